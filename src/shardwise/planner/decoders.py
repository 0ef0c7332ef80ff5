"""Reads a decoder's sizes (`Shape`) from the catalogue or a `config.json`, by `WORDS` (keys) and `FAMILIES`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardwise.cluster.catalogue import model
from shardwise.costs.shapes import Shape
from shardwise.errors import InputError

WORDS = {  # size -> keys of a configuration, one for each way in which families name it
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "shared": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "kv_latent": ("kv_lora_rank",),
    "q_latent": ("q_lora_rank",),
    "plain_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
    "top_k": ("num_experts_per_tok",),
    "positions": ("n_positions", "max_position_embeddings"),
}
NEEDED = ("hidden", "layers", "heads", "vocab")
NOT_ZERO = {word for name in (*NEEDED, "kv_heads", "head_dim", "ffn") for word in WORDS[name]}


class NotByNumbers(InputError):
    """Raised for a configuration whose model `Shape` cannot describe by widths and heads."""


def decoder_by_name(name: str) -> Shape:
    """Returns the shape of a model of the catalogue; raises `InputError` with the nearest name if it is unknown."""
    return Shape.from_row(model(name))


def read_file(path: str) -> tuple[dict[str, Any], Path]:
    """Returns (contents of a transformers `config.json`, its path); `path`: the file or its folder.

    Raises `InputError` if there is none or it is not a JSON object.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"task: no file {file}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise InputError(f"task: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"task: {file} holds a {type(config).__name__}, not the keys of a transformers configuration")
    return config, file


def decoder_from_config(path: str) -> Shape:
    """Returns the shape of a `config.json`, given by file or folder; raises as `read_file` and `shape_of_config`."""
    config, file = read_file(path)
    return shape_of_config(config, str(file))


def shape_of_config(config: Mapping[str, Any], where: str) -> Shape:
    """Returns the `Shape` of the decoder of a transformers configuration; `where`: its name in messages.

    Keys that it lacks are as in its family (`model_type`; without one Llama, or GPT-2 if it has `n_embd`).
    Raises `NotByNumbers` for a model that `Shape` cannot describe (an unknown family, an encoder, an encoder-decoder,
    another head than one over the vocabulary, compressed attention of another family than DeepSeek's, layers that
    differ by more than the first dense ones), and `InputError` for impossible sizes.
    """
    kind = config.get("model_type") or ("gpt2" if "n_embd" in config else "llama")
    # checked before the sizes, which another family may name otherwise
    if why := _other_family(kind) or _other_than_a_decoder(config, FAMILIES[kind]):
        raise NotByNumbers(_not_described(where, why))
    numbers = {name: _number(config, words, where) for name, words in WORDS.items()}
    if missing := [WORDS[name][0] for name in NEEDED if numbers[name] is None]:
        raise NotByNumbers(_not_described(where, f"it lacks {', '.join(missing)}"))
    return _shape(config, {name: value or 0 for name, value in numbers.items()}, FAMILIES[kind], where)


def _other_family(kind: object) -> str:
    """Returns why a `model_type` cannot be read, with the nearest known one; "" if it is a key of `FAMILIES`."""
    if kind in FAMILIES:
        return ""
    near = get_close_matches(str(kind), FAMILIES, 1)
    said = f" (did you mean {near[0]!r}?)" if near else f" ({', '.join(sorted(FAMILIES))})"
    return f"its model_type {kind!r} is not among the families known here{said}"


def _not_described(where: str, why: str) -> str:
    return (
        f"task: {where} is not a decoder described by widths and heads: {why}; give the model as a task of your "
        "own (module:name), and its own forward is traced"
    )


