"""Check in float64 that choices which a forward makes by values it reads are the same on a part of the batch.

A solver that takes its step size from the largest error in its batch gives the same results on a rank's part as on the
whole batch up to its own tolerance, a difference that the plan's precision hides in rounding. So if a forward reads
values, the loss and its gradients are compared once more in float64, in one process.

    error of a gradient = max|a - b| / max(max|b|, 1e-4 of the largest gradient)       b: the whole batch
    bars                  1e-11 for the loss, 1e-10 for gradients, a tenth of those of a proof; at least a hundred times
                          what moving every weight by one epsilon does

What this does not do: meet a choice that the samples at hand do not bring about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.look.one_process import MOST_ELEMENTS, Untried
from shardwise.look.watched_run import Evaluate, Runner, Seen
from shardwise.precision import Precision
from shardwise.python_seeds import python_restored
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.forward import Forward
from shardwise.step.loss import Loss
from shardwise.task import Task
from shardwise.trace.deferred import build, named_tensors
from shardwise.trace.double import KeepDouble, default_dtype

LOSS_BAR, GRADIENT_BAR = 1e-11, 1e-10
ALLOWANCE = 100  # factor on the effect of one epsilon
DRAWS = 3  # sets of initial weights that are tried, since a solver's choices depend on them
MOST_DRAWN = 2**24  # parameters above which only one set of weights is tried, since each takes seconds
SMALL = 2**16  # most elements of a weight whose gradient is compared in a large model
FLOOR = 1e-4  # fraction of the largest gradient that is the floor of errors, so that rounding of a zero counts little
DOUBLE = Precision.of(Plan(precision="fp64"))

Parts = tuple[Any, Any]  # of a batch
Gradients = dict[str, torch.Tensor]
Result = tuple[dict[str, float], Gradients]  # (name -> sum or weight of the loss, gradients of its total)
Again = Callable[[bool, bool], "str | None"]  # (whether this rank asks, whether for all gradients) -> what differs


def task_differs(
    task: Task, module: nn.Module, whole: Any, parts: Parts, seed: int, *, every: bool = True
) -> str | None:  # fmt: skip
    """Returns, as text, the largest difference between the task's loss on `whole` and on single samples, or None.

    module  the task's, for its number of parameters alone
    parts   two parts of `whole`, for a loss over pairs of samples, which cannot be computed sample by sample
    seed    of the run; initial weights of this seed are tried, and of the next two if the model is not large
    every   whether all gradients of a large model are compared, or only those of small weights: another choice of the
            forward shows in the loss and in these too, and all gradients in float64 would be held four times

    Raises `Untried` for a model that is too large, that cannot be built, or that has no float64.
    """
    elements = sum(param.numel() for param in module.parameters())
    if elements > MOST_ELEMENTS:
        raise Untried(f"{elements:.2g} parameters are many to hold in float64")
    # with one set of weights a choice may be the same by chance
    draws = DRAWS if elements <= MOST_DRAWN else 1
    # for a large model each sample takes seconds, and two show a choice that is made for both at once
    if elements > MOST_DRAWN and task.loss_scope != "global":
        whole = slice_samples(whole, 0, 2)
    count = samples_in(whole)
    alone = [slice_samples(whole, place, place + 1) for place in range(count)]
    for weights_seed in range(seed, seed + draws):
        with torch.random.fork_rng(devices=[]), python_restored():
            own = _drawn(task, weights_seed)
        forward = Forward(task, own, DOUBLE, torch.device("cpu"), Axis.alone("data"))
        if elements > MOST_DRAWN and not every:
            _hold_large(own)
        # single samples show most, but a loss over pairs of samples has no terms on them
        if task.loss_scope != "global":
            text = differs(own, forward.local, whole, alone)
        else:
            text = differs(own, forward.local, whole, parts, joined=forward.joined)
        if text is not None:
            return text
    return None


def _hold_large(module: nn.Module) -> None:
    """Freezes the large weights of the module, if it has small trained ones."""
    trained = [param for param in module.parameters() if param.requires_grad]
    if any(param.numel() <= SMALL for param in trained):
        for param in trained:
            param.requires_grad_(param.numel() <= SMALL)


def _drawn(task: Task, seed: int) -> nn.Module:
    """Returns the task's module in float64, with the initial weights of a run of this seed."""
    built = build(task.model, seed)
    built.value_from = task.weights
    # Each is cast when it is made, so that no second copy of the model is held; all are put in place last, since a
    # value may be computed from others.
    values = {
        id(tensor): built.value(name).to(DOUBLE.dtype_of(tensor), copy=True)
        for name, tensor in named_tensors(built.module)
    }
    with torch.no_grad():
        for _, tensor in named_tensors(built.module):
            tensor.data = values[id(tensor)]
    return built.module.train()


def differs(
    module: nn.Module, evaluate: Evaluate, whole: Any, parts: Sequence[Any], *, joined: Evaluate | None = None
) -> str | None:
    """Returns, as text, the number or gradient that differs most between `whole` and its `parts`; None if none does.

    module  in float64, and used nowhere else, since its weights are moved
    joined  for a loss that does not add up over samples: (whole, parts) -> the loss on the parts' joined outputs

    Raises `Untried` if float64 fails, `RefusedPlan` as `Seen` does.
    """
    seen = Seen(module)
    run = _Doubled(module, seen)
    try:
        with torch.random.fork_rng(devices=[]), seen.watching():
            of_whole = run(evaluate, whole)
            if joined is not None:
                of_parts = run(joined, (whole, parts))
            else:
                nothing: Result = ({}, {})
                of_parts = reduce(_added, (run(evaluate, part) for part in parts), nothing)
            errors = _errors(of_whole, of_parts)
            if not any(error > _bar(name) for name, error in errors.items()):
                return None
            # A model that magnifies rounding differs by that alone, so the effect of one epsilon is allowed for.
            _nudge(module)
            noise = _errors(of_whole, run(evaluate, whole))
    except RefusedPlan:  # raised by `Seen`, and true of the plan too
        raise
    except Exception as error:
        raise Untried(f"in float64 it fails: {type(error).__name__}: {error}") from error
    noise = {name: noise.get(name, 0.0) for name in errors}
    beyond = {name: error for name, error in errors.items() if error > max(_bar(name), ALLOWANCE * noise[name])}
    if not beyond:
        return None
    name = max(beyond, key=lambda name: beyond[name] / _bar(name))
    return f"{name} differs by {beyond[name]:.1e}, and by {noise[name]:.1e} where weights move by one epsilon"


