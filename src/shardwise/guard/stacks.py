"""Gets Python stacks of another process without its help, even if its interpreter is locked; stopped ones are woken."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ANSWER_S = 3.0  # seconds to wait after a dump has last grown
LONGEST_S = 20.0  # and at most, though dumps still grow
_LOOK_S = 0.05
_CRASH, _MODULES = "Fatal Python error: ", "\nExtension modules: "  # how faulthandler begins and ends
# SIGUSR1 and SIGUSR2 are what schedulers send before a pre-emption
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


def answer_with_stacks(file: Any, crashes: Any = None) -> None:
    """Registers the signal handler that writes every thread's stack to `file`; it runs in C, without the interpreter.

    crashes   where the stack of a crash goes (a segmentation fault, an abort); None: to the same file
    """
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    if not faulthandler.is_enabled():  # the user may have enabled it, for a file of theirs
        faulthandler.enable(file=file if crashes is None else crashes, all_threads=False)


def crash_in(dump: str) -> str:
    """Returns the stack of the crash that ended a process, from its dump; "" if there was none."""
    last = dump.rpartition(_CRASH)
    return "".join(last[1:]).partition(_MODULES)[0].strip() if last[1] else ""


def ask(pid: int) -> None:
    """Makes the main thread of a process write its stacks.

    A signal to a stopped process may be answered by any of its threads, and meanwhile its main thread would go on with
    the run, so that its place is lost. A signal for the main thread itself is handled first.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is not None and tgkill(pid, pid, int(STACK_SIGNAL)) == 0:
        return
    try:
        os.kill(pid, STACK_SIGNAL)  # a C library without tgkill
    except ProcessLookupError:
        return


def wake(pid: int) -> None:
    """Continues a process that is stopped (SIGCONT), so that it answers a request for its stack."""
    if process_state(pid) in ("T", "t"):
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def collect(pids: Mapping[int, int], dump: Callable[[int], str]) -> None:
    """Asks all ranks for their stacks; returns when their dumps are complete, or none grows any more.

    pids   rank -> process id
    dump   rank -> what it has written so far

    Stopped processes are woken once the others have answered, since they go on with the run afterwards.
    """
    for pid in pids.values():
        ask(pid)
    stopped = {rank for rank, pid in pids.items() if process_state(pid) in ("T", "t")}
    wait(set(pids) - stopped, dump)
    for rank in stopped:
        wake(pids[rank])
    wait(stopped, dump)


def wait(ranks: set[int], dump: Callable[[int], str]) -> None:
    """Waits until these ranks' dumps are complete, none has grown for `ANSWER_S`, or `LONGEST_S` have passed."""
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
    """Whether a dump is complete: the answering thread, which comes last, is there to its outermost frame."""
    last = dump.rpartition("Current thread ")[2] if "Current thread " in dump else ""
    return last.endswith("\n") and last.rstrip().endswith(("in <module>", "\n  ..."))


def process_state(pid: int) -> str:
    """Returns Linux's letter for a process: "T" stopped, "Z" ended; "" if it is gone or cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def readable(dump: str, ends: tuple[str, ...], hidden: tuple[str, ...] = (), left_out: tuple[str, ...] = ()) -> str:
    """Returns faulthandler's dump without threads and frames that say nothing of the user's code.

    ends      files; frames from the first one in these on are cut off
    hidden    words; a thread with one of these is left out
    left_out  words; a frame with one of these is left out
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
