"""A run as a plain loop in one process: what `train` does, without the engine. Its settings come from verify_run.

    for each step   the next samples of the shuffled epoch (the last batch of one may be short) -> micro-batches
                    learning rate of the step -> gradient of the mean -> clip -> optimizer -> average of the weights
    when due        held-out loss and metrics of the weights, and of their average, in eval mode

Shared with a run are the task, initial weights (`trace/deferred`), random masks (checked by literal_draws) and the
schedule's formula. Everything else is implemented again.

What this does not do: resume, or skip steps that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.errors import RefusedPlan
from shardwise.proof import literal_weights
from shardwise.proof.literal import count_of, evaluating, loss_of, optimizer_of, samples_of
from shardwise.proof.literal_boundary import unlike_boundary
from shardwise.proof.literal_draws import CheckedRandom
from shardwise.proof.literal_order import sample_at
from shardwise.proof.literal_rollout import literal_rollout, unlike_curriculum
from shardwise.proof.literal_sources import one_by_one
from shardwise.proof.oracle import needs_closure, plain_module
from shardwise.proof.settings import Settings
from shardwise.proof.visited import literal
from shardwise.proof.zeros import settle_and_note
from shardwise.random import BatchDims, GlobalRandom, Samples
from shardwise.random.reading_seeds import drawing
from shardwise.task import Task
from shardwise.trace.double import KeepDouble, default_dtype

Numbers = dict[str, float]


@dataclass(frozen=True)
class RunSettings:
    """A run's settings, computed from its configuration.

    steps       optimizer steps
    batch       samples of a global batch, if the task has data to read
    accumulate  micro-batches of a step
    factor      step, from 0 -> factor on the learning rates
    clip_norm   largest norm of the gradient; None: not clipped
    eval_every  steps between evaluations; None: at the end alone; 0: never
    eval_count  held-out samples of one evaluation; 0: all
    decay       of the average of the weights; None: there is none
    """

    steps: int
    seed: int
    batch: int
    accumulate: int
    factor: Callable[[int], float]
    clip_norm: float | None = None
    eval_every: int | None = None
    eval_count: int = 0
    decay: float | None = None


@dataclass
class RunRecord:
    """The outcome of a run: numbers of each step and evaluation (by step), final weights, buffers and averages."""

    steps: list[Numbers] = field(default_factory=list)
    evaluations: dict[int, Numbers] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    averaged: list[str] = field(default_factory=list)  # names of the weights of which an average is kept
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    # of a run its last checkpoint; of the plain loop what that should hold
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    saved_averages: dict[str, torch.Tensor] = field(default_factory=dict)
    read_again: set[str] = field(default_factory=set)  # frozen weights not in the checkpoint but in the task's files
    states: dict[str, torch.Tensor] = field(default_factory=dict)  # "name of the parameter/key" -> optimizer state
    counts: dict[str, float | None] = field(default_factory=dict)  # of the checkpoint and the summary: steps, losses
    kept: list[int] = field(default_factory=list)  # steps whose checkpoints exist, ascending, from 1
    limits: tuple[float, ...] = ()  # each step's size up to which gradient elements are zeroed (zeros)
    differences: list[str] = field(
        default_factory=list
    )  # sentences on faults that one side shows alone, such as unreadable files


def plain_run(task: Task, settings: RunSettings) -> RunRecord:
    """Returns the `RunRecord` of the run, in float64 in this process; `RefusedPlan` for an optimizer with a closure."""
    of_task = unlike_curriculum(task) + unlike_boundary(task)
    task = literal_rollout(task)
    module = plain_module(task, Settings(seed=settings.seed))
    unlike: list[str] = []
    if literal_weights.is_looked_at(task, module):
        unlike = literal_weights.differences(task, module)
        # built again, so that state which a constructor leaves outside its module (a list) is this module's
        module = plain_module(task, Settings(seed=settings.seed))
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    optimizer = optimizer_of(task.optimizer, [param for _, param in named])
    if needs_closure(optimizer):
        raise RefusedPlan(f"a run with {type(optimizer).__name__}, which needs a closure: verify the task itself")
    rates = [group.get("lr") for group in optimizer.param_groups]
    limits: list[float] = []
    settle_and_note(optimizer, limits)
    averages = {name: param.detach().clone() for name, param in named}
    record = RunRecord(initial=_state_dict(module))
    random = CheckedRandom(BatchDims())
    for step, batch in zip(range(settings.steps), _batches(task, settings), strict=False):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            # an optimizer may have no learning rate
            if rate is not None:
                group["lr"] = rate * settings.factor(step)
        numbers = _gradients(task, module, named, batch, step, settings, random)
        with KeepDouble(), default_dtype(torch.float64):
            optimizer.step()
        if settings.decay is not None:
            for name, param in named:
                averages[name] = settings.decay * averages[name] + (1 - settings.decay) * param.detach()
        numbers["lr"] = float(optimizer.param_groups[0].get("lr", math.nan))
        record.steps.append(numbers)
        if is_due(task, settings, step):
            with evaluating(optimizer):
                evaluation = {f"eval_{key}": value for key, value in _evaluated(task, module, settings).items()}
            if settings.decay is not None:
                with _replaced(named, averages):
                    of_average = _evaluated(task, module, settings)
                of_average.pop("weight")  # a run writes no weight for the average
                evaluation |= {f"ema_eval_{key}": value for key, value in of_average.items()}
            record.evaluations[step] = evaluation
    record.differences = of_task + unlike + random.differences
    record.limits = tuple(limits)
    record.saved = _state_dict(module)  # in the optimizer's training mode, from which a checkpoint resumes
    with evaluating(optimizer):
        record.weights = _state_dict(module)
    record.states = {
        f"{name}/{key}": value.detach().clone()
        for name, param in named
        for key, value in optimizer.state.get(param, {}).items()
        # a checkpoint stores tensors of the weight's shape as tensors, and numbers such as step counts elsewhere
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == param.shape and value.numel()
    }
    steps = len(record.steps)
    record.counts = {"steps taken": steps, "number of its step": steps, "steps skipped": 0, "seed": settings.seed}
    record.counts |= {"first loss": record.steps[0]["loss"], "last loss": record.steps[-1]["loss"]}
    if record.evaluations:
        record.counts["held-out loss"] = [*record.evaluations.values()][-1]["eval_loss"]
    # a task that makes its batches reads no samples, and a run counts none
    if task.batch is None:
        record.counts["samples read"] = sum(numbers["samples"] for numbers in record.steps)
    if settings.decay is not None:
        with _replaced(named, averages):
            record.averages = _state_dict(module)
        record.averaged = [name for name, _ in named]
    return record


def _state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns name -> copy of the module's parameters and persistent buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@contextmanager
def _replaced(named: list[tuple[str, nn.Parameter]], values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Context in which the parameters have the values in `values`, by name; afterwards their own again."""
    kept = [param.data for _, param in named]
    for name, param in named:
        param.data = values[name]
    yield
    for (_, param), value in zip(named, kept, strict=True):
        param.data = value


