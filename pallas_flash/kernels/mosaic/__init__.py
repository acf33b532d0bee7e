"""What the Mosaic GPU kernels of all generations share, in the Layouts that each supplies."""
