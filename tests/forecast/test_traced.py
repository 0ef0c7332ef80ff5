"""Any module by its trace, real ranks, and runs beside their forecasts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rank_memory import every_rank

from shardwise.cluster import Cluster, model
from shardwise.costs.layout import of_plan
from shardwise.costs.shapes import Shape
from shardwise.costs.software import software
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.planner import search as search_plans
from shardwise.task import Task

if TYPE_CHECKING:
    from shardwise.simulator.counted import StepTrace

ROOT = Path(__file__).parents[2]
LLAMA = Shape.from_row(model("llama3-8b"))
NODE = Cluster.parse("8 h100-sxm-80gb")
# a machine whose ranks hold the global batch, as those that measure here do
HERE = Cluster(replace(Cluster.parse("8 l40s").device, kind="cpu", table=""), NODE.tiers)


# --- any module


def test_a_trace_counts_what_a_step_does() -> None:
    """A chain of two linear layers: products, and bytes that backward reads, by hand."""
    import torch
    from torch import nn

    from shardwise.rehearsal.step_trace import trace

    def chain() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    task = Task(
        model=chain,
        loss=lambda output, batch: (output.sum(), torch.tensor(1.0)),
        batch=lambda step: torch.ones(6, 8),
    )
    found = trace(task, 3)
    forward = 2 * 3 * (8 * 32 + 32 * 4)
    assert found.flops == 2 * forward + 2 * 3 * 32 * 4, "backward has both weights' and one input's gradient"
    assert found.parameters == 8 * 32 + 32 + 32 * 4 + 4
    assert len(found.units) == 0 or sum(found.units) + found.rest == found.parameters
    assert trace(task, 6).peak > found.peak > 3 * 32 * 4


@pytest.mark.parametrize("name", ["decoder", "gpt2", "vit", "mlp", "unet_field"])
def test_reference_tasks_get_a_ranked_table(name: str) -> None:
    from shardwise.models import tasks
    from shardwise.planner.traced_layouts import traced_subject

    make = getattr(tasks, name, None) or next(
        getattr(tasks, other) for other in dir(tasks) if other.startswith(name.split("_")[0])
    )
    machine = Cluster.parse("2x8 a100-sxm-80gb, ib-200")
    subject = traced_subject(make(), machine, software("shardwise"), 64, "bf16", ("none",), cuts=False)
    found = search_plans(subject, machine)
    assert found.best.plan.world_size == 16
    assert found.best.runnable == ""
    steps = [p.forecast.step_s for p in found.proposals]
    assert min(steps) > 0
    assert "ZeRO-3" in {p.family for p in found.proposals}


def test_recompute_keeps_less_and_computes_more() -> None:
    from shardwise.models.tasks import decoder as task
    from shardwise.rehearsal.step_trace import trace

    none, full = (trace(task(), 16, "fp32", policy) for policy in ("none", "full"))
    assert full.peak < none.peak
    assert full.flops > none.flops


def test_flops_are_those_of_the_model_whatever_ranks_do_twice() -> None:
    """Recompute, and what tp does not cut, add work but no model FLOPs: MFU follows the rate."""
    from shardwise.costs.layout import Layout
    from shardwise.models import tasks
    from shardwise.planner.traced_layouts import traced_subject

    subject = traced_subject(tasks.gpt2(), NODE, software("shardwise"), 8, "bf16", ("full",))
    plain = subject.simulate(Layout(seq=1, micro_batch=4, n_micro=1, replicas=2))
    for other in (
        Layout(seq=1, micro_batch=4, n_micro=1, replicas=2, recompute="full"),
        Layout(seq=1, micro_batch=8, n_micro=1, tp=2),
    ):
        assert subject.simulate(other).flops == plain.flops


def test_a_module_that_looks_at_values_is_named_with_its_line() -> None:
    import torch
    from torch import nn

    from shardwise.rehearsal.step_trace import trace

    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    task = Task(model=Peeks, loss=lambda o, b: (o.sum(), torch.tensor(1.0)), batch=lambda step: torch.ones(4, 4))
    with pytest.raises(InputError, match=r"without values: in Peeks, .*test_traced.py:\d+: a value that"):
        trace(task, 2)


def test_a_module_that_fails_is_named_by_its_path() -> None:
    import torch
    from torch import nn

    from shardwise.rehearsal.step_trace import trace

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.no_such_thing()

    task = Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Fails())),
        loss=lambda o, b: (o.sum(), torch.tensor(1.0)), batch=lambda step: torch.ones(4, 4),
    )  # fmt: skip
    with pytest.raises(InputError, match=r"in '1\.1' \(Fails\), .*test_traced.py:\d+: .*no_such_thing"):
        trace(task, 2)


def test_a_recurrent_layer_is_counted() -> None:
    """An LSTM of two layers: FLOPs of its products by hand, forward and twice in backward."""
    import torch
    from torch import nn

    from shardwise.rehearsal.step_trace import trace

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(8, 16, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0]

    task = Task(model=Remembers, loss=lambda o, b: (o.sum(), torch.tensor(1.0)), batch=lambda step: torch.ones(6, 5, 8))
    gates = 4 * 16 * (8 + 16) + 4 * 16 * (16 + 16)
    assert trace(task, 3).flops == 3 * 2 * 3 * 5 * gates


def test_time_between_two_traces_is_that_of_the_trace_there() -> None:
    """Shapes are on a line, not seconds: a forecast for 64 samples from traces of 2 and 4 is that of a trace of 64."""
    from shardwise.costs.kernels import Kernels
    from shardwise.models.tasks import gpt2
    from shardwise.rehearsal.step_trace import trace
    from shardwise.simulator.traced import between, compute_seconds

    soft, kernels = software("shardwise"), Kernels(NODE.device)
    one, two, many = (trace(gpt2(), count) for count in (2, 4, 64))
    assert between(one, two, 64, kernels, soft) == pytest.approx(compute_seconds(many, kernels, soft), rel=0.01)


def traced_and_measured(task: Task) -> tuple[StepTrace, int]:
    """A trace on fake tensors, and the bytes at the peak of a real step; gradients are left out of both."""
    from shardwise.memory.live import LiveBytes
    from shardwise.rehearsal.step_trace import trace

    assert task.batch is not None
    batch = task.batch(0)
    model = task.model().train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    live = LiveBytes()
    live.count([*model.parameters(), *model.buffers(), *batch.values()])
    base = live.now
    with live:
        args, kwargs = task.inputs(batch)
        output = model(*args, **kwargs)
        total = task.loss(output, batch)[0]
        del output
        total.backward()
    return trace(task, next(iter(batch.values())).shape[0]), live.peak - base


def test_peak_of_a_trace_is_that_of_a_real_step() -> None:
    from shardwise.models.tasks import decoder

    found, peak = traced_and_measured(decoder())
    assert found.peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("name", ["moe", "moe_shared", "hf_mixtral", "hf_qwen2_moe"])
def test_routed_experts_are_traced_under_a_balanced_load(name: str) -> None:
    """Counts of tokens are asked for by value; the peak is within 2% of a step whose router chose for itself."""
    from shardwise.models import tasks

    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="the task's model is one of transformers")
    found, peak = traced_and_measured(getattr(tasks, name)())
    assert found.peak == pytest.approx(peak, rel=0.02)
    assert found.balanced


def test_values_follow_masks_counts_and_views() -> None:
    """What a shadow says is what the same ops say on real integers; what is written over has no values any more."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.trace.known_values import Values, balanced, shadow

    fake = FakeTensorMode()
    with fake, Values(fake) as mode:
        scores, rows = torch.rand(6, 4), torch.rand(6, 8)
        assert not mode.assumed
        index = scores.topk(2, dim=-1).indices
        counts = torch.bincount(index.flatten(), minlength=4).tolist()
        hit = torch.nn.functional.one_hot(index, 4).sum((0, 1)).nonzero()
        picked = rows[index[:, 0] == 0]
        chosen = torch.masked_select(rows, index[:, :1] == 0)
        written = torch.zeros(3, dtype=torch.int64)
        written.copy_(scores[:3, 0] > 0)
    assert mode.assumed
    assert counts == [3, 3, 3, 3], "every choice equally often"
    assert hit.shape == (4, 1)
    assert picked.shape == (3, 8)
    assert chosen.shape == (24,)
    assert shadow(written) is None
    assert all(len(set(row)) == 2 for row in balanced(torch.Size([6, 2]), 1, 4).tolist()), "two different choices"


