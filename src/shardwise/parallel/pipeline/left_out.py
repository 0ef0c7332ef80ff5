"""Made-up results for calls that a pipeline stage leaves out, with the right structure, shapes and dtypes, but NaN."""

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

MOST_RECIPES = 4096  # cached recipes, each for a call and the shapes of its arguments


@dataclass(frozen=True)
class _Leaf:
    """How to make one leaf of a result, which is an argument, a plain value or a new tensor.

    argument      index of the argument leaf that the call returns unchanged; None: a value or a new tensor
    value         the plain value, if `argument` and `number` are None
    number        id of the new tensor, the same for leaves that are one tensor
    shape, dtype  of the new tensor;  along  how it is cut over axes of positions
    """

    argument: int | None = None
    number: int | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    along: Along = ()
    value: Any = None


class LeftOutResults:
    """Makes the results of calls that are left out.

    compute  dtype of floating-point results, unless they are like an argument
    axes     the axes that cut positions, outermost first

    If a call returns one tensor twice, or returns an argument, so does the made-up result. What is later received for
    it is then seen wherever the caller holds it. Uncut float tensors of one shape share memory until one is written.
    """

    def __init__(self, compute: torch.dtype, axes: Sequence[Axis]) -> None:
        self.compute, self.axes = compute, axes
        self._recipes: dict[tuple, tuple[list[_Leaf], TreeSpec]] = {}  # (id of a skip, its arguments' shapes) -> result
        self._blank: dict[tuple, torch.Tensor] = {}  # (shape, dtype, device) -> a tensor of NaN to share

    def clear(self) -> None:
        """Frees the shared memory."""
        self._blank.clear()

    def result(self, skip: Skip, along: Sequence[Along], args: tuple, kwargs: dict) -> Any:
        """Returns a made-up result of the call `skip`.

        along         how each leaf of the result is cut over axes of positions; () if all are uncut
        args, kwargs  the call's arguments, from whose shapes those of the result follow
        Raises `RefusedPlan` if a shape does not follow from the arguments'.
        """
        plain = not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
        leaves = args if plain else tree_flatten((args, kwargs))[0]
        kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        key = id(skip), *kinds
        if key not in self._recipes:
            if len(self._recipes) >= MOST_RECIPES:  # else shapes that change from step to step would fill memory
                self._recipes.clear()
            self._recipes[key] = self._recipe(skip, along, leaves)
        recipe, spec = self._recipes[key]
        if len(recipe) == 1 and recipe[0].number is not None and spec.is_leaf():  # a fast path for most blocks
            return self._tensor(recipe[0], leaves)
        made: dict[int, torch.Tensor] = {}
        results = []
        for leaf in recipe:
            if leaf.argument is not None:
                results.append(leaves[leaf.argument])
            elif leaf.number is None:
                results.append(leaf.value)
            else:
                if leaf.number not in made:
                    made[leaf.number] = self._tensor(leaf, leaves)
                results.append(made[leaf.number])
        return tree_unflatten(results, spec)

    def _recipe(self, skip: Skip, along: Sequence[Along], leaves: Sequence[Any]) -> tuple[list[_Leaf], TreeSpec]:
        """Returns (a `_Leaf` for each leaf of the result, the result's tree) for argument leaves of these shapes.

        Raises `RefusedPlan` if a shape does not follow from them.
        """
        shapes = made_up_shapes(skip, [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves])
        argument_of = {number: place for place, number in enumerate(skip.call.arguments) if number is not None}
        cuts = along or [()] * len(shapes)
        recipe = []
        for leaf, like, shape, cut in zip(skip.call.leaves, skip.like, shapes, cuts, strict=True):
            # an argument that the call returns, or a plain value, which is as it was when the forward was recorded
            if leaf.tensor is None or leaf.tensor in argument_of:
                argument = argument_of.get(leaf.tensor) if leaf.tensor is not None else None
                recipe.append(_Leaf(argument=argument, value=leaf.value))
                continue
            assert leaf.dtype is not None
            dtype = self.compute if leaf.dtype.is_floating_point else leaf.dtype
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
        """Returns a tensor of NaN (integers: 0) as `leaf` describes it, on the device of the argument leaves."""
        assert leaf.dtype is not None
        first = next((arg for arg in leaves if isinstance(arg, torch.Tensor)), None)
        device = first.device if first is not None else None
        # integers may be counters that are incremented in place, so each has memory of its own
        if leaf.along or not leaf.dtype.is_floating_point:
            fill = float("nan") if leaf.dtype.is_floating_point else 0
            beside = [arg for arg in leaves if isinstance(arg, torch.Tensor)]
            return filled(leaf.shape, fill, leaf.along, self.axes, beside, dtype=leaf.dtype, device=device)
        key = leaf.shape, leaf.dtype, device
        blank = self._blank.get(key)
        # replaced if it was written into (`_version`), or made in inference mode, so that autograd cannot save it
        if blank is None or blank.is_inference() or blank._version:
            blank = self._blank[key] = torch.full(leaf.shape, float("nan"), dtype=leaf.dtype, device=device)
        return blank.detach()  # shares memory and version counter, so writes into it are noticed above


