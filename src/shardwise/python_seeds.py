"""Python's and numpy's generators: seeded alike in all processes, put back afterwards (in reading: random/).

What this does not do: give each sample draws of its own, as modes do for torch's operations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def seed_python(seed: int) -> None:
    """Seeds Python's generator, and numpy's where it is imported: what they draw cannot be dealt over samples."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def python_states() -> tuple:
    """Returns where Python's and numpy's generators stand, to be compared."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ("", b"", 0)
    return random.getstate(), bytes(state[1]), state[2]


def python_kept() -> Callable[[], None]:
    """Returns a function that puts Python's and numpy's generators back to where they are now."""
    kept = random.getstate()
    numpy = sys.modules.get("numpy")
    kept_numpy = numpy.random.get_state() if numpy is not None else None

    def put_back() -> None:
        random.setstate(kept)
        if numpy is not None:
            numpy.random.set_state(kept_numpy)

    return put_back


@contextmanager
def python_restored() -> Iterator[None]:
    """Context: Python's and numpy's generators are afterwards as they were before."""
    put_back = python_kept()
    try:
        yield
    finally:
        put_back()
