"""Checks of a task before its first step: whether a plan on it would equal one process. See docs/design.md."""
