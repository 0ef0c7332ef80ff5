"""One step of one rank on fake tensors: operations are counted and live bytes followed; nothing is computed."""
