"""Gathers that travel together: what each comes to is what it comes to alone, in fewer collectives."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.comm import Gathering, Ledger, Observer, everybody, gathered_alone, gathered_together, ready, together

DTYPES = (torch.float64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.int64)


def _row(rank: int, place: int) -> torch.Tensor:
    return (torch.arange(place * 3 % 7) * (rank + 2) + place).to(DTYPES[place % len(DTYPES)])


def _twice(rank: int, place: int) -> Gathering:
    """Asks for rows, then for as many again, each twice."""
    first = yield _row(rank, place), everybody()
    second = yield _row(rank, place).repeat(2), everybody()
    return place, first, second


def _all(rank: int) -> Iterator[Gathering]:
    for place in range(12):
        yield _twice(rank, place)
        yield ready(place)


def _calls(ledger: Ledger) -> int:
    return sum(row["calls"] for row in ledger.rows())


def gathers() -> tuple[list, list, int, int]:
    rank = everybody().index
    few, more = Ledger(), Ledger()
    with Observer(few, {}):
        found = list(gathered_together(_all(rank)))
    alone = [gathered_alone(one) for one in _all(rank)]
    together.MOST_BYTES, most = 64, together.MOST_BYTES
    try:
        with Observer(more, {}):
            again = list(gathered_together(_all(rank)))
    finally:
        together.MOST_BYTES = most
    for one, other in zip(found, again, strict=True):
        assert isinstance(one, int) or all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))
    return found, alone, _calls(few), _calls(more)


def test_what_travels_together_is_what_travels_alone(pool) -> None:
    for found, alone, few, more in pool.run(gathers, 3):
        for place, (one, other) in enumerate(zip(found, alone, strict=True)):
            if place % 2:
                assert one == other == place // 2
                continue
            wanted = torch.stack([_row(rank, place // 2) for rank in range(3)])
            for found_one in (one, other):
                assert found_one[0] == place // 2 and found_one[1].dtype == wanted.dtype
                assert torch.equal(found_one[1], wanted) and torch.equal(found_one[2], wanted.repeat(1, 2))
        assert few == 2 < more
