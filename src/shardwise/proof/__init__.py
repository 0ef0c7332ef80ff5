"""The proof: one process in float64 is compared with N ranks under a plan, on the same global batches."""
