"""One module of the ranks' model that computes wrongly, on purpose: the place that a locator must name is known.

forward   its output is off: "scaled", or "turned" (the samples in another order)
backward  its output is right, and the gradient of its arguments is off: "scaled"
weight    its output and its arguments' gradient are right, and the gradient of one of its parameters is off
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise.proof import rank as proof_rank
from shardwise.task_names import resolve_task

KINDS = ("forward", "turned", "backward", "weight")


@dataclass(frozen=True)
class Spoil:
    """What is wrong: `kind` of KINDS, in the module at `path`, on `ranks` (None: all)."""

    task: str
    plan: str
    path: str
    kind: str
    ranks: tuple[int, ...] | None = None


class _Scaled(torch.autograd.Function):
    """The same values, whose gradient is scaled on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 1.25


def _each(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    return tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, values
    )


def _spoiled(module: nn.Module, kind: str) -> Callable:
    before = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # the look before the first step
            return before(*args, **kwargs)
        if kind == "backward":
            return before(*_each(lambda x: _Scaled.apply(x) if x.requires_grad else x, args), **kwargs)
        output = before(*args, **kwargs)
        if kind == "forward":
            return _each(lambda x: x * 1.25, output)
        if kind == "turned":
            return _each(lambda x: x.flip(0), output)
        param = next(module.parameters(recurse=False))
        return _each(lambda x: x + 0 * x * (param - param.detach()).sum() + (param - param.detach()).sum(), output)

    return forward


@contextmanager
def spoiled(spoil: Spoil) -> Iterator[None]:
    """On a rank: engines that a proof makes have the module spoiled, inside."""
    before = proof_rank._engine

    def engine(*args: Any) -> Any:
        made = before(*args)
        module = made[0].module.get_submodule(spoil.path)
        module.__dict__["forward"] = _spoiled(module, spoil.kind)
        return made

    proof_rank._engine = engine
    try:
        yield
    finally:
        proof_rank._engine = before


def run_spoiled(spoil: Spoil, function: Callable, args: tuple) -> Any:
    """On a rank: the function's result with the module spoiled."""
    import torch.distributed as dist

    if spoil.ranks is not None and dist.get_rank() not in spoil.ranks:
        return function(*args)
    with spoiled(spoil):
        return function(*args)


class SpoiledPool:
    """A pool whose ranks have a spoiled module while they run."""

    def __init__(self, pool: Any, spoil: Spoil):
        self.pool, self.spoil = pool, spoil

    def run(self, function: Callable, world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """`RankPool.run` with the module spoiled."""
        return self.pool.run(run_spoiled, world_size, self.spoil, function, args, timeout_s=timeout_s)


def drawn(tasks: list[str], plans: list[str], many: int, seed: int) -> list[Spoil]:
    """So many modules to be spoiled: task, plan, module and kind, drawn by a seed."""
    draw, found = random.Random(seed), []
    while len(found) < many:
        task, plan, kind = draw.choice(tasks), draw.choice(plans), draw.choice(KINDS)
        module = resolve_task(task).model()
        paths = [path for path, child in module.named_modules() if path and _fits(child, kind)]
        if paths:
            found.append(Spoil(task, plan, draw.choice(paths), kind))
    return found


def _fits(child: nn.Module, kind: str) -> bool:
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        return False
    if kind == "weight":
        return next(child.parameters(recurse=False), None) is not None
    return kind != "backward" or not isinstance(child, nn.Embedding)
