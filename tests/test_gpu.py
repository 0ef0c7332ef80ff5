"""What only a CUDA device can show: the same code, one device, equal to the CPU, in every precision and compiled."""

from __future__ import annotations

import pytest
import torch

from shardwise import parallelize
from shardwise.models import tasks

pytestmark = pytest.mark.gpu


def losses(device: str, plan: str, steps: int = 4) -> list[float]:
    task = tasks.decoder()
    engine = parallelize(task, plan, randomness="global", clip_norm=1.0, device=device)
    return [engine.step(task.batch(step)).loss for step in range(steps)]


def test_cuda_equals_cpu_in_float64():
    on_cpu, on_cuda = losses("cpu", "precision=fp64"), losses("cuda", "precision=fp64")
    assert max(abs(a - b) for a, b in zip(on_cpu, on_cuda, strict=True)) < 1e-8


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
