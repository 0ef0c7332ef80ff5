"""Compile blocks whose weights or activations are sharded, as programs on this rank's plain shares.

The compiler does not support `Part`s. But their rules run plain operations on shares, with collectives in between, in
backward too. So the block is traced once on shares without values, forward and backward, and the trace is compiled.

    caller        Part x ──unwrapped── share ─┐                           ┌─ share ──wrapped── Part y
    compiled                                  └─ block on parts, traced ──┘
    in it         products of shares · all-reduce · other operations, fused

A trace holds decisions that Python made by anything but tensors' values. A block is traced again for other shapes,
arguments, modes (training, gradients), and plain attributes of its modules. Tensors that it stores in attributes (an
auxiliary loss) are results of the program. A block that cannot be traced (it reads values, counts calls, writes into
arguments, uses Python's random numbers) runs uncompiled, with a notice, since a trace fails alike on every rank. If
the compiler fails on a trace, which may happen on one rank alone, the plan is refused.

Collectives are in torch.distributed's functional form, whose order the compiler keeps. All ranks must run them in one
order, so each must compile the same program, and a block with uneven shares runs uncompiled.

A ring's messages between two ranks are inside opaque operations (`parallel/sequence/operators`).

What this does not do: compile under a dispatch mode (masks by global index, a ledger), under which a block runs
uncompiled; notice a change in objects outside the block that it reads.
"""

from __future__ import annotations

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
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardwise.device import autocast_states
from shardwise.errors import RefusedPlan, ShardwiseError, first_line
from shardwise.part import forget
from shardwise.part.plain_shares import APART, PartLayout, keeping, unwrapped, wrapped
from shardwise.python_seeds import python_kept, python_states

MOST = 16  # programs of one block; calls with further shapes run uncompiled
# torch 2.10 to 2.13: kernels that reduce rows and columns at once silently leave slices of gradients unwritten on a
# GPU if norms take scale and shift from one tensor, as in a DiT (pytorch/pytorch#193061)
OPTIONS = {"triton.mix_order_reduction": False}
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_Attribute = tuple[int, str]  # (index of the module in `block.modules()`, attribute)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compile_block(block: nn.Module, path: str, notices: list[str]) -> None:
    """Replaces the block's forward by a compiled one; called after `install`, so that weights read as `Part`s.

    path     of the block, for messages
    notices  a line is appended in the first step if the block cannot be traced, and so runs uncompiled
    The first call raises `RefusedPlan` if the compiler fails on the trace.
    """
    block.forward = _Compiled(block, path, notices)


def why_eager(block: nn.Module) -> str:
    """Returns why a block cannot be compiled, as far as its structure shows; "" if it may be."""
    for child in block.modules():
        cuts = child.__dict__.get("_tensor_cuts", ({}, None))[0].values()
        if any(cut is not None and len(set(cut.owners.counts)) > 1 for cut in cuts):
            return "its weights are cut unevenly, so that ranks could come to different orders of collectives"
    return ""


@dataclass
class _Program:
    """One compiled program, and how the caller's results are made from its plain tensors.

    trace   the block on shares, which the compiler traces;  run  the compiled function
    traced  of the last trace, [tree of (output, attributes' values), its leaves with `_TENSOR` for tensors, a layout or
            None for each leaf, the attributes in which the block left tensors]
    named   objects that operations of the program refer to by number
    ran     whether it has run once
    raised  what the block raised while it was traced; None if nothing
    """

    trace: Callable[..., tuple[torch.Tensor, ...]]
    run: Callable[..., tuple[torch.Tensor, ...]] = field(init=False)
    traced: list[Any] = field(default_factory=list)
    named: list[Any] = field(default_factory=list)
    ran: bool = False
    raised: BaseException | None = None


