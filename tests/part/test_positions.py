"""What modules make and read of positions in ways of their own, where the positions are cut."""

from __future__ import annotations

import pytest
import torch

from shardwise import verify
from shardwise.comm import Axis, Ledger
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Part, gather, plain
from shardwise.part.crossing import dealt_beside
from shardwise.part.cuts import of_other_rows, runs_of
from shardwise.part.position_tables import CutRanges, whole_table


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        ("branches", "cp=2"),
        ("branches", "cp_ulysses=3"),
        ("one_by_one", "cp=2"),
        ("relative", "cp=3"),
        ("relative", "cp=2,tp=2,sp=true"),
        ("selected", "cp=2,cp_ulysses=2"),
        ("selected", "tp=2,sp=true"),
        ("selected", "cp=2,pp=2"),
        ("routed", "cp=2,cp_ulysses=2"),
        ("nearest", "cp=2"),
        ("shifted", "cp=3"),
        ("turned", "cp=3"),
        ("turned", "cp=2,cp_ulysses=2"),
        ("turned", "cp_ulysses=2,zero=3,remat=full"),
    ],
)
def test_positions_read_in_ways_of_its_own_equal_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"position_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()


def test_rows_of_an_expert_are_read_and_written_by_the_ranks_that_have_them(pool) -> None:
    found = verify("position_tasks:routed", "cp=2", pool=pool)
    assert found.parity and "gathered" not in found.text(), found.text()


def _rows_of_other_lengths() -> list[str]:
    """What differs between views of rows as rows of another length and those of the whole tensor."""
    (axis,) = build_mesh(Plan(cp=3), torch.device("cpu")).inner
    wrong = []
    for before, after in (((2, 7, 8), (2, 8, 7)), ((7, 9), (9, 7)), ((2, 2, 6, 7), (4, 7, 6)), ((5, 4, 2), (8, 5))):
        for owners in (Owners.blocks(before[-2 - (before == (5, 4, 2))], 3), Owners.zigzag(before[-2], 3)):
            dim = 0 if before == (5, 4, 2) else len(before) - 2
            if owners.size != before[dim]:
                continue
            whole = torch.randn(before, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            part = Part(owners.take(whole, dim, axis.index).contiguous(), dim, owners, axis)
            seen = part.view(after)
            if not isinstance(seen, Part) or seen.local.numel() > whole.numel() * 0.8:
                wrong.append(f"{before} to {after} is not cut: {seen!r}")
            if not torch.equal(plain(seen), whole.view(after)):
                wrong.append(f"{before} to {after} with {owners}")
    return wrong


def test_rows_seen_as_rows_of_another_length_stay_cut(pool) -> None:
    assert pool.run(_rows_of_other_lengths, 3) == [[]] * 3


def test_owners_of_rows_of_another_length_are_those_of_their_middles() -> None:
    owners = Owners.zigzag(8, 2)
    again = of_other_rows(owners, 9, 8)
    assert again.size == 9 and again.array.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert runs_of(again, 0) == ((0, 2), (7, 9))


def test_tables_of_positions_are_held_in_shares_and_made_whole_without_sending() -> None:
    ledger = Ledger()
    axis = Axis("cp", 2, 1, None, (0, 1), rehearsal=ledger)
    owners = Owners.zigzag(10, 2)
    words = Part(torch.zeros(3, 5), 1, owners, axis)
    with CutRanges({10: words}, dealt_beside):
        at = torch.arange(10)
        assert not isinstance(torch.arange(9), Part)
        cos = (at[None, :, None] * torch.tensor([0.5, 0.25])).cos()
        assert not isinstance(whole_table(cos), Part)
    assert isinstance(cos, Part) and cos.may_gather and tuple(cos.local.shape) == (1, 5, 2)
    expected = (torch.arange(10)[None, :, None] * torch.tensor([0.5, 0.25])).cos()
    assert torch.equal(gather(cos), expected) and torch.equal(whole_table(cos), expected)
    assert torch.equal(cos.local, owners.take(expected, 1, 1))
    pairs = at[:, None] - at
    assert not isinstance(pairs, Part) and torch.equal(pairs, torch.arange(10)[:, None] - torch.arange(10))
    assert not ledger.entries
    seen = at.view(1, 10)
    at += 3
    assert whole_table(at) is None and whole_table(seen) is None  # what was written into is not made again
    gather(seen)
    assert ledger.entries


def test_what_ranks_gather_is_compared_by_its_size() -> None:
    """An exchange differs from rank to rank, in what each sends; a sum of other sizes would end the ranks."""
    from shardwise.engine.collectives_met import Collectives

    def met(*calls: tuple[str, str, int]) -> tuple[int, ...]:
        ledger = Collectives()
        for op, axis, size in calls:
            ledger.record("activations", op, axis, size, 2, None)
        return ledger.numbers(["domain0", "domain1"])

    first = met(("all_to_all", "domain0", 8), ("all_gather", "domain0", 64), ("all_reduce", "domain1", 32))
    assert met(("all_to_all", "domain0", 16), ("all_gather", "domain0", 64), ("all_reduce", "domain1", 32)) == first
    other = met(("all_to_all", "domain0", 8), ("all_gather", "domain0", 48), ("all_reduce", "domain1", 32))
    assert other[:2] == first[:2] and other[2] != first[2] and other[3] == first[3]
