"""FlashAttention-2 as Pallas kernels for every GPU that jax's Triton lowering compiles for."""
