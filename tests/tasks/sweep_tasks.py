"""Tasks for modules that nobody chose: transformers' models from shrunken configurations, classes of `torch.nn`.

    hf:llama    the configuration of a model type, made small; the model with the first head that transformers has
    nn:GELU     a class of torch.nn between two linear layers, its arguments and input found by trying
    lib:siren   a small module of another library (`library_tasks`), where that is installed

A recipe says which of several ways was the first to give a finite loss with gradients in one process, and to add up
over samples; `found` looks for it and `made` follows it. The loss takes the distance of the first floating-point tensor
of the output, batch dim first, from a fixed one.
"""

from __future__ import annotations

import copy
import inspect
import re
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from library_tasks import LIBRARIES
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shardwise import Task
from shardwise.heads import build_model, heads_of, model_class, parts_of
from shardwise.step.batching import slice_samples

SAMPLES, LENGTH, WIDTH, OUT = 4, 8, 6, 3
MOST_ELEMENTS = 2e6  # of a model that is small enough to be tried
SECONDS = 30  # that the search for a recipe takes at most
Recipe = tuple[int, ...]


def made(name: str, recipe: Recipe) -> Task:
    """The task of a module, as its recipe says."""
    kind, _, which = name.partition(":")
    return {"hf": transformers_task, "nn": torch_task, "lib": library_task}[kind](which, recipe)


def found(name: str) -> tuple[Recipe | None, str]:
    """The first recipe whose task runs in one process; None with the reason why there is none."""
    kind, _, which = name.partition(":")
    why, until = "nothing to try", time.monotonic() + SECONDS
    recipes = {"hf": transformers_recipes, "nn": torch_recipes, "lib": lambda name: iter([(0,)])}[kind](which)
    while True:
        recipe = None
        try:
            recipe = next(recipes)
            why = _unfit(made(name, recipe))
        except StopIteration:
            break
        except Skip as skip:
            return None, str(skip)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if recipe is None:  # a class that the installed version lists and has not
                break
        if not why:
            return recipe, ""
        if time.monotonic() > until:
            break
    return None, why[:200]


class Skip(Exception):
    """No recipe will do."""


def _unfit(task: Task) -> str:
    """Why a task is none: run in one process, in training mode without randomness, whole and in parts."""
    if _elements_without_memory(task) > MOST_ELEMENTS:
        return "too large however it is shrunk"
    torch.manual_seed(0)
    module = task.model().train()
    assert task.batch is not None
    batch = task.batch(0)
    args, kwargs = task.inputs(batch)
    total, _ = task.loss(module(*args, **kwargs), batch)
    total.backward()
    moved = [p.grad for p in module.parameters() if p.grad is not None and bool(p.grad.any())]
    if not bool(torch.isfinite(total)) or not moved or not all(bool(g.isfinite().all()) for g in moved):
        return "no finite gradient"
    with torch.no_grad():
        totals = [
            _total(task, module.eval(), slice_samples(batch, low, high)) for low, high in ((0, 4), (0, 1), (1, 4))
        ]
    return "" if abs(totals[0] - totals[1] - totals[2]) <= 1e-4 * max(1.0, abs(totals[0])) else "it mixes samples"


def _elements_without_memory(task: Task) -> int:
    """Of its parameters, built without memory for them; 0 where its constructor needs values."""
    try:
        with torch.device("meta"):
            return sum(param.numel() for param in task.model().parameters())
    except Exception:
        return 0


def _total(task: Task, module: nn.Module, batch: Any) -> float:
    args, kwargs = task.inputs(batch)
    return float(task.loss(module(*args, **kwargs), batch)[0])


def first_tensor(output: Any, samples: int) -> Tensor:
    """The first floating-point tensor of a module's output whose first dim is the samples, as (samples, rest)."""
    leaves = tree_flatten(output if not hasattr(output, "to_tuple") else output.to_tuple())[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]
    tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return next(leaf for leaf in tensors if leaf.dim() and leaf.shape[0] == samples and leaf.numel()).reshape(
        samples, -1
    )


