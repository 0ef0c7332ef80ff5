"""What Python and the engine add to kernels' time, by technique; measured by measure/overheads.

    step   once: control, losses, the optimizer's loop
    call   each op that the host starts, views among them
    cut    each op on a tensor that is cut (tp, cp, domain), which a rule in Python answers
    event  each unit that ZeRO-3 gathers, each micro-batch that a pipeline passes on
    wait   share of the work: ranks that meet often wait each time for the one that is late just then

Techniques that meet in one plan add what each adds to replicas. A module that draws random numbers has each operation
followed (randomness=global): its rows are those of the same techniques with ` draws` behind their names.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Device
from shardwise.costs.layout import Layout

BASE = "replicas"
DRAWS = " draws"  # behind the name of a technique: of modules that draw random numbers


@dataclass(frozen=True)
class Overhead:
    """Seconds that Python and the engine add to a step, a call, a call on cut tensors and an event (`events`).

    wait   a share of the seconds that a rank computes
    """

    step: float = 0.0
    call: float = 0.0
    cut: float = 0.0
    event: float = 0.0
    wait: float = 0.0


def techniques(layout: Layout) -> list[str]:
    """Returns the names of a probe's rows whose overheads a layout has."""
    names = [f"zero{layout.zero}" if layout.sharded.state else BASE]
    if layout.tp > 1:
        names.append("sp" if layout.sp else "tp")
    if layout.pp > 1:
        names.append("pp")
    return names


def overhead_of(device: Device, layout: Layout, follows: bool = False) -> Overhead:
    """Returns the summed overheads of the layout's techniques; zeros on a device that was not probed for them.

    follows   random numbers are those of one process; a technique that was not measured so adds what it adds without
    """
    rows = {name: [*(1e-6 * value for value in times), wait] for name, *times, wait in device.overheads}
    # a device that was not probed: kernels' times alone
    if BASE not in rows:
        return Overhead()
    # with draws, if the probe measured any
    draws = DRAWS if follows and BASE + DRAWS in rows else ""
    total = list(rows[BASE + draws])
    for name in techniques(layout):
        own = draws if name + draws in rows else ""
        # what a technique adds to replicas; one without a row adds nothing
        for at, (value, base) in enumerate(zip(rows.get(name + own, rows[BASE]), rows[BASE + own], strict=True)):
            total[at] += value - base
    return Overhead(*(max(0.0, value) for value in total))


def events(layout: Layout, units: int) -> int:
    """Returns how many units are gathered, or micro-batches passed on, in a step."""
    if layout.pp > 1:
        return layout.n_micro * layout.rounds
    return layout.n_micro * (units + 1) if layout.sharded.weights else 0
