"""Compile blocks whose weights or activations are cut: as a program on this rank's plain shares.

Activations are parts, which the compiler does not know. But what their rules do is a program of plain operations on
shares, with collectives between them, and its backward is one too. The block is run once on shares without values
and written down, forward and backward; the compiler is given that.

    caller        Part x ──unwrapped── share ─┐                           ┌─ share ──wrapped── Part y
    compiled                                  └─ block on parts, traced ──┘
    in it         products of shares · all-reduce · what lies between them, fused

Tracing stands in for Python: what a block decides by anything but its tensors' values is decided once. It is traced
anew for other shapes, other arguments, another mode (training, gradients), and other plain attributes of its modules.
Refused are blocks that read values, change attributes, buffers or arguments, or draw from Python's generators.

Collectives are those of torch.distributed's functional form, which the compiler keeps in their order; since ranks
must come to them in one order, each must compile the same program: a block whose shares are uneven runs as it is.

Messages between two ranks, of which a program knows none, stand in it as operations of our own (`parallel/sequence`).

What this does not do: compile under a dispatch mode (masks by global index, a ledger), where a block runs as it is;
see what a block reads from objects that are not its own.
"""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map, tree_unflatten

from shardwise.device import autocast_states
from shardwise.errors import RefusedPlan, ShardwiseError, first_line
from shardwise.part import forget
from shardwise.part.boundary import APART, PartLayout, unwrapped, wrapped
from shardwise.part.named import keeping

MOST = 16  # programs of one block; further shapes run as they are
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compile_block(block: nn.Module, path: str) -> None:
    """Make the block's forward run compiled. Weights must read as parts (`install`)."""
    block.forward = _Compiled(block, path)


def why_eager(block: nn.Module) -> str:
    """Why a block cannot be compiled, known from its structure alone, or nothing."""
    for child in block.modules():
        cuts = child.__dict__.get("_tensor_cuts", ({}, None))[0].values()
        if any(cut is not None and len(set(cut.owners.counts)) > 1 for cut in cuts):
            return "its weights are cut unevenly, so that ranks could come to different orders of collectives"
    return ""


@dataclass
class _Program:
    """One compiled program, and what its results are."""

    trace: Callable[..., tuple[torch.Tensor, ...]]  # the block on shares, as the compiler meets it
    run: Callable[..., tuple[torch.Tensor, ...]] = field(init=False)
    traced: list[Any] = field(default_factory=list)  # the last trace: (spec, leaves, layouts)
    named: list[Any] = field(default_factory=list)  # what it names by number
    ran: bool = False
    raised: BaseException | None = None  # by the block, while it was traced


