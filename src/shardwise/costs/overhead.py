"""Seconds that Python and the engine add to kernels' time, for each technique; measured by measure/overheads.

    step   once in a step: control, losses, the optimizer's loop
    call   for each op that the host starts, views included
    cut    for each op on a sharded tensor (tp, cp, domain), which a rule in Python answers
    event  for each unit that ZeRO-3 gathers, and each micro-batch that a pipeline passes on
    wait   share of a rank's compute time, because at each collective ranks wait for the slowest one

Techniques of one plan each add their difference to replicas. A module that uses random numbers has each of its
operations followed (randomness=global), which takes longer: a probe has rows for it, named with the suffix ` draws`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Device
from shardwise.costs.layout import Layout

BASE = "replicas"
DRAWS = " draws"  # suffix of a technique's name, for modules that use random numbers


@dataclass(frozen=True)
class Overhead:
    """Seconds added to each step, call, call on sharded tensors (`cut`) and event (see `events`).

    wait   added share of the seconds that a rank computes
    """

    step: float = 0.0
    call: float = 0.0
    cut: float = 0.0
    event: float = 0.0
    wait: float = 0.0


def techniques(layout: Layout) -> list[str]:
    """Returns the names of the techniques that a layout uses, such as ["zero3", "tp"], as a probe names its rows."""
    names = [f"zero{layout.zero}" if layout.sharded.state else BASE]
    if layout.tp > 1:
        names.append("sp" if layout.sp else "tp")
    if layout.pp > 1:
        names.append("pp")
    return names


def overhead_of(device: Device, layout: Layout, follows: bool = False) -> Overhead:
    """Returns the summed overheads of the layout's techniques; zeros if the device was not probed for them.

    follows   whether random operations are followed (randomness=global); a technique without such a row adds the
              difference that it has without random numbers
    """
    rows = {name: [*(1e-6 * value for value in times), wait] for name, *times, wait in device.overheads}
    if BASE not in rows:
        return Overhead()
    draws = DRAWS if follows and BASE + DRAWS in rows else ""
    total = list(rows[BASE + draws])
    for name in techniques(layout):
        own = draws if name + draws in rows else ""
        # the difference to replicas; a technique without a row of its own adds nothing
        for at, (value, base) in enumerate(zip(rows.get(name + own, rows[BASE]), rows[BASE + own], strict=True)):
            total[at] += value - base
    return Overhead(*(max(0.0, value) for value in total))


def events(layout: Layout, units: int) -> int:
    """Returns a step's events: micro-batches under a pipeline, else gathers of `units` and the root under ZeRO-3."""
    if layout.pp > 1:
        return layout.n_micro * layout.rounds
    return layout.n_micro * (units + 1) if layout.sharded.weights else 0
