"""Acceptance: every plan that is built, on very different models, equals one process. And the proof can fail.

CI takes a covering part of plans x tasks x accumulate; `pytest -m long` takes the whole product.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize, verify
from shardwise.models import tasks
from shardwise.proof.oracle import run_oracle
from shardwise.proof.outcome import GRADIENT_BAR, LOSS_BAR, PARAMETER_BAR
from shardwise.proof.settings import Settings
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build

PLANS = [
    "dp_replicate=2", "dp_replicate=3",
    "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3",
    "dp_shard=3,zero=1", "dp_shard=3,zero=2", "dp_shard=3,zero=3",
    "dp_replicate=2,dp_shard=2,zero=1", "dp_replicate=2,dp_shard=2,zero=2", "dp_replicate=2,dp_shard=2,zero=3",
]  # fmt: skip
TASKS = [
    "decoder", "gpt2", "vit", "unet_group", "unet_batchnorm", "mlp_frozen_unused", "hf_llama", "hf_vit",
    "decoder_dropout",
]  # fmt: skip
ACCUMULATE = [1, 3]
Case = tuple[str, str, int]

PRODUCT: list[Case] = list(product(PLANS, TASKS, ACCUMULATE))
# a walk through plans and tasks side by side (11 and 9 share no factor), 1 and 3 micro-batches in turn
COVER: list[Case] = [(PLANS[i % len(PLANS)], TASKS[i % len(TASKS)], ACCUMULATE[i % len(ACCUMULATE)]) for i in range(22)]


def cases(chosen: list[Case]) -> list[Any]:
    return [pytest.param(case, id=f"{case[1]}-{case[0]}-x{case[2]}") for case in chosen]


def prove(case: Case, pool: RankPool) -> None:
    plan, name, accumulate = case
    parity = verify(f"shardwise.models.tasks:{name}", f"{plan},accumulate={accumulate}", pool=pool, timeout_s=120)
    assert parity.parity, parity.text()
    assert parity.gradient_error and parity.parameter_error


@pytest.mark.parametrize("case", cases(COVER))
def test_equal_to_one_process(case: Case, pool: RankPool) -> None:
    prove(case, pool)


@pytest.mark.long
@pytest.mark.parametrize("case", cases([case for case in PRODUCT if case not in COVER]))
def test_equal_to_one_process_in_full(case: Case, pool: RankPool) -> None:
    prove(case, pool)


def test_the_cover_covers() -> None:
    assert set(COVER) <= set(PRODUCT)
    assert min(Counter(plan for plan, _, _ in COVER).values()) >= 2
    assert min(Counter(task for _, task, _ in COVER).values()) >= 2
    assert set(Counter((task, accumulate) for _, task, accumulate in COVER)) == set(product(TASKS, ACCUMULATE))
    assert set(Counter((plan, accumulate) for plan, _, accumulate in COVER)) == set(product(PLANS, ACCUMULATE))


# --- settings that change what a step does


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3",
                                  "dp_replicate=2,dp_shard=2,zero=2"])  # fmt: skip
def test_clipping_is_that_of_one_process(plan: str, pool: RankPool) -> None:
    clip = 0.05
    whole = run_oracle(tasks.unet_group(), Settings(steps=1))
    norm = sum(float(g.square().sum()) for g in whole.gradients[0].values() if g is not None) ** 0.5
    assert norm > 2 * clip, "the clip must be active"
    parity = verify("shardwise.models.tasks:unet_group", plan, clip_norm=clip, pool=pool)
    # both clip by norm + 1e-6 in float64, so no bar is raised for it
    assert parity.parity, parity.text()


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3"])
def test_more_steps_and_another_seed(plan: str, pool: RankPool) -> None:
    parity = verify("shardwise.models.tasks:gpt2", plan, steps=3, seed=11, pool=pool)
    assert parity.parity, parity.text()


# a stand-in is a matter of the technique; replicas around it (in `long`) add a sum over them, proven above
ALONE = ("dp_replicate=3", "dp_shard=3,zero=1", "dp_shard=3,zero=3", "dp_replicate=2,dp_shard=2,zero=2")


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, marks=[] if plan in ALONE else [pytest.mark.long])
        for plan in PLANS
        if Plan.parse(plan).world_size > 2
    ],
)
def test_ranks_without_a_sample(plan: str, pool: RankPool) -> None:
    parity = verify("module_tasks:few_samples", f"{plan},accumulate=3", pool=pool)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("remat", ["full", "selective"])
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_recompute_changes_nothing(plan: str, remat: str, pool: RankPool) -> None:
    parity = verify("shardwise.models.tasks:decoder_dropout", f"{plan},remat={remat}", pool=pool)
    assert parity.parity, parity.text()


def test_selective_recompute_advances_statistics_once(pool: RankPool) -> None:
    """Counters and running statistics that a block writes are put back without an op of its own being seen."""
    parity = verify("module_tasks:norm_cumulative", "dp_replicate=2,remat=selective", pool=pool)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_in_pairs_are_read_as_complex_from_a_bucket(stage: int, pool: RankPool) -> None:
    parity = verify("module_tasks:complex_pairs", f"dp_shard=2,zero={stage}", pool=pool)
    assert parity.parity, parity.text()


# --- the proof can fail: bugs planted on the ranks alone


def on_a_rank() -> bool:
    """Whether this process is one of several: the bug is planted there and not in the oracle."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def lying_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    total, weight = tasks.feature_loss(output, batch)
    return total, weight + (1e-3 if on_a_rank() else 0.0)


