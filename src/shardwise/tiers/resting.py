"""`Resting`: a tensor whose values are coded elsewhere (narrow.py); who reads it gets them, who writes it codes anew.

    between steps   optimizer.state[w]["exp_avg"] ── is Resting ──> bytes in a tier: any operation decodes what it reads
    in a step       the same object is an ordinary tensor, on memory of its own

The object stays the one that an optimizer holds: `lay` and `wake` exchange what it is (`torch.utils.swap_tensors`), so
that groups, state and gradients need not be told.

What this does not do: views of it that are written to. A view is of a decoded copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from shardwise.tiers.narrow import HALVES, Codec, Draw


@dataclass
class Rest:
    """Values of a tensor, coded in `memory` (bytes), wherever that is.

    like     a tensor without values that says shape, stride, dtype
    device   where the values are taken to
    """

    memory: torch.Tensor
    like: torch.Tensor
    device: torch.device
    codec: Codec

    def take(self) -> torch.Tensor:
        """Returns the values."""
        out = torch.empty(self.like.numel(), dtype=self.like.dtype, device=self.device)
        self.codec.take(self.memory.to(self.device), out)
        return _in_order(out, self.like)

    def put(self, values: torch.Tensor, draw: Draw | None = None) -> None:
        """Let the values of a tensor rest here. draw: None, rounded to the nearest."""
        if self.memory.device == values.device:
            self.codec.put(values.detach().reshape(-1), self.memory, draw)
            return
        coded = torch.empty(self.memory.numel(), dtype=torch.uint8, device=values.device)
        self.codec.put(values.detach().reshape(-1), coded, draw)
        self.memory.copy_(coded)


@dataclass
class SplitRest:
    """Masters as the halves that `weight`, the module's, lacks. A part of them: from the `start`-th element on."""

    memory: torch.Tensor
    like: torch.Tensor
    weight: torch.Tensor
    start: int = 0

    def part(self, start: int, like: torch.Tensor) -> SplitRest:
        """Returns the rest of `like`'s elements, which lie as they do from `start` on."""
        return SplitRest(self.memory, like, self.weight, start)

    def take(self) -> torch.Tensor:
        """Returns the values."""
        weights, count = _lying(self.weight), self.like.numel()
        out = torch.empty(count, dtype=torch.float32, device=weights.device)
        mine = weights[self.start : self.start + count]
        HALVES.take(self.memory.to(weights.device), weights.numel(), mine, out, self.start)
        return out.as_strided(self.like.shape, self.like.stride())

    def put(self, values: torch.Tensor, draw: Draw | None = None) -> None:
        """Let the values rest here, and round them into the weights; `draw` is not used."""
        weights, count = _lying(self.weight), self.like.numel()
        masters = torch.empty_strided(self.like.shape, self.like.stride(), dtype=torch.float32, device=weights.device)
        masters = _lying(masters.copy_(values.detach()))
        if count < weights.numel():  # halves are packed together: the others' come along
            whole = SplitRest(self.memory, weights, self.weight).take()
            whole[self.start : self.start + count] = masters
            masters = whole
        weights.copy_(masters)
        coded = torch.empty(HALVES.size(masters.numel()), dtype=torch.uint8, device=weights.device)
        HALVES.put(masters, coded)
        self.memory[: coded.numel()].copy_(coded)


class Resting(torch.Tensor):
    """A tensor whose values lie in `rest`."""

    rest: Rest | SplitRest
    awake: torch.Tensor  # what it is in a step: the same object's other content
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, rest: Rest | SplitRest) -> Resting:
        """rest: where the values lie."""
        device = rest.weight.device if isinstance(rest, SplitRest) else rest.device
        like = rest.like
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )

    def __init__(self, rest: Rest | SplitRest):
        self.rest = rest

    def __repr__(self, **_: Any) -> str:
        return repr(self.detach())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Returns the values: a copy of a state is nobody's to update."""
        memo[id(self)] = values = self.detach()
        return values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        values: dict[int, torch.Tensor] = {}

        def taken(resting: Resting) -> torch.Tensor:
            if id(resting) not in values:
                values[id(resting)] = resting.rest.take()
            return values[id(resting)]

        everything = (args, kwargs or {})
        plain_args, plain_kwargs = tree_map_only(Resting, taken, everything)
        result = func(*plain_args, **plain_kwargs)
        for resting in _written(func, args, kwargs or {}):
            resting.rest.put(values[id(resting)])
        owners = {id(values[id(t)]): t for t in tree_iter(everything) if isinstance(t, Resting)}
        return tree_map_only(torch.Tensor, lambda out: owners.get(id(out), out), result)


def _written(func: Any, args: tuple, kwargs: dict) -> list[Resting]:
    """Returns the tensors at rest among an operation's arguments that it writes into."""
    names = [row.name for row in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    changed = [
        given[row.name]
        for row in func._schema.arguments
        if row.name in given and row.alias_info is not None and row.alias_info.is_write
    ]
    return [tensor for tensor in tree_iter(changed) if isinstance(tensor, Resting)]


def lay(tensor: torch.Tensor, rest: Rest | SplitRest) -> None:
    """Let a tensor rest: the object reads as the values in `rest`, and its own memory is let go of."""
    if isinstance(tensor, Resting):
        tensor.rest = rest
        return
    gradient, tensor.grad = tensor.grad, None
    other = Resting(rest)
    torch.utils.swap_tensors(tensor, other)  # from here on `other` is what the tensor was
    other.data = torch.empty(0, dtype=other.dtype, device=other.device)
    assert isinstance(tensor, Resting)
    tensor.awake, tensor.grad = other, gradient


def wake(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Let a tensor at rest be an ordinary one on this memory, as it was before."""
    assert isinstance(tensor, Resting)
    other, gradient = tensor.awake, tensor.grad
    tensor.grad = None
    other.data = memory
    torch.utils.swap_tensors(tensor, other)
    tensor.grad = gradient


def _in_order(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns flat values in the shape of `like`, and in memory as that lies."""
    if like.is_contiguous():
        return values.view(like.shape)
    out = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device)
    return out.copy_(values.view(like.shape))


def _lying(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements as they lie in memory, flat."""
    return tensor.as_strided((tensor.numel(),), (1,))
