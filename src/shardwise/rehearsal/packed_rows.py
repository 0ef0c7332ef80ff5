"""Packed sequences on tensors without values: how many rows each time has, from known lengths.

torch reads the lengths in C++, where no mode is asked. So what packing gives beside the rows, the number of sequences
at each time, is an ordinary tensor with its values: recurrent layers and their backward read it as they do in a run.
Padding the rows again writes lengths into a tensor that it makes itself, and is done here, as torch does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

PACK = torch.ops.aten._pack_padded_sequence.default


def packed(lengths: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns (sequences at each time, rows in all) for lengths in descending order."""
    if not lengths.numel() or int(lengths.min()) < 1:
        raise ValueError("a sequence of length 0 cannot be packed")
    times = torch.arange(int(lengths[0]))
    return (lengths[None] > times[:, None]).sum(1), int(lengths.sum())


@contextmanager
def padding_by_values() -> Iterator[None]:
    """Context: `pad_packed_sequence` works on fake tensors whose row counts for each time step are known."""
    name = "_pad_packed_sequence"
    theirs = getattr(torch._VF, name)

    def pad(
        rows: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(rows, FakeTensor) or isinstance(sizes, FakeTensor):
            return theirs(rows, sizes, batch_first, value, total)
        with _disable_current_modes():
            of_each = sizes.tolist()
            lengths = (sizes[:, None] > torch.arange(of_each[0])).sum(0)
        return _padded(rows, of_each, batch_first, value, total), lengths

    setattr(torch._VF, name, pad)
    try:
        yield
    finally:
        delattr(torch._VF, name)  # which finds torch's own again


def _padded(rows: torch.Tensor, sizes: list[int], batch_first: bool, value: float, total: int) -> torch.Tensor:
    if 0 < total < len(sizes):
        raise ValueError(f"total_length={total} is less than the longest sequence, {len(sizes)}")
    out = rows.new_full((max(total, len(sizes)), sizes[0], *rows.shape[1:]), value)
    began = at = 0
    for time, size in enumerate([*sizes[1:], 0], start=1):
        if size != sizes[began]:  # a stretch of times that as many sequences have
            many = sizes[began] * (time - began)
            stretch = rows[at : at + many].view(time - began, sizes[began], *rows.shape[1:])
            out[began:time, : sizes[began]].copy_(stretch)
            began, at = time, at + many
    return out.transpose(0, 1) if batch_first else out