class _Doubled:
    """Runs a loss and its backward in float64, without the module's own casts to narrower dtypes."""

    def __init__(self, module: nn.Module, seen: Seen) -> None:
        self.run = Runner(module, self._evaluate, seen)
        self.named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self.gradients: Gradients = {}

    def __call__(self, evaluate: Evaluate, batch: Any) -> Result:
        self.gradients = {}  # a new dict, since the last run's caller holds the other one
        with torch.enable_grad(), KeepDouble(), default_dtype(torch.float64):
            loss = self.run((evaluate, batch))[0]
        return loss.numbers(), self.gradients

    def _evaluate(self, call: tuple[Evaluate, Any]) -> Loss:
        """Returns the loss and sets `gradients`, taken here, before what the forward changed is put back."""
        evaluate, batch = call
        loss = evaluate(batch)
        params = [param for _, param in self.named]
        taken = torch.autograd.grad(loss.total, params, allow_unused=True) if loss.total.requires_grad else ()
        pairs = zip(self.named, taken, strict=False)  # a loss without a graph has none
        self.gradients = {name: gradient for (name, _), gradient in pairs if gradient is not None}
        return loss


def _added(first: Result, second: Result) -> Result:
    """Returns (numbers, gradients) of `first` plus `second`, added in the memory of `first`."""
    numbers = {name: first[0].get(name, 0.0) + second[0].get(name, 0.0) for name in first[0] | second[0]}
    gradients = first[1]
    for name, gradient in second[1].items():
        # cloned, since autograd may give one tensor, or one expanded, for several weights
        gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient.clone()
    return numbers, gradients


def _errors(whole: Result, other: Result) -> dict[str, float]:
    """Returns name in a message -> relative error, for each number and gradient of `other` against `whole`."""
    errors = {f"its {name}": _apart(value, other[0].get(name, 0.0)) for name, value in whole[0].items()}
    largest = max((float(gradient.abs().max()) for gradient in whole[1].values() if gradient.numel()), default=0.0)
    for name in sorted(whole[1] | other[1]):
        a, b = whole[1].get(name), other[1].get(name)
        like = a if a is not None else b
        assert like is not None
        # a weight without a gradient on one of the two sides has a gradient of zero there
        a, b = (torch.zeros_like(like) if gradient is None else gradient for gradient in (a, b))
        scale = max(float(a.abs().max()) if a.numel() else 0.0, FLOOR * largest, 1e-300)
        errors[f"the gradient of '{name}'"] = float((a - b).abs().max()) / scale if a.numel() else 0.0
    return errors


def _apart(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def _bar(name: str) -> float:
    return GRADIENT_BAR if name.startswith("the gradient") else LOSS_BAR


def _nudge(module: nn.Module) -> None:
    """Multiplies the elements of each parameter, in place, by 1 + eps and 1 - eps alternately, eps that of float64."""
    with torch.no_grad():
        for param in module.parameters():
            if param.is_floating_point() or param.is_complex():
                signs = 1 - 2 * (torch.arange(param.numel(), device=param.device) % 2)
                param.mul_((1 + torch.finfo(torch.float64).eps * signs.double()).view(param.shape))


def choices(
    again: Again, repeats: str, asked: bool, backwards: list[str], *, every: bool
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Returns (problems, notices) of choices made by values of a batch, and of backwards that mix samples. Collective.

    again      the comparison in float64
    repeats    text of `Seen.repeats`; "" if no module runs more often on more samples
    asked      whether this rank saw values read, or a backward of the user's, though other ranks may not have
    backwards  `Runner.own_backwards`, for a forward that reads no values; [] otherwise
    every      whether backwards of the user's ran, so that gradients may differ though the loss does not
    """
    made = (
        f"the forward reads values of tensors in Python{f', and {repeats}' if repeats else ''}: a choice that is made "
        "for all samples of a batch at once (the steps of a solver) comes out otherwise on each rank's part"
    )
    by = " or ".join(dict.fromkeys(backwards))
    try:
        differs = again(asked, every)
    except Untried as why:  # a notice and no refusal, since nothing was shown
        if backwards:
            notice = f"whether {by} gives other gradients for a rank's part of the samples was not tried: {why}"
            return [], [notice] if asked else []
        notice = f"{made}, and results differ by as much (not tried in float64: {why})"
        return [], [notice] if repeats and asked else []
    if differs is None or not asked:
        return [], []
    if backwards:
        return [f"{by} gives other gradients for a rank's part of the samples: in float64 {differs}. {_MIXED}"], []
    return [f"{made}: in float64 {differs}. Make the choice for each sample, or one that no value decides"], []


_MIXED = (
    'Treat each sample by itself there (norms and counts over one, not over the batch), or declare loss_scope="model", '
    "by which every rank runs the model on all of them"
)
