"""A step with the optimizer's state on a disk, against the longer of its two parts, each measured alone.

    python benchmarks/offload_overlap.py [ROUNDS]

101 million parameters in fp32 with fused AdamW, one process of one thread. In turn: `single` (compute), the state's way
from the disk and back with an optimizer that does nothing (disk), `offload=optimizer:disk`, and the same with
`gradients=as_made`. Rows of a batch make compute shorter than the disk, about as long, and longer. Medians of seconds,
and of a round's ratios. TMPDIR names the folder of the file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from offload_limit import Case

from shardwise import parallelize
from shardwise.engine.engine import Engine

TIERED = ("offload=optimizer:disk", "offload=optimizer:disk,gradients=as_made")
ROWS = (16, 64, 256)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def moved_alone(engine: Engine) -> None:
    """Read all state and write it, as a step does, without an update; gradients must be there, all zeros."""
    assert engine.state.tier is not None
    engine.state.tier.step(lambda: None)


def rounds(rows: int, count: int) -> list[dict[str, float]]:
    """Returns, for each round, the seconds of "single", "disk" and each plan with a tier."""
    case = Case(1024, 12, rows, TIERED, 0.0, partial(torch.optim.AdamW, lr=1e-4, fused=True))
    engines = {plan: parallelize(case.task(), plan) for plan in ("single", *TIERED)}
    batch, results = case.batch(0), []
    for engine in engines.values():  # state is first made in a step
        for _ in range(2):
            engine.step(batch)
    # gradients tell the tier which of its sub-groups step
    alone = engines[TIERED[0]]
    for turn in range(count):
        row = {}
        for plan in (*engines, "disk") if turn % 2 == 0 else ("disk", *reversed(engines)):
            if plan == "disk":
                for slot in alone.state.technique.slots:
                    slot.master.grad = torch.zeros_like(slot.master)
                row[plan] = seconds(partial(moved_alone, alone))
            else:
                row[plan] = seconds(partial(engines[plan].step, batch))
        results.append(row)
    for engine in engines.values():
        engine.close()
    return results


def main() -> None:
    count = int(sys.argv[1]) if sys.argv[1:] else 7
    torch.set_num_threads(1)
    for rows in ROWS:
        results = rounds(rows, count)
        print(f"{rows} rows", flush=True)
        for name in results[0]:
            ratio = median(row[name] / max(row["single"], row["disk"]) for row in results)
            told = f", {ratio:.2f} of the longer part (bar 1.15)" if name in TIERED else " alone"
            print(f"  {name}: {median(row[name] for row in results):.2f} s{told}", flush=True)


if __name__ == "__main__":
    main()
