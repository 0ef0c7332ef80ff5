"""Combine two data-parallel techniques (slots.py), since experts' gradients are reduced over other ranks than others'.

    other parameters   gradients are reduced over dp_shard and dp_replicate, as `zero` says
    experts            differ on each rank of ep, and their gradients contain the tokens of all of ep already, so these
                       are reduced over the dp_shard / ep ranks that hold the same experts, and over dp_replicate

Under zero >= 1 the dp_shard / ep ranks share the experts' optimizer state (with zero >= 2 also gradients) as flat
pieces. Experts are whole on the ranks that hold them, under zero=3 too, and never gathered. The same holds for weights
into which the forward writes, which are combined with the units of zero=3 in the same way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from shardwise.parallel.slots import DataParallel, Slot


def _of_both(name: str) -> Any:
    """Returns a method that calls the method `name` of `rest` and then of `experts`, with the same arguments."""

    def call(self: WithExperts, *args: Any, **kwargs: Any) -> None:
        """Calls the method of both techniques."""
        for technique in (self.rest, self.experts):
            getattr(technique, name)(*args, **kwargs)

    return call


def _of_its_technique(name: str) -> Any:
    """Returns a method (index, ...) that calls the method `name` of the technique that owns the index-th parameter."""

    def call(self: WithExperts, index: int, *args: Any) -> Any:
        """Returns the result of that technique's method, called with the parameter's index in that technique."""
        technique, place = self._home[index]
        return getattr(technique, name)(place, *args)

    return call


class WithExperts:
    """Two techniques as one `DataParallel`, each with its own parameters; an index counts all parameters of both.

    rest     technique of the parameters that are no experts';  experts  that of the experts' (or written weights)
    ranks    (index of this rank among those that share the other parameters, index among those that share its experts).
             The rank with index 0 counts a replicated gradient in the norm. None: both techniques shard over the same
             ranks, as for weights that a forward writes beside the units of zero=3
    """

    in_pieces = True  # no rank of ep holds every gradient, so square norms are summed over ranks
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
        """Combines the techniques. `names`: all trainable parameters; `of_experts`: those that `experts` owns."""
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
        for technique in (rest, experts):  # the norm must count a replicated gradient once, so only its first rank does
            for slot in technique.slots:
                slot.counted = technique.in_pieces or self._rank(technique, 0) == 0
        self.slots: list[Slot] = [*rest.slots, *experts.slots]

    @property
    def params(self) -> list[Any]:
        """Returns the parameters as the module holds them, in the order of their indices."""
        home: list[tuple[Any, int]] = [self._home[index] for index in range(len(self._home))]
        return [technique.params[place] for technique, place in home]

    def finish_micro_batch(self) -> set[int]:
        """Ends a micro-batch of both; returns the indices of the parameters that this rank's backward reached."""
        used = set()
        for technique in (self.rest, self.experts):
            indices = self._indices[id(technique)]
            used |= {indices[place] for place in technique.finish_micro_batch()}
        return used

    def finish_step(self, used: set[int]) -> None:
        """Waits for both techniques' reductions, and sets the masters' gradients.

        used  indices of parameters that this rank's backward reached, and if called again in a step, any rank's
        """
        for technique in (self.rest, self.experts):
            technique.finish_step({p for p, i in enumerate(self._indices[id(technique)]) if i in used})

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (weight, wider master) of both techniques."""
        return self.rest.wide_masters() + self.experts.wide_masters()

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns None, since a rank counts only some of these gradients in the norm."""
        return None

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the gradient buffers of both techniques."""
        return self.rest.gradient_buffers() + self.experts.gradient_buffers()

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view of `whole`, shaped as the index-th parameter, that is the piece of rank `shard_rank`.

        For a parameter of experts `whole` has this rank's experts.
        """
        technique, place = self._home[index]
        select = getattr(technique, "select", None)
        return whole if select is None else select(place, whole, self._rank(technique, shard_rank))

    def _rank(self, technique: DataParallel, shard_rank: int) -> int:
        """Returns this rank's index among those that share the technique's parameters; without `ranks` `shard_rank`."""
        return shard_rank if self.ranks is None else self.ranks[technique is self.experts]
