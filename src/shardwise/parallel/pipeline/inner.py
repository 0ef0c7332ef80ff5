"""Find which stage boundaries are crossed by a gradient that the forward itself computes, and where its inputs are.

    x . block 0 | block 1 . energy . grad(energy, x)     the gradient by x goes back through block 0, on another stage

A boundary is crossed if x was made before it, and a crossing tensor other than x is computed from x. The stage after
the boundary then asks the stage before for its summands (stage_gradients), which must have the same x, as an argument
of the model, or as a result of a call or of the forward's own code. A tensor that depends on no parameter, as x
usually is, exists on every stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.parallel.pipeline.boundaries import By, CutPoint, Holder
from shardwise.parallel.pipeline.skips import Skip
from shardwise.trace.flow import Flow, ModuleCall


def crossed(flow: Flow, call: ModuleCall, numbers: Sequence[int]) -> list[int]:
    """Returns the indices in `flow.taken` of the gradients that go back over the entry of `call`.

    numbers  numbers of the tensors that cross there
    """
    # if not `plain`, the tensors that it is taken with respect to are unknown, so it counts as crossing
    return [
        index
        for index, taken in enumerate(flow.taken)
        if taken.enter > call.enter
        and (not taken.plain or any(_leads(flow, x, numbers) for x in taken.by if flow.made[x] < call.enter))
    ]


def _leads(flow: Flow, x: int, numbers: Sequence[int]) -> bool:
    """Whether a tensor in `numbers`, other than `x` itself, is computed from tensor number `x`."""
    return any(number != x and number in flow.influenced_by(x) for number in numbers)


def blocked(flow: Flow, call: ModuleCall, numbers: Sequence[int]) -> int | None:
    """Returns the number of a tensor because of which a gradient cannot go back over the entry of `call`; or None.

    Either no stage before `call` has the tensor with respect to which it is taken, or the gradient cannot be computed
    in parts (then it is the first of `numbers`, the tensors that cross).
    """
    # a backward that the forward runs behind this place (`loss.backward()`) cannot be computed in parts
    if any(start > call.enter for start in flow.backwards):
        return numbers[0]
    for index in crossed(flow, call, numbers):
        taken = flow.taken[index]
        if not taken.plain:  # other than `torch.autograd.grad(outputs, inputs)`
            return numbers[0]
        for x in taken.by:
            if flow.made[x] < call.enter and where(flow, x, call.enter, ()) is None:
                return x
    return None


def where(flow: Flow, x: int, before: int, skips: Sequence[Skip]) -> Holder | None:
    """Returns the holder of tensor number `x` on a stage that ends at time `before`; None if the stage lacks it.

    skips   calls that the stage leaves out
    """
    # every stage has the arguments of the outermost call
    if x in flow.root.arguments:
        return Holder("", 0, True, flow.root.arguments.index(x))
    for call, is_argument, leaf in flow.call_leaves.get(x, ()):
        # unlike at a boundary, the result of a left-out call does not do, since it has no graph
        if (call.enter if is_argument else call.exit) <= before and not _hidden(call, skips):
            return Holder(call.path, call.place, is_argument, leaf)
    made = flow.own.get(x)
    # otherwise it must be the result of a torch function that a module's own code calls
    if made is None or flow.made[x] > before or _hidden(made.whose, skips):
        return None
    callees = tuple(sorted({call.path for call in made.whose.inside}))
    return Holder(made.whose.path, made.whose.place, False, made.leaf, False, (made.place, made.name), callees)


def _hidden(call: ModuleCall, skips: Sequence[Skip]) -> bool:
    """Whether a call is, or lies inside, one that is left out."""
    return any(skip.call.enter <= call.enter and call.exit <= skip.call.exit for skip in skips)


def found_by(
    flow: Flow, stop: int, entry: CutPoint | None, skips: Sequence[Skip], last: CutPoint | None
) -> dict[int, By]:  # fmt: skip
    """Returns index in `flow.taken` -> `By`, where a stage has the tensors that the gradient is taken with respect to.

    Keys are the gradients that are taken before the stage's end, and those that cross it.

    stop         time before which the stage's operations lie
    entry, last  where the stage begins and ends; None for the first stage's and for the last one's
    skips        calls that the stage leaves out
    """
    here = [k for k, taken in enumerate(flow.taken) if taken.enter < stop]
    if last is not None:
        here += crossed(flow, last.call, last.numbers)
    sent = entry.numbers if entry is not None and crossed_at(flow, entry) else ()
    holders: dict[int, By] = {}
    for index in here:
        by = flow.taken[index].by
        # True: the gradient goes back with those of other received tensors, and the stage that has x adds it there
        holders[index] = tuple(
            True if x in sent else where(flow, x, stop, skips) if flow.made[x] < stop else None for x in by
        )
    return holders


def crossed_at(flow: Flow, place: CutPoint) -> bool:
    """Whether a gradient that the forward itself computes goes back over this place."""
    return bool(crossed(flow, place.call, place.numbers))
