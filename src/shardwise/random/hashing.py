"""Random bits (dropout's masks) by global index: splitmix64's finaliser; in one Triton kernel where a device has it.

    value = index * golden + key         index of element (i, j): rows[i] + columns[j]
    value = (value ^ value >> 30) * a
    value = (value ^ value >> 27) * b
    value =  value ^ value >> 31         its upper 53 bits are a double in [0, 1)

As torch operations these are fifteen passes over eight bytes for each element, of which a mask keeps one bit. If the
device has Triton, one kernel computes all of it and writes the result alone, eight bytes or the one of a mask. It is
used once it has returned the same bits as the torch operations on that device.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from shardwise.errors import first_line

_GOLDEN = 0x9E3779B97F4A7C15
_TOP = -(2**63)


def signed(value: int) -> int:
    """Returns the int64 (as a Python int) that has the bits of `value`, a number in [0, 2**64)."""
    return value - 2**64 if value >= 2**63 else value


_G, _A, _B = signed(_GOLDEN), signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix(value: int) -> int:
    """Returns the 64-bit hash of one Python int, splitmix64's next output from that state."""
    value = (value + _GOLDEN) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


def _shift(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns an int64 tensor shifted right by `bits` with zeros shifted in, in new memory."""
    return (tensor >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _finished(value: torch.Tensor) -> torch.Tensor:
    """Returns the hash of `value` = index * golden + key, written over it."""
    value ^= _shift(value, 30)
    value *= _A
    value ^= _shift(value, 27)
    value *= _B
    value ^= _shift(value, 31)
    return value


def words(key: int, index: torch.Tensor) -> torch.Tensor:
    """Returns 64 random bits, as int64, for each index (int64), a function of key and index alone."""
    return _finished(index * _G + signed(key))


def hashed(key: int, index: torch.Tensor) -> torch.Tensor:
    """Returns 53 random bits, an int64 in [0, 2**53), for each index (int64), a function of key and index alone."""
    return _shift(_finished(index * _G + signed(key)), 11)


def is_below(key: int, index: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns, for each index (int64), whether its 53 bits (`hashed`) are below rate * 2**53."""
    return _less(_finished(index * _G + signed(key)), rate)


def _less(value: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns bool: whether the upper 53 bits of each hash are below rate * 2**53; overwrites `value`."""
    limit = _limit(rate)
    if limit is None:
        return torch.ones_like(value, dtype=torch.bool)
    value ^= _TOP  # int64 are compared as if they had no sign
    return value < limit


def _limit(rate: float) -> int | None:
    """Returns the number below which a hash with its top bit flipped lies if its 53 bits are below rate * 2**53.

    None if all are.
    """
    least = max(0, math.ceil(rate * 2.0**53))
    return None if least >= 2**53 else (least << 11) + _TOP


def bits_at(key: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns (R, C) int64 with 53 random bits each, of elements whose index is rows[i] + columns[j]."""
    if has_kernel(rows.device):
        return _kernels()[0](rows, columns, _scalar(key, rows))
    return _shift(_finished((rows * _G + signed(key)).unsqueeze(1) + columns * _G), 11)


def below_at(key: int, rows: torch.Tensor, columns: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns (R, C) booleans: whether the 53 bits of element rows[i] + columns[j] are below `rate` * 2**53."""
    limit = _limit(rate)
    if limit is not None and has_kernel(rows.device):
        return _kernels()[1](rows, columns, _scalar(key, rows), _scalar(limit, rows))
    return _less(_finished((rows * _G + signed(key)).unsqueeze(1) + columns * _G), rate)


def _scalar(value: int, like: torch.Tensor) -> torch.Tensor:
    """Returns `value` as an int64 tensor () on `like`'s device, since a Python int would compile a kernel per key."""
    return torch.full((), signed(value % 2**64), dtype=torch.int64, device=like.device)


def _all_bits(rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    value = (rows.unsqueeze(1) + columns) * _G + key
    value = (value ^ ((value >> 30) & (2**34 - 1))) * _A
    value = (value ^ ((value >> 27) & (2**37 - 1))) * _B
    return value ^ ((value >> 31) & (2**33 - 1))


def _bits(rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (_all_bits(rows, columns, key) >> 11) & (2**53 - 1)


def _below(rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return (_all_bits(rows, columns, key) ^ _TOP) < limit


@cache
def _kernels(backend: str = "inductor") -> tuple[Callable[..., Any], Callable[..., Any]]:
    return tuple(torch.compile(each, dynamic=True, fullgraph=True, backend=backend) for each in (_bits, _below))


WITHOUT: dict[str, str] = {}  # device type -> why it hashes by torch operations, for the user


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether one Triton kernel hashes on this device; if not on an accelerator, `WITHOUT` gets the reason."""
    if device.type in ("cpu", "meta"):
        return False
    from torch.utils._triton import has_triton

    if not has_triton():
        WITHOUT[device.type] = "Triton is not there"
        return False
    try:
        # other bits would train another model, so the kernel is compared with the torch operations first
        wrong = not gives_the_bits(device)
    except Exception as error:  # whatever a compiler lacks here: the plain operations need none
        WITHOUT[device.type] = f"a kernel cannot be compiled ({first_line(error)})"
        return False
    if wrong:
        WITHOUT[device.type] = "the compiled kernel gives other bits"
    return not wrong


def gives_the_bits(device: torch.device, backend: str = "inductor") -> bool:
    """Whether the kernels return the bits of the torch operations, tried on 15 x 300 indices above 2**40."""
    # indices beyond 32 bits, and sizes that are no powers of two
    rows, columns = (torch.arange(size, device=device) for size in (15, 300))
    rows = rows * 300 + 2**40
    bits, below = _kernels(backend)
    key, rate = 0xFEDCBA9876543210, 0.9
    plain = hashed(key, rows.unsqueeze(1) + columns)
    limit = _scalar(_limit(rate) or 0, rows)
    same = torch.equal(bits(rows, columns, _scalar(key, rows)), plain)
    return same and torch.equal(below(rows, columns, _scalar(key, rows), limit), plain.double() * 2.0**-53 < rate)
