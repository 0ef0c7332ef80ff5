"""Seconds of one piece of work that all ranks do together."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def timed(run: Callable[[], None]) -> float:
    """Seconds that the slower rank takes."""
    dist.barrier()
    start = time.perf_counter()
    run()
    took = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)
