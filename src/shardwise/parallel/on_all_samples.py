"""Modules that mix the samples of a micro-batch, run on all data ranks' samples. Found by look/mixing.

    rank 0   x_0 ─┐             ┌─> module(x) ─> its rows 0
                  ├─> x, whole ─┤
    rank 1   x_1 ─┘             └─> module(x) ─> its rows 1

Every rank runs the module as one process does, so what it leaves in buffers (a code book that moves, a queue) and what
it makes of all samples (a loss of its own) are one process's. Each rank goes on with its own rows. Backward sums the
ranks' gradients of x, of which each takes its rows; those of the module's weights are summands, as everywhere.

Bytes on the wire: x once forward, of all ranks; twice as much backward. Time: the module's own for all samples, on
every rank, so it is for small modules between large ones.

What it draws is drawn for all samples, alike on every rank (random/modes, scripts/sample_draws).

What this does not do: pipelines, deterministic=true (a rank computes single pieces).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis, broadcast, gather_rows, gather_samples
from shardwise.errors import RefusedPlan
from shardwise.host import put, read
from shardwise.parallel.slots import Phase
from shardwise.part.crossing import on_shares
from shardwise.part.levels import Distributed
from shardwise.part.sums import whole_gradient

_TAG = "mixed samples"


class LeafRows(NamedTuple):
    """A leaf of a module's arguments or results: its rows for each of the first argument's, or (0, its first dim)."""

    times: int
    size: int


Learnt = tuple[Sequence[LeafRows], Sequence[LeafRows]]  # of arguments and of results


class OnAllSamples:
    """Stands for the forward of a module that mixes samples.

    learnt   which leaves of arguments and results have rows of samples; None until a look has learnt it
    looking  what runs the module instead, while it is looked at
    always   in evaluation too; else its forward is then a rank's own, which others need not run (a script's)
    """

    def __init__(
        self, module: nn.Module, axis: Axis, phase: Phase, learnt: Learnt | None = None, *, always: bool = True
    ) -> None:
        self.module, self.forward, self.axis, self.phase = module, module.forward, axis, phase
        self.learnt, self.always = learnt, always
        self.looking: Callable[[tuple, dict], Any] | None = None

    def __deepcopy__(self, copied: dict[int, Any]) -> Callable[..., Any]:
        """Returns the plain forward of the module's copy, which belongs to one process."""
        return types.MethodType(type(self.module).forward, copied[id(self.module)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's rows of what the module gives for all ranks' rows. Collective.

        Raises `RefusedPlan` where no look has learnt which rows are whose, or these are of other sizes than it met.
        """
        if self.looking is not None:
            return self.looking(args, kwargs)
        # of samples that every rank has, each computes all anyway
        if self.axis.size == 1 or self.phase.same or self.is_own:
            return self.forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        rows = rows_of(leaves)
        if self.learnt is None:
            raise RefusedPlan(
                "a module that mixes samples fails on as few of them as the look gave it, so that which rows of its "
                "results belong to which sample is not known: give more samples to a rank"
            )
        given, made = self.learnt
        device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        own = put([0.0 if self.phase.stand_in else float(rows)], device)
        counts = [int(n) for n in read(gather_rows(own, self.axis, _TAG).view(-1), "rows of each rank")]
        gathered = [
            self._whole(leaf, times, counts) if times else leaf
            for leaf, times in zip(leaves, times_of(given, leaves, rows), strict=True)
        ]
        args, kwargs = tree_unflatten(gathered, spec)
        before = [(buffer, buffer._version) for buffer in self.module.buffers()]
        output = self.run_on_all(*args, **kwargs)
        self._agree([buffer for buffer, version in before if buffer._version != version])
        results, spec = tree_flatten(output)
        times = times_of(made, results, sum(counts))
        # a stand-in's rows count nothing: any will do
        first = 0 if self.phase.stand_in else sum(counts[: self.axis.index])
        return tree_unflatten(rows_from(results, times, first, rows), spec)

    def run_on_all(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's forward gives for the samples of all ranks."""
        self.phase.same = True  # for batch norms and random numbers inside, whose samples are all here
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.phase.same = False

    @property
    def is_own(self) -> bool:
        """Whether this forward is of the rank's own samples alone."""
        return not self.always and not self.module.training

    def _whole(self, leaf: torch.Tensor, times: int, counts: Sequence[int]) -> torch.Tensor:
        """Returns the rows of all ranks, `times` for each that `counts` counts. Collective in backward too."""
        by_rank = tuple(times * count for count in counts)

        def gathered(share: torch.Tensor) -> torch.Tensor:
            # beside cut weights its gradient may come in shares
            return whole_gradient(gather_samples(share, by_rank, self.axis, _TAG, summed=True))

        return on_shares(leaf, gathered)

    def _agree(self, written: Sequence[torch.Tensor]) -> None:
        """Give all ranks the first one's bits of what a forward wrote: a GPU may add up in another order on each."""
        for buffer in written:
            # a cut one is another on each rank of its axis, and alike over data ranks up to such an order
            if not isinstance(buffer, Distributed):
                broadcast(buffer, self.axis, 0, _TAG)


def rows_of(leaves: Sequence[Any]) -> int:
    """Returns the first dim of the first tensor that has one; 0 where none has."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def size_of(leaf: Any) -> int:
    """Returns the first dim of a tensor; 0 for a scalar, and for what is no tensor."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else 0


def times_of(learnt: Sequence[LeafRows], leaves: Sequence[Any], rows: int) -> list[int]:
    """Returns how many rows each leaf has for each of `rows`; 0 for one that has none of its own.

    Raises `RefusedPlan` where the leaves are not those of the look: which rows are a rank's would be a guess.
    """
    sizes = [leaf.times * rows or leaf.size for leaf in learnt]
    if sizes != [size_of(leaf) for leaf in leaves]:
        raise RefusedPlan(
            f"a module that mixes samples takes or gives first dims of {[size_of(leaf) for leaf in leaves]} for {rows} "
            f"rows, where the look before the first step makes {sizes} of them: which rows belong to which sample is "
            'not known. loss_scope="model" (of Task, of prepare) has every rank run the model on all samples'
        )
    return [leaf.times for leaf in learnt]


def rows_from(leaves: Sequence[Any], times: Sequence[int], first: int, count: int) -> list[Any]:
    """Returns the leaves, of those with rows `count` from the first on, by as many `times` as they have for each."""
    return [leaf.narrow(0, n * first, n * count) if n else leaf for leaf, n in zip(leaves, times, strict=True)]
