"""Operations that read dims whole, write some indices or count elements, on tiles against the whole tensor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import test_tiles as tiles
import torch
import torch.nn.functional as F

SHAPE = (2, 2, 7, 9)
AT, NORM = torch.tensor([0, 3]), torch.linalg.vector_norm
Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _levels(*levels: float) -> torch.Tensor:
    return torch.tensor(levels, dtype=tiles.DOUBLE)


def _points() -> torch.Tensor:
    return torch.linspace(-1, 1, 8, dtype=tiles.DOUBLE).view(4, 2).tanh()


def _into_zeros(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Zeros that are whole, with the two largest of each row put in place."""
    return torch.zeros(SHAPE, dtype=x.dtype).scatter_(-1, y.topk(2, -1).indices, 1.0)


def _written(x: torch.Tensor) -> torch.Tensor:
    """A whole tensor that becomes a tile."""
    kept = torch.zeros(SHAPE, dtype=x.dtype)
    kept[:, :, 1:] = x[:, :, 1:]
    return kept


def _extremes(y: torch.Tensor, **along: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.__version__ < (2, 12):  # whose `aminmax` has no derivative
        return torch.amin(y, **along), torch.amax(y, **along)
    return torch.aminmax(y, **along)


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    least, most = _extremes(y, dim=-1, keepdim=True)
    return (x - least) / (most - least)


def _short(x: torch.Tensor) -> torch.Tensor:
    """The energy of each signal, by transforms of 4 cells and back."""
    window = torch.hann_window(4, dtype=x.dtype)
    spectrum = torch.stft(x, 4, 2, window=window, return_complex=True)
    return (torch.istft(spectrum * 2, 4, 2, window=window) ** 2).sum() + spectrum.abs().sum()


def _as_samples(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Every cell as a sample of its own, with one row of places."""
    return x.permute(0, 2, 3, 1).reshape(-1, 2 // channels, 1, channels)


# y = x * w, of which x has the shape above; dims 2 and 3 are tiled
ORDERED: dict[str, Operation] = {
    "sort": lambda x, y: y.sort(-1).values * x + y.sort(2, descending=True)[0],
    "sort both": lambda x, y: torch.sort(y, stable=True, dim=2)[0] * y.sort(-1).indices,
    "sort joined": lambda x, y: y.flatten(1).sort(1).values ** 2,
    "sort all": lambda x, y: y.view(-1).sort().values[:40] ** 2,
    "msort": lambda x, y: torch.msort(y.permute(2, 0, 1, 3)).tanh(),
    "ranks": lambda x, y: y * x.argsort(2).argsort(2),
    "by order": lambda x, y: torch.take_along_dim(y, x.argsort(-1), -1) + y.gather(2, x.argsort(2)),
    "topk": lambda x, y: y.topk(3, -1).values.tanh(),
    "topk joined": lambda x, y: y.flatten(1).topk(9, 1).values.mean(1),
    "topk kept": lambda x, y: y * torch.zeros_like(x).scatter(-1, y.topk(2, -1).indices, 1.0),
    "topk put": lambda x, y: y * torch.zeros_like(x).scatter_(2, y.topk(2, 2).indices, 1.0),
    "topk into zeros": lambda x, y: y * _into_zeros(x, y),
    "added": lambda x, y: y.scatter_add(-1, x.argsort(-1), x.tanh()),
    "reduced": lambda x, y: y.scatter_reduce(2, x.argsort(2), x.tanh(), "amax"),
    "kthvalue": lambda x, y: y.kthvalue(2, -1).values + (x * y.kthvalue(2, 2, True)[0]).sum(3),
    "median": lambda x, y: y.median(-1, keepdim=True).values * x - y.median(),
    "median joined": lambda x, y: y.flatten(2).median(2).values,
    "nanmedian": lambda x, y: y.nanmedian(2)[0] * y.nanmedian(),
    "mode": lambda x, y: y.round().mode(-1)[0] + y.sum(-1),
    "quantile": lambda x, y: torch.quantile(y, 0.3, dim=-1) + y.nanquantile(0.4, 3),
    "quantiles": lambda x, y: torch.quantile(y, _levels(0.1, 0.7), dim=2, keepdim=True) * x,
    "quantiles joined": lambda x, y: torch.quantile(y.flatten(1), _levels(0.1, 0.7), dim=1) * y.quantile(0.3),
    "diagonals": lambda x, y: y.diagonal(0, 2, 3).tanh() * y.diagonal(1, -1, -2).sum() + y.diagonal(0, 0, 2)[:, 0, :1],
    "short transforms": lambda x, y: _short(y.flatten(0, 1).flatten(1)) + _short(y.flatten(0, 2)[:, :]).mean() * x,
    "glu": lambda x, y: F.glu(y[..., :8], -1).sum(-1) + F.glu(y[:, :, 1:], 2).sum((2, 3), keepdim=True)[..., 0],
    "turned": lambda x, y: torch.rot90(y, 1, (2, 3)).tanh(),
    "turned square": lambda x, y: torch.rot90(y[..., :7], 3, [-2, -1]) * x[..., 1:8] + x.rot90(2, (2, 3))[..., :7],
}  # fmt: skip
REDUCED: dict[str, Operation] = {
    "norms": lambda x, y: x / y.norm(1, -1, keepdim=True) + NORM(y, 3, (2, 3), keepdim=True),
    "norms of most": lambda x, y: NORM(y, math.inf, (-1,)) - y.norm(-math.inf, 3),
    "norms of each": lambda x, y: x / y.norm(p=1) + NORM(y, 0, 2, True) * torch.norm(y, 0.5, 2, True),
    "norms of matrices": lambda x, y: torch.linalg.matrix_norm(y) + torch.linalg.matrix_norm(y, 1),
    "normalised": lambda x, y: F.normalize(y, p=1, dim=2) * F.pairwise_distance(y, x.flip(-1), p=3, keepdim=True),
    "products": lambda x, y: y.prod(-1, keepdim=True) * x + y.prod(2, keepdim=True),
    "products with zeros": lambda x, y: (x.round() * y).prod(3) * (y + 1).prod(),
    "renorm": lambda x, y: torch.renorm(y, 2, 0, 1.0) + torch.renorm(y, 1, 2, 1.0) + y.renorm(2, 1, 0.5),
    "scaled": _scaled,
    "largest of all": lambda x, y: y * x.argmax() - _extremes(y)[1],
    "softmax": lambda x, y: y[:, :, :2].softmax(2) * y[:, :, :2].logsumexp(2, True) + x[:, :, :2].amax(2, True),
    "triangles": lambda x, y: y.tril().tanh() + torch.triu(y, 2) * x.tril(-3),
}  # fmt: skip
PLACED: dict[str, Operation] = {
    "index_fill": lambda x, y: y.index_fill(2, AT, 0.5) * torch.index_fill(x, -1, -AT, 2.0),
    "index_fill_": lambda x, y: (y * 1).index_fill_(2, AT, 0.5) * x,
    "index_copy": lambda x, y: y.index_copy(2, AT, y.mean().expand(2, 2, 2, 9)) * x,
    "index_copy of tiles": lambda x, y: y.index_copy(2, AT, x[:, :, 1:3]) * x,
    "index_copy_": lambda x, y: (y * 1).index_copy_(-1, torch.tensor([1]), x.mean().expand(2, 2, 7, 1)) * x,
    "slice_scatter": lambda x, y: torch.slice_scatter(y, x[:, :, 2:5].tanh(), 2, 1, 4) * x,
    "slice_scatter of steps": lambda x, y: torch.slice_scatter(y, x[:, :, ::2].tanh(), 2, 0, 7, 2) * x,
    "slice_scatter of one": lambda x, y: torch.slice_scatter(y, x.mean().expand(2, 2, 3, 9), 2, 1, 4) * x,
    "slice_scatter of zeros": lambda x, y: torch.zeros(SHAPE, dtype=x.dtype).slice_scatter(y[..., 1:5], 3, 0, 4) * x,
    "select_scatter": lambda x, y: y.select_scatter(x[:, :, 0].tanh(), 2, -1) * x,
    "select_scatter of one": lambda x, y: torch.select_scatter(y, x.sum().expand(2, 2, 9), 2, 3) * x,
    "bins": lambda x, y: y * torch.bucketize(x.detach(), _levels(-1, 0, 0.5)),
    "bins of a row": lambda x, y: y * torch.searchsorted(_levels(-1, 0, 0.5), x.detach(), right=True),
    "histogram": lambda x, y: torch.histc(x.detach(), 5, -2, 2) * y.sum() + torch.histc(x.detach(), 5) + y.mean(),
    "counts": lambda x, y: torch.bincount((x > 0).long().flatten(), minlength=3) * y.sum(),
    "weighted counts": lambda x, y: torch.bincount((x > 0).long().flatten(), x.detach().flatten()) * y.sum(),
    "distances": lambda x, y: torch.cdist(y.flatten(2).transpose(1, 2), _points() * y.mean()),
    "distances of all": lambda x, y: torch.cdist(y.permute(0, 2, 3, 1).reshape(-1, 2), _points() * y.mean(), p=1),
    "distances of cells": lambda x, y: torch.cdist(y.flatten(2).transpose(1, 2), x.flatten(2).transpose(1, 2)[:, :5]),
    "sampled": lambda x, y: F.grid_sample(_as_samples(y, 2), _as_samples(x.tanh(), 2), align_corners=True),
    "sampled rows": lambda x, y: F.grid_sample(y.permute(2, 1, 0, 3), x.tanh().permute(2, 0, 3, 1), align_corners=True),
    "sampled channels": lambda x, y: F.grid_sample(y.permute(0, 2, 1, 3), y.mean().expand(2, 3, 3, 2).tanh()),
    "written beside": lambda x, y: x * _written(y) + torch.cat([x, _written(y)], 1).sum(1, keepdim=True),
}  # fmt: skip
OPERATIONS = ORDERED | REDUCED | PLACED


def _found(names: list[str], grid: tuple[int, int], shape: tuple[int, ...] = SHAPE) -> list[tuple[str, float | str]]:
    """(operation, how far it is off or why it is refused). Runs on every rank."""
    axes, found = tiles.Meshes()[grid], []
    for name in names:
        case = tiles.Case(name, shape, lambda x, w, name=name: OPERATIONS[name](x, x * w), [(1, 2, 1, 1)], 2)
        expected = tiles._whole(case, 3)
        assert expected is not None, name
        found.append((name, tiles._try(case, axes, expected)))
    return found


def _all_equal(found: list[list[tuple[str, float | str]]]) -> None:
    wrong = {name: result for rank in found for name, result in rank if isinstance(result, str) or result > tiles.BAR}
    assert not wrong


@pytest.mark.parametrize(("ranks", "grid"), [(3, (1, 3)), (4, (2, 2))])
def test_some_operations_equal_those_of_the_whole(pool, ranks: int, grid: tuple[int, int]) -> None:
    drawn = random.sample(list(OPERATIONS), 15)
    _all_equal(pool.run(_found, ranks, drawn, grid, timeout_s=60))


def test_a_rank_that_is_dealt_no_signal_comes_to_the_same_collectives(pool) -> None:
    """Two signals for three ranks, the third of which computes a stand-in."""
    _all_equal(pool.run(_found, 3, ["short transforms"], (3, 1), (1, 2, 7, 9), timeout_s=60))


def _transforms_of_few_fields() -> list[float | str]:
    """Of three fields, which both axes of 2 x 2 tiles are dealt while they are transformed: one rank has none."""
    axes = tiles.Meshes()[(2, 2)]
    case = tiles.Case("fields", (1, 3, 7, 9), lambda x: torch.fft.irfft2(torch.fft.rfft2(x).tanh(), s=(7, 9)), [], 2)
    expected = tiles._whole(case, 1)
    assert expected is not None
    return [tiles._try(case, axes, expected)]


def test_two_axes_may_leave_a_rank_without_a_field(pool) -> None:
    for found in pool.run(_transforms_of_few_fields, 4):
        assert all(isinstance(error, float) and error < 1e-10 for error in found), found


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "grid"), [(2, (2, 1)), (3, (1, 3)), (4, (2, 2)), (6, (3, 2)), (6, (6, 1))])
def test_all_operations_equal_those_of_the_whole(pool, ranks: int, grid: tuple[int, int]) -> None:
    _all_equal(pool.run(_found, ranks, list(OPERATIONS), grid, timeout_s=600))


def _extremes_with_an_empty_tile() -> list[float | str]:
    """Reductions along rows, of which the last rank of three has none, on columns that two ranks share."""
    axes, found = tiles.Meshes()[(3, 2)], []
    for reduced in (
        lambda x: x.amax(2, True) * x.min(2, True)[0],
        lambda x: x.softmax(2) * x.logsumexp(2, True),
        lambda x: x.gather(2, torch.zeros(2, 2, 1, 9, dtype=torch.int64)),
    ):
        case = tiles.Case("rows", (2, 2, 2, 9), lambda x, reduced=reduced: reduced(x) * x, [], 2)
        expected = tiles._whole(case, 1)
        assert expected is not None
        found.append(tiles._try(case, axes, expected))
    return found


def test_a_rank_without_rows_gives_what_others_give_of_their_columns(pool) -> None:
    assert all(found <= tiles.BAR for rank in pool.run(_extremes_with_an_empty_tile, 6) for found in rank)