# --- the loop


def test_a_run_writes_its_forecast_beside_what_it_measured(tmp_path: Path) -> None:
    """On a cluster in words, so that nothing is measured first: memory by class is exact, and time is told."""
    from shardwise import train
    from shardwise.cluster import Figure
    from shardwise.training.foresight import refine

    path = tmp_path / "cluster.toml"
    base = Cluster.parse("2 l40s")
    device = base.device.__class__(**{**base.device.__dict__, "kind": "cpu", "table": ""})
    path.write_text(Cluster(device, base.tiers).to_toml())
    run = train(
        "shardwise.models.tasks:mlp", "dp_shard=2,zero=1", steps=4, cluster=str(path), out=str(tmp_path / "runs")
    )
    pairs = run.summary["forecast"]["beside"]
    for name in ("parameters", "gradients", "optimizer"):
        forecast, measured = pairs[name]
        assert forecast == pytest.approx(measured, rel=0.02), name
    assert pairs["step"][1] > 0
    again = refine(Cluster.parse(str(path)), run.folder)
    assert isinstance(again.device.correction, Figure)
    assert again.device.correction.value == pytest.approx(pairs["step"][1] / pairs["step"][0], rel=1e-3)
    for text in ("{", "[1]"):
        (run.folder / "summary.json").write_text(text)
        with pytest.raises(InputError, match="--refine"):
            refine(Cluster.parse(str(path)), run.folder)


