"""Say what a command is about to do, before anything that takes long is imported, and that it goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.cli.answer import Answer
from shardwise.progress import Say, timing

# New objects after which Python looks for garbage. What is imported is none, and at 700, Python's own figure, looking
# for it is a sixth of the time that imports of torch and transformers take
OBJECTS = 10_000


@contextmanager
def waiting(answer: Answer, text: str) -> Iterator[Say]:
    """Context: yields `say`, which reports what the command does next, first `text`; slow imports go inside."""
    gc.set_threshold(OBJECTS)
    with timing(not answer.as_json, text) as say:
        yield say
