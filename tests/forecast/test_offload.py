"""Forecasts of plans whose optimizer's state lies in the hosts' memory or on their disks."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise import Plan, Task, plan, simulate
from shardwise.cluster import Cluster
from shardwise.cluster.figure import Figure
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES, states
from shardwise.costs.offload import HOST_GBPS, LINK_SHARE, offloaded
from shardwise.costs.room import of_host
from shardwise.costs.software import STATES, software
from shardwise.errors import InputError, RefusedPlan
from shardwise.memory.live import LiveBytes
from shardwise.memory.recompute import recompute_block
from shardwise.models import tasks
from shardwise.models.decoder import DecoderConfig
from shardwise.planner import propose
from shardwise.planner.candidates import Constraints
from shardwise.planner.decoders import decoder_by_name
from shardwise.rehearsal.step_trace import trace
from shardwise.tiers import activations, stores

DISK = ",offload=activations:disk"
NODE = "8 h100-sxm-80gb"
ASKED = {"global_batch": 64, "seq": 4096}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_a_rank_holds_the_rest_of_the_state(zero: int, fraction: float) -> None:
    layouts = [Layout(shard=8, zero=zero, offload=text) for text in ("none", f"optimizer:host:{fraction}")]
    without, held = (states({"dense": 1.0, "experts": 0.0}, layout, software("shardwise")) for layout in layouts)
    assert held["optimizer"] == pytest.approx(without["optimizer"] * (1 - fraction))
    assert {**held, "optimizer": 0} == {**without, "optimizer": 0}, "masters stay beside the gradients"


def test_the_state_goes_over_the_link_and_back() -> None:
    """Against sums by hand: 8 bytes of a rank's own eighth, twice, which the update waits for."""
    count = decoder_by_name("llama3-8b").parameters
    text = "dp_shard=8,zero=3,accumulate=8,precision=bf16"
    with_it = simulate("llama3-8b", f"{text},offload=optimizer", NODE, **ASKED)
    without = simulate("llama3-8b", text, NODE, **ASKED)
    link = Cluster.parse(NODE).device.host_gbps
    assert link is not None
    moved = count / 8 * 2 * 8 / (link.value * LINK_SHARE * 1e9)
    assert with_it.parts["optimizer"] == pytest.approx(without.parts["optimizer"] + moved, rel=1e-3)
    assert with_it.parts["compute"] == without.parts["compute"]
    assert f"{count / 8 * 8 / 1e9:,.3g} GB of each rank in the host's memory" in with_it.basis["offload"]
    saved = without.worst.allocated - with_it.worst.allocated
    assert saved == pytest.approx(count / 8 * 8, rel=1e-3)


def test_a_disk_works_beside_the_update() -> None:
    """The longer of the two, with the ranks of a host at one disk."""
    rate = Figure(5.0, "measured", "a test")
    cluster = Cluster.parse(NODE)
    cluster = replace(cluster, device=replace(cluster.device, disk_gbps=rate))
    layout = Layout(shard=8, zero=3, offload="optimizer:disk")
    cost = offloaded(1e9, STATES["bf16"], layout, cluster, 28.0)
    assert cost.disk_s == pytest.approx(2 * 8e9 * 8 / 5e9) and cost.disk_bytes == 8e9
    assert cost.beside(1.0) == cost.disk_s and cost.beside(100.0) == 100.0 + cost.link_s
    unknown = Cluster.parse("8 rtx-4090")
    with pytest.raises(RefusedPlan, match="no figure for the disk of its host: give disk_gbps"):
        offloaded(1e9, STATES["bf16"], layout, unknown, 28.0)


def test_70b_on_one_node_has_an_answer_that_runs() -> None:
    found = plan("llama3-70b", NODE, **ASKED)
    assert found.best.plan.offload == "optimizer" and not found.best.runnable
    assert any(note.startswith("nothing fits in the devices' memory alone") for note in found.notes)
    again = simulate("llama3-70b", found.best.plan, NODE, **ASKED)
    assert again.step_s == pytest.approx(found.best.forecast.step_s) and again.fits(found.capacity)


