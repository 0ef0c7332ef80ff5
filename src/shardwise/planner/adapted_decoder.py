"""A model of the catalogue with adapters: transformers' model of the same numbers, which is traced as any task.

Adapters change what a decoder's formulas take for granted (every weight has a gradient, states and a reduction), so
that none of them is used: the module that would be trained is built without weights and its step counted.

What this does not do: decoders that are no Llama, Qwen2 or Qwen3 by their numbers (experts, latents, windows, learned
positions); their `config.json` is traced instead.
"""

from __future__ import annotations

from typing import Any

from shardwise.costs.shapes import Shape
from shardwise.errors import InputError


def configuration_of(shape: Shape, length: int) -> Any:
    """Returns transformers' configuration of a decoder's numbers, for samples of `length` tokens.

    Raises `InputError` for a decoder that is none of the kinds that its numbers alone make.
    """
    import transformers

    plain = Shape(
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab,
        tied=shape.tied, qkv_bias=shape.qkv_bias, qk_norm=shape.qk_norm, name=shape.name,
    )  # fmt: skip
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
