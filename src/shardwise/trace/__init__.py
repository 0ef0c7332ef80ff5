"""Looking into a module nobody prepared: how it is built, and of which blocks."""
