"""Bytes and seconds of state that rests by a code (`optimizer_state=`, `masters=`), as tiers/narrow codes it.

    rests    bf16 2 bytes an element, 8bit 1 + 4 / 256; of split masters 2 + 1 / 8 beside the weights
    a step   decodes a sub-group's state at a time: the largest parameter's, or 64 MB, is there in full beside the rest
    time     what is read and written to decode and code it, at the memory's rate, beside the update's own

What this does not do: count what a code computes. On a processor that takes longer than its bytes.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.costs.layout import Layout
from shardwise.costs.software import States
from shardwise.layout.offload import SUBGROUP_BYTES, SUBGROUPS

CODED = {"bf16": 2.0, "8bit": 1 + 4 / 256}
SPLIT = 2 + 1 / 8


def resting(states: States, layout: Layout, coded: float | None = None) -> States:
    """Returns `states` with the bytes of a parameter's state as it rests: coded, where the layout has codes.

    coded  elements of state that a code takes; None: Adam's two, which are all of it
    """
    width = states.held if coded is not None else states.optimizer / 2
    saved = width - min(CODED.get(layout.optimizer_state, width), width)
    master = SPLIT if layout.masters == "split" and states.master else states.master
    return replace(states, optimizer=states.optimizer - (2 if coded is None else coded) * saved, master=master)


def decoded(states: States, layout: Layout, count: float, largest: float, coded: float | None = None) -> float:
    """Returns the bytes of coded state that a step holds decoded at once, of `count` parameters.

    largest  elements of the largest parameter; `coded`: as in `resting`
    """
    each = 0.0
    if resting(states, layout, coded).optimizer != states.optimizer:
        each += states.optimizer if coded is None else coded * states.held
    if layout.masters == "split":
        each += states.master
    return max(largest * each, min(SUBGROUP_BYTES, count * each / SUBGROUPS)) if each else 0.0


def coding_bytes(states: States, layout: Layout, coded: float | None = None) -> float:
    """Returns the bytes moved for one parameter to decode its state and code it again; `coded`: as in `resting`."""
    rests, moved = resting(states, layout, coded), 0.0
    if rests.optimizer != states.optimizer:
        full = states.optimizer if coded is None else coded * states.held
        moved += 2 * (full + full - (states.optimizer - rests.optimizer))
    if rests.master != states.master:
        moved += 2 * (states.master + rests.master) + states.weight  # weights are read beside their halves
    return moved
