"""Runs that stop and go on: the same bits on the same plan, the same samples on another, signals, what is told."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import domain_tasks
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import AVERAGED, losses_of, weights_of

import shardwise
from shardwise.checkpoint import manifest, publish
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.cli.main import call
from shardwise.config import Given, load
from shardwise.data import Blend, Loader
from shardwise.digest import digest
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.observe.summary import summary_text
from shardwise.ranks import start_ranks
from shardwise.report.page import page
from shardwise.report.runs import read_run
from shardwise.training.holding import LOCK, held
from shardwise.training.keeping import Stopping
from shardwise.training.resume import (
    ARRAY_TASK,
    STOPPED,
    changes,
    find_run,
    mark_stopped,
    of_another_plan,
    settings_of,
)

# --- engines: every later loss and the final weights


class Sequences:
    """Token sequences with a number of their own, drawn from it."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        rows = [torch.Generator().manual_seed(self.first + i) for i in indices]
        tokens = torch.stack([torch.randint(0, tasks.VOCAB, (8,), generator=row) for row in rows])
        return {"tokens": tokens, "labels": tokens.clone(), "id": torch.tensor(indices) + self.first}


class Fields(Sequences):
    """Fields with a number of their own, drawn from it."""

    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        draws = [torch.Generator().manual_seed(self.first + i) for i in indices]
        values = torch.stack([torch.randn(5, 11, 13, generator=one) for one in draws])
        return {"x": values[:, :3], "y": values[:, 3:], "id": torch.tensor(indices) + self.first}


def task(plan: str) -> shardwise.Task:
    made = (
        domain_tasks.point_wise()
        if "domain" in plan
        else tasks.moe_shared()
        if "ep" in plan
        else tasks.decoder_dropout()
    )
    kind = Fields if "domain" in plan else Sequences
    return made.with_(batch=None, data=Blend({"a": (kind(0, 13), 3.0), "b": (kind(100, 9), 1.0)}))


def walked(plan: str, seed: int, folder: str, first: int, save_after: int, stop: int) -> tuple[list, list, str]:
    """(losses, this rank's sample numbers at each step, digest of the weights) of steps [first, stop).

    first        where it is not 0, the checkpoint in `folder` is gone on from
    save_after   a checkpoint is written in the background after this step, while training goes on
    """
    engine = shardwise.parallelize(task(plan), plan, seed=seed, randomness="global", clip_norm=1.0)
    saver = Saver(engine, folder)
    assert engine.task.data is not None
    loader = Loader(engine.task.data, seed, 6, accumulate=engine.plan.step_microbatches,
                    data_rank=engine.data_rank, data_ranks=engine.data_ranks, prefetch=2)  # fmt: skip
    if first:
        restored = restore(engine, folder)
        loader.load_state_dict(restored.manifest.fields["data"])
        assert engine.steps_done == first
    found, seen = [], []
    for step in range(first, stop):
        parts = next(loader)
        seen.append([int(i) for part in parts if part.count for i in part.batch["id"]])
        found.append(engine.step(parts).loss)
        if step == save_after:
            saver.save({"data": loader.state_dict()})
    saver.finish()
    saver.close()
    loader.close()
    weights = "".join(digest(value) for _, value in engine.full_parameters())
    engine.close()
    return found, seen, weights


PLANS = ["single", "dp_replicate=2", "dp_shard=2,zero=1,accumulate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3",
         "tp=2", "pp=2,microbatches=2", "dp_shard=2,ep=2,zero=1", "cp=2,zero=3", "domain=2x2,zero=1"]  # fmt: skip
STEPS = 6
# whose states go to other plans in test_checkpoint.py and test_domain.py
WALKED = ("cp=2,zero=3", "domain=2x2,zero=1", "dp_shard=2,ep=2,zero=1")


def world(plan: str) -> int:
    return Plan.parse(plan).world_size


def seeds() -> Iterator[Any]:
    for place, plan in enumerate(PLANS):
        for seed in range(10):
            rare = seed != place % 3 or plan in WALKED
            yield pytest.param(plan, seed, id=f"{plan}-{seed}", marks=[pytest.mark.long] * rare)


