"""What a layer of experts costs beside its products, each term against arithmetic by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.cluster import Cluster, model
from shardwise.costs.block import CASTS, BlockCosts
from shardwise.costs.expert_moves import (
    ROUTING,
    bias_bytes,
    cast_elements,
    cast_kernels,
    clamp_bytes,
    routed_bytes,
)
from shardwise.costs.host_seconds import layer_host
from shardwise.costs.kernels import STREAM_SHARE, Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import layer_activations
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software, software
from shardwise.costs.wire import RankGroup, Wire
from shardwise.simulator import simulate
from shardwise.simulator.parts import GAPS, StepContext

ROOT = Path(__file__).parents[2]
QWEN, DEEPSEEK, GPT_OSS = (Shape.from_row(model(name)) for name in ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b"))
DEALT = Layout(ep=8, shard=8, zero=1, seq=4096)
NODE = Cluster.parse("8 b200-sxm")
NEMO = software("nemo")


def benchmark(name: str) -> ModuleType:
    """A module of benchmarks/."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    ("changes", "ep", "passes"),
    [
        ({}, 1, 2 + 2 / 8),
        ({}, 8, 2 + 2 / 8 + 4),
        ({}, 128, 2 + 2 / 8),  # one expert each: nothing to sort
        ({"fp8": "blocks"}, 8, 2 + 2 / 8 + 4 + 4),
        ({"fp8": "blocks", "drops": True}, 8, 2 + 2 / 8 + 4),
        ({"fp8": "blocks", "dispatch": "deepep"}, 8, 4 + 4),
        ({"fp8": "blocks", "dispatch": "hybridep"}, 8, 4),
    ],
)
def test_rows_are_copied_on_their_way_to_experts(changes: dict[str, object], ep: int, passes: float) -> None:
    soft = replace(NEMO, dispatch="each") if not changes.get("dispatch") else NEMO
    moved = routed_bytes(QWEN, DEALT.with_(ep=ep, shard=ep), replace(soft, **changes))
    assert moved == pytest.approx(passes * 4096 * 8 * 2048 * 2)


def test_a_dense_layer_routes_nothing() -> None:
    llama = Shape.from_row(model("llama3-8b"))
    assert routed_bytes(llama, DEALT, NEMO) == cast_kernels(llama, DEALT, replace(NEMO, fp8="blocks")) == 0
    assert bias_bytes(llama, DEALT, NEMO) == (0.0, 0.0)


def test_biases_of_experts_are_added_in_float32_by_megatron_alone() -> None:
    """GPT-OSS: four experts for each row, 2880 wide both ways."""
    rows = 4096 * 4
    assert bias_bytes(GPT_OSS, DEALT, NEMO) == pytest.approx((rows * 2880 * 28, rows * 2880 * 36))
    assert clamp_bytes(GPT_OSS, DEALT, NEMO) == pytest.approx((rows * 2880 * 16, rows * 2880 * 30))
    for moved in (bias_bytes, clamp_bytes):
        assert moved(GPT_OSS, DEALT, software("torchtitan")) == moved(QWEN, DEALT, NEMO) == (0.0, 0.0)
    times = [BlockCosts(s, DEALT, NEMO, Kernels(NODE.device)).layer() for s in (GPT_OSS, GPT_OSS.with_(expert_bias=0))]
    seconds = rows * 2880 * (44 + 66) / (0.666 * 8e12)
    assert times[0].forward + times[0].backward - times[1].forward - times[1].backward == pytest.approx(seconds)


@pytest.mark.parametrize(("recipe", "each"), [("current", 3), ("blocks", 1)])
def test_rows_of_each_expert_are_cast_apart(recipe: str, each: int) -> None:
    """Sixteen experts on a rank, two products: fifteen more of each cast than one feed-forward has."""
    soft = replace(NEMO, fp8=recipe)
    assert cast_kernels(QWEN, DEALT, soft) == 2 * 15 * each
    slow, quick = (BlockCosts(QWEN, DEALT, soft, Kernels(NODE.device, launch_us=us))._casts() for us in (1e6, 0.0))
    counts = [round(a - b) for a, b in zip(slow, quick, strict=True)]
    assert counts == [n + 2 * 15 * each for n in CASTS]


def test_routing_takes_its_kernels_launches() -> None:
    slow, quick = (BlockCosts(QWEN, DEALT, NEMO, Kernels(NODE.device, launch_us=us)) for us in (1e6, 0.0))
    stream = zip(slow._feed_forward_stream(), quick._feed_forward_stream(), strict=True)
    assert [round(a - b) for a, b in stream] == [1 + ROUTING[0], 2 + ROUTING[1]]


