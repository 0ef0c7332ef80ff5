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

from shardwise.part.cuts import Uncut
from shardwise.part.dimwise import over
from shardwise.part.gathering import gathered
from shardwise.part.tensor import Part, no_rule
from shardwise.part.tiles.entire import Needs, needs_whole, with_whole
from shardwise.part.tiles.windows import answers, cuts


def _fits(input: torch.Tensor, dims: list[int]) -> bool:
    """Returns whether a dim that is not transformed has an index for each rank that cuts one of `dims`."""
    ranks = 1
    for cut in cuts(input, dims):
        ranks *= cut.axis.size
    return any(n >= ranks for dim, n in enumerate(input.shape) if dim not in dims)


def _transform(plain: Callable, default: tuple[int, ...] | None) -> Callable:
    """Returns the function that does what `plain`, one of `torch.fft`, does on tiles too."""
    name = plain.__name__.removeprefix("fft_")
    single, inverse, real = name.endswith("fft"), name.startswith("i"), "rfft" in name

    def transform(
        input: torch.Tensor, s: Any = None, dim: Any = default, norm: str | None = None, *, n: int | None = None
    ) -> torch.Tensor:  # fmt: skip
        """The transform of a tensor of which any dim may be cut."""
        s = s if n is None else n
        sizes = None if s is None else [s] if isinstance(s, int) else list(s)
        if dim is None:  # as torch has it: all dims, or as many of the last ones as sizes are named
            dim = range(input.dim()) if sizes is None else range(-len(sizes), 0)
        dims = [d % input.dim() for d in ([dim] if isinstance(dim, int) else dim)]
        if single or len(dims) == 1 or _fits(input, dims):  # all dims at once, whole on each rank
            return with_whole(lambda x: plain(x, s, dims[0] if single else dims, norm), [input], dims)
        # one dim after the other, so that the others of them can take its cut meanwhile
        pairs = list(zip(dims, sizes or [None] * len(dims), strict=True))
        steps = [(ANSWERS["ifft" if inverse else "fft"], *pair) for pair in pairs]
        # the real field lies at one end of the steps, and the last dim alone goes there: first forward, last back
        if real:
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


def _of_a_whole_field(func: Any, part: Part, dims: set[int], keepdim: bool, arguments: dict[str, Any]) -> torch.Tensor:
    """Returns the transform of a gradient that arrives in tiles: every rank did the transform of a whole field."""
    if not part.axis.positions:
        raise Uncut(no_rule(func, [part]))
    return func(gathered(part), *list(arguments.values())[1:])


over("_fft_c2c", "_fft_r2c", "_fft_c2r", along=_of_a_whole_field)
needs_whole("stft", Needs("n_fft", gone=True, behind=True))
needs_whole("istft", Needs("n_fft", (-2, -1), gone=True, behind=True))
