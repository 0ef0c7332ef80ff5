"""Record what a script computes between its batch and its loss, to compute it again on other values.

    batch  --->  [ model ]  --->  outputs  --->  the script's own operations  --->  loss
    source                        source                  the tape

Operations are remembered as the script called them, with their tensors, until the next batch. Inside the model only
those since the last module returned are kept, for a model that returns its loss.

Of numbers that may count samples it is remembered where they come from (`stated`): the same operations on more of them
are given more. What is drawn, or made by a size alone, is remembered for that too.

What this does not do: follow numbers that left torch (`.item()`, NumPy). They stay what they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from shardwise.device import CPU, generator_state
from shardwise.engine.check import bar_of
from shardwise.part.levels import Distributed
from shardwise.scripts.stated import NOTHING, Stated, asks, stated

Rule = Callable[["Operation", tuple[tuple, dict[str, Any]], bool], Any]  # (operation, its call now, given others)
SELECTS = {"__getitem__", "select", "narrow", "index_select"}  # some rows, by number
_KEEPS_STATISTICS = {"batch_norm", "instance_norm"}
_NUMBERS = {"item", "__int__", "__float__", "__index__"}
_READS = _NUMBERS | {"__bool__", "tolist", "numpy", "__array__", "equal", "allclose"}


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
    stated: Stated  # of numbers that may count samples; NOTHING where there are none
    drawn: bool = False


class LossTape(TorchFunctionMode):
    """Records while active, and not `idle`. `inside`: the model's own forward runs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.kind = device, device.type
        self.inside = False
        self.paused = self.idle = False
        self.operations: list[Operation] = []
        self.numbers: list[tuple[float, torch.Tensor]] = []  # what left torch, and the tensor that it was
        self.samples = 0  # of the batch, on this rank
        self.asked = False  # the script may know how many there are
        self.read = False  # values of tensors, by which it may take some samples and leave others
        self.made: dict[
            Any, dict[float, str]
        ] = {}  # by a node of autograd, where the numbers come from that it was given

    def rounding(self, dtype: torch.dtype) -> float:
        """Returns what rounding may change in a loss of this dtype, as a part of it."""
        narrow = any(one.autocast[0] for one in self.operations)
        return bar_of(self.operations[0].autocast[1] if narrow and dtype == torch.float32 else dtype)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.operations.clear()
        self.numbers.clear()
        self.made.clear()
        self.inside = self.read = False

    def module_returned(self) -> None:
        """Forget the last operations recorded inside the model, since a module of it has returned their result."""
        while self.operations and self.operations[-1].inside:
            self.operations.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused or self.idle:
            return func(*args, **kwargs)
        given, name = tensors_in((args, kwargs)), getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        before = first.detach().clone() if first is not None and writes(name) else None
        stood = self._generators()
        output = func(*args, **kwargs)
        drawn = not all(map(torch.equal, stood, self._generators()))
        if name in _READS and not (self.read or self.inside):
            self.read = asks()
        if name in _NUMBERS and isinstance(output, int | float) and not self.inside:
            self.numbers.append((float(output), given[0]))
        elif (before is not None and not drawn) or (before is None and tensors_in(output)):
            autocast = (torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind))
            where = self._where((args, kwargs), output, every=name in SELECTS)
            called = Operation(func, args, kwargs, output, before, self.inside, torch.is_grad_enabled(), autocast,
                               where, drawn)  # fmt: skip
            self.operations.append(called)
        if not (self.asked or self.inside) and given and self._may_tell(output):
            self.asked = asks()
        return output

    def _generators(self) -> list[torch.Tensor]:
        """The states of torch's generators, which are no plain tensors inside a transform of torch.func."""
        own = generator_state(self.device)
        return [torch.get_rng_state(), *([] if own is None else [own])]

    def _where(self, call: Any, output: Any, *, every: bool) -> Stated:
        """Where the numbers of a call come from that may count samples; or every one of its numbers."""
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        every |= node is not None and output.numel() == 1  # of what a loss is divided by or multiplied with
        all_numbers = numbers_in(call)
        numbers = [number for number in all_numbers if every or self.may_count(number)]
        found = stated() if numbers and not self.inside else None
        if found is None:
            return NOTHING
        if not (found.counts or self.asked):
            found = replace(found, written=found.written | set(map(abs, numbers)))  # it cannot know how many there are
        if node is not None:
            self.made[node] = {abs(float(number)): found.of(number) for number in numbers}
        return found

    def may_count(self, number: float) -> bool:
        """Whether a number is one of samples, or a multiple; or one by which a mean over them is taken."""
        held = abs(number) if abs(number) >= 1 else 1 / abs(number) if number else 0.0
        return (
            math.isfinite(held)
            and self.samples > 0
            and held > 1
            and abs(held / self.samples - round(held / self.samples)) < 1e-6 < held
        )

    def _may_tell(self, output: Any) -> bool:
        """Whether something that an operation gives, other than a tensor, may tell how many samples there are."""
        if isinstance(output, torch.Tensor | bool) or output is None:
            return False
        if isinstance(output, int | float):
            return self.may_count(output)
        if isinstance(output, tuple | list):
            return len(output) % max(1, self.samples) == 0 or any(map(self._may_tell, output))
        return not isinstance(output, torch.dtype | torch.device | torch.layout)

    def again(self, wanted: list[Any], values: dict[int, torch.Tensor], rule: Rule | None = None) -> list[Any]:
        """Compute `wanted` again with other values for the tensors of these ids; the script's own tensors stay.

        rule    gives what an operation that is needed gives; by itself, one with other tensors is called, as it was
        """
        known = dict(values)

        def now(tree: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda tensor: known.get(id(tensor), tensor), tree)

        for one in self.needed(wanted, set(values)):
            touched = any(id(tensor) in known for tensor in tensors_in((one.args, one.kwargs)))
            if (rule is None and (one.drawn or not touched)) or (one.before is not None and not touched):
                continue
            if touched and getattr(one.function, "__name__", "") in _KEEPS_STATISTICS:
                raise RuntimeError("a norm outside of the model, which would keep statistics of other samples")
            if one.before is not None:
                known[id(one.args[0])] = known.get(id(one.args[0]), one.before).clone()
            call = (now(one.args), now(one.kwargs))
            if any(_is_freed(tensor) for tensor in tensors_in(call)):
                raise RuntimeError("a weight in them is not gathered any more")  # by a unit of zero=3
            enabled, dtype = one.autocast
            with torch.set_grad_enabled(one.gradients), torch.autocast(self.kind, dtype=dtype, enabled=enabled):
                output = one.function(*call[0], **call[1]) if rule is None else rule(one, call, touched)
            for old, new in zip(_leaves(one.output), _leaves(output), strict=True):
                if isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor):
                    raise RuntimeError("a gradient that a backward has left is not there again")
                if isinstance(old, torch.Tensor) and id(old) not in values and new is not old:
                    known[id(old)] = new
        return [now(each) for each in wanted]

    def on_host(
        self, wanted: list[Any], values: dict[int, torch.Tensor]
    ) -> tuple[LossTape, list[Any], dict[int, torch.Tensor]]:
        """Returns the same on copies of the CPU: a tape, what is wanted of it, and the values by their ids there.

        An index that is out of range ends a process on an accelerator, where the CPU raises.
        """
        copies: dict[int, torch.Tensor] = {}

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in copies:
                    copies[id(leaf)] = leaf.detach().cpu().requires_grad_(leaf.requires_grad)
                return copies[id(leaf)]
            return CPU if isinstance(leaf, torch.device | str) and str(leaf).partition(":")[0] == self.kind else leaf

        tape = LossTape(CPU)
        tape.samples, tape.asked = self.samples, self.asked
        for one in self.needed(wanted, set(values)):
            call = {name: tree_map(copied, getattr(one, name)) for name in ("args", "kwargs", "output", "before")}
            tape.operations.append(replace(one, **call))
        asked = tree_map(copied, wanted)
        return tape, asked, {id(copies[key]): value.cpu() for key, value in values.items() if key in copies}

    def needed(self, wanted: list[Any], sources: set[int]) -> list[Operation]:
        """Returns the operations that `wanted` is made by, in order; none behind a source."""
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


def numbers_in(tree: Any) -> list[float]:
    """The numbers of a call's arguments, those of slices and ranges too."""
    found: list[float] = []

    def note(number: Any) -> Any:
        found.append(number)
        return number

    changed_numbers(tree, note)
    return found


def changed_numbers(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments with other numbers; those of slices and ranges too."""
    kind = type(tree)
    if kind is int or kind is float:
        return change(tree)
    if kind is tuple or kind is list or kind is torch.Size:
        found = [changed_numbers(one, change) for one in tree]
        return found if kind is list else tuple(found)
    if kind is dict:
        return {key: changed_numbers(one, change) for key, one in tree.items()}
    if kind is slice or kind is range:
        return kind(*(changed_numbers(one, change) for one in (tree.start, tree.stop, tree.step)))
    return tree


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
