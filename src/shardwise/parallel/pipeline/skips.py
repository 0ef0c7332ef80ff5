"""Find calls outside of a stage's part that it can leave out, and the shapes of the results made up for them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.trace.flow import Flow, ModuleCall

LARGE = 0.01  # fraction of the forward's cost from which a call is left out even if its shapes are less certain


@dataclass(frozen=True)
class Skip:
    """A call that a stage leaves out, since its values are not used or are received.

    path     of the module that is called;  place  index of the call among its calls in the forward
    like     for each leaf of the result, index of an argument leaf that always has the same shape, or None
    call     the recorded call;  other  the same call in a forward with another number of samples
    samples  (number of samples of `call`, of `other`)
    """

    path: str
    place: int
    like: tuple[int | None, ...]
    call: ModuleCall
    other: ModuleCall
    samples: tuple[int, int]


def skips_between(start: float, stop: float, flow: Flow, other: Flow, samples: tuple[int, int]) -> list[Skip]:
    """Returns the outermost calls between times `start` and `stop` that a stage can leave out.

    other    the same forward on another number of samples
    samples  (number of samples in `flow`, in `other`)
    """
    twins = _twins(flow, other)
    total = sum(op.cost for op in flow.ops)
    skips: list[Skip] = []

    def walk(call: ModuleCall) -> None:
        """Adds to `skips` the outermost calls inside `call` that can be left out."""
        for inner in call.inside:
            if inner.enter >= stop or inner.exit < start:
                continue
            # a call that extends beyond the span contains a boundary, and cannot be left out itself
            whole = start <= inner.enter and inner.exit <= stop
            skip = _skip(flow, inner, twins, samples, total) if whole else None
            if skip is not None:
                skips.append(skip)
            else:
                walk(inner)

    walk(flow.root)
    return skips


def _twins(flow: Flow, other: Flow) -> dict[tuple[str, int], ModuleCall]:
    """Returns (path, place) -> call in `other`, without modules whose number of calls varies (`Flow.repeats`)."""
    return {(call.path, call.place): call for call in other.calls() if call.path not in flow.repeats}


def _skip(
    flow: Flow, call: ModuleCall, twins: dict[tuple[str, int], ModuleCall], samples: tuple[int, int], total: float
) -> Skip | None:
    """Returns the `Skip` of a call; None if it must run, as its result must be right, or its shapes are not known.

    twins   `_twins` of a forward with another number of samples;  total  cost of the forward
    """
    other = twins.get((call.path, call.place))
    if other is None or not _pairs(call, other):  # nothing shows how its shapes depend on the number of samples
        return None
    # a later forward would find made-up state, or the call's plain values would differ there
    if call.moves or not _plain(call) or not all(_alike(call, later) for later in flow.later):
        return None
    returned = {leaf.tensor for leaf in call.leaves}
    for leaf in call.leaves:
        if leaf.tensor is not None and not flow.depends[leaf.tensor]:
            return None  # a mask or a table of positions is never sent, so every stage computes it
    first, last = (bisect.bisect_left(flow.in_order, (moment, -1)) for moment in (call.enter, call.exit + 1))
    for _, number in flow.in_order[first:last]:  # a tensor from inside may be used later without being returned
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
        return None  # a size depends on the number of samples unlike any argument's size
    # shapes combined from several arguments may be wrong for other inputs, a risk worth taking for large modules only
    by_argument = all(place is not None or leaf.tensor is None for place, leaf in zip(like, call.leaves, strict=True))
    if not by_argument and sum(op.cost for op in flow.ops if call.enter <= op.time <= call.exit) < LARGE * total:
        return None
    return skip


def _pairs(call: ModuleCall, other: ModuleCall) -> bool:
    """Whether two calls have equally many arguments and results; layers dropped at random inside may change these."""
    return (len(call.shapes), len(call.leaves)) == (len(other.shapes), len(other.leaves))


def _plain(call: ModuleCall) -> bool:
    """Whether a call's result consists of tensors and plain values, since other objects may not be comparable."""
    return all(isinstance(leaf.value, type(None) | bool | int | float | str) for leaf in call.leaves)


def _alike(call: ModuleCall, later: Flow) -> bool:
    """Whether the same call in a later forward has equal shapes and plain values, and changes no attribute.

    True also if the later forward does not make the call.
    """
    twin = next((other for other in later.calls() if (other.path, other.place) == (call.path, call.place)), None)
    if twin is None:
        return True
    of_twin = (twin.spec, twin.shapes, [leaf.value for leaf in twin.leaves], [leaf.shape for leaf in twin.leaves])
    of_call = (call.spec, call.shapes, [leaf.value for leaf in call.leaves], [leaf.shape for leaf in call.leaves])
    return not twin.moves and _plain(twin) and of_twin == of_call


def made_up_shapes(skip: Skip, argument_shapes: Sequence[Sequence[int] | None]) -> list[list[int | None]]:
    """Returns the shape of each leaf of a left-out call's result, with None for a size that is not known.

    argument_shapes   shape of each argument leaf in this call; None if it is no tensor
    A leaf takes the shape of the argument in `skip.like`. Otherwise each dim takes the size of an argument's dim at the
    same place, is fixed, or follows an argument's dim that grew in proportion when samples were added.
    """
    arguments = [(a, b, now) for a, b, now in zip(skip.call.shapes, skip.other.shapes, argument_shapes, strict=True)
                 if a is not None and b is not None and now is not None]  # fmt: skip
    shapes: list[list[int | None]] = []
    for like, leaf, twin in zip(skip.like, skip.call.leaves, skip.other.leaves, strict=True):
        if leaf.tensor is None or like is not None:
            shapes.append(list(argument_shapes[like] or ()) if like is not None else [])
        else:
            pairs = enumerate(zip(leaf.shape, twin.shape, strict=True))
            shapes.append([_made_up_dim(dim, a, b, arguments) for dim, (a, b) in pairs])
    return shapes


def _made_up_dim(dim: int, a: int, b: int, arguments: Sequence[tuple[Sequence[int], ...]]) -> int | None:
    """Returns the size, for this call's arguments, of dim `dim` of a result; None if it is not known.

    a, b       its sizes in the two recorded forwards
    arguments  for each argument (shape in the one forward, shape in the other, shape in this call)
    """
    for first, second, now in arguments:  # an argument's dim at the same place with the same sizes
        if len(first) > dim and (first[dim], second[dim]) == (a, b):
            return now[dim]
    if a == b:
        return a
    for first, second, now in arguments:  # in proportion to some dim, as samples * positions grow with samples
        for x, y, size in zip(first, second, now, strict=True):
            if x != y and a * y == b * x and a * size % x == 0:
                return a * size // x
    return None
