"""What a block does, written down from one forward, so that `shrink` can tell unlike blocks apart.

A program is the list of operations that ran inside a block: what each was called with, where its tensors came from
(the block's input, a parameter by its name in the block, an operation before), shapes, numbers; the nodes that autograd
made for it, so that a backward of the block's own shows; and the values of its buffers. Names and classes say nothing:
two blocks of one class may do different things, and blocks of two classes the same.

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
    """Returns the program of each block, from one forward on shapes alone; that of a block that did not run is empty.

    The module is left as it was. Raises what the forward raises on tensors without values.
    """
    module = built.module
    state, drawn = ModuleState(module), random.getstate()  # a forward may draw from Python's (layers that it drops)
    recorder = _Recorder({path: _Block(built, path) for path in paths})
    handles = recorder.watch(module)
    try:
        with torch.random.fork_rng(devices=[]), Fake() as mode, torch.enable_grad():
            fake = tree_map_only(torch.Tensor, mode.from_tensor, batch)
            with recorder:
                # only what runs inside the recorder belongs to a block
                args, kwargs = inputs(fake)
                module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        random.setstate(drawn)
        state.restore()
    return {path: block.program() for path, block in recorder.blocks.items()}


class _Block:
    """The program of one block, while its operations run."""

    def __init__(self, built: Built, path: str):
        module = built.module.get_submodule(path)
        self.names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self.parameters = tuple(
            (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()
        )
        # their values: two blocks with unlike masks do unlike things by the same operations
        self.buffers = tuple((name, digest(built.value(f"{path}.{name}"))) for name, _ in module.named_buffers())
        self.lines: list[Hashable] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []  # or another tensor would get its id
        self.before: set[Any] = set()  # nodes of autograd from before the block

    def program(self) -> Program:
        """Returns the block's program: parameters, buffers, each call, operation and return; () if never called."""
        return (self.parameters, self.buffers, *self.lines) if self.lines else ()

    def enter(self, arguments: Any) -> None:
        """Add the line of a call of the block."""
        self.before = {leaf.grad_fn for leaf in _tensors(arguments) if leaf.grad_fn is not None}
        self.lines.append(("call", *(self.described(leaf) for leaf in tree_flatten(arguments)[0])))

    def leave(self, output: Any) -> None:
        """Add the lines of a return of the block, and of the autograd nodes that the call has made."""
        self.lines.append(("return", *(self.described(leaf) for leaf in tree_flatten(output)[0])))
        self.lines.append(("backward", *_nodes([leaf.grad_fn for leaf in _tensors(output)], self.before)))

    def note(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Add the line of an operation."""
        arguments = tuple(self.described(leaf) for leaf in tree_flatten((args, kwargs))[0])
        made = tuple(self.described(leaf) for leaf in tree_flatten(output)[0])
        self.lines.append((str(func), arguments, made))

    def described(self, leaf: Any) -> Hashable:
        """Returns a tensor's name or number, shape and dtype; the `repr` of anything else."""
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
        """Register hooks at the blocks' calls; returns their handles."""
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
        for block in self.running:  # of nested blocks, each: an inner one's operations are the outer one's too
            block.note(func, args, kwargs or {}, output)
        return output


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _nodes(roots: list[Any], before: set[Any]) -> list[str]:
    """Returns the names of autograd's nodes from the roots down to those in `before`, each where it is first met."""
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