def _batches(task: Task, settings: RunSettings) -> Iterator[Any]:
    """Yields global batches: the task's own, or the samples of shuffled epochs one after the other, without end."""
    if task.batch is not None:
        yield from map(task.batch, range(settings.steps))
        return
    assert task.data is not None
    length, epoch = len(task.data), 0
    indices = _order(task.data, settings)
    while True:
        # the last batch ends with the epoch, so it may be short
        for first in range(epoch * length, (epoch + 1) * length, settings.batch):
            chosen = indices(first, min(first + settings.batch, (epoch + 1) * length))
            # the same seeds for both ways of reading: the source's own, and sample by sample
            with drawing(settings.seed, epoch, first):
                batch = task.data.read(chosen)
            with drawing(settings.seed, epoch, first) as drawn:
                apart = one_by_one(task.data, chosen)
            # random numbers drawn for several samples at once cannot be assigned to one: then the source's own batch
            yield batch if apart is None or drawn.together else apart
        epoch += 1


def _order(data: Any, settings: RunSettings) -> Callable[[int, int], list[int]]:
    """Returns (start, stop) -> samples at these positions, of shuffled epochs or of the source's own order."""
    if getattr(data, "starts", ()):
        return literal(data.source, settings.seed, data.starts, data.batch)
    return lambda start, stop: [sample_at(len(data), settings.seed, place) for place in range(start, stop)]