def test_a_traced_task_on_the_processor_goes_to_a_disk() -> None:
    machine = Cluster.parse("2 l40s")
    rate = Figure(1.0, "measured", "a test")
    machine = replace(machine, device=replace(machine.device, kind="cpu", table="", disk_gbps=rate))
    task, text = "shardwise.models.tasks:decoder", "dp_shard=2,zero=1,precision=bf16"
    with_it, without = (simulate(task, text + more, machine) for more in (",offload=optimizer:disk", ""))
    terms, before = with_it.worst.terms, without.worst.terms
    assert "optimizer" not in terms and "master" not in terms
    assert terms["state on its way to the disk"] == pytest.approx(before["optimizer"] + before["master"])
    assert with_it.parts["optimizer"] >= without.parts["optimizer"]
    with pytest.raises(RefusedPlan, match="is a processor, whose memory is the host's"):
        simulate(task, f"{text},offload=optimizer", machine)


def on_processors(gbps: float = 1.0) -> Cluster:
    machine = Cluster.parse("2 l40s")
    device = replace(machine.device, kind="cpu", table="", disk_gbps=Figure(gbps, "measured", "a test"))
    return replace(machine, device=device)


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given before it returns."""

    def submit(self, function: Any, *args: Any) -> Future:
        done: Future = Future()
        done.set_result(function(*args))
        return done


def deep() -> Task:
    """A decoder of twelve blocks."""
    return tasks._decoder("deep", 8, DecoderConfig(layers=12))


@pytest.mark.parametrize(("remat", "fraction"), [("none", 1.0), ("none", 0.5), ("full", 1.0)])
def test_the_peak_of_a_trace_with_moved_activations_is_a_real_one(
    remat: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """To the byte, gradients left out of both; and the bytes that are put are those of the trace."""
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    task = deep()
    assert task.batch is not None
    batch, model = task.batch(0), task.model().train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for block in model.blocks if remat != "none" else ():
        recompute_block(block, remat)
    store = stores.ExtentFile(torch.device("cpu"), 0)
    activations.Activations(model, activations.spread([*model.blocks], [(store, fraction)]))
    store._pool = AtOnce()  # a thread lets go of what it has written a moment later
    live = LiveBytes()
    live.count([*model.parameters(), *model.buffers(), *batch.values()])
    base = live.now
    with live:
        args, kwargs = task.inputs(batch)
        output = model(*args, **kwargs)
        total = task.loss(output, batch)[0]
        del output
        total.backward()
    traced = trace(task, 8, recompute=remat, moved=f"activations:disk:{fraction}")
    assert traced.peak == live.peak - base
    assert traced.put == {"disk": store.bytes_put}


def test_activations_that_move_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sums by hand: there and back, two ranks at one disk, beside forward and backward."""
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    text, task = "dp_replicate=2,accumulate=2,offload=activations:disk", "test_offload:deep"
    slow, fast = (simulate(task, text, on_processors(gbps)) for gbps in (1e-3, 1e3))
    alone = simulate(task, "dp_replicate=2,accumulate=2", on_processors())
    put = trace(deep(), 2, moved="activations:disk").put["disk"]
    assert put > 0 and fast.parts["activations that move"] == 0
    waited = 2 * (2 * put * 2 / 1e6 - alone.parts["compute"] / 2)
    assert slow.parts["activations that move"] == pytest.approx(waited, rel=0.02)
    assert slow.worst.allocated < alone.worst.allocated
    assert "activations of each micro-batch there and back" in slow.basis["activations that move"]


@pytest.mark.parametrize("plan", [pytest.param("pp=2,microbatches=2", marks=pytest.mark.long), "dp_shard=2,zero=3"])
def test_ranks_are_rehearsed_with_what_moves(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 1)
    moved, alone = (simulate("test_offload:deep", plan + more, on_processors()) for more in (DISK, ""))
    assert moved.worst.terms["micro-batch"] < 0.95 * alone.worst.terms["micro-batch"]


