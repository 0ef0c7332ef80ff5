"""`LeftOutResults`: results of calls that a pipeline stage leaves out, right in shape and kind, NaN in every value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.parallel.pipeline.skips import Skip, made_up_shapes
from shardwise.part import Part
from shardwise.part.crossing import Along, filled
from shardwise.part.levels import Distributed
from shardwise.trace.leaves import replaced, tensors_in
from shardwise.trace.without_gradient import hooks_nothing

MOST_RECIPES = 4096  # of calls and shapes of their arguments, remembered at once


@dataclass(frozen=True)
class _Leaf:
    """One leaf of a result: the argument leaf `argument`, a new tensor, or a plain `value`.

    number  the same for leaves that are one tensor
    along   how a new tensor is cut over axes of positions
    """

    argument: int | None = None
    number: int | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    along: Along = ()
    value: Any = None


class LeftOutResults:
    """Makes the results of calls that are left out.

    compute  the dtype that is computed in
    axes     that cut positions, outermost first

    A tensor that the call gives twice, or was given and gives on, is one tensor here too: what arrives for it is seen
    wherever the caller holds it. Whole tensors of one shape share their memory until somebody writes into it.
    """

    def __init__(self, compute: torch.dtype, axes: Sequence[Axis]) -> None:
        self.compute, self.axes = compute, axes
        self._recipes: dict[tuple, tuple[list[_Leaf], TreeSpec]] = {}  # (id of a skip, its arguments' shapes) -> result
        self._blank: dict[tuple, torch.Tensor] = {}  # (shape, dtype, device) -> a tensor of NaN to share

    def clear(self) -> None:
        """Let go of the shared memory."""
        self._blank.clear()

    def result(self, skip: Skip, along: Sequence[Along], args: tuple, kwargs: dict) -> Any:
        """Returns a made-up result of a call; `along`: how each of its leaves is cut, empty where all are whole.

        Raises `RefusedPlan` where a shape does not follow from the arguments'.
        """
        plain = not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
        leaves = args if plain else tree_flatten((args, kwargs))[0]
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        key = id(skip), *kinds
        if key not in self._recipes:
            if len(self._recipes) >= MOST_RECIPES:  # shapes that change from step to step would fill memory
                self._recipes.clear()
            self._recipes[key] = self._recipe(skip, along, leaves)
        recipe, spec = self._recipes[key]
        if len(recipe) == 1 and recipe[0].number is not None and spec.is_leaf():  # one tensor, as of most blocks
            return self._tensor(recipe[0], leaves)
        made: dict[int, torch.Tensor] = {}
        results = []
        for leaf in recipe:
            if leaf.argument is not None:
                results.append(leaves[leaf.argument])
            elif leaf.number is None:
                results.append(leaf.value)
            else:
                if leaf.number not in made:  # what arrives for one of two equal leaves must be seen in the other
                    made[leaf.number] = self._tensor(leaf, leaves)
                results.append(made[leaf.number])
        return tree_unflatten(results, spec)

    def _recipe(self, skip: Skip, along: Sequence[Along], leaves: Sequence[Any]) -> tuple[list[_Leaf], TreeSpec]:
        """Returns (leaves of the result, their tree) for these arguments; `RefusedPlan` if they tell no shape."""
        shapes = made_up_shapes(skip, [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves])
        argument_of = {number: place for place, number in enumerate(skip.call.arguments) if number is not None}
        cuts = along or [()] * len(shapes)
        recipe = []
        for leaf, like, shape, cut in zip(skip.call.leaves, skip.like, shapes, cuts, strict=True):
            # what the call hands on is taken from its arguments; a plain value is kept as it was when it was looked at
            # a plain value, or an argument that the call gives on as the same tensor
            if leaf.tensor is None or leaf.tensor in argument_of:
                argument = argument_of.get(leaf.tensor) if leaf.tensor is not None else None
                recipe.append(_Leaf(argument=argument, value=leaf.value))
                continue
            assert leaf.dtype is not None
            dtype = self.compute if leaf.dtype.is_floating_point else leaf.dtype
            # made like one of the arguments: in its dtype
            if like is not None and leaves[like].is_floating_point() and leaf.dtype.is_floating_point:
                dtype = leaves[like].dtype
            if None in shape:
                raise RefusedPlan(
                    f"the shape of what '{skip.path}' gives, {leaf.shape} for {skip.samples[0]} samples, does not "
                    "follow from its arguments on other samples, and a stage leaves it out: name other places with "
                    "stages="
                )
            sizes = tuple(n for n in shape if n is not None)
            recipe.append(_Leaf(number=leaf.tensor, shape=sizes, dtype=dtype, along=cut))
        assert skip.call.spec is not None
        return recipe, skip.call.spec

    def _tensor(self, leaf: _Leaf, leaves: Sequence[Any]) -> torch.Tensor:
        """Returns a tensor of NaN (0 in integers) as `leaf` describes it, on the arguments' device."""
        assert leaf.dtype is not None
        first = next((arg for arg in leaves if isinstance(arg, torch.Tensor)), None)
        device = first.device if first is not None else None
        # cut tensors are put together; integers may be counted up in place, so each has memory of its own
        if leaf.along or not leaf.dtype.is_floating_point:  # whole numbers count something: nobody else's are touched
            fill = float("nan") if leaf.dtype.is_floating_point else 0
            beside = [arg for arg in leaves if isinstance(arg, torch.Tensor)]
            return filled(leaf.shape, fill, leaf.along, self.axes, beside, dtype=leaf.dtype, device=device)
        key = leaf.shape, leaf.dtype, device
        blank = self._blank.get(key)
        # one was written into (`_version`), or was made in inference mode, outside of which autograd cannot keep it
        if blank is None or blank.is_inference() or blank._version:
            blank = self._blank[key] = torch.full(leaf.shape, float("nan"), dtype=leaf.dtype, device=device)
        return blank.detach()  # on the same memory, with the same count of versions: writes into it show above


