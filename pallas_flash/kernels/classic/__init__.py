"""The algorithms before FlashAttention-2, as Pallas kernels, to compare with: standard attention,
and FlashAttention's first."""
