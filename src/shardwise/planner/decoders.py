"""From a name or a configuration file to a decoder's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.cluster.catalogue import key_of, model, model_names
from shardwise.costs.shapes import Shape
from shardwise.errors import InputError

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def is_catalogue_name(name: str) -> bool:
    """Whether a word names a packaged model."""
    return any(key_of(known) == key_of(name) for known in model_names())


def decoder_by_name(name: str) -> Shape:
    """A packaged model; an unknown name raises `InputError` with the nearest."""
    return Shape.from_row(model(name))


def decoder_from_config(path: str) -> Shape:
    """A decoder from a transformers `config.json` (the file, or the folder that holds it)."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"task: no file {file}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"task: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"task: {file} holds a {type(config).__name__}, not the keys of a transformers configuration")
    return shape_of_config(config, str(file))


def shape_of_config(config: Mapping[str, Any], where: str) -> Shape:
    """The numbers of a transformers configuration of a decoder.

    Raises `InputError` for one that is not described by them (an encoder, an encoder-decoder, another head than one
    over the vocabulary, compressed attention): give such a model as `module:name`, and it is traced.
    """
    names = {**{k: k for k in NEEDED}, "hidden_size": "n_embd" if "n_embd" in config else "hidden_size"}
    names["num_hidden_layers"] = "n_layer" if "n_layer" in config else "num_hidden_layers"
    names["num_attention_heads"] = "n_head" if "n_head" in config else "num_attention_heads"
    missing = [name for name in names.values() if not isinstance(config.get(name), int)]
    why = f"it lacks {', '.join(missing)}" if missing else _other_than_a_decoder(config)
    if why:
        raise InputError(
            f"task: {where} is not a decoder described by widths and heads: {why}; give the model as a task of your "
            "own (module:name), and its own forward is traced"
        )
    hidden, heads = config[names["hidden_size"]], config[names["num_attention_heads"]]
    old = "n_embd" in config
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    ffn = config.get("moe_intermediate_size") or config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    return Shape(
        layers=config[names["num_hidden_layers"]],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=ffn,
        vocab=config["vocab_size"],
        gated=not old and config.get("hidden_act", "silu") in ("silu", "swish", "gelu_pytorch_tanh"),
        tied=bool(config.get("tie_word_embeddings", old)),
        bias=old,
        qkv_bias=bool(config.get("attention_bias", False)),
        learned_positions=config.get("n_positions") or 0 if old else 0,
        layer_norm=old,
        experts=experts,
        top_k=config.get("num_experts_per_tok") or 0,
        dropout=bool(config.get("resid_pdrop", 0.0)),
        name=str(config.get("_name_or_path") or config.get("model_type") or "decoder"),
    )


def _other_than_a_decoder(config: Mapping[str, Any]) -> str:
    """What a configuration says of itself that widths and heads do not; empty for a decoder."""
    if config.get("is_encoder_decoder") or config.get("kv_lora_rank"):
        return "its attention or its two halves need more than that"
    named = [str(name) for name in config.get("architectures") or ()]  # as transformers writes them: LlamaForCausalLM
    if any("ForCausalLM" in name for name in named):
        return ""
    if others := [name for name in named if "For" in name]:
        return f"its architecture is {', '.join(others)}"
    return "it says is_decoder = false" if config.get("is_decoder") is False else ""
