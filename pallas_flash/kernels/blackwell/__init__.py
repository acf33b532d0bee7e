"""FlashAttention-4 as Mosaic GPU kernels for Blackwell's datacenter GPUs: tcgen05, tensor memory,
TMA. What they do not compute, kernels/mma does."""
