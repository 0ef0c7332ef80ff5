"""`configured`: a transformers `config.json` as a task with made-up samples, its model built by transformers.

    head     the one whose model `architectures` names, else the first that transformers offers (heads.py), else none
    sample   by the model's main input, its forward's arguments and sizes of the configuration; labels by the head
    weights  none are ever made, since the model is built without values and traced

If a configuration does not say how an input is laid out, or which further inputs are needed, several samples are made,
and the first with which the model can be traced is used.

*What this does not do*: images and sounds for models whose main input is text; custom code (`auto_map`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.heads import inputs, parts_of

if TYPE_CHECKING:
    from torch import Tensor, nn
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise.costs.shapes import Shape
from shardwise.errors import InputError, first_line
from shardwise.heads import (
    HEADS,
    build_model,
    heads_of,
    labels_of,
    model_class,
    read_config,
    settings,
)
from shardwise.task import Task

NEAR = 2e-3  # relative difference of parameter counts that is ignored (such as one norm more in each layer)
OWN = "give the model as a task of your own (module:name), and its own forward is traced"
CHANNELS_LAST = (
    "images in channels_last, as nets of convolutions are trained (--no-channels-last: as transformers builds them): "
    "hf.task(..., model=lambda base: base.to(memory_format=torch.channels_last))"
)
COMPANIONS = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}  # inputs from tokenizers -> their value
WIDTHS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")  # keys of a spectrogram's height
IMAGE = 224  # pixels of an image's side, if the model does not say
Sample = dict[str, torch.Tensor]


class MadeUp:
    """A source of 2^20 samples that are all the same made-up one; `sample`: a batch of one."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 2**20

    def read(self, indices: list[int], region: Any = None) -> Sample:
        """Returns a batch with the made-up sample once for each index, without copies."""
        return {name: tensor.expand(len(indices), *tensor.shape[1:]) for name, tensor in self.sample.items()}


@dataclass(frozen=True)
class Configured:
    """The tasks for a model's configuration, for tracing.

    tasks    the same model with different samples, of which the first that can be traced is to be used
    samples  description of each task's sample
    head     a key of `HEADS`, or `BASE`
    notes    assumptions, as lines for people
    hint     end of the message if no sample can be traced
    of_images  whether the model's main input is images
    """

    tasks: tuple[Task, ...]
    samples: tuple[str, ...]
    head: str
    notes: tuple[str, ...]
    hint: str = ""
    of_images: bool = False


def configured(path: Any, seq: int | None, *, channels_last: bool = False) -> Configured:
    """Returns the model of a `config.json` (the file, its folder, or the configuration object) as tasks.

    seq            tokens of a sample, or values or columns of a sound; None: the model reads neither, or says how many
    channels_last  whether a model of images has its weights, and so its convolutions, in channels_last

    Raises `InputError` if transformers cannot read it or has no such model, or if `seq` is missing or not used.
    """
    # a copy, since fields of it are set below
    config = copy.deepcopy(read_config(path))
    head, notes = head_of(config, path)
    kind, labels = _read_by(config, head)
    _refuse_absent(kind, path)
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # the token before shifted labels; None would be an error
    build = partial(build_base, config) if head == BASE else partial(build_model, config, head)
    of_images = main_input(kind) == "pixel_values"
    if channels_last and of_images:
        build = partial(in_channels_last, build)
        notes.append(CHANNELS_LAST)
    fields = {**(settings_of_base(config) if head == BASE else settings(config, head)), "model": build}
    examples = list(samples(config, kind, labels, seq, path, notes))
    tasks = tuple(Task(data=MadeUp(example), **fields) for example in examples)
    # --seq is a sound's length, which the model may not accept
    sound = seq is not None and "input_ids" not in examples[0] and labels != "decoder"
    hint = "; without --seq it is given the length that it names itself, if any" if sound else ""
    return Configured(tasks, tuple(map(sizes_of, examples)), head, tuple(notes), hint, of_images)


def head_of(config: Any, path: str) -> tuple[str, list[str]]:
    """Returns (name of the head of a configuration's model, or `BASE` without one; remarks for people).

    Raises `InputError` if transformers has no such model with a known head, nor one without a head.
    """
    able = _usual_first(config, heads_of(config))
    named, base = getattr(config, "architectures", None) or (), base_class(config)
    for head in able:
        if model_class(config, head).__name__ in named:
            return head, []
    # `architectures` may name the model without a head even where models with a head exist
    if base is not None and (not able or base.__name__ in named):
        return BASE, [f"{path}: planned as {base.__name__}, {MADE_UP}"]
    if not able:
        raise InputError(
            f"task: {path}: transformers has no model for a {type(config).__name__} with one of the heads known here "
            f"({', '.join(HEADS)}), nor without; {OWN}"
        )
    head = able[0]
    said = f"its architecture {named[0]} has no head known here" if named else "it names no architecture"
    return head, [f"{path}: {said}; taken as {model_class(config, head).__name__} ({head})"]