class _Compiled:
    """The forward of a block: runs the program compiled for this kind of call."""

    def __init__(self, block: nn.Module, path: str, notices: list[str]):
        self.block, self.path, self.notices = block, path, notices
        self.forward = block.forward
        self.programs: dict[tuple, _Program] = {}  # `_key` of a call -> its program
        self.left: set[_Attribute] = set()  # attributes in which the block leaves a tensor
        self.eager: set[bool] = set()  # values of `training` for which a trace failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's results, by a compiled program if it can be traced."""
        # a mode (masks by global index, a ledger) must see every operation, which a program would hide
        if self.block.training in self.eager or is_in_torch_dispatch_mode():
            return self.forward(*args, **kwargs)
        try:
            return self._compiled(args, kwargs)
        except _NotWritten as failure:
            self.eager |= {self.block.training} if failure.lasting else set()
            if not any(str(failure) in notice for notice in self.notices):  # only for the first of alike blocks
                self.notices.append(f"compile leaves '{self.path}' and blocks like it as they are: {failure}")
            return self.forward(*args, **kwargs)

    def _compiled(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the results of the program for this kind of call; raises `_NotWritten` if it cannot be traced."""
        leaves, spec = tree_flatten(_opened((args, kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        layouts = [PartLayout.of(leaves[place]) for place in places]
        # with uneven shares ranks would compile different programs, perhaps with collectives in different orders
        if any(layout is not None and layout.uneven_weights for layout in layouts):
            return self.forward(*args, **kwargs)
        state = [tensor for _, _, tensor in _state_of(self.block)]
        inputs = [unwrapped(leaves[place])[0] for place in places]
        key = self._key(leaves, dict(zip(places, layouts, strict=True)), spec, [*inputs, *state])
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= MOST:  # shapes change from call to call
                return self.forward(*args, **kwargs)
            program = self.programs[key] = self._program(leaves, places, layouts, spec)
        try:
            with keeping(program.named):  # at every run, since the compiler decides when it traces
                results = program.run(*inputs, *state)
        except ShardwiseError:
            raise
        except Exception as error:
            if program.ran:  # the program was compiled, and fails for another reason
                raise
            from torch._dynamo.exc import BackendCompilerFailed  # a slow import, which the compiler has done by now

            # tracing succeeded, but compiling failed
            if program.raised is None and isinstance(error, BackendCompilerFailed):
                raise self._refused(error) from error
            raise _NotWritten(_cause(program.raised or error)) from None
        program.ran = True
        out_spec, out, out_layouts, left = program.traced
        tensors = iter(results)
        out_leaves = [
            wrapped(next(tensors), layout) if leaf is _TENSOR else leaf
            for leaf, layout in zip(out, out_layouts, strict=True)
        ]
        output, values = tree_unflatten(out_leaves, out_spec)
        for (place, name), value in zip(left, values, strict=True):
            _tables(self.block)[place][name] = value
        return output

    def _key(self, leaves: list, layouts: dict[int, PartLayout | None], spec: TreeSpec, tensors: list) -> tuple:
        """Returns the key of a call's program, which has all that its trace depends on.

        leaves   of the call's arguments, in the tree `spec`;  layouts  index of a tensor leaf -> how it is cut, or None
        tensors  the program's inputs, which are the call's plain tensors and then the block's parameters and buffers
        Raises `_NotWritten` for an argument that is neither a tensor nor a plain value.
        """
        others: list[Any] = []
        for place, leaf in enumerate(leaves):
            layout = layouts.get(place)
            if place in layouts:
                others.append(layout and layout.key)
            elif isinstance(leaf, _PLAIN):
                others.append((type(leaf), leaf))  # the type too: True == 1 == 1.0
            else:
                reason = f"it is given a {type(leaf).__name__}, no tensor or plain value"
                raise _NotWritten(f"{reason} (caches of transformers: config.use_cache=False)", lasting=False)
        described = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        mode = (torch.is_grad_enabled(), autocast_states())
        # tensors that the call before left in attributes are not read, so they do not matter
        attributes = _attributes(self.block) | dict.fromkeys(self._holding(), _TENSOR)
        return spec, tuple(others), described, mode, tuple(attributes.items())

    def _refused(self, error: BaseException) -> RefusedPlan:
        """Returns the refusal of a plan because the compiler failed with `error` on this block's trace."""
        return RefusedPlan(
            f"compile=true: the compiler fails on '{self.path}', written down as a program on shares: {_cause(error)}; "
            "use compile=false, or a plan that cuts neither weights nor positions"
        )

    def _program(self, leaves: list, places: list[int], layouts: list, spec: TreeSpec) -> _Program:
        """Returns a program for calls like this one, which is compiled when it first runs.

        leaves   of the call's arguments, in the tree `spec`
        places   indices of the leaves that are tensors;  layouts  for each of these, how it is cut, or None
        """
        self._check_structure()
        # other arguments are constants of the program, and so part of its key
        template = [None if place in places else leaf for place, leaf in enumerate(leaves)]

        def trace(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # parameters and buffers are inputs too, since as constants they would keep the first call's values
            inputs, state = tensors[: len(places)], tensors[len(places) :]
            filled = list(template)
            for place, layout, tensor in zip(places, layouts, inputs, strict=True):
                filled[place] = wrapped(tensor, layout)
            args, kwargs = _closed(tree_unflatten(filled, spec))
            forget()  # the cache of the last gathered tensor, which must not pass into or out of the trace
            try:
                with _placed(self.block, state):
                    output, left = self._traced(args, kwargs)
            except Exception as error:  # the compiler's own error may not contain this one
                program.raised = error
                raise
            finally:
                forget()
            flat, out_spec = tree_flatten((output, list(left.values())))
            pairs = [unwrapped(leaf) if isinstance(leaf, torch.Tensor) else (leaf, None) for leaf in flat]
            # the program returns plain tensors; `traced` has how to make the caller's results from these
            marked = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
            program.traced = [out_spec, marked, [layout for _, layout in pairs], list(left)]
            values = tuple(value for value, _ in pairs if isinstance(value, torch.Tensor))
            # the graph is traced with functional tensors; calls before that only infer shapes
            return values if any(isinstance(t, FunctionalTensor) for t in tensors) else _shapes_of(values)

        program = _Program(trace)
        program.run = torch.compile(_own_code(program), fullgraph=True, dynamic=False, options=OPTIONS)
        return program

    def _traced(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[_Attribute, torch.Tensor]]:
        """Runs the block; returns (output, {attribute: tensor that the block left in it}). Attributes are restored.

        Raises `TypeError` if the block changes anything else, or other attributes in each run.
        """
        for _ in range(2):
            with _as_it_was(self.block):
                for place, name in self._holding():
                    _tables(self.block)[place][name] = _Unread()
                before, watch = _attributes(self.block), _Watch(self.block, (args, kwargs))
                output = self.forward(*args, **kwargs)
                left = _changed(self.block, before)
                watch.check()
            if left.keys() <= self.left:
                return output, left
            self.left |= left.keys()  # runs again with `_Unread` there, to see whether the block reads them
        raise TypeError("it leaves tensors in other attributes each time")

    def _holding(self) -> list[_Attribute]:
        """Returns those attributes of `left` that hold a tensor now."""
        tables = _tables(self.block)
        return [key for key in self.left if isinstance(tables[key[0]].get(key[1]), torch.Tensor)]

    def _check_structure(self) -> None:
        """Raises `_NotWritten` if a module inside the block has hooks, or another forward than its class."""
        # not for the block itself, whose hooks run outside of the program
        for name, child in self.block.named_modules():
            hooked = [hooks for hooks in _HOOKS if getattr(child, hooks)] if child is not self.block else []
            if child is not self.block and ("forward" in vars(child) or hooked):
                raise _NotWritten(f"'{name}' inside it has hooks or another forward than its class")


_TENSOR = object()  # stands for a tensor among a program's results, and in keys


@dataclass
class _Opened:
    """An argument of a class in `APART` (a `PairMask`) as its tensors, inputs of the program, and the `bare` object."""

    bare: Any
    tensors: list[torch.Tensor]


register_pytree_node(_Opened, lambda x: (x.tensors, x.bare), lambda tensors, bare: _Opened(bare, list(tensors)))


def _opened(arguments: Any) -> Any:
    """Returns a nest of arguments with an `_Opened` in place of each object of a class in `APART`."""
    return tree_map(lambda leaf: _Opened(*APART[type(leaf)](leaf)) if type(leaf) in APART else leaf, arguments)


def _closed(arguments: Any) -> Any:
    """Returns a nest of arguments with the original objects in place of `_Opened`s; the inverse of `_opened`."""
    return tree_map(
        lambda leaf: leaf.bare.filled(leaf.tensors) if isinstance(leaf, _Opened) else leaf, arguments,
        is_leaf=lambda leaf: isinstance(leaf, _Opened),
    )  # fmt: skip


def _shapes_of(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the results detached from the graph, for calls in which the compiler only infers shapes.

    The compiler keeps them, and with their graph the process groups of every `Part` would stay alive.
    """
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in values)


def _own_code(program: _Program) -> Callable:
    """Returns the program's trace as a function with its own code object, by which the compiler counts programs.

    The function holds the program weakly, since the compiler keeps functions for the life of the process, and with them
    it would keep the block and the process groups of an engine that is gone.
    """
    owner = weakref.ref(program)

    def body(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        program = owner()
        assert program is not None, "the block that this program belongs to is gone"
        return program.trace(*tensors)

    traced = torch.compiler.allow_in_graph(body)

    def entry(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return traced(*tensors)

    return types.FunctionType(entry.__code__.replace(), entry.__globals__, "program", None, entry.__closure__)


def _state_of(block: nn.Module) -> Iterator[tuple[dict, str, torch.Tensor]]:
    """Yields (the module's dict that holds it, its name there, tensor) for every parameter and buffer of a block."""
    for child in block.modules():
        for table in (child._parameters, child._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    yield table, leaf, tensor


@contextmanager
def _placed(block: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Context in which the block has these tensors, in the order of `_state_of`, as its parameters and buffers."""
    kept = list(_state_of(block))
    try:
        for (table, leaf, _), tensor in zip(kept, tensors, strict=True):
            table[leaf] = tensor
        yield
    finally:
        for table, leaf, tensor in kept:
            table[leaf] = tensor


def _tables(block: nn.Module) -> list[dict[str, Any]]:
    """Returns the `__dict__` of each of the block's modules, in the order of `Module.modules`."""
    return [vars(child) for child in block.modules()]


def _attributes(block: nn.Module) -> dict[_Attribute, Any]:
    """Returns attribute -> its value if that is plain, else (id, length of a list, dict or set, else 0)."""
    return {
        (place, name): value
        if isinstance(value, _PLAIN)
        else (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for place, table in enumerate(_tables(block))
        for name, value in table.items()
    }


def _changed(block: nn.Module, before: dict[_Attribute, Any]) -> dict[_Attribute, torch.Tensor]:
    """Returns attribute -> tensor for the attributes that changed since `before`, a result of `_attributes`.

    Raises `TypeError` if one changed to anything but a tensor.
    """
    now, tables = _attributes(block), _tables(block)
    names = [key for key in now | before if key not in now or key not in before or now[key] != before[key]]
    left = {(place, name): tables[place].get(name) for place, name in names}
    if not all(isinstance(value, torch.Tensor) for value in left.values()):
        raise TypeError("it changes attributes of its modules, and not to tensors alone")
    return left


@contextmanager
def _as_it_was(block: nn.Module) -> Iterator[None]:
    """Context that restores the block's attributes, lists, dicts and sets in them, and Python's random generators."""
    put_back, kept = python_kept(), [(table, dict(table)) for table in _tables(block)]
    contents = [(v, v.copy()) for _, copy in kept for v in copy.values() if type(v) in (list, dict, set)]
    try:
        yield
    finally:
        put_back()
        for table, before in [*kept, *contents]:
            table.clear()
            table.extend(before) if isinstance(table, list) else table.update(before)


class _Unread(torch.Tensor):
    """Stands for a tensor that the call before left in an attribute; any use but `isinstance` raises `TypeError`."""

    @staticmethod
    def __new__(cls) -> _Unread:
        return torch.Tensor._make_wrapper_subclass(cls, ())

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Raises `TypeError`, since the block reads what a program would not have."""
        raise TypeError("it reads what the call before left in an attribute")

    __torch_dispatch__ = __torch_function__


class _Watch:
    """Records what a block must not change, since a program would not repeat the change; `check` compares.

    These are its arguments, its parameters, and the state of Python's and numpy's random generators.
    """

    def __init__(self, block: nn.Module, arguments: Any):
        self.tensors = [("an argument", t, t._version) for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        self.tensors += [
            ("a parameter", t, t._version)
            for child in block.modules()
            for t in child._parameters.values()
            if t is not None
        ]
        self.drawn = python_states()

    def check(self) -> None:
        """Raises `TypeError` if any of it has changed."""
        for what, tensor, version in self.tensors:
            if tensor._version != version:
                raise TypeError(f"it writes into {what} of shape {tuple(tensor.shape)}")
        if python_states() != self.drawn:
            raise TypeError("it draws from Python's random generator, or numpy's")


class _NotWritten(Exception):
    """Raised if a block cannot be traced; its text is the reason. `lasting`: whether that holds for all calls."""

    def __init__(self, why: str, lasting: bool = True):
        super().__init__(why)
        self.lasting = lasting


def _cause(error: BaseException) -> str:
    """Returns the first line of the innermost cause of an error, which the compiler wraps in its own errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
