"""Costs, the simulated step, the search, and the score: each against a figure worked out another way."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, model
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.memory import layer_activations, stage_parameters, states
from shardwise.costs.shapes import Shape
from shardwise.costs.software import STATES, software
from shardwise.costs.wire import Group, Wire
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.schedules import Times, make_schedule
from shardwise.planner import Constraints
from shardwise.planner import search as search_plans
from shardwise.planner.candidates import family, plan_of
from shardwise.planner.propose import decoder
from shardwise.planner.units import batch, count
from shardwise.simulator import simulate
from shardwise.simulator.events import Op, run
from shardwise.simulator.goodput import goodput
from shardwise.simulator.pipeline import play
from shardwise.simulator.quick import Estimator

ROOT = Path(__file__).parents[1]
LLAMA = Shape.from_row(model("llama3-8b"))
NODE = Cluster.parse("8 h100-sxm-80gb")


# --- memory


def test_bytes_per_parameter_of_the_field_fall_out_of_the_policy() -> None:
    totals = {name: policy.total for name, policy in STATES.items()}
    assert totals["fp16-apex"] == 16
    assert totals["bf16"] == 18
    assert totals["fp16-apex-fp32-grad"] == 20


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.875)])
def test_zero_on_64_ranks_as_in_its_paper(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, table 1: 7.5B parameters, 16 bytes, 64 ranks."""
    layout = Layout(shard=64, zero=zero)
    apex = software("deepspeed-2021")
    found = sum(states({"dense": 7.5e9}, layout, apex).values()) / 1e9
    if zero == 3:  # weights are kept as masters and gathered: fp16 copies are not at rest here
        assert found == pytest.approx(7.5 * 14 / 64)
    else:
        assert found == pytest.approx(gigabytes, rel=0.01)


def test_activations_of_a_layer_as_in_korthikanti() -> None:
    """Section 4: s b h (34 + 5 a s / h) bytes without parallelism; theirs keeps what ours names, dropout masks too."""
    shape = Shape(1, 6144, 64, 64, 96, 24576, 51200, gated=False, bias=True, layer_norm=True, dropout=True)
    layout = Layout(micro_batch=4, seq=2048)
    mine = sum(layer_activations(shape, layout, software("megatron-2021")).values())
    theirs = 2048 * 4 * 6144 * (34 + 5 * 64 * 2048 / 6144)
    assert mine == pytest.approx(theirs, rel=0.02)


def test_tensor_parallel_divides_and_sequence_parallel_divides_the_rest() -> None:
    soft = software("megatron-core")
    whole = layer_activations(LLAMA, Layout(seq=4096), soft)
    split = layer_activations(LLAMA, Layout(tp=8, seq=4096), soft)
    both = layer_activations(LLAMA, Layout(tp=8, sp=True, seq=4096), soft)
    assert split["norm inputs"] == whole["norm inputs"]
    assert both["norm inputs"] == whole["norm inputs"] / 8
    assert sum(both.values()) == pytest.approx(sum(whole.values()) / 8)


def test_parameters_of_stages_add_up() -> None:
    layout = Layout(pp=4)
    stages = [stage_parameters(LLAMA, layout, 8, first=i == 0, last=i == 3)["dense"] for i in range(4)]
    assert sum(stages) == LLAMA.parameters


# --- wire


def test_a_group_that_leaves_the_node_is_slower_and_says_formula() -> None:
    wire = Wire(Cluster.parse("2x8 h100-sxm-80gb, ib-400"))
    inside = wire.collective("all_gather", Group(8, 1), 2**30)
    across = wire.collective("all_gather", Group(16, 1), 2**30)
    one_each = wire.collective("all_gather", Group(2, 8), 2**30)
    assert inside < across < one_each
    assert wire.basis("all_gather", Group(8, 1)).startswith("measured")
    assert wire.basis("all_gather", Group(16, 1)).startswith("formula")


def test_messages_between_neighbours_cross_only_where_the_node_ends() -> None:
    wire = Wire(Cluster.parse("2x8 h100-sxm-80gb, ib-400"))
    assert wire.send(1e8, 6, 7) < wire.send(1e8, 7, 8)


# --- events and pipelines


def test_overlap_follows_from_dependencies() -> None:
    ops = [Op("a", "compute", 2.0), Op("send", "link", 3.0, [0]), Op("b", "compute", 1.0), Op("c", "compute", 1.0, [1])]
    assert run(ops, contention=0.0) == pytest.approx(6.0)
    assert ops[2].start == pytest.approx(2.0)


def test_compute_is_slowed_beside_communication() -> None:
    ops = [Op("a", "compute", 1.0), Op("x", "link", 10.0)]
    run(ops, contention=0.5)
    assert ops[0].end == pytest.approx(1.5)


