"""Check that stages have the right state that one forward leaves for the next, in plain attributes and buffers.

Every stage also runs the code around its own part, so it keeps the state that its own part computed, and beside it
made-up state that is never read. That is right at a cut if neither side reads state that only the other side computed:

    one side computes it, the same side reads it   a layer's memory of its last batch
    both sides compute it                          a counter of the outermost forward; a table of positions
    one side computes it, the other one reads it   would have to be sent from batch to batch, so no stage begins here

State that code around a cut changes behind it (`self.memory = new` at the end of the outermost forward) reaches the
stage before the cut only if that stage runs on to the end of the forward, on made-up results (`runs_on`).
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
    """Returns the call in the forward `flow` that corresponds to `call` of another forward; None if there is none.

    Corresponding calls are the same module's with one index, or a torch function's at the same place of the code.
    """
    candidates = flow.functions if call.own is not None else flow.calls()
    key = call.path, call.place, call.own
    return next((other for other in candidates if (other.path, other.place, other.own) == key), None)


@dataclass
class _Cut:
    """A cut of one forward, `flow`, at time `moment`; the forward is one of several run in a row."""

    flow: Flow
    moment: int

    def side(self, time: int) -> int:
        """Returns the side of the cut, BEFORE or AFTER, on which a time lies."""
        return BEFORE if time < self.moment else AFTER

    def around(self, call: ModuleCall) -> bool:
        """Whether the cut lies inside the call, so that stages on both sides run the call's own code."""
        return call.enter < self.moment < call.exit or call is self.flow.root

    def run_by(self, op: FlowOp, callers: list[ModuleCall], runs_on: bool) -> int:
        """Returns the sides whose stages run an operation: BEFORE, AFTER or BOTH.

        callers  the calls inside which it runs, outermost first
        runs_on  whether the stage before the cut runs on to the end of the forward
        """
        mine, flow = self.side(op.time), self.flow
        for call in callers:
            if self.around(call) or call.moves:  # calls that change attributes are never left out
                continue
            # the other side may leave the call out, since results depend on parameters or are not used behind it
            used = max((flow.last_use[number] for number in op.makes), default=-1)
            if any(flow.depends[number] for number in op.makes) or used <= call.exit:
                return mine
        return BOTH if mine == BEFORE or runs_on else mine  # the stage after the cut also runs code before its part


def conflict(flow: Flow, place: ModuleCall) -> tuple[bool, str]:
    """Returns (whether the stage before `place` must run on to the forward's end, why no stage can begin there).

    The reason is "" if a stage can begin there.
    """
    # no later forward was recorded since no attribute changes, and no written buffer is used on both sides
    if not flow.later and not any(first < place.enter <= last for first, last in flow.written_buffers):
        return False, ""
    # without a later forward this one stands for the next too, which finds the buffers that this one has written
    flows = [flow, *flow.later] if flow.later else [flow, flow]
    twins = [place, *(twin_of(place, later) for later in flow.later)] if flow.later else [place, place]
    if None in twins:
        return False, "that place is not met again in a later forward, which finds what the first one left"
    if any(forward.taken or forward.backwards for forward in flows) and flow.later:
        return False, "the forward takes gradients itself"
    cuts = _cuts(flows, twins)
    must_run_on = any(_changed_behind(cut) for cut in cuts)
    for runs_on in (True,) if must_run_on else (False, True):  # not to run on is tried first, since it saves time
        why = _conflict(cuts, runs_on)
        if not why:
            return runs_on, ""
    return True, why


def _changed_behind(cut: _Cut) -> bool:
    """Whether, behind the cut, code around it changes an attribute, or a call changes one outside its own module."""
    for change in cut.flow.changes:
        path, call = change.place[0], change.call
        own = path == call.path or path.startswith(f"{call.path}.")
        if change.time > cut.moment and (cut.around(call) or not own):
            return True
    return False


