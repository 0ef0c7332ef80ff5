"""Builds and calls transformers' models by head, with their losses and metrics.

A head is one of transformers' Auto classes with the kind of its labels. A loss is a sum with the number of labels that
are not ignored as its weight, whatever loss the model itself returns. Importing this does not import transformers.
"""

from __future__ import annotations

import copy
import inspect
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy, pad

from shardwise.errors import InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = -100
# head -> (transformers' class, kind of labels): "next" (the next token), "tokens" (one for each token), "decoder" (one
# for each token of the decoder), "classes" (one for each sample)
HEADS: dict[str, tuple[str, str]] = {
    "causal-lm": ("AutoModelForCausalLM", "next"),
    "masked-lm": ("AutoModelForMaskedLM", "tokens"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "decoder"),
    "speech-seq2seq": ("AutoModelForSpeechSeq2Seq", "decoder"),
    "image-text": ("AutoModelForImageTextToText", "next"),
    "token-classification": ("AutoModelForTokenClassification", "tokens"),
    "sequence-classification": ("AutoModelForSequenceClassification", "classes"),
    "image-classification": ("AutoModelForImageClassification", "classes"),
    "audio-classification": ("AutoModelForAudioClassification", "classes"),
}


def read_config(source: Any) -> Any:
    """Returns transformers' configuration from a folder, a file, or the object itself; `InputError` for others."""
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError as error:
        raise InputError(f"Hugging Face models need transformers ({error}): pip install 'shardwise[hf]'") from error
    if isinstance(source, PretrainedConfig):
        return source
    if not isinstance(source, str | Path):
        raise InputError(f"expected a checkpoint folder or a transformers configuration, got {type(source).__name__}")
    file = Path(source) if Path(source).is_file() else Path(source) / "config.json"
    if not file.exists():
        raise InputError(f"{source} has no config.json: give a local checkpoint folder")
    try:
        return AutoConfig.from_pretrained(str(source), local_files_only=True)
    except Exception as error:  # each configuration class has checks of its own
        try:
            json.loads(file.read_bytes())
            reason = first_line(error)
        except ValueError as wrong:
            reason = f"not JSON: {wrong}"
        raise InputError(f"{file} is not a configuration: {reason}") from error


def parts_of(config: Any) -> list[Any]:
    """Returns a list of a configuration and all configurations nested in it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for part_config in inner if part_config is not None for part in parts_of(part_config))]


def settings(config: Any, head: str) -> dict[str, Any]:
    """Returns the fields of a `Task` that follow from a configuration and a head: "inputs", "loss", "metrics", "name".

    Raises `InputError` for an encoder-decoder without a first token of the decoder.
    """
    labels = labels_of(config, head)
    return {
        "inputs": partial(decoder_inputs, _start(config), _pad(config)) if labels == "decoder" else inputs,
        "loss": {"next": next_token_loss, "classes": class_loss}.get(labels, token_loss),
        "metrics": class_metrics if labels == "classes" else partial(token_metrics, shift=labels == "next"),
        "name": f"{config.model_type}-{head}",
    }


def labels_of(config: Any, head: str) -> str:
    """Returns the kind of a head's labels: "next", "tokens", "decoder" or "classes".

    A sequence-to-sequence model without an argument `decoder_input_ids` is a decoder alone, with labels "next".
    """
    labels = HEADS[head][1]
    alone = labels == "decoder" and "decoder_input_ids" not in arguments_of(config, head)
    return "next" if alone else labels


def arguments_of(config: Any, head: str) -> tuple[str, ...]:
    """Returns the names of the arguments of the model's forward; () if there is no model with this head."""
    kind = model_class(config, head)
    return tuple(inspect.signature(kind.forward).parameters) if kind is not None else ()


def model_class(config: Any, head: str) -> Any:
    """Returns transformers' class of model for a configuration with this head; None if there is none."""
    import transformers

    mapping = getattr(transformers, HEADS[head][0])._model_mapping
    if type(config) not in mapping:
        return None
    mapped = mapping[type(config)]
    several = mapped if isinstance(mapped, tuple | list) else [mapped]
    named = getattr(config, "architectures", None) or ()
    return next((kind for kind in several if kind.__name__ in named), several[0])


def heads_of(config: Any) -> list[str]:
    """Returns the names in `HEADS` for which transformers has a model of this configuration."""
    return [head for head in HEADS if model_class(config, head) is not None]


def build_model(config: Any, head: str) -> nn.Module:
    """Returns a new model with this head, in float32 and without key-value cache; `InputError` if there is none."""
    import transformers

    config = copy.deepcopy(config)  # changed here, and by a model that is resized
    kind = HEADS[head][0]
    for part in parts_of(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    try:
        return getattr(transformers, kind).from_config(config, dtype=torch.float32)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise InputError(
            f"{type(config).__name__} has no model with the head {head!r} ({kind}); it has "
            f"{', '.join(heads_of(config)) or 'none of those that are known here'}"
        ) from None


# --- inputs and losses, by the kind of labels


def inputs(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """Returns the model's (args, kwargs) for a batch: all entries but "labels", as keywords."""
    return (), {name: value for name, value in batch.items() if name != "labels"}


def decoder_inputs(start: int, pad: int, batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """Returns the model's (args, kwargs) for a batch, with "decoder_input_ids": the labels shifted right.

    start   id of the decoder's first token; `pad`: id in place of ignored labels
    """
    labels = batch["labels"]
    shifted = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], 1)
    return (), {**inputs(batch)[1], "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, pad)}


def _start(config: Any) -> int:
    start = getattr(config, "decoder_start_token_id", None)
    if start is None and getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{type(config).__name__} has no decoder_start_token_id: set it to the decoder's first token")
    return 0 if start is None else int(start)


def _pad(config: Any) -> int:
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) else 0


def next_token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (sum of the next tokens' cross entropies, number of labels that are not ignored)."""
    return _summed(output.logits, _next(batch["labels"]))


def _next(labels: Tensor) -> Tensor:
    """Returns the labels (B, S) shifted left by one, the last ignored, since shifting the logits would copy more."""
    return pad(labels, (0, 1), value=IGNORED)[:, 1:]


def token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (sum of the cross entropies at positions with a label, number of these positions)."""
    return _summed(output.logits, batch["labels"])


def class_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of the samples' cross entropies, number of samples)."""
    return cross_entropy(output.logits, batch["labels"], reduction="sum"), len(batch["labels"])


def _of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the logits (B, S, V) of the labels' S positions, without those that prompt tuning puts before them."""
    return logits[:, -labels.shape[1] :] if logits.shape[1] > labels.shape[1] else logits


def _summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = _of_labels(logits, labels)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (labels != IGNORED).sum()


def token_metrics(output: Any, batch: dict[str, Tensor], *, shift: bool) -> dict[str, tuple]:
    """Returns {"perplexity": (loss, weight, "exp"), "accuracy": (number of right tokens, weight)}, for `Task.metrics`.

    shift   Whether a position's logits are of the next token
    """
    logits, labels = output.logits, batch["labels"]
    labels = _next(labels) if shift else labels
    logits = _of_labels(logits, labels)
    total, weight = _summed(logits, labels)
    return {"perplexity": (total, weight, "exp"), "accuracy": ((logits.argmax(-1) == labels).sum(), weight)}


def class_metrics(output: Any, batch: dict[str, Tensor]) -> dict[str, tuple]:
    """Returns {"accuracy": (number of samples with the right class, number of samples)}, for `Task.metrics`."""
    labels = batch["labels"]
    return {"accuracy": ((output.logits.argmax(-1) == labels).sum(), len(labels))}
