"""Saving while training goes on: what is written is the state at the call, failures surface, nothing grows."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_files import save, steps_that_load, work_of

import shardwise
from shardwise.checkpoint import publish
from shardwise.checkpoint.background import Writer
from shardwise.checkpoint.files import Disk
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.digest import digest
from shardwise.errors import RunError
from shardwise.models import tasks
from shardwise.testing import faults
from shardwise.testing.faults import Fault


def weights(engine: Any) -> list[str]:
    return [digest(value) for _, value in engine.full_parameters()]


def saved_while_training(folder: str) -> tuple[list[list[str]], list[list[str]]]:
    """(weights at each save, weights that each checkpoint gives back); a save begins before the last has ended."""
    engine = shardwise.parallelize(tasks.decoder(), "dp_shard=2,zero=2")
    saver, then = Saver(engine, folder, keep=9), []
    for step in range(5):
        engine.step(engine.task.batch(step))
        then.append(weights(engine))
        saver.save()
    engine.step(engine.task.batch(9))
    saver.finish()
    assert saver.last == publish.scan(Path(folder))[0]
    saver.close()
    later = []
    for path in reversed(publish.scan(Path(folder))):
        restore(engine, path)
        later.append(weights(engine))
    engine.close()
    return then, later


def test_each_checkpoint_is_the_state_at_its_call(pool, tmp_path: Path) -> None:
    for then, later in pool.run(saved_while_training, 2, str(tmp_path)):
        assert then == later and len({str(one) for one in then}) == 5


def failing(folder: str) -> list[str]:
    """What saves say when there is a file in the place of the folder, and when the disk is full."""
    engine = shardwise.parallelize(tasks.mlp(), "dp_replicate=2")
    saver, said = Saver(engine, folder), []
    saver.save()
    saver.finish()
    if engine.rank == 1:
        assert saver._writer is not None
        saver._writer.process.send_signal(signal.SIGKILL)
        saver._writer.process.wait()
    saver.save()  # a writer that died between two saves is started anew
    saver.finish()
    for damage in ("file in the way", "full"):
        engine.step(engine.task.batch(0))
        if damage == "file in the way" and engine.rank == 0:
            shutil.move(folder, folder + "-kept")
            Path(folder).write_bytes(b"")
        if damage == "full":
            if engine.rank == 0:
                os.remove(folder)
                shutil.move(folder + "-kept", folder)
            saver.total_bytes = 2**60
        torch.distributed.barrier()
        with pytest.raises(RunError) as caught:
            saver.save()
            saver.finish()
        said.append(str(caught.value))
    saver.close()
    restored = restore(engine, folder)
    engine.close()
    assert restored.manifest.step == 0 and not restored.notices
    return said


def test_what_the_writer_fails_with_is_raised_on_every_rank(pool, tmp_path: Path) -> None:
    one, other = pool.run(failing, 2, str(tmp_path / "x"), timeout_s=60)
    assert one == other
    assert "the checkpoint of step 1 was not written" in one[0] and "Not a directory" in one[0]
    assert "no checkpoint of step 2 was written: it needs" in one[1] and "MB left" in one[1]


def interrupted(folder: str, trials: int) -> list[int]:
    """A writer is killed at a random moment of a save; returns the steps that are published each time."""
    engine, found, rng = shardwise.parallelize(tasks.decoder(), "single"), [], random.Random(0)
    for trial in range(trials):
        engine.state.steps_done = trial
        saver = Saver(engine, folder, keep=1)
        saver.prepare()
        saver.save()
        saver.finish()
        engine.state.steps_done = trial + 1
        assert saver._writer is not None
        timer = threading.Timer(rng.random() * 0.012, os.kill, (saver._writer.process.pid, signal.SIGKILL))
        timer.start()
        try:
            saver.save()
            saver.finish()
        except RunError as error:
            assert "its writer left with exit code -9" in str(error) or "has ended" in str(error), error
        timer.join()
        saver.close()
        paths = publish.scan(Path(folder))
        assert all(publish.verify(path) == [] for path in paths)
        found.append(publish.step_of(paths[0]) - trial)
        shutil.rmtree(folder)
    engine.close()
    return found


def test_a_writer_that_is_killed_leaves_the_last_published_one(pool, tmp_path: Path) -> None:
    (found,) = pool.run(interrupted, 1, str(tmp_path / "x"), 12)
    assert set(found) <= {0, 1} and 0 in found


def grown(folder: str, saves: int) -> tuple[float, int]:
    """(MB by which this process and its writer have grown over the later saves, open files more than before)."""
    engine = shardwise.parallelize(tasks.decoder(), "single")
    saver = Saver(engine, folder, keep=1)

    def held() -> tuple[float, int]:
        assert saver._writer is not None
        pages = sum(
            int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in ("self", saver._writer.process.pid)
        )
        return pages * os.sysconf("SC_PAGESIZE") / 1e6, len(os.listdir("/proc/self/fd"))

    sizes = []
    for _ in range(saves):
        engine.step(engine.task.batch(0))
        saver.save()
        saver.finish()
        sizes.append(held())
    saver.close()
    engine.close()
    return sizes[-1][0] - sizes[saves // 2][0], sizes[-1][1] - sizes[saves // 2][1]


def test_nothing_grows_with_the_number_of_saves(pool, tmp_path: Path) -> None:
    ((grown_mb, files),) = pool.run(grown, 1, str(tmp_path), 50)
    assert grown_mb < 2 and files == 0


def test_a_writer_ends_with_its_rank_and_writes_what_it_was_given(tmp_path: Path) -> None:
    """A rank that is killed in the middle of a save: the writer publishes what it has, and leaves no process."""
    child = os.fork()
    if child == 0:
        os._exit(_killed_while_saving(str(tmp_path)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    until = time.monotonic() + 30
    while time.monotonic() < until and not publish.scan(tmp_path):
        time.sleep(0.05)
    (path,) = publish.scan(tmp_path)
    assert publish.verify(path) == []
    writer = int((tmp_path / "writer").read_text())
    while time.monotonic() < until and Path(f"/proc/{writer}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{writer}").exists() or "Z" in Path(f"/proc/{writer}/stat").read_text().split()[2]


def written_by_two(folder: Path) -> list[str]:
    """A checkpoint of step 2 of two ranks, each by a writer: what each of them failed with."""
    begun: list[tuple[Writer, publish.Work, int]] = []
    for rank in (0, 1):
        work, parts = work_of(folder, 2, rank, keep=1)
        file = os.memfd_create("x")
        size = os.write(file, b"".join(parts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            begun.append((Writer(file), work, size))
        os.close(file)
    told = []
    for writer, work, size in begun:
        writer.begin(work, size)
    for writer, _, _ in reversed(begun):
        try:
            writer.wait()
            told.insert(0, "")
        except RunError as error:
            told.insert(0, str(error))
        writer.close()
    return told


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_writer_killed_at_any_change_of_the_disk(rank: int, every: int, tmp_path: Path) -> None:
    """The same as for a rank that writes itself; and the other rank's writer does not wait for what will not come."""
    for at in range(0, 100, every):
        folder = tmp_path / str(at)
        save(folder, 1, Disk(), keep=1)
        with faults.injected(Fault("kill", rank=rank, at="disk", after=at)) as told_in:
            began = time.monotonic()
            said = written_by_two(folder)
            struck = faults.struck(told_in)
        assert time.monotonic() - began < 100  # it would be 600 s
        if not struck:
            break
        assert f"its writer left with exit code {-signal.SIGKILL}" in said[rank], said
        assert steps_that_load(folder) in ([1], [2], [2, 1]), (at, said)
        publish.clear(folder, Disk())
        save(folder, 3, Disk(), keep=1)
        assert steps_that_load(folder) == [3]
    assert not struck and said == ["", ""] and steps_that_load(folder) == [2] and at > 7


def _killed_while_saving(folder: str) -> int:

    work, parts = work_of(Path(folder), 3, 0, ranks=1)
    data = b"".join(parts)
    file = os.memfd_create("x")
    os.write(file, data)
    writer = Writer(file)
    (Path(folder) / "writer").write_text(str(writer.process.pid))
    writer.begin(work, len(data))
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
