"""What a module's own paddings find beyond the edges that `Task.spatial` declares: in one process, and on tiles."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import domain_tasks
import pytest
import torch
import torch.nn.functional as F
from boundary_tasks import Block, Net, globe
from torch.utils.checkpoint import checkpoint

from shardwise import Domain, Task, verify
from shardwise.boundary import Edges, bounded
from shardwise.errors import InputError

DOUBLE = torch.float64
GLOBE = Edges(("lat", "lon"), ("pole", "periodic"))


def _index(kind: str, i: int, n: int) -> int | None:
    """The cell that lies at i of n, from the definition of each boundary; None where it is a zero."""
    if kind == "periodic":
        return i % n
    if kind == "replicate":
        return min(max(i, 0), n - 1)
    if kind == "reflect":
        i = abs(i)
        return i if i < n else 2 * (n - 1) - i
    return i if 0 <= i < n else None


def _beyond(x: torch.Tensor, kinds: tuple[str, str], p: tuple[int, int], fill: float = 0.0) -> torch.Tensor:
    """The field with p cells around it, cell by cell."""
    h, w = x.shape[-2:]
    found = x.new_full((*x.shape[:-2], h + 2 * p[0], w + 2 * p[1]), fill)
    for i in range(-p[0], h + p[0]):
        for j in range(-p[1], w + p[1]):
            row, column = _index(kinds[0], i, h), j
            if kinds[0] == "pole":
                row = -1 - i if i < 0 else 2 * h - 1 - i if i >= h else i
                column = j + w // 2 * (not 0 <= i < h)
            at = _index(kinds[1], column, w)
            if row is not None and at is not None:
                found[..., i + p[0], j + p[1]] = x[..., row, at]
    return found


@pytest.mark.parametrize(
    "kinds",
    [("pole", "periodic"), ("reflect", "periodic"), ("replicate", "reflect"), ("zeros", "periodic"),
     ("periodic", "zeros")],
)  # fmt: skip
def test_paddings_are_those_of_the_definition_corners_with_them(kinds: tuple[str, str]) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 6, 8, dtype=DOUBLE, generator=draws)
    w = torch.randn(4, 3, 3, 5, dtype=DOUBLE, generator=draws)
    edges = Edges(("lat", "lon"), kinds)

    def same(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)

    with edges.entered(""):
        same(F.conv2d(x, w, padding=(1, 2)), F.conv2d(_beyond(x, kinds, (1, 2)), w))
        same(F.conv2d(x, w, padding="same"), F.conv2d(_beyond(x, kinds, (1, 2)), w))
        same(F.max_pool2d(x, 3, 2, 1), F.max_pool2d(_beyond(x, kinds, (1, 1), -math.inf), 3, 2))
        same(F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(_beyond(x, kinds, (1, 1)), 3, 2))
        same(F.unfold(x, 3, padding=1), F.unfold(_beyond(x, kinds, (1, 1)), 3))
        same(F.pad(x, [1, 1, 1, 1]), _beyond(x, ("zeros", "zeros"), (1, 1)))  # as the module says
        # an output of the transposed one gets what every cell around it adds, cut from that of a larger field
        for stride, padding, more in ((1, 1, 0), (2, 1, 1), (2, 0, 0)):
            found = F.conv_transpose2d(x, w.transpose(0, 1), None, stride, padding, more)
            larger = F.conv_transpose2d(_beyond(x, kinds, (3, 4)), w.transpose(0, 1), None, stride)
            top, left = 3 * stride + padding, 4 * stride + padding
            same(found, larger[..., top : top + found.shape[-2], left : left + found.shape[-1]])


@pytest.mark.parametrize(
    ("task", "plan"),
    [("globe", "domain=2x2"), ("globe", "domain=1x3,remat=full"), ("globe", "domain=3,zero=3"),
     ("box", "domain=2x2"), ("globe", "dp_shard=2,zero=2,remat=selective"), ("globe", "pp=2"),
     ("globe", "dp_replicate=2,compile=true,remat=full")],
)  # fmt: skip
def test_plans_with_a_boundary_equal_one_process_with_it(pool, task: str, plan: str) -> None:
    found = verify(f"boundary_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()


def test_the_boundary_is_part_of_the_module_that_a_task_builds() -> None:
    x = torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    task = globe()
    module = task.model().double()
    found = module(x)
    turned = module(x.roll(8, -1))  # around the globe
    torch.testing.assert_close(turned, found.roll(8, -1), rtol=1e-12, atol=1e-12)
    copied = copy.deepcopy(module)
    torch.testing.assert_close(copied(x), found, rtol=0, atol=0)
    with torch.no_grad():
        copied.last.bias.add_(1.0)
    torch.testing.assert_close(copied(x), found + 1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module(x), found, rtol=0, atol=0)
    assert list(inspect.signature(module.forward).parameters) == ["x"]
    plain = task.with_(spatial=None).model().double()
    plain.load_state_dict(module.state_dict())
    assert (plain(x) - found).abs().max() > 1e-3
    again = task.with_(model=task.model, spatial=Domain((-2, -1), ("lat", "lon"), {"lon": "periodic"}))
    assert again.model.edges.kinds == ("zeros", "periodic")


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_finds_the_same(reentrant: bool) -> None:
    block = bounded(Block, [("lat", "pole"), ("lon", "periodic")])().double()
    x = torch.randn(1, 4, 4, 6, dtype=DOUBLE, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    output = checkpoint(block, x, use_reentrant=reentrant)
    output.square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-13, atol=1e-13)


def _conv(x: torch.Tensor, k: int, padding: int) -> torch.Tensor:
    return F.conv2d(x, torch.ones(1, 1, k, k), padding=padding)


@pytest.mark.parametrize(
    ("edges", "run", "message"),
    [
        (GLOBE, lambda: _conv(torch.ones(1, 1, 4, 5), 3, 1), "half way around lon, and lon has 5 cells"),
        (GLOBE, lambda: _conv(torch.ones(1, 1, 9, 4), 11, 5), "reads 5 cells beyond the edge of lon.* has 4"),
        (Edges(("z",), ("reflect",)), lambda: F.avg_pool1d(torch.ones(1, 1, 1), 2, 1, 1), "reflect gives at most 0"),
        (GLOBE, lambda: F.conv1d(torch.ones(1, 1, 9), torch.ones(1, 1, 3), padding=1), "cannot be told"),
        (GLOBE, lambda: F.max_pool2d(torch.ones(1, 1, 4, 4), 3, 2, 1, 1, True), "ceil_mode=True"),
        (GLOBE, lambda: F.max_pool2d(torch.ones(1, 1, 4, 4), 3, 2, 1, return_indices=True), "return_indices=True"),
        (GLOBE, lambda: F.fold(torch.ones(1, 9, 16), 4, 3, padding=1), "fold without padding"),
        (GLOBE, lambda: F.grid_sample(torch.ones(1, 1, 4, 4), torch.zeros(1, 2, 2, 2)), "padding_mode='border'"),
        (GLOBE, lambda: torch.convolution(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), None, (1, 1), (1, 1),
                                          (1, 1), False, (0, 0), 1), "torch.nn.functional"),
    ],
)  # fmt: skip
def test_what_a_boundary_cannot_give_is_named(edges: Edges, run: Any, message: str) -> None:
    with edges.entered("deep.conv"), pytest.raises(InputError, match=message) as raised:
        run()
    assert "'deep.conv'" in str(raised.value)


def odd() -> Task:
    """A globe of which half the columns are odd in number after one halving."""
    return domain_tasks._task(Net, domain_tasks._fields(2, 12, 18, samples=2),
                              spatial=Domain((-2, -1), ("lat", "lon"), {"lat": "pole", "lon": "periodic"}))  # fmt: skip


def test_an_odd_number_of_longitudes_is_named_with_the_module(pool) -> None:
    for run in (lambda: odd().model()(torch.zeros(1, 2, 12, 18)), lambda: verify(odd(), "domain=2", pool=pool)):
        with pytest.raises(InputError, match=r"conv2d of 'blocks.0': boundary 'pole' .* lon has 9 cells"):
            run()
