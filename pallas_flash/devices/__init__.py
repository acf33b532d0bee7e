"""Several devices: what each computes, and what they send each other."""
