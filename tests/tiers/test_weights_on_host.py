"""Weights, gradients and state on the host's memory, for ranks on a mock accelerator: not one bit of a run changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mutations.tasks import adafactor

from shardwise import Plan, Task, parallelize
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.digest import digest
from shardwise.engine.ema import Ema
from shardwise.engine.load_weights import load_state_dict
from shardwise.host import HostReads
from shardwise.models import tasks
from shardwise.parallel.sequence import block_attention
from shardwise.proof.oracle import run_oracle
from shardwise.proof.rank import run_rank
from shardwise.proof.settings import Settings
from shardwise.ranks import RankPool
from shardwise.testing import mock_device

HOST = "offload=parameters"
STEPS = 3


@pytest.fixture(scope="module")
def mocks() -> Iterator[RankPool]:
    """Ranks of their own: a device is registered for a process's life."""
    with RankPool(quiet=True) as ranks:
        yield ranks


def task_of(name: str | Callable[[], Task]) -> Task:
    return getattr(tasks, name)() if isinstance(name, str) else name()


def stepped(task: Task, plan: str, device: str, clip: float | None) -> dict[str, Any]:
    """Losses and digests of all that is trained, after three steps; of the last, reads and what crossed the link."""
    engine = parallelize(task, plan, device=device, clip_norm=clip)
    assert task.batch is not None
    out: dict[str, Any] = {"losses": [engine.step(task.batch(step)).loss for step in range(STEPS - 1)]}
    mock_device.TRAFFIC.clear()
    with HostReads() as reads:
        out["losses"].append(engine.step(task.batch(STEPS - 1)).loss)
    traffic = mock_device.TRAFFIC
    out["reads"] = dict(reads.named), dict(reads.others)
    out["link"] = traffic.bytes["to device"], traffic.beside, traffic.bytes["to host"], traffic.waits
    out["weights"] = {key: digest(value.cpu()) for key, value in engine.full_parameters()}
    out["used"] = {key: digest(value.cpu()) for key, value in engine.used_parameters()}
    out["gradients"] = {key: digest(value.cpu()) for key, value in engine.full_gradients() if value is not None}
    out["state"] = {
        f"{key}/{part}": digest(value.cpu())
        for key, kept in engine.full_optimizer_state()
        for part, value in kept.items()
        if isinstance(value, torch.Tensor)
    }
    out["evaluated"] = engine.evaluate([task.batch(7)])
    out["held"] = engine.memory()
    engine.close()
    return out


