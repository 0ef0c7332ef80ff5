"""Compile blocks whose weights or activations are cut: as a program on this rank's plain shares.

Activations are parts, which the compiler does not know. But what their rules do is a program of plain operations on
shares, with collectives between them, and its backward is one too. The block is run once on shares without values
and written down, forward and backward; the compiler is given that.

    caller        Part x ──unwrapped── share ─┐                           ┌─ share ──wrapped── Part y
    compiled                                  └─ block on parts, traced ──┘
    in it         products of shares · all-reduce · what lies between them, fused

Tracing stands in for Python: what a block decides by anything but its tensors' values is decided once. It is traced
anew for other shapes, other arguments, another mode (training, gradients), and other plain attributes of its modules.
Tensors that it leaves in attributes (an auxiliary loss) are results of the program. A block that cannot be written
down so (it reads values, counts calls, writes into arguments, draws from Python's generators) runs as it is, which is
told: a trace fails alike on every rank. What the compiler makes of a trace may fail on one alone, and is refused.

Collectives are those of torch.distributed's functional form, which the compiler keeps in their order; since ranks
must come to them in one order, each must compile the same program: a block whose shares are uneven runs as it is.

Messages between two ranks, of which a program knows none, stand in it as operations of our own (`parallel/sequence`).

What this does not do: compile under a dispatch mode (masks by global index, a ledger), where a block runs as it is;
see what a block reads from objects that are not its own.
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

MOST = 16  # programs of one block; further shapes run as they are
# torch 2.10 to 2.13: kernels that reduce rows and columns at once leave slices of gradients unwritten on a GPU, without
# a word, where norms take scale and shift from one tensor, as in a DiT (pytorch/pytorch#193061)
OPTIONS = {"triton.mix_order_reduction": False}
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_Attribute = tuple[int, str]  # (which of the block's modules, name)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compile_block(block: nn.Module, path: str, notices: list[str]) -> None:
    """Make the block's forward run compiled. Weights must read as parts (`install`).

    notices  gets a line in the first step where the block turns out to run as it is
    The first call raises `RefusedPlan` where the compiler fails on what was written down.
    """
    block.forward = _Compiled(block, path, notices)


def why_eager(block: nn.Module) -> str:
    """Returns why a block cannot be compiled, as far as its structure tells, or ""."""
    for child in block.modules():
        cuts = child.__dict__.get("_tensor_cuts", ({}, None))[0].values()
        if any(cut is not None and len(set(cut.owners.counts)) > 1 for cut in cuts):
            return "its weights are cut unevenly, so that ranks could come to different orders of collectives"
    return ""


@dataclass
class _Program:
    """One compiled program, and how its results are put together."""

    trace: Callable[..., tuple[torch.Tensor, ...]]  # the block on shares, as the compiler meets it
    run: Callable[..., tuple[torch.Tensor, ...]] = field(init=False)
    traced: list[Any] = field(default_factory=list)  # the last trace: (spec, leaves, layouts, left attributes)
    named: list[Any] = field(default_factory=list)  # what it names by number
    ran: bool = False
    raised: BaseException | None = None  # by the block, while it was traced


class _Compiled:
    """The forward of a block: runs the program compiled for this kind of call."""

    def __init__(self, block: nn.Module, path: str, notices: list[str]):
        self.block, self.path, self.notices = block, path, notices
        self.forward = block.forward
        self.programs: dict[tuple, _Program] = {}  # by `_key` of the call
        self.left: set[_Attribute] = set()  # in which the block leaves a tensor
        self.eager: set[bool] = set()  # modes (training or not) in which a trace failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a mode (masks by global index, a ledger) must see every operation, which a compiled program does not run
        if self.block.training in self.eager or is_in_torch_dispatch_mode():
            return self.forward(*args, **kwargs)
        try:
            return self._compiled(args, kwargs)
        except _NotWritten as failure:
            self.eager |= {self.block.training} if failure.lasting else set()
            if not any(str(failure) in notice for notice in self.notices):  # of alike blocks the first
                self.notices.append(f"compile leaves '{self.path}' and blocks like it as they are: {failure}")
            return self.forward(*args, **kwargs)

    def _compiled(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the results of the program for this kind of call. Raises `_NotWritten` where there can be none."""
        leaves, spec = tree_flatten(_opened((args, kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        layouts = [PartLayout.of(leaves[place]) for place in places]
        # uneven shares: ranks would compile programs of their own, and could come to collectives in other orders
        if any(layout is not None and layout.uneven_weights for layout in layouts):
            return self.forward(*args, **kwargs)
        state = [tensor for _, _, tensor in _state_of(self.block)]
        inputs = [unwrapped(leaves[place])[0] for place in places]
        key = self._key(leaves, dict(zip(places, layouts, strict=True)), spec, [*inputs, *state])
        program = self.programs.get(key)
        if program is None:
            if len(self.programs) >= MOST:  # shapes that change from call to call run as they are
                return self.forward(*args, **kwargs)
            program = self.programs[key] = self._program(leaves, places, layouts, spec)
        try:
            with keeping(program.named):  # each time: whether it is written down again is the compiler's choice
                results = program.run(*inputs, *state)
        except ShardwiseError:
            raise
        except Exception as error:
            if program.ran:  # what was compiled and ran before fails for a reason of its own
                raise
            from torch._dynamo.exc import BackendCompilerFailed  # heavy, and loaded by now

            # the block itself was written down, and the compiler failed on that
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
        """Returns the key of a call's program: all that its trace depends on. Raises `_NotWritten` for other arguments.

        tensors  as they are handed to the program: the call's, then the block's own
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
        # what the call before left in an attribute is not read: any tensor there is as good as another
        attributes = _attributes(self.block) | dict.fromkeys(self._holding(), _TENSOR)
        return spec, tuple(others), described, mode, tuple(attributes.items())

    def _refused(self, error: BaseException) -> RefusedPlan:
        """Returns the refusal of a block on whose trace the compiler failed."""
        return RefusedPlan(
            f"compile=true: the compiler fails on '{self.path}', written down as a program on shares: {_cause(error)}; "
            "use compile=false, or a plan that cuts neither weights nor positions"
        )

    def _program(self, leaves: list, places: list[int], layouts: list, spec: TreeSpec) -> _Program:
        """Returns a program for calls like this one, compiled when it runs first.

        leaves   of the call's arguments, in the tree `spec`
        places   which of them are tensors; layouts: of each of these, how it is cut
        """
        self._check_structure()
        # arguments other than tensors are constants of the program, which is why its key has them
        template = [None if place in places else leaf for place, leaf in enumerate(leaves)]

        def trace(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # parameters and buffers are inputs too: as constants they would be the values of the first call for good
            inputs, state = tensors[: len(places)], tensors[len(places) :]
            filled = list(template)
            for place, layout, tensor in zip(places, layouts, inputs, strict=True):
                filled[place] = wrapped(tensor, layout)
            args, kwargs = _closed(tree_unflatten(filled, spec))
            forget()  # the tensor gathered last: one of outside the trace has no place in it, nor one of it outside
            try:
                with _placed(self.block, state):
                    output, left = self._traced(args, kwargs)
            except Exception as error:  # kept: what the compiler raises in its place may not name it
                program.raised = error
                raise
            finally:
                forget()
            flat, out_spec = tree_flatten((output, list(left.values())))
            pairs = [unwrapped(leaf) if isinstance(leaf, torch.Tensor) else (leaf, None) for leaf in flat]
            # a program returns plain tensors alone: how to make the caller's parts and other results of them stays here
            marked = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
            program.traced = [out_spec, marked, [layout for _, layout in pairs], list(left)]
            values = tuple(value for value, _ in pairs if isinstance(value, torch.Tensor))
            # the graph is traced with functional tensors; before that, the compiler asks for shapes alone
            return values if any(isinstance(t, FunctionalTensor) for t in tensors) else _shapes_of(values)

        program = _Program(trace)
        program.run = torch.compile(_own_code(program), fullgraph=True, dynamic=False, options=OPTIONS)
        return program

    def _traced(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, dict[_Attribute, torch.Tensor]]:
        """Returns (output, {attribute: tensor left in it}), attributes put back; `TypeError` if others each time."""
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
            self.left |= left.keys()  # once more: whether it reads what the call before left there
        raise TypeError("it leaves tensors in other attributes each time")

    def _holding(self) -> list[_Attribute]:
        """Returns those of the attributes in which the block leaves a tensor that have one now."""
        tables = _tables(self.block)
        return [key for key in self.left if isinstance(tables[key[0]].get(key[1]), torch.Tensor)]

    def _check_structure(self) -> None:
        """Raises `_NotWritten` where a module inside the block has hooks, or another forward than its class."""
        # of the block itself hooks lie around the program, and its forward is the one that is compiled
        for name, child in self.block.named_modules():
            hooked = [hooks for hooks in _HOOKS if getattr(child, hooks)] if child is not self.block else []
            # a program is written from the class's forward alone, and would leave both out
            if child is not self.block and ("forward" in vars(child) or hooked):
                raise _NotWritten(f"'{name}' inside it has hooks or another forward than its class")


_TENSOR = object()


@dataclass
class _Opened:
    """An argument of a class in `APART`, taken apart: `tensors` are the program's inputs, `bare` is the rest."""

    bare: Any
    tensors: list[torch.Tensor]


register_pytree_node(_Opened, lambda x: (x.tensors, x.bare), lambda tensors, bare: _Opened(bare, list(tensors)))


def _opened(arguments: Any) -> Any:
    return tree_map(lambda leaf: _Opened(*APART[type(leaf)](leaf)) if type(leaf) in APART else leaf, arguments)


def _closed(arguments: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.bare.filled(leaf.tensors) if isinstance(leaf, _Opened) else leaf, arguments,
        is_leaf=lambda leaf: isinstance(leaf, _Opened),
    )  # fmt: skip


def _shapes_of(values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns detached copies of the results, enough for the compiler, which at first reads shapes alone."""
    # it keeps them, and they would keep the graph behind them, with the process groups of every part in it
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in values)


def _own_code(program: _Program) -> Callable:
    """Returns the program's trace as a function with a code object of its own: the compiler counts programs by those.

    The compiler keeps what it has met as long as the process lives, so what it meets must not hold the block, and with
    it the process groups of an engine that is gone.
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
    """Yields (table, name, tensor) of every parameter and buffer: the table is the module's own dict."""
    for child in block.modules():
        for table in (child._parameters, child._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    yield table, leaf, tensor


@contextmanager
def _placed(block: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Context: the block has these tensors in the place of its parameters and buffers."""
    kept = list(_state_of(block))
    try:
        for (table, leaf, _), tensor in zip(kept, tensors, strict=True):
            table[leaf] = tensor
        yield
    finally:
        for table, leaf, tensor in kept:
            table[leaf] = tensor


def _tables(block: nn.Module) -> list[dict[str, Any]]:
    """Returns the attributes of each of the block's modules, by name, in the order of `Module.modules`."""
    return [vars(child) for child in block.modules()]


def _attributes(block: nn.Module) -> dict[_Attribute, Any]:
    """Returns the plain attributes of the block's modules, and the ids (and lengths) of the other objects."""
    return {
        (place, name): value
        if isinstance(value, _PLAIN)
        else (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for place, table in enumerate(_tables(block))
        for name, value in table.items()
    }


def _changed(block: nn.Module, before: dict[_Attribute, Any]) -> dict[_Attribute, torch.Tensor]:
    """Returns the tensors in attributes that are not as `before`. Raises `TypeError` for another kind of change."""
    now, tables = _attributes(block), _tables(block)
    names = [key for key in now | before if key not in now or key not in before or now[key] != before[key]]
    left = {(place, name): tables[place].get(name) for place, name in names}
    if not all(isinstance(value, torch.Tensor) for value in left.values()):
        raise TypeError("it changes attributes of its modules, and not to tensors alone")
    return left


@contextmanager
def _as_it_was(block: nn.Module) -> Iterator[None]:
    """Context: afterwards attributes, the lists, dicts and sets in them, and Python's generators are as before."""
    # tables are copied, and contents too: the block may write into either
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
    """Stands where a call of the block left a tensor: any use of it raises `TypeError`, but the question what it is."""

    @staticmethod
    def __new__(cls) -> _Unread:
        return torch.Tensor._make_wrapper_subclass(cls, ())

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise TypeError("it reads what the call before left in an attribute")

    __torch_dispatch__ = __torch_function__


class _Watch:
    """Notes what a block must leave as it was, since a program would not repeat the change; `check` compares."""

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
        """Raise `TypeError` for what was changed."""
        for what, tensor, version in self.tensors:
            if tensor._version != version:
                raise TypeError(f"it writes into {what} of shape {tuple(tensor.shape)}")
        if python_states() != self.drawn:
            raise TypeError("it draws from Python's random generator, or numpy's")


class _NotWritten(Exception):
    """A block cannot be written down as a program: the message says why, `lasting` whether for all calls."""

    def __init__(self, why: str, lasting: bool = True):
        super().__init__(why)
        self.lasting = lasting


def _cause(error: BaseException) -> str:
    """Returns the first line of what was raised first: the compiler wraps it in errors of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
