"""What JAX does to a call: derivatives, vmap, partitioning and lowering."""
