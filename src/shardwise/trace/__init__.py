"""Inspect an unmodified module: record its constructor, find its repeated blocks, and record its forward."""
