"""A dozen of the planted bugs; `make test-mutations` plants them all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mutations.bugs import BUGS
from mutations.plant import Bug, NotPlanted, planted
from mutations.published import PUBLISHED
from mutations.run import try_bug
from shardwise.ranks import RankPool

DOZEN = (
    "gradients of the last step stay in the bucket",
    "only the first bucket's weights are published",
    "updated weights are not published",
    "a weight without dims is not sent to the other ranks",
    "running statistics are updated on rank 0 alone",
    "rank 1's optimizer forgets its state",
    "a rank of zero=1 forgets its optimizer's state",
    "the norm counts replicas",
    "an extra term weighs by this rank's tokens",
    "masks follow the place on the rank",
    "a tied weight's gradient lacks the other stage's share",
    "an ignored class gets a gradient where classes are cut",
    "experts are not summed over those that hold the same",
)
BY_NAME = {bug.name: bug for bug in BUGS}


@pytest.mark.parametrize("name", DOZEN)
def test_a_planted_bug_is_caught(name: str, pool: RankPool) -> None:
    found = try_bug(BY_NAME[name], pool)
    assert found.fine, found


@pytest.mark.long
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.name not in DOZEN], ids=lambda bug: bug.name)
def test_every_planted_bug_is_caught(bug: Bug, pool: RankPool) -> None:
    found = try_bug(bug, pool)
    assert found.fine, found


def test_every_bug_has_a_place_and_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(BUGS)
    assert PUBLISHED.keys() <= BY_NAME.keys() and len(PUBLISHED) >= 25
    for bug in BUGS:
        with planted(bug) as ran:
            assert ran() == 0
    with pytest.raises(NotPlanted, match="stands 0 times"), planted(replace(BUGS[0], old="what is not there")):
        pass
    misspelt = replace(BY_NAME[DOZEN[1]], old="pending = []", new="pending = lost([])")
    with pytest.raises(NotPlanted, match="the name lost"), planted(misspelt):
        pass


def test_a_change_that_is_no_bug_and_one_that_never_runs_are_not_caught(pool: RankPool) -> None:
    kind = replace(BY_NAME[DOZEN[1]], old="pending = []", new="pending = list()")
    harmless = try_bug(kind, pool)
    assert harmless.ran and not harmless.caught and not harmless.fine
    unmet = try_bug(
        replace(BY_NAME["a tied weight's gradient lacks the other stage's share"], plan="dp_replicate=2"), pool
    )
    assert not unmet.ran and not unmet.fine
