"""Detect sharded weights that a forward reads other than as attributes of their module, where it would get shares.

    self.weight.square()                            reads a `Part` of the whole weight, which is exact
    for p in self.parameters(): p.square().sum()    reads this rank's share, so the parameter must not be sharded
    for p, q in zip(...): q.data.lerp_(p.data, m)   elementwise on shares that are cut alike, which is right
    grad(y, [*self.parameters()])                   only names what a gradient is taken by, which is right

They are detected in a rehearsal of the module's own code, by the torch functions that it calls on parameters. If
positions are cut, the gradient of an unsharded parameter is a sum over ranks only if it is read as an attribute, so
reads past attributes are detected for these too.

What this does not do: see such code if it runs only in backward (recompute).
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

_How = tuple[str, int, Any]  # of a share (its parameter's name, the cut dim, the owners)


class RawReads(TorchFunctionMode):
    """Mode that raises `Uncut` if the module's own code computes with a share as if it were the weight.

    cuts    name of a sharded parameter -> its cut;  named  name -> parameter, for sharded ones this rank's share
    summed  text that names the axes that cut positions; unless it is "", the mode also raises `RefusedPlan` if the code
            computes with any trained parameter past its attribute
    """

    def __init__(self, cuts: dict[str, WeightCut], named: dict[str, torch.Tensor], summed: str = ""):
        super().__init__()
        self.summed = summed
        self.whole = {id(tensor): name for name, tensor in named.items() if summed and tensor.requires_grad}
        shares = [(tensor, cuts[name]) for name, tensor in named.items() if name in cuts]
        # id of a tensor, a share or an elementwise result of shares -> how it is cut
        self.shares: dict[int, _How] = {id(tensor): (cut.name, cut.dim, cut.owners) for tensor, cut in shares}
        self.alive: list[torch.Tensor] = [tensor for tensor, _ in shares]  # so that no other tensor gets the same id

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Returns the function's result, after a check of its arguments."""
        output = func(*args, **(kwargs or {}))
        tensors = tensors_in((args, kwargs))
        met = [self.shares[id(tensor)] for tensor in tensors if id(tensor) in self.shares]
        trained = [tensor for tensor in tensors if tensor.requires_grad]  # a forward may have frozen a parameter
        whole = [self.whole[id(tensor)] for tensor in trained if id(tensor) in self.whole]
        if (met or whole) and by_a_module(sys._getframe(1)):  # not called by torch's or this package's own code
            if met:
                self._met(func, tensors, met, output)
            if any(tensor.requires_grad for tensor in tensors_in(output)) and whole:
                self._refuse(whole[0])
        return output

    def _refuse(self, name: str) -> None:
        """Raises `RefusedPlan` for a weight that is read past its attribute, whose gradient would be wrong."""
        raise RefusedPlan(
            f"{self.summed}: the forward computes with '{name}' past its attribute, as by parameters(), and its "
            "gradient would count once for each rank: read it as an attribute (self.weight), or leave a penalty on "
            "weights to the optimizer (weight_decay)"
        )

    def _met(self, func: Any, tensors: list[torch.Tensor], met: list[_How], output: Any) -> None:
        """Records that results of `func` are shares, as its arguments are; raises `Uncut` if that would be wrong.

        tensors  all tensor arguments;  met  how those of them that are shares are cut;  output  of the call
        """
        name, made = getattr(func, "__name__", str(func)), tensors_in(output)
        # functions that need the parameter itself, or whose result (neither tensor nor size) is the same for a share
        if name in TAKE_TENSOR_ITSELF or (not made and func not in _SIZES):
            return
        # elementwise on shares that are cut alike, and on scalars, is right on each rank's elements
        alike = len({how[1:] for how in met}) == 1 and len(met) == sum(tensor.dim() > 0 for tensor in tensors)
        data = torch.Tensor.data.__get__  # read here, since it is replaced while assignments to `.data` are followed
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
