"""Operations of a tensor of which any dim is cut, samples and channels too, against the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import test_tiles as tiles
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import linalg

from shardwise.part import Owners, Uncut, plain, to_part
from shardwise.part.sums import with_summed_gradient

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FIELD, SQUARE, ROWS = (2, 4, 6, 5), (2, 4, 3, 3), (4, 12)
BINS = torch.arange(12) % 5
AT = torch.tensor([0, 5, 23])


def _places(pool: Callable, x: torch.Tensor, size: object) -> torch.Tensor:
    y, places = pool(x, size, return_indices=True)
    return y * (1 + places.double().sin())


def _regular(x: torch.Tensor) -> torch.Tensor:
    return x + 5 * torch.eye(3, dtype=x.dtype)


def _low_rank(x: torch.Tensor) -> torch.Tensor:
    u, s, v = linalg.svd(x, full_matrices=False)
    return (u[..., :2] * s[..., None, :2]) @ v[..., :2, :]


def _by_cell(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Attention within each cell, of which queries, keys or values are learned and the same in all."""
    cells = x.flatten()[:, None, None] * w
    learned = w.expand(len(cells), 3, 3)
    attend = F.scaled_dot_product_attention
    return attend(learned, cells, cells.tanh()) + attend(cells, learned, learned.sin()) + attend(cells, cells, learned)


# of x and a weight (3, 3) that every rank has
KEPT_APART: dict[str, tuple[tuple[int, ...], Operation]] = {
    "max": (FIELD, lambda x, w: F.max_pool2d(x, 2, 1)),
    "max places": (FIELD, lambda x, w: _places(F.max_pool2d, x, 2)),
    "max 1": ((4, 4, 6), lambda x, w: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2)),
    "3": ((2, 3, 2, 4, 4), lambda x, w: F.max_pool3d(x, 2) + F.avg_pool3d(x, 2)),
    "mean": (FIELD, lambda x, w: F.avg_pool2d(x, 2, 1)),
    "one sample": ((4, 6, 5), lambda x, w: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)),
    "adaptive": (FIELD, lambda x, w: F.adaptive_avg_pool2d(x, (2, 3)) + _places(F.adaptive_max_pool2d, x, (2, 3))),
    "unpooled": (FIELD, lambda x, w: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(6, 5))),
    "response": (FIELD, lambda x, w: F.local_response_norm(x, 2)),
    **{mode: (FIELD, lambda x, w, mode=mode: F.interpolate(x, scale_factor=2, mode=mode))
       for mode in ("nearest", "bilinear", "bicubic", "area")},
    **{f"{mode} of one size": (FIELD, lambda x, w, mode=mode: F.interpolate(x, scale_factor=1.05, mode=mode))
       for mode in ("nearest", "bilinear")},
    "batch norm": (FIELD, lambda x, w: F.batch_norm(x, None, None, training=True)),
    "among all others": (FIELD, lambda x, w: x * torch.isin((4 * x).round(), (4 * x.flip(0)).round())),
    "turned": (FIELD, lambda x, w: torch.rot90(x, 1, (2, 3))),
    "both ways": (FIELD, lambda x, w: tiles._both_ways(x, w[0, 0])),
    "shuffled": (FIELD, lambda x, w: F.channel_shuffle(x, 2)),
    "known": (FIELD, lambda x, w: x * torch.isin(x.round(), torch.tensor([0.0, 1.0], dtype=x.dtype))),
}  # fmt: skip
MATRICES: dict[str, tuple[tuple[int, ...], Operation]] = {
    "inv": (SQUARE, lambda x, w: linalg.inv(_regular(x)) + _regular(x).inverse()),
    "solve": (SQUARE, lambda x, w: linalg.solve(_regular(x), x) + linalg.solve(_regular(x), x[..., 0])[..., None]),
    "solve of a weight": (SQUARE, lambda x, w: linalg.solve(_regular(w), x) + linalg.solve(_regular(x), w)),
    "triangular": (SQUARE, lambda x, w: linalg.solve_triangular(_regular(x).tril(), x, upper=False)),
    "lstsq": (SQUARE, lambda x, w: linalg.lstsq(_regular(x), x).solution),
    "det": (SQUARE, lambda x, w: linalg.det(x) + linalg.slogdet(x)[1] + x.det() + _regular(x).logdet()),
    "svd": (SQUARE, lambda x, w: _low_rank(x)),
    "svd of fields": (FIELD, lambda x, w: linalg.svdvals(x) + torch.svd(x).S + linalg.matrix_norm(x, "nuc")[..., None]),
    "eigh": (SQUARE, lambda x, w: linalg.eigh(x + x.mT).eigenvalues + linalg.eigvalsh(x + x.mT)),
    "cholesky": (SQUARE, lambda x, w: linalg.cholesky(x @ x.mT + torch.eye(3, dtype=x.dtype))),
    "qr": (SQUARE, lambda x, w: linalg.qr(x).R.abs() + linalg.lu_factor(x)[0]),
    "others": (SQUARE, lambda x, w: linalg.pinv(_regular(x)) + torch.matrix_exp(x)),
    "householder": (SQUARE, lambda x, w: linalg.householder_product(x, x[..., 0])),
    "cross": (SQUARE, lambda x, w: linalg.cross(x, x.flip(-1) * 2) + linalg.cross(x, x.tanh(), dim=2)),
}  # fmt: skip
OF_ALL: dict[str, tuple[tuple[int, ...], Operation]] = {
    "trace": ((6, 6), lambda x, w: torch.trace(x) * w + x.trace()),
    "diagonals": ((6, 6), lambda x, w: torch.diag(x) * torch.diag(x[0]) + x.diagonal_scatter(x.sum(1)) * x),
    "diagonal of rows": (ROWS, lambda x, w: torch.diag_embed(x).tanh()),
    "masked_scatter": (ROWS, lambda x, w: x.masked_scatter(x > 0, (x * 2).flatten().flip(0)) * x),
    "masked_scatter of a table": (ROWS, lambda x, w: x.masked_scatter(x > 0, (w.sum() * torch.arange(48)).tanh()) * x),
    "take": (ROWS, lambda x, w: torch.take(x, AT).tanh() + x.sum()),
    "put": (ROWS, lambda x, w: x.put(AT, w[0]) * x),
    "put in place": (ROWS, lambda x, w: (x * 1).put_(AT, w[0], accumulate=True).tanh()),
    "bins": (ROWS, lambda x, w: torch.zeros(4, 5, dtype=x.dtype).index_add_(1, BINS, x).tanh()),
    "bins of rows": (ROWS, lambda x, w: x.new_zeros(5, 4).index_add_(0, BINS, x.T).tanh()),
    "largest of bins": (ROWS, lambda x, w: x.new_zeros(4, 5).scatter_reduce_(1, BINS.expand(4, 12), x, "amax")),
    "mean of bins": (ROWS, lambda x, w: x.new_zeros(4, 5).scatter_reduce(1, BINS.expand(4, 12), x, "mean")),
    "blocks": (ROWS, lambda x, w: torch.block_diag(x, w).tanh()),
    "distances": (ROWS, lambda x, w: F.pdist(x) + torch.cdist(x, x.tanh()).sum()),
    "attention of cells": (ROWS, _by_cell),
    "pairs": (ROWS, lambda x, w: F.bilinear(x, x.tanh(), w[:, :1, None].expand(3, 12, 12), w[0])),
}  # fmt: skip
OPERATIONS = KEPT_APART | MATRICES | OF_ALL


