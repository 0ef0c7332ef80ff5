"""Counts the FLOPs of a sample, by one of two conventions, and knows the peak rates of devices, for MFU.

Each number is shown with the convention that it follows:

language tasks  6 for each token and parameter (Kaplan et al. 2020, section 2.1): 2 forward, 4 backward. The
                rows of embedding tables that are only looked up are not parameters here, and the products of
                attention scores are not counted.
all others      matrix products, convolutions and attention of one forward pass of one sample, times 3. Counted
                by torch's `FlopCounterMode` on fake tensors, so nothing is computed or allocated.

What is computed again under `remat`, and the stand-ins of ranks without a sample, are left out, as is usual
for MFU (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from shardwise.device import device_name
from shardwise.layout.precisions import BYTES, PRECISIONS
from shardwise.rehearsal.step_trace import forward_without_values
from shardwise.task import Task

BY_PARAMETERS = "6 per token and parameter; looked-up embeddings and attention scores not counted"
BY_COUNTING = "3 x the products, convolutions and attention of one forward pass"

# attention as a CPU computes it, for which torch has no formula of its own
_ON_CPUS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop}

# dense peaks in TFLOP/s by part of the device's name: (16-bit, tf32, fp32); from the vendor's data sheets
PEAKS: tuple[tuple[str, float, float, float], ...] = (
    ("H200 NVL", 835, 417, 60),
    ("H200", 989, 494, 67),
    ("H100 NVL", 835, 417, 60),
    ("H100 PCIe", 756, 378, 51),
    ("H100", 989, 494, 67),
    ("A100", 312, 156, 19.5),
    ("L40S", 362, 183, 91.6),
)


@dataclass(frozen=True)
class Flops:
    """FLOPs of one sample, forward and backward, None if they could not be counted; `convention` says which or why."""

    per_sample: float | None
    convention: str


def count_flops(task: Task, sample: Any, tokens_per_sample: int | None) -> Flops:
    """Returns the FLOPs of one sample; never raises, since a run needs no FLOPs.

    sample             a batch of one sample
    tokens_per_sample  of a language task; None for other tasks, whose operations are counted
    """
    try:
        if tokens_per_sample is None:
            counter = FlopCounterMode(display=False)
            counter.flop_registry |= _ON_CPUS
            counter.mod_tracker = _AsOne()
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _taken_apart(), counter:
                forward_without_values(task, sample)
            return Flops(3.0 * counter.get_total_flops(), BY_COUNTING)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return Flops(6.0 * tokens_per_sample * _multiplied(task.model()), BY_PARAMETERS)
    except Exception as error:  # any model may need values; a run needs no FLOPs
        return Flops(None, f"not counted: the model does not run on shapes alone ({type(error).__name__})")


@contextmanager
def _taken_apart() -> Iterator[None]:
    """Context in which torch's transformer layers run as products, not as an operation unknown to the counter."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _AsOne:
    """Replaces the counter's module tracker, which fails on a forward without gradients."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, *error: object) -> None:
        """Does nothing."""


def _multiplied(model: nn.Module) -> int:
    """Returns how many parameters take part in products: all but those that only `nn.Embedding` modules hold."""
    users: dict[int, set[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(type(module))
    looked_up = {key for key, kinds in users.items() if kinds == {nn.Embedding}}
    return sum(p.numel() for p in model.parameters() if id(p) not in looked_up)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the dense peak FLOP/s of the device at this precision; None if it is not in `PEAKS`."""
    name = device_name(device)
    if name is None:
        return None
    for part, half, tf32, single in PEAKS:
        if part in name:  # the first match, as longer names stand before their prefixes
            compute = PRECISIONS[precision].compute
            if BYTES[compute] == 2:
                return half * 1e12
            # products in float32 run as TF32 where torch is told that this is exact enough
            if compute == "fp32":
                return (single if torch.get_float32_matmul_precision() == "highest" else tf32) * 1e12
    return None
