"""What goes on while a search or a probe works: one line on stderr that the next one overwrites.

A line is written by a function that can be pickled, so that rank 0 of a probe writes it itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
WIDTH = 100  # columns, so that a line is never wrapped on a common terminal


def silent(text: str) -> None:
    """Say nothing."""


def line(text: str) -> None:
    """Put a line in the place of the one before."""
    sys.stderr.write(f"\r\x1b[2K{text[:WIDTH]}")
    sys.stderr.flush()


@contextmanager
def telling(wanted: bool) -> Iterator[Say]:
    """`line` where it is wanted and stderr is a terminal, which is left clean; else `silent`."""
    if not (wanted and sys.stderr.isatty()):
        yield silent
        return
    try:
        yield line
    finally:
        line("")
