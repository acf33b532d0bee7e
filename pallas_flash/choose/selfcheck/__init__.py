"""The self-check: kernels are run once on this machine, and whether they are right is recorded."""
