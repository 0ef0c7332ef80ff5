"""Averages, fp16's scale and compiled blocks against references of their own; and bugs planted in each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mutations.bugs import bug
from mutations.plant import Bug, BuggyPool
from torch import Tensor

from shardwise import Task, parallelize
from shardwise.engine.ema import Ema
from shardwise.errors import RunError
from shardwise.models import tasks
from shardwise.ranks import RankPool

# --- averages: e <- 0.9 e + 0.1 w, by hand

DECAY, STEPS = 0.9, 3


def sgd(groups: list[dict], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr)


def plain() -> Task:
    return tasks.mlp().with_(optimizer=partial(sgd, lr=0.5))


def averaged(plan: str) -> dict[str, Any]:
    """Weights after each step, the average as it is applied, losses under both, and the weights afterwards."""
    task = plain()
    engine = parallelize(task, f"{plan},precision=fp64", device="cpu")
    ema = Ema(engine, DECAY)

    def weights() -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in engine.full_parameters()}

    def loss() -> float:
        total, weight = engine.evaluate([task.batch(7)])
        return total / weight

    trail = [weights()]
    for step in range(STEPS):
        engine.step(task.batch(step))
        ema.update()
        trail.append(weights())
    with ema.applied():
        inside = weights(), {n: v.detach().clone() for n, v in engine.used_parameters()}, loss()
    return {"trail": trail, "inside": inside, "outside": (weights(), loss())}


def wrong_averages(pool: Any, plan: str) -> list[str]:
    """What is not as a loop over the weights has it."""
    found = pool.run(averaged, 2, plan)
    wrong = []
    for rank, one in enumerate(found):
        trail, (applied, used, loss), (after, loss_after) = one["trail"], one["inside"], one["outside"]
        for name, start in trail[0].items():
            average = start
            for weights in trail[1:]:
                average = DECAY * average + (1 - DECAY) * weights[name]
            wrong += [f"{name} on {rank}"] * (not torch.allclose(applied[name], average, rtol=1e-12))
            wrong += [f"used {name} on {rank}"] * (not torch.allclose(used[name], average, rtol=1e-12))
            wrong += [f"{name} afterwards on {rank}"] * (not torch.equal(after[name], trail[-1][name]))
        module = plain().model().double()
        module.load_state_dict(dict(applied))
        features, labels = plain().batch(7)
        expected = torch.nn.functional.cross_entropy(module(features.double()), labels).item()
        wrong += [f"loss {loss} {expected}"] * (abs(loss - expected) > 1e-12) + ["same loss"] * (loss == loss_after)
    return wrong


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3"])
def test_averages_are_those_of_a_loop(plan: str, pool: RankPool) -> None:
    assert wrong_averages(pool, plan) == []


AVERAGES = [
    bug("the average follows the last weights", "engine.ema:Ema.update", "1 - self.decay", "self.decay", "", ""),
    bug("the average begins at zero", "engine.ema:Ema.__init__", "master.detach().clone()", "master.detach() * 0", "",
        ""),
    bug("one rank does not average", "engine.ema:Ema.update", "zip(averages, masters, strict=True)", "()", "", "",
        (1,)),
    bug("the average is not published", "engine.ema:Ema._swap", ".technique.publish()", ".technique", "", ""),
    bug("weights do not come back", "engine.ema:Ema._swap", "average.copy_(kept)", "kept", "", ""),
]  # fmt: skip


@pytest.mark.parametrize("one", AVERAGES, ids=lambda one: one.name)
def test_a_bug_in_averages_is_found(one: Bug, pool: RankPool) -> None:
    buggy = BuggyPool(pool, one)
    assert wrong_averages(buggy, "dp_shard=2,zero=1") and buggy.ran


# --- fp16: the loss is scaled, gradients are divided again; plain SGD would show it


def movement(plan: str) -> tuple[dict[str, Tensor], list[float], float]:
    """How far each weight moved in three steps of SGD, gradient norms, and the loss scale at the end."""
    task = plain()
    engine = parallelize(task, plan, device="cpu")
    start = {name: value.detach().clone() for name, value in engine.full_parameters()}
    results = [engine.step(task.batch(step)) for step in range(STEPS)]
    assert not any(result.skipped for result in results)
    moved = {name: value.detach() - start[name] for name, value in engine.full_parameters()}
    scale = engine.state.scale
    return moved, [result.grad_norm for result in results], scale.value if scale is not None else 1.0


def far_from_fp32(pool: Any, plan: str) -> list[str]:
    moved, norms, scale = pool.run(movement, 2, f"{plan},precision=fp16")[0]
    wanted, wide, _ = movement("accumulate=1")
    found = [f"norm {a} {b}" for a, b in zip(norms, wide, strict=True) if abs(a - b) > 0.02 * b]
    for name, expected in wanted.items():
        if float((moved[name] - expected).abs().max()) > 0.05 * float(expected.abs().max()):
            found.append(name)
    assert scale >= 2.0**8, "a scale that does nothing would hide everything"
    return found


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2"])
def test_fp16_moves_weights_as_fp32_does(plan: str, pool: RankPool) -> None:
    assert far_from_fp32(pool, plan) == []


def test_a_scale_that_is_not_divided_out_is_found(pool: RankPool) -> None:
    one = bug("the scale stays in the gradient", "step.normalise:divisor_of",
              "state.scale.value if state.scale is not None else 1.0", "1.0", "", "")  # fmt: skip
    buggy = BuggyPool(pool, one)
    with pytest.raises(RunError, match="is not finite"):  # a step of 2^12 times its length
        far_from_fp32(buggy, "dp_replicate=2")
    assert buggy.ran


# --- compiled blocks: something is compiled


def graphs(plan: str) -> int:
    """How many graphs the compiler was given in two steps."""
    from torch._dynamo.utils import counters

    compiler = torch.compile
    torch._dynamo.reset()
    counters.clear()
    torch.compile = partial(compiler, backend="eager")  # type: ignore[assignment]
    try:
        task = tasks.decoder()
        engine = parallelize(task, plan, device="cpu")
        for step in range(2):
            engine.step(task.batch(step))
        return counters["stats"]["unique_graphs"]
    finally:
        torch.compile = compiler
        torch._dynamo.reset()


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_compile_compiles(plan: str, pool: RankPool) -> None:
    assert pool.run(graphs, 2, plan) == [0, 0]
    assert all(count >= 1 for count in pool.run(graphs, 2, f"{plan},compile=true", timeout_s=120))