def _tried(name: str, cuts: dict[int, int], meshes: tiles.Meshes) -> float | str:
    """How far an operation is off whose dims are cut over the axes of a grid; why it is refused. On every rank."""
    shape, run = OPERATIONS[name]
    grid = tuple(cuts.values())
    axes = dict(zip(cuts, meshes[grid], strict=True))
    draws = torch.Generator().manual_seed(3)
    x, w = (torch.randn(each, dtype=tiles.DOUBLE, generator=draws).requires_grad_() for each in (shape, (3, 3)))
    y = run(x, w)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=draws)
    (y * weight).sum().backward()
    local, owners = x.detach(), {dim: Owners.blocks(shape[dim], axis.size) for dim, axis in axes.items()}
    for dim, axis in axes.items():
        local = owners[dim].take(local, dim, axis.index)
    tile = leaf = local.clone().requires_grad_()
    for dim, axis in reversed(axes.items()):
        tile = to_part(tile, dim, owners[dim], axis)
    held = w.detach().clone().requires_grad_()
    try:
        out = run(tile, with_summed_gradient(held, tuple(axes.values())))
        (out * weight).sum().backward()
    except Uncut as refused:
        return str(refused)
    expected = x.grad
    for dim, axis in axes.items():
        expected = owners[dim].take(expected, dim, axis.index)
    found = [tiles._off(y.detach(), plain(out.detach())), tiles._off(expected, leaf.grad)]
    if w.grad is not None:
        total = torch.zeros_like(w) if held.grad is None else held.grad.clone()
        dist.all_reduce(total)
        found.append(tiles._off(w.grad, total))
    return max(found)


def _found(names: list[str]) -> dict[tuple, float | str]:
    """Each operation with each dim cut, and with each pair of dims. Runs on every rank."""
    ranks, found, meshes = dist.get_world_size(), {}, tiles.Meshes()
    for name in names:
        dims = range(len(OPERATIONS[name][0]))
        ways = [{d: ranks} for d in dims] if ranks < 4 else [{d: 2, e: 2} for d in dims for e in dims if d < e]
        for cuts in ways:
            found[name, *cuts] = _tried(name, cuts, meshes)
    return found


@pytest.mark.parametrize("kind", [KEPT_APART, MATRICES, OF_ALL], ids=["kept apart", "matrices", "of all"])
def test_operations_with_any_dim_cut_equal_those_of_the_whole(pool, kind: dict) -> None:
    """On three ranks, of which one may have none of a dim's indices."""
    found = pool.run(_found, 3, list(kind), timeout_s=60)
    wrong = {name: result for rank in found for name, result in rank.items() if not _equal(result)}
    assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_operations_with_any_dims_cut_equal_those_of_the_whole(pool, ranks: int) -> None:
    found = pool.run(_found, ranks, list(OPERATIONS), timeout_s=900)
    wrong = {name: result for rank in found for name, result in rank.items() if not _equal(result)}
    assert not wrong


def _equal(result: float | str) -> bool:
    return isinstance(result, float) and not math.isnan(result) and result <= 1e-11
