"""Named points of a run, noted in records and used to inject faults. `PHASES` has the deadline and words of each.

    start -> (input -> forward -> reduce -> update -> [evaluate] -> [save]) for each step -> end

`SHARDWISE_AT_POINTS="module:function"` in a rank's environment names a listener, by which tests inject faults
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
    """The phase of a run that begins at a point.

    deadline  the name of its deadline: "start", "step" or "save"
    words     what a slow rank is slow in, for a message; "" if no message names it
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
Listener = Callable[[str, int, Any], None]  # called with (point, step, subject)


class _Here:
    """The process's state: the record that it writes, the listener that `reach` calls, and the last step (-1: none)."""

    record: RankRecord | None = None
    listener: Listener | None = None
    step = -1


def have(record: RankRecord | None) -> None:
    """Sets the record that this process writes (None: none), and the listener that the environment names."""
    _Here.record, _Here.step = record, -1
    listen_as_asked()


def record() -> RankRecord | None:
    """Returns the record that this process writes; None if nobody watches."""
    return _Here.record


def listen_as_asked() -> None:
    """Installs the listener that the environment names, or none."""
    wished = os.environ.get(VARIABLE)
    _Here.listener = None
    if wished:
        module, _, name = wished.partition(":")
        _Here.listener = getattr(importlib.import_module(module), name)


def reach(point: str, step: int | None = None, subject: Any = None) -> None:
    """Notes in the record that the rank comes to `point`, and calls the listener.

    step     optimizer steps done; None: as at the point before
    subject  what the point is about, for a listener to read or change
    """
    if step is not None:
        _Here.step = step
    if _Here.record is not None:
        _Here.record.phase(point, _Here.step)
    if _Here.listener is not None:
        _Here.listener(point, _Here.step, subject)
