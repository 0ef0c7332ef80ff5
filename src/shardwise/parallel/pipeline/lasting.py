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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.parallel.pipeline.boundaries import CutPoint
from shardwise.part.levels import Distributed
from shardwise.trace.flow import Flow, FlowOp, ModuleCall

BEFORE, AFTER = 1, 2  # sides of a cut, as bits
BOTH = BEFORE | AFTER


def twin_of(call: ModuleCall, flow: Flow) -> ModuleCall | None:
    """Returns the call of another forward by the same module, or the same line of code; None where there is none."""
    candidates = flow.functions if call.own is not None else flow.calls()
    key = call.path, call.place, call.own
    return next((other for other in candidates if (other.path, other.place, other.own) == key), None)


@dataclass
class _Cut:
    """A cut of one forward (`flow`), of several run in a row, at a moment (time of the flow)."""

    flow: Flow
    moment: int

    def side(self, time: int) -> int:
        """Returns BEFORE or AFTER for a moment of the forward."""
        return BEFORE if time < self.moment else AFTER

    def around(self, call: ModuleCall) -> bool:
        """Returns whether the cut lies inside the call, so that stages on both sides run its own code."""
        return call.enter < self.moment < call.exit or call is self.flow.root

    def run_by(self, op: FlowOp, callers: list[ModuleCall], runs_on: bool) -> int:
        """Returns the sides whose stages run an operation: BEFORE, AFTER, or BOTH where code around the cut runs it.

        callers  the calls inside which it runs, outermost first
        runs_on  the stage before goes on to the end of the forward
        """
        mine, flow = self.side(op.time), self.flow
        for call in callers:
            if self.around(call) or call.moves:  # what changes attributes is never left out
                continue
            # may be left out as a call: it depends on parameters, or nothing of it is used after the call
            used = max((flow.last_use[number] for number in op.makes), default=-1)
            if any(flow.depends[number] for number in op.makes) or used <= call.exit:
                return mine
        return BOTH if mine == BEFORE or runs_on else mine  # the stage after a cut runs what lies before its part too


def conflict(flow: Flow, place: ModuleCall) -> tuple[bool, str]:
    """Returns (whether the stage before runs on to the forward's end, why no stage can begin at `place`, or "")."""
    # one forward is enough to see that nothing lasts: no attribute changes, and no written buffer is used on both sides
    if not flow.later and not any(first < place.enter <= last for first, last in flow.written_buffers):
        return False, ""
    # none was recorded: the forward stands for the next one too, which finds the buffers that it has written
    flows = [flow, *flow.later] if flow.later else [flow, flow]
    twins = [place, *(twin_of(place, later) for later in flow.later)] if flow.later else [place, place]
    if None in twins:
        return False, "that place is not met again in a later forward, which finds what the first one left"
    if any(forward.taken or forward.backwards for forward in flows) and flow.later:
        return False, "the forward takes gradients itself"
    cuts = _cuts(flows, twins)
    must_run_on = any(_changed_behind(cut) for cut in cuts)
    for runs_on in (True,) if must_run_on else (False, True):  # running on costs the time of the code behind the cut
        why = _conflict(cuts, runs_on)
        if not why:
            return runs_on, ""
    return True, why


def _changed_behind(cut: _Cut) -> bool:
    """Returns whether, after the cut, code around it changes an attribute, or a call one outside its own module."""
    for change in cut.flow.changes:
        path, call = change.place[0], change.call
        own = path == call.path or path.startswith(f"{call.path}.")
        if change.time > cut.moment and (cut.around(call) or not own):
            return True
    return False


def _cuts(flows: Sequence[Flow], twins: Sequence[ModuleCall | None]) -> list[_Cut]:
    return [_Cut(flow, twin.enter) for flow, twin in zip(flows, twins, strict=True) if twin is not None]


def _conflict(cuts: list[_Cut], runs_on: bool) -> str:
    return _had(cuts, runs_on)[1]


