"""`with_lora(task, section)`: a task whose model has low-rank adapters, which are the only trained parameters.

    y = W x + (alpha / rank) B A x          W frozen, A random, B zero, so at the start the model is unchanged

peft puts its layers into the model (`inject_adapter_in_model`) without a wrapper class, so the names of other modules,
and the model's class, stay. The values of W are the task's: from a folder, or initialised from the seed.

What this does not do: adapters other than LoRA, rsLoRA and DoRA; for those a task calls `peft.get_peft_model` itself.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.adapters.targets import target_paths, whole_paths
from shardwise.config.schema import LoraSection
from shardwise.errors import InputError
from shardwise.task import Task


def with_lora(task: Task, section: LoraSection) -> Task:
    """Returns the task with adapters in its model; unchanged if `section.rank` is None.

    section  the configuration's `[lora]`
    Raises `InputError` if peft is missing; the errors of `peft_config` are raised when the model is made.
    """
    if section.rank is None:
        return task
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise InputError(f"[lora] needs peft ({error}): pip install 'shardwise[lora]'") from error
    return task.with_(model=Adapted(task.model, section))


@dataclass(frozen=True)
class Adapted:
    """A model constructor: calls `model`, and puts adapters into the layers that `section` names."""

    model: Callable[[], nn.Module]
    section: LoraSection

    def __call__(self) -> nn.Module:
        import peft

        model, section = self.model(), self.section
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of settings that it corrects itself (a transposed weight)
            adapted = peft.inject_adapter_in_model(peft_config(section, model), model)
        return adapted


def _base(model: nn.Module) -> dict[str, Any]:
    """Returns the fields of peft's configuration that name the base model; {} if the model is from no local folder."""
    name = getattr(model, "name_or_path", None)
    if not name or not Path(name).is_dir():
        return {}
    kind = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return {"base_model_name_or_path": str(Path(name).resolve()), "auto_mapping": kind}


def peft_config(section: LoraSection, model: nn.Module) -> Any:
    """Returns the `peft.LoraConfig` for a model, with the section's target layers by their full paths.

    Raises `InputError` for a pattern that matches nothing, a rank above a layer's width, and a target layer that is
    inside a module of `section.whole`, which is trained without an adapter.
    """
    import peft

    assert section.rank is not None
    paths = target_paths(model, section.targets, section.rank)
    whole = whole_paths(model, section.whole)
    both = [path for path in paths if any(path == other or path.startswith(f"{other}.") for other in whole)]
    if both:
        raise InputError(f"lora.whole: '{both[0]}' is trained whole, and lora.targets puts an adapter beside it")
    return peft.LoraConfig(
        **_base(model),
        r=section.rank,
        lora_alpha=section.alpha if section.alpha is not None else section.rank,
        target_modules="|".join(map(re.escape, paths)),  # a regular expression that peft matches with full paths
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        use_dora=section.dora,
        modules_to_save=whole or None,
    )
