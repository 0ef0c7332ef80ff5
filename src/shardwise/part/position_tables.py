"""Hold tables of positions (rotary angles and other functions of `arange(S)`) in shares, without messages.

Inside a module whose batch is cut, `torch.arange` and `torch.linspace` of as many numbers as a cut dim has give a part,
dealt as that dim is. What is computed of such parts and of small tensors beside them is a part too, and remembers how
it was made: whatever needs it whole makes it again in place of gathering it, so nothing is ever sent for a table.

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
    """The making of a table: an operation, its arguments (tables as recipes), the plain tensors and their versions."""

    func: Callable
    args: tuple
    kwargs: dict
    plain_inputs: tuple[tuple[torch.Tensor, int], ...] = ()  # (tensor, its version when the table was made)

    def made(self, made_before: dict[int, Any]) -> Any:
        """Returns the table, whole; None where a tensor that it was made of has changed since, or lost its memory.

        made_before  id of a recipe -> what it made: filled here, empty at first
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
    """Whether a tensor has its memory: ZeRO-3 takes it from weights that are not in use."""
    return tensor.untyped_storage().nbytes() > 0 or not tensor.numel()


def whole_table(part: Distributed) -> torch.Tensor | None:
    """Returns a table made whole on this rank; None where the tensor is no table, or was written into."""
    if part.recipe is None or not is_table(part):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():  # ranges are not cut again
        return part.recipe[0].made({})


def is_table(part: Distributed) -> bool:
    """Whether a tensor can be made whole without the other ranks: neither it nor its base was written into."""
    return part.recipe is not None and part._version == part.recipe[1]


def note_table(func: Any, args: tuple, kwargs: dict, inputs: list[Distributed], output: Any) -> None:
    """Marks an operation's result as a table where it was made of tables and small plain tensors alone."""
    if not isinstance(output, Distributed) or func._schema.is_mutable or not all(map(is_table, inputs)):
        return
    # made again it would be drawn again
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
    """While entered, a range of as many numbers as one of these cut dims has is made as a part dealt like it.

    parts  length of a cut dim -> a tensor cut along one
    share  (whole range, part) -> its share beside that part; None: it stays whole
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
    """Makes ranges inside the module parts, dealt as the parts that it is called with; returns the undo function."""

    def mode_of(args: tuple, kwargs: dict) -> CutRanges:
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Distributed) and leaf.deals]
        return CutRanges({leaf.owners.size: leaf for leaf in leaves}, share)

    return run_under(module, mode_of)