def test_the_host_takes_what_megatrons_tests_of_tiny_models_take() -> None:
    def milliseconds(shape: Shape, **changes: object) -> float:
        return 1e3 * sum(layer_host(shape, DEALT, replace(NEMO, **changes)))

    llama = Shape.from_row(model("llama3-8b"))
    sixteen = 16 * 3.3 / 64
    assert milliseconds(llama) == pytest.approx(4.7)
    assert milliseconds(QWEN) == pytest.approx(4.7 + 3.4 + sixteen)
    assert milliseconds(QWEN, fp8="blocks") == pytest.approx(4.7 + 1.7 + 3.4 + sixteen)
    assert milliseconds(QWEN, overlap_ep=0.15) == pytest.approx(1.3 * (4.7 + 3.4 + sixteen))
    assert milliseconds(QWEN, graphs="attention") == pytest.approx(3.4 + sixteen)
    assert milliseconds(QWEN, graphs="routing") == pytest.approx(4.7 + sixteen)
    assert milliseconds(QWEN, graphs="attention+routing") == pytest.approx(sixteen)
    grace = 1e3 * sum(layer_host(QWEN, DEALT, replace(NEMO, fp8="blocks"), "gb300"))
    assert grace == pytest.approx(7.4 + 1.2 + 3.7 + sixteen), "another processor starts its kernels"
    assert milliseconds(QWEN, graphs="step") == 0
    assert sum(layer_host(QWEN, DEALT, software("shardwise"))) == 0


def test_no_layer_is_faster_than_its_host_and_a_large_one_is_not_slower() -> None:
    """What a device waits for its rows is over while it waits for the host."""

    def layer(samples: int, soft: Software) -> float:
        layout = DEALT.with_(micro_batch=samples)
        step = StepContext(QWEN, layout, NODE, soft)
        return step.timed(BlockCosts(QWEN, layout, soft, step.kernels).layer()).seconds

    free = replace(NEMO, graphs="step")
    assert layer(1, NEMO) == pytest.approx(sum(layer_host(QWEN, DEALT, NEMO)) / GAPS, rel=0.05)
    assert layer(1, free) < 0.7 * layer(1, NEMO)
    assert layer(8, NEMO) == layer(8, free)
    bases = [simulate(QWEN, DEALT.with_(micro_batch=n), NODE, NEMO).basis.get("host", "") for n in (1, 8)]
    assert "Megatron-Core's Python takes 8.92 ms" in bases[0] and not bases[1]


def test_what_deepseek_makes_of_latents_is_computed_again() -> None:
    soft, layout = replace(NEMO, selective="latents"), DEALT.with_(recompute="selective")
    kernels = Kernels(NODE.device)
    block = BlockCosts(DEEPSEEK, layout, soft, kernels)
    queries, keys = kernels.product(4096, 128 * 192, 1536), kernels.product(4096, 128 * (128 + 128), 512)
    assert block.layer().recompute == pytest.approx(queries + keys + block._rotary()[0])
    assert layer_activations(DEEPSEEK, layout, soft)["q k v"] == 0
    assert BlockCosts(QWEN, layout, soft, kernels).layer().recompute == 0


def test_a_wait_for_the_slowest_rank_is_linear_as_far_as_it_was_measured() -> None:
    rack, node = (Wire(Cluster.parse(name)) for name in ("64 gb200", "8 b200-sxm"))
    assert node.skew(2) == pytest.approx(7e-6) and node.skew(8) == rack.skew(8) == pytest.approx(49e-6)
    half = [sum(1 / n for n in range(2, ranks + 1)) for ranks in (8, 64)]
    assert rack.skew(64) == pytest.approx(49e-6 * half[1] / half[0])
    assert node.skew(64) == node.skew(8), "those of one domain"


def test_memory_streams_as_on_a_device_of_the_same_generation() -> None:
    rates = {
        name: Kernels(Cluster.parse(f"8 {name}").device).bandwidth for name in ("b200-sxm", "gb200", "h100-sxm-80gb")
    }
    assert rates["gb200"] == rates["b200-sxm"] == pytest.approx(0.666 * 8e12)
    assert rates["h100-sxm-80gb"] == pytest.approx(STREAM_SHARE * 3.35e12)


@pytest.mark.parametrize(
    ("model_name", "gpu", "chunks", "dispatch", "graphs", "beside"),
    [
        ("Qwen3_30B_a3B (tokendrop)", "B200-SXM", 1, "each", "step", False),
        ("Qwen3_30B_a3B", "GB200-NVL72", 1, "hybridep", "routing", False),
        ("Qwen3_235B_a22B", "GB200-NVL72", 1, "hybridep", "attention", False),
        ("Qwen3_235B_a22B", "B200-SXM", 2, "each", "", True),
        ("DeepSeekV3", "H100-SXM-80GB", 4, "deepep", "", True),
        ("DeepSeekV3", "B200-SXM", 1, "deepep", "", False),
    ],
)
def test_recipes_of_megatron_bridge_by_plan_and_device(
    model_name: str, gpu: str, chunks: int, dispatch: str, graphs: str, beside: bool
) -> None:
    row = {"model": model_name, "gpu": gpu, "source": "NeMo", "notes": ""}
    soft = benchmark("forecast_ran_on").bridge_recipe(NEMO, row, DEALT.with_(chunks=chunks, pp=chunks))
    assert (soft.dispatch, soft.graphs, soft.overlap_ep > 0) == (dispatch, graphs, beside)
    assert soft.drops is ("tokendrop" in model_name)


