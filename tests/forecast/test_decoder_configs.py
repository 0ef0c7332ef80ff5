"""Decoders by their numbers: read from configurations, and those whose attention or layers are not all alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise import plan, simulate
from shardwise.cluster import Cluster
from shardwise.costs.block import BlockCosts
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.memory import layer_activations, rank_memory, stage_parameters
from shardwise.costs.software import software
from shardwise.errors import InputError
from shardwise.planner import Constraints
from shardwise.planner.configured_task import configured
from shardwise.planner.decoders import FAMILIES, decoder_by_name, decoder_from_config, shape_of_config
from shardwise.planner.traced_layouts import traced_subject
from shardwise.simulator import simulate as simulate_shape
from shardwise.simulator.stages import dense_of, stage_layers

LAYERS = 2


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_parameters_are_those_of_the_model(kind: str) -> None:
    """Also where the file does not say whether weights are tied: many published ones leave out what is the default."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](num_hidden_layers=LAYERS)
    if getattr(config, "first_k_dense_replace", 0):
        config.first_k_dense_replace = 1
    if getattr(config, "num_experts_per_tok", 2) is None:  # a default that transformers builds no model of
        config.num_experts_per_tok = 2
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    told = {**config.to_dict(), "architectures": [type(model).__name__]}
    for left_out in ((), ("tie_word_embeddings",)):
        shape = shape_of_config({name: told[name] for name in told if name not in left_out}, "config.json")
        assert shape.parameters == pytest.approx(count, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "jamba"}, "'jamba' is not among the families"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "deepseek_v32", "kv_lora_rank": 512}, "'deepseek_v32' is not among the families"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"model_type": "qwen2_moe", "num_experts": 8, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"model_type": "qwen2_moe", "num_experts": 8, "moe_intermediate_size": 100,
          "num_experts_per_tok": 2, "shared_expert_intermediate_size": 150}, "shared_expert_intermediate_size"),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads"),
        ({"intermediate_size": -3}, "intermediate_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)  # fmt: skip
def test_what_is_not_described_is_refused(changes: dict[str, object], told: str, tmp_path: Path) -> None:
    values = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "intermediate_size": 1024, "vocab_size": 1000,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, **changes}))
    with pytest.raises(InputError, match=told):
        decoder_from_config(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError, match=r"config.json"):
        decoder_from_config(str(path))


# --- latents, windows, dense layers in front

V3 = decoder_by_name("deepseek-v3")
CLUSTER = "128x8 h100-sxm-80gb, ib-400"


