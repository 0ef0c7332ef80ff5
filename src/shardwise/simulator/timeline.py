"""The timeline of a step as a Chrome/Perfetto trace and as one HTML page with SVG; and scaling curves."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

from shardwise.costs.layout import Layout
from shardwise.errors import ShardwiseError
from shardwise.simulator.forecast import Forecast

DRAWN = 6000  # boxes of a page at most; a browser copes with that many
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#e45756", "W": "#72b7b2", "g": "#bab0ac", "s": "#9d755d"}


def chrome(forecast: Forecast, title: str) -> str:
    """JSON for chrome://tracing and ui.perfetto.dev; microseconds."""
    lanes = list(dict.fromkeys(lane for lane, *_ in forecast.timeline))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": lane}} for i, lane in enumerate(lanes)
    ]
    place = {lane: i for i, lane in enumerate(lanes)}
    events += [
        {"ph": "X", "pid": 0, "tid": place[lane], "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for lane, name, start, end in forecast.timeline
    ]
    return json.dumps({"traceEvents": events, "otherData": {"title": title}})


def page(forecast: Forecast, title: str) -> str:
    """A page without outside resources: where the time goes, the timeline, memory of each stage."""
    return (
        "<!doctype html><meta charset='utf-8'><title>" + html.escape(title) + "</title>"
        "<style>body{font:14px sans-serif;margin:2em}td{padding:2px 12px}svg{border:1px solid #ddd}</style>"
        f"<h1>{html.escape(title)}</h1><p>step {forecast.step_s:.4g} s, MFU {forecast.mfu:.1%}, bubble "
        f"{forecast.bubble:.1%}</p><h2>Where the step's time goes</h2>{_bars(forecast.parts, 's')}"
        f"<h2>Timeline</h2>{_gantt(forecast)}<h2>Memory of each stage</h2>{_memory(forecast)}"
    )


def _bars(values: dict[str, float], unit: str) -> str:
    top = max(values.values(), default=0.0) or 1.0
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{value:.4g} {unit}<td><svg width='400' height='14'>"
        f"<rect width='{400 * value / top:.1f}' height='14' fill='#4c78a8'/></svg>"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
        if value > 0
    )
    return f"<table>{rows}</table>"


def _gantt(forecast: Forecast) -> str:
    boxes = forecast.timeline[:DRAWN]
    if not boxes:
        return "<p>One stage without communication to lay out in time.</p>"
    lanes = list(dict.fromkeys(lane for lane, *_ in boxes))
    end = max(box[3] for box in boxes) or 1.0
    width, height = 1200, 18
    parts = []
    for lane, name, start, stop in boxes:
        x, y = 90 + width * start / end, lanes.index(lane) * height
        colour = COLOURS.get(name[0], "#54a24b")
        parts.append(
            f"<rect x='{x:.1f}' y='{y}' width='{max(0.4, width * (stop - start) / end):.1f}' height='{height - 2}' "
            f"fill='{colour}'><title>{html.escape(name)} {start:.4g}-{stop:.4g} s</title></rect>"
        )
    labels = "".join(f"<text x='2' y='{i * height + 13}'>{html.escape(lane)}</text>" for i, lane in enumerate(lanes))
    cut = f"<p>the first {DRAWN} of {len(forecast.timeline)} boxes</p>" if len(forecast.timeline) > DRAWN else ""
    return f"<svg width='{width + 100}' height='{len(lanes) * height}'>{labels}{''.join(parts)}</svg>{cut}"


def _memory(forecast: Forecast) -> str:
    return "".join(
        f"<h3>stage {i}: {ledger.allocated / 1e9:.2f} GB allocated, {ledger.reserved / 1e9:.2f} GB reserved</h3>"
        + _bars({k: v / 1e9 for k, v in ledger.terms.items()}, "GB")
        for i, ledger in enumerate(forecast.memory)
    )


def scaling(simulate: Callable[[Layout], Forecast], layout: Layout) -> list[dict[str, Any]]:
    """More and fewer data ranks with the same work for each (weak), and the same batch (strong)."""
    rows: list[dict[str, Any]] = []
    for factor in (0.25, 0.5, 1, 2, 4):
        name = "replicas" if layout.shard == 1 or layout.replicas > 1 else "shard"
        degree = getattr(layout, name) * factor
        if degree != int(degree) or degree < 1:
            continue
        for kind, n_micro in (("weak", layout.n_micro), ("strong", layout.n_micro / factor)):
            if n_micro != int(n_micro) or n_micro < 1:
                continue
            changed = layout.with_(**{name: int(degree), "n_micro": int(n_micro)})
            try:
                found = simulate(changed)
            except ShardwiseError:
                continue
            rows.append(
                {
                    "kind": kind, "devices": changed.world_size, "global_batch": changed.global_batch,
                    "step_s": found.step_s, "tokens_per_s": found.tokens_per_s, "mfu": found.mfu,
                }
            )  # fmt: skip
    return rows


def scaling_lines(rows: list[dict[str, Any]]) -> list[str]:
    """For a reader."""
    out = ["scaling over data ranks (weak: the same work for each; strong: the same batch):"]
    out += [
        f"  {row['kind']:6} {row['devices']:6} devices, batch {row['global_batch']:6}: step {row['step_s']:.4g} s, "
        f"{row['tokens_per_s']:.4g} tokens/s, MFU {row['mfu']:.1%}"
        for row in sorted(rows, key=lambda row: (row["kind"], row["devices"]))
    ]
    return out
