"""A mock accelerator: a device type `mock`, known to torch as a GPU is, whose tensors lie in the host's memory.

For tests, on machines without an accelerator, of code that is meant for one. What would fail on a GPU fails here:

    mock tensor + CPU tensor        raises, except where torch allows it (a 0-d CPU tensor, an index)
    tensor.numpy(), a pickle        raises
    a copy to or from the host      is counted by `HostReads`, as are values that Python reads
    a random operation              uses an RNG of the device's own
    a collective's result           is NaN until its work is waited for; so is what is being sent
    a copy to pinned memory         is NaN until its event, or a stream behind it, was waited for
    a type, strides or sizes that   raise
      NCCL does not take

The CPU's kernels compute all results, so they equal the CPU's to the bit.

How: a mock tensor is a subclass that wraps a CPU storage and reports the mock device, as fake tensors wrap meta
tensors; torch's hooks for devices written in Python make factories call `_compute`. `install` cannot be undone.

What this does not do: run anything asynchronously (work is done when its call returns; streams only delay copies to
the host: mock_streams), kernels of compilers, factories that pin memory.

Source: `torch/utils/backend_registration.py`, `torch/_subclasses/fake_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.comm.recording import waits_for
from shardwise.testing.mock_streams import TRAFFIC, MockEvent, MockStream, is_pinned, pin, unreadable
from shardwise.testing.nccl_takes import refuse_as_nccl
from shardwise.trace.elementwise import is_random

NAME = "mock"
HOST = torch.device("cpu")

SEEN: set[torch._ops.OpOverload] = set()  # operations that were called on mock tensors

_installed: list[Any] = []  # objects that torch refers to, kept alive


class _Module:
    """The device module `torch.mock`, with those functions of `torch.cuda` that libraries use."""

    Stream, Event = MockStream, MockEvent
    _initialized = True  # torch's checkpoint reads it before it saves the device's RNG state

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Does nothing: there is one device."""

    def device(self, device: Any) -> Any:
        return nullcontext()

    def get_device_name(self, device: Any = None) -> str:
        return "mock accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_stream(self, device: Any = None) -> MockStream:
        return TRAFFIC.current

    def default_stream(self, device: Any = None) -> MockStream:
        return TRAFFIC.own

    @contextmanager
    def stream(self, stream: MockStream | None) -> Iterator[None]:
        """Context in which `stream` is the current stream; None: no change."""
        before, TRAFFIC.current = TRAFFIC.current, stream or TRAFFIC.current
        try:
            yield
        finally:
            TRAFFIC.current = before

    def synchronize(self, device: Any = None) -> None:
        """Completes all copies to the host."""
        TRAFFIC.arrive()

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        self.generator.set_state(state)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def install() -> torch.device:
    """Registers the mock accelerator with torch in this process, for good; returns its device."""
    if not _installed:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        factories = torch.library.Library("_", "IMPL")
        _installed.extend((_Module(), _Hooks(), _Guard(), factories))
        _setup_privateuseone_for_python_backend(NAME, *_installed[:3])
        factories.fallback(lambda func, *args, **kwargs: _compute(func, args, kwargs), "PrivateUse1")
        kernels = torch.library.Library("aten", "IMPL")
        for func in _own_kernels():
            kernels.impl(func, lambda *args, _f=func, **kwargs: _compute(_f, args, kwargs), "PrivateUse1")
        _installed.append(kernels)
        dist.Backend.register_backend(NAME, _no_backend, extended_api=True, devices=[NAME])
        torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)
        # torch's guards written in Python lack these two
        torch.accelerator.synchronize = _installed[0].synchronize
        torch.accelerator.current_stream = _installed[0].current_stream
        torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin, is_pinned
        FSDPParam.reset_sharded_param = _unless_same(FSDPParam.reset_sharded_param)
    return _device()


def _unless_same(reset: Callable[[FSDPParam], None]) -> Callable[[FSDPParam], None]:
    """Returns a wrapper of FSDP2's `reset_sharded_param` that does nothing if a shard's memory has not changed.

    FSDP2 notices that for plain tensors only, and would copy an uneven mock shard, which optimizers still refer to.
    """

    def look(param: FSDPParam) -> None:
        param_now = getattr(param._module_info.module, param._module_info.param_name)
        places = [t.untyped_storage().data_ptr() for t in (param._sharded_param_data, param_now._local_tensor)]
        if param_now is not param.sharded_param or places[0] != places[1] or not places[0]:
            reset(param)

    return look


def _no_backend(options: Any, _: Any) -> Any:
    """Returns a process group's backend for the mock device, which is never used: `_collective` runs gloo."""
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size)