@pytest.mark.long
def test_probe_measures_two_ranks() -> None:
    from shardwise.measure.machine import probe

    found = probe(2)
    assert found.world_size == 2
    assert found.device.products and found.collectives
    assert all(row[-1] > 0 for row in found.collectives)
    assert {row[0] for row in found.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert found.device.pace_us is not None and found.device.host_gbps is None
    assert Cluster.from_dict(found.as_dict()) == found or found.as_dict()["collectives"]


# --- memory of real ranks


def task_of(name: str):
    """A task of this file, of the tests, or of the package."""
    import module_tasks

    from shardwise.models import tasks
    from shardwise.task_names import resolve_task

    if ":" in name:
        return resolve_task(name)
    return (OWN.get(name) or getattr(tasks, name, None) or getattr(module_tasks, name))()


def evenly():
    """A mode in which every top-k picks what a forecast takes it to pick: each choice equally often."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardwise.trace.known_values import balanced

    class Evenly(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is not torch.ops.aten.topk.default:
                return func(*args, **(kwargs or {}))
            scores, k, *rest = args
            dim = rest[0] if rest else -1
            shape = list(scores.shape)
            shape[dim] = k
            index = balanced(torch.Size(shape), dim % scores.dim(), scores.shape[dim])
            return scores.gather(dim, index), index

    return Evenly()


def live_peak(name: str, text: str, even: bool = False, look: bool = False) -> tuple[int, int]:
    """On a rank: the most live bytes of the second step, and what rests after the first.

    Settled, since recompute leaves cycles and threads of the backend hold a collective's tensors a little longer.

    even  routers pick every expert equally often
    look  at a few samples first
    """
    import gc
    from contextlib import nullcontext

    from shardwise import parallelize
    from shardwise.memory.live import LiveBytes

    task = task_of(name)
    with LiveBytes() as live, evenly() if even else nullcontext():
        engine = parallelize(task, text, check_loss=look)
        engine.step(task.batch(0))
        gc.collect()
        rest = live.now
        live.reset_peak()
        live.settle = True
        engine.step(task.batch(1))
        return live.peak, rest


def both(pool, name: str, text: str, even: bool = False) -> tuple[list[float], list[int]]:
    """Bytes of every rank: forecast, and the peak of what was live."""
    from shardwise.planner.traced_task import Traced
    from shardwise.step.batching import samples_in

    task, plan = task_of(name), Plan.parse(text)
    samples = samples_in(task.batch(0))
    layout = of_plan(plan, global_batch=samples, seq=1, uneven=True)
    traced = Traced(task, HERE, software("shardwise"), plan.precision, (layout.micro_batch,) * 2, cuts=True)
    forecast = [ledger.allocated for ledger in every_rank(traced, layout, samples)]
    return forecast, [peak for peak, _ in pool.run(live_peak, plan.world_size, name, text, even, timeout_s=240)]


def beyond(pool, name: str, plans: list[str], within: float = 0.02) -> list[str]:
    """Every rank of each plan whose forecast is not within a share of its live bytes."""
    wrong = []
    for text in plans:
        forecast, measured = both(pool, name, text)
        wrong += [
            f"{text} rank {rank}: {mine:.0f} forecast, {theirs} measured ({mine / theirs - 1:+.1%})"
            for rank, (mine, theirs) in enumerate(zip(forecast, measured, strict=True))
            if abs(mine / theirs - 1) > within
        ]
    return wrong


def wire_in_a_run(name: str, text: str) -> dict[tuple[str, str], tuple[int, float]]:
    """On a rank: calls and bytes of each (axis, op) over axes that cut positions, in the second step."""
    from shardwise import parallelize
    from shardwise.layout.grid import INNER

    task = task_of(name)
    engine = parallelize(task, text, check_loss=False)
    engine.step(task.batch(0))
    with engine.observe() as ledger:
        engine.step(task.batch(1))
    found = {}
    for (tag, op, axis), entry in ledger.entries.items():
        if axis in INNER and tag != "control":
            calls, size = found.get((axis, op), (0, 0.0))
            found[axis, op] = calls + entry.calls, size + entry.received_bytes
    return found


def check_wire(pool, name: str, text: str) -> None:
    """Asserts that calls and bytes of each rank, axis of positions and operation are those of a run's ledger."""
    from shardwise.comm.ledger import FACTORS
    from shardwise.planner.traced_task import Traced, places
    from shardwise.step.batching import samples_in

    task, plan = task_of(name), Plan.parse(text)
    samples = samples_in(task.batch(0))
    layout = of_plan(plan, global_batch=samples, seq=1, uneven=True)
    traced = Traced(task, HERE, software("shardwise"), plan.precision, (layout.micro_batch,) * 2, cuts=True)
    key, sizes, beside = traced._key(layout, samples)
    degrees = dict(layout.inner)
    along = places(tuple(degrees.values()))
    for place, measured in zip(along, pool.run(wire_in_a_run, plan.world_size, name, text), strict=False):
        (model,) = traced.ranks(key, sizes, beside, place)
        calls, size = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for part in model.small.wire.values():
            for (axis, op, whole), times in ((sent, n) for sent, n in part.items() if sent[0] in degrees):
                calls[axis, op] += layout.n_micro * times
                size[axis, op] += layout.n_micro * times * FACTORS[op](degrees[axis]) * whole
        forecast = {each: (calls[each], size[each]) for each in calls}
        assert forecast.keys() == measured.keys()
        for each in forecast:
            assert forecast[each][1] == pytest.approx(measured[each][1], rel=1e-9), (place, each)
            if each[1] != "point_to_point":  # of which a run counts both ends
                assert forecast[each][0] == measured[each][0], (place, each)
        for op in ("all_to_all", "point_to_point"):  # told apart by where they come from, as well
            came = sum(b for part in model.small.arrivals.values() for (_, o, _), b in part.items() if o == op)
            assert came * layout.n_micro == pytest.approx(sum(size[axis, o] for axis, o in size if o == op))


# what holds the parameters' states x recompute x micro-batches
DATA = ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"]
CUT = ["tp=2", "tp=2,sp=true", "pp=2"]
BOTH = ["tp=2,dp_shard=2,zero=3", "pp=2,dp_shard=2,zero=3", "pp=2,dp_shard=2,zero=2"]
EACH = ["", ",remat=full", ",remat=selective", ",accumulate=3", ",remat=full,accumulate=2"]
OTHERS = [
    "pp=2,schedule=zbh1,accumulate=2", "pp=2,microbatches=4", "dp_shard=3,zero=3", "dp_replicate=2,dp_shard=2,zero=3",
    "dp_replicate=2,dp_shard=2,zero=3,accumulate=2",
]  # fmt: skip
# a row of a few plans each: all in one take most of the time that a test has
ALL = [*([plan + more for more in EACH] for plan in (*DATA, *CUT, *BOTH)), OTHERS]
# most of it is gradients: under zbh1 those that the first W makes are counted at rest as well, 4.5% too much
OF_TINY = {"mlp": [[plan for plan in plans if "zbh1" not in plan] for plans in ALL]}
TASKS = ["gpt2", "vit", "moe", "decoder", "unet_group", "mlp", "several_buckets"]


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("gpt2", ["dp_replicate=2,accumulate=3", "dp_shard=2,zero=1,remat=selective"], id="replicas"),
        pytest.param("gpt2", ["dp_shard=2,zero=2,accumulate=2"], id="zero2"),
        pytest.param("vit", ["dp_shard=2,zero=3", "dp_shard=2,zero=3,remat=full,accumulate=2"], id="zero3"),
        pytest.param("gpt2", ["tp=2,sp=true,remat=selective"], id="tp"),
        pytest.param("gpt2", ["pp=2,schedule=zbh1,accumulate=2"], id="pp"),
        pytest.param("gpt2", ["tp=2,dp_shard=2,zero=3", "pp=2,dp_shard=2,zero=3,accumulate=2"], id="zero3-cut"),
        pytest.param("vit", ["pp=2,dp_shard=2,zero=2,microbatches=3"], id="zero2-pp"),
        pytest.param("decoder_dropout", ["dp_shard=2,zero=1", "dp_shard=2,zero=3,remat=full", "tp=2"], id="dropout"),
        pytest.param("several_buckets", ["dp_shard=2,zero=1", "dp_shard=2,zero=2,accumulate=2"], id="buckets"),
        pytest.param(
            "several_buckets",
            ["gradients=as_made", "dp_shard=2,zero=1,gradients=as_made", "dp_shard=2,zero=3,gradients=as_made"],
            id="as-made",
        ),
        pytest.param(
            "several_buckets",
            [f"{plan},gradients=as_made" for plan in ("dp_replicate=2,precision=bf16", *DATA, "tp=2")],
            id="as-made-all",
            marks=pytest.mark.long,
        ),
        *(
            pytest.param(name, plans, id=f"{name}-{plans[0]}-all", marks=pytest.mark.long)
            for name in TASKS
            for plans in OF_TINY.get(name, ALL)
        ),
    ],
)
def test_memory_of_every_rank_is_within_two_percent(name: str, plans: list[str], pool) -> None:
    """Each rank as it is dealt and cut: its forecast against the peak of its live bytes."""
    wrong = beyond(pool, name, plans)
    assert not wrong, "\n".join(wrong)


