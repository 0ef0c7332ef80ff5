"""Weights, gradients and state on the host's memory, for ranks on a mock accelerator: not one bit of a run changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mutations.plant import Bug, planted
from mutations.tasks import adafactor
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise import Plan, Task, parallelize, simulate
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.digest import digest
from shardwise.engine.ema import Ema
from shardwise.engine.load_weights import load_state_dict
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.host import HostReads
from shardwise.look import memory_limits
from shardwise.memory.live import LiveBytes
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
    out["held"], out["notices"] = engine.memory(), engine.notices
    engine.close()
    return out


def both(
    name: str | Callable[[], Task], plan: str, clip: float | None, bug: Bug | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Returns what is to be the same: the plan on the CPU, and on a mock accelerator with its weights on the host.

    bug  planted in the latter
    """
    device = mock_device.install()
    if dist.get_world_size() > 1:
        mock_device.join_group()
    # both take the operations of which attention is composed: kernels of the CPU alone round in another order
    torch.backends.cuda.enable_flash_sdp(False)
    kernel_for, block_attention.kernel_for = block_attention.kernel_for, lambda *_: None
    try:
        plain = stepped(task_of(name), plan, "cpu", clip)
        here = bug is not None and (bug.ranks is None or dist.get_rank() in bug.ranks)
        with planted(bug) if here and bug else nullcontext(lambda: 1) as ran:
            moved = stepped(task_of(name), f"{plan},{HOST}".removeprefix("single,"), str(device), clip)
        assert ran() > 0, "the bug did not run"
        return plain, moved
    finally:
        block_attention.kernel_for = kernel_for
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
SETTINGS = ["", "accumulate=4", "precision=bf16", "clip"]


def test_same_bits(mocks: RankPool) -> None:
    for rank in assert_same("mlp_frozen_unused", "dp_shard=2,zero=3,accumulate=2", mocks, 0.05):
        assert rank["reads"][0] == {"control row": 1}
        assert any("AdamW updates weights on the host's processor op by op" in told for told in rank["notices"])
        assert rank["held"]["parameters"] == rank["held"]["gradients"] == rank["held"]["optimizer"] == 0


@pytest.mark.long
@pytest.mark.parametrize(("layout", "setting"), list(product(LAYOUTS, SETTINGS)))
def test_same_bits_in_full(layout: str, setting: str, mocks: RankPool) -> None:
    setting = setting.replace("4", "2") if "pp" in layout else setting  # of seven samples
    plan = ",".join(filter(None, [layout, "" if setting == "clip" else setting]))
    assert_same("decoder", plan, mocks, 0.05 if setting == "clip" else None)


def refusal(plan: str, free: int) -> str:
    """Returns why a plan is refused on a host of so much free memory; "" where it is made."""
    device = mock_device.install()
    if dist.get_world_size() > 1:
        mock_device.join_group()
    told, memory_limits.host_memory = memory_limits.host_memory, lambda: (None, free)
    try:
        parallelize(task_of("mlp"), plan, device=str(device)).close()
    except RefusedPlan as refused:
        return str(refused)
    finally:
        memory_limits.host_memory = told
    return ""


@pytest.mark.parametrize(
    ("plan", "width"),
    [(f"dp_shard=2,zero=3,{HOST}", 12), ("dp_shard=2,zero=1,offload=optimizer", 8)],
)
def test_a_host_without_room_is_told_before_the_first_step(plan: str, width: int, mocks: RankPool) -> None:
    """Of all ranks together: Adam's state, and gradients where weights lie there too."""
    params = sum(param.numel() for param in task_of("mlp").model().parameters())
    needed = params * width
    less, enough = (mocks.run(refusal, 2, plan, free) for free in (int(needed * 0.98), int(needed * 1.3) + 10_000))
    assert enough == ["", ""]
    assert less[0] == less[1] and "2 rank(s) of" in less[0] and "offload=optimizer:disk" in less[0]


@pytest.mark.long
@pytest.mark.parametrize("plan", ["accumulate=2", "precision=fp16", "remat=full"])
@pytest.mark.parametrize("name", ["decoder", "wide"])
def test_same_bits_of_a_rank_alone(name: str, plan: str, mocks: RankPool) -> None:
    """Not clipped: the plan without offload takes the norm over other runs of elements."""
    assert_same(wide if name == "wide" else name, plan, mocks, same=[what for what in SAME if what != "used"])


@pytest.mark.long
@pytest.mark.parametrize("name", [adafactor, "mlp_frozen_unused", "decoder_tied", "mlp", "unet_batchnorm"])
@pytest.mark.parametrize("plan", ["dp_shard=2,zero=3,accumulate=2", "dp_shard=2,zero=3,precision=fp16"])
def test_same_bits_of_other_modules(name: Any, plan: str, mocks: RankPool) -> None:
    """Owners of whole tensors, frozen and unused weights, one weight in two units, unequal shards, batch statistics."""
    assert_same(name, plan, mocks, 0.05)


# --- bytes on the device and on the host, and what crosses


