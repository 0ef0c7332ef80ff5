"""`Resting`: a tensor whose values are stored coded (narrow.py); reads decode them, in-place writes code them again.

    between steps   optimizer.state[w]["exp_avg"] ── is Resting ──> coded bytes in a tier, decoded by any operation
    in a step       the same object is an ordinary tensor, with memory of its own

The optimizer keeps the same tensor object. `lay` and `wake` exchange its content (`torch.utils.swap_tensors`), so that
groups, state and gradients stay valid.

What this does not do: support writes through views, since a view is of a decoded copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from shardwise.tiers.narrow import HALVES, Codec, Draw


@dataclass
class Rest:
    """The coded values of a tensor.

    memory   coded bytes (uint8), on any device
    like     a meta tensor with the shape, stride and dtype
    device   where values are decoded
    codec    by which they are coded
    """

    memory: torch.Tensor
    like: torch.Tensor
    device: torch.device
    codec: Codec

    def take(self) -> torch.Tensor:
        """Returns the decoded tensor."""
        out = torch.empty(self.like.numel(), dtype=self.like.dtype, device=self.device)
        self.codec.take(self.memory.to(self.device), out)
        return _in_order(out, self.like)

    def put(self, values: torch.Tensor, draw: Draw | None = None) -> None:
        """Codes `values` into `memory`. draw: random bits for rounding; None: to the nearest."""
        if self.memory.device == values.device:
            self.codec.put(values.detach().reshape(-1), self.memory, draw)
            return
        coded = torch.empty(self.memory.numel(), dtype=torch.uint8, device=values.device)
        self.codec.put(values.detach().reshape(-1), coded, draw)
        self.memory.copy_(coded)


@dataclass
class SplitRest:
    """A float32 master stored as its bf16 weight and the bits that the weight lacks (`narrow.Halves`).

    memory   those bits (uint8);  weight  the module's, bf16
    like     a meta tensor like the master, or like a view of it that begins at the `start`-th element in memory
    """

    memory: torch.Tensor
    like: torch.Tensor
    weight: torch.Tensor
    start: int = 0

    def part(self, start: int, like: torch.Tensor) -> SplitRest:
        """Returns the `SplitRest` of a view of the master, like `like`, whose elements begin at `start` in memory."""
        return SplitRest(self.memory, like, self.weight, start)

    def take(self) -> torch.Tensor:
        """Returns the decoded master, or view of it, in float32."""
        weights, count = _lying(self.weight), self.like.numel()
        out = torch.empty(count, dtype=torch.float32, device=weights.device)
        mine = weights[self.start : self.start + count]
        HALVES.take(self.memory.to(weights.device), weights.numel(), mine, out, self.start)
        return out.as_strided(self.like.shape, self.like.stride())

    def put(self, values: torch.Tensor, draw: Draw | None = None) -> None:
        """Stores `values`: rounds them into the weight, and the rest into `memory`. `draw` is not used."""
        weights, count = _lying(self.weight), self.like.numel()
        masters = torch.empty_strided(self.like.shape, self.like.stride(), dtype=torch.float32, device=weights.device)
        masters = _lying(masters.copy_(values.detach()))
        if count < weights.numel():  # tie bits are packed, so all elements are coded again
            whole = SplitRest(self.memory, weights, self.weight).take()
            whole[self.start : self.start + count] = masters
            masters = whole
        weights.copy_(masters)
        coded = torch.empty(HALVES.size(masters.numel()), dtype=torch.uint8, device=weights.device)
        HALVES.put(masters, coded)
        self.memory[: coded.numel()].copy_(coded)


class Resting(torch.Tensor):
    """A tensor whose values are coded in `rest`; `awake` is its content as an ordinary tensor, without memory."""

    rest: Rest | SplitRest
    awake: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, rest: Rest | SplitRest) -> Resting:
        """Makes a wrapper with the shape, stride and dtype of `rest.like`."""
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
        """Returns the decoded values as an ordinary tensor, since a copy of the state is not offloaded."""
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
    """Returns the `Resting` tensors among an operation's arguments that it writes into."""
    names = [row.name for row in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    changed = [
        given[row.name]
        for row in func._schema.arguments
        if row.name in given and row.alias_info is not None and row.alias_info.is_write
    ]
    return [tensor for tensor in tree_iter(changed) if isinstance(tensor, Resting)]


def lay(tensor: torch.Tensor, rest: Rest | SplitRest) -> None:
    """Turns a tensor into a `Resting` one of the values in `rest`, and frees its memory."""
    if isinstance(tensor, Resting):
        tensor.rest = rest
        return
    gradient, tensor.grad = tensor.grad, None
    other = Resting(rest)
    torch.utils.swap_tensors(tensor, other)  # from here on `other` has the tensor's old content
    other.data = torch.empty(0, dtype=other.dtype, device=other.device)
    assert isinstance(tensor, Resting)
    tensor.awake, tensor.grad = other, gradient


def wake(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Turns a `Resting` tensor into an ordinary one, whose data is `memory`."""
    assert isinstance(tensor, Resting)
    other, gradient = tensor.awake, tensor.grad
    tensor.grad = None
    other.data = memory
    torch.utils.swap_tensors(tensor, other)
    tensor.grad = gradient


def _in_order(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns flat values, in row-major order, as a tensor with the shape and strides of `like`."""
    if like.is_contiguous():
        return values.view(like.shape)
    out = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device)
    return out.copy_(values.view(like.shape))


def _lying(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat view of a dense tensor's elements, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
