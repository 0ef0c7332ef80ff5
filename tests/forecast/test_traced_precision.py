"""Forecasts in other dtypes than float32: memory of every rank within 2% of its live bytes, and what is switched."""

from __future__ import annotations

import pytest
import torch
from test_traced import HERE, beyond, summed
from torch import nn

from shardwise import Plan, Task, parallelize
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.models import tasks
from shardwise.planner import Constraints
from shardwise.planner.door import simulate, subject_of
from shardwise.planner.propose import search
from shardwise.precision import Precision

PRECISIONS = ["bf16", "bf16,reduce_dtype=bf16", "fp32,reduce_dtype=bf16", "bf16-full", "fp64"]
LAYOUTS = ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "tp=2", "pp=2",
           "dp_shard=2,zero=3,remat=full,accumulate=2", "dp_shard=2,zero=2,accumulate=2", "tp=2,sp=true"]  # fmt: skip
ALL = [[f"{layout},precision={precision}" for layout in LAYOUTS] for precision in PRECISIONS]


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("gpt2", [ALL[0][0], ALL[0][3], "dp_shard=2,zero=2,precision=bf16-full"], id="tied-weights"),
        pytest.param("gpt2", ["dp_shard=2,zero=1,precision=bf16,reduce_dtype=bf16"], id="narrow-sums"),
        pytest.param("vit", ["pp=2,precision=bf16,accumulate=2", "dp_replicate=2,precision=fp64"], id="cast-inputs"),
        pytest.param("unet_batchnorm", ["tp=2,precision=bf16"], id="batch-norm"),
        *(pytest.param(name, plans, id=f"{name}-{precision}-all", marks=pytest.mark.long)
          for name in ("gpt2", "vit", "unet_batchnorm", "moe", "recurrent", "hf_llama")
          for precision, plans in zip(PRECISIONS, ALL, strict=True)),
    ],
)  # fmt: skip
def test_memory_of_every_rank_in_other_dtypes(name: str, plans: list[str], pool) -> None:
    wrong = beyond(pool, name, plans)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("precision", ["bf16", "bf16-full", "fp16"])
def test_batch_norm_runs_in_sixteen_bits_on_one_rank(precision: str) -> None:
    """Statistics stay float32 beside weights of 16 bits, which no kernel takes as it is; evaluation too."""
    task = Task(
        model=lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
        loss=summed, batch=lambda step: torch.linspace(-1, 1, 4 * 2 * 8 * 8).view(4, 2, 8, 8), name="normed",
    )  # fmt: skip
    wide, narrow = (parallelize(task, plan) for plan in ("precision=fp32", f"precision={precision}"))
    steps = 1 if precision == "fp16" else 3  # whose first steps overflow and are skipped
    losses = [[float(engine.step(task.batch(0)).loss) for _ in range(steps)] for engine in (wide, narrow)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    for engine in (wide, narrow):
        engine.module.eval()
        out = engine.module(task.batch(0).to(next(engine.module.parameters()).dtype))
        assert out.isfinite().all()


def test_a_compiled_plan_is_forecast_with_fused_ops_and_says_so() -> None:
    plain, compiled = (
        simulate(tasks.gpt2(), plan, "2 h100-sxm-80gb", randomness="fast")
        for plan in ("dp_shard=2", "dp_shard=2,compile=true")
    )
    assert compiled.step_s < plain.step_s
    assert "compile" in compiled.basis and "compile" not in plain.basis
    shapes = [
        simulate("llama3-8b", plan + ",precision=bf16", "8 h100-sxm-80gb", global_batch=8, seq=4096).step_s
        for plan in ("dp_shard=8", "dp_shard=8,compile=true", "dp_shard=8,reduce_dtype=bf16")
    ]
    assert shapes[1] < shapes[0]
    assert shapes[2] <= shapes[0]


def test_switches_that_are_fixed_are_on_in_every_plan_of_a_search() -> None:
    fixed = Constraints(fixed=(("compile", True), ("reduce_dtype", "bf16")))
    eight, two = (HERE.parse(f"{count} h100-sxm-80gb") for count in (8, 2))
    for subject, where in (
        (subject_of("llama3-8b", eight, global_batch=64, seq=2048, precision="bf16"), eight),
        (subject_of(tasks.gpt2(), two, global_batch=4, precision="bf16", randomness="fast"), two),
    ):
        found = search(subject, where, fixed, precision="bf16")
        assert all(p.plan.compile and p.plan.reduce_dtype == "bf16" for p in found.proposals)


def test_gradients_are_sent_in_the_dtype_that_a_plan_says() -> None:
    from shardwise.simulator.held import policy

    def bytes_of(text: str) -> tuple[float, float, float]:
        plan = Plan.parse(text)
        states = policy(plan.precision, 2.0, of_plan(plan, global_batch=8, seq=1))
        return states.gradient, states.copies, states.on_wire

    assert bytes_of("dp_replicate=2,precision=bf16") == (4, 0, 4)
    assert bytes_of("dp_replicate=2,precision=bf16,reduce_dtype=bf16") == (2, 4, 2)
    assert bytes_of("dp_shard=2,zero=1,precision=bf16-full") == (4, 2, 4)
    assert bytes_of("dp_shard=2,zero=3,precision=bf16-full") == (2, 0, 4)
    assert software("shardwise").grad_reduce_bytes == 4


@pytest.mark.parametrize(
    ("plan", "compute", "master", "reduce", "scaled"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32, False),
        ("fp64", torch.float64, torch.float64, torch.float64, False),
        ("bf16-mixed", torch.bfloat16, torch.float32, torch.float32, False),
        ("bf16-full", torch.bfloat16, torch.bfloat16, torch.float32, False),
        ("fp16,reduce_dtype=bf16", torch.float16, torch.float32, torch.bfloat16, True),
    ],
)
def test_the_dtypes_of_each_precision(
    plan: str, compute: torch.dtype, master: torch.dtype, reduce: torch.dtype, scaled: bool
) -> None:
    found = Precision.of(Plan.parse(f"precision={plan}"))
    assert found == Precision(compute, master, reduce, scaled)
