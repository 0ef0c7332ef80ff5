"""Bugs planted in saving, loading and going on: each shows in what a run that was gone on with comes to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mutations.plant import Bug, BuggyPool, planted
from small_runs import AVERAGED, weights_of
from test_checkpoint import differing, saved

import shardwise
from shardwise.checkpoint import publish, save
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.errors import ShardwiseError
from shardwise.models import tasks

STEPS, SAVED = 6, 3


def bug(where: str, old: str, new: str) -> Bug:
    return Bug("planted", f"shardwise.{where}", old, new, "", "")


def told_of(folder: Path) -> dict[str, Any]:
    """What a run came to: its steps and losses, weights, average, first loss, best, and its checkpoints."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [(one["step"], one.get("loss"), one.get("lr"), one.get("eval_loss")) for one in lines]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    best = summary["best"] and {key: summary["best"][key] for key in ("step", "eval_loss")}
    kept = sorted(path.name for path in publish.scan(folder / "checkpoints"))
    return {"steps": steps, "weights": weights_of(folder), "first": summary["first_loss"], "best": best, "kept": kept}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    options = {**AVERAGED, "checkpoint_every": SAVED, "checkpoint_keep": 9, "eval_every": 1, "keep_best": True}
    return shardwise.train("digits", steps=STEPS, out=str(out), schedule={"name": "cosine"}, **options).folder


def gone_on(undisturbed: Path, to: Path) -> dict[str, Any]:
    """The same run, taken back to its checkpoint in the middle."""
    folder = to / undisturbed.name
    shutil.copytree(undisturbed, folder)
    run = shardwise.train(
        "digits", config=folder / "config.toml", resume=folder / "checkpoints" / f"step-{SAVED:08d}", out=str(to)
    )
    assert run.folder == folder
    return told_of(folder)


def test_a_run_taken_back_comes_to_the_same(undisturbed: Path, tmp_path: Path) -> None:
    told, again = told_of(undisturbed), gone_on(undisturbed, tmp_path)
    best, best_again = told.pop("best"), again.pop("best")
    assert again == told and best_again["eval_loss"] >= best["eval_loss"]
    assert len(list((tmp_path / undisturbed.name / "checkpoints").glob("*aside*"))) == 1


RUN = [
    bug("training.keeping:Keeper._resume", 'self.loader.load_state_dict(fields["data"])', "pass"),
    bug(
        "training.keeping:Keeper._resume",
        'self.first_loss = _from_json((fields.get("run") or {}).get("first_loss"))',
        "pass",
    ),
    bug("training.keeping:Keeper._set_aside", "> restored.manifest.step", "> restored.manifest.step + 9"),
    bug("training.resume:trim_metrics", "<= first", "<= first + 1"),
    bug("checkpoint.load:_read", "holding.key if holding.key in stored.tensors else", ""),
    bug("checkpoint.load:restore", 'int(state["steps"])', 'int(state["steps"]) - 1'),
    bug("checkpoint.load:_read_optimizer", "if state:", "if False:"),
    bug("checkpoint.load:_read", "_put(stored, holding.key, holding.piece, holding.tensor)", "pass"),
    bug("data.loader:Loader.load_state_dict", 'int(state["position"])', "0"),
]


@pytest.mark.parametrize("one", RUN, ids=lambda one: f"{one.where.partition(':')[2]}-{one.old[:20]}")
def test_a_bug_in_a_run_shows(one: Bug, undisturbed: Path, tmp_path: Path) -> None:
    with planted(one) as ran:
        try:
            again = gone_on(undisturbed, tmp_path)
        except ShardwiseError:
            again = {}
        assert ran()
    told = told_of(undisturbed)
    assert any(again.get(key) != told[key] for key in ("steps", "weights", "first", "kept"))


# what is planted while a state is saved under one plan and loaded under another one
STATE = [
    ("dp_shard=2,zero=1", bug("checkpoint.save:assigned", "count * place // len(ranks), count", "0, count")),
    ("dp_shard=2,zero=1", bug("checkpoint.save:Saver._parts", "[share.first :", "[0 * share.first :")),
    ("dp_shard=2,zero=1", bug("checkpoint.load:_read_optimizer", 'piece if kind == "like" else', "")),
    ("dp_replicate=2", bug("checkpoint.optimizers:decoded", "torch.full(shape, number,", "torch.full(shape, 1.0,")),
]


def split_and_saved(*given: Any) -> dict[str, str]:
    """`saved`, where pieces of a few bytes are written by several ranks already."""
    save.SPLIT_BYTES = 8
    try:
        return saved(*given)
    finally:
        save.SPLIT_BYTES = 2**16


def through_a_checkpoint(pool: Any, plan: str, folder: Path) -> bool:
    """Whether every rank has, under this plan, the state of two replicas that wrote it."""
    before, *_ = pool.run(split_and_saved, 2, "mlp", "dp_replicate=2", str(folder / "a"), 2)
    after = pool.run(split_and_saved, 2, "mlp", plan, str(folder / "b"), 0, str(folder / "a"))
    return not any(differing(before, state) for state in after)


def test_what_replicas_write_in_parts_loads(pool: Any, tmp_path: Path) -> None:
    assert through_a_checkpoint(pool, "dp_shard=2,zero=1", tmp_path)


@pytest.mark.parametrize(("plan", "one"), STATE, ids=lambda one: getattr(one, "where", one))
def test_a_bug_in_a_state_shows(plan: str, one: Bug, pool: Any, tmp_path: Path) -> None:
    buggy = BuggyPool(pool, one)
    try:
        right = through_a_checkpoint(buggy, plan, tmp_path)
    except ShardwiseError:
        right = False
    assert buggy.ran and not right


# --- an engine that is taken back


def taken_back(plan: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of two steps, and of the same ones after an evaluation and a way back."""
    engine = shardwise.parallelize(tasks.mlp(), plan)
    saver = Saver(engine, folder, background=False)
    engine.step(engine.task.batch(0))
    saver.save()
    losses = [[engine.step(engine.task.batch(step)).loss for step in (1, 2)]]
    engine.evaluate([engine.task.batch(0)])  # which leaves a unit of ZeRO-3 gathered
    restore(engine, folder)
    losses.append([engine.step(engine.task.batch(step)).loss for step in (1, 2)])
    saver.close()
    engine.close()
    return losses[0], losses[1]


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2"])
def test_an_engine_is_taken_back_after_an_evaluation(plan: str, pool: Any, tmp_path: Path) -> None:
    for losses, again in pool.run(taken_back, 2, plan, str(tmp_path)):
        assert losses == again


def test_a_bug_on_the_way_back_shows(pool: Any, tmp_path: Path) -> None:
    buggy = BuggyPool(pool, bug("checkpoint.load:restore", "engine.technique.publish()", "pass"))
    found = buggy.run(taken_back, 2, "dp_shard=2,zero=1", str(tmp_path))
    assert buggy.ran and any(losses != again for losses, again in found)
