"""Twelve small architectures of `transformers` under six of peft's methods: `adapted(name, method)`.

    partial(adapted, "llama", "dora")        a task for `verify`, as a rank makes it

Beside them a small Llama in a folder, whose adapters are not zero at the start: `of_folder`, `configured`, `two`.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import torch
from torch import Tensor, nn

from shardwise import Task
from shardwise.adapters import with_lora
from shardwise.config.schema import LoraSection
from shardwise.hf import task as hf_task

NAMES = ["llama", "mistral", "qwen3", "gemma3", "mixtral", "gpt2", "gpt_neox", "opt", "phi", "bert", "t5", "vit"]
METHODS = ["lora", "rslora", "dora", "ia3", "prompt", "norms"]
PLANS = ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2,microbatches=2", "cp=2", "dp_shard=2,tp=2"]
NOT_IN_PEFT = {("vit", "prompt")}  # learned prompts need a model that takes embeddings or past keys
VIRTUAL = 2  # learned positions before a sample's own

KEYS = {"gpt2": "c_attn", "gpt_neox": "query_key_value", "bert": "key", "t5": "k"}
FEED_FORWARD = {"mixtral": None, "gpt2": "mlp.c_proj", "gpt_neox": "dense_4h_to_h", "opt": "fc2", "phi": "fc2",
                "bert": "output.dense", "t5": "wo", "vit": "fc2"}  # fmt: skip


def adapted(name: str, method: str) -> Task:
    """Returns the architecture's task with what the method adds, which alone is trained; dropout is on."""
    task = getattr(architectures, name)()
    fields: dict[str, Any] = {"model": Adapted(task.model, name, method), "name": f"{name}, {method}"}
    if name == "bert" and method == "prompt":
        fields["loss"] = after_the_prompt
    return task.with_(**fields)


class Adapted:
    """A constructor whose model is what `peft.get_peft_model` makes of another's."""

    def __init__(self, model: Callable[[], nn.Module], name: str, method: str) -> None:
        self.model, self.name, self.method = model, name, method

    def __call__(self) -> nn.Module:
        import peft

        base = self.model()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(base, config(self.name, self.method, base))


def config(name: str, method: str, base: nn.Module) -> Any:
    """Returns peft's configuration of the method for an architecture."""
    import peft

    if method in ("lora", "rslora", "dora"):
        # of experts held as one parameter peft adapts the whole, without dropout and without DoRA's lengths
        experts = name == "mixtral" and method != "dora"
        layers = ["q_proj", "k_proj", "v_proj", "o_proj"] if name == "mixtral" and not experts else "all-linear"
        return peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0 if experts else 0.1, target_modules=layers,
                               use_rslora=method == "rslora", use_dora=method == "dora")  # fmt: skip
    if method == "ia3":
        forward = [layer for layer in [FEED_FORWARD.get(name, "down_proj")] if layer is not None]
        return peft.IA3Config(target_modules=[KEYS.get(name, "k_proj"), *forward], feedforward_modules=forward)
    if method == "norms":
        return peft.LNTuningConfig(target_modules=norms(base))
    if name == "bert":
        return peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=VIRTUAL)
    kind = "SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM"
    return peft.PrefixTuningConfig(task_type=kind, num_virtual_tokens=VIRTUAL)


def norms(base: nn.Module) -> list[str]:
    """Returns the paths of a model's norms."""
    return [path for path, child in base.named_modules() if "norm" in type(child).__name__.lower()]


def after_the_prompt(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`same_word` of a sample's own positions."""
    output.logits = output.logits[:, VIRTUAL:]
    return architectures.same_word(output, batch)


# --- a folder's model


def small_llama() -> Path:
    """Returns a folder that transformers wrote, the same for all processes of this machine."""
    import transformers

    name = f"shardwise-small-llama-{transformers.__version__}-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as between:
            torch.manual_seed(1)
            architectures.llama().model().save_pretrained(str(Path(between) / name))
            try:
                (Path(between) / name).rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder


def of_folder() -> Task:
    """A folder's Llama with adapters that are drawn on both sides, and dropout."""
    return hf_task(small_llama(), batch=architectures.words, optimizer=architectures.sgd, model=_drawn)


def two() -> Task:
    """Two adapters on one base, of which the first is active and trained."""
    return of_folder().with_(model=lambda: _second(_drawn(_base())))


def configured() -> Task:
    """Adapters as `[lora]` gives them, with an alpha of its own, and a layer that is trained whole."""
    section = LoraSection(rank=2, alpha=8.0, targets=["q_proj", "down_proj"], whole=["lm_head"])
    return with_lora(hf_task(small_llama(), batch=architectures.words, optimizer=architectures.sgd), section)


def _base() -> nn.Module:
    return hf_task(small_llama(), batch=architectures.words).model()


def _drawn(base: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.1, init_lora_weights=False,
                                                     target_modules="all-linear"))  # fmt: skip


def _second(model: Any) -> nn.Module:
    import peft

    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model
