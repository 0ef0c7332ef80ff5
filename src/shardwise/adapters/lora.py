"""`with_lora(task, section)`: the task whose model's layers have low-rank adapters, which alone are trained.

    y = W x + (alpha / rank) B A x          W frozen, A drawn, B zero: at the start the model is what it was

peft writes its own layers into the model (`inject_adapter_in_model`), under the model's own names: no class around it,
so that plans, heads and exports see the model that they know. Values of W are those of the task: a folder's, or drawn.

What this does not do: adapters other than LoRA, rsLoRA and DoRA; a task's own `peft.get_peft_model` makes them.
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
    """Returns the task with adapters in its model; as it is where no rank is set.

    Raises `InputError` without peft, at once; `peft_config`'s errors come when the model is made.
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
    """A constructor whose model has adapters beside the layers that `[lora]` names."""

    model: Callable[[], nn.Module]
    section: LoraSection

    def __call__(self) -> nn.Module:
        import peft

        model, section = self.model(), self.section
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft: what it sets by itself (a transposed weight)
            adapted = peft.inject_adapter_in_model(peft_config(section, model), model)
        return adapted


def _base(model: nn.Module) -> dict[str, Any]:
    """Returns the fields of peft's configuration by which its Auto classes load the base; {} without a folder."""
    name = getattr(model, "name_or_path", None)
    if not name or not Path(name).is_dir():
        return {}
    kind = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return {"base_model_name_or_path": str(Path(name).resolve()), "auto_mapping": kind}


def peft_config(section: LoraSection, model: nn.Module) -> Any:
    """Returns peft's configuration of the section for a model, its layers by their whole paths.

    Raises `InputError` for patterns that match nothing, a rank above a layer's width, a layer that `whole` trains too.
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
        target_modules="|".join(map(re.escape, paths)),  # peft matches it against whole paths
        lora_dropout=section.dropout,
        use_rslora=section.rslora,
        use_dora=section.dora,
        modules_to_save=whole or None,
    )
