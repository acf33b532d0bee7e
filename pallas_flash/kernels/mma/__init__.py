"""What all kernels by mma share: those of kernels/ampere, of kernels/decoding, and the gradients of
scores, which are every Mosaic family's."""
