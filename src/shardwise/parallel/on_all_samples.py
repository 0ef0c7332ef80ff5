"""Runs modules that mix the samples of a micro-batch on all data ranks' samples. look/mixing finds these modules.

    rank 0   x_0 ─┐              ┌─> module(x) ─> rows of rank 0
                  ├─> all-gather ─┤
    rank 1   x_1 ─┘              └─> module(x) ─> rows of rank 1

"Rows" are entries of dim 0, of which a sample may have one or several. Every rank runs the module on all samples, as
one process does, so the buffers that it changes (a moving code book, a queue) and values computed from all samples (an
auxiliary loss) equal one process's. Each rank goes on with its own rows. Backward sums the ranks' gradients of x, and
each rank takes its rows; gradients of the module's weights are summands over ranks, as everywhere.

Bytes on the wire: all ranks' x once in forward, twice as much in backward. Time: every rank computes the module for all
samples, so this suits small modules between large ones.

Random numbers in the module are drawn for all samples, alike on every rank (random/modes, scripts/sample_draws).

What this does not do: pipelines, deterministic=true (where a rank computes single pieces of the batch).
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
    """How dim 0 of one leaf of a module's arguments or results depends on the number of rows of its first argument.

    times  rows of the leaf for each row of the first argument; 0 if its dim 0 does not depend on that
    size   size of the leaf's dim 0 if `times` is 0 (0 for a scalar or no tensor); else 0
    """

    times: int
    size: int


Learnt = tuple[Sequence[LeafRows], Sequence[LeafRows]]  # (of each leaf of the arguments, of each leaf of the results)


class OnAllSamples:
    """Replaces the `forward` of a module that mixes samples.

    module   the module;  forward  its own forward
    axis     the data ranks
    phase    tells code inside the module whose samples it has; see `Phase`
    learnt   which leaves of arguments and results have rows of samples; None until the look before step one finds out
    looking  called with (args, kwargs) in place of the forward during that look; else None
    always   whether the module takes all samples in evaluation too; if not, each rank evaluates its own samples alone,
             without collectives (as a script may do on one rank only)
    """

    def __init__(
        self, module: nn.Module, axis: Axis, phase: Phase, learnt: Learnt | None = None, *, always: bool = True
    ) -> None:
        self.module, self.forward, self.axis, self.phase = module, module.forward, axis, phase
        self.learnt, self.always = learnt, always
        self.looking: Callable[[tuple, dict], Any] | None = None

    def __deepcopy__(self, copied: dict[int, Any]) -> Callable[..., Any]:
        """Returns the original forward of the module's copy, since a copy (an EMA model) is run without collectives."""
        return types.MethodType(type(self.module).forward, copied[id(self.module)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's rows of the module's results on all ranks' rows. Collective.

        Raises `RefusedPlan` if it is not known which rows belong to which rank, or sizes are not those of the look.
        """
        if self.looking is not None:
            return self.looking(args, kwargs)
        # `same`: every rank has all samples already
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
        # a stand-in has no rows among the gathered ones; its results count nothing, so it takes the first rows
        first = 0 if self.phase.stand_in else sum(counts[: self.axis.index])
        return tree_unflatten(rows_from(results, times, first, rows), spec)

    def run_on_all(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the module's own forward on arguments that hold the samples of all ranks."""
        self.phase.same = True  # so that batch norms take local statistics, and all ranks draw the same random numbers
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.phase.same = False

    @property
    def is_own(self) -> bool:
        """Whether the forward runs on this rank's samples alone, which it does in evaluation unless `always`."""
        return not self.always and not self.module.training

    def _whole(self, leaf: torch.Tensor, times: int, counts: Sequence[int]) -> torch.Tensor:
        """Returns `leaf` with the rows of all ranks, in order. Collective, in backward too.

        times   rows of the leaf for each row of the first argument;  counts  each rank's rows of the first argument
        """
        by_rank = tuple(times * count for count in counts)

        def gathered(share: torch.Tensor) -> torch.Tensor:
            # if tp shards the module's weights, the gradient may arrive in shares
            return whole_gradient(gather_samples(share, by_rank, self.axis, _TAG, summed=True))

        return on_shares(leaf, gathered)

    def _agree(self, written: Sequence[torch.Tensor]) -> None:
        """Broadcasts the buffers that a forward wrote from the first rank, since GPUs' sums may differ in rounding."""
        for buffer in written:
            # a sharded buffer is left alone; it is equal over data ranks up to such rounding
            if not isinstance(buffer, Distributed):
                broadcast(buffer, self.axis, 0, _TAG)


def rows_of(leaves: Sequence[Any]) -> int:
    """Returns the size of dim 0 of the first tensor among `leaves` that has dims; 0 if there is none."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def size_of(leaf: Any) -> int:
    """Returns the size of dim 0 of a tensor; 0 for a scalar, and for a leaf that is no tensor."""
    return leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else 0


def times_of(learnt: Sequence[LeafRows], leaves: Sequence[Any], rows: int) -> list[int]:
    """Returns `times` of each leaf (see `LeafRows`), after a check of the leaves' sizes.

    rows   rows of the first argument in this call
    Raises `RefusedPlan` if a leaf's dim 0 is not as `learnt` says, since it is then unknown which rows are a rank's.
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
    """Returns the leaves, each one with rows narrowed to those of rows [first, first + count) of the first argument.

    times   rows of each leaf for each row of the first argument; a leaf with 0 is returned unchanged
    """
    return [leaf.narrow(0, n * first, n * count) if n else leaf for leaf, n in zip(leaves, times, strict=True)]
