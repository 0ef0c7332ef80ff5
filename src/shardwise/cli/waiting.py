"""Say on a terminal what a command is about to do, before anything that takes long is imported."""

from __future__ import annotations

import gc
import sys

from shardwise.cli.answer import Answer
from shardwise.progress import sayer

# New objects after which Python looks for garbage. What is imported is none, and at 700, Python's own figure, looking
# for it is a sixth of the time that imports of torch and transformers take
OBJECTS = 10_000


def begin(answer: Answer, text: str) -> None:
    """Say so on a terminal; a log has no need of it. The next line, or the answer, takes its place."""
    gc.set_threshold(OBJECTS)
    if sys.stderr.isatty():
        sayer(not answer.as_json)(text)
        answer.unfinished = True
