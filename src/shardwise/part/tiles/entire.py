"""Operations that need dims whole: cuts move to other dims, the plain operation runs, they move back (`needs_whole`).

    x (B, C, H, W) cut along H over d0, along W over d1; sorted along W
    moved       d1 cuts channels (or samples)               whole rows, which the operation of one process sorts
    moved back  d1 cuts W

What takes the dims away (a median) leaves its result on every rank. Received by a rank: (p-1)/p of its share each way.
Where an operation needs all dims (`done_whole` too), the tensor is gathered, and the run says what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.part.cuts import Owners, Uncut
from shardwise.part.moves import from_axis, moved, owners_inside, replaced_from_axis, share_of
from shardwise.part.sums import redealt, whole_gradient, whole_over_axis
from shardwise.part.tensor import Part
from shardwise.part.tiles.gathers import noted
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, opened, placed, used_over
from shardwise.trace.leaves import replaced, tensors_in


@dataclass(frozen=True)
class Needs:
    """Which dims an operation needs whole: what its arguments say, or these (None: all)."""

    names: str  # of the arguments behind the first tensor
    dims: int | tuple[int, ...] | None = -1
    gone: bool = False  # its result has none of them, unless it is asked to keep them
    beside: tuple[str, ...] = ()  # arguments that are dealt as the first tensor is
    behind: bool = False  # dims that its result has more lie behind those that stay, not in front
    apart: bool = False  # any other dim may be cut too, and each rank has its own of it, or none


def with_whole(
    run: Callable, tensors: Sequence[torch.Tensor], dims: Sequence[int], *, reduces: bool = False, lost: int = 0,
    behind: bool = False, empties: bool = False,
) -> Any:  # fmt: skip
    """Returns what `run` gives, cut as the first tensor is; it is run on shares, while cuts of `dims` lie along others.

    tensors  those behind the first are dealt as it is
    reduces  the results have one index along the dims, or, of the first `lost` of them, no dim any more
    empties  `run` takes tensors without elements
    """
    first, *others = tensors
    afar = []
    for cut in cuts(first, dims):
        home = _home([first, *others], dims, cut)
        if home is None:  # no other dim can take the cut (of a single matrix, say)
            noted("a field of which an operation reads all dims", first, cut)
            first, *others = (whole_over_axis(tensor, cut.axis) for tensor in (first, *others))
        else:
            inside = owners_inside(from_axis(first.detach(), cut.axis), home)
            first = moved(first, home, _among(inside, _extent(first, home, cut), cut.axis.size), cut.axis)
            afar.append((cut, inside))
    now = cuts(first, range(first.dim()))
    shares = [opened(tensor, now) for tensor in (first, *(dealt_alike(tensor, now) for tensor in others))]
    # a rank without indices runs on a stand-in of one, else it would not come to the collectives of the others
    # (`test_a_rank_that_is_dealt_no_signal_comes_to_the_same_collectives`)
    empty = [cut.dim for cut in now if not (empties or shares[0].shape[cut.dim])]
    shares = [with_elements(share, empty) for share in shares]
    results = run(*shares)
    gone = sorted(dims)[:lost]

    def back(result: torch.Tensor) -> torch.Tensor:
        # dims that the result has more: in front of all, one index for each level of a quantile
        added = 0 if behind else result.dim() - (first.dim() - lost)
        places = [cut.dim - sum(dim < cut.dim for dim in gone) + added for cut in now]
        expected = [(place, shares[0].shape[cut.dim]) for cut, place in zip(now, places, strict=True)]
        if behind and any(place >= result.dim() or result.shape[place] != n for place, n in expected):
            return result  # an empty tensor in the place of a result that was not asked for (`qr(mode="r")`)
        for cut, place in zip(now, places, strict=True):
            result = result.narrow(place, 0, 0) if cut.dim in empty else result
        result = placed(result, [CutDim(cut.axis, d, cut.owners) for cut, d in zip(now, places, strict=True)])
        for cut, inside in reversed(afar):
            if reduces:  # the dim that was cut has no more than one index to deal
                result = whole_over_axis(result, cut.axis)
            elif result.dim() == first.dim():
                result = _home_again(result, cut, inside)
        return result

    made = replaced(torch.Tensor, back, results)
    return made if type(results) in (list, tuple) or not isinstance(results, tuple) else type(results)(made)


def _home(tensors: list[torch.Tensor], dims: Sequence[int], cut: CutDim) -> int | None:
    """Returns the dim with most indices for each rank to which a cut can be moved; None where there is none."""
    first = tensors[0]
    # of a dim that is broadcast beside the first tensor, others would have no indices to deal
    room = {dim: float(n) for dim, n in enumerate(first.shape)
            if dim not in dims and all(tensor.shape[dim] == n for tensor in tensors)}  # fmt: skip
    depths = {other.dim: other.axis.depth for other in cuts(first, room)}
    for other in cuts(first, room):  # its indices are shared already
        room[other.dim] /= other.axis.size
    here = from_axis(first.detach(), cut.axis)
    within = {dim: min(owners.counts) for dim in room if (owners := owners_inside(here, dim)) is not None}
    # not to a dim that an axis of positions further in cuts: its ranks would exchange unequal shares; nor to channels
    # of which a rank of tp has too few
    free = [dim for dim in room
            if depths.get(dim, -1) < cut.axis.depth and within.get(dim, cut.axis.size) >= cut.axis.size]  # fmt: skip
    return max(free, key=lambda dim: (room[dim], -dim)) if free else None


def _among(inside: Owners | None, n: int, ranks: int) -> Owners:
    """Returns the owners of a dim of `n` indices for a cut that is moved there.

    inside  the dim's owners over an axis further in (tp), each of whose ranks must have some of each owner
    """
    if inside is None:
        return Owners.blocks(n, ranks)
    who = np.empty(n, dtype=np.int16)
    for rank in range(inside.ranks):
        mine = inside.indices(rank)
        who[mine] = Owners.blocks(len(mine), ranks).array
    return Owners.of(who, ranks)


def _home_again(result: torch.Tensor, cut: CutDim, inside: Owners | None) -> torch.Tensor:
    """Returns a result cut along the dim of `cut`: by the same owners, or in blocks where its size is another."""
    n = _extent(result, cut.dim, cut)
    owners = cut.owners if n == cut.owners.size else Owners.blocks(n, cut.axis.size)
    return moved(result, cut.dim, owners, cut.axis, inside)


def dealt_alike(tensor: torch.Tensor, now: list[CutDim]) -> torch.Tensor:
    """Returns a tensor cut as `now` says, however it is dealt. Collective where it is cut otherwise."""
    for cut in now:
        here = from_axis(tensor, cut.axis)
        if _extent(tensor, cut.dim, cut) != cut.owners.size:
            raise Uncut(f"indices of {tuple(tensor.shape)} beside a tensor with {cut.owners.size} along dim {cut.dim}")
        if not isinstance(here, Part) or here.axis is not cut.axis:
            if not tensor.requires_grad:  # each rank takes its indices of what all have; nothing has to come back
                share = Part(cut.owners.take(here, cut.dim, cut.axis.index), cut.dim, cut.owners, cut.axis)
                tensor = replaced_from_axis(tensor, cut.axis, share)
                continue
            if cut.dim in [other.dim for other in cuts(tensor, range(tensor.dim()))]:
                raise Uncut(f"values {tuple(tensor.shape)} that every rank has, beside a dim that is cut over two axes")
            # its gradient is a sum of what each rank's own indices get, so it is read as a weight beside tiles is
            mine = cut.owners.take(used_over(tensor, (cut.axis,)), cut.dim, cut.axis.index)
            tensor = placed(mine, [cut])
        elif (here.dim_cut, here.owners) != (cut.dim, cut.owners):
            tensor = moved(tensor, cut.dim, cut.owners, cut.axis)
    return tensor


def with_elements(share: torch.Tensor, empty: list[int]) -> torch.Tensor:
    """Returns a share with one index along its empty dims, since kernels take no tensors without elements."""
    # a sum over nothing: zeros, by an operation of autograd, so that backward runs on this rank too
    return share.sum(empty, keepdim=True).to(share.dtype) if empty else share


def _extent(tensor: torch.Tensor, dim: int, cut: CutDim) -> int:
    """Returns the size of a dim as the ranks of the cut's axis see it: axes further out may have cut it."""
    return from_axis(tensor.detach(), cut.axis).shape[dim]