def _cuts(flows: Sequence[Flow], twins: Sequence[ModuleCall | None]) -> list[_Cut]:
    """Returns the cut of each forward at the entry of its call in `twins`, without forwards whose call is None."""
    return [_Cut(flow, twin.enter) for flow, twin in zip(flows, twins, strict=True) if twin is not None]


def _conflict(cuts: list[_Cut], runs_on: bool) -> str:
    """Returns why no stage can begin at these cuts, or "". `runs_on`: as in `_had`."""
    return _had(cuts, runs_on)[1]


def _had(cuts: list[_Cut], runs_on: bool) -> tuple[list[list[int]], str]:
    """Returns (sides[forward][tensor number], the sides of the cut that have the right values; why no cut, or "").

    cuts     one for each forward, in the order in which they run
    runs_on  whether the stage before the cut runs on to the forward's end
    Sides are bits, `BEFORE | AFTER`. The list ends before the forward with a conflict.
    """
    had: list[list[int]] = []
    for cut in cuts:
        sides, why = _sides(cut, runs_on, cuts, had)
        if why:
            return had, why
        had.append(sides)
    return had, ""


def kept_on(flow: Flow, places: Sequence[CutPoint]) -> dict[int, list[int]]:
    """Returns buffer id -> indices of the stages that have the right values, for buffers that a forward reassigns.

    Other stages have computed the buffer from made-up results. `places`: where the stages after the first begin.
    """
    stages: dict[int, list[int]] = {}
    sides_at = [_of_buffers(flow, place) for place in places]
    for buffer in {buffer for sides in sides_at for buffer in sides}:
        right = [sides.get(buffer, BOTH) for sides in sides_at]
        # a stage is right if it is on a right side of both the cut at its beginning and the one at its end
        edges = zip([AFTER, *right], [*right, BEFORE], strict=True)
        stages[buffer] = [stage for stage, (enter, leave) in enumerate(edges) if enter & AFTER and leave & BEFORE]
    return stages


def _of_buffers(flow: Flow, place: CutPoint) -> dict[int, int]:
    """Returns buffer id -> sides of `place` that have the right values, for each buffer that the forward reassigned."""
    cuts = _cuts([flow, *flow.later], [place.call, *(twin_of(place.call, later) for later in flow.later)])
    had = _had(cuts, place.runs_on)[0] if flow.later else []
    # if `_had` ended early, at a conflict, the first forward is used, which names no buffer
    last = flow.later[-1] if len(had) > len(flow.later) else flow
    kept = [(last.buffers[number], source) for number, source in last.carried.items() if number in last.buffers]
    return {buffer: had[which][number] for buffer, (which, number) in kept}


def _sides(cut: _Cut, runs_on: bool, cuts: list[_Cut], had: list[list[int]]) -> tuple[list[int], str]:
    """Returns (sides[tensor number] of one forward, as bits of the sides with the right values; why no cut, or "").

    cuts  of all forwards, of which `cut` is one;  had  the sides of the forwards before it
    """
    flow = cut.flow
    sides = [BOTH] * len(flow.made)
    for number, param in flow.parameters.items():
        sides[number] = _holders(cut, param)
    for number, (which, source) in flow.carried.items():
        sides[number] = had[which][source]
    if had:  # buffers begin as the forward before left them
        _find_buffers(flow, cuts[len(had) - 1].flow, had[-1], sides)
    for op, callers in zip(flow.ops, flow.callers, strict=True):
        here, run = cut.side(op.time), cut.run_by(op, callers, runs_on)
        if runs_on and op.reads_value and run == BOTH and any(flow.depends[n] or flow.drawn[n] for n in op.reads):
            return sides, "code around it decides by values that one side alone has"
        right = run  # a result is right on sides that run the operation on right inputs
        for number in op.reads:
            right &= sides[number]
        depends = any(flow.depends[number] for number in op.makes)
        # results that reach neither output nor state may be wrong
        counts = op.reads_value or (depends and not flow.reaching.isdisjoint(op.makes))
        needed = run if op.reads_value else here
        missing = [n for n in op.reads if not flow.depends[n] and sides[n] & needed != needed]
        if counts and missing:
            return sides, "what one forward leaves there, a later one reads on the other side"
        for number in op.makes:  # `here`, since inputs that depend on parameters are sent to the operation's own side
            sides[number] = right | here if depends and counts else right
    if any(not flow.depends[n] and not sides[n] & AFTER for n in flow.returned):
        return sides, "the forward returns what an earlier one left on the other side"
    return sides, ""


