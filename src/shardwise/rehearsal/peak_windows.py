"""`PeakWindows`: the most live bytes before the first repeated block, from its forward to its backward, and after that.

In each of them they grow evenly with the number of alike blocks (simulator/depths), which one peak of all does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.memory.live import LiveBytes
from shardwise.simulator.counted import RankTrace, StepTrace, Tops


class PeakWindows:
    """Follows `live` over the steps of a module, whose repeated blocks have these paths, if any."""

    def __init__(self, live: LiveBytes, model: nn.Module, paths: Sequence[str]):
        self.live, self._tops, self._at = live, [0, 0, 0], 0
        for block in map(model.get_submodule, paths[:1]):
            block.register_forward_pre_hook(lambda module, args: self._enter(1))
            block.register_forward_hook(lambda module, args, output: self._watch(output))

    def tell(self, trace: StepTrace, rests: int) -> None:
        """Sets a trace's peaks to the most live bytes beyond `rests`."""
        trace.tops = beyond(self.tops(), rests)
        trace.peak = max(trace.tops)
        if isinstance(trace, RankTrace):
            trace.first_tops = beyond(trace.first_tops, rests)
            trace.first = max(trace.first_tops)

    def tell_first(self, trace: RankTrace) -> None:
        """Sets a rank's peaks as they were when its first backward was over, unless they are set."""
        trace.first_tops = trace.first_tops if any(trace.first_tops) else self.tops()

    def tops(self) -> Tops:
        """Returns the most live bytes (before the first block, to its backward, after it), 0 where not reached."""
        self._enter(self._at)
        before, within, after = self._tops
        return before, within, after

    def _watch(self, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda gradient: self._enter(2))
                return

    def _enter(self, window: int) -> None:
        self._tops[self._at] = max(self._tops[self._at], self.live.peak)
        self.live.reset_peak()
        self._at = window


def beyond(tops: Tops, rests: int) -> Tops:
    """Returns the bytes of each window beyond `rests`."""
    before, within, after = (max(0, top - rests) for top in tops)
    return before, within, after
