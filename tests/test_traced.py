"""Any module by its trace, real ranks, and runs beside their forecasts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, model
from shardwise.costs.layout import of_plan
from shardwise.costs.shapes import Shape
from shardwise.costs.software import software
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.planner import search as search_plans

ROOT = Path(__file__).parents[1]
LLAMA = Shape.from_row(model("llama3-8b"))
NODE = Cluster.parse("8 h100-sxm-80gb")
# a machine whose ranks hold the global batch, as those that measure here do
HERE = Cluster(replace(Cluster.parse("8 l40s").device, kind="cpu", table=""), NODE.tiers)


# --- any module


def test_a_trace_counts_what_a_step_does() -> None:
    """A chain of two linear layers: products, and bytes that backward reads, by hand."""
    import torch
    from torch import nn

    from shardwise import Task
    from shardwise.planner.tracing import trace

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
    from shardwise.planner.traced import traced_subject

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
    from shardwise.planner.tracing import trace

    none, full = (trace(task(), 16, "fp32", policy) for policy in ("none", "full"))
    assert full.peak < none.peak
    assert full.flops > none.flops


def test_a_module_that_looks_at_values_is_named_with_its_line() -> None:
    import torch
    from torch import nn

    from shardwise import Task
    from shardwise.planner.tracing import trace

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

    from shardwise import Task
    from shardwise.planner.tracing import trace

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

    from shardwise import Task
    from shardwise.planner.tracing import trace

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
    from shardwise.planner.tracing import trace
    from shardwise.simulator.traced import between, compute_seconds

    soft, kernels = software("shardwise"), Kernels(NODE.device)
    one, two, many = (trace(gpt2(), count) for count in (2, 4, 64))
    assert between(one, two, 64, kernels, soft) == pytest.approx(compute_seconds(many, kernels, soft), rel=0.01)


def test_peak_of_a_trace_is_that_of_a_real_step() -> None:
    """Live bytes on fake tensors against live bytes on real ones, gradients left out of both."""
    import torch

    from shardwise.memory.live import LiveBytes
    from shardwise.models.tasks import decoder as make
    from shardwise.planner.tracing import trace

    task = make()
    batch = task.batch(0) if task.batch is not None else None
    samples = batch["tokens"].shape[0]
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
    assert isinstance(total, torch.Tensor)
    assert trace(task, samples).peak == pytest.approx(live.peak - base, rel=0.02)


@pytest.mark.parametrize("name", ["moe", "moe_shared", "hf_mixtral", "hf_qwen2_moe"])
def test_routed_experts_are_traced_under_a_balanced_load(name: str) -> None:
    """Counts of tokens are asked for by value; the peak is within 2% of a step whose router chose for itself."""
    from shardwise.memory.live import LiveBytes
    from shardwise.models import tasks
    from shardwise.planner.tracing import trace

    if name.startswith("hf_"):
        pytest.importorskip("transformers", reason="the task's model is one of transformers")
    task = getattr(tasks, name)()
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
    found = trace(task, next(iter(batch.values())).shape[0])
    assert found.peak == pytest.approx(live.peak - base, rel=0.02)
    assert found.balanced


def test_values_follow_masks_counts_and_views() -> None:
    """What a shadow says is what the same ops say on real integers; what is written over has no values any more."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.planner.routed import Values, balanced, shadow

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


@pytest.mark.long
def test_probe_measures_two_ranks() -> None:
    from shardwise.planner.measure import probe

    found = probe(2)
    assert found.world_size == 2
    assert found.device.products and found.collectives
    assert all(row[-1] > 0 for row in found.collectives)
    assert Cluster.from_dict(found.as_dict()) == found or found.as_dict()["collectives"]


# --- memory of real ranks


def live_peak(name: str, text: str) -> tuple[int, int]:
    """On a rank: the most live bytes of the second step, and what rests after the first.

    Settled, since recompute leaves cycles and threads of the backend hold a collective's tensors a little longer.
    """
    import gc

    from shardwise import parallelize
    from shardwise.memory.live import LiveBytes
    from shardwise.models import tasks

    task = getattr(tasks, name)()
    with LiveBytes() as live:
        engine = parallelize(task, text, check_loss=False)
        engine.step(task.batch(0))
        gc.collect()
        gc.freeze()  # what is here already need not be looked at again
        try:
            rest = live.now
            live.reset_peak()
            live.settle = True
            engine.step(task.batch(1))
        finally:
            gc.unfreeze()
        return live.peak, rest


PLANS = [
    "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_replicate=2,remat=full",
    "dp_replicate=2,accumulate=3", "dp_shard=2,zero=1,remat=selective", "dp_shard=2,zero=2,accumulate=2",
]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", pytest.param("vit", marks=pytest.mark.long)])
def test_memory_of_replicas_and_zero_is_within_two_percent(name: str, pool) -> None:
    from shardwise.models import tasks
    from shardwise.planner.traced import traced_subject

    task = getattr(tasks, name)()
    for text in PLANS:
        parsed = Plan.parse(text)
        samples = next(iter(task.batch(0).values())).shape[0]
        layout = of_plan(parsed, global_batch=samples, seq=1, uneven=True)
        micro = (layout.micro_batch, layout.micro_batch)
        subject = traced_subject(task, HERE, software("shardwise"), samples, "fp32", (parsed.remat,), micro)
        measured = max(peak for peak, _ in pool.run(live_peak, 2, name, text))
        forecast = subject.memory(layout).allocated
        assert forecast == pytest.approx(measured, rel=0.02), text


