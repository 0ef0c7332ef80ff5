"""Python stacks of another process, without its help: its interpreter may be locked, but it must not be stopped."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

# SIGUSR1 and SIGUSR2 are what schedulers send before a pre-emption
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


def answer_with_stacks(file: Any) -> None:
    """From now on the signal writes every thread's stack to this file, in C."""
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


def ask(pid: int) -> None:
    """Have the stacks of this process written down."""
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return


def process_state(pid: int) -> str:
    """Linux's letter for a process: "T" stopped, "Z" ended; "" where it is gone or cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def readable(dump: str, ends: tuple[str, ...], hidden: tuple[str, ...] = (), left_out: tuple[str, ...] = ()) -> str:
    """faulthandler's threads, for a reader.

    ends      frames from one of these files on are cut off
    hidden    a thread with one of these words in it is not shown, nor is a frame with one of `left_out`
    """
    kept = []
    for block in dump.strip().split("\n\n"):
        lines = block.splitlines()
        if any(word in line for line in lines for word in hidden):
            continue
        lines = [line for line in lines if not any(word in line for word in left_out)]
        outer = [index for index, line in enumerate(lines) if any(end in line for end in ends)]
        kept.append("\n".join(lines[: outer[0]] if outer and outer[0] > 1 else lines))
    return "\n\n".join(kept)
