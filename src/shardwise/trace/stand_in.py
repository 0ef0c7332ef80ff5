"""Replace a module's tensors for a while, by ones without values or by small ones."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.trace.deferred import named_tensors

Make = Callable[[str, torch.Tensor], torch.Tensor]  # (name, tensor) -> what stands in for it


@contextmanager
def standing_in(module: nn.Module, make: Make) -> Iterator[dict[str, torch.Tensor]]:
    """The module's tensors replaced for a while; yields the parameters by name."""
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    made: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict, str, Any]] = []

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            value = make(names[id(tensor)], tensor)
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        return made[id(tensor)]

    for child in module.modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, torch.Tensor)}
        for table in (child._parameters, child._buffers, plain):
            for leaf, tensor in list(table.items()):
                if tensor is not None:
                    home = child.__dict__ if table is plain else table
                    kept.append((home, leaf, tensor))
                    home[leaf] = other(tensor)
    lists = _lists_of(module, made)
    for held, before in lists:
        held[:] = [made.get(id(one), one) for one in before]
    try:
        yield dict(module.named_parameters())
    finally:
        for home, leaf, tensor in kept:
            home[leaf] = tensor
        for held, before in lists:
            held[:] = before


def _lists_of(module: nn.Module, made: Container[int]) -> list[tuple[list, list]]:
    """Lists of its weights that a module keeps beside them, as recurrent layers do, each with what it holds."""
    lists = [held for child in module.modules() for held in vars(child).values() if isinstance(held, list)]
    return [(held, list(held)) for held in lists if any(id(one) in made for one in held)]
