"""`task(source, head, ...)`: a `Task` around a transformers model (heads: heads.py; weights: hf/weights).

The model is built from the configuration, without reading weights. A rank reads each weight from the checkpoint when it
needs its value (hf/weights), or initialises it from the seed if there is no checkpoint. The loss is a sum whose weight
is the number of labels that count, whatever the model itself would return.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, did_you_mean
from shardwise.heads import HEADS, build_model, read_config, settings
from shardwise.hf.weights import Weights
from shardwise.task import Task

if TYPE_CHECKING:
    from torch import nn


def task(source: Any, head: str = "causal-lm", *, new: bool = False, **fields: Any) -> Task:
    """Returns a `Task` that trains a transformers model, from a checkpoint folder or from scratch.

    source   a local folder with config.json and safetensors files, or a configuration object, for weights from the seed
    head     "causal-lm", "masked-lm", "seq2seq", "speech-seq2seq", "image-text", "token-", "sequence-", "image-" or
             "audio-classification"
    new      whether parameters that the checkpoint lacks (a new head) are initialised from the seed; False: refused
    fields   of `Task`: data or batch, optimizer, eval_data, ... A batch is a dict; its "labels" go to the loss, where
             -100 is ignored, and the rest goes to the model. `model` may be a function or module class with one
             required argument, the folder's model, such as lambda base: get_peft_model(base, config)

    Raises `InputError` for a folder that cannot be read, a model without that head, and names that do not match.
    """
    if head not in HEADS:
        raise InputError(f"head {head!r}: expected one of {', '.join(HEADS)}{did_you_mean(head, list(HEADS))}")
    config = copy.deepcopy(_config_of(source))  # the model is built without a cache
    build = partial(build_model, config, head)
    model = fields.pop("model", None)
    if isinstance(source, str | Path):
        fields.setdefault("weights", Weights(source, config, None if model is not None else head, new))
    # a `model` without a required argument makes the whole model by itself
    if model is not None and _takes_one(model):
        model = partial(_wrapped, model, build)
    of_head = settings(config, head)
    if model is not None and "loss" in fields:  # the output need not be the head's, which the head's metrics read
        del of_head["metrics"]
    return Task(**{**of_head, "model": build if model is None else model, **fields})


def _takes_one(model: Any) -> bool:
    """Whether a function or class has exactly one required argument, which is then the model to wrap.

    False for transformers' own classes, whose argument is a configuration.
    """
    if not callable(model) or hasattr(model, "config_class"):
        return False
    needed = [value for value in inspect.signature(model).parameters.values() if value.default is value.empty]
    return len([value for value in needed if value.kind in (value.POSITIONAL_ONLY, value.POSITIONAL_OR_KEYWORD)]) == 1


def _wrapped(wrap: Callable[[nn.Module], nn.Module], build: Callable[[], nn.Module]) -> nn.Module:
    return wrap(build())


def _config_of(source: Any) -> Any:
    """Returns the transformers configuration of a folder or configuration object; `InputError` for a file."""
    if isinstance(source, str | Path) and Path(source).is_file():
        raise InputError(f"{source} is a file: give the checkpoint folder that holds it, or the configuration object")
    return read_config(source)
