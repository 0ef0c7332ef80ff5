"""Adapts FSDP2's private interfaces, which differ among the supported versions of torch (2.11 to 2.13).

    2.11         has one group of parameters for each unit; later versions have a list
    2.11         does not shard integers, and casts them in mixed precision, so they are replicated here
    2.11, 2.12   do not reduce zeros for parameters that one rank alone did not use, so ranks of a routed model would
                 issue reduce-scatters of different sizes; DTensor has no rule for `detach_`; a unit that runs inside a
                 transform of `torch.func` does not gather its weights in backward, and so must be part of the unit
                 around it, as a unit inside derivatives must be in every version

Which form a version has is found from its attributes, except for integers, for which the version number is compared.

In every version FSDP2 does not gather for backward if an output's tensor is inside an object or is the base of a view
(`await_unseen`), and frees the memory of weights that a model returns (`outlive`).
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
    """Context in which FSDP2's hooks after `load_state_dict` do not run, while other tensors replace the parameters.

    These hooks would take the tensors that they find in the module for the shards.
    """
    # copies of the tables, since hooks are deleted from the tables themselves
    before = [(child._load_state_dict_post_hooks, {**child._load_state_dict_post_hooks}) for child in module.modules()]
    for hooks, hooks_before in before:
        for key, hook in hooks_before.items():
            if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                del hooks[key]
    try:
        yield
    finally:
        # rebuilt from the copies, since putting single hooks back would change their order
        for hooks, hooks_before in before:
            hooks.clear()
            hooks.update(hooks_before)


@contextmanager
def without(module: nn.Module, absent: Collection[torch.Tensor]) -> Iterator[None]:
    """Context in which the parameters in `absent` (of other pipeline stages) are None in the module."""
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
    """Returns FSDP2's `FSDPParamGroup`s of a unit: one or none in torch 2.11, one for each mesh in later versions."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def partial_reductions(root: torch.nn.Module) -> list[torch.Tensor | None]:
    """Returns each group's reduce-scattered gradients that are not yet summed over replicas; None for a group without.

    root   the module whose units' groups are listed
    """
    units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
    return [group._partial_reduce_output for unit in units for group in groups_of(unit)]


class _Announced:
    """Wraps FSDP2's all-gather or reduce-scatter of a unit, `own`, and calls `say` before it runs."""

    def __init__(self, own: Any, say: Callable[[], None]) -> None:
        self._own, self._say = own, say

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns an uninitialised tensor, as the wrapped collective allocates it."""
        return self._own.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `say`, then runs the wrapped collective and returns its result."""
        self._say()
        return self._own(*args, **kwargs)


def announce(unit: FSDPModule, gathers: Callable[[], None], reduces: Callable[[], None]) -> None:
    """Has `gathers()` called before each all-gather of a unit's weights, `reduces()` before each reduce-scatter."""
    for group in groups_of(unit):
        group._all_gather_comm = _Announced(group._all_gather_comm, gathers)
        group._reduce_scatter_comm = _Announced(group._reduce_scatter_comm, reduces)


def shards_of(unit: FSDPModule) -> list[torch.Tensor]:
    """Returns the memory of each parameter's shard in a unit, as 1-d tensors, FSDP2's padding included."""
    return [param._sharded_param_data for group in groups_of(unit) for param in group.fsdp_params]


def lay_shards(unit: FSDPModule, memory: Sequence[torch.Tensor]) -> None:
    """Makes a unit's shards views of `memory`, 1-d tensors in the order and sizes of `shards_of`; copies no values."""
    params = [param for group in groups_of(unit) for param in group.fsdp_params]
    for param, flat in zip(params, memory, strict=True):
        length = param.sharded_param._local_tensor.size(param.fsdp_placement.dim)
        param._sharded_param_data = flat
        padded = flat.view(param.padded_sharded_param_size)
        param.sharded_param._local_tensor = padded.narrow(param.fsdp_placement.dim, 0, length)


