"""Check a script's model on its first batch: each sample's output must be a function of that sample alone.

The engine's own look needs a loss. Here a fixed weighted sum of the outputs that have a batch dim stands for it, so
that a module that mixes samples shows as it would in a task's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.comm import gather_rows
from shardwise.engine.alone import Untried, needs_gradients
from shardwise.engine.check import look
from shardwise.engine.choices import differs
from shardwise.engine.engine import Engine
from shardwise.engine.evaluated import Evaluate
from shardwise.engine.samples import SAMPLES
from shardwise.errors import InputError, RefusedPlan
from shardwise.host import put
from shardwise.parallel.batchnorm import batch_norm_modules
from shardwise.part import plain
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.loss import Loss
from shardwise.trace.stand_in import standing_in

Plainly = Callable[[], AbstractContextManager[None]]

_UNCHECKED = "that the model treats samples one by one was not checked: "


def _samples_of(arguments: Any, samples: int, dim: int | None) -> tuple[int, Places]:
    """Returns (how many samples the model's arguments hold, along which dims); 0 where they have no common dim."""
    try:
        rows = samples_in(arguments, name="the model's arguments")
        if not dim or rows == samples:
            return rows, Places(None, 0)
    except InputError:
        pass  # first dims differ: each tensor by its own
    places = Places(samples, dim or 0)
    return samples if any(places.of(leaf) is not None for leaf in tree_flatten(arguments)[0]) else 0, places


def look_at_model(
    engine: Engine, args: tuple, kwargs: dict, samples: int, dim: int | None, *, check: bool = True,
    plainly: Plainly = nullcontext,
) -> ModelLook:  # fmt: skip
    """Returns what a few samples show: batch norms, notices, dims. Collective; raises for modules that mix samples.

    samples  that this rank holds, for arguments whose first dims differ (a hidden state beside time-first tokens)
    dim      of the batch's tensors that counts them, where known
    check    False: only batch norm is looked for, by its modules
    plainly  inside it the model runs as if it were not prepared
    """
    batch = (args, kwargs)
    if not check:
        return ModelLook(batch_norm_modules(engine.module), [_UNCHECKED + "check_loss=False was given"])
    rows, places = _samples_of(batch, samples, dim)
    told = put([float(rows)], engine.device)
    n = min(int(gather_rows(told, engine.mesh.data).min()), SAMPLES)  # every rank must run as many forwards
    if n < 2:
        reason = "its arguments have no common batch dim" if rows == 0 else "it has one sample"
        return ModelLook(batch_norm_modules(engine.module), [f"{_UNCHECKED}{reason} in the first batch"])
    sizes = (n, 1, n - 1)
    given = [(places.cut(batch, low, high), high - low) for low, high in ((0, n), (0, 1), (1, n))]
    alone = [(places.cut(batch, place, place + 1), 1) for place in range(n)]
    outputs: list[int | None] = []  # of each output, the dim that counts samples
    shapes: list[list[tuple[int, ...]]] = []  # of all outputs, for each number of samples
    made: dict[int, list[Any]] = {}  # and they themselves, of all samples, the first, the others

    def evaluate(one: tuple[tuple, int]) -> Loss:
        (given_args, given_kwargs), count = one
        try:
            output = engine.module(*given_args, **given_kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            if count == n or needs_gradients(error):
                raise
            raise RefusedPlan(
                f"the model takes {n} samples and fails on {count} of them ({str(error).splitlines()[0]}), of which "
                f"each rank has a part{_hint(dim)}"
            ) from error
        leaves = tree_flatten(dict(output) if isinstance(output, Mapping) else output)[0]
        made.update({at: leaves for at, asked in enumerate(given) if asked is one})
        shapes.append([tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else () for leaf in leaves])
        if not outputs:
            outputs.extend(Places(count, dim or 0, more=bool(dim)).of(leaf) for leaf in leaves)
        return Loss(_weighted_sum(leaves, outputs, count, engine.device), float(count))

    try:
        findings = look(
            engine.module, evaluate, given[0], (given[1], given[2]), sizes, joined=None,
            dtype=engine.state.precision.compute, strict=True, masks=False,
            again=lambda asked: _differs(engine, evaluate, given[0], alone, plainly) if asked else None,
        )  # fmt: skip
    except RefusedPlan as error:
        _refuse_longest(shapes, outputs, n)
        if dim or "add up over samples" not in str(error):
            raise
        raise RefusedPlan(f"{error}{_hint(dim)}") from None
    if findings.reentrant:
        engine.state.technique.expect_pieces()
    return ModelLook(findings.batch_norms, findings.notices, _following(shapes, sizes, made))


def _refuse_longest(shapes: list[list[tuple[int, ...]]], places: list[int | None], samples: int) -> None:
    """Raise `RefusedPlan` where an output of some samples has another size than of all in a dim that counts none."""
    for part in shapes[1:]:
        for whole, fewer, at in zip(shapes[0], part, places, strict=False):
            if (
                at is not None
                and len(whole) == len(fewer)
                and whole[:at] + whole[at + 1 :] != fewer[:at] + fewer[at + 1 :]
            ):
                raise RefusedPlan(
                    f"the model gives {whole} for {samples} samples and {fewer} for {fewer[at]} of them: its output is "
                    "as long as the longest sample that it is given, of which each rank has a part. Give it the length "
                    "of the batch (pad_packed_sequence(..., total_length=x.shape[1]))"
                )


def _following(
    shapes: list[list[tuple[int, ...]]], sizes: tuple[int, ...], made: dict[int, list[Any]]
) -> list[Rows | None] | None:  # fmt: skip
    """Of each output, where its samples lie: the dim that is as large as they are many, whatever their number, or one
    of so many views of each, whose values are those of samples by themselves.
    """
    if len(shapes) < len(sizes) or len({len(each) for each in shapes}) > 1:
        return None
    found: list[Rows | None] = []
    for at, of_one in enumerate(zip(*shapes[: len(sizes)], strict=True)):
        ndim = min(len(shape) for shape in of_one)
        fits = [d for d in range(ndim) if tuple(shape[d] for shape in of_one) == sizes]
        found.append(Rows(fits[0]) if fits else _of_views([made[n][at] for n in range(len(sizes))], sizes))
    return found


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
    """Modules whose batch norm is to be joined; notices; of each output, the dim that counts samples, where learnt."""

    batch_norms: list[nn.Module]
    notices: list[str]
    dims: list[Rows | None] | None = None


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
    """Which dim of a tensor counts its samples; `samples` None: the first, of every tensor. `more`: any that fits."""

    samples: int | None
    dim: int
    more: bool = True

    def of(self, leaf: Any) -> int | None:
        """Returns the dim that counts samples; None where none does."""
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return None
        if self.samples is None:
            return 0
        fits = [at for at, size in enumerate(leaf.shape) if size == self.samples]
        known = [at for at in (self.dim, 0) if at in fits]
        return known[0] if known else fits[0] if self.more and len(fits) == 1 else None

    def cut(self, batch: Any, low: int, high: int) -> Any:
        """Returns samples [low, high) of a tensor; one without samples stays whole."""

        def part(leaf: torch.Tensor) -> torch.Tensor:
            at = self.of(leaf)
            return leaf if at is None else leaf.narrow(at, low, high - low)

        return slice_samples(batch, low, high) if self.samples is None else tree_map_only(torch.Tensor, part, batch)


def _weighted_sum(leaves: list[Any], places: list[int | None], count: int, device: torch.device) -> torch.Tensor:
    """Sum over samples of a fixed functional of each sample's outputs."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for leaf, at in zip(leaves, places, strict=False):
        if at is None or not leaf.is_floating_point() or leaf.shape[at : at + 1] != (count,):
            continue
        rows = leaf.movedim(at, 0).reshape(count, -1).double()
        signs = torch.cos(torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device))
        each = (rows * signs).sum(dim=1)  # (count,)
        total = total + (each + each.square()).sum()  # not linear: a mean that is taken off would cancel in a sum
    return total
