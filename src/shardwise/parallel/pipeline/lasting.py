"""What forwards leave for the next ones, in plain attributes and buffers: whether stages come to the same.

Every stage runs the code around its own part too, and so keeps what its own part made; what was made up is kept beside
it and is never read. That is right at a cut where nothing is read on one side that only the other side has made:

    one side makes it, the same side reads it      a layer's memory of its last batch
    both sides make it                             a counter by the outermost forward; a table of positions
    one side makes it, the other one reads it      would have to travel from batch to batch: no stage begins here

What is changed behind a cut by code around it (`self.memory = new` at the end of the outermost forward) reaches the
stage before only if that stage runs on to the end of the forward, on made-up results: it `runs on`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.trace.flow import Flow, FlowOp, ModuleCall

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.cuts import CutPoint

BEFORE, AFTER = 1, 2  # sides of a cut, as bits
BOTH = BEFORE | AFTER


def twin_of(call: ModuleCall, flow: Flow) -> ModuleCall | None:
    """The same place in another forward: a call of the same module, or of the same function by the same code."""
    known = flow.functions if call.own is not None else flow.calls()
    return next(
        (each for each in known if (each.path, each.place, each.own) == (call.path, call.place, call.own)), None
    )


@dataclass
class _Cut:
    """A cut in one of several forwards: when, and the calls around it."""

    flow: Flow
    moment: int

    def side(self, time: int) -> int:
        """On which side something happens."""
        return BEFORE if time < self.moment else AFTER

    def around(self, call: ModuleCall) -> bool:
        """Whether a call's own code is run by the stages on both sides."""
        return call.enter < self.moment < call.exit or call is self.flow.root

    def run_by(self, op: FlowOp, callers: list[ModuleCall], runs_on: bool) -> int:
        """The sides whose stages do an operation: its own, and the other one where the code is around the cut."""
        mine, flow = self.side(op.time), self.flow
        for call in callers:
            if self.around(call) or call.moves:
                continue
            used = max((flow.last_use[number] for number in op.makes), default=-1)
            if any(flow.depends[number] for number in op.makes) or used <= call.exit:
                return mine
        return BOTH if mine == BEFORE or runs_on else mine


def conflict(flow: Flow, place: ModuleCall) -> tuple[bool, str]:
    """(whether the stage before a cut runs on to the end of the forward, why the cut cannot be; empty: it can be)."""
    if not flow.later and not any(first < place.enter <= last for first, last in flow.written_buffers):
        return False, ""
    flows = [flow, *flow.later] if flow.later else [flow, flow]
    twins = [place, *(twin_of(place, each) for each in flow.later)] if flow.later else [place, place]
    if None in twins:
        return False, "that place is not met again in a later forward, which finds what the first one left"
    if any(each.taken or each.backwards for each in flows) and flow.later:
        return False, "the forward takes gradients itself"
    cuts = _cuts(flows, twins)
    on = any(_changed_behind(cut) for cut in cuts)
    for runs_on in (True,) if on else (False, True):
        why = _conflict(cuts, runs_on)
        if not why:
            return runs_on, ""
    return True, why


def _changed_behind(cut: _Cut) -> bool:
    """Whether code around a cut changes a plain attribute behind it, or a later call one that is not its own."""
    for change in cut.flow.changes:
        path, call = change.place[0], change.call
        own = path == call.path or path.startswith(f"{call.path}.")
        if change.time > cut.moment and (cut.around(call) or not own):
            return True
    return False


def _cuts(flows: Sequence[Flow], twins: Sequence[ModuleCall | None]) -> list[_Cut]:
    return [_Cut(each, twin.enter) for each, twin in zip(flows, twins, strict=True) if twin is not None]


def _conflict(cuts: list[_Cut], runs_on: bool) -> str:
    return _had(cuts, runs_on)[1]


def _had(cuts: list[_Cut], runs_on: bool) -> tuple[list[list[int]], str]:
    """(of each forward, by number: the sides that have a tensor's right values; why the cut cannot be)."""
    had: list[list[int]] = []
    for cut in cuts:
        sides, why = _sides(cut, runs_on, cuts, had)
        if why:
            return had, why
        had.append(sides)
    return had, ""


