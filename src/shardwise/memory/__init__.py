"""Memory: recompute in backward, wide tensors in chunks of positions, and counting the bytes that are live."""
