"""A task whose model is fed its own result: K steps of a forecast, each with a loss, trained together.

    batch      x (B, C, H, W), y (B, K, C, H, W), forcing (B, K, F, H, W)
    step k     the one-step task's `inputs` and `loss` see x_k (C, H, W), y[:, k] and forcing[:, k] of each sample
    x_{k+1}    advance(output_k, batch_k): the output itself, or what takes its place in the next step's input
    loss       (sum over k of w_k S_k, sum over k of w_k W_k): the mean over steps weighted by w, of the steps' means

With `recompute` a step keeps its input alone and is computed again in backward: K states, and the activations of one
step. Forcings are known fields that are not forecast (the sun's height, boundary temperatures): each step is given its
own, and no gradient goes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.errors import InputError
from shardwise.memory.recompute import recompute_block
from shardwise.task import Task


def _itself(output: Any, batch: Any) -> Any:
    return output


@dataclass(frozen=True)
class _Steps:
    """Cuts a batch of K steps into batches of one step."""

    task: Task  # of one step
    state: str  # the batch's field that a step starts from
    targets: str  # the field with the K steps to come
    forcings: tuple[str, ...]  # fields that each step reads of its own time
    weights: tuple[float, ...]  # of the steps' losses; () for 1 each
    advance: Callable[[Any, Any], Any]  # (output, the step's batch) -> the next step's state
    recompute: bool  # each step again in backward
    asked: Mapping[str, Any]  # as it was called: a proof begins with these

    def count(self, batch: Mapping[str, Any]) -> int:
        """Returns K, the number of steps in a batch; `InputError` where its fields or the weights do not fit."""
        # a batch without these fields belongs to another task: the message lists what it has
        missing = [name for name in (self.state, self.targets, *self.forcings) if name not in batch]
        if missing:
            raise InputError(f"rollout: the batch has no {', '.join(missing)}; it has {', '.join(batch)}")
        steps, whole = batch[self.targets].shape[1], tuple(batch[self.targets].shape)
        for name in self.forcings:
            # dim 1 counts steps; one short of steps would repeat the last one silently
            if batch[name].dim() < 2 or batch[name].shape[1] < steps:
                raise InputError(
                    f"rollout: '{name}' of shape {tuple(batch[name].shape)} is read at each of {steps} steps along "
                    f"dim 1, those of '{self.targets}' {whole}"
                )
        if self.weights and len(self.weights) < steps:
            raise InputError(f"rollout: {len(self.weights)} weights for {steps} steps of '{self.targets}' {whole}")
        return steps

    def factors(self, count: int) -> tuple[float, ...]:
        """Returns the weight of each step's loss."""
        return self.weights[:count] or (1.0,) * count

    def at(self, batch: Mapping[str, Any], k: int, state: Any) -> dict[str, Any]:
        """Returns the batch of step k, which starts at `state`."""
        forced = {name: batch[name].select(1, k).detach() for name in self.forcings}
        return {**batch, **forced, self.state: state, self.targets: batch[self.targets].select(1, k)}


