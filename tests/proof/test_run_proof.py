"""`verify CONFIG.toml`: what `train` does with a configuration, against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mutations.bugs import RUNS
from mutations.plant import Bug, BuggyPool
from mutations.run import try_bug
from run_tasks import noisy

from shardwise import Plan, verify
from shardwise.config import Given, load
from shardwise.errors import RunError
from shardwise.proof.own_precision import plain_steps
from shardwise.proof.settings import Settings
from shardwise.proof.verify_run import verify_run
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task

CONFIG = Path(__file__).parents[1] / "mutations" / "run.toml"
NARROW = CONFIG.with_name("narrow.toml")
BY_NAME = {bug.name: bug for bug in RUNS}


def proof(plan: str, pool: RankPool, task: str = "run_tasks:classified", **values: Any) -> Any:
    given = [Given("plan", plan, "the test"), Given("task.name", task, "the test")] + [
        Given(f"train.{key}", value, "the test") for key, value in values.items()
    ]
    return verify_run(load(CONFIG, values=given), pool=pool, timeout_s=60)


@pytest.mark.parametrize(
    ("plan", "values"),
    [
        ("dp_replicate=2", {"workers": 1}),
        ("dp_shard=2,zero=3,accumulate=2", {}),
        ("dp_shard=3,zero=2", {"eval_samples": 0}),
        ("tp=2", {"eval_every": 0}),
    ],
)
def test_a_run_equals_a_plain_loop(plan: str, values: dict, pool: RankPool) -> None:
    parity = proof(plan, pool, **values)
    assert parity.parity, parity.text()
    assert ("eval_metric/accuracy" in parity.text()) == ("eval_every" not in values)
    assert len([name for name in parity.parameter_error if not name.startswith("checkpoint's")]) == 22
    assert len(parity.parameter_error) == 41 and len(parity.optimizer_error) == 16  # with the checkpoint's
    assert "weights at the end and their averages" in parity.text()


@pytest.mark.parametrize("task", ["run_tasks:remembered", "run_tasks:scale_free"])
def test_no_false_alarm(task: str, pool: RankPool) -> None:
    given = [Given("plan", "dp_replicate=2", "the test"), Given("task.name", task, "the test")]
    parity = verify_run(load(CONFIG.with_name("scaled.toml"), values=given), pool=pool, timeout_s=60)
    assert parity.parity, parity.text()


def test_what_a_forward_makes_in_float32_is_float64_in_the_look_too(pool: RankPool) -> None:
    parity = proof("dp_replicate=2", pool, "run_tasks:timed", eval_every=0)
    assert parity.parity, parity.text()


# --- the source itself is read: its order, its tiles


def planted(where: str, old: str, new: str, plan: str, task: str, pool: RankPool) -> Any:
    return proof(plan, BuggyPool(pool, Bug("", where, old, new, task, plan)), task=task, ema_decay=None)


def test_the_order_that_a_source_defines_is_visited(pool: RankPool) -> None:
    parity = proof("dp_replicate=2", pool, task="run_tasks:blended")
    assert parity.parity, parity.text()
    assert "batches at 0, 4092, 8192, 9000, 13506" in parity.text()


@pytest.mark.parametrize(("old", "new"), [
    ("int(block) * np.asarray(counts)", "0 * np.asarray(counts)"),
    ("np.asarray(base) + int(block)", "np.asarray(base) + min(int(block), 1)"),
    ("whole[source[here]] + before[places[here]]", "whole[source[here]] + places[here]"),
], ids=["each block starts anew", "the third block is the second", "places are taken for numbers"])  # fmt: skip
def test_a_bug_in_a_blend_is_found(old: str, new: str, pool: RankPool) -> None:
    parity = planted("shardwise.data.blend:BlendOrder._own", old, new, "dp_replicate=2", "run_tasks:blended", pool)
    assert not parity.equal


def test_tiles_are_read_as_a_run_reads_them(pool: RankPool) -> None:
    parity = proof("domain=2", pool, task="run_tasks:tiled", ema_decay=None)
    assert parity.parity, parity.text()


def test_a_tile_read_a_row_too_early_is_found(pool: RankPool) -> None:
    late = ("(start, start + count)", "(start - (axis is not None and axis.index == 1), start + count - "
            "(axis is not None and axis.index == 1))")  # fmt: skip
    parity = planted("shardwise.part.positions:Positions.region", *late, "domain=2", "run_tasks:tiled", pool)
    assert not parity.equal


def test_a_run_in_which_every_step_overflows_is_not_proven(pool: RankPool) -> None:
    parity = proof("dp_replicate=2,precision=fp16", pool, task="run_tasks:overflowing", ema_decay=None)
    text = parity.text()
    assert not parity.parity and parity.verdict == "NOT PROVEN", text
    assert "all 10 steps overflowed in one process in fp16" in text


@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2,precision=bf16",
        "dp_shard=2,zero=2,precision=fp16,accumulate=2",
        "dp_shard=2,zero=3,precision=bf16,reduce_dtype=bf16",
        "tp=2,precision=bf16-full",
    ],
)
def test_a_plan_is_no_further_from_one_process_than_its_rounding(plan: str, pool: RankPool) -> None:
    given = [Given("plan", plan, "the test")]
    (second,) = verify_run(load(NARROW, values=given), pool=pool, timeout_s=60).further
    assert second.parity, second.text()
    assert len(second.parameter_error) == 8


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_process_takes_steps_with_batch_norms_in_sixteen_bits(precision: str) -> None:
    task = resolve_task("norm_tasks:normed")
    found = plain_steps(task, Plan(precision=precision), Settings())
    assert found.losses[-1] < found.losses[0]


def test_batches_are_drawn_as_the_task_draws_them(pool: RankPool, tmp_path: Path) -> None:
    """A run on tiles whose batches come from a generator, which in float64 would give other numbers."""
    config = 'plan = "domain=2"\n[task]\nname = "domain_tasks:point_wise"\n[train]\nsteps = 2\n'
    (tmp_path / "run.toml").write_text(config)
    parity = verify_run(load(tmp_path / "run.toml"), steps=2, pool=pool, timeout_s=60)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_a_dataset_and_its_collate_function_draw_is_one_process_s(workers: int, pool: RankPool) -> None:
    parity = proof("dp_shard=2,zero=2,accumulate=2", pool, workers=workers, task="run_tasks:noisy")
    assert parity.parity, parity.text()


def test_nor_does_a_proof_of_the_task_alone_see_other_draws(pool: RankPool) -> None:
    parity = verify(noisy(), "dp_replicate=2", pool=pool, timeout_s=60)
    assert parity.parity, parity.text()


def test_what_one_process_cannot_compute_is_not_proven(pool: RankPool) -> None:
    parity = proof("dp_replicate=2,precision=fp16", pool, task="run_tasks:solved")
    assert parity.equal and not parity.parity
    assert "one process cannot run in fp16: NotImplementedError" in parity.text()


@pytest.mark.parametrize(
    "name",
    [
        "the average takes the weights for itself",
        "evaluations run in training mode",
        "the schedule is stepped twice",
        "every epoch has the first one's order",
        "metrics go on from step to step",
        "the loss scale is not divided out",
    ],
)
def test_bugs_beside_the_step_are_caught(name: str, pool: RankPool) -> None:
    found = try_bug(BY_NAME[name], pool)
    assert found.fine, found


def test_a_proof_that_sees_no_epoch_s_end_says_so(pool: RankPool) -> None:
    given = [Given("plan", "dp_replicate=2", "the test")]
    parity = verify_run(load(CONFIG, values=given), steps=2, pool=pool, timeout_s=60)
    assert parity.parity and "do not reach the end of the first epoch" in parity.text()


# --- checkpoints by meaning: labels that are wrong, and that the plan which wrote them would read back as they were


PIECES = "shardwise.checkpoint.holdings:"


@pytest.mark.parametrize(("where", "old", "new", "plan"), [
    ("share_of", "cut.owners.indices(axis.index)", "cut.owners.indices(axis.size - 1 - axis.index)", "tp=2"),
    ("trained_piece", "start = view.storage_offset()", "start = share.numel() - view.numel() - view.storage_offset()",
     "dp_shard=2,zero=2"),
    ("averages", "yield Holding(f\"ema/{name}\", pieces[name][0], average)",
     "yield Holding(f\"ema/{name}\", *pieces[name])", "dp_replicate=2"),
], ids=["halves of tp are swapped", "pieces of zero are dealt backwards", "weights stand for averages"])  # fmt: skip
def test_a_checkpoint_with_wrong_labels_is_found(where: str, old: str, new: str, plan: str, pool: RankPool) -> None:
    parity = proof(plan, BuggyPool(pool, Bug("", PIECES + where, old, new, "", plan)), eval_every=0)
    assert not parity.equal
    wrong = [name for kind in ("parameter", "optimizer") for name, error in parity.errors(kind).items()
             if error > parity.bar(kind, name)]  # fmt: skip
    assert (wrong or parity.differences) and all(name.startswith("checkpoint's") for name in wrong)


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_that_are_labelled_as_the_other_ranks_are_found(wrong: bool, pool: RankPool, tmp_path: Path) -> None:
    config = tmp_path / "experts.toml"
    config.write_text('[task]\nname = "shardwise.models.tasks:moe"\n[train]\nsteps = 3\n')
    effective = load(config, values=[Given("plan", "dp_shard=2,ep=2,precision=fp64", "the test")])
    bug = Bug("", f"{PIECES}share_of", "shape[0], engine.state.experts.axis.index",
              "shape[0], 1 - engine.state.experts.axis.index", "", "")  # fmt: skip
    parity = verify_run(effective, pool=BuggyPool(pool, bug) if wrong else pool, steps=3, timeout_s=100)
    assert parity.equal != wrong, parity.text()


def test_a_checkpoint_that_goes_on_elsewhere_is_found(pool: RankPool) -> None:
    old, new = '"position": self._position', '"position": self._position + 8'
    bug = Bug("", "shardwise.data.loader:Loader.state_dict", old, new, "", "")
    parity = proof("dp_replicate=2", BuggyPool(pool, bug), eval_every=0)
    assert any("samples read" in told for told in parity.differences)


# --- an optimizer with a mode evaluates, and writes, other weights than it trains

MODES = """
task.name = "run_tasks:averaged"
[train]
steps = 6
eval_every = 2
keep_best = true
"""


def proof_of_modes(plan: str, pool: Any, folder: Path) -> Any:
    (folder / "modes.toml").write_text(MODES)
    given = [Given("plan", plan, "the test")]
    return verify_run(load(folder / "modes.toml", values=given), pool=pool, timeout_s=60)


MORE = [pytest.param(plan, marks=pytest.mark.long) for plan in ("tp=2", "dp_shard=2,zero=3")]


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=2", *MORE])
def test_an_optimizer_with_a_mode_evaluates_and_writes_its_average(plan: str, pool: RankPool, tmp_path: Path) -> None:
    parity = proof_of_modes(plan, pool, tmp_path)
    assert parity.parity, parity.text()


@pytest.mark.long
@pytest.mark.parametrize(("where", "old", "new"), [
    ("shardwise.step.optimizer_modes:switch", "state.technique.publish()", "pass"),
    ("shardwise.engine.engine:Engine.evaluate", "evaluation_weights(self.state)", "self.state.hooks.inside('reduce')"),
    ("shardwise.step.optimizer_modes:enter_training", "optimizer.train()", "optimizer.eval()"),
], ids=["not published", "not entered", "not in training"])  # fmt: skip
def test_a_bug_in_a_mode_is_found(where: str, old: str, new: str, pool: RankPool, tmp_path: Path) -> None:
    bug = Bug("", where, old, new, "run_tasks:averaged", "dp_shard=2,zero=2")
    try:
        assert not proof_of_modes("dp_shard=2,zero=2", BuggyPool(pool, bug), tmp_path).equal
    except RunError as error:
        assert "a step outside of training" in str(error) or "which hold the same" in str(error)
