"""Tiny tasks for tests and first tries; each task is a function without arguments that returns a `Task`.

Data is synthetic and depends on the step alone, which seeds an RNG. Sequences are arithmetic modulo
the vocabulary, with some noise; images, fields and features are noise with targets from a fixed rule.
Global batches have 6 or 7 samples, so that most numbers of ranks do not divide them. A step takes
milliseconds, and everything in a task can be pickled.

A falling loss here says that training works, not that a model is good: for that, use real data.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import InputError
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.models.gpt2 import GPT2, GPT2Config
from shardwise.models.mlp import MLP, MLPConfig
from shardwise.models.moe import MoEConfig, MoEDecoder, sign_descent
from shardwise.models.unet import UNet, UNetConfig
from shardwise.models.vit import ViT, ViTConfig
from shardwise.task import Task

IGNORED = -100
VOCAB = 47  # odd, so that no number of ranks but one divides it
IMAGE = 8
CLASSES = 5

# --- data: step -> global batch ---


def token_batch(step: int, samples: int, length: int) -> dict[str, Tensor]:
    """Returns {"tokens", "labels"}, both (samples, length); labels are the tokens, some replaced by `IGNORED`.

    The share of ignored labels is random for each sample, so samples differ in weight.
    """
    g = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (samples, 1), generator=g)
    stride = torch.randint(1, 5, (samples, 1), generator=g)
    noise = torch.rand(samples, length, generator=g) < 0.1
    tokens = (start + stride * torch.arange(length) + noise) % VOCAB
    share = 0.8 * torch.rand(samples, 1, generator=g)
    ignored = torch.rand(samples, length, generator=g) < share
    return {"tokens": tokens, "labels": tokens.masked_fill(ignored, IGNORED)}


def image_batch(step: int, samples: int) -> dict[str, Tensor]:
    """Returns {"images": (samples, 3, 8, 8), "labels": (samples,)}, random with the step as seed."""
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (samples,), generator=g)
    tint = labels.view(-1, 1, 1, 1) / CLASSES
    return {"images": torch.randn(samples, 3, IMAGE, IMAGE, generator=g) + tint, "labels": labels}


def field_batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Returns (fields (samples, 2, 9, 7), target (samples, 1, 9, 7)); the target is the smoothed product of the two."""
    g = torch.Generator().manual_seed(step)
    fields = torch.randn(samples, 2, 9, 7, generator=g)
    return fields, F.avg_pool2d(fields.prod(1, keepdim=True), 3, stride=1, padding=1)


def feature_batch(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Returns (features (samples, 12), class (samples,)); the class is the index of the largest of the first five."""
    g = torch.Generator().manual_seed(step)
    features = torch.randn(samples, 12, generator=g)
    return features, features[:, :CLASSES].argmax(1)


# --- inputs and losses: a sum and a weight ---


def tokens_only(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (batch["tokens"],), {}


def hf_tokens(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (), {"input_ids": batch["tokens"], "use_cache": False}


def images_only(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (batch["images"],), {}


def hf_images(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (), {"pixel_values": batch["images"]}


def first_only(batch: tuple[Tensor, Tensor]) -> tuple[tuple, dict]:
    return (batch[0],), {}


def logits_of(output: Any) -> Tensor:
    """Returns the logits of a model's output: a tensor, or an output object of transformers."""
    return output if isinstance(output, Tensor) else output.logits


def next_token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (sum of the next tokens' cross entropies, number of labels that are not ignored)."""
    logits = logits_of(output)[:, :-1].flatten(0, 1)  # (B * (S - 1), V)
    targets = batch["labels"][:, 1:].flatten()  # (B * (S - 1),)
    total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


def moe_loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict]:
    """Returns (sum, weight) of `next_token_loss`, and {"balance": (sum of samples' routing terms, samples)}."""
    logits, terms = output
    return *next_token_loss(logits, batch), {"balance": (terms.sum(), len(terms))}


def image_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of the images' cross entropies, number of images)."""
    return F.cross_entropy(logits_of(output), batch["labels"], reduction="sum"), len(batch["labels"])


def feature_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of the samples' cross entropies, number of samples)."""
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def field_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of squared errors, number of elements)."""
    return (output - batch[1]).square().sum(), batch[1].numel()


# --- optimizers: named groups -> optimizer ---


def adamw(groups: list[dict], lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.1)


def adamw_decay_matrices(groups: list[dict], lr: float = 3e-3) -> torch.optim.Optimizer:
    """Returns an AdamW with decay on matrices alone, and half the learning rate for the group "no_decay".

    groups   named "decay" (matrices) and "no_decay" (norms, biases)
    """
    rates = {"decay": {"weight_decay": 0.1}, "no_decay": {"lr": lr / 2}}
    return torch.optim.AdamW([{**group, **rates[group["name"]]} for group in groups], lr=lr)


def adamw_and_bias_rows(groups: list[dict], lr: float = 3e-3) -> torch.optim.Optimizer:
    """Returns an AdamW that moves the routers' bias rows by the sign of their gradient alone (`sign_descent`)."""
    return torch.optim.AdamW(sign_descent(groups, rate=1e-2), lr=lr, weight_decay=0.1)


