"""Fourier transforms; on tiles an all-to-all moves the cut to a dim that is not transformed, and another one back.

    x (B, C, H, W) cut along H over d0, along W over d1; rfft2 over H and W
    moved       d0 and d1 cut channels (or samples)         the transform is local
    moved back  d0 cuts H, d1 cuts the W/2 + 1 frequencies

If all dims are transformed, and for `stft` and `istft`, the field is gathered. Received by a rank: (p-1)/p of its share
each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.part.cuts import Owners, Uncut, blocks_within
from shardwise.part.dimwise import over
from shardwise.part.gathering import gathered
from shardwise.part.moves import from_axis, moved, owners_inside
from shardwise.part.sums import whole_over_axis
from shardwise.part.tensor import Part, no_rule
from shardwise.part.tiles.entire import dealt_again, done_whole, extent, with_elements
from shardwise.part.tiles.gathers import noted
from shardwise.part.tiles.saved_halos import CutDim
from shardwise.part.tiles.windows import answers, cuts, opened, placed


def _moving(plain: Callable, usual: Any) -> Callable:
    """Returns a function with the arguments of `plain`, a transform, that takes tiles too.

    usual  the dims that it transforms if the call names none: an int, a tuple, or None for all
    """

    def transform(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns `plain` of a tensor of which any dim may be cut. Collective."""
        every = range(input.dim())
        if not cuts(input, every) or "out" in kwargs:
            return plain(input, *args, **kwargs)
        asked = (dict(zip(("n", "dim", "norm"), args, strict=False)) | kwargs).get("dim", usual)
        dims = every if asked is None else {d % input.dim() for d in ([asked] if isinstance(asked, int) else asked)}
        first, afar = input, list[tuple[CutDim, Owners | None]]()
        for cut in cuts(first, dims):
            home = _home(first, dims, cut)
            if home is None:  # no other dim can take the cut (of a single matrix, say)
                noted("a field of which a transform reads all dims", first, cut)
                first = whole_over_axis(first, cut.axis)
            else:
                inside = owners_inside(from_axis(first.detach(), cut.axis), home)
                owners = blocks_within(extent(first, home, cut), cut.axis.size, inside)
                first = moved(first, home, owners, cut.axis)
                afar.append((cut, inside))
        now = cuts(first, every)
        share = opened(first, now)
        # a rank without indices runs on a stand-in of one, else it would not come to the collectives of the others
        # (`test_a_rank_that_is_dealt_no_signal_comes_to_the_same_collectives`)
        # two axes may cut one dim now
        empty = sorted({cut.dim for cut in now if not share.shape[cut.dim]})
        result = plain(with_elements(share, empty), *args, **kwargs)
        for dim in empty:
            result = result.narrow(dim, 0, 0)
        result = placed(result, now)
        for cut, inside in reversed(afar):
            result = moved(result, cut.dim, dealt_again(result, cut), cut.axis, inside)
        return result

    return transform


def _home(field: torch.Tensor, dims: Any, cut: CutDim) -> int | None:
    """Returns the dim to which `cut` is moved: the one not in `dims` that gives each rank the most indices.

    dims  those that are transformed
    None if no other dim can take the cut.
    """
    room = {dim: float(n) for dim, n in enumerate(field.shape) if dim not in dims}
    depths = {other.dim: other.axis.depth for other in cuts(field, room)}
    for other in cuts(field, room):  # its indices are shared already
        room[other.dim] /= other.axis.size
    here = from_axis(field.detach(), cut.axis)
    within = {dim: min(owners.counts) for dim in room if (owners := owners_inside(here, dim)) is not None}
    # not to a dim that an axis of positions further in cuts: its ranks would exchange unequal shares; nor to channels
    # of which a rank of tp has too few
    free = [dim for dim in room
            if depths.get(dim, -1) < cut.axis.depth and within.get(dim, cut.axis.size) >= cut.axis.size]  # fmt: skip
    return max(free, key=lambda dim: (room[dim], -dim)) if free else None


for _name in ("fft", "ifft", "rfft", "irfft"):
    for _ending, _dims in (("", -1), ("2", (-2, -1)), ("n", None)):
        _plain = getattr(torch.fft, f"{_name}{_ending}")
        answers(_plain)(_moving(_plain, _dims))
done_whole("stft", "istft")


def _of_a_whole_field(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> torch.Tensor:
    """Returns the transform of the gathered `part`, a gradient that arrives cut although the forward ran whole.

    Raises `Uncut` if it is cut over an axis of weights.
    """
    if not part.axis.positions:
        raise Uncut(no_rule(func, [part]))
    return func(gathered(part), *list(arguments.values())[1:])


over("_fft_c2c", "_fft_r2c", "_fft_c2r", along=_of_a_whole_field)
