"""Shards of weights in a mapped file: what is in memory when, and a disk that fails."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import parallelize
from shardwise.engine.moved_parameters import lie_on_host, shards_elsewhere
from shardwise.errors import RefusedPlan, RunError
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.tiers import ShardFile, scratch, shards

CPU = torch.device("cpu")
WEIGHTS = "dp_shard=2,zero=3,offload=parameters:disk"
ELEMENTS = 1 << 20  # of each shard: 4 MiB


def file_of(units: int = 3) -> ShardFile:
    """Returns a file with two shards of each unit, which hold 2 k and 2 k + 1 in all elements, written and unmapped."""
    file = ShardFile([[torch.empty(ELEMENTS, device="meta")] * 2 for _ in range(units)], 0)
    for number, shard in enumerate(shard for unit in file.memory for shard in unit):
        shard.fill_(number)
    file.let_go()
    return file


def mapped_bytes(file: ShardFile) -> int:
    """Returns what of the file lies in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{file._start:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024


def test_a_unit_is_in_memory_for_its_gather_alone() -> None:
    file = file_of()
    assert mapped_bytes(file) == 0
    file.before_gather(1)
    assert mapped_bytes(file) == 2 * ELEMENTS * 4
    assert [shard[-1].item() for shard in file.memory[1]] == [2, 3], "nothing is lost where it is unmapped"
    file.after_gather(1)
    assert mapped_bytes(file) == 0
    file.close()


def test_the_next_unit_is_read_ahead_from_the_second_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    file, waited = file_of(), []
    read = file._read

    def noting(extents: Any, how: int) -> None:
        waited.append(threading.current_thread() is threading.main_thread())
        read(extents, how)

    monkeypatch.setattr(file, "_read", noting)
    order = [0, 1, 2, 2, 1, 0]  # forward, backward
    for unit in order * 3:
        file.before_gather(unit)
        assert file.memory[unit][1][0] == 2 * unit + 1
        file.after_gather(unit)
    file.abandon()
    # the second round's first two come after a pair that was not seen before
    assert waited.count(True) == len(order) + 2 and waited.count(False) == 2 * len(order) - 1
    file.close()


def test_what_is_changed_in_place_is_read_back() -> None:
    file = file_of()
    params = [file.memory[0][0], file.memory[2][1]]
    file.fetch(params)
    file.wait_for(params)
    for param in params:
        param.add_(0.5)
    file.store(params)
    file.finish()
    assert mapped_bytes(file) == 0
    os.posix_fadvise(file.file.fd, 0, file.size, os.POSIX_FADV_DONTNEED)  # not from the page cache
    assert [shard[-1].item() for unit in file.memory for shard in unit] == [0.5, 1, 2, 3, 4, 5.5]
    file.close()


def test_shards_of_any_size_lie_apart() -> None:
    """Of no elements, of other dtypes, and not of whole pages."""
    likes = [torch.empty(3), torch.empty(0), torch.empty(5000, dtype=torch.int64), torch.empty(7, dtype=torch.bool)]
    file = ShardFile([likes], 0)
    for number, shard in enumerate(file.memory[0]):
        shard.fill_(number % 2)
    assert [(s.dtype, s.shape) for s in file.memory[0]] == [(s.dtype, s.shape) for s in likes]
    assert [s.float().mean().item() for s in file.memory[0] if s.numel()] == [0, 0, 1]
    assert file._extents(file.memory[0]) == [(0, file.size)] and file._extents([torch.empty(3)]) == []
    file.close()


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EINVAL])
def test_a_disk_that_gives_no_bytes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL: an older kernel, which reads when the pages are touched."""
    file, real = file_of(), shards._madvise()

    def failing(start: int, size: int, how: int) -> int:
        return number if how == shards.POPULATE_READ else real(start, size, how)

    monkeypatch.setattr(shards, "_madvise", lambda: failing)
    if number == errno.EINVAL:
        file.before_gather(1)
        assert file.memory[1][0][0] == 2
    else:
        where = rf"cannot read {8 * ELEMENTS} bytes at offset {8 * ELEMENTS} of .*\.parameters: the disk gave no bytes"
        with pytest.raises(RunError, match=where):
            file.before_gather(1)
    file.close()


def full_disk_in_an_update() -> list[str]:
    task = tasks.decoder()
    engine = parallelize(task, WEIGHTS)
    assert task.batch is not None
    engine.step(task.batch(0))
    real, messages = os.fdatasync, []

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for sync in (failing, real):
        os.fdatasync = sync
        try:
            engine.step(task.batch(1))
        except RunError as error:
            messages.append(str(error))
    return messages


def test_a_write_that_fails_ends_the_run(pool: RankPool) -> None:
    for failed, after in pool.run(full_disk_in_an_update, 2):
        assert "cannot write" in failed and ".parameters: Input/output error" in failed
        assert "go on from the last checkpoint" in failed and "a step failed on its way" in after


def test_a_full_disk_is_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RefusedPlan, match=r"no room for .* GB, this rank's weights .No space left"):
        file_of()


def test_a_folder_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "file_system", lambda folder: "tmpfs")
    with pytest.raises(RefusedPlan, match="is tmpfs, which lies in the host's memory: let TMPDIR name"):
        file_of()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("dp_shard=2,zero=2,offload=parameters:disk", "add zero=3"),
        ("dp_shard=2,zero=3,ep=2,offload=parameters:disk", "use offload=optimizer"),
        ("dp_shard=2,zero=3,offload=gradients:disk", "offload=parameters under zero=3 puts weights, gradients and"),
        ("dp_shard=2,zero=3,offload=gradients", "offload=parameters under zero=3 puts weights, gradients and"),
        ("dp_shard=2,zero=3,offload=parameters:host:0.5", "use offload=parameters, or offload=optimizer"),
    ],
)
def test_plans_that_are_refused(plan: str, message: str) -> None:
    with pytest.raises(RefusedPlan, match=message):
        parallelize(tasks.moe(), plan)


def elsewhere(offload: str, device: torch.device = CPU) -> Any:
    notices: list[str] = []
    mesh = replace(build_mesh(Plan.parse("single"), CPU), device=device)
    lay = shards_elsewhere(Plan.parse(f"dp_shard=2,zero=3,offload={offload}"), mesh, notices)
    return lay, notices


def test_tiers_that_gain_nothing_or_are_not_built() -> None:
    with pytest.raises(RefusedPlan, match=r"the device of this rank is its processor.*offload=parameters:disk"):
        lie_on_host(Plan.parse("dp_shard=2,offload=parameters"), CPU)
    with pytest.raises(RefusedPlan, match=r"an accelerator would wait.*offload=parameters, the host's memory"):
        elsewhere("parameters:disk", torch.device("meta"))


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("offload=parameters", "zero=3,offload=optimizer|parameters|gradients"),
        ("dp_shard=2,offload=gradients|parameters", "dp_shard=2,zero=3,offload=optimizer|parameters|gradients"),
        ("zero=3,offload=optimizer:disk:0.4|parameters|activations",
         "zero=3,offload=optimizer:host:0.6|optimizer:disk:0.4|parameters|gradients|activations"),
        ("offload=optimizer:disk|parameters:disk", "zero=3,offload=optimizer:disk|parameters:disk"),
    ],
)  # fmt: skip
def test_what_lies_with_weights_on_the_host(text: str, plan: str) -> None:
    assert Plan.parse(text) == Plan.parse(plan) == Plan.parse(str(Plan.parse(text)))
    assert Plan.parse(text).sharded.weights


def test_units_go_by_the_fraction_of_bytes() -> None:
    units = [[torch.empty(10)], [torch.empty(5)], [torch.empty(85)]]
    for fraction, moving in ((0.12, 1), (0.5, 2), (1, 3)):
        lay, notices = elsewhere(f"parameters:disk:{fraction}")
        assert len(lay(units).memory) == moving and not notices
    lay, notices = elsewhere("parameters:disk:0.01")
    assert lay(units) is None and "nothing moves for parameters:disk:0.01: a unit's weights move tog" in notices[0]
