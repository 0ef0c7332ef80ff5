"""Scripts that are wrong on ranks in one thing, of 165 kinds: each is NOT EQUAL or refused; made right it is EQUAL."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_kinds import KINDS, script

from shardwise.proof.outcome import Parity
from shardwise.ranks import RankPool
from shardwise.scripts.proof.verify_script import verify_script

QUICK = (
    "unequal_tokens", "class_weights", "sum_without_weight", "mean_with_weight", "dice", "contrastive", "queue_of_keys",
    "centers_of_classes", "noise_by_numpy", "workers_that_draw", "rate_by_samples_seen", "written_on_one_rank",
    "statistics_of_an_average", "model_takes_the_mean_off", "code_book", "draws_behind_the_first_batch",
    "output_as_long_as_the_longest", "penalty_before_the_first_forward", "views_side_by_side", "head_made_anew",
    "group_added_later", "norm_behind_its_own_backward", "average_in_a_hook", "written_in_a_hook",
    "clip_in_a_hook_of_the_optimizer",
)  # fmt: skip
# the text is wrong in one process as well, which --against the script as it was tells
ALIKE = ("divided_twice",)
# what prepare makes right by itself
MADE_RIGHT = ("squeezed_rows", "noise_by_its_own_generator", "hook_on_a_hidden_state", "workers_that_draw",
              "clip_in_a_hook_of_the_optimizer", "average_in_a_hook", "written_in_a_hook",
              "augmented_from_the_second_epoch", "marks_on_weights", "forwards_are_counted")  # fmt: skip
# what no weight follows within the steps of a proof, or follows under some plans alone
BESIDE = (
    "counted_right", "rate_by_own_held_out_samples", "evaluated_on_one_rank", "saved_on_one_rank", "replayed_samples",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where little lies: each run of a proof copies the present folder, which is the whole repository."""
    monkeypatch.chdir(tmp_path)


def prove(name: str, plan: str, pool: RankPool, folder: Path, *, right: bool) -> Parity:
    path = folder / f"{name}.py"
    path.write_text(script(name, plan, right=right))
    return verify_script(path, plan=plan, pool=pool, timeout_s=200)


CASES = [
    pytest.param(name, plan, marks=() if name in QUICK and plan == kind.plans[0] else pytest.mark.long)
    for name, kind in KINDS.items()
    for plan in kind.plans
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_wrong_script_is_not_equal(name: str, plan: str, pool: RankPool, tmp_path: Path) -> None:
    parity = prove(name, plan, pool, tmp_path, right=False)
    assert name in BESIDE or parity.parity == (name in (*ALIKE, *MADE_RIGHT)), parity.text()


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_made_right_it_is_equal(name: str, plan: str, pool: RankPool, tmp_path: Path) -> None:
    parity = prove(name, plan, pool, tmp_path, right=True)
    assert parity.parity or parity.refused, parity.text()
