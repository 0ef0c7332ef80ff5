"""Checkpoints in stores without renames: the manifest last, half files not believed, the same bits under any plan."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutations.plant import Bug, planted
from small_runs import SMALL, losses_of, undisturbed, weights_of
from test_checkpoint import differing, saved
from test_checkpoint_files import work_of

import shardwise
from shardwise.checkpoint import inspect, manifest, publish
from shardwise.checkpoint.remote import RemoteDisk, RemotePath, place
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.stored import of_checkpoint
from shardwise.errors import InputError, RunError
from shardwise.models import tasks
from shardwise.testing import faults
from shardwise.testing.faults import Fault
from shardwise.training import restart

pytest.importorskip("fsspec")


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """An empty folder of a store."""
    folder: Any = place(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/store")
    assert isinstance(folder, RemotePath) and str(folder).startswith(f"{request.param}://")
    yield folder
    RemoteDisk().remove(folder)


def save(folder: Any, step: int, disk: RemoteDisk, keep: int = 2, number: int = 1) -> Any:
    for rank in (1, 0):
        work, parts = work_of(folder, step, rank, keep=keep)
        work = publish.Work(**{**vars(work), "partial": f"step-{step:08d}-{number}"})
        publish.write_rank(work, parts, disk)
    return publish.publish(work, disk)


def steps_that_load(folder: Any) -> list[int]:
    found = []
    for path in publish.scan(folder):
        if publish.verify(path):
            continue
        with of_checkpoint(path) as stored:
            assert stored.manifest is not None
            step, tensor = stored.manifest.step, stored.tensors["model/w"]
            values = stored.read("model/w", tensor.parts[0].piece.whole(tensor.shape)).view(np.int64)
        assert values.tolist() == [10 * step] * 6 + [10 * step + 1] * 6
        found.append(step)
    return found


def test_published_ones_load_and_the_older_ones_go(store: Any) -> None:
    published_and_retained(store)


def published_and_retained(store: Any) -> None:
    for step in (1, 2, 3):
        save(store, step, RemoteDisk())
    assert steps_that_load(store) == [3, 2]
    assert sorted(name for name in store.names() if name.startswith("step")) == ["step-00000002-1", "step-00000003-1"]
    again = save(store, 3, RemoteDisk(), number=5)
    assert publish.scan(store)[0] == again and inspect.find(str(store)) == again
    assert inspect.summary(str(store))["step"] == 3
    kept = publish.set_aside(again, "damaged", RemoteDisk())
    assert steps_that_load(store) == [3] and publish.under_way(store) == [] and kept.exists()


class Stopped(BaseException):
    """The process is gone."""


class Ending(RemoteDisk):
    """Ends before the n-th change."""

    def __init__(self, at: int) -> None:
        self.at, self.changes = at, list[str]()

    def reached(self, change: str, path: Path) -> None:
        if len(self.changes) == self.at:
            raise Stopped
        self.changes.append(f"{change} {path.name}")


def ended_anywhere(folder: Any) -> None:
    """The manifest is the publication, and what was published before stays until then."""
    counting = Ending(-1)
    save(folder / "count", 1, RemoteDisk(), keep=1)
    save(folder / "count", 2, counting, keep=1)
    written = counting.changes.index("sync manifest.json")
    assert counting.changes.index("sync rank-00000.safetensors") < written
    for at in range(len(counting.changes)):
        here = folder / str(at)
        save(here, 1, RemoteDisk(), keep=1)
        with pytest.raises(Stopped):
            save(here, 2, Ending(at), keep=1)
        found = steps_that_load(here)
        assert found in ([1], [2], [2, 1]), (at, counting.changes[at])
        assert 2 in found or at <= written, counting.changes[at]
        publish.clear(here, RemoteDisk())
        assert steps_that_load(here) == found and publish.under_way(here) == []
        save(here, 3, RemoteDisk(), keep=1)
        assert steps_that_load(here) == [3]


def test_ended_before_any_change_a_good_one_is_there(store: Any) -> None:
    ended_anywhere(store)


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [("publish:publish", "if not is_remote(work.folder):", "if True:"),
     ("publish:_is_published", "(path / manifest.NAME).exists() if is_remote(path) else path.is_dir()", "True"),
     ("publish:retain", "others[max(keep - 1, 0) :]", "others[max(keep - 2, 0) :]"),
     ("publish:retain", "path != newest", "path == newest"),
     ("remote:RemoteDisk.withdraw", 'self.file(path / f"manifest.json.{why}", [text])', "self.remove(path)"),
     ("publish:_is_set_aside", 'not name.startswith(f"{kept}gone-")', "False")],
)  # fmt: skip
def test_planted_bugs_are_caught(where: str, old: str, new: str, tmp_path: Path) -> None:
    bug = Bug("planted", f"shardwise.checkpoint.{where}", old, new, "", "")
    folder: Any = place(f"memory://{uuid.uuid4().hex}")
    with planted(bug) as ran, pytest.raises(BaseException) as caught:
        ended_anywhere(folder)
        published_and_retained(folder / "x")
    assert ran() and not isinstance(caught.value, AttributeError | NameError)


def test_half_a_file_is_not_believed(store: Any) -> None:
    good, bad = save(store, 1, RemoteDisk()), save(store, 2, RemoteDisk())
    text = (bad / manifest.NAME).read_bytes()
    for half in (text[: len(text) // 2], b""):
        RemoteDisk().file(bad / manifest.NAME, [half])
        assert steps_that_load(store) == [1] and publish.verify(good) == []
    RemoteDisk().file(bad / manifest.NAME, [text])
    RemoteDisk().file(bad / "rank-00001.safetensors", [b"x" * 100])
    (told,) = publish.verify(bad)
    assert str(bad) in told and "has 100 bytes" in told


def test_what_a_store_fails_with_is_told_with_the_address(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = save(store, 1, RemoteDisk())

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no such key")

    monkeypatch.setattr(type(made.store), "cat_file", broken)
    (told,) = publish.verify(made)
    assert str(made) in told and "ValueError: no such key" in told
    with pytest.raises(InputError, match="gibberish"):
        place("gibberish://x")


def saved_out_of_sight(url: str, background: bool) -> str:
    """What a save says whose place no other process sees."""
    engine = shardwise.parallelize(tasks.mlp(), f"dp_replicate={torch.distributed.get_world_size()}")
    saver = Saver(engine, url, background=background)
    with pytest.raises(RunError) as caught:
        saver.save()
        saver.finish()
    saver.close()
    engine.close()
    return str(caught.value)


def test_a_place_that_others_do_not_see_is_told_at_once(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in pool.run(saved_out_of_sight, 2, "memory://here", False):
        assert "rank 1 does not see what rank 0 writes in memory://" in said
    (said,) = pool.run(saved_out_of_sight, 1, "memory://here", True)
    assert "its writer, another process, wrote memory://" in said


def test_any_plan_to_any_plan_through_a_store(pool: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    first, *_ = pool.run(saved, 2, "mlp", "dp_shard=2,zero=3", f"{url}/a", 2)
    for plan, ranks in (("dp_shard=3,zero=1", 3), ("single", 1)):
        again = pool.run(saved, ranks, "mlp", plan, f"{url}/b", 0, f"{url}/a")
        assert all(not differing(first, state) for state in again)
    assert not list((tmp_path / "store").rglob("*.partial")) and (tmp_path / "store" / "a").is_dir()


def test_a_run_whose_checkpoints_lie_in_a_store_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, and on another host that has no folder of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(restart, "FIRST_WAIT_S", 0.05)
    plan, url = "dp_replicate=2", f"file://{tmp_path}/store"
    losses, weights = undisturbed(plan)
    with faults.injected(Fault("kill", rank=1, step=5, at="update")):
        run = shardwise.train("digits", plan, **SMALL, checkpoint_every=3, restarts=1, checkpoint_folder=url,
                              checkpoint_background=False)  # fmt: skip
    assert losses_of(run) == losses and weights_of(run.folder) == weights
    entries = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    assert [entry["from_step"] for entry in entries] == [0, 3] and not (run.folder / "checkpoints").exists()
    assert len(os.listdir(tmp_path / "store" / run.folder.name)) == 3  # two, and the hint
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    for path in publish.scan(place(f"{url}/{run.folder.name}"))[:1]:
        RemoteDisk().withdraw(path, "aside")  # that of the end
    again = shardwise.train("digits", plan, **SMALL, resume=f"{url}/{run.folder.name}")
    assert weights_of(again.folder) == weights and losses_of(again) == losses[6:]
