"""zero=3 of one rank (`FullShard`, FSDP2) on tensors without values: messages are noted, nothing is sent.

What FSDP2 asks of a backend is how many ranks there are and which one this is; a group of torch's that sends nothing
says so. Its gathers and reductions are ours (`Exchanges`): they note what would be sent, and hold what a backend holds.

To tell again what FSDP2 makes and frees took 340 lines, which did not know units by name, units inside one another, or
weights read while their unit does not run. On twelve rehearsals (four modules, one and two micro-batches, bf16 with
recompute) peaks, shards, gathers and operations were the same to the byte. One takes half as long again.

What this does not do: replicas of shards, whose sums are taken in place; streams, whose allocations may live a little
longer on a GPU.
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
_numbers = count()  # of groups: each has a name of its own
_NO_THREAD = -1  # so no mesh of a rehearsal equals a run's, which DTensor would give what it remembers of the other


@contextmanager
def silent_mesh(plan: Plan, ranks: int) -> Iterator[Mesh]:
    """Context: yields the mesh of the first of `ranks` ranks that shard; this process's groups stay as they are."""
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
    """FSDP2's gathers and reductions of one unit: the elements of each gather are appended to `seen`.

    copies  a reduction works on a copy of what it is given, as gloo's does
    crosses shards have come from the host just before; a cast on their way is played as an operation there
    """

    def __init__(self, seen: list[int], copies: bool, crosses: bool):
        self.seen, self.copies, self.crosses = seen, copies, crosses

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns an empty tensor, as FSDP2 asks of a backend."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any = None,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Note a gather, which has no operation; make what a reduction makes."""
        if op is None:
            self.seen.append(output_tensor.numel())
            if self.crosses:
                torch.empty_like(input_tensor)  # for the peak alone
        elif self.copies:
            torch.empty_like(input_tensor)  # for the peak alone


class FakeFullShard(FullShard):
    """`FullShard` whose exchanges are noted.

    units   modules whose weights are gathered together; what lies in none of them is the root's
    absent  names of parameters that other stages hold
    spread  names of parameters that are dealt to ranks (experts): not gathered, and left as they are
    fake    the mode of the module's tensors
    freed   shards of gradients go as they are reduced
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
        """Allocate the shards without values or DTensor operations; returns (name, shard) of each parameter."""

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
        """Returns the elements, in a master's width, of all weight shards of this rank, padding included."""
        shards = [param for param in self.module.parameters() if isinstance(param, DTensor)]
        return sum(_padded(shard) * shard.dtype.itemsize for shard in shards) // self.precision.master.itemsize

    @property
    def rows(self) -> Counter[tuple[int, int]]:
        """Returns how many trained weights have each (indices along the dim that is cut, elements at each)."""
        cut = [(param.shape[param.placements[-1].dim], param.numel()) for param in self._cut()]
        return Counter((rows, elements // rows) for rows, elements in cut)

    @property
    def held_gradients(self) -> int:
        """Returns the bytes of the shards of gradients, once all are there."""
        return 0 if self._freed else sum(_padded(param) for param in self._cut()) * self.precision.master.itemsize

    def _cut(self) -> list[DTensor]:
        return [param for param in self.params if isinstance(param, DTensor)]


def _gone(param: torch.Tensor) -> None:
    """Drops a reduced gradient, as its copy to the host does, or an update within backward."""
    param.grad = None


def _padded(param: DTensor) -> int:
    local = param._local_tensor
    return local.untyped_storage().nbytes() // local.element_size()
