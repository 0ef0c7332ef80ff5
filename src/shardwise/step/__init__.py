"""One optimizer step of one rank, as functions of its `RankState`: micro-batches, reduction, the update."""
