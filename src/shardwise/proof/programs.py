"""Record what each block does in one forward, its program, so that `shrink` can tell which blocks are equal.

A program lists the operations that ran inside a block: the arguments of each, where its tensors came from (the block's
input, a parameter by its name in the block, an earlier operation), shapes and numbers. It also has the autograd nodes,
which show a custom backward, and the values of buffers. Names and classes do not count: two blocks of one class may do
different things, and blocks of two classes the same.

What this does not do: see what depends on values, or on Python state that changes nothing in this forward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwise.digest import digest
from shardwise.trace.deferred import Built
from shardwise.trace.fake import Fake
from shardwise.trace.module_state import ModuleState

Program = tuple[Hashable, ...]


def programs_of(
    built: Built, paths: Iterable[str], inputs: Callable[[Any], tuple[tuple, dict]], batch: Any
) -> dict[str, Program]:
    """Returns path -> program of each block, from one forward on fake tensors; () for a block that did not run.

    inputs  batch -> (args, kwargs) of the module

    The module is left as it was. Raises what the forward raises on tensors without values.
    """
    module = built.module
    state, drawn = ModuleState(module), random.getstate()  # a forward may use Python's generator (layer dropout)
    recorder = _Recorder({path: _Block(built, path) for path in paths})
    handles = recorder.watch(module)
    try:
        with torch.random.fork_rng(devices=[]), Fake() as mode, torch.enable_grad():
            fake = tree_map_only(torch.Tensor, mode.from_tensor, batch)
            with recorder:
                # entered after the batch was made fake, whose ops are none of a block
                args, kwargs = inputs(fake)
                module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        random.setstate(drawn)
        state.restore()
    return {path: block.program() for path, block in recorder.blocks.items()}


class _Block:
    """Recorder of one block's program; the hooks of `_Recorder` call its methods."""

    def __init__(self, built: Built, path: str):
        module = built.module.get_submodule(path)
        self.names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self.parameters = tuple(
            (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()
        )
        # by value, since two blocks with other masks do different things by the same operations
        self.buffers = tuple((name, digest(built.value(f"{path}.{name}"))) for name, _ in module.named_buffers())
        self.lines: list[Hashable] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # held so that no id is reused
        self.before: set[Any] = set()  # nodes of autograd from before the block

    def program(self) -> Program:
        """Returns (parameters, buffers, then a line for each call, operation and return); () if the block never ran."""
        return (self.parameters, self.buffers, *self.lines) if self.lines else ()

    def enter(self, arguments: Any) -> None:
        """Adds the line of a call of the block."""
        self.before = {leaf.grad_fn for leaf in _tensors(arguments) if leaf.grad_fn is not None}
        self.lines.append(("call", *(self.described(leaf) for leaf in tree_flatten(arguments)[0])))

    def leave(self, output: Any) -> None:
        """Adds the lines of a return of the block and of the autograd nodes that the call made."""
        self.lines.append(("return", *(self.described(leaf) for leaf in tree_flatten(output)[0])))
        self.lines.append(("backward", *_nodes([leaf.grad_fn for leaf in _tensors(output)], self.before)))

    def note(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Adds the line of an operation."""
        arguments = tuple(self.described(leaf) for leaf in tree_flatten((args, kwargs))[0])
        made = tuple(self.described(leaf) for leaf in tree_flatten(output)[0])
        self.lines.append((str(func), arguments, made))

    def described(self, leaf: Any) -> Hashable:
        """Returns a tensor's name, or (number, shape, dtype) of an unnamed one; the `repr` of anything else."""
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        if id(leaf) in self.names:
            return self.names[id(leaf)]
        if id(leaf) not in self.numbers:
            self.numbers[id(leaf)] = len(self.numbers)
            self.alive.append(leaf)
        return self.numbers[id(leaf)], tuple(leaf.shape), str(leaf.dtype)


class _Recorder(TorchDispatchMode):
    """Dispatch mode that adds each operation to the programs of the blocks that are running."""

    def __init__(self, blocks: dict[str, _Block]):
        super().__init__()
        self.blocks = blocks
        self.running: list[_Block] = []

    def watch(self, module: nn.Module) -> list[Any]:
        """Registers hooks at the blocks' calls and returns their handles."""
        handles = []
        for path, block in self.blocks.items():
            child = module.get_submodule(path)
            handles.append(child.register_forward_pre_hook(self._enter(block), with_kwargs=True))
            handles.append(child.register_forward_hook(self._leave(block)))
        return handles

    def _enter(self, block: _Block) -> Callable:
        """Returns the hook before a block's forward."""

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self.running.append(block)
            block.enter((args, kwargs))

        return enter

    def _leave(self, block: _Block) -> Callable:
        """Returns the hook after a block's forward."""

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            block.leave(output)
            self.running.remove(block)

        return leave

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for block in self.running:  # each of nested blocks, since an inner one's operations are the outer one's too
            block.note(func, args, kwargs or {}, output)
        return output


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _nodes(roots: list[Any], before: set[Any]) -> list[str]:
    """Returns names of the autograd nodes from `roots` back to those in `before`, each once, depth first."""
    names: list[str] = []
    seen = set(before)
    stack = [root for root in reversed(roots) if root is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        stack += [child for child, _ in reversed(node.next_functions) if child is not None]
    return names