@pytest.mark.parametrize(("name", "billions", "active"), [("deepseek-v3", 671.0264, 37), ("deepseek-v2", 235.7414, 21)])
def test_parameters_are_those_published(name: str, billions: float, active: int) -> None:
    shape = decoder_by_name(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=1e-4)
    assert int(shape.active_parameters / 1e9) == active


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_flops_are_those_of_transformers_model(q_lora_rank: int | None, tmp_path: Path) -> None:
    """Counted on the module that transformers builds, with one dense layer in front, against the closed form."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=2, q_lora_rank=q_lora_rank, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=1,
    )  # fmt: skip
    config.architectures = ["DeepseekV3ForCausalLM"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    shape = shape_of_config(json.loads(path.read_text()), str(path))
    assert (shape.dense_layers, shape.dense_ffn, shape.head_dim, shape.value_dim) == (1, 160, 24, 16)
    task = configured(str(path), 32).tasks[0]
    subject = traced_subject(task, Cluster.parse("8 h100-sxm-80gb"), software("shardwise"), 8, "bf16", ("none",))
    traced = subject.simulate(next(iter(subject.layouts(8, Constraints()))))
    assert shape.flops_per_token(32) * 8 * 32 == pytest.approx(traced.flops, rel=0.02)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=4), Layout(pp=2, chunks=2, schedule="interleaved1f1b")])
def test_stages_hold_all_parameters_once(layout: Layout) -> None:
    layers = stage_layers(V3, layout)
    dense = dense_of(V3, layers)
    assert sum(dense) == V3.dense_layers
    held = [
        sum(
            stage_parameters(
                V3, layout, n, first=at == 0, last=at == len(layers) - 1, dense=front
            ).values()
        )
        for at, (n, front) in enumerate(zip(layers, dense, strict=True))
    ]  # fmt: skip
    assert sum(held) == pytest.approx(V3.parameters, rel=1e-9)


def test_latents_are_kept_in_place_of_what_they_are_made_into() -> None:
    """Bytes that a layer keeps: latents on top of queries, keys and values as wide as their heads."""
    one = rank_memory(V3.in_front, Layout(), software("megatron-core"), layers=1, first=False, last=False, in_flight=1)
    wide = 2 * V3.query_width + 2 * V3.output_width  # queries, keys; values, what attention gives
    latents = 2 * V3.q_latent + 2 * V3.kv_latent + V3.rope_dim
    rest = 4 * V3.hidden + 3 * V3.dense_ffn
    statistics = 4 * V3.heads / 2
    assert one.terms["activations"] == pytest.approx(2 * 2048 * (wide + latents + rest + statistics))


def test_a_layer_of_experts_and_a_dense_one_take_their_own_times() -> None:
    """Six layers of which two are dense: in a pipeline of three, the first stage is the dense one."""
    shape = V3.with_(layers=6, dense_layers=2)
    layout = Layout(pp=3, micro_batch=1, n_micro=12, shard=8, zero=1, ep=8, seq=4096)
    cluster, soft = Cluster.parse("3x8 h100-sxm-80gb, ib-400"), software("megatron-core")
    mixed = simulate_shape(shape, layout, cluster, soft)
    plain = simulate_shape(shape.with_(dense_layers=0, dense_ffn=0), layout, cluster, soft)
    assert mixed.memory[0].terms["weights"] < plain.memory[0].terms["weights"]
    assert mixed.memory[1].allocated == pytest.approx(plain.memory[1].allocated)
    alone = [simulate_shape(shape.with_(dense_layers=n), layout.with_(pp=1), cluster, soft).step_s for n in (0, 2, 6)]
    assert alone[2] < 0.9 * alone[0]
    assert alone[1] == pytest.approx(alone[0] + (alone[2] - alone[0]) / 3, rel=0.02)


def test_chunks_that_hold_unlike_layers_keep_what_each_holds() -> None:
    """Embedding and loss count as a layer: the last rank holds one layer, of whose micro-batches four are alive."""
    shape = decoder_by_name("llama3-8b").with_(layers=6)
    layout = Layout(pp=4, chunks=2, n_micro=4, schedule="interleaved1f1b", stage_layers=(0, 1, 1, 1, 1, 1, 1, 0))
    soft = software("megatron-core")
    found = simulate_shape(shape, layout, Cluster.parse("4 h100-sxm-80gb"), soft)
    one = sum(layer_activations(shape, layout, soft).values())
    assert found.memory[-1].terms["activations"] == pytest.approx(4 * one)


@pytest.mark.parametrize(("seq", "window"), [(4096, 128), (512, 500), (128, 128), (64, 128)])
def test_a_window_reaches_as_many_positions_as_counted_one_by_one(seq: int, window: int) -> None:
    seen = sum(min(query + 1, window) for query in range(seq))
    shape = V3.with_(window=window, windowed=1)
    assert shape.window_keys(seq) * seq / 2 == pytest.approx(seen, rel=1 / min(seq, window))


def test_windows_of_a_configuration_are_read_and_shorten_attention() -> None:
    transformers = pytest.importorskip("transformers")
    told = {**transformers.GptOssConfig().to_dict(), "architectures": ["GptOssForCausalLM"]}
    shape = shape_of_config(told, "config.json")
    assert (shape.windowed, shape.window) == (18, 128)
    assert shape.parameters == pytest.approx(decoder_by_name("gpt-oss-120b").parameters, rel=1e-3)
    plain = shape.with_(window=0, windowed=0)
    more = plain.flops_per_token(8192) - shape.flops_per_token(8192)
    assert more == pytest.approx(6 * shape.query_width * 18 * (8192 - 2 * 128), rel=0.01)
    layout, cluster = Layout(seq=8192), Cluster.parse("1 h100-sxm-80gb")
    for name, gains in (("nemo", True), ("shardwise", False)):  # SDPA with a mask computes what it masks
        times = [BlockCosts(each, layout, software(name), Kernels(cluster.device)).layer() for each in (shape, plain)]
        assert (times[0].attention_forward < 0.7 * times[1].attention_forward) is gains


def test_deepseek_is_planned_by_its_numbers() -> None:
    few = Constraints(fixed=(("pp", 16), ("zero", 1), ("ep", 16), ("remat", "full")))
    found = plan("deepseek-v3", CLUSTER, global_batch=2048, seq=4096, constraints=few)
    again = simulate("deepseek-v3", found.best.plan, CLUSTER, global_batch=2048, seq=4096)
    assert again.step_s == pytest.approx(found.best.forecast.step_s) and not again.impossible
