"""Checks a script's model on its first batch: an output must not depend on other samples. Called by `scripts/calls`.

The engine's own check (`look`) needs a loss. Here the sum over samples of a fixed function of the outputs that have a
batch dim stands for it, so that a module that mixes samples shows as it would in a task's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.comm import gather_rows
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan, first_line
from shardwise.host import put, read
from shardwise.look.first_samples import Findings, gently, look, refusing_writes
from shardwise.look.mixing import (
    MixesSamples,
    install,
    mixers_of,
    modules_around,
    modules_that_mix,
    refuse_mixed,
    told_mixing,
)
from shardwise.look.one_process import needs_gradients
from shardwise.look.task_look import may_mix
from shardwise.look.watched_run import Runner, Seen, TakesGradients, WritesWeights
from shardwise.memory.recompute import note_written
from shardwise.parallel.batchnorm import batch_norm_modules
from shardwise.random import BatchDims
from shardwise.scripts.guard import WRITTEN, Gate
from shardwise.scripts.own_backwards import OwnBackwards
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.loss import Loss

ON_EVERY_RANK = (
    'or prepare(..., loss_scope="model"), by which every rank runs the model on whole batches: equal to one process, '
    "no faster, and weights and optimizer in pieces under zero"
)
BY_ROWS = (
    "where each sample's output depends on its own rows alone, prepare(..., check_loss=False), with a collate function "
    'that joins the rows of the samples it is given, and branches="per_sample" if a rank\'s samples may have none; '
    "verify proves it"
)
RAGGED = (
    ". An output of it has the shapes {}: where it is padded to the longest of the samples it is given, let it be as "
    "long whatever they are (pad_packed_sequence(..., total_length=x.shape[1])); or, where the loss leaves paddings "
    "out, prepare(..., check_loss=False), and verify proves it"
)
FAILURES = (RuntimeError, ValueError, IndexError, AssertionError)  # of a model that is given fewer samples
MOST = 4  # samples that the check runs on
Shape = tuple[int, ...]  # of an output; () if it is no tensor
_GUESSED = (
    "the model fails on {} of its samples ({}). First dims of its arguments differ, so for this look rows were taken "
    "by size: {}"
)
_MIXES = "the model mixes samples: what it gives does not add up over samples, a sum of its outputs"
_UNCHECKED = "that the model treats samples one by one was not checked: "


def _samples_of(arguments: Any, samples: int, dim: int | None) -> tuple[int, Places]:
    """Returns (number of samples in the model's arguments, the `Places` of their sample dims); number 0: unknown.

    samples  of the batch at hand, 0 if unknown;  dim  of the batch's tensors that counts them, None if unknown
    """
    leaves = tree_flatten(arguments)[0]
    places = Places(samples, dim or 0)
    sized = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    try:
        rows = samples_in(arguments, name="the model's arguments")
        # first dims agree on another number than the batch has, and each tensor has a dim of that number: turned
        turned = samples and rows != samples and sized and all(places.of(leaf) is not None for leaf in sized)
        # the batch itself has samples first (or as many rows): cut by the first dim
        if not turned and (not dim or rows == samples):
            return rows, Places(None, 0)
    except InputError:
        pass  # first dims differ: each tensor by its own
    return samples if any(places.of(leaf) is not None for leaf in leaves) else 0, places


def look_at_model(
    engine: Engine, args: tuple, kwargs: dict, samples: int, dim: int | None, gate: Gate,
    own: tuple[OwnBackwards, nn.Module] | None, *, check: bool = True,
) -> ModelLook:  # fmt: skip
    """Returns the `ModelLook` of running the model on at most 4 samples of the first batch. Collective.

    samples  of the batch that this rank has, for arguments whose first dims differ (a hidden state, time-first tokens)
    dim      of the batch's tensors that counts samples; None if unknown
    gate     open for the check's own reads, closed while the model's forward runs
    own      (the model's own backwards, the module that the script calls); None if these are not tried
    check    False: nothing is run, and batch norms are found by their class
    Raises `RefusedPlan` for a model that mixes samples, or whose forward the plan cannot run.
    """
    batch = (args, kwargs)
    if not check:
        return ModelLook(batch_norm_modules(engine.module), [_UNCHECKED + "check_loss=False was given"])
    rows, places = _samples_of(batch, samples, dim)
    held = read(gather_rows(put([float(rows)], engine.device), engine.mesh.data).view(-1), "samples of each rank")
    unplaced = _unplaced(batch, places)
    n = min(*map(int, held), MOST)  # every rank must run as many forwards
    if n < 2:
        reason = "its arguments have no common batch dim" if rows == 0 else "it has one sample"
        return ModelLook(batch_norm_modules(engine.module), [f"{_UNCHECKED}{reason} in the first batch"])
    sizes = (n, 1, n - 1)
    batches = [(places.cut(batch, low, high), high - low) for low, high in ((0, n), (0, 1), (1, n))]
    made = _Made(sizes, dim or 0)

    def outputs(module: nn.Module, call: tuple[tuple, dict]) -> list[Any]:
        output = module(*call[0], **call[1])
        return tree_flatten(dict(output) if isinstance(output, Mapping) else output)[0]

    def evaluate(one: tuple[tuple, int]) -> Loss:
        """Returns what stands for the loss on one of `batches`, (call, samples of it); notes its outputs' shapes."""
        call, count = one
        at = next(at for at, asked in enumerate(batches) if asked is one)  # `batches.index` would compare tensors
        try:
            with gate.closed():
                leaves = outputs(engine.module, call)
        except FAILURES as error:
            if count == n and places.samples is not None and not needs_gradients(error):
                raise RefusedPlan(_GUESSED.format(n, first_line(error), BY_ROWS)) from error
            # the model fails on all samples too, or was run without gradients, which the look then asks for
            if count == n or needs_gradients(error):
                raise
            raise RefusedPlan(
                f"the model takes {n} samples and fails on {count} of them ({first_line(error)}), of which "
                f"each rank has a part{unplaced or _hint(dim)}"
            ) from error
        made.shapes[at] = list(map(_shape, leaves))
        return _OfOutputs(leaves, count, made, engine.device)

    def of_copy(module: nn.Module, one: tuple[tuple, int]) -> Loss:
        return _OfOutputs(outputs(module, one[0]), one[1], made, torch.device("cpu"))

    def again(asked: bool, _every: bool) -> str | None:  # a copy of the model compares every gradient anyway
        if own is not None and asked:
            refuse_mixed(engine.module)
        alone = [(places.cut(batch, at, at + 1), 1) for at in range(n)]
        return own[0].differ(own[1], of_copy, batches[0], alone, asked) if own is not None else None

    look_once = partial(
        look, engine.module, evaluate, batches[0], (batches[1], batches[2]), sizes, joined=None,
        dtype=engine.state.precision.compute, strict=True, masks=False, follows=True, again=again, joins=False,
        mixes=may_mix(engine.state),
    )  # fmt: skip
    try:
        findings = _on_all_samples(engine, look_once, evaluate, batches)
    except WritesWeights as written:
        raise RefusedPlan(WRITTEN.format(", ".join(written.names))) from None
    except TakesGradients:
        raise RefusedPlan(
            "the model's forward takes gradients by itself (forces by torch.autograd.grad), which goes through weights "
            "that zero=3 frees as its units end: use zero=2, or describe the run as a Task"
        ) from None
    except RefusedPlan as error:
        raise RefusedPlan(_for_a_script(str(error), unplaced, made.ragged() or _hint(dim))) from None
    note_written(engine.module, [*findings.written, *findings.changed], findings.batch_norms)
    if findings.reentrant:  # such checkpoints bring a parameter's gradient in several parts
        engine.state.technique.expect_pieces()
    return ModelLook(findings.batch_norms, findings.notices, made.dims, places.turned, findings.dims)


def _on_all_samples(
    engine: Engine, look_once: Callable[[], Findings], evaluate: Callable[[Any], Loss], batches: list[Any]
) -> Findings:
    """Returns the `Findings` of a look after modules that mix samples were made to run on the samples of all ranks.

    look_once  runs the look; raises `MixesSamples` as long as such a module is left
    evaluate   (call, samples) -> what stands for the loss; batches: such pairs, of all samples and of two parts

    In evaluation ranks may not meet, so a module that mixes samples there too raises `RefusedPlan`.
    """
    before = mixers_of(engine.module)  # found when another submodule was called first
    while True:
        try:
            findings = look_once()
            break
        except MixesSamples as mixed:
            paths = modules_around(mixed, mixers_of(engine.module))
            install(engine.module, dict.fromkeys(paths), engine.mesh.data, engine.state.phase, always=False)
    mixing = [path for path in mixers_of(engine.module) if path not in before]
    if not mixing:
        return findings
    training = {child: child.training for child in engine.module.modules()}
    seen = Seen(engine.module.eval())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), seen.watching():
            also = modules_that_mix(engine.module, Runner(engine.module, evaluate, seen), batches[0], batches[1:])
    finally:
        for child, was in training.items():
            child.training = was
    if also:
        raise RefusedPlan(f"'{also[0]}' mixes the samples of a batch, in evaluation too")
    findings.notices.append(told_mixing(mixing, engine.mesh.data.size))
    return findings


def refuse_writes(module: nn.Module, args: tuple, kwargs: dict, gate: Gate) -> None:
    """Raises `RefusedPlan` if a forward on these arguments, which is undone, writes into weights held in pieces."""
    seen = Seen(module)

    def forward(call: tuple[tuple, dict]) -> Any:
        with gate.closed():
            return module(*call[0], **call[1])

    def run() -> None:
        with torch.random.fork_rng(devices=[]), seen.watching(), refusing_writes(seen, list, follows=True):
            Runner(module, forward, seen)((args, kwargs))

    try:
        gently(module, run)
    except WritesWeights as written:
        raise RefusedPlan(WRITTEN.format(", ".join(written.names))) from None
    except TakesGradients:
        pass  # its writes show later, in the versions of weights and in a proof


def _for_a_script(told: str, unplaced: str, hint: str) -> str:
    """Returns the message `told` of a refusal, which is worded for a Task, in the words of a script.

    unplaced  a remark on an argument without samples, or ""; hint: what to add if there is none, or ""
    """
    mixes = _MIXES.replace("samples:", "samples, or has rows that are not one a sample:") if unplaced else _MIXES
    told = told.replace("the loss does not add up over samples: its sum", mixes)
    told = told.partition(". Return (sum, weight)")[0] + ((unplaced or hint) if mixes in told else "")
    return told if 'loss_scope="model"' in told else f"{told}; {ON_EVERY_RANK}"


def _unplaced(batch: Any, places: Places) -> str:
    """Returns a remark on a tensor argument that has no dim of samples and was given whole; "" if there is none."""
    leaves = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    others = [tuple(leaf.shape) for leaf in leaves if places.of(leaf) is None]
    if not others:
        return ""
    return (
        f". A tensor of shape {others[0]} among its arguments has no dim that counts {places.samples} samples, so it "
        f"was given whole for fewer of them: {BY_ROWS}"
    )


def _hint(dim: int | None) -> str:
    """Returns the advice to set `batch_dim`, "" if `dim` is set already."""
    return "" if dim else ". Where a batch's samples lie along its second dim: prepare(..., batch_dim=1)"


@dataclass(frozen=True)
class ModelLook:
    """What the check of a model has shown.

    batch_norms       modules whose statistics are to be joined over ranks
    notices           sentences for the user
    dims              for each output leaf the `Rows` of its samples, or None; None for all if not learnt
    arguments_turned  Whether some argument may have samples in another dim than the first
    drawn             which dim of a random tensor counts samples, by its shape
    """

    batch_norms: list[nn.Module]
    notices: list[str]
    dims: list[Rows | None] | None = None
    arguments_turned: bool = False
    drawn: BatchDims = field(default_factory=BatchDims)

    @property
    def turned(self) -> bool:
        """Returns whether an argument or an output has samples in another dim than the first."""
        return self.arguments_turned or any(rows is not None and rows.dim for rows in self.dims or [])


@dataclass(frozen=True)
class Rows:
    """Where a tensor has its samples.

    dim    the dim that counts them
    views  how often it holds each: all samples of one view, then all of the next (x1 x2 .. x1' ..)
    """

    dim: int
    views: int = 1

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as (samples, ...), or (samples, views, ...) if it has several views."""
        tensor = tensor.movedim(self.dim, 0)
        return tensor if self.views == 1 else tensor.unflatten(0, (self.views, -1)).transpose(0, 1)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Undoes `first`: returns the tensor with its samples along `dim` again."""
        rows = rows if self.views == 1 else rows.transpose(0, 1).flatten(0, 1)
        return rows.movedim(0, self.dim)


@dataclass(frozen=True)
class Places:
    """Finds which dim of a tensor counts its samples, by size.

    samples  how many there are; None: the first dim of every tensor counts them
    dim      the dim to try first, then the first dim
    more     Whether any other dim is taken if it alone has that size
    """

    samples: int | None
    dim: int
    more: bool = True

    @property
    def turned(self) -> bool:
        """Returns whether samples may lie along another dim than the first."""
        return self.samples is not None and not self.dim

    def of(self, leaf: Any) -> int | None:
        """Returns the dim of `leaf` that counts samples; None if there is none, or `leaf` is no tensor."""
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return None
        # each argument has its samples first
        if self.samples is None:
            return 0
        fits = [at for at, size in enumerate(leaf.shape) if size == self.samples]
        # where the batch has them, then the first dim; size alone, which may be a chance, only where one dim has it
        known = [at for at in (self.dim, 0) if at in fits]
        return known[0] if known else fits[0] if self.more and len(fits) == 1 else None

    def cut(self, batch: Any, low: int, high: int) -> Any:
        """Returns the batch with samples [low, high) of each tensor; tensors without a dim of samples stay whole."""

        def part(leaf: torch.Tensor) -> torch.Tensor:
            at = self.of(leaf)
            return leaf if at is None else leaf.narrow(at, low, high - low)

        return slice_samples(batch, low, high) if self.samples is None else tree_map_only(torch.Tensor, part, batch)


class _Made:
    """Shapes of the model's outputs in runs on several numbers of samples, and which output dims follow these.

    sizes   samples of each run;  dim  tried first for outputs that `dims` does not cover
    shapes  index of a run -> the shapes of its outputs, which themselves are not kept
    """

    def __init__(self, sizes: tuple[int, ...], dim: int) -> None:
        self.sizes, self.dim = sizes, dim
        self.shapes: dict[int, list[Shape]] = {}
        self._dims: list[Rows | None] | None = None

    @property
    def dims(self) -> list[Rows | None] | None:
        """Returns for each output the `Rows` of its samples, None for one without; None for all while unknown.

        That is the dim whose size is the number of samples in every run, or the same multiple of it (several views).
        """
        # runs of n, 1 and n - 1 samples: before the last has ended a dim's size tells nothing
        if self._dims is None and len(self.shapes) == len(self.sizes):
            runs = [self.shapes[at] for at in range(len(self.sizes))]
            # outputs of runs that return other numbers of them cannot be matched
            if len({len(shapes) for shapes in runs}) == 1:
                self._dims = [_rows_of(list(shapes), self.sizes) for shapes in zip(*runs, strict=True)]
        return self._dims

    def ragged(self) -> str:
        """Returns a sentence on an output that is padded to the longest of its samples; "" if there is none."""
        for rows, shapes in zip(self.dims or [], zip(*self.shapes.values(), strict=True), strict=False):
            others = {shape[: rows.dim] + shape[rows.dim + 1 :] for shape in shapes} if rows is not None else set()
            if len(others) > 1:
                return RAGGED.format(" and ".join(map(str, dict.fromkeys(shapes))))
        return ""

    def rows(self, leaves: list[Any], count: int) -> list[Rows | None]:
        """Returns the `Rows` or None of each of `leaves`, outputs of `count` samples; by size if `dims` fails."""
        dims = self.dims
        if dims is not None and len(dims) == len(leaves):
            return dims
        places = Places(count, self.dim, more=bool(self.dim))
        return [None if at is None else Rows(at) for at in map(places.of, leaves)]


def _shape(leaf: Any) -> Shape:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()


def _rows_of(shapes: list[Shape], sizes: tuple[int, ...]) -> Rows | None:
    """Returns the `Rows` of an output that had these shapes in runs on `sizes` samples; None if no dim follows them."""
    fits = [dim for dim in range(min(map(len, shapes))) if tuple(shape[dim] for shape in shapes) == sizes]
    # a scalar, or no tensor, has no first dim to hold several views
    if fits or not all(shapes):
        return Rows(fits[0]) if fits else None
    # rows of several views, one after the other: the first dim is the same multiple of samples in each run
    views = shapes[0][0] // sizes[0]
    return Rows(0, views) if views > 1 and [s[0] for s in shapes] == [views * size for size in sizes] else None


class _OfOutputs(Loss):
    """Stands for a loss: the sum over samples of a fixed function of each sample's outputs (`leaves`, flat).

    Summed when it is asked for, because `made` knows the outputs' dims of samples only after the runs.
    """

    def __init__(self, leaves: list[Any], count: int, made: _Made, device: torch.device) -> None:
        self.weight, self.extras = float(count), {}
        self._leaves, self._count, self._made, self._device = leaves, count, made, device

    @cached_property  # asked for by each comparison, and a pass over the widest result
    def total(self) -> torch.Tensor:
        """Returns the sum, a float64 scalar with its graph."""
        return self._added(lambda each: each + each.square())  # not linear: a mean taken off would cancel in a sum

    @property
    def terms(self) -> float:
        """Returns the sum of the terms' absolute values, which scales the rounding error of narrow precision."""
        return float(self._added(lambda each: each.abs() + each.square()).detach())

    def _added(self, term: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns the sum over outputs and samples of `term` of each sample's number, a float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for leaf, at in zip(self._leaves, self._made.rows(self._leaves, self._count), strict=True):
            if not isinstance(leaf, torch.Tensor) or at is None or not leaf.is_floating_point():
                continue
            samples = at.first(leaf)
            if len(samples) == self._count and samples.numel():
                total = total + term(_projected(samples).double()).sum()  # of (count,)
        return total


def _projected(samples: torch.Tensor) -> torch.Tensor:
    """Returns one number for each sample, (count,): a fixed linear function of its elements.

    The samples may be the largest tensor of the run, so it is neither copied nor given a factor for each element.
    """
    last = samples.shape[-1] if samples.dim() > 1 else 1
    rows = samples.reshape(len(samples), -1, last) @ _factors(last, samples)  # (count, elements / last)
    return rows @ _factors(rows.shape[1], rows)


def _factors(count: int, like: torch.Tensor) -> torch.Tensor:
    """Returns `count` fixed factors (cosines of 0, 1, 2 ...) in the dtype and on the device of `like`."""
    return torch.cos(torch.arange(count, dtype=torch.float64, device=like.device)).to(like.dtype)
