"""Runs a user's script in a rank's process, for `shardwise run`, and shortens its tracebacks. Options: cli/run_script.

Each rank runs the whole script as `python script.py` would, with a process group that `prepare` and `parallelize` find.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.errors import RunError

PROFILE_STEPS = "SHARDWISE_PROFILE_STEPS"  # environment variable with the steps that `prepare` profiles
# variables of launchers on which scripts branch; a script that calls `prepare` needs none of them
HIDDEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def run_script(path: str, arguments: Sequence[str], shown: bool, profiled: str | None = None) -> None:
    """Runs a script as the main program (`__main__`) of this rank; called on each rank.

    path       of the script; `arguments`: the rest of its sys.argv
    shown      Whether RANK and the other `HIDDEN` variables stay in the environment, as under torchrun
    profiled   steps that `prepare` is to profile, as "10:12"; None: none

    Raises what the script raises, and `RunError` if it calls sys.exit with a code other than 0.
    """
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    for name in () if shown else HIDDEN:
        os.environ.pop(name, None)
    if profiled is not None:
        os.environ[PROFILE_STEPS] = profiled
    if isinstance(sys.stdout, io.TextIOWrapper):  # all ranks write to one pipe, so lines must not be torn or late
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    from shardwise.ranks.ended import say_ended  # imports torch, which the command that starts ranks does not need
    from shardwise.ranks.own_group import own_group

    try:
        with own_group(alone=False):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as done:
        if done.code not in (None, 0):
            raise RunError(f"{path} ended itself: sys.exit({done.code!r})") from None
    say_ended()  # this process lives on to report, while others may wait for the script's next collective
    if rank == "0" and ranks not in ("", "1") and not _JOINS & sys.modules.keys():
        sys.stderr.write(
            f"run: {path} ended without shardwise.prepare or parallelize: each of {ranks} ranks did all of its work\n"
        )


def of_script(trace: str, path: str) -> str:
    """Returns a rank's traceback shortened to what concerns the script at `path`.

    Any other error: from the script's first frame on, without frames of shardwise and of torch called by those; all of
    it if the script has no frame. An error of shardwise: the script's own lines alone, "" if there are none or the
    message names a line of a file.
    """
    lines = trace.rstrip().splitlines()
    start = next((at for at, line in enumerate(lines) if f'File "{path}"' in line), None)
    ours = lines[-1].startswith(_OURS)
    if ours and re.search(r"\[\S+\.py, line \d+(: .*)?\]", lines[-1]):
        return ""
    # raised before the script's first line or in another thread: there is no frame to begin at
    if start is None:
        return "" if ours else trace
    if ours:  # the message says what is wrong, so only the place in the script is missing
        places = [at for at, line in enumerate(lines) if f'File "{path}"' in line]
        return "\n".join(line for at in places for line in lines[at : at + 2])
    return "\n".join([lines[0], *_without_ours(lines[start:])])


def _without_ours(lines: list[str]) -> Iterator[str]:
    """Yields the lines of a traceback without frames of shardwise and frames of torch that shardwise called."""
    dropping = False
    for line in lines:
        if frame := _FRAME.match(line):
            # torch's frames that the script called directly stay
            ours = frame[1].startswith(_FOLDER)
            dropping = ours or (dropping and "/torch/" in frame[1])
        # an unindented line is of the error itself, after all frames
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            yield line


def line_in(trace: str, path: str) -> str:
    """Returns the script's innermost line in a traceback, as "train.py, line 12: loss.backward()"; "" without one."""
    lines = trace.splitlines()
    at = max((at for at, line in enumerate(lines[:-1]) if f'File "{path}", line' in line), default=None)
    return "" if at is None else f"{Path(path).name}, {lines[at].split(', ')[1]}: {lines[at + 1].strip()}"


def cause_of(trace: str, path: str) -> str:
    """Returns the error in one line: the traceback's last line and the script's; of shardwise's errors the message."""
    last = trace.rstrip().splitlines()[-1]
    if last.startswith(_OURS):
        return last.partition(": ")[2]
    line = line_in(trace, path)
    return f"{last} [{line}]" if line else last


def stacks_first(message: str) -> tuple[str, str]:
    """Returns (stacks of the ranks, all before them) of a hang's message, so that the cause can be printed last."""
    lines = message.splitlines()
    start = next((at for at, line in enumerate(lines) if re.fullmatch(r"rank \d+ was here:", line)), len(lines))
    return "\n".join(lines[start:]), "\n".join(lines[:start])


_OURS = f"{RunError.__module__.partition('.')[0]}."  # prefix of the qualified names of shardwise's errors
_FRAME = re.compile(r'  File "([^"]+)", line \d+')
_FOLDER = str(Path(__file__).parents[1])
_JOINS = {"shardwise.scripts.prepared", "shardwise.engine.engine"}  # imported if a script uses prepare or parallelize
