"""Stages of a forward that leaves calls out by chance: layers dropped by a draw of Python's, numpy's or torch's.

    for layer in self.layers:
        if random.random() > self.drop: x = layer(x)        stage 1 begins at layer 2, or at 3 where 2 is dropped

All stages draw the same numbers, so they come to the same calls. A stage begins at the first of some calls that the
forward comes to, up to one that it always makes; each of them is given all that crosses there.

Draws of torch's are those of their place in the forward (`random/modes`), and so alike on all stages too.

    for x, edges in samples:
        outs.append(self.graph(x, edges))                   runs as often as there are samples
    return self.head(torch.stack(outs))                     stage 1 begins here, in every forward

What is called as often as there are samples, or as values of these say, is run by one stage: another one begins where
a module is entered that is called equally often, outside of those, with all that crosses. Stages after it run on
absent weights what they cannot leave out as one call.

What this does not do: follow a draw that is read together with what depends on parameters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.trace.flow import Flow, ModuleCall

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.cuts import CutPoint


def repeated(flow: Flow, other: Flow) -> frozenset[str]:
    """Modules called more often in one of two forwards; empty where the calls of the others are in another order."""
    first, second = (Counter(path for path, _ in each.order) for each in (flow, other))
    found = frozenset(path for path in first | second if first[path] != second[path])
    left = [[path for path, _ in each.order if path not in found] for each in (flow, other)]
    return found if left[0] == left[1] else frozenset()


def met_always(flow: Flow, places: list[CutPoint]) -> list[CutPoint]:
    """The places that do not lie among calls of which there are more or fewer."""
    if not flow.repeats:
        return places
    calls = [*flow.calls()]
    spans = [(call.enter, call.exit) for call in calls if call.path in flow.repeats]
    lists = {path.rpartition(".")[0] for path in flow.repeats} - {call.path for call in calls}  # of experts

    def apart(call: ModuleCall) -> bool:
        own = call.path not in flow.repeats and call.path.rpartition(".")[0] not in lists - {""}
        return own and not any(enter < call.enter < leave for enter, leave in spans)

    return [place for place in places if place.call.own is None and place.clean and apart(place.call)]


def met_by_chance(flow: Flow, places: list[CutPoint], known: list[CutPoint]) -> list[CutPoint]:
    """The places that every forward comes to, or in whose stead one of the next calls can be one.

    known  all places, also those that nothing is computed before
    """
    if not flow.varies:
        return places
    by_call = {(place.call.path, place.call.place): place for place in known if place.call.own is None}
    found = [(place, _in_its_stead(flow, place, by_call)) for place in places]
    return [replace(place, others=others) for place, others in found if others is not None]


def _in_its_stead(
    flow: Flow, place: CutPoint, known: dict[tuple[str, int], CutPoint]
) -> tuple[CutPoint, ...] | None:  # fmt: skip
    parent, call = flow.root, place.call
    while inner := [each for each in parent.inside if each.enter < call.enter < each.exit]:
        parent = inner[0]
        if (parent.path, parent.place) in flow.varies:
            return None
    if call.own is not None or (call.path, call.place) not in flow.varies:
        return ()
    found: list[CutPoint] = []
    for each in parent.inside if place.clean else ():
        if each.enter <= call.enter:
            continue
        other = known.get((each.path, each.place))
        if other is None or not other.clean or other.shapes != place.shapes:
            return None
        found.append(other)
        if (each.path, each.place) not in flow.varies:
            return tuple(found)
    return None
