"""Codecs for state that is stored in fewer bytes than it is updated in (`optimizer_state=`, `masters=`).

    bf16    x -> its upper 16 bits, rounded stochastically, so that the mean is x       2 bytes an element
    8bit    256 elements share a scale s, their largest |x|: x -> code of x / s         1 + 4 / 256
            seven decades of magnitudes, with twice as many values in each as in the one below
    split   a float32 master and its bf16 weight w have their upper bits in common:     2 + 1 / 8
            master = upper half . lower half,   upper = w, or w - 1 if the lower half made it round up

A lower half of exactly 0x8000 is a tie: w is the even one of both neighbours, which does not say from which side it was
reached. One more bit for each element does, so that a master is restored to the bit.

Random bits depend on the element's index in the unsharded parameter, its name and the step (element_draws.py), so that
replicas, and pieces of any size, round alike. A value that is representable is not changed by rounding.

If no element of a block is negative, a positive one is never coded as 0. Else an update that divides by its square root
(Adam) would divide by eps.

Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), dynamic trees; Gupta et al., "Deep
Learning with Limited Numerical Precision" (ICML 2015), stochastic rounding.

What this does not do: blocks across ranks. A piece's blocks begin where the piece does, so that 8-bit state differs at
its borders from one process's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import torch

from shardwise.device import on_host

BLOCK = 256  # elements that share a scale
# elements coded at once, to bound temporaries; a CPU's chunk fits its cache
CHUNK, CHUNK_OF_DEVICE = 1 << 18, 1 << 21
DECADES = 7
VALUES, MIDDLE = 255, 127  # number of codes; the code of 0 in blocks with negative elements
ONE = 0x3F80  # the upper 16 bits of the float32 1.0
TIE = 0x8000  # a lower half between both bf16 neighbours

Draw = Callable[[int, int], torch.Tensor]  # (first, last) -> 16 random bits, as int32, for each of these elements


class Codec(Protocol):
    """Codes a flat tensor of real numbers into bytes, and decodes it."""

    def size(self, count: int) -> int:
        """Returns the bytes of `count` coded elements."""
        ...

    def put(self, flat: torch.Tensor, memory: torch.Tensor, draw: Draw | None) -> None:
        """Codes elements (n,) into `memory` (uint8). draw: random bits for rounding; None: to the nearest."""

    def take(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes `memory` (uint8) into `out` (n,)."""


