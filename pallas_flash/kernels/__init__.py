"""Pallas kernels, one folder for each family of GPUs."""
