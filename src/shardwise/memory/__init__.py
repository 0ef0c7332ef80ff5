"""Memory: recompute in backward, and counting the bytes that are live."""