def kept_on(flow: Flow, places: Sequence[CutPoint]) -> dict[int, list[int]]:
    """The stages that have what a forward put in the place of a buffer, by the buffer's id.

    Those that computed it of what was made up have it not.
    """
    found: dict[int, list[int]] = {}
    sides = [_of_buffers(flow, place) for place in places]
    for held in {held for each in sides for held in each}:
        right = [each.get(held, BOTH) for each in sides]
        edges = zip([AFTER, *right], [*right, BEFORE], strict=True)
        found[held] = [stage for stage, (enter, leave) in enumerate(edges) if enter & AFTER and leave & BEFORE]
    return found


def _of_buffers(flow: Flow, place: CutPoint) -> dict[int, int]:
    cuts = _cuts([flow, *flow.later], [place.call, *(twin_of(place.call, each) for each in flow.later)])
    had = _had(cuts, place.runs_on)[0] if flow.later else []
    last = flow.later[-1] if len(had) > len(flow.later) else flow
    kept = [(last.buffers[number], source) for number, source in last.carried.items() if number in last.buffers]
    return {held: had[which][number] for held, (which, number) in kept}


def _sides(cut: _Cut, runs_on: bool, cuts: list[_Cut], had: list[list[int]]) -> tuple[list[int], str]:
    flow = cut.flow
    sides = [BOTH] * len(flow.made)
    for number, param in flow.parameters.items():
        sides[number] = _holders(cut, param)
    for number, (which, source) in flow.carried.items():
        sides[number] = had[which][source]
    if had:
        _find_buffers(flow, cuts[len(had) - 1].flow, had[-1], sides)
    for op, callers in zip(flow.ops, flow.callers, strict=True):
        here, run = cut.side(op.time), cut.run_by(op, callers, runs_on)
        if runs_on and op.reads_value and run == BOTH and any(flow.depends[n] or flow.drawn[n] for n in op.reads):
            return sides, "code around it decides by values that one side alone has"
        found = run
        for number in op.reads:
            found &= sides[number]
        depends = any(flow.depends[number] for number in op.makes)
        counts = op.reads_value or (depends and not flow.reaching.isdisjoint(op.makes))
        needed = run if op.reads_value else here
        missing = [n for n in op.reads if not flow.depends[n] and sides[n] & needed != needed]
        if counts and missing:
            return sides, "what one forward leaves there, a later one reads on the other side"
        for number in op.makes:
            sides[number] = found | here if depends and counts else found
    if any(not flow.depends[n] and not sides[n] & AFTER for n in flow.returned):
        return sides, "the forward returns what an earlier one left on the other side"
    return sides, ""


def _holders(cut: _Cut, param: int) -> int:
    """The sides whose stages hold a parameter."""
    used = {n for n, held in cut.flow.parameters.items() if held == param}
    found = 0
    for op in cut.flow.ops:
        if not used.isdisjoint(op.reads):
            found |= cut.side(op.time)
    return found


def _find_buffers(flow: Flow, before: Flow, had: list[int], sides: list[int]) -> None:
    """Of buffers that an operation writes into, the forward finds what the one before it has written last."""
    last = {held: number for number, held in before.buffers.items()}  # numbers ascend with time
    for number, held in flow.buffers.items():
        if flow.made[number] < 0 and held in last and before.made[last[held]] >= 0:
            sides[number] = had[last[held]]


def kept_twice(flow: Flow, places: Sequence[CutPoint]) -> str:
    """What the stages on both sides of some cut change for a later forward, named; empty where there is nothing."""
    if flow.later:
        return _named(flow)
    for place in places:
        cut = _Cut(flow, place.call.enter)
        for op, callers in zip(flow.ops, flow.callers, strict=True):
            written = [n for n in op.makes if n in flow.buffers]
            if written and cut.run_by(op, callers, runs_on=place.runs_on) == BOTH:
                return "a buffer"
    return ""


def _named(flow: Flow) -> str:
    places = sorted({change.place for each in (flow, *flow.later) for change in each.changes})
    return ", ".join(f"'{f'{path}.' if path else ''}{name}'" for path, name in places[:3]) or "a buffer"


def told_lasting(flow: Flow) -> str:
    """Why what forwards leave for later ones lets no stage begin at some call, as a sentence; else empty."""
    for call in flow.calls():
        if why := conflict(flow, call)[1]:
            kept = f"what the forward keeps from one batch to the next, in {_named(flow)}"
            return f". Elsewhere {kept}, is in the way: {why}"
    return ""
