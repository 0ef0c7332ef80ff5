"""Show on stderr what a command is doing, in one line or as a log. The steps of a run: observe/progress_display.

A line is written by a function that can be pickled, so that rank 0 of a probe writes it itself.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Say = Callable[[str], None]
LOG_S = 10.0  # after which a log is told of work that goes on, and after twice as long again
FIRST_S = 0.5  # after which it is told of the first part, of which it has heard nothing
EVERY_S = 2.0  # between plain lines of one process: a log is read later
_last_plain = [-EVERY_S]


class Unbroken(io.FileIO):
    """A standard stream that drops what it cannot write (its reader is gone, the disk of a log full): work goes on."""

    def write(self, data: Any) -> int:
        """Write the bytes, or drop them; returns their number."""
        left = memoryview(data)
        while left:  # a write to a pipe may take a part
            try:
                left = left[super().write(left) or 0 :]
            except OSError:
                break
        return len(data)


def unbroken_stderr() -> None:
    """Let stderr drop what it cannot write; not where it is no file, as under a test."""
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr.flush()
        raw = Unbroken(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, sys.stderr.errors, write_through=True)


def silent(text: str) -> None:
    """Say nothing."""


def line(text: str) -> None:
    """Replace the terminal's current line by `text`, cut to the terminal's width."""
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\x1b[2K{text[:width]}")
    sys.stderr.flush()


def plain(text: str) -> None:
    """Print `text` as a line; it is dropped where the last one is not two seconds old."""
    if text and time.monotonic() - _last_plain[0] >= EVERY_S:
        _last_plain[0] = time.monotonic()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def block(text: str) -> None:
    """Print lines that stay, whatever line a terminal shows."""
    if sys.stderr.isatty():
        line("")
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def sayer(wanted: bool) -> Say:
    """Returns the function that shows progress: `line` on a terminal, `plain` elsewhere, `silent` if not wanted."""
    return (line if sys.stderr.isatty() else plain) if wanted else silent


@contextmanager
def telling(wanted: bool) -> Iterator[Say]:
    """Context: gives a function that shows progress on stderr (not `wanted`: none); clears the line at the end."""
    say = sayer(wanted)
    try:
        yield say
    finally:
        if say is line:
            line("")


@contextmanager
def timing(wanted: bool, first: str = "") -> Iterator[Say]:
    """Context: as `telling`, and the seconds of the part that goes on are counted: by a terminal's line each second,
    in a log after 10, 20, 40 seconds and so on.

    first   the part that goes on from the start; a log hears of it where it takes half a second

    For work that this process waits for; what ranks say themselves would be written over.
    """
    with telling(wanted) as say:
        if say is silent:
            yield say
            return
        patience = 0.0 if say is line else LOG_S
        state: list = [first, time.monotonic(), patience]  # the part, when it began, seconds until it is told of next
        unheard = bool(first) and say is not line
        if first and say is line:
            say(first)
        over = threading.Event()

        def tick() -> None:
            if unheard and not over.wait(FIRST_S) and state[0] == first:
                block(first)  # the first part that follows is told too, however soon
            while not over.wait(1.0):
                passed = time.monotonic() - state[1]
                if state[0] and passed >= state[2]:
                    state[2] = 2 * state[2]
                    say(f"{state[0]} ... {passed:.0f} s")

        def begin(text: str) -> None:
            state[:] = [text, time.monotonic(), patience]
            say(text)

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield begin
        finally:
            over.set()
            clock.join()
