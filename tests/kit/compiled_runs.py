"""Runs with compiled blocks, and what came of them: for tests of compiled plans, and for bugs planted in those."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise import Plan, Task, parallelize
from shardwise.parallel.tensor import compiled

STEPS = 2
Curve = tuple[list[float], float, dict[str, Tensor], dict[str, Tensor]]


class Programs:
    """Every compiled forward that is made, and the compiler that is used."""

    def __init__(self, backend: str):
        self.made: list[Any] = []
        self.backend = backend

    def __enter__(self) -> Programs:
        self.compile, self.kind = torch.compile, compiled._Compiled
        torch.compile = partial(self.compile, backend=self.backend)  # type: ignore[assignment]
        compiled._Compiled = self.keep  # type: ignore[assignment, misc]
        torch._dynamo.reset()
        return self

    def keep(self, *args: Any) -> Any:
        self.made.append(self.kind(*args))
        return self.made[-1]

    def __exit__(self, *error: object) -> None:
        torch.compile, compiled._Compiled = self.compile, self.kind  # type: ignore[misc]
        torch._dynamo.reset()


def curve(make: Callable[[], Task], plan: str, backend: str) -> tuple[Curve, list[int], list[str]]:
    """Losses, a loss in evaluation, the first gradients and the last weights; programs of each block; notices."""
    with Programs(backend) as programs:
        made = make()
        engine = parallelize(made, Plan.parse(plan).with_(precision="fp64"), device="cpu", seed=1, clip_norm=0.5)
        losses, gradients = [], {}
        for step in range(STEPS):
            losses.append(engine.step(made.batch(step)).loss)
            if step == 0:
                gradients = {name: g.clone() for name, g in engine.full_gradients() if g is not None}
        total, weight = engine.evaluate([made.batch(9)])
        weights = {name: tensor.clone() for name, tensor in engine.full_parameters()}
        counts = [len(one.programs) for one in programs.made]
        return (losses, total / weight, gradients, weights), counts, engine.notices