def test_weights_are_read_for_each_gather_and_written_once() -> None:
    """Against sums by hand: what lies in memory, what gathers read beside compute, and what the update moves."""
    text, task = "dp_shard=2,zero=3,accumulate=2", "test_offload:deep"
    offload = ",offload=optimizer:disk|parameters:disk:0.5"
    slow, fast = (simulate(task, text + offload, on_processors(gbps)) for gbps in (1e-3, 1e3))
    alone = simulate(task, text, on_processors())
    before, after = alone.worst.terms, slow.worst.terms
    weights = before["weights"]
    assert after["weights"] == pytest.approx(weights / 2) and "optimizer" not in after
    assert 0 < after["weights on their way from the disk"] <= weights / 2
    assert {**after, "weights": 0}.items() >= {name: before[name] for name in ("gradients", "micro-batch")}.items()
    read = 2 * weights / 2 * 2 / 1e6  # for forward and backward, by two ranks at one disk
    compute = alone.parts["compute"] / 2
    assert slow.parts["weights that are read"] == pytest.approx(2 * (read - compute), rel=0.1)
    assert fast.parts["weights that are read"] == 0
    assert slow.parts["optimizer"] == pytest.approx(2 * (before["optimizer"] + weights / 2) * 2 / 1e6, rel=0.02)
    assert "of weights read for each micro-batch" in slow.basis["weights that are read"]
    assert "in a disk, of weights" in slow.basis["offload"]


@pytest.mark.parametrize(
    ("machine", "offload", "told"),
    [(Cluster.parse("2 l40s"), "parameters:disk", "l40s has memory of its own"),
     (on_processors(), "parameters", "is a processor, whose memory is the host's")],
)  # fmt: skip
def test_weights_lie_on_disks_of_processors(machine: Cluster, offload: str, told: str) -> None:
    with pytest.raises(RefusedPlan, match=told):
        simulate("test_offload:deep", f"dp_shard=2,zero=3,offload={offload}", machine)


def test_what_costs_more_is_looked_at_later() -> None:
    """Of tasks whose modules are traced: activations after the optimizer, and weights, of processors, last."""
    task, shape = SimpleNamespace(own=True), SimpleNamespace(own=False)
    optimizer = "optimizer:disk"
    assert propose._tiers(on_processors(), task) == [
        optimizer, f"{optimizer}|activations:disk", f"{optimizer}|parameters:disk",
        f"{optimizer}|parameters:disk|activations:disk",
    ]  # fmt: skip
    weights = "optimizer|parameters|gradients"
    disks = ["optimizer:disk", "optimizer:disk|parameters|gradients"]
    assert propose._tiers(Cluster.parse(NODE), task) == [
        "optimizer", "optimizer|activations", weights, f"{weights}|activations", *disks,
    ]  # fmt: skip
    assert propose._tiers(Cluster.parse(NODE), shape) == ["optimizer", weights, *disks]
    assert propose._tiers(Cluster.parse("8 rtx-4090"), shape) == ["optimizer", weights], "a disk without a rate"


# --- weights on the host

HOST = "offload=parameters"


def test_weights_come_from_the_host_for_each_gather() -> None:
    """Against sums by hand: 16 bytes of a rank's eighth lie there, of which 4 cross before each gather, and back."""
    count, machine = decoder_by_name("llama3-8b").parameters, Cluster.parse(NODE)
    text = "dp_shard=8,zero=3,accumulate=8,precision=bf16"
    there, here = (simulate("llama3-8b", f"{text}{more}", machine, **ASKED) for more in (f",{HOST}", ""))
    assert not {"weights", "master", "gradients", "optimizer"} & there.worst.terms.keys()
    assert f"{count / 8 * 16 / 1e9:,.3g} GB of each rank in the host's memory" in there.basis["offload"]
    assert there.room.needed == {"host": pytest.approx(count * 16)} and there.parts["compute"] == here.parts["compute"]
    # op by op, after the norm and the division
    assert there.parts["optimizer"] == pytest.approx(count * (3 * 28 + 12) / (HOST_GBPS * 1e9), rel=1e-3)
    link = machine.device.host_gbps
    assert link is not None
    slow = replace(machine, device=replace(machine.device, host_gbps=replace(link, value=1.0)))
    crossing = 8 * 2 * count / 8 * 4 / (LINK_SHARE * 1e9)  # eight micro-batches, forward and backward
    step = simulate("llama3-8b", f"{text},{HOST}", slow, **ASKED)
    assert step.parts["compute"] + step.parts["data-parallel communication"] == pytest.approx(crossing, rel=0.1)


@pytest.mark.parametrize(
    ("name", "machine", "offload", "asked"),
    [("gpt-3-175b", NODE, "optimizer:disk|parameters|gradients", {"global_batch": 64, "seq": 2048}),
     ("llama3-8b", "1 rtx-4090", "optimizer|parameters|gradients", ASKED)],
)  # fmt: skip
def test_what_needs_the_host_has_an_answer_that_runs(
    name: str, machine: str, offload: str, asked: dict[str, int]
) -> None:  # fmt: skip
    found = plan(name, machine, **asked)
    best = found.best.plan
    assert best.offload == offload and best.zero == 3 and not found.best.runnable
    assert Plan.parse(str(best)) == best and best.world_size == Cluster.parse(machine).world_size
    again = simulate(name, best, machine, **asked)
    assert again.fits(found.capacity)