def _shape(config: Mapping[str, Any], numbers: Mapping[str, int], family: DecoderFamily, where: str) -> Shape:
    """Returns the shape of a decoder of `family`; raises `InputError` for impossible sizes.

    numbers  {key of `WORDS`: size}, 0 if the configuration lacks it
    """
    hidden, heads, experts = numbers["hidden"], numbers["heads"], numbers["experts"]
    ffn = (numbers["expert_ffn"] if experts else 0) or numbers["ffn"] or 4 * hidden
    # the first layers of some mixtures have a dense feed-forward in place of experts
    dense = min(numbers["dense_layers"], numbers["layers"]) if experts else 0
    latent = {"q_latent", "kv_latent", "rope_dim", "value_dim"} if family.latent else set()
    bias = bool(config.get(family.bias_key, family.bias))
    shape = Shape(
        layers=numbers["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, numbers, family),
        head_dim=numbers["plain_dim"] + numbers["rope_dim"] if latent else numbers["head_dim"] or hidden // heads,
        ffn=ffn,
        vocab=numbers["vocab"],
        **{name: numbers[name] for name in latent},
        dense_layers=dense,
        parallel=_parallel(config, family),
        **_windows(config),
        dense_ffn=numbers["ffn"] if dense else 0,
        gated=family.gated,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        bias=bias,
        qkv_bias=bool(config.get(family.qkv_key, family.qkv_bias)),
        qk_norm=bool(config.get("use_qk_norm", family.qk_norm)),
        learned_positions=0 if family.positions is None else numbers["positions"] + family.positions,
        layer_norm=family.layer_norm,
        norm_bias=family.norm_bias,
        experts=experts,
        expert_bias=int(bias and experts > 0),
        top_k=numbers["top_k"] if experts else 0,
        shared_experts=(numbers["shared"] or numbers["shared_ffn"] // ffn) if experts else 0,
        dropout=bool(config.get("resid_pdrop", 0.0)),
        name=str(config.get("_name_or_path") or config.get("model_type") or "decoder"),
    )
    if wrong := _contradiction(shape):
        raise InputError(f"task: {where}: {wrong}")
    # `Shape` counts shared experts in widths of a routed one
    if experts and numbers["shared_ffn"] % ffn:
        shared = f"shared_expert_intermediate_size={numbers['shared_ffn']} is not a multiple of the experts' {ffn}"
        raise NotByNumbers(_not_described(where, shared))
    return shape


def _parallel(config: Mapping[str, Any], family: DecoderFamily) -> int:
    """Returns the number of norms of a layer whose attention and feed-forward run in parallel; 0 if in sequence."""
    if family.one_kv and config.get("new_decoder_architecture"):  # Falcon of 40B and 180B
        return int(config.get("num_ln_in_parallel_attn") or 2)
    if not config.get(family.parallel_key, family.parallel):
        return 0
    return family.parallel or 1


def _windows(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns {"window": positions, "windowed": layers} if some layers have sliding-window attention, else {}."""
    kinds = config.get("layer_types") or ()
    window, windowed = config.get("sliding_window"), sum(kind == "sliding_attention" for kind in kinds)
    return {"window": int(window), "windowed": windowed} if window and windowed else {}


def _contradiction(shape: Shape) -> str:
    """Returns text on two sizes of the shape that contradict each other, or ""."""
    if shape.heads % shape.kv_heads:
        return f"num_attention_heads={shape.heads} is not a multiple of num_key_value_heads={shape.kv_heads}"
    if shape.experts and not 0 < shape.top_k <= shape.experts:
        return f"num_experts_per_tok={shape.top_k} of {shape.experts} experts"
    return ""


def _kv_heads(config: Mapping[str, Any], numbers: Mapping[str, int], family: DecoderFamily) -> int:
    """Returns the number of kv heads of a configuration; `numbers`: as in `_shape`."""
    if family.one_kv:  # Falcon and StarCoder have several kv heads only if the file says so
        if config.get("new_decoder_architecture"):
            return numbers["kv_heads"] or numbers["heads"]
        return 1 if config.get("multi_query", True) else numbers["heads"]
    return numbers["kv_heads"] or numbers["heads"]


def _number(config: Mapping[str, Any], words: tuple[str, ...], where: str) -> int | None:
    """Returns the value of the first key of `words` in the configuration, or None; `InputError` if it is no count."""
    for word in words:
        value = config.get(word)
        if value is None:
            continue
        # JSON's true and false are ints in Python, but not counts
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and word in NOT_ZERO):
            raise InputError(f"task: {where}: {word} is a whole number above 0, not {value!r}")
        return value
    return None


def _other_than_a_decoder(config: Mapping[str, Any], family: DecoderFamily) -> str:
    """Returns why a configuration is not a decoder that `Shape` describes, or ""."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder and a decoder"
    if config.get("kv_lora_rank") and not family.latent:
        return "its keys and values are compressed (kv_lora_rank)"
    if other := layers_differ(config):
        return f"its layers are not all alike ({other}={config[other]})"
    if config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size"):
        return "its embedding has another width than its layers (word_embed_proj_dim)"
    named = [str(name) for name in config.get("architectures") or ()]  # as transformers writes them: LlamaForCausalLM
    if any("ForCausalLM" in name for name in named):
        return ""
    # other heads (LlamaForSequenceClassification); a name without "For" (LlamaModel) tells none
    if others := [name for name in named if "For" in name]:
        return f"its architecture is {', '.join(others)}"
    return "it says is_decoder = false" if config.get("is_decoder") is False else ""


def configuration_of(shape: Shape, length: int) -> Any:
    """Returns a transformers configuration (Llama, Qwen2 or Qwen3) of a decoder's sizes for `length` tokens a sample.

    Raises `InputError` for a decoder that none of these has.
    """
    import transformers

    plain = Shape(
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab,
        tied=shape.tied, qkv_bias=shape.qkv_bias, qk_norm=shape.qk_norm, name=shape.name,
    )  # fmt: skip
    # any further trait of the shape would be lost in the configuration
    if plain != shape or (shape.qkv_bias and shape.qk_norm):
        raise InputError(
            f"--lora: {shape.name} is no plain decoder, whose numbers would make its modules: give its config.json, "
            "which transformers builds without weights"
        )
    kind = "Qwen3" if shape.qk_norm else "Qwen2" if shape.qkv_bias else "Llama"
    sizes = {} if kind == "Qwen2" else {"head_dim": shape.head_dim}
    return getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied,
        max_position_embeddings=length, architectures=[f"{kind}ForCausalLM"], **sizes,
    )  # fmt: skip


@dataclass(frozen=True)
class DecoderFamily:
    """Defaults of a family of decoders. Each `*_key` is the key of a configuration that overrides a default, or "".

    tied        whether the output matrix is the embedding, if the file does not say
    positions   rows of a learned position table in addition to `max_position_embeddings`; None: no table
    one_kv      whether queries share one kv head, if the file does not say
    latent      whether keys and values (and queries, if the file has a rank for them) are projected from latents
    parallel    norms of a layer whose attention and feed-forward both read its input; 0: one after the other
    """

    tied: bool = False
    gated: bool = True  # whether the feed-forward has three matrices
    bias: bool = False  # whether all matrices of a layer have biases
    bias_key: str = ""
    qkv_bias: bool = False  # whether q, k and v have biases
    qkv_key: str = "attention_bias"
    qk_norm: bool = False  # whether each head's queries and keys are normed
    layer_norm: bool = False  # whether norms are layer norms, not RMS norms
    norm_bias: bool = True  # whether layer norms have biases
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
    """Returns the key of a configuration which says that its layers differ, or ""."""
    alike = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1, "block_sparse_moe_step": 1}
    return next((name for name, plain in alike.items() if config.get(name) not in (None, plain)), "")