EXPERTS = ["dp_shard=2,ep=2,zero=1", "dp_shard=2,ep=2,pp=2,zero=2", "dp_shard=2,ep=2,tp=2,zero=1",
           "dp_shard=4,ep=2,zero=3,remat=full", "dp_shard=2,ep=2,zero=2,accumulate=2"]  # fmt: skip
# 2.4% low: loads that are not even move the moment of the peak on the fuller rank of ep
BY_ITS_ROUTER = ("moe", "tp=2,dp_shard=2,ep=2,remat=full")
# a batch that is dealt unevenly over micro-batches, so that a rank's neighbours in ep have more in one than in another
UNEVEN = ["dp_shard=2,ep=2,zero=1,accumulate=2", "tp=2,dp_shard=2,ep=2,zero=1,remat=full,accumulate=3"]
OVER_POSITIONS = [
    "cp=2,dp_shard=2,ep=2", "cp=2,dp_shard=2,ep=4,zero=2", "cp_ulysses=2,ep=2,remat=full", "cp=4,ep=2,zero=1",
    "cp=2,ep=2,accumulate=2", "cp=2,tp=2,ep=2", "cp=2,dp_shard=2,ep=2,zero=3",
]  # fmt: skip
DEALT = [
    [plan + more for more in EACH] for plan in (
        "dp_shard=2,ep=2", "dp_shard=2,ep=2,zero=1", "dp_shard=4,ep=2,zero=1", "dp_shard=4,ep=2,zero=2",
        "dp_shard=4,ep=2,zero=3", "pp=2,dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2,zero=2", "tp=2,dp_shard=2,ep=2",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("moe", EXPERTS[:1], id="moe"),
        pytest.param("moe", EXPERTS[3:4], id="moe-zero3"),
        pytest.param("moe", EXPERTS, id="moe-all", marks=pytest.mark.long),
        pytest.param("moe_shared", EXPERTS, id="moe_shared-all", marks=pytest.mark.long),
    ],
)
def test_memory_of_dealt_experts_is_within_two_percent_of_all_ranks(name: str, plans: list[str], pool) -> None:
    """Where a router sends more rows than half, the other rank of ep has fewer: the sum does not depend on it.

    A rank by itself is as far off as its router is from an even load: here within 5%.
    """
    for text in plans:
        forecast, measured = both(pool, name, text)
        assert sum(forecast) == pytest.approx(sum(measured), rel=0.02), text
        assert forecast == pytest.approx(measured, rel=0.05), text


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("hf_mixtral", UNEVEN[:1], id="hf_mixtral"),
        pytest.param("sequence_tasks:routed", ["cp=2,ep=2,zero=1"], id="routed"),
        pytest.param("listed_tasks:wide", ["dp_shard=4,ep=2,zero=3"], id="listed"),
        pytest.param("sequence_tasks:routed", OVER_POSITIONS, id="routed-all", marks=pytest.mark.long),
        *(
            pytest.param(name, plans, id=f"{name}-{plans[-1]}-all", marks=pytest.mark.long)
            for name in ("hf_mixtral", "hf_qwen2_moe", "moe", "moe_shared", "listed_tasks:wide")
            for plans in (EXPERTS, UNEVEN, *DEALT)
        ),
    ],
)
def test_memory_of_ranks_whose_router_is_even_is_within_two_percent(name: str, plans: list[str], pool) -> None:
    """With routers that do what a forecast takes them to do, every rank by itself; and all together with their own."""
    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="the task's model is one of transformers")
    wrong = []
    for text in plans:
        forecast, even = both(pool, name, text, even=True)
        free = [peak for peak, _ in pool.run(live_peak, len(even), name, text)]
        ratio = sum(forecast) / sum(free)
        if abs(ratio - 1) > 0.02 and (name, text) != BY_ITS_ROUTER:
            wrong.append(f"{text}: {sum(forecast):.0f} forecast, {sum(free)} measured ({ratio - 1:+.1%})")
        wrong += [
            f"{text} rank {rank}, even: {mine:.0f} forecast, {theirs} measured ({mine / theirs - 1:+.1%})"
            for rank, (mine, theirs) in enumerate(zip(forecast, even, strict=True))
            if abs(mine / theirs - 1) > 0.02
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", ["dp_shard=2,zero=3", "dp_shard=2,zero=2,accumulate=2"])
def test_a_rank_run_alone_has_the_bytes_of_the_real_one(text: str, pool) -> None:
    from shardwise.measure.one_rank import measure_rank
    from shardwise.models.tasks import decoder as make

    real = pool.run(live_peak, 2, "decoder", text)
    alone = [measure_rank(make, Plan.parse(text), 1, rank) for rank in range(2)]
    for found, (peak, _) in zip(alone, real, strict=True):  # when a reduction ends moves the peak by a unit's gradients
        assert found["peak_live"] == pytest.approx(peak, rel=0.1)
    assert [found["rest_live"] for found in alone] == [rest for _, rest in real]


def test_a_rank_of_many_is_measured_here() -> None:
    from shardwise.measure.one_rank import measure_rank
    from shardwise.models.tasks import decoder as make

    few, many = (measure_rank(make, Plan.parse(f"dp_replicate={n}"), 1, n - 1) for n in (2, 7))
    assert many["seconds"] > 0
    assert many["peak_live"] < few["peak_live"], "a seventh of the batch, not half"
    with pytest.raises(InputError, match="ranks 0 to 6, not 7"):
        measure_rank(make, Plan.parse("dp_replicate=7"), 1, 7)


# --- a search that does not do things twice


@pytest.mark.parametrize(
    ("name", "degree", "chunks"), [("1f1b", 2, 1), ("gpipe", 2, 1), ("zbh1", 2, 1), ("interleaved1f1b", 2, 2)]
)
def test_the_telling_part_of_a_row_holds_as_much_as_the_whole(name: str, degree: int, chunks: int, monkeypatch) -> None:
    """Uneven micro-batches and tied ends: the same peak, and the same ops, as of the row played to its end."""
    from shardwise.models import tasks
    from shardwise.rehearsal import cut_module, rank_row
    from shardwise.rehearsal.rank_row import trace_of
    from shardwise.rehearsal.step_trace import one_sample

    task = tasks.gpt2()
    stages = ("blocks.0", "blocks.1", "head") if chunks == 2 else ()
    cuts = cut_module.Cuts(pp=degree, schedule=name, microbatches=4, stages=stages)
    looks = cut_module.TaskAnalysis(task, one_sample(task))
    shorter = 0
    for sizes in ((1,), (2, 1, 1, 1)):
        for rank in range(degree):
            short = trace_of(cut_module.CutRehearsal(looks, cuts), 0, rank, sizes)
            with monkeypatch.context() as patch:
                patch.setattr(rank_row, "telling", lambda row, sizes, stages: list(row))
                whole = trace_of(cut_module.CutRehearsal(looks, cuts), 0, rank, sizes)
            assert (short.peak, short.messages, short.wire) == (whole.peak, whole.messages, whole.wire)
            assert {key: op.order for key, op in short.ops.items()} == {key: op.order for key, op in whole.ops.items()}
            row = cut_module.CutRehearsal(looks, cuts).schedule.rows[rank]
            shorter += len(rank_row.telling(row, [1] * 4, degree * chunks)) < len(row)
    assert shorter, "nothing was left out"


def test_a_large_sample_is_read_once(monkeypatch) -> None:
    """A plan with tp and pp of fields that are read for seconds reads one of them."""
    import torch
    from torch import nn

    from shardwise.planner import subject as subjects
    from shardwise.planner import traced_layouts
    from shardwise.rehearsal import cut_module

    reads = []

    class Fields:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            reads.append(index)
            return torch.zeros(64, 64)

    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))

    monkeypatch.setattr(cut_module, "LARGE_BYTES", 1)
    monkeypatch.setattr(subjects, "LONG_S", 0.0)
    task = Task(model=chain, loss=lambda output, batch: (output.sum(), len(batch)), data=Fields())
    said: list[str] = []
    subject = traced_layouts.traced_subject(
        task, Cluster.parse("4 l40s"), software("shardwise"), 16, "bf16", ("none",), say=said.append
    )
    found = search_plans(subject, Cluster.parse("4 l40s"))
    assert {proposal.family for proposal in found.proposals} >= {"DDP", "DDP + tp", "DDP + pp"}
    assert reads == [0]
    assert any("rehearsing pp=2" in text for text in said) and any("tracing" in text for text in said)


