"""Random operations on shares: of cut positions each rank draws its own, else every rank draws all and keeps a share.

How random numbers are made of bits by global index, the same on any number of ranks: `random/draws`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.device import generators_kept, seed_generators
from shardwise.host import read
from shardwise.part.gathering import gather
from shardwise.part.tensor import Part, is_part, parts_in, rule
from shardwise.trace.leaves import replaced, tensors_in


@rule("native_dropout")
def native_dropout(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns (output, mask), cut as the input.

    Of cut positions each rank draws its share of the mask; else every rank draws the whole mask and keeps its share.
    """
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
    """Returns the random tensor that `func` draws, cut as its first argument; an in-place one is that argument.

    Of cut positions a rank draws its share alone, because a whole field may be larger than a device's memory.
    """
    part = args[0]
    if not is_part(part) or len(parts_in((args, kwargs))) > 1:
        # what else the draw reads (a tensor of rates) is read whole, since the numbers are then drawn for all ranks
        whole = replaced(Part, gather, (args[1:], kwargs))
        args, kwargs = (args[0], *whole[0]), whole[1]
    if not is_part(part):
        return func(*args, **kwargs)
    # `bernoulli(x)` and the like read x as rates; those that write, or end in `_like`, have of it the shape alone
    reads = not func._schema.is_mutable and not func._schema.name.endswith("_like")
    alone = not tensors_in((args[1:], kwargs))
    # not with the caller's generator, which stands alike on all ranks, nor where a script draws as one process does
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
    """Context in which random operations on cut positions draw the whole tensor, alike on all ranks."""
    _OF_ONE_PROCESS.append(True)
    try:
        yield
    finally:
        _OF_ONE_PROCESS.pop()


@contextmanager
def _own_draws(part: Part) -> Iterator[None]:
    """Context in which torch's generators are seeded by this rank's index plus one number that all ranks drew alike.

    The generators are put back afterwards. In a rehearsal it does nothing.
    """
    if part.axis.rehearsal is not None:
        yield
        return
    seed = int(read(torch.randint(2**62, ()), "the seed of a rank's own draws")) + part.axis.index
    with generators_kept():
        seed_generators(seed)
        yield
