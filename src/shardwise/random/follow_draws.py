"""Decide in which steps random ops are intercepted, so that a module without random ops pays nothing.

A mode that sees each operation costs time. Whether the module draws random numbers is known from the look at a few
samples, and checked against the state of torch's generators, which any draw changes:

    the look saw random ops       each step is watched, and random numbers are one process's
    it saw none                   no step is watched until a generator's state has changed; then the next step is
    the watched step has none     another thread draws (a dataset's own randomness); no step is watched any more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.random.modes import EACH_ITS_OWN, GlobalRandom

Randomness = Literal["global", "fast"]  # random numbers are one process's, or each data rank's own
HIDDEN = (
    "which are followed operation by operation to be those of one process, and compile=true hides them: leave compile "
    f"out, or {EACH_ITS_OWN}"
)


@dataclass
class Watch:
    """State of the decision whether random ops are intercepted in a step.

    idle   Whether operations are not watched
    moved  index of the step in which a generator's state changed while nothing was watched; None: none
    sure   Whether it is known that the model does not change generators, so that these are not checked any more
    """

    idle: bool = False
    moved: int | None = None
    sure: bool = False

    def at(self, step: int, random: GlobalRandom) -> str | None:
        """Sets `idle` for step `step` (from 0); returns a note for the user, or None. `random`: the mode."""
        if self.moved is None or step == self.moved:  # no generator moved, or only in this step: the next one tells
            return None
        # a generator moved in a step that nobody watched: the next one is watched, with attention's scores written
        if self.idle:
            self.idle, random.scores = False, True
        elif random.met:
            # the watched step drew: the model does, under some condition that the look did not meet
            first, self.moved = self.moved, None
            return (
                f"the model drew random numbers in step {first + 1}, which a look at its first samples did not see: "
                f"those of that step are not one process's; from step {first + 2} on they are"
            )
        elif step > self.moved + 1:
            # a whole step was watched and drew nothing: another thread does
            self.idle, self.moved, self.sure = True, None, True
        return None
