"""The device room: everything that asks which kind of device this is.

Other rooms call these functions instead of branching on `cuda`.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from statistics import median

import torch

from shardwise.errors import InputError
from shardwise.ranks.launchers import local_rank


def pick_device(requested: str | torch.device | None = None) -> torch.device:
    """This rank's device: as requested, else the CUDA device of the local rank, else the CPU."""
    if requested is not None:
        device = torch.device(requested)
    elif torch.cuda.is_available():
        place = local_rank(os.environ)  # None: `join` has chosen, or this process is alone
        chosen = torch.cuda.current_device() if place is None else place % torch.cuda.device_count()
        device = torch.device("cuda", chosen)
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device {device} was asked for, but torch sees no CUDA device")
        torch.cuda.set_device(device)
    return device


def describe() -> str:
    """`torch 2.13.0+cpu, 2 CPU cores, no CUDA device`: what a run has here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    devices = f"{len(found)} x {found[0]}" if found else "no CUDA device"
    return f"torch {torch.__version__}, {cores} CPU cores, {devices}"


def peak_bytes(device: torch.device) -> int | None:
    """Peak of allocated bytes on the device since the last reset; None where the device does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def memory_bytes(device: torch.device) -> int | None:
    """All memory that this rank's device has: a GPU's, or this host's (its container's); None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    found = []
    for path, unit in (("/proc/meminfo", 1024), ("/sys/fs/cgroup/memory.max", 1)):
        try:
            words = Path(path).read_text().split()
        except OSError:
            continue
        number = words[words.index("MemTotal:") + 1] if "MemTotal:" in words else words[0]
        if number.isdecimal():
            found.append(int(number) * unit)
    return min(found, default=None)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


WARM_ROUNDS = 2  # of the fixed work, since caches hold what ran before


@cache
def _fixed_work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Made once: what is allocated anew would be slow for reasons of its own."""
    return torch.ones(256, 256), torch.ones(256, 256), torch.ones(8)


def pace_us(device: torch.device, rounds: int = 100) -> float | None:
    """Microseconds that a fixed piece of work takes on this rank's CPU now: a product and sixty tiny additions.

    A virtual CPU is as fast as its neighbours let it be; this says how fast that is. None on a GPU, whose clocks are
    its own.
    """
    if device.type != "cpu":
        return None
    times = []
    factor, out, tiny = _fixed_work()
    for _ in range(WARM_ROUNDS + rounds):
        began = time.perf_counter()
        torch.mm(factor, factor, out=out)
        for _ in range(60):
            torch.add(tiny, tiny)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[WARM_ROUNDS:])


def seed_generators(seed: int) -> None:
    """Seed the generators that torch draws from on every device."""
    seed &= 2**63 - 1
    torch.default_generator.manual_seed(seed)  # torch.manual_seed walks over every backend: 100 times the price
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def math_attention_only():
    """A context in which attention takes the composite path, whose dropout is an op that can be met."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)
