"""The search and the commands on top of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from peak_resident import PeakResident

from shardwise import simulate
from shardwise.cluster import Cluster, model
from shardwise.cluster.figure import Figure
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.memory import CONTEXT_BYTES, MemoryLedger
from shardwise.costs.shapes import Shape
from shardwise.costs.software import software
from shardwise.costs.units import batch, count, seconds_text
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.planner import Constraints
from shardwise.planner import search as search_plans
from shardwise.planner.candidates import decoder_layouts, family, plan_of
from shardwise.planner.decoders import decoder_by_name
from shardwise.planner.door import layout_of, plan
from shardwise.planner.proposal_text import Proposal, senseless
from shardwise.planner.propose import _sorted as sorted_by_worth
from shardwise.planner.subject import counts_that_do, decoder, first_devices
from shardwise.planner.worth import JobCost, job_lines
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.goodput import goodput, saved_bytes, stall_of

ROOT = Path(__file__).parents[2]
LLAMA = Shape.from_row(model("llama3-8b"))
NODE = Cluster.parse("8 h100-sxm-80gb")


# --- plans


def search(name: str, cluster: str, samples: int, seq: int, constraints: Constraints | None = None):
    machine = Cluster.parse(cluster)
    subject = decoder(Shape.from_row(model(name)), machine, software("shardwise"), samples, seq, "bf16")
    return search_plans(subject, machine, constraints)


def test_405b_on_16384_devices_within_the_time_and_memory() -> None:
    began = time.process_time()  # what this process took: others may use the machine
    with PeakResident() as peak:
        found = search("llama3-405b", "2048x8 h100-sxm-80gb, ib-400", 2048, 8192)
    assert time.process_time() - began < 30
    assert 0 < peak.added < 2e9
    assert found.best.plan.world_size == 16384
    assert found.best.forecast.needed_bytes <= found.capacity < 80e9
    assert 0.3 < found.best.forecast.mfu < 0.6
    assert {"ZeRO-3", "DDP + tp", "ZeRO-1 + tp"} <= found.lost.keys()
    assert "GB of 78.2 GB" in found.lost["ZeRO-1 + tp"]
    assert all(not p.runnable for p in found.proposals)
    assert all(p.runnable and p.forecast.step_s < found.best.forecast.step_s for p in found.later)


def test_a_small_model_gets_a_simple_plan() -> None:
    found = search("llama-3.2-1b", "8 h100-sxm-80gb", 256, 4096)
    assert found.best.plan.tp == found.best.plan.pp == 1
    assert found.best.runnable == ""
    assert any("fits on one device" in note for note in found.notes)


def test_one_device_holds_what_a_search_on_one_finds() -> None:
    hosts = "a100-sxm-40gb, host-8tb"
    two = search("llama3-405b", f"2 {hosts}", 8, 4096)
    assert two.best.plan.offload == "optimizer|parameters|gradients"
    assert not any("fits on one device" in note for note in two.notes)
    with pytest.raises(InputError, match="no plan fits"):
        search("llama3-405b", f"1 {hosts}", 8, 4096)
    moved = Constraints(fixed=(("offload", "optimizer|parameters|gradients"), ("zero", 3)))
    for gb in (100, 12):  # of each of two hosts; the model takes 20 GB
        notes = search("llama-3.2-1b", f"2x1 a100-sxm-40gb, ib-200, host-{gb}gb", 2, 4096, moved).notes
        assert any("fits on one device" in note for note in notes) == (gb == 100)


def test_every_proposal_is_a_plan_of_its_layout() -> None:
    for p in search("llama3-8b", "2x8 h100-sxm-80gb, ib-400", 128, 8192).proposals:
        assert p.plan.world_size == p.layout.world_size == 16
        back = of_plan(Plan.parse(str(p.plan)), global_batch=128, seq=8192)
        assert plan_of(back, "bf16") == p.plan
        assert back.micro_batch == p.layout.micro_batch
        assert family(back) == family(p.layout)


def proposal(seconds: float, needed: float, **layout: object) -> Proposal:
    """One with a made-up forecast."""
    ledger = MemoryLedger({"all": (needed - CONTEXT_BYTES) / 1.03})
    made = Layout(**layout)
    return Proposal(
        plan_of(made, "bf16"), made, Forecast(seconds, {}, [ledger], 1.0, 1, 1, 1e9, 1e9), family(made)
    )  # fmt: skip


def test_of_plans_as_fast_the_leaner_comes_before_the_simpler() -> None:
    full, lean, slow = proposal(1.0, 68e9), proposal(1.0, 46e9, tp=2, shard=2, zero=1), proposal(1.1, 10e9)
    assert sorted_by_worth([slow, full, lean], 78e9) == [lean, full, slow]
    small, smaller = proposal(1.0, 30e9), proposal(1.0, 10e9, tp=2)
    assert sorted_by_worth([smaller, small], 78e9) == [small, smaller], "below half of a device memory decides nothing"


def test_a_search_that_is_interrupted_ends_with_the_best_so_far() -> None:
    subject = decoder(LLAMA, NODE, software("shardwise"), 64, 4096, "bf16")

    def some(world: int, constraints: Constraints):
        for place, layout in enumerate(subject.layouts(world, constraints)):
            if place == 40:
                raise KeyboardInterrupt
            yield layout

    told: list[str] = []
    found = search_plans(replace(subject, layouts=some), NODE, say=told.append)
    assert found.stopped and found.considered == 40 and "interrupted" in found.notes[0]
    assert any(text.startswith("simulating 1 of") for text in told)
    with pytest.raises(KeyboardInterrupt):  # nothing fits so far
        search_plans(replace(subject, layouts=some), Cluster.parse("8 v100-sxm2-16gb"))


def test_what_no_version_can_run_is_not_promised() -> None:
    """Only what is not built yet is told as a plan to come."""
    found = search("llama3-8b", "2x8 h100-sxm-80gb, ib-400", 64, 8192, Constraints(fixed=(("pp", 4),)))
    assert not any(senseless(p.plan) for p in found.later)
    assert senseless(Plan.parse("pp=2,schedule=zbh1,microbatches=4,remat=full"))
    assert not senseless(Plan.parse("pp=2,cp=2"))


def test_constraints_hold() -> None:
    found = search("llama3-8b", "8 h100-sxm-80gb", 64, 4096, Constraints(most=(("tp", 2),), fixed=(("remat", "full"),)))
    assert all(p.plan.tp <= 2 and p.plan.remat == "full" for p in found.proposals)


def test_zero_over_the_ranks_of_a_sequence_is_looked_at() -> None:
    """One long sample on a node: its ranks are all there is to shard over, and heads are dealt over them."""
    found = search("llama3-8b", "8 h100-sxm-80gb", 1, 32768)
    guess = Plan.parse("zero=3,cp_ulysses=8,precision=bf16")
    assert any(p.plan == guess for p in found.proposals)
    assert found.best.plan.cp_ulysses > 1 <= found.best.plan.zero


def test_heads_are_dealt_beyond_a_node_for_sequences_that_fit_no_other_way() -> None:
    found = search("llama3-8b", "4x8 h100-sxm-80gb, ib-400", 4, 2**20)
    assert found.best.plan.tp * found.best.plan.cp_ulysses > 8
    asked = search("llama3-8b", "2x8 h100-sxm-80gb, ib-400", 1, 32768, Constraints(fixed=(("cp_ulysses", 16),)))
    assert asked.best.plan.cp_ulysses == 16, "asked for, with 2048 positions a rank"
    assert seconds_text(1092.3) == "1,092 s"


def test_no_plan_is_proposed_that_does_not_fit() -> None:
    """Of 62 layers over 36 ranks some hold two; the least of them was asked alone, and 323 GB were proposed for 171."""
    found = search("deepseek-v3-mtp", "1x72 gb200", 576, 4096, Constraints(fixed=(("pp", 36),)))
    assert all(proposal.forecast.fits(found.capacity) for proposal in found.proposals)


def test_what_does_not_fit_names_the_nearest() -> None:
    with pytest.raises(
        InputError,
        match=r"no plan fits of .*, needs .* GB of 78.2 GB.*8% is kept free; .*--max-tp, .*devices, or a",
    ):
        search("llama3-405b", "8 h100-sxm-80gb", 8, 2**19)


def test_where_nothing_fits_on_all_devices_fewer_that_divide_more_are_named() -> None:
    """72 leaves a sample of 2**20 positions eight shares at most; 64 leaves it as many beside tp."""
    with pytest.raises(InputError, match=r"Every plan has all 72 devices; on 64 of them .*cp=.* fits"):
        search("llama3-8b", "1x72 gb200", 1, 2**20)


def test_a_precision_that_is_fixed_is_the_one_that_is_searched() -> None:
    """Whatever is given beside it."""
    for name in ("fp16", "bf16-full"):
        found = plan("llama3-8b", "1x8 h100-sxm-80gb", global_batch=8, seq=2048,
                     constraints=Constraints(fixed=(("precision", name),)), precision="bf16")  # fmt: skip
        assert found.best.plan.precision == name


def test_a_batch_that_no_plan_takes_names_the_nearest_that_would() -> None:
    only = Constraints(fixed=(("tp", 1), ("pp", 1), ("cp", 1), ("cp_ulysses", 1)))
    with pytest.raises(InputError, match=r"global batch of 19 samples.*nearest that would: 16"):
        search("llama3-8b", "8 h100-sxm-80gb", 19, 4096, only)
    with pytest.raises(InputError, match=r"nearest that would: 8$"):
        search("llama3-8b", "8 h100-sxm-80gb", 3, 4096, only)


def test_devices_that_a_batch_does_not_divide_over_are_left_out_by_name() -> None:
    """1,024 samples over 125 nodes: no degrees of 1,000 devices leave data ranks that divide them."""
    few = Constraints(most=(("cp", 1), ("tp", 8)))  # plans are enough
    found = search("llama3-8b", "125x8 h100-sxm-80gb, ib-400", 1024, 8192, few)
    assert found.cluster is not None and found.cluster.world_size < 1000 and found.cluster.world_size % 8 == 0
    assert found.best.plan.world_size == found.cluster.world_size
    assert found.notes[0].startswith(f"planned on {found.cluster.world_size} of 1000 devices (")
    assert "512 take" in found.notes[0] and "nearest that would: 1025" in found.notes[0]
    assert search("llama3-8b", "2x8 h100-sxm-80gb, ib-400", 64, 8192).cluster is None


def test_nodes_of_six_are_cut_by_six_and_part_of_them_is_what_there_is() -> None:
    """Heads that six ranks do not divide are dealt unevenly; 16 devices are no part of three nodes of six, and a search
    on them once had no end."""
    cluster = Cluster.parse("3x6 h200-sxm-141gb, roce-100")
    assert "tp=6" in str(search("llama-3.2-1b", str(cluster), 18, 2048).best.plan)
    subject = decoder(LLAMA, cluster, software("shardwise"), 16, 2048, "bf16")
    counts = counts_that_do(subject, cluster, Constraints())
    assert counts and all(first_devices(cluster, each).world_size == each for each in counts)


def test_a_step_of_which_half_is_waited_for_names_half_of_the_devices() -> None:
    found = search("llama3-8b", "8x8 h100-sxm-80gb, eth-25", 1, 2**16)
    told = [each for each in found.notes if each.startswith("half of the devices")]
    assert len(told) == 1 and "on 32 of 64" in told[0]
    assert not any("half of the devices" in each for each in search("llama3-8b", "8 h100-sxm-80gb", 64, 4096).notes)


def test_no_batch_is_named_that_would_not_do_either() -> None:
    """8 devices are not a multiple of 3, whatever the batch."""
    from shardwise.models import tasks
    from shardwise.planner.traced_layouts import traced_subject

    for subject in (
        traced_subject(tasks.mlp(), NODE, software("shardwise"), 12, "bf16", ("none",)),
        decoder(LLAMA, NODE, software("shardwise"), 12, 4096, "bf16"),
    ):
        with pytest.raises(InputError, match=r"has tp=3; there are tp=1, 2"):
            search_plans(subject, NODE, Constraints(fixed=(("tp", 3),)))


def a_task(read_s: float = 0.0, *, from_data: bool = False):
    """A small network whose input takes `read_s` a sample."""
    import torch
    from torch import nn

    from shardwise import Task

    class Rows:
        def __len__(self) -> int:
            return 64

        def read(self, indices):
            time.sleep(read_s * len(indices))
            return torch.ones(len(indices), 256)

    def made(step: int) -> torch.Tensor:
        time.sleep(read_s * 8)
        return torch.ones(8, 256)

    source: dict = {"data": Rows()} if from_data else {"batch": made}
    return Task(
        model=lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))),
        loss=lambda output, batch: (output.pow(2).sum(), torch.tensor(float(len(output)))), **source,
    )  # fmt: skip


def test_input_that_is_slower_than_the_step_is_told() -> None:
    from shardwise import plan

    slow = plan(a_task(0.01, from_data=True), "4 h100-sxm-80gb", global_batch=16).notes
    assert any("input-bound: a rank reads its samples" in note and "readers for each rank" in note for note in slow)
    made = plan(a_task(0.01), "4 h100-sxm-80gb", global_batch=16).notes
    assert any("input-bound: every rank makes the global batch" in note for note in made)
    assert any("1.0 times as fast: not worth distributing" in note for note in made)


def test_one_device_is_compared_at_its_own_best_micro_batch() -> None:
    """Not with micro-batches of one sample: more devices are never faster than in proportion to their number."""
    import re

    from shardwise import plan

    notes = plan(a_task(from_data=True), "4 h100-sxm-80gb", global_batch=1024).notes
    (times,) = (float(m[1]) for n in notes if (m := re.search(r"devices are ([\d.]+) times", n)))
    assert times <= 4.2


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


@pytest.mark.parametrize(
    "plan", ["dp_replicate=8", "dp_shard=8,zero=1", "dp_shard=8,zero=3", "dp_replicate=2,dp_shard=4,zero=2"]
)
def test_a_checkpoint_holds_each_element_once_however_ranks_hold_it(plan: str) -> None:
    """AdamW in bf16 with float32 masters: 12 bytes of each weight over all ranks."""
    subject = decoder(LLAMA, NODE, software("shardwise"), 64, 2048, "bf16")
    layout = layout_of(Plan.parse(plan + ",precision=bf16"), subject)
    saved = saved_bytes(subject.simulate(layout).memory, layout)
    assert 8 * saved == pytest.approx(12 * LLAMA.parameters, rel=0.01)


def test_what_a_run_measured_is_taken(tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    summary.write_text('{"world_size": 2, "checkpoints": {"stall_s": 0.25, "bytes": 7}}')
    assert stall_of(tmp_path) == (0.25, 3.5)
    for text in ('{"world_size": 2, "checkpoints": null}', '{"checkpoints": {"stall_s": 0.25, "bytes": 7}}',
                 '{"world_size": 2, "checkpoints": {"stall_s": 0.25, "bytes": 0}}'):  # fmt: skip
        summary.write_text(text)
        with pytest.raises(InputError, match="does not tell what a checkpoint cost"):
            stall_of(tmp_path)


@pytest.mark.parametrize("write_s", [None, 1200.0])
def test_goodput_by_formula_and_by_drawing_agree(write_s: float | None) -> None:
    found = goodput(6.0, 16384, 50_000 * 3600, 300, 30, write_s=write_s)
    assert found["share_by_simulation"] == pytest.approx(found["share_by_formula"], abs=0.03)


def test_no_interval_is_shorter_than_the_disk_takes_to_write() -> None:
    young = goodput(7.0, 1000, 1e7, 300, 0.5, write_s=60.0)
    assert young["checkpoint_every_s"] == pytest.approx(100) and young["bound_by"] == "failures"
    bound = goodput(7.0, 1000, 1e7, 300, 0.5, write_s=157.0)
    assert (bound["checkpoint_every_s"], bound["bound_by"]) == (157.0, "disk")
    assert bound["checkpoint_every_steps"] == 23 and 23 * 7 >= 157  # 22.4 steps
    assert bound["share_by_formula"] < young["share_by_formula"]
    assert goodput(7.0, 1000, 1e7, 300, 0.5)["write_s"] is None


def test_the_cluster_s_disk_and_another_run_s_bytes_count(tmp_path: Path) -> None:
    device = replace(Cluster.parse("2x8 h100-sxm-80gb, ib-400").device, disk_gbps=Figure(0.01, "measured", "here"))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(replace(Cluster.parse("2x8 h100-sxm-80gb, ib-400"), device=device).to_toml())
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text('{"world_size": 2, "checkpoints": {"stall_s": 0.001, "bytes": 2000}}')
    code, step = shardwise(
        "simulate", "llama3-8b", "--cluster", str(cluster), "--global-batch", "1M-tokens", "--seq", "8k",
        "--plan", "dp_shard=16,zero=3", "--mtbf-hours", "20000", "--saves-of", str(run),
    )  # fmt: skip
    assert code in (0, 3), step
    found = step["goodput"]
    assert found["checkpoint_s"] == pytest.approx(1e-6 * found["saved_bytes"])  # a byte takes a microsecond
    assert found["write_s"] == pytest.approx(8 * found["saved_bytes"] / 1e7)  # eight ranks to a node's disk
    assert found["checkpoint_every_s"] >= found["write_s"]
    assert found["checkpoint_every_steps"] * step["step_s"] >= found["write_s"]


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
    code, found = shardwise("plan", "llama3-8b", *where, "-o", path, "--mtbf-hours", "20000", "--checkpoint-s", "10")
    assert code == 0
    assert f"--checkpoint-every {found['goodput']['checkpoint_every_steps']} --restarts" in found["command"]
    assert found["goodput"]["checkpoint_every_s"] == pytest.approx((2 * 10 * 20000 * 3600 / 16) ** 0.5)
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


def test_a_job_is_told_in_hours_and_cost_on_all_devices_and_on_fewer() -> None:
    where = ("--cluster", "8 h100-sxm-80gb", "--global-batch", "64", "--seq", "2k")
    code, found = shardwise("plan", "llama-3.2-1b", *where, "--tokens", "1B", "--price", "3")
    assert code == 0 and [job["devices"] for job in found["job"]] == [8, 4, 2, 1]
    all_devices, alone = found["job"][0], found["job"][-1]
    steps = 1e9 / (64 * 2048)
    assert all_devices["seconds"] == pytest.approx(steps * found["proposals"][0]["step_s"] + all_devices["start_s"])
    assert alone["cost"] == pytest.approx(3 * alone["seconds"] / 3600)
    assert all_devices["seconds"] < alone["seconds"] < 8 * all_devices["seconds"]
    for words, told in (
        (("--tokens", "1B", "--job", "20m"), "give one of the two"),
        (("--price", "2"), "is for a job"),
        (("--job", "soon"), "expected a time such as"),
        (("--tokens", "-3"), "expected a number of tokens"),
    ):
        code, found = shardwise("plan", "llama-3.2-1b", *where, *words)
        assert code == 2 and told in found["error"]


def test_a_job_that_does_not_repay_its_start_says_so() -> None:
    found = search("llama-3.2-1b", "8 h100-sxm-80gb", 64, 2048)
    told = "\n".join(job_lines([JobCost(found.best, 8, 10), JobCost(found.best, 1, 80)]))
    assert "not worth it: start-up is 9" in told
    assert "not worth it" not in "\n".join(job_lines([JobCost(found.best, 8, 1e5), JobCost(found.best, 1, 8e5)]))


def test_compare_puts_plans_side_by_side() -> None:
    code, found = shardwise(
        "compare", "llama3-8b", "--plans",
        "dp_shard=8,zero=3,precision=bf16;dp_replicate=8,precision=bf16;dp_replicate=7,precision=bf16;dp_shard=8,precision=fp32",
        "--cluster", "8 h100-sxm-80gb", "--global-batch", "16", "--seq", "4k",
    )  # fmt: skip
    assert code == 0
    fits = [row.get("fits") for row in found["plans"]]
    assert fits == [True, False, None, None]
    assert "does not divide" in found["plans"][2]["error"]
    assert "not fp32" in found["plans"][3]["error"]


def test_compare_says_why_where_no_plan_can_be_forecast() -> None:
    words = ("--plans", "dp_shard=8,precision=fp32;dp_shard=16", "--global-batch", "16", "--seq", "4k")
    code, found = shardwise("compare", "llama3-8b", *words, "--cluster", "8 h100-sxm-80gb")
    assert code == 2
    assert "none of the plans" in found["error"] and "not fp32" in found["error"]


def test_a_plan_that_does_not_fit_ends_with_3_and_a_name_is_forecast_in_bf16() -> None:
    words = ("--cluster", "8 h100-sxm-80gb", "--global-batch", "16", "--seq", "4k")
    code, found = shardwise("simulate", "llama3-8b", "--plan", "dp_replicate=8", *words)
    assert (code, found["fits"], found["plan"]) == (3, False, "dp_replicate=8,precision=bf16")
    code, found = shardwise("simulate", "llama3-8b", "--plan", "dp_shard=8,remat=full", *words)
    assert (code, found["fits"]) == (0, True)


def test_devices_that_a_plan_leaves_out_are_told(capsys: pytest.CaptureFixture) -> None:
    from shardwise.cli.main import call

    words = ["--cluster", "8 h100-sxm-80gb", "--global-batch", "16", "--seq", "4k"]
    assert call(["simulate", "llama3-8b", "--plan", "dp_shard=4", *words]) == 3
    out = capsys.readouterr().out
    assert "the plan has 4 ranks: 4 of 8 devices stand idle" in out
    assert out.rstrip().endswith("`shardwise plan` with the same words looks for plans that do")


def test_a_cluster_has_an_end() -> None:
    with pytest.raises(InputError, match="up to 1,048,576 are planned for"):
        Cluster.parse("100000000x8 h100-sxm-80gb, ib-400")


def test_compare_measures_on_the_ranks_at_hand() -> None:
    code, found = shardwise(
        "compare",
        "shardwise.models.tasks:mlp",
        "--plans",
        "single;dp_replicate=512",
        "--cluster",
        "64x8 l40s, ib-400",
        "--measure",
    )
    assert code == 0
    ran, refused = (row["measured"] for row in found["plans"])
    assert ran["step_s"] > 0 and ran["peak_live"] > 0 and ran["received_bytes"] == 0
    assert "needs 512 ranks" in refused["refused"]


def test_compare_measures_a_task_that_reads_a_source() -> None:
    words = ("--plans", "single", "--cluster", "1x2 l40s", "--measure", "--global-batch", "8")
    code, found = shardwise("compare", "digits", *words)
    assert code == 0 and 0 < found["plans"][0]["measured"]["loss"] < 10
    code, found = shardwise("compare", "shardwise.models.tasks:mlp", *words)
    assert code == 2 and "runs the task's own batch" in found["error"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("compare", "llama3-8b", "--plans", "tp=8", "--cluster", "8 h100-sxm-80gb", "--measure"), "is a shape"),
        (("plan", "llama3-9b", "--cluster", "8 h100-sxm-80gb"), "did you mean"),
        (("plan", "llama3-8b", "--cluster", "8 h1000"), "no device"),
        (("plan", "llama3-8b", "--cluster", "8 h100-sxm-80gb"), "give --seq and --global-batch"),
        (("simulate", "llama3-8b", "--cluster", "8 h100-sxm-80gb", "--plan", "tp=16"), "needs 16 devices"),
        (("plan", "shardwise.models.tasks:mlp", "--cluster", "8 h100-sxm-80gb", "--precision", "bf61"), "'bf16'"),
        (("plan", "llama3-8b", "--cluster", "8 l40s", "--seq", "8k", "--global-batch", "-8"), "number of samples"),
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
    path.write_text(json.dumps({**values, "architectures": ["LlamaForCausalLM"], "is_decoder": False}))
    assert decoder_from_config(str(path)).parameters == LLAMA.parameters
    for other, why in (
        ({**values, "is_decoder": False}, "it says is_decoder = false"),
        ({**values, "architectures": ["BertForMaskedLM"]}, "its architecture is BertForMaskedLM"),
        ([values], "holds a list"),
    ):
        path.write_text(json.dumps(other))
        with pytest.raises(InputError, match=why):
            decoder_from_config(str(path))


def test_a_plan_of_too_many_ranks_has_no_forecast_beside_others() -> None:
    plans = "dp_replicate=8,precision=bf16;dp_replicate=16,precision=bf16"
    where = ("--seq", "1024", "--global-batch", "16", "--cluster", "8 h100-sxm-80gb")
    code, found = shardwise("compare", "llama3-8b", "--plans", plans, *where)
    assert code == 0
    assert "needs 16 devices" in found["plans"][1]["error"]
    assert "error" not in found["plans"][0]


@pytest.mark.parametrize("plan", ["tp=2,pp=4,microbatches=8", "pp=4,microbatches=8,schedule=zbh1,dp_replicate=2"])
def test_memory_over_time_peaks_at_what_each_rank_allocates(plan: str) -> None:
    """And ends where it began; the page shows each rank's under the same axis as its ops."""
    from shardwise.simulator.step_page import memory_over_time, page

    forecast = simulate("llama3-8b", f"{plan},precision=bf16", "8 h100-sxm-80gb", global_batch=16, seq=2048)
    curves = memory_over_time(forecast)
    assert [name for name, _ in curves] == [f"rank {rank}" for rank in range(4)]
    for (_, curve), ledger in zip(curves, forecast.memory, strict=True):
        assert max(size for _, size in curve) == pytest.approx(ledger.allocated)
        assert curve[-1][1] == pytest.approx(curve[0][1])
        assert [second for second, _ in curve] == sorted(second for second, _ in curve)
    text = page(forecast, "a < b", 80e9)
    assert "a &lt; b" in text and text.count("<polygon") == 4 and "80 GB" in text and "http" not in text


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("sp=true", "give tp its degree"),
        ("tp=8,zero=3", "give dp_shard its degree"),
        ("ep=8,dp_shard=64,zero=3", "has no experts"),
        ("pp=64", "64 stages of 34 parts"),
    ],
)
def test_a_plan_that_no_version_can_run_is_not_forecast(plan: str, told: str) -> None:
    with pytest.raises(RefusedPlan, match=told):
        simulate("llama3-8b", plan, "8x8 h100-sxm-80gb, ib-400", global_batch=64, seq=2048)


