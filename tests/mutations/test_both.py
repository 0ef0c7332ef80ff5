"""Bugs on both sides of a proof: some here, all of them by `make test-mutations`."""

from __future__ import annotations

import pytest

from mutations.both import BOTH, try_both
from mutations.combined import COMBINED
from mutations.held_out import HELD_OUT
from mutations.held_out_fifth import HELD_OUT_FIFTH, LEFT_OUT
from mutations.held_out_fourth import HELD_OUT_FOURTH
from mutations.held_out_second import HELD_OUT_SECOND
from mutations.held_out_third import HELD_OUT_THIRD
from mutations.plant import Bug, planted
from shardwise.ranks import RankPool

BY_NAME = {bug.name: bug for bug in BOTH}
QUICK = ("later rows of a causal block are masked as the first",)


def test_every_bug_on_both_sides_has_a_place_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(BOTH) >= 80
    held_out = (*HELD_OUT, *HELD_OUT_SECOND, *HELD_OUT_THIRD, *HELD_OUT_FOURTH, *HELD_OUT_FIFTH, *LEFT_OUT)
    for bug in (*BOTH, *held_out, *COMBINED):
        with planted(bug) as ran:
            assert ran() == 0


@pytest.mark.parametrize("name", QUICK)
def test_one_that_small_sizes_alone_meet_is_caught(name: str, pool: RankPool) -> None:
    caught, ran = try_both(BY_NAME[name], pool)
    assert caught and ran


@pytest.mark.long
@pytest.mark.parametrize("bug", [bug for bug in BOTH if bug.name not in QUICK], ids=lambda bug: bug.name)
def test_every_one_runs(bug: Bug, pool: RankPool) -> None:
    """Whether it is caught is told by tests/mutations/both.py: a few are not, and count against the proof."""
    assert try_both(bug, pool, thorough=True)[1] > 0
