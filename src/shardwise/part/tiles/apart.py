"""Pools, interpolations, shuffles on tiles: samples and channels that an axis of positions cuts stay apart. Not tp.

    windows of a field (B * rows, C, h, w), samples cut over d0      max_pool2d of a rank's own windows; nothing is sent
    the same, and w cut over d1                                      on tiles over d1 alone

Dims in front of those that a function reads are kept apart; those that it reads are its own answer's (`pooling`, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.tensor import FUNCTIONS, Part
from shardwise.part.tiles.entire import with_elements
from shardwise.part.tiles.windows import answers, cuts, opened, placed
from shardwise.trace.leaves import replaced


def apart(function: Callable, lead: Callable[[torch.Tensor], int]) -> None:
    """Register `function`, run on this rank's own indices of the first `lead(input)` dims, which it keeps apart."""
    answer = FUNCTIONS.get(function, function)  # read before it is replaced below: it answers cuts of the other dims

    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dims = range(lead(input)) if isinstance(input, torch.Tensor) else range(0)  # `isin` may be given a number
        cut_dims = cuts(input, dims)
        if not cut_dims:
            return answer(input, *args, **kwargs)
        share = opened(input, cut_dims)
        # a rank that is dealt no sample computes a stand-in, so that it comes to the collectives of the others
        empty = [cut.dim for cut in cut_dims if not share.shape[cut.dim]]

        def beside(other: Part) -> torch.Tensor:
            # indices of `max_unpool2d`: each rank reads those of its own samples
            if [(cut.axis, cut.dim, cut.owners) for cut in cuts(other, dims)] != [
                (cut.axis, cut.dim, cut.owners) for cut in cut_dims
            ]:
                raise Uncut(f"{function.__name__} of tensors that are cut differently ({input!r}, {other!r})")
            return with_elements(opened(other, cut_dims), empty)

        args, kwargs = replaced(Part, beside, (args, kwargs))

        def own(result: torch.Tensor) -> torch.Tensor:
            for dim in empty:  # what was computed of the stand-in belongs to nobody
                result = result.narrow(dim, 0, 0)
            return placed(result, cut_dims)

        return replaced(torch.Tensor, own, answer(with_elements(share, empty), *args, **kwargs))

    answers(function, cut_once=False)(run)


def in_front(dims: int) -> Callable[[torch.Tensor], int]:
    """Returns a function that gives the number of dims of a tensor in front of its last `dims`."""
    return lambda x: x.dim() - dims
