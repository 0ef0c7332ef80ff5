"""Runs that lose a rank go on by themselves: the same bits at the end, the samples each once, and a journal."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, STEPS, losses_of, undisturbed, weights_of

import shardwise
from shardwise.checkpoint import publish
from shardwise.checkpoint.replicas import ReplicaCheck, verdict
from shardwise.digest import bits_hash
from shardwise.engine.weights_file import WeightsFile
from shardwise.errors import RefusedPlan, RunError
from shardwise.guard.records import RankRecord
from shardwise.layout import Plan
from shardwise.layout.elastic import smaller
from shardwise.models import tasks
from shardwise.observe.peak_memory import imbalance
from shardwise.testing import faults
from shardwise.testing.faults import Fault
from shardwise.training import restart
from shardwise.training.replay import places
from shardwise.training.stragglers import Stragglers

RESUMED: dict[str, Any] = {**SMALL, "checkpoint_every": 3, "restarts": 1, "checkpoint_background": False}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(restart, "FIRST_WAIT_S", 0.05)
    return tmp_path


def journal_of(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_no_bit(here: Path, capfd: Any) -> None:
    plan = "dp_shard=2,zero=1"
    losses, weights = undisturbed(plan)
    with faults.injected(Fault("kill", rank=1, step=5, at="update")):
        run = shardwise.train("digits", plan, **RESUMED)
    assert losses_of(run) == losses and weights_of(run.folder) == weights
    first, second = journal_of(run)
    assert (first["reason"], first["rank"], first["reached_step"]) == ("died", 1, 5)
    assert first["saved_step"] == 3 and first["lost_steps"] == 2 and "died of SIGKILL" in first["what"]
    assert (second["reason"], second["from_step"], second["lost_steps"]) == ("done", 3, 0)
    times = [one["seconds"] + one["input_seconds"] for one in run.metrics if "seconds" in one]
    for entry, kept in ((first, times[:3]), (second, times[3:])):  # five steps were taken first, and three kept
        assert entry["goodput"] == pytest.approx(sum(kept) / entry["seconds"], rel=0.01)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["attempts"], summary["lost_steps"]) == (2, 2) and 0 < summary["goodput"] <= 1
    assert "going on from step 3" in capfd.readouterr().err
    assert "died of SIGKILL" in (run.folder / "error-attempt1.log").read_text()


PLANS = ("dp_shard=2,zero=2", "dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2,microbatches=2", "dp_shard=3,zero=1",
         "dp_replicate=2,dp_shard=2")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_kills_of_any_rank_at_any_step_and_point(seed: int, here: Path) -> None:
    rng = random.Random(seed)
    plan = PLANS[seed % len(PLANS)]
    fault = Fault("kill", rank=rng.randrange(Plan.parse(plan).world_size), step=rng.randrange(STEPS),
                  at=rng.choice(["input", "forward", "reduce", "update"]))  # fmt: skip
    losses, weights = undisturbed(plan)
    with faults.injected(fault):
        run = shardwise.train("digits", plan, **{**RESUMED, "checkpoint_background": seed % 2 == 0})
    assert losses_of(run) == losses and weights_of(run.folder) == weights, fault
    assert [entry["reason"] for entry in journal_of(run)] == ["died", "done"]


SOAK = int(os.environ.get("SHARDWISE_SOAK", "20"))
EACH = 5  # faults of one run
DEADLINE_S = float(os.environ.get("SHARDWISE_SOAK_DEADLINE", "6"))
ENDING = ("kill", "exit", "segfault", "raise", "stop", "lock", "sleep", "disconnect", "nan")
OF_A_FILE = ("eio", "enospc", "kill")
NORMS = "run_tasks:classified"  # batch norms: buffers that all ranks hold alike
# (task, plan) -> how many of 20 faults, what may flip there
SOAKED = {
    ("digits", "dp_shard=2,zero=2"): (5, ("flip-weight",)),
    ("digits", "dp_replicate=3"): (4, ("flip-weight", "flip-optimizer")),
    (NORMS, "dp_replicate=3"): (3, ("flip-weight", "flip-optimizer", "flip-buffer", "flip-buffer")),
    ("digits", "dp_replicate=2,tp=2"): (4, ()),
    ("digits", "dp_shard=2,zero=3"): (2, ()),
    ("digits", "pp=2,dp_shard=2,zero=1,microbatches=2"): (2, ()),
}


def drawn(plan: str, corrupting: tuple[str, ...], steps: list[int], rng: random.Random) -> list[Fault]:
    """A fault at each of these steps, of any kind that the plan can meet, on any rank."""
    found = []
    for step in steps:
        rank = rng.randrange(Plan.parse(plan).world_size)
        if step in range(5, 40, 5) and rng.random() < 0.5:  # a checkpoint is written
            found.append(Fault(rng.choice(OF_A_FILE), rank=rank, step=step, at="disk", after=rng.randrange(8)))
            continue
        kind = rng.choice(ENDING + corrupting * (step > 0))
        points = ["input", "reduce"] if kind in corrupting else ["input", "forward", "reduce", "update"]
        at = "forward" if kind == "nan" else rng.choice(points)
        found.append(Fault(kind, rank=rank, step=step, at=at, bit=rng.randrange(32)))
    return found


def soaks() -> list[tuple[str, str, int, int]]:
    """(task, plan, which run, its faults) of all runs."""
    found = []
    for (task, plan), (share, _) in SOAKED.items():
        total = -(-SOAK * share // sum(share for share, _ in SOAKED.values()))
        found += [(task, plan, run, min(EACH, total - run * EACH)) for run in range(-(-total // EACH))]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("task", "plan", "run", "count"), soaks())
def test_many_faults_in_one_run(task: str, plan: str, run: int, count: int, here: Path, capsys: Any) -> None:
    """Faults of every kind at random places, one after another in a run of 40 steps: nothing is lost or repeated."""
    rng = random.Random(f"{task} {plan} {run}")
    options = {**SMALL, "steps": 40, "eval_every": 10, "eval_samples": 8}
    if task != "digits":
        del options["config"]
    whole = shardwise.train(task, plan, **options)
    planned = drawn(plan, SOAKED[task, plan][1], sorted(rng.sample(range(40), count)), rng)
    with faults.injected(*planned) as folder:
        soaked = shardwise.train(task, plan, **options, checkpoint_every=5, restarts=2 * count,
                                 step_deadline=DEADLINE_S, check_replicas=1)  # fmt: skip
        assert faults.struck(folder) == count, planned
    assert [record["step"] for record in soaked.metrics if "loss" in record] == list(range(1, 41)), planned
    assert losses_of(soaked) == losses_of(whole) and weights_of(soaked.folder) == weights_of(whole.folder), planned
    capsys.readouterr()
    with capsys.disabled():
        kinds = " ".join(fault.kind for fault in planned)
        sys.stdout.write(
            f"{task}, {plan}, run {run}: {count} faults ({kinds}), {len(journal_of(soaked))} attempts, "
            f"goodput {soaked.summary['goodput']:.2f}\n"
        )


def test_a_run_is_not_started_again_where_that_cannot_help(here: Path) -> None:
    with (
        faults.injected(Fault("raise", rank=0, step=1, at="forward", times=9)),
        pytest.raises(RunError, match="Injected") as caught,
    ):
        shardwise.train("digits", "single", **{**RESUMED, "restarts": 5})
    assert "not started again: two attempts came to the same error in the same step" in caught.value.__notes__
    (folder,) = (here / "runs").iterdir()
    assert len((folder / "journal.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
def test_the_budget_ends(here: Path) -> None:
    with (
        faults.injected(Fault("kill", rank=0, at="forward", times=9)),
        pytest.raises(RunError, match="died of SIGKILL") as caught,
    ):
        shardwise.train("digits", "dp_shard=2", **{**RESUMED, "restarts": 2})
    assert "not started again: its 2 restart(s) are used up (train.restarts)" in caught.value.__notes__
    assert "resume=" in str(caught.value) or "nothing was saved yet" in str(caught.value)


def test_fewer_ranks_go_on_with_smaller_data_degrees(here: Path) -> None:
    """A rank that is lost twice without progress is done without; the samples stay the same."""
    whole = shardwise.train("digits", "single", **{**SMALL, "randomness": "global"})
    with faults.injected(Fault("kill", rank=1, step=0, times=2)):
        options = {**RESUMED, "randomness": "global", "restarts": 2, "min_ranks": 1}
        run = shardwise.train("digits", "dp_replicate=2", **options)
    assert [entry["plan"] for entry in journal_of(run)] == ["dp_replicate=2", "dp_replicate=2", "single"]
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)


def test_a_run_that_is_lost_after_its_last_step_only_ends(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door, calls = sys.modules["shardwise.training.run"], []
    own = door._launched

    def lost(job: Any) -> Any:
        calls.append(own(job))
        if len(calls) == 1:
            raise RunError("lost at the very end")
        return calls[-1]

    monkeypatch.setattr(door, "_launched", lost)
    run = shardwise.train("digits", "single", **{**RESUMED, "eval_every": 4, "eval_samples": 8})
    first, second = calls
    assert (second["loss"], second["eval_loss"]) == (first["loss"], first["eval_loss"])
    assert [entry["from_step"] for entry in journal_of(run)] == [0, STEPS] and len(losses_of(run)) == STEPS
    assert len(publish.scan(run.folder / "checkpoints")) == 2


def test_a_run_that_is_taken_back_and_lost_at_its_start_is_taken_back_again(here: Path, monkeypatch: Any) -> None:
    """What is ahead of the checkpoint that was asked for is no place to go on from."""
    door, calls = sys.modules["shardwise.training.run"], []
    half = shardwise.train("digits", "single", **{**RESUMED, "steps": 6, "restarts": 0})

    def lost_first(job: Any) -> Any:
        calls.append(job.resume)
        if len(calls) == 1:
            raise RunError("lost before it began")
        return door._here(job.with_(launched=False))

    monkeypatch.setattr(door, "_launched", lost_first)
    older = half.folder / "checkpoints" / "step-00000003"
    run = shardwise.train("digits", "single", **{**RESUMED, "steps": 5}, resume=older)
    assert calls == [str(older), str(older)] and [entry["from_step"] for entry in journal_of(run)] == [3, 3]
    assert publish.scan(older.parent)[0].name == "step-00000005" and len(losses_of(run)) == 5


def test_which_plans_can_shrink() -> None:
    for plan, ranks, fewer in [
        ("dp_replicate=4,dp_shard=2,zero=3", 7, "dp_replicate=3,dp_shard=2,zero=3"),
        ("dp_replicate=2,dp_shard=4,zero=2", 5, "dp_shard=4,zero=2"),
        ("dp_shard=2,zero=3", 1, "single"),
        ("dp_shard=4,tp=2,zero=1", 6, "dp_shard=3,zero=1,tp=2"),
        ("dp_shard=4,ep=2,zero=1", 3, "dp_shard=2,zero=1,ep=2"),
    ]:
        assert smaller(Plan.parse(plan), ranks) == Plan.parse(fewer), plan
    for plan, ranks, needed in [("tp=2,pp=2", 3, 4), ("dp_shard=4,ep=2", 1, 2)]:
        with pytest.raises(RefusedPlan, match=f"need {needed} by themselves"):
            smaller(Plan.parse(plan), ranks)


def test_weights_go_elsewhere_where_their_folder_is_full(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = WeightsFile.add

    def full(file: WeightsFile, name: str, tensor: Any) -> None:
        if "runs" in str(file.path) and file._entries:
            raise OSError(28, "No space left on device")
        own(file, name, tensor)

    monkeypatch.setattr(WeightsFile, "add", full)
    monkeypatch.setattr("tempfile.tempdir", str(here / "elsewhere"))
    run = shardwise.train("digits", "single", **SMALL)
    written = Path(run.summary["weights"])
    assert written.parent.parent == here / "elsewhere" and load_file(written)
    assert not list((here / "runs").glob("*/*.partial"))
    assert any("No space left on device" in note and str(written) in note for note in run.summary["notices"])


# --- what ranks hold alike


def flipped(plan: str, culprit: int, what: str) -> str:
    """The message of a comparison after one bit of one rank is another."""
    engine = shardwise.parallelize(tasks.unet_batchnorm(), plan)
    assert engine.task.batch is not None
    check = ReplicaCheck(engine)
    for step in range(2):
        engine.step(engine.task.batch(step))
        check()
    if engine.rank == culprit:
        faults.KINDS[what](Fault(what, bit=3), engine.state)
    try:
        check()
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "what", "told"),
    [("dp_replicate=3", "flip-weight", "on rank 1: the other ranks agree"),
     ("dp_replicate=3", "flip-optimizer", "on rank 1: the other ranks agree"),
     ("dp_shard=3,zero=2", "flip-buffer", "on rank 1: the other ranks agree"),
     ("dp_shard=3,zero=1", "flip-weight", "on rank 1: the other ranks agree"),
     ("dp_replicate=2,dp_shard=2,zero=3", "flip-weight", "two cannot tell which is right")],
)  # fmt: skip
def test_one_bit_of_one_replica_is_found(plan: str, what: str, told: str, pool: Any) -> None:
    world = Plan.parse(plan).world_size
    kind = {"flip-weight": "'(model|used)/", "flip-optimizer": "'optimizer/", "flip-buffer": "'buffer/"}[what]
    for text in pool.run(flipped, world, plan, 1, what):
        assert re.search(f"after 2 steps {kind}", text) and told in text


def disagreeing(plan: str, fault: Fault, **options: Any) -> str:
    """What ends a run in which a bit of one rank flips."""
    with faults.injected(fault) as folder:
        with pytest.raises(RunError) as caught:
            shardwise.train("digits", plan, **{**SMALL, "check_replicas": 1, **options})
        assert faults.struck(folder) == 1
    return str(caught.value)


BEFORE = "before the last one's update, "


@pytest.mark.parametrize(
    ("plan", "fault", "when"),
    [("dp_replicate=2", Fault("flip-weight", rank=1, step=5, at="input", bit=20), BEFORE),
     ("dp_shard=2,zero=2", Fault("flip-weight", rank=0, step=2, at="forward", bit=20), BEFORE),
     pytest.param("dp_replicate=2", Fault("flip-optimizer", rank=0, step=4, at="update", bit=3), "",
                  marks=pytest.mark.long),
     pytest.param("dp_replicate=2,dp_shard=2,zero=3", Fault("flip-weight", rank=2, step=5, at="reduce", bit=20),
                  BEFORE, marks=pytest.mark.long)],
)  # fmt: skip
def test_of_two_replicas_the_wrong_one_is_found_by_another_rank(plan: str, fault: Fault, when: str, here: Path) -> None:
    """From a checkpoint and from the beginning; a copy that the update would have written anew is found too."""
    said = disagreeing(plan, fault, checkpoint_every=3 if fault.step != 2 else 0)
    assert re.search(rf"after {fault.step + 1} steps,? ?{when}'(model|used|optimizer)/", said), said
    assert f"on rank {fault.rank}: another rank that took the steps in its place came to what the others have" in said


@pytest.mark.long
def test_what_had_spread_before_it_was_compared_is_told_to_be_open(here: Path) -> None:
    said = disagreeing("dp_replicate=2", Fault("flip-weight", rank=1, step=1, at="input", bit=20), check_replicas=4)
    assert "of ranks 0, 1, and two cannot tell which is right (what others come to in their place is what none" in said


def test_who_is_right_by_voices() -> None:
    for first, again, ranks in [
        ({0: 7, 1: 8}, {1: 7, 0: 7}, [1]),  # a bit that flipped once
        ({0: 7, 2: 8}, {3: 7, 1: 7}, [2]),
        ({0: 7, 2: 8}, {1: 8, 3: 8}, [0]),
        ({0: 7, 1: 8}, {1: 9, 0: 7}, [1]),  # rank 1 never comes to the same
        ({0: 7, 1: 8}, {1: 8, 0: 7}, []),  # each stays with its own
        ({0: 7, 1: 8}, {1: 9, 0: 9}, []),  # it went wrong before
    ]:
        blamed, why = verdict({"w": first}, {"w": again})
        assert blamed == ranks, (first, again)
        assert ranks or ("its own again" if again[0] == 7 else "before the last step") in why


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_places_are_taken_by_others(world: int) -> None:
    for one in range(world):
        for other in range(one):
            order = places(world, {one, other})
            assert sorted(order) == list(range(world)) and all(rank != place for place, rank in enumerate(order))
            assert world < 4 or not {order[one], order[other]} & {one, other}


def test_a_slow_rank_is_told_once_with_its_phase(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(notices=[], mesh=SimpleNamespace(pp=SimpleNamespace(index=0)))
    stragglers = Stragglers(engine)
    assert stragglers.row(3) == [0.0] * 7
    usual, other_stage = [0, 0.01, 0.002, 0, 0, 0, 0], [1, 0.5, 0, 0, 0, 0, 0]
    for own in [0.03] * 4 + [0.003] + [0.03] * 12:
        stragglers.look([usual, usual, [0, 0.01, own, 0, 0, 0, 0], other_stage, other_stage], 0.5)
    (told,) = engine.notices
    assert told.startswith("rank 2 is slow in forward and backward: 30 ms of its own work in a step, where the median")
    for _ in range(6):  # nowhere as slow as that, and as a whole; of two ranks too
        stragglers.look([[0, *[0.004] * 6], [0, *[0.0019] * 6]], 0.03)
    assert engine.notices[1].startswith("rank 0 is slow: 24 ms of its own work in a step, where the median is 11 ms")
    for _ in range(6):  # 18 ms, where a step takes half a second
        stragglers.look([usual, [0, 0.01, 0.018, 0, 0, 0, 0], usual], 0.5)
    assert len(engine.notices) == 2


def test_uneven_memory_is_told_with_what_makes_it_so() -> None:
    even = {"parameters": 10**9, "gradients": 10**9, "optimizer": 2 * 10**9, "peak": 6 * 10**9}
    fuller = {**even, "parameters": 2 * 10**9, "optimizer": 4 * 10**9, "peak": 91 * 10**8}
    assert imbalance([even, even, {**even, "peak": 7 * 10**9}]) == ""
    assert imbalance([even, fuller, even]) == (
        "memory is uneven: rank 1 needs 9,100 MB and rank 0 6,000 MB: optimizer 4,000 against 2,000 MB, "
        "parameters 2,000 against 1,000 MB"
    )
    on_cpu = [{"process peak": size * 10**6} for size in (400, 900)]
    assert imbalance(on_cpu).endswith("activations and buffers, at the peak 900 against 400 MB")
    assert imbalance([{"process peak": 10**7}, {"process peak": 2 * 10**7}]) == ""  # both are small


def test_what_a_rank_waits_for_others_is_not_its_own_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0] * 10)
    monkeypatch.setattr("shardwise.guard.records.time.monotonic", lambda: next(clock))
    record = RankRecord(tmp_path / "record-0", 0, 1)
    group = record.group("world||0")
    for now, act in [(1.0, lambda: record.phase("input", 0)), (3.0, lambda: record.phase("forward", 0)),
                     (4.0, lambda: record.waits(group, 1)), (9.0, record.goes_on),
                     (10.0, lambda: record.phase("input", 1))]:  # fmt: skip
        clock = iter([now] * 3)
        act()
    assert record.own_s == {"start": 1.0, "input": 2.0, "forward": 2.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_every_changed_bit_and_every_swap_changes_the_hash(dtype: torch.dtype) -> None:
    values = torch.arange(13).remainder(2).to(dtype) if dtype == torch.bool else (torch.arange(13) * 3).to(dtype)
    own = bits_hash(values)
    assert own == bits_hash(values.clone()) == bits_hash(torch.cat([values, values])[13:])  # wherever it lies in memory
    held = values.view(torch.uint8)
    for place in range(held.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            held[place] ^= 1 << bit
            assert bits_hash(values) != own
            held[place] ^= 1 << bit
    for one in range(12):
        swapped = values.clone()
        swapped[[one, one + 1]] = values[[one + 1, one]]
        assert bits_hash(swapped) != own
    assert bits_hash(values[:12]) != own and bits_hash(values[:0]) == 0
