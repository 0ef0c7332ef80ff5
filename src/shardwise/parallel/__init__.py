"""The parallelism techniques, one room each. None imports another; engine/ combines them."""