def test_an_op_cannot_wait_for_a_later_one() -> None:
    with pytest.raises(ValueError, match="later"):
        run([Op("a", "compute", 1.0, [1]), Op("b", "compute", 1.0)])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbh1", "zbh2", "interleaved1f1b", "zbv", "dualpipev"])
def test_a_played_schedule_takes_as_long_as_its_table_counts(name: str) -> None:
    chunks = 2 if name in ("interleaved1f1b", "zbv", "dualpipev") else 1
    table = make_schedule(name, 4, 8, chunks)
    n = table.stages
    played = play(table, [1.0] * n, [1.5] * n, [0.5] * n, [0.0] * (n - 1))
    assert played.seconds == pytest.approx(table.span(Times(1.0, 1.5, 0.5)))


def test_a_bubble_is_the_textbook_one() -> None:
    table = make_schedule("1f1b", 4, 16)
    played = play(table, [1.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 3)
    assert played.bubble == pytest.approx(3 / (16 + 3))


def test_slow_messages_lengthen_a_pipeline() -> None:
    table = make_schedule("1f1b", 4, 8)
    still = [play(table, [1.0] * 4, [1.0] * 4, [1.0] * 4, [wire] * 3, blocking=True).seconds for wire in (0.0, 0.3)]
    assert still[1] > still[0] + 8 * 0.3


# --- a step


def test_a_step_cannot_beat_the_data_sheet() -> None:
    for layout in (Layout(seq=8192, n_micro=8), Layout(tp=8, sp=True, seq=8192, micro_batch=4)):
        assert 0.2 < simulate(LLAMA, layout, NODE, software("megatron-core")).mfu < 0.8


def test_parts_add_up_to_the_step() -> None:
    for layout in (Layout(shard=8, zero=3, seq=4096, n_micro=6), Layout(pp=4, shard=2, zero=1, n_micro=8, seq=4096)):
        found = simulate(LLAMA, layout, NODE, software("shardwise"))
        assert sum(found.parts.values()) == pytest.approx(found.step_s)
        assert found.step_s > 0
        assert found.timeline


def test_work_costs_what_it_adds() -> None:
    soft = software("megatron-core")
    base = Layout(seq=4096, n_micro=4)
    plain = simulate(LLAMA, base, NODE, soft)
    again = simulate(LLAMA, base.with_(recompute="full"), NODE, soft)
    assert 1.2 < again.step_s / plain.step_s < 1.4
    assert again.worst.allocated < plain.worst.allocated
    twice = simulate(LLAMA, base.with_(n_micro=8), NODE, soft)
    assert 1.9 < twice.step_s / plain.step_s < 2.0


def test_a_device_without_a_table_says_roofline() -> None:
    assert Kernels(Cluster.parse("8 mi300x").device).basis.startswith("roofline")
    assert Kernels(NODE.device).basis.startswith("measured")


def test_the_estimate_is_near_the_simulation() -> None:
    soft = software("shardwise")
    estimator = Estimator(LLAMA, NODE, soft)
    for layout in (
        Layout(replicas=8, seq=4096, n_micro=4),
        Layout(shard=8, zero=3, seq=4096, micro_batch=2, n_micro=4),
        Layout(tp=4, sp=True, shard=2, zero=1, seq=4096, n_micro=4),
        Layout(pp=4, shard=2, zero=1, seq=4096, n_micro=16),
    ):
        assert estimator.estimate(layout).seconds == pytest.approx(
            simulate(LLAMA, layout, NODE, soft).step_s, rel=0.12
        ), layout


# --- plans


def search(name: str, cluster: str, samples: int, seq: int, constraints: Constraints | None = None):
    machine = Cluster.parse(cluster)
    subject = decoder(Shape.from_row(model(name)), machine, software("shardwise"), samples, seq, "bf16")
    return search_plans(subject, machine, constraints)


def test_405b_on_16384_devices_within_the_time_and_memory() -> None:
    import resource

    began = time.process_time()  # what this process took: others may use the machine
    found = search("llama3-405b", "2048x8 h100-sxm-80gb, ib-400", 2048, 8192)
    assert time.process_time() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2e9
    assert found.best.plan.world_size == 16384
    assert found.best.forecast.needed_bytes <= 80e9
    assert 0.3 < found.best.forecast.mfu < 0.6
    assert {"ZeRO-3", "DDP + tp", "ZeRO-1 + tp"} <= found.lost.keys()
    assert "GB of 80.0 GB" in found.lost["ZeRO-1 + tp"]


def test_a_small_model_gets_a_simple_plan() -> None:
    found = search("llama-3.2-1b", "8 h100-sxm-80gb", 256, 4096)
    assert found.best.plan.tp == found.best.plan.pp == 1
    assert found.best.runnable == ""
    assert any("fits on one device" in note for note in found.notes)


def test_every_proposal_is_a_plan_of_its_layout() -> None:
    for p in search("llama3-8b", "2x8 h100-sxm-80gb, ib-400", 128, 8192).proposals:
        assert p.plan.world_size == p.layout.world_size == 16
        back = of_plan(Plan.parse(str(p.plan)), global_batch=128, seq=8192)
        assert plan_of(back, "bf16") == p.plan
        assert back.micro_batch == p.layout.micro_batch
        assert family(back) == family(p.layout)


def test_constraints_hold() -> None:
    found = search("llama3-8b", "8 h100-sxm-80gb", 64, 4096, Constraints(max_tp=2, fixed=(("remat", "full"),)))
    assert all(p.plan.tp <= 2 and p.plan.remat == "full" for p in found.proposals)


def test_what_does_not_fit_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no plan fits: the nearest, .*, needs .* GB of 80.0 GB"):
        search("llama3-405b", "8 h100-sxm-80gb", 8, 8192)


def test_a_batch_that_does_not_divide_names_its_neighbours() -> None:
    with pytest.raises(InputError, match="the nearest that do are 8, 16"):
        of_plan(Plan.parse("dp_replicate=8"), global_batch=13, seq=1024)


@pytest.mark.parametrize(
    ("text", "seq", "samples"), [("512", None, 512), ("16M-tokens", 8192, 2048), ("64k-tokens", 1024, 64)]
)
def test_batches_as_people_write_them(text: str, seq: int | None, samples: int) -> None:
    assert batch(text, seq) == samples


@pytest.mark.parametrize(
    ("text", "seq"), [("16M-tokens", None), ("many", 8), ("10-tokens", 8), ("8-words", 8), ("0", 8)]
)
def test_batches_that_are_none(text: str, seq: int | None) -> None:
    with pytest.raises(InputError, match="--global-batch"):
        batch(text, seq)
    assert count("8k", "x") == 8192


def test_goodput_by_formula_and_by_drawing_agree() -> None:
    found = goodput(6.0, 16384, 50_000 * 3600, 300, 30)
    assert found["share_by_simulation"] == pytest.approx(found["share_by_formula"], abs=0.03)


# --- the score


def published(tmp_path: Path, **changes: str) -> Path:
    """One made-up run in the columns of a published one."""
    row = {
        "source": "a run", "model": "llama", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
        "ffn": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-SXM-80GB", "n_gpus": "8", "tp": "2",
        "sp": "1", "cp": "1", "pp": "1", "vpp": "", "dp": "4", "dp_shard": "1", "ep": "1", "micro_batch": "1",
        "global_batch": "32", "recompute": "none", "precision": "bf16", "tflops_per_gpu": "",
        "tokens_per_s_per_gpu": "", "table": "",
        "step_time_s": "5.0", "mem_gb_per_gpu": "", "notes": "", **changes,
    }  # fmt: skip
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, row.keys())
        out.writeheader()
        out.writerow(row)
    return tmp_path


