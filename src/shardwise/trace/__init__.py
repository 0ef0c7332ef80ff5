"""Look into a module that nobody prepared: how it is built, of which blocks, and what its forward does."""
