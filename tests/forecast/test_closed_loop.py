"""What a probe measures and how a forecast uses it. Whether times come true: benchmarks/closed_loop.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shardwise.cluster import Cluster, OpTable, measured_ops
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.overhead import Overhead, events, overhead_of, techniques
from shardwise.costs.software import software
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.measure.overheads import LARGE, REFERENCES, _seconds, fit, non_negative, plans
from shardwise.measure.pace import Pace
from shardwise.measure.reference_modules import large_tasks, reference_task
from shardwise.planner.traced_layouts import traced_subject
from shardwise.rehearsal import cut_module
from shardwise.rehearsal.rank_row import trace_of
from shardwise.rehearsal.step_trace import one_sample, trace
from shardwise.task import Task

ROWS = (
    ("replicas", 400.0, 3.0, 60.0, 0.0, 0.0),
    ("zero3", 900.0, 3.0, 60.0, 700.0, 0.1),
    ("tp", 600.0, 3.0, 60.0, 0.0, 0.2),
    ("pp", 500.0, 3.0, 60.0, 90.0, 0.0),
)


def probed(overhead_rows: tuple = ROWS) -> Cluster:
    """Two ranks of a CPU that was measured, in round figures."""
    base = Cluster.parse("2 l40s")
    device = replace(
        base.device, kind="cpu", table="", overheads=overhead_rows,
        ops=(("add", 1e3, 2.0), ("add", 1e6, 100.0), ("gelu", 1e3, 10.0), ("gelu", 1e6, 400.0)),
        products=(
            *(("fp32", m, n, k, 1.0 + 2e-5 * m * n * k) for m in (16, 64) for n in (16, 64) for k in (16, 64)),
            *((kind, m, n, k, 5.0 + slow * m * n * k) for kind, slow in (("conv", 4e-5), ("conv_backward", 8e-5))
              for m in (512, 8192) for n in (32, 64) for k in (72, 576)),
        ),
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
    assert both == Overhead(*map(pytest.approx, (1100e-6, 3e-6, 60e-6, 700e-6, 0.3)))
    assert overhead_of(device, Layout(shard=2, zero=1)) == overhead_of(device, Layout()), "not measured: as replicas"
    assert overhead_of(Cluster.parse("2 l40s").device, Layout()) == Overhead()
    drawn = (("replicas draws", 450.0, 13.0, 90.0, 0.0, 0.0), ("zero3 draws", 980.0, 13.0, 90.0, 900.0, 0.1))
    drawing = probed((*ROWS, *drawn)).device
    assert overhead_of(drawing, Layout(tp=2), follows=True).step == pytest.approx(650e-6), "not measured: as without"
    assert overhead_of(drawing, Layout(tp=2)).cut == pytest.approx(60e-6), "this model draws nothing"
    both = overhead_of(drawing, Layout(pp=2, shard=2, zero=3), follows=True)
    assert both == Overhead(*map(pytest.approx, (1080e-6, 13e-6, 90e-6, 990e-6, 0.1)))
    assert events(Layout(shard=2, zero=3, n_micro=2), units=4) == 10
    assert events(Layout(pp=2, n_micro=4), units=4) == 4


def test_a_probe_follows_draws_for_rows_of_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at samples `randomness="global"` looks at every operation, which doubles a small step."""
    asked: list[str] = []

    class Asked(Exception):
        pass

    def parallelize(*_: object, randomness: str = "global", **__: object) -> None:
        asked.append(randomness)
        raise Asked

    monkeypatch.setattr("shardwise.engine.engine.parallelize", parallelize)
    for follows in (False, True):
        with pytest.raises(Asked):
            _seconds(reference_task(), "dp_replicate=1", Pace(torch.device("cpu"), 100.0), 1.0, follows)
    assert asked == ["fast", "global"]
    assert {name for name in plans(2) if name not in plans(2, quick=True)} == {
        "zero2", "sp", "zero3 draws", "tp draws", "sp draws", "pp draws",
    }  # fmt: skip
    assert plans(2)["replicas draws"] == plans(2)["replicas"] and plans(2)["pp draws"] == plans(2)["pp"]
    assert set(plans(1)) == {"replicas", "replicas draws"}


MADE = (("products", 1.3), ("convolutions", 0.8), ("rest", 1.6))


