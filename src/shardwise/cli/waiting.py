"""Shows what a command is doing while slow imports and work run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.cli.answer import Answer
from shardwise.progress import Say, timing

# Threshold of new objects for a garbage collection. Imports make no garbage, and at Python's default of 700 collections
# take a sixth of the time that importing torch and transformers takes
OBJECTS = 10_000


@contextmanager
def waiting(answer: Answer, text: str) -> Iterator[Say]:
    """Context for slow imports and work that shows `text`, and gives `say`, which shows another text.

    With --json nothing is shown.
    """
    gc.set_threshold(OBJECTS)
    with timing(not answer.as_json, text) as say:
        yield say
