"""What Megatron's host takes for a layer: `python benchmarks/forecast_host.py --data DIR` reads its figures.

Golden values of its tests (megatron_ci_golden.csv) have 12 layers of width 512, which a GPU computes in no time. An
iteration of `micro` micro-batches over `pp` stages of `chunks` pieces starts (micro + (pp - 1) / chunks) x 12 / pp
layers one after the other, and something once:

    a layer            median slope over all pairs of layouts (Theil and Sen), dense, bf16
    FP8                what a dense layer takes more in the same layout; where there is none, beside the slope
    experts            what a layer of experts takes more than a dense one, median over layouts that have both
    rows sent beside   times as much as the same layout without, once what an iteration takes once is off

Runs of one node of a kind that is tested on two are left out: they share a host with others.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from forecast_cells import Row, Skip, number

LAYERS, WIDTH = 12, 512


class Kind(NamedTuple):
    """A layout, and what its layers are."""

    experts: bool
    fp8: bool
    beside: bool
    layout: tuple[int, ...]  # tp, pp, cp, micro-batches, chunks


class Iteration(NamedTuple):
    """Layers that start one after the other, and seconds."""

    layers: float
    seconds: float


def iterations(rows: Iterable[Mapping[str | None, object]], gpu: str) -> dict[Kind, Iteration]:
    """The median iteration of each kind on one device."""
    out: dict[Kind, list[Iteration]] = defaultdict(list)
    for cells in rows:
        try:
            kind, layers, seconds = _read(Row(cells), gpu)
        except Skip:
            continue
        out[kind].append(Iteration(layers, seconds))
    return {kind: Iteration(of[0].layers, median(one.seconds for one in of)) for kind, of in out.items()}


def _read(row: Row, gpu: str) -> tuple[Kind, float, float]:
    small = (number(row, "layers"), number(row, "hidden")) == (LAYERS, WIDTH)
    name = row["model"]
    if row["gpu"] != gpu or not small or not name.startswith(("gpt/", "moe/")) or not row["iteration_time_s"]:
        raise Skip("another run")
    if row["recompute"] not in ("", "none") or row["megatron_fsdp"] == "1" or "1node" in name or "muon" in name:
        raise Skip("does something else")
    tp, pp, cp = (number(row, axis, 1) for axis in ("tp", "pp", "cp"))
    each = number(row, "vpp_layers", LAYERS // pp)
    data = max(1, number(row, "n_gpus", 8) // (tp * pp * cp))
    micro, chunks = number(row, "global_batch") // (number(row, "micro_batch") * data), LAYERS // (pp * each)
    kind = Kind(
        number(row, "num_experts", 0, least=0) > 0,
        row["precision"] == "fp8",
        "ovlp" in name,
        (tp, pp, cp, micro, chunks),
    )
    return kind, (micro + (pp - 1) / chunks) * LAYERS / pp, float(row["iteration_time_s"])


def figures(kinds: Mapping[Kind, Iteration]) -> dict[str, float]:
    """Milliseconds of a layer, and how many times as much where rows are sent beside computing."""
    dense = [one for kind, one in kinds.items() if not (kind.experts or kind.fp8 or kind.beside)]
    pairs = [(a, b) for a, b in combinations(dense, 2) if a.layers != b.layers]
    layer = median((b.seconds - a.seconds) / (b.layers - a.layers) for a, b in pairs)
    once = median(one.seconds - layer * one.layers for one in dense)
    more, cast, beside = [], [], []
    for kind, one in kinds.items():
        plain = kinds.get(kind._replace(experts=False, beside=False))
        if kind.experts and not kind.beside and plain:
            more.append((one.seconds - plain.seconds) / one.layers)
        if kind.fp8 and not kind.experts:
            cast.append((one.seconds - once) / one.layers - layer)
        if kind.beside and (without := kinds.get(kind._replace(beside=False))):
            beside.append((one.seconds - once) / (without.seconds - once))
    found = {"layer, ms": 1e3 * layer, "once, ms": 1e3 * once}
    named = ("experts, ms more", more, 1e3), ("FP8, ms more", cast, 1e3), ("rows sent beside, times", beside, 1.0)
    return found | {name: scale * median(of) for name, of, scale in named if of}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published CSV files")
    path = parser.parse_args().data / "megatron_ci_golden.csv"
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    for gpu in ("H100", "A100", "GB200"):
        kinds = iterations(rows, gpu)
        print(
            gpu, f"{len(kinds)} layouts", *(f"{name} {value:.2f}" for name, value in figures(kinds).items()), sep="   "
        )


if __name__ == "__main__":
    main()
