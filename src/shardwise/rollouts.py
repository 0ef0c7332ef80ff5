"""`rollout`: a task that runs a one-step model K times, each step on the last one's output, and sums the steps' losses.

    batch      x (B, C, H, W), y (B, K, C, H, W), forcing (B, K, F, H, W)
    step k     the one-step task's `inputs` and `loss` get x_k (B, C, H, W), y[:, k] and forcing[:, k]
    x_{k+1}    advance(output_k, batch_k): by default the output itself
    loss       (sum over k of w_k S_k, sum over k of w_k W_k), of the steps' sums S_k and weights W_k

With `recompute` a step keeps only its input and is recomputed in backward, so memory holds K states and the activations
of one step. Forcings are known fields that are not forecast (solar elevation, boundary temperatures); each step gets
its own, without gradient.
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
    """The arguments of `rollout`, which split a batch of K steps into batches of one step."""

    task: Task  # of one step
    state: str  # the batch's entry from which the first step starts
    targets: str  # the batch's entry with the targets of K steps
    forcings: tuple[str, ...]  # entries of which each step gets its own part
    weights: tuple[float, ...]  # of the steps' losses; () for 1 each
    advance: Callable[[Any, Any], Any]  # (output, the step's batch) -> the next step's state
    recompute: bool  # whether each step is recomputed in backward
    asked: Mapping[str, Any]  # the arguments of `rollout` by name, from which a proof makes the task again

    def count(self, batch: Mapping[str, Any]) -> int:
        """Returns K, the number of steps in a batch; `InputError` if its entries or the weights do not fit."""
        missing = [name for name in (self.state, self.targets, *self.forcings) if name not in batch]
        if missing:
            raise InputError(f"rollout: the batch has no {', '.join(missing)}; it has {', '.join(batch)}")
        steps, whole = batch[self.targets].shape[1], tuple(batch[self.targets].shape)
        for name in self.forcings:
            if batch[name].dim() < 2 or batch[name].shape[1] < steps:
                raise InputError(
                    f"rollout: '{name}' of shape {tuple(batch[name].shape)} is read at each of {steps} steps along "
                    f"dim 1, those of '{self.targets}' {whole}"
                )
        if self.weights and len(self.weights) < steps:
            raise InputError(f"rollout: {len(self.weights)} weights for {steps} steps of '{self.targets}' {whole}")
        return steps

    def factors(self, count: int) -> tuple[float, ...]:
        """Returns the weights of the losses of `count` steps."""
        return self.weights[:count] or (1.0,) * count

    def at(self, batch: Mapping[str, Any], k: int, state: Any) -> dict[str, Any]:
        """Returns the one-step task's batch of step k, which starts from the tensor `state`."""
        forced = {name: batch[name].select(1, k).detach() for name in self.forcings}
        return {**batch, **forced, self.state: state, self.targets: batch[self.targets].select(1, k)}


class Rollout(nn.Module):
    """A module that runs the one-step module K times: batch -> tuple of the K outputs."""

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
        """Returns (loss, weight), each summed over steps with the steps' weights."""
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
    """A function for `Task.batch` that gives the first K steps of `batch`, with K by the curriculum.

    curriculum   (training step from which on, K), ascending
    """

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
    """Returns a task of K steps made from a one-step task, whose batches are mappings with the targets of K steps.

    task        of one step; its `inputs` and `loss` are called with the batch of each step
    state       name of the entry (B, ...) from which the first step starts; later steps get what `advance` returns
    targets     name of the entry (B, K, ...) with each step's targets, which determines K
    forcings    names of entries (B, at least K, ...) of which step k gets [:, k]
    weights     weights of the steps' losses, at least K; () for 1 each
    recompute   Whether a step keeps only its input and is recomputed in backward
    advance     (output, batch of this step) -> the next state; by default the output
    curriculum  {training step from which on: K}, with a key 0, for tasks with `batch`; None: all steps of a batch

    The model returns a tuple of K outputs; `predict_to` takes `select=lambda outputs: torch.stack(outputs, 1)`.
    Raises `InputError` for a task with `metrics`, and a curriculum that cannot be followed. The new task raises it for
    a batch without these entries, and for a loss with extras.
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
