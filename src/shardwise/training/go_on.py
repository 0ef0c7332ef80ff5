"""Makes the advice on how to resume a run that failed: its newest checkpoint, and the command."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from shardwise.checkpoint import publish
from shardwise.training.job import Job
from shardwise.training.resume import home_of

LOST = ("died", "start", "late", "wire")  # reasons after which the same run may get further


def how_to_go_on(job: Job) -> str:
    """Returns a sentence with the run's last checkpoint and the command that resumes from it."""
    newest = next(iter(publish.scan(home_of(job.effective, job.folder))), None)
    if newest is None:
        return "nothing was saved yet: the same command begins again (train.checkpoint_every=N saves more often)"
    return f"the last checkpoint is {newest}; {_command(job.folder)} goes on from step {publish.step_of(newest)}"


def _command(folder: Path) -> str:
    """Returns the command that resumes the run in `folder`: this process's own, with --resume, or a call of `train`."""
    program, *words = sys.argv
    if Path(program).name != "shardwise":
        return f"train(..., resume={str(folder)!r})"
    for at, word in enumerate(words):
        if word == "--resume":
            words[at : at + 2] = []
            break
    words = [word for word in words if not word.startswith("--resume=")]
    return f"`{shlex.join(['shardwise', *words, '--resume', str(folder)])}`, started as before,"
