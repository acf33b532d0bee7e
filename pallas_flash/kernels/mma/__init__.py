"""What kernels by mma share, in kernels/ampere and kernels/decoding; and the gradients of scores,
which are every Mosaic family's."""
