"""Score forecasts against published runs: `python benchmarks/forecast.py --data DIR [--rows] [--json]`.

DIR holds CSV files with the columns of a published run. For each file: rows scored, rows skipped with the reason,
mean and median |error|, bias, 90th percentile, and Kendall's tau of layouts of one model on one cluster.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forecast_bubbles import bubble
from forecast_cells import Row
from forecast_ranking import Timed, ranked, tau
from forecast_rows import Case, Skip, case_of

from shardwise.costs.block import BlockCosts
from shardwise.errors import ShardwiseError
from shardwise.simulator import Forecast, simulate
from shardwise.simulator.parts import GAPS, StepContext

# files of a folder that are not runs, and what is made of them
FACTS = {
    "gpus": "facts of devices: packaged as devices.csv",
    "models": "shapes: packaged as models.csv",
    "gemm_measured": "matrix products: calibration, packaged as gemm.csv",
    "nccl_measured": "collectives: calibration, packaged as collectives.csv",
}
LABELS = {
    "mixtures": "  of experts", "ratios": "schedule ratios", "small": "memory below 7B", "told": "  its attention told",
}  # fmt: skip
# what, on which files, used for
CALIBRATED = (
    ("matrix products by shape", "gemm_measured.csv", "A100, H100, H200, B200"),
    ("collectives inside a node", "nccl_measured.csv", "8 kinds of GPU"),
    ("share of those products in long runs", "products of stas00/ml-engineering; for SimuMax's B200 its own", ""),
    ("attention kernels", "figures of FlashAttention-2's and -3's papers, SimuMax's B200, NVIDIA/cudnn-frontend", ""),
    ("memory bandwidth, float32 accumulation, skew of ranks", "SimuMax's kernel measurements, A100 PCIe and B200", ""),
    (
        "milliseconds of Megatron-Core's host for a layer",
        "megatron_ci_golden.csv, iteration times of width 512, which are not scored",
        "forecast_host.py",
    ),
    ("GAPS: slowest device, clocks, gaps", "the medians of all files of runs together, one constant", "see below"),
    (
        "BLOCKED_US: a blocking message",
        "zero_bubble.csv, schedules that block against those that do not",
        "one constant",
    ),
    (
        "a copy for each rank in DeepSpeed's gathers of 2021",
        "megatron_sc21.csv showed that it matters",
        "a host launch",
    ),
    ("bytes of the loss and of float32 weight gradients", "simumax_b200.csv, memory", "which tensors, no factors"),
    ("bytes of an unfused loss", "megatron_ci_golden.csv, 7B", "which tensors, no factors"),
    (
        "workspaces of Megatron's libraries",
        "megatron_ci_golden.csv, every other row",
        "0.110 GiB; the others say 0.108",
    ),
    ("zero_bubble writes its scores", "zero_bubble.csv, memory", "a yes or no"),
    ("zero_bubble sums gradients in fp16", "its authors' scripts, which ask for it", "not its rows"),
    ("no fused attention in an early image of Megatron's tests", "megatron_ci_golden.csv, memory", "a yes or no"),
    ("contention, launch, unfused factor, links between nodes", "assumed, on no file", ""),
)
FITTED_TO_RUNS = "no constant is fitted to a row"


@dataclass
class Score:
    """Errors of one quantity of one file."""

    errors: list[float]

    def as_dict(self) -> dict[str, float]:
        absolute = sorted(abs(e) for e in self.errors)
        at = max(0, -(-9 * len(absolute) // 10) - 1)
        return {
            "rows": len(absolute),
            "mean": statistics.fmean(absolute),
            "median": statistics.median(absolute),
            "bias": statistics.fmean(self.errors),
            "p90": absolute[at],
        }


def predict(case: Case) -> tuple[float, Forecast | None]:
    """Seconds, and the forecast of a whole step."""
    if case.one_layer:
        step = StepContext(case.shape, case.layout, case.cluster, case.software)
        layer = step.timed(BlockCosts(case.shape, case.layout, case.software, step.kernels).layer())
        return layer.forward + layer.backward + layer.weight, None
    tried = [case.layout]
    if case.open_micro_batch:
        per_rank = case.layout.global_batch // case.layout.dp
        tried = [case.layout.with_(micro_batch=m, n_micro=per_rank // m) for m in (1, 2, 4, 8) if per_rank % m == 0]
    found = [simulate(case.shape, lay, case.cluster, case.software, precision=case.precision) for lay in tried]
    fit = [f for f in found if f.worst.allocated < case.cluster.device.memory_bytes] or found
    best = min(fit, key=lambda f: f.step_s)
    return best.step_s, best


def score_file(name: str, rows: Iterable[Mapping[str | None, object]]) -> dict[str, Any]:
    """All figures of one file."""
    skipped: Counter[str] = Counter()
    times, mixtures, memories, small, told = (Score([]) for _ in range(5))
    lines: list[dict[str, Any]] = []
    groups: dict[str, list[Timed]] = defaultdict(list)
    schedules: dict[tuple[str, int], dict[str, tuple[float, float]]] = defaultdict(dict)
    bubbles: list[tuple[str, float, float]] = []
    for cells in rows:
        row = Row(cells)
        if (rates := bubble(row)) is not None:
            bubbles.append(rates)
            if not row["step_time_s"]:
                continue
        try:
            case = case_of(name, row)
            seconds, forecast = predict(case)
        except (Skip, ShardwiseError) as reason:
            skipped[str(reason)] += 1
            continue
        line: dict[str, Any] = {"row": case.label}
        if case.seconds is not None:
            error = seconds / case.seconds - 1
            times.errors.append(error)
            if case.shape.experts:
                mixtures.errors.append(error)
            groups[case.group].append(Timed(case.label, case.seconds, seconds))
            schedules[row["model"], case.layout.n_micro][case.layout.schedule] = (case.seconds, seconds)
            line |= {"measured_s": case.seconds, "forecast_s": seconds, "time_error": error}
        if forecast is not None and case.memory_gib:
            unit = 1e9 if case.memory_is_gb else 2**30
            for stage, value in case.memory_gib:
                ledger = forecast.worst if stage < 0 else forecast.memory[stage]
                error = (ledger.reserved if case.memory_is_reserved else ledger.allocated) / unit / value - 1
                (small if case.small else memories).errors.append(error)
                line[f"memory_error_{stage}"] = error
                if case.small and case.told_attention:
                    told.errors.append(error)
        lines.append(line)
    agree, total = map(sum, zip(*(tau(pairs) for pairs in groups.values()), strict=True)) if groups else (0, 0)
    result: dict[str, Any] = {"file": name, "skipped": dict(skipped), "lines": lines}
    if times.errors:
        result["time"] = times.as_dict()
    if 0 < len(mixtures.errors) < len(times.errors):
        result["mixtures"] = mixtures.as_dict()
    if memories.errors:
        result["memory"] = memories.as_dict()
    if small.errors:
        result["small"] = small.as_dict()
    if told.errors:
        result["told"] = told.as_dict()
    if bubbles:
        points = [100 * (found - published) for _, published, found in bubbles]
        result["bubbles"] = {
            "rows": len(points), "mean": statistics.fmean(map(abs, points)), "worst": max(map(abs, points)),
            "lines": [{"row": label, "published": a, "simulated": b} for label, a, b in bubbles],
        }  # fmt: skip
    if total:
        result["tau"], result["pairs"], result["groups"] = agree / total, total, ranked(groups)
    if any("1f1b" in by_name and len(by_name) > 1 for by_name in schedules.values()):
        result["ratios"] = _ratios(schedules)
    return result


def score_path(path: Path) -> dict[str, Any]:
    """The figures of a file, or why it cannot be read: it is text in UTF-8, with a line of column names."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        return {"file": path.stem, "skipped": {f"the file cannot be read: {error}": 1}, "lines": []}
    if not rows:
        return {"file": path.stem, "skipped": {"the file has no rows": 1}, "lines": []}
    return score_file(path.stem, rows)


