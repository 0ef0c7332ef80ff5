"""`PeakWindows`: peak live bytes in three windows: before the first repeated block, until its backward, after that.

In each window the peak is linear in the number of equal blocks (simulator/depths), which the peak of a whole step is
not.
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
    """Reads the peaks of `live` in three windows while `model` runs; `paths`: its repeated blocks, if any."""

    def __init__(self, live: LiveBytes, model: nn.Module, paths: Sequence[str]):
        self.live, self._tops, self._at = live, [0, 0, 0], 0
        for block in map(model.get_submodule, paths[:1]):
            block.register_forward_pre_hook(lambda module, args: self._enter(1))
            block.register_forward_hook(lambda module, args, output: self._watch(output))

    def tell(self, trace: StepTrace, rests: int) -> None:
        """Sets the peaks of `trace` to the peak live bytes minus `rests`, the bytes that live between steps."""
        trace.tops = beyond(self.tops(), rests)
        trace.peak = max(trace.tops)
        if isinstance(trace, RankTrace):
            trace.first_tops = beyond(trace.first_tops, rests)
            trace.first = max(trace.first_tops)

    def tell_first(self, trace: RankTrace) -> None:
        """Sets a rank's `first_tops` to the peaks so far, called after each backward; only the first call counts."""
        trace.first_tops = trace.first_tops if any(trace.first_tops) else self.tops()

    def tops(self) -> Tops:
        """Returns the peak live bytes (before the first block, until its backward, after it), 0 if not reached."""
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
    """Returns the bytes of each window minus `rests`, at least 0."""
    before, within, after = (max(0, top - rests) for top in tops)
    return before, within, after
