"""Calls of a script's model where a plan cuts positions: whole tensors in, parts of this rank inside and out.

    script               x (B, S), whole on every rank of the axis, as its loader gives it
    model(x)             this rank's share of x          which arguments are cut: found in the first call in training
    logits (B, S, V)     a part: the global shape, this rank's positions in memory
    loss, backward       the script's own operations, on parts beside whole labels, as a task's loss is

An operation of the script's that has no rule for parts gathers what it is given on every rank, which is told with its
bytes. Without gradients the output is gathered at once, as under tensor parallelism.

What this does not do: cut what the loader reads. Every rank of these axes reads the batch whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.mesh import Mesh
from shardwise.part import Part
from shardwise.part.crossing import axes_of, cuts_of, entering, put_together, share_under
from shardwise.part.levels import Distributed
from shardwise.part.positions import Positions, name_of

Call = tuple[tuple, dict[str, Any]]


class Named:
    """A model's call as one dict of its arguments by the names of its forward, and back."""

    def __init__(self, model: nn.Module):
        kinds = inspect.Parameter
        found = inspect.signature(model.forward).parameters.values()
        self._names = [one.name for one in found if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]

    def of(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a call's arguments by name, positional ones first; those beyond the names by their number."""
        numbered = [*self._names, *(f"argument {n}" for n in range(len(self._names), len(args)))]
        return dict(zip(numbered, args, strict=False)) | dict(kwargs)

    @staticmethod
    def back(named: Mapping[str, Any], positional: int) -> Call:
        """Returns (args, kwargs) of arguments by name, of which the first `positional` had no keyword."""
        items = list(named.items())
        return tuple(value for _, value in items[:positional]), dict(items[positional:])


_AXES: WeakValueDictionary[Axis, Axis] = WeakValueDictionary()  # without their groups -> those of a living model


def on_common_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with the axes of positions of a model that the script prepared before, where they are the same.

    What one model gives is a part over its axes. Over others of the same ranks, the weights of a model that is given it
    would take sums over ranks for this rank's, and count them once for each rank.
    """
    return replace(mesh, inner=tuple(map(_common, mesh.inner)))


def _common(axis: Axis) -> Axis:
    key = replace(axis, group=None)
    before = _AXES.get(key)
    if before is None or before.group not in dist.distributed_c10d._world.pg_map:  # ended, with its engine or its world
        _AXES[key] = before = axis
    return before


class Door:
    """Cuts a call's arguments as `positions` says, by their names, and lets parts out to the script."""

    def __init__(self, model: nn.Module, positions: Positions):
        self._named, self._positions = Named(model), positions
        self._cuts = {name: cuts for name, cuts in zip(positions.names, positions.cuts, strict=True) if cuts}

    def enter(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Call, str]:
        """Returns (the call with this rank's shares, a notice); tensors with too few positions stay whole."""
        paths, spec = tree_flatten_with_path(self._named.of(args, kwargs))
        leaves = [self._share(name_of(path), leaf) for path, leaf in paths]
        notice = ""
        if self._cuts and not any(isinstance(leaf, Distributed) for leaf in leaves):
            axes = " x ".join(f"{axis.name}={axis.size}" for axis in self._positions.axes)
            notice = (
                f"the model is called without {' and '.join(self._cuts)}, or with fewer positions than {axes} has "
                "ranks: such a call is computed whole on every rank"
            )
        return self._named.back(tree_unflatten(leaves, spec), len(args)), notice

    def _share(self, name: str, leaf: Any) -> Any:
        cuts = self._cuts.get(name)
        if isinstance(leaf, Distributed) and leaf.axis.positions and leaf.axis not in self._positions.axes:
            raise InputError(
                f"the model's {name or 'argument'} was cut over {leaf.axis.name} by another prepared model, whose plan "
                "is another one: prepare both under one plan"
            )
        if not cuts or not isinstance(leaf, torch.Tensor) or isinstance(leaf, Distributed):
            return leaf
        if any(leaf.dim() <= dim or leaf.shape[dim] < self._positions.fewest(axes) for dim, axes in cuts):
            return leaf
        dealt, axes = self._positions.dealt(leaf.shape, cuts), tuple(axis for _, each in cuts for axis in each)
        return entering(leaf, dealt, axes)


def let_out(output: Any) -> Any:
    """Returns a training forward's output, whose parts any of the script's operations may gather."""
    return tree_map_only(Part, _let_out, output)


def _let_out(part: Part) -> torch.Tensor:
    left = _Leaves.apply(part) if part.requires_grad and part.axis.positions else part
    left.may_gather = True
    return left


class _Leaves(torch.autograd.Function):
    """A part as it is; a gradient that was computed whole on every rank comes back to the model as shares."""

    @staticmethod
    def forward(ctx: Any, part: Part) -> torch.Tensor:
        ctx.cut = cuts_of(part), axes_of(part)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        cuts, axes = ctx.cut
        if not cuts or isinstance(gradient, Distributed):
            return gradient
        return put_together(share_under(gradient, cuts, axes).contiguous(), cuts, axes)