def lying_weight() -> Task:
    """Its weight does not add up over samples."""
    return tasks.mlp().with_(loss=lying_loss)


def heavy_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    total, weight = tasks.feature_loss(output, batch)
    return total, weight * (1 + 1e-6 if on_a_rank() else 1.0)


def heavy_weight() -> Task:
    """Its weight adds up, but to something else than in one process."""
    return tasks.mlp().with_(loss=heavy_loss)


class Meddled(torch.optim.SGD):
    """SGD that scales the update of its first piece by 1 + 1e-6."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        before = first.detach().clone()
        result = super().step(closure)
        if on_a_rank():
            with torch.no_grad():
                first.add_(first - before, alpha=1e-6)
        return result


def meddled_optimizer(groups: list[dict]) -> torch.optim.Optimizer:
    return Meddled(groups, lr=0.5)


def scaled_update() -> Task:
    return tasks.mlp().with_(optimizer=meddled_optimizer)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-6)


class MeddledMLP(nn.Module):
    """`mode`: "scaled", one parameter's gradient is off by 1e-6; "dropped", it has none; "start", it starts off."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.first = nn.Linear(12, 8)
        self.last = nn.Linear(8, tasks.CLASSES)
        if mode == "start" and on_a_rank():
            nn.init.ones_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        if self.mode == "scaled" and on_a_rank():
            weight = ScaledGradient.apply(weight)
        if self.mode == "dropped" and on_a_rank():
            weight = weight.detach()
        return nn.functional.linear(nn.functional.gelu(self.first(x)), weight, self.last.bias)


def meddled_scaled_model() -> nn.Module:
    return MeddledMLP("scaled")


def meddled_dropped_model() -> nn.Module:
    return MeddledMLP("dropped")


def meddled_start_model() -> nn.Module:
    return MeddledMLP("start")


def scaled_gradient() -> Task:
    return tasks.mlp().with_(model=meddled_scaled_model)


def dropped_parameter() -> Task:
    return tasks.mlp().with_(model=meddled_dropped_model)


