"""What shardwise costs beside the loop one would write by hand, and beside Accelerate and Lightning Fabric.

Two ranks with one thread each train two copies of the same decoder, from the same weights and on the same batches, in
the same processes and process group: one copy by `engine.step`, the other by the peer's loop. Steps alternate, and
which copy goes first alternates too. A pair's ratio is t_peer / t_shardwise, each the slower rank's time; above 1,
shardwise is faster. The median stands with its 95% bootstrap interval. It is "short" if that interval's upper end is
below 0.98, "faster" if its lower end is above 1, and "holds" otherwise. Beside it stands the same ratio of the
processor time that the ranks spent, which other programs on the machine hardly disturb.

Both sides: fp32, AdamW at torch's defaults, clipping by global norm, the loss a sum over tokens divided by the global
weight, DDP or FSDP2 (each block and the root) at torch's defaults. The peers know that ranks' weights are equal;
shardwise does not and asks. Over the warm-up, losses and gradient norms of both copies are compared, so that no side
does less (later, rounding alone drives them apart).

    python benchmarks/overhead.py --strategy ddp --peer hand --pairs 100
    python benchmarks/overhead.py --write                                     # docs/tables/overhead.md

"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peers import BUILDERS, CLIP_NORM, CONFIG, LENGTH, RANKS, SAMPLES, TASK, Batch, Unavailable, make_batch

import shardwise
from shardwise.models.decoder import Decoder
from shardwise.ranks import launch

Numbers = tuple[float, float]  # loss, gradient norm
WARM_UP = 8  # pairs run before those that count
RESAMPLES, SEED = 10_000, 0
SHORT = 0.98
PLANS = {
    "ddp": "dp_replicate=2",
    "zero1": "dp_shard=2,zero=1",
    "zero2": "dp_shard=2,zero=2",
    "zero3": "dp_shard=2,zero=3",
}
PEERS = {"hand": "hand-written", "accelerate": "Accelerate", "fabric": "Lightning Fabric"}
READINGS = ("every", "never")
TABLE = Path(__file__).resolve().parent.parent / "docs" / "tables" / "overhead.md"

# --- on each rank ---


@dataclass
class Times:
    """One rank's seconds of each counted pair, and how far apart the two copies' numbers came."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)  # of all threads
    peer_cpu: list[float] = field(default_factory=list)
    difference: float = 0.0  # largest relative difference of global loss or gradient norm during the warm-up
    parameters: int = 0
    why_not: str = ""  # the peer does not offer this


def on_rank(strategy: str, peer: str, reading: str, pairs: int) -> Times:
    """Alternate the two copies' steps and time each."""
    _be_quiet()
    torch.set_num_threads(1)
    engine = shardwise.parallelize(TASK, PLANS[strategy], clip_norm=CLIP_NORM)
    model = Decoder(CONFIG)
    model.load_state_dict(engine.state_dict())
    times = Times(parameters=sum(p.numel() for p in model.parameters()))
    try:
        peer_step = BUILDERS[strategy, peer](model)
    except Unavailable as why:
        return Times(why_not=str(why))
    torch.set_num_threads(1)  # Accelerate sets its own
    each = SAMPLES // RANKS
    mine = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)

    def ours(batch: Batch) -> Numbers:
        result = engine.step(batch)
        return result.loss, result.grad_norm

    def theirs(batch: Batch) -> Any:
        loss, norm = peer_step(batch)
        return (loss.item(), float(_whole(norm))) if reading == "every" else (loss, norm)

    gc.collect()
    gc.freeze()  # a collection walks what one step left behind, not both models
    for pair in range(WARM_UP + pairs):
        batch = make_batch(pair)
        local = {name: tensor[mine].clone() for name, tensor in batch.items()}
        sides = [(ours, batch), (theirs, local)]
        timed = [_timed(*side) for side in (sides if pair % 2 == 0 else sides[::-1])]
        (t_ours, c_ours, of_ours), (t_peer, c_peer, of_theirs) = timed if pair % 2 == 0 else timed[::-1]
        if pair < WARM_UP:
            times.difference = max(times.difference, _difference(of_ours, of_theirs))
        else:
            times.ours.append(t_ours)
            times.peer.append(t_peer)
            times.ours_cpu.append(c_ours)
            times.peer_cpu.append(c_peer)
    return times


def _timed(step: Callable[[Batch], Any], batch: Batch) -> tuple[float, float, Any]:
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    numbers = step(batch)
    return time.perf_counter() - start, time.process_time() - cpu, numbers


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _difference(ours: Numbers, theirs: Any) -> float:
    """Outside the timing: the peer's loss averaged over ranks, and its norm, against ours."""
    loss = torch.as_tensor(float(theirs[0]))
    dist.all_reduce(loss)
    pairs = ((ours[0], float(loss) / RANKS), (ours[1], float(_whole(torch.as_tensor(theirs[1])))))
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def _be_quiet() -> None:
    import logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


# --- what they add up to ---


@dataclass
class Row:
    """One comparison."""

    strategy: str
    peer: str
    reading: str
    pairs: int
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    cpu_ratio: float = math.nan
    cpu_low: float = math.nan
    cpu_high: float = math.nan
    peer_ms: float = math.nan
    shardwise_ms: float = math.nan
    difference: float = math.nan
    parameters: int = 0
    verdict: str = ""