def test_a_pipeline_with_weights_on_the_host_is_not_forecast() -> None:
    with pytest.raises(RefusedPlan, match="not forecast with a pipeline"):
        simulate("llama3-8b", f"pp=2,dp_shard=4,zero=3,microbatches=4,{HOST}", NODE, **ASKED)


@pytest.mark.parametrize("text", ["dp_shard=2,zero=3", "accumulate=2,precision=bf16"])
def test_a_traced_task_keeps_its_units_alone(text: str) -> None:
    machine = Cluster.parse("2 l40s")
    there = simulate("test_offload:deep", f"{text},{HOST}", machine)
    here = simulate("test_offload:deep", text, machine)
    assert there.worst.terms.keys() <= {"micro-batch", "weights on their way from the host", "inputs"}
    assert there.worst.allocated < here.worst.allocated
    assert "of weights come from the host for each gather" in there.basis["weights from the host"]


@pytest.mark.long
@pytest.mark.parametrize(("machine", "text"), [("2 l40s", "dp_shard=2,zero=3,"), ("1 l40s", "")])
def test_a_task_that_needs_the_host_has_an_answer(machine: str, text: str) -> None:
    """Between what it needs with weights on the host, and with all else there."""
    task, cluster = f"{Path(__file__).parents[1] / 'tiers' / 'test_weights_on_host.py'}:wide", Cluster.parse(machine)
    more, less = (
        simulate(task, f"{text}offload={what}", cluster).worst.reserved
        for what in ("optimizer|activations", "parameters")
    )
    memory = Figure(((more + less) / 2 + CONTEXT_BYTES) / 1e9, "given", "a test")
    between = replace(cluster, device=replace(cluster.device, memory_gb=memory))
    found = plan(task, between, constraints=Constraints(headroom=0.0), precision="fp32")
    assert found.best.plan == Plan.parse(f"{text}offload=parameters") and not found.best.runnable


@pytest.mark.long
def test_a_task_whose_weights_do_not_fit_has_an_answer() -> None:
    """Between what it needs with its optimizer on the disk, and with its weights too."""
    task, machine = "test_offload:deep", on_processors()
    texts = ("optimizer:disk|activations:disk", "optimizer:disk|parameters:disk")
    more, less = (
        simulate(task, f"dp_shard=2,zero=3,precision=bf16,remat=full,offload={text}", machine).worst.allocated
        for text in texts
    )
    assert less < more
    memory = Figure(((more + less) / 2 + CONTEXT_BYTES) / 1e9, "given", "a test")
    between, exact = replace(machine, device=replace(machine.device, memory_gb=memory)), Constraints(headroom=0.0)
    found = plan(task, between, constraints=exact)
    assert "parameters:disk" in found.best.plan.offload and found.best.plan.zero == 3


def test_what_fits_on_the_devices_is_not_offloaded() -> None:
    found = plan("llama3-8b", NODE, **ASKED)
    assert found.best.plan.offload == "none" and not found.best.runnable


@pytest.mark.parametrize(
    ("task", "what", "told"),
    [("llama3-8b", "activations|parameters", "is not forecast"), ("llama3-8b", "activations", "is not forecast"),
     ("shardwise.models.tasks:mlp", "gradients:disk", "gradients")],
)  # fmt: skip
def test_other_offloads_are_refused(task: str, what: str, told: str) -> None:
    asked = ASKED if ":" not in task else {}
    with pytest.raises(RefusedPlan, match=told):
        simulate(task, f"dp_shard=8,zero=3,offload={what}", NODE, **asked)


# --- room on a host


