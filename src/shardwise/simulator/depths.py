"""`longer`: extends traces of a module with few equal layers to many, by counts, sizes and operations on a line.

    number        extrapolated on the line through both traces
    list          items that the deeper trace has more of are repeated once for each further layer
    mapping       by key
    bool, text    must be equal in both traces, otherwise `NoLine`

Peak live bytes are linear in the number of layers in each of three windows (before the layers, until their backward,
after it), unless gradient shards, which are made while activations are freed, grow faster than the activations.

*What this does not do*: find out whether layers are alike (planner/alike_layers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from shardwise.simulator.counted import Model, RankTrace, Sent, StepTrace, Tops


class NoLine(Exception):
    """Raised if traces of a module at two depths cannot be extended to a third."""


def longer(few: Model, more: Model, layers: int) -> Model:
    """Returns the `Model` of a module with `layers` more layers than `more`, which has one layer more than `few`.

    Raises `NoLine` if `few` and `more` differ by anything else than one repeated layer.
    """
    pairs = ((few.small, more.small), (few.large, more.large))
    small, large = (longer_trace(before, after, layers) for before, after in pairs)
    return replace(more, small=small, large=large)


def longer_trace(few: StepTrace, more: StepTrace, layers: int) -> StepTrace:
    """Returns the trace of a module with `layers` more layers than that of `more`; `NoLine` as in `longer`."""
    _refuse(few, more)
    values = {field.name: (getattr(few, field.name), getattr(more, field.name)) for field in fields(more)}
    held = [[(trace.in_order[place], trace.wholes.get(place)) for place in range(len(trace.in_order))]
            for trace in (few, more) if [*trace.in_order] == [*range(len(trace.in_order))]]  # fmt: skip
    # both optimizers must be given the parameters in the module's order, so that the lists can be compared
    if len(held) < 2:
        raise NoLine
    params = _line(held[0], held[1], layers)
    for name in ("in_order", "wholes", "peak", "tops", "first", "first_tops", "wire"):
        values.pop(name, None)
    made = {name: _line(before, after, layers) for name, (before, after) in values.items()}
    made["in_order"] = {place: size for place, (size, _) in enumerate(params)}
    made["wholes"] = {place: whole for place, (_, whole) in enumerate(params) if whole is not None}
    made["tops"] = _grown(few.tops, more.tops, layers)
    made["peak"] = max(made["tops"])
    if isinstance(few, RankTrace) and isinstance(more, RankTrace):
        made["first_tops"] = _grown(few.first_tops, more.first_tops, layers)
        made["first"] = max(made["first_tops"])
        made["wire"] = {op: _sent(few.wire[op], more.wire[op], layers) for op in more.wire}
    return type(more)(**made)


def _sent(few: dict[Sent, int], more: dict[Sent, int], layers: int) -> dict[Sent, int]:
    """Returns {`Sent`: calls} extended by `layers`, with a mean size for messages of one kind; or raises `NoLine`."""
    if [key[:2] for key in few] != [key[:2] for key in more]:
        raise NoLine
    sent: dict[Sent, int] = {}
    for ((axis, op, size), calls), (before, fewer) in zip(more.items(), few.items(), strict=True):
        times = calls + layers * (calls - fewer)
        mean = size if size == before[2] else (size * calls + layers * (size * calls - before[2] * fewer)) / times
        sent[axis, op, mean] = sent.get((axis, op, mean), 0) + times
    return sent


def _refuse(few: StepTrace, more: StepTrace) -> None:
    """Raises `NoLine` for two traces that cannot be extended.

    That is if gradient shards grow faster than kept activations, gradients' arrivals were noted, or exchanges overlap.
    """
    if more.shard_gradient_bytes - few.shard_gradient_bytes > more.tops[1] - few.tops[1]:
        raise NoLine
    if more.arrived:
        raise NoLine
    if isinstance(more, RankTrace) and any(more.overlaps.values()):  # overlaps hold indexes of operations
        raise NoLine


def _grown(few: Tops, more: Tops, layers: int) -> Tops:
    before, within, after = (deep + layers * (deep - flat) for flat, deep in zip(few, more, strict=True))
    return before, within, after


def _line(few: Any, more: Any, layers: int) -> Any:
    """Returns a value of a trace (number, list, mapping, trace) extended by `layers`, or raises `NoLine`."""
    if type(few) is not type(more):
        raise NoLine
    if isinstance(more, StepTrace):
        return longer_trace(few, more, layers)
    if isinstance(more, Counter):
        made = ((key, more[key] + layers * (more[key] - few[key])) for key in {**few, **more})
        return Counter({key: times for key, times in made if times})
    if isinstance(more, Mapping):
        if few.keys() != more.keys():
            raise NoLine
        return {key: _line(few[key], more[key], layers) for key in more}
    if isinstance(more, list):
        return _stretched(few, more, layers)
    if isinstance(more, int | float) and not isinstance(more, bool):
        return more + layers * (more - few)
    if few != more:  # names and flags must not depend on depth
        raise NoLine
    return more


def _stretched(few: Sequence[Any], more: Sequence[Any], layers: int) -> list[Any]:
    """Returns `more` with the items of its additional layer repeated `layers` times, or raises `NoLine`.

    The items may be in two places, as a forward and a backward have them:

    few    head           middle          tail
    more   head  forward  middle backward tail
    """
    added = len(more) - len(few)
    head = _common(few, more)
    tail = min(_common(few[::-1], more[::-1]), len(few) - head)
    middle, end = few[head : len(few) - tail], len(more) - tail
    # tries every split of the additional items into a forward and a backward
    for forward in range(added + 1):
        if more[head + forward : end - added + forward] == middle:
            again = [*more[head : head + forward]], [*more[end - added + forward : end]]
            return [*more[: head + forward], *again[0] * layers, *middle, *again[1] * (layers + 1), *more[end:]]
    raise NoLine


def _common(few: Sequence[Any], more: Sequence[Any]) -> int:
    """Returns the length of the common beginning of two sequences."""
    pairs = enumerate(zip(few, more, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(few), len(more)))
