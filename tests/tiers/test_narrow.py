"""Codes: what comes back, what is bit-equal, what draws do, and that nothing moves that is coded twice."""

from __future__ import annotations

import pytest
import torch

from shardwise.tiers import narrow
from shardwise.tiers.element_draws import draws
from shardwise.tiers.narrow import BLOCK, BLOCKWISE, CODECS, HALVES, ROUNDED, Draw


def drawn(key: int) -> Draw:
    return lambda first, last: draws(key, torch.empty(last, device="meta"), first, last, torch.device("cpu"))


def there_and_back(name: str, values: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
    codec, out = CODECS[name], torch.empty_like(values)
    memory = torch.full((codec.size(values.numel()),), 0xAB, dtype=torch.uint8)
    codec.put(values, memory, draw)
    codec.take(memory, out)
    return out


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
def test_values_come_back_and_stay(name: str, count: int) -> None:
    """Within a code's step of the largest in their block, of the last partial block too; a second time as they are."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 10.0 ** -(torch.arange(count) % 5)
    for draw in (None, drawn(1)):
        back = there_and_back(name, values, draw)
        largest = torch.stack([part.abs().max() for part in values.split(BLOCK)]).repeat_interleave(BLOCK)[:count]
        step = 2.0**-7 * values.abs() if name == "bf16" else torch.maximum(1.8 * values.abs(), 3e-6 * largest)
        assert ((back - values).abs() <= step).all()
        assert ((back - values).abs() <= 0.015 * largest).all()
        assert torch.equal(there_and_back(name, back), back)


def test_a_block_has_its_own_scale() -> None:
    values = torch.cat([torch.full((BLOCK,), 1e6), torch.full((BLOCK,), 1e-6), torch.full((7,), -3.0)])
    assert torch.equal(there_and_back("8bit", values), values)


@pytest.mark.parametrize("name", CODECS)
def test_draws_keep_the_mean(name: str) -> None:
    """A value between two codes lies on each of them as often as keeps the mean; to the nearest it would not move."""
    values = torch.full((200_000,), 1 + 2.0**-10)
    values[::BLOCK] = 4.0 if name == "8bit" else values[1]
    rest = torch.ones(200_000, dtype=torch.bool)
    rest[::BLOCK] = name == "bf16"
    back = there_and_back(name, values, drawn(7))[rest]
    assert len(set(back.tolist())) == 2
    assert float(back.double().mean()) == pytest.approx(1 + 2.0**-10, rel=3e-5)
    assert len(set(there_and_back(name, values)[rest].tolist())) == 1


def test_what_is_positive_is_never_nothing() -> None:
    """A second moment of 0 beside a gradient that is none would be a step of 1 / eps."""
    values = torch.full((BLOCK,), 1e-12)
    values[0] = 1.0
    assert (there_and_back("8bit", values, drawn(3)) > 0).all()
    values[1] = 0.0
    assert there_and_back("8bit", values, drawn(3))[1] == 0
    assert (there_and_back("8bit", torch.zeros(300), drawn(3)) == 0).all()


@pytest.mark.parametrize("name", CODECS)
def test_what_is_no_number_shows(name: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(600)
        values[400] = bad
        back = there_and_back(name, values, drawn(2))
        assert not back[400].isfinite() and back[:256].isfinite().all() and back[512:].isfinite().all()


def test_codes_are_255_distinct_values_up_to_1() -> None:
    for signed in (False, True):
        table = narrow.table(signed)
        assert len(set(table.tolist())) == 255 and (table.diff() > 0).all() and table.max() == 1
        assert not signed or torch.equal(table, -table.flip(0))
        assert not signed or (table[narrow.MIDDLE] == 0 and len(table) == narrow.VALUES)


def test_a_code_is_a_neighbour() -> None:
    """Of every number, against a search: the nearest without a draw, one of both with it."""
    numbers = torch.cat([torch.rand(600, generator=torch.Generator().manual_seed(3)) ** 8, narrow.sizes(False)])
    numbers = torch.cat([numbers, numbers.nextafter(torch.tensor(0.0)), numbers.nextafter(torch.tensor(1.0))])
    for signed in (False, True):
        table, rows = narrow.table(signed), numbers.view(-1, 1).repeat(1, BLOCK)
        rows[:, 1], rows[:, 2] = 1.0, -1.0 if signed else 0.5
        above = torch.searchsorted(table, numbers).clamp(max=len(table) - 1)
        pair = torch.stack([table[(above - 1).clamp(min=0)], table[above]])
        nearest = (pair - numbers).abs().amin(0)
        back = there_and_back("8bit", rows.flatten()).view(-1, BLOCK)[:, 0]
        none = (numbers > 0) & (numbers < table[table > 0].min()) & (not signed)  # which never become 0
        assert torch.equal((back - numbers).abs()[~none], nearest[~none]) and (back[none] > 0).all()
        drawn_back = there_and_back("8bit", rows.flatten(), drawn(4)).view(-1, BLOCK)[:, 0]
        assert ((drawn_back == pair[0]) | (drawn_back == pair[1])).all()


def all_kinds() -> torch.Tensor:
    """Returns masters of every lower half that matters above every kind of upper one, of both signs."""
    upper = torch.tensor([0, 1, 2, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x4249], dtype=torch.int32)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = ((upper << 16).unsqueeze(1) | lower).flatten()
    return torch.cat([bits, bits | -(2**31)]).view(torch.float32)


@pytest.mark.parametrize("start", [0, 1, 13])
def test_masters_come_back_to_the_bit(start: int) -> None:
    random = torch.randint(-(2**31), 2**31 - 1, (10_000,), generator=torch.Generator().manual_seed(0))
    masters = torch.cat([all_kinds(), random.to(torch.int32).view(torch.float32)])
    masters = masters[~masters.isnan()]
    memory = torch.full((HALVES.size(masters.numel()),), 0xAB, dtype=torch.uint8)
    HALVES.put(masters, memory)
    out = torch.empty_like(masters[start:])
    HALVES.take(memory, masters.numel(), masters.to(torch.bfloat16)[start:], out, start)
    assert torch.equal(out.view(torch.int32), masters[start:].view(torch.int32))


def test_a_master_that_is_no_number_stays_none() -> None:
    masters = torch.tensor([0x7FC00000, 0x7F800001, 0x7FC08000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    memory, out = torch.empty(HALVES.size(4), dtype=torch.uint8), torch.empty(4)
    HALVES.put(masters, memory)
    HALVES.take(memory, 4, masters.to(torch.bfloat16), out)
    assert out.isnan().all()


def test_chunks_are_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    whole = {name: there_and_back(name, values, drawn(5)) for name in CODECS}
    monkeypatch.setattr(narrow, "CHUNK", 1024)
    for name, expected in whole.items():
        assert torch.equal(there_and_back(name, values, drawn(5)), expected)
    memory, out = torch.empty(HALVES.size(3000), dtype=torch.uint8), torch.empty(3000)
    HALVES.put(values, memory)
    HALVES.take(memory, 3000, values.to(torch.bfloat16), out)
    assert torch.equal(out, values)


def test_bytes() -> None:
    assert (ROUNDED.size(1000), BLOCKWISE.size(1000), HALVES.size(1000)) == (2000, 1016, 2125)
