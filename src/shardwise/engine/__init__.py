"""One rank of a run: `parallelize` builds an `Engine` from a task and a plan; whole weights and state in and out."""
