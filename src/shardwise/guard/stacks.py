"""Python stacks of another process without its help; it may hold its interpreter's lock, but must not be stopped."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ANSWER_S = 3.0  # how long to wait after the last rank whose dump was completed
LONGEST_S = 20.0  # and at most, though ranks' dumps still grow
_LOOK_S = 0.05
_CRASH, _MODULES = "Fatal Python error: ", "\nExtension modules: "  # how faulthandler begins and ends
# SIGUSR1 and SIGUSR2 are what schedulers send before a pre-emption
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


def answer_with_stacks(file: Any, crashes: Any = None) -> None:
    """Register the signal handler that writes every thread's stack to `file`; it runs in C, without the interpreter.

    crashes   where the stack of a crash goes (a segmentation fault, an abort); None: to the same file
    """
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    if not faulthandler.is_enabled():  # else the user has asked for it, in a place of theirs
        faulthandler.enable(file=file if crashes is None else crashes, all_threads=False)


def crash_in(dump: str) -> str:
    """Returns the stack of the crash that ended a process, from what it has written; "" where there was none."""
    last = dump.rpartition(_CRASH)
    return "".join(last[1:]).partition(_MODULES)[0].strip() if last[1] else ""


def ask(pid: int) -> None:
    """Have the stacks of this process written down, by its main thread.

    A signal to the process may be answered by any of its threads where it was stopped, and the main one would go on
    with the run meanwhile: what it stood in would be lost. One that waits for the main thread itself is met first.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is not None and tgkill(pid, pid, int(STACK_SIGNAL)) == 0:
        return
    try:
        os.kill(pid, STACK_SIGNAL)  # another C library
    except ProcessLookupError:
        return


def wake(pid: int) -> None:
    """Continue a process that is stopped (SIGCONT), so that it answers a request for its stack."""
    if process_state(pid) in ("T", "t"):
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def collect(pids: Mapping[int, int], dump: Callable[[int], str]) -> None:
    """Ask all ranks for their stacks, and return when their dumps are complete, or no rank's dump grows any more.

    pids   each rank's process
    dump   what a rank has written up to now

    Processes that are stopped are woken once the others have answered, since they go on with the run afterwards.
    """
    for pid in pids.values():
        ask(pid)
    stopped = {rank for rank, pid in pids.items() if process_state(pid) in ("T", "t")}
    wait(set(pids) - stopped, dump)
    for rank in stopped:
        wake(pids[rank])
    wait(stopped, dump)


def wait(ranks: set[int], dump: Callable[[int], str]) -> None:
    """Wait until these ranks' dumps are complete, none has grown for `ANSWER_S`, or `LONGEST_S` have passed."""
    began = moved = time.monotonic()
    before: dict[int, str] = {}
    while time.monotonic() < min(moved + ANSWER_S, began + LONGEST_S):
        now = {rank: dump(rank) for rank in ranks}
        if all(map(complete, now.values())):
            return
        if now != before:
            before, moved = now, time.monotonic()
        time.sleep(_LOOK_S)


def complete(dump: str) -> bool:
    """Whether a dump is complete: the thread that answers comes last, and is there to its outermost frame."""
    last = dump.rpartition("Current thread ")[2] if "Current thread " in dump else ""
    return last.endswith("\n") and last.rstrip().endswith(("in <module>", "\n  ..."))


def process_state(pid: int) -> str:
    """Returns Linux's letter for a process: "T" stopped, "Z" ended; "" where it is gone or cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def readable(dump: str, ends: tuple[str, ...], hidden: tuple[str, ...] = (), left_out: tuple[str, ...] = ()) -> str:
    """Returns faulthandler's dump as a reader wants it: without the threads and frames named below.

    ends      frames from one of these files on are cut off
    hidden    a thread with one of these words in it is not shown, nor is a frame with one of `left_out`
    """
    kept = []
    for block in dump.strip().split("\n\n"):
        lines = block.splitlines()
        # a thread of torch's or of ours says nothing of the user's code
        if any(word in line for line in lines for word in hidden):
            continue
        lines = [line for line in lines if not any(word in line for word in left_out)]
        outer = [index for index, line in enumerate(lines) if any(end in line for end in ends)]
        # from a frame of the launcher on, frames are ours; a stack of only those is shown whole
        kept.append("\n".join(lines[: outer[0]] if outer and outer[0] > 1 else lines))
    return "\n\n".join(kept)