CUT_PLANS = [
    "tp=2", "tp=2,sp=true", "pp=2", "tp=2,remat=full", "tp=2,remat=selective", "tp=2,sp=true,remat=full",
    "tp=2,sp=true,remat=selective", "pp=2,remat=full", "pp=2,remat=selective",
    "pp=2,schedule=zbh1,accumulate=2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("gpt2", CUT_PLANS[::3], id="gpt2"),  # tp, recompute, split backwards
        pytest.param("gpt2", CUT_PLANS, id="gpt2-all", marks=pytest.mark.long),
        pytest.param("vit", CUT_PLANS, id="vit-all", marks=pytest.mark.long),
    ],
)
def test_memory_of_every_rank_of_a_cut_module_is_within_two_percent(name: str, plans: list[str], pool) -> None:
    """Each rank's share and row, rehearsed without values, against the live bytes of the real rank."""
    from shardwise.models import tasks
    from shardwise.planner.traced import traced_subject

    task = getattr(tasks, name)()
    samples = next(iter(task.batch(0).values())).shape[0]
    wrong = []
    for text in plans:
        parsed = Plan.parse(text)
        layout = of_plan(parsed, global_batch=samples, seq=1, uneven=True)
        micro = (layout.micro_batch, layout.micro_batch)
        subject = traced_subject(task, HERE, software("shardwise"), samples, "fp32", (parsed.remat,), micro)
        forecast = [ledger.allocated for ledger in subject.simulate(layout).memory]
        measured = [peak for peak, _ in pool.run(live_peak, 2, name, text)]
        if len(forecast) == 1:  # the cut is even: one rank stands for both
            forecast *= 2
        wrong += [
            f"{text} rank {rank}: {mine:.0f} forecast, {theirs} measured ({mine / theirs - 1:+.1%})"
            for rank, (mine, theirs) in enumerate(zip(forecast, measured, strict=True))
            if abs(mine / theirs - 1) > 0.02
        ]
    assert not wrong, "\n".join(wrong)


MATRIX = [
    "dp_replicate=2", "dp_replicate=2,remat=full", "dp_shard=2,zero=1", "dp_shard=2,zero=1,accumulate=2",
    "dp_shard=2,zero=2", "dp_shard=2,zero=2,remat=selective", "tp=2", "tp=2,remat=full", "tp=2,accumulate=2", "pp=2",
    "pp=2,microbatches=4", "pp=2,remat=full",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "vit", "moe", "decoder", "unet_group"])
def test_memory_of_every_axis_with_recompute_and_micro_batches(name: str, pool) -> None:
    """The fullest data rank of each rank of tp or pp: forecast within 2% of its live bytes."""
    from shardwise.engine.batching import samples_in
    from shardwise.models import tasks
    from shardwise.planner.traced import traced_subject

    task = getattr(tasks, name)()
    samples = samples_in(task.batch(0))
    wrong = []
    for text in MATRIX:
        parsed = Plan.parse(text)
        layout = of_plan(parsed, global_batch=samples, seq=1, uneven=True)
        micro = (layout.micro_batch, layout.micro_batch)
        subject = traced_subject(task, HERE, software("shardwise"), samples, "fp32", (parsed.remat,), micro)
        forecast = [ledger.allocated for ledger in subject.simulate(layout).memory]
        measured = [peak for peak, _ in pool.run(live_peak, 2, name, text)]
        if parsed.tp * parsed.pp == 1:
            measured = [max(measured)]  # data ranks may be dealt different numbers of samples
        wrong += [
            f"{text} rank {rank}: {mine:.0f} forecast, {theirs} measured ({mine / theirs - 1:+.1%})"
            for rank, (mine, theirs) in enumerate(zip(forecast * len(measured), measured, strict=False))
            if abs(mine / theirs - 1) > 0.02
        ]
    assert not wrong, "\n".join(wrong)


def test_what_of_a_cut_module_is_not_forecast_is_refused_by_name() -> None:
    from shardwise import simulate
    from shardwise.models.tasks import gpt2

    for text, told in (("tp=2,dp_shard=2,zero=3", "zero=3 beside tp"), ("pp=2,dp_shard=2,zero=2", "zero=2 under a")):
        with pytest.raises(RefusedPlan, match=told):
            simulate(gpt2(), text, "8 h100-sxm-80gb")


@pytest.mark.parametrize("text", ["dp_shard=2,zero=3", "dp_shard=2,zero=2,accumulate=2"])
def test_a_rank_run_alone_has_the_bytes_of_the_real_one(text: str, pool) -> None:
    from shardwise.models.tasks import decoder as make
    from shardwise.planner.onerank import measure_rank

    real = pool.run(live_peak, 2, "decoder", text)
    alone = [measure_rank(make, Plan.parse(text), rank) for rank in range(2)]
    for found, (peak, _) in zip(alone, real, strict=True):  # when a reduction ends moves the peak by a unit's gradients
        assert found["peak_live"] == pytest.approx(peak, rel=0.1)
    assert [found["rest_live"] for found in alone] == [rest for _, rest in real]


def test_a_rank_of_many_is_measured_here() -> None:
    from shardwise.models.tasks import decoder as make
    from shardwise.planner.onerank import measure_rank

    few, many = (measure_rank(make, Plan.parse(f"dp_replicate={n}"), n - 1) for n in (2, 7))
    assert many["seconds"] > 0
    assert many["peak_live"] < few["peak_live"], "a seventh of the batch, not half"
    with pytest.raises(InputError, match="ranks 0 to 6, not 7"):
        measure_rank(make, Plan.parse("dp_replicate=7"), 7)
