"""ZeRO-3 by FSDP2 (engine/recipe, scripts/stepping). Forecast by sharded, cut, step, stages and quick of simulator.

    forward    block i: all-gather w_i . compute . free
    backward   block i: all-gather w_i . compute g_i . reduce-scatter -> g_i,r . free
    optimizer  |w_r| <- |w_r|, |g_r|, |state_r|

Bytes on the wire over dp_shard: 3 (N-1)/N P for each micro-batch. With replicas (HYBRID_SHARD) the gradient shards
are summed over dp_replicate once for each optimizer step: 2 (R-1)/R P/N.
Bytes at rest: 1/N of everything; unsharded are the block that computes and the prefetched one.
Source: Rajbhandari et al., "ZeRO" (SC 2020), section 5.3; Zhao et al., "PyTorch FSDP" (VLDB 2023).

Each parameter is sharded along its first dim whose size the number of ranks divides, so that ranks are balanced; if
there is none, along dim 0, unevenly. A parameter without dims or elements is replicated ("uncut"): all ranks hold it,
and the first of dp_shard updates it. FSDP2's own division by the ranks is switched off, since the engine divides once.

With `host` shards, gradients and state lie in the host's memory (FSDP2's `CPUOffloadPolicy`). |w_r| is copied to the
device before each gather, one unit ahead, and g_i,r to the host after each reduction, where it is accumulated.

What this does not do: hold a parameter that two units share in one of them (it belongs to the root unit).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from shardwise.comm import Gathering, Trail, all_reduce, broadcast, broadcast_together, ready
from shardwise.comm.tree import FixedOrder, ReduceInOrder
from shardwise.device import CPU, can_pin
from shardwise.mesh import Mesh
from shardwise.parallel.fsdp import (
    HostGradients,
    announce,
    around_gathers,
    await_unseen,
    can_cut,
    copy_ahead,
    know_detach,
    lay_empty,
    lay_shards,
    outlive,
    partial_reductions,
    put_shard,
    reduce_unused,
    refuse_transforms,
    shards_of,
    weakly,
    without,
    without_margin,
)
from shardwise.parallel.slots import Arrived, ShardMemory, Slot, ValueOf, bring_back, joined
from shardwise.part import Part
from shardwise.part.pairs import as_complex, as_pairs, pairs_in
from shardwise.precision import Precision
from shardwise.trace.blocks import inner_first
from shardwise.trace.conversions import converting

_END, _GATHER, _REDUCE = "the end of the forward", "the gathering of {}", "the reduction of {}"
USED_OUTSIDE = (
    "a parameter is used outside the forward of the unit that holds it, where zero=3 has only pieces of it: name units "
    "with wrap= so that a unit's parameters are used inside its forward, or use zero=2"
)


class FullShard:
    """ZeRO-3 (a `DataParallel`): optimizer and module hold shards of parameters, which units gather to compute."""

    in_pieces = True

    def __init__(
        self,
        module: nn.Module,
        units: list[nn.Module],
        mesh: Mesh,
        precision: Precision,
        absent: Collection[str] = (),
        order: FixedOrder | None = None,
        elsewhere: Callable[[list[list[torch.Tensor]]], ShardMemory | None] | None = None,
        host: bool = False,
    ):
        """Shards the parameters of each of `units`, and those in no unit as the root unit.

        absent     names of parameters of other pipeline stages, which get no memory;  order  None unless deterministic
        elsewhere  from the 1-d shards of each unit to other memory for some of them, or None; None: no such memory
        host       whether shards, gradients and optimizer state lie in the host's memory
        """
        self.module = module
        self._elsewhere = elsewhere
        self.moved: ShardMemory | None = None
        self.host = host
        self._absent = {param for name, param in module.named_parameters() if name in absent}
        self.precision = precision
        self.order = order
        self.ranks = mesh.shard.size
        self._replicas = mesh.replicate.size
        self.units = [*units, module]
        self._holders, self._shards = mesh.gradients, mesh.shard
        here = [param for param in module.parameters() if param not in self._absent]
        self.pairs = pairs_in(module)  # names of complex parameters, held as real ones with a last dim of 2
        self._of_pairs = {id(param) for name, param in module.named_parameters() if name in self.pairs}
        self._whole = {id(param) for param in here if not (self._dims(param) and param.numel() and can_cut(param))}
        self._whole_gradients: dict[int, torch.Tensor] = {}  # index of an uncut parameter -> its reduced gradient
        self._used_now: set[int] = set()  # indices of parameters that this micro-batch's backward has reached
        self._arrived: Arrived | None = None
        self._used: set[int] = set()  # indices of parameters that have a gradient in this step
        self.written = False  # whether a script wrote into shards; set and reset by scripts/weight_access
        self.heard: Callable[[torch.Tensor], None] = lambda param: None  # called with a parameter when its grad is set
        paths = {id(child): path for path, child in module.named_modules()}
        self._names = [f"unit '{paths[id(unit)]}'" if paths[id(unit)] else "the root unit" for unit in self.units]
        events = [*self._names, _END, *(way.format(name) for way in (_GATHER, _REDUCE) for name in self._names)]
        self._trail = Trail(mesh.gradients, events, mesh.device)
        self._shard(module, units, mesh)
        self.slots: list[Slot] = []
        self.params: list[Any] = []  # trainable parameters: DTensors, and plain tensors if uncut
        self._complex: list[bool] = []  # for each of `params` whether it is in `pairs`

    def _dims(self, param: torch.Tensor) -> torch.Size:
        """Returns the sizes of the dims that may be sharded: all but the dim of 2 of a complex parameter's pairs."""
        return param.shape[:-1] if id(param) in self._of_pairs else param.shape

    def _shard(self, module: nn.Module, units: list[nn.Module], mesh: Mesh) -> None:
        """Applies `fully_shard` to units (inner ones first) and then to the root, and adds this module's hooks."""
        assert mesh.device_mesh is not None
        know_detach()
        device_mesh = mesh.device_mesh if self._replicas > 1 else mesh.device_mesh["dp_shard"]
        ranks = mesh.shard.size
        precision = self.precision

        def placement(param: nn.Parameter) -> Shard | None:  # None: FSDP2's default, dim 0
            even = [dim for dim, size in enumerate(self._dims(param)) if size % ranks == 0 and size > 0]
            return Shard(even[0]) if even and even[0] != 0 else None

        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute if precision.mixed else None,
            reduce_dtype=precision.reduce if precision.reduce != precision.compute else None,
            cast_forward_inputs=False,
        )
        whole = {param for param in module.parameters() if id(param) in self._whole}
        frees = mesh.plan.sharded.gathers > 1  # weights are gathered again in backward, so they are freed after forward
        options = {"mesh": device_mesh, "reshard_after_forward": frees, "shard_placement_fn": placement}
        options |= {"mp_policy": policy, "ignored_params": whole | self._absent}
        options |= {"offload_policy": CPUOffloadPolicy(pin_memory=can_pin(mesh.device))} if self.host else {}
        for unit in [*inner_first(units), module]:
            fully_shard([unit], **options)  # a list: torch 2.11 takes no `ModuleList` by itself
        shards = [child for child in module.modules() if isinstance(child, FSDPModule)]
        for shard in shards:
            shard.set_gradient_divide_factor(1.0)  # keep sums, since the engine divides by the global weight
            shard.set_force_sum_reduction_for_comms(True)
            if self.order is not None:  # deterministic: in a fixed order of ranks
                shard.set_custom_reduce_scatter(ReduceInOrder(self.order))
        self._gradients = HostGradients(shards) if self.host else None
        for shard in shards if self.host and self.ranks == 1 and can_pin(mesh.device) else ():
            copy_ahead(shard)
        reduce_unused(module)  # ranks may differ inside a unit
        for unit, name in zip(self.units, self._names, strict=True):
            unit.register_forward_pre_hook(lambda m, a, name=name: self._trail.mark(name), prepend=True)
            refuse_transforms(unit, name)
            if self._replicas == 1:  # else the trail is over several replicas, which need not gather in one order
                gathers, reduces = (partial(self._trail.mark, way.format(name)) for way in (_GATHER, _REDUCE))
                announce(unit, gathers, reduces)
            if mesh.plan.domain_depth > 1:  # deep halos: FSDP2 would not see gradients that arrive through a margin
                unit.register_forward_hook(lambda m, a, output: tree_map_only(Part, without_margin, output))
        module.register_forward_hook(lambda m, a, o: self._trail.mark(_END))
        module.register_forward_hook(lambda m, a, o: outlive(self.module, o), prepend=True)
        for unit in self.units:
            unit.register_forward_hook(lambda m, a, k, output: await_unseen(m, (a, k), output), with_kwargs=True)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # `await_unseen` hooks its base

    def place(self, device: torch.device) -> list[tuple[str, nn.Parameter]]:
        """Allocates the shards' memory, uninitialised. Returns (name, shard) of each parameter that this rank holds."""
        with without(self.module, self._absent), converting():
            lay_empty(self.module, partial(self.home, device=device))
            self._lay_elsewhere()
            return list(self.module.named_parameters())

    def home(self, tensor: torch.Tensor, device: torch.device) -> torch.device:
        """Returns the device on which a parameter or buffer lies: the CPU for shards under `host`, else `device`."""
        return CPU if self.host and isinstance(tensor, DTensor) else device

    def _lay_elsewhere(self) -> None:
        if self._elsewhere is None:
            return
        self.moved = moved = self._elsewhere([shards_of(unit) for unit in self.units])
        for number, (unit, memory) in enumerate(zip(self.units, moved.memory if moved else [], strict=False)):
            assert moved is not None
            lay_shards(unit, memory)
            around_gathers(unit, partial(moved.before_gather, number), partial(moved.after_gather, number))

    def materialise(self, value_of: ValueOf, device: torch.device) -> None:
        """Allocates the shards, and fills them one by one from the parameters' full values, which `value_of` makes."""
        for name, param in self.place(device):
            full = value_of(name)  # not converted, since a rank may not have room for a second full copy
            if isinstance(param, DTensor):
                put_shard(param, full)
            else:
                param.detach().copy_(full)
            if self.moved is not None:
                self.moved.let_go()

    def make_slots(self) -> None:
        """Makes a slot, whose master is a view of the shard, for each trainable parameter; call after `materialise`."""
        for name, param in self.module.named_parameters():
            if param.requires_grad:
                shape = param.shape[:-1] if name in self.pairs else param.shape
                index = len(self.params)
                self.params.append(param)
                self._complex.append(name in self.pairs)
                self.slots.append(Slot(name, shape, nn.Parameter(self.piece(index, param.detach())), whole=False))
        self._watch_use()

    def _outside(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, laid out as the index-th parameter, as the optimizer sees it (pairs as complex numbers)."""
        return as_complex(tensor) if self._complex[index] else tensor

    def piece(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece, as the optimizer sees it, of a tensor sharded as the index-th parameter is."""
        if isinstance(tensor, DTensor):
            return self._outside(index, tensor.to_local())
        return self._uncut_piece(self._outside(index, tensor))

    def _gradient(self, index: int) -> torch.Tensor:
        """Returns this rank's piece of the index-th parameter's `.grad`, a view of the same memory."""
        param, own = self.params[index], torch.Tensor.grad  # torch's attribute; under `prepare` a property hides it
        grad = own.__get__(param)
        # FSDP2 lays the gradients of a unit end to end in one buffer; `view_as_complex` requires an even offset
        if self._complex[index] and grad.to_local().storage_offset() % 2:
            grad = DTensor(grad.to_local().clone(), grad._spec, requires_grad=False)
            own.__set__(param, grad)
        return self.piece(index, grad)

    def _uncut_piece(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece (1-d) of an uncut parameter: all of it on the first of dp_shard, else empty."""
        return whole.view(-1)[: whole.numel() if self._shards.index == 0 else 0]

    def _uncut(self) -> list[int]:
        """Returns the indices in `params` of the parameters that FSDP2 does not shard."""
        return [index for index, param in enumerate(self.params) if not isinstance(param, DTensor)]

    def _watch_use(self) -> None:
        """Hooks each unit's forward to watch the gathered parameters, which the module has only while the unit runs."""
        index_of = {slot.name: index for index, slot in enumerate(self.slots)}
        for unit in self.units:
            named = [(child, leaf, index_of.get(name)) for child, leaf, name in self.inside(unit)]
            trained = [(child, leaf, index) for child, leaf, index in named if index is not None]
            unit.register_forward_pre_hook(lambda m, a, trained=trained: self._hook_gathered(trained))

    def inside(self, unit: nn.Module) -> list[tuple[nn.Module, str, str]]:
        """Returns (module, attribute, path in the whole module) of each parameter of `unit`, without nested units'."""
        within = set(unit.modules())
        nested = [other for other in self.units if other is not unit and other in within]
        own = within.difference(*(set(other.modules()) for other in nested))
        return [
            (child, leaf, f"{path}.{leaf}" if path else leaf)
            for path, child in self.module.named_modules()
            if child in own
            for leaf in child._parameters
        ]

    def _hook_gathered(self, trained: list[tuple[nn.Module, str, int]]) -> None:
        """Hooks a running unit's gathered parameters, `trained` (module, attribute, index), to note their gradients."""
        for child, leaf, index in trained:
            param = child._parameters[leaf]
            # a DTensor is still the shard: it was not gathered for this call, so no gradient arrives at it
            watched = param is None or isinstance(param, DTensor) or hasattr(param, "_use_is_watched")
            if watched or not param.requires_grad:  # a script has switched it off for this call
                continue
            param._use_is_watched = True  # FSDP2 keeps this object and gives it its storage back for each gather
            param.register_post_accumulate_grad_hook(weakly(self._note_use, index))

    def _note_use(self, index: int, param: torch.Tensor) -> None:
        self._used_now.add(index)
        self.heard(param)

    def use_as_made(self, arrived: Arrived) -> None:
        """Has `arrived` called within backward for each gradient that a unit has reduced, and then drops it."""
        self._arrived = arrived
        for index, param in enumerate(self.params):
            if isinstance(param, DTensor):
                param.register_post_accumulate_grad_hook(weakly(self._reduced, index))

    def _reduced(self, index: int, param: torch.Tensor) -> None:
        # a unit that ran twice reduces twice, first zeros; if this rank did not use the parameter, perhaps none did
        if self._arrived is not None and index in self._used_now:
            slot = self.slots[index]
            slot.master.grad = self._gradient(index)
            param.grad = None
            self._arrived([slot], index, None)

    def start_step(self) -> None:
        """Drops the last step's gradients."""
        if self.moved is not None:  # pages of shards that were read outside of gathers
            self.moved.let_go()
        for param, slot in zip(self.params, self.slots, strict=True):
            param.grad = None
            slot.master.grad = None
        self._whole_gradients.clear()
        if self._gradients is not None:
            self._gradients.start_step()
        if self.order is not None:
            self.order.start_step()

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepares for a micro-batch. `last`: whether its gradients are summed over dp_replicate, too."""
        assert isinstance(self.module, FSDPModule)
        self._used_now = set()
        self.module.set_is_last_backward(last)
        if self._replicas > 1:
            self.module.set_requires_all_reduce(last)

    def expect_pieces(self) -> None:
        """Does nothing: if a unit's backward came in pieces, the look at a few samples has refused the plan."""

    def finish_micro_batch(self) -> set[int]:
        """Ends a micro-batch; returns the indices of the parameters that this rank's backward reached."""
        # deterministic: sharded gradients pass through `ReduceInOrder`, but FSDP2 does not reduce uncut ones
        for index in self._uncut() if self.order is not None else ():
            param = self.params[index]
            if param.grad is not None and param.numel():
                assert self.order is not None
                self.order.add(index, self._padded(param.grad.detach()))
                param.grad = None
        if self._gradients is not None:
            self._gradients.take()
        for unit in self.units:  # if the module's own backward ran a unit again, FSDP2 does not free its weights
            unit.reshard()
        return self._used_now

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns `whole` as 1-d, padded with zeros to a multiple of the number of ranks."""
        flat = whole.new_zeros(-(-whole.numel() // self.ranks) * self.ranks)
        flat[: whole.numel()] = whole.reshape(-1)
        return flat

    def finish_step(self, used: set[int]) -> None:
        """Sets the masters' gradients to this rank's pieces of the reduced ones, for indices in `used`; else None."""
        self._used = used
        if self._gradients is not None:
            self._gradients.put()
        if not self._whole_gradients:  # once in a step, however often this is called
            for index in self._uncut():
                param = self.params[index]
                # zeros if this rank's backward did not reach it, since all ranks take part in the all-reduce
                gradient = torch.zeros_like(param).detach() if param.grad is None else param.grad.detach()
                if gradient.numel() and self.order is not None:  # deterministic: in a fixed order of ranks
                    total = self.order.whole(index, self._padded(gradient))
                    gradient = total[: gradient.numel()].view(param.shape)
                elif gradient.numel():
                    all_reduce(gradient, self._holders, "gradients")
                self._whole_gradients[index] = gradient
                param.grad = gradient if index in used else None
            if self.order is not None:
                self.order.finish_step()
        for index, (param, slot) in enumerate(zip(self.params, self.slots, strict=True)):
            if index in self._whole_gradients:
                slot.master.grad = self.piece(index, self._whole_gradients[index]) if index in used else None
            elif index in used and param.grad is not None:
                slot.master.grad = self._gradient(index)  # FSDP2 has reduced it in backward

    def set_gradient(self, index: int, value: DTensor | None) -> None:
        """Replaces the index-th parameter's gradient by `value`, sharded as the parameter is; None removes it."""
        torch.Tensor.grad.__set__(self.params[index], value)
        (self._used.discard if value is None else self._used.add)(index)
        self.slots[index].master.grad = None if value is None else self._gradient(index)

    def place_gradient(self, index: int, whole: torch.Tensor | None) -> None:
        """Sets the index-th parameter's gradient to this rank's piece of the unsharded `whole`; None removes it."""
        param = self.params[index]
        if whole is None:
            torch.Tensor.grad.__set__(param, None)  # torch's attribute; under `prepare` a property hides it
            self.slots[index].master.grad = None
            self._used.discard(index)
        elif isinstance(param, DTensor):
            numbers = as_pairs(whole) if self._complex[index] else whole
            numbers = numbers.to(param.dtype).contiguous()
            piece = distribute_tensor(numbers, param.device_mesh, param.placements, src_data_rank=None)
            self.set_gradient(index, piece)
        else:
            param.grad = self._whole_gradients[index] = whole.to(param.dtype, copy=True)
            self.take_uncut()

    def tell_branches(self, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replaces the function that raises if ranks run different units by `wrap(function)`, which may say more."""
        self._trail.refuse = wrap(self._trail.refuse)  # type: ignore[method-assign]

    def take_uncut(self) -> None:
        """Sets the gradients of uncut parameters' masters from `param.grad`, which a script may have changed."""
        for index in self._whole_gradients:
            grad, slot = self.params[index].grad, self.slots[index]
            (self._used.discard if grad is None else self._used.add)(index)
            slot.master.grad = None if grad is None else self.piece(index, grad.detach())

    @torch.no_grad()
    def share_uncut(self) -> None:
        """Broadcasts uncut parameters' gradients from the first of dp_shard, which has clipped them. Collective."""
        gradients = [gradient for gradient in self._whole_gradients.values() if gradient.numel()]
        broadcast_together(gradients, self._shards, 0, "control")

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns [], since the masters are the module's own shards in every precision."""
        return []

    @torch.no_grad()
    def publish(self, *, rounded: bool = False) -> None:
        """Broadcasts uncut parameters from the first of dp_shard; shards are masters, so `rounded` has no effect."""
        for index, (param, slot) in enumerate(zip(self.params, self.slots, strict=True)):
            bring_back(slot.master, self.piece(index, param.detach()))
        for index in self._uncut():
            if self.params[index].numel():
                broadcast(self.params[index].detach(), self._shards, 0, "parameters")

    def take_weights(self) -> None:
        """Makes uncut parameters' masters views of them again, as `p.data = x` may have given them other memory."""
        for index in self._uncut():
            self.slots[index].master.data = self.piece(index, self.params[index].detach())

    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Does nothing: `materialise` has filled the shards, which are the masters."""

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns None, since the shards of gradients are separate tensors."""
        return None

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the gradient shards that FSDP2 keeps outside `.grad` until they are summed over replicas."""
        return partial_reductions(self.module)

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view of `whole`, shaped as the index-th parameter, that rank `shard_rank` of dp_shard holds."""
        param = self.params[index]
        if not isinstance(param, DTensor):
            return whole.view(-1)[: whole.numel() if shard_rank == 0 else 0]
        dim = param.placements[-1].dim
        size = -(-whole.shape[dim] // self.ranks)
        low = min(shard_rank * size, whole.shape[dim])  # the last ranks may hold fewer, or none
        return whole.narrow(dim, low, min(size, whole.shape[dim] - low))

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the gathering of a tensor in the index-th parameter's shape from every rank's `piece`."""
        return joined(self, index, self.slots[index].shape, piece, self._shards)

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the index-th parameter, unsharded."""
        param = self.params[index].detach()
        if isinstance(param, DTensor):
            return self.whole(index, self.piece(index, param))
        return ready(self._outside(index, param))

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the index-th parameter's unsharded gradient; it gives None if no rank used it."""
        if index in self._whole_gradients:
            gradient = self._whole_gradients[index].clone()
            if gradient.numel():  # the first of dp_shard alone has divided and clipped it
                broadcast(gradient, self._shards, 0, "control")
            return ready(self._outside(index, gradient) if index in self._used else None)
        gradient = self.params[index].grad
        unused = gradient is None or index not in self._used
        return ready(None) if unused else self.whole(index, self.piece(index, gradient.detach()))
