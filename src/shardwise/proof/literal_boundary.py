"""Check the cells that a task's modules find beyond a field's edges against places counted by hand.

Both sides of a proof run the task's module, into which the package puts `Domain(boundary=)`, so a field mirrored with
its last cell twice would be wrong on both. Here a small convolution and a pooling with padding run with the task's
boundary, and without padding on a field whose cells beyond the edges are looked up one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from shardwise.boundary import bounded
from shardwise.task import Domain, Task

SIZES = (6, 8, 4)  # of the field's dims; even, since the cell opposite across a pole is half the dim away
WIDTH = 2  # cells beyond an edge


def unlike_boundary(task: Task) -> list[str]:
    """Returns [a sentence] if one of two operations finds other cells than the task's boundary says; else []."""
    edges = task.spatial.edges if isinstance(task.spatial, Domain) else ()
    # the task declares no boundary: torch's own zeros
    if not edges:
        return []
    dims, kinds = len(edges), [kind for _, kind in edges]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        field = torch.randn(1, 2, *SIZES[:dims], dtype=torch.float64)
        wide = _with_cells_beyond(field, kinds)
        for made in (_convolution, _pooling):
            module, padded = made(dims, 0), made(dims, WIDTH)
            padded.load_state_dict(module.state_dict())
            found, says = bounded(partial(_itself, padded), edges)()(field), module(wide)
            if "zeros" in kinds and made is _pooling:  # torch pads a maximum with -inf, so this pair cannot agree
                continue
            if not torch.allclose(found, says, rtol=1e-12, atol=1e-12):
                return [f"{type(module).__name__} finds other cells beyond a field's edges than {dict(edges)} says"]
    return []


def _itself(module: nn.Module) -> nn.Module:
    return module


def _convolution(dims: int, padding: int) -> nn.Module:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 2, 2 * WIDTH + 1, padding=padding).double()


def _pooling(dims: int, padding: int) -> nn.Module:
    return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](2 * WIDTH + 1, 1, padding)


def _with_cells_beyond(field: torch.Tensor, kinds: Sequence[str]) -> torch.Tensor:
    """Returns a field (1, C, ...) with `WIDTH` cells more on each side, by `kinds`, the boundary of each dim."""
    sizes = field.shape[2:]
    wide = field.new_zeros((1, field.shape[1], *(n + 2 * WIDTH for n in sizes)))
    for place in itertools.product(*(range(-WIDTH, n + WIDTH) for n in sizes)):
        source = _cell(place, sizes, kinds)
        if source is not None:
            wide[(0, slice(None), *(p + WIDTH for p in place))] = field[(0, slice(None), *source)]
    return wide


def _cell(place: Sequence[int], sizes: Sequence[int], kinds: Sequence[str]) -> list[int] | None:
    """Returns the index of the field's cell that the padded `place` reads; None if it reads a zero.

    place  may lie up to `WIDTH` outside of [0, size);  sizes, kinds  extent and boundary of each dim
    """
    dims = list(zip(place, sizes, kinds, strict=True))
    # a step over a pole leads to the opposite meridian, half way around the periodic dim
    turned = any(kind == "pole" and not 0 <= p < n for p, n, kind in dims)
    cell = []
    for p, n, kind in dims:
        if kind == "periodic":
            cell.append((p + turned * n // 2) % n)
        # inside the field along this dim, whatever its kind
        elif 0 <= p < n:
            cell.append(p)
        elif kind == "reflect":
            cell.append(-p if p < 0 else 2 * n - 2 - p)
        elif kind == "replicate":
            cell.append(0 if p < 0 else n - 1)
        elif kind == "pole":
            cell.append(-1 - p if p < 0 else 2 * n - 1 - p)
        # "zeros": nothing is there
        else:
            return None
    return cell
