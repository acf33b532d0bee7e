"""What the package asks of jax, XLA and the machine: private names, pytrees, flags, hardware."""