def test_a_cache_that_a_block_is_given_does_not_grow_when_the_block_runs_again() -> None:
    """As the decoders of transformers do when nobody switches their cache off."""
    import torch
    from torch import nn

    from shardwise.memory.recompute import recompute_block

    class Cache:
        def __init__(self) -> None:
            self.layers: list[dict[str, torch.Tensor]] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.layers.append({"seen": self.linear(x)})
            return x + torch.tanh(sum(layer["seen"] for layer in cache.layers))

    gradients = {}
    for policy in ("none", "full", "selective"):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(3))
        for block in blocks:
            if policy != "none":
                recompute_block(block, policy)
        x, cache = torch.linspace(-1, 1, 8).view(2, 4), Cache()
        for block in blocks:
            x = block(x, cache)
        x.square().sum().backward()
        assert len(cache.layers) == 3
        gradients[policy] = torch.cat([p.grad.flatten() for p in blocks.parameters()])
    assert torch.equal(gradients["full"], gradients["none"])
    assert torch.equal(gradients["selective"], gradients["none"])


# --- modules of one's own, and what a run makes of them


def summed(output, batch):
    """A loss of any output."""
    return output.square().sum(), len(output)


def normed():
    """Batch norms of vectors and of fields, on 8 samples."""
    import torch
    from torch import nn

    def chain() -> nn.Module:
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(8 * 36, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    return Task(model=chain, loss=summed, batch=lambda step: torch.linspace(-1, 1, 8 * 8 * 36).view(8, 8, 6, 6).sin())


def recurrent():
    """An LSTM, whose kernel keeps a workspace for backward."""
    import torch
    from torch import nn

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(16, 24, num_layers=2, batch_first=True)
            self.head = nn.Linear(24, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x)[0])

    return Task(model=Remembers, loss=summed, batch=lambda step: torch.linspace(-1, 1, 8 * 320).view(8, 20, 16).sin())


