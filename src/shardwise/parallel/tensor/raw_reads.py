"""Detect weights that a forward reads otherwise than as attributes of their module, where ranks hold shares of them.

    self.weight.square()                            the whole weight, or a part of it: exact
    for p in self.parameters(): p.square().sum()    the parameter itself, which is this rank's share: it is left whole
    for p, q in zip(...): q.data.lerp_(p.data, m)   each element alone, both kept alike: right on shares
    grad(y, [*self.parameters()])                   a name for what a gradient is taken by: right on shares

Seen where a rehearsal runs the module's own code, by functions of torch that it calls on parameters. Where positions
are cut, what a gradient is of is settled where an attribute is read, so whole parameters cannot be read past theirs.

What this does not do: see such code where it is run again in backward alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.errors import RefusedPlan
from shardwise.parallel.tensor.derive import WeightCut
from shardwise.part import Uncut
from shardwise.part.parameters import TAKE_TENSOR_ITSELF
from shardwise.trace.leaves import tensors_in
from shardwise.trace.own_calls import by_a_module

_ALONE = frozenset(
    name
    for plain in (
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "copy", "lerp", "zero",
        "fill", "clamp", "sign", "abs", "square", "sqrt", "pow", "tanh", "sigmoid", "exp", "where", "clone", "detach",
        "to", "double", "float", "half", "bfloat16", "type_as", "requires_grad", "zeros_like", "ones_like",
    )
    for name in (plain, f"{plain}_", f"__{plain}__", f"__r{plain}__", f"__i{plain}__")
) | {"__rtruediv__", "__truediv__", "__itruediv__"}  # fmt: skip
_SIZES = (torch.Tensor.shape.__get__, torch.Tensor.size, torch.Tensor.numel)

_How = tuple[str, int, Any]  # of a share: its parameter's name, the cut dim, the owners


class RawReads(TorchFunctionMode):
    """Mode that raises `Uncut` where the module's code computes with a share as if it were the weight.

    summed  axes over which positions are cut, in words: `RefusedPlan` where it computes with a parameter itself
    """

    def __init__(self, cuts: dict[str, WeightCut], named: dict[str, torch.Tensor], summed: str = ""):
        super().__init__()
        self.summed = summed
        self.whole = {id(tensor): name for name, tensor in named.items() if summed and tensor.requires_grad}
        shares = [(tensor, cuts[name]) for name, tensor in named.items() if name in cuts]
        # by id of a tensor: shares of parameters, and what was computed of them
        self.shares: dict[int, _How] = {id(tensor): (cut.name, cut.dim, cut.owners) for tensor, cut in shares}
        self.alive: list[torch.Tensor] = [tensor for tensor, _ in shares]  # else another tensor could have its id

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs))
        met = [self.shares[id(tensor)] for tensor in tensors if id(tensor) in self.shares]
        trained = [tensor for tensor in tensors if tensor.requires_grad]  # now: a forward may have frozen it
        whole = [self.whole[id(tensor)] for tensor in trained if id(tensor) in self.whole]
        if (met or whole) and by_a_module(sys._getframe(1)):  # not torch's own code, nor ours
            if met:
                self._met(func, tensors, met, output)
            # a whole weight, where positions are cut: its gradient would count once for each rank
            if any(tensor.requires_grad for tensor in tensors_in(output)) and whole:
                self._refuse(whole[0])
        return output

    def _refuse(self, name: str) -> None:
        """Raise `RefusedPlan` for a weight that is read past its attribute."""
        raise RefusedPlan(
            f"{self.summed}: the forward computes with '{name}' past its attribute, as by parameters(), and its "
            "gradient would count once for each rank: read it as an attribute (self.weight), or leave a penalty on "
            "weights to the optimizer (weight_decay)"
        )

    def _met(self, func: Any, tensors: list[torch.Tensor], met: list[_How], output: Any) -> None:
        """Notes that results of `func` are shares, as its arguments are. Raises `Uncut` where that would be wrong."""
        name, made = getattr(func, "__name__", str(func)), tensors_in(output)
        # these take the parameter itself; what gives neither tensors nor a size shows nothing of a share
        if name in TAKE_TENSOR_ITSELF or (not made and func not in _SIZES):
            return
        # element by element on shares that are all cut alike, beside numbers at most: right on each rank's elements
        alike = len({how[1:] for how in met}) == 1 and len(met) == sum(tensor.dim() > 0 for tensor in tensors)
        data = torch.Tensor.data.__get__  # now: another attribute is there while assignments to it are followed
        if not alike or not (name in _ALONE or func == data):
            error = Uncut(
                f"the forward computes with '{met[0][0]}' past its module's attribute, as by parameters(), where it "
                f"would meet a share of it ({'its size' if func in _SIZES else name})"
            )
            error.origins = frozenset(how[0] for how in met)
            raise error
        for tensor in made:
            self.shares[id(tensor)] = met[0]
            self.alive.append(tensor)
