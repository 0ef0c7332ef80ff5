"""A run whose optimizer's state is larger than the memory that its process may have, with a disk's tier and without.

    python benchmarks/offload_limit.py [LIMIT_GB]

One process, 201.5 million parameters in bf16, AdamW with amsgrad: 16 bytes of state and masters for each. The limit is
RLIMIT_DATA, under which malloc is to map large blocks alone, so that what is freed does not count.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task, parallelize

WIDTH, LAYERS, STEPS, LIMIT_GB = 1024, 24, 3, 2.9
PLANS = ("precision=bf16,offload=optimizer:disk", "precision=bf16")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.blocks = nn.ModuleList(wide)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(F.layer_norm(x, (WIDTH,)))
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1)


def run(plan: str, limit_gb: float) -> None:
    """Take steps of a plan under the limit, and print what they come to."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit_gb * 1e9),) * 2)
    task = Task(
        name="wide", model=Wide, batch=batch, inputs=lambda pair: ((pair[0],), {}),
        loss=lambda output, pair: ((output - pair[1]).square().mean(1).sum(), len(output)),
        optimizer=partial(torch.optim.AdamW, lr=1e-4, amsgrad=True),
    )  # fmt: skip
    engine = parallelize(task, plan)
    for step in range(STEPS):
        began = time.perf_counter()
        loss = engine.step(batch(0)).loss
        print(f"  step {step + 1}: loss {loss:.4f}, {time.perf_counter() - began:.1f} s", flush=True)
    held = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in engine.memory().items() if size)
    print(f"  {held}; peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def main() -> None:
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else LIMIT_GB
    if len(sys.argv) > 2:
        return run(sys.argv[2], limit)
    for plan in PLANS:
        print(f"{plan}, at most {limit} GB", flush=True)
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        done = subprocess.run(
            [sys.executable, __file__, str(limit), plan], env=environment, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            print("  " + done.stderr.strip().splitlines()[-1][:200])


if __name__ == "__main__":
    main()
