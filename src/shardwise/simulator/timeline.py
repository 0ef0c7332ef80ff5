"""Writes a step's timeline as a Chrome/Perfetto trace (`chrome`), and tables of weak and strong scaling (`scaling`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardwise.costs.layout import Layout
from shardwise.errors import ShardwiseError
from shardwise.simulator.forecast import Forecast


def chrome(forecast: Forecast, title: str) -> str:
    """Returns the timeline as JSON for chrome://tracing and ui.perfetto.dev, in microseconds."""
    lanes = list(dict.fromkeys(lane for lane, *_ in forecast.laid_out))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": lane}} for i, lane in enumerate(lanes)
    ]
    place = {lane: i for i, lane in enumerate(lanes)}
    events += [
        {"ph": "X", "pid": 0, "tid": place[lane], "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for lane, name, start, end in forecast.laid_out
    ]
    return json.dumps({"traceEvents": events, "otherData": {"title": title, "made": "written by shardwise"}})


def scaling(simulate: Callable[[Layout], Forecast], layout: Layout) -> list[dict[str, Any]]:
    """Returns forecasts on 1/4 to 4 times as many data ranks, as one dict for each row of a table.

    simulate  layout -> its forecast. "weak": the same micro-batches for each rank; "strong": the same global batch.
    Keys: kind, devices, global_batch, step_s, samples_per_s or tokens_per_s, mfu, rate (text).
    """
    rows: list[dict[str, Any]] = []
    for factor in (0.25, 0.5, 1, 2, 4):
        # replicas are scaled if there are any or nothing is sharded, else the shards
        name = "replicas" if layout.shard == 1 or layout.replicas > 1 else "shard"
        degree = getattr(layout, name) * factor
        if degree != int(degree) or degree < 1:
            continue
        for kind, n_micro in (("weak", layout.n_micro), ("strong", layout.n_micro / factor)):
            if n_micro != int(n_micro) or n_micro < 1:
                continue
            changed = layout.with_(**{name: int(degree), "n_micro": int(n_micro)})
            try:
                forecast = simulate(changed)
            # degrees that cannot be simulated get no row
            except ShardwiseError:
                continue
            rows.append(
                {
                    "kind": kind, "devices": changed.world_size, "global_batch": changed.global_batch,
                    "step_s": forecast.step_s, f"{forecast.rate[1]}_per_s": forecast.rate[0], "mfu": forecast.mfu,
                    "rate": f"{forecast.rate[0]:.4g} {forecast.rate[1]}/s",
                }
            )  # fmt: skip
    return rows


def scaling_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the rows of `scaling` as lines of text."""
    out = ["scaling over data ranks (weak: the same work for each; strong: the same batch):"]
    out += [
        f"  {row['kind']:6} {row['devices']:6} devices, batch {row['global_batch']:6}: step {row['step_s']:.4g} s, "
        f"{row['rate']}, MFU {row['mfu']:.1%}"
        for row in sorted(rows, key=lambda row: (row["kind"], row["devices"]))
    ]
    return out
