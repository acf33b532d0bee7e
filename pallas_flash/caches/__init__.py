"""Keys and values that are kept: in pages, in 8 bits."""
