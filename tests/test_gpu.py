"""What only a CUDA device can show: the same code, one device, equal to the CPU, in every precision and compiled."""

from __future__ import annotations

import pytest
import torch

from shardwise import Plan, parallelize
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task

pytestmark = pytest.mark.gpu


def losses(device: str, plan: str, steps: int = 4, name: str = "shardwise.models.tasks:decoder") -> list[float]:
    task = resolve_task(name)
    engine = parallelize(task, plan, randomness="global", clip_norm=1.0, device=device)
    return [engine.step(task.batch(step)).loss for step in range(steps)]


def test_cuda_equals_cpu_in_float64():
    on_cpu, on_cuda = losses("cpu", "precision=fp64"), losses("cuda", "precision=fp64")
    assert max(abs(a - b) for a, b in zip(on_cpu, on_cuda, strict=True)) < 1e-8


@pytest.mark.parametrize(("name", "plan"), [
    ("shardwise.models.tasks:decoder", "dp_replicate=2"), ("shardwise.models.tasks:decoder", "dp_shard=2,zero=2"),
    ("shardwise.models.tasks:decoder", "dp_shard=2,zero=3"), ("shardwise.models.tasks:decoder", "tp=2,sp=true"),
    ("shardwise.models.tasks:decoder", "pp=2,microbatches=2"), ("shardwise.models.tasks:moe", "dp_shard=2,ep=2"),
    ("sequence_tasks:decoder", "cp=2"), ("sequence_tasks:decoder", "cp_ulysses=2"),
    ("domain_tasks:unet_group", "domain=2"),
])  # fmt: skip
def test_two_ranks_on_one_device_equal_the_cpu(name: str, plan: str, pool: RankPool) -> None:
    """Ranks that share a device meet over gloo."""
    found = [pool.run(losses, 2, device, f"{plan},precision=fp64", 2, name)[0] for device in ("cpu", "cuda")]
    assert Plan.parse(plan).world_size == 2
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-8


@pytest.mark.parametrize("precision", ["bf16", "bf16-full", "fp16"])
def test_narrow_precision_follows_float32(precision):
    expected, found = losses("cuda", "precision=fp32"), losses("cuda", f"precision={precision}")
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.05


def test_compiled_blocks_follow_eager_ones():
    expected, found = losses("cuda", "single"), losses("cuda", "compile=true")
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-3


def test_memory_counts_the_peak():
    task = tasks.decoder()
    engine = parallelize(task, "single", device="cuda")
    engine.step(task.batch(0))
    assert engine.memory()["peak"] >= engine.memory()["parameters"]
    assert torch.cuda.max_memory_allocated() == engine.memory()["peak"]
