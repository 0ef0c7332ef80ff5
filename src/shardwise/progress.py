"""Shows on stderr what a command is doing, in one changing line or as a log. For steps: observe/progress_display.

The functions that write can be pickled, so that rank 0 of a probe can write itself.
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

Say = Callable[[str], None]  # shows a text
LOG_S = 10.0  # seconds after which a log gets a line on work under way; then after 20, 40, ...
FIRST_S = 0.5  # seconds after which a log gets a line on the first part
EVERY_S = 2.0  # least seconds between plain lines of one process
_last_plain = [-EVERY_S]


class Unbroken(io.FileIO):
    """A raw stream that drops what it cannot write (its reader is gone, the disk is full) instead of raising."""

    def write(self, data: Any) -> int:
        """Writes the bytes or drops them; returns their number."""
        left = memoryview(data)
        while left:  # a write to a pipe may be partial
            try:
                left = left[super().write(left) or 0 :]
            except OSError:
                break
        return len(data)


def unbroken_stderr() -> None:
    """Replaces `sys.stderr` by a stream that drops what it cannot write; does nothing if it was replaced (tests)."""
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr.flush()
        raw = Unbroken(sys.stderr.fileno(), "w", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, sys.stderr.errors, write_through=True)


def silent(text: str) -> None:
    """Does nothing; the `Say` for a command that shows no progress."""


def line(text: str) -> None:
    """Replaces the terminal's current line by `text`, truncated to the terminal's width."""
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\x1b[2K{text[:width]}")
    sys.stderr.flush()


def plain(text: str) -> None:
    """Prints `text` as a line, unless this process printed one within the last two seconds."""
    if text and time.monotonic() - _last_plain[0] >= EVERY_S:
        _last_plain[0] = time.monotonic()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def block(text: str) -> None:
    """Prints `text` on lines that stay, after clearing a terminal's progress line."""
    if sys.stderr.isatty():
        line("")
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def sayer(wanted: bool) -> Say:
    """Returns the function that shows progress: `line` on a terminal, `plain` elsewhere, `silent` unless `wanted`."""
    return (line if sys.stderr.isatty() else plain) if wanted else silent


@contextmanager
def telling(wanted: bool) -> Iterator[Say]:
    """Context that gives a `Say` for stderr (a silent one unless `wanted`), and clears its line at the end."""
    say = sayer(wanted)
    try:
        yield say
    finally:
        if say is line:
            line("")


@contextmanager
def timing(wanted: bool, first: str = "") -> Iterator[Say]:
    """Context as `telling`, which also shows how many seconds the present part of the work has taken.

    first   text on the part under way at the start; a log gets it if it takes half a second. "": none

    A terminal's line is updated each second, a log gets a line after 10, 20, 40, ... seconds. For work during which
    ranks do not write to the terminal themselves.
    """
    with telling(wanted) as say:
        if say is silent:
            yield say
            return
        patience = 0.0 if say is line else LOG_S
        state: list = [first, time.monotonic(), patience]  # text of the part, its start, seconds until the next line
        unheard = bool(first) and say is not line
        if first and say is line:
            say(first)
        over = threading.Event()

        def tick() -> None:
            if unheard and not over.wait(FIRST_S) and state[0] == first:
                block(first)  # not `plain`, which would suppress the next part's line within two seconds
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