# --- the tasks ---

TINY_DECODER = DecoderConfig(vocab=VOCAB, hidden=32, layers=4, heads=4, kv_heads=2, intermediate=48, context=16)


def _decoder(name: str, samples: int, config: DecoderConfig) -> Task:
    return Task(
        model=partial(Decoder, config), loss=next_token_loss, inputs=tokens_only, optimizer=adamw, name=name,
        batch=partial(token_batch, samples=samples, length=10),
    )  # fmt: skip


def decoder() -> Task:
    """Returns a task: a Llama-style decoder, untied."""
    return _decoder("decoder", 7, TINY_DECODER)


def decoder_tied() -> Task:
    """Returns `decoder` with one matrix for the embedding and the head."""
    return _decoder("decoder_tied", 6, replace(TINY_DECODER, layers=2, tied=True))


def decoder_dropout() -> Task:
    """Returns `decoder` with dropout, in attention too."""
    return _decoder("decoder_dropout", 7, replace(TINY_DECODER, layers=2, dropout=0.1))


def _moe(name: str, samples: int, **changes: Any) -> Task:
    config = MoEConfig(replace(TINY_DECODER, layers=2, intermediate=0), experts=4, top_k=2, width=20)
    return Task(
        model=partial(MoEDecoder, replace(config, **changes)), loss=moe_loss, inputs=tokens_only, optimizer=adamw,
        batch=partial(token_batch, samples=samples, length=10), name=name,
    )  # fmt: skip


def moe() -> Task:
    """Returns a task: a decoder with four routed experts, no token dropped, and a balance loss."""
    return _moe("moe", 7)


def moe_shared() -> Task:
    """Returns `moe` with a shared expert, a capacity that drops tokens, and bias rows in place of the balance loss."""
    shared = replace(TINY_DECODER, layers=2, intermediate=24)
    task = _moe("moe_shared", 6, decoder=shared, experts=8, top_k=3, capacity=1.0, balance=0.0, bias=True)
    return task.with_(optimizer=adamw_and_bias_rows)


def gpt2() -> Task:
    """Returns a task: GPT-2 with dropout, and weight decay on some parameters only."""
    config = GPT2Config(vocab=VOCAB, hidden=24, layers=2, heads=3, context=12, dropout=0.1)
    return Task(
        model=partial(GPT2, config), loss=next_token_loss, inputs=tokens_only, optimizer=adamw_decay_matrices,
        batch=partial(token_batch, samples=7, length=9), name="gpt2",
    )  # fmt: skip


def vit() -> Task:
    """Returns a task: a vision transformer, with dropout."""
    config = ViTConfig(
        image=IMAGE, patch=4, channels=3, classes=CLASSES, hidden=24, layers=2, heads=2, intermediate=48,
        dropout=0.1,
    )  # fmt: skip
    return Task(
        model=partial(ViT, config), loss=image_loss, inputs=images_only, optimizer=adamw,
        batch=partial(image_batch, samples=7), name="vit",
    )  # fmt: skip


