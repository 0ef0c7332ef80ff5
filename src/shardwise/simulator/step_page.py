"""`page`: a forecast as an HTML page with SVG; `memory_over_time`: a rank's bytes as a curve. Of runs: report/page.

    step's time   one bar, divided into its parts
    timeline      a lane for each rank of a pipeline, or for each stream
    memory        on the same time axis: bytes at rest, and activations that micro-batches add and free

What this does not do: draw every tensor. Activations rise linearly in a forward and fall linearly in a backward.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from shardwise.costs.memory import MemoryLedger
from shardwise.simulator.forecast import Forecast

DRAWN = 6000  # most boxes of a page, as many as a browser shows without delay
LEFT, WIDTH, LANE, CHART = 90, 1080, 18, 56  # pixels: labels, a chart, a lane's height, a curve's height (window 1280)
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#e45756", "W": "#72b7b2", "g": "#bab0ac", "s": "#9d755d"}
PARTS = ("#4c78a8", "#f58518", "#e45756", "#72b7b2", "#54a24b", "#eeca3b", "#b279a2", "#9d755d", "#bab0ac")
NAMES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
# terms of a ledger that micro-batches add and free; LATE: those that live only in the optimizer's step
COMES_AND_GOES = ("activations", "embedding output", "head input", "micro-batch")
LATE = ("optimizer's temporaries",)
FORWARD = 1 / 3  # share of a micro-batch's time without a pipeline
Curve = list[tuple[float, float]]  # (seconds, bytes)


def page(forecast: Forecast, title: str, capacity: float | None = None) -> str:
    """Returns the HTML page of a forecast; `capacity`: bytes of a device, drawn as a line, None: no line."""
    return (
        "<!doctype html><meta charset='utf-8'><title>" + html.escape(title) + "</title>"
        "<style>body{font:14px sans-serif;margin:2em}td{padding:2px 12px}svg{border:1px solid #ddd}"
        "svg text{font:11px sans-serif}</style>"
        f"<h1>{html.escape(title)}</h1>{_misfit(forecast, capacity)}"
        f"<p>step {_readable(forecast.step_s, 's')}, MFU {forecast.mfu:.1%}, bubble "
        f"{forecast.bubble:.1%}</p><h2>Where the step's time goes</h2>{_stacked(forecast.parts)}"
        f"{_bars(forecast.parts, 's')}<h2>Timeline</h2>{_gantt(forecast)}"
        f"<h2>Memory over time</h2>{_over_time(forecast, capacity)}<h2>Memory at the peak</h2>{_memory(forecast)}"
    )


def _misfit(forecast: Forecast, capacity: float | None) -> str:
    """Returns a warning as HTML if the plan does not fit in `capacity` bytes, else ""."""
    if capacity is None or forecast.fits(capacity):
        return ""
    return f"<p><b style='color:#c00'>DOES NOT FIT: {html.escape(forecast.shortage(capacity))}</b></p>"


def _readable(value: float, unit: str) -> str:
    """Returns `value` as text with three digits, in `unit` ("s" or "GB") or a smaller unit (ms, us; MB, kB)."""
    smaller = {"s": ("ms", "us"), "GB": ("MB", "kB")}.get(unit, ())
    for less in smaller:
        if value >= 1 or not value:
            break
        value, unit = value * 1000, less
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _stacked(parts: dict[str, float]) -> str:
    """Returns an SVG bar of the step's time divided into `parts` {name: seconds}."""
    whole, x, boxes = sum(parts.values()) or 1.0, 0.0, []
    for colour, (name, value) in zip(_colours(len(parts)), parts.items(), strict=True):
        wide = WIDTH * value / whole
        label = f"{name} {value / whole:.0%}"
        text = f"<text x='{x + 4:.1f}' y='17' fill='#fff'>{html.escape(label)}</text>" if wide > 7 * len(label) else ""
        boxes.append(
            f"<g><rect x='{x:.1f}' y='0' width='{wide:.1f}' height='26' fill='{colour}'>"
            f"<title>{html.escape(label)}</title></rect>{text}</g>"
        )
        x += wide
    return f"<svg width='{WIDTH}' height='26'>{''.join(boxes)}</svg>"