def test_the_hosts_seconds_are_read_from_iterations_of_tiny_models() -> None:
    """Made up: 10 ms once, 5 ms a layer; 2 ms more in FP8, 3 ms more with experts, 1.5 times beside computing."""
    host = benchmark("forecast_host")

    def row(name: str, micro: int, pp: int, ms: float, **changes: str) -> dict[str, str]:
        layers = (micro + pp - 1) * 12 / pp
        return {
            "model": name, "gpu": "H100", "layers": "12", "hidden": "512", "n_gpus": str(pp), "tp": "1", "cp": "1",
            "pp": str(pp), "micro_batch": "1", "global_batch": str(micro), "precision": "bf16", "recompute": "none",
            "num_experts": "0", "iteration_time_s": str(0.01 + 1e-3 * ms * layers), **changes,
        }  # fmt: skip

    some = {"num_experts": "8"}
    runs = chain(
        (row("gpt/a", micro, pp, 5.0) for micro in (1, 4, 9) for pp in (1, 2)),
        [row("gpt/b", 4, 2, 7.0, precision="fp8"), row("moe/c", 4, 2, 8.0, **some)],
        [row("moe/d_ovlp", 4, 2, 12.0, **some), row("gpt/e_1node", 4, 2, 50.0)],
        [row("gpt/f", 4, 2, 9.0, hidden="4096")],
    )
    found = host.figures(host.iterations(runs, "H100"))
    assert found == pytest.approx({
        "layer, ms": 5.0, "once, ms": 10.0, "experts, ms more": 3.0, "FP8, ms more": 2.0,
        "rows sent beside, times": 1.5,
    })  # fmt: skip


def test_rows_that_are_weighed_first_do_not_come_back_in_recompute() -> None:
    """Nothing behind an expert's last product is kept then, so it is not run again, nor is its exchange; where rows are
    weighed after it, as modules of transformers do, all of it is."""
    layout = Layout(ep=8, shard=8, zero=3, seq=4096, recompute="full")
    kernels = Kernels(NODE.device)
    first, after = (BlockCosts(QWEN, layout, software(name), kernels).layer() for name in ("automodel", "fsdp"))
    rows = 4096 * QWEN.top_k * 8 / QWEN.experts
    last = QWEN.experts / 8 * kernels.product(rows, QWEN.hidden, QWEN.ffn)
    assert first.forward - first.recompute == pytest.approx(last)
    assert after.recompute == after.forward
    assert [len(layer.recompute_messages) for layer in (first, after)] == [1, 2]


def test_experts_that_one_rank_has_alone_are_not_gathered() -> None:
    """FSDP2's copies are of what it gathers: none of experts where `ep` deals them over all ranks that shard."""
    kernels = Kernels(NODE.device)
    alone, dealt = (
        BlockCosts(QWEN, Layout(ep=8, shard=shard, zero=3, seq=4096), software("automodel"), kernels)._products()[2]
        for shard in (8, 16)
    )
    experts = QWEN.experts / 8 * 3 * QWEN.hidden * QWEN.ffn
    assert dealt - alone == pytest.approx(experts * software("automodel").unit_bytes / kernels.bandwidth, rel=1e-6)


def test_grouped_products_that_join_the_activation_leave_its_bytes_and_casts_out() -> None:
    """Rows are cast as they come, and the gradients that go back: nothing of what is inside of an expert."""
    plain = replace(NEMO, fp8="blocks", dispatch="hybridep")
    joined, rows = replace(plain, joins_experts=True), 4096 * 8
    inner = QWEN.ffn
    assert cast_elements(QWEN, DEALT, plain) == (rows * (2048 + inner), rows * (2 * inner + 2048))
    assert cast_elements(QWEN, DEALT, joined) == (rows * 2048, rows * 2048)
    assert cast_kernels(QWEN, DEALT, joined) == 0 < cast_kernels(QWEN, DEALT, plain)
    times = [BlockCosts(QWEN, DEALT, soft, Kernels(NODE.device))._activated() for soft in (plain, joined)]
    saved = [(slow - quick) * 0.666 * 8e12 for slow, quick in zip(*times, strict=True)]
    assert saved == pytest.approx([rows * inner * 6, rows * inner * 10])