def test_memory_over_time_without_a_pipeline_is_that_of_a_micro_batch() -> None:
    from shardwise.simulator.step_page import memory_over_time

    forecast = simulate("llama3-8b", "dp_shard=8,zero=3,precision=bf16", "8 h100-sxm-80gb", global_batch=8, seq=2048)
    ((_, curve),) = memory_over_time(forecast)
    assert max(size for _, size in curve) == pytest.approx(forecast.worst.allocated)


def test_a_page_says_what_does_not_fit_and_a_step_of_one_stage_has_a_trace() -> None:
    from shardwise.simulator.step_page import page
    from shardwise.simulator.timeline import chrome

    forecast = simulate("llama3-8b", "dp_replicate=8", "8 h100-sxm-80gb", global_batch=8, seq=2048)
    assert not forecast.timeline and "DOES NOT FIT: 1" in page(forecast, "t", 85e9)
    assert "DOES NOT FIT" not in page(forecast, "t", 300e9) and " ms<td>" in page(forecast, "t")
    events = [event for event in json.loads(chrome(forecast, "t"))["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in events) == pytest.approx(1e6 * forecast.step_s)


def test_experts_are_dealt_over_ranks_in_a_search() -> None:
    found = search("mixtral-8x7b", "2x8 h100-sxm-80gb, ib-400", 128, 4096)
    assert {"ZeRO-1 + ep", "ZeRO-3 + ep"} <= {p.family for p in found.proposals} | set(found.lost)
    dealt = [p for p in found.proposals if p.layout.ep > 1]
    assert dealt and all(p.layout.shard % p.layout.ep == 0 for p in dealt)
    assert any(not p.runnable for p in dealt)


def test_what_is_written_to_a_file_runs(tmp_path: Path) -> None:
    """What a faster plan lacks is told beside it; the file and the command hold the best that runs."""
    from shardwise.layout import check

    out = tmp_path / "plan.toml"
    code, found = shardwise(
        "plan", "mixtral-8x7b", "--cluster", "2x8 a100-sxm-80gb, ib-200", "--global-batch", "128", "--seq", "4096",
        "-o", str(out),
    )  # fmt: skip
    assert code == 0
    assert found["proposals"][0]["runnable"] is True
    check(Plan.parse(str(out)))


def test_many_experts_are_dealt_beyond_a_node() -> None:
    """As DeepSeek's were: over up to eight nodes, and more where it is asked for."""

    def degrees(**fixed: object) -> set[int]:
        one, asked = (
            decoder_by_name("deepseek-v3"),
            Constraints(fixed=(("pp", 16), ("tp", 1), ("cp", 1), *fixed.items())),
        )
        return {layout.ep for layout in decoder_layouts(one, 2048, 15360, 4096, 8, asked)}

    assert {1, 8, 16, 32, 64} <= degrees() and 128 not in degrees()
    assert 128 in degrees(ep=128)
