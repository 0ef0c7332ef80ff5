"""`gradients=as_made`: weights are updated within backward, and not one bit of a run changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from mutations.tasks import adafactor
from torch import Tensor, nn

from shardwise import RefusedPlan, RunError, Task, parallelize
from shardwise.comm.buckets import small_buckets
from shardwise.digest import digest
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.tiers import StateTiers, places, subgroups

STEPS = 3
LAYOUTS = {
    "dp_replicate=1": 1, "dp_replicate=2": 2, "dp_shard=2,zero=1": 2, "dp_shard=2,zero=2": 2, "dp_shard=2,zero=3": 2,
    "tp=2": 2, "cp=2,zero=3": 2, "dp_replicate=2,dp_shard=2,zero=2": 4, "dp_replicate=2,dp_shard=2,zero=3": 4,
    "tp=2,dp_shard=2,zero=1": 4,
}  # fmt: skip
SETTINGS = ["", "precision=bf16", "remat=full", "offload=optimizer:disk", "optimizer_state=8bit",
            "precision=bf16,reduce_dtype=bf16,offload=optimizer:disk:0.5"]  # fmt: skip


class Branches(nn.Module):
    """Uses some of its layers alone, others twice, one of them by a tied weight; one layer has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.empty = nn.Linear(16, 0)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        skipped = set(range(4, 8)) if int(step[0]) % 2 else {2}  # all samples' steps are one
        for place, layer in enumerate(self.layers):
            x = x if place in skipped else torch.tanh(layer(x))
        return self.head(self.layers[1](x)) + self.empty(x).sum()


def branches() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)), torch.full((8,), step)

    return Task(
        name="branches", model=Branches, batch=batch, inputs=lambda pair: (pair, {}),
        loss=lambda output, pair: (output.square().sum(), len(output)),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip


def made(name: str | Callable[[], Task], plan: str, steps: int = STEPS) -> dict[str, Any]:
    """Take steps in small buckets and sub-groups; returns losses, norms, digests, and updates within backward."""
    forced, size, update = places.has_own_memory, subgroups.SUBGROUP_BYTES, StateTiers.update
    early, held = [0], [0]

    def noted(tier: StateTiers, *args: Any, **options: Any) -> Any:
        early[0] += bool(torch._C._current_graph_task_id() != -1)
        return update(tier, *args, **options)

    places.has_own_memory, subgroups.SUBGROUP_BYTES, StateTiers.update = lambda device: True, 20_000, noted
    try:
        task = getattr(tasks, name)() if isinstance(name, str) else name()
        with small_buckets():
            engine = parallelize(task, plan)
        assert task.batch is not None
        results = [engine.step(task.batch(step)) for step in range(steps)]
        return {
            "losses": [result.loss for result in results], "norms": [result.grad_norm for result in results],
            "weights": {key: digest(value) for key, value in engine.full_parameters()},
            "used": {key: digest(value) for key, value in engine.used_parameters()},
            "state": {
                f"{key}/{part}": digest(value)
                for key, kept in engine.full_optimizer_state()
                for part, value in kept.items()
                if isinstance(value, torch.Tensor)
            },
            "early": early[0], "gradients": engine.memory()["gradients"], "held": held[0],
        }  # fmt: skip
    finally:
        places.has_own_memory, subgroups.SUBGROUP_BYTES, StateTiers.update = forced, size, update


def assert_same(name: str | Callable[[], Task], plan: str, ranks: int, pool: RankPool) -> None:
    together, as_made = (pool.run(made, ranks, name, text) for text in (plan, f"{plan},gradients=as_made"))
    for one, other in zip(together, as_made, strict=True):
        for what in ("losses", "norms", "weights", "used", "state"):
            assert one[what] == other[what], f"{what} differ"
        assert not one["early"] and other["early"] >= STEPS
        assert one["gradients"] and other["gradients"] < one["gradients"]


QUICK = [
    ("dp_replicate=1", "offload=optimizer:disk"), ("dp_replicate=2", "precision=bf16"),
    ("dp_shard=2,zero=1", "remat=full"), ("dp_shard=2,zero=2", ""), ("dp_shard=2,zero=3", "offload=optimizer:disk"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "setting"), QUICK)
def test_same_bits(layout: str, setting: str, pool: RankPool) -> None:
    assert_same("decoder", ",".join(filter(None, [layout, setting])), LAYOUTS[layout], pool)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "setting"), [case for case in product(LAYOUTS, SETTINGS) if case not in QUICK])