def test_a_host_with_too_little_is_told_and_the_disk_is_its_remedy() -> None:
    """Against sums by hand: 16 bytes of each weight on one host, 8 of which a disk would take, twice."""
    count = decoder_by_name("llama3-8b").parameters
    host = round(count * 12 / 0.9e9)
    half = f"1 rtx-4090, host-{host}gb"
    with pytest.raises(InputError) as raised:
        plan("llama3-8b", half, **ASKED)
    told = str(raised.value)
    assert f"keeps {count * 16 / 1e9:.4g} GB of a host's memory for its 1 rank(s), of {host * 0.9:.4g} GB" in told
    staging = 3 * 2**26
    assert (
        f"What would: offload=optimizer:disk|parameters|gradients, which keeps {(count * 8 + staging) / 1e9:.4g} GB"
        in told
    )
    assert f"{count * 16 / 1e9:.4g} GB of a host's disk" in told and "disk-12gb/s in its text" in told
    found = plan("llama3-8b", f"{half}, disk-7gb/s", **ASKED)
    best = found.best
    assert best.plan.offload == "optimizer:disk|parameters|gradients" and best.forecast.fits(found.capacity)
    assert "of how much is not known: disk-2tb in the cluster's text" in found.notes[0]
    with pytest.raises(InputError, match=r"GB of a host's disk for its 1 rank\(s\), of 100 GB"):
        plan("llama3-8b", f"{half}, disk-7gb/s, disk-100gb", **ASKED)


def test_405b_does_not_fit_one_node_and_its_host_is_why() -> None:
    with pytest.raises(InputError, match=r"3,248 GB of a host's memory for its 8 rank\(s\), of 1,800 GB \(2,000 less"):
        plan("llama3-405b", NODE, **ASKED)


def test_a_plan_beyond_its_host_does_not_fit() -> None:
    text = "dp_shard=8,zero=3,accumulate=8,precision=bf16,offload=parameters"
    small, large, unknown = (simulate("llama3-8b", text, where, **ASKED) for where in (
        f"{NODE}, host-100gb", NODE, "8 rtx-4090"
    ))  # fmt: skip
    assert not small.fits(1e12) and large.fits(1e12) and unknown.fits(1e12)
    assert "128.5 GB of a host's memory for its 8 rank(s), of 90 GB" in small.shortage(1e12)
    assert large.shortage(1e9).startswith(f"{large.needed_bytes / 1e9:.1f} GB of 1.0 GB")
    assert unknown.room.line("host").endswith("memory_gb of [node] in its file, tells it")


@pytest.mark.parametrize(("plan", "ranks"), [("pp=2,dp_shard=4,zero=1,microbatches=4", 8), ("dp_shard=16,zero=1", 8)])
def test_all_ranks_of_a_host_count(plan: str, ranks: int) -> None:
    """Stages of a host by their own parameters: together they have the model's, each host its part of the shards."""
    count, machine = decoder_by_name("llama3-8b").parameters, "2x8 h100-sxm-80gb, ib-400"
    parsed = Plan.parse(plan)
    forecast = simulate("llama3-8b", f"{plan},precision=bf16,offload=optimizer", machine, global_batch=64, seq=1024)
    assert forecast.room.ranks == ranks
    assert forecast.room.needed["host"] == pytest.approx(8 * count * ranks / parsed.world_size)


def test_stages_that_fill_a_host_alone_count_by_the_fullest() -> None:
    unlike = [{"host": 3.0}, {"host": 1.0}]
    machine = Cluster.parse("2x8 h100-sxm-80gb, ib-400")
    whole, apart = (of_host(unlike, Layout(pp=2, shard=shard), machine) for shard in (4, 8))
    assert whole.needed == {"host": 8 * 2.0} and apart.needed == {"host": 8 * 3.0}
    tray = of_host([{"host": 1.0}], Layout(shard=72, zero=3), Cluster.parse("72 gb200"))
    assert tray.ranks == 4 and tray.needed == {"host": 4.0}, "four devices of a host, where links join 72"


def test_a_traced_task_tells_what_its_host_keeps() -> None:
    machine = Cluster.parse("2 l40s, host-100gb")
    forecast = simulate("test_offload:deep", f"dp_shard=2,zero=3,{HOST}", machine)
    params = sum(param.numel() for param in deep().model().parameters())
    assert forecast.room.needed["host"] == pytest.approx(16 * params, rel=0.01)
    assert forecast.as_dict()["host"]["host"]["room_bytes"] == 90e9
    on_disk = simulate("test_offload:deep", "dp_replicate=2,offload=activations:disk", on_processors())
    put = trace(deep(), 4, moved="activations:disk").put["disk"]
    assert on_disk.room.needed == {"disk": 2 * put}