def both(name: str | Callable[[], Task], plan: str, clip: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is to be the same: the plan on the CPU, and on a mock accelerator with its weights on the host."""
    device = mock_device.install()
    if dist.get_world_size() > 1:
        mock_device.join_group()
    # both take the operations of which attention is composed: kernels of the CPU alone round in another order
    torch.backends.cuda.enable_flash_sdp(False)
    fused, block_attention._is_fused = block_attention._is_fused, lambda *_: False
    try:
        plain = stepped(task_of(name), plan, "cpu", clip)
        return plain, stepped(task_of(name), f"{plan},{HOST}".removeprefix("single,"), str(device), clip)
    finally:
        block_attention._is_fused = fused
        torch.backends.cuda.enable_flash_sdp(True)


SAME = ("losses", "weights", "used", "gradients", "state", "evaluated")


def assert_same(
    name: Any, plan: str, mocks: RankPool, clip: float | None = None, same: Sequence[str] = SAME
) -> list[dict[str, Any]]:  # fmt: skip
    ranks = mocks.run(both, Plan.parse(plan).world_size, name, plan, clip, timeout_s=180)
    for plain, moved in ranks:
        for what in same:
            assert moved[what] == plain[what], f"{what} differ"
        assert plain["state"]
    return [moved for _, moved in ranks]


LAYOUTS = [
    "dp_shard=2,zero=3", "cp=2,zero=3", "dp_shard=2,dp_replicate=2,zero=3", "tp=2,dp_shard=2,zero=3",
    "pp=2,dp_shard=2,zero=3", "cp=2,dp_shard=2,zero=3", "dp_shard=2,zero=3,remat=full",
    "dp_shard=2,zero=3,remat=selective", "dp_shard=3,zero=3",
]  # fmt: skip
SETTINGS = ["", "accumulate=3", "precision=bf16", "clip"]


def test_same_bits(mocks: RankPool) -> None:
    for rank in assert_same("decoder_tied", "dp_shard=2,zero=3,accumulate=2", mocks, 0.05):
        assert rank["reads"][0] == {"control row": 1}
        assert rank["held"]["parameters"] == rank["held"]["gradients"] == rank["held"]["optimizer"] == 0


@pytest.mark.long
@pytest.mark.parametrize(("layout", "setting"), list(product(LAYOUTS, SETTINGS)))
def test_same_bits_in_full(layout: str, setting: str, mocks: RankPool) -> None:
    plan = ",".join(filter(None, [layout, "" if setting == "clip" else setting]))
    assert_same("decoder", plan, mocks, 0.05 if setting == "clip" else None)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["accumulate=2", "precision=fp16", "remat=full", "wrap=blocks.1"])
def test_same_bits_of_a_rank_alone(plan: str, mocks: RankPool) -> None:
    """Not clipped: the plan without offload takes the norm over other runs of elements."""
    assert_same("decoder", plan, mocks, same=[what for what in SAME if what != "used"])


@pytest.mark.long
@pytest.mark.parametrize("name", [adafactor, "mlp_frozen_unused", "decoder_tied", "mlp", "unet_batchnorm"])
@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3,accumulate=2", "dp_shard=2,zero=3,precision=fp16"])
def test_same_bits_of_other_modules(name: Any, plan: str, mocks: RankPool) -> None:
    """Owners of whole tensors, frozen and unused weights, one weight in two units, unequal shards, batch statistics."""
    assert_same(name, plan, mocks, 0.05)


# --- around a run


def goes_on(folder: str) -> list[str]:
    """What is not the same of a run that stops, with weights on the host before, after, or both, as of one that does
    not; and of whole weights that are taken out and put in."""
    device = str(mock_device.install())
    mock_device.join_group()
    plan, wrong = "dp_shard=2,zero=3,accumulate=2", []
    task = tasks.mlp()
    assert task.batch is not None

    def run(steps: range, offload: bool, read: str = "", save: str = "") -> tuple[dict[str, str], dict[str, str]]:
        where = (f"{plan},{HOST}", device) if offload else (plan, "cpu")
        engine = parallelize(task, where[0], device=where[1], clip_norm=0.05)
        ema = Ema(engine, 0.5)
        if read:
            restore(engine, f"{folder}/{read}", ema=ema)
        for step in steps:
            engine.step(task.batch(step))
            ema.update()
        if save:
            saver = Saver(engine, f"{folder}/{save}", background=False, ema=ema)
            saver.save({"data": {"position": 5}})
            saver.close()
        weights = {key: digest(value) for key, value in engine.state_dict().items()}
        with ema.applied():
            averages = {key: digest(value) for key, value in engine.state_dict().items()}
        engine.close()
        return weights, averages

    whole = run(range(4), False)
    for before, after in ((True, True), (True, False), (False, True)):
        name = f"{before}{after}"
        run(range(2), before, save=name)
        if run(range(2, 4), after, read=name) != whole:
            wrong.append(name)
    engine = parallelize(task, f"{plan},{HOST}", device=device)
    given = {key: torch.full_like(value, 0.01) for key, value in engine.state_dict().items()}
    load_state_dict(engine.state, given)
    plain = parallelize(task, plan, device="cpu")
    load_state_dict(plain.state, given)
    for step in range(2):
        if engine.step(task.batch(step)).loss != plain.step(task.batch(step)).loss:
            wrong.append("weights that were put in")
    engine.save_weights(f"{folder}/weights.safetensors")
    ours, theirs = engine.state_dict(), plain.state_dict()
    if any(not torch.equal(value, theirs[key]) for key, value in ours.items()):
        wrong.append("weights that came out")
    return wrong


def test_a_run_goes_on_and_weights_come_out(mocks: RankPool, tmp_path: Any) -> None:
    assert mocks.run(goes_on, 2, str(tmp_path), timeout_s=120) == [[], []]


def proven(name: str, plan: str) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses of one process on the device and of ranks there, in float64, and the largest differences."""
    device = mock_device.install()
    if dist.get_world_size() > 1:
        mock_device.join_group()
    settings = Settings(clip_norm=0.05, device=device.type)
    alone = run_oracle(task_of(name), settings)
    ranks = run_rank(task_of(name), Plan.parse(f"{plan},precision=fp64,{HOST}"), settings)
    far: dict[str, float] = {}
    for what in ("gradients", "parameters"):
        for one, other in zip(getattr(alone, what), getattr(ranks, what), strict=False):  # rank 0 has them
            gaps = [(one[key] - other[key]).abs().max().item() for key in one if one[key] is not None]
            far[what] = max(far.get(what, 0.0), *gaps)
    return alone.losses, ranks.losses, far


@pytest.mark.parametrize(("name", "plan"), [("decoder_tied", "dp_shard=2,accumulate=2"), ("mlp", "accumulate=1")])
def test_proven_in_float64(name: str, plan: str, mocks: RankPool) -> None:
    (alone, ranks, far), *_ = mocks.run(proven, Plan.parse(plan).world_size, name, plan, timeout_s=120)
    assert max(abs(a - b) for a, b in zip(alone, ranks, strict=True)) < 1e-12
    assert max(far["gradients"], far["parameters"]) < 1e-11, far
