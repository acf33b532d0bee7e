"""Which kernels are right on this machine: found by trying, and kept."""
