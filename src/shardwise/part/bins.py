"""Rules of bucketize, searchsorted, histc, bincount: each rank takes its own elements, counts are added up."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.host import read
from shardwise.part.cuts import Uncut
from shardwise.part.gathering import reduced
from shardwise.part.moves import dealt_as
from shardwise.part.reductions import arguments_of
from shardwise.part.sums import plain
from shardwise.part.tensor import is_part, no_rule, parts_in, rule


@rule("bucketize", "searchsorted")
def bucketize(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns each element's place among boundaries in one row, which every rank has."""
    # bucketize(x, bins), searchsorted(bins, x)
    bins, x = args[:2] if func._schema.name == "aten::searchsorted" else args[1::-1]
    if not is_part(x) or is_part(bins) or bins.dim() != 1 or kwargs.get("sorter") is not None:
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    return x.with_local(func(*(each.local if each is x else each for each in args), **kwargs))


@rule("histc")
def histc(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns how many elements lie in each of the equal bins, by default between the minimum and the maximum."""
    arguments = arguments_of(func, args, kwargs)
    x, bins, low, high = (arguments[name] for name in ("self", "bins", "min", "max"))
    # torch's default is the range of the data, which is that of all ranks
    if low == high:
        ends = [plain(end) for end in (x.amin(), x.amax())]
        # a rehearsal has no values to read: any bins have as many counts
        low, high = (0, 1) if x.axis.rehearsal else (read(end, "the bins of a histogram") for end in ends)
        low, high = (low - 1, high + 1) if low == high else (low, high)  # as torch does where all values are equal
    return reduced(func(x.local, bins, low, high), x)


@rule("bincount")
def bincount(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns how many elements have each value, or the sums of their weights."""
    arguments = arguments_of(func, args, kwargs)
    x, weights, least = arguments["self"], arguments["weights"], arguments["minlength"]
    if not is_part(x):
        raise Uncut(no_rule(func, parts_in((args, kwargs))))
    # counts have one length on all ranks, by the largest value that any has
    most = plain(x.amax())
    if x.axis.rehearsal is not None:  # nobody knows how many values there are
        kind = torch.int64 if weights is None else torch.promote_types(weights.dtype, torch.float32)
        return reduced(torch.zeros(max(least, 1), dtype=kind, device=x.device), x)
    own = weights
    if weights is not None:
        own = dealt_as(weights, x, 0, str(func)).local if is_part(weights) else x.share(weights, 0)
    return reduced(func(x.local, own, max(least, int(read(most, "how many values there are")) + 1)), x)
