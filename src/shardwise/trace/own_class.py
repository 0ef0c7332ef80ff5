"""Which objects a module's author made: plain ones with attributes, such as a store of states."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn

CONTAINERS = (list, dict, set, frozenset, deque, tuple)
_OTHERS = ("torch", "shardwise", "numpy", "builtins", "functools", "threading", "logging")


def is_own(value: Any) -> bool:
    """Whether a value is an object with attributes, of a class that is neither torch's nor ours."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in _OTHERS or isinstance(value, nn.Module | type) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)
