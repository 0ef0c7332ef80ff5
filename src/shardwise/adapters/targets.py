"""Choose the modules that get adapters: patterns of `[lora] targets` are matched with a model's linear layers.

A pattern is a full path or the last parts of one (`q_proj`, `self_attn.q_proj`), with `*` and `?` within a part
(`layers.*.mlp.up_proj`). `all-linear` matches every linear layer, but the output layer of a transformers model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.errors import InputError, did_you_mean

ALL = "all-linear"


def target_paths(model: nn.Module, patterns: Sequence[str], rank: int) -> list[str]:
    """Returns the paths of the linear layers that match a pattern, each once, in the model's order.

    Raises `InputError` for a model without linear layers, a pattern that matches none, a layer narrower than `rank`.
    """
    widths = dict(_linear_layers(model))
    if not widths:
        raise InputError("lora.targets: the model has no linear layer to put adapters beside")
    paths = [path for path in widths if any(_is_named(path, pattern, model) for pattern in patterns)]
    for pattern in patterns:
        if not any(_is_named(path, pattern, model) for path in widths):
            # patterns are mostly last parts of paths, so similar ones of these are suggested
            names = list(dict.fromkeys(path.rpartition(".")[2] for path in widths))
            near = (
                did_you_mean(pattern.rpartition(".")[2], names)
                or f" (the last parts of their names: {', '.join(names)})"
            )
            raise InputError(f"lora.targets: {pattern!r} matches none of the {len(widths)} linear layers{near}")
    for path in paths:
        # such an adapter would have more parameters than the layer
        if rank > widths[path]:
            raise InputError(
                f"lora.rank: {rank} is above the width of '{path}' ({widths[path]}), where an adapter is larger than "
                f"what it adapts: at most {min(widths[path] for path in paths)}, or leave the layer out of lora.targets"
            )
    return paths


def whole_paths(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Returns the paths of the modules that match a pattern of `[lora] whole`, to be trained without adapters.

    Raises `InputError` for a pattern that matches none, and if peft would train another module too.
    """
    # a module without parameters has nothing to train
    modules = [path for path, module in model.named_modules() if path and any(True for _ in module.parameters())]
    paths = []
    for pattern in patterns:
        named = [path for path in modules if _ends_as(path, pattern)]
        if not named:
            near = did_you_mean(pattern, list(dict.fromkeys(path.rpartition(".")[2] for path in modules)))
            raise InputError(f"lora.whole: {pattern!r} matches no module with parameters{near}")
        paths += named
    # peft compares the ends of paths as text, so that `head` matches `aux_head`
    for path in modules:
        alike = next((own for own in paths if path.endswith(own)), None)
        if alike is not None and path not in paths:
            raise InputError(
                f"lora.whole: peft would train '{path}' whole too, since its name ends as '{alike}' does: name it in "
                "lora.whole as well, or give one of the two another name"
            )
    # two patterns may name the same module
    return list(dict.fromkeys(paths))


def _is_named(path: str, pattern: str, model: nn.Module) -> bool:
    """Whether a linear layer's path matches a pattern."""
    if pattern == ALL:
        return model.get_submodule(path) is not _output_layer(model)
    return _ends_as(path, pattern)


def _ends_as(path: str, pattern: str) -> bool:
    """Whether the last parts of a path match the parts of the pattern."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(wanted) <= len(parts) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yields (path, smaller of input and output width) of each linear layer."""
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if path and weight is not None and (isinstance(module, nn.Linear) or _is_transposed(module)):
            yield path, min(weight.shape)


def _is_transposed(module: Any) -> bool:
    """Whether a module is transformers' `Conv1D`, a linear layer whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _output_layer(model: Any) -> Any:
    """Returns a transformers model's output layer (`lm_head`), or None; None for other modules."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
