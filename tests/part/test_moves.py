"""Exchanges between ranks of a cut dim's indices: against indexing the whole tensor, and as adjoint pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from exchanges import DOUBLE, dealt_at_random, inner_product

from shardwise.comm import Axis, Ledger
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Part, plain, to_part
from shardwise.part.exchanges import fetch, give_back
from shardwise.part.moves import moved, recut, reowned

CASES = 40


def _wanted(n: int, ranks: int, rng: random.Random) -> tuple:
    """Overlapping, empty, backward-ordered and outside ranges."""

    def some() -> tuple[int, int]:
        start = rng.randint(-2, n)
        return start, rng.randint(start, min(n + 2, start + 5))

    return tuple(tuple(some() for _ in range(rng.randint(0, 3))) for _ in range(ranks))


def _moves(seed: int) -> list[str]:
    """What is wrong, over random shapes, owners and wishes. Runs on every rank."""
    rng = random.Random(seed)
    ranks = torch.distributed.get_world_size()
    axis = build_mesh(Plan(tp=ranks), torch.device("cpu")).tp
    wrong = []
    for case in range(CASES):
        shape = [rng.randint(1, 7) for _ in range(3)]
        draws = torch.Generator().manual_seed(seed + case)
        whole = torch.randn(shape, dtype=DOUBLE, generator=draws)
        a, b = rng.sample(range(3), 2)
        before, after = dealt_at_random(shape[a], ranks, rng), dealt_at_random(shape[b], ranks, rng)
        again = dealt_at_random(shape[a], ranks, rng)
        part = Part(before.take(whole, a, axis.index).contiguous(), a, before, axis)
        there = recut(part, b, after)
        if not torch.equal(there.local, after.take(whole, b, axis.index)):
            wrong.append(f"case {case}: recut")
        if not torch.equal(recut(there, a, before).local, part.local):
            wrong.append(f"case {case}: recut back")
        if not torch.equal(reowned(part, again).local, again.take(whole, a, axis.index)):
            wrong.append(f"case {case}: other owners")
        wanted = _wanted(shape[a], ranks, rng)
        found = fetch(part, wanted)
        mine = [i for start, stop in wanted[axis.index] for i in range(start, stop)]
        rows = whole.movedim(a, 0)
        expected = torch.stack([rows[i] if 0 <= i < shape[a] else torch.zeros_like(rows[0]) for i in mine], 0).movedim(
            0, a
        ) if mine else found.new_zeros([0 if d == a else n for d, n in enumerate(shape)])  # fmt: skip
        if not torch.equal(found, expected):
            wrong.append(f"case {case}: fetch")
        y = torch.randn(found.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed + axis.index))
        back = give_back(y, part.dim_cut, part.owners, part.axis, wanted)
        forward, adjoint = inner_product(found, y), inner_product(part.local, back.local)
        if abs(forward - adjoint) > 1e-12 * max(1.0, abs(forward)):
            wrong.append(f"case {case}: <Fx, y> = {forward}, <x, F*y> = {adjoint}")
        leaf = part.local.clone().requires_grad_()
        weight = torch.randn(shape, dtype=DOUBLE, generator=draws)
        (moved(to_part(leaf, a, before, axis), b, after, axis) ** 2 * weight).sum().backward()
        if not torch.allclose(leaf.grad, before.take(2 * whole * weight, a, axis.index), rtol=1e-12, atol=0):
            wrong.append(f"case {case}: gradient of a moved tensor")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_equal_indexing_the_whole(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    wrong = [each for found in pool.run(_moves, ranks, seed, timeout_s=240) for each in found]
    assert not wrong, f"seed {seed}: {wrong[:5]}"


def _moves_inside() -> list[str]:
    """Over an outer axis, of tensors that are cut over an inner one, along another dim and along the same."""
    mesh = build_mesh(Plan(cp=2, tp=2), torch.device("cpu"))
    (cp,), tp = mesh.inner, mesh.tp
    whole = torch.arange(2.0 * 6 * 5, dtype=DOUBLE).view(2, 6, 5)  # (B, heads, S)
    heads, positions = Owners.of(np.array([0, 0, 0, 1, 1, 1]), 2), Owners.of(np.array([0, 1, 1, 1, 0]), 2)
    inner = Part(heads.take(positions.take(whole, 2, cp.index), 1, tp.index).contiguous(), 1, heads, tp)
    part = Part(inner, 2, positions, cp)
    wrong = []
    for owners in (Owners.of(np.array([0, 0, 1, 0, 1, 1]), 2), Owners.blocks(6, 2)):
        by_heads = recut(part, 1, owners)
        if not torch.equal(plain(by_heads), whole):
            wrong.append("positions to heads")
        back = recut(by_heads, 2, positions, inside=heads)
        if not torch.equal(back.local.local, inner.local) or not torch.equal(plain(back), whole):
            wrong.append("and back")
    by_batch = recut(part, 0, Owners.blocks(2, 2))
    if not torch.equal(plain(by_batch), whole):
        wrong.append("positions to samples")
    if not torch.equal(fetch(part, (((0, 5),), ((3, 7),))).local, heads.take(
        whole if cp.index == 0 else torch.cat([whole[..., 3:], torch.zeros(2, 6, 2, dtype=DOUBLE)], 2), 1, tp.index
    )):  # fmt: skip
        wrong.append("fetch")
    return wrong


def test_exchanges_over_an_outer_axis(pool) -> None:
    assert not [each for found in pool.run(_moves_inside, 4) for each in found]


def test_a_rehearsal_counts_what_an_exchange_sends() -> None:
    axis = Axis("tp", 2, 0, None, (0, 1), rehearsal=Ledger())
    owners = Owners.blocks(4, 2)
    part = Part(torch.ones(2, 6, dtype=DOUBLE), 0, owners, axis)
    assert recut(part, 1, Owners.blocks(6, 2)).local.shape == (4, 3)
    assert [(row["op"], row["calls"]) for row in axis.rehearsal.rows()] == [("all_to_all", 1)]
