"""A moving average of the weights, in pieces. Used by training/loop; saved by checkpoint/holdings; proof: plain_run.

    e <- decay e + (1 - decay) w        after each step

A rank averages the master weights that it holds: nothing is sent, and under zero a rank holds 1/N of the average.

`applied()` puts the average into the module for a while (an evaluation, an export) and the weights back afterwards.
Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992); as used by Tarvainen and
Valpola, "Mean teachers" (NeurIPS 2017).

What this does not do: average buffers; running statistics are those of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.device import by_device
from shardwise.engine.engine import Engine
from shardwise.errors import InputError


class Ema:
    """A moving average of an engine's trainable weights since it was made, in this rank's pieces.

    decay  weight of the average in each update, in [0, 1); `InputError` for another
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        if not 0 <= decay < 1:
            raise InputError(f"the decay of an average lies in [0, 1), got {decay}")
        self.technique, self.decay = engine.technique, decay
        # Under zero a rank may hold no element of a weight.
        slots = [slot for slot in engine.technique.slots if slot.master.numel()]
        self._names, self._masters = [slot.name for slot in slots], [slot.master for slot in slots]
        self._averages = [master.detach().clone() for master in self._masters]

    @torch.no_grad()
    def restart(self) -> None:
        """Sets the average to the current weights."""
        for average, master in zip(self._averages, self._masters, strict=True):
            average.copy_(master)

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average with the current weights, e <- decay e + (1 - decay) w; called after each step."""
        averages, masters = by_device(self._averages), by_device(master.detach() for master in self._masters)
        for of_device, weights in zip(averages, masters, strict=True):
            torch._foreach_lerp_(of_device, weights, 1 - self.decay)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, this rank's piece of the average) of each weight of which this rank holds elements."""
        return iter(zip(self._names, self._averages, strict=True))

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Context: the module computes with the average in place of the weights. Collective."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges masters and averages, in place, and brings the module's weights up to the masters. Collective."""
        for master, average in zip(self._masters, self._averages, strict=True):
            kept = master.detach().clone()
            master.copy_(average)
            average.copy_(kept)
        # Under zero=1 and 2 and in mixed precision the module computes with copies of the masters.
        self.technique.publish()
