"""A stack of convolutions on two tiles: halos beside computation, or waited for; over a slow link and on loopback.

    python benchmarks/domain.py                        # under a minute
    python benchmarks/domain.py --pairs 21 --write     # docs/tables/domain.md, a few minutes

Forward and backward of `LAYERS` convolutions of kernel 5 with ReLU, float32, a field cut along its rows over two ranks
of one thread each. Four ways take turns, so that whatever else runs on the machine meets them alike; a figure is the
median of the ratios of neighbours, each the slower rank's time.

    overlap     domain_overlap=auto: a tile is convolved while its halo is on its way
    waiting     domain_overlap=never
    deep        domain_depth=LAYERS: one exchange for all convolutions, which compute borders twice
    whole       one process with one thread computes all; half of its time is what two ranks could reach at best
    apart       both ranks convolve their tiles at once, as if these were all, and send nothing: what two ranks reach
                on this machine, whose memory and clock they share

The slow link lies between two network namespaces, each of which may send so many Mbit/s (`tc`, a token bucket); it
needs root and Linux. Bars: overlap / waiting below 1 on the slow link and at most 1.03 on loopback; overlap / (whole /
2) at most 1.15 on loopback, where `apart` shows what of it is the machine's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from slowest import timed

import shardwise.engine.find_positions  # noqa: F401 - functions on tiles
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, to_part
from shardwise.part.tiles import overlap
from shardwise.ranks import launch
from shardwise.ranks.join import join

TABLE = Path(__file__).resolve().parent.parent / "docs" / "tables" / "domain.md"
LAYERS, CHANNELS, KERNEL, RANKS = 4, 32, 5, 2
WAYS = ("overlap", "waiting", "deep", "whole", "apart")
Times = list[dict[str, float]]


def stack(field: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Forward and backward; gradients of weights stay those of a rank's rows."""
    x = field
    for weight in weights:
        x = F.conv2d(x, weight, padding=KERNEL // 2).relu()
    torch.autograd.grad(x.square().sum(), [field, *weights])


def measure(size: int, pairs: int, alone: bool) -> Times:
    """Seconds of each way in each round; `whole`, if asked for, is run by rank 0 while the other waits."""
    torch.set_num_threads(1)
    (axis,) = build_mesh(Plan(domain=(RANKS,)), torch.device("cpu")).inner
    torch.manual_seed(0)
    owners, whole = Owners.blocks(size, RANKS), torch.randn(1, CHANNELS, size, size, requires_grad=True)
    shape, deviation = (CHANNELS, CHANNELS, KERNEL, KERNEL), (2 / CHANNELS / KERNEL**2) ** 0.5
    weights = [(torch.randn(shape) * deviation).requires_grad_() for _ in range(LAYERS)]
    share = owners.take(whole.detach(), 2, axis.index).contiguous().requires_grad_()
    waits = replace(axis, overlap_from=math.inf)
    axes = axis, waits, replace(waits, halo_depth=LAYERS)
    auto, waiting, deep = (to_part(share, 2, owners, each) for each in axes)
    ways = {
        "overlap": lambda: stack(auto, weights),
        "waiting": lambda: stack(waiting, weights),
        "deep": lambda: stack(deep, weights),
        "whole": lambda: stack(whole, weights) if axis.index == 0 else None,
        "apart": lambda: stack(share, weights),
    }
    names = [name for name in WAYS if alone or name != "whole"]
    with counted() as ran:
        stack(auto, weights)
    assert ran[0] == LAYERS, f"{ran[0]} of {LAYERS} convolutions passed their halo beside computation"
    found = []
    for turn in range(-1, pairs):
        times = {name: timed(ways[name]) for name in (names if turn % 2 else names[::-1])}
        found += [times] * (turn >= 0)
    return found


@contextmanager
def counted() -> Iterator[list[int]]:
    """Context: how many convolutions passed their halo beside computation."""
    before, ran = overlap._Overlapped.forward, [0]

    def forward(*args: object) -> torch.Tensor:
        ran[0] += 1
        return before(*args)

    overlap._Overlapped.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        yield ran
    finally:
        overlap._Overlapped.forward = staticmethod(before)  # type: ignore[method-assign]


def ip(*words: str, program: str = "ip") -> None:
    """Run one line of `ip` or `tc`."""
    subprocess.run([program, *words], check=True)


@contextmanager
def slow_link(mbit: int) -> Iterator[list[str]]:
    """Context: two network namespaces, 10.231.8.1 and .2, on devices of their names, each sending so many Mbit/s."""
    names = [f"swd{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for place, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.231.8.{place + 1}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "qdisc", "add", "dev", name, "root", "tbf", "rate", f"{mbit}mbit", "burst", "16kb",
               "latency", "400ms", program="tc")  # fmt: skip
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def over_slow_link(mbit: int, size: int, pairs: int) -> Times:
    """`measure`, of two processes that talk over the slow link."""
    told = {**os.environ, "MASTER_ADDR": "10.231.8.1", "MASTER_PORT": "29517", "WORLD_SIZE": str(RANKS)}
    with slow_link(mbit) as names:
        ranks = []
        for rank, name in enumerate(names):
            own = {**told, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": name,
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
            line = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", "--size", str(size),
                    "--pairs", str(pairs)]  # fmt: skip
            ranks.append(subprocess.Popen(line, env=own, stdout=subprocess.PIPE, text=True))
        try:
            said = [rank.communicate(timeout=400)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return json.loads(said[0].splitlines()[-1])


def row(link: str, size: int, found: Times) -> str:
    """One line of the table."""
    cells = [link, f"{size} x {size}"]
    for name in WAYS:
        cells.append(f"{1e3 * statistics.median(t[name] for t in found):.0f}" if name in found[0] else "–")
    for way in ("overlap", "deep"):
        low, *_, high = sorted(ratios := [t[way] / t["waiting"] for t in found])
        cells.append(f"{statistics.median(ratios):.3f} ({low:.2f} to {high:.2f})")
    scaled = [2 * t["overlap"] / t["whole"] for t in found if "whole" in t]
    cells.append(f"{statistics.median(scaled):.3f}" if scaled else "–")
    cells.append(f"{statistics.median(t['overlap'] / t['apart'] for t in found):.3f}")
    return f"| {' | '.join([*cells, str(len(found))])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--size", type=int, default=256, help="rows and columns of the field")
    parser.add_argument("--mbit", type=int, default=50, help="of the slow link, each way")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank, _ = join()
        found = measure(asked.size, asked.pairs, alone=False)
        print(json.dumps(found) if rank == 0 else "", flush=True)
        dist.destroy_process_group()
        return
    names = ["link", "field", *(f"{way}, ms" for way in WAYS), "overlap / waiting", "deep / waiting",
             "overlap / (whole / 2)", "overlap / apart", "rounds"]  # fmt: skip
    head = [f"| {' | '.join(names)} |", "|---|---|" + "---:|" * (len(names) - 2)]
    print("\n".join(head), flush=True)
    lines = []
    for link, size in ((f"{asked.mbit} Mbit/s", asked.size), ("loopback", asked.size), ("loopback", asked.size // 4)):
        slow = link != "loopback"
        found = (
            over_slow_link(asked.mbit, size, asked.pairs)
            if slow
            else launch(measure, RANKS, (size, asked.pairs if size == asked.size else 4 * asked.pairs, True))[0]
        )
        lines.append(row(link, size, found))
        print(lines[-1], flush=True)
    if asked.write:
        intro = (
            f"Made by `python benchmarks/domain.py --write` on {date.today()}, which says what is timed: {LAYERS} "
            f"convolutions of {CHANNELS} channels and kernel {KERNEL}, forward and backward, on two tiles. Times are "
            "medians, ratios medians of neighbours, with the smallest and the largest."
        )
        TABLE.write_text("\n".join(["# Halos beside computation", "", intro, "", *head, *lines, ""]))


if __name__ == "__main__":
    main()
