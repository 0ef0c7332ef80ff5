"""Rules of elementwise and random operations (draws by index: random/draws). Labels: trace/axis_rules/pointwise."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.device import generators_kept, seed_generators
from shardwise.host import read
from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gather, gathered
from shardwise.part.moves import recut, whole_inside
from shardwise.part.sums import Sum
from shardwise.part.tables import is_table
from shardwise.part.tensor import GATHERS, Part, facts, is_part, no_rule, parts_in, rule
from shardwise.trace.leaves import replaced, tensors_in

# elementwise by their definition; `add` stands for every operation that is tagged so, or found to be so by trying
ELEMENTWISE = (
    "add", "_to_copy", "to_copy", "copy_", "detach", "detach_", "alias", "fill_", "zero_", "masked_fill_", "lift_fresh",
    "contiguous", "nan_to_num_", "relu_", "clamp_", "bernoulli_p",
)  # fmt: skip


Shapes = Sequence[Sequence[int]]


class _Whole(threading.local):
    """The operation that is being answered, and the shapes of its tensors as one process has them.

    For an axis further in, tiles of those further out may be one index or none: ranks would find others repeated.
    """

    running: tuple[Any, Shapes] | None = None

    def shapes(self, func: Any, tensors: list[torch.Tensor]) -> Shapes:
        running = self.running
        same = running is not None and running[0] is func and len(running[1]) == len(tensors)
        return running[1] if running is not None and same else [tensor.shape for tensor in tensors]

    @contextmanager
    def inside(self, func: Any, shapes: Shapes) -> Iterator[None]:
        """Context: the operation is answered for axes further in."""
        before, self.running = self.running, (func, shapes)
        try:
            yield
        finally:
            self.running = before


WHOLE = _Whole()


class PointwiseCuts:
    """Where and how all parts of an elementwise operation are cut, in the dims of its result."""

    def __init__(self, func: Any, tensors: list[torch.Tensor], shapes: Shapes):
        self.whole = {id(tensor): shape for tensor, shape in zip(tensors, shapes, strict=True)}
        self.ndim = max(tensor.dim() for tensor in tensors)
        parts = [tensor for tensor in tensors if is_part(tensor)]
        # soft parts may be gathered, so the others say how the result is cut: the one of most dims has all of its dims
        firm = [part for part in parts if not part.may_gather] or parts
        self._follow(max(firm, key=lambda part: part.dim()))
        if any(self.crossing(part) for part in firm):  # positions by positions: cut as the largest is, or by its rows
            self._follow(max(firm, key=lambda part: (math.prod(self.whole[id(part)]), -self.place(part))))
        lead = self.lead
        for part in firm:
            if self.place(part) != self.dim or not part.beside(lead):
                free = lead.axis.positions and (self.movable(part) or self.crossing(part))
                if free or all(p.may_gather for p in parts):
                    continue
                raise Uncut(f"{func} meets tensors that are cut differently: {no_rule(func, [part, lead])}")

    def _follow(self, lead: Part) -> None:
        self.lead, self.dim, self.owners = lead, self.place(lead), lead.owners

    def crossing(self, tensor: Part) -> bool:
        """Whether a part of positions is cut along another dim than the result, along whose cut dim it is repeated."""
        dim = self.dim - (self.ndim - tensor.dim())
        lead, shape = self.lead, self.whole[id(tensor)]
        apart = self.place(tensor) != self.dim and lead.axis.positions and self.whole[id(lead)][lead.dim_cut] > 1
        return apart and (dim < 0 or shape[dim] == 1)

    def movable(self, tensor: Part) -> bool:
        """Whether a part has the dim along which the result is cut, so that its cut can be moved there."""
        dim = self.dim - (self.ndim - tensor.dim())
        return dim >= 0 and tensor.shape[dim] == self.owners.size

    def place(self, tensor: Part) -> int:
        """Returns the part's cut dim, counted in the dims of the result."""
        return tensor.dim_cut + self.ndim - tensor.dim()

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of one input. Collective where that is cut along another dim."""
        if is_part(tensor):
            if self.place(tensor) == self.dim and tensor.beside(self.lead):
                return tensor.local
            if self.lead.axis.positions and not tensor.may_gather and not self.crossing(tensor):
                dim = self.dim - (self.ndim - tensor.dim())
                return recut(tensor if dim == tensor.dim_cut else whole_inside(tensor), dim, self.owners).local
            tensor = gather(tensor)  # soft, or repeated: it would have been refused
        place = self.dim - (self.ndim - tensor.dim())
        # repeated along the cut dim: every rank reads all of it
        if place < 0 or (tensor.shape[place] == 1 and self.owners.size != 1):
            return tensor
        return self.lead.share(tensor, place)


@rule(*ELEMENTWISE)
def pointwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `func` of the ranks' shares, brought beside each other."""
    tensors = tensors_in((args, kwargs))
    shapes = WHOLE.shapes(func, tensors)
    if _dealt_alike(tensors):
        # the result may be gathered only where all inputs may
        lead = next((part for part in tensors if not part.may_gather), tensors[0])
        first = args[0]
        args, kwargs = replaced(Part, lambda part: part.local, (args, kwargs))
        with WHOLE.inside(func, shapes):
            output = func(*args, **kwargs)
        return first if facts(func).writes else replaced(torch.Tensor, lead.with_local, output)
    # one rank has an index that all ranks read: it is gathered before the shares meet
    repeated = {id(tensor) for tensor, shape in zip(tensors, shapes, strict=True) if _repeats(tensor, shape, shapes)}
    if repeated:
        args, kwargs = replaced(Part, lambda part: gather(part) if id(part) in repeated else part, (args, kwargs))
        axis, tensors = parts_in(tensors)[0].axis, tensors_in((args, kwargs))
        if not parts_in(tensors):
            # no other input is cut: the result is whole, and no memory of a part
            return replaced(torch.Tensor, lambda whole: Sum.read_only(whole, axis), func(*args, **kwargs))
    if not facts(func).writes and _pairs_of_tables(parts_in(tensors)):
        args, kwargs = replaced(Part, lambda part: gathered(part) if is_part(part) else part, (args, kwargs))
        return func(*args, **kwargs)
    agreement = PointwiseCuts(func, tensors, shapes)
    changed = args[0] if facts(func).writes else None
    if changed is not None and not is_part(changed) and agreement.lead.axis.positions:
        return _into_a_whole(func, args, kwargs)
    if changed is not None:
        _refuse_changing(func, changed, agreement)
    args, kwargs = replaced(torch.Tensor, agreement.local, (args, kwargs))
    with WHOLE.inside(func, shapes):
        output = func(*args, **kwargs)
    if changed is not None:
        return changed
    return replaced(torch.Tensor, lambda t: agreement.lead.with_local(t, agreement.dim, agreement.owners), output)


