"""Named points of a run, for records and faults. `PHASES`: the deadline and words of each; a new one goes there.

    start -> (input -> forward -> reduce -> update -> [evaluate] -> [save]) for each step -> end

`SHARDWISE_AT_POINTS="module:function"` in a rank's environment names a listener: faults are injected so
(`shardwise.testing.faults`). Without a listener a point costs a microsecond.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.guard.records import RankRecord

VARIABLE = "SHARDWISE_AT_POINTS"


@dataclass(frozen=True)
class RunPhase:
    """The phase of a run that begins at a point: its deadline, and its words in messages.

    deadline  the name of its deadline
    words     what a slow rank is slow in, for a message; "": it is not named
    """

    deadline: str
    words: str = ""


PHASES = {
    "start": RunPhase("start"),
    "input": RunPhase("step", "reading its samples"),
    "forward": RunPhase("step", "forward and backward"),
    "reduce": RunPhase("step", "summing gradients"),
    "update": RunPhase("step", "the optimizer's update, and what a run writes after it"),
    "evaluate": RunPhase("step", "evaluating"),
    "save": RunPhase("save", "saving"),
    "disk": RunPhase("save"),
    "end": RunPhase("save"),
}
Listener = Callable[[str, int, Any], None]


class _Here:
    """The process's state: its shared-memory record, a listener to `reach` (faults of tests), and the last step."""

    record: RankRecord | None = None
    listener: Listener | None = None
    step = -1


def have(record: RankRecord | None) -> None:
    """Set the record that this process writes (None: it writes none), and the listener that the environment names."""
    _Here.record, _Here.step = record, -1
    listen_as_asked()


def record() -> RankRecord | None:
    """Returns this process's shared-memory record; None where nobody watches."""
    return _Here.record


def listen_as_asked() -> None:
    """Install the listener that the environment names, or none."""
    wished = os.environ.get(VARIABLE)
    _Here.listener = None
    if wished:
        module, _, name = wished.partition(":")
        _Here.listener = getattr(importlib.import_module(module), name)


def reach(point: str, step: int | None = None, subject: Any = None) -> None:
    """Note that the rank comes to this point. `subject` is what it is about, for a listener to look at or to change.

    step   optimizer steps done; None: as at the point before
    """
    if step is not None:
        _Here.step = step
    if _Here.record is not None:
        _Here.record.phase(point, _Here.step)
    if _Here.listener is not None:
        _Here.listener(point, _Here.step, subject)
