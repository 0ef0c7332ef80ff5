"""Run a recorded program of operations for one chunk of positions after another, and again in backward.

    chunk i of the inputs     a `Part` over an axis of turns: Part[cp] of Part[chunks], or Part[chunks]
    its results               chunks, which are concatenated, or summands, which are added up
    backward                  recomputes the chunk with gradients. Gradients of chunked inputs are concatenated; those
                              of others (weights, tables) are added up in float32 at least

See `memory/chunks.py`. The rules of `part/` make results exact; a rule that would have to communicate raises `Uncut`.
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
    """An argument that is the program's input with the index `place`."""

    place: int


class ResultOf(NamedTuple):
    """An argument that is the result of the step with index `step`, or element `place` of it unless that is None."""

    step: int
    place: int | None


class Step(NamedTuple):
    """One recorded call; its arguments are values, `InputAt` or `ResultOf`, nested as they were given."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict
    grad: bool  # whether gradients were enabled when it was recorded


class _NothingLeaves(Ledger):
    """A ledger that raises `Uncut` for every collective or message, since turns of one rank cannot communicate."""

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
    """Returns one turn's chunk of this rank's elements of a tensor, along `dim`, as a `Part` over `axis` (`turn`)."""

    def chunk(local: torch.Tensor) -> torch.Tensor:
        owners = Owners.blocks(local.shape[dim], axis.size)
        return Part(owners.take(local, dim, axis.index), dim, owners, axis)

    return _within(tensor, chunk)


def _within(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns the tensor with `change` applied to its local tensor inside all axes of ranks."""
    # a sum over ranks that is not reduced yet stays so, to be reduced once for all chunks
    if isinstance(tensor, Sum) and tensor.axis.name != CHUNKS and tensor.waits:
        return Sum(_within(tensor.local, change), tensor.axis, tensor.origin, tensor.added, tensor.spread)
    if isinstance(tensor, Distributed) and tensor.axis.name != CHUNKS:
        return tensor.like(_within(tensor.settled_local(), change))
    return change(tensor)


