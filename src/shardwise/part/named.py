"""Numbers that stand for objects in a compiled program, whose constants can be numbers and tensors alone.

The number of an object is good as long as the program is: whoever writes it down keeps the object (`keeping`), and what
the compiler remembers beyond that holds numbers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_KEEPERS: list[list[Any]] = []
_NUMBERS = itertools.count()


@contextmanager
def keeping(kept: list[Any]) -> Iterator[None]:
    """Context: objects that get a number inside are added to the list, and named as long as it holds them."""
    _KEEPERS.append(kept)
    try:
        yield
    finally:
        _KEEPERS.pop()


def number_of(thing: Any) -> int:
    """Returns the number by which the program being written down names the object; `TypeError` where none is."""
    if not _KEEPERS:
        raise TypeError(f"{type(thing).__name__} is named by a program, and none is being written down")
    number = next(_NUMBERS)
    _OBJECTS[number] = thing
    _KEEPERS[-1].append(thing)
    return number


def by_number(number: int) -> Any:
    """Returns the object that a program names by this number. `KeyError` once its program is gone."""
    return _OBJECTS[number]
