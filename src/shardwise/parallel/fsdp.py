"""What FSDP2 calls otherwise, or lacks, in one of the versions of torch that are supported (2.11 to 2.13).

    2.11   one group of parameters for each unit; 2.12 has a list
    2.11   shards no integers, and casts them where precision is mixed: they are held whole
    2.12   and before: no gradients of zeros for what one rank alone leaves out, so ranks of a routed model would come
           to reduce-scatters of different sizes; DTensor does not know `detach_`; a unit that runs inside a transform
           of `torch.func` would not gather its weights in backward: it belongs into the unit around it, as one
           inside derivatives does in every version

torch itself is asked which it is, but for integers.

In every version it waits for no gradient of a tensor inside an object, nor of a view's base (`await_unseen`), and frees
weights that a model returns (`outlive`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops._tensor_ops import propagate_single_input_strategy
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import RefusedPlan
from shardwise.part import Part
from shardwise.trace.functional import transforming
from shardwise.trace.tensors_in_objects import change_hidden, hidden

UNITS_IN_TRANSFORMS = RegisterPostBackwardFunction.generate_vmap_rule
IN_TRANSFORM = (
    f" runs inside a torch.func transform, where units of zero=3 cannot gather their weights in torch "
    f"{torch.__version__}: use zero=2, or torch 2.13"
)


@contextmanager
def units_aside(module: nn.Module) -> Iterator[None]:
    """Context: other tensors stand in the places of the module's parameters, and units do not look at them.

    A unit takes what it finds there after `load_state_dict` for its shards.
    """
    # copies: hooks are taken out of the tables themselves, which torch goes through
    before = [(child._load_state_dict_post_hooks, {**child._load_state_dict_post_hooks}) for child in module.modules()]
    for hooks, hooks_before in before:
        for key, hook in hooks_before.items():
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                del hooks[key]
    try:
        yield
    finally:
        # rebuilt as they were, as putting single hooks back would change their order
        for hooks, hooks_before in before:
            hooks.clear()
            hooks.update(hooks_before)


@contextmanager
def without(module: nn.Module, absent: Collection[torch.Tensor]) -> Iterator[None]:
    """Context: the module lacks these parameters, of other pipeline stages, which get no memory here."""
    taken = [
        (child, leaf, param)
        for child in module.modules()
        for leaf, param in list(child._parameters.items())
        if param in absent
    ]
    for child, leaf, _ in taken:
        child._parameters[leaf] = None
    try:
        yield
    finally:
        for child, leaf, param in taken:
            child._parameters[leaf] = param


def groups_of(unit: FSDPModule) -> list[Any]:
    """Returns FSDP2's groups of a unit's parameters: one or none in torch 2.11, later one for each mesh."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def partial_reductions(root: torch.nn.Module) -> list[torch.Tensor | None]:
    """Returns the reduced gradient shards that are not yet summed over replicas, one tensor for each unit's group."""
    units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
    return [group._partial_reduce_output for unit in units for group in groups_of(unit)]


class _Announced:
    """FSDP2's gather or reduction of a unit, which calls `say` before it runs."""

    def __init__(self, own: Any, say: Callable[[], None]) -> None:
        self._own, self._say = own, say

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns a new tensor without values."""
        return self._own.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._say()
        return self._own(*args, **kwargs)


def announce(unit: FSDPModule, gathers: Callable[[], None], reduces: Callable[[], None]) -> None:
    """Has `gathers()` called before each gather of a unit's weights, `reduces()` before each reduction of gradients."""
    for group in groups_of(unit):
        group._all_gather_comm = _Announced(group._all_gather_comm, gathers)
        group._reduce_scatter_comm = _Announced(group._reduce_scatter_comm, reduces)


def shards_of(unit: FSDPModule) -> list[torch.Tensor]:
    """Returns the memory of each shard of a unit, flat, padding included."""
    return [param._sharded_param_data for group in groups_of(unit) for param in group.fsdp_params]


def lay_shards(unit: FSDPModule, memory: Sequence[torch.Tensor]) -> None:
    """Let a unit's shards lie on `memory`, tensors in the order and sizes of `shards_of`; values are not copied."""
    params = [param for group in groups_of(unit) for param in group.fsdp_params]
    for param, flat in zip(params, memory, strict=True):
        length = param.sharded_param._local_tensor.size(param.fsdp_placement.dim)
        param._sharded_param_data = flat
        padded = flat.view(param.padded_sharded_param_size)
        param.sharded_param._local_tensor = padded.narrow(param.fsdp_placement.dim, 0, length)