RAISED = (IndexError, RuntimeError)  # what kernels raise on NaN (`LinAlgError` is a RuntimeError)


class OnNothing(TorchFunctionMode):
    """Mode in which torch functions that fail on made-up inputs return NaN of the right shape.

    begun   returns whether the stage's own part is running, in which all inputs have values, so failures are raised
    """

    def __init__(self, begun: Callable[[], bool]):
        super().__init__()
        self.begun = begun

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Returns the function's result; if it fails before the stage's own part, a made-up one."""
        kwargs = kwargs or {}
        if hooks_nothing(func, args) and not self.begun():  # a made-up tensor requires no gradient, so cannot be hooked
            return RemovableHandle(OrderedDict())
        try:
            return func(*args, **kwargs)
        except ShardwiseError:  # a refusal, which is no failure on NaN
            raise
        except RAISED:
            if self.begun():
                raise
            if _writes_into_absent(func, args):
                return args[0]
            if any(isinstance(tensor, Distributed) for tensor in tensors_in((args, kwargs))):
                raise  # how the result would be cut does not follow from shapes
            try:
                return _made_up(func, args, kwargs)
            except RAISED:
                pass  # it fails for these shapes too, and the first error tells more
            raise


def _writes_into_absent(func: Callable[..., Any], args: tuple) -> bool:
    """Whether a call writes into a weight that only other stages hold; such a write is dropped."""
    name = getattr(func, "__name__", "")
    # names of in-place functions end in one underscore, or are `__setitem__` and in-place operators
    plain = name.endswith("_") and not name.endswith("__")
    written = args[0] if args and (plain or name == "__setitem__" or name.startswith("__i")) else None
    while isinstance(written, Part):
        written = written.local
    # absent weights are a single element, expanded, and torch refuses to write into overlapping memory
    return isinstance(written, torch.Tensor) and written.numel() > 1 and 0 in written.stride()


def _made_up(func: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Returns the function's result with NaN in every value (integers: 0); runs it on meta tensors.

    An argument that the function returns, as an in-place one does, is returned itself.
    """
    originals: dict[int, torch.Tensor] = {}  # id of a meta tensor -> the argument that it stands for

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        """Returns a meta tensor for an argument."""
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        originals[id(shape)] = tensor
        return shape

    shapes = replaced(torch.Tensor, without_values, (args, kwargs))
    device = next((tensor.device for tensor in originals.values()), None)

    def filled(shape: torch.Tensor) -> torch.Tensor:
        """Returns the made-up tensor for a meta tensor of the result."""
        if id(shape) in originals:
            return originals[id(shape)]
        value = float("nan") if shape.is_floating_point() or shape.is_complex() else 0
        return torch.full(shape.shape, value, dtype=shape.dtype, device=device)

    return replaced(torch.Tensor, filled, func(*shapes[0], **shapes[1]))
