"""Answer the next stage's questions for gradients that the forward takes itself, until its micro-batch is over.

A stage that waits for a gradient from the stage after answers meanwhile what that one asks, of any micro-batch.
"""

from __future__ import annotations

import torch

from shardwise.comm import Axis
from shardwise.parallel.pipeline.boundaries import StagePlacement
from shardwise.parallel.pipeline.stage_gradients import Tape
from shardwise.parallel.pipeline.talk import Talk


class Serving:
    """The gradients that a forward takes through several stages, seen from one rank. Made on all ranks together."""

    def __init__(self, cut: StagePlacement, axis: Axis, device: torch.device):
        self.stages = cut.stages
        self.talk = Talk(axis, cut.schedule.owner, device)
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._over: set[tuple[int, int]] = set()

    def tape(self, stage: int, batch: int) -> Tape:
        """Returns a new tape for a stage's forward of a micro-batch."""
        cut = self.stages[stage]
        self._tapes[stage, batch] = Tape(self.talk, stage, batch, cut.over, cut.by)
        return self._tapes[stage, batch]

    def until_end(self, stage: int, batch: int) -> None:
        """Answer what the stage after asks until it has no more to ask of this micro-batch."""
        if not self.stages[stage].answers:
            return
        while (stage, batch) not in self._over:
            # of any micro-batch: the stage after runs them in an order of its own, and says things in that order
            words, tensors = self.talk.hear(stage + 1, stage)
            if words["kind"] == "end":
                self._over.add((stage, words["batch"]))
            else:
                self._tapes[stage, words["batch"]].answer(words, tensors)
        self._over.remove((stage, batch))

    def end(self, stage: int, batch: int) -> None:
        """Tell the stage before that nothing more will be asked of a micro-batch."""
        if self.stages[stage].over:
            self.talk.say(stage, stage - 1, {"kind": "end", "batch": batch})

    def forget(self, stage: int, batch: int) -> None:
        """Drop the tape of a micro-batch that is over."""
        self._tapes.pop((stage, batch)).clear()

    def clear(self) -> None:
        """Drop all tapes, and wait until everything that was said has left."""
        self._tapes.clear()
        self.talk.flush()