def _had(cuts: list[_Cut], runs_on: bool) -> tuple[list[list[int]], str]:
    """Returns (for each forward and tensor number, the sides of the cut with its right values; why no cut, or "").

    Sides are bits, `BEFORE | AFTER`. The list ends before the forward with a conflict.

    runs_on  the stage before goes on to the forward's end
    """
    had: list[list[int]] = []
    for cut in cuts:
        sides, why = _sides(cut, runs_on, cuts, had)
        if why:
            return had, why
        had.append(sides)
    return had, ""


def kept_on(flow: Flow, places: Sequence[CutPoint]) -> dict[int, list[int]]:
    """Returns buffer id -> indices of the stages with the right values of what a forward put in its place.

    A stage that computed it from made-up results is not among them.
    """
    stages: dict[int, list[int]] = {}
    sides_at = [_of_buffers(flow, place) for place in places]
    # at a place that says nothing of a buffer both sides have it right
    for buffer in {buffer for sides in sides_at for buffer in sides}:
        right = [sides.get(buffer, BOTH) for sides in sides_at]
        # a stage lies after the cut at its beginning and before the one at its end: it has what both these sides have
        edges = zip([AFTER, *right], [*right, BEFORE], strict=True)
        stages[buffer] = [stage for stage, (enter, leave) in enumerate(edges) if enter & AFTER and leave & BEFORE]
    return stages


def _of_buffers(flow: Flow, place: CutPoint) -> dict[int, int]:
    """Returns id -> sides of `place` with the right values, for each buffer that the forward replaced."""
    cuts = _cuts([flow, *flow.later], [place.call, *(twin_of(place.call, later) for later in flow.later)])
    had = _had(cuts, place.runs_on)[0] if flow.later else []
    # `_had` ends early at a conflict: the first forward has carried nothing, so that no buffer is named
    last = flow.later[-1] if len(had) > len(flow.later) else flow
    kept = [(last.buffers[number], source) for number, source in last.carried.items() if number in last.buffers]
    return {buffer: had[which][number] for buffer, (which, number) in kept}


def _sides(cut: _Cut, runs_on: bool, cuts: list[_Cut], had: list[list[int]]) -> tuple[list[int], str]:
    """Returns (sides[tensor number], as bits, with its right values; why no cut can be here, or "").

    had  the sides of the forwards before this one
    """
    flow = cut.flow
    sides = [BOTH] * len(flow.made)
    for number, param in flow.parameters.items():
        sides[number] = _holders(cut, param)
    for number, (which, source) in flow.carried.items():
        sides[number] = had[which][source]
    if had:  # buffers begin as the forward before has left them
        _find_buffers(flow, cuts[len(had) - 1].flow, had[-1], sides)
    for op, callers in zip(flow.ops, flow.callers, strict=True):
        here, run = cut.side(op.time), cut.run_by(op, callers, runs_on)
        if runs_on and op.reads_value and run == BOTH and any(flow.depends[n] or flow.drawn[n] for n in op.reads):
            return sides, "code around it decides by values that one side alone has"
        right = run  # a result is right where the operation is done on inputs that are right
        for number in op.reads:
            right &= sides[number]
        depends = any(flow.depends[number] for number in op.makes)
        # results that reach neither output nor state may be wrong: nobody reads them
        counts = op.reads_value or (depends and not flow.reaching.isdisjoint(op.makes))
        needed = run if op.reads_value else here
        missing = [n for n in op.reads if not flow.depends[n] and sides[n] & needed != needed]
        if counts and missing:
            return sides, "what one forward leaves there, a later one reads on the other side"
        for number in op.makes:  # `here`: what depends on parameters is sent, so its own side has it right
            sides[number] = right | here if depends and counts else right
    if any(not flow.depends[n] and not sides[n] & AFTER for n in flow.returned):
        return sides, "the forward returns what an earlier one left on the other side"
    return sides, ""


def _holders(cut: _Cut, param: int) -> int:
    """Returns the sides (bits BEFORE, AFTER) whose stages hold a parameter: those that use it."""
    used = {number for number, other in cut.flow.parameters.items() if other == param}
    sides = 0
    for op in cut.flow.ops:
        if not used.isdisjoint(op.reads):
            sides |= cut.side(op.time)
    return sides


