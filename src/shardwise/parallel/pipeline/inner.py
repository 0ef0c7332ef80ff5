"""Find which stage boundaries a gradient crosses that the forward takes itself, and what each stage adds to it.

    x . block 0 | block 1 . energy . grad(energy, x)     the gradient by x goes back through block 0, on another stage

A boundary is crossed where x was made before it and something other than x itself that crosses it follows from x. The
stage after it then asks the stage before it for the rest (tape.py), which knows the same x: an argument of the model,
or what its own code or a call made. What depends on no parameter, x as a rule, every stage has.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.parallel.pipeline.boundaries import By, CutPoint, Holder
from shardwise.parallel.pipeline.skips import Skip
from shardwise.trace.flow import Flow, ModuleCall


def crossed(flow: Flow, call: ModuleCall, numbers: Sequence[int]) -> list[int]:
    """Returns the indices in `flow.taken` of the gradients that go back over the entry of `call`.

    numbers  the tensors that cross there
    """
    # what one that is not plain is taken by is not known, so that it is held to cross
    return [
        index
        for index, taken in enumerate(flow.taken)
        if taken.enter > call.enter
        and (not taken.plain or any(_leads(flow, x, numbers) for x in taken.by if flow.made[x] < call.enter))
    ]


def _leads(flow: Flow, x: int, numbers: Sequence[int]) -> bool:
    """Returns whether another of the crossing tensors (`numbers`) is computed from x."""
    return any(number != x and number in flow.influenced_by(x) for number in numbers)


def blocked(flow: Flow, call: ModuleCall, numbers: Sequence[int]) -> int | None:
    """Returns the number of a tensor that a gradient over this place is taken by and no earlier stage has, or None.

    For a gradient that cannot be taken in parts, the first of `numbers` (the tensors that cross) is returned.
    """
    # a backward of the forward's own (`loss.backward()`) begins behind this place, and cannot be taken in parts
    if any(start > call.enter for start in flow.backwards):
        return numbers[0]
    for index in crossed(flow, call, numbers):
        taken = flow.taken[index]
        if not taken.plain:  # not `torch.autograd.grad(outputs, inputs)`: what it is taken by is not known
            return numbers[0]
        for x in taken.by:
            # made on the other side of the place, and held by nobody here
            if flow.made[x] < call.enter and where(flow, x, call.enter, ()) is None:
                return x
    return None


def where(flow: Flow, x: int, before: int, skips: Sequence[Skip]) -> Holder | None:
    """Returns the holder of tensor `x` on a stage that ends at `before` and leaves out `skips`; None: it has none."""
    # an argument of the outermost call is there on every stage
    if x in flow.root.arguments:
        return Holder("", 0, True, flow.root.arguments.index(x))
    for call, is_argument, leaf in flow.call_leaves.get(x, ()):
        # a call that is left out is hidden itself, unlike at a boundary: its result is made up, and no x to derive by
        if (call.enter if is_argument else call.exit) <= before and not _hidden(call, skips):
            return Holder(call.path, call.place, is_argument, leaf)
    made = flow.own.get(x)
    # else only a function that some module's own code calls can give it
    if made is None or flow.made[x] > before or _hidden(made.whose, skips):
        return None
    callees = tuple(sorted({call.path for call in made.whose.inside}))
    return Holder(made.whose.path, made.whose.place, False, made.leaf, False, (made.place, made.name), callees)


def _hidden(call: ModuleCall, skips: Sequence[Skip]) -> bool:
    return any(skip.call.enter <= call.enter and call.exit <= skip.call.exit for skip in skips)


def found_by(
    flow: Flow, stop: int, entry: CutPoint | None, skips: Sequence[Skip], last: CutPoint | None
) -> dict[int, By]:  # fmt: skip
    """Returns, by index in `flow.taken` of a gradient that a stage takes or that crosses its end, where its inputs are.

    Each input: its holder, True where the stage before sent it, None where the stage lacks it.

    stop         time of the flow before which the stage's operations lie
    entry, last  where the stage begins and ends; None on the first and on the last stage
    skips        calls that the stage leaves out, in which it holds nothing
    """
    here = [k for k, taken in enumerate(flow.taken) if taken.enter < stop]
    if last is not None:
        here += crossed(flow, last.call, last.numbers)
    sent = entry.numbers if entry is not None and crossed_at(flow, entry) else ()
    holders: dict[int, By] = {}
    for index in here:
        by = flow.taken[index].by
        # sent: its gradient goes back with those of the other leaves, and the stage that has x adds them up
        holders[index] = tuple(
            True if x in sent else where(flow, x, stop, skips) if flow.made[x] < stop else None for x in by
        )
    return holders


def crossed_at(flow: Flow, place: CutPoint) -> bool:
    """Returns whether a gradient that the forward takes itself crosses this place."""
    return bool(crossed(flow, place.call, place.numbers))