def test_recompute_of_activations_alone_and_of_whole_experts() -> None:
    """Megatron-Core's modules layernorm and moe_act, and layernorm and moe: attention's output is kept by both."""
    layout = DEALT.with_(recompute="selective")

    def layer(selective: str) -> tuple[BlockCosts, set[str]]:
        soft = replace(NEMO, selective=selective)
        kept = {name for name, size in layer_activations(QWEN, layout, soft).items() if size}
        return BlockCosts(QWEN, layout, soft, Kernels(NODE.device)), kept

    light, kept = layer("activations")
    assert light.layer().recompute == pytest.approx(light._norms()[0] + light._activated()[0])
    assert {"up and gate", "routed tokens", "attention output"} <= kept and not kept & {"activation", "norm outputs"}
    heavy, kept = layer("experts")
    again = heavy.layer()
    kept_s = sum(heavy.kernels.layer_product(4096, *pair) for pair in QWEN.projections(1)) + heavy._attention()[0]
    assert again.recompute == pytest.approx(again.forward - kept_s)
    assert [m.axis for m in again.recompute_messages] == ["ep", "ep"], "rows travel again"
    assert "attention output" in kept and not kept & {"up and gate", "routed tokens", "norm outputs"}


def test_megatrons_experts_are_dealt_to_neighbours_whatever_tp_is() -> None:
    """Parallel folding (arXiv:2504.14960): eight experts' ranks of tp=4 are one node, not four."""
    layout = Layout(tp=4, sp=True, ep=8, shard=8, zero=1, seq=4096)
    wide = Cluster.parse("4x8 h100-sxm-80gb, ib-400")
    groups = [StepContext(QWEN, layout, wide, software(name)).group("ep") for name in ("nemo", "shardwise")]
    assert groups == [RankGroup(8, 1), RankGroup(8, 4)]


def test_deepep_hands_rows_over_no_faster_than_its_processors_do() -> None:
    """20 of them: 391 GB/s a rank of a B200's node, where NCCL's all-to-all has more."""
    (sent,) = set(BlockCosts(QWEN, DEALT, NEMO, Kernels(NODE.device)).layer().forward_messages)
    slow, quick = (
        StepContext(QWEN, DEALT, NODE, replace(NEMO, dispatch=name)).seconds(sent) for name in ("deepep", "hybridep")
    )
    met = (1 - (7 / 8) ** 8) * sent.size_bytes
    assert slow - Wire(NODE).skew(8) == pytest.approx(met / 391e9) and slow > 1.2 * quick


@pytest.mark.parametrize(
    ("notes", "dispatch", "graphs", "beside", "selective"),
    [
        ("alltoall, baseline; recomputes mlp up_proj", "each", "", False, "latents"),
        ("DeepEP, 1f1b overlap of EP; recomputes norm, act", "deepep", "", True, "activations"),
        ("HybridEP, graphs attn moe_router moe_preprocess", "hybridep", "attention+routing", False, "attention"),
        ("HybridEP, full-iteration CUDA graphs", "hybridep", "step", False, "attention"),
        ("DeepEP, forced balance; recomputes layernorm and moe", "deepep", "", False, "experts"),
        ("HybridEP, EP overlap, no graphs", "hybridep", "", True, "attention"),
    ],
)
def test_notes_of_a_row_say_how_its_rows_travel(
    notes: str, dispatch: str, graphs: str, beside: bool, selective: str
) -> None:
    found = benchmark("forecast_recipes").as_told(NEMO, {"notes": notes, "table": ""}, "h100-sxm-80gb")
    assert (found.dispatch, found.graphs, found.selective) == (dispatch, graphs, selective)
    assert bool(found.overlap_ep) is beside


def test_recipes_of_2026_make_a_step_one_graph_in_mxfp8_on_a_rack() -> None:
    recipes, new = benchmark("forecast_recipes"), software("nemo-2026")
    row = {"model": "Qwen3_30B_a3B", "precision": "FP8-MX", "notes": ""}
    rack = recipes.bridge_2026(new, row, DEALT, "gb300", True)
    assert (rack.graphs, rack.joins_experts, rack.attention) == ("step", True, "cudnn-2026-mxfp8")
    bf16 = recipes.bridge_2026(new, row | {"precision": "BF16"}, DEALT, "gb300", True)
    assert (bf16.graphs, bf16.joins_experts, bf16.attention) == ("routing", False, "cudnn-2026")
    waits = recipes.bridge_2026(new, row | {"model": "DeepSeekV3", "precision": "BF16"}, DEALT, "h100", False)
    assert (waits.dispatch, waits.graphs, waits.overlap_ep) == ("deepep", "", 0.0)
    assert recipes.bridge_2026(new, row, DEALT.with_(ep=1), "gb300", True) == new
