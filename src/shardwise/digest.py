"""A digest of a tensor: equal if and only if dtype, shape and every bit of its values are."""

from __future__ import annotations

import hashlib

import torch


def digest(tensor: torch.Tensor) -> str:
    """32 hex digits (BLAKE2b) of a dense tensor's dtype, shape and bytes; 0.0 and -0.0 differ, and so do two NaNs."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if values.numel():
        found.update(values.view(torch.uint8).numpy().data)
    return found.hexdigest()
