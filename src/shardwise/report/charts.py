"""Charts as SVG: lines over steps, and stacked bars. Colours are indexes into those of report/page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

WIDE, HIGH = 560, 240  # size of a chart in its own units, which the page scales to its width
LETTER = 9.2  # width of a letter in these units, in the larger font of narrow pages
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 26  # margins
POINTS = 300  # most points of a line
Points = list[tuple[float, float]]  # (step, value)


def thinned(points: Points) -> Points:
    """Returns at most `POINTS` points, each with the mean value of neighbouring ones."""
    if len(points) <= POINTS:
        return points
    means = []
    for at in range(POINTS):
        part = points[len(points) * at // POINTS : len(points) * (at + 1) // POINTS]
        means.append((part[-1][0], sum(value for _, value in part) / len(part)))
    return means


def number(value: float) -> str:
    """Returns a number as text with three digits and a unit prefix, such as "1.25k" or "0.0312"."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`, or [low] if `high` is not above it."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * at for at in range(first, math.floor(high / step + 1e-9) + 1)]


def lines(series: Sequence[tuple[int, str, Points]], what: str, *, dots: bool = False) -> str:
    """Returns a chart of lines over steps as HTML, or "" without finite values.

    series  (index of a colour, name, points) of each line
    what    caption; `dots`: whether points are marked
    """
    drawn = [(colour, name, thinned(points)) for colour, name, points in series if points]
    xs = [x for _, _, points in drawn for x, _ in points]
    ys = sorted(y for _, _, points in drawn for _, y in points if math.isfinite(y))
    # a run that diverged at once has only NaN
    if not ys:
        return ""
    left, right = min(xs), max(max(xs), min(xs) + 1)
    low, high = ys[0], ys[-1]
    if low > 0 and low < high / 3:  # starts at 0 if the values would still use two thirds of the height
        low = 0.0
    pad = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = (low - pad if low else 0.0), high + pad

    def x_of(x: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * (x - left) / (right - left)

    def y_of(y: float) -> float:
        return TOP + (HIGH - TOP - BOTTOM) * (high - y) / (high - low)

    parts = []
    for tick in ticks(low, high):
        y = y_of(tick)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDE - RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{number(tick)}</text>")
    for tick in ticks(left, right):
        parts.append(f"<text x='{x_of(tick):.1f}' y='{HIGH - 8}' text-anchor='middle'>{number(tick)}</text>")
    for colour, name, points in drawn:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points if math.isfinite(y))
        title = f"<title>{html.escape(name)}</title>"
        parts.append(f"<polyline class='line c{colour}' points='{path}'>{title}</polyline>")
        # a line with one point is invisible without a dot
        for x, y in points if dots or len(points) == 1 else ():
            label = f"<title>{html.escape(name)}, step {x:g}: {y:.4g}</title>"
            parts.append(f"<circle class='dot c{colour}' cx='{x_of(x):.1f}' cy='{y_of(y):.1f}' r='3'>{label}</circle>")
    return (
        f"<figure><figcaption>{html.escape(what)}</figcaption>"
        f"<svg viewBox='0 0 {WIDE} {HIGH}' role='img' aria-label='{html.escape(what)}'>{''.join(parts)}</svg></figure>"
    )


def bars(rows: Sequence[tuple[str, dict[str, float]]], what: str, unit: str, colours: dict[str, int]) -> str:
    """Returns a chart of horizontal stacked bars as HTML, or "" if all are 0.

    rows     (name of the bar, {part: value}) of each bar
    what, unit  caption, and unit of the values
    colours  {part: index of its colour}
    """
    most = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if most <= 0:
        return ""
    drawn, row_high = [], 26
    totals = [f"{number(sum(parts.values()))} {unit}" for _, parts in rows]
    label = 12 + LETTER * max(len(name) for name, _ in rows)
    room = WIDE - label - 8 - LETTER * max(map(len, totals))  # of the longest bar, with space for its total
    for at, (name, parts) in enumerate(rows):
        x, y = float(label), 4 + row_high * at
        drawn.append(f"<text x='{label - 8:.1f}' y='{y + 14}' text-anchor='end'>{html.escape(name)}</text>")
        for part, value in parts.items():
            wide = room * value / most
            title = f"<title>{html.escape(name)}: {html.escape(part)} {number(value)} {unit}</title>"
            drawn.append(
                f"<rect class='f{colours[part]}' x='{x:.1f}' y='{y}' width='{max(wide, 0):.1f}' height='18'>"
                f"{title}</rect>"
            )
            x += wide
        drawn.append(f"<text x='{x + 6:.1f}' y='{y + 14}'>{totals[at]}</text>")
    key = "".join(f"<span><i class='k{colour}'></i>{html.escape(part)}</span>" for part, colour in colours.items())
    return (
        f"<figure><figcaption>{html.escape(what)}</figcaption><p class='key'>{key}</p>"
        f"<svg viewBox='0 0 {WIDE} {row_high * len(rows) + 6}' role='img' aria-label='{html.escape(what)}'>"
        f"{''.join(drawn)}</svg></figure>"
    )