@pytest.mark.parametrize(("plan", "seed"), list(seeds()))
def test_the_same_plan_goes_on_to_the_bit(plan: str, seed: int, pool, tmp_path: Path) -> None:
    at = random.Random(f"{plan}{seed}").randrange(STEPS - 1)
    whole = pool.run(walked, world(plan), plan, seed, str(tmp_path), 0, at, STEPS)  # training goes on while it writes
    again = pool.run(walked, world(plan), plan, seed, str(tmp_path), at + 1, -1, STEPS)
    for (losses, seen, weights), (later, seen_later, weights_later) in zip(whole, again, strict=True):
        assert later == losses[at + 1 :] and seen_later == seen[at + 1 :] and weights_later == weights


def test_a_deterministic_run_goes_on_to_the_bit_on_any_number_of_data_ranks(pool, tmp_path: Path) -> None:
    whole = pool.run(walked, 2, "dp_shard=2,zero=1,deterministic=6", 1, str(tmp_path), 0, 1, STEPS)
    for plan in ("deterministic=6", "dp_shard=3,zero=3,deterministic=6"):
        ranks = pool.run(walked, world(plan), plan, 1, str(tmp_path), 2, -1, STEPS)
        assert ranks[0][0] == whole[0][0][2:] and ranks[0][2] == whole[0][2], plan


def test_another_plan_reads_the_same_samples_each_once(pool, tmp_path: Path) -> None:
    """Two micro-batches everywhere: masks depend on how many there are."""
    whole = pool.run(walked, 1, "accumulate=2", 3, str(tmp_path), 0, 1, STEPS)
    for plan in ("dp_shard=3,zero=2,accumulate=2", "tp=2,accumulate=2", "pp=2,microbatches=2"):
        ranks = pool.run(walked, world(plan), plan, 3, str(tmp_path), 2, -1, STEPS)
        groups = {str(seen): seen for _, seen, _ in ranks}  # ranks of tp and pp read the same ones
        for place in range(STEPS - 2):
            assert sorted(i for seen in groups.values() for i in seen[place]) == sorted(whole[0][1][2 + place]), plan
        assert ranks[0][0] == pytest.approx(whole[0][0][2:], rel=2e-4), plan
    (out,) = publish.scan(tmp_path)
    assert out.name == "step-00000002"


# --- runs


HEAD = "model.safetensors/head.weight"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on_in_its_folder_and_says_what_changed(here, capfd):
    whole = shardwise.train("digits", steps=6, **AVERAGED)
    half = shardwise.train("digits", steps=4, checkpoint_every=2, **AVERAGED)
    assert sorted(os.listdir(half.folder / "checkpoints")) == ["latest", "step-00000002", "step-00000004"]
    again = shardwise.train("digits", steps=6, checkpoint_every=3, resume="auto", **AVERAGED)
    assert again.folder == half.folder and losses_of(again) == losses_of(whole)
    assert weights_of(again.folder) == weights_of(whole.folder)
    assert again.summary["first_loss"] == whole.summary["first_loss"] and again.loss == whole.loss
    assert "train.steps was 4 and is 6" in again.summary["notices"]
    assert not any("checkpoint_every" in note for note in again.summary["notices"])
    with pytest.raises(InputError, match="nothing left to do"):
        shardwise.train("digits", steps=6, resume=half.folder, **AVERAGED)
    older = shardwise.train("digits", steps=5, resume=half.folder / "checkpoints" / "step-00000004", **AVERAGED)
    assert losses_of(older) == losses_of(whole)[:5]  # and what was ahead of it is out of the way
    names = os.listdir(half.folder / "checkpoints")
    assert any(name.startswith("step-00000006.aside-") for name in names)
    assert publish.scan(half.folder / "checkpoints")[0].name == "step-00000005"
    assert (half.folder / "config.toml").exists()
    with pytest.raises(InputError, match="there is no such folder"):
        shardwise.train("digits", resume="nowhere", **AVERAGED)
    with held(half.folder), pytest.raises(InputError, match=f"is in use: process {os.getpid()} on .* copy the folder"):
        shardwise.train("digits", steps=9, resume=half.folder, **AVERAGED)
    assert not (half.folder / LOCK).exists()
    new = shardwise.train("digits", steps=1, resume="new", **AVERAGED)
    assert new.folder != half.folder
    shutil.copytree(half.folder / "checkpoints" / "step-00000005", "alone/step-00000005")
    with pytest.raises(InputError, match=r"does not fit.*: it lacks model/"):
        shardwise.train(odd, steps=9, resume="alone/step-00000005", out="others")
    assert not os.listdir("others")


