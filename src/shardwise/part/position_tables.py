"""Hold tables of positions (rotary angles and other functions of `arange(S)`) in shares, without messages.

Inside a module whose batch is cut, `torch.arange` and `torch.linspace` of as many numbers as a cut dim has return a
part with the owners of that dim. What is computed of such parts and of small plain tensors is a part too, and keeps
the recipe of its computation. An operation that needs it whole computes it again on every rank instead of gathering
it, so nothing is ever sent for a table.

    arange(S)        0 1 | 2 3 | ...      a share on each rank
    * frequencies    (S/p, D/2)           and the operations that led there
    queries * cos    a share beside a share
    at[:, None] - at (S, S)               positions by positions: made whole, as without cuts

What this does not do: cut tables that are buffers, which are whole on every rank, as weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from shardwise.part.levels import Distributed
from shardwise.trace.elementwise import is_random
from shardwise.trace.leaves import replaced, tensors_in

MOST = 1 << 12  # elements of a plain tensor that a table may be made of and keep
_MAKES = (torch.arange, torch.linspace)


@dataclass(frozen=True, eq=False)
class TableRecipe:
    """How to compute a table again: an operation and its arguments, in which tables are recipes themselves."""

    func: Callable
    args: tuple
    kwargs: dict
    plain_inputs: tuple[tuple[torch.Tensor, int], ...] = ()  # (tensor, its version when the table was made)

    def made(self, made_before: dict[int, Any]) -> Any:
        """Returns the whole table; None if a plain input was written since, or has no memory any more.

        made_before  id of a recipe -> its table (or None), a cache that this call fills; pass {}
        """
        # recipes share inputs (cos and sin of the same angles), each of which is made once
        if id(self) not in made_before:
            # a plain input that changed since, or is gone, cannot be used again
            changed = any(x._version != version or not _has_memory(x) for x, version in self.plain_inputs)
            args, kwargs = replaced(TableRecipe, lambda recipe: recipe.made(made_before), (self.args, self.kwargs))
            inside = tensors_in((self.args, self.kwargs), TableRecipe)
            # one input that cannot be made leaves nothing to make of it
            broken = changed or any(made_before[id(recipe)] is None for recipe in inside)
            made_before[id(self)] = None if broken else self.func(*args, **kwargs)
        return made_before[id(self)]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its memory, which ZeRO-3 frees for weights that are not in use."""
    return tensor.untyped_storage().nbytes() > 0 or not tensor.numel()


def whole_table(part: Distributed) -> torch.Tensor | None:
    """Returns a table computed whole on this rank; None if the tensor is no table, or it or an input was written."""
    if part.recipe is None or not is_table(part):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():  # ranges are not cut again
        return part.recipe[0].made({})


def is_table(part: Distributed) -> bool:
    """Whether a tensor is a table that was not written since, so that each rank can compute it whole by itself."""
    return part.recipe is not None and part._version == part.recipe[1]


def note_table(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed], output: Any) -> None:
    """Marks `output`, the result of `func`, as a table if it was computed of tables and small plain tensors alone.

    inputs  the distributed tensors among `args` and `kwargs`
    """
    if not isinstance(output, Distributed) or func._schema.is_mutable or not all(map(is_table, inputs)):
        return
    # computed again, it would hold other random numbers
    if is_random(func):
        return
    plain = [tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, Distributed)]
    # a weight changes and has gradients; a large tensor would be kept alive; inference tensors count no versions
    if any(tensor.requires_grad or tensor.numel() > MOST or tensor.is_inference() for tensor in plain):
        return
    args, kwargs = replaced(Distributed, lambda tensor: tensor.recipe[0], (args, kwargs))
    _name(output, TableRecipe(func, args, kwargs, tuple((tensor, tensor._version) for tensor in plain)))


def _name(part: Any, recipe: TableRecipe) -> None:
    if not part.is_inference():
        part.recipe, part.may_gather = (recipe, part._version), True


class CutRanges(TorchFunctionMode):
    """Mode in which `arange` or `linspace` of as many numbers as a cut dim has returns a part cut like that dim.

    parts  length of a cut dim -> a part with a cut dim of that length
    share  (whole range, part) -> the range as a part with that part's owners; None: it stays whole
    """

    def __init__(self, parts: dict[int, Any], share: Callable[[torch.Tensor, Any], Any]):
        super().__init__()
        self.parts, self.share = parts, share

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        # a tensor that needs gradients is no constant, and `out=` writes into one that somebody holds
        if func not in _MAKES or made.numel() not in self.parts or made.requires_grad or "out" in kwargs:
            return made
        part = self.share(made, self.parts[made.numel()])
        if part is None:
            return made
        _name(part, TableRecipe(func, args, {**kwargs, "dtype": made.dtype, "device": made.device}))
        return part


def run_under(module: nn.Module, mode_of: Callable[[tuple, dict], TorchFunctionMode]) -> Callable[[], None]:
    """Makes every forward of the module run under `mode_of(its arguments)`; returns the undo function."""
    entered: list[TorchFunctionMode] = []

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
        entered.append(mode_of(args, kwargs))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def cut_ranges(module: nn.Module, share: Callable[[torch.Tensor, Any], Any]) -> Callable[[], None]:
    """Makes ranges in forwards of `module` parts like those among its arguments; returns the undo function.

    share  as of `CutRanges`
    """

    def mode_of(args: tuple, kwargs: dict) -> CutRanges:
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Distributed) and leaf.deals]
        return CutRanges({leaf.owners.size: leaf for leaf in leaves}, share)

    return run_under(module, mode_of)