def _own_kernels() -> list[Any]:
    """Returns the operations that need a kernel of their own beside the fallback.

    These are those that `torch.tensor` calls without dispatch to subclasses, and those that torch would decompose on a
    device without a kernel for them.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    both = [name for name in names if has(name, "CompositeImplicitAutograd") and has(name, "CPU")]
    packets = [getattr(torch.ops.aten, name.removeprefix("aten::").partition(".")[0]) for name in both]
    asked = [aten.empty.memory_format, aten.empty_strided.default, aten.copy_.default, aten._local_scalar_dense.default]
    return [*asked, *(packet.default for packet in packets)]


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Sets `tensor.data = new`, also if one is on the CPU and the other on the mock device."""
    if isinstance(tensor, MockTensor) == isinstance(new, MockTensor):
        torch._C.TensorBase.data.__set__(tensor, new)
        return
    moved = new.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)


def join_group() -> None:
    """Adds the mock device's backend to this rank's default process group beside gloo, for groups made of it too."""
    group, registry = dist.group.WORLD, dist.distributed_c10d._world
    name, backend = group.group_name, FakeProcessGroup._create_internal(dist.get_rank(), dist.get_world_size())
    group._register_backend(_device(), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    text = f"cpu:gloo,{NAME}:{NAME}"
    registry.pg_map[group] = (text, registry.pg_map[group][1])
    registry.pg_backend_config[group] = text


def _device() -> torch.device:
    return torch.device(NAME, 0)


class MockTensor(torch.Tensor):
    """A tensor in the memory of a CPU tensor that reports the mock device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elements: torch.Tensor) -> MockTensor:
        """Returns a mock tensor that shares the storage of the CPU tensor `elements`."""
        return torch.Tensor._make_subclass(
            cls, elements, False, dispatch_device=True, device_for_backend_keys=_device()
        )

    def __init__(self, elements: torch.Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device()
        if not all(issubclass(kind, MockTensor) for kind in types):
            return NotImplemented
        return _compute(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{elements(self)!r}, on {NAME}"

    def tolist(self) -> Any:
        """Returns the elements as nested lists of numbers, through a copy to the host, which is counted."""
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor of an accelerator cannot be pickled: copy it to the CPU")


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor that shares the memory of a mock tensor; no copy is made or counted."""
    with torch.no_grad():
        bare = torch.empty(0, dtype=tensor.dtype, device=HOST)
        return bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


# --- collectives


class _Arriving(dist.Work):
    """The work of a collective that runs on copies; `wait` copies the results into the given tensors.

    work      gloo's work
    arriving  (tensor to write, copy with its result), for each output
    """

    alive: ClassVar[set[_Arriving]] = set()  # keeps the Python objects alive, which C++ does not

    def __init__(self, work: dist.Work, arriving: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.work, self.arriving = work, arriving
        self.alive.add(self)

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the collective is done and writes its results into their tensors; returns True."""
        waits_for(self)
        self.work.wait() if timeout is None else self.work.wait(timeout)
        for goal, arrived in self.arriving:
            goal.copy_(arrived)
        self.arriving = []
        self.alive.discard(self)
        return True

    def is_completed(self) -> bool:
        """Whether the collective is done; its results are written only by `wait`."""
        return self.work.is_completed()


def _collective(func: Any, args: tuple, bare_args: tuple, kwargs: dict) -> Any:
    """Runs a collective with gloo on copies; returns its result. Its outputs are NaN until its work is waited for.

    args        the operation's arguments; `bare_args`: the same with CPU tensors in place of mock tensors
    """
    refuse_as_nccl(func, bare_args)
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # (memory of the device, its copy)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        staged.append((tensor, tensor.clone()))
        return staged[-1][1]

    written = () if func.overloadpacket in _SENDS else tree_leaves(bare_args[0])
    with torch.no_grad():
        results = func(*tree_map_only(torch.Tensor, copied, bare_args), **kwargs)
        arriving = [pair for pair in staged if any(pair[0] is tensor for tensor in written)]
        for goal, _ in arriving:
            unreadable(goal)
    if not isinstance(results, tuple):
        return _Arriving(dist.Work.unbox(results), arriving).boxed()
    *_, work = results
    return (*args[: len(results) - 1], _Arriving(dist.Work.unbox(work), arriving).boxed())


# --- operations

aten = torch.ops.aten
_SENDS = (torch.ops.c10d.send, torch.ops.c10d.barrier)
_TAKES_HOST_INDICES = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns an operation's result on mock tensors, computed by the CPU's kernel and wrapped as mock tensors."""
    SEEN.add(func)
    claimed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of elements -> (elements, mock tensor)
    foreign: list[torch.Tensor] = []

    def uncover(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, MockTensor):
            foreign.append(tensor)
            return tensor
        bare = elements(tensor)
        claimed[id(bare)] = (bare, tensor)
        return bare

    bare_args, bare_kwargs = tree_map_only(torch.Tensor, uncover, (args, kwargs))
    goal = torch.device(kwargs["device"]) if kwargs.get("device") is not None else _device()
    # factories for the mock device make CPU tensors, and never pinned ones
    bare_kwargs |= {"device": HOST} if goal.type == NAME and "device" in kwargs else {}
    bare_kwargs |= {"pin_memory": False} if kwargs.get("pin_memory") else {}
    if claimed:  # there are mock tensors, so CPU tensors beside them may be an error
        _refuse_both(func, args, foreign)
    if func.namespace == "c10d":  # results are NaN until they are waited for
        return _collective(func, args, bare_args, bare_kwargs)
    with torch.no_grad(), _own_draws(func):
        out = func(*bare_args, **bare_kwargs)
        _crosses(func, args, kwargs, out)
    for bare, mock in claimed.values():
        if not _alike(bare, mock):
            mock.data = MockTensor(bare)  # an in-place operation changed shape or storage

    def cover(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, AsyncCollectiveTensor):  # keep the wrapper that waits
            return AsyncCollectiveTensor(MockTensor(tensor.elem))
        if id(tensor) in claimed:  # an argument that is returned stays the same object
            return claimed[id(tensor)][1]
        # a result on the host, or a CPU argument that is returned
        return tensor if goal.type != NAME or any(tensor is other for other in foreign) else MockTensor(tensor)

    return tree_map_only(torch.Tensor, cover, out)


def _crosses(func: Any, args: tuple, kwargs: dict, out: Any) -> None:
    """Counts the bytes that an operation moves between host and device, and waits of the host.

    out   the operation's result. A non-blocking copy into pinned memory becomes readable only once it is waited for.
    """
    stream = TRAFFIC.current
    if func is aten._local_scalar_dense.default:  # `.item()`
        stream.synchronize()
    if func is aten._to_copy.default:
        goal, source, later = out, args[0], kwargs.get("non_blocking", False)
        pinned = (
            True  # torch takes pinned memory for a new tensor, and for a tensor on the device by `pin_memory` alone
        )
    elif func is aten.copy_.default:
        goal, source, later = args[0], args[1], len(args) > 2 and args[2]
        pinned = is_pinned(goal)
    else:
        return
    onto = goal.device.type == NAME or (func is aten._to_copy.default and _goes_to(kwargs) == NAME)
    if onto != isinstance(source, MockTensor):  # the copy crosses between host and device
        TRAFFIC.copied("to device" if onto else "to host", source, waits=not (later and (pinned or onto)))
        if not onto and later and pinned:  # asynchronous: it arrives when its stream is waited for
            stream.send(goal)
        elif not onto:
            stream.synchronize()


def _goes_to(kwargs: dict) -> str:
    return NAME if kwargs.get("device") is None else torch.device(kwargs["device"]).type


def _refuse_both(func: Any, args: tuple, foreign: list[torch.Tensor]) -> None:
    """Raises `RuntimeError` if an operation mixes CPU tensors (`foreign`) with mock tensors, as on a GPU."""
    packet = func.overloadpacket
    # copies are how tensors come to a device
    if not foreign or packet in (aten.copy_, aten._foreach_copy_):
        return
    # indexing takes indices from the host, as CUDA does
    if packet in _TAKES_HOST_INDICES and isinstance(args[0], MockTensor):
        indices = [index for index in args[1] if index is not None and not isinstance(index, MockTensor)]
        foreign = [tensor for tensor in foreign if not any(tensor is index for index in indices)]
    # 0-d CPU tensors are allowed as inputs, but not as outputs
    if all(tensor.dim() == 0 for tensor in foreign) and not _writes_to(func, args, foreign):
        return
    tensors = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in foreign)
    raise RuntimeError(f"{func}: expected all tensors to be on the same device, but {tensors} meets tensors on {NAME}")


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same storage, offset, shape and strides."""
    places = [(t.shape, t.stride(), t.storage_offset(), t.untyped_storage()._cdata) for t in (one, other)]
    return places[0] == places[1]


def _writes_to(func: Any, args: tuple, foreign: list[torch.Tensor]) -> bool:
    """Whether the operation's schema says that it writes into one of the CPU tensors `foreign`."""
    written = [
        value
        for place, value in zip(func._schema.arguments, args, strict=False)
        if place.alias_info is not None and place.alias_info.is_write
    ]
    return any(tensor is value for value in written for tensor in foreign)


@contextmanager
def _own_draws(func: Any) -> Iterator[None]:
    """Context in which torch's default RNG has the mock device's state, if the operation `func` is random."""
    if not is_random(func):
        yield
        return
    own = _installed[0].generator
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(kept)