def test_a_run_that_changed_plans_tells_all_of_them(here, capfd):
    shardwise.train("digits", steps=2, checkpoint_every=2)
    kept = shardwise.train("digits", steps=3, checkpoint_every=1, resume="auto")
    run = shardwise.train("digits", "accumulate=2", steps=4, resume="auto")
    assert kept.summary["plans"] == [] and run.folder == kept.folder
    assert run.summary["plans"] == ["single in steps 1 to 3", "accumulate=2 in steps 4 to 4"]
    assert "single in steps 1 to 3; then accumulate=2 in steps 4 to 4 (1 rank)" in summary_text(run.summary)
    assert "<code>single in steps 1 to 3</code><br><code>accumulate=2 in steps 4 to 4</code>" in page(
        [read_run(run.folder)]
    )


def test_what_another_plan_has_in_common_is_said_as_it_is() -> None:
    single = Plan.parse("dp_shard=2,zero=3")
    assert of_another_plan(single, Plan.parse("tp=2")).endswith("in the same order, sums in another")
    other = of_another_plan(single, Plan.parse("pp=2,microbatches=2"))
    assert "with 2 micro-batches a step where that had 1" in other and "batch norm" in other


def test_a_task_that_was_edited_since_its_checkpoint_is_told(here):
    text = "from shardwise.models.tasks import mlp\n\n\ndef task():\n    return mlp()\n"
    Path("edited_task.py").write_text(text)
    run = shardwise.train("edited_task.py:task", steps=1, checkpoint_every=1)
    same = shardwise.train("edited_task.py:task", steps=2, checkpoint_every=1, resume=run.folder)
    assert not any("was edited" in note for note in same.summary["notices"])
    Path("edited_task.py").write_text(text + "# another loss\n")
    on = shardwise.train("edited_task.py:task", steps=3, checkpoint_every=1, resume=run.folder)
    assert any("edited_task.py was edited since the checkpoint" in note for note in on.summary["notices"])


def test_the_same_command_finds_its_own_run_among_others_that_were_stopped(here):
    """As jobs of an array do, that were all stopped and come again in any order."""

    def of(seed: int) -> Any:
        return load(values=[Given("task.name", "digits", "the task"), Given("train.seed", seed, "--set")])

    runs = {}
    for seed in (1, 2):
        run = shardwise.train("digits", steps=1, checkpoint_every=1, **AVERAGED)
        runs[seed] = run.folder
        mark_stopped(run.folder, of(seed), {"step": 1})
    for seed in (1, 2):
        assert find_run(None, of(seed), "digits")[0] == runs[seed]
    assert find_run(None, of(3), "digits")[0] is None and find_run("auto", of(3), "digits")[0] == runs[2]
    path = publish.scan(runs[2] / "checkpoints")[0]
    found = manifest.read(path)
    found.fields["settings"] = settings_of(of(1))  # the second run was of the first's configuration, and is done
    (runs[2] / STOPPED).unlink()
    (path / manifest.NAME).write_bytes(manifest.sealed(found.content()))
    assert find_run(None, of(1), "digits")[0] is None


def test_a_run_whose_name_ends_in_a_number_is_not_taken_for_another(here):
    """Folders of one second are numbered at the end, and so are names that people give."""
    runs = {name: shardwise.train("digits", steps=1, checkpoint_every=1, name=name, **AVERAGED).folder
            for name in ("exp", "exp-2")}  # fmt: skip
    effective = load(values=[Given("task.name", "digits", "the task")])
    assert {name: find_run("auto", effective, name)[0] for name in runs} == runs