RAISED = (IndexError, RuntimeError)  # by kernels, `LinAlgError` among them


class OnNothing(TorchFunctionMode):
    """Mode in which functions of torch that fail on made-up inputs give NaN of the right shape, until `begun()`."""

    def __init__(self, begun: Callable[[], bool]):
        super().__init__()
        self.begun = begun

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if hooks_nothing(func, args) and not self.begun():  # a made-up tensor has no gradient that a hook could see
            return RemovableHandle(OrderedDict())
        try:
            return func(*args, **kwargs)
        except ShardwiseError:  # a reason, and no failure on NaN
            raise
        except RAISED:
            if self.begun():  # the stage's own part has values: a failure of the module's
                raise
            if _writes_into_absent(func, args):  # what it would write is made up too
                return args[0]
            if any(isinstance(tensor, Distributed) for tensor in tensors_in((args, kwargs))):
                raise  # how a result would be cut does not follow from shapes
            try:
                return _made_up(func, args, kwargs)
            except RAISED:
                pass  # it is wrong for these shapes too: the first error tells more
            raise


def _writes_into_absent(func: Callable[..., Any], args: tuple) -> bool:
    """Returns whether a function writes into a weight that other stages hold: such a write has no effect here."""
    name = getattr(func, "__name__", "")
    # functions that write end in one underscore, or are item and in-place operators
    plain = name.endswith("_") and not name.endswith("__")
    written = args[0] if args and (plain or name == "__setitem__" or name.startswith("__i")) else None
    while isinstance(written, Part):
        written = written.local
    # absent weights are one number, expanded: torch refuses to write into memory that several elements share
    return isinstance(written, torch.Tensor) and written.numel() > 1 and 0 in written.stride()


def _made_up(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Returns a result of the right shapes and dtypes, NaN in every value (0 in integers)."""
    originals: dict[int, torch.Tensor] = {}  # by id of the tensor without values that stands for each

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        originals[id(shape)] = tensor
        return shape

    shapes = replaced(torch.Tensor, without_values, (args, kwargs))
    device = next((tensor.device for tensor in originals.values()), None)

    def filled(shape: torch.Tensor) -> torch.Tensor:
        if id(shape) in originals:  # written in place, and nothing in it counts
            return originals[id(shape)]
        value = float("nan") if shape.is_floating_point() or shape.is_complex() else 0
        return torch.full(shape.shape, value, dtype=shape.dtype, device=device)

    return replaced(torch.Tensor, filled, func(*shapes[0], **shapes[1]))
