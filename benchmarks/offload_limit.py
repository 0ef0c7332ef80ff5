"""A run that needs more memory than its process may have, with a disk's tier and without.

    python benchmarks/offload_limit.py [optimizer | activations] [LIMIT_GB]
    python benchmarks/offload_limit.py parameters | clipped

optimizer    201.5 million parameters in bf16, AdamW with amsgrad: 16 bytes of state and masters for each
activations  3.2 million parameters, 3,072 rows: 96 blocks keep 0.8 GB for backward

parameters   157 million parameters in fp32 on 2 ranks of zero=3, AdamW: 12 of 16 bytes lie on the disk; no limit
clipped      the same with gradients=as_made: without clipping, with a bound that no norm exceeds, and one that all do

One process each, but for the last. The limit is RLIMIT_DATA, under which malloc is to map large blocks alone, so that
what is freed does not count. The forecast is of tensors: the interpreter and torch's libraries, resident after a step
of a small model, are printed beside it.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize, simulate
from shardwise.cluster import Cluster
from shardwise.cluster.figure import Figure
from shardwise.ranks import RankPool

STEPS = 3


class Wide(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = (width,)
        wide = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(F.layer_norm(x, self.width))
        return x


@dataclass(frozen=True)
class Case:
    """What is too large, and what the process may have. plans: with the tier, without."""

    width: int
    layers: int
    rows: int
    plans: tuple[str, ...]
    limit_gb: float
    optimizer: partial

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(step))
        return x, x.roll(1, 1)

    def task(self) -> Task:
        return Task(
            name="wide", model=partial(Wide, self.width, self.layers), batch=self.batch,
            inputs=lambda pair: ((pair[0],), {}),
            loss=lambda output, pair: ((output - pair[1]).square().mean(1).sum(), len(output)),
            optimizer=self.optimizer,
        )  # fmt: skip


CASES = {
    "optimizer": Case(
        1024, 24, 8, ("precision=bf16,offload=optimizer:disk", "precision=bf16"), 2.9,
        partial(torch.optim.AdamW, lr=1e-4, amsgrad=True),
    ),
    "activations": Case(
        64, 96, 3072, ("offload=activations:disk", "single"), 0.8, partial(torch.optim.AdamW, lr=1e-4)
    ),
    "parameters": Case(
        1280, 12, 64,
        ("dp_shard=2,zero=3,offload=optimizer:disk|parameters:disk", "dp_shard=2,zero=3,offload=optimizer:disk",
         "dp_shard=2,zero=3"), 0.0, partial(torch.optim.AdamW, lr=1e-4),
    ),
}  # fmt: skip


def run(case: Case, plan: str, limit_gb: float) -> None:
    """Take steps of a plan under the limit, and print what they come to."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit_gb * 1e9),) * 2)
    small = replace(case, width=64, layers=4, rows=64)
    parallelize(small.task(), plan).step(small.batch(0))
    before = resident_gb()
    engine = parallelize(case.task(), plan)
    for step in range(STEPS):
        began = time.perf_counter()
        loss = engine.step(case.batch(0)).loss
        print(f"  step {step + 1}: loss {loss:.4f}, {time.perf_counter() - began:.1f} s", flush=True)
    sizes = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in engine.memory().items() if size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"  {sizes}; peak resident {peak:.2f} GB, {before:.2f} of it after a step of a small one")


def peak_gb(case: Case, plan: str, clip: float | None = None) -> tuple[float, float, list[float]]:
    """On a rank: returns the peak resident beyond a step of a small model, bytes in the file, seconds of each step."""
    small = replace(case, width=64, layers=4, rows=64)
    engine = parallelize(small.task(), plan)
    engine.step(small.batch(0))
    engine.close()
    del engine
    gc.collect()
    before = resident_gb()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    engine, seconds = parallelize(case.task(), plan, clip_norm=clip), []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step(case.batch(0))
        seconds.append(time.perf_counter() - began)
    on_disk = (engine.memory().get("disk") or 0) / 1e9
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kb = int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return peak_kb * 1024 / 1e9 - before, on_disk, seconds


def on_two_ranks(case: Case, bounds: tuple[float | None, ...] = (None,)) -> None:
    """Print the peak of both ranks, without a limit, and its forecast; under each of the bounds on the norm."""
    for plan, clip in product(case.plans, bounds):
        with RankPool(threads=1, quiet=True) as pool:
            rows = pool.run(peak_gb, 2, case, plan, clip, timeout_s=500)
            peaks = " and ".join(f"{peak:.3f}" for peak, _, _ in rows)
            steps = ", ".join(f"{seconds:.1f}" for seconds in rows[0][2])
            told = "" if clip is None else f", norms up to {clip:g}"
            print(f"{plan}{told}: forecast of tensors {forecast_gb(case, plan):.3f} GB", flush=True)
            print(f"  peak resident beyond a small model's {peaks} GB, disk {rows[0][1]:.2f} GB, steps of {steps} s")


def resident_gb() -> float:
    """Returns what of this process lies in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9


def forecast_gb(case: Case, plan: str) -> float:
    """Returns the forecast of the tensors' peak on a processor, whose rates do not matter to it."""
    machine = Cluster.parse(f"{Plan.parse(plan).world_size} l40s")
    device = replace(machine.device, kind="cpu", table="", disk_gbps=Figure(1.0, "assumed", "no matter"))
    return simulate(case.task(), plan, replace(machine, device=device)).worst.allocated / 1e9


def main() -> None:
    args = sys.argv[1:]
    if args == ["clipped"]:
        plan = "dp_shard=2,zero=3,offload=optimizer:disk,gradients=as_made"
        return on_two_ranks(replace(CASES["parameters"], plans=(plan,)), (None, 1e6, 1e-6))
    name = args.pop(0) if args and args[0] in CASES else "optimizer"
    case = CASES[name]
    if not case.limit_gb:
        return on_two_ranks(case)
    limit = float(args.pop(0)) if args else case.limit_gb
    if args:
        return run(case, args[0], limit)
    for plan in case.plans:
        print(f"{plan}, at most {limit} GB; forecast of tensors {forecast_gb(case, plan):.2f} GB", flush=True)
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}
        done = subprocess.run(
            [sys.executable, __file__, name, str(limit), plan], env=environment, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            print("  " + done.stderr.strip().splitlines()[-1][:200])


if __name__ == "__main__":
    main()
