"""Forecasts of plans whose optimizer lies in the hosts' memory; none of them runs."""

from __future__ import annotations

import pytest

from shardwise import plan, simulate
from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import states
from shardwise.costs.offload import HOST_MEMORY_GBPS, LINK_SHARE
from shardwise.costs.software import software
from shardwise.errors import RefusedPlan
from shardwise.planner.decoders import decoder_by_name

NODE = "8 h100-sxm-80gb"
ASKED = {"global_batch": 64, "seq": 4096}


@pytest.mark.parametrize(("zero", "weights", "gradients"), [(0, 2, 4), (1, 2, 4), (2, 2, 0.5), (3, 0.25, 0.5)])
def test_a_rank_holds_neither_masters_nor_state(zero: int, weights: float, gradients: float) -> None:
    """Bytes for each parameter over eight ranks: of weights in bf16 and gradients in float32, what ZeRO leaves."""
    layout = Layout(shard=8, zero=zero, offload="optimizer")
    held = states({"dense": 1.0, "experts": 0.0}, layout, software("shardwise"))
    assert {name: size for name, size in held.items() if size} == {"weights": weights, "gradients": gradients}


def test_the_update_takes_its_bytes_over_the_link_and_over_the_hosts_memory() -> None:
    """Against sums by hand: 4 + 2 bytes of a rank's own eighth, and 4 + 8 + 16 of all of a node's."""
    count = decoder_by_name("llama3-8b").parameters
    text = "dp_shard=8,zero=3,accumulate=8,precision=bf16"
    with_it = simulate("llama3-8b", f"{text},offload=optimizer", NODE, **ASKED)
    without = simulate("llama3-8b", text, NODE, **ASKED)
    link = Cluster.parse(NODE).device.host_gbps
    assert link is not None
    moved = count / 8 * 6 / (link.value * LINK_SHARE * 1e9)
    updated = count * (4 + 2 * 4 + 2 * 8) / (HOST_MEMORY_GBPS * 1e9)
    assert with_it.parts["optimizer"] == pytest.approx(moved + updated, rel=1e-3)
    assert with_it.parts["compute"] == without.parts["compute"]
    assert f"{count * 12 / 1e9:,.0f} GB of each node's memory" in with_it.basis["offload"]
    saved = without.worst.allocated - with_it.worst.allocated
    assert saved == pytest.approx(count / 8 * (4 + 8 - 2), rel=1e-3)  # weights in bf16 take the masters' place


def test_70b_on_one_node_has_an_answer_that_does_not_run() -> None:
    found = plan("llama3-70b", NODE, **ASKED)
    assert found.best.plan.offload == "optimizer" and "offload" in found.best.runnable
    assert any(note.startswith("nothing fits in the devices' memory alone") for note in found.notes)
    again = simulate("llama3-70b", found.best.plan, NODE, **ASKED)
    assert again.step_s == pytest.approx(found.best.forecast.step_s) and again.fits(found.capacity)


def test_what_fits_on_the_devices_is_not_offloaded() -> None:
    found = plan("llama3-8b", NODE, **ASKED)
    assert found.best.plan.offload == "none" and not found.best.runnable


@pytest.mark.parametrize(
    ("task", "what", "told"),
    [("llama3-8b", "parameters", "is not forecast"), ("llama3-8b", "activations", "is not forecast"),
     ("shardwise.models.tasks:mlp", "optimizer", "decoders by their numbers alone")],
)  # fmt: skip
def test_other_offloads_are_refused(task: str, what: str, told: str) -> None:
    asked = ASKED if ":" not in task else {}
    with pytest.raises(RefusedPlan, match=told):
        simulate(task, f"dp_replicate=2,offload={what}", NODE, **asked)
