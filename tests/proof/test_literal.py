"""Plans against a loop that shares no code with the engine, and what only such a loop can find."""

from __future__ import annotations

from typing import Any

import literal
import pytest
import torch
from mutations.bugs import bug
from mutations.plant import Bug, BuggyPool, planted
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize, verify
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task

BAR = 1e-9
M = "shardwise.models.tasks:"


def run_plan(name: str, plan: str, steps: int, clip_norm: float | None) -> literal.Run:
    """The engine under the plan, from the weights of a plainly built module."""
    task = resolve_task(name)
    values = literal.initial_values(task)
    engine = parallelize(
        task.with_(weights=values.get), f"{plan},precision=fp64", randomness="global", clip_norm=clip_norm, device="cpu"
    )
    for group in engine.optimizer.param_groups:
        if "eps" in group:
            group["eps"] = max(group["eps"], literal.LEAST_EPS)
    run = literal.Run()
    for step in range(steps):
        run.losses.append(engine.step(literal.wide(task.batch(step))).loss)
        run.gradients.append({n: None if g is None else g.clone() for n, g in engine.full_gradients()})
        run.parameters.append({n: p.clone() for n, p in engine.full_parameters()})
        run.buffers.append({n: b.clone() for n, b in engine.full_buffers()})
    return run


def differences(name: str, plan: str, pool: Any, *, steps: int = 2, clip_norm: float | None = None) -> list[str]:
    """What the plan has otherwise than the literal loop."""
    cut = Plan.parse(plan).step_microbatches
    one = literal.train(resolve_task(name), steps=steps, micro_batches=cut, clip_norm=clip_norm)
    many = pool.run(run_plan, Plan.parse(plan).world_size, name, plan, steps, clip_norm, timeout_s=120)[0]
    found = [f"loss {a} {b}" for a, b in zip(many.losses, one.losses, strict=True) if abs(a - b) > BAR * abs(b)]
    for kind in ("gradients", "parameters", "buffers"):
        for step, (ours, theirs) in enumerate(zip(getattr(many, kind), getattr(one, kind), strict=True)):
            assert ours.keys() == theirs.keys()
            floor = max(float(t.abs().max()) for t in theirs.values() if t is not None and t.numel()) if theirs else 1.0
            for key, expected in theirs.items():
                if (expected is None) != (ours[key] is None):
                    found.append(f"{kind} {key} on one side, step {step}")
                elif expected is not None and float((ours[key] - expected).abs().max()) > BAR * floor:
                    found.append(f"{kind} {key}, step {step}")
    return found


@pytest.mark.parametrize(
    ("name", "plan", "clip_norm"),
    [
        (M + "mlp_frozen_unused", "dp_shard=2,zero=1,accumulate=3", None),
        (M + "mlp", "dp_replicate=2", 0.05),
        (M + "unet_batchnorm", "dp_replicate=2", None),
        (M + "decoder_tied", "pp=2,microbatches=2", None),
        ("test_literal:gpt2_without_dropout", "tp=2,dp_shard=2,zero=3", None),
        (M + "moe", "dp_shard=2,ep=2", None),
        ("module_tasks:pairs", "dp_replicate=2", None),
        ("mutations.tasks:ignored_class", "tp=2", 0.1),
    ],
)
def test_a_plan_is_the_literal_loop(name: str, plan: str, clip_norm: float | None, pool: RankPool) -> None:
    assert differences(name, plan, pool, clip_norm=clip_norm) == []


def gpt2_without_dropout() -> Task:
    from shardwise.models import tasks

    task = tasks.gpt2()
    (config,) = task.model.args
    return task.with_(model=lambda: tasks.GPT2(tasks.replace(config, dropout=0.0)))


# --- bugs in what ranks share with the code that the proof's oracle ran once: it has its own now

SHARED = [
    bug("every micro-batch loses its last sample", "step.batching:_slice",
        "leaf[low:high]", "leaf[low : max(low + 1, high - 1)]", M + "mlp", "accumulate=2"),
    bug("weights are taken twice", "step.loss:read_loss",
        'Loss(total.reshape(()), _number(weight, "weight")', 'Loss(total.reshape(()), 2 * _number(weight, "weight")',
        M + "mlp", "dp_replicate=2"),
    bug("no weight decays", "step.task_optimizer:named_groups",
        '{"name": "decay", "params": decay}', '{"name": "decay", "params": decay, "weight_decay": 0.0}', M + "mlp",
        "dp_replicate=2"),
    bug("micro-batches overlap", "layout.dealing:cut",
        "return length * index // pieces,", "return max(0, length * index // pieces - 1),", M + "mlp", "accumulate=2"),
]  # fmt: skip


@pytest.mark.parametrize("one", SHARED, ids=lambda one: one.name)
def test_a_bug_on_both_sides_is_found_by_the_literal_loop_and_by_the_proof(one: Bug, pool: RankPool) -> None:
    buggy = BuggyPool(pool, one)
    assert differences(one.task, one.plan, buggy) and buggy.ran
    with planted(one):  # in this process, where the proof's oracle runs, as in the ranks
        assert not verify(one.task, one.plan, pool=BuggyPool(pool, one)).parity


# --- masks, by their statistics

RATE, ROWS, WIDTH = 0.3, 64, 200


class Masks(nn.Module):
    """Dropout of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.one = nn.Dropout(RATE), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.ones_like(x)) * self.one


def moments(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    """The mean, the mean square, and the mean product of a mask's two halves (equal masks: the square)."""
    low, high = output[:, : WIDTH // 2], output[:, WIDTH // 2 :]
    return output.sum(), output.numel(), {"square": output.square().sum(), "halves": 2 * (low * high).sum()}


def masks() -> Task:
    return Task(model=Masks, loss=moments, batch=lambda step: {"x": torch.zeros(ROWS, WIDTH)},
                inputs=lambda b: ((b["x"],), {}), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0))  # fmt: skip


def mask_moments(plan: str, randomness: str) -> list[tuple[float, ...]]:
    task = masks()
    engine = parallelize(task, plan, randomness=randomness, device="cpu")
    found = []
    for _ in range(3):
        result = engine.step(task.batch(0))
        mean = result.loss - result.extras["square"] - result.extras["halves"]
        found.append((mean, result.extras["square"], result.extras["halves"]))
    return found


@pytest.mark.parametrize("randomness", ["fast", "global"])
def test_masks_are_those_of_dropout(randomness: str, pool: RankPool) -> None:
    found = torch.tensor(pool.run(mask_moments, 2, "dp_replicate=2,accumulate=2", randomness)[0])
    each = 1 / (1 - RATE)  # a kept one
    sigma = (RATE / (1 - RATE) / (ROWS * WIDTH)) ** 0.5
    assert (found[:, 0] - 1).abs().max() < 5 * sigma
    assert (found[:, 1] - each).abs().max() < 5 * sigma * each
    assert (found[:, 2] - 1).abs().max() < 10 * sigma, "halves of a mask are drawn apart"
    assert len(set(found[:, 0].tolist())) == 3, "another mask in each step"
