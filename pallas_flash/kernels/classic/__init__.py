"""Standard attention and FlashAttention's first algorithm, as Pallas kernels to compare with.

jax's Triton lowering compiles them for a GPU. In a jax without it Pallas' interpreter runs them on
every device, also on a GPU, as a loop of XLA's operations: exact, and slow.
"""