def _colours(count: int) -> list[str]:
    return [PARTS[index % len(PARTS)] for index in range(count)]


def _bars(values: dict[str, float], unit: str) -> str:
    """Returns an HTML table with a bar for each value above 0, the largest first; `unit`: as in `_readable`."""
    top = max(values.values(), default=0.0) or 1.0
    colours = dict(zip(values, _colours(len(values)), strict=True))
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{_readable(value, unit)}<td><svg width='400' height='14'>"
        f"<rect width='{400 * value / top:.1f}' height='14' fill='{colours[name]}'/></svg>"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
        if value > 0
    )
    return f"<table>{rows}</table>"


def _gantt(forecast: Forecast) -> str:
    """Returns SVG of the timeline: a row for each lane, a box for each op, the first `DRAWN` of them."""
    boxes = forecast.laid_out[:DRAWN]
    lanes = list(dict.fromkeys(lane for lane, *_ in boxes))
    end = max(box[3] for box in boxes) or 1.0
    drawn = []
    for lane, name, start, stop in boxes:
        x, y = LEFT + WIDTH * start / end, lanes.index(lane) * LANE
        colour = COLOURS.get(name[0], "#54a24b")
        drawn.append(
            f"<rect x='{x:.1f}' y='{y}' width='{max(0.4, WIDTH * (stop - start) / end):.1f}' height='{LANE - 2}' "
            f"fill='{colour}'><title>{html.escape(name)} {_readable(start, 's')} to {_readable(stop, 's')}</title>"
            "</rect>"
        )
    labels = "".join(f"<text x='2' y='{i * LANE + 13}'>{html.escape(lane)}</text>" for i, lane in enumerate(lanes))
    cut = f"<p>the first {DRAWN} of {len(forecast.timeline)} boxes</p>" if len(forecast.timeline) > DRAWN else ""
    high = len(lanes) * LANE
    picture = f"{labels}{''.join(drawn)}{_axis(end, high)}"
    return f"{_legend(boxes)}<svg width='{LEFT + WIDTH + 10}' height='{high + 16}'>{picture}</svg>{cut}"


def _legend(boxes: Sequence[tuple[str, str, float, float]]) -> str:
    kinds = [kind for kind in NAMES if any(re.match(rf"{kind}\d", name) for _, name, _, _ in boxes)]
    return "".join(f"<span style='color:{COLOURS[kind]}'>&#9632;</span> {NAMES[kind]} &nbsp; " for kind in kinds)


def _axis(end: float, y: float) -> str:
    """Returns SVG labels of a time axis from 0 to `end` seconds at height `y` pixels."""
    return "".join(
        f"<text x='{LEFT + WIDTH * tick / 4 - (24 if tick else 0):.0f}' y='{y + 12:.0f}'>{end * tick / 4:.3g} s</text>"
        for tick in range(5)
    )


def memory_over_time(forecast: Forecast) -> list[tuple[str, Curve]]:
    """Returns (label, curve of allocated bytes over seconds) of each pipeline rank, or of one rank without pipeline."""
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    for lane, name, start, stop in forecast.timeline:
        if re.match(r"[FBIW]\d", name):
            lanes.setdefault(lane, []).append((name[0], start, stop))
    # without a pipeline the lanes are streams of one rank
    if len(lanes) != len(forecast.memory) or len(lanes) < 2:
        return [("a rank", _of_one(forecast, forecast.worst))]
    return [(lane, _of_row(ops, ledger)) for (lane, ops), ledger in zip(lanes.items(), forecast.memory, strict=True)]


def _split(ledger: MemoryLedger) -> tuple[float, float, float, float]:
    """Returns bytes (at rest, of activations, only at the peak, of the optimizer's temporaries)."""
    activations = sum(size for name, size in ledger.terms.items() if name in COMES_AND_GOES)
    late = sum(size for name, size in ledger.terms.items() if name in LATE)
    moment = sum(size for name, size in ledger.terms.items() if name.startswith("peak: "))
    return ledger.allocated - activations - late - moment, activations, moment, late