class Rounded:
    """Codec of bf16 values, rounded stochastically if `draw` is given."""

    def size(self, count: int) -> int:
        """Returns the bytes of `count` coded elements."""
        return 2 * count

    def put(self, flat: torch.Tensor, memory: torch.Tensor, draw: Draw | None) -> None:
        """Codes float32 elements (n,), each as one of its two bf16 neighbours."""
        halves = memory[: 2 * flat.numel()].view(torch.bfloat16)
        for first, last in _spans(flat):
            part = flat[first:last]
            nearest = part.to(torch.bfloat16)
            if draw is not None:
                bits = part.contiguous().view(torch.int32) + draw(first, last)
                drawn = (bits >> 16).to(torch.int16).view(torch.bfloat16)
                nearest = torch.where(part.isfinite(), drawn, nearest)  # else a NaN's bits might overflow
            halves[first:last] = nearest

    def take(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes into `out` (n,)."""
        out.copy_(memory[: 2 * out.numel()].view(torch.bfloat16))


class Blockwise:
    """8-bit codec: | float32 scale for each block | uint8 code for each element |.

    A block without negative elements uses all codes for magnitudes, which a negative sign of its scale marks.
    """

    def size(self, count: int) -> int:
        """Returns the bytes of `count` coded elements."""
        return 4 * _blocks(count) + count

    def put(self, flat: torch.Tensor, memory: torch.Tensor, draw: Draw | None) -> None:
        """Codes elements (n,), each as the value above or below it in magnitude."""
        scales, codes = _parts(memory, flat.numel())
        sizes, lower, _ = _tables(flat.device)
        for first, last in _spans(flat):
            rows = _rows(flat[first:last].float())
            largest, signed = rows.abs().amax(1), (rows < 0).any(1)
            scales[first // BLOCK : _blocks(last)] = torch.where(signed, largest, -largest)
            parts = rows.abs() / torch.where(largest == 0, 1.0, largest).unsqueeze(1)
            # the upper half of a float gives the table value below it, or the one before that, which is corrected next
            half = (parts.view(torch.int32) >> 16).clamp_(max=ONE)
            below = lower[half + (signed * (ONE + 1)).unsqueeze(1)]
            below += (parts >= sizes[below + 1]) & (sizes[below + 1] < 1)
            low, high = sizes[below], sizes[below + 1]
            up = 0.5 if draw is None else 1 - _rows(draw(first, last)) * 2.0**-16
            above = (parts - low) / (high - low) >= up
            above |= (below == 0) & (parts > 0)
            which = below + above
            signs = torch.where(rows < 0, VALUES - which, which - VALUES) + MIDDLE
            coded = torch.where(signed.unsqueeze(1), signs, which)
            codes[first:last] = coded.view(-1)[: last - first].to(torch.uint8)

    def take(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Decodes into `out` (n,)."""
        scales, codes = _parts(memory, out.numel())
        _, _, values = _tables(out.device)
        for first, last in _spans(out):
            of_blocks = scales[first // BLOCK : _blocks(last)].unsqueeze(1)
            which = _rows(codes[first:last]).int() + VALUES * (~of_blocks.signbit())
            out[first:last] = (values[which] * of_blocks.abs()).view(-1)[: last - first]


class Halves:
    """Stores what bf16 weights lack of their float32 masters: | lower 16 bits each | a tie bit each |."""

    def size(self, count: int) -> int:
        """Returns the bytes for `count` masters."""
        return 2 * count + -(-count // 8)

    def put(self, masters: torch.Tensor, memory: torch.Tensor) -> None:
        """Writes the lower halves and tie bits of `masters` (n,) float32; weights must be rounded to the nearest."""
        lower, ties = _halves(memory, masters.numel())
        for first, last in _spans(masters):
            bits = masters[first:last].contiguous().view(torch.int32)
            lower[first:last] = bits.to(torch.int16)
            odd = ((bits & 0xFFFF) == TIE) & ((bits >> 16) & 1).bool()
            padded = torch.nn.functional.pad(odd, (0, -odd.numel() % 8)).view(-1, 8)
            ties[first // 8 : -(-last // 8)] = (padded << _places(bits.device)).sum(1, dtype=torch.uint8)

    def take(self, memory: torch.Tensor, count: int, weights: torch.Tensor, out: torch.Tensor, start: int = 0) -> None:
        """Restores float32 masters into `out` (n,) from bf16 `weights` (n,).

        count  number of masters in `memory`;  start  index there of the first one to restore
        """
        lower, ties = _halves(memory, count)
        for first, last in _spans(out):
            low = lower[start + first : start + last].to(torch.int32) & 0xFFFF
            begin = (start + first) // 8
            packed = ties[begin : -(-(start + last) // 8)].unsqueeze(1) >> _places(out.device)
            tie = (packed & 1).view(-1)[start + first - 8 * begin :][: last - first].bool()
            upper = weights[first:last].contiguous().view(torch.int16).to(torch.int32)
            upper -= ((low > TIE) | ((low == TIE) & tie)).to(torch.int32)
            out[first:last] = ((upper << 16) | low).view(torch.float32)


ROUNDED, BLOCKWISE, HALVES = Rounded(), Blockwise(), Halves()
CODECS: dict[str, Codec] = {"bf16": ROUNDED, "8bit": BLOCKWISE}


def sizes(signed: bool) -> torch.Tensor:
    """Returns the magnitudes that codes stand for, ascending from 0 to 1, float32: (255,), or (128,) if `signed`."""
    values = [torch.zeros(1, dtype=torch.float64)]
    for decade in range(DECADES):
        borders = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        values.append((borders[:-1] + borders[1:]) / 2 * 10.0 ** (decade - DECADES + 1))
    values[-1][-1] = 1.0  # so that a block's largest element is exact
    return torch.cat(values).float()


def table(signed: bool) -> torch.Tensor:
    """Returns the value of each code, (255,) float32; `signed`: for blocks with negative elements."""
    above = sizes(signed)
    return torch.cat([-above.flip(0)[:-1], above]) if signed else above


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (magnitudes, places, values), each for blocks without negative elements followed by those for others.

    magnitudes  of `sizes`;  values  of `table`
    places      for the upper 16 bits of each float32 up to 1, the index of the largest magnitude not above it; for 1
                the one before, so that each has a magnitude above it
    """
    numbers = (torch.arange(ONE + 1, dtype=torch.int32) << 16).view(torch.float32)
    both = [sizes(signed) for signed in (False, True)]
    places = [torch.searchsorted(ascending[:-1], numbers, right=True) - 1 for ascending in both]
    lower = torch.cat([places[0], places[1] + VALUES]).int()
    values = torch.cat([table(signed) for signed in (False, True)])
    return torch.cat(both).to(device), lower.to(device), values.to(device)


def _rows(flat: torch.Tensor) -> torch.Tensor:
    """Returns elements (n,) as (blocks, BLOCK), the last block padded with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _parts(memory: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views (scales float32, codes uint8) of `memory` for `count` elements."""
    border = 4 * _blocks(count)
    return memory[:border].view(torch.float32), memory[border : border + count]


def _halves(memory: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns views (lower halves int16, packed tie bits uint8) of `memory` for `count` masters."""
    return memory[: 2 * count].view(torch.int16), memory[2 * count : 2 * count + -(-count // 8)]


def _places(device: torch.device) -> torch.Tensor:
    """Returns the bit positions 0 to 7, to pack bits into bytes."""
    return torch.arange(8, device=device, dtype=torch.uint8)


def _blocks(count: int) -> int:
    """Returns the number of blocks of `count` elements."""
    return -(-count // BLOCK)


def _spans(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of the chunks of elements that are coded at once."""
    count, chunk = flat.numel(), CHUNK if on_host(flat.device) else CHUNK_OF_DEVICE
    return ((first, min(first + chunk, count)) for first in range(0, count, chunk))
