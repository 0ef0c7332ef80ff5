"""Sizes at which the code takes another path: a proof meets both sides."""

from __future__ import annotations

from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import pytest
from mutations.plant import Bug, BuggyPool

from shardwise import verify
from shardwise.proof.sizes import AS_THEY_ARE, SIZES, PathSize, sizes_of, small_sizes
from shardwise.ranks import RankPool


def _reads(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(isinstance(const, CodeType) and _reads(const, name) for const in code.co_consts)


def _codes(module: Any) -> list[CodeType]:
    things = [thing for thing in vars(module).values() if getattr(thing, "__module__", "") == module.__name__]
    things += [part for thing in things if isinstance(thing, type) for part in vars(thing).values()]
    things = [getattr(thing, "__func__", getattr(thing, "fget", thing)) for thing in things]
    return [thing.__code__ for thing in things if isinstance(thing, FunctionType)] + [
        thing.__wrapped__.__code__ for thing in things if hasattr(thing, "__wrapped__")]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_each_size_is_read_where_it_stands_when_it_is_needed(size: PathSize) -> None:
    module = import_module(f"shardwise.{size.module}")
    before = getattr(module, size.name)
    assert any(_reads(code, size.name) for code in _codes(module))
    with sizes_of(0):
        assert getattr(module, size.name) == before
    with small_sizes():
        assert getattr(module, size.name) == size.small != before
    assert getattr(module, size.name) == before


def test_sizes_that_proofs_meet_as_they_are_stand_where_they_are_said_to() -> None:
    for module, name, _ in AS_THEY_ARE:
        assert isinstance(getattr(import_module(f"shardwise.{module}"), name), int)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_convolution_that_overlaps_its_halo_wrongly_is_found(wrong: bool, pool: RankPool) -> None:
    bug = Bug("", "shardwise.part.tiles.overlap:_Overlapped.forward", "strips = halo.wait()",
              "strips = [strip if strip is None else strip * 1.1 for strip in halo.wait()]", "", "")  # fmt: skip
    parity = verify("domain_tasks:forces", "domain=2", pool=BuggyPool(pool, bug) if wrong else pool, timeout_s=100)
    assert parity.equal != wrong, parity.text()


@pytest.mark.long  # test_both plants the same, and test_mock_device runs the task as it is
@pytest.mark.parametrize("wrong", [False, True])
def test_a_causal_block_whose_later_rows_are_masked_wrongly_is_found(wrong: bool, pool: RankPool) -> None:
    bug = Bug("", "shardwise.parallel.sequence.block_attention:_scores", ".tril(first)", ".tril(0)", "", "")
    ranks = BuggyPool(pool, bug) if wrong else pool
    parity = verify("shardwise.models.tasks:decoder", "cp=2", pool=ranks, timeout_s=100)
    assert parity.equal != wrong, parity.text()
