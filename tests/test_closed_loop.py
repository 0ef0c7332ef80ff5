"""What a probe measures and how a forecast uses it. Whether times come true: benchmarks/closed_loop.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.cluster import Cluster, OpTable, measured_ops
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.overhead import Overhead, events, overhead_of, techniques
from shardwise.costs.software import software
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.planner.overheads import REFERENCES, fit, non_negative, plans, reference_task, whole_task
from shardwise.planner.traced import traced_subject
from shardwise.planner.tracing import trace
from shardwise.task import Task

ROWS = (("replicas", 400.0, 3.0, 0.0), ("zero3", 900.0, 3.0, 700.0), ("tp", 600.0, 40.0, 0.0), ("pp", 500.0, 3.0, 90.0))


def probed(overhead_rows: tuple = ROWS) -> Cluster:
    """Two ranks of a CPU that was measured, in round figures."""
    base = Cluster.parse("2 l40s")
    device = replace(
        base.device, kind="cpu", table="", overheads=overhead_rows,
        ops=(("add", 1e3, 2.0), ("add", 1e6, 100.0), ("gelu", 1e3, 10.0), ("gelu", 1e6, 400.0)),
        products=tuple(("fp32", m, n, k, 1.0 + 2e-5 * m * n * k) for m in (16, 64) for n in (16, 64) for k in (16, 64)),
    )  # fmt: skip
    return replace(base, device=device)


def test_an_op_is_read_between_its_sizes_and_an_unknown_one_moves_bytes_as_an_addition_does() -> None:
    table = measured_ops(probed().device.ops)
    assert isinstance(table, OpTable)
    assert table.seconds("gelu", 1e3) == pytest.approx(10e-6)
    assert 10e-6 < table.seconds("gelu", 3e4) < 400e-6
    assert table.seconds("gelu", 2e6) == pytest.approx(800e-6), "beyond its largest size an op is bound by its bytes"
    assert table.seconds("add", 1.0) == pytest.approx(2e-6)
    assert table.seconds("an op of tomorrow", 1e6) == table.seconds("add", 1e6)
    assert measured_ops(()) is None


def test_techniques_that_meet_add_what_each_adds_to_replicas() -> None:
    device = probed().device
    both = overhead_of(device, Layout(tp=2, shard=2, zero=3))
    assert techniques(Layout(tp=2, shard=2, zero=3)) == ["zero3", "tp"]
    assert (both.step, both.call, both.event) == pytest.approx((1100e-6, 40e-6, 700e-6))
    assert overhead_of(device, Layout(shard=2, zero=1)) == overhead_of(device, Layout()), "not measured: as replicas"
    assert overhead_of(Cluster.parse("2 l40s").device, Layout()) == Overhead()
    assert events(Layout(shard=2, zero=3, n_micro=2), units=4) == 10
    assert events(Layout(pp=2, n_micro=4), units=4) == 4


def test_overheads_are_found_again_in_steps_that_were_made_with_them() -> None:
    cluster = probed()
    tasks = [reference_task(*sizes, 8) for sizes in REFERENCES]
    steps = {name: [seconds_of(cluster, *each) for each in zip(plans(2)[name], tasks, strict=True)]
             for name, *_ in ROWS}  # fmt: skip
    large = {"replicas": 1.3 * seconds_of(cluster, plans(2)["replicas"][0], whole_task(2))}
    slower = {name: [1.3 * seconds for seconds in own] for name, own in steps.items()}
    found, factor = fit(replace(cluster, device=replace(cluster.device, overheads=())), slower, large)
    assert factor == pytest.approx(1.3, rel=0.02)
    assert [row[0] for row in found] == [row[0] for row in ROWS]
    for row, made in zip(found, ROWS, strict=True):
        assert row[1:] == pytest.approx(made[1:], rel=0.05), row[0]


def seconds_of(cluster: Cluster, text: str, task: Task) -> float:
    """The forecast of a reference's step."""
    plan = Plan.parse(text)
    layout = of_plan(plan, global_batch=8, seq=1, uneven=True)
    micro = (layout.micro_batch, layout.micro_batch)
    return traced_subject(task, cluster, software("shardwise"), 8, "fp32", (plan.remat,), micro).simulate(layout).step_s


def test_weights_are_never_negative() -> None:
    features = np.array([[1.0, 10.0], [1.0, 20.0], [1.0, 30.0]])
    assert non_negative(features, features @ [2.0, 0.5]) == pytest.approx([2.0, 0.5])
    found = non_negative(features, features @ [-4.0, 0.5])
    assert min(found) >= 0 and found[1] > 0


def test_a_question_about_a_tensor_is_not_an_op() -> None:
    task = reference_task(1, 1, 2)
    found = trace(task, 2)
    assert found.order and all(kind != "device" for kind, _, _ in found.order)
    assert found.kernels == len(found.order)
    assert found.calls > found.kernels, "views are calls too"


def test_a_cluster_file_keeps_ops_and_overheads() -> None:
    cluster = probed()
    assert Cluster.from_dict(cluster.as_dict()).device.ops == cluster.device.ops
    assert Cluster.from_dict(cluster.as_dict()).device.overheads == ROWS
    broken = cluster.as_dict()
    broken["device"]["overheads"][0][1] = -1.0
    with pytest.raises(InputError, match=r"device.overheads\[0\].*of at least 0"):
        Cluster.from_dict(broken)
    broken = cluster.as_dict()
    broken["device"]["ops"][0][2] = 0.0
    with pytest.raises(InputError, match=r"device.ops\[0\].*above 0"):
        Cluster.from_dict(broken)
