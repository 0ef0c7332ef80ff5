"""Run a recorded program of operations for one chunk of positions after the other, and again in backward.

    chunk i of the inputs     a part over an axis of turns: Part[cp] of Part[chunks], or Part[chunks]
    its results               shares, put side by side; or summands, added up
    backward                  the chunk again, with gradients: of the positions' inputs shares, of others (weights,
                              tables) summands, added up in float32 at least

See `memory/chunks.py`. Everything is exact by the rules of `part/`; what a rule would have to send raises `Uncut`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.comm import Axis, Ledger
from shardwise.host import to_device
from shardwise.layout.grid import CHUNKS
from shardwise.part import Owners, Part, Sum, Uncut, summand
from shardwise.part.levels import Distributed
from shardwise.part.moves import share_of
from shardwise.part.sums import whole_over_axis
from shardwise.trace.functional import differentiable_once

NO_SECOND = "the gradient of what is computed in chunks is differentiated again: leave chunks out of the plan"


class InputAt(NamedTuple):
    """An argument that is the program's input at this place."""

    place: int


class ResultOf(NamedTuple):
    """An argument that is the result of step `step`, or element `place` of that result."""

    step: int
    place: int | None


class Step(NamedTuple):
    """One recorded call; its arguments are values, `InputAt` or `ResultOf`, nested as they were given."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict
    grad: bool  # recorded where gradients were wanted


class _NothingLeaves(Ledger):
    """A ledger that raises `Uncut` for every message: the axis over turns cannot send."""

    def record(self, tag: str, op: str, axis: str, *sizes: Any) -> None:
        """Raises `Uncut`: a chunk cannot send a collective."""
        raise Uncut(f"chunks of positions are computed one after the other, and this needs all of them at once ({op})")

    def leaving(self, tag: str, axis: str) -> None:
        """Raises `Uncut`: a chunk cannot send a message."""
        self.record(tag, "a message", axis)


_LEDGER = _NothingLeaves()


@lru_cache(4096)
def turn(count: int, index: int) -> Axis:
    """Returns the (cached) axis over `count` chunks of positions, as seen while chunk `index` is computed."""
    return Axis(CHUNKS, count, index, None, tuple(range(count)), rehearsal=_LEDGER)


def cut_into(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """Returns one turn's chunk of this rank's elements of a tensor, along `dim`, as a `Part` over `axis`."""

    def chunk(local: torch.Tensor) -> torch.Tensor:
        owners = Owners.blocks(local.shape[dim], axis.size)
        return Part(owners.take(local, dim, axis.index), dim, owners, axis)

    return _within(tensor, chunk)


def _within(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns the tensor with `change` applied to its innermost local tensor, this rank's plain memory."""
    if isinstance(tensor, Sum) and tensor.axis.name != CHUNKS and tensor.waits:  # taken once for all chunks
        return Sum(_within(tensor.local, change), tensor.axis, tensor.origin, tensor.added, tensor.spread)
    if isinstance(tensor, Distributed) and tensor.axis.name != CHUNKS:
        return tensor.like(_within(tensor.settled_local(), change))
    return change(tensor)