def leave_one_out(results: list[dict[str, Any]]) -> None:
    """For each file its time errors with GAPS taken from the other files: the mean of their medians."""
    bare = {}
    for result in results:
        ratios = [line["measured_s"] / line["forecast_s"] * GAPS for line in result["lines"] if "time_error" in line]
        if ratios:
            bare[result["file"]] = statistics.median(ratios)
    for result in results:
        others = [value for file, value in bare.items() if file != result["file"]]
        if result["file"] in bare and others:
            gaps = statistics.fmean(others)
            errors = [(1 + line["time_error"]) * gaps / GAPS - 1 for line in result["lines"] if "time_error" in line]
            result["without_file"] = {"gaps": gaps, **Score(errors).as_dict()}


def _ratios(schedules: dict[tuple[str, int], dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Throughput of each schedule over 1F1B's: |forecast / measured - 1|."""
    errors = []
    for by_name in schedules.values():
        base = by_name.get("1f1b")
        for name, (measured, forecast) in by_name.items():
            if base and name != "1f1b":
                errors.append((base[1] / forecast) / (base[0] / measured) - 1)
    return Score(errors).as_dict()


def text(results: list[dict[str, Any]], rows: bool) -> str:
    """The report."""
    out = []
    for result in results:
        out.append(f"\n{result['file']}")
        for kind in ("time", "mixtures", "memory", "small", "told", "ratios"):
            if kind in result:
                s = result[kind]
                label = LABELS.get(kind, kind)
                out.append(
                    f"  {label:20} {s['rows']:3} scored   mean |error| {s['mean']:6.1%}   median {s['median']:6.1%}   "
                    f"bias {s['bias']:+6.1%}   p90 {s['p90']:6.1%}"
                )
        if "bubbles" in result:
            b = result["bubbles"]
            out.append(
                f"  bubble rates         {b['rows']:3} scored   mean |error| {b['mean']:.2f} points   "
                f"worst {b['worst']:.2f} points   (simulated with stated times, forecast_bubbles.py)"
            )
        if "tau" in result:
            out.append(
                f"  Kendall's tau   {result['tau']:.2f} over {result['pairs']} pairs of one model on one cluster"
            )
            for group in result["groups"]:
                out.append(
                    f"    {group['tau']:5.2f} over {group['pairs']:2} pairs of {group['layouts']} layouts, the one put "
                    f"first {group['regret']:.1%} slower than the best: {group['group']}"
                )
        for reason, count in sorted(result["skipped"].items(), key=lambda item: -item[1]):
            out.append(f"  skipped {count:4}    {reason}")
        if rows:
            for line in result["lines"]:
                figures = "  ".join(
                    f"{k} {v:+.1%}" if "error" in k else f"{k} {v:.4g}" for k, v in line.items() if k != "row"
                )
                out.append(f"    {line['row']}: {figures}")
    out.append("")
    for result in results:
        if "without_file" in result:
            s = result["without_file"]
            out.append(
                f"{result['file']}: with GAPS from the other files alone ({s['gaps']:.3f}) "
                f"mean |error| {s['mean']:.1%}, bias {s['bias']:+.1%}"
            )
    every = [e for r in results for e in (line["time_error"] for line in r["lines"] if "time_error" in line)]
    if every:
        s = Score(every).as_dict()
        out.append(f"\nall times: {s['rows']} rows, mean |error| {s['mean']:.1%}, bias {s['bias']:+.1%}")
    out.append("\ncalibrated on:")
    out += [f"  {what}: {where}{f' ({more})' if more else ''}" for what, where, more in CALIBRATED]
    out.append(f"  {FITTED_TO_RUNS}")
    return "\n".join(out).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published CSV files")
    parser.add_argument("--file", action="append", help="score only this file; repeatable")
    parser.add_argument("--rows", action="store_true", help="one line for each row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    here = sorted(p.stem for p in args.data.glob("*.csv"))
    if missing := [name for name in args.file or [] if name not in here]:
        parser.error(f"no {missing[0]}.csv in {args.data} (there are {', '.join(here) or 'no CSV files'})")
    results = []
    for name in args.file or [name for name in here if name not in FACTS]:
        results.append(score_path(args.data / f"{name}.csv"))
    leave_one_out(results)
    facts = {name: FACTS[name] for name in here if name in FACTS and not args.file}
    if args.json:
        print(json.dumps({"files": results, "not_runs": facts, "calibrated": CALIBRATED}))
        return
    print(text(results, args.rows))
    for name, why in facts.items():
        print(f"\n{name}: not runs; {why}", end="")
    print()


if __name__ == "__main__":
    main()
