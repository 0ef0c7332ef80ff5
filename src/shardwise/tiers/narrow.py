"""State that rests in fewer bytes than it is stepped in (`optimizer_state=`, `masters=`): codes, and their inverses.

    bf16    x -> its upper 16 bits, up or down by a draw, so that the mean is x         2 bytes an element
    8bit    256 elements share a scale s, their largest size: x -> code of x / s        1 + 4 / 256
            seven decades of sizes, with twice as many values in each as in the one below
    split   a float32 master and its bf16 weight w have their upper bits in common:     2 + 1 / 8
            master = upper half . lower half,   upper = w, or w - 1 where the lower half made it round up

A lower half of exactly 0x8000 is a tie: w is the even one of both neighbours, which does not say from which side it was
reached. One bit of each element does, so that a master comes back to the bit.

Draws are by the element's index in the whole parameter, its name and the step (element_draws.py): replicas round
alike, and so do pieces of whatever size. What is rounded already is not moved by being rounded again.

A positive number never becomes 0 where all of a block are: an update that divides by its root would be one over eps.

Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022), dynamic trees; Gupta et al., "Deep
Learning with Limited Numerical Precision" (ICML 2015), stochastic rounding.

What this does not do: blocks across ranks. Those of a piece begin where it does, so that at its borders 8-bit state is
another than one process has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import torch

from shardwise.device import on_host

BLOCK = 256  # elements that share a scale
# elements at once: what a code computes with is wider than what comes of it; a processor's is to fit its cache
CHUNK, CHUNK_OF_DEVICE = 1 << 18, 1 << 21
DECADES = 7
VALUES, MIDDLE = 255, 127  # of a code; where 0 is among those with a sign
ONE = 0x3F80  # the upper half of 1
TIE = 0x8000

Draw = Callable[[int, int], torch.Tensor]  # (first, last) -> 16 random bits for each of these elements, int32


class Codec(Protocol):
    """Puts a tensor's elements, in order, into bytes, and takes them from there."""

    def size(self, count: int) -> int:
        """Returns the bytes of so many elements."""
        ...

    def put(self, flat: torch.Tensor, memory: torch.Tensor, draw: Draw | None) -> None:
        """Write elements (n) into `memory` (bytes). draw: None, to the nearest."""

    def take(self, memory: torch.Tensor, out: torch.Tensor) -> None:
        """Read elements into `out` (n)."""


class Rounded:
    """In bf16."""

    def size(self, count: int) -> int:
        """Returns the bytes of so many elements."""
        return 2 * count

    def put(self, flat: torch.Tensor, memory: torch.Tensor, draw: Draw | None) -> None:
        """Write float32 elements (n), each to one of its two neighbours."""
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
        """Read elements into `out` (n)."""
        out.copy_(memory[: 2 * out.numel()].view(torch.bfloat16))


class Blockwise:
    """In 8 bits: | a scale for each block | a code for each element |. The scale is below 0 where no element is."""

    def size(self, count: int) -> int:
        """Returns the bytes of so many elements."""
        return 4 * _blocks(count) + count

    def put(self, flat: torch.Tensor, memory: torch.Tensor, draw: Draw | None) -> None:
        """Write elements (n), each to the code above or below its size."""
        scales, codes = _parts(memory, flat.numel())
        sizes, lower, _ = _tables(flat.device)
        for first, last in _spans(flat):
            rows = _rows(flat[first:last].float())
            largest, signed = rows.abs().amax(1), (rows < 0).any(1)
            scales[first // BLOCK : _blocks(last)] = torch.where(signed, largest, -largest)
            parts = rows.abs() / torch.where(largest == 0, 1.0, largest).unsqueeze(1)
            # the upper half of a number says which value is below it, up to one: they lie further apart than halves do
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
        """Read elements into `out` (n)."""
        scales, codes = _parts(memory, out.numel())
        _, _, values = _tables(out.device)
        for first, last in _spans(out):
            of_blocks = scales[first // BLOCK : _blocks(last)].unsqueeze(1)
            which = _rows(codes[first:last]).int() + VALUES * (~of_blocks.signbit())
            out[first:last] = (values[which] * of_blocks.abs()).view(-1)[: last - first]


class Halves:
    """The half of float32 masters that their bf16 weights lack: | lower halves | a bit each: reached from above |."""

    def size(self, count: int) -> int:
        """Returns the bytes of so many elements."""
        return 2 * count + -(-count // 8)

    def put(self, masters: torch.Tensor, memory: torch.Tensor) -> None:
        """Write what their weights, rounded to the nearest, will not say. masters: (n) float32."""
        lower, ties = _halves(memory, masters.numel())
        for first, last in _spans(masters):
            bits = masters[first:last].contiguous().view(torch.int32)
            lower[first:last] = bits.to(torch.int16)
            odd = ((bits & 0xFFFF) == TIE) & ((bits >> 16) & 1).bool()
            padded = torch.nn.functional.pad(odd, (0, -odd.numel() % 8)).view(-1, 8)
            ties[first // 8 : -(-last // 8)] = (padded << _places(bits.device)).sum(1, dtype=torch.uint8)

    def take(self, memory: torch.Tensor, count: int, weights: torch.Tensor, out: torch.Tensor, start: int = 0) -> None:
        """Read the masters of bf16 `weights` (n) into `out` (n): of `count` that were put, those from `start` on."""
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
    """Returns the sizes that codes stand for, ascending from 0 to 1, float32: (255,), or (128,) of signed codes."""
    values = [torch.zeros(1, dtype=torch.float64)]
    for decade in range(DECADES):
        borders = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        values.append((borders[:-1] + borders[1:]) / 2 * 10.0 ** (decade - DECADES + 1))
    values[-1][-1] = 1.0  # a block's largest element rests as it is, and being rounded again changes nothing
    return torch.cat(values).float()


def table(signed: bool) -> torch.Tensor:
    """Returns the value of each code."""
    above = sizes(signed)
    return torch.cat([-above.flip(0)[:-1], above]) if signed else above


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (sizes, places, values): each of blocks without a negative element, and behind these those of others.

    places  for each upper half of a float32 up to that of 1, where the largest size lies that is not above it; of 1
            itself the one before, since each has one above it
    """
    numbers = (torch.arange(ONE + 1, dtype=torch.int32) << 16).view(torch.float32)
    both = [sizes(signed) for signed in (False, True)]
    places = [torch.searchsorted(ascending[:-1], numbers, right=True) - 1 for ascending in both]
    lower = torch.cat([places[0], places[1] + VALUES]).int()
    values = torch.cat([table(signed) for signed in (False, True)])
    return torch.cat(both).to(device), lower.to(device), values.to(device)


def _rows(flat: torch.Tensor) -> torch.Tensor:
    """Returns elements (n) in rows of a block, the last one filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _parts(memory: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (scales, codes) of so many elements in the bytes of `memory`."""
    border = 4 * _blocks(count)
    return memory[:border].view(torch.float32), memory[border : border + count]


def _halves(memory: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return memory[: 2 * count].view(torch.int16), memory[2 * count : 2 * count + -(-count // 8)]


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, device=device, dtype=torch.uint8)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _spans(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    count, chunk = flat.numel(), CHUNK if on_host(flat.device) else CHUNK_OF_DEVICE
    return ((first, min(first + chunk, count)) for first in range(0, count, chunk))
