"""Digests of a tensor's dtype, shape and bits, and a hash of its bits that is computed on its device."""

from __future__ import annotations

import hashlib

import torch

from shardwise.host import read

_CHUNK = 2**20  # 8-byte words that are hashed at once
_FACTOR = -0x61C8864680B583EB  # 2^64 / the golden ratio, as a signed number
_MASK = 2**64 - 1


def digest(tensor: torch.Tensor) -> str:
    """Returns 32 hex digits (BLAKE2b) of a tensor's dtype, shape and bytes; 0.0 and -0.0 differ, as do NaN payloads."""
    hasher = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.numel():
        hasher.update(values.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def bits_hash(flat: torch.Tensor) -> int:
    """Returns a 64-bit hash of a 1-d tensor's bytes and length, equal on any device; 0 if empty. The host waits.

    Changing any single 8-byte word changes it.
    """
    if not flat.numel():
        return 0
    content = flat.contiguous().view(torch.uint8)
    padded = torch.cat([content, content.new_zeros(-content.numel() % 8)]) if content.numel() % 8 else content
    # a view as int64 needs a storage offset that is a multiple of 8 bytes
    if padded.storage_offset() % 8:
        padded = padded.clone()
    words, total = padded.view(torch.int64), torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        some = words[start : start + _CHUNK]
        places = torch.arange(start, start + some.numel(), dtype=torch.int64, device=flat.device)
        total = total + (some * (places * _FACTOR | 1)).sum()
    return (int(read(total, "a hash of bits")) + flat.numel()) & _MASK
