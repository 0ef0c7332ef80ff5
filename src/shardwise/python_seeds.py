"""Seeds, reads and restores the RNGs of Python and numpy.

What this does not do: give each sample random numbers of its own, as random/ does for torch's operations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def seed_python(seed: int) -> None:
    """Seeds Python's RNG, and numpy's (modulo 2^32) if numpy is imported."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def python_states() -> tuple:
    """Returns the states of Python's and numpy's RNGs, to be compared for equality."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ("", b"", 0)
    return random.getstate(), bytes(state[1]), state[2]


def python_kept() -> Callable[[], None]:
    """Returns a function that restores Python's and numpy's RNGs to their present states."""
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
    """Context after which Python's and numpy's RNGs have the states from before."""
    put_back = python_kept()
    try:
        yield
    finally:
        put_back()
