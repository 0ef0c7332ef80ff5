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

from shardwise.parallel.pipeline.boundaries import CutPoint
from shardwise.trace.flow import Flow, ModuleCall


def repeated(flow: Flow, other: Flow) -> frozenset[str]:
    """Returns the paths of modules whose number of calls differs between two forwards.

    Empty where the other modules are called in another order.
    """
    first, second = (Counter(path for path, _ in forward.order) for forward in (flow, other))
    paths = frozenset(path for path in first | second if first[path] != second[path])
    rest = [[path for path, _ in forward.order if path not in paths] for forward in (flow, other)]
    # where the rest differs too it is another way through the model, not a layer more or less
    return paths if rest[0] == rest[1] else frozenset()


def met_always(flow: Flow, places: list[CutPoint]) -> list[CutPoint]:
    """Returns the places outside of calls whose number differs between forwards (`Flow.repeats`)."""
    if not flow.repeats:
        return places
    calls = [*flow.calls()]
    spans = [(call.enter, call.exit) for call in calls if call.path in flow.repeats]
    # lists of experts: one that was called equally often in both forwards need not be in a third
    lists = {path.rpartition(".")[0] for path in flow.repeats} - {call.path for call in calls}

    def apart(call: ModuleCall) -> bool:
        own = call.path not in flow.repeats and call.path.rpartition(".")[0] not in lists - {""}
        return own and not any(enter < call.enter < leave for enter, leave in spans)

    # clean: among calls whose number differs, no other holder of a tensor can be named by its count
    return [place for place in places if place.call.own is None and place.clean and apart(place.call)]


def met_by_chance(flow: Flow, places: list[CutPoint], substitutes: list[CutPoint]) -> list[CutPoint]:
    """Returns the places that every forward comes to, or that later calls (`others`) can replace.

    substitutes  all cut points that may replace one, also those before which nothing is computed
    """
    if not flow.varies:
        return places
    by_call = {(place.call.path, place.call.place): place for place in substitutes if place.call.own is None}
    tried = [(place, _in_its_stead(flow, place, by_call)) for place in places]
    return [replace(place, others=others) for place, others in tried if others is not None]


def _in_its_stead(
    flow: Flow, place: CutPoint, by_call: dict[tuple[str, int], CutPoint]
) -> tuple[CutPoint, ...] | None:  # fmt: skip
    """Returns the places that stand in for `place`, in order: a stage begins at the first that a forward comes to.

    None where that cannot be; () where every forward makes the call of `place`.
    """
    parent, call = flow.root, place.call
    while inner := [child for child in parent.inside if child.enter < call.enter < child.exit]:
        parent = inner[0]
        if (parent.path, parent.place) in flow.varies:  # all around the place may be left out, stand-ins too
            return None
    # a call of torch's function is its caller's code, and all callers were asked above
    if call.own is not None or (call.path, call.place) not in flow.varies:
        return ()
    stand_ins: list[CutPoint] = []
    # clean: all that crosses is given to the call, whose arguments' shapes are known
    for sibling in parent.inside if place.clean else ():
        if sibling.enter <= call.enter:  # the place itself, or before it
            continue
        other = by_call.get((sibling.path, sibling.place))
        # other shapes: those of a boundary's messages are told once, and must stay (`messages`)
        if other is None or not other.clean or other.shapes != place.shapes:
            return None
        stand_ins.append(other)
        if (sibling.path, sibling.place) not in flow.varies:  # made always: some stand-in is met in every forward
            return tuple(stand_ins)
    return None
