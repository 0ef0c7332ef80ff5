"""The techniques: one room each, and none imports another. They meet in the engine."""
