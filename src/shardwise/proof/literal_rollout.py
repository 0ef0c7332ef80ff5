"""A roll-out, implemented again for the one process: K steps, each with its own targets and forcings.

The batches of a curriculum are cut to length here too, and compared with the task's around each step where a new length
begins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from shardwise.rollouts import _Growing, _Loss, _Made
from shardwise.task import Task


class LiteralRollout(nn.Module):
    """Runs the one-step module once for each target along dim 1, each time from its last result.

    step  the module of one step;  of  the roll-out's settings: its task and names of batch fields
    """

    def __init__(self, step: nn.Module, of: Any):
        super().__init__()
        self.step, self._of = step, of

    def forward(self, batch: Any) -> tuple[Any, ...]:
        """Returns the outputs of all steps."""
        outputs: list[Any] = []
        for k, now in enumerate(_batches(self._of, batch, outputs)):
            args, kwargs = self._of.task.inputs(now)
            outputs.append(self.step(*args, **kwargs))
            assert len(outputs) == k + 1
        return tuple(outputs)


def _batches(of: Any, batch: Any, outputs: Any) -> Any:
    """Yields the batch of each of the K steps; its state is `advance` of the output before, which `outputs` gets."""
    state = batch[of.state]
    for k in range(batch[of.targets].shape[1]):
        now = dict(batch)
        for name in of.forcings:
            now[name] = batch[name][:, k].detach()
        now[of.state], now[of.targets] = state, batch[of.targets][:, k]
        yield now
        state = of.advance(outputs[k], now)


def literal_rollout(task: Task) -> Task:
    """Returns a roll-out task as the one process runs it; any other task unchanged."""
    if not isinstance(task.model, _Made) or not isinstance(task.loss, _Loss):
        return task
    of = SimpleNamespace(**task.model.steps.asked)

    def loss(outputs: tuple[Any, ...], batch: Any) -> tuple:
        total = weight = 0.0
        for k, now in enumerate(_batches(of, batch, outputs)):
            one, count = of.task.loss(outputs[k], now)
            times = of.weights[k] if of.weights else 1.0
            total, weight = total + times * one, weight + times * count
        return total, weight

    grows = task.batch
    batch = (lambda step: _cut(grows, step)) if isinstance(grows, _Growing) else grows
    return task.with_(model=lambda: LiteralRollout(of.task.model(), of), loss=loss, batch=batch)


def _cut(growing: _Growing, step: int) -> dict[str, Any]:
    """Returns the batch of a training step, its targets and forcings cut to the length that the curriculum has then."""
    of, batch = SimpleNamespace(**growing.steps.asked), growing.batch(step)
    length = of.curriculum[max(start for start in of.curriculum if start <= step)]
    return {name: value[:, :length] if name in (of.targets, *of.forcings) else value for name, value in batch.items()}


def unlike_curriculum(task: Task) -> list[str]:
    """Returns [a sentence] for the first step whose batch has another length than the curriculum says; else []."""
    growing = task.batch
    # without a curriculum every training step has the same length
    if not isinstance(growing, _Growing):
        return []
    name = growing.steps.targets
    curriculum = growing.steps.asked["curriculum"]
    for step in sorted({max(0, start + beside) for start in curriculum for beside in (-1, 0, 1)}):
        now, says = growing(step)[name].shape[1], _cut(growing, step)[name].shape[1]
        if now != says:
            return [f"the curriculum gives step {step} {now} steps of '{name}', and says {says}"]
    return []