class Block(nn.Module):
    """Two wide layers, so that weights are most of what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def wide() -> Task:
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(step)
        return torch.randn(8, 128, generator=made), torch.randn(8, 128, generator=made)

    return Task(
        lambda: nn.Sequential(*(Block() for _ in range(6))),
        batch=batch,
        inputs=lambda batch: ((batch[0],), {}),
        loss=lambda output, batch: ((output - batch[1]).square().sum(), len(output)),
    )


class DeviceBytes(LiveBytes):
    """Live bytes of the mock device alone."""

    def note(self, output: object) -> None:
        leaves = [getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(output)]
        super().note([leaf for leaf in leaves if isinstance(leaf, mock_device.MockTensor)])


def bytes_of_a_step(plan: str) -> tuple[int, int | None, tuple[int, int, int, int]]:
    """Returns (peak on the device, bytes on the host, what crossed the link) of a second step."""
    device = mock_device.install()
    if dist.get_world_size() > 1:
        mock_device.join_group()
    task, live, traffic = wide(), DeviceBytes(), mock_device.TRAFFIC
    assert task.batch is not None
    engine = parallelize(task, plan, device=str(device))
    engine.step(task.batch(0))
    traffic.clear()
    with live:
        engine.step(task.batch(1))
    link = traffic.bytes["to device"], traffic.beside, traffic.bytes["to host"], traffic.waits
    return live.peak, engine.memory()["host"], link


@pytest.mark.parametrize("plan", [
    "dp_shard=2,accumulate=2", *(pytest.param(plan, marks=pytest.mark.long) for plan in (
        "accumulate=1", "precision=bf16,remat=full", "dp_shard=2,precision=bf16", "dp_shard=2,remat=full",
    )),
])  # fmt: skip
def test_bytes_are_those_of_the_forecast(plan: str, mocks: RankPool) -> None:
    ranks, micro = Plan.parse(plan).world_size, Plan.parse(plan).accumulate
    peak, on_host, (_, beside, to_host, waits) = mocks.run(bytes_of_a_step, ranks, f"{plan},{HOST}")[0]
    forecast = simulate("test_weights_on_host:wide", f"{plan},{HOST}", "2 l40s")
    assert peak == pytest.approx(forecast.worst.allocated, rel=0.02)
    weights = 4 * sum(param.numel() for param in wide().model().parameters()) / ranks
    assert on_host == pytest.approx(4 * weights, rel=0.02), "weights, gradients and two moments"
    told = re.search(r"([\d.e+-]+) GB of each rank in the host's memory", forecast.basis["offload"])
    assert told is not None and float(told[1]) * 1e9 == pytest.approx(on_host, rel=0.02)
    # with several micro-batches FSDP2 gathers a unit ahead that nobody waits for
    assert 0 <= beside - 2 * micro * weights <= (micro - 1) * weights / 6, "for each gather, beside what computes"
    assert to_host == pytest.approx(micro * weights, rel=0.001)
    assert waits == 1 + len(Block().state_dict()), "for the control row, and the copies of the unit that is last"


# --- bugs planted, each in the run with weights on the host alone

ADD = "shardwise.parallel.fsdp:HostGradients._add"
FIRST = "self._sums[id(param)].to_local().add_(gradient.to_local())"
BUGS = [
    ("a copy to the host is not waited for", ADD, "event.synchronize()", "pass",
     "dp_shard=2,zero=3,accumulate=4", None),  # FSDP2 waits for the last, and what came before it in its stream
    ("the first micro-batch's gradient is dropped", ADD, FIRST, "self._sums[id(param)] = gradient",
     "dp_shard=2,zero=3,accumulate=2", None),
    ("a micro-batch's gradient is added twice", ADD, FIRST, f"{FIRST}.add_(gradient.to_local())",
     "dp_shard=2,zero=3,accumulate=2", None),
    ("the norm lacks one rank's part", "shardwise.step.normalise:_sum_of_squares", "[_summed(norms_of(held)",
     "[0 * _summed(norms_of(held)", "dp_shard=2,zero=3", (1,)),
    ("only gradients on the device are clipped", "shardwise.step.normalise:normalise", "by_device(gradients)",
     "by_device(gradients[:0])", "dp_shard=2,zero=3", None),
    ("a gather reads what was copied for one before", "shardwise.parallel.fsdp:_use_copies",
     "param._sharded_param_data = shard", "pass", "accumulate=1", None),
    ("masters are others than what is gathered", "shardwise.parallel.full:FullShard.publish",
     "bring_back(slot.master, self.piece(index, param.detach()))", "slot.master.data = slot.master.data.clone()",
     "dp_shard=2,zero=3", None),
    ("shards are put a row late", "shardwise.parallel.fsdp:put_shard", "whole[slices]", "whole.roll(1, 0)[slices]",
     "dp_shard=2,zero=3", (1,)),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", BUGS, ids=lambda case: case[0])
def test_a_bug_is_found(case: tuple, mocks: RankPool) -> None:
    name, where, old, new, plan, on = case
    bug = Bug(name, where, old, new, "", plan, on)
    try:
        ranks = mocks.run(both, Plan.parse(plan).world_size, "mlp", plan, 0.05, bug, timeout_s=100)
    except ShardwiseError as error:
        assert "not finite" in str(error), "it is named"
        return
    assert any(plain[what] != moved[what] for plain, moved in ranks for what in SAME)


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


@pytest.mark.parametrize(("name", "plan"), [
    pytest.param("decoder_tied", "dp_shard=2,accumulate=2", marks=pytest.mark.long), ("mlp", "accumulate=1"),
    pytest.param("decoder", "dp_replicate=2", marks=pytest.mark.long),
])  # fmt: skip
def test_proven_in_float64(name: str, plan: str, mocks: RankPool) -> None:
    (alone, ranks, far), *_ = mocks.run(proven, Plan.parse(plan).world_size, name, plan, timeout_s=120)
    assert max(abs(a - b) for a, b in zip(alone, ranks, strict=True)) < 1e-12
    assert max(far["gradients"], far["parameters"]) < 1e-11, far
