"""What a run leaves for comparison: losses, and every gradient, parameter and buffer after each step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Record:
    """Whole tensors in float64 on the CPU; the lists have one entry for each optimizer step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    lr: float = 0.0
    notices: list[str] = field(default_factory=list)
    ledger: list[dict] = field(default_factory=list)


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64 (integers as they are) on the CPU."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()
