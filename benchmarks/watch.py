"""What the watch costs a rank: CPU time of an all-reduce of one rank with and without a record, and of a step's point.

    python benchmarks/watch.py

CPU time of this thread, the best of some rounds, so that other programs hardly count. The collective is asked for from
a user's function below a few frames of a module's forward, as in a step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.comm import recording
from shardwise.guard import points
from shardwise.guard.records import RankRecord

ROUNDS, CALLS = 9, 4000


def microseconds(work: Callable[[], object]) -> float:
    """CPU time of one call, the best round's."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(CALLS):
            work()
        found.append((time.thread_time() - began) / CALLS * 1e6)
    return min(found)


class Layer(torch.nn.Module):
    """Four levels of a module's forward above the collective."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Layer(depth - 1) if depth else None
        self.value = torch.ones(4)

    def forward(self) -> None:
        if self.inner is not None:
            return self.inner()
        dist.all_reduce(self.value)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
        layer, value = Layer(4), torch.ones(4)
        works = {"all_reduce": lambda: dist.all_reduce(value), "all_reduce below four modules": layer}
        recording.begin(None)
        without = {name: microseconds(work) for name, work in works.items()}
        record = RankRecord(Path(folder) / "record", 0, 1)
        points.have(record)
        recording.begin(record)
        for name, work in works.items():
            watched = microseconds(work)
            print(f"{name}: {watched:.1f} us, {without[name]:.1f} without, the watch {watched - without[name]:.1f}")
        print(f"a point of a step: {microseconds(lambda: points.reach('forward', 3)):.2f} us")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