def _usual_first(config: Any, able: list[str]) -> list[str]:
    """Returns the heads of `able` with the usual one first: masked-lm for encoders, seq2seq for encoder-decoders."""
    first = ["masked-lm"] if not getattr(config, "is_decoder", False) else []
    if getattr(config, "is_encoder_decoder", False):
        first = ["seq2seq", "speech-seq2seq"]
    return sorted(able, key=lambda head: head not in first)


def sizes_of(sample: Sample) -> str:
    """Returns a one-line description of a sample's fields and their shapes, without the batch dim."""
    return ", ".join(f"{name} {' x '.join(map(str, tensor.shape[1:])) or '1'}" for name, tensor in sample.items())


def differs(path: str, shape: Shape) -> tuple[list[str], bool]:
    """Returns (remarks, whether transformers' model and `shape` differ by more than 0.2% in parameters).

    False if transformers cannot build the model.
    """
    try:
        config = copy.deepcopy(read_config(path))
        with torch.device("meta"):
            model = build_model(config, "causal-lm")
    except Exception as error:  # as without transformers, nothing is compared
        return [f"{path}: its parameters were not compared, since transformers does not build it: {error}"], False
    count = sum(parameter.numel() for parameter in model.parameters())
    if abs(shape.parameters - count) <= NEAR * count:
        return [], False
    name = type(model).__name__
    return [f"{path}: {name} has {count:,} parameters and not {shape.parameters:,}, as its numbers say: traced"], True


# --- samples


def _read_by(config: Any, head: str) -> tuple[Any, str]:
    """Returns (class of the model with this head, kind of its labels as in `labels_of`, "" without labels)."""
    return (base_class(config), "") if head == BASE else (model_class(config, head), labels_of(config, head))


def _refuse_absent(kind: Any, path: str) -> None:
    """Raises `InputError` if `kind` is transformers' stand-in for a class whose library is not installed."""
    try:
        _ = kind.forward
    except ImportError as error:
        raise InputError(f"{path}: {first_line(error)}") from error


def samples(
    config: Any, kind: Any, labels: str, seq: int | None, path: str, notes: list[str]
) -> Iterator[Sample]:  # fmt: skip
    """Yields batches of one sample that the model may accept, the likeliest first.

    kind     the class of the model
    labels   kind of its labels as in `labels_of`; "" for a model without labels
    seq      tokens, or a sound's length; None: not given
    path     text that names the configuration in messages
    notes    list to which lines on assumptions are appended

    Raises `InputError` for kinds of inputs and labels that are not made up here, and if `seq` is missing or not used.
    """
    takes, main = tuple(inspect.signature(kind.forward).parameters), main_input(kind)
    reads_text = main == "input_ids"
    if reads_text or labels == "decoder":
        if seq is None:
            raise InputError(f"{path} ({kind.__name__}) reads tokens: give --seq")
        ids = tokens(config, seq)
    if reads_text:
        examples: list[Sample] = [{main: ids}]
        beside = {name: torch.full_like(ids, value) for name, value in COMPANIONS.items() if name in takes}
        examples += [{main: ids, **beside}] if beside else []
        if not labels and "pixel_values" in takes:  # it compares texts with pictures (CLIP), and takes both
            examples += [{**text, "pixel_values": torch.zeros(1, *_picture(config, path, notes))} for text in examples]
    elif main == "pixel_values":
        examples = [{main: torch.zeros(1, *_picture(config, path, notes))}]
    elif main in ("input_values", "input_features"):
        # with a decoder --seq is the length of its text, and the sound has the model's own length
        free = seq if labels != "decoder" else None
        examples = [{main: torch.zeros(1, *shape)} for shape in _sounds(config, free)]
    else:
        raise InputError(f"task: {path}: {kind.__name__} is given {main}, of which no sample is made up here; {OWN}")
    if not reads_text and labels not in ("classes", "decoder", ""):
        raise InputError(
            f"task: {path}: {kind.__name__} is given {main} and labels for tokens, of which no sample is made up here; "
            f"{OWN}"
        )
    if not examples:
        raise InputError(f"{path} ({kind.__name__}) reads a waveform: give --seq, its values (16000 for a second)")
    if seq is not None and main == "pixel_values" and labels != "decoder":
        sizes = sizes_of(examples[0])
        raise InputError(f"--seq: {path} ({kind.__name__}) reads {sizes}, as it says itself: leave it out")
    # without labels a decoder has no tokens, so these are made up too
    if not labels:
        later = {"decoder_input_ids": torch.zeros(1, seq or 1, dtype=torch.long)}
        yield from ({**example, **(later if "decoder_input_ids" in takes else {})} for example in examples)
        return
    target = torch.zeros(1, dtype=torch.long) if labels == "classes" else ids
    yield from ({**example, "labels": target} for example in examples)