def _gradients(
    task: Task, module: nn.Module, named: list[tuple[str, nn.Parameter]], batch: Any, step: int, settings: RunSettings,
    random: GlobalRandom,
) -> Numbers:  # fmt: skip
    """Leaves the clipped gradients of the batch's mean loss in the parameters; returns the step's numbers by name."""
    for _, param in named:
        param.grad = None
    samples = count_of(batch)
    count = min(settings.accumulate, samples)  # the last batch of an epoch may have fewer samples than micro-batches
    sums: dict[str, list[Any]] = {}
    total = weight = 0.0
    extras: Numbers = {}
    for index in range(count):
        low, high = samples * index // count, samples * (index + 1) // count
        part = _double(samples_of(batch, low, high))
        random.begin(settings.seed, step, index, Samples(0, high - low, high - low))
        with random.watching(module), KeepDouble(), default_dtype(torch.float64):
            output, loss = _forward(task, module, part)
            objective = loss.total
            for name, extra in loss.extras.items():
                share = 1.0 if extra.weight is None else float(loss.weight) / float(extra.weight)
                objective = objective + extra.total * share
                extras[name] = extras.get(name, 0.0) + float(extra.total.detach()) * share
            objective.backward()
        total, weight = total + float(loss.total.detach()), weight + float(loss.weight)
        _add_metrics(task, output, part, sums)
    for _, param in named:
        if param.grad is not None:
            param.grad /= weight
    used = [param for _, param in named if param.grad is not None]
    norm = math.sqrt(sum(float(param.grad.abs().square().sum()) for param in used if param.grad is not None))
    if settings.clip_norm is not None:
        factor = min(1.0, settings.clip_norm / (norm + 1e-6))
        for param in used:
            param.grad = param.grad * factor
    numbers = {"loss": (total + sum(extras.values())) / weight, "weight": weight, "grad_norm": norm}
    numbers |= {f"extra/{name}": value / weight for name, value in extras.items()}
    return numbers | {"samples": float(samples)} | {f"metric/{k}": v for k, v in _metrics(sums).items()}


def _forward(task: Task, module: nn.Module, part: Any) -> tuple[Any, Any]:
    args, kwargs = task.inputs(part)
    output = module(*args, **kwargs)
    return output, loss_of(task, output, part)


def _double(batch: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)


def is_due(task: Task, settings: RunSettings, step: int) -> bool:
    """Whether the run evaluates after this step, counted from 0."""
    every, last = settings.eval_every, step + 1 == settings.steps
    return task.eval_data is not None and every != 0 and (last or bool(every and (step + 1) % every == 0))


def held_out(length: int, settings: RunSettings) -> list[int]:
    """Returns the indices of one evaluation's samples among `length` held-out ones, evenly spread."""
    count = min(settings.eval_count, length) if settings.eval_count else length
    return [length * index // count for index in range(count)]


@torch.no_grad()
def _evaluated(task: Task, module: nn.Module, settings: RunSettings) -> Numbers:
    """Returns the mean loss ("loss"), its weight and the metrics ("metric/...") on the held-out samples."""
    assert task.eval_data is not None
    chosen = held_out(len(task.eval_data), settings)
    sums: dict[str, list[Any]] = {}
    total = weight = 0.0
    module.eval()
    for first in range(0, len(chosen), settings.batch):
        with drawing(0, 0, first):
            now = chosen[first : first + settings.batch]
            apart = one_by_one(task.eval_data, now)
            part = _double(task.eval_data.read(now) if apart is None else apart)
        with KeepDouble(), default_dtype(torch.float64):
            output, loss = _forward(task, module, part)
        total, weight = total + float(loss.total.detach()), weight + float(loss.weight)
        _add_metrics(task, output, part, sums)
    module.train()
    return {"loss": total / weight, "weight": weight} | {f"metric/{k}": v for k, v in _metrics(sums).items()}


@torch.no_grad()
def _add_metrics(task: Task, output: Any, part: Any, sums: dict[str, list[Any]]) -> None:
    """Adds a micro-batch's metrics to `sums`: name -> [sum, weight, [function applied after the division]]."""
    for name, (total, weight, *finish) in (task.metrics(output, part) if task.metrics is not None else {}).items():
        total = torch.as_tensor(total, dtype=torch.float64)
        weight = torch.as_tensor(weight, dtype=torch.float64).expand(total.shape)
        before = sums.get(name)
        sums[name] = [total, weight, finish] if before is None else [before[0] + total, before[1] + weight, finish]


def _metrics(sums: dict[str, list[Any]]) -> Numbers:
    """Returns metric -> value, with "name/0", "name/1" for vectors; `sums` as in `_add_metrics`."""
    ends: dict[Any, Callable[[float], float]] = {"sqrt": math.sqrt, "exp": math.exp}
    values = {}
    for name, (total, weight, finish) in sums.items():
        for place, value in enumerate((total / weight).reshape(-1).tolist()):
            if finish:
                value = finish[0](value) if callable(finish[0]) else ends[finish[0]](value)
            values[f"{name}/{place}" if total.dim() else name] = value
    return values