@pytest.mark.long
def test_overheads_and_factors_are_found_again_in_steps_that_were_made_with_them() -> None:
    cluster = probed()
    made = replace(cluster, device=replace(cluster.device, factors=MADE))
    tasks = [reference_task(*sizes, 8) for sizes in REFERENCES]
    steps = {name: [seconds_of(made, *each) for each in zip(plans(2)[name], tasks, strict=True)]
             for name, *_ in ROWS}  # fmt: skip
    large = {(kind, name): seconds_of(made, plans(2)[name][0], task)
             for kind, task in large_tasks(2).items() for name in LARGE[kind] if name in steps}  # fmt: skip
    found, factors = fit(replace(cluster, device=replace(cluster.device, overheads=())), steps, large)
    assert dict(factors) == pytest.approx(dict(MADE), rel=0.02)
    rows = {row[0]: row[1:] for row in found}
    assert list(rows) == [*(row[0] for row in ROWS), "sp"]
    for name, *known in ROWS:
        assert rows[name] == pytest.approx(tuple(known), rel=0.05), name
    assert rows["sp"] == rows["tp"], "not measured here, so as the other one"


def test_a_kind_of_op_that_no_step_tells_of_has_the_factor_of_the_others() -> None:
    """Steps of a transformer alone say nothing of convolutions."""
    cluster = probed()
    even = tuple((kind, 1.5) for kind, _ in MADE)
    made = replace(cluster, device=replace(cluster.device, factors=even, overheads=()))
    task = large_tasks(2)["products"]
    large = {("products", name): seconds_of(made, plans(2)[name][0], task) for name in ("replicas", "zero1")}
    nothing = replace(cluster, device=replace(cluster.device, overheads=()))
    steps = {name: [seconds_of(nothing, plan, reference_task(*sizes, 8))
                    for plan, sizes in zip(plans(2)[name], REFERENCES, strict=True)]
             for name in ("replicas", "zero1")}  # fmt: skip
    _, factors = fit(nothing, steps, large)
    assert dict(factors)["convolutions"] == pytest.approx(1.5, rel=0.15)
    assert dict(factors)["products"] == pytest.approx(1.5, rel=0.15)


def test_each_kind_of_op_takes_its_own_factor() -> None:
    """A net of convolutions is slower by the factor of convolutions, and no transformer is."""
    cluster = probed()
    tasks = large_tasks(2)

    def slower(kind: str, factor: str) -> float:
        made = replace(cluster, device=replace(cluster.device, factors=((factor, 2.0),), overheads=()))
        bare = replace(cluster, device=replace(cluster.device, overheads=()))
        return seconds_of(made, "dp_replicate=2", tasks[kind]) / seconds_of(bare, "dp_replicate=2", tasks[kind])

    assert slower("products", "convolutions") == 1.0
    assert slower("convolutions", "convolutions") > 1.5 and slower("products", "products") > 1.3
    assert slower("rest", "rest") > 1.5 and slower("rest", "products") == 1.0


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
    probed_kinds = replace(cluster, device=replace(cluster.device, factors=MADE))
    assert Cluster.from_dict(probed_kinds.as_dict()).device.factors == MADE
    broken = cluster.as_dict()
    broken["device"]["overheads"][0][1] = -1.0
    with pytest.raises(InputError, match=r"device.overheads\[0\].*of at least 0"):
        Cluster.from_dict(broken)
    broken = cluster.as_dict()
    broken["device"]["ops"][0][2] = 0.0
    with pytest.raises(InputError, match=r"device.ops\[0\].*above 0"):
        Cluster.from_dict(broken)


def test_ops_on_cut_tensors_are_counted_beside_those_that_their_rules_start() -> None:
    """A step on tensors that nothing cuts has none; one under tensor parallelism has fewer than it has ops in all."""
    task = reference_task(2, 1, 4)
    looks = cut_module.TaskAnalysis(task, one_sample(task))
    assert trace(task, 2).cut_calls == 0
    alone, cut = (trace_of(cut_module.CutRehearsal(looks, cut_module.Cuts(tp=tp)), 0, 0, (2,)) for tp in (1, 2))
    assert alone.cut_calls == 0
    assert 0 < cut.cut_calls < cut.calls


def test_an_op_on_cut_tensors_has_its_own_cost_in_a_forecast() -> None:
    """Each costs as much as was measured under tp, and none under replicas, which start no such op."""
    dear = tuple((*row[:3], row[3] + 100.0, *row[4:]) for row in ROWS)
    task = reference_task(2, 1, 4)
    looks = cut_module.TaskAnalysis(task, one_sample(task))
    calls = trace_of(cut_module.CutRehearsal(looks, cut_module.Cuts(tp=2)), 0, 0, (8,)).cut_calls
    added = seconds_of(probed(dear), "tp=2", task) - seconds_of(probed(), "tp=2", task)
    assert added == pytest.approx(calls * 100e-6 * 1.2), "and its ranks wait for a fifth of what they do"
    assert seconds_of(probed(dear), "dp_replicate=2", task) == seconds_of(probed(), "dp_replicate=2", task)
