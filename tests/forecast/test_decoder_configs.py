"""Shapes read from transformers' configurations, beside the parameters of the models that they describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.errors import InputError
from shardwise.planner.decoder_families import FAMILIES
from shardwise.planner.decoders import decoder_from_config, shape_of_config

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
