"""Forecasts of plans whose optimizer's state lies in the hosts' memory or on their disks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise import plan, simulate
from shardwise.cluster import Cluster
from shardwise.cluster.figure import Figure
from shardwise.costs.layout import Layout
from shardwise.costs.memory import states
from shardwise.costs.offload import LINK_SHARE, offloaded
from shardwise.costs.software import STATES, software
from shardwise.errors import RefusedPlan
from shardwise.planner.decoders import decoder_by_name

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
    cost = offloaded(1e9, STATES["bf16"], layout, cluster)
    assert cost.disk_s == pytest.approx(2 * 8e9 * 8 / 5e9) and cost.disk_bytes == 8e9
    assert cost.beside(1.0) == cost.disk_s and cost.beside(100.0) == 100.0 + cost.link_s
    with pytest.raises(RefusedPlan, match="no figure for the disk of its host: give disk_gbps"):
        offloaded(1e9, STATES["bf16"], layout, Cluster.parse(NODE))


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


def test_what_fits_on_the_devices_is_not_offloaded() -> None:
    found = plan("llama3-8b", NODE, **ASKED)
    assert found.best.plan.offload == "none" and not found.best.runnable


@pytest.mark.parametrize(
    ("task", "what", "told"),
    [("llama3-8b", "parameters", "is not forecast"), ("llama3-8b", "activations", "is not forecast"),
     ("shardwise.models.tasks:mlp", "gradients:disk", "is not forecast")],
)  # fmt: skip
def test_other_offloads_are_refused(task: str, what: str, told: str) -> None:
    asked = ASKED if ":" not in task else {}
    with pytest.raises(RefusedPlan, match=told):
        simulate(task, f"dp_replicate=2,offload={what}", NODE, **asked)
