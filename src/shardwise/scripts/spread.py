"""The first training forward of a script's model: its arguments determine the cuts of tp and ep, then it is spread.

    prepare(model, ...)      ranks meet; the model waits, whole
    model(x)  in training    rank 0's arguments to all ranks -> cuts derived and tried -> weights cut -> the forward
    loss, backward, step     the script's own

Outputs keep the whole tensor's shape. In training a cut output stays a tensor part for as long as the script's
operations have rules for it (cross-entropy over cut classes); the first operation that has none gathers it. Without
gradients outputs are gathered at once.

What this does not do: derive cuts from anything but the model's own call; calls of its submodules alone raise.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from shardwise.comm import Axis, broadcast, gather_json
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.mesh import Mesh
from shardwise.part import Part, Sum, plain, whole
from shardwise.part.crossing import axes_of, cuts_of, entering, put_together, share_under
from shardwise.part.levels import Distributed
from shardwise.part.parameters import unannounced
from shardwise.part.positions import Positions, name_of
from shardwise.scripts.script_lines import names_line
from shardwise.trace.functional import transforming

Spread = Callable[[tuple, dict], None]  # called with (args, kwargs) of the first call


def wait_for_call(model: nn.Module, spread: Spread) -> None:
    """Calls `spread` before the model's first forward in training; every earlier forward runs on the whole model."""
    kind = type(model)
    begun = False
    refusal: Exception | None = None

    @torch.compiler.disable  # a compiler does not know tensor parts
    @names_line
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun, refusal
        if self is model and refusal is not None:  # the script caught it: forwards that follow would train unspread
            raise refusal
        if self is model and not begun and self.training and torch.is_grad_enabled():
            refuse_transform()
            begun = True  # first, since looks inside call the model too
            try:
                spread(args, kwargs)
            except Exception as error:
                refusal = error
                raise
        return kind.__call__(self, *args, **kwargs)

    model.__class__ = unannounced(kind, {"__call__": call})


def refuse_transform() -> None:
    """Raises `RefusedPlan` inside a transform of torch.func, whose tensors have no memory that could be sent."""
    if transforming():
        raise RefusedPlan(
            "the model is called inside a transform of torch.func (vmap, grad, jacrev, ...), where ranks cannot meet, "
            "and draws and gradients cannot be followed: call model(x) on the batch itself, and take derivatives with "
            "regard to what it is given by torch.autograd.grad(outputs, inputs, create_graph=True)"
        )


@contextmanager
def thawed(model: nn.Module, trained: Collection[str]) -> Iterator[None]:
    """Context in which the parameters named `trained` require gradients.

    A script may freeze them for one forward (an attack on its inputs, samples drawn by a gradient), and the model is
    spread and checked by that forward all the same.
    """
    still = [name for name, param in model.named_parameters() if name in trained and not param.requires_grad]
    _set_trained(model, still, True)
    try:
        yield
    finally:
        _set_trained(model, still, False)


def _set_trained(model: nn.Module, names: Collection[str], trained: bool) -> None:
    """Sets `requires_grad` of the parameters of these names."""
    for name, param in model.named_parameters():
        if name in names:
            param.requires_grad_(trained)


