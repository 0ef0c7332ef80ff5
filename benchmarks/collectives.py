"""Four collectives on this machine's CPU ranks beside the formula: `python benchmarks/collectives.py --write`.

Writes docs/tables/collectives.md. The formula: steps of a ring x the time of the smallest message, plus the bytes that
a rank receives (layout/ring_steps.py) at the rate of the largest all-reduce.
"""

from __future__ import annotations

import sys
import time
from datetime import date
from pathlib import Path

from shardwise.layout.ring_steps import ring
from shardwise.ranks import RankPool

PAGE = Path(__file__).parents[1] / "docs" / "tables" / "collectives.md"
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SIZES = (2**12, 2**16, 2**20, 2**24)
ROUNDS = 30


def times() -> dict[str, list[float]]:
    """The least seconds of each collective by size of its whole tensor, on the slowest rank. Collective."""
    import torch
    import torch.distributed as dist

    ranks, found = dist.get_world_size(), {}
    for op in OPS:
        found[op] = []
        for size in SIZES:
            whole, part = torch.ones(size // 4), torch.ones(size // 4 // ranks)
            call = {
                "all_reduce": lambda whole=whole: dist.all_reduce(whole),
                "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
                "all_to_all": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
            }[op]
            best = float("inf")
            for _ in range(ROUNDS if size < 2**22 else 8):
                dist.barrier()
                began = time.perf_counter()
                call()
                best = min(best, time.perf_counter() - began)
            row = torch.tensor([best], dtype=torch.float64)
            dist.all_reduce(row, dist.ReduceOp.MAX)
            found[op].append(float(row))
    return found


def main() -> None:
    rows = []
    with RankPool(quiet=True) as pool:
        for ranks in (2, 4):
            found = pool.run(times, ranks, timeout_s=300)[0]
            wait = found["all_reduce"][0] / len(ring("all_reduce", ranks).steps)
            share = ring("all_reduce", ranks).received()[0]
            rate = share * SIZES[-1] / (found["all_reduce"][-1] - found["all_reduce"][0])
            for op in OPS:
                drawn = ring(op, ranks)
                cells = []
                for size, took in zip(SIZES, found[op], strict=True):
                    formula = len(drawn.steps) * wait + drawn.received()[0] * size / rate
                    cells.append(f"{1e6 * took:,.0f} / {1e6 * formula:,.0f}")
                rows.append(
                    f"| {op} | {ranks} | {len(drawn.steps)} | {drawn.received()[0]:.2f} | {' | '.join(cells)} |"
                )
    head = " | ".join(f"{size // 1024:,} KiB" for size in SIZES)
    text = (
        f"# Collectives beside the formula\n\nMade by `python benchmarks/collectives.py --write` on {date.today()}: "
        "microseconds measured / by the formula, over gloo "
        "between ranks of one machine with two virtual cores, which other work shared; the "
        "least of 30 calls (8 of the largest), on the slowest rank. Four ranks share two cores. The formula is steps × "
        "(time of a message) + (bytes received) / rate, with the time and the rate taken from the smallest and the "
        "largest all-reduce of as many ranks: those two cells agree by construction, the others are forecast. gloo "
        "chooses its own algorithms, which need not be rings.\n\n"
        f"| collective | ranks | steps | received, of the tensor | {head} |\n|---|---|---|---|{'---|' * len(SIZES)}\n"
        + "\n".join(rows) + "\n"
    )  # fmt: skip
    print(text)
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
