"""What is right on this machine: found by trying, and kept."""