def distance(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    samples = next(iter(batch.values())).shape[0]
    values = first_tensor(output, samples)
    target = torch.arange(values.shape[1], dtype=values.dtype).sin()
    return (values - target).square().sum() / values.shape[1], samples


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def _drawn(shapes: dict[str, tuple], step: int) -> dict[str, Tensor]:
    """A batch: floats by shape; integers below a bound where the first entry is one, as (bound, shape)."""
    generator = torch.Generator().manual_seed(step + 11)
    return {
        name: torch.randint(1, shape[0][0], (SAMPLES, *shape[1]), generator=generator) if isinstance(shape[0], tuple)
        else torch.randn(SAMPLES, *shape, generator=generator) for name, shape in shapes.items()
    }  # fmt: skip


def _bounded(bound: int, *shape: int) -> tuple:
    return ((bound,), shape)


# --- transformers

SHRUNK = 3  # ways to make a configuration small: everything, all but widths, layers alone
LAYERS = re.compile(r"(layers?|blocks?|depths?|n_layer|stages)$")
HEADS_OF = re.compile(r"(heads?|n_head|groups)$")
WIDE = re.compile(r"(size|dim|dims|hidden|embd|channels?|width|model|ffn|inner|d_ff|features|rank|filters|units)s?$")
FIXED = re.compile(r"(vocab|image|patch|kernel|num_channels|window|type|token|pad|tubelet|stride|in_channels|crop)")


def model_types() -> list[str]:
    """Every model type of transformers that AutoModel can build."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES.keys() & MODEL_MAPPING_NAMES.keys())


def sees_pictures(model_type: str) -> bool:
    """Whether transformers makes a classifier of images, a backbone or a detector of a model type."""
    from transformers.models.auto import modeling_auto

    kinds = ("IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "VIDEO_CLASSIFICATION", "IMAGE_SEGMENTATION")
    return any(model_type in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds)


def shrunk(config: Any, way: int) -> Any:
    """The configuration made small, those inside it too."""
    config = copy.deepcopy(config)
    for part in parts_of(config):
        for name, value in list(vars(part).items()):
            small = _small(name, value, way)
            if small != value:
                try:
                    setattr(part, name, small)
                except Exception:  # a property of another
                    continue
    return config


def _small(name: str, value: Any, way: int) -> Any:
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return type(value)(_small(name, one, way) for one in value)
    if type(value) is not int:
        return 0.0 if isinstance(value, float) and re.search(r"(drop|mask_.*prob|noise)", name) else value
    if name.endswith(("token_id", "token_index", "_idx")) and value > 60:
        return 60
    if "vocab" in name and value > 64:
        return 64
    if LAYERS.search(name):
        return min(value, 2)
    if way == 2 or FIXED.search(name):
        return min(value, 64) if re.search(r"image_size|crop", name) and value > 64 and way < 2 else value
    if way == 0 and HEADS_OF.search(name):
        return min(value, 2)
    if way == 0 and name in ("head_dim", "d_kv", "attention_head_dim", "qk_head_dim", "v_head_dim"):
        return min(value, 16)
    if WIDE.search(name) and value >= 64:
        return 32 if way == 0 else max(32, value // 12)
    return value


def _sized(config: Any, *words: str) -> Any:
    values = (getattr(part, word, None) for part in parts_of(config) for word in words)
    return next((value for value in values if value is not None), None)


def _samples_of(config: Any, kind: Any) -> list[dict[str, tuple]]:
    """Batches that a model may take, likeliest first, as shapes."""
    main = getattr(kind, "main_input_name", "input_ids")
    takes = inspect.signature(kind.forward).parameters
    vocab = min(int(_sized(config, "vocab_size") or 50), 50)
    words = _bounded(vocab, LENGTH)
    size = _sized(config, "image_size", "img_size", "input_size")
    size = size if isinstance(size, int) else (size[0] if isinstance(size, list | tuple) else 64)
    channels = _sized(config, "num_channels", "in_channels", "in_chans", "num_input_channels")
    channels = channels if isinstance(channels, int) else 3
    pictures = [(channels, s, s) for s in dict.fromkeys([size, 64, 32, 224])]
    bins = _sized(config, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")
    bins = bins if isinstance(bins, int) else 80
    length = 2 * (_sized(config, "max_source_positions") or 20)
    options: dict[str, list[dict[str, tuple]]] = {
        "input_ids": [{"input_ids": words}],
        "pixel_values": [{"pixel_values": shape} for shape in pictures],
        "pixel_values_videos": [{"pixel_values_videos": (_sized(config, "num_frames", "frames_per_clip") or 2, *p)}
                                for p in pictures],
        "input_values": [{"input_values": (n,)} for n in (1600, 16000)] + [{"input_values": (1, 1600)}]
                        + [{"input_values": (_sized(config, "max_length") or 64, bins)}],
        "input_features": [{"input_features": s} for s in ((bins, length), (length, bins), (64, bins), (bins, 3000))],
        "past_values": [{"past_values": (_sized(config, "context_length") or 32, _sized(config, "num_input_channels")
                                         or 1)}],
    }  # fmt: skip
    found = options.get(main, [])
    for other in options.values():
        found = found + [one for one in other if one not in found and next(iter(one)) in takes]
    if main == "pixel_values":  # a video, samples first
        found = found + [{"pixel_values": (_sized(config, "num_frames") or 2, *shape)} for shape in pictures]
    if "decoder_input_ids" in takes:
        found = [{**one, "decoder_input_ids": words} for one in found] + found
    if "input_ids" in takes:
        found = found + [{**one, "input_ids": words} for one in found if "input_ids" not in one]
    if "attention_mask" in takes:
        found = found + [{**one, "attention_mask": _bounded(2, LENGTH)} for one in found if "input_ids" in one]
    return found


def _config(model_type: str, way: int) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return shrunk(CONFIG_MAPPING[model_type](), way)


def _head(config: Any) -> str:
    return next(iter(heads_of(config)), "")


def _class_of(config: Any) -> Any:
    from transformers import AutoModel

    head = _head(config)
    return model_class(config, head) if head else AutoModel._model_mapping[type(config)]


def transformers_recipes(model_type: str) -> Iterator[Recipe]:
    for way in range(SHRUNK):
        config = _config(model_type, way)
        kind = _class_of(config)
        if isinstance(kind, tuple | list):
            kind = kind[0]
        yield from ((way, sample) for sample in range(len(_samples_of(config, kind))))


def _build(model_type: str, way: int) -> nn.Module:
    from transformers import AutoModel

    config = _config(model_type, way)
    for part in parts_of(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    head = _head(config)
    module = build_model(config, head) if head else AutoModel.from_config(config, dtype=torch.float32)
    return module


def transformers_task(model_type: str, recipe: Recipe) -> Task:
    way, sample = recipe
    config = _config(model_type, way)
    kind = _class_of(config)
    shapes = _samples_of(config, kind[0] if isinstance(kind, tuple | list) else kind)[sample]
    return Task(model=partial(_build, model_type, way), batch=partial(_drawn, shapes), loss=distance, optimizer=sgd,
                inputs=keywords, name=model_type)  # fmt: skip


def keywords(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (), dict(batch)


# --- other libraries


def library_task(name: str, recipe: Recipe) -> Task:
    make, shapes = LIBRARIES[name]
    return Task(model=make, batch=partial(_drawn, shapes), loss=distance, optimizer=sgd, inputs=positional, name=name)


def positional(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return tuple(batch.values()), {}


# --- torch.nn

VALUES: list[Any] = [WIDTH, 2, 3, 1, (WIDTH,), (2, 3), [3, 5], 0.3, 2.0]
SHAPES: list[tuple] = [
    (WIDTH,),
    (4, WIDTH),
    (WIDTH, 4),
    (WIDTH, 4, 4),
    (4, 4),
    (WIDTH, 4, 4, 4),
    (2, 4, 4),
    (2, 4, 4, 4),
]
FIRST = 4  # of the shapes, that a second and third argument are tried with


def classes() -> list[str]:
    """Every class of torch.nn that is a module."""
    found = {name for name, one in vars(nn).items() if isinstance(one, type) and issubclass(one, nn.Module)}
    return sorted(found - {"Module"})


def _constructions(kind: type) -> list[dict[str, Any]]:
    """Keyword arguments to try: required ones by value, and the batch first, reduction none."""
    takes = inspect.signature(kind.__init__).parameters
    required = [name for name, one in list(takes.items())[1:]
                if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]  # fmt: skip
    fixed: dict[str, Any] = {}
    if "batch_first" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        fixed["batch_first"] = True
    if "reduction" in takes:
        fixed["reduction"] = "none"
    fixed |= {name: 0.0 for name in takes if name == "dropout"}
    values = [*VALUES, nn.Identity, _encoder_layer, _decoder_layer]
    if len(required) > 3:
        tried = [dict.fromkeys(required, value) for value in values]
    else:
        tried = [dict(zip(required, chosen, strict=True)) for chosen in product(values, repeat=len(required))]
    if any(one.kind is one.VAR_POSITIONAL for one in takes.values()):
        tried += [{"*0": WIDTH, "*1": WIDTH}]
    tried.sort(key=lambda chosen: len({repr(value) for value in chosen.values()}))
    small = {name: WIDTH if one.default > 64 else 2 for name, one in takes.items()
             if type(one.default) is int and one.default > 4}  # fmt: skip
    more = [fixed, {}, {**small, **fixed}, *({name: 2} for name, one in takes.items() if one.default is None)]
    return [{**chosen, **each} for chosen in tried for place, each in enumerate(more) if each not in more[:place]]


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)


def _decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)


def _constructed(kind: type, options: dict[str, Any]) -> nn.Module:
    given = {name: value() if callable(value) else value for name, value in options.items()}
    positional = [given.pop(name) for name in sorted(given) if name.startswith("*")]
    return kind(*positional, **given)


def _inputs() -> list[tuple]:
    """What a module is given: shapes of floats (made from parameters), or "index" for integers."""
    ones: list[tuple] = [(shape,) for shape in SHAPES] + [("index",), ("indices",)]
    twos: list[tuple] = [(shape, shape) for shape in SHAPES[:FIRST]]
    twos += [(shape, other) for shape in SHAPES[:FIRST] for other in ((), "index", "indices", "sign")]
    threes: list[tuple] = [(shape,) * 3 for shape in SHAPES[:FIRST]] + [((WIDTH,), (WIDTH,), "sign"), ((), (), "sign")]
    return ones + twos + threes


class Between(nn.Module):
    """Linear layers, the module on what they give, and a linear layer over its result."""

    def __init__(self, kind: str, options: dict[str, Any], given: tuple) -> None:
        super().__init__()
        self.given = given
        sizes = [int(torch.Size(one).numel()) for one in given if not isinstance(one, str)]
        self.enter = nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes)
        self.inner = _constructed(getattr(nn, kind), options)
        with torch.no_grad():
            state = torch.random.get_rng_state()
            torch.manual_seed(1)
            self.train()
            inner = _constructed(getattr(nn, kind), options).eval()  # some look for other ranks in training
            x = {"x": torch.rand(2, WIDTH), "index": torch.ones(2, dtype=torch.long)}
            size = first_tensor(inner(*self._args(**x)), 2).shape[1]
            torch.random.set_rng_state(state)
        self.leave = nn.Linear(size, OUT)

    def _args(self, x: Tensor, index: Tensor) -> list[Tensor]:
        layers = iter(self.enter)
        made: list[Tensor] = []
        for one in self.given:
            if one == "index":
                made.append(index)
            elif one == "indices":
                made.append(torch.stack([index, index], 1))
            elif one == "sign":
                made.append(2 * (index % 2).to(x.dtype) - 1)
            else:
                made.append(torch.sigmoid(next(layers)(x)).view(len(x), *one))
        return made

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.leave(first_tensor(self.inner(*self._args(x, index)), len(x)))


def torch_recipes(name: str) -> Iterator[Recipe]:
    kind = getattr(nn, name)
    for construction, options in enumerate(_constructions(kind)[:600]):
        try:
            _constructed(kind, options)
        except Exception:
            continue
        yield from ((construction, given) for given in range(len(_inputs())))


def torch_task(name: str, recipe: Recipe) -> Task:
    options, given = _constructions(getattr(nn, name))[recipe[0]], _inputs()[recipe[1]]
    shapes = {"x": (WIDTH,), "index": _bounded(3)}
    return Task(model=partial(Between, name, options, given), batch=partial(_drawn, shapes), loss=distance,
                optimizer=sgd, inputs=keywords, name=name)  # fmt: skip
