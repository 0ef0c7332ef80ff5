"""Formats the final table of a run as text, from its `summary.json` (made in training/loop)."""

from __future__ import annotations

from typing import Any

from shardwise.observe.progress_display import short, size


def summary_text(summary: dict[str, Any]) -> str:
    """Returns `summary.json` as lines for a reader: loss, speed, memory of each rank, files, and generated text."""
    rows = [("run", summary["folder"]), ("task", summary["task"]), ("plan", _plan(summary))]
    rows += [("steps", _steps(summary)), ("loss", _loss(summary)), ("speed", _speed(summary))]
    rows += _memory(summary["memory"])
    rows += _forecast(summary.get("forecast"))
    rows.append(("weights", summary["weights"]))
    if summary.get("adapters"):
        rows.append(("adapters", summary["adapters"]))
    lines = [f"{name:<8}  {value}" for name, value in rows]
    if summary.get("text"):
        lines += ["", "what the model wrote:", *(f"  | {line}" for line in summary["text"].splitlines())]
    return "\n".join(lines)


def _plan(summary: dict[str, Any]) -> str:
    """Returns the plan, or the plans that followed each other, with the number of ranks."""
    ranks = f" ({summary['world_size']} rank{'s' if summary['world_size'] > 1 else ''})"
    return "; then ".join(summary.get("plans") or [summary["plan"]]) + ranks


def _steps(summary: dict[str, Any]) -> str:
    """Returns the steps taken, how many of them here, in how many seconds, skipped and repeated."""
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    repeated = f", {summary['repeated']} repeated to be clipped" if summary.get("repeated") else ""
    before = summary.get("before", 0)  # taken by the run that this one goes on from
    here = f", the last {summary['steps'] - before}" if before else ""
    return f"{summary['steps']}{here} in {summary['seconds']:.1f} s{skipped}{repeated}"


def _loss(summary: dict[str, Any]) -> str:
    """Returns the first and last loss as text, with those on held-out data."""
    text = f"{_number(summary['first_loss'])} -> {_number(summary['loss'])}"
    if summary["eval_loss"] is not None:
        text += f", on held-out data {_number(summary['eval_loss'])}"
    if summary.get("best") is not None:
        text += f" (best {_number(summary['best']['eval_loss'])}, after step {summary['best']['step']})"
    return text


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _speed(summary: dict[str, Any]) -> str:
    """Returns the rate of a run as text, with its MFU or FLOP/s."""
    unit = summary["unit"]
    convention = summary.get("flops_convention", "").split(";")[0]  # its full text is in summary.json
    text = f"{short(summary[f'{unit}_per_s'])} {unit}/s"
    if "mfu" in summary:
        text += f", MFU {100 * summary['mfu']:.1f} % ({convention})"
    elif "flops_per_s_per_rank" in summary:
        text += f", {short(summary['flops_per_s_per_rank'], ' ')}FLOP/s per rank ({convention})"
    return text


def _forecast(forecasts: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Returns (label, text) rows of each forecast beside its measurement; [] for a run without a forecast."""
    rows: list[tuple[str, str]] = []
    forecasts = forecasts or {}
    for name, (forecast, measured) in forecasts.get("beside", {}).items():
        # a figure that was not measured has nothing to stand beside
        if measured:
            shown = [f"{v:.4g} s" if name.endswith("step") else size(v) for v in (forecast, measured)]
            text = f"{name}: {shown[0]} forecast, {shown[1]} measured ({forecast / measured - 1:+.1%})"
            # a machine that is slower than when it was probed makes the forecast wrong by that factor
            if name == "step" and abs(forecasts["pace"] - 1) >= 0.01:
                text += f"; the same work took {forecasts['pace']:.2f} times as long as during the probe"
            # one label for all lines
            rows.append(("" if rows else "forecast", text))
    return rows


def _memory(ranks: list[dict[str, int]]) -> list[tuple[str, str]]:
    """Returns (label, text) rows of each rank's memory, from its {kind: bytes}."""
    rows = []
    for rank, memory in enumerate(ranks):
        parts = [f"{name} {size(count)}" for name, count in memory.items() if count is not None]
        rows.append(("memory" if rank == 0 else "", f"rank {rank}: {', '.join(parts)}"))
    return rows