def test_jobs_of_an_array_that_have_one_configuration_keep_their_runs(here, monkeypatch):
    runs = {}
    for job in ("0", "7"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", job)
        run = shardwise.train("digits", steps=1, checkpoint_every=1, **AVERAGED)
        effective = load(values=[Given("task.name", "digits", "the task")])
        mark_stopped(run.folder, effective, {"step": 1})
        runs[job] = run.folder
    for job in ("0", "7"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", job)
        assert find_run(None, effective, "digits")[0] == find_run("auto", effective, "digits")[0] == runs[job]
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert find_run(None, effective, "digits")[0] is None
    *nothing, said = find_run("auto", effective, "digits")
    assert nothing == [None, None] and "of array task SLURM_ARRAY_TASK_ID=3 with a checkpoint" in said[0]
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID")
    for name, value in (("SGE_TASK_ID", "undefined"), ("LSB_JOBINDEX", "0")):  # as jobs of no array have them
        monkeypatch.setenv(name, value)
    assert find_run("auto", effective, "digits")[0] == runs["7"] and ARRAY_TASK not in settings_of(effective)


def test_a_lock_ends_with_its_process_though_one_that_was_forked_off_goes_on(here):
    """As a loader's worker does for a while after its rank was killed."""
    told, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            kept = held(here)
            kept.__enter__()
            if os.fork() == 0:  # the worker, which has let go of the lock when it tells
                os.write(tell, str(os.getpid()).encode())
                time.sleep(60)
            time.sleep(0.5)
        finally:
            os._exit(0)  # as if it were killed: nothing is tidied up
    worker = int(os.read(told, 20))
    os.waitpid(holder, 0)
    try:
        assert (here / LOCK).exists()
        with held(here):
            os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(here, monkeypatch):
    """Between opening the file and locking it another process ends, and removes it: a lock on nothing."""
    own, opened = os.open, []

    def raced(path, *args, **options):
        file = own(path, *args, **options)
        if str(path).endswith(LOCK) and not opened:
            opened.append(file)
            os.unlink(path)
        return file

    monkeypatch.setattr(os, "open", raced)
    with held(here) as said, pytest.raises(InputError, match="is in use"), held(here):
        pass
    assert opened and not said and not (here / LOCK).exists()


def test_a_lock_that_another_host_left_is_told(here):
    """A file system may keep locks within a host: then the other process may still be there."""
    (here / LOCK).write_text("process 12 on elsewhere\n")
    with held(here) as said:
        pass
    assert len(said) == 1 and "process 12 on elsewhere was in this run" in said[0] and "nolock" in said[0]
    (here / LOCK).write_text(f"process 12 on {socket.gethostname()}\n")
    with held(here) as said:
        assert not said and (here / LOCK).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_run_without_held_out_data_goes_on_by_its_folder_alone(here, capfd):
    """Its config.toml has every key, also those that would have no effect on this task if they were set."""
    assert call(["train", "shardwise.models.tasks:mlp", "--steps", "2", "--checkpoint-every", "1"]) == 0
    (folder,) = Path("runs").iterdir()
    assert call(["train", "--resume", str(folder), "--steps", "3"]) == 0, capfd.readouterr().err
    assert call(["train", "--resume", str(folder), "--steps", "4", "--set", "train.workers=2"]) == 2
    assert "train.workers would have no effect on this task" in capfd.readouterr().err


def test_a_damaged_one_is_told_and_set_aside_and_the_one_before_is_taken(here):
    half = shardwise.train("digits", steps=4, checkpoint_every=2, **AVERAGED)
    before = losses_of(half)
    path = half.folder / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    again = shardwise.train("digits", steps=5, resume="auto", **AVERAGED)
    said = next(note for note in again.summary["notices"] if "damaged" in note)
    assert str(path) in said.replace(str(here) + "/", "") or path.name in said
    assert "its digest should be" in said and losses_of(again)[:4] == before
    assert any(name.startswith("step-00000004.damaged-") for name in os.listdir(half.folder / "checkpoints"))


def test_checkpoints_by_time_and_none_at_all(here):
    often = shardwise.train("digits", steps=12, checkpoint_minutes=1e-6, checkpoint_keep=20, **AVERAGED)
    steps = [publish.step_of(path) for path in publish.scan(often.folder / "checkpoints")]
    assert steps[0] == 12 and len(steps) > 1
    for options in (
        {"checkpoint_every": 0},
        {},
    ):  # the default: none before a quarter of an hour, and so none at the end
        never = shardwise.train("digits", steps=2, **options, **AVERAGED)
        assert not (never.folder / "checkpoints").exists()


class Odd(torch.optim.SGD):
    """Keeps a tensor under a name of its own."""

    def step(self, closure=None):
        self.state["history"] = torch.zeros(3)
        return super().step(closure)


def odd() -> shardwise.Task:
    return tasks.mlp().with_(optimizer=lambda groups: Odd(groups, lr=0.1))


def test_state_that_has_no_place_is_told_by_default_and_ends_a_run_that_asked_for_checkpoints(here):
    run = shardwise.train(odd, steps=8, checkpoint_minutes=1e-6)
    (said,) = [note for note in run.summary["notices"] if note.startswith("no checkpoints are made")]
    assert "'history', which is none of its weights" in said
    with pytest.raises(RefusedPlan, match="history"):
        shardwise.train(odd, steps=2, checkpoint_every=1)


def test_a_save_that_fails_is_told_and_a_second_in_a_row_ends_the_run(here, monkeypatch, capsys):
    own, calls = Saver.save, []

    def failing(saver: Saver, fields: Any = None) -> None:
        calls.append(saver.engine.steps_done)
        if len(calls) in bad:
            raise RunError("no checkpoint was written: No space left on device")
        own(saver, fields)

    monkeypatch.setattr(Saver, "save", failing)
    bad = {2}
    run = shardwise.train("digits", steps=6, checkpoint_every=2, **AVERAGED)
    assert calls == [2, 4, 6]
    assert any("No space left on device; the run goes on" in note for note in run.summary["notices"])
    steps = [publish.step_of(path) for path in publish.scan(run.folder / "checkpoints")]
    assert steps == [6, 2]
    bad = {4, 5}
    with pytest.raises(RunError, match="No space left"):
        shardwise.train("digits", steps=6, checkpoint_every=2, **AVERAGED)
    bad = {6, 7}
    run = shardwise.train("digits", steps=4, checkpoint_every=2, **AVERAGED)
    told = f"No space left on device; every step is done, and the weights are in {run.folder / 'model.safetensors'}"
    assert told in run.summary["notices"][-1] and load_file(run.folder / "model.safetensors")
    assert told in capsys.readouterr().err


def test_the_best_on_held_out_data_is_kept_and_remembered(here):
    """By a learning rate that spoils the weights later; a run that goes on does not take a worse one for the best."""
    options = {**AVERAGED, "optimizer": {"name": "sgd", "lr": 3.0}, "eval_every": 1, "keep_best": True}
    del options["ema_decay"]
    half = shardwise.train("digits", steps=3, checkpoint_every=3, **options)
    again = shardwise.train("digits", steps=6, resume="auto", **options)
    whole = shardwise.train("digits", steps=6, **options)
    found = [(record["eval_loss"], record["step"]) for record in whole.metrics if "eval_loss" in record]
    assert len(found) == 6 and min(found)[1] < 6
    for run in (again, whole):
        assert (run.summary["best"]["eval_loss"], run.summary["best"]["step"]) == min(found)
    best, last = (load_file(whole.folder / f"{name}.safetensors") for name in ("best", "model"))
    assert half.folder == again.folder and not torch.equal(best["head.weight"], last["head.weight"])
    assert all(torch.equal(best[name], value) for name, value in load_file(again.folder / "best.safetensors").items())
    fresh = shardwise.train("digits", steps=1, init_from=str(whole.folder / "best.safetensors"),
                            **{**options, "optimizer": {"name": "sgd", "lr": 1e-30}})  # fmt: skip
    assert fresh.eval_loss == min(found)[0], (found, fresh.eval_loss)
    with pytest.raises(InputError, match="eval_data is None"):
        shardwise.train(odd, steps=1, keep_best=True)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Tensors, not files: the order of a safetensors header's own words is drawn."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_best_of_a_step_that_is_taken_again_is_not_taken_for_an_earlier_one(here):
    """The first steps get better, so the file is of step 3 when the run is taken back to step 1."""
    options = {**AVERAGED, "eval_every": 1, "keep_best": True, "checkpoint_every": 1, "checkpoint_keep": 9}
    run = shardwise.train("digits", steps=3, **options)
    held = load_file(run.folder / "best.safetensors")
    assert run.summary["best"]["step"] == 3
    moved = run.folder.rename(here / "moved")
    back = shardwise.train("digits", steps=2, resume=moved / "checkpoints" / "step-00000001", **options)
    told = "of step 3, which is taken again: it is best.aside-step3.safetensors now, and those of step 1 are not kept"
    assert any(told in note for note in back.summary["notices"])
    assert equal(load_file(moved / "best.aside-step3.safetensors"), held)
    assert back.summary["best"] == {"step": 2, "eval_loss": back.eval_loss, "weights": str(moved / "best.safetensors")}
    again = shardwise.train("digits", steps=3, resume=moved, **options)
    assert again.summary["best"]["step"] == 3 and equal(load_file(moved / "best.safetensors"), held)


def test_weights_alone_by_name_and_pattern(here):
    first = shardwise.train("digits", steps=2, checkpoint_every=2, **AVERAGED)
    still = {**AVERAGED, "optimizer": {"name": "sgd", "lr": 1e-30}, "steps": 1}
    for source in (first.folder, first.folder / "model.safetensors"):
        run = shardwise.train("digits", init_from=str(source), **still)
        assert weights_of(run.folder)[HEAD] == weights_of(first.folder)[HEAD]
        assert next(note for note in run.summary["notices"] if note.startswith("weights from"))
    renamed = {f"net.{name}": value for name, value in load_file(first.folder / "model.safetensors").items()}
    renamed["net.head.bias"] = torch.zeros(3)
    save_file(renamed, "other.safetensors")
    run = shardwise.train("digits", init_from="other.safetensors", init_rename=[r"^net\.="], **still)
    (said,) = [note for note in run.summary["notices"] if note.startswith("weights from")]
    assert "begun anew: head.bias" in said and "not used: head.bias" in said
    with pytest.raises(InputError, match="no weight of this model has a name and shape in it"):
        shardwise.train("digits", init_from="other.safetensors", **still)
    Path("x.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"neither model\.safetensors nor .*x\.bin may be a pickle"):
        shardwise.train("digits", init_from=".", **still)


# --- signals


def command(here: Path, plan: str, steps: int) -> subprocess.Popen:
    words = [sys.executable, "-m", "shardwise", "train", "digits", "--plan", plan, "--steps", str(steps), "--json",
             "--set", "train.eval_every=0", "--set", "task.model.layers=1", "--set", "task.model.hidden=16",
             "--set", "task.model.heads=2", "--set", "train.log_every=1"]  # fmt: skip
    return subprocess.Popen(words, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_steps(here: Path, count: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        files = list(here.glob("runs/*/metrics.jsonl"))
        if files and files[0].read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize(
    ("plan", "number"), [("single", signal.SIGINT), ("dp_shard=2,zero=1", signal.SIGUSR1), ("single", signal.SIGHUP)]
)
def test_a_signal_saves_and_the_same_command_goes_on(plan: str, number: int, here):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"whoever started these tests ignores signal {number}, as nohup does, and so do their processes")
    process = command(here, plan, 100_000)
    until_steps(here, 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    answer = json.loads(out)
    (folder,) = (here / "runs").iterdir()
    assert "stopped after step" in answer["error"] and "the same command" in answer["error"]
    (saved,) = publish.scan(folder / "checkpoints")
    assert str(saved) in answer["error"] and publish.verify(saved) == []
    if plan != "single":
        return
    stopped = json.loads((folder / "stopped.json").read_text())
    again = command(here, plan, 100_000)  # the same command
    until_steps(here, stopped["step"] + 2, again)
    again.send_signal(signal.SIGTERM)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 75 and "goes on from" in err, err
    assert list((here / "runs").iterdir()) == [folder]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))


def test_a_signal_that_arrives_twice_at_once_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM to its command and to the command's group."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        stopping = Stopping(launched=False)
        stopping.start()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.asked == "SIGTERM" and not heard
        monkeypatch.setattr(start_ranks, "TOGETHER_S", 0.0)  # a second has passed
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_of_others_hear_the_second_signal_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_ranks, "TOGETHER_S", 0.0)
    heard: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    try:
        own = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            stopping = Stopping(launched=False)
            stopping.start()
            os.kill(os.getpid(), number)
            assert stopping.asked == signal.Signals(number).name and not heard
            os.kill(os.getpid(), number)
            assert heard == [number] and {one: signal.getsignal(one) for one in numbers} == own
            heard.clear()
        stopping = Stopping(launched=False)
        stopping.start()
        stopping.stop()  # a run that ends
        assert {number: signal.getsignal(number) for number in numbers} == own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_setting_that_was_not_set_is_told_so() -> None:
    assert changes({"lora.alpha": None}, {"lora.alpha": 8.0}) == ["lora.alpha was not set and is 8.0"]
