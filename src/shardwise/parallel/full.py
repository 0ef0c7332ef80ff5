"""ZeRO-3 by FSDP2 (made in recipe; see scripts/stepping). Time: simulator/sharded, cut, step, stages, quick.

    forward    block i: all-gather w_i . compute . free
    backward   block i: all-gather w_i . compute g_i . reduce-scatter -> g_i,r . free
    optimizer  |w_r| <- |w_r|, |g_r|, |state_r|

Bytes on the wire over dp_shard: 3 (N-1)/N P for each micro-batch. With replicas (HYBRID_SHARD) the gradient shards
are summed over dp_replicate once for each optimizer step: 2 (R-1)/R P/N.
Bytes at rest: 1/N of everything; in flight, the block that computes and the one fetched ahead.
Source: Rajbhandari et al., "ZeRO" (SC 2020), section 5.3; Zhao et al., "PyTorch FSDP" (VLDB 2023).

Each parameter is cut along its first dim that the ranks divide, so that ranks are balanced; along dim 0, unevenly,
where there is none. A parameter without dims or elements is not cut: all ranks hold it, the first of dp_shard updates
it. FSDP2's own division by the ranks is switched off: the engine divides once.

With `host` shards, gradients and state lie in the host's memory (FSDP2's `CPUOffloadPolicy`): |w_r| goes to the device
before each gather, one unit ahead, and g_i,r to the host after each reduction, where it is added up.

What this does not do: hold a parameter that two units share in one of them (it stays with the root unit).
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
    """ZeRO-3: shards of parameters for optimizer and module alike, which units gather while they compute."""

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
        """Shard the parameters of a module's units, and of what is in none; but for `absent` ones, of other stages.

        elsewhere  gives memory for the shards of units (flat, without values), which stay where that is None
        host       shards lie in the host's memory, beside their gradients and what the optimizer keeps
        """
        self.module = module
        self._elsewhere = elsewhere
        self.moved: ShardMemory | None = None
        self.host = host
        self._absent = {param for name, param in module.named_parameters() if name in absent}  # other stages'
        self.precision = precision
        self.order = order
        self.ranks = mesh.shard.size
        self._replicas = mesh.replicate.size
        self.units = [*units, module]
        self._holders, self._shards = mesh.gradients, mesh.shard
        here = [param for param in module.parameters() if param not in self._absent]
        self.pairs = pairs_in(module)  # names of those that are complex outside
        self._of_pairs = {id(param) for name, param in module.named_parameters() if name in self.pairs}
        self._whole = {id(param) for param in here if not (self._dims(param) and param.numel() and can_cut(param))}
        self._whole_gradients: dict[int, torch.Tensor] = {}  # index of an uncut parameter -> its reduced gradient
        self._used_now: set[int] = set()
        self._arrived: Arrived | None = None
        self._used: set[int] = set()
        self.written = False  # into shards, past the optimizer
        self.heard: Callable[[torch.Tensor], None] = lambda param: None  # told of each gradient that arrives
        paths = {id(child): path for path, child in module.named_modules()}
        self._names = [f"unit '{paths[id(unit)]}'" if paths[id(unit)] else "the root unit" for unit in self.units]
        events = [*self._names, _END, *(way.format(name) for way in (_GATHER, _REDUCE) for name in self._names)]
        self._trail = Trail(mesh.gradients, events, mesh.device)
        self._shard(module, units, mesh)
        self.slots: list[Slot] = []
        self.params: list[Any] = []  # DTensors, and the few whole ones
        self._complex: list[bool] = []  # of each, whether it is one of pairs

    def _dims(self, param: torch.Tensor) -> torch.Size:
        """Returns the sizes of the dims that may be cut: both parts of a complex number stay on one rank."""
        return param.shape[:-1] if id(param) in self._of_pairs else param.shape

    def _shard(self, module: nn.Module, units: list[nn.Module], mesh: Mesh) -> None:
        """Shards units, inner ones first, then the root by FSDP2, whose division is off, and hooks their forwards."""
        assert mesh.device_mesh is not None
        know_detach()
        device_mesh = mesh.device_mesh if self._replicas > 1 else mesh.device_mesh["dp_shard"]
        ranks = mesh.shard.size
        precision = self.precision

        def placement(param: nn.Parameter) -> Shard | None:
            even = [dim for dim, size in enumerate(self._dims(param)) if size % ranks == 0 and size > 0]
            return Shard(even[0]) if even and even[0] != 0 else None  # None: FSDP2's own choice, dim 0

        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute if precision.mixed else None,
            reduce_dtype=precision.reduce if precision.reduce != precision.compute else None,
            cast_forward_inputs=False,
        )
        whole = {param for param in module.parameters() if id(param) in self._whole}
        frees = mesh.plan.sharded.gathers > 1  # gathered anew in backward, so freed after forward
        options = {"mesh": device_mesh, "reshard_after_forward": frees, "shard_placement_fn": placement}
        options |= {"mp_policy": policy, "ignored_params": whole | self._absent}
        options |= {"offload_policy": CPUOffloadPolicy(pin_memory=can_pin(mesh.device))} if self.host else {}
        for unit in [*inner_first(units), module]:
            fully_shard([unit], **options)  # a list: torch 2.11 takes no `ModuleList` by itself
        shards = [child for child in module.modules() if isinstance(child, FSDPModule)]
        for shard in shards:
            shard.set_gradient_divide_factor(1.0)  # gradients are sums here: the engine divides by the global weight
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
            if self._replicas == 1:  # else ranks of several groups, which need not gather in one order
                gathers, reduces = (partial(self._trail.mark, way.format(name)) for way in (_GATHER, _REDUCE))
                announce(unit, gathers, reduces)
            if mesh.plan.domain_depth > 1:  # deep halos: gradients that arrive by a margin would pass FSDP2 by
                unit.register_forward_hook(lambda m, a, output: tree_map_only(Part, without_margin, output))
        module.register_forward_hook(lambda m, a, o: self._trail.mark(_END))
        module.register_forward_hook(lambda m, a, o: outlive(self.module, o), prepend=True)
        for unit in self.units:
            unit.register_forward_hook(lambda m, a, k, output: await_unseen(m, (a, k), output), with_kwargs=True)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # `await_unseen` hooks its base

    def place(self, device: torch.device) -> list[tuple[str, nn.Parameter]]:
        """Give the shards memory, without values yet. Returns (name, shard) of each parameter that is held here."""
        with without(self.module, self._absent), converting():
            lay_empty(self.module, partial(self.home, device=device))
            self._lay_elsewhere()
            return list(self.module.named_parameters())

    def home(self, tensor: torch.Tensor, device: torch.device) -> torch.device:
        """Returns where a parameter or buffer lies of a module on `device`."""
        return CPU if self.host and isinstance(tensor, DTensor) else device

    def _lay_elsewhere(self) -> None:
        if self._elsewhere is None:
            return
        self.moved = moved = self._elsewhere([shards_of(unit) for unit in self.units])
        # the first units of them
        for number, (unit, memory) in enumerate(zip(self.units, moved.memory if moved else [], strict=False)):
            assert moved is not None
            lay_shards(unit, memory)
            around_gathers(unit, partial(moved.before_gather, number), partial(moved.after_gather, number))

    def materialise(self, value_of: ValueOf, device: torch.device) -> None:
        """Give every shard its slice of the full initial value, one parameter at a time."""
        for name, param in self.place(device):
            full = value_of(name)  # in its own dtype: a copy of all of it is what a rank may not have room for
            if isinstance(param, DTensor):
                put_shard(param, full)
            else:
                param.detach().copy_(full)
            if self.moved is not None:
                self.moved.let_go()

    def make_slots(self) -> None:
        """Make what the optimizer updates, on the memory of the module's shards; to be called once they have values."""
        for name, param in self.module.named_parameters():
            if param.requires_grad:
                shape = param.shape[:-1] if name in self.pairs else param.shape
                index = len(self.params)
                self.params.append(param)
                self._complex.append(name in self.pairs)
                self.slots.append(Slot(name, shape, nn.Parameter(self.piece(index, param.detach())), whole=False))
        self._watch_use()

    def _outside(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the index-th parameter's layout as the optimizer sees it: pairs as complex numbers."""
        return as_complex(tensor) if self._complex[index] else tensor

    def piece(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece, for the optimizer, of a tensor that lies as the index-th parameter does."""
        if isinstance(tensor, DTensor):
            return self._outside(index, tensor.to_local())
        return self._uncut_piece(self._outside(index, tensor))

    def _gradient(self, index: int) -> torch.Tensor:
        """Returns this rank's piece of a gradient, on the memory of the parameter's own."""
        param, own = self.params[index], torch.Tensor.grad  # not what a script sees in its place
        grad = own.__get__(param)
        # FSDP2 lays the gradients of a unit end to end in one buffer; `view_as_complex` takes even offsets alone
        if self._complex[index] and grad.to_local().storage_offset() % 2:
            grad = DTensor(grad.to_local().clone(), grad._spec, requires_grad=False)
            own.__set__(param, grad)
        return self.piece(index, grad)

    def _uncut_piece(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece (1-d) of a parameter that cannot be cut: all of it on the first of dp_shard."""
        return whole.view(-1)[: whole.numel() if self._shards.index == 0 else 0]

    def _uncut(self) -> list[int]:
        """Returns the indices of the parameters that FSDP2 does not shard."""
        return [index for index, param in enumerate(self.params) if not isinstance(param, DTensor)]

    def _watch_use(self) -> None:
        """Note which parameters backward reaches, on the gathered parameters that a unit holds while it runs."""
        index_of = {slot.name: index for index, slot in enumerate(self.slots)}
        for unit in self.units:
            named = [(child, leaf, index_of.get(name)) for child, leaf, name in self.inside(unit)]
            trained = [(child, leaf, index) for child, leaf, index in named if index is not None]
            unit.register_forward_pre_hook(lambda m, a, trained=trained: self._hook_gathered(trained))

    def inside(self, unit: nn.Module) -> list[tuple[nn.Module, str, str]]:
        """Returns (module, attribute, name) of each of a unit's parameters, without those of units inside it."""
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
        """Hooks the gathered parameters of a unit that runs, so that the gradients' arrival is noted."""
        for child, leaf, index in trained:
            param = child._parameters[leaf]
            # a DTensor is still the shard: it was not gathered for this call, and no gradient comes to it here
            watched = param is None or isinstance(param, DTensor) or hasattr(param, "_use_is_watched")
            if watched or not param.requires_grad:  # switched off for this call
                continue
            param._use_is_watched = True  # FSDP2 keeps the object and gives it its storage back each time
            param.register_post_accumulate_grad_hook(weakly(self._note_use, index))

    def _note_use(self, index: int, param: torch.Tensor) -> None:
        self._used_now.add(index)
        self.heard(param)

    def use_as_made(self, arrived: Arrived) -> None:
        """Call a function for each gradient that a unit has reduced, and keep none of them."""
        self._arrived = arrived
        for index, param in enumerate(self.params):
            if isinstance(param, DTensor):
                param.register_post_accumulate_grad_hook(weakly(self._reduced, index))

    def _reduced(self, index: int, param: torch.Tensor) -> None:
        # a unit that ran twice reduces twice, first zeros; what this rank's backward did not reach may be nobody's
        if self._arrived is not None and index in self._used_now:
            slot = self.slots[index]
            slot.master.grad = self._gradient(index)
            param.grad = None
            self._arrived([slot], index, None)

    def start_step(self) -> None:
        """Forget the last step's gradients."""
        if self.moved is not None:  # what others than gathers have read of shards that lie elsewhere
            self.moved.let_go()
        for param, slot in zip(self.params, self.slots, strict=True):
            param.grad = None
            slot.master.grad = None
        self._whole_gradients.clear()
        if self._gradients is not None:  # shards lie in the host's memory, and so do gradients
            self._gradients.start_step()
        if self.order is not None:  # deterministic
            self.order.start_step()

    def start_micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch, which is reduced over dp_shard, the last one over dp_replicate too."""
        assert isinstance(self.module, FSDPModule)
        self._used_now = set()
        self.module.set_is_last_backward(last)
        if self._replicas > 1:
            self.module.set_requires_all_reduce(last)

    def expect_pieces(self) -> None:
        """Nothing to do: a unit that would run more than once so is refused by the look at a few samples."""

    def finish_micro_batch(self) -> set[int]:
        """Returns which parameters (by index) this rank's backward reached."""
        # deterministic: FSDP2 gives our reduce-scatter what it shards, and what it leaves alone is added here
        for index in self._uncut() if self.order is not None else ():
            param = self.params[index]
            if param.grad is not None and param.numel():
                assert self.order is not None
                self.order.add(index, self._padded(param.grad.detach()))
                param.grad = None
        if self._gradients is not None:  # they lie in the host's memory
            self._gradients.take()
        for unit in self.units:  # what a backward of the module's own ran again has no end that FSDP2 sees
            unit.reshard()
        return self._used_now

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the tensor flat (1-d), with zeros behind it to a size that the ranks divide."""
        flat = whole.new_zeros(-(-whole.numel() // self.ranks) * self.ranks)
        flat[: whole.numel()] = whole.reshape(-1)
        return flat

    def finish_step(self, used: set[int]) -> None:
        """Sets each master's gradient to this rank's reduced shard, None where no rank used the parameter."""
        self._used = used
        if self._gradients is not None:  # they lie in the host's memory
            self._gradients.put()
        if not self._whole_gradients:  # once in a step, however often this is called
            for index in self._uncut():
                param = self.params[index]
                # zeros where this rank's backward did not come: all ranks take part in the sum
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
                slot.master.grad = self._gradient(index)  # reduced by FSDP2 already, in backward

    def set_gradient(self, index: int, value: DTensor | None) -> None:
        """Replace a parameter's gradient for this step, as a script does; None: it has none."""
        torch.Tensor.grad.__set__(self.params[index], value)
        (self._used.discard if value is None else self._used.add)(index)
        self.slots[index].master.grad = None if value is None else self._gradient(index)

    def place_gradient(self, index: int, whole: torch.Tensor | None) -> None:
        """Set a parameter's gradient to this rank's piece of a whole tensor, past backward; None takes it away."""
        param = self.params[index]
        if whole is None:
            torch.Tensor.grad.__set__(param, None)  # past what a script sees in the attribute's place
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
        """Replace the function that refuses ranks in different units by `wrap` of it, which may say more."""
        self._trail.refuse = wrap(self._trail.refuse)  # type: ignore[method-assign]

    def take_uncut(self) -> None:
        """Set the masters' gradients of parameters that are not cut to what those parameters have now."""
        for index in self._whole_gradients:
            grad, slot = self.params[index].grad, self.slots[index]
            (self._used.discard if grad is None else self._used.add)(index)
            slot.master.grad = None if grad is None else self.piece(index, grad.detach())

    @torch.no_grad()
    def share_uncut(self) -> None:
        """Give every rank the gradients of uncut parameters, as the first of dp_shard has clipped them. Collective."""
        gradients = [gradient for gradient in self._whole_gradients.values() if gradient.numel()]
        broadcast_together(gradients, self._shards, 0, "control")

    def wide_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns []: the shards, which units gather from, are the masters."""
        return []

    @torch.no_grad()
    def publish(self, *, rounded: bool = False) -> None:
        """Bring weights up to the masters, `rounded` or not: shards lie on them, what is not cut is broadcast."""
        for index, (param, slot) in enumerate(zip(self.params, self.slots, strict=True)):
            bring_back(slot.master, self.piece(index, param.detach()))
        for index in self._uncut():
            if self.params[index].numel():
                broadcast(self.params[index].detach(), self._shards, 0, "parameters")

    def take_weights(self) -> None:
        """Let masters follow parameters that are not cut into other memory (`p.data = x`); shards are the masters."""
        for index in self._uncut():
            self.slots[index].master.data = self.piece(index, self.params[index].detach())

    def load_masters(self, index: int, value: torch.Tensor) -> None:
        """Nothing to do: the shards are the masters."""

    def flat_gradients(self) -> list[torch.Tensor] | None:
        """Returns None: each gradient's shard has memory of its own, so no flat tensor holds several."""
        return None

    def gradient_buffers(self) -> list[torch.Tensor | None]:
        """Returns the gradient shards that FSDP2 keeps beside `.grad` until the last micro-batch, under replicas."""
        return partial_reductions(self.module)

    def select(self, index: int, whole: torch.Tensor, shard_rank: int) -> torch.Tensor:
        """Returns the view of a whole parameter that is the piece of rank `shard_rank` (`torch.chunk`'s cut)."""
        param = self.params[index]
        if not isinstance(param, DTensor):
            return whole.view(-1)[: whole.numel() if shard_rank == 0 else 0]
        dim = param.placements[-1].dim
        size = -(-whole.shape[dim] // self.ranks)
        low = min(shard_rank * size, whole.shape[dim])  # the last ranks may have less, or nothing
        return whole.narrow(dim, low, min(size, whole.shape[dim] - low))

    def whole(self, index: int, piece: torch.Tensor) -> Gathering:
        """Returns the gathering of a whole tensor of the index-th parameter's shape, from every rank's piece."""
        return joined(self, index, self.slots[index].shape, piece, self._shards)

    def full_parameter(self, index: int) -> Gathering:
        """Returns the gathering of the whole weight."""
        param = self.params[index].detach()
        if isinstance(param, DTensor):
            return self.whole(index, self.piece(index, param))
        return ready(self._outside(index, param))

    def full_gradient(self, index: int) -> Gathering:
        """Returns the gathering of the whole gradient, divided and clipped; of None where no rank used it."""
        if index in self._whole_gradients:
            gradient = self._whole_gradients[index].clone()
            if gradient.numel():  # the first of dp_shard alone has divided and clipped it
                broadcast(gradient, self._shards, 0, "control")
            return ready(self._outside(index, gradient) if index in self._used else None)
        gradient = self.params[index].grad
        unused = gradient is None or index not in self._used
        return ready(None) if unused else self.whole(index, self.piece(index, gradient.detach()))