def _dealt_alike(tensors: list[Any]) -> bool:
    """Whether all are parts, of one shape and dealt in one way: most operations by far."""
    first = tensors[0]
    if not is_part(first):
        return False
    shape, dim, axis, owners = first.shape, first.dim_cut, first.axis, first.owners
    return all(
        part is first
        or (isinstance(part, Part) and part.axis is axis and part.dim_cut == dim and part.shape == shape
            and part.owners == owners)
        for part in tensors
    )  # fmt: skip


def _into_a_whole(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns `whole.add_(part)` of the gathered part, as for statistics that a module keeps. Collective."""
    for part in parts_in((args, kwargs)):
        for tell in GATHERS:
            tell("a field that is written into a whole tensor", part)
    args, kwargs = replaced(Part, lambda part: gathered(part) if is_part(part) else part, (args, kwargs))
    return func(*args, **kwargs)


def _repeats(tensor: torch.Tensor, shape: Sequence[int], shapes: Shapes) -> bool:
    """Whether a part of one index along its cut dim, which one rank has, is read by every index of another tensor."""
    if not is_part(tensor) or shape[tensor.dim_cut] != 1:
        return False
    place = tensor.dim_cut - tensor.dim()  # from behind, where shapes meet
    return any(len(other) >= -place and other[place] > 1 for other in shapes)


def _pairs_of_tables(parts: list[Part]) -> bool:
    """Whether tables of positions meet along other dims: each rank makes what is of all pairs whole, unsent.

    Attention's masks are looked at whole, and what weights are read for by such a table would have to be gathered.
    """
    places = {(part.dim_cut - part.dim(), part.owners) for part in parts}
    return len(places) > 1 and all(map(is_table, parts))


def _refuse_changing(func: Any, changed: Any, agreement: PointwiseCuts) -> None:
    """Raises `Uncut` where an in-place operation would put shares into a tensor that is whole or cut otherwise."""
    fits = is_part(changed) and agreement.place(changed) == agreement.dim and changed.beside(agreement.lead)
    if not fits:
        raise Uncut(f"{func} writes a cut tensor into one that is not cut alike")


@rule("native_dropout")
def native_dropout(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns (output, mask); the mask is drawn for the whole tensor, and this rank keeps its share."""
    part = args[0]
    if part.axis.positions and not _OF_ONE_PROCESS:
        with _own_draws(part):
            output, mask = func(part.local, *args[1:], **kwargs)
        return part.with_local(output), part.with_local(mask)
    # dropout of ones gives the scale and the mask of the whole tensor, alike on all ranks, which are seeded alike
    ones = torch.empty_strided(part.shape, part.whole_strides, dtype=part.dtype, device=part.device).fill_(1)
    scale, mask = func(ones, *args[1:], **kwargs)  # drawn in the order of memory
    scale, mask = part.share(scale, part.dim_cut), part.share(mask, part.dim_cut)
    return part.with_local(part.local * scale), part.with_local(mask)


@rule("bernoulli")  # and each operation that `draws_each`
def random(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns this rank's share of the random tensor that the operation draws.

    Of positions a rank draws its own alone: a field may be larger than what a device holds.
    """
    part = args[0]
    if not is_part(part) or len(parts_in((args, kwargs))) > 1:
        # what else the draw reads (a tensor of rates) is read whole, since the numbers are then drawn for all ranks
        whole = replaced(Part, gather, (args[1:], kwargs))
        args, kwargs = (args[0], *whole[0]), whole[1]
    if not is_part(part):
        return func(*args, **kwargs)
    reads = not func._schema.is_mutable and not func._schema.name.endswith("_like")  # it is distributed by its values
    alone = not tensors_in((args[1:], kwargs))
    own = alone and not part.may_gather and kwargs.get("generator") is None and not _OF_ONE_PROCESS
    if part.axis.positions and own:
        with _own_draws(part):
            drawn = func(part.local, *args[1:], **kwargs)
        return part if func._schema.is_mutable else part.with_local(drawn)
    as_it_lies = {"dtype": part.dtype, "device": part.device}  # numbers are drawn in the order of memory
    whole = gather(part) if reads else torch.empty_strided(part.shape, part.whole_strides, **as_it_lies)
    drawn = part.share(func(whole, *args[1:], **kwargs), part.dim_cut)
    if func._schema.is_mutable:
        part.local.copy_(drawn)
        return part
    return part.with_local(drawn.contiguous())


_OF_ONE_PROCESS: list[bool] = []


@contextmanager
def draws_of_one_process() -> Iterator[None]:
    """Context: draws for parts cut over positions are made whole, alike on every rank, which keeps its share."""
    _OF_ONE_PROCESS.append(True)
    try:
        yield
    finally:
        _OF_ONE_PROCESS.pop()


@contextmanager
def _own_draws(part: Part) -> Iterator[None]:
    """Context: generators are seeded for this rank of the part's axis, from a draw that is equal on all of them."""
    if part.axis.rehearsal is not None:
        yield
        return
    seed = int(read(torch.randint(2**62, ()), "the seed of a rank's own draws")) + part.axis.index
    with generators_kept():
        seed_generators(seed)
        yield


@rule("_local_scalar_dense", "equal", "is_nonzero")
def value(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns what Python reads of a tensor, from the whole of it."""
    return func(*replaced(Part, gather, args), **kwargs)