def _unet(name: str, config: UNetConfig) -> Task:
    return Task(
        model=partial(UNet, config), loss=field_loss, inputs=first_only, optimizer=adamw, name=name,
        batch=partial(field_batch, samples=6),
    )  # fmt: skip


def unet_group() -> Task:
    """Returns a task: a U-Net with group norm on images of odd height and width."""
    return _unet("unet_group", UNetConfig(channels=2, width=8, depth=2, norm="group", groups=4))


def unet_batchnorm() -> Task:
    """Returns a task: a U-Net with batch norm, so that in training a sample's loss depends on the others."""
    return _unet("unet_batchnorm", UNetConfig(channels=2, width=8, depth=2, norm="batch"))


def _mlp(name: str, frozen: bool, unused: bool) -> Task:
    config = MLPConfig(features=12, hidden=17, layers=2, outputs=CLASSES, frozen=frozen, unused=unused)
    return Task(
        model=partial(MLP, config), loss=feature_loss, inputs=first_only, optimizer=adamw, name=name,
        batch=partial(feature_batch, samples=7),
    )  # fmt: skip


def mlp() -> Task:
    """Returns a task: a multilayer perceptron of odd width."""
    return _mlp("mlp", frozen=False, unused=False)


def mlp_frozen_unused() -> Task:
    """Returns `mlp` with its first layer frozen and one layer never called."""
    return _mlp("mlp_frozen_unused", frozen=True, unused=True)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError("this task needs transformers: pip install 'shardwise[hf]'") from error
    return transformers


def _hf_llama_model() -> nn.Module:
    hf = _transformers()
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def _hf_vit_model() -> nn.Module:
    hf = _transformers()
    config = hf.ViTConfig(
        image_size=IMAGE, patch_size=4, num_channels=3, num_labels=CLASSES, hidden_size=24,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def hf_llama() -> Task:
    """Returns a task: `LlamaForCausalLM` of transformers, unchanged; `InputError` if transformers is not installed."""
    _transformers()
    return Task(
        model=_hf_llama_model, loss=next_token_loss, inputs=hf_tokens, optimizer=adamw,
        batch=partial(token_batch, samples=7, length=10), name="hf_llama",
    )  # fmt: skip


def _hf_mixtral_model() -> nn.Module:
    hf = _transformers()
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False, bos_token_id=0, eos_token_id=0, experts_implementation="eager",
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def _hf_qwen2_moe_model() -> nn.Module:
    hf = _transformers()
    config = hf.Qwen2MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=20, shared_expert_intermediate_size=28, use_cache=False, bos_token_id=0, eos_token_id=0,
        experts_implementation="eager",
    )  # fmt: skip
    return hf.Qwen2MoeForCausalLM(config)


def _hf_experts(name: str, model: Any) -> Task:
    _transformers()
    return Task(
        model=model, loss=next_token_loss, inputs=hf_tokens, optimizer=adamw,
        batch=partial(token_batch, samples=7, length=10), name=name,
    )  # fmt: skip


def hf_mixtral() -> Task:
    """Returns a task: `MixtralForCausalLM` of transformers, with eager experts, which also run in float64."""
    return _hf_experts("hf_mixtral", _hf_mixtral_model)


def hf_qwen2_moe() -> Task:
    """Returns a task: `Qwen2MoeForCausalLM` of transformers, with a shared expert; experts as in `hf_mixtral`."""
    return _hf_experts("hf_qwen2_moe", _hf_qwen2_moe_model)


def hf_vit() -> Task:
    """Returns a task: `ViTForImageClassification` of transformers, unchanged."""
    _transformers()
    return Task(
        model=_hf_vit_model, loss=image_loss, inputs=hf_images, optimizer=adamw,
        batch=partial(image_batch, samples=7), name="hf_vit",
    )  # fmt: skip
