"""A disk that is full, fails or gives too little: one error that names file and offset, and never a mixture."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import parallelize
from shardwise.digest import digest
from shardwise.engine.engine import Engine
from shardwise.errors import RefusedPlan, RunError
from shardwise.models import tasks
from shardwise.tiers import disk, scratch, subgroups

DISK = "offload=optimizer:disk"


@pytest.fixture(autouse=True)
def small_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgroups, "SUBGROUP_BYTES", 20_000)


def stepped(plan: str = DISK, steps: int = 2) -> Engine:
    task = tasks.decoder()
    engine = parallelize(task, plan)
    assert task.batch is not None
    for step in range(steps):
        engine.step(task.batch(step))
    return engine


def states(engine: Engine) -> dict[str, str]:
    """Digests of the state as it lies on the disk, without asking the engine."""
    names = {id(slot.master): slot.name for slot in engine.technique.slots}
    return {
        f"{names[id(param)]}/{key}": digest(value)
        for param, kept in engine.optimizer.state.items()
        for key, value in kept.items()
        if value.numel() > 1
    }


class Failing:
    """`os.preadv` or `os.pwritev` that goes wrong at its `at`-th call from now on."""

    def __init__(self, real: Any, at: int, outcome: OSError | int):
        self.real, self.left, self.outcome = real, at, outcome

    def __call__(self, fd: int, buffers: list[Any], offset: int) -> int:
        self.left -= 1
        if self.left != 0:
            return self.real(fd, buffers, offset)
        if isinstance(self.outcome, OSError):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize("at", [1, 9])
@pytest.mark.parametrize(
    ("call", "outcome", "message"),
    [
        ("preadv", OSError(errno.EIO, "Input/output error"), "cannot read"),
        ("preadv", 0, "the disk gave no more bytes"),
        ("pwritev", OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_a_failure_in_a_step(
    call: str, outcome: Any, message: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    engine = stepped()
    before = states(engine)
    monkeypatch.setattr(os, call, Failing(getattr(os, call), at, outcome))
    batch = tasks.decoder().batch
    assert batch is not None
    with pytest.raises(RunError, match=message) as raised:
        engine.step(batch(2))
    monkeypatch.undo()
    assert "at offset" in str(raised.value) and ".state" in str(raised.value)
    assert states(engine) == before, "what lies on the disk is the state before the step"
    for use in (lambda: engine.step(batch(2)), lambda: dict(engine.full_optimizer_state())):
        with pytest.raises(RunError, match="go on from the last checkpoint"):
            use()


def test_a_failure_in_the_first_step_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stepped(steps=0)
    monkeypatch.setattr(os, "pwritev", Failing(os.pwritev, 3, OSError(errno.EIO, "Input/output error")))
    batch = tasks.decoder().batch
    assert batch is not None
    with pytest.raises(RunError, match="cannot write"):
        engine.step(batch(0))
    assert states(engine) == {}


def test_a_short_read_that_goes_on_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def in_pages(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][: subgroups.PAGE]], offset)

    monkeypatch.setattr(os, "preadv", in_pages)
    engine = stepped(steps=3)
    monkeypatch.undo()
    assert states(engine) == states(stepped("single", steps=3))


def test_a_full_disk_is_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RefusedPlan, match=r"has no room for .* GB, twice this rank's state .*TMPDIR"):
        stepped(steps=0)


def test_a_folder_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "file_system", lambda folder: "tmpfs")
    with pytest.raises(RefusedPlan, match="is tmpfs, which lies in the host's memory: let TMPDIR name"):
        stepped(steps=0)


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="Linux tells its file systems")
def test_the_kind_of_a_file_system() -> None:
    assert scratch.file_system(Path("/dev/shm")) == "tmpfs"
    assert scratch.file_system(Path(__file__).parent) not in ("", "tmpfs")


def test_a_file_system_without_direct_access_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", refusing)
    engine = stepped(steps=2)
    assert any("O_DIRECT" in notice for notice in engine.notices)
    assert states(engine) == states(stepped("single", steps=2))


def test_nothing_is_left_of_the_file() -> None:
    engine = stepped(steps=1)
    (place,) = engine.state.tier.places if engine.state.tier is not None else ()
    assert isinstance(place, disk.StateFile)
    assert not place.file.path.exists()
    engine.close()


def test_a_saved_state_is_as_large_as_itself(tmp_path: Path) -> None:
    torch.save(stepped().optimizer.state_dict(), tmp_path / "moved.pt")
    torch.save(stepped("single").optimizer.state_dict(), tmp_path / "plain.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("moved.pt", "plain.pt")]
    assert abs(sizes[0] - sizes[1]) < 4096


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda groups: torch.optim.SGD(groups, lr=0.1), "keeps no state beside the weights"),
        (lambda groups: torch.optim.LBFGS([p for g in groups for p in g["params"]]), "does not give the same bits so"),
    ],
)
def test_optimizers_whose_state_does_not_move(optimizer: Any, message: str) -> None:
    with pytest.raises(RefusedPlan, match=message):
        parallelize(tasks.mlp().with_(optimizer=optimizer), DISK)


class CountsCalls(torch.optim.AdamW):
    """An optimizer whose rate hangs on how often it was called, by a number that it keeps in a list."""

    def __init__(self, groups: Any):
        super().__init__(groups, lr=1e-3)
        self.calls = [0]

    def step(self, closure: Any = None) -> Any:
        self.calls[0] += 1
        for group in self.param_groups:
            group["lr"] = 1e-3 / self.calls[0]
        return super().step(closure)


def test_an_optimizer_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(RefusedPlan, match="CountsCalls does not give the same bits so"):
        parallelize(tasks.mlp().with_(optimizer=CountsCalls), DISK)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor, torch.optim.NAdam, torch.optim.ASGD]
)
def test_other_optimizers_give_the_same_bits(optimizer: Any) -> None:
    task = tasks.mlp().with_(optimizer=lambda groups: optimizer(groups, lr=1e-2))
    digests = []
    for plan in ("single", DISK):
        engine = parallelize(task, plan)
        assert task.batch is not None
        losses = [engine.step(task.batch(step)).loss for step in range(3)]
        digests.append((losses, {name: digest(value) for name, value in engine.full_parameters()}, states(engine)))
    assert digests[0] == digests[1]


def test_the_host_of_a_rank_on_the_processor_is_refused() -> None:
    with pytest.raises(RefusedPlan, match=r"the device of this rank is its processor.*offload=optimizer:disk"):
        parallelize(tasks.mlp(), "offload=optimizer")