@dataclass(frozen=True)
class Program:
    """The recorded calls in order, and which of their results are outputs.

    sources  the dim along which inputs are cut into chunks, by their place
    count    chunks
    """

    steps: tuple[Step, ...]
    wanted: tuple[ResultOf, ...]  # results that are handed out
    sources: dict[int, int]
    count: int

    def chunk(self, inputs: Sequence[torch.Tensor], index: int, wants: Sequence[bool] | None = None) -> list:
        """Returns the inputs as turn `index` has them, those in `wants` as leaves that require gradients."""
        axis, tensors = turn(self.count, index), []
        for place, tensor in enumerate(inputs):
            here = tensor.detach()
            here = cut_into(here, self.sources[place], axis) if place in self.sources else here
            tensors.append(here.requires_grad_() if wants is not None and wants[place] else here)
        return tensors

    def gathered(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the inputs; those that are cut into chunks are gathered over axes that keep shares of them (`sp`).

        Once for all chunks. Collective.
        """
        tensors = list(inputs)
        for place in self.sources:
            for axis in _between_products(tensors[place]):
                tensors[place] = whole_over_axis(tensors[place], axis)
        return tensors

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the program's outputs for these inputs; other results are freed after their last reader."""
        results: dict[int, Any] = {}
        for number, step in enumerate(self.steps):
            args, kwargs = (_filled(tree, inputs, results) for tree in (step.args, step.kwargs))
            # a call that was made under no_grad stays so in backward's second run
            with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
                results[number] = step.func(*args, **kwargs)
            # else they would keep a wide result until the next step has run
            del args, kwargs
            for other in self._last_read[number]:
                results.pop(other, None)
        return [_taken(which, results) for which in self.wanted]

    @property
    def _last_read(self) -> list[list[int]]:
        """Returns, for each step, the numbers of the steps whose results no later step reads, to be freed after it."""
        # a result that nobody reads is freed at once
        last = {number: number for number in range(len(self.steps))}
        for number, step in enumerate(self.steps):
            last |= {read.step: number for read in _results_in((step.args, step.kwargs))}
        # the program's own results stay until its end
        last |= {which.step: len(self.steps) for which in self.wanted}
        freed_after: list[list[int]] = [[] for _ in range(len(self.steps) + 1)]
        for number, place in last.items():
            freed_after[place].append(number)
        return freed_after


def _between_products(tensor: torch.Tensor) -> list[Axis]:
    """Returns the axes of weights (tp) that also cut a tensor's positions, as `sp` does."""
    axes = []
    while isinstance(tensor, Part):
        axes += [tensor.axis] if not tensor.axis.positions else []
        tensor = tensor.local
    return axes


def _results_in(tree: Any) -> list[ResultOf]:
    """Returns the `ResultOf`s in arguments, in nested containers too."""
    if isinstance(tree, ResultOf):
        return [tree]
    # both are named tuples: a walk into them would look at their numbers
    if isinstance(tree, InputAt) or not isinstance(tree, dict | tuple | list):
        return []
    return [read for leaf in (tree.values() if isinstance(tree, dict) else tree) for read in _results_in(leaf)]


def _taken(which: ResultOf, results: dict[int, Any]) -> Any:
    result = results[which.step]
    return result if which.place is None else result[which.place]


def _filled(tree: Any, inputs: Sequence[torch.Tensor], results: dict[int, Any]) -> Any:
    """Returns arguments with inputs and earlier results in the place of `InputAt` and `ResultOf`."""
    if isinstance(tree, InputAt):
        return inputs[tree.place]
    if isinstance(tree, ResultOf):
        return _taken(tree, results)
    # the program's arguments are nested as the calls had them: the same kinds come back
    if isinstance(tree, dict):
        return {key: _filled(leaf, inputs, results) for key, leaf in tree.items()}
    if isinstance(tree, tuple | list):
        leaves = [_filled(leaf, inputs, results) for leaf in tree]
        return leaves if isinstance(tree, list) else tuple(leaves)
    return tree


class _Joined:
    """Joins one output over all turns: chunks are put side by side, summands added up."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None  # of what this rank holds
        self._last: torch.Tensor | None = None  # a turn's value, which tells how the total lies over ranks

    def add(self, value: torch.Tensor, index: int) -> None:
        """Add a turn's value to the result; over ranks' axes it is distributed as the others are."""
        self._last = _within(value, lambda here: self._take(here, index))

    def _take(self, here: torch.Tensor, index: int) -> torch.Tensor:
        """Add one turn's gradient, a chunk at its place or a summand; returns it as it came."""
        if isinstance(here, Part):
            self._put(here.local, here.dim_cut, here.owners, index)
        elif isinstance(here, Sum):
            # what belongs to the sum once (a bias) is added by the first turn
            mine = here.local if here.added is None or index else here.local + here.added
            self.total = mine.clone() if self.total is None else self.total.add_(mine)
        elif self.total is None:  # the same in every turn
            self.total = here
        return here

    def _put(self, share: torch.Tensor, dim: int, owners: Owners, index: int) -> None:
        """Copy a turn's chunk into its positions along `dim` of the result."""
        if self.total is None:
            shape = list(share.shape)
            shape[dim] = owners.size
            self.total = share.new_empty(shape)
        span = owners.span(index)
        if span is not None:
            self.total.narrow(dim, *span).copy_(share)
        else:
            self.total.index_copy_(dim, to_device(owners.indices(index), share.device), share)

    def value(self) -> torch.Tensor:
        """Returns the result over all turns."""
        total, last = self.total, self._last
        assert total is not None and last is not None
        return _within(last, lambda _: total)


class _Gradient:
    """The gradient of one input over all turns: shares side by side along `dim`, or, without it, a sum."""

    def __init__(self, dtype: torch.dtype, dim: int | None):
        self.dtype, self.dim = dtype, dim
        self.total: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None, axis: Axis) -> None:
        """Add a turn's gradient; None where there is none."""
        if gradient is not None:
            self._last = _within(gradient, lambda here: self._take(here, axis))

    def _take(self, here: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Put one turn's gradient into its place along `dim`, or add it to the sum in float32; returns it as it is."""
        if self.dim is not None:
            owners = Owners.blocks(here.shape[self.dim], axis.size)
            if self.total is None:
                self.total = (here.local if isinstance(here, Distributed) else here).new_zeros(tuple(here.shape))
            # a rule may have given the whole, or a summand of it, where a chunk was cut
            share = share_of(here, self.dim, owners, axis)
            span = owners.span(axis.index)
            assert span is not None
            self.total.narrow(self.dim, *span).copy_(share)
            return here
        mine = summand(here, (axis,))
        # many small summands in bfloat16 would be lost (test_gradients_of_narrow_weights_are_added_up_wide)
        wide = torch.promote_types(mine.dtype, torch.float32) if mine.is_floating_point() else mine.dtype
        self.total = mine.to(wide, copy=True) if self.total is None else self.total.add_(mine)
        return here

    def value(self) -> torch.Tensor | None:
        """Returns the gradient over all turns, in the input's dtype; None where no turn gave one."""
        total, last = self.total, self._last
        if total is None or last is None:
            return None
        return _within(last, lambda _: total.to(self.dtype))


def _beside(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns the part of a whole gradient that belongs to a turn's output, distributed as the output is."""
    if not isinstance(output, Distributed):
        return gradient
    if isinstance(output, Part):
        share = share_of(gradient, output.dim_cut, output.owners, output.axis)
        return output.with_local(_beside(share, output.local))
    assert isinstance(output, Sum)
    if output.axis.name == CHUNKS:  # a sum over turns: each summand has the gradient of the sum
        return gradient
    if output.waits:
        # the output has not been summed over ranks yet: each rank's summand has the gradient of the sum
        return _beside(whole_over_axis(gradient, output.axis), output.local)
    return _beside(gradient, output.settled())


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype may have a gradient: real numbers and complex ones."""
    return dtype.is_floating_point or dtype.is_complex


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, *inputs: torch.Tensor):
        joined, here = [_Joined() for _ in program.wanted], program.gathered(inputs)
        for index in range(program.count):
            outputs = program.run(program.chunk(here, index))
            for result, output in zip(joined, outputs, strict=True):
                result.add(output, index)
            # before the next chunk's are made, so that the wide tensors of one chunk are there at a time
            del outputs
        ctx.program = program
        ctx.save_for_backward(*inputs)
        results = tuple(result.value() for result in joined)
        ctx.mark_non_differentiable(*(result for result in results if not has_gradient(result.dtype)))
        return results

    @staticmethod
    @differentiable_once(NO_SECOND)
    def backward(ctx: Any, *gradients: torch.Tensor):
        """Returns the gradients of the program's inputs: chunk by chunk, each run again and added up."""
        program = ctx.program
        inputs = program.gathered(ctx.saved_tensors)
        wants = ctx.needs_input_grad[1:]
        totals = {place: _Gradient(inputs[place].dtype, program.sources.get(place))
                 for place, wanted in enumerate(wants) if wanted}  # fmt: skip
        for index in range(program.count):
            for place, gradient in zip(totals, _of_turn(program, inputs, wants, gradients, index), strict=True):
                totals[place].add(gradient, turn(program.count, index))
                # added up already: the next turn need not stand beside it
                del gradient
        return None, *(totals[place].value() if place in totals else None for place in range(len(inputs)))


def _of_turn(
    program: Program, inputs: Sequence[torch.Tensor], wants: Sequence[bool], gradients: Sequence[torch.Tensor],
    index: int,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """Returns the gradient of each wanted input (None without one) from one turn, whose chunk is computed again."""
    with torch.enable_grad():
        here = program.chunk(inputs, index, wants)
        outputs = program.run(here)
    pairs = [(output, _beside(gradient, output)) for output, gradient in zip(outputs, gradients, strict=True)
             if gradient is not None and output.requires_grad]  # fmt: skip
    leaves = [leaf for leaf, wanted in zip(here, wants, strict=True) if wanted]
    if not pairs:
        return [None] * len(leaves)
    return torch.autograd.grad([out for out, _ in pairs], leaves, [own for _, own in pairs], allow_unused=True)


def chunked(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the program's outputs, computed chunk by chunk and recomputed so in backward. Differentiable."""
    return list(_Chunked.apply(program, *inputs))
