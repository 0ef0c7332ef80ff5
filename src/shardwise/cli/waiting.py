"""Say on a terminal what a command is about to do, before anything that takes long is imported."""

from __future__ import annotations

import sys

from shardwise.cli.answer import Answer
from shardwise.progress import sayer


def begin(answer: Answer, text: str) -> None:
    """Say so on a terminal; a log has no need of it. The next line, or the answer, takes its place."""
    if sys.stderr.isatty():
        sayer(not answer.as_json)(text)
        answer.unfinished = True