def shared_call(args: tuple, kwargs: dict, world: Axis, device: torch.device) -> tuple[tuple, dict]:
    """Returns (args, kwargs) of rank 0's call on every rank, tensors on the CPU. Collective.

    Raises `RefusedPlan` for sparse tensors, `RunError` on a rank that gives another number of tensors.
    """
    leaves, spec = tree_flatten(tree_map_only(torch.Tensor, plain, (args, kwargs)))
    mine = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # sparse tensors are no strided memory that could be sent or labelled
    sparse = next((leaf for leaf in mine if leaf.layout is not torch.strided), None)
    if sparse is not None:
        raise RefusedPlan(
            f"the model is given a tensor of layout {sparse.layout} and shape {tuple(sparse.shape)}, and cuts are "
            "followed through dense tensors alone: give it dense (.to_dense()), or as indices and values that the "
            "forward multiplies and adds up by index_add; or leave tp, cp, cp_ulysses, domain and ep out"
        )
    # rank 0's shapes size the buffers: a rank's own last batch may be smaller
    shapes = gather_json([[list(leaf.shape), str(leaf.dtype)] for leaf in mine], world, device)
    # otherwise tensors would be received into other arguments, or a rank would wait for one that never comes
    if len(shapes[0]) != len(mine):
        raise RunError(
            f"prepare: rank {world.index} calls the model with {len(mine)} tensors, rank 0 with {len(shapes[0])}: "
            "every rank must call it in the same way"
        )
    received = iter([_of_rank_0(*pair, world, device) for pair in zip(mine, shapes[0], strict=True)])
    leaves = [next(received) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(leaves, spec)


def _of_rank_0(tensor: torch.Tensor, told: tuple[list[int], str], world: Axis, device: torch.device) -> torch.Tensor:
    """Returns rank 0's tensor on the CPU of every rank; `told`: its shape and the name of its dtype. Collective."""
    shape, dtype = told[0], getattr(torch, told[1].removeprefix("torch."))
    sent = tensor.detach().to(device) if world.index == 0 else torch.empty(shape, dtype=dtype, device=device)
    flat = sent.contiguous().reshape(-1)
    if flat.numel():
        flat = flat.view(torch.uint8)
        broadcast(flat, world, 0, "control")
        flat = flat.view(dtype)
    return flat.view(shape).cpu()


def check_cuts(cuts: Mapping[str, Any], world: Axis, device: torch.device) -> None:
    """Raises `RunError` if ranks derived different cuts. Collective."""
    mine = zlib.crc32(repr([(name, cut.dim, cut.owners.counts) for name, cut in sorted(cuts.items())]).encode())
    if len(set(gather_json(mine, world, device))) > 1:
        raise RunError(
            "prepare: the ranks derived different cuts from the same call of the model: its forward depends on "
            "something else than its arguments (the rank, the time, unseeded draws)"
        )


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in what a model returned: in tuples, lists, dicts, registered pytrees and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    if type(output) in (tuple, list):  # the usual case, for each batch and each call, is quick
        inside: Iterable[Any] = output
    elif isinstance(output, Mapping):
        inside = output.values()
    else:
        # registered pytrees of a library, and dataclasses that are none
        inside = [leaf for leaf in tree_flatten(output)[0] if leaf is not output]
        # a dataclass that no pytree is registered for
        if dataclasses.is_dataclass(output) and not (inside or isinstance(output, type)):
            inside = [getattr(output, field.name) for field in dataclasses.fields(output)]
    for each in inside:
        yield from tensors_of(each)


def total_of(output: Any) -> torch.Tensor:
    """Returns a scalar of all floating-point outputs, as a loss for trying cuts; `InputError` if there are none."""
    floats = [t for t in tensors_of(output) if t.is_floating_point()]
    if not floats:
        raise InputError(
            f"prepare: the model returned {type(output).__name__}, in which no floating-point tensor was found: return "
            "tensors, or tuples, dicts or dataclasses of them"
        )
    return torch.stack([t.double().square().sum() for t in floats]).sum()


def seen_outside(output: Any) -> Any:
    """Returns a model's output as the script may use it: sums are reduced, parts may be gathered when needed."""
    if not torch.is_grad_enabled():
        return tree_map_only(torch.Tensor, plain, output)
    for tensor in tensors_of(output):
        if isinstance(tensor, Part):
            tensor.may_gather = True
    return let_out(tree_map_only(Sum, whole, output))


Call = tuple[tuple, dict[str, Any]]


class Named:
    """Converts a call's (args, kwargs) into one dict by the names of the forward's arguments, and back."""

    def __init__(self, model: nn.Module):
        kinds = inspect.Parameter
        found = inspect.signature(model.forward).parameters.values()
        self._names = [one.name for one in found if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]

    def of(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a call's arguments by name, positional ones first; "argument N" for those beyond the names."""
        numbered = [*self._names, *(f"argument {n}" for n in range(len(self._names), len(args)))]
        return dict(zip(numbered, args, strict=False)) | dict(kwargs)

    @staticmethod
    def back(named: Mapping[str, Any], positional: int) -> Call:
        """Returns (args, kwargs) of arguments by name, the first `positional` of which are args."""
        items = list(named.items())
        return tuple(value for _, value in items[:positional]), dict(items[positional:])


_AXES: WeakValueDictionary[Axis, Axis] = WeakValueDictionary()  # axis without its group -> a model's axis


def on_common_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with the position axes of an earlier prepared model, for those that have the same ranks.

    A model's output is a tensor part over its axes. If another model that is given it had other axes over the same
    ranks, its weights' gradients would take the part's sums over ranks for this rank's own, and count them on each
    rank.
    """
    return replace(mesh, inner=tuple(map(_common, mesh.inner)))


def _common(axis: Axis) -> Axis:
    """Returns the axis of the same ranks of a model that was prepared before; this one if there is none."""
    key = replace(axis, group=None)
    before = _AXES.get(key)
    if before is None or before.group not in dist.distributed_c10d._world.pg_map:  # its group has ended
        _AXES[key] = before = axis
    return before


class Door:
    """Cuts a call's arguments as `positions` says, by their names."""

    def __init__(self, model: nn.Module, positions: Positions):
        self._named, self._positions = Named(model), positions
        self._cuts = {name: cuts for name, cuts in zip(positions.names, positions.cuts, strict=True) if cuts}

    def enter(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Call, str]:
        """Returns ((args, kwargs) with this rank's shares, notice or ""); tensors with too few positions stay whole.

        Raises `InputError` for a tensor that another model's plan has cut.
        """
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
        """Returns this rank's share of the argument `name`; `leaf` itself if it is no tensor, not cut, or too short."""
        cuts = self._cuts.get(name)
        # a part over this model's own axes goes in as it is; over another's, sums would run over the wrong ranks
        if isinstance(leaf, Distributed) and leaf.axis.positions and leaf.axis not in self._positions.axes:
            raise InputError(
                f"the model's {name or 'argument'} was cut over {leaf.axis.name} by another prepared model, whose plan "
                "is another one: prepare both under one plan"
            )
        if not cuts or not isinstance(leaf, torch.Tensor) or isinstance(leaf, Distributed):
            return leaf
        # fewer positions than ranks: some would have none, so each computes all; `enter` says so
        if any(leaf.dim() <= dim or leaf.shape[dim] < self._positions.fewest(axes) for dim, axes in cuts):
            return leaf
        dealt, axes = self._positions.dealt(leaf.shape, cuts), tuple(axis for _, each in cuts for axis in each)
        return entering(leaf, dealt, axes)


def let_out(output: Any) -> Any:
    """Returns a training forward's output, whose tensor parts any operation of the script may gather."""
    return tree_map_only(Part, _let_out, output)


def _let_out(part: Part) -> torch.Tensor:
    """Returns the part, marked so that it may be gathered; under cut positions its gradient is cut on the way back."""
    left = _Leaves.apply(part) if part.requires_grad and part.axis.positions else part
    left.may_gather = True
    return left


class _Leaves(torch.autograd.Function):
    """Autograd function: returns a part unchanged; backward cuts a whole gradient into the part's shares."""

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
