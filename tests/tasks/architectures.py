"""Modules nobody prepared, from small configurations: `transformers` architectures and plain ones.

Zero-argument functions that return a `Task`, for `verify` and for the table of docs/tables/coverage.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task
from shardwise.models import tasks

WORDS, SAMPLES, LENGTH = 41, 6, 6
IGNORED = -100


def words(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 11)
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=generator)
    hidden = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.3
    return {"input_ids": ids, "labels": ids.masked_fill(hidden, IGNORED)}


def pictures(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 11)
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 4, (SAMPLES,), generator=generator),
    }


def sounds(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step + 11)
    return {"input_features": torch.randn(SAMPLES, 8, 16, generator=generator), "labels": words(step)["labels"]}


def vectors(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(SAMPLES, LENGTH, 8, generator=torch.Generator().manual_seed(step + 11))}


def only(*names: str, **fixed: Any) -> Callable[[dict[str, Tensor]], tuple[tuple, dict]]:
    return lambda batch: ((), {name: batch[name] for name in names} | fixed)


def next_word(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, targets = output.logits[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1), reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


def same_word(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["labels"]
    total = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (targets != IGNORED).sum()


def picture(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output.logits, batch["labels"], reduction="sum"), count(batch)


def count(batch: dict[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def squares(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), count(batch)


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _built(name: str, config_name: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config_name)(**settings))


SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WORDS_OF_T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
               "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
BART = {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
          "image_size": 16, "patch_size": 8, "num_labels": 4}  # fmt: skip


def language(model: str, config: str, **settings: Any) -> Task:
    return Task(model=partial(_built, model, config, settings), batch=words, loss=next_word, optimizer=sgd,
                inputs=only("input_ids", use_cache=False))  # fmt: skip


def masked(model: str, config: str, **settings: Any) -> Task:
    return Task(model=partial(_built, model, config, settings), batch=words, loss=same_word, optimizer=sgd,
                inputs=only("input_ids"))  # fmt: skip


def translation(model: str, config: str, **settings: Any) -> Task:
    return Task(model=partial(_built, model, config, settings), batch=words, loss=same_word, optimizer=sgd,
                inputs=only("input_ids", "labels", use_cache=False))  # fmt: skip


def vision(model: str, config: str, **settings: Any) -> Task:
    return Task(model=partial(_built, model, config, settings), batch=pictures, loss=picture, optimizer=sgd,
                inputs=only("pixel_values"))  # fmt: skip


# --- decoders


def llama() -> Task:
    return language("LlamaForCausalLM", "LlamaConfig", **GROUPED)


def mistral() -> Task:
    return language("MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=3, attention_dropout=0.1)


def qwen3() -> Task:
    return language("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, tie_word_embeddings=True)


def olmo2() -> Task:
    """Norms of queries and keys over all heads together."""
    return language("Olmo2ForCausalLM", "Olmo2Config", **{**SIZES, "num_key_value_heads": 2})


def gemma3() -> Task:
    return language("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, sliding_window=3, query_pre_attn_scalar=8)


def gpt2() -> Task:
    return language("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=16, n_layer=3, n_head=2, n_positions=32,
                    bos_token_id=1, eos_token_id=2)  # fmt: skip


def gpt_neox() -> Task:
    return language("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, hidden_dropout=0.1, attention_dropout=0.1)


def opt() -> Task:
    return language("OPTForCausalLM", "OPTConfig", vocab_size=WORDS, hidden_size=16, ffn_dim=24, num_hidden_layers=3,
                    num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=16)  # fmt: skip


def phi() -> Task:
    return language("PhiForCausalLM", "PhiConfig", **{**SIZES, "hidden_size": 32}, resid_pdrop=0.1)


def falcon() -> Task:
    return language("FalconForCausalLM", "FalconConfig", vocab_size=WORDS, hidden_size=16, num_hidden_layers=3,
                    num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, bos_token_id=1,
                    eos_token_id=2)  # fmt: skip


def mixtral() -> Task:
    return language("MixtralForCausalLM", "MixtralConfig", **SIZES, num_key_value_heads=2, num_local_experts=4,
                    num_experts_per_tok=2, experts_implementation="eager").with_(branches="per_sample")  # fmt: skip


# --- encoders, encoder-decoders, vision


def bert() -> Task:
    return masked("BertForMaskedLM", "BertConfig", **SIZES)


def roberta() -> Task:
    return masked("RobertaForMaskedLM", "RobertaConfig", **SIZES)


def distilbert() -> Task:
    return masked("DistilBertForMaskedLM", "DistilBertConfig", vocab_size=WORDS, dim=16, n_layers=3, n_heads=2,
                  hidden_dim=24, max_position_embeddings=32, pad_token_id=0)  # fmt: skip


def t5() -> Task:
    return translation("T5ForConditionalGeneration", "T5Config", **WORDS_OF_T5)


def bart() -> Task:
    return translation("BartForConditionalGeneration", "BartConfig", **BART, max_position_embeddings=32)


def whisper() -> Task:
    task = translation("WhisperForConditionalGeneration", "WhisperConfig", **BART | {"forced_eos_token_id": None},
                       num_mel_bins=8, max_source_positions=8, max_target_positions=16)  # fmt: skip
    return task.with_(batch=sounds, inputs=only("input_features", "labels", use_cache=False))


def vit() -> Task:
    return vision("ViTForImageClassification", "ViTConfig", **VISION)


def swin() -> Task:
    return vision("SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2, embed_dim=8, depths=[2, 2],
                  num_heads=[2, 2], window_size=4, num_labels=4, drop_path_rate=0.0)  # fmt: skip


def convnext() -> Task:
    return vision("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[2, 2],
                  num_stages=2, num_labels=4, patch_size=2)  # fmt: skip


# --- plain modules


class Reused(nn.Module):
    """One block that runs three times, between an entrance and an exit."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(8, 16), Residual(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = self.block(x)
        return self.leave(x)


class Residual(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Measured(nn.Module):
    """Blocks whose positions are computed from the input's length, into a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.register_buffer("table", torch.zeros(0, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[1]:
            place = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
            self.table = torch.outer(place, torch.arange(16, dtype=x.dtype, device=x.device)).div(7).sin()
        x = self.enter(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 24), nn.ReLU(),
                         nn.Linear(24, 16), nn.LayerNorm(16), nn.Linear(16, 5))  # fmt: skip


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 24, dropout=0.1, batch_first=True), 3,
                                 enable_nested_tensor=False)  # fmt: skip


def plain(model: Callable[[], nn.Module]) -> Task:
    return Task(model=model, batch=vectors, loss=squares, optimizer=sgd, inputs=lambda batch: ((batch["x"],), {}))


def sequential() -> Task:
    return plain(_sequential)


def transformer_encoder() -> Task:
    return plain(_encoder)


def reused_layer() -> Task:
    return plain(Reused)


def length_buffer() -> Task:
    return plain(Measured)


def unet() -> Task:
    return tasks.unet_group()


DECODERS = [llama, mistral, qwen3, gemma3, gpt2, gpt_neox, opt, phi, falcon, mixtral]
OTHERS = [bert, roberta, distilbert, t5, bart, whisper, vit, swin, convnext, sequential, transformer_encoder, unet,
          reused_layer, length_buffer]  # fmt: skip
