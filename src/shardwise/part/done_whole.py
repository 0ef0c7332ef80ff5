"""Operations on cut positions that run on gathered tensors, on every rank: those without a rule, CTC, recurrence.

    ctc_loss               (T, B, C) gathered, the loss of each sequence on every rank; backward gathers again, and each
                           rank keeps its positions of the gradient
    pack_padded_sequence   (B, S, H) gathered; rows, and the recurrence over them, on every rank
    any other without a    its inputs gathered, the operation on every rank, in backward too; a result of the shape of
    rule (`sort`, `topk`)  its first part is cut as that is

Bytes received by a rank: (p-1)/p of the tensor, in forward; of `ctc_loss` as many in backward.

What this does not do: operations that draw random numbers or write into a part, and tiles of a field, which are
gathered only where a model asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.layout.grid import SPACE
from shardwise.part.cuts import Uncut
from shardwise.part.dimwise import arguments_of
from shardwise.part.gathering import gathered
from shardwise.part.levels import Distributed
from shardwise.part.sums import Sum
from shardwise.part.tensor import Part, facts, in_backward, is_part, no_rule, parts_in, tell
from shardwise.trace.elementwise import is_random
from shardwise.trace.leaves import replaced, tensors_in


class Gathers:
    """Switches for what may be gathered for an operation without a rule.

    all        Whether any part may be: in a method called outside the model's forward, without gradients
    on_gather  called with (operation, bytes) of each gathering in code that was not rehearsed (a script's own loss),
               where parts over positions may be gathered; None while the modules themselves run
    none       Whether no part may be, not even of sequences, since a rehearsal first tries cuts under which every
               operation has a rule
    """

    on_gather: Callable[[str, int], None] | None = None
    all: bool = False
    none: bool = False


@contextmanager
def by_rules(alone: bool = True) -> Iterator[None]:
    """Context in which operations without a rule raise `Uncut` if `alone`; else they run on gathered sequences."""
    before, Gathers.none = Gathers.none, alone
    try:
        yield
    finally:
        Gathers.none = before


def may_be_done_whole(func: Any, args: tuple, kwargs: dict, parts: list[Part]) -> bool:
    """Whether an operation without a rule may run on gathered tensors, with the same result on every rank.

    It may if all `parts` are of sequences, it draws no random numbers, and it writes into plain tensors alone.
    """
    draws = is_random(func)
    # drawn once on each rank, numbers would differ; `as_strided_` writes into memory that gathering copies
    if draws or facts(func).name.startswith("as_strided_") or not all(map(_of_a_sequence, parts)):
        return False
    arguments = arguments_of(func, args, kwargs)
    writable = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    written = [arguments.get(name) for name in writable]
    # what it writes must be plain: a write into a gathered copy of a part would be lost
    return bool(parts) and not tensors_in(written, Distributed)


def _of_a_sequence(part: Part) -> bool:
    # chunks (turns) are computed one after the other, so the others are not there to be gathered
    return part.axis.positions and not part.axis.turns and part.axis.name not in SPACE


def done_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns an operation's results on gathered tensors; results of the first part's shape are cut as that part."""
    lead = parts_in((args, kwargs))[0]
    args, kwargs = on_whole_positions(func, args), on_whole_positions(func, kwargs)
    if facts(func).name == "as_strided":  # reads by strides: the copy must lie in memory as the module sees it
        args = (torch.empty_strided(lead.shape, lead.stride(), dtype=lead.dtype, device=lead.device).copy_(args[0]),
                *args[1:])  # fmt: skip
    output = func(*args, **kwargs)
    if func._schema.is_mutable:  # it wrote into a plain tensor, which is what it returns
        return output
    if facts(func).is_view:  # of a copy: reading it is right, writing into it would be lost
        return replaced(torch.Tensor, lambda copy: Sum.read_only(copy, lead.axis), output)
    return replaced(torch.Tensor, lambda each: _cut_as(lead, each) if each.shape == lead.shape else each, output)


def _cut_as(lead: Part, whole: torch.Tensor) -> Part:
    """Returns this rank's share of `whole`, cut as `lead` of the same shape, along its cut dim over inner axes too."""
    share, inner = lead.share(whole, lead.dim_cut).clone(), lead.local
    if isinstance(inner, Part) and inner.dim_cut == lead.dim_cut and not isinstance(share, Distributed):
        share = inner.with_local(inner.share(share, inner.dim_cut).clone())
    return lead.with_local(share)


def on_whole_positions(func: Any, args: Any) -> Any:
    """Returns `args` with parts over positions gathered; in forward each is reported to `GATHERS`. Collective.

    Raises `Uncut` if a part is cut over an axis that cuts weights. `func` is the operation, for its name.
    """
    parts: list[Part] = parts_in(args)
    # refused where weights are cut, so that the weight is left whole (`Uncut.origins`)
    if any(not part.axis.positions for part in parts):
        raise Uncut(no_rule(func, parts))
    name = func._schema.name.partition("::")[2].strip("_")
    for part in parts if not in_backward() else []:
        each: Any = part
        # each axis that cuts this dim is one more all-gather, and one more line for the user
        while isinstance(each, Part) and each.axis.positions and each.dim_cut == part.dim_cut:
            tell(f"what {name} reads", each)
            each = each.local
    return replaced(Part, lambda part: gathered(part) if is_part(part) else part, args)