@torch.no_grad()
def put_shard(param: DTensor, whole: torch.Tensor) -> None:
    """Copies this rank's shard of `whole`, an unsharded tensor on any device, into `param`."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, param.device_mesh, param.placements)
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local = param.to_local()
    if local.numel():
        local.copy_(whole[slices].view(local.shape))


def around_gathers(unit: FSDPModule, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Has `before()` called when an all-gather is about to read a unit's shards, `after()` once it has read them."""
    for group in groups_of(unit):
        group.unshard = partial(_read, weakref.ref(group), before)
        group.wait_for_unshard = partial(_have_read, weakref.ref(group), after)


def _read(owner: weakref.ref[Any], before: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    """Calls `before` and begins the all-gather of the group that `owner` refers to. Stands for its `unshard`."""
    group = owner()
    if group is not None:
        # otherwise the weights are gathered already or the gather is under way, as after a prefetch
        if group.is_sharded and group._all_gather_result is None:
            before()
        type(group).unshard(group, *args, **kwargs)


def _have_read(owner: weakref.ref[Any], after: Callable[[], None]) -> None:
    """Waits for the all-gather of the group that `owner` refers to, and calls `after` if one was under way."""
    group = owner()
    if group is not None:
        pending = group._all_gather_result is not None
        type(group).wait_for_unshard(group)  # in a group of one rank FSDP2 reads the shards here, not at the beginning
        if pending:
            after()


def copy_ahead(unit: FSDPModule) -> None:
    """Makes a unit sharded over one rank copy its shards from host to device when its gather begins, in a side stream.

    FSDP2 itself copies them when the gather is waited for, in the compute stream, so the copy would not overlap.
    """
    for group in groups_of(unit):
        copies = _Copies()
        group.unshard = partial(_begin_copies, weakref.ref(group), copies)
        group.wait_for_unshard = partial(_use_copies, weakref.ref(group), copies)


@dataclass
class _Copies:
    """Device copies of a group's shards that were begun for one gather; FSDP2 may drop a gather without waiting for it.

    gather   FSDP2's result object of that gather, compared by identity; None: no copies are under way
    shards   the copies, in the order of the group's parameters
    """

    gather: Any = None
    shards: list[torch.Tensor] = field(default_factory=list)


def _begin_copies(owner: weakref.ref[Any], copies: _Copies, *args: Any, **kwargs: Any) -> None:
    """Begins a group's gather and, in FSDP2's copy-in stream, the copies of its shards. Stands for its `unshard`."""
    group = owner()
    # None: the module was freed
    if group is not None:
        type(group).unshard(group, *args, **kwargs)
        # called twice for one gather (by a prefetch, then by the unit itself): the second call copies nothing
        if group._all_gather_result is not None and group._all_gather_result is not copies.gather:
            copies.gather = group._all_gather_result
            with group.device_handle.stream(group.comm_ctx.all_gather_copy_in_stream):
                shards = (param._sharded_param_data for param in group.fsdp_params)
                copies.shards = [shard.to(group.device, non_blocking=True) for shard in shards]


def _use_copies(owner: weakref.ref[Any], copies: _Copies) -> None:
    """Waits for a group's gather, which reads the device copies if they belong to it. Stands for `wait_for_unshard`."""
    group = owner()
    # None: the module was freed
    if group is None:
        return
    kept = [param._sharded_param_data for param in group.fsdp_params]
    # copies that were begun for a gather that FSDP2 dropped may hold weights from before an update
    here = copies.gather is not None and group._all_gather_result is copies.gather
    if here:
        group.device_handle.current_stream().wait_stream(group.comm_ctx.all_gather_copy_in_stream)
    for param, copy in zip(group.fsdp_params, copies.shards if here else (), strict=False):
        param._sharded_param_data = copy
    try:
        type(group).wait_for_unshard(group)  # the copy-in stream waits behind it, so the copies may be freed below
    finally:  # the shards on the host are what the optimizer updates, so they must be put back after an error too
        for param, shard in zip(group.fsdp_params, kept, strict=True):
            param._sharded_param_data = shard
        copies.gather, copies.shards = None, []


class HostGradients:
    """Accumulates on the host, over a step's micro-batches, the gradients of units whose shards lie there.

    FSDP2 adds a gradient to the sum within backward and waits there for its copy, so the device would idle. Here a
    backward only copies, as the first one does with FSDP2; its gradients are added after the next backward.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._params = [param for unit in units for group in groups_of(unit) for param in group.fsdp_params]
        self._coming: list[tuple[Any, DTensor, Any]] = []  # (parameter, gradient, event behind its copy)

    def start_step(self) -> None:
        """Drops the gradients of the last step."""
        self._sums: dict[int, DTensor] = {}  # id of an `FSDPParam` -> sum of its gradients so far
        self._coming.clear()

    def take(self) -> None:
        """Takes the last backward's gradients from the shards, and adds those of the backward before to the sums."""
        self._add()
        for param in self._params:
            gradient = param.sharded_param.grad
            if gradient is not None:
                self._coming.append((param, gradient, param.grad_offload_event))
                param.sharded_param.grad = param.grad_offload_event = None

    @torch.no_grad()
    def _add(self) -> None:
        """Waits for the copies of the gradients that `take` took last, and adds these to the sums."""
        for param, gradient, event in self._coming:
            if event is not None:
                event.synchronize()
            if id(param) in self._sums:
                self._sums[id(param)].to_local().add_(gradient.to_local())
            else:
                self._sums[id(param)] = gradient
        self._coming.clear()

    def put(self) -> None:
        """Sets each shard's gradient to its sum over the step; called after the last backward, waits for all copies."""
        self.take()
        self._add()
        for param in self._params:
            param.sharded_param.grad = self._sums.pop(id(param), None)


def can_cut(param: torch.Tensor) -> bool:
    """Whether FSDP2 can shard a parameter of this dtype; 2.11 makes every shard require gradients, so no integers."""
    return param.is_floating_point() or param.is_complex() or torch.__version__ >= (2, 12)


def reduce_unused(root: FSDPModule) -> None:
    """Makes each rank reduce zeros for parameters that its own backward does not reach, since other ranks' may."""
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    # torch before 2.13
    assert isinstance(root, torch.nn.Module)
    for unit in root.modules():
        for group in groups_of(unit) if isinstance(unit, FSDPModule) else ():
            group.post_backward = partial(_with_zeros, weakref.ref(group))  # no cycle, which would keep process groups


def _with_zeros(owner: weakref.ref[Any], *unused: Any) -> None:
    """Runs a group's `post_backward` with zeros for missing gradients, so that all ranks reduce equal sizes."""
    group = owner()
    if group is not None:
        # only where the unit reduces now: in other micro-batches gradients are kept
        for fsdp_param in group.fsdp_params if group.reduce_grads else ():
            param = getattr(fsdp_param, "_unsharded_param", None)
            # frozen, not gathered, or an earlier micro-batch has left a gradient that will be reduced
            if param is None or not param.requires_grad or fsdp_param.unsharded_accumulated_grad is not None:
                continue
            # torch's own attribute, since under `prepare` the parameter's class has a `grad` property for scripts
            if torch.Tensor.grad.__get__(param) is None:
                torch.Tensor.grad.__set__(param, torch.zeros_like(param))
        type(group).post_backward(group, *unused)


def know_detach() -> None:
    """Gives DTensor a rule for `detach_`, which autograd calls on a weight gathered in a forward without gradients."""
    propagator, operation = DTensor._op_dispatcher.sharding_propagator, torch.ops.aten.detach_.default
    if operation not in propagator.op_strategy_funcs:
        propagator.register_op_strategy(operation, propagate_single_input_strategy)


def refuse_transforms(unit: torch.nn.Module, name: str) -> None:
    """Makes a unit raise `RefusedPlan` if it is called inside a transform of `torch.func`; does nothing in torch 2.13.

    name   of the unit, the subject of the message
    """

    def refuse(*unused: Any) -> None:
        if transforming():
            raise RefusedPlan(f"{name}{IN_TRANSFORM}")

    if not UNITS_IN_TRANSFORMS:
        # before FSDP2's own hook, which gathers
        unit.register_forward_pre_hook(refuse, prepend=True)


def await_unseen(unit: FSDPModule, inputs: Any, output: Any) -> None:
    """Makes FSDP2 gather a unit's weights for backward if the gradient arrives at tensors that it does not hook itself.

    FSDP2 hooks the tensors of the output that torch's tree functions find. This adds those in objects of the user's
    classes, and the bases of outputs that are views, since an operation in place on a view (`y = block(x); y += x`)
    drops the view's hook.

    inputs   (args, kwargs) of the unit's call;  output  what it returned
    """
    # bases that belong to the caller are left out: their gradient comes only when the unit's backward is over
    theirs = {id(tensor) for leaf in _tensors(inputs) for tensor in (leaf, leaf._base)}
    bases = [leaf._base for leaf in _tensors(output) if leaf.requires_grad and id(leaf._base) not in theirs]
    if waits := [tensor for tensor in (*hidden(output), *bases) if tensor is not None and tensor.requires_grad]:
        unit._get_fsdp_state()._register_pre_backward_hook(waits)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Returns the tensors in a nest of tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def outlive(module: nn.Module, output: Any) -> Any:
    """Returns a model's output with clones of the parameters in it (a learned temperature), whose memory FSDP2 frees.

    Raises `RefusedPlan` if a tensor of it is computed from shards, outside of the forward of their unit.
    """
    gathered = {param.untyped_storage()._cdata for param in module.parameters() if not isinstance(param, DTensor)}

    def keep(leaf: torch.Tensor) -> torch.Tensor:
        of_unit = isinstance(leaf, DTensor)
        leaf = leaf.clone() if of_unit else leaf  # an operation that `OutsideReads` can intercept, to gather the weight
        if isinstance(leaf, DTensor):
            raise RefusedPlan(
                "the model's output is computed from parameters outside the forward of the unit that holds them, "
                "where zero=3 has only pieces of them: name units with wrap= so that a unit's parameters are used "
                "inside its forward, or use zero=2"
            )
        if leaf.untyped_storage()._cdata not in gathered and not of_unit:
            return leaf
        copy = leaf.clone()
        copy.is_weight = True  # else a dim as large as the batch would be taken for samples
        return copy

    change_hidden(output, keep)
    return tree_map_only(torch.Tensor, keep, output)


def without_margin(output: Part) -> torch.Tensor:
    """Returns `output`, as a view without margin if it has a `margin` (deep halos).

    Otherwise the gradient would arrive through the margin, and not at the tensor that FSDP2 hooks.
    """
    return output if output.margin is None else output.view_as(output)


def weakly(method: Callable[..., Any], index: int) -> Callable[[torch.Tensor], None]:
    """Returns a parameter's hook that calls `method(index, parameter)` as long as the method's object lives.

    A strong reference would keep the technique, and its process groups, alive as long as the module.
    """
    known = weakref.WeakMethod(method)

    def hook(param: torch.Tensor) -> None:
        called = known()
        if called is not None:
            called(index, param)

    return hook


def lay_empty(module: nn.Module, home: Callable[[torch.Tensor], torch.device]) -> None:
    """Allocates uninitialised memory for each parameter and buffer; a buffer that several modules share stays shared.

    home   from a parameter or buffer to the device on which it is to lie
    """
    made: dict[torch.Tensor, torch.Tensor] = {}  # buffer -> its new tensor

    def empty(old: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialised tensor in place of `old`."""
        new = torch.empty_like(old, device=home(old))
        return new if isinstance(old, nn.Parameter) else made.setdefault(old, new)

    module._apply(empty)
