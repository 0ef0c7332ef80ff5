"""Costs and the simulated step: each figure against one worked out another way."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from shardwise.cluster import Cluster, Device, model
from shardwise.cluster.catalogue import device, device_names
from shardwise.costs.block import HOST_US, LAYER_OPS, BlockCosts
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import (
    COPIES,
    buffers,
    layer_activations,
    rank_memory,
    stage_parameters,
    states,
)
from shardwise.costs.ops import op_seconds
from shardwise.costs.shapes import Shape
from shardwise.costs.software import LOSS_BYTES, SOFTWARE, STATES, as_planned, handled_bytes, software
from shardwise.costs.wire import RankGroup, Wire, _lies
from shardwise.errors import InputError
from shardwise.layout.schedules import Times, make_schedule
from shardwise.layout.timing import play
from shardwise.layout.zero_stages import STAGES
from shardwise.measure.machine import attention_times
from shardwise.models import tasks
from shardwise.planner.door import simulate as forecast_of_task
from shardwise.rehearsal.step_trace import one_sample, trace
from shardwise.simulator import simulate
from shardwise.simulator.counted import StepTrace
from shardwise.simulator.events import StreamOp, run
from shardwise.simulator.parts import StepContext, reduction_seconds
from shardwise.simulator.pipeline import play_all, schedule
from shardwise.simulator.quick import Estimator
from shardwise.simulator.stages import stage_layers
from shardwise.task import Task

ROOT = Path(__file__).parents[2]
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


def test_what_reads_the_same_stream_is_summed_at_once() -> None:
    """Attention and feed-forward of GPT-NeoX: one message forward where they are added first, one a norm backward."""
    neox, one = Shape.from_row(model("gpt-neox-20b")), Shape.from_row(model("gpt-j-6b"))
    after = neox.with_(parallel=0)

    def sums(shape: Shape, name: str, **more: bool) -> list[int]:
        costs = BlockCosts(shape, Layout(tp=8, **more), software(name), Kernels(NODE.device))
        return [sum(m.op in ("all_reduce", "reduce_scatter") for m in way) for way in costs._messages()]

    assert [sums(shape, "megatron-deepspeed") for shape in (after, neox, one)] == [[2, 2], [1, 2], [1, 1]]
    assert [sums(shape, "shardwise") for shape in (after, neox, one)] == [[2, 2], [2, 2], [2, 1]]
    assert sums(one, "nemo", sp=True) == [1, 1]
    kept = [sum(layer_activations(shape, Layout(), software("megatron-2021")).values()) for shape in (after, neox)]
    assert kept[0] - kept[1] == 2 * 2048 * neox.hidden, "the stream in front of the feed-forward is that of attention"


def test_a_token_further_ahead_costs_a_layer_and_the_output_matrix_again() -> None:
    """DeepSeek-V3 as it was trained: 11.6B parameters more, of which the embedding and the output matrix are none."""
    plain, ahead = (Shape.from_row(model(name)) for name in ("deepseek-v3", "deepseek-v3-mtp"))
    assert ahead.parameters - plain.parameters == plain.layer_parameters + 2 * 7168**2 + 3 * 7168
    idle = (plain.experts - plain.top_k) * plain.expert_parameters
    met = plain.layer_parameters - idle + 2 * 7168**2 + 3 * 7168 + 7168 * plain.vocab
    more = ahead.flops_per_token(4096) - plain.flops_per_token(4096)
    assert more == pytest.approx(6 * met + 6 * plain.attention_width * 4096)
    where, layout = Cluster.parse("16x8 h800-sxm-80gb, ib-400"), Layout(pp=16, ep=8, shard=8, zero=1, n_micro=16)
    assert stage_layers(plain, layout)[-2:] == [3, 3] and stage_layers(ahead, layout)[-2:] == [4, 2]
    elements = [stage_parameters(s, layout, 4.0, first=False, last=True) for s in (plain, ahead)]
    assert sum(elements[1].values()) - sum(elements[0].values()) == pytest.approx(
        sum(stage_parameters(plain, layout, 1.0, first=False, last=False).values()) + 2 * 7168**2 + 3 * 7168
    )
    slower = [simulate(shape, layout, where, software("nemo")).step_s for shape in (plain, ahead)]
    assert 1.0 < slower[1] / slower[0] < 1.15


class _VocabParallel(torch.autograd.Function):
    """Megatron's cross-entropy without its fusion, on one rank: the same operations in place (its cross_entropy.py)."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        logits -= logits.max(dim=-1)[0].unsqueeze(-1)
        picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        torch.exp(logits, out=logits)
        total = logits.sum(-1)
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, target)
        return total.log() - picked

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax, target = ctx.saved_tensors
        softmax.scatter_add_(-1, target.unsqueeze(-1), torch.full_like(gradient, -1.0).unsqueeze(-1))
        return softmax.mul_(gradient.unsqueeze(-1)), None