def _of_row(ops: Sequence[tuple[str, float, float]], ledger: MemoryLedger) -> Curve:
    """Returns a pipeline rank's bytes over seconds; a forward adds a micro-batch's activations, a backward frees them.

    ops  (kind "F", "B", "I" or "W", start s, end s) of each op
    """
    rests, activations, moment, _ = _split(ledger)
    ordered = sorted(ops, key=lambda op: op[1])
    # I frees nothing, since W still reads the activations
    change = {"F": 1, "B": -1, "W": -1}
    flying = most = 0
    for kind, _, _ in ordered:
        flying += change.get(kind, 0)
        most = max(most, flying)
    per_micro_batch, now = activations / max(1, most), rests
    curve: Curve = [(0.0, rests)]
    for kind, start, stop in ordered:
        # the peak is in a backward, so bytes that live only at the peak are drawn there
        extra = moment if kind != "F" else 0.0
        curve += [(start, now), (start, now + extra)]
        now += per_micro_batch * change.get(kind, 0)
        curve += [(stop, now + extra), (stop, now)]
    return curve


def _of_one(forecast: Forecast, ledger: MemoryLedger) -> Curve:
    """Returns the curve of a step without a pipeline, drawn as one micro-batch and the optimizer's step."""
    rests, activations, moment, late = _split(ledger)
    optimizer = forecast.parts.get("optimizer", 0.0)
    work = max(forecast.step_s - optimizer, 1e-12)
    turn = FORWARD * work
    top = rests + activations + moment
    return [(0.0, rests), (turn, top), (work, rests), (work, rests + late), (work + optimizer, rests + late)]


def _over_time(forecast: Forecast, capacity: float | None) -> str:
    """Returns SVG of each rank's allocated bytes over a step, with a line at `capacity`."""
    curves = memory_over_time(forecast)
    end = max(point[0] for _, curve in curves for point in curve) or 1.0
    top = max([capacity or 0.0, *(size for _, curve in curves for _, size in curve)]) or 1.0
    parts = []
    for index, (label, curve) in enumerate(curves):
        floor = (index + 1) * (CHART + 6)

        def place(second: float, size: float, floor: float = floor) -> str:
            return f"{LEFT + WIDTH * second / end:.1f},{floor - CHART * size / top:.1f}"

        points = " ".join([place(0.0, 0.0), *(place(*point) for point in curve), place(curve[-1][0], 0.0)])
        peak = max(size for _, size in curve)
        parts.append(
            f"<polygon points='{points}' fill='#4c78a8' fill-opacity='0.6' stroke='#2f4b6e'/>"
            f"<text x='2' y='{floor - CHART / 2:.0f}'>{html.escape(label)}</text>"
            f"<text x='2' y='{floor - CHART / 2 + 13:.0f}'>{peak / 1e9:.3g} GB</text>"
        )
        if capacity:
            y = floor - CHART * capacity / top
            parts.append(f"<path d='M{LEFT} {y:.1f}H{LEFT + WIDTH}' stroke='#c00' stroke-dasharray='4'/>")
    high = len(curves) * (CHART + 6)
    line_note = f"; the broken line is a device's {capacity / 1e9:.4g} GB" if capacity else ""
    note = "" if len(curves) > 1 else ", as if the step were one micro-batch"
    return (
        f"<p>allocated bytes of each rank that differs: what rests, and activations as micro-batches come and go{note}"
        f"{line_note}</p><svg width='{LEFT + WIDTH + 10}' height='{high + 16}'>{''.join(parts)}{_axis(end, high)}</svg>"
    )


def _memory(forecast: Forecast) -> str:
    """Returns the memory terms of each ledger as HTML."""
    return "".join(
        f"<h3>stage {i}: {ledger.allocated / 1e9:.2f} GB allocated, {ledger.reserved / 1e9:.2f} GB reserved</h3>"
        + _bars({k: v / 1e9 for k, v in ledger.terms.items()}, "GB")
        for i, ledger in enumerate(forecast.memory)
    )