def test_same_bits_in_full(layout: str, setting: str, pool: RankPool) -> None:
    assert_same("decoder", ",".join(filter(None, [layout, setting])), LAYOUTS[layout], pool)


@pytest.mark.parametrize("layout", ["dp_replicate=1", "dp_shard=2,zero=3,wrap=layers.1|layers.6"])
def test_layers_left_out_used_twice_and_tied(layout: str, pool: RankPool) -> None:
    """Of some steps whole sub-groups are left out, whose state lies on the disk between others'."""
    assert_same(branches, f"{layout},offload=optimizer:disk", Plan.parse(layout).world_size, pool)


def test_left_out_layers_with_gradients_held(pool: RankPool) -> None:
    plain, on_disk = (
        pool.run(made, 1, branches, f"dp_replicate=1{more}", 4)[0] for more in ("", ",offload=optimizer:disk")
    )
    assert plain["weights"] == on_disk["weights"] and plain["state"] == on_disk["state"]


class Bursts(nn.Module):
    """Its loss is finite, and in the second step the gradient of its last layer is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers(x[:, :8])
        return made + torch.sqrt(made.abs() * 0 + (x[:, 8:] < 0))  # of 0 where x is positive, whose slope is infinite


def bursts() -> Task:
    def batch(step: int) -> Tensor:
        return torch.randn(4, 9, generator=torch.Generator().manual_seed(step)).index_fill(
            1, torch.tensor([8]), 2.0 * (step == 1) - 1
        )

    return Task(
        name="bursts", model=Bursts, batch=batch, inputs=lambda x: ((x,), {}),
        loss=lambda output, x: (output.square().sum() + output.sum(), len(output)),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip


def burst(plan: str) -> list[str]:
    """Returns the errors of a step whose norm is not finite, and of the one after it."""
    task, told = bursts(), []
    engine = parallelize(task, plan, check_loss=False)
    assert task.batch is not None
    engine.step(task.batch(0))
    for step in (1, 2):
        try:
            engine.step(task.batch(step))
            told.append("")
        except RunError as error:
            told.append(str(error))
    return told


@pytest.mark.parametrize("plan", ["offload=optimizer:disk", "dp_replicate=2", "dp_shard=2,zero=3"])
def test_a_norm_that_is_not_finite_ends_the_run(plan: str, pool: RankPool) -> None:
    """Weights have moved by then: no step and no checkpoint of them follows."""
    for first, second in pool.run(burst, LAYOUTS.get(plan, 1), f"{plan},gradients=as_made"):
        assert "gradient norm nan is not finite in step 2" in first
        assert "weights and the optimizer's state belong to different steps" in second


def refused(name: str | Callable[[], Task], plan: str, **options: Any) -> str:
    task = getattr(tasks, name)() if isinstance(name, str) else name()
    try:
        parallelize(task, plan, **options)
    except RefusedPlan as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "plan", "options", "words"),
    [
        ("mlp", "", {"clip_norm": 1.0}, "clip_norm looks at the norm of all gradients"),
        ("mlp", "", {"on_nonfinite": "skip"}, "looks at the norm of all gradients"),
        (adafactor, "dp_shard=2,zero=1", {}, "updates whole tensors on their owners"),
    ],
)
def test_what_needs_all_gradients_first(name: Any, plan: str, options: Any, words: str, pool: RankPool) -> None:
    text = ",".join(filter(None, [plan, "gradients=as_made"]))
    for told in pool.run(partial(refused, name, text, **options), 2 if plan else 1):
        assert told.startswith("gradients=as_made: ") and words in told and told.endswith("leave gradients out")


def prepared() -> str:
    import shardwise

    model = nn.Linear(7, 5)
    try:
        shardwise.prepare(model, torch.optim.SGD(model.parameters()), [], plan="gradients=as_made")
    except RefusedPlan as error:
        return str(error)
    return ""


def test_a_script_reads_gradients_before_its_step(pool: RankPool) -> None:
    assert "gradients=as_made in prepare" in pool.run(prepared, 1)[0]