def test_bytes_of_a_loss_are_those_of_its_operations() -> None:
    """Of one logit in Megatron's loss without fusion: what one more column of logits moves in a trace."""

    class Head(torch.nn.Module):
        def __init__(self, vocab: int) -> None:
            super().__init__()
            self.out = torch.nn.Linear(8, vocab, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return _VocabParallel.apply(self.out(x).float(), labels).sum()

    def moved(vocab: int) -> float:
        batch = {"x": torch.zeros(1, 64, 8), "labels": torch.zeros(1, 64, dtype=torch.long)}
        task = Task(model=lambda: Head(vocab), batch=lambda step: batch, inputs=lambda b: ((b["x"], b["labels"]), {}),
                    loss=lambda out, b: (out, 64.0), optimizer=lambda p: torch.optim.SGD(p, 0.1))  # fmt: skip
        return trace(task, 1, "bf16", fused=True).moved

    picks = 4 + 8  # a trace counts all of what a gather and a scatter pick from
    beside = (moved(1024) - moved(512)) / 512 / 64
    assert sum(LOSS_BYTES["parallel"]) == pytest.approx(beside - picks, rel=0.01)


def test_heads_are_dealt_whole_and_the_fullest_rank_counts() -> None:
    """32 heads over 24 or 64 ranks: some have two, some have one, none has half of one."""
    assert [LLAMA.heads_of(ranks) for ranks in (1, 8, 24, 64)] == [32, 4, 2, 1]
    assert [LLAMA.heads_of(ranks) for ranks in (3, 6)] == [12, 8], "four heads read the same keys, and stay together"
    attends = {
        ranks: BlockCosts(LLAMA, Layout(ulysses=ranks, seq=2**16), software("megatron-core"), Kernels(NODE.device))
        .layer().attention_forward for ranks in (16, 24, 32, 64)
    }  # fmt: skip
    assert attends[24] == pytest.approx(attends[16], rel=0.05)
    assert attends[64] == pytest.approx(attends[32], rel=0.05)
    widths = [LLAMA.projections(tp)[-1][1] / LLAMA.head_dim for tp in (16, 24, 64)]
    assert widths == [2, 2, 1]


def test_parameters_of_stages_add_up() -> None:
    layout = Layout(pp=4)
    stages = [stage_parameters(LLAMA, layout, 8, first=i == 0, last=i == 3)["dense"] for i in range(4)]
    assert sum(stages) == LLAMA.parameters


# --- wire


def test_a_group_that_leaves_the_node_is_slower_and_says_formula() -> None:
    wire = Wire(Cluster.parse("2x8 h100-sxm-80gb, ib-400"))
    inside = wire.collective("all_gather", RankGroup(8, 1), 2**30)
    across = wire.collective("all_gather", RankGroup(16, 1), 2**30)
    one_each = wire.collective("all_gather", RankGroup(2, 8), 2**30)
    assert inside < across < one_each
    assert wire.basis("all_gather", RankGroup(8, 1)).startswith("measured")
    assert wire.basis("all_gather", RankGroup(16, 1)).startswith("formula")


def test_a_group_that_nodes_split_unevenly_is_as_slow_as_its_fewest_ports() -> None:
    """12 ranks over nodes of 8: 8 and 4, then 4 and 8; only 4 ports take part on one side."""
    wire = Wire(Cluster.parse("3x8 h100-sxm-80gb, ib-400"), 24)
    assert wire.inside(RankGroup(12)) == 4 and wire.tier(RankGroup(12)) == 1
    assert wire.inside(RankGroup(16)) == 8
    uneven, even = (wire.collective("all_gather", RankGroup(size), 1e9) for size in (12, 16))
    assert uneven > 1.6 * even, "though it has fewer ranks"
    assert wire.tier(RankGroup(3)) == 1, "the third of them has ranks on both sides of a border"
    assert Wire(wire.cluster, 6).tier(RankGroup(3)) == 0, "no border is met by six ranks"
    assert wire.tier(RankGroup(4, 2)) == 0 and wire.inside(RankGroup(6, 4)) == 2


@pytest.mark.parametrize("unit", [3, 4, 8])
def test_how_groups_lie_on_nodes_is_what_counting_all_of_them_gives(unit: int) -> None:
    for size, stride, ranks in product((2, 3, 4, 6), (1, 2, 3, 5), (12, 24, 60)):
        group = RankGroup(size, stride)
        if ranks % group.span:
            continue
        shares = [
            Counter((base + within + place * stride) // unit for place in range(size))
            for base in range(0, ranks, group.span)
            for within in range(stride)
        ]
        expected = all(len(share) == 1 for share in shares), min(min(share.values()) for share in shares)
        assert _lies(group, unit, ranks) == expected, (group, ranks)


def test_gradients_in_buckets_wait_for_their_hops_bucket_by_bucket() -> None:
    """FSDP sends a layer at a time, Megatron 40 million elements or a million a rank, this package that or 25 MiB."""
    ours, fsdp, nemo = (software(name) for name in ("shardwise", "fsdp", "nemo"))
    assert [ours.pieces(100 * 2**20, ranks, 32, STAGES[1]) for ranks in (4, 25, 1024)] == [16, 5, 1]
    assert ours.pieces(100 * 2**20, 1024, 32, STAGES[2]) == 16, "of larger ones more gradients would be whole"
    assert fsdp.pieces(1e12, 1024, 32, STAGES[1]) == 32
    assert [nemo.pieces(1e9, ranks, 32, STAGES[1]) for ranks in (8, 128)] == [25, 8]
    assert software("megatron-core").pieces(1e12, 1024, 32, STAGES[1]) == 1, "nothing overlaps by default: all at once"
    many = Cluster.parse("64x8 h100-sxm-80gb, ib-400")
    layout = Layout(shard=512, zero=1)
    elements = stage_parameters(LLAMA, layout, LLAMA.layers, first=True, last=True)
    step = StepContext(LLAMA, layout, many, ours)
    whole = StepContext(LLAMA, layout, many, replace(ours, bucket=(math.inf, 0.0)))
    n = ours.pieces(elements["dense"], 512, 32, STAGES[1])
    for one, at_once in zip(*(reduction_seconds(s, elements, 32) for s in (step, whole)), strict=True):
        assert one - at_once == pytest.approx((n - 1) * many_hops(many), rel=0.05)


def many_hops(cluster: Cluster) -> float:
    """Seconds of the smallest message around a ring of all devices."""
    return Wire(cluster).collective("reduce_scatter", RankGroup(cluster.world_size), 1.0)


def test_what_a_rank_sends_to_each_other_rank_goes_by_its_own_port() -> None:
    """Half of what a rank has is for the other node; 8 ports carry that of 8 ranks, as one carries that of one."""
    wire = Wire(Cluster.parse("2x8 h100-sxm-80gb, ib-400"))
    port = wire.cluster.tiers[1].gbps.value * 1e9
    many, few = (wire.collective("all_to_all", RankGroup(size, stride), 1e9) for size, stride in ((16, 1), (2, 8)))
    assert many == pytest.approx(5e8 / port, rel=0.02)
    assert few == pytest.approx(many, rel=0.02)


def test_a_row_goes_once_to_a_node_and_once_to_a_rank_that_has_several_of_its_experts() -> None:
    """Eight copies over two nodes: nearly each row has experts in both; one of its copies crosses, not four.

    Of eight ranks it meets 8 (1 - (7/8)^8) = 5.25: NVIDIA/Megatron-LM issue 2692, "they just send it once".
    """
    wire, size = Wire(Cluster.parse("2x8 h100-sxm-80gb, ib-400")), 1e9
    each, once = wire.collective("all_to_all", RankGroup(16), size), wire.rows(RankGroup(16), size, 8)
    port = wire.cluster.tiers[1].gbps.value * 1e9
    assert once < 0.35 * each and once == pytest.approx(size / 8 * 2 * (1 - 1 / 2**8) / 2 / port, rel=0.02)
    assert wire.rows(RankGroup(16), size, 1) == pytest.approx(each, rel=0.01), "of one copy there is nothing to save"
    met = 8 * (1 - (7 / 8) ** 8) / 8 * size
    assert wire.rows(RankGroup(8), size, 8) == wire.collective("all_to_all", RankGroup(8), met)
    assert wire.rows(RankGroup(8), size, 8, 1e11) == pytest.approx(met / 1e11), "no faster than its kernels"


def test_replicas_outside_of_stages_meet_over_the_outer_link() -> None:
    wire, size = Wire(Cluster.parse("4x4 a100-sxm-40gb, eth-1x1")), 1e9
    apart = wire.all_reduce(RankGroup(1), RankGroup(4, 4), size)
    assert (
        apart
        == wire.collective("all_reduce", RankGroup(4, 4), size)
        > 10 * wire.collective("all_reduce", RankGroup(4), size)
    )
    evenly = wire.all_reduce(RankGroup(2), RankGroup(2, 2), size)
    assert evenly == wire.collective("all_reduce", RankGroup(4), size)
    assert wire.all_reduce(RankGroup(2), RankGroup(2, 4), size) > wire.collective(
        "all_reduce", RankGroup(2, 4), size / 2
    )


@pytest.mark.parametrize("shard", [1, 2])
def test_a_step_of_replicas_of_pipelines_takes_longer_over_a_slow_link(shard: int) -> None:
    def step(link: str) -> float:
        layout = Layout(tp=2, pp=4, shard=shard, replicas=4 // shard, micro_batch=1, n_micro=8, seq=2048)
        return simulate(LLAMA, layout, Cluster.parse(f"4x8 a100-sxm-40gb, {link}"), software("shardwise")).step_s

    assert step("eth-1x1") > 3 * step("eth-400")


def test_gloos_reduce_scatter_is_an_all_reduce_where_no_table_tells() -> None:
    gpus = Cluster.parse("2x2 l40s, eth-10")
    cpus = Wire(replace(gpus, device=replace(gpus.device, kind="cpu", table="")))
    for group in (RankGroup(2), RankGroup(4)):
        scattered = cpus.collective("reduce_scatter", group, 1e9)
        assert scattered == cpus.collective("all_reduce", group, 1e9)
        assert scattered == pytest.approx(2 * cpus.collective("all_gather", group, 1e9), rel=0.01)
    one_way = Wire(gpus).collective("all_gather", RankGroup(4), 1e9)
    assert Wire(gpus).collective("reduce_scatter", RankGroup(4), 1e9) == pytest.approx(one_way, rel=0.05)


def test_rows_of_experts_that_travel_beside_computing_slow_it() -> None:
    """They are waited for where they take longer than all computing alone; processors that send do not compute."""
    shape = Shape.from_row(model("deepseek-v3"))
    layout = Layout(ep=64, shard=64, zero=1, seq=4096)
    soft, near, far = software("deepseek"), Cluster.parse("8x8 h800-sxm-80gb, ib-400"), "8x8 h800-sxm-80gb, ib-100"
    hidden, open_ = (
        StepContext(shape, layout, near, replace(soft, overlap_ep=part)) for part in (soft.overlap_ep, 0.0)
    )
    plain = BlockCosts(shape, layout, soft, hidden.kernels).layer()
    beside, waited = hidden.timed(plain), open_.timed(plain)
    assert beside.exposed == 0 < waited.exposed
    assert plain.forward + plain.backward < beside.seconds < 132 / 112 * (plain.forward + plain.backward) + 1e-12
    assert beside.seconds < waited.seconds
    slow = StepContext(shape, layout, Cluster.parse(far), soft).timed(plain)
    assert 0 < slow.exposed < StepContext(shape, layout, Cluster.parse(far), open_.software).timed(plain).exposed


def test_devices_that_share_ports_share_their_rate() -> None:
    own, shared = (Cluster.parse(f"4x8 h100-sxm-80gb, {link}").tiers[1] for link in ("ib-400", "ib-400x2"))
    assert shared.gbps.value == pytest.approx(own.gbps.value / 4)
    assert "2 ports of 400 Gb/s" in shared.gbps.source
    assert Cluster.parse("4x8 h100-sxm-80gb, ib-400x16").tiers[1].gbps.value == own.gbps.value


def test_messages_between_neighbours_cross_only_where_the_node_ends() -> None:
    wire = Wire(Cluster.parse("2x8 h100-sxm-80gb, ib-400"))
    assert wire.send(1e8, 6, 7) < wire.send(1e8, 7, 8)


# --- events and pipelines


def test_overlap_follows_from_dependencies() -> None:
    ops = [
        StreamOp("a", "compute", 2.0),
        StreamOp("send", "link", 3.0, [0]),
        StreamOp("b", "compute", 1.0),
        StreamOp("c", "compute", 1.0, [1]),
    ]
    assert run(ops, contention=0.0) == pytest.approx(6.0)
    assert ops[2].start == pytest.approx(2.0)


def test_compute_is_slowed_beside_communication() -> None:
    ops = [StreamOp("a", "compute", 1.0), StreamOp("x", "link", 10.0)]
    run(ops, contention=0.5)
    assert ops[0].end == pytest.approx(1.5)


def test_an_op_cannot_wait_for_a_later_one() -> None:
    with pytest.raises(ValueError, match="later"):
        run([StreamOp("a", "compute", 1.0, [1]), StreamOp("b", "compute", 1.0)])


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


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbh1"])
def test_a_pipeline_pays_for_what_zero_does_in_every_micro_batch(schedule: str) -> None:
    """Less memory at rest is never free: gradients are reduced, and weights gathered, once for each micro-batch."""
    base = Layout(tp=4, pp=4, shard=4, seq=4096, n_micro=16, schedule=schedule, chunks=2 if "inter" in schedule else 1)
    cluster = Cluster.parse("8x8 h100-sxm-80gb, ib-400")
    stages = (1, 2) if schedule == "zbh1" else (1, 2, 3)
    found = [simulate(LLAMA, base.with_(zero=zero), cluster, software("shardwise")) for zero in stages]
    for less, more in pairwise(found):
        assert more.step_s > less.step_s * 1.01
        assert more.worst.allocated < less.worst.allocated
    one, two = (
        simulate(LLAMA, base.with_(zero=zero, schedule="1f1b", chunks=1), cluster, software("megatron-core"))
        for zero in (1, 2)
    )
    name = "data-parallel communication"
    reduced = (two.parts[name] - one.parts[name]) / 15  # nothing hides, so each of the other micro-batches pays it
    parameters = stage_parameters(LLAMA, base, LLAMA.layers / 4, first=False, last=True)
    once = Wire(cluster).collective("reduce_scatter", RankGroup(4, 4), 4 * parameters["dense"])
    assert reduced == pytest.approx(once, rel=0.1)


def test_zero_over_the_ranks_of_a_sequence_gathers_as_over_data_ranks() -> None:
    """Weights that nobody holds whole are gathered for every micro-batch, whatever else their ranks share."""
    slow, soft = Cluster.parse("8x1 h100-sxm-80gb, eth-25"), software("shardwise")
    along, data = Layout(ulysses=8, zero=3, seq=8 * 4096), Layout(shard=8, zero=3, seq=4096)
    for n in (1, 2, 3):
        one, two = (simulate(LLAMA, layout.with_(n_micro=n), slow, soft) for layout in (along, data))
        assert one.step_s == pytest.approx(two.step_s, rel=0.05), "at 25 Gb/s all else hides behind it"
        gathered = [buffers(LLAMA, layout, soft, LLAMA.layers) for layout in (along, data)]
        assert gathered[0] == gathered[1] > 0
        estimate = Estimator(LLAMA, slow, soft).seconds(along.with_(n_micro=n))
        assert estimate == pytest.approx(one.step_s, rel=0.12)


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


def test_a_device_of_a_generation_that_was_measured_slows_down_on_small_products_as_that_does() -> None:
    borrowed = Kernels(Cluster.parse("8 gb200").device)
    assert borrowed.basis.endswith("by shape as on b200_sxm")
    rates = [
        2 * m * 4096 * k / borrowed.product(m, 4096, k) / 1e12 for m, k in ((128, 512), (1024, 4096), (16384, 8192))
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1]
    assert rates[-1] < borrowed.peak_tflops < borrowed.best_tflops


def test_a_later_kernel_of_attention_is_as_fast_as_the_one_before_where_it_was_not_measured() -> None:
    """NVIDIA/cudnn-frontend's results of 2026, causal, 8192 positions: GB300 1927 TFLOP/s, GB200 1563."""
    rates = {
        name: Kernels(device(name)[0]).attention_tflops("cudnn-2026", 8192, 128, False) for name in ("gb200", "gb300")
    }
    assert rates == {"gb200": 1563, "gb300": 1927}
    hopper = Kernels(device("h100-sxm-80gb")[0])
    old, new, narrow = (
        hopper.attention_tflops(f"cudnn{more}", 8192, 128, False) for more in ("", "-2026", "-2026-mxfp8")
    )
    assert old == new == narrow
    assert Kernels(device("gb300")[0]).attention_tflops("cudnn-2026-mxfp8", 8192, 128, False) == 2632


def test_a_b200_holds_what_its_table_has_in_long_runs() -> None:
    """XLA's table of B200 (matmul_interpolator_data.h, sm_100): 4096 cubed in bf16 at 1417 TFLOP/s."""
    b200 = Kernels(device("b200-sxm")[0])
    assert b200.share == 1.0
    assert 2 * 4096.0**3 / b200.product(4096, 4096, 4096) / 1e12 == pytest.approx(1417, rel=0.1)


# --- FP8


@pytest.mark.parametrize("recipe", ["-fp8", "-fp8-delayed", "-mxfp8"])
def test_fp8_halves_products_and_pays_for_its_casts(recipe: str) -> None:
    layout = Layout(seq=8192, n_micro=8, shard=8, zero=1)
    wide, narrow = (simulate(LLAMA, layout, NODE, software(name)) for name in ("nemo", "nemo" + recipe))
    gain = narrow.mfu / wide.mfu  # of two forecasts; attention, norms and the head are what they were
    assert 1.2 < gain < 1.8
    assert narrow.worst.terms["weights in FP8"] == pytest.approx(2 * 32 * LLAMA.layer_parameters, rel=0.01)
    assert narrow.worst.terms["activations"] < wide.worst.terms["activations"]
    assert "no plan of this version runs it" in narrow.basis["implementation"]


def test_small_products_gain_nothing_from_fp8() -> None:
    small = LLAMA.with_(hidden=512, heads=4, kv_heads=4, ffn=1024, vocab=1024)
    wide, narrow = (simulate(small, Layout(seq=1024), NODE, software(name)) for name in ("nemo", "nemo-fp8"))
    assert narrow.step_s > wide.step_s


def test_fp8_is_refused_where_a_device_or_a_task_cannot_have_it() -> None:
    with pytest.raises(InputError, match="a100-sxm-80gb has no FP8 products"):
        simulate(LLAMA, Layout(seq=2048), Cluster.parse("8 a100-sxm-80gb"), software("nemo-fp8"))
    with pytest.raises(InputError, match=r"--software torchtitan$"):
        forecast_of_task(tasks.mlp(), "dp_replicate=2", Cluster.parse("2 h100-sxm-80gb"), software="torchtitan-mxfp8")
    with pytest.raises(InputError, match="NAME-mxfp8"):
        software("nemo-fp4")


def test_the_estimate_is_near_the_simulation() -> None:
    soft = software("shardwise")
    estimator = Estimator(LLAMA, NODE, soft)
    for layout in (
        Layout(replicas=8, seq=4096, n_micro=4),
        Layout(shard=8, zero=3, seq=4096, micro_batch=2, n_micro=4),
        Layout(tp=4, sp=True, shard=2, zero=1, seq=4096, n_micro=4),
        Layout(pp=4, shard=2, zero=1, seq=4096, n_micro=16),
    ):
        assert estimator.seconds(layout) == pytest.approx(simulate(LLAMA, layout, NODE, soft).step_s, rel=0.12), layout


@pytest.mark.parametrize(
    ("name", "ranks", "count", "chunks"),
    [
        ("1f1b", 4, 403, 1),
        ("gpipe", 3, 200, 1),
        ("zbh1", 4, 330, 1),
        ("interleaved1f1b", 4, 400, 2),
        ("zbv", 2, 301, 2),
    ],
)
def test_a_very_long_pipeline_is_as_long_as_if_all_of_it_were_played(
    name: str, ranks: int, count: int, chunks: int
) -> None:
    """Uneven stages, blocking or not; what is kept too."""
    stages = ranks * chunks
    times = [[scale * (1 + 0.1 * (stage % 3)) for stage in range(stages)] for scale in (1.0, 1.1, 0.9)]
    for blocking in (False, True):
        send = [0.05] * (stages - 1)
        whole = play(schedule(name, ranks, count, chunks), *times, send, blocking=blocking)
        quick = play_all(name, ranks, count, chunks, *times, send, blocking=blocking)
        assert len(quick.ops) < len(whole.ops)
        assert quick.seconds == pytest.approx(whole.seconds, rel=1e-9)
        assert quick.busy == pytest.approx(whole.busy, rel=1e-9)
        assert quick.in_flight == whole.in_flight


def _probed(**changes: object) -> Device:
    """A GPU as a probe would write it."""
    device = Cluster.parse("1 h200-sxm-141gb").device
    return replace(device, table="", **changes)


def test_attention_that_was_measured_takes_as_long_as_that() -> None:
    rows = tuple(attention_times(torch.device("cpu"), lengths=(16, 64), widths=(8, 16), tokens=128))
    assert {row[:4] for row in rows} == {
        (kind, length, 128 // length, width)
        for kind in ("attention", "attention_backward") for length in (16, 64) for width in (8, 16)
    }  # fmt: skip
    kernels = Kernels(_probed(products=rows), launch_us=0.0)
    for kind, length, heads, width, us in rows:
        found = kernels.attention("flash2", 1, heads, length, length, width, backward=kind != "attention")
        assert found == pytest.approx(1e-6 * us)


def test_a_host_starts_as_many_ops_of_a_layer_as_transformers_llama_has() -> None:
    hf, kernels = pytest.importorskip("transformers"), []
    for layers in (1, 2):
        config = hf.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        )  # fmt: skip
        task = replace(tasks.hf_llama(), model=lambda config=config: hf.LlamaForCausalLM(config))
        kernels.append(trace(task, 1, "bf16", "none", one_sample(task), 0, fused=True).kernels)
    assert kernels[1] - kernels[0] == sum(LAYER_OPS)


def test_small_micro_batches_of_a_decoder_wait_for_the_host() -> None:
    soft, small = software("shardwise"), Layout(replicas=8, seq=64)
    shape = Shape.from_row(model("llama-3.2-1b"))
    few, more = (simulate(shape, small.with_(micro_batch=n), NODE, soft) for n in (1, 2))
    least = shape.layers * sum(LAYER_OPS) * HOST_US * 1e-6
    assert least < few.parts["compute"] < 1.3 * least, "the two ends come on top"
    assert f"{shape.layers * sum(LAYER_OPS)} ops" in few.basis["host"]
    assert more.parts["compute"] < 1.2 * few.parts["compute"], "more samples cost little more"
    compiled = simulate(shape, small, NODE, replace(soft, fused=True))
    assert compiled.parts["compute"] < 0.9 * few.parts["compute"], "fewer ops, until the device is the limit"
    assert "host" not in simulate(shape, small.with_(seq=8192), NODE, soft).basis


def test_a_measured_rate_is_not_taken_at_a_discount() -> None:
    plain = _probed()
    measured = replace(
        plain,
        memory_bandwidth_gbps=replace(plain.memory_bandwidth_gbps, kind="measured"),
        bf16_tflops=replace(plain.bf16_tflops, kind="measured"),
        sustained_bf16_tflops=None,
    )
    kernels = Kernels(measured)
    assert kernels.bandwidth == plain.memory_bandwidth_gbps.value * 1e9
    assert kernels.peak_tflops == plain.bf16_tflops.value
    assert Kernels(plain).bandwidth < kernels.bandwidth


def test_copies_of_gradients_live_when_no_micro_batch_does() -> None:
    """Of fp16 as Megatron has it: copies of the gradients at the step, beside states and not beside activations."""
    shape = Shape.from_row(model("llama-2-7b"))
    soft = replace(software("megatron-2021"), states="fp16-apex-fp32-grad")
    elements = sum(stage_parameters(shape, Layout(), shape.layers, first=True, last=True).values())
    rests = 16 * elements + soft.workspace_bytes

    def peak(in_flight: float) -> tuple[float, str]:
        layout = Layout(seq=2048)
        found = rank_memory(shape, layout, soft, layers=shape.layers, first=True, last=True, in_flight=in_flight)
        return found.allocated, found.peak

    assert peak(0.0) == (pytest.approx(rests + 4 * elements), COPIES)
    many, name = peak(4.0)
    layers = 4.0 * shape.layers * sum(layer_activations(shape, Layout(seq=2048), soft).values())
    assert name != COPIES and layers > 4 * elements
    assert many < rests + layers + 4 * elements


def of_transformers(family: str, layers: int, length: int, recompute: str = "none", vocab: int = 64) -> StepTrace:
    """A trace of one sample of a small decoder, as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    from shardwise.hf import task as hf_task

    common = {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": vocab}
    if family == "opt":
        own = {"ffn_dim": 384, "word_embed_proj_dim": 128, "dropout": 0.0, "enable_bias": False}
        config = transformers.OPTConfig(**common, **own, activation_function="gelu")
    else:
        kind = transformers.LlamaConfig if family == "llama" else transformers.Qwen3Config
        config = kind(**common, intermediate_size=384, num_key_value_heads=2, head_dim=32)
    ids = torch.zeros(1, length, dtype=torch.long)
    made = hf_task(config, batch=lambda step: {"input_ids": ids, "labels": ids})
    return trace(made, 1, "bf16", recompute=recompute, fused=True)


def by_numbers(family: str) -> Shape:
    gated = family != "opt"
    return Shape(
        layers=1, hidden=128, heads=4, kv_heads=2 if gated else 4, head_dim=32, ffn=384, vocab=64, gated=gated,
        learned_positions=0 if gated else 64, layer_norm=not gated, qk_norm=family == "qwen3",
    )  # fmt: skip


FAMILIES = ("llama", "qwen3", "opt")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_moves_by_numbers_is_what_a_trace_of_transformers_has(family: str) -> None:
    """Bytes of one layer beside its products and attention, for a position: forward and backward together."""
    length = 32
    kernels = Kernels(Cluster.parse("2 h100-sxm-80gb").device, launch_us=0.0)
    costs = BlockCosts(by_numbers(family), Layout(micro_batch=1, seq=length), software("shardwise"), kernels)
    streams = (*costs._norms(), *costs._rotary(), *costs._feed_forward_stream())
    told = sum(streams) * kernels.bandwidth / length
    scaled = 8 * 128 if family == "opt" else 0  # OPT multiplies its queries, forward and backward
    moved = of_transformers(family, 2, length).moved - of_transformers(family, 1, length).moved
    assert told + scaled == pytest.approx(moved / length, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_computed_again_by_numbers_is_what_a_trace_moves_again(family: str) -> None:
    """Selective recompute of this package keeps products and attention: no attention is computed again."""
    length = 32
    kernels = Kernels(Cluster.parse("2 h100-sxm-80gb").device, launch_us=0.0)
    layout = Layout(micro_batch=1, seq=length, recompute="selective")
    costs = BlockCosts(by_numbers(family), layout, software("shardwise"), kernels)
    told = costs.layer().recompute * kernels.bandwidth / length
    moved = [of_transformers(family, n, length, how).moved for how in ("none", "selective") for n in (2, 3)]
    again = (moved[3] - moved[2]) - (moved[1] - moved[0])
    assert told == pytest.approx(again / length, rel=0.1)


def test_full_recompute_stops_with_the_last_tensor_that_backward_reads() -> None:
    """torch's non-reentrant checkpoint does not run a dense layer's last product again, nor send its sum; Megatron's
    own runs all of it."""
    layout = Layout(tp=2, sp=True, micro_batch=1, seq=4096, recompute="full")
    left, h200 = {}, device("h200-sxm-141gb")[0]
    for name in ("fsdp", "nemo"):
        costs = BlockCosts(LLAMA, layout, software(name), Kernels(h200))
        layer = costs.layer()
        left[name] = layer.forward - layer.recompute
        assert len(layer.forward_messages) - len(layer.recompute_messages) == (name == "fsdp")
        assert [m.op for m in layer.recompute_messages].count("all_gather") == 2, "what is read is gathered again"
    down = Kernels(h200).product(4096, LLAMA.hidden, LLAMA.ffn / 2)
    assert left == {"fsdp": pytest.approx(down), "nemo": 0.0}
    dropped = BlockCosts(replace(LLAMA, dropout=True), layout, software("fsdp"), Kernels(h200)).layer()
    assert dropped.recompute == dropped.forward, "a mask is kept behind the last product"


def test_recompute_of_a_layers_parts_keeps_their_inputs_and_leaves_out_two_products() -> None:
    """AutoModel checkpoints norms, attention and feed-forward one by one: each ends before its own last product."""
    layout = Layout(tp=2, sp=True, micro_batch=1, seq=4096, recompute="full")
    kernels, soft = Kernels(device("h200-sxm-141gb")[0]), software("automodel")
    layer = BlockCosts(LLAMA, layout, soft, kernels).layer()
    out, down = (kernels.product(4096, LLAMA.hidden, deep) for deep in (LLAMA.hidden / 2, LLAMA.ffn / 2))
    assert layer.forward - layer.recompute == pytest.approx(out + down)
    assert [m.op for m in layer.recompute_messages] == ["all_gather"] * 2
    stream = 4096 * LLAMA.hidden * 2 / 2
    assert sum(layer_activations(LLAMA, layout, soft).values()) == 4 * stream


def test_what_tp_of_pytorch_copies_and_keeps() -> None:
    """A copy orders what is gathered of several samples, narrow where products are, and what is scattered; products
    keep it for their weights. Begun early, they leave pieces, which are read and added up."""
    kernels, layout = Kernels(device("h100-sxm-96gb")[0]), Layout(tp=8, sp=True, micro_batch=2, seq=4096)
    whole = 2 * 4096 * LLAMA.hidden * 2

    def moved(name: str, layout: Layout) -> list[float]:
        costs = BlockCosts(LLAMA, layout, as_planned(software(name), layout), kernels)
        launches = (4, 4) if not layout.tp_overlap else (2, 2)
        return [
            (seconds - n * 2e-6) * kernels.bandwidth / whole if seconds else 0.0
            for seconds, n in zip(costs._reorders(), launches, strict=True)
        ]

    assert moved("torchtitan", layout) == pytest.approx([8.0, 8.0])
    assert moved("torchtitan-fp8", layout) == pytest.approx([6.0, 6.0])
    assert moved("torchtitan", layout.with_(micro_batch=1)) == [0.0, 0.0]
    assert moved("nemo", layout) == [0.0, 0.0]
    assert moved("torchtitan", layout.with_(tp_overlap=True)) == pytest.approx([2 * (1 + 1 / 8)] * 2)
    sent = {
        name: [m.op for m in BlockCosts(LLAMA, layout, software(name), kernels).layer().backward_messages]
        for name in ("torchtitan", "fsdp")
    }
    assert sent["fsdp"] == [*sent["torchtitan"], "all_gather", "all_gather"], "what weights' gradients read"


def test_what_selective_recompute_is_follows_from_the_software() -> None:
    """Megatron computes attention again and keeps the rest; torchtitan every second product and what is elementwise."""
    kernels = Kernels(NODE.device)
    layout = Layout(micro_batch=2, seq=8192, recompute="selective")
    all_of, more = {}, {}
    for name in ("nemo", "torchtitan", "torchtitan-eager", "shardwise"):
        costs = BlockCosts(LLAMA, layout, software(name), kernels)
        more[name] = costs.layer().recompute / costs._products()[0]
        plain = sum(layer_activations(LLAMA, layout.with_(recompute="none"), software(name)).values())
        all_of[name] = sum(layer_activations(LLAMA, layout, software(name)).values()) / plain
    assert more["nemo"] == pytest.approx(costs_of_attention("nemo", layout, kernels), rel=1e-6)
    assert 0.36 < more["torchtitan"] < 0.5 < more["torchtitan-eager"], "k, o and up are 0.37 of the products"
    assert all_of["torchtitan"] < 0.6 < 0.99 < all_of["nemo"] < 1, "only statistics of the softmax are not kept"


def costs_of_attention(name: str, layout: Layout, kernels: Kernels) -> float:
    """Seconds of attention's forward kernel for one second of the products."""
    costs = BlockCosts(LLAMA, layout, software(name), kernels)
    return costs._attention()[2] / costs._products()[0]


@pytest.mark.parametrize("name", ["deepseek-v3-mtp", "llama3-405b", "llama3-8b", "gpt-3-13b"])
def test_the_fullest_rank_of_an_estimate_is_that_of_the_step(name: str) -> None:
    """Stages in the middle hold a layer more where layers do not divide: 62 over 36 ranks."""
    shape, soft = Shape.from_row(model(name)), software("shardwise")
    for pp in (3, 6, 12, 36):
        if pp > shape.layers:
            continue
        cluster = Cluster.parse(f"{pp}x2 h100-sxm-80gb, ib-400")
        layout = Layout(pp=pp, shard=2, zero=1, n_micro=2 * pp, seq=4096, recompute="selective")
        worst = simulate(shape, layout, cluster, soft).worst
        assert Estimator(shape, cluster, soft).memory(layout).allocated == pytest.approx(worst.allocated), (name, pp)


def test_what_is_computed_again_needs_no_more_memory() -> None:
    """A layer's backward makes again what the policy dropped: beside what was kept, no more than keeping it all."""
    for name in SOFTWARE:
        held = [
            rank_memory(
                LLAMA, Layout(seq=8192, recompute=how), software(name), layers=32, first=True, last=True, in_flight=1
            ).allocated
            for how in ("none", "selective", "full")
        ]
        assert held == sorted(held, reverse=True), name


def test_a_ring_of_pytorch_sends_all_heads_and_passes_sums_in_float32() -> None:
    """Keys and values of each head of queries gathered forward and backward; sums go home block by block, the last
    one beside nothing; compiled blocks wait for each where it stands, others beside one block of the ring."""
    layout = Layout(cp=4, micro_batch=2, seq=32768)
    heads = LLAMA.heads * 2 * LLAMA.head_dim
    whole = 2 * 2 * 32768 * heads
    for name in ("torchtitan", "torchtitan-eager"):
        forward, backward = BlockCosts(LLAMA, layout, software(name), Kernels(NODE.device))._messages()
        assert [(m.op, m.size_bytes) for m in forward] == [("all_gather", whole)]
        assert [(m.op, m.size_bytes) for m in backward] == [("all_gather", whole), *[("pass", whole / 2)] * 4]
        hidden = [m.hidden for m in backward]
        assert hidden == ([False] * 5 if name == "torchtitan" else [True, True, True, True, False])
        assert all(m.share == 1 / 4 for m in backward if m.hidden)
    step = StepContext(LLAMA, layout, NODE, software("torchtitan-eager"))
    gather, beside = forward[0], 2 * step.seconds(forward[0])
    assert step.exposed([gather], beside)[0] == pytest.approx(beside / 4), "a quarter of it is one block"
    few = [simulate(LLAMA, layout, NODE, software(name)).step_s for name in ("torchtitan", "torchtitan-eager")]
    even = [simulate(LLAMA, layout, NODE, replace(software(n), ring="even")).step_s for n in ("torchtitan", "fsdp")]
    assert 1.03 < few[0] / even[0] < 1.3 and few[1] > even[1]


def test_stages_of_fully_shard_stay_whole_in_pytorchs_pipelines() -> None:
    """Weights are gathered and gradients summed once, so more micro-batches send no more, and both lie whole."""
    layout = Layout(pp=4, shard=2, zero=3, n_micro=8, seq=8192, recompute="full")
    titan = software("torchtitan")
    sent = [simulate(LLAMA, layout.with_(n_micro=n), NODE, titan).exposed["data"] for n in (8, 32)]
    assert sent[0] == pytest.approx(sent[1])
    ours = [simulate(LLAMA, layout.with_(n_micro=n), NODE, software("shardwise")).exposed["data"] for n in (8, 32)]
    assert ours[1] > 2 * ours[0]
    split = replace(titan, pipelines_whole=False)
    held = [states({"dense": 1e9, "experts": 0.0}, layout, soft) for soft in (titan, split)]
    assert held[0]["weights"] - held[1]["weights"] == 2e9 and held[0]["gradients"] == 4e9 == 2 * held[1]["gradients"]


def test_gradients_stay_whole_until_the_last_micro_batch_without_syncs() -> None:
    """They are summed once, so more micro-batches send weights alone, and whole ones lie in float32 meanwhile."""
    layout, fsdp, once = Layout(shard=8, zero=3, seq=8192), software("fsdp"), software("fsdp-no-sync")
    for n in (1, 4):
        each, whole = (states({"dense": 1e9, "experts": 0.0}, layout.with_(n_micro=n), soft) for soft in (fsdp, once))
        assert each["gradients"] == 4e9 / 8
        assert whole["gradients"] == (2e9 if n > 1 else 4e9 / 8)  # in the dtype that they are summed in
        assert {**whole, "gradients": 0.0} == {**each, "gradients": 0.0}
    slow = Cluster.parse("8x1 h100-sxm-80gb, ib-100")
    sent = [[simulate(LLAMA, layout.with_(n_micro=n), slow, soft).exposed["data"] for n in (1, 4)]
            for soft in (fsdp, once)]  # fmt: skip
    assert sent[0][0] == pytest.approx(sent[1][0]) and sent[1][1] < sent[0][1]


def test_weights_cost_a_micro_batch_what_is_moved_of_them() -> None:
    """Sums of gradients that no product makes; what fully_shard copies; nothing where a product adds into the sum."""
    once, twice, whole = Layout(shard=8, zero=1), Layout(shard=8, zero=1, n_micro=2), Layout(shard=8, zero=3)
    ours, titan, megatron = (software(name) for name in ("shardwise", "torchtitan", "nemo"))
    assert [handled_bytes(ours, layout) for layout in (once, twice, whole)] == [2 + 4, 2 + 4 + 4, 4 + 4 + 6]
    assert [handled_bytes(titan, layout) for layout in (once, twice, whole)] == [0, 10, 14]
    assert [handled_bytes(megatron, layout) for layout in (once, twice, whole)] == [0, 0, 0]
    assert handled_bytes(software("megatron-deepspeed"), twice) == 2 + 4 + 4 + 4 + 4, "widened, then added"
    assert handled_bytes(titan, twice.with_(zero=3, pp=2)) == 10, "a pipeline's stage stays whole"
    assert handled_bytes(titan, twice.with_(zero=2)) == 0 == handled_bytes(titan, twice.with_(zero=3, shard=1))
    more = simulate(LLAMA, whole, NODE, ours).parts["compute"]
    more -= simulate(LLAMA, whole, NODE, replace(ours, unit_bytes=0.0)).parts["compute"]
    assert more == pytest.approx(14 * LLAMA.parameters / Kernels(NODE.device).bandwidth, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_keeps_by_numbers_is_what_a_trace_of_transformers_has(family: str, recompute: str) -> None:
    """Bytes that one layer more keeps, where the peak is at the logits; and of those, for each of them."""
    length, vocab = 256, 4096  # so long that no gradient of a matrix is larger than the logits
    layout = Layout(micro_batch=1, seq=length, recompute=recompute)
    told = sum(layer_activations(by_numbers(family), layout, software("shardwise")).values())
    two, three = (of_transformers(family, layers, length, recompute, vocab).peak for layers in (2, 3))
    assert told == pytest.approx(three - two, rel=0.02)
    wider = of_transformers(family, 2, length, recompute, 2 * vocab).peak
    assert software("shardwise").logit_peak_bytes == pytest.approx((wider - two) / length / vocab, rel=0.03)


def test_at_the_logits_nothing_is_gathered_and_no_gradient_is_there_yet() -> None:
    """ZeRO-3 of one micro-batch: its gradients' shards come as the activations go; of two, they rest meanwhile."""
    soft, layout = software("shardwise"), Layout(shard=8, zero=3, seq=4096)
    one, two = (simulate(LLAMA, layout.with_(n_micro=n), NODE, soft).worst for n in (1, 2))
    assert one.peak == two.peak == "logits" and "buffers" not in one.terms
    assert two.allocated - one.allocated == pytest.approx(two.terms["gradients"], rel=1e-6)
    few = simulate(LLAMA, Layout(shard=2, zero=3, seq=512), NODE, soft).worst
    assert min(few.terms.values()) > 0, "more gradients than a peak takes"


@pytest.mark.parametrize("name", device_names())
def test_no_attention_is_faster_than_products_and_like_chips_are_alike(name: str) -> None:
    """A kernel's rates are those of the device, else of its generation; none promises more than large products do."""
    kernels = Kernels(device(name)[0])
    for kernel in ("flash1", "flash2", "cudnn"):
        for backward in (False, True):
            rate = kernels.attention_tflops(kernel, 32768, 128, backward)
            assert rate < kernels.peak_tflops, (kernel, backward)
            if name in ("h200-sxm-141gb", "h800-sxm-80gb"):
                assert rate == Kernels(device("h100-sxm-80gb")[0]).attention_tflops(kernel, 32768, 128, backward)


def test_an_older_kernel_does_not_grow_with_a_newer_device() -> None:
    hopper, blackwell = (Kernels(device(name)[0]) for name in ("h100-sxm-80gb", "b200-sxm"))
    old, new = (each.attention_tflops("flash2", 8192, 128, False) for each in (hopper, blackwell))
    assert old == new < blackwell.attention_tflops("cudnn", 8192, 128, False)


def test_before_ampere_attention_is_the_memory_efficient_kernel() -> None:
    old, new = (Kernels(device(name)[0]) for name in ("v100-sxm2-32gb", "a100-sxm-80gb"))
    assert old.runs_as("flash2") == old.runs_as("cudnn") == "memory-efficient" and new.runs_as("flash2") == "flash2"
    assert old.runs_as("unfused") == "unfused"  # scores are written anywhere
    rate = old.attention_tflops("flash2", 1024, 128, False)
    assert rate == pytest.approx(0.30 * old.device.bf16_tflops.value)
    told = forecast_of_task(
        "gpt-2-xl", "precision=fp16,dp_replicate=4", "4 v100-sxm2-32gb", global_batch=16, seq=512
    ).basis
    assert "flash2 does not run on v100-sxm2-32gb" in told["attention"]


def test_float32_is_multiplied_off_tensor_cores_and_convolved_on_them() -> None:
    """As torch does by default: `matmul.allow_tf32` is off, `cudnn.allow_tf32` is on."""
    h200, v100 = (Cluster.parse(f"1x1 {name}").device for name in ("h200-sxm-141gb", "v100-sxm2-16gb"))
    flops = 2 * 8192.0**3
    wide, narrow = (Kernels(h200, dtype=dtype).product(8192, 8192, 8192) for dtype in ("fp32", "bf16"))
    assert flops / wide == pytest.approx(67e12 * 0.85, rel=0.02) and narrow < wide / 8
    assert Kernels(h200, dtype="fp32").large_convolutions_tflops == pytest.approx(494.5 * 0.7)
    assert Kernels(v100, dtype="fp32").large_convolutions_tflops == pytest.approx(15.7 * 0.85)  # has no TF32
    conv = (1e6, 256.0, 2304.0, 0.0, 0.0, 0.0)
    rates = [
        2.0 * math.prod(conv[:3]) / op_seconds("conv", conv, 1.0, Kernels(of, dtype="fp32"), software("shardwise"))
        for of in (h200, v100)
    ]
    assert rates == pytest.approx([494.5e12 * 0.7 * 0.6, 15.7e12 * 0.85], rel=0.01), (
        "a share of it on tensor cores alone"
    )
    half = Kernels(h200)
    alone, first = (op_seconds("conv", (*conv[:3], 0.0, t, 1.0), 1.0, half, software("shardwise")) for t in (0.0, 1.0))
    assert 2.0 * math.prod(conv[:3]) / alone / 1e12 == pytest.approx(67 * 0.85 * 0.2, rel=0.01), "no tensor core"
    assert first == pytest.approx(4 * alone, rel=0.01)
    moved = op_seconds("conv", (1e6, 256.0, 64.0, 2e9, 0.0, 0.0), 1.0, half, software("shardwise"))
    assert moved == pytest.approx(2e9 / half.bandwidth, rel=0.01), "bytes, where they take longer"
    unknown = replace(h200, fp32_tflops=None, tf32_tflops=None)  # a cluster of one's own file
    assert Kernels(unknown, dtype="fp32").peak_tflops == pytest.approx(989 / 15 * 0.85)


# bfloat16 on an H200 with torch 2.11, (N, C, H, W): microseconds of a batch norm alone, forward and backward
BATCH_NORMS = [((128, 64, 112), 1520, 2974), ((128, 64, 56), 447, 845), ((128, 256, 56), 628, 1027),
               ((128, 512, 28), 261, 378)]  # fmt: skip


@pytest.mark.parametrize(("shape", "forward_us", "backward_us"), BATCH_NORMS)
def test_a_batch_norm_by_planes_takes_what_was_measured(shape: tuple[int, int, int], forward_us: float,
                                                        backward_us: float) -> None:  # fmt: skip
    samples, channels, side = shape
    one, kernels = 2 * samples * channels * side**2, Kernels(device("h200-sxm-141gb")[0])
    assert kernels.norm_in_bf16(2 * one, channels, backward=False) == pytest.approx(forward_us * 1e-6, rel=0.45)
    assert kernels.norm_in_bf16(3 * one, channels, backward=True) == pytest.approx(backward_us * 1e-6, rel=0.45)


def test_a_batch_norm_reads_its_input_twice_but_where_it_is_bfloat16() -> None:
    """H200, 256 samples of 256 channels in 56 x 56, channels_last: float16 388 and 565 us, bfloat16 859 and 703."""
    one, kernels = 2.0 * 256 * 256 * 56**2, Kernels(device("h200-sxm-141gb")[0])
    for name, tensors, half_us, bfloat_us in (
        ("native_batch_norm", 2, 388, 859), ("native_batch_norm_backward", 3, 565, 703)
    ):  # fmt: skip
        half, bfloat = (
            op_seconds(name, shape, 1.0, kernels, software("shardwise"))
            for shape in ((tensors * one,), (tensors * one, 0.0))
        )
        assert half == pytest.approx(half_us * 1e-6, rel=0.25)
        assert bfloat == pytest.approx(bfloat_us * 1e-6, rel=0.25)


def test_layout_and_dtype_say_how_long_convolutions_and_batch_norms_take() -> None:
    """In channels_last, and in float32 (cuDNN's batch norm), no plane is summed by one block and nothing is turned."""

    def seconds(precision: str, last: bool) -> float:
        layout = torch.channels_last if last else torch.contiguous_format

        def model() -> torch.nn.Module:
            layers = torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.Conv2d(64, 2, 1)
            return torch.nn.Sequential(*layers).to(memory_format=layout)

        task = Task(
            model, batch=lambda step: torch.zeros(64, 64, 48, 48).to(memory_format=layout),
            loss=lambda out, x: (out.square().sum(), len(x)), inputs=lambda x: ((x,), {}), name="convolved",
        )  # fmt: skip
        return forecast_of_task(task, f"precision={precision}", "1 h200-sxm-141gb").step_s

    first, last = (seconds("bf16", each) for each in (False, True))
    assert first > 2 * last
    assert seconds("fp32", False) == pytest.approx(seconds("fp32", True), rel=0.01)
