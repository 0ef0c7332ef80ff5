"""Decide whether a step's random ops are followed, so that a module that draws nothing pays nothing.

A mode that sees each operation costs time. Whether the module draws is known from the look at a few samples, and held
against torch's generators, which any draw moves:

    the look saw draws           each step is watched, and draws are one process's
    it saw none                  no step is, until a generator has moved; the step after that is watched
    nor does a watched step      another thread draws (a dataset's own randomness): not watched, nor looked at again
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
    """Whether random ops are followed: in this step, and from the next one on.

    idle   operations are not watched
    moved  the step in which a generator moved while nothing was watched
    sure   that what moves a generator is no module of this model
    """

    idle: bool = False
    moved: int | None = None
    sure: bool = False

    def at(self, step: int, random: GlobalRandom) -> str | None:
        """Decides whether this step is watched; returns a note for the user, or None."""
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
