"""Memory: recompute in backward, wide tensors computed in chunks of positions, and a count of live bytes."""
