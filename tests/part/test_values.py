"""Operations along a cut dim where values overflow, are infinite, no numbers, or out of range: as in one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from shardwise.comm import Axis, Ledger
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Sum, plain, to_part

HALF = torch.float16
PICKED = torch.tensor([[1], [5], [2], [4], [5], [2], [1], [0]])
TARGETS = torch.tensor([1, 5, 2, 4, 255, 2, 1, 5])
IGNORED = torch.full((8,), -100)
BEYOND = torch.tensor([[9, 0, 0]])


def _weighted(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, TARGETS, torch.arange(1.0, 7.0), ignore_index=255)


def _cases() -> dict[str, tuple[torch.Tensor, int, Callable]]:
    """Name -> (whole tensor, dim that is cut, function)."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    unknown, masked = x.clone(), x.clone()
    unknown[1, 0] = unknown[6, 1] = math.nan
    masked[:, [0, 3]] = -math.inf
    half = torch.full((8192, 3), 300.0, dtype=HALF)
    half[4096:] *= -1
    flat, small = torch.zeros(140000, 2, dtype=HALF), x.abs().to(torch.uint8)
    return {
        "log-probabilities of -inf": (masked, 1, lambda t: F.cross_entropy(t, TARGETS, ignore_index=255)),
        "weights, and an ignored class beyond them": (x, 1, _weighted),
        "nothing but ignored targets": (x, 1, lambda t: F.cross_entropy(t, IGNORED)),
        "gathered beside -inf": (masked, 1, lambda t: t.gather(1, PICKED)),
        "rows beside -inf": (masked.T.contiguous(), 0, lambda t: F.embedding(torch.tensor([1, 5, 4]), t)),
        "a row": (x, 0, lambda t: F.embedding(torch.tensor(5), t)),
        "infinity added": (x, 0, lambda t: t.scatter_add(0, PICKED[:2], torch.full((2, 1), math.inf))),
        "more values than indices": (x, 0, lambda t: t.scatter_add(0, PICKED[:2], torch.ones(5, 3))),
        "gathered beyond the end": (x, 0, lambda t: t.gather(0, BEYOND)),
        "added beyond the end": (x, 0, lambda t: t.scatter_add(0, BEYOND, torch.ones(1, 3))),
        "largest": (unknown, 0, lambda t: t.amax(0)),
        "largest, where": (unknown, 0, lambda t: t.max(0)),
        "smallest and largest": (unknown, 0, lambda t: torch.aminmax(t, dim=0)),
        "norm": (unknown, 0, lambda t: torch.linalg.vector_norm(t, math.inf, 0)),
        "where, among all": (x, 0, lambda t: t.argmax(None, True)),
        "all, of bytes": (small, 0, lambda t: t.all(0)),
        "any, of bytes": (small, 0, lambda t: t.any(0)),
        "all, over no dim": (x, 0, lambda t: torch.all(t, dim=())),
        "sum": (half, 0, lambda t: t.sum(0)),
        "sum of numbers": (half, 0, lambda t: t.nansum(0)),
        "log-softmax": (flat, 0, lambda t: t.log_softmax(0)),
        "softmax": (flat, 0, lambda t: t.softmax(0)),
        "log of a sum, of bytes": (small, 0, lambda t: t.logsumexp(0)),
    }


def _of_positions() -> dict[str, tuple[torch.Tensor, int, Callable]]:
    """Cases, as `_cases`, of functions that have rules on positions alone."""
    field = torch.rand(1, 2, 8, 8, generator=torch.Generator().manual_seed(0)) * 255
    half = torch.full((2, 1024), 100.0, dtype=HALF)
    half[:, 512:] *= -1
    return {
        "running sum": (half, 1, lambda t: t.cumsum(1)[:, -1:]),
        "bytes between bytes": (field.byte(), 2, lambda t: F.interpolate(t, size=(12, 12), mode="bilinear")),
        "cut off and wrapped": (field, 2, lambda t: F.pad(t, (1, 1, -1, 2), mode="circular")),
        "wrapped and cut off": (field, 2, lambda t: F.pad(t, (1, 1, 2, -1), mode="circular")),
        "only cut off": (field, 2, lambda t: F.pad(t, (0, 0, -1, -2), mode="circular")),
    }


def _outcome(function: Callable, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns results, and the gradient of the first; nothing where it raises."""
    x.requires_grad_(x.is_floating_point())
    try:
        found = function(x)
    except (IndexError, RuntimeError):
        return []
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    real = results[0].requires_grad
    gradients = torch.autograd.grad(results[0].float().sum(), x) if real else ()
    return [plain(each.detach()) for each in (*results, *gradients)]


def _differences(kind: str) -> list[str]:
    """Returns what of the cases differs from one process, cut over an axis of weights or of positions."""
    ranks = torch.distributed.get_world_size()
    mesh = build_mesh(Plan(**{kind: ranks}), torch.device("cpu"))
    axis, told = mesh.tp if kind == "tp" else mesh.inner[0], []
    for name, (x, dim, function) in (_cases() if kind == "tp" else _cases() | _of_positions()).items():
        owners = Owners.blocks(x.shape[dim], ranks)
        expected = _outcome(function, x.clone())
        found = _outcome(function, to_part(owners.take(x, dim, axis.index).clone(), dim, owners, axis))
        same = len(expected) == len(found) and all(
            a.dtype == b.dtype and a.shape == b.shape
            and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
            for a, b in zip(expected, found, strict=True)
        )  # fmt: skip
        told += [] if same else [f"{name}: {found} for {expected}"]
    return told


def test_values_that_are_no_plain_numbers_over_weights(pool) -> None:
    assert pool.run(_differences, 2, "tp") == [[], []]


def test_values_that_are_no_plain_numbers_over_positions(pool) -> None:
    assert pool.run(_differences, 2, "cp") == [[], []]


def test_a_sum_that_waits_has_the_dtype_of_one_process() -> None:
    """Plus a wider bias it is wider; its bits are not those of the summands added up."""
    axis = Axis("tp", 2, 0, None, (0, 1), rehearsal=Ledger())
    summed = Sum.of(torch.ones(2, 3, dtype=HALF), axis)
    assert (summed + torch.ones(3)).dtype is torch.float32
    seen = Sum.of(torch.ones(2, 3, dtype=HALF), axis).view(torch.int16)
    assert not isinstance(seen, Sum) or not seen.untaken