@dataclass(frozen=True)
class Program:
    """The recorded calls in order, and which of their results are outputs.

    steps    recorded calls;  wanted  results that are outputs
    sources  index of an input -> dim along which it is chunked; other inputs are the same in each turn
    count    number of chunks
    """

    steps: tuple[Step, ...]
    wanted: tuple[ResultOf, ...]
    sources: dict[int, int]
    count: int

    def chunk(self, inputs: Sequence[torch.Tensor], index: int, wants: Sequence[bool] | None = None) -> list:
        """Returns the inputs of turn `index`, detached; those with a true entry in `wants` require gradients."""
        axis, tensors = turn(self.count, index), []
        for place, tensor in enumerate(inputs):
            here = tensor.detach()
            here = cut_into(here, self.sources[place], axis) if place in self.sources else here
            tensors.append(here.requires_grad_() if wants is not None and wants[place] else here)
        return tensors

    def gathered(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the inputs, chunked ones gathered over tp if sequence parallelism shards them. Collective.

        Called once for all chunks, which could not communicate.
        """
        tensors = list(inputs)
        for place in self.sources:
            for axis in _between_products(tensors[place]):
                tensors[place] = whole_over_axis(tensors[place], axis)
        return tensors

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the program's outputs for these inputs; other results are freed after their last use."""
        results: dict[int, Any] = {}
        for number, step in enumerate(self.steps):
            args, kwargs = (_filled(tree, inputs, results) for tree in (step.args, step.kwargs))
            # a call made under no_grad runs so in backward's recomputation too
            with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
                results[number] = step.func(*args, **kwargs)
            # these references would keep a wide result until the next step has run
            del args, kwargs
            for other in self._last_read[number]:
                results.pop(other, None)
        return [_taken(which, results) for which in self.wanted]

    @property
    def _last_read(self) -> list[list[int]]:
        """Returns for each step the indices of the steps whose results no later step reads, to be freed after it."""
        # a result that no step reads is freed at once
        last = {number: number for number in range(len(self.steps))}
        for number, step in enumerate(self.steps):
            last |= {read.step: number for read in _results_in((step.args, step.kwargs))}
        # outputs stay until the end
        last |= {which.step: len(self.steps) for which in self.wanted}
        freed_after: list[list[int]] = [[] for _ in range(len(self.steps) + 1)]
        for number, place in last.items():
            freed_after[place].append(number)
        return freed_after


def _between_products(tensor: torch.Tensor) -> list[Axis]:
    """Returns the axes that shard a tensor's positions but belong to weights: tp under sequence parallelism (`sp`)."""
    axes = []
    while isinstance(tensor, Part):
        axes += [tensor.axis] if not tensor.axis.positions else []
        tensor = tensor.local
    return axes


def _results_in(tree: Any) -> list[ResultOf]:
    """Returns all `ResultOf`s in nested arguments."""
    if isinstance(tree, ResultOf):
        return [tree]
    # `InputAt` is a tuple too, whose elements are no arguments
    if isinstance(tree, InputAt) or not isinstance(tree, dict | tuple | list):
        return []
    return [read for leaf in (tree.values() if isinstance(tree, dict) else tree) for read in _results_in(leaf)]


def _taken(which: ResultOf, results: dict[int, Any]) -> Any:
    """Returns the result that `which` means. `results`: index of a step -> its result."""
    result = results[which.step]
    return result if which.place is None else result[which.place]


def _filled(tree: Any, inputs: Sequence[torch.Tensor], results: dict[int, Any]) -> Any:
    """Returns nested arguments with each `InputAt` and `ResultOf` replaced by its value."""
    if isinstance(tree, InputAt):
        return inputs[tree.place]
    if isinstance(tree, ResultOf):
        return _taken(tree, results)
    if isinstance(tree, dict):
        return {key: _filled(leaf, inputs, results) for key, leaf in tree.items()}
    if isinstance(tree, tuple | list):
        leaves = [_filled(leaf, inputs, results) for leaf in tree]
        return leaves if isinstance(tree, list) else tuple(leaves)
    return tree


class _Joined:
    """One output over all turns: chunks are concatenated, summands added up."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None  # this rank's elements
        self._last: torch.Tensor | None = None  # the last turn's value, for how the output is sharded over ranks

    def add(self, value: torch.Tensor, index: int) -> None:
        """Adds the value of turn `index`."""
        self._last = _within(value, lambda here: self._take(here, index))

    def _take(self, here: torch.Tensor, index: int) -> torch.Tensor:
        """Adds one turn's local value, a chunk or a summand, to `total`; returns it unchanged."""
        if isinstance(here, Part):
            self._put(here.local, here.dim_cut, here.owners, index)
        elif isinstance(here, Sum):
            # a term that belongs to the sum once (a bias) is added in the first turn
            mine = here.local if here.added is None or index else here.local + here.added
            self.total = mine.clone() if self.total is None else self.total.add_(mine)
        elif self.total is None:  # it does not depend on positions, so it is the same in every turn
            self.total = here
        return here

    def _put(self, share: torch.Tensor, dim: int, owners: Owners, index: int) -> None:
        """Copies a turn's chunk into its positions along `dim` of `total`."""
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
        """Returns the output over all turns, sharded over ranks as the turns' values are."""
        total, last = self.total, self._last
        assert total is not None and last is not None
        return _within(last, lambda _: total)


class _Gradient:
    """The gradient of one input over all turns: concatenated along `dim`, or a sum if `dim` is None."""

    def __init__(self, dtype: torch.dtype, dim: int | None):
        self.dtype, self.dim = dtype, dim
        self.total: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None, axis: Axis) -> None:
        """Adds the gradient of one turn, if there is one. `axis`: the turn's."""
        if gradient is not None:
            self._last = _within(gradient, lambda here: self._take(here, axis))

    def _take(self, here: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Writes one turn's local gradient to its place along `dim`, or adds it to the sum; returns it unchanged."""
        if self.dim is not None:
            owners = Owners.blocks(here.shape[self.dim], axis.size)
            if self.total is None:
                self.total = (here.local if isinstance(here, Distributed) else here).new_zeros(tuple(here.shape))
            # a rule may have returned the gradient of all positions, or a summand of it
            share = share_of(here, self.dim, owners, axis)
            span = owners.span(axis.index)
            assert span is not None
            self.total.narrow(self.dim, *span).copy_(share)
            return here
        mine = summand(here, (axis,))
        # sums in bfloat16 would lose small summands (test_gradients_of_narrow_weights_are_added_up_wide)
        wide = torch.promote_types(mine.dtype, torch.float32) if mine.is_floating_point() else mine.dtype
        self.total = mine.to(wide, copy=True) if self.total is None else self.total.add_(mine)
        return here

    def value(self) -> torch.Tensor | None:
        """Returns the gradient over all turns, in the input's dtype; None if no turn gave one."""
        total, last = self.total, self._last
        if total is None or last is None:
            return None
        return _within(last, lambda _: total.to(self.dtype))


def _beside(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns the part of a gradient, of the output over all turns, that belongs to one turn's `output`."""
    if not isinstance(output, Distributed):
        return gradient
    if isinstance(output, Part):
        share = share_of(gradient, output.dim_cut, output.owners, output.axis)
        return output.with_local(_beside(share, output.local))
    assert isinstance(output, Sum)
    if output.axis.name == CHUNKS:  # each summand over turns has the gradient of the sum
        return gradient
    if output.waits:
        # the output is not reduced over ranks yet, and each rank's summand has the gradient of the sum
        return _beside(whole_over_axis(gradient, output.axis), output.local)
    return _beside(gradient, output.settled())


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype may have a gradient (floating-point and complex ones)."""
    return dtype.is_floating_point or dtype.is_complex


class _Chunked(torch.autograd.Function):
    """Function of a program's inputs that computes its outputs chunk by chunk, and so its gradients."""

    @staticmethod
    def forward(ctx: Any, program: Program, *inputs: torch.Tensor):
        joined, here = [_Joined() for _ in program.wanted], program.gathered(inputs)
        for index in range(program.count):
            outputs = program.run(program.chunk(here, index))
            for result, output in zip(joined, outputs, strict=True):
                result.add(output, index)
            # freed before the next chunk is computed
            del outputs
        ctx.program = program
        ctx.save_for_backward(*inputs)
        results = tuple(result.value() for result in joined)
        ctx.mark_non_differentiable(*(result for result in results if not has_gradient(result.dtype)))
        return results

    @staticmethod
    @differentiable_once(NO_SECOND)
    def backward(ctx: Any, *gradients: torch.Tensor):
        """Returns the gradients of the program's inputs; recomputes each chunk."""
        program = ctx.program
        inputs = program.gathered(ctx.saved_tensors)
        wants = ctx.needs_input_grad[1:]
        totals = {place: _Gradient(inputs[place].dtype, program.sources.get(place))
                 for place, wanted in enumerate(wants) if wanted}  # fmt: skip
        for index in range(program.count):
            for place, gradient in zip(totals, _of_turn(program, inputs, wants, gradients, index), strict=True):
                totals[place].add(gradient, turn(program.count, index))
                # freed before the next turn
                del gradient
        return None, *(totals[place].value() if place in totals else None for place in range(len(inputs)))


def _of_turn(
    program: Program, inputs: Sequence[torch.Tensor], wants: Sequence[bool], gradients: Sequence[torch.Tensor],
    index: int,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """Recomputes the chunk of turn `index`; returns its gradient, or None, for each input with a true `wants`.

    gradients  of the outputs over all turns
    """
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
    """Returns the program's outputs, computed chunk by chunk. Differentiable; backward recomputes each chunk."""
    return list(_Chunked.apply(program, *inputs))