def tokens(config: Any, count: int) -> torch.Tensor:
    """Returns token ids (1, count) of one token without special meaning, with the eos token at the end if known."""
    # special ids (padding, placeholders of images) are avoided, since a forward treats them differently
    named = [pair for part in parts_of(config) for pair in vars(part).items()]
    special = {value for name, value in named if name.endswith(("token_id", "token_index")) and isinstance(value, int)}
    ids = torch.full((1, count), next(index for index in range(len(special) + 1) if index not in special))
    end, rows = _find(config, "eos_token_id"), _find(config, "vocab_size")
    # some heads (sequence classification of T5 or BART) read the state at the end token, and fail without one
    if isinstance(end, int) and isinstance(rows, int) and 0 <= end < rows:
        ids[:, -1] = end
    return ids


def _picture(config: Any, path: str, notes: list[str]) -> tuple[int, int, int]:
    """Returns (channels, height, width) of the model's images."""
    channels = _find(config, "num_channels", "in_channels", "in_chans")
    size = _find(config, "image_size", "img_size")
    if size is None:
        size = _preprocessed(path)
    if size is None:
        size = IMAGE
        notes.append(
            f"{path}: no size of images is given there or in preprocessor_config.json: {IMAGE} x {IMAGE} taken"
        )
    if isinstance(size, dict):  # {"height": 224, "width": 224}, or {"shortest_edge": 224}
        size = [size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))]
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    return (channels if isinstance(channels, int) else 3), int(height), int(width)


def _preprocessed(path: str) -> Any:
    """Returns the image size in the preprocessor_config.json beside a configuration; None without such a file."""
    if not isinstance(path, str):  # a configuration object, without a folder
        return None
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    try:
        processor = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return processor.get("crop_size") or processor.get("size")


def _sounds(config: Any, seq: int | None) -> list[tuple[int, ...]]:
    """Returns possible shapes of a sound without the batch dim: a spectrogram in both orders, or a waveform.

    seq  its length; None: the configuration's. [] if neither is known.
    """
    width, places = _find(config, *WIDTHS), _find(config, "max_source_positions")
    # positions are counted after a convolution of stride 2 (Whisper)
    own = 2 * places if isinstance(places, int) else _find(config, "max_length")
    length = seq if seq is not None else own if isinstance(own, int) else None
    if length is None:
        return []
    return [(width, length), (length, width)] if isinstance(width, int) else [(length,)]


def _find(config: Any, *words: str) -> Any:
    """Returns the first value that is not None under one of these names in a configuration or its parts, or None."""
    values = (getattr(part, word, None) for part in parts_of(config) for word in words)
    return next((value for value in values if value is not None), None)


BASE = "base"  # in place of a head
MADE_UP = "with a made-up loss, the sum of squares of its outputs: a task of your own has the head and the loss"


def base_class(config: Any) -> Any:
    """Returns transformers' class that `architectures` names, else its model without a head; None if it has neither."""
    import transformers

    mapping = transformers.AutoModel._model_mapping
    mapped = mapping.get(type(config), None)
    several = mapped if isinstance(mapped, tuple | list) else [mapped]
    named = getattr(config, "architectures", None) or ()
    # one with a head that is not known here (question answering) needs no head: its loss is made up
    own = [getattr(transformers, name, None) for name in named]
    fits = [kind for kind in own if inspect.isclass(kind) and vars(kind).get("config_class") is type(config)]
    return next((kind for kind in (*several, *fits) if getattr(kind, "__name__", "") in named), several[0])


def build_base(config: Any) -> nn.Module:
    """Returns the model of `base_class`, in float32, with its key-value cache off."""
    for part in parts_of(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return base_class(config)._from_config(config, dtype=torch.float32)


def in_channels_last(build: Callable[[], nn.Module]) -> nn.Module:
    """Returns the model that `build` makes with its 4-D weights, and so its convolutions, in channels_last."""
    return build().to(memory_format=torch.channels_last)


def made_up_loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of squares of the differentiable outputs, samples of the batch)."""
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    squares = [leaf.float().square().sum() for leaf in floats if leaf.requires_grad] or [floats[0].float().sum()]
    return torch.stack(squares).sum(), len(next(iter(batch.values())))


def settings_of_base(config: Any) -> dict[str, Any]:
    """Returns {"inputs": function, "loss": function, "name": text}, the fields of a `Task` besides model and data."""
    return {"inputs": inputs, "loss": made_up_loss, "name": config.model_type}


def main_input(kind: Any) -> str:
    """Returns the name of a model class's main input: its own if its forward takes it, else a usual one."""
    takes = tuple(inspect.signature(kind.forward).parameters)[1:]
    said = getattr(kind, "main_input_name", "input_ids")
    usual = ("pixel_values", "input_ids", "input_features", "input_values")
    return said if said in takes else next((name for name in takes if name in usual), said)
