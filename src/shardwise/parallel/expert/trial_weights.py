"""Random weights for the trial of a module; those of its experts overlap, so that they need the memory of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardwise.trace.deferred import Built

_SHIFT = 16  # elements between the random values of one expert and the next
Values = Callable[[str, torch.Tensor], torch.Tensor]  # (name in the module, tensor) -> what stands in for it


def random_weight(like: torch.Tensor, dtype: torch.dtype, generator: torch.Generator, *, stacked: bool) -> torch.Tensor:
    """Returns random values in the shape of `like`, scaled so that activations stay near 1.

    stacked   whether dim 0 counts experts, whose values then overlap in memory and must not be written
    """
    count, shape = (like.shape[0], like.shape[1:]) if stacked else (1, like.shape)
    elements = max(shape.numel(), 1)
    size = max(elements / max(shape), 1) if shape else 1.0
    flat = torch.randn(elements + (count - 1) * _SHIFT, dtype=torch.float32, generator=generator).to(dtype)
    flat *= max(max(shape, default=1), size) ** -0.5
    if not stacked:
        return flat.view(shape)
    strides = torch.empty(shape, device="meta").stride()
    # expert e begins e * _SHIFT elements further on, so that experts differ, in little more than the memory of one
    return flat.as_strided((count, *shape), (_SHIFT, *strides))


def random_weights(
    built: Built, path: str, dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> Values:
    """Returns a function (name, tensor) -> random values for a parameter of the module at `path`; a buffer's own.

    dtype      of floating-point values;  generator  None: one with seed 0
    """
    drawn_by = torch.Generator().manual_seed(0) if generator is None else generator

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns random values in place of a parameter; a buffer's own values."""
        if isinstance(tensor, nn.Parameter):
            return random_weight(tensor, dtype, drawn_by, stacked=False)
        own = built.value(f"{path}.{name}".removeprefix("."))
        return own.to(dtype if own.is_floating_point() else None, copy=True)

    return value


def alike_weights(
    built: Built, path: str, members: Sequence[str], dtype: torch.dtype, generator: torch.Generator
) -> Values:
    """Returns a function (name, tensor) -> random values for a parameter of the mixture at `path`; a buffer's own.

    members   paths of its experts, alike modules, whose values overlap in memory
    """
    of_all: dict[str, torch.Tensor] = {}  # name within an expert -> values (experts, ...) of all experts
    own = random_weights(built, path, dtype, generator)

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns random values in place of a parameter; a buffer's own values."""
        full = f"{path}.{name}".removeprefix(".")
        place = next((n for n, path in enumerate(members) if full.startswith(f"{path}.")), None)
        if place is None or not isinstance(tensor, nn.Parameter):
            return own(name, tensor)
        leaf = full.removeprefix(members[place])
        if leaf not in of_all:
            form = torch.empty(len(members), *tensor.shape, device="meta")
            of_all[leaf] = random_weight(form, dtype, generator, stacked=True)
        return of_all[leaf][place]

    return value
