"""Operations along cut positions that have no rule: done whole on every rank, which is told, as one process does."""

from __future__ import annotations

import pytest
import torch

from shardwise import verify
from shardwise.comm import Axis
from shardwise.part import Sum, plain


@pytest.mark.parametrize("plan", ["cp=3", "cp=2,cp_ulysses=2", "cp=2,tp=2,sp=true"])
@pytest.mark.parametrize("task", ["chosen", "solved"])
def test_operations_without_a_rule_equal_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"ruleless_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize("plan", ["cp=2", "tp=2", "dp_replicate=2"])
def test_an_operation_of_another_library_is_not_taken_for_aten_s(pool, plan: str) -> None:
    found = verify("ruleless_tasks:named_alike", plan, pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize("plan", ["cp=3", "cp_ulysses=2", "cp=2,cp_ulysses=2"])
@pytest.mark.parametrize("task", ["learned_keys", "learned_values"])
def test_attention_of_cut_keys_and_whole_values(pool, task: str, plan: str) -> None:
    found = verify(f"ruleless_tasks:{task}", plan, pool=pool, steps=1)
    assert found.parity and "gathered" not in found.text(), found.text()


def test_what_is_gathered_where_choices_are_read_is_told(pool) -> None:
    told = verify("ruleless_tasks:chosen", "cp=2", pool=pool).text()
    assert "read at places of tiles is gathered over cp=2: in a forward a rank receives" in told, told


def test_a_copy_that_overlaps_in_memory_is_seen_in_other_shapes() -> None:
    windows = torch.arange(24.0).as_strided((2, 3, 4), (4, 2, 1))
    read = Sum.read_only(windows, Axis("cp", 2, 0, None, (0, 1)))
    assert torch.equal(plain(read.view(6, 4)), windows.reshape(6, 4))


def test_draws_among_cut_positions_are_refused(pool) -> None:
    found = verify("ruleless_tasks:drawn", "cp=2", pool=pool)
    assert not found.parity and "multinomial" in found.refused, found.text()