def score(folder: Path) -> dict:
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "forecast.py", "--data", folder, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(ran.stdout)["files"][0]


def test_a_run_is_scored(tmp_path: Path) -> None:
    found = score(published(tmp_path))
    assert found["time"]["rows"] == 1
    assert abs(found["time"]["bias"]) < 0.5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"notes": "recalled: uncertain"}, "uncertain"),
        ({"notes": "NOT A MEASUREMENT"}, "not a measurement"),
        ({"precision": "FP8"}, "FP8"),
        ({"gpu": "Abacus"}, "not in the catalogue"),
        ({"hidden": ""}, "hidden is not published"),
        ({"step_time_s": ""}, "neither time nor memory"),
        ({"global_batch": "33"}, "does not divide"),
    ],
)
def test_a_row_is_skipped_with_its_reason(changes: dict[str, str], told: str, tmp_path: Path) -> None:
    found = score(published(tmp_path, **changes))
    assert "time" not in found
    assert any(told in reason for reason in found["skipped"])


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
    subject = traced_subject(make(), machine, software("shardwise"), 64, "bf16", ("none",))
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
    with pytest.raises(InputError, match=r"cannot be traced without values: .*test_foresight.py:\d+"):
        trace(task, 2)


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


# --- the command line


def shardwise(*words: str) -> tuple[int, dict]:
    import io
    from contextlib import redirect_stdout

    from shardwise.cli.main import call

    out = io.StringIO()
    with redirect_stdout(out):
        code = call([*words, "--json"])
    return code, json.loads(out.getvalue())


