"""transformers' models by head: how each is built and called, its loss. Made-up samples: planner/configured_task.

A head is one of transformers' Auto classes with what its labels are. Losses are sums with the number of labels that
count as their weight, whatever the model itself would return. Importing this does not import transformers.
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
# head -> transformers' class, and what its labels are: the next token, one for each token, or one for each sample
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
    """Returns transformers' configuration of a folder, of a file, or the object itself; raises `InputError`."""
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
    """Returns a configuration and all configurations inside it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(part for part_config in inner if part_config is not None for part in parts_of(part_config))]


def settings(config: Any, head: str) -> dict[str, Any]:
    """Returns the fields of a `Task` that follow from a head: inputs, loss, metrics, name; may raise `InputError`."""
    labels = labels_of(config, head)
    return {
        "inputs": partial(decoder_inputs, _start(config), _pad(config)) if labels == "decoder" else inputs,
        "loss": {"next": next_token_loss, "classes": class_loss}.get(labels, token_loss),
        "metrics": class_metrics if labels == "classes" else partial(token_metrics, shift=labels == "next"),
        "name": f"{config.model_type}-{head}",
    }


def labels_of(config: Any, head: str) -> str:
    """Returns the kind of a head's labels: "next", "tokens", "decoder" or "classes".

    Some of transformers' models from a sequence to a sequence are decoders: these are given no tokens beside the input.
    """
    labels = HEADS[head][1]
    alone = labels == "decoder" and "decoder_input_ids" not in arguments_of(config, head)
    return "next" if alone else labels


def arguments_of(config: Any, head: str) -> tuple[str, ...]:
    """Returns the names of the arguments of the forward of the model with this head; () where there is none."""
    kind = model_class(config, head)
    return tuple(inspect.signature(kind.forward).parameters) if kind is not None else ()


def model_class(config: Any, head: str) -> Any:
    """Returns transformers' class of a head; None where it has none for such a configuration."""
    import transformers

    mapping = getattr(transformers, HEADS[head][0])._model_mapping
    if type(config) not in mapping:
        return None
    mapped = mapping[type(config)]
    several = mapped if isinstance(mapped, tuple | list) else [mapped]
    named = getattr(config, "architectures", None) or ()
    return next((kind for kind in several if kind.__name__ in named), several[0])


def heads_of(config: Any) -> list[str]:
    """Returns the heads for which transformers has a model of this configuration."""
    return [head for head in HEADS if model_class(config, head) is not None]


def build_model(config: Any, head: str) -> nn.Module:
    """Returns the model in float32 with this head, without a cache of keys and values; `InputError` for none."""
    import transformers

    config = copy.deepcopy(config)  # a model that is resized writes into its own
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
    """Returns the model's arguments for a batch: all of it but the labels, by keyword."""
    return (), {name: value for name, value in batch.items() if name != "labels"}


def decoder_inputs(start: int, pad: int, batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """Returns the model's arguments for a batch, with the labels shifted right as the decoder's input."""
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
    """Returns (summed cross entropy of each next token, number of tokens with a label)."""
    return _summed(output.logits, _next(batch["labels"]))


def _next(labels: Tensor) -> Tensor:
    """Returns labels shifted left by one, the last ignored: shifting the far larger logits would copy them."""
    return pad(labels, (0, 1), value=IGNORED)[:, 1:]


def token_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (summed cross entropy at each place with a label, number of these places)."""
    return _summed(output.logits, batch["labels"])


def class_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (summed cross entropy of each sample's class, number of samples)."""
    return cross_entropy(output.logits, batch["labels"], reduction="sum"), len(batch["labels"])


def _of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the logits of the labels' positions: prompt tuning puts positions of its own before them."""
    return logits[:, -labels.shape[1] :] if logits.shape[1] > labels.shape[1] else logits


def _summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = _of_labels(logits, labels)
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return total, (labels != IGNORED).sum()


def token_metrics(output: Any, batch: dict[str, Tensor], *, shift: bool) -> dict[str, tuple]:
    """Returns {"perplexity": (sum, weight, "exp"), "accuracy": (labels ranked first, weight)}; `shift`: of the next."""
    logits, labels = output.logits, batch["labels"]
    labels = _next(labels) if shift else labels
    logits = _of_labels(logits, labels)
    total, weight = _summed(logits, labels)
    return {"perplexity": (total, weight, "exp"), "accuracy": ((logits.argmax(-1) == labels).sum(), weight)}


def class_metrics(output: Any, batch: dict[str, Tensor]) -> dict[str, tuple]:
    """Returns {"accuracy": (samples whose class the model ranks first, samples)}."""
    labels = batch["labels"]
    return {"accuracy": ((output.logits.argmax(-1) == labels).sum(), len(labels))}
