"""Write a folder's weights into transformers' model as soon as it is constructed, wherever a constructor does so.

What wraps, edits or extends the model afterwards (adapters, resized embeddings, a head of one's own, values copied or
computed from its weights) then works on the folder's weights, under whatever names. Where the constructor is recorded
(trace/deferred) nothing is read yet: the tape notes from where each weight comes, and a rank reads one when it makes
its value.

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
    """The weights of a folder, as `Task.weights`: `into(model)` is the constructor whose model has them.

    head   whose model is looked at now, for names that do not match; None: they are when a model is constructed
    new    parameters that the folder lacks are drawn; else they are refused
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
        """Returns None for every parameter, as `Task.weights` may: the constructor writes the folder's values."""

    def __reduce__(self) -> tuple:
        return Weights, (self.folder, self.config, None, self.new)

    def into(self, model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Returns the constructor, now with the folder's weights in the transformers model that it makes."""
        return model if isinstance(model, _Filled) and model.weights is self else _Filled(model, self)

    def fill(self, model: nn.Module) -> str:
        """Write the folder's weights into a model; returns "", or why not for one of another kind or of other sizes."""
        if type(model.config) is not type(self.config):
            return f"a {type(model.config).__name__} made the model, and the folder has a {type(self.config).__name__}"
        if any(param.is_meta for param in model.parameters()):
            return ""  # `from_pretrained` makes it, and fills it
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
        """Write the folder's tensors by name into a module not of transformers; `InputError` where they do not fit."""
        tensors = dict(_tensors(module))
        plain = {name: Recipe(name, ((name, None),), None, {name: self.checkpoint.outline(name).shape})
                 for name in self.checkpoint.files}  # fmt: skip
        for name, (stored_as, _) in self._matched(module, plain).items():
            if tensors[name].shape != plain[stored_as].shapes[stored_as]:
                its = f"{_of_shape(stored_as, plain[stored_as].shapes[stored_as])} in {self.folder}"
                raise InputError(f"{its}, but the model's has {tuple(tensors[name].shape)}: it is another model's")
            write_from(tensors[name], partial(self.checkpoint.read, stored_as, tensors[name].dtype))

    def _matched(self, model: nn.Module, made: dict[str, Recipe]) -> dict[str, tuple[str, Recipe]]:
        """Returns {parameter or kept buffer: (name of recipe, recipe)}; `InputError` for missing ones, unless `new`."""
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
        """Raise `InputError` where the folder's tensors are not the model's: none, or `missing` ones of `count`."""
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
    """A task's constructor, whose model of transformers gets the folder's weights."""

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
    """Context: `done` is called with each model of transformers whose constructor ends, the outermost of nested ones.

    All of them call `PreTrainedModel.__init__` first and `post_init` last.
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
    if under_way:  # one without a post_init
        done(under_way[0])


def _of_shape(name: str, shape: torch.Size) -> str:
    return f"'{name}' has shape {tuple(shape)}"


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Returns {parameter or kept buffer: all names of that tensor}; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, tensor) of each parameter and kept buffer, a tied one under each of its names."""
    kept = set(model.state_dict())
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
    return [*model.named_parameters(remove_duplicate=False), *buffers]