def _holders(cut: _Cut, param: int) -> int:
    """Returns the sides, as bits, whose stages hold the parameter with id `param`, which are those that use it."""
    used = {number for number, other in cut.flow.parameters.items() if other == param}
    sides = 0
    for op in cut.flow.ops:
        if not used.isdisjoint(op.reads):
            sides |= cut.side(op.time)
    return sides


def _find_buffers(flow: Flow, before: Flow, had: list[int], sides: list[int]) -> None:
    """Sets `sides` of buffers that `flow` reads before it writes them, from the forward `before`, which wrote them.

    had, sides   sides[tensor number] of `before`, and of `flow`
    """
    last = {buffer: number for number, buffer in before.buffers.items()}  # the last number, since they ascend with time
    for number, buffer in flow.buffers.items():
        # made < 0: as this forward found it;  made >= 0: the forward before wrote it
        if flow.made[number] < 0 and buffer in last and before.made[last[buffer]] >= 0:
            sides[number] = had[last[buffer]]


def kept_twice(flow: Flow, places: Sequence[CutPoint]) -> str:
    """Returns text that names state which stages on both sides of a cut change for a later forward; "" without any.

    A rank with several stages would change it once for each of them in a step.
    """
    # later forwards are recorded only if one leaves something for the next
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
    """Returns up to three names of attributes that forwards change, as text; "a buffer" if none changes."""
    places = sorted({change.place for forward in (flow, *flow.later) for change in forward.changes})
    return ", ".join(f"'{f'{path}.' if path else ''}{name}'" for path, name in places[:3]) or "a buffer"


def told_lasting(flow: Flow) -> str:
    """Returns a sentence on why the state that a forward leaves bars a stage from some call; "" if it bars none."""
    for call in flow.calls():
        if why := conflict(flow, call)[1]:
            kept = f"what the forward keeps from one batch to the next, in {_named(flow)}"
            return f". Elsewhere {kept}, is in the way: {why}"
    return ""


@dataclass
class _Saved:
    """A tensor saved for backward whose memory the forward writes; replaced by a copy at the forward's end."""

    tensor: torch.Tensor


def _unpacked(kept: torch.Tensor | _Saved) -> torch.Tensor:
    """Returns the tensor that backward reads for one that `pack` returned."""
    return kept.tensor if isinstance(kept, _Saved) else kept


@contextmanager
def as_left(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context of one forward, whose backward then reads parameters and buffers as they are at the forward's end.

    names  of the parameters and buffers into which the forward writes; the next micro-batch changes them again
    """
    if not names or not torch.is_grad_enabled():
        yield
        return
    saved_here: list[_Saved] = []

    def pack(saved: torch.Tensor) -> torch.Tensor | _Saved:
        """Returns what autograd keeps for a saved tensor."""
        if isinstance(saved, Distributed) or saved.layout is not torch.strided:  # without one storage to compare
            return saved
        memory = saved.untyped_storage()._cdata
        for name in names:  # looked up each time, since an assignment to .data or the attribute changes the storage
            path, _, leaf = name.rpartition(".")
            child = module.get_submodule(path)
            state = child._parameters.get(leaf, child._buffers.get(leaf))
            if state is not None and state.untyped_storage()._cdata == memory:
                saved_here.append(_Saved(saved))
                return saved_here[-1]
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpacked):
        yield
    for saved in saved_here:  # copied at the end, since in one process backward reads what the whole forward wrote
        saved.tensor = saved.tensor.detach().clone()


def told_written(flow: Flow, module: nn.Module, call: ModuleCall) -> str:
    """Returns why no stage may begin at `call`, between two uses of a tensor that the forward writes; "" if one may."""
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