def test_plan_then_simulate_the_file(tmp_path: Path) -> None:
    where = ("--cluster", "2x8 h100-sxm-80gb, ib-400", "--global-batch", "1M-tokens", "--seq", "8k")
    path = str(tmp_path / "plan.toml")
    code, found = shardwise("plan", "llama3-8b", *where, "-o", path)
    assert code == 0
    assert found["world_size"] == 16
    assert found["proposals"][0]["plan"] == found["plan"]
    code, step = shardwise(
        "simulate", "llama3-8b", *where, "--plan", path, "--trace", str(tmp_path / "t.json"),
        "--html", str(tmp_path / "t.html"), "--mtbf-hours", "20000", "--price", "2", "--scale",
    )  # fmt: skip
    assert code == 0
    assert step["plan"] == found["plan"]
    assert step["step_s"] == pytest.approx(found["proposals"][0]["step_s"])
    assert step["fits"] is True
    assert step["scaling"] and step["goodput"]["share_by_formula"] < 1
    assert "traceEvents" in json.loads((tmp_path / "t.json").read_text())
    page = (tmp_path / "t.html").read_text()
    assert "<svg" in page and "http" not in page, "one page without outside resources"


def test_compare_puts_plans_side_by_side() -> None:
    code, found = shardwise(
        "compare", "llama3-8b", "--plans",
        "dp_shard=8,zero=3,precision=bf16;dp_replicate=8,precision=bf16;dp_replicate=7",
        "--cluster", "8 h100-sxm-80gb", "--global-batch", "16", "--seq", "4k",
    )  # fmt: skip
    assert code == 0
    fits = [row.get("fits") for row in found["plans"]]
    assert fits == [True, False, None]
    assert "does not divide" in found["plans"][2]["error"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("plan", "llama3-9b", "--cluster", "8 h100-sxm-80gb"), "did you mean"),
        (("plan", "llama3-8b", "--cluster", "8 h1000"), "no device"),
        (("plan", "llama3-8b", "--cluster", "8 h100-sxm-80gb"), "give --seq and --global-batch"),
        (("simulate", "llama3-8b", "--cluster", "8 h100-sxm-80gb", "--plan", "tp=16"), "needs 16 devices"),
    ],
)  # fmt: skip
def test_mistakes_end_with_two(words: tuple[str, ...], told: str) -> None:
    code, found = shardwise(*words)
    assert code == 2
    assert told in found["error"]


def test_a_transformers_config_is_a_decoder(tmp_path: Path) -> None:
    from shardwise.planner.decoders import decoder_from_config

    values = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert decoder_from_config(str(path)).parameters == LLAMA.parameters
    path.write_text(json.dumps({**values, "is_encoder_decoder": True}))
    with pytest.raises(InputError, match="module:name"):
        decoder_from_config(str(path))


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
    """On a rank: the most live bytes of the second step, and what rests after the first."""
    from shardwise import parallelize
    from shardwise.memory.live import LiveBytes
    from shardwise.models import tasks

    task = getattr(tasks, name)()
    with LiveBytes() as live:
        engine = parallelize(task, text, check_loss=False)
        engine.step(task.batch(0))
        rest = live.now
        live.reset_peak()
        engine.step(task.batch(1))
        return live.peak, rest


PLANS = [
    "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_replicate=2,remat=full",
    "dp_replicate=2,accumulate=3", "dp_shard=2,zero=1,remat=selective", "dp_shard=2,zero=2,accumulate=2",
]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_memory_of_replicas_and_zero_is_within_two_percent(name: str, pool) -> None:
    from shardwise.models import tasks
    from shardwise.planner.traced import traced_subject

    task = getattr(tasks, name)()
    for text in PLANS:
        parsed = Plan.parse(text)
        samples = next(iter(task.batch(0).values())).shape[0]
        layout = of_plan(parsed, global_batch=samples, seq=1, uneven=True)
        micro = (layout.micro_batch, layout.micro_batch)
        subject = traced_subject(task, NODE, software("shardwise"), samples, "fp32", (parsed.remat,), micro)
        measured = max(peak for peak, _ in pool.run(live_peak, 2, name, text))
        forecast = subject.memory(layout).allocated
        assert forecast == pytest.approx(measured, rel=0.02), text


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


@pytest.mark.long
def test_the_rules_of_thumb_are_current() -> None:
    ran = subprocess.run([sys.executable, ROOT / "benchmarks" / "rules_of_thumb.py", "--check"], check=False)
    assert ran.returncode == 0, "run benchmarks/rules_of_thumb.py"
