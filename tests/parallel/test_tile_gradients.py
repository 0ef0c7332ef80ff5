"""Gradients of operations on tiles against differences of their own values, and what tiles send against its adjoint.

A slope is that along a random direction of all inputs and parameters at once, in float64, by central differences: what
`torch.autograd.gradcheck(fast_mode=True)` compares too. It can not be called here, since each rank holds a tile, ranks
are to come to the same collectives, and a loss's slope is a sum over them. A gradient that is wrong in any element, on
any rank, has the slope of another function in all but a set of directions of measure zero; each case draws its own.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace

import pytest
import test_tiles as tiles
import torch
import torch.distributed as dist
from exchanges import DOUBLE, dealt_at_random, inner_product

from shardwise.comm import Axis
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Part, Uncut, plain
from shardwise.part.exchanges import Halo, HaloBack, fetch, has_halos
from shardwise.part.gathering import gathered, scatter_sum
from shardwise.part.moves import owners_inside, recut
from shardwise.part.sums import all_sum, with_summed_gradient
from shardwise.part.tiles.maps import Sliding, reads

STEPS = (1e-6, 1e-8)  # the second where a kink, or a place that is rounded, may lie within the first
BAR = 1e-5
TORCH = "torch refuses it"


def _slopes(case: tiles.Case, axes: tuple[Axis, ...], seed: int) -> float | str:
    """How far slopes along random directions of x and parameters lie apart: by backward on tiles, and by differences.

    Words where there is nothing to compare: a refusal, or a gradient of torch that is no slope in one process either.
    """
    expected = tiles._whole(case, seed)
    if expected is None:
        return TORCH
    x, params, output, weight, gradients = expected
    weight[..., output.shape[-1] - case.buffers :] = 0
    draws = torch.Generator().manual_seed(seed + 1)
    along, *beside = [torch.randn(t.shape, dtype=DOUBLE, generator=draws) for t in (x, *params)]
    over = tuple(axis for axis in axes if axis.size > 1)

    def value(step: float) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        leaf, tile = tiles._tile(x + step * along, axes, case.dims)
        mine = [(p.detach() + step * b).requires_grad_() for p, b in zip(params, beside, strict=True)]
        out = case.run(tile, *(with_summed_gradient(p, over) for p in mine))
        return (out * weight).real.sum(), leaf, mine

    try:
        total, leaf, mine = value(0.0)
        total.backward()
    except Uncut as refused:
        return str(refused)
    directions = [tiles._tile(along, axes, case.dims)[0].detach(), *beside]
    pairs = zip([leaf.grad, *(p.grad for p in mine)], directions, strict=True)
    slope = sum((g * b).sum() for g, b in pairs if g is not None) + torch.zeros(1, dtype=DOUBLE)
    dist.all_reduce(slope)
    with torch.no_grad():
        found = [(float(plain(value(s)[0])) - float(plain(value(-s)[0]))) / (2 * s) for s in STEPS]
    apart = _apart(float(slope), found)
    whole = sum(float((g * a).sum()) for g, a in zip(gradients, (along, *beside), strict=True))
    if not (apart <= BAR or _apart(whole, found) <= BAR):  # unpooling where windows share their largest
        return "torch's gradient is no slope in one process either"
    return apart


def _apart(slope: float, found: list[float]) -> float:
    return min(abs(slope - other) / max(1.0, abs(slope), abs(other)) for other in found)


def _checked(seed: int, kinds: tuple[str, ...], each: int) -> list[tuple[str, float | str]]:
    """(what was tried, how far the two slopes lie apart) of random cases of each kind. Runs on every rank."""
    ranks, meshes = dist.get_world_size(), tiles.Meshes()
    found: list[tuple[str, float | str]] = []
    for number, kind in enumerate(kinds * each):
        rng = random.Random(seed + number)
        case = tiles.DRAWS[kind](rng)
        grid = rng.choice(tiles._grids(ranks, case.dims))
        axes = tuple(replace(axis, overlap_from=rng.choice((0.0, math.inf))) for axis in meshes[grid])
        found.append((f"{case.kind} {case.shape} {case.told} on {grid}", _slopes(case, axes, seed + number)))
    return found


def _judge(found: list[list[tuple[str, float | str]]], seed: int) -> int:
    """How many slopes agree; every rank has the same number, and few are refused that torch takes."""
    tried = [row for row in found[0] if row[1] != TORCH]
    checked = [row for row in found[0] if isinstance(row[1], float)]
    wrong = [row for rows in found for row in rows if isinstance(row[1], float) and not row[1] <= BAR]
    assert not wrong, f"seed {seed}: {wrong[:3]}"
    assert len(checked) >= 0.6 * len(tried)
    return len(checked)


def test_gradients_on_tiles_are_slopes(pool) -> None:
    _judge(pool.run(_checked, 4, 5, tuple(tiles.DRAWS), 1, timeout_s=240), 5)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", list(tiles.DRAWS))
def test_gradients_of_every_kind_are_slopes(pool, kind: str, ranks: int) -> None:
    seed = random.randrange(2**31)
    sys.stderr.write(f"seed {seed}\n")  # a rank that raises leaves no other trace
    assert _judge(pool.run(_checked, ranks, seed, (kind,), 12, timeout_s=600), seed)


# --- what passes between ranks, as pairs


def _adjoints(seed: int) -> list[str]:
    """What is wrong of <Fx, y> = <x, F*y> for halos, gathers, sums and recuts of random shapes. Runs on every rank."""
    rng, ranks = random.Random(seed), dist.get_world_size()
    axis = build_mesh(Plan(domain=(ranks,)), torch.device("cpu")).inner[0]
    own, wrong, halos = torch.Generator().manual_seed(seed + axis.index), [], 0

    def drawn(shape: list[int] | torch.Size) -> torch.Tensor:
        return torch.randn(shape, dtype=DOUBLE, generator=own)

    def check(what: str, forward: float, adjoint: float) -> None:
        if abs(forward - adjoint) > 1e-12 * max(1.0, abs(forward)):
            wrong.append(f"{what}: <Fx, y> = {forward}, <x, F*y> = {adjoint}")

    for case in range(30):
        shape = [rng.randint(1, 4), rng.randint(3 * ranks, 5 * ranks), rng.randint(1, 4)]
        owners, kernel, stride = Owners.blocks(shape[1], ranks), rng.randint(1, 4), rng.randint(1, 2)
        part = Part(drawn([shape[0], owners.counts[axis.index], shape[2]]), 1, owners, axis)
        before = rng.randint(0, kernel - 1)
        sliding = Sliding((shape[1] - 1) // stride + 1, kernel, stride, before)
        wanted = reads(owners, sliding).wanted
        if has_halos(owners, wanted):
            halos += 1
            window, (front, behind) = fetch(part, wanted), Halo(part, wanted).wait()
            ends = [t for t in (front, behind) if t is not None]
            ys = [drawn(t.shape) for t in ends]
            places = iter(ys)
            held = drawn(part.local.shape)  # what it is added to
            mine = held.clone()
            HaloBack(*(None if t is None else next(places) for t in (front, behind)), part, wanted).add_into(mine)
            flat = [torch.cat([t.flatten() for t in (*each, part.local[:0].flatten())]) for each in (ends, ys)]
            check(f"case {case}: halo", inner_product(*flat), inner_product(part.local, mine - held))
            if front is not None and not torch.equal(front, window[:, : front.shape[1]]):
                wrong.append(f"case {case}: the strip in front")
            if behind is not None and not torch.equal(behind, window[:, window.shape[1] - behind.shape[1] :]):
                wrong.append(f"case {case}: the strip behind")
        some = dealt_at_random(shape[1], ranks, rng)
        dealt = Part(drawn([shape[0], some.counts[axis.index], shape[2]]), 1, some, axis)
        whole = gathered(dealt)
        y = drawn(whole.shape)
        check(
            f"case {case}: gather", inner_product(whole, y), inner_product(dealt.local, scatter_sum(y, 1, some, axis))
        )
        x, y = drawn(shape), drawn(shape)
        check(f"case {case}: sum", inner_product(all_sum(x, axis), y), inner_product(x, all_sum(y, axis)))
        other = rng.choice((0, 1, 2))  # 1: other owners of the same dim
        there = recut(dealt, other, dealt_at_random(shape[other], ranks, rng))
        y = drawn(there.local.shape)
        back = recut(there.with_local(y), 1, some)
        check(
            f"case {case}: recut to dim {other}", inner_product(there.local, y), inner_product(dealt.local, back.local)
        )
    return wrong if halos else ["no case has halos"]


def _recuts_of_grids(seed: int) -> list[str]:
    """What is wrong of <Fx, y> = <x, F*y> for exchanges over one of two axes that cut a tensor. Runs on every rank."""
    rng, wrong = random.Random(seed), []
    axes = build_mesh(Plan(domain=(2, dist.get_world_size() // 2)), torch.device("cpu")).inner
    outer, inner = axes
    own = torch.Generator().manual_seed(seed + dist.get_rank())
    for case in range(40):
        shape = [rng.randint(1, 5) for _ in range(4)]
        one, two, to = rng.sample(range(4), 3)
        to = rng.choice((to, two, one))  # a dim that neither axis cuts; that of the other; its own, dealt anew
        over = rng.choice(axes) if to not in (one, two) else outer
        dealt = {axis: dealt_at_random(shape[d], axis.size, rng) for axis, d in ((outer, one), (inner, two))}
        tile = list(shape)
        tile[one], tile[two] = dealt[outer].counts[outer.index], dealt[inner].counts[inner.index]
        part = Part(
            Part(torch.randn(tile, dtype=DOUBLE, generator=own), two, dealt[inner], inner), one, dealt[outer], outer
        )
        after = dealt_at_random(shape[to], over.size, rng)
        if over is inner:
            there = part.with_local(recut(part.local, to, after))
        else:
            there = recut(part, to, after)
        y = torch.randn(there.local.local.shape, dtype=DOUBLE, generator=own)
        arrived = there.with_local(there.local.with_local(y))
        if over is inner:
            back = arrived.with_local(recut(arrived.local, two, dealt[inner]))
        else:
            back = recut(arrived, one, dealt[outer], owners_inside(part, to))
        forward, adjoint = inner_product(there.local.local, y), inner_product(part.local.local, back.local.local)
        if not abs(forward - adjoint) <= 1e-12 * max(1.0, abs(forward)):
            wrong.append(f"case {case}, {shape} {one, two} to {to}: <Fx, y> = {forward}, <x, F*y> = {adjoint}")
    return wrong


@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.long)])
def test_exchanges_over_an_axis_of_a_grid_have_their_adjoint(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    wrong = [each for found in pool.run(_recuts_of_grids, ranks, seed) for each in found]
    assert not wrong, f"seed {seed}: {wrong[:5]}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_passes_between_ranks_has_its_adjoint(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    wrong = [each for found in pool.run(_adjoints, ranks, seed) for each in found]
    assert not wrong, f"seed {seed}: {wrong[:5]}"
