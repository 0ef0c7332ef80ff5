"""Trace an optimizer on small tensors: what it keeps and does for each element."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwise.errors import InputError
from shardwise.memory.live import LiveBytes
from shardwise.rehearsal.op_counts import Count
from shardwise.simulator.counted import StepTrace, Update
from shardwise.step.task_optimizer import construct, named_groups, needs_closure
from shardwise.task import Task


def update_of(task: Task, at_once: bool = False) -> Update:
    """Returns what the task's optimizer keeps and does for one tensor, measured on small ones.

    at_once   as torch's optimizers do on a GPU unless told otherwise: each op on all tensors, which keeps its results
              for all of them
    """
    parameter = nn.Parameter(torch.zeros(64, 64))
    others = [nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64, 64))]
    optimizer = construct(task.optimizer, [parameter, *others])
    if needs_closure(optimizer):
        raise InputError(
            f"{type(optimizer).__name__} asks for a forward and backward as often as it likes in one step (a closure), "
            "which no forecast knows: plan with an optimizer that takes one, or train with dp_replicate, which runs it"
        )
    for group in optimizer.param_groups if at_once else ():
        if not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = True
    for param in (parameter, *others):
        param.grad = torch.ones_like(param)
    optimizer.step()  # the first one makes the state, which is no work of each step
    state = optimizer.state.get(parameter, {})
    kept = sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()) / parameter.numel()
    others[0].grad = None  # an optimizer passes over what has no gradient: two are updated, then one
    bytes_of_two, _ = _updated(optimizer, [parameter, others[1]])
    others[1].grad = None
    bytes_of_one, seen = _updated(optimizer, [parameter])
    work = tuple((name, shape[0] / parameter.numel()) for name, shape, _ in seen.order if len(shape) == 1)
    more = max(0.0, (bytes_of_two - bytes_of_one) / parameter.nbytes)
    return Update(kept, work, seen.calls, bytes_of_one / parameter.nbytes, more)


def _updated(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> tuple[int, StepTrace]:
    """Returns (bytes that live only while the optimizer updates these, counts of its operations)."""
    seen, live = StepTrace(1), LiveBytes()
    states = [value for param in parameters for value in optimizer.state.get(param, {}).values()]
    tensors = (*parameters, *(param.grad for param in parameters), *states)
    live.count(value for value in tensors if isinstance(value, torch.Tensor))
    rests = live.now
    with live, Count(seen):
        optimizer.step()
    return live.peak - rests, seen


def in_order(trained: Iterable[nn.Parameter]) -> dict[int, int]:
    """Returns the elements of each trained parameter by its place, in the order in which an optimizer has them."""
    params = [*trained]
    places = {id(param): place for place, param in enumerate(params)}
    return {places[id(param)]: param.numel() for group in named_groups(params) for param in group["params"]}
