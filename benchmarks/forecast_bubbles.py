"""Bubble rates that a paper computed from profiled times, simulated from the same times.

The published rows give rates and not the times; those stand in an appendix of Qi et al. 2024 (arXiv:2401.10241) and
are stated here as recalled: milliseconds of a stage's forward (F), backward for the input (B), backward for the
weights (W) and of a message, for each model and number of micro-batches. The rates of 1F1B in the same table, which
decide nothing here, follow from them to 0.01 points as well.

A rate is 1 - m (F + B + W) / cost; the cost is the longest time between the first and the last op of one rank, since
ZB-H2's ranks start their next step without waiting for each other (section 4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.layout.timing import play
from shardwise.simulator.pipeline import schedule

# model -> micro-batches over stages -> F, B, W, message
PROFILED = {
    "GPT 1.5B": {
        3: (18.522, 18.086, 9.337, 0.601), 4: (18.513, 18.086, 9.331, 0.626), 8: (18.546, 18.097, 9.321, 0.762),
    },
    "GPT 6.2B": {
        3: (29.718, 29.444, 19.927, 0.527), 4: (29.802, 29.428, 19.530, 0.577), 8: (29.935, 29.621, 19.388, 0.535),
    },
    "GPT 14.6B": {
        3: (11.347, 11.248, 8.132, 0.377), 4: (11.307, 11.254, 8.101, 0.379), 8: (11.325, 11.308, 8.109, 0.378),
    },
    "GPT 28.3B": {
        3: (10.419, 10.207, 7.715, 0.408), 4: (10.408, 10.204, 7.703, 0.408), 8: (10.402, 10.248, 7.698, 0.460),
    },
}  # fmt: skip
SCHEDULES = {"1F1B": "1f1b", "ZB-H1": "zbh1", "ZB-H2": "zbh2"}  # the automatic ones (ZB-1p, ZB-2p) are not tables


def bubble(row: Mapping[str, str]) -> tuple[str, float, float] | None:
    """(label, published rate, simulated rate) of a row with a rate that can be simulated; else None."""
    notes = row["notes"]
    named = re.search(r"schedule=([\w-]+); num_microbatches=(\d+)", notes)
    rate = re.search(r"bubble_rate[^=;]*=([\d.]+)", notes)
    if not named or not rate or named[1] not in SCHEDULES or row["model"] not in PROFILED or not row["pp"].isdigit():
        return None
    ranks, micro = int(row["pp"]), int(named[2])
    times = PROFILED[row["model"]].get(micro // ranks) if ranks and micro % ranks == 0 else None
    if times is None:
        return None
    forward, back, weight, message = times
    table = schedule(SCHEDULES[named[1]], ranks, micro, 1)
    played = play(table, [forward] * ranks, [back] * ranks, [weight] * ranks, [message] * (ranks - 1))
    found = 1 - micro * (forward + back + weight) / played.longest_span
    return f"{row['model']} {named[1]} pp={ranks} x{micro}", float(rate[1]), found
