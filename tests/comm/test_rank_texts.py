"""Texts between ranks: what one rank raises in the place of all is raised on all."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm import everybody, of_first
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankPool

KINDS = {"input": InputError, "plan": RefusedPlan, "other": ValueError}


def raised(kind: str) -> tuple[str, str]:
    """On a rank: the class and the text of what it meets."""

    def compute() -> None:
        raise KINDS[kind]("no such thing")

    try:
        of_first(compute, everybody(), torch.device("cpu"))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_waits_for_the_first_where_it_raises(kind: str, pool: RankPool) -> None:
    first, second = pool.run(raised, 2, kind, timeout_s=60)
    assert first == (KINDS[kind].__name__, "no such thing")
    others = RunError if kind == "other" else KINDS[kind]
    told = "rank 0: ValueError: no such thing" if kind == "other" else "no such thing"
    assert second == (others.__name__, told)
