"""Find where stages can begin in a forward that drops calls at random, or repeats calls a varying number of times.

    for layer in self.layers:
        if random.random() > self.drop: x = layer(x)        stage 1 begins at layer 2, or at 3 if 2 is dropped

All stages draw the same random numbers (Python's, numpy's or torch's), so they make the same calls. A stage begins at
the first that the forward makes of a list of calls, the last of which it always makes. Each of these calls has all
crossing tensors as arguments. torch's random numbers depend on the place in the forward (`random/modes`), and so are
the same on all stages too.

    for x, edges in samples:
        outs.append(self.graph(x, edges))                   runs as often as there are samples
    return self.head(torch.stack(outs))                     stage 1 begins here, in every forward

Modules that are called once for each sample, or as often as values say, are run by one stage. Another stage begins
where a module outside of these, which is called equally often in every forward, is given all crossing tensors. Later
stages run calls that they cannot leave out on absent weights.

What this does not do: follow a random number that Python reads together with a value that depends on parameters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shardwise.parallel.pipeline.boundaries import CutPoint
from shardwise.trace.flow import Flow, ModuleCall


def repeated(flow: Flow, other: Flow) -> frozenset[str]:
    """Returns the paths of modules whose number of calls differs between two forwards.

    Empty if the calls of the remaining modules differ too, since then the forward takes another branch.
    """
    first, second = (Counter(path for path, _ in forward.order) for forward in (flow, other))
    paths = frozenset(path for path in first | second if first[path] != second[path])
    rest = [[path for path, _ in forward.order if path not in paths] for forward in (flow, other)]
    return paths if rest[0] == rest[1] else frozenset()


def met_always(flow: Flow, places: list[CutPoint]) -> list[CutPoint]:
    """Returns those of `places` that every forward reaches once, outside of repeated calls (`Flow.repeats`)."""
    if not flow.repeats:
        return places
    calls = [*flow.calls()]
    spans = [(call.enter, call.exit) for call in calls if call.path in flow.repeats]
    # siblings of repeated modules (experts in a list) may be called another number of times in a third forward
    lists = {path.rpartition(".")[0] for path in flow.repeats} - {call.path for call in calls}

    def apart(call: ModuleCall) -> bool:
        """Whether a call is of a module that is not repeated, and not inside a repeated call."""
        own = call.path not in flow.repeats and call.path.rpartition(".")[0] not in lists - {""}
        return own and not any(enter < call.enter < leave for enter, leave in spans)

    # clean, since a holder among repeated calls could not be named by the index of its call
    return [place for place in places if place.call.own is None and place.clean and apart(place.call)]


def met_by_chance(flow: Flow, places: list[CutPoint], substitutes: list[CutPoint]) -> list[CutPoint]:
    """Returns the places that every forward reaches, or that later calls can replace, which are put into `others`.

    substitutes  all cut points that may replace a place, also those before which nothing is computed
    """
    if not flow.varies:
        return places
    by_call = {(place.call.path, place.call.place): place for place in substitutes if place.call.own is None}
    tried = [(place, _in_its_stead(flow, place, by_call)) for place in places]
    return [replace(place, others=others) for place, others in tried if others is not None]


def _in_its_stead(
    flow: Flow, place: CutPoint, by_call: dict[tuple[str, int], CutPoint]
) -> tuple[CutPoint, ...] | None:  # fmt: skip
    """Returns the places that replace `place`, in order, if a forward leaves its call out.

    by_call   (path, index of the call) -> cut point
    Returns () if every forward makes the call, None if it cannot be replaced.
    """
    parent, call = flow.root, place.call
    while inner := [child for child in parent.inside if child.enter < call.enter < child.exit]:
        parent = inner[0]
        if (parent.path, parent.place) in flow.varies:  # a call around the place may be left out, with replacements
            return None
    # a torch function's call is part of its caller's code, and no caller varies
    if call.own is not None or (call.path, call.place) not in flow.varies:
        return ()
    stand_ins: list[CutPoint] = []
    for sibling in parent.inside if place.clean else ():
        if sibling.enter <= call.enter:  # the place itself, or before it
            continue
        other = by_call.get((sibling.path, sibling.place))
        # shapes must be equal, since those of a boundary's messages are announced once (`stage_messages`)
        if other is None or not other.clean or other.shapes != place.shapes:
            return None
        stand_ins.append(other)
        if (sibling.path, sibling.place) not in flow.varies:  # every forward makes this call, so the list is complete
            return tuple(stand_ins)
    return None
