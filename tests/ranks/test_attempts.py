"""Attempts of one job on one store, as torchrun's agent keeps it: none meets what another has left there."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_runs import weights_of

import shardwise
from shardwise.errors import RunError
from shardwise.ranks import attempts
from shardwise.testing import faults
from shardwise.testing.faults import Fault
from shardwise.training import run as runs
from shardwise.training.job import make_job


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def met(store: Any, ranks: int, timeout_s: float = 10.0) -> list[str]:
    """What each rank of an attempt reads under a name that rank 0 writes, a moment late."""
    told: dict[int, str] = {}

    def rank(number: int) -> None:
        own = attempts.fresh(store.clone(), number, ranks, timeout_s)
        if number == 0:
            threading.Event().wait(0.05)
            own.set("address", str(own.get("address-of-1").decode()))
        else:
            own.set(f"address-of-{number}", secrets.token_hex(4))
        told[number] = own.get("address").decode()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [told[number] for number in range(ranks)]


def test_an_attempt_reads_nothing_of_another_on_the_same_store(store: Any) -> None:
    store.set("shardwise/ask/1", "a rank that was ended while it waited")
    seen = [met(store, 3) for _ in range(3)]
    assert all(len(set(one)) == 1 for one in seen) and len({one[0] for one in seen}) == 3


def test_ranks_that_do_not_come_are_named(store: Any) -> None:
    with pytest.raises(RunError, match="rank 1, 2 of 3 did not come"):
        attempts.fresh(store, 0, 3, 0.05)
    with pytest.raises(RunError, match="rank 1 heard nothing from rank 0"):
        attempts.fresh(store, 1, 3, 0.05)


SMALL: dict[str, Any] = {
    "steps": 6, "batch_samples": 16, "eval_every": 0, "checkpoint_every": 2, "checkpoint_keep": 9,
    "config": {"task": {"model": {"layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1}}},
}  # fmt: skip


def test_what_an_attempt_goes_on_with(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_agent", store)
    monkeypatch.chdir(tmp_path)
    older = shardwise.train("digits", **SMALL)
    job = make_job(shardwise.config.load(older.folder / "config.toml"))
    first = runs._placed_in_turn(job, None)
    assert first.folder != older.folder and first.resume is None and not first.again
    again = runs._placed_in_turn(job, None)  # it died before a checkpoint
    assert again.folder == first.folder and again.resume is None and again.again
    assert str(first.folder) in again.effective.notes[-1]

    store.delete_key("shardwise/kept/run")
    asked = older.folder / "checkpoints" / "step-00000002"  # those ahead of it are of steps that are taken again
    assert runs._placed_in_turn(job, str(asked)).resume == str(asked)
    assert runs._placed_in_turn(job, str(asked)).resume == str(asked)  # it died before they were set aside
    for step in (4, 6):
        path = older.folder / "checkpoints" / f"step-0000000{step}"
        path.rename(path.with_name(f"{path.name}.aside"))
    again = runs._placed_in_turn(job, str(asked))
    assert again.folder == older.folder and again.resume == str(older.folder / "checkpoints")


@pytest.mark.long
def test_a_run_that_torchrun_starts_again_goes_on(tmp_path: Path) -> None:
    """Two ranks die one after another; the third attempt ends with the bits of a run that was not disturbed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    words += [
        "-m",
        "shardwise",
        "train",
        "digits",
        "--plan",
        "dp_shard=2,zero=2",
        "--steps",
        "8",
        "--checkpoint-every",
        "2",
    ]
    words += ["--set", "train.checkpoint_background=false", "--set", "train.ema_decay=0.9"]
    folders = []
    for name, kills in (("whole", []), ("killed", [Fault("kill", 1, 3, "update"), Fault("kill", 0, 6, "forward")])):
        (tmp_path / name / "struck").mkdir(parents=True)
        told = {**os.environ, **faults.environment(kills, tmp_path / name / "struck")}
        done = subprocess.run(words, cwd=tmp_path / name, env=told, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert faults.struck(tmp_path / name / "struck") == len(kills)
        folders += (tmp_path / name / "runs").iterdir()
    whole, killed = folders
    losses = [
        [json.loads(line).get("loss") for line in (one / "metrics.jsonl").read_text().splitlines()] for one in folders
    ]
    assert losses[0] == losses[1] and weights_of(whole) == weights_of(killed)
    assert "goes on from" in done.stderr
