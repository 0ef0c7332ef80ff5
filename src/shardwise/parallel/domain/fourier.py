"""Fourier transforms of tiles: the cut moves to a dim that is not transformed, and back, by all-to-alls.

    x (B, C, H, W) cut along H over d0, along W over d1; rfft2 over H and W
    moved       d0 and d1 cut channels (or samples)         the transform is local
    moved back  d0 cuts H, d1 cuts the W/2 + 1 frequencies

Where no other dim has as many indices as there are ranks, dims are transformed one after the other, each while the
others are cut. Received by a rank: (p-1)/p of its share each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.parallel.domain.tiles import CutDim, answers, cuts, opened, placed
from shardwise.part import Owners, Uncut
from shardwise.part.gathering import gathered
from shardwise.part.moves import from_axis, moved
from shardwise.part.tensor import no_rule, rule


def _local(run: Callable, input: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """`run(tensor)` with every cut moved off the transformed dims meanwhile, and back afterwards."""
    found = cuts(input, dims)
    room = {dim: float(input.shape[dim]) for dim in range(input.dim()) if dim not in dims}
    held = {cut.dim: cut.axis.depth for cut in cuts(input, room)}
    for cut in cuts(input, room):
        room[cut.dim] /= cut.axis.size
    for cut in found:  # not to a dim that an axis further in cuts: its ranks would exchange unequal shares
        free = [dim for dim in room if held.get(dim, -1) < cut.axis.depth]
        if not free:
            raise Uncut(f"a transform of all dims of {tuple(input.shape)} that are not cut: give it a dim of samples")
        home = max(free, key=lambda dim: (room[dim], -dim))
        room[home] /= cut.axis.size
        input = moved(input, home, Owners.blocks(_extent(input, home, cut), cut.axis.size), cut.axis)
    now = cuts(input, range(input.dim()))
    output = placed(_run(run, opened(input, now), dims), now)
    for cut in reversed(found):
        n = _extent(output, cut.dim, cut)
        owners = cut.owners if n == cut.owners.size else Owners.blocks(n, cut.axis.size)
        output = moved(output, cut.dim, owners, cut.axis)
    return output


def _run(run: Callable, tile: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """`run(tile)`, also where the tile has no elements, which kernels do not take."""
    empty = [dim for dim, n in enumerate(tile.shape) if n == 0 and dim not in dims]
    if not empty:
        return run(tile)
    output = run(tile.sum(empty, keepdim=True))
    for dim in empty:
        output = output.narrow(dim, 0, 0)
    return output


def _extent(tensor: torch.Tensor, dim: int, cut: CutDim) -> int:
    """The size of a dim as the ranks of the cut's axis see it: axes further out may have cut it."""
    return from_axis(tensor.detach(), cut.axis).shape[dim]


def _fits(input: torch.Tensor, dims: list[int]) -> bool:
    """Whether dims that are not transformed have indices for every rank."""
    ranks = 1
    for cut in cuts(input, dims):
        ranks *= cut.axis.size
    return any(n >= ranks for dim, n in enumerate(input.shape) if dim not in dims)


def _transform(plain: Callable, default: tuple[int, ...] | None) -> Callable:
    """The function that answers `plain`, one of `torch.fft`, on cut tensors."""
    name = plain.__name__.removeprefix("fft_")
    one, inverse, real = name.endswith("fft"), name.startswith("i"), "rfft" in name

    def transform(
        input: torch.Tensor, s: Any = None, dim: Any = default, norm: str | None = None, *, n: int | None = None
    ) -> torch.Tensor:  # fmt: skip
        """The transform of a tensor of which any dim may be cut."""
        s = s if n is None else n
        sizes = None if s is None else [s] if isinstance(s, int) else list(s)
        if dim is None:
            dim = range(input.dim()) if sizes is None else range(-len(sizes), 0)
        dims = [d % input.dim() for d in ([dim] if isinstance(dim, int) else dim)]
        if one or len(dims) == 1 or _fits(input, dims):
            return _local(lambda x: plain(x, s, dims[0] if one else dims, norm), input, dims)
        pairs = list(zip(dims, sizes or [None] * len(dims), strict=True))
        steps = [(ANSWERS["ifft" if inverse else "fft"], *pair) for pair in pairs]
        if real:  # the last dim alone has real values on one side
            last = (ANSWERS["irfft" if inverse else "rfft"], *pairs[-1])
            steps = [*steps[:-1], last] if inverse else [last, *steps[:-1]]
        for step, d, size in steps:
            input = step(input, size, d, norm)
        return input

    return answers(plain)(transform)


ANSWERS = {
    plain.__name__.removeprefix("fft_"): _transform(plain, default)
    for default, kinds in {
        (-1,): (torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft),
        (-2, -1): (torch.fft.fft2, torch.fft.ifft2, torch.fft.rfft2, torch.fft.irfft2),
        None: (torch.fft.fftn, torch.fft.ifftn, torch.fft.rfftn, torch.fft.irfftn),
    }.items()
    for plain in kinds
}


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def of_a_whole_field(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Backward of a transform that every rank did of a whole field: its gradient, which arrives in tiles, gathered."""
    part = args[0]
    if part.dim_cut not in {d % part.dim() for d in args[1]}:
        return part.with_local(func(part.local, *args[1:], **kwargs))
    if not part.axis.positions:
        raise Uncut(no_rule(func, [part]))
    return func(gathered(part), *args[1:], **kwargs)
