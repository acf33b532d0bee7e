"""Several devices: each attends for its own part, and what crosses between them."""