class Rollout(nn.Module):
    """The one-step module, run K times: the outputs of all steps, in a tuple."""

    def __init__(self, step: nn.Module, steps: _Steps):
        super().__init__()
        self.step = step
        self._steps = steps
        if steps.recompute:
            recompute_block(step, "full", by_value=True)

    def forward(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        steps, outputs, state = self._steps, [], batch[self._steps.state]
        for k in range(steps.count(batch)):
            now = steps.at(batch, k, state)
            args, kwargs = steps.task.inputs(now)
            outputs.append(self.step(*args, **kwargs))
            state = steps.advance(outputs[-1], now)
        return tuple(outputs)


@dataclass(frozen=True)
class _Made:
    steps: _Steps

    def __call__(self) -> nn.Module:
        return Rollout(self.steps.task.model(), self.steps)


@dataclass(frozen=True)
class _Loss:
    steps: _Steps

    def __call__(self, outputs: tuple[Any, ...], batch: Mapping[str, Any]) -> tuple:
        """Returns the loss and its weight, summed over steps by the steps' weights."""
        total, weight, state = 0.0, 0.0, batch[self.steps.state]
        for k, (output, factor) in enumerate(zip(outputs, self.steps.factors(len(outputs)), strict=True)):
            now = self.steps.at(batch, k, state)
            found, of, *more = self.steps.task.loss(output, now)
            if more:
                raise InputError("rollout: the loss of one step gives extras, which are not added up over steps")
            total, weight = total + factor * found, weight + factor * of
            state = self.steps.advance(output, now)
        return total, weight


@dataclass(frozen=True)
class _Growing:
    """`batch` with the first K steps alone, K by the curriculum."""

    batch: Callable[[int], Any]
    steps: _Steps
    curriculum: tuple[tuple[int, int], ...]

    def __call__(self, step: int) -> dict[str, Any]:
        batch, k = self.batch(step), next(k for start, k in reversed(self.curriculum) if step >= start)
        if batch[self.steps.targets].shape[1] < k:
            raise InputError(
                f"rollout: the curriculum asks for {k} steps from step {step} on, and '{self.steps.targets}' has "
                f"{batch[self.steps.targets].shape[1]}"
            )
        cut = {name: batch[name][:, :k] for name in (self.steps.targets, *self.steps.forcings)}
        return {**batch, **cut}


def rollout(
    task: Task, *, state: str = "x", targets: str = "y", forcings: Sequence[str] = (),
    weights: Sequence[float] = (), recompute: bool = True, advance: Callable[[Any, Any], Any] = _itself,
    curriculum: Mapping[int, int] | None = None,
) -> Task:  # fmt: skip
    """Returns a task of K steps made from a one-step task; its batches hold the targets of all K steps.

    task        of one step: its `inputs` and `loss` are called with the batch of each step
    state       the batch's entry that a step starts from, (B, ...); from the second step on, what `advance` gives
    targets     what outputs are compared with, (B, K, ...): their number is K
    forcings    entries (B, K, ...) that each step has its own of
    weights     of the steps' losses, at least K; () for all alike
    recompute   keep each step's input alone, and compute the step again in backward
    advance     (output, batch of this step) -> the next state
    curriculum  {training step from which on: K}, with 0 among them, for tasks with `batch`

    The model gives a tuple of K outputs; `predict_to` takes `select=lambda outputs: torch.stack(outputs, 1)`.
    Raises `InputError` for a task with `metrics`, and a curriculum that cannot be followed; the task does where a batch
    is no mapping with these entries, or a step's loss has extras.
    """
    asked = dict(locals())
    if not isinstance(task, Task):
        raise InputError(f"rollout: a Task of one step is wanted, got {type(task).__name__}")
    if task.metrics is not None:
        raise InputError("rollout: metrics of one step are not those of many; give them to the task that comes out")
    steps = _Steps(task, state, targets, tuple(forcings), tuple(map(float, weights)), advance, recompute, asked)
    batch = task.batch
    if curriculum is not None:
        if batch is None:
            raise InputError(
                "rollout: a source is not told which training step it is read for, so a curriculum needs Task.batch; "
                "with a source, train each K as a run that goes on from the last one's checkpoint"
            )
        growing = tuple(sorted(curriculum.items()))
        if not growing or growing[0][0] != 0 or any(k < 1 for _, k in growing):
            raise InputError(f"rollout: a curriculum is {{training step: K}} from step 0 on, got {dict(curriculum)!r}")
        batch = _Growing(batch, steps, growing)
    return replace(task, model=_Made(steps), loss=_Loss(steps), batch=batch, inputs=_whole, name=f"{task.name} rollout")


def _whole(batch: Any) -> tuple[tuple, dict]:
    if not isinstance(batch, Mapping):
        raise InputError(f"rollout: batches are mappings with named entries, got {type(batch).__name__}")
    return (batch,), {}


__all__ = ["Rollout", "rollout"]
