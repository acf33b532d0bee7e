"""What several devices are told, and what they send each other."""
