"""K steps of a forecast trained together: against a loop by hand, on tiles, and what a step keeps."""

from __future__ import annotations

from typing import Any

import domain_tasks
import numpy as np
import pytest
import torch
from torch import nn

from shardwise import Domain, InputError, Task, parallelize, rollout, verify
from shardwise.data import ArraySource, own_tile
from shardwise.layout import Plan
from shardwise.memory.live import LiveBytes

DOUBLE = torch.float64


class Forced(nn.Module):
    """A step of two fields, with a known third one beside them; its batch norm and dropout look at each step once."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop, self.second = nn.Dropout(0.1), nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x: torch.Tensor, sun: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.drop(self.norm(self.first(torch.cat([x, sun], 1))).tanh()))


def _batches(steps: int, rows: int = 11, columns: int = 13, samples: int = 2) -> Any:
    def batch(step: int) -> dict:
        draws = torch.Generator().manual_seed(step)
        shapes = {"x": (2,), "y": (steps, 2), "sun": (steps, 1)}
        return {name: torch.randn(samples, *shape, rows, columns, generator=draws) for name, shape in shapes.items()}

    return batch


def _one_step(steps: int, **more: Any) -> Task:
    return domain_tasks._task(Forced, _batches(steps), domain_tasks._area_weighted, **more).with_(
        inputs=lambda batch: ((batch["x"], batch["sun"]), {})
    )


def _rolled(steps: int, **more: Any) -> Task:
    return rollout(_one_step(steps), forcings=["sun"], weights=[0.8**k for k in range(steps)], **more)


def k1() -> Task:
    return _rolled(1)


def k4() -> Task:
    return _rolled(4)


def k8() -> Task:
    return _rolled(8)


def grown() -> Task:
    """One step, then three, of a forecast around the globe."""
    globe = Domain((-2, -1), ("lat", "lon"), {"lon": "periodic"})
    return rollout(_one_step(3, spatial=globe), forcings=["sun"], curriculum={0: 1, 1: 3})


@pytest.mark.parametrize(
    ("task", "plan"),
    [("k1", "domain=2"), ("k4", "dp_shard=2,zero=3"),
     ("k4", "domain=2,dp_replicate=2,accumulate=2"), ("k4", "domain=2,zero=3,remat=full"), ("grown", "domain=1x2")],
)  # fmt: skip
def test_steps_on_tiles_equal_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"test_rollout:{task}", plan, pool=pool, steps=3 if task == "grown" else 2)
    assert found.parity, found.text()


@pytest.mark.long
@pytest.mark.parametrize("plan", ["accumulate=2", "domain=2", "domain=1x2", "domain=2x2"])
@pytest.mark.parametrize("task", ["k1", "k4", "k8"])
def test_steps_on_every_number_of_tiles(pool, task: str, plan: str) -> None:
    found = verify(f"test_rollout:{task}", plan, pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize("recompute", [True, False])
def test_steps_are_those_of_a_loop_by_hand(recompute: bool) -> None:
    """Loss, gradients, running statistics and what the forcings have: no gradient."""
    task, batch = _rolled(3, recompute=recompute), _batches(3)(0)
    torch.manual_seed(0)
    module = task.model().double()
    own = Forced().double()
    own.load_state_dict(module.step.state_dict())
    own.drop.p = module.step.drop.p = 0.0
    batch = {name: value.double() for name, value in batch.items()}
    batch["sun"].requires_grad_()
    total, weight = task.loss(module(*task.inputs(batch)[0]), batch)
    total.backward()
    x, expected, counted = batch["x"], 0.0, 0.0
    for k in range(3):
        x = own(x, batch["sun"][:, k].detach())
        found, of = domain_tasks._area_weighted(x, {"y": batch["y"][:, k]})
        expected, counted = expected + 0.8**k * found, counted + 0.8**k * of
    expected.backward()
    torch.testing.assert_close((total, weight), (expected, counted), rtol=1e-13, atol=1e-13)
    assert batch["sun"].grad is None and int(module.step.norm.num_batches_tracked) == 3
    for (_, mine), (_, theirs) in zip(module.step.named_parameters(), own.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for (_, mine), (_, theirs) in zip(module.step.named_buffers(), own.named_buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_the_next_state_is_what_advance_makes_of_an_output() -> None:
    task = rollout(
        _one_step(2), forcings=["sun"], advance=lambda output, batch: batch["x"] + 0.5 * output.relu(), recompute=False
    )
    module, batch = task.model().eval(), _batches(2)(0)
    first, second = module(batch)
    torch.testing.assert_close(second, module.step(batch["x"] + 0.5 * first.relu(), batch["sun"][:, 1]))


def _wide(steps: int, recompute: bool = True) -> Task:
    def inputs(batch: dict) -> tuple:
        return (batch["x"],), {}

    fields = {"x": np.ones((1, 2, 48, 64), "f"), "y": np.ones((1, steps, 2, 48, 64), "f")}
    source = ArraySource(fields, global_shape=(48, 64))

    def loss(output: torch.Tensor, batch: dict) -> tuple:
        return (output - batch["y"]).square().sum(), float(len(output))

    return rollout(Task(model=lambda: domain_tasks.UNet("group", 8, 2, 2), data=source, inputs=inputs, loss=loss),
                   recompute=recompute)  # fmt: skip


def _peak(steps: int, plan: str) -> int:
    """Live bytes at the peak of a step, above what lies there before it but for this rank's own tile of the batch."""
    task = _wide(steps)
    engine = parallelize(task, plan, check_loss=False)
    mine: Any = own_tile(task.data, engine)
    engine.step(mine.read([0]))
    with LiveBytes(settle=True) as live:
        engine.step(mine.read([0]))
        peak = live.peak
    engine.close()
    return peak


@pytest.mark.parametrize(
    "plan", ["accumulate=1", *(pytest.param(plan, marks=pytest.mark.long) for plan in ("domain=2", "domain=2x2"))]
)
def test_eight_steps_keep_little_more_than_one(pool, plan: str) -> None:
    """Recomputed by step: 1.25 times the peak of one step, and the states of the others."""
    ranks = Plan.parse(plan).world_size
    one, eight = (max(pool.run(_peak, ranks, steps, plan)) for steps in (1, 8))
    states = 7 * 2 * 48 * 64 * 4 // ranks
    assert eight <= 1.25 * one + states, (one, eight, states)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: rollout(_one_step(2), curriculum={5: 1}), "from step 0 on"),
        (lambda: rollout(_one_step(2), forcings=["moon"]).model()(_batches(2)(0)), "has no moon; it has x, y, sun"),
        (lambda: rollout(_one_step(2), weights=[1.0]).model()(_batches(2)(0)), "1 weights for 2 steps"),
        (lambda: rollout(_one_step(2), curriculum={0: 3}).batch(0), "asks for 3 steps from step 0 on, and 'y' has 2"),
        (lambda: rollout(_one_step(2).with_(batch=None, data=[1]), curriculum={0: 1}), "needs Task.batch"),
        (lambda: rollout(_one_step(2)).inputs([1]), "batches are mappings"),
        (lambda: rollout(_one_step(2).with_(metrics=lambda o, b: {})), "metrics of one step"),
    ],
)
def test_what_cannot_be_rolled_out_is_named(made: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()
