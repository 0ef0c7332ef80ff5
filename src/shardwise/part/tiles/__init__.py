"""Tiles: what a rank reads of a cut dim beside its own share, and how long it is kept."""
