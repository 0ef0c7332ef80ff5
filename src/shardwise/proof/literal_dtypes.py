"""Run operations on tensors of several dtypes, which the one process of a proof in 16 bits meets.

    batch norms                    weights in 32 bits, since kernels take only those beside an input of 16 bits
    ops that refuse several dtypes all tensors in the compute dtype, or in that of the tensor it writes into
    norms with running statistics  all in the widest, so that the statistics and not a copy of them are written

What this does not do: change an operation that takes them as they are.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_NORM_WEIGHTS = {functional.batch_norm: ((3, "weight"), (4, "bias")), torch.batch_norm: ((1, "weight"), (2, "bias"))}
_STATISTICS = {functional.batch_norm, torch.batch_norm, functional.instance_norm, torch.instance_norm}


class OneDtype(TorchFunctionMode):
    """Function mode that casts tensors of ops that refuse several dtypes, and weights of batch norms to 32 bits."""

    def __init__(self, compute: torch.dtype):
        super().__init__()
        self.compute = compute

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Returns an operation's result; where torch refuses mixed dtypes, all are computed in one dtype."""
        args, kwargs = list(args), dict(kwargs or {})
        # kernels of batch norms take weights of 32 bits alone beside an input of 16 (positional or keyword arguments)
        for place, name in _NORM_WEIGHTS.get(func, ()):
            if place < len(args) and args[place] is not None:
                args[place] = args[place].to(torch.promote_types(args[place].dtype, torch.float32))
            elif kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].to(torch.promote_types(kwargs[name].dtype, torch.float32))
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # perhaps for mixed dtypes
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_real(leaf)}
            # with one dtype it failed for another reason; `out` would be cast, and the result lost in the copy
            if len(dtypes) < 2 or kwargs.get("out") is not None:
                raise
        name = getattr(func, "__name__", "")
        # an in-place op must write into its first argument itself, so all others get that one's dtype
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):  # in place
            dtype = args[0].dtype
        else:
            # the widest is that of running statistics, which a cast would replace by a copy
            dtype = max(dtypes, key=lambda seen: seen.itemsize) if func in _STATISTICS else self.compute
        args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _is_real(leaf) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
