"""One step of one rank on tensors without values: operations counted, live bytes followed, nothing computed."""