def _like(whole: torch.Tensor, index: torch.Tensor) -> list[CutDim]:
    """Returns the cuts by which a whole tensor is dealt beside an index that is cut: along the same dims.

    Where it has another size along one (`take_along_dim` of few out of many), it is dealt in blocks.
    """
    return [
        cut if whole.shape[cut.dim] == index.shape[cut.dim]
        else replace(cut, owners=Owners.blocks(whole.shape[cut.dim], cut.axis.size))
        for cut in cuts(index, range(index.dim()))
    ]  # fmt: skip


def answer_of(plain: Callable, needs: Needs) -> Callable:
    """Returns a function that does what `plain` does, on cut tensors too."""
    names = needs.names.split()

    def answer(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What `plain` gives of a tensor of which any dim may be cut."""
        arguments = dict(zip(names, args, strict=False)) | kwargs
        asked = arguments.get("dim", arguments.get("dims", needs.dims))
        dims = range(input.dim()) if asked is None else [asked] if isinstance(asked, int) else asked
        dims = sorted({d % input.dim() for d in dims}) if isinstance(input, torch.Tensor) and input.dim() else []
        beside = {name: arguments[name] for name in needs.beside if isinstance(arguments.get(name), torch.Tensor)}
        # what torch writes in Python (stft) is given tiles, whichever dim is cut
        read = range(input.dim()) if (needs.behind or needs.apart) and isinstance(input, torch.Tensor) else dims
        cut_tensors = [tensor for tensor in (input, *beside.values()) if cuts(tensor, read)]
        enough = needs.apart or all(cuts(tensor, read) for tensor in beside.values())
        # else a rule for parts answers: the index is whole, other dims are cut, or a given tensor is to be written
        if not cut_tensors or not enough or "out" in kwargs:
            return plain(input, *args, **kwargs)
        if not cuts(input, read):  # whole, beside indices that are cut
            input = dealt_alike(input, _like(input, cut_tensors[0]))

        def run(first: torch.Tensor, *others: torch.Tensor) -> Any:
            own = dict(zip(beside, others, strict=True))
            placed_args = [own.get(name, arg) for name, arg in zip(names, args, strict=False)]
            # arguments behind those that have names here are handed on as they are
            rest = {name: own.get(name, value) for name, value in kwargs.items()}
            return plain(first, *placed_args, *args[len(names) :], **rest)

        lost = len(dims) if needs.gone and not arguments.get("keepdim", False) else 0
        tensors = [input, *beside.values()]
        return with_whole(run, tensors, dims, reduces=needs.gone, lost=lost, behind=needs.behind, empties=needs.apart)

    return answer


def of_all(plain: Callable) -> Callable:
    """Returns what runs `plain` on gathered tensors, on every rank; results of as many dims are cut again."""

    @wraps(plain)
    def answer(*args: Any, **kwargs: Any) -> Any:
        """What `plain` gives of tensors of which any dim may be cut."""
        parts = tensors_in((args, kwargs), Part)
        args, kwargs = replaced(Part, partial(_whole, plain.__name__), (args, kwargs))
        result = plain(*args, **kwargs)
        now = cuts(parts[0], range(parts[0].dim())) if parts else []

        def again(whole: torch.Tensor) -> torch.Tensor:
            whole = whole_gradient(whole, now[0].axis)  # in backward too the operation is done of whole tensors
            n, sizes = parts[0].dim(), zip(whole.shape, parts[0].shape, strict=False)
            room = [size == before or size >= math.prod(cut.axis.size for cut in now) for size, before in sizes]
            fits = whole.dim() == n and all(room[cut.dim] for cut in now)
            return redealt(whole, lambda given: _shared(given, now)) if fits else whole

        return replaced(torch.Tensor, again, result) if now else result

    return answer


def _whole(name: str, part: Part) -> torch.Tensor:
    """Returns the part gathered over every axis of positions, and notes what that costs. Collective."""
    whole: torch.Tensor = part
    for cut in reversed(cuts(part, range(part.dim()))):
        noted(f"a field of which {name} reads all dims", whole, cut)
        whole = whole_over_axis(whole, cut.axis)
    return whole


def _shared(whole: torch.Tensor, cut_dims: list[CutDim]) -> torch.Tensor:
    """Returns a tensor that every rank has, cut in these ways, in blocks where its size is another. Nothing is sent."""
    if not cut_dims:
        return whole
    cut, *inside = cut_dims
    n = _extent(whole, cut.dim, cut)
    owners = cut.owners if n == cut.owners.size else Owners.blocks(n, cut.axis.size)
    share = _shared(share_of(whole, cut.dim, owners, cut.axis), inside)
    return placed(share, [CutDim(cut.axis, cut.dim, owners)])


def _functions(name: str) -> set[Callable]:
    """Returns the functions of torch that have a name: of torch, of tensors, and of its namespaces."""
    places = (torch, torch.Tensor, F, torch.linalg, torch.fft)
    return {getattr(place, name) for place in places if callable(getattr(place, name, None))}


def needs_whole(name: str, needs: Needs) -> None:
    """Registers the functions of this name on tiles: cuts of the dims that they need whole lie elsewhere meanwhile."""
    for plain in _functions(name):
        answers(plain)(answer_of(plain, needs))


def done_whole(*names: str) -> None:
    """Registers the functions of these names on tiles: every rank gathers what they read and does them whole; noted."""
    for name in names:
        for plain in _functions(name):
            answers(plain, cut_once=False)(of_all(plain))
