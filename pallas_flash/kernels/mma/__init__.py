"""Mosaic GPU kernels by mma: FlashAttention-2 for GPUs from Ampere on, which is the implementation
"ampere"; and decoding and the gradients of scores, which Hopper's and Blackwell's share."""
