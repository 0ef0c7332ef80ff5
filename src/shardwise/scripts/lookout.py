"""Check a script's model on its first batch: an output must not depend on other samples. Called by calls.

The engine's own look needs a loss. Here a fixed weighted sum of the outputs that have a batch dim stands for it, so
that a module that mixes samples shows as it would in a task's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from shardwise.comm import gather_rows
from shardwise.engine.alone import Untried, needs_gradients
from shardwise.engine.check import Findings, gently, look
from shardwise.engine.choices import differs
from shardwise.engine.engine import Engine
from shardwise.engine.evaluated import Evaluate
from shardwise.engine.many import Many, look_at_many, sizes_to_try, too_many
from shardwise.engine.samples import SAMPLES
from shardwise.errors import InputError, RefusedPlan, first_line
from shardwise.host import put, read
from shardwise.memory.recompute import note_written
from shardwise.parallel.batchnorm import batch_norm_modules
from shardwise.part import plain
from shardwise.random import BatchDims
from shardwise.scripts.dealt import deal
from shardwise.scripts.rows import FAILURES
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.loss import Loss
from shardwise.trace.stand_in import standing_in

NO_PLACES: Mapping[int, int] = {}

Plainly = Callable[[], AbstractContextManager[None]]

ON_EVERY_RANK = (
    'or prepare(..., loss_scope="model"), by which every rank runs the model on whole batches: equal to one process, '
    "no faster, and weights and optimizer in pieces under zero"
)
_UNCHECKED = "that the model treats samples one by one was not checked: "


def _samples_of(arguments: Any, samples: int, dim: int | None, known: Mapping[int, int]) -> tuple[int, Places]:
    """Returns (how many samples the model's arguments hold, along which dims); 0 where they have no common dim."""
    leaves = [leaf for leaf in tree_flatten(arguments)[0] if id(leaf) in known]
    sizes = {leaf.shape[known[id(leaf)]] for leaf in leaves}
    if len(sizes) == 1 and any(known[id(leaf)] for leaf in leaves):
        return sizes.pop(), Places(leaves[0].shape[known[id(leaves[0])]], dim or 0, known=known)
    try:
        rows = samples_in(arguments, name="the model's arguments")
        if not dim or rows == samples:
            return rows, Places(None, 0)
    except InputError:
        pass  # first dims differ: each tensor by its own
    places = Places(samples, dim or 0)
    return samples if any(places.of(leaf) is not None for leaf in tree_flatten(arguments)[0]) else 0, places


def look_at_model(
    engine: Engine, args: tuple, kwargs: dict, samples: int, dim: int | None, known: Mapping[int, int] = NO_PLACES, *,
    check: bool = True, plainly: Plainly = nullcontext, counts: bool = True, spreads: bool = False,
) -> ModelLook:  # fmt: skip
    """Returns what a few samples show: batch norms, notices, dims. Collective; raises for modules that mix samples.

    samples  that this rank holds, for arguments whose first dims differ (a hidden state beside time-first tokens)
    dim      of the batch's tensors that counts them, where known
    known    by id, the same of tensors that the model is given
    check    False: only batch norm is looked for, by its modules
    plainly  inside it the model runs as if it were not prepared
    counts   whether this rank's samples do, and not on another one
    spreads  the arguments hold all ranks' samples, and the model is to be given this rank's
    """
    batch = (args, kwargs)
    if not check:
        return ModelLook(batch_norm_modules(engine.module), [_UNCHECKED + "check_loss=False was given"])
    rows, places = _samples_of(batch, samples, dim, known)
    told = put([float(rows), float(counts)], engine.device)
    held = read(gather_rows(told, engine.mesh.data), "samples of each rank")
    n = min(*(int(each[0]) for each in held), SAMPLES)  # every rank must run as many forwards
    if n < 2:
        reason = "its arguments have no common batch dim" if rows == 0 else "it has one sample"
        return ModelLook(batch_norm_modules(engine.module), [f"{_UNCHECKED}{reason} in the first batch"])
    sizes = (n, 1, n - 1)
    given = [(places.cut(batch, low, high), high - low) for low, high in ((0, n), (0, 1), (1, n))]
    alone = [(places.cut(batch, place, place + 1), 1) for place in range(n)]
    made = _Made(sizes, dim or 0)

    def evaluate(one: tuple[tuple, int]) -> Loss:
        (given_args, given_kwargs), count = one
        at = next((at for at, asked in enumerate(given) if asked is one), None)
        try:
            with made.listening(engine.module, at):
                output = engine.module(*given_args, **given_kwargs)
        except FAILURES as error:
            if count == n or needs_gradients(error):
                raise
            raise RefusedPlan(
                f"the model takes {n} samples and fails on {count} of them ({first_line(error)}), of which "
                f"each rank has a part{_hint(dim)}"
            ) from error
        leaves = tree_flatten(dict(output) if isinstance(output, Mapping) else output)[0]
        if at is not None:
            made.outputs[at] = leaves
        return _OfOutputs(leaves, count, made, engine.device)

    try:
        findings = look(
            engine.module, evaluate, given[0], (given[1], given[2]), sizes, joined=None,
            dtype=engine.state.precision.compute, strict=True, masks=False, follows=True,
            again=lambda asked: _differs(engine, evaluate, given[0], alone, plainly) if asked else None,
        )  # fmt: skip
    except RefusedPlan as error:
        made.refuse_longest()
        turned = "add up over samples" in str(error)
        raise RefusedPlan(f"{error}{_hint(dim) if turned else ''}; {ON_EVERY_RANK}") from None
    ranks = range(len(held))
    each = [deal(rows, len(ranks), rank).part.count for rank in ranks] if spreads else [int(a * b) for a, b in held]
    findings.notices += _look_at_many(engine, batch, places, rows, each, findings, made)
    note_written(engine.module, [*findings.written, *findings.changed], findings.batch_norms)
    if findings.reentrant:
        engine.state.technique.expect_pieces()
    return ModelLook(
        findings.batch_norms, findings.notices, made.dims, any(known.values()), made.inside(), findings.dims
    )


def _look_at_many(
    engine: Engine, batch: Any, places: Places, rows: int, sizes: list[int], findings: Findings, made: _Made
) -> list[str]:  # fmt: skip
    """Raise where the model gives for as many samples as all ranks have other than for each rank's; notices."""
    tried = sizes_to_try(sizes, findings.sample_bytes)
    if not tried:
        return too_many(sizes)
    ends = list(accumulate(tried, initial=0))
    stands = torch.arange(ends[-1], device=engine.device) * rows // ends[-1]  # samples in their order, repeated
    parts = [(places.take(batch, stands[low:high]), high - low) for low, high in pairwise(ends)]

    def evaluate(one: tuple[tuple, int]) -> Loss:
        (args, kwargs), count = one
        output = engine.module(*args, **kwargs)
        leaves = tree_flatten(dict(output) if isinstance(output, Mapping) else output)[0]
        return _OfOutputs(leaves, count, made, engine.device)

    many, dtype = Many((places.take(batch, stands), ends[-1]), parts, tried), engine.state.precision.compute
    try:
        problems = gently(
            engine.module, lambda: look_at_many(engine.module, evaluate, many, dtype=dtype, scores=findings.scores)
        )
    except FAILURES as error:
        return [f"{_UNCHECKED}on {ends[-1]} samples, as ranks have together, it fails ({first_line(error)})"]
    if problems:
        raise RefusedPlan(f"{problems[0]}; {ON_EVERY_RANK}")
    return []


def _of_views(outputs: list[Any], sizes: tuple[int, ...]) -> Rows | None:
    """Where an output has several rows of each sample along its first dim: view after view, or side by side."""
    if not all(isinstance(one, torch.Tensor) and one.dim() and len(one) for one in outputs):
        return None
    whole, *parts = (plain(one.detach()) for one in outputs)
    views = len(whole) // sizes[0]
    if views < 2 or [len(whole), *map(len, parts)] != [views * size for size in sizes]:
        return None
    bar = 1e-9 if whole.dtype in (torch.float64, torch.complex128) else 1e-3
    for rows in (Rows(0, views, True), Rows(0, views, False)):
        together = rows.back(torch.cat([rows.first(part) for part in parts]))
        if torch.allclose(together, whole, rtol=bar, atol=bar * float(whole.abs().max())):
            return rows
    return None


def _differs(
    engine: Engine,
    evaluate: Evaluate,
    whole: Any,
    alone: list[Any],
    plainly: Plainly,
) -> str | None:
    """What differs in float64 between the samples together and each alone. Raises `Untried` where weights are cut."""
    if engine.plan.zero == 3 or engine.plan.tp > 1:
        raise Untried("ranks hold pieces of its weights")
    if engine.mesh.inner:
        raise Untried("what it is given is cut, and would be whole on every rank")

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    with plainly(), standing_in(engine.module, lambda name, tensor: wide(tensor.detach().clone())):
        return differs(engine.module, evaluate, *tree_map_only(torch.Tensor, wide, (whole, alone)))


def _hint(dim: int | None) -> str:
    return "" if dim else ". Where a batch's samples lie along its second dim: prepare(..., batch_dim=1)"


@dataclass(frozen=True)
class ModelLook:
    """Modules whose batch norm is to be joined; notices; of each output, the dim that counts samples, where learnt;
    whether some argument has them in another dim than the first; of each module's outputs, that dim; and of draws."""

    batch_norms: list[nn.Module]
    notices: list[str]
    dims: list[Rows | None] | None = None
    arguments_turned: bool = False
    inside: Mapping[nn.Module, list[Rows | None]] = field(default_factory=dict)
    drawn: BatchDims = field(default_factory=BatchDims)

    @property
    def turned(self) -> bool:
        """Returns whether an argument or an output has samples in another dim than the first."""
        return self.arguments_turned or any(rows is not None and rows.dim for rows in self.dims or [])


@dataclass(frozen=True)
class Rows:
    """Where a tensor has its samples: along `dim`; `views` rows of each, `after` one another (x1 x2 .. x1' x2' ..)."""

    dim: int
    views: int = 1
    after: bool = True

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor with one row for each sample, first."""
        tensor = tensor.movedim(self.dim, 0)
        if self.views == 1:
            return tensor
        if self.after:
            return tensor.unflatten(0, (self.views, -1)).transpose(0, 1)
        return tensor.unflatten(0, (-1, self.views))

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns what `first` was given."""
        if self.views > 1:
            rows = (rows.transpose(0, 1) if self.after else rows).flatten(0, 1)
        return rows.movedim(0, self.dim)


@dataclass(frozen=True)
class Places:
    """Which dim of a tensor counts its samples; `samples` None: the first, of every tensor. `more`: any that fits.
    `known`: those of some tensors, by id."""

    samples: int | None
    dim: int
    more: bool = True
    known: Mapping[int, int] = field(default_factory=dict)

    def of(self, leaf: Any) -> int | None:
        """Returns the dim that counts samples; None where none does."""
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return None
        if self.samples is None:
            return 0
        if id(leaf) in self.known:
            return self.known[id(leaf)]
        fits = [at for at, size in enumerate(leaf.shape) if size == self.samples]
        known = [at for at in (self.dim, 0) if at in fits]
        return known[0] if known else fits[0] if self.more and len(fits) == 1 else None

    def take(self, batch: Any, index: torch.Tensor) -> Any:
        """Returns these samples of a tensor, by their places; one without samples stays whole."""

        def taken(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray) and leaf.ndim and self.samples is None:
                return leaf.take(index.tolist(), 0)
            at = self.of(leaf)
            return leaf if at is None else leaf.index_select(at, index.to(leaf.device))

        return tree_map(taken, batch)

    def cut(self, batch: Any, low: int, high: int) -> Any:
        """Returns samples [low, high) of a tensor; one without samples stays whole."""

        def part(leaf: torch.Tensor) -> torch.Tensor:
            at = self.of(leaf)
            return leaf if at is None else leaf.narrow(at, low, high - low)

        return slice_samples(batch, low, high) if self.samples is None else tree_map_only(torch.Tensor, part, batch)


class _Made:
    """What the model gave for each number of samples, `sizes`, by place; and where its outputs have their samples."""

    def __init__(self, sizes: tuple[int, ...], dim: int) -> None:
        self.sizes, self.dim = sizes, dim
        self.outputs: dict[int, list[Any]] = {}
        self._inside: dict[int, list[tuple[nn.Module, list[tuple[int, ...]]]]] = {}  # shapes of what modules gave
        self._dims: list[Rows | None] | None = None

    @property
    def dims(self) -> list[Rows | None] | None:
        """Of each output, where its samples lie: the dim that is as large as they are many, whatever their number, or
        one of so many views of each, whose values are those of samples by themselves. None: outputs do not match."""
        if self._dims is None and len(self.outputs) == len(self.sizes):
            outputs = [self.outputs[at] for at in range(len(self.sizes))]
            if len({len(leaves) for leaves in outputs}) == 1:
                self._dims = [_rows_of(list(each), self.sizes) for each in zip(*outputs, strict=True)]
        return self._dims

    @contextmanager
    def listening(self, module: nn.Module, at: int | None) -> Iterator[None]:
        """Context: what modules inside give is noted by its shapes, for the run at this place."""
        noted = self._inside[-1 if at is None else at] = []

        def note(child: nn.Module, given: Any, output: Any) -> None:
            noted.append((child, list(map(_shape, tree_flatten(output)[0]))))

        handles = [child.register_forward_hook(note) for child in module.modules() if child is not module]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def inside(self) -> dict[nn.Module, list[Rows | None]]:
        """Returns where outputs of modules inside have their samples; of those that all calls of a module agree in."""
        found: dict[nn.Module, list[Rows | None]] = {}
        unlike = set[nn.Module]()
        for calls in zip(*(self._inside.get(at, []) for at in range(len(self.sizes))), strict=False):
            child, leaves = calls[0][0], [shapes for _, shapes in calls]
            rows = [_along(list(each), self.sizes) for each in zip(*leaves, strict=False)]
            if any(other is not child for other, _ in calls) or found.setdefault(child, rows) != rows:
                unlike.add(child)
        return {child: rows for child, rows in found.items() if child not in unlike}

    def rows(self, leaves: list[Any], count: int) -> list[Rows | None]:
        """Returns where each of these outputs has its `count` samples, by size alone where `dims` does not tell."""
        dims = self.dims
        if dims is not None and len(dims) == len(leaves):
            return dims
        places = Places(count, self.dim, more=bool(self.dim))
        return [None if at is None else Rows(at) for at in map(places.of, leaves)]

    def refuse_longest(self) -> None:
        """Raise `RefusedPlan` where an output of fewer samples has another size in a dim that counts none."""
        for at, rows in enumerate(self.dims or []):
            full, *others = (_shape(self.outputs[n][at]) for n in range(len(self.sizes)))
            for fewer in others:
                if rows is not None and rows.views == 1 and _without(full, rows.dim) != _without(fewer, rows.dim):
                    raise RefusedPlan(
                        f"the model gives {full} for {self.sizes[0]} samples and {fewer} for {fewer[rows.dim]} of "
                        "them: its output is as long as the longest sample that it is given, of which each rank has a "
                        "part. Give it the length of the batch (pad_packed_sequence(..., total_length=x.shape[1]))"
                    )


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def _rows_of(outputs: list[Any], sizes: tuple[int, ...]) -> Rows | None:
    """Where one output, given for each number of samples, has them."""
    return _along(list(map(_shape, outputs)), sizes) or _of_views(outputs, sizes)


def _along(shapes: list[tuple[int, ...]], sizes: tuple[int, ...]) -> Rows | None:
    """The dim that is as large as samples are many, whatever their number."""
    fits = [dim for dim in range(min(map(len, shapes))) if tuple(shape[dim] for shape in shapes) == sizes]
    return Rows(fits[0]) if fits else None


class _OfOutputs(Loss):
    """Stands for a loss: the sum over samples of a fixed functional of each sample's outputs.

    It is added up when it is asked for: where outputs have their samples shows by other numbers of them.
    """

    def __init__(self, leaves: list[Any], count: int, made: _Made, device: torch.device) -> None:
        self.weight, self.extras = float(count), {}
        self._leaves, self._count, self._made, self._device = leaves, count, made, device

    @property
    def total(self) -> torch.Tensor:
        """The sum, with its graph."""
        return self._added(lambda each: each + each.square())  # not linear: a mean taken off would cancel in a sum

    @property
    def terms(self) -> float:
        """The sum of its terms without their signs: narrow precision rounds by these."""
        return float(self._added(lambda each: each.abs() + each.square()).detach())

    def _added(self, term: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for leaf, at in zip(self._leaves, self._made.rows(self._leaves, self._count), strict=True):
            if not isinstance(leaf, torch.Tensor) or at is None or not leaf.is_floating_point():
                continue
            samples = at.first(leaf)
            if len(samples) == self._count:
                rows = samples.reshape(self._count, -1).double()
                signs = torch.cos(torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device))
                total = total + term((rows * signs).sum(dim=1)).sum()  # of (count,)
        return total
