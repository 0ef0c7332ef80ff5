"""Record what a script computes between its batch and its loss, to compute it again on other values.

    batch  --->  [ model ]  --->  outputs  --->  the script's own operations  --->  loss
    source                        source                  the tape

Operations are remembered as the script called them, with their tensors, until the next batch. Inside the model only
those since the last module returned are kept, for a model that returns its loss.

What this does not do: follow numbers that left torch (`.item()`, NumPy). They stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.part.levels import Distributed

_KEEPS_STATISTICS = {"batch_norm", "instance_norm"}
_NUMBERS = {"item", "__int__", "__float__", "__index__"}


@dataclass
class Operation:
    """One call. Its tensors are those of the recording; `before` is what the first was, if it was written into."""

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    output: Any
    before: torch.Tensor | None
    inside: bool
    gradients: bool
    autocast: tuple[bool, torch.dtype]


class LossTape(TorchFunctionMode):
    """Records while active, and not `idle`. `inside`: the model's own forward runs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.kind = device.type
        self.inside = False
        self.paused = self.idle = False
        self.operations: list[Operation] = []
        self.numbers: list[tuple[float, torch.Tensor]] = []  # what left torch, and the tensor that it was

    def clear(self) -> None:
        """Forget what was recorded."""
        self.operations.clear()
        self.numbers.clear()
        self.inside = False

    def module_returned(self) -> None:
        """Forget the last operations recorded inside the model, since a module of it has returned their result."""
        while self.operations and self.operations[-1].inside:
            self.operations.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [] if self.paused or self.idle else tensors_in((args, kwargs))
        if not given:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        before = first.detach().clone() if first is not None and writes(name) else None
        stood = torch.get_rng_state()
        output = func(*args, **kwargs)
        if name in _NUMBERS and isinstance(output, int | float) and not self.inside:
            self.numbers.append((float(output), given[0]))
        elif (before is not None or tensors_in(output)) and torch.equal(stood, torch.get_rng_state()):
            autocast = (torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind))
            called = Operation(func, args, kwargs, output, before, self.inside, torch.is_grad_enabled(), autocast)
            self.operations.append(called)
        return output

    def again(self, wanted: list[Any], values: dict[int, torch.Tensor]) -> list[Any]:
        """Compute `wanted` again with other values for the tensors of these ids; the script's own tensors stay."""
        known = dict(values)

        def now(tree: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda tensor: known.get(id(tensor), tensor), tree)

        for one in self._needed(wanted, set(values)):
            if not any(id(tensor) in known for tensor in tensors_in((one.args, one.kwargs))):
                continue
            if getattr(one.function, "__name__", "") in _KEEPS_STATISTICS:
                raise RuntimeError("a norm outside of the model, which would keep statistics of other samples")
            if one.before is not None:
                known[id(one.args[0])] = known.get(id(one.args[0]), one.before).clone()
            if any(_is_freed(tensor) for tensor in tensors_in((now(one.args), now(one.kwargs)))):
                raise RuntimeError("a weight in them is not gathered any more")  # by a unit of zero=3
            enabled, dtype = one.autocast
            with torch.set_grad_enabled(one.gradients), torch.autocast(self.kind, dtype=dtype, enabled=enabled):
                output = one.function(*now(one.args), **now(one.kwargs))
            for old, new in zip(_leaves(one.output), _leaves(output), strict=True):
                if isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor):
                    raise RuntimeError("a gradient that a backward has left is not there again")
                if isinstance(old, torch.Tensor) and id(old) not in values:
                    known[id(old)] = new
        return [now(each) for each in wanted]

    def _needed(self, wanted: list[Any], sources: set[int]) -> list[Operation]:
        """The operations that `wanted` is made by, in order; none behind a source."""
        needed, found = {id(tensor) for tensor in tensors_in(wanted)}, []
        for one in reversed(self.operations):
            made = {id(tensor) for tensor in tensors_in(one.output)} - sources
            if one.before is not None:
                made.add(id(one.args[0]))
            if made & needed:
                found.append(one)
                needed |= {id(tensor) for tensor in tensors_in((one.args, one.kwargs))}
        return found[::-1]


class _Aliased(torch.autograd.Function):
    """The same tensor, which a script may write into: of a view, autograd would leave out the hooks on what it shows,
    by which units of zero=3 gather for their backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


ALIASED = "_AliasedBackward"


def aliased(output: Any) -> Any:
    """Returns a model's output, its tensors of the same memory and with nodes of their own in the graph."""

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or tensor.is_leaf:
            return tensor
        return tensor.view_as(tensor) if isinstance(tensor, Distributed | DTensor) else _Aliased.apply(tensor)

    return tree_map_only(torch.Tensor, alias, output)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a call's arguments, of its result, or of a batch."""
    found: list[torch.Tensor] = []
    if _plainly(tree, found):  # most calls; torch's tree functions would cost more than the operation
        return found
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]


_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def _plainly(tree: Any, found: list[torch.Tensor]) -> bool:
    """Add the tensors of nested tuples, lists and dicts; False where there is anything else that may hold some."""
    kind = type(tree)
    if kind in _ATOMS:
        return True
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        return True
    if kind is tuple or kind is list:
        return all(_plainly(leaf, found) for leaf in tree)
    return kind is dict and all(_plainly(leaf, found) for leaf in tree.values())


def _leaves(tree: Any) -> list[Any]:
    return tree_flatten(dict(tree) if isinstance(tree, Mapping) else tree)[0]


def _is_freed(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, Distributed | DTensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def writes(name: str) -> bool:
    """Whether an operation of this name may write into its first argument: add_, __setitem__, __iadd__."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
