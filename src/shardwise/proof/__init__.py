"""The proof: one process in float64 against N ranks under a plan, on the same global batches."""
