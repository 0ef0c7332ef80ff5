"""Modules off the beaten track, written as for one process: each name takes nothing and returns a `Task`.

docs/modules.md has a row for each of `ALL`, in this order: its docstring, and what every plan says.
"""

from importlib import import_module

from unusual_kit import ALL, SPACE

for _kind in ("recurrent", "graphs", "weights", "forwards", "mixers", "signals", "sets", "densities"):
    import_module(f"unusual_{_kind}")  # lists its tasks

globals().update(ALL)  # `unusual_tasks:gru`

__all__ = ["ALL", "SPACE"]