def _find_buffers(flow: Flow, before: Flow, had: list[int], sides: list[int]) -> None:
    """Set `sides` of the buffers that the forward finds to those with the right values at the end of the one before."""
    last = {buffer: number for number, buffer in before.buffers.items()}  # numbers ascend with time
    for number, buffer in flow.buffers.items():
        # read here before any write of this forward, and written by the one before
        if flow.made[number] < 0 and buffer in last and before.made[last[buffer]] >= 0:
            sides[number] = had[last[buffer]]


def kept_twice(flow: Flow, places: Sequence[CutPoint]) -> str:
    """Returns the names of what stages on both sides of a cut change for a later forward, as text, or ""."""
    # `later` has forwards only where one leaves something for the next
    if flow.later:
        return _named(flow)
    for place in places:
        cut = _Cut(flow, place.call.enter)
        for op, callers in zip(flow.ops, flow.callers, strict=True):
            written = [n for n in op.makes if n in flow.buffers]
            # code around a cut runs once for each stage, so a rank that has several would write as often in one step
            if written and cut.run_by(op, callers, runs_on=place.runs_on) == BOTH:
                return "a buffer"
    return ""


def _named(flow: Flow) -> str:
    places = sorted({change.place for forward in (flow, *flow.later) for change in forward.changes})
    return ", ".join(f"'{f'{path}.' if path else ''}{name}'" for path, name in places[:3]) or "a buffer"


def told_lasting(flow: Flow) -> str:
    """Returns a sentence on why what forwards leave for later ones lets no stage begin at some call, or ""."""
    for call in flow.calls():
        if why := conflict(flow, call)[1]:
            kept = f"what the forward keeps from one batch to the next, in {_named(flow)}"
            return f". Elsewhere {kept}, is in the way: {why}"
    return ""


@dataclass
class _Saved:
    """A saved tensor on the memory of one that the forward writes; a copy takes its place when the forward is over."""

    tensor: torch.Tensor


def _unpacked(kept: torch.Tensor | _Saved) -> torch.Tensor:
    return kept.tensor if isinstance(kept, _Saved) else kept


@contextmanager
def as_left(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context of one forward: its backward reads these parameters and buffers with their values at the forward's end.

    names  of parameters and buffers into which the forward writes
    """
    if not names or not torch.is_grad_enabled():
        yield
        return
    saved_here: list[_Saved] = []

    def pack(saved: torch.Tensor) -> torch.Tensor | _Saved:
        if isinstance(saved, Distributed) or saved.layout is not torch.strided:  # no memory to know it by
            return saved
        memory = saved.untyped_storage()._cdata
        for name in names:  # looked up anew: an assignment to .data or to the attribute gives it other memory
            path, _, leaf = name.rpartition(".")
            child = module.get_submodule(path)
            state = child._parameters.get(leaf, child._buffers.get(leaf))
            if state is not None and state.untyped_storage()._cdata == memory:
                saved_here.append(_Saved(saved))
                return saved_here[-1]
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        yield
    for saved in saved_here:  # at the end: one process meets in backward what its whole forward has written
        saved.tensor = saved.tensor.detach().clone()


def told_written(flow: Flow, module: nn.Module, call: ModuleCall) -> str:
    """Returns why no stage may begin at a call between two uses of what the forward writes into, or ""."""
    if shared := flow.rewritten_after(call.enter):
        first, second, *_ = (f"'{flow.maker(number) or 'the outermost forward'}'" for number in shared)
        return (
            f"at {call.label} two tensors share one memory (a slice and its base; made in {first} and {second}), which "
            "the forward writes into afterwards and reads by both: clone() one of them, or cut elsewhere"
        )
    state, named = flow.written_around(call.enter), (*module.named_parameters(), *module.named_buffers())
    names = [name for name, tensor in named if id(tensor) == state]
    reason = "the forward writes into '{}' what depends on parameters, and all that uses it belongs into one stage"
    return reason.format(names[0]) if names else ""
