"""Random bits for the elements of a piece, by an element's index in the unsharded parameter, the name, and the step.

    key of (seed, name, step) ── word i // 4, 64 bits (random/hashing) ──> 16 bits for element i: the i % 4-th of them

So all that hold an element have the same bits for it: replicas, pieces of any size, a resumed run.

What this does not do: give shares of tp and ep different bits, since elements are counted within the share.
"""

from __future__ import annotations

import hashlib

import torch

from shardwise.random.hashing import mix, words

LANES = 4  # elements that share a word
BITS = 16


def key_of(seed: int, name: str, step: int) -> int:
    """Returns the 64-bit key of the random bits of the state tensor `name` in `step`."""
    text = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return mix(mix(mix(seed % 2**64) ^ int.from_bytes(text, "big")) ^ step)


def draws(key: int, piece: torch.Tensor, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Returns 16 random bits, as int32 below 2**16, for elements [first, last) of a piece in row-major order.

    key    of `key_of`
    piece  a meta tensor, a view of the unsharded parameter that says where the elements lie
    """
    if piece.is_contiguous():  # consecutive elements, so whole words are used
        start = piece.storage_offset() + first
        begin, end = start // LANES, -(-(start + last - first) // LANES)
        lanes = words(key, torch.arange(begin, end, device=device)).view(torch.int16)
        return lanes[start - LANES * begin :][: last - first].to(torch.int32) & 0xFFFF
    place = places(piece, first, last, device)
    drawn = words(key, place // LANES) >> (place % LANES * BITS)
    return drawn.to(torch.int32) & 0xFFFF


def places(piece: torch.Tensor, first: int, last: int, device: torch.device) -> torch.Tensor:
    """Returns the indices in the base tensor's memory, int64, of elements [first, last) of a view, row-major."""
    number = torch.arange(first, last, dtype=torch.int64, device=device)
    place = torch.full_like(number, piece.storage_offset())
    for size, stride in zip(reversed(piece.shape), reversed(piece.stride()), strict=True):
        place += number % size * stride
        number = number // size
    return place