@torch.no_grad()
def put_shard(param: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor, on any device, into a shard."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, param.device_mesh, param.placements)
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local = param.to_local()
    if local.numel():
        local.copy_(whole[slices].view(local.shape))


def around_gathers(unit: FSDPModule, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Has `before()` called when a unit's shards are about to be read for a gather, `after()` when they have been."""
    for group in groups_of(unit):
        group.unshard = partial(_read, weakref.ref(group), before)
        group.wait_for_unshard = partial(_have_read, weakref.ref(group), after)


def _read(owner: weakref.ref[Any], before: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    """Call `before` where a group's gather begins, then begin it."""
    group = owner()
    if group is not None:
        if group.is_sharded and group._all_gather_result is None:
            before()
        type(group).unshard(group, *args, **kwargs)


def _have_read(owner: weakref.ref[Any], after: Callable[[], None]) -> None:
    """Wait for a group's gather, and call `after` if there was one."""
    group = owner()
    if group is not None:
        pending = group._all_gather_result is not None
        type(group).wait_for_unshard(group)  # one rank alone reads here
        if pending:
            after()


def copy_ahead(unit: FSDPModule) -> None:
    """Makes a unit of a group of one rank copy its shards from the host when its gather begins, in another stream.

    FSDP2 copies them where the gather is waited for, in the stream that computes.
    """
    for group in groups_of(unit):
        copies = _Copies()
        group.unshard = partial(_begin_copies, weakref.ref(group), copies)
        group.wait_for_unshard = partial(_use_copies, weakref.ref(group), copies)


@dataclass
class _Copies:
    """Copies of a group's shards on the device, begun for one gather, which FSDP2 may drop without waiting for it."""

    gather: Any = None
    shards: list[torch.Tensor] = field(default_factory=list)


def _begin_copies(owner: weakref.ref[Any], copies: _Copies, *args: Any, **kwargs: Any) -> None:
    """Starts a group's gather from copies of its shards on the device, in the stream of copies."""
    group = owner()
    # the unit ended while a gather was asked for
    if group is not None:
        type(group).unshard(group, *args, **kwargs)
        # asked for twice (a prefetch, then the unit itself): the second call begins no copy of its own
        if group._all_gather_result is not None and group._all_gather_result is not copies.gather:
            copies.gather = group._all_gather_result
            with group.device_handle.stream(group.comm_ctx.all_gather_copy_in_stream):
                shards = (param._sharded_param_data for param in group.fsdp_params)
                copies.shards = [shard.to(group.device, non_blocking=True) for shard in shards]


def _use_copies(owner: weakref.ref[Any], copies: _Copies) -> None:
    """Waits for a group's gather, which read the copies of its shards where they were begun for it."""
    group = owner()
    # the unit is gone
    if group is None:
        return
    kept = [param._sharded_param_data for param in group.fsdp_params]
    # copies belong to one gather: a later one, or one that FSDP2 dropped, has none
    here = copies.gather is not None and group._all_gather_result is copies.gather
    if here:
        group.device_handle.current_stream().wait_stream(group.comm_ctx.all_gather_copy_in_stream)
    for param, copy in zip(group.fsdp_params, copies.shards if here else (), strict=False):
        param._sharded_param_data = copy
    try:
        type(group).wait_for_unshard(group)  # behind which the stream of copies waits, so that their memory is free
    # FSDP2 keeps its own pointers: put back whatever happens
    finally:
        for param, shard in zip(group.fsdp_params, kept, strict=True):
            param._sharded_param_data = shard
        copies.gather, copies.shards = None, []


class HostGradients:
    """Gradients of units whose shards lie on the host, added up there over a step's micro-batches.

    FSDP2 adds one to the one before within the backward, and waits for each copy where it does: the device would have
    nothing to do meanwhile. Here each backward copies as the first does, and its gradients are added after the next.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._params = [param for unit in units for group in groups_of(unit) for param in group.fsdp_params]
        self._coming: list[tuple[Any, DTensor, Any]] = []  # (parameter, gradient, event behind its copy)

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        self._sums: dict[int, DTensor] = {}  # id of FSDP2's parameter -> gradients so far
        self._coming.clear()

    def take(self) -> None:
        """Called after each backward: takes its gradients from the shards, and adds up those of the backward before."""
        self._add()
        for param in self._params:
            gradient = param.sharded_param.grad
            if gradient is not None:
                self._coming.append((param, gradient, param.grad_offload_event))
                param.sharded_param.grad = param.grad_offload_event = None

    @torch.no_grad()
    def _add(self) -> None:
        """Adds the gradients that were taken last to the sums, once their copies have arrived."""
        for param, gradient, event in self._coming:
            if event is not None:
                event.synchronize()
            if id(param) in self._sums:
                self._sums[id(param)].to_local().add_(gradient.to_local())
            else:
                self._sums[id(param)] = gradient
        self._coming.clear()

    def put(self) -> None:
        """Called after the last backward: sets each shard's gradient to the sum, once all have arrived."""
        self.take()
        self._add()
        for param in self._params:
            param.sharded_param.grad = self._sums.pop(id(param), None)


def can_cut(param: torch.Tensor) -> bool:
    """Returns whether FSDP2 shards a parameter of this type: torch 2.11 lets every shard require gradients."""
    return param.is_floating_point() or param.is_complex() or torch.__version__ >= (2, 12)


def reduce_unused(root: FSDPModule) -> None:
    """Let every rank reduce zeros for parameters that its own backward does not reach: others' may."""
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    # else a routed model's ranks come to reduce-scatters of different sizes
    assert isinstance(root, torch.nn.Module)
    for unit in root.modules():
        for group in groups_of(unit) if isinstance(unit, FSDPModule) else ():
            group.post_backward = partial(_with_zeros, weakref.ref(group))  # no cycle, which would keep process groups


def _with_zeros(owner: weakref.ref[Any], *unused: Any) -> None:
    """Runs a group's end of backward with zeros for gradients that did not come, so that all ranks reduce alike."""
    group = owner()
    if group is not None:
        # only where the unit reduces now: in other micro-batches gradients are kept
        for fsdp_param in group.fsdp_params if group.reduce_grads else ():
            param = getattr(fsdp_param, "_unsharded_param", None)
            # nothing to reduce, or another call of the unit has left a gradient already
            if param is None or not param.requires_grad or fsdp_param.unsharded_accumulated_grad is not None:
                continue
            if torch.Tensor.grad.__get__(param) is None:  # not what a script sees in its place
                torch.Tensor.grad.__set__(param, torch.zeros_like(param))
        type(group).post_backward(group, *unused)


def know_detach() -> None:
    """Let DTensor take `detach_`, which autograd does to a weight made whole in a forward without gradients."""
    propagator, operation = DTensor._op_dispatcher.sharding_propagator, torch.ops.aten.detach_.default
    if operation not in propagator.op_strategy_funcs:
        propagator.register_op_strategy(operation, propagate_single_input_strategy)


def refuse_transforms(unit: torch.nn.Module, name: str) -> None:
    """Makes a unit raise `RefusedPlan` inside a transform of `torch.func`, where this torch's FSDP2 cannot run."""

    def refuse(*unused: Any) -> None:
        if transforming():
            raise RefusedPlan(f"{name}{IN_TRANSFORM}")

    if not UNITS_IN_TRANSFORMS:
        # before FSDP2's own hook, which gathers
        unit.register_forward_pre_hook(refuse, prepend=True)


def await_unseen(unit: FSDPModule, inputs: Any, output: Any) -> None:
    """Lets FSDP2 gather a unit's weights for backward also where it does not see the gradient come.

    FSDP2 hooks the output's tensors that torch's tree functions find. Hooked here are those in an object of the user's
    class, and, where an output is a view, its base: an operation in place on a view (`y = block(x); y += x`) drops the
    view's hook.
    """
    # a view of an input: its base is the caller's, whose gradient comes when the unit's backward is over
    theirs = {id(tensor) for leaf in _tensors(inputs) for tensor in (leaf, leaf._base)}
    bases = [leaf._base for leaf in _tensors(output) if leaf.requires_grad and id(leaf._base) not in theirs]
    # a tensor without a gradient sends nobody to the backward of the unit
    if waits := [tensor for tensor in (*hidden(output), *bases) if tensor is not None and tensor.requires_grad]:
        unit._get_fsdp_state()._register_pre_backward_hook(waits)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def outlive(module: nn.Module, output: Any) -> Any:
    """Returns a model's output, parameters in it (a learned temperature) copied, since FSDP2 frees their memory.

    Raises `RefusedPlan` where it is computed from shards, outside of the forward of their unit.
    """
    gathered = {param.untyped_storage()._cdata for param in module.parameters() if not isinstance(param, DTensor)}

    def keep(leaf: torch.Tensor) -> torch.Tensor:
        of_unit = isinstance(leaf, DTensor)
        leaf = leaf.clone() if of_unit else leaf  # an operation, for `OutsideReads` to answer
        if isinstance(leaf, DTensor):
            raise RefusedPlan(
                "the model's output is computed from parameters outside the forward of the unit that holds them, "
                "where zero=3 has only pieces of them: name units with wrap= so that a unit's parameters are used "
                "inside its forward, or use zero=2"
            )
        if leaf.untyped_storage()._cdata not in gathered and not of_unit:
            return leaf
        copy = leaf.clone()
        copy.is_weight = True  # else a size that equals the batch's would be taken for its samples
        return copy

    change_hidden(output, keep)
    return tree_map_only(torch.Tensor, keep, output)


def without_margin(output: Part) -> torch.Tensor:
    """Returns a view of `output` without its `margin`, so that its gradient arrives at `output`, where FSDP2 hooks."""
    return output if output.margin is None else output.view_as(output)


def weakly(method: Callable[..., Any], index: int) -> Callable[[torch.Tensor], None]:
    """Returns a hook that calls a technique's method with `index` and the parameter, and does not keep it alive.

    Hooks of parameters would else keep the technique, and its process groups, as long as the module lives.
    """
    known = weakref.WeakMethod(method)

    def hook(param: torch.Tensor) -> None:
        called = known()
        if called is not None:
            called(index, param)

    return hook


def lay_empty(module: nn.Module, home: Callable[[torch.Tensor], torch.device]) -> None:
    """Give each parameter and buffer memory at its `home`, without values; a buffer of several modules stays one."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def empty(old: torch.Tensor) -> torch.Tensor:
        new = torch.empty_like(old, device=home(old))
        return new if isinstance(old, nn.Parameter) else made.setdefault(old, new)

    module._apply(empty)
