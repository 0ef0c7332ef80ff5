"""Combine two data-parallel techniques (slots.py): experts are reduced over other ranks than the rest.

    the rest      reduced over dp_shard and dp_replicate, as `zero` says
    experts       on each rank of ep others, whose gradients hold the tokens of all of ep already: reduced over the
                  dp_shard / ep ranks that hold the same ones, and over dp_replicate

Under zero >= 1 the dp_shard / ep ranks share the experts' optimizer state (and, from 2 on, gradients) as flat pieces;
experts themselves stay whole on the ranks that hold them under zero=3 too, and are never gathered. So do weights into
which the forward writes, which are combined with the units of zero=3 in the same way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from shardwise.parallel.slots import DataParallel, Slot


def _of_both(name: str) -> Any:
    """Returns a method that calls the method of this name of `rest`, then of `experts`."""

    def call(self: WithExperts, *args: Any, **kwargs: Any) -> None:
        for technique in (self.rest, self.experts):
            getattr(technique, name)(*args, **kwargs)

    return call


def _of_its_technique(name: str) -> Any:
    """Returns a method (index of a parameter, ...) that calls the method of this name of that parameter's technique."""

    def call(self: WithExperts, index: int, *args: Any) -> Any:
        technique, place = self._home[index]
        return getattr(technique, name)(place, *args)

    return call


class WithExperts:
    """Two techniques as one, `rest` and `experts`, each with its own parameters; indices are those among all `names`.

    ranks  this rank's place among those that share the rest, and among those that share its experts: the first
           counts a replicated gradient in the norm. None: both are in pieces over the same ranks, as weights that a
           forward writes are beside the units of zero=3
    """

    in_pieces = True  # no rank of ep holds every gradient
    start_step, start_micro_batch, expect_pieces, take_weights, publish, use_as_made = map(
        _of_both, ("start_step", "start_micro_batch", "expect_pieces", "take_weights", "publish", "use_as_made")
    )
    load_masters, full_parameter, full_gradient, whole = map(
        _of_its_technique, ("load_masters", "full_parameter", "full_gradient", "whole")
    )

    def __init__(
        self,
        names: list[str],
        rest: DataParallel,
        experts: DataParallel,
        of_experts: Collection[str],
        ranks: tuple[int, int] | None,
    ):
        self.rest, self.experts, self.ranks = rest, experts, ranks
        self._indices = {
            id(rest): [i for i, name in enumerate(names) if name not in of_experts],
            id(experts): [i for i, name in enumerate(names) if name in of_experts],
        }
        self._home = {
            index: (technique, place)
            for technique in (rest, experts)
            for place, index in enumerate(self._indices[id(technique)])
        }
        for technique in (rest, experts):  # a replicated gradient is in the norm once: by the first rank that has it
            for slot in technique.slots:
                slot.counted = technique.in_pieces or self._rank(technique, 0) == 0
        self.slots: list[Slot] = [*rest.slots, *experts.slots]

    @property
    def params(self) -> list[Any]:
        """Returns the parameters as the module holds them, by index."""
        home: list[tuple[Any, int]] = [self._home[index] for index in range(len(self._home))]
        return [technique.params[place] for technique, place in home]

    def finish_micro_batch(self) -> set[int]:
        """Returns which parameters (by index) this rank's backward reached."""
        used = set()
        for technique in (self.rest, self.experts):
            indices = self._indices[id(technique)]
            used |= {indices[place] for place in technique.finish_micro_batch()}
        return used

    def finish_step(self, used: set[int]) -> None:
        """Wait for both techniques' reductions, and set the masters' gradients.

        used  indices, among all names, of parameters that this rank's backward reached (called again: any rank's)
        """
        for technique in (self.rest, self.experts):
            technique.finish_step({p for p, i in enumerate(self._indices[id(technique)]) if i in used})

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (weight, wider master) of both techniques."""
        return self.rest.wide_masters() + self.experts.wide_masters()

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns None: of experts' gradients and the others' not every rank counts all."""
        return None

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the gradient buffers of both techniques."""
        return self.rest.gradient_buffers() + self.experts.gradient_buffers()

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view of `whole` (of an expert's: this rank's experts) that is the piece of rank `shard_rank`."""
        technique, place = self._home[index]
        select = getattr(technique, "select", None)
        return whole if select is None else select(place, whole, self._rank(technique, shard_rank))

    def _rank(self, technique: DataParallel, shard_rank: int) -> int:
        return shard_rank if self.ranks is None else self.ranks[technique is self.experts]
