"""FlashAttention-3 as Mosaic GPU kernels for Hopper: wgmma, TMA, warpgroups with roles."""
