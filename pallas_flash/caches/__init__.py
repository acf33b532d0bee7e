"""Keys and values that are kept in pages."""
