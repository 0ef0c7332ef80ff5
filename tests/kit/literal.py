"""Training as a person would write it: a plain loop in float64 that takes nothing from the package but `Task`.

The proof's own oracle shares code with the engine (see docs/verify.md). This one shares none: the module is built by
calling its class, samples are sliced by hand, gradients are divided and clipped by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.task import Task

LEAST_EPS = 1e-4  # as the proof raises it, on both sides


@dataclass
class Run:
    """What happened, after each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


def built(task: Task, seed: int = 0) -> nn.Module:
    """The module, constructed as it is written, in float64."""
    torch.manual_seed(seed)
    return task.model().double().train()


def initial_values(task: Task, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter and buffer by name."""
    module = built(task, seed)
    return {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def train(task: Task, *, steps: int = 2, micro_batches: int = 1, clip_norm: float | None = None) -> Run:
    """A few steps on whole batches."""
    module = built(task)
    trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    matrices = [param for _, param in trained if param.dim() >= 2]
    others = [param for _, param in trained if param.dim() < 2]
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"name": "decay", "params": matrices})
    if others:
        groups.append({"name": "no_decay", "params": others, "weight_decay": 0.0})
    optimizer = task.optimizer(groups)
    for group in optimizer.param_groups:
        if "eps" in group:
            group["eps"] = max(group["eps"], LEAST_EPS)
    run = Run()
    for step in range(steps):
        batch = wide(task.batch(step))
        optimizer.zero_grad()
        total, weight = 0.0, 0.0
        samples = count(batch)
        for number in range(micro_batches):
            low, high = samples * number // micro_batches, samples * (number + 1) // micro_batches
            part = cut(batch, low, high)
            args, kwargs = task.inputs(part)
            summed, own, *extras = task.loss(module(*args, **kwargs), part)
            for extra in (extras[0] if extras else {}).values():
                if isinstance(extra, tuple):
                    summed = summed + extra[0] * (float(own) / float(extra[1]))
                else:
                    summed = summed + extra
            summed.backward()
            total, weight = total + summed.item(), weight + float(own)
        reached = [param for _, param in trained if param.grad is not None]
        for param in reached:
            param.grad /= weight
        if clip_norm is not None:
            norm = torch.cat([param.grad.flatten() for param in reached]).norm()
            for param in reached:
                param.grad *= min(1.0, clip_norm / (float(norm) + 1e-6))
        run.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in trained})
        optimizer.step()
        run.losses.append(total / weight)
        run.parameters.append({name: param.detach().clone() for name, param in module.named_parameters()})
        run.buffers.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return run


def wide(batch: Any) -> Any:
    """Floating-point tensors of a dict or tuple in float64."""
    if isinstance(batch, dict):
        return {key: wide(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(wide(value) for value in batch)
    return batch.double() if batch.is_floating_point() else batch


def count(batch: Any) -> int:
    """Samples."""
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def cut(batch: Any, low: int, high: int) -> Any:
    """Samples [low, high)."""
    if isinstance(batch, dict):
        return {key: value[low:high] for key, value in batch.items()}
    return tuple(value[low:high] for value in batch)
