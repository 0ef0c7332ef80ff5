"""What only a CUDA device can show: the same code, on one device that ranks share, equal to one process on the CPU."""

from __future__ import annotations

import pytest
import torch
from test_mock_device import CASES, MORE, named

from shardwise import parallelize, verify
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


PROVEN = [(task, plan) for task, plan, *_ in CASES + MORE if "precision" not in plan]


@pytest.mark.parametrize(("task", "plan"), PROVEN)
def test_ranks_on_the_device_equal_one_process(task: str, plan: str, pool: RankPool) -> None:
    """Ranks that share a device meet over gloo."""
    parity = verify(named(task), plan, device="cuda", pool=pool, timeout_s=180)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("precision", ["bf16", "bf16-full", "fp16"])
def test_narrow_precision_follows_float32(precision):
    expected, found = losses("cuda", "precision=fp32"), losses("cuda", f"precision={precision}")
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.05


@pytest.mark.parametrize("plan", ["compile=true", "compile=true,precision=bf16", "compile=true,remat=full"])
def test_compiled_blocks_follow_eager_ones(plan):
    expected, found = losses("cuda", "single"), losses("cuda", plan)
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.05


def test_memory_counts_the_peak():
    task = tasks.decoder()
    torch.cuda.reset_peak_memory_stats()
    engine = parallelize(task, "single", device="cuda")
    engine.step(task.batch(0))
    assert engine.memory()["peak"] >= engine.memory()["parameters"]
    assert torch.cuda.max_memory_allocated() == engine.memory()["peak"]


def test_a_step_waits_for_the_device_once():
    """torch tells each call that makes the host wait: the control row alone."""
    task = tasks.decoder()
    engine = parallelize(task, "precision=bf16,accumulate=2", device="cuda", clip_norm=1.0)
    for step in range(2):
        engine.step(task.batch(step))
    with pytest.warns(UserWarning, match="synchronizing CUDA operation") as told:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step(task.batch(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in told if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, waits
