"""Write a folder's weights into a transformers model as soon as it is constructed, anywhere in a task's constructor.

Code that wraps, edits or extends the model afterwards (adapters, resized embeddings, a new head, values computed from
its weights) then works on the folder's weights, whatever their names become. If the constructor is being recorded
(trace/deferred) nothing is read: the tape notes the source of each weight, and a rank reads it when it needs the value.

    Task.model()    LlamaForCausalLM(config)  <- the folder's, here     get_peft_model(...)     resize_token_embeddings
    value("base_model.model.lm_head.weight")     read, cut, put in its place, forgotten

What this does not do: fill a model that `from_pretrained` makes in the constructor, which reads its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import InputError
from shardwise.heads import build_model
from shardwise.hf.folder_tensors import Checkpoint
from shardwise.hf.names import Recipe, recipes_of
from shardwise.trace.constructor_recorder import unrecorded, write_from


class Weights:
    """The weights of a folder, for `Task.weights`.

    config  the folder's transformers configuration
    head    head of the model whose names are compared with the folder's now; None: when a model is constructed
    new     whether parameters that the folder lacks keep their initial values; False: they are refused
    """

    def __init__(self, folder: str | Path, config: Any, head: str | None, new: bool) -> None:
        self.folder, self.config, self.head, self.new = folder, config, head, new
        self.checkpoint = Checkpoint(folder)
        if (few := getattr(config, "quantization_config", None)) is not None:
            method = (few if isinstance(few, dict) else vars(few)).get("quant_method", "unknown")
            raise InputError(
                f"{folder} is quantised (quantization_config in its config.json, {method}), and such weights are not "
                "trained here: give the folder of the model in bf16 or fp32"
            )
        if head is not None:
            with torch.device("meta"):
                model = build_model(config, head)
            self._matched(model, recipes_of(model, self.checkpoint))

    def __call__(self, name: str) -> None:
        """Returns None, as a `Task.weights` that gives no value, since the constructor writes the folder's values."""

    def __reduce__(self) -> tuple:
        return Weights, (self.folder, self.config, None, self.new)

    def into(self, model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Returns a constructor like `model`, in whose transformers model the folder's weights are written."""
        return model if isinstance(model, _Filled) and model.weights is self else _Filled(model, self)

    def fill(self, model: nn.Module) -> str:
        """Writes the folder's weights into a transformers model; returns "".

        For a model of another kind or with other sizes it writes nothing and returns the reason.
        """
        if type(model.config) is not type(self.config):
            return f"a {type(model.config).__name__} made the model, and the folder has a {type(self.config).__name__}"
        if any(param.is_meta for param in model.parameters()):
            return ""  # `from_pretrained` is making it, and will fill it
        with unrecorded():
            recipes = recipes_of(model, self.checkpoint)
            tensors = dict(_tensors(model))
            for name, recipe in recipes.items():
                if name in tensors and tensors[name].shape != recipe.shapes[name]:
                    return f"{_of_shape(name, recipe.shapes[name])}, but the model's has {tuple(tensors[name].shape)}"
            matched = self._matched(model, recipes)
        for name, (stored_as, recipe) in matched.items():
            write_from(tensors[name], partial(recipe.make, self.checkpoint, stored_as, model, tensors[name].dtype))
        return ""

    def fill_by_names(self, module: nn.Module) -> None:
        """Writes the folder's tensors by name into any module; `InputError` if names or shapes do not fit."""
        tensors = dict(_tensors(module))
        plain = {name: Recipe(name, ((name, None),), None, {name: self.checkpoint.outline(name).shape})
                 for name in self.checkpoint.files}  # fmt: skip
        for name, (stored_as, _) in self._matched(module, plain).items():
            if tensors[name].shape != plain[stored_as].shapes[stored_as]:
                its = f"{_of_shape(stored_as, plain[stored_as].shapes[stored_as])} in {self.folder}"
                raise InputError(f"{its}, but the model's has {tuple(tensors[name].shape)}: it is another model's")
            write_from(tensors[name], partial(self.checkpoint.read, stored_as, tensors[name].dtype))

    def _matched(self, model: nn.Module, made: dict[str, Recipe]) -> dict[str, tuple[str, Recipe]]:
        """Returns {parameter or persistent buffer: (its name in `made`, recipe)} of those that the folder gives.

        made  name -> recipe of each tensor that the folder gives; a tied tensor may have any of its names
        Raises `InputError` as `_refuse` does.
        """
        recipes: dict[str, tuple[str, Recipe]] = {}
        missing = []
        aliases = _aliases(model)
        for name, names in aliases.items():
            taken = next((other for other in names if other in made), None)
            if taken is None:
                missing.append(name)
            else:
                recipes[name] = taken, made[taken]
        left = sorted(made.keys() - {other for names in aliases.values() for other in names})
        self._refuse(recipes, missing, left, len(aliases))
        return recipes

    def _refuse(self, recipes: dict, missing: list[str], left: list[str], count: int) -> None:
        """Raise `InputError` if the folder has none of the model's tensors, or lacks some and `new` is False.

        recipes  of `_matched`;  missing  names that the folder lacks, of `count`;  left  names that the model lacks
        """
        if not recipes:
            raise InputError(f"{self.folder} holds none of the model's tensors: it is another model's")
        if missing and not self.new:
            listed = f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
            over = f"; it holds {', '.join(left[:4])} besides, which the model does not know" if left else ""
            raise InputError(
                f"{self.folder} lacks {len(missing)} of the model's {count} tensors: {listed}{over}. Its "
                "config.json describes another model than its weights. Give new=True to hf.task if they are a new "
                "head, to be drawn from the seed"
            )


class _Filled:
    """A task's constructor `model`, whose result has the folder's weights; made by `Weights.into`."""

    def __init__(self, model: Callable[[], nn.Module], weights: Weights) -> None:
        self.model, self.weights = model, weights

    def __call__(self) -> nn.Module:
        made: list[str] = []
        with _constructed(lambda model: made.append(self.weights.fill(model))):
            module = self.model()
        if not made:
            self.weights.fill_by_names(module)
        elif all(made):
            raise InputError(
                f"the weights of {self.weights.folder} would not be used: {made[0]}. It is another model's, or another "
                "configuration's; a task with weights=None draws them"
            )
        return module


@contextmanager
def _constructed(done: Callable[[nn.Module], None]) -> Iterator[None]:
    """Context: `done(model)` is called when the constructor of a transformers model ends; of nested ones the outermost.

    It relies on constructors calling `PreTrainedModel.__init__` first and `post_init` last.
    """
    from transformers import PreTrainedModel

    begin, end = PreTrainedModel.__init__, PreTrainedModel.post_init
    under_way: list[nn.Module] = []

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        under_way.append(self)
        begin(self, *args, **kwargs)

    def post_init(self: Any) -> None:
        end(self)
        place = next((place for place, model in enumerate(under_way) if model is self), len(under_way))
        del under_way[place:]
        if not under_way:
            done(self)

    PreTrainedModel.__init__, PreTrainedModel.post_init = init, post_init
    try:
        yield
    finally:
        PreTrainedModel.__init__, PreTrainedModel.post_init = begin, end
    if under_way:  # a model that did not call `post_init`
        done(under_way[0])


def _of_shape(name: str, shape: torch.Size) -> str:
    return f"'{name}' has shape {tuple(shape)}"


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Returns {first name of a parameter or persistent buffer: all its names}; a tied weight has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, tensor) of each parameter and persistent buffer, a tied one under each of its names."""
    kept = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    return [*model.named_parameters(remove_duplicate=False), *buffers]
