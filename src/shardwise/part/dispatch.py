"""Compute an ATen operation on parts and sums by its rule, by its decomposition, or on gathered tensors."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout.grid import SPACE
from shardwise.part.cuts import Uncut
from shardwise.part.done_whole import Gathers, done_whole, may_be_done_whole
from shardwise.part.gathering import GatheredView, gather, gathered
from shardwise.part.known import with_known
from shardwise.part.levels import Distributed, ViewOf, answering, answers_operations, here, written_back
from shardwise.part.position_tables import note_table
from shardwise.part.rules.losses import added_up
from shardwise.part.sum_rules import with_sums
from shardwise.part.sums import Sum
from shardwise.part.tensor import RULES, Part, facts, forget, in_backward, is_part, parts_in, same_memory, tell
from shardwise.trace.elementwise import is_elementwise
from shardwise.trace.leaves import replaced, tensors_in

_TURNS = frozenset({"t", "numpy_T"})  # transposes of a matrix
# operations whose result has the values of their input in the same order, transposed or not
_SAME_VALUES = _TURNS | {"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy", "detach",
                         "alias", "clone"}  # fmt: skip


@answers_operations
def answer(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the result of an operation on parts and sums, by its rule, applied for the outermost of their axes.

    Raises `Uncut` if it has no rule and its inputs may not be gathered.
    """
    inputs = tensors_in((args, kwargs), Distributed)
    with answering(inputs):
        for each in inputs:
            # a rehearsal on values: what one process would have is computed beside the shares
            if each.whole_values is not None:
                return with_known(func, args, kwargs, inputs, lambda: _answer(func, args, kwargs, inputs))
        output = _answer(func, args, kwargs, inputs)
        # a table of positions is made of tables alone, so the first input tells whether to look at all
        if inputs[0].recipe is not None:
            note_table(func, args, kwargs, inputs, output)
        return output


def _answer(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed]) -> Any:
    """Returns an operation's result by its rule, else by the operations it is made of, else on gathered tensors."""
    for tensor in inputs:
        if tensor.summed and here(tensor):
            # sums first: linear operations keep them, and for others their totals are put in their place
            return with_sums(func, args, kwargs, inputs)
    op = facts(func)
    if op.writes and is_part(args[0]):
        # what was gathered last may be what is written into
        forget()
        # what is written would be in the copy, and not in what it is a view of
        if args[0].copied:
            raise Uncut(f"{func} writes into a view that is a copy here ({args[0]!r})")
    try:
        if op.rule is None:
            # the operations that it is made of may have rules
            if op.composite:
                return func.decompose(*args, **kwargs)
            # neither: a loss of elements with its sum or mean, or `Uncut` from `added_up`
            if not is_elementwise(op.apart or func, args, kwargs):
                return added_up(func, args, kwargs)
        output = (op.rule or RULES["add"])(func, args, kwargs)
    except Uncut:
        return _on_gathered(func, args, kwargs)
    # a view stands for the same memory: what is known of the memory's values goes on to it
    if op.is_view:
        for part in parts_in([output]):
            part.copied = args[0].copied or not _writes_through(part.local, args[0].local)
            part.source = ViewOf(args[0]) if args[0].source is not None else None
            # places along one dim stay such in any view; of a matrix of places a view may move the column
            part.own = args[0].own if args[0].own is not None and args[0].own[1] is None else part.own
    elif op.writes and is_part(args[0]):
        # a view that is a copy here gives what was written on to what it is a view of
        written_back(args[0])
    # views of one soft part share what is gathered of it: queries, keys and values each read it
    if op.name in _SAME_VALUES and is_part(args[0]) and is_part(output):
        values, turned = args[0].values
        output.values = values, turned != (op.name in _TURNS)
    return output


def _writes_through(view: torch.Tensor, local: torch.Tensor) -> bool:
    """Whether a write into `view` reaches the share `local`, by shared memory or because it is copied back."""
    return (isinstance(view, Distributed) and view.source is not None) or same_memory(view, local)


def _may_be_gathered(part: Part) -> bool:
    return part.may_gather or Gathers.all or (Gathers.on_gather is not None and part.axis.positions)


def _on_gathered(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the result on gathered inputs if these may be gathered; else raises the `Uncut` being handled again."""
    writes = facts(func).writes and is_part(args[0])
    parts = parts_in((args, kwargs))
    # the forward ran on a whole tensor, so its backward does
    if not writes and (_of_a_whole(func, args, parts) or _in_backward_of_tiles(func, parts)):
        args, kwargs = replaced(Part, lambda p: gathered(p) if is_part(p) else p, (args, kwargs))
        output = func(*args, **kwargs)
        if facts(func).is_view:
            return replaced(torch.Tensor, lambda copy: Sum.read_only(copy, parts[0].axis), output)
        return output
    may_gather = [part for part in parts if _may_be_gathered(part)]
    # nothing here that the plan gathers anyway, but sequences may be gathered for an operation without a rule
    if not may_gather and not Gathers.none and may_be_done_whole(func, args, kwargs, parts):
        return done_whole(func, args, kwargs)
    if writes or not may_gather:
        raise  # what is being handled
    # somebody counts what is gathered (a script's own loss, which nobody rehearsed)
    if Gathers.on_gather is not None:
        Gathers.on_gather(facts(func).name, sum(part.nbytes for part in may_gather))
    viewed, rest, options = args[0] if args else None, args[1:], kwargs
    args, kwargs = replaced(Part, lambda p: gather(p) if is_part(p) and _may_be_gathered(p) else p, (args, kwargs))
    output = func(*args, **kwargs)
    if facts(func).is_view:  # of a copy: reading it is right, writing into it is another matter
        # a view of one part can be read anew when the part is written, and written through; of several it is a copy
        alone = len(parts) == 1 and viewed is may_gather[0] and not isinstance(may_gather[0].local, Distributed)
        seen = GatheredView(may_gather[0], lambda whole: func(whole, *rest, **options)) if alone else None
        return replaced(torch.Tensor, lambda copy: Sum.read_only(copy, may_gather[0].axis, seen), output)
    return output


def _in_backward_of_tiles(func: Any, parts: list[Part]) -> bool:
    """Whether `func` runs in backward and all its parts are tiles; if so, reports that each of them is gathered.

    Called for an operation without a rule, whose forward therefore ran on a gathered field.
    """
    if not in_backward() or not parts or any(part.axis.name not in SPACE for part in parts):
        return False
    for part in parts:
        tell(f"what the backward {facts(func).name} reads", part)
    return True


def _of_a_whole(func: Any, args: tuple, parts: list[Part]) -> bool:
    """Whether an operation is the backward of one that every rank did on whole tensors, and its gradient arrives cut.

    Such an operation (the resize of a learned position table, a transform of a gathered field) had no cut input in
    forward, so that its backward expects a whole gradient. True for axes of positions alone.
    """
    # other axes have cuts that were derived with the backward in view: a cut gradient there means a missing rule
    if not func._schema.name.endswith("_backward") or not all(part.axis.positions for part in parts):
        return False
    cut = [given.name for given, value in zip(func._schema.arguments, args, strict=False) if is_part(value)]
    # only gradients are cut: the operation's own inputs were whole, so its forward ran whole
    return len(cut) == len(parts) and all(name.startswith("grad") for name in cut)
