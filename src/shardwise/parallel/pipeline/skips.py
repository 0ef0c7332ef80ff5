"""Find calls before a stage that it can leave out, and the shapes of the results made up for them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.trace.flow import Flow, ModuleCall

LARGE = 0.01  # of the forward's cost, from which a module that a stage does without is not run on zeros


@dataclass(frozen=True)
class Skip:
    """A call that a stage leaves out: it stands before the stage's part, and its results do not reach it."""

    path: str  # of the module that is called
    place: int  # the how-manieth of its calls
    like: tuple[int | None, ...]  # for each leaf of the result: the argument leaf of the same shape
    call: ModuleCall
    other: ModuleCall  # the same call with another number of samples
    samples: tuple[int, int]  # numbers of them with which `call` and `other` were recorded


def skips_between(start: float, stop: float, flow: Flow, other: Flow, samples: tuple[int, int]) -> list[Skip]:
    """Returns the outermost calls that a stage can leave out, of those that lie between two moments of the forward.

    other    the same forward on another number of samples
    samples  how many each of the two had
    """
    twins = _twins(flow, other)
    total = sum(op.cost for op in flow.ops)
    skips: list[Skip] = []

    def walk(call: ModuleCall) -> None:
        for inner in call.inside:
            # calls that end before the stage begins, or begin after it, are other stages'
            if inner.enter >= stop or inner.exit < start:
                continue
            # else the stage begins, or ends, inside it
            whole = start <= inner.enter and inner.exit <= stop
            skip = _skip(flow, inner, twins, samples, total) if whole else None
            if skip is not None:
                skips.append(skip)
            else:
                walk(inner)

    walk(flow.root)
    return skips


def _twins(flow: Flow, other: Flow) -> dict[tuple[str, int], ModuleCall]:
    """Returns (path, place) -> call of another forward, without modules whose number of calls differs (`repeats`)."""
    return {(call.path, call.place): call for call in other.calls() if call.path not in flow.repeats}


def _skip(
    flow: Flow, call: ModuleCall, twins: dict[tuple[str, int], ModuleCall], samples: tuple[int, int], total: float
) -> Skip | None:
    """Returns the `Skip` of a call; None where it must run: its result is shared, or has shapes that are not known."""
    other = twins.get((call.path, call.place))
    if other is None or not _pairs(call, other):  # nothing tells how its shapes follow the samples
        return None
    # what it changes in the module, a later forward would find made up; and it must give the same values then too
    if call.moves or not _plain(call) or not all(_alike(call, later) for later in flow.later):
        return None
    returned = {leaf.tensor for leaf in call.leaves}
    for leaf in call.leaves:
        if leaf.tensor is not None and not flow.depends[leaf.tensor]:
            return None  # a mask, a table of positions: never sent, every stage computes it
    first, last = (bisect.bisect_left(flow.in_order, (moment, -1)) for moment in (call.enter, call.exit + 1))
    for _, number in flow.in_order[first:last]:  # something from inside is used by other ways than its result
        if flow.last_use[number] > call.exit and number not in returned:
            return None
    like = []
    for leaf, twin in zip(call.leaves, other.leaves, strict=True):
        same = [
            place
            for place, (a, b) in enumerate(zip(call.shapes, other.shapes, strict=True))
            if a is not None and a == leaf.shape and b == twin.shape
        ]
        like.append(same[0] if same and leaf.tensor is not None else None)
    skip = Skip(call.path, call.place, tuple(like), call, other, samples)
    if any(None in shape for shape in made_up_shapes(skip, call.shapes)):
        return None  # it follows the samples in a way that its arguments do not
    # shapes put together from several arguments may be wrong for other inputs: worth it for large modules alone
    by_argument = all(place is not None or leaf.tensor is None for place, leaf in zip(like, call.leaves, strict=True))
    if not by_argument and sum(op.cost for op in flow.ops if call.enter <= op.time <= call.exit) < LARGE * total:
        return None
    return skip


def _pairs(call: ModuleCall, other: ModuleCall) -> bool:
    """Returns whether two calls have as many arguments and results: layers that chance leaves out hand on no more."""
    return (len(call.shapes), len(call.leaves)) == (len(other.shapes), len(other.leaves))


def _plain(call: ModuleCall) -> bool:
    """Returns whether a result is of tensors and plain values: two objects of the user's may not compare."""
    return all(isinstance(leaf.value, type(None) | bool | int | float | str) for leaf in call.leaves)


def _alike(call: ModuleCall, later: Flow) -> bool:
    """Returns whether a later forward's same call has equal arguments and results and changes no attribute.

    True where it makes no such call.
    """
    twin = next((other for other in later.calls() if (other.path, other.place) == (call.path, call.place)), None)
    # a call that chance left out of the later forward says nothing against it
    if twin is None:
        return True
    of_twin = (twin.spec, twin.shapes, [leaf.value for leaf in twin.leaves], [leaf.shape for leaf in twin.leaves])
    of_call = (call.spec, call.shapes, [leaf.value for leaf in call.leaves], [leaf.shape for leaf in call.leaves])
    # equal to the value: a call that hands on another number each time may not be left out
    return not twin.moves and _plain(twin) and of_twin == of_call


def made_up_shapes(skip: Skip, argument_shapes: Sequence[Sequence[int] | None]) -> list[list[int | None]]:
    """Returns the shape of each leaf of a result that is left out, for arguments of these shapes; None: not known.

    A leaf takes the shape of the argument that had the same one. Else each dim takes the size of an argument's dim: of
    the same place, or one that grew alike when samples were added (an LSTM's state has them second); or it is fixed.
    """
    arguments = [(a, b, now) for a, b, now in zip(skip.call.shapes, skip.other.shapes, argument_shapes, strict=True)
                 if a is not None and b is not None and now is not None]  # fmt: skip
    shapes: list[list[int | None]] = []
    for like, leaf, twin in zip(skip.like, skip.call.leaves, skip.other.leaves, strict=True):
        # a value that is no tensor has no shape, and a leaf like an argument takes that one's
        if leaf.tensor is None or like is not None:
            shapes.append(list(argument_shapes[like] or ()) if like is not None else [])
        else:
            pairs = enumerate(zip(leaf.shape, twin.shape, strict=True))
            shapes.append([_made_up_dim(dim, a, b, arguments) for dim, (a, b) in pairs])
    return shapes


def _made_up_dim(dim: int, a: int, b: int, arguments: Sequence[tuple[Sequence[int], ...]]) -> int | None:
    """Returns the size for this call's arguments of a dim that was `a` in one forward, `b` in the other; None: untold.

    arguments  (shape in the one, shape in the other, shape now) of each
    """
    for first, second, now in arguments:  # same place, same size in both
        if len(first) > dim and (first[dim], second[dim]) == (a, b):
            return now[dim]
    if a == b:
        return a
    for first, second, now in arguments:  # grows with some dim, as rows (samples * positions) do
        for x, y, size in zip(first, second, now, strict=True):
            if x != y and a * y == b * x and a * size % x == 0:
                return a * size // x
    return None