def bootstrap(ratios: np.ndarray) -> tuple[float, float]:
    """95% interval of the median."""
    draws = np.random.default_rng(SEED).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return float(low), float(high)


def compare(strategy: str, peer: str, reading: str, pairs: int) -> Row:
    """Run one comparison on fresh ranks."""
    ranks: list[Times] = launch(on_rank, RANKS, (strategy, peer, reading, pairs))
    row = Row(strategy, peer, reading, pairs)
    if ranks[0].why_not:
        row.verdict = ranks[0].why_not
        return row
    ours = np.max([times.ours for times in ranks], axis=0)
    theirs = np.max([times.peer for times in ranks], axis=0)
    row.ratio = float(np.median(theirs / ours))
    row.low, row.high = bootstrap(theirs / ours)
    cpu = np.sum([times.peer_cpu for times in ranks], axis=0) / np.sum([times.ours_cpu for times in ranks], axis=0)
    row.cpu_ratio = float(np.median(cpu))
    row.cpu_low, row.cpu_high = bootstrap(cpu)
    row.peer_ms, row.shardwise_ms = float(np.median(theirs)) * 1e3, float(np.median(ours)) * 1e3
    row.difference = max(times.difference for times in ranks)
    row.parameters = ranks[0].parameters
    row.verdict = "short" if row.high < SHORT else "holds" if row.low <= 1 else "faster"
    return row


def as_table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| strategy | peer | numbers read | peer ms | shardwise ms | t_peer / t_shardwise | 95% "
        "| of CPU time | 95% | pairs | verdict |",
        "|---|---|---|---:|---:|---:|---|---:|---|---:|---|",
    ]
    for row in rows:
        peer = PEERS[row.peer] + (" (DDP + ZeroRedundancyOptimizer)" if row.strategy in ("zero1", "zero2") else "")
        if math.isnan(row.ratio):
            lines.append(f"| {row.strategy} | {peer} | {row.reading} | | | | | | | | {row.verdict} |")
            continue
        lines.append(
            f"| {row.strategy} | {peer} | {row.reading} | {row.peer_ms:.1f} | {row.shardwise_ms:.1f} | "
            f"{row.ratio:.3f} | {row.low:.3f} to {row.high:.3f} | {row.cpu_ratio:.3f} | "
            f"{row.cpu_low:.3f} to {row.cpu_high:.3f} | {row.pairs} | {row.verdict} |"
        )
    return "\n".join(lines)


def as_json(rows: list[Row]) -> str:
    """A list of objects; null where nothing was measured."""

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    return json.dumps([{name: plain(value) for name, value in asdict(row).items()} for row in rows], indent=1)


def as_page(rows: list[Row]) -> str:
    """The table with what it was measured on."""
    done = [row for row in rows if row.parameters]
    worst = max((row.difference for row in done), default=math.nan)
    setting = (
        f"{done[0].parameters / 1e6:.1f} M parameters, {SAMPLES} samples of {LENGTH} tokens, {RANKS} ranks with one "
        f"thread each on {os.cpu_count()} {platform.machine()} cores, gloo, torch {torch.__version__}, "
        f"{', '.join(_versions())}; the machine is shared, its load average at the end {os.getloadavg()[0]:.0f}"
    )
    return "\n".join(
        [
            "# The cost of the abstraction",
            "",
            f"Made by `python benchmarks/overhead.py --write` on {date.today()}; how it is measured stands there.",
            "",
            f"{setting}. Intervals are of the median ratio over alternating pairs: {RESAMPLES:,} bootstrap resamples, "
            f"seed {SEED}. \"numbers read\": whether the peer's loop reads its loss and gradient norm every step, or "
            "never; shardwise always does. Above 1, shardwise is faster; \"short\" would be an upper end below "
            f"{SHORT}. In the first {WARM_UP} steps, losses and gradient norms of the two sides differed by at most "
            f"{worst:.0e} relative.",
            "",
            as_table(rows),
            "",
        ]
    )  # fmt: skip


def _versions() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("accelerate", "lightning", "lightning-fabric"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=100, help="counted pairs of steps for each comparison")
    parser.add_argument("--strategy", choices=("ddp", "zero3", "zero1", "zero2", "all"), default="all")
    parser.add_argument("--peer", choices=(*PEERS, "all"), default="all")
    parser.add_argument("--reading", choices=(*READINGS, "both"), default="both",
                        help="whether the peer's loop reads loss and gradient norm (default: both)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} in docs/tables")
    options = parser.parse_args()
    wanted = [
        (strategy, peer, reading)
        for strategy, peer in BUILDERS
        for reading in READINGS
        if options.strategy in (strategy, "all")
        and options.peer in (peer, "all")
        and options.reading in (reading, "both")
    ]
    if not wanted:
        parser.error(f"there is no comparison of {options.strategy} with {options.peer}")
    rows = []
    for one in wanted:
        rows.append(compare(*one, options.pairs))
        print(f"{len(rows)}/{len(wanted)} {' '.join(one)}: {rows[-1].ratio:.3f}", file=sys.stderr)
    print(as_json(rows) if options.json else as_table(rows))
    if options.write:
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(as_page(rows))


if __name__ == "__main__":
    main()
