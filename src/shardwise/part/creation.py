"""New tensors made after a part's kind: whole and plain, since only their dtype and device are the part's."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.tensor import rule


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
def new(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """`x.new_zeros(shape)`."""
    plain = torch.empty((), dtype=args[0].dtype, device=args[0].device)
    return func(plain, *args[1:], **kwargs)
