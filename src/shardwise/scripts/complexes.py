"""Complex weights that the plan holds as pairs of real numbers (part/pairs), as a script's own code sees them: complex.

p.shape, p.dtype, p.is_complex()    of the complex weight
p.abs().sum()                       of complex numbers; its gradient comes to the pairs
p.mul_(c), p.data = x               written into the pairs, which lie on the same memory
p.requires_grad_(), id(p)           the parameter itself
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.part.pairs import as_complex, as_pairs
from shardwise.trace.leaves import replaced

_ITSELF = frozenset((
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "backward", "data_ptr",
    "untyped_storage", "__delete__",
))  # fmt: skip


def of_itself(name: str, attribute: str) -> bool:
    """Whether a function of torch is meant for the parameter, whatever its numbers are."""
    return name in _ITSELF or (name == "__set__" and attribute != "data") or attribute in ("grad", "requires_grad")


def show_complex(model: nn.Module, pairs: Collection[str], asked: Callable[[], bool]) -> None:
    """Let whole weights that are held as pairs answer as complex ones, while the script's own code asks."""
    for name, param in model.named_parameters():
        if name in pairs and not isinstance(param, DTensor) and not hasattr(type(param), "answers_as_complex"):
            param.__class__ = _shown(type(param), asked)


def _shown(base: type, asked: Callable[[], bool]) -> type:
    class Shown(base):
        answers_as_complex = staticmethod(asked)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = getattr(func, "__name__", "")
            attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name[:5] in _GETS else ""
            if not asked():
                return super().__torch_function__(func, types, args, kwargs)
            if (name, attribute) == ("__set__", "grad") and args[1] is not None:
                return super().__torch_function__(func, types, (args[0], as_pairs(args[1])), kwargs)
            if of_itself(name, attribute):
                found = super().__torch_function__(func, types, args, kwargs)
                return found if attribute != "grad" or found is None else as_complex(found)
            if (name, attribute) == ("__set__", "data"):
                return super().__torch_function__(func, types, (args[0], as_pairs(args[1].detach())), kwargs)

            def numbers(param: torch.Tensor) -> torch.Tensor:
                return super(Shown, cls).__torch_function__(torch.view_as_complex, types, (param,), {})

            return func(*replaced(cls, numbers, args), **replaced(cls, numbers, kwargs))

    return Shown


_GETS = ("__get", "__set")