def looked_up():
    """Its first parameter is its largest, and what it uses first is another."""
    import torch
    from torch import nn

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.lift = nn.Embedding(500, 16), nn.Linear(4, 16)
            self.head = nn.Linear(16, 1)

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.head(self.lift(x) + self.table(rows))

    def batch(step: int):
        return torch.linspace(-1, 1, 64).view(16, 4), torch.arange(16)

    return Task(
        model=Adds, loss=lambda o, b: (o.square().sum(), len(o)), batch=batch, inputs=lambda b: (b, {}),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip


def repeated(reentrant: bool):
    """Blocks that the forward above them recomputes."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                      for _ in range(4)]  # fmt: skip
            self.lift, self.blocks = nn.Linear(8, 32), nn.ModuleList(blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lift(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            return x

    return Task(model=Repeats, loss=summed, batch=lambda step: torch.linspace(-1, 1, 1280).view(16, 10, 8).sin())


def reentrant():
    return repeated(True)


def not_reentrant():
    return repeated(False)


def whole_tensors():
    """An optimizer that needs them, so that each has one rank that updates it."""
    import torch
    from torch import nn

    def model() -> nn.Module:
        return nn.Sequential(*(part for wide in (96, 160, 64) for part in (nn.Linear(64, wide), nn.Linear(wide, 64))))

    return Task(model=model, loss=summed, batch=lambda step: torch.linspace(-1, 1, 512).view(8, 64).sin(),
                optimizer=torch.optim.Adafactor)  # fmt: skip


OWN = {f.__name__: f for f in (normed, recurrent, looked_up, reentrant, not_reentrant, whole_tensors)}


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("normed", ["dp_replicate=2", "dp_shard=2,zero=3,remat=selective", "pp=2,dp_shard=2,zero=2,remat=full"]),
        ("recurrent", ["dp_replicate=2", "dp_shard=2,zero=3", "pp=2"]),
        ("reentrant", ["dp_shard=2,zero=3", "dp_shard=2,zero=3,accumulate=2"]),
        ("not_reentrant", ["dp_shard=2,zero=3"]),
        ("looked_up", ["dp_shard=2,zero=1", "dp_shard=2,zero=2,accumulate=2"]),
        ("whole_tensors", ["dp_replicate=2", *(f"dp_shard=2,zero={stage}" for stage in (1, 2, 3)), "tp=2"]),
        ("whole_tensors", ["tp=2,dp_shard=2,zero=1", "tp=2,dp_shard=2,zero=3"]),
    ],
)
def test_memory_of_modules_of_ones_own(name: str, plans: list[str], pool) -> None:
    """Batch norms over ranks keep more than the module's own, and kernels a workspace of which shapes do not tell."""
    wrong = beyond(pool, name, plans)
    assert not wrong, "\n".join(wrong)


def test_batch_norms_over_ranks_are_in_the_step() -> None:
    """Each sends twice in forward and once in backward; alone it sends nothing, and needs more than one sample."""
    from shardwise.planner.traced_layouts import traced_subject
    from shardwise.rehearsal.step_trace import trace

    assert sum(trace(normed(), 1, joined=2).joined.values()) == 4 * 3
    alone = trace(normed(), 1)
    assert (alone.batch_norms, alone.alone, sum(alone.joined.values())) == (4, True, 0)
    subject = traced_subject(normed(), NODE, software("shardwise"), 8, "bf16", ("none",))
    found = search_plans(subject, NODE)
    replicas = next(p for p in found.proposals if p.family == "DDP")
    assert replicas.forecast.parts["batch norm communication"] > 0
    assert all(p.layout.dp * p.layout.micro_batch > 1 for p in found.proposals)


def test_convolutions_that_enlarge_are_counted_by_their_small_side() -> None:
    """A transposed convolution's products of backward are as large as its forward; of complex numbers each is four."""
    import torch
    from torch import nn

    from shardwise.rehearsal.step_trace import trace

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.complex(x, x) @ torch.view_as_complex(self.weight))

    def task(model, *shape: int) -> Task:
        return Task(model=model, loss=summed, batch=lambda step: torch.ones(shape))

    larger = task(lambda: nn.ConvTranspose2d(4, 6, 2, stride=2), 3, 4, 5, 5)
    assert trace(larger, 3).flops == 2 * (2 * 3 * 25 * 4 * 6 * 4), "of the input none is asked for"
    assert trace(task(Mixes, 3, 4), 3).flops == 2 * 4 * (2 * 3 * 4 * 4)


def test_a_mask_made_of_ones_is_known() -> None:
    """Floats that come from numbers alone have values, until something unknown is written into them or a view."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.trace.known_values import Values, shadow

    fake = FakeTensorMode()
    with fake, Values(fake):
        mask = torch.ones(2, 3)
        assert bool(mask.to(torch.bool).all())
        scores = torch.rand(2, 3)
        assert bool((scores.new_zeros(2, 3) == torch.zeros_like(scores)).all())
        whole = torch.zeros(2, 3, dtype=torch.int64)
        whole[:, 0] = (scores[:, 0] > 0).to(torch.int64)
        assert shadow(whole) is None, "written through a view"
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(scores.sum() > 0)


def test_complex_weights_are_counted_as_pairs() -> None:
    import torch
    from torch import nn

    from shardwise.rehearsal.step_trace import trace

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.cfloat) @ self.weight).real

    found = trace(Task(model=Complex, loss=summed, batch=lambda step: torch.ones(4, 4)), 2)
    assert (found.parameters, found.gradients) == (2 * 16, 2 * 16 * 4), "real numbers"