class _Compiled:
    """The forward of a block, compiled for each kind of call."""

    def __init__(self, block: nn.Module, path: str):
        self.block, self.path = block, path
        self.forward = block.forward
        self.programs: dict[tuple, _Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_in_torch_dispatch_mode():
            return self.forward(*args, **kwargs)
        leaves, spec = tree_flatten(_opened((args, kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        layouts = [PartLayout.of(leaves[place]) for place in places]
        if any(layout is not None and layout.uneven_weights for layout in layouts):
            return self.forward(*args, **kwargs)
        held = [tensor for _, _, tensor in _held(self.block)]
        given = [unwrapped(leaves[place])[0] for place in places]
        key = self._key(leaves, dict(zip(places, layouts, strict=True)), spec, [*given, *held])
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= MOST:
                return self.forward(*args, **kwargs)
            program = self.programs[key] = self._program(leaves, places, layouts, spec)
        try:
            with keeping(program.named):  # each time: whether it is written down again is the compiler's choice
                results = program.run(*given, *held)
        except ShardwiseError:
            raise
        except Exception as error:
            if program.ran:
                raise
            raise self._refused(program.raised or error) from error
        program.ran = True
        out_spec, out, out_layouts = program.traced
        found = iter(results)
        made = [
            wrapped(next(found), layout) if leaf is _TENSOR else leaf
            for leaf, layout in zip(out, out_layouts, strict=True)
        ]
        return tree_unflatten(made, out_spec)

    def _key(self, leaves: list, layouts: dict[int, PartLayout | None], spec: TreeSpec, tensors: list) -> tuple:
        """What a program is traced for: `tensors` as they are handed to it, and what else may decide."""
        others: list[Any] = []
        for place, leaf in enumerate(leaves):
            layout = layouts.get(place)
            if place in layouts:
                others.append(layout and layout.key)
            elif isinstance(leaf, _PLAIN):
                others.append((type(leaf), leaf))
            else:
                given = f"it is given a {type(leaf).__name__}, no tensor or plain value"
                raise self._refused(TypeError(f"{given} (caches of transformers: config.use_cache=False)"))
        described = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        mode = (torch.is_grad_enabled(), autocast_states())
        return spec, tuple(others), described, mode, _attributes(self.block)

    def _refused(self, error: BaseException) -> RefusedPlan:
        first = error
        while first.__cause__ is not None:
            first = first.__cause__
        told = first_line(first)
        return RefusedPlan(
            f"compile=true: '{self.path}' cannot be written down as a program on shares: {told}; use compile=false, or "
            "a plan that cuts neither weights nor positions"
        )

    def _program(self, leaves: list, places: list[int], layouts: list, spec: TreeSpec) -> _Program:
        self._check_structure()
        template = [None if place in places else leaf for place, leaf in enumerate(leaves)]

        def trace(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given, state = tensors[: len(places)], tensors[len(places) :]
            filled = list(template)
            for place, layout, tensor in zip(places, layouts, given, strict=True):
                filled[place] = wrapped(tensor, layout)
            watch = _Watch(self.block, [leaf for leaf in filled if isinstance(leaf, torch.Tensor)], state)
            args, kwargs = _closed(tree_unflatten(filled, spec))
            forget()
            try:
                with _placed(self.block, state):
                    output = self.forward(*args, **kwargs)
                watch.check()
            except Exception as error:
                program.raised = error
                raise
            finally:
                forget()
            flat, out_spec = tree_flatten(output)
            pairs = [unwrapped(leaf) if isinstance(leaf, torch.Tensor) else (leaf, None) for leaf in flat]
            marked = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
            program.traced = [out_spec, marked, [layout for _, layout in pairs]]
            values = tuple(value for value, _ in pairs if isinstance(value, torch.Tensor))
            return values if any(isinstance(t, FunctionalTensor) for t in tensors) else _shapes_of(values)

        program = _Program(trace)
        program.run = torch.compile(_own_code(program), fullgraph=True, dynamic=False)
        return program

    def _check_structure(self) -> None:
        for name, child in self.block.named_modules():
            hooked = [hooks for hooks in _HOOKS if getattr(child, hooks)] if child is not self.block else []
            if child is not self.block and ("forward" in vars(child) or hooked):
                raise self._refused(TypeError(f"'{name}' inside it has hooks or another forward than its class"))


_TENSOR = object()


@dataclass
class _Opened:
    """An argument that a program is given as its tensors."""

    bare: Any
    tensors: list[torch.Tensor]


register_pytree_node(_Opened, lambda one: (one.tensors, one.bare), lambda tensors, bare: _Opened(bare, list(tensors)))


def _opened(arguments: Any) -> Any:
    return tree_map(lambda leaf: _Opened(*APART[type(leaf)](leaf)) if type(leaf) in APART else leaf, arguments)


def _closed(arguments: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.bare.filled(leaf.tensors) if isinstance(leaf, _Opened) else leaf, arguments,
        is_leaf=lambda leaf: isinstance(leaf, _Opened),
    )  # fmt: skip


def _shapes_of(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Results as the compiler first asks for them, for their shapes alone.

    It keeps them, and they would keep the graph behind them, with the process groups of every part in it.
    """
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in values)


def _own_code(program: _Program) -> Callable:
    """A function with a code object of its own: the compiler counts what it made by code object.

    The compiler keeps what it has met as long as the process lives, so what it meets must not hold the block, and with
    it the process groups of an engine that is gone.
    """
    known = weakref.ref(program)

    def body(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        there = known()
        assert there is not None, "the block that this program belongs to is gone"
        return there.trace(*tensors)

    traced = torch.compiler.allow_in_graph(body)

    def entry(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return traced(*tensors)

    return types.FunctionType(entry.__code__.replace(), entry.__globals__, "program", None, entry.__closure__)


def _held(block: nn.Module) -> Iterator[tuple[dict, str, torch.Tensor]]:
    """(table, name, tensor) of every parameter and buffer."""
    for child in block.modules():
        for table in (child._parameters, child._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    yield table, leaf, tensor


@contextmanager
def _placed(block: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """The block with these tensors in the place of its parameters and buffers."""
    kept = list(_held(block))
    try:
        for (table, leaf, _), tensor in zip(kept, tensors, strict=True):
            table[leaf] = tensor
        yield
    finally:
        for table, leaf, tensor in kept:
            table[leaf] = tensor


def _attributes(block: nn.Module) -> tuple:
    """The plain attributes of the block's modules, and which objects the others are."""
    return tuple(
        value if isinstance(value, _PLAIN) else (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for child in block.modules()
        for value in vars(child).values()
    )


class _Watch:
    """What a block must leave as it was."""

    def __init__(self, block: nn.Module, given: list[torch.Tensor], state: tuple[torch.Tensor, ...]):
        self.block, self.attributes = block, _attributes(block)
        self.tensors = [("an argument", t, t._version) for t in given]
        self.tensors += [("a parameter or buffer", t, t._version) for t in state]
        self.drawn = random.getstate()

    def check(self) -> None:
        """Raise `TypeError` for what was changed."""
        if _attributes(self.block) != self.attributes:
            raise TypeError("it changes attributes of its modules")
        for what, tensor, version in self.tensors:
            if tensor._version != version:
                raise TypeError(f"it writes into {what} of shape {tuple(tensor.shape)}")
        if random.getstate() != self.drawn:
            raise TypeError("it draws from Python's random generator")
