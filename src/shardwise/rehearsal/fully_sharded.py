"""zero=3 of one rank (`FullShard`, FSDP2) on fake tensors: collectives are noted, nothing is sent.

FSDP2 asks its process group for the number of ranks and this rank; torch's fake process group answers. FSDP2's
all-gathers and reduce-scatters are replaced by `Exchanges`, which note sizes and allocate what a backend allocates.

FSDP2 itself runs, because a model of what it allocates and frees would have to know units by name, nested units, and
weights that are read while their unit does not run.

What this does not do: replicas of shards, whose sums are taken in place; streams, because of which allocations may live
a little longer on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group, _unregister_process_group
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.comm import Axis, Ledger
from shardwise.engine.materialise import empty_parameters
from shardwise.layout import Plan
from shardwise.memory.chunks import given_values
from shardwise.mesh import Mesh
from shardwise.parallel.full import FullShard
from shardwise.precision import Precision
from shardwise.trace.conversions import converting

CPU = torch.device("cpu")
_numbers = count()  # makes the names of process groups unique
_NO_THREAD = -1  # makes meshes of a rehearsal differ from those of a run, so that DTensor shares no caches between them


@contextmanager
def silent_mesh(plan: Plan, ranks: int) -> Iterator[Mesh]:
    """Context that yields the mesh of rank 0 of `ranks` ranks in dp_shard, whose group sends nothing.

    The process groups that torch has already stay as they are.
    """
    kind, group = dist.ProcessGroup.BackendType.CUSTOM, dist.ProcessGroup(0, ranks)
    group._register_backend(CPU, kind, FakeProcessGroup._create_internal(0, ranks))  # which keeps the name
    group._set_default_backend(kind)
    group._set_group_name(f"shardwise-rehearsal-{next(_numbers)}")
    _register_process_group(group.group_name, group)
    try:
        rows = DeviceMesh(CPU.type, list(range(ranks)), mesh_dim_names=("dp_shard",), _init_backend=False, _rank=0)
        rows._dim_group_names = [group.group_name]
        rows._thread_id = _NO_THREAD
        shard = Axis("dp_shard", ranks, 0, group, tuple(range(ranks)), rehearsal=Ledger())
        alone = {name: Axis.alone(name) for name in ("dp_replicate", "tp", "pp", "ep")}
        yield Mesh(
            plan, 0, CPU, alone["dp_replicate"], shard, shard, shard, (), alone["tp"], alone["pp"], shard, alone["ep"],
            shard, shard, rows,
        )  # fmt: skip
    finally:
        _unregister_process_group(group.group_name)


class Exchanges:
    """Stands in for the all-gather and reduce-scatter of one FSDP2 unit, and sends nothing.

    seen     list to which the elements of each all-gather are appended
    copies   whether a reduction works on a copy of its input, as gloo's does
    crosses  whether shards come from the host without a cast, so that a gather allocates their copy on the device
    """

    def __init__(self, seen: list[int], copies: bool, crosses: bool):
        self.seen, self.copies, self.crosses = seen, copies, crosses

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an empty tensor; FSDP2 calls it for the output of a collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any = None,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Notes an all-gather (`op` is None), or allocates what a reduction allocates for the time that it runs."""
        if op is None:
            self.seen.append(output_tensor.numel())
            if self.crosses:
                torch.empty_like(input_tensor)  # for the peak alone
        elif self.copies:
            torch.empty_like(input_tensor)  # for the peak alone


class FakeFullShard(FullShard):
    """`FullShard` on fake tensors, whose collectives are noted and not sent.

    units   modules whose weights are gathered together; weights outside of all of them belong to the root
    absent  names of parameters that other stages hold
    spread  names of experts' parameters, which ep deals to ranks: they are not gathered, and stay as they are
    fake    the mode of the module's tensors
    copies  whether reductions work on copies (`Exchanges`)
    host    whether shards of weights rest on the host
    freed   whether each gradient shard is freed as soon as it is reduced
    """

    def __init__(
        self, module: nn.Module, units: list[nn.Module], mesh: Mesh, precision: Precision, absent: set[str],
        spread: set[str], fake: FakeTensorMode, *, copies: bool, host: bool = False,
        freed: bool = False,
    ):  # fmt: skip
        kept = {name: param for name, param in module.named_parameters() if name in spread}
        empty_parameters(module, precision, mesh.device, absent | spread)
        super().__init__(module, units, mesh, precision, absent | spread, host=host)
        given_values(units)
        self.seen: list[int] = []  # elements of each gather, in order
        for unit in self.units:
            exchanges: Any = Exchanges(self.seen, copies, host and not precision.mixed)
            unit.set_custom_all_gather(exchanges)
            unit.set_custom_reduce_scatter(exchanges)
        with fake, torch.no_grad():
            self.place(mesh.device)
            self.make_slots()
        self._freed = host or freed
        for param in self._cut() if self._freed else ():
            param.register_post_accumulate_grad_hook(_gone)
        for name, param in kept.items():
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._parameters[leaf] = param

    def place(self, device: torch.device) -> list[tuple[str, nn.Parameter]]:
        """Allocates the shards without values or DTensor operations; returns (name, shard) of each parameter."""

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                local = torch.empty(tensor._local_tensor.shape, dtype=tensor.dtype)
                return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

        with converting():
            self.module._apply(made)
        return list(self.module.named_parameters())

    def taken(self) -> list[int]:
        """Returns the elements of each all-gather since the last call, in order, and forgets them."""
        gathers = self.seen[:]
        self.seen.clear()
        return gathers

    @property
    def sizes(self) -> list[int]:
        """Returns the elements of the sharded weights of each FSDP2 unit but the root, in the order of modules."""
        sizes = []
        for unit in self.units[:-1]:
            cut = (child._parameters[leaf] for child, leaf, _ in self.inside(unit))
            sizes.append(sum({id(weight): weight.numel() for weight in cut if isinstance(weight, DTensor)}.values()))
        return sizes

    @property
    def held_elements(self) -> int:
        """Returns this rank's elements of all weight shards with padding, as bytes divided by a master's item size."""
        shards = [param for param in self.module.parameters() if isinstance(param, DTensor)]
        return sum(_padded(shard) * shard.dtype.itemsize for shard in shards) // self.precision.master.itemsize

    @property
    def rows(self) -> Counter[tuple[int, int]]:
        """Returns {(size of the sharded dim, elements at each index of it): number of such trained weights}."""
        cut = [(param.shape[param.placements[-1].dim], param.numel()) for param in self._cut()]
        return Counter((rows, elements // rows) for rows, elements in cut)

    @property
    def held_gradients(self) -> int:
        """Returns the bytes of this rank's gradient shards after a backward; 0 if they are freed as they come."""
        return 0 if self._freed else sum(_padded(param) for param in self._cut()) * self.precision.master.itemsize

    def _cut(self) -> list[DTensor]:
        return [param for param in self.params if isinstance(param, DTensor)]


def _gone(param: torch.Tensor) -> None:
    """Drops a reduced gradient, as a copy to the host or an update within backward would."""
    param.grad = None


def _padded(param: DTensor) -> int:
    local = param._local_tensor
    return local.untyped_storage().nbytes() // local.element_size()
