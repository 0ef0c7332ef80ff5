"""What `config.json` does not say of transformers' decoder families, by `model_type` (a new one goes here).

Values are the defaults of each family's configuration class and the modules of its modelling file in transformers:
published files leave out what is the default there. A norm more or less in a layer is not told apart (below 0.2% of
the parameters).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class DecoderFamily:
    """Traits of a family. Each `*_key` names the configuration's own word on it, where there is one.

    tied        the output matrix is the embedding's, where the file does not say
    positions   a learned position table has this many rows beside `max_position_embeddings`; None: no table
    one_kv      without a word on them, queries share one head of keys and values
    latent      keys and values (and queries, where the file has a rank for them) come from narrow latents
    parallel    attention and feed-forward read the same stream, through so many norms; 0: one after the other
    """

    tied: bool = False
    gated: bool = True
    bias: bool = False
    bias_key: str = ""
    qkv_bias: bool = False
    qkv_key: str = "attention_bias"
    qk_norm: bool = False
    layer_norm: bool = False
    norm_bias: bool = True
    positions: int | None = None
    one_kv: bool = False
    latent: bool = False
    parallel: int = 0
    parallel_key: str = ""


LLAMA = DecoderFamily()
_PLAIN = DecoderFamily(
    gated=False, layer_norm=True, bias=True, qkv_key=""
)  # as GPT-2: two matrices, biases, layer norms
FAMILIES: dict[str, DecoderFamily] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "phi3", "granite", "granitemoe", "helium", "olmo", "glm4_moe"), LLAMA
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), replace(LLAMA, latent=True)),
    **dict.fromkeys(("glm", "glm4", "qwen2", "qwen2_moe", "seed_oss"), replace(LLAMA, qkv_bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_moe", "olmo2", "olmo3", "olmoe", "exaone4"), replace(LLAMA, qk_norm=True)),
    **dict.fromkeys(("gemma", "gemma2", "smollm3"), replace(LLAMA, tied=True)),
    "gemma3_text": replace(LLAMA, tied=True, qk_norm=True),
    "ernie4_5": replace(LLAMA, tied=True, bias_key="use_bias"),
    "gpt_oss": replace(LLAMA, bias=True),
    "arcee": replace(LLAMA, gated=False),
    "phimoe": replace(LLAMA, layer_norm=True),
    "stablelm": replace(LLAMA, layer_norm=True, qkv_key="use_qkv_bias", parallel_key="use_parallel_residual"),
    **dict.fromkeys(("cohere", "cohere2"), replace(LLAMA, tied=True, layer_norm=True, norm_bias=False, parallel=1)),
    "persimmon": _PLAIN,
    "phi": replace(_PLAIN, parallel=1),
    "gpt_neox": replace(_PLAIN, parallel=2, parallel_key="use_parallel_residual"),
    "starcoder2": replace(_PLAIN, tied=True, bias_key="use_bias"),
    "bloom": replace(_PLAIN, tied=True),
    "falcon": replace(
        _PLAIN, tied=True, bias=False, bias_key="bias", one_kv=True, parallel=1, parallel_key="parallel_attn"
    ),
    "gpt2": replace(_PLAIN, tied=True, positions=0),
    "gpt_bigcode": replace(_PLAIN, tied=True, positions=0, one_kv=True),
    "opt": replace(_PLAIN, tied=True, positions=2, bias_key="enable_bias"),
}


def layers_differ(config: Mapping[str, Any]) -> str:
    """Returns the key of a configuration by which its layers are not all alike; "" where they are."""
    alike = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1, "block_sparse_moe_step": 1}
    return next((name for name, plain in alike.items() if config.get(name) not in (None, plain)), "")
