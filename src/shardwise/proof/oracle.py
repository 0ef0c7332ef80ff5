"""The oracle: a plain training loop in one process, with which a plan is compared.

For each micro-batch: forward, backward of the sum. Then every gradient is divided by the total weight, clipped, and
the optimizer steps. Random masks follow the global index, as with the engine's randomness=global.

A new part of the step must also be added to plain_run, verify_run, own_precision and settings.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from shardwise.errors import InputError
from shardwise.layout.dealing import micro_batches
from shardwise.proof import literal_weights
from shardwise.proof.eps import EpsWatch
from shardwise.proof.literal import bounds, call_of, count_of, loss_of, optimizer_of, replaced, samples_of
from shardwise.proof.literal_boundary import unlike_boundary
from shardwise.proof.literal_draws import CheckedRandom
from shardwise.proof.literal_rollout import literal_rollout, unlike_curriculum
from shardwise.proof.record import Record, kept, kept_state
from shardwise.proof.settings import Settings, global_batch, nudged
from shardwise.proof.watch import CallTrace, ModuleWatch
from shardwise.proof.zeros import settle_and_note
from shardwise.random import BatchDims, GlobalRandom, Samples
from shardwise.task import Task
from shardwise.trace.deferred import build, named_tensors
from shardwise.trace.double import KeepDouble, default_dtype


@dataclass
class Look:
    """A request to trace one step of the oracle, and its result.

    step    the step to trace, from 0
    ranks   data ranks for which `shares` are computed
    trace   every module's outputs and their gradients
    shares  for each data rank name -> its summand of the gradient; [] if the samples' gradients do not add up
    """

    step: int
    ranks: int
    trace: CallTrace = field(default_factory=CallTrace)
    shares: list[dict[str, torch.Tensor]] = field(default_factory=list)


def run_oracle(task: Task, settings: Settings, look: Look | None = None) -> Record:
    """Returns the record of `settings.steps` steps in this process, in `settings.dtype`; fills `look`, if given.

    Raises what the task raises, and `InputError` for a batch whose global weight is 0.
    """
    unlike = unlike_curriculum(task) + unlike_boundary(task)
    task = literal_rollout(task)
    module = plain_module(task, settings)
    # once in a proof, since the traced run and runs with nudged weights have the same constructor
    if look is None and not settings.nudge and literal_weights.is_looked_at(task, module):
        unlike += literal_weights.differences(task, module)
        # built again, so that state which a constructor leaves outside its module (a list) is this module's
        module = plain_module(task, settings)
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    optimizer = optimizer_of(task.optimizer, [param for _, param in named])
    eps = EpsWatch(named, optimizer, task.optimizer)
    record = Record(lr=max(float(group.get("lr", 0.0)) for group in optimizer.param_groups))
    # with a closure the optimizer computes gradients inside its step, so they cannot be changed before it
    if not needs_closure(optimizer):
        settle_and_note(optimizer, record.limits)
    record.trained = {name for name, _ in named}
    record.initial = {name: kept(param) for name, param in module.named_parameters()}
    random = _Noted(BatchDims())
    arithmetic = KeepDouble()
    for step in range(settings.steps):
        norms: list[float] = []
        batch = _cast(global_batch(task, settings, step), settings)
        watch = None
        if look is not None and look.step == step:
            watch = ModuleWatch(module)
            look.trace = watch.trace
            look.shares = _shares(task, module, named, batch, step, settings, random, look.ranks)

        def gradients(batch: Any = batch, step: int = step, norms: list[float] = norms, watch=watch) -> float:
            loss, norm = _gradients(task, module, named, batch, step, settings, random, watch)
            norms.append(norm)
            return loss

        if needs_closure(optimizer):
            losses: list[float] = []

            def closure(losses: list[float] = losses, gradients=gradients) -> float:
                losses.append(gradients())
                return losses[-1]

            with arithmetic, default_dtype(settings.dtype):
                optimizer.step(closure)
            record.losses.append(losses[0])  # later calls of the closure are at other weights
        else:
            record.losses.append(gradients())
            with arithmetic, default_dtype(settings.dtype):  # scalars of an optimizer's state follow the default
                eps.begin()
                optimizer.step()
                eps.end()
        record.norms.append(norms[0])
        new = replaced(module, named)  # a parameter that a forward has replaced counts as a buffer from now on
        mine = [(name, param) for name, param in named if name not in new]
        record.gradients.append({name: None if p.grad is None else kept(p.grad) for name, p in mine})
        parameters = dict(module.named_parameters())
        record.parameters.append({name: kept(param) for name, param in parameters.items() if name not in new})
        states = [kept_state(name, optimizer.state.get(param, {})) for name, param in mine if param.numel()]
        record.states.append({key: value for state in states for key, value in state.items()})
        record.buffers.append({name: kept(buffer) for name, buffer in (*module.named_buffers(), *new.items())})
    for name in replaced(module, named):  # a buffer under a plan too
        record.trained.discard(name)
        del record.initial[name]
    record.notices += eps.notes()
    record.differences += unlike + random.differences
    if len(set(random.seeds.values())) < len(random.seeds):
        record.differences.append("two micro-batches, or steps, draw their masks from one seed")
    if arithmetic.met:
        record.notices.append("the optimizer computes in less than float64 by itself; both sides kept it in float64")
    return record


class _Noted(CheckedRandom):
    """`CheckedRandom` that also records the seed of each micro-batch's masks, by (step, micro-batch)."""

    def __init__(self, dims: BatchDims):
        super().__init__(dims)
        self.seeds: dict[tuple[int, int], int] = {}

    def begin(self, seed: int, step: int, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        """Starts a micro-batch and records its seed."""
        super().begin(seed, step, micro_batch, *args, **kwargs)
        self.seeds[step, micro_batch] = torch.initial_seed()


def _gradients(
    task, module, named, batch, step, settings: Settings, random: GlobalRandom, watch: ModuleWatch | None = None
) -> tuple[float, float]:
    """Leaves the clipped gradients of the batch's mean loss in the parameters; returns (loss, norm before clipping).

    Raises `InputError` for a batch whose weight is 0.
    """
    with nullcontext() if watch is None else watch.watching():
        total, weight = _sums(task, module, named, batch, step, settings, random, watch)
    if weight == 0:
        raise InputError(
            "the global weight of a batch is 0 (no sample or token counts): look at what Task.loss returns as weight, "
            "and whether every target is ignored or a mask is empty"
        )
    new = replaced(module, named)  # a parameter that the forward has replaced is not updated, nor part of the norm
    named = [(name, param) for name, param in named if name not in new]
    gradients = [param.grad for _, param in named if param.grad is not None]
    for gradient in gradients:
        gradient.div_(weight)
    # In float64, also of float32 gradients: torch's own norm of a large tensor is off by a thousandth on a CPU.
    norm = math.sqrt(sum(float(gradient.abs().double().square().sum()) for gradient in gradients))
    factor = 1.0 if settings.clip_norm is None else settings.clip_norm / (norm + 1e-6)
    if not factor >= 1.0:  # not `<`, so that a NaN reaches the gradients, as it does in torch
        for gradient in gradients:
            gradient.mul_(factor)
    return total / weight, norm


def _sums(task, module, named, batch, step, settings, random, watch: ModuleWatch | None = None) -> tuple[float, float]:
    """Returns (sum of losses, sum of weights) over micro-batches; leaves the gradients of the first."""
    for _, param in named:
        param.grad = None
    total, weight = 0.0, 0.0
    for index, low, high, samples in _cuts(count_of(batch), settings):
        part = samples_of(batch, low, high)
        random.begin(settings.seed, step, index, samples)
        if watch is not None:
            watch.begin(index, samples.start, samples.count, samples.total)
        with (
            # on an accelerator fused attention would draw its dropout where no mode sees it
            nullcontext() if settings.device == "cpu" else sdpa_kernel(SDPBackend.MATH),
            random.watching(module),
            KeepDouble(),
            default_dtype(settings.dtype),
        ):
            args, kwargs = call_of(task, part)
            loss = loss_of(task, module(*args, **kwargs), part)
            objective = loss.total
            for extra in loss.extras.values():
                # an extra term is a mean over its own weight, and all is divided by the loss's weight at the end
                factor = 1.0 if extra.weight is None else _ratio(float(loss.weight), float(extra.weight))
                objective = objective + extra.total * factor
            objective.backward()
        total += float(objective.detach())
        weight += float(loss.weight)
    return total, weight


def _shares(task, module, named, batch, step, settings, random, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Returns each data rank's summands of the gradients, by name; [] if unknown, or if they do not add up.

    They do not add up if samples depend on each other. Runs on a copy of the module, since forwards may change it;
    [] if it cannot be copied.
    """
    try:
        module = copy.deepcopy(module)
    except (RuntimeError, TypeError):  # attributes hold tensors with a graph, or a thread
        return []
    copies = dict(module.named_parameters())
    named = [(name, copies[name]) for name, _ in named]
    _, weight = _sums(task, module, named, batch, step, settings, random)
    whole = {name: kept(param.grad) / weight for name, param in named if param.grad is not None}
    shares = []
    try:
        for rank in range(ranks):
            _sums(task, module, named, batch, step, replace(settings, share=(rank, ranks)), random)
            grads = {name: param.grad for name, param in named}
            zeros = {name: torch.zeros_like(value) for name, value in whole.items()}
            shares.append({n: zeros[n] if (g := grads[n]) is None else kept(g) / weight for n in whole})
    except (RuntimeError, ValueError):  # too few samples, for a batch norm for example
        return []
    # where samples look at each other (a batch norm), parts of a batch do not add up to the whole
    adds_up = all(torch.allclose(sum(share[name] for share in shares), value) for name, value in whole.items())
    return shares if adds_up else []


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def _cuts(samples: int, settings: Settings):
    """Yields (micro-batch, start, stop, `Samples`) of each forward: a micro-batch, half of one, or a rank's share."""
    micro_batches(samples, settings.accumulate)  # refuses too few of them
    for index, (low, high) in enumerate(bounds(samples, settings.accumulate)):
        middle = low + (high - low) // 2 if settings.halves else high
        parts = [(low, middle), (middle, high)]
        if settings.share is not None:
            rank, ranks = settings.share
            parts = [(low + (high - low) * rank // ranks, low + (high - low) * (rank + 1) // ranks)]
        for first, last in parts:
            # with fewer samples than parts, some parts are empty and run nothing
            if last > first:
                yield index, first, last, Samples(first - low, last - first, high - low)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch computes in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def plain_module(task: Task, settings: Settings) -> nn.Module:
    """Returns the task's module with its initial values, in the proof's dtype, on its device, in train mode."""
    dtype = settings.dtype
    device = torch.device(settings.device)
    with one_thread():  # as the ranks of a proof have: a QR or a product rounds otherwise on several
        built = build(task.model, settings.seed)
        module = built.module
        built.value_from = task.weights
        # copies, since `value` returns the module's own tensor if building was not deferred
        values = {id(tensor): built.value(name).clone() for name, tensor in named_tensors(module)}
    with torch.no_grad():
        for place, (_, tensor) in enumerate(named_tensors(module)):
            tensor.data = values[id(tensor)]
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
            elif tensor.is_complex():
                tensor.data = tensor.data.to(dtype.to_complex())
            tensor.data = nudged(tensor.data, settings, place).to(device)
    # a choice among equal values inside the module may not be reached by nudging weights and inputs alone
    if settings.nudge_inside:
        _nudge_inside(module, settings)
    return module.train()


def _nudge_inside(module: nn.Module, settings: Settings) -> None:
    """Adds hooks that move each childless module's output by an epsilon, the same in every call; gradients stay."""

    def moved(place: int, output: Any) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            kept = tensor.detach()
            return tensor + (nudged(kept, settings, place) - kept)

        return tree_map_only(torch.Tensor, move, output)

    for place, child in enumerate(module.modules(), start=100_000):
        if not next(child.children(), None):
            child.register_forward_hook(lambda m, a, output, place=place: moved(place, output))


def _cast(batch: Any, settings: Settings) -> Any:
    """Returns the batch on the proof's device, floating-point data in the proof's dtype and nudged if asked."""
    device = torch.device(settings.device)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        tensor = nudged(tensor.to(settings.dtype), settings, -1) if tensor.is_floating_point() else tensor
        return tensor.to(device)

    return tree_map_only(torch.Tensor, cast, batch)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's `step` cannot be called without a closure, as LBFGS's cannot."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
