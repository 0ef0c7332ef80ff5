"""Existing scripts: `prepare` spreads the model, optimizer and loader that a script made, and leaves its loop alone."""

from __future__ import annotations

from shardwise.scripts.part_loader import PartLoader
from shardwise.scripts.prepared import Prepared, prepare

__all__ = ["PartLoader", "Prepared", "prepare"]