def other_start() -> Task:
    return tasks.mlp().with_(model=meddled_start_model)


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"])
class TestTheProofCanFail:
    def test_a_weight_that_lies(self, plan: str, pool: RankPool) -> None:
        parity = verify("test_parity:lying_weight", plan, pool=pool)
        assert not parity.parity
        assert "does not add up over samples: its weight" in (parity.refused or "")

    def test_a_weight_off_by_a_millionth(self, plan: str, pool: RankPool) -> None:
        parity = verify("test_parity:heavy_weight", plan, steps=1, pool=pool)
        assert not parity.parity
        assert parity.loss_error is not None and parity.loss_error > LOSS_BAR

    def test_an_update_off_by_a_millionth(self, plan: str, pool: RankPool) -> None:
        parity = verify("test_parity:scaled_update", plan, steps=1, pool=pool)
        assert not parity.parity
        assert max(parity.parameter_error.values()) > PARAMETER_BAR
        assert max(parity.gradient_error.values()) <= GRADIENT_BAR, "the gradients were right"

    def test_one_gradient_off_by_a_millionth(self, plan: str, pool: RankPool) -> None:
        parity = verify("test_parity:scaled_gradient", plan, steps=1, pool=pool)
        assert not parity.parity
        wrong = {name for name, error in parity.gradient_error.items() if error > GRADIENT_BAR}
        assert wrong == {"last.weight"}
        assert "NOT EQUAL" in parity.text() and "last.weight" in parity.text()

    def test_a_parameter_without_its_gradient(self, plan: str, pool: RankPool) -> None:
        parity = verify("test_parity:dropped_parameter", plan, steps=1, pool=pool)
        assert not parity.parity
        assert parity.differences[0] == "gradient of 'last.weight' exists only in one process"

    def test_other_initial_values(self, plan: str, pool: RankPool) -> None:
        parity = verify("test_parity:other_start", plan, steps=1, pool=pool)
        assert not parity.parity
        assert any("initial value of 'last.bias'" in what for what in parity.differences)


# --- initial weights


def initial_weights(name: str, plans: list[str], seed: int) -> list[dict[str, Tensor]]:
    found = []
    for plan in plans:
        engine = parallelize(getattr(tasks, name)(), plan, seed=seed, check_loss=False)
        weights = {path: tensor.clone() for path, tensor in engine.full_parameters()}
        found.append(weights if engine.rank == 0 else {})
    return found


# every proof above compares the initial weights too, in float64; here they are those of a run
@pytest.mark.parametrize(
    "name", ["decoder_tied", *(pytest.param(name, marks=pytest.mark.long) for name in ("unet_batchnorm", "hf_vit"))]
)
def test_initial_weights_do_not_depend_on_the_plan(name: str, pool: RankPool) -> None:
    built = build(getattr(tasks, name)().model, 5)
    expected = {path: built.value(path) for path, _ in built.module.named_parameters()}
    for size in (1, 2, 3, 4):
        plans = [plan for plan in PLANS if Plan.parse(plan).world_size == size] or ["single"]
        for weights in pool.run(initial_weights, size, name, plans, 5)[0]:
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[path], expected[path]) for path in expected), plans
    other = build(getattr(tasks, name)().model, 6)
    assert any(not torch.equal(other.value(path), expected[path]) for path in expected)


# --- the plan's own precision


def loss_curves(name: str, plans: list[str], steps: int) -> list[list[float]]:
    task = getattr(tasks, name)()
    curves = []
    for plan in plans:
        engine = parallelize(task, plan, check_loss=False)
        curves.append([engine.step(task.batch(step)).loss for step in range(steps)])
    return curves


STAGES = ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"]
TO_FP32 = 0.02  # of the loss: bf16 has 8 bits of mantissa, a relative rounding of 2^-9 for each product
AMONG_STAGES = 0.004


@pytest.mark.parametrize("name", ["decoder_tied", "unet_group"])
def test_bf16_stays_near_fp32_and_stages_nearer_to_each_other(name: str, pool: RankPool) -> None:
    plans = STAGES + [f"{plan},precision=bf16" for plan in STAGES]
    curves = torch.tensor(pool.run(loss_curves, 2, name, plans, 5)[0], dtype=torch.float64)
    fp32, bf16 = curves[:4], curves[4:]
    assert torch.isfinite(curves).all()
    assert (fp32[:, -1] != fp32[:, 0]).all()
    assert float(((fp32 - fp32[0]) / fp32[0]).abs().max()) < 1e-5
    assert float(((bf16 - fp32) / fp32).abs().max()) < TO_FP32
    assert float(((bf16 - bf16[0]) / fp32[0]).abs().max()) < AMONG_STAGES


def test_fp16_scales_and_follows_fp32(pool: RankPool) -> None:
    plans = ["dp_replicate=2", "dp_replicate=2,precision=fp16", "dp_shard=2,zero=3,precision=fp16"]
    fp32, *fp16 = (torch.tensor(c) for c in pool.run(loss_curves, 2, "decoder", plans, 5)[0])
    for curve in fp16:
        assert float(((curve - fp32) / fp32).abs().max()) < 0.01
