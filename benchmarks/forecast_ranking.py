"""Whether forecasts put the layouts of one model on one cluster in the order that was measured.

Kendall's tau over pairs of different layouts; times within 3% of each other are a tie, which no order can be held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

TIE = 0.03
FEWEST = 4  # layouts of a group that gets a line of its own


@dataclass(frozen=True)
class Timed:
    """One layout: its label, and its measured and forecast seconds."""

    label: str
    measured: float
    forecast: float


def tau(layouts: list[Timed]) -> tuple[int, int]:
    """Returns (concordant minus discordant pairs, pairs that are no tie)."""
    agree = total = 0
    for one, two in combinations(layouts, 2):
        if one.label == two.label or abs(one.measured - two.measured) <= TIE * max(one.measured, two.measured):
            continue
        sign = (one.measured - two.measured) * (one.forecast - two.forecast)
        total += 1
        agree += 1 if sign > 0 else -1 if sign < 0 else 0
    return agree, total


def regret(layouts: list[Timed]) -> float:
    """How much longer the layout that forecasts put first took than the fastest measured one, as a share."""
    chosen = min(layouts, key=lambda each: each.forecast)
    return chosen.measured / min(each.measured for each in layouts) - 1


def ranked(groups: dict[str, list[Timed]]) -> list[dict[str, float | str]]:
    """One row for each group of at least `FEWEST` different layouts with a pair that is no tie, worst first."""
    rows: list[dict[str, float | str]] = []
    for name, layouts in groups.items():
        different = len({each.label for each in layouts})
        agree, total = tau(layouts)
        if different >= FEWEST and total:
            rows.append({"group": name, "layouts": different, "pairs": total, "tau": agree / total,
                         "regret": regret(layouts)})  # fmt: skip
    return sorted(rows, key=lambda row: row["tau"])
