"""`task(source, head, ...)`: a `Task` around a transformers model.

The model is built by the configuration without its weights; each weight is then read from the checkpoint when its
place is made, or drawn from the seed where there is no checkpoint. Losses are sums with the number of labels that
count as their weight, whatever the model itself would return.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from shardwise.errors import InputError, did_you_mean
from shardwise.hf.checkpoint import Checkpoint
from shardwise.hf.names import Recipe, recipes_of
from shardwise.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100
# head -> transformers' class, and what its labels are: the next token, one for each token, or one for each sample
HEADS: dict[str, tuple[str, str]] = {
    "causal-lm": ("AutoModelForCausalLM", "next"),
    "masked-lm": ("AutoModelForMaskedLM", "tokens"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "decoder"),
    "token-classification": ("AutoModelForTokenClassification", "tokens"),
    "sequence-classification": ("AutoModelForSequenceClassification", "classes"),
    "image-classification": ("AutoModelForImageClassification", "classes"),
    "audio-classification": ("AutoModelForAudioClassification", "classes"),
}


def task(source: Any, head: str = "causal-lm", *, new: bool = False, **fields: Any) -> Task:
    """A task from a checkpoint folder (its weights are read) or a transformers configuration (they are drawn).

    source   a local folder with config.json and safetensors files, or a configuration object
    head     "causal-lm", "masked-lm", "seq2seq", "token-", "sequence-", "image-" or "audio-classification"
    new      parameters that the checkpoint lacks (a new head) are drawn from the seed; else they are refused
    fields   of `Task`: data or batch, optimizer, eval_data, ... A batch is a dict with "labels"; the rest of it goes
             to the model. -100 is no label

    Raises `InputError` for a folder that cannot be read, a model without that head, and names that do not match.
    """
    if head not in HEADS:
        raise InputError(f"head {head!r}: expected one of {', '.join(HEADS)}{did_you_mean(head, list(HEADS))}")
    config = copy.deepcopy(read_config(source))  # the model is built without a cache
    build = partial(build_model, config, head)
    weights = None
    if isinstance(source, str | Path):
        weights = Weights(source, config, head, new)
    labels = HEADS[head][1]
    settings: dict[str, Any] = {
        "inputs": partial(decoder_inputs, _start(config), config.pad_token_id or 0) if labels == "decoder" else inputs,
        "loss": {"next": next_token_loss, "classes": class_loss}.get(labels, token_loss),
        "metrics": class_metrics if labels == "classes" else partial(token_metrics, shift=labels == "next"),
        "name": f"{config.model_type}-{head}",
    }
    return Task(model=build, weights=weights, **{**settings, **fields})


def read_config(source: Any) -> Any:
    """transformers' configuration of a folder, or the object itself."""
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError as error:
        raise InputError(f"Hugging Face models need transformers ({error}): pip install 'shardwise[hf]'") from error
    if isinstance(source, PretrainedConfig):
        return source
    if not isinstance(source, str | Path):
        raise InputError(f"expected a checkpoint folder or a transformers configuration, got {type(source).__name__}")
    if not (Path(source) / "config.json").exists():
        raise InputError(f"{source} has no config.json: give a local checkpoint folder")
    try:
        return AutoConfig.from_pretrained(str(source), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{Path(source) / 'config.json'} is not a configuration: {error}") from error


def build_model(config: Any, head: str) -> nn.Module:
    """The model in float32 with this head, without a cache of keys and values."""
    import transformers

    kind = HEADS[head][0]
    if hasattr(config, "use_cache"):
        config.use_cache = False
    try:
        return getattr(transformers, kind).from_config(config, dtype=torch.float32)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        able = [name for name, (other, _) in HEADS.items() if _offers(getattr(transformers, other), config)]
        raise InputError(
            f"{type(config).__name__} has no model with the head {head!r} ({kind}); it has "
            f"{', '.join(able) or 'none of those that are known here'}"
        ) from None


def _offers(auto_class: Any, config: Any) -> bool:
    return type(config) in auto_class._model_mapping


class Weights:
    """Parameter -> its value in a checkpoint, None for one that is drawn; the `Task.weights` of a folder."""

    def __init__(self, folder: str | Path, config: Any, head: str, new: bool) -> None:
        self.folder, self.config, self.head, self.new = folder, config, head, new
        self.checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            self.model = build_model(config, head)
        made = recipes_of(self.model, self.checkpoint)
        self.recipes: dict[str, tuple[str, Recipe]] = {}  # parameter -> the name that it is made under, and how
        missing = []
        aliases = _aliases(self.model)
        for name, names in aliases.items():
            taken = next((other for other in names if other in made), None)
            if taken is None:
                missing.append(name)
            else:
                self.recipes[name] = taken, made[taken]
        self._refuse(
            missing, sorted(made.keys() - {other for names in aliases.values() for other in names}), len(aliases)
        )

    def __call__(self, name: str) -> Tensor | None:
        if name not in self.recipes:
            return None
        taken, recipe = self.recipes[name]
        return recipe.make(self.checkpoint, taken, self.model)

    def __reduce__(self) -> tuple:
        return Weights, (self.folder, self.config, self.head, self.new)

    def _refuse(self, missing: list[str], left: list[str], count: int) -> None:
        if not self.recipes:
            raise InputError(f"{self.folder} holds none of the model's tensors: it is another model's")
        if missing and not self.new:
            told = f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
            over = f"; it holds {', '.join(left[:4])} besides, which the model does not know" if left else ""
            raise InputError(
                f"{self.folder} lacks {len(missing)} of the model's {count} tensors: {told}{over}. Give new=True if "
                "they are a new head, to be drawn from the seed"
            )


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Parameter or kept buffer -> every name it goes by; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *_kept_buffers(model)):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


def _kept_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    kept = set(model.state_dict())
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


# --- inputs and losses, by the kind of labels


def inputs(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """All but the labels."""
    return (), {name: value for name, value in batch.items() if name != "labels"}


def decoder_inputs(start: int, pad: int, batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """The decoder sees the labels, one place later."""
    labels = batch["labels"]
    shifted = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], 1)
    return (), {**inputs(batch)[1], "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, pad)}


def _start(config: Any) -> int:
    start = getattr(config, "decoder_start_token_id", None)
    if start is None and getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{type(config).__name__} has no decoder_start_token_id: set it to the decoder's first token")
    return 0 if start is None else int(start)


def next_token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of each next token, and how many have a label."""
    return _summed(output.logits[:, :-1], batch["labels"][:, 1:])


def token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy at each place with a label."""
    return _summed(output.logits, batch["labels"])


def class_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross entropy of each sample's class."""
    return cross_entropy(output.logits, batch["labels"], reduction="sum"), len(batch["labels"])


def _summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (labels != IGNORED).sum()


def token_metrics(output: Any, batch: dict[str, Tensor], *, shift: bool) -> dict[str, tuple]:
    """Perplexity, and the share of labels that the model puts first."""
    logits, labels = output.logits, batch["labels"]
    logits, labels = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    total, weight = _summed(logits, labels)
    return {"perplexity": (total, weight, "exp"), "accuracy": ((logits.argmax(-1) == labels).sum(), weight)}


def class_metrics(output: Any, batch: dict[str, Tensor]) -> dict[str, tuple]:
    """The share of samples whose class the model puts first."""
    labels = batch["labels"]
    return {"accuracy": ((output.logits.argmax(-1) == labels).sum(), len(labels))}
