"""Draws for the elements of a piece, by where each lies in the whole parameter, its name, and the step.

    key of (seed, name, step) ── word i // 4, 64 bits (random/hashing) ──> 16 bits for element i: the i % 4-th of them

So whoever holds an element draws the same for it: replicas, pieces of any size, a run that goes on.

What this does not do: tell shares of tp and ep apart. Their elements are counted within the share.
"""

from __future__ import annotations

import hashlib

import torch

from shardwise.random.hashing import mix, words

LANES = 4  # elements that share a word
BITS = 16


def key_of(seed: int, name: str, step: int) -> int:
    """Returns the key of a tensor's draws in a step."""
    text = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return mix(mix(mix(seed % 2**64) ^ int.from_bytes(text, "big")) ^ step)


def draws(key: int, piece: torch.Tensor, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Returns 16 bits, as int32 below 2**16, for elements [first, last) of a piece, in its own order.

    piece  a view of the whole, without values
    """
    if piece.is_contiguous():  # a run of elements: all of a word are used
        start = piece.storage_offset() + first
        begin, end = start // LANES, -(-(start + last - first) // LANES)
        lanes = words(key, torch.arange(begin, end, device=device)).view(torch.int16)
        return lanes[start - LANES * begin :][: last - first].to(torch.int32) & 0xFFFF
    place = places(piece, first, last, device)
    drawn = words(key, place // LANES) >> (place % LANES * BITS)
    return drawn.to(torch.int32) & 0xFFFF


def places(piece: torch.Tensor, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Returns where elements [first, last) of a view, in its own order, lie in the memory that it is of."""
    number = torch.arange(first, last, dtype=torch.int64, device=device)
    place = torch.full_like(number, piece.storage_offset())
    for size, stride in zip(reversed(piece.shape), reversed(piece.stride()), strict=True):
        place += number % size * stride
        number = number // size
    return place
