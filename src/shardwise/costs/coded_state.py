"""Bytes of optimizer state and masters that are encoded between steps (`optimizer_state=`, `masters=`; tiers/narrow).

    at rest  bf16 2 bytes an element, 8bit 1 + 4 / 256; split masters 2 + 1 / 8, besides the weights that hold the rest
    a step   decodes the state of one sub-group at a time, which is the largest parameter or 64 MB
    time     bytes read and written to decode and encode, at the memory's rate, in addition to the update itself

What this does not do: count the arithmetic of a code, which on a processor takes longer than its bytes.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.costs.layout import Layout
from shardwise.costs.software import States
from shardwise.layout.offload import SUBGROUP_BYTES, SUBGROUPS

CODED = {"bf16": 2.0, "8bit": 1 + 4 / 256}  # optimizer_state -> bytes of an element at rest
SPLIT = 2 + 1 / 8  # bytes of a split master at rest


def resting(states: States, layout: Layout, coded: float | None = None) -> States:
    """Returns `states` with `optimizer` and `master` as bytes per parameter between steps, encoded if the layout says.

    coded  elements of state per parameter that are encoded; None: Adam's two, which are all of its state
    """
    width = states.held if coded is not None else states.optimizer / 2
    saved = width - min(CODED.get(layout.optimizer_state, width), width)
    master = SPLIT if layout.masters == "split" and states.master else states.master
    return replace(states, optimizer=states.optimizer - (2 if coded is None else coded) * saved, master=master)


def decoded(states: States, layout: Layout, count: float, largest: float, coded: float | None = None) -> float:
    """Returns the bytes of decoded state that live at a time in a rank's step; 0 if nothing is encoded.

    count    parameters that the rank updates
    largest  elements of the largest of them
    coded    as in `resting`
    """
    each = 0.0
    if resting(states, layout, coded).optimizer != states.optimizer:
        each += states.optimizer if coded is None else coded * states.held
    if layout.masters == "split":
        each += states.master
    return max(largest * each, min(SUBGROUP_BYTES, count * each / SUBGROUPS)) if each else 0.0


def coding_bytes(states: States, layout: Layout, coded: float | None = None) -> float:
    """Returns the bytes moved per parameter to decode its state and encode it again; `coded`: as in `resting`."""
    rests, moved = resting(states, layout, coded), 0.0
    if rests.optimizer != states.optimizer:
        full = states.optimizer if coded is None else coded * states.held
        moved += 2 * (full + full - (states.optimizer - rests.optimizer))
    if rests.master != states.master:
        moved += 2 * (states.master + rests.master) + states.weight  # weights are read beside their halves
    return moved
