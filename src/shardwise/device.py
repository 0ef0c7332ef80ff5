"""Everything that depends on the kind of device, asked of torch's registry of accelerators. Mock: testing/mock_device.

CUDA, ROCm, XPU, NPU and any other that `torch.accelerator` knows are treated alike. Other rooms call these functions
instead of naming a kind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.errors import InputError

CPU = torch.device("cpu")


def accelerator() -> torch.device | None:
    """Returns this machine's accelerator, without an index; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def device_count() -> int:
    """Returns accelerators that this process sees."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def current_device() -> torch.device:
    """Returns the accelerator that this process has taken, else the CPU."""
    kind = accelerator()
    return CPU if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def take(index: int) -> torch.device:
    """Make accelerator `index` (modulo their number) this process's device and return it; the CPU without one."""
    count = device_count()
    if count:
        torch.accelerator.set_device_index(index % count)
    return current_device()


def pick_device(requested: str | torch.device | None = None, local_rank: int | None = None) -> torch.device:
    """Returns a rank's device: as requested (`InputError` where there is none), else its local rank's, else the CPU.

    local_rank  None where the device was taken already, or this process is alone
    """
    # nothing asked for: the device that this rank has
    if requested is None:
        return current_device() if local_rank is None else take(local_rank)
    device = torch.device(requested)
    # "meta" holds no values: tests and rehearsals
    if on_host(device) or device.type == "meta":
        return device
    own = accelerator()
    if own is None or own.type != device.type:
        raise InputError(f"device {device} was asked for, but torch sees no {device.type.upper()} device")
    # an index was chosen, and is taken for this process
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
        return device
    return current_device() if local_rank is None else take(local_rank)


def check_device(kind: str, asked: str = "device", also: str = "") -> None:
    """Raise `InputError` unless `kind` is "cpu" or this machine's accelerator; `asked`: the option, `also`: advice."""
    own = None if kind == "cpu" else accelerator()
    if kind != "cpu" and (own is None or own.type != kind):
        here = "no accelerator" if own is None else f'an accelerator of type "{own.type}"'
        raise InputError(f'{asked} = "{kind}", but torch sees {here} on this machine: use{also} "cpu"')


def describe() -> str:
    """Returns a line on versions and devices here: `torch 2.13.0+cpu, 2 CPU cores, no accelerator`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind, count = accelerator(), device_count()
    devices = "no accelerator" if kind is None else f"{count} x {device_name(current_device()) or kind.type}"
    return f"torch {torch.__version__}, {cores} CPU cores, {devices}"


def can_pin(device: torch.device) -> bool:
    """Whether the device copies faster, and beside other work, from memory of the host's that is pinned."""
    return not on_host(device)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor of the host's in memory that the device copies from at its link's full rate."""
    return tensor.pin_memory() if can_pin(device) else tensor


def on_host(device: torch.device) -> bool:
    """Whether ops on this device run on the host's own cores (a CPU)."""
    return device.type == "cpu"


def rounds_lse_up() -> bool:
    """Whether memory-efficient attention rounds a log-sum-exp's rows up: ROCm's does not (pytorch#146848)."""
    return torch.version.hip is None


def by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns tensors in lists of one device each: operations over many take no mixture."""
    lists: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.device, []).append(tensor)
    return list(lists.values())


def group_backend(ranks_here: int | None) -> str:
    """Returns a process group's backends: gloo, and the accelerator's own where each rank has a device to itself.

    ranks_here  that see the same devices; None where each may see others (Slurm shows each rank its own). Ranks that
                share a device meet over gloo: NCCL refuses them
    """
    import torch.distributed as dist

    kind = None if ranks_here is not None and ranks_here > device_count() else accelerator()
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    return "gloo" if kind is None or own is None else f"cpu:gloo,{kind.type}:{own}"


def check_own_backend(name: str, asked: str) -> None:
    """Raise `InputError` unless torch has this backend for this machine's accelerator; `asked` names the option."""
    import torch.distributed as dist

    kind = accelerator()
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    if name != own:
        here = "torch sees no accelerator here" if kind is None else f'the backend of "{kind.type}" is "{own}"'
        raise InputError(f"{asked} = {name!r}, but {here}: leave it out, and ranks that share a device meet over gloo")


def library_versions() -> dict[str, str]:
    """Returns the versions of what torch was built with, and of NCCL where there is a device for it."""
    found = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in found.items() if version is not None}


def group_on_host() -> bool:
    """Whether the default process group has no backend of an accelerator's own: its ranks compute on the host."""
    import torch.distributed as dist

    kind = accelerator()
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    return own is None or own == "gloo" or own not in dist.get_backend_config()


def backend_of(group: Any, device: torch.device) -> str | None:
    """Returns the backend by which a process group moves tensors of this device ("nccl", "gloo"), or None.

    `dist.get_backend` gives the text that the group was made with, as "cpu:gloo,cuda:nccl".
    """
    if device.type not in {kind.type for kind in group._device_types}:
        return None
    return group._get_backend(torch.device(device.type)).name()


def device_name(device: torch.device) -> str | None:
    """Returns the product's name as its driver tells it; None for the CPU, or where the driver tells none."""
    tell = None if on_host(device) else getattr(torch.get_device_module(device), "get_device_name", None)
    return None if tell is None else tell(device)


def device_uuid(device: torch.device) -> str | None:
    """Returns the device's UUID by its driver; None where the driver has none."""
    tell = None if on_host(device) else getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if tell is None else getattr(tell(device), "uuid", None)
    return None if uuid is None else str(uuid)


def peak_bytes(device: torch.device) -> int | None:
    """Returns peak of allocated bytes on the device since the last reset; None where the device does not count them."""
    count = None if on_host(device) else getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if count is None else count(device)


def memory_bytes(device: torch.device) -> int | None:
    """Returns all memory of a device: an accelerator's, or this host's (its container's); None where nothing tells."""
    if not on_host(device):
        tell = getattr(torch.get_device_module(device), "get_device_properties", None)
        return None if tell is None else tell(device).total_memory
    return host_memory()[0]


def host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Returns (all, now available) bytes of this host, or of the control group that limits this process to fewer.

    None where nothing tells. root: of the files by which Linux does
    """
    told = {line.split()[0]: int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if " kB" in line}
    total, available = ([told[name]] if name in told else [] for name in ("MemTotal:", "MemAvailable:"))
    for folder, most, used in _memory_groups(root):
        limit, use = (_number("".join(_lines(folder / name))) for name in (most, used))
        # "max", or no such file: this group does not limit
        if limit is None:
            continue
        total.append(limit)
        if use is not None:
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            cache = sum(
                int(stat.get(name, 0)) for name in ("inactive_file", "active_file")
            )  # given back when asked for
            available.append(max(0, limit - max(0, use - cache)))
    return min(total, default=None), min([*available, *total], default=None) if available else None


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields (folder, file of its limit, file of its use) of the control groups around this process, old and new."""
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        # version 1 of the control groups has a line for each kind; version 2 has one without any
        if kinds and "memory" not in kinds.split(","):
            continue
        own = base / path.strip("/")
        # limits of the groups around this one hold too; above the mount point there are none
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                yield folder, *names


def _lines(path: Path) -> list[str]:
    """Returns a file's lines; [] where there is none that may be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work queued so far."""
    if not on_host(device):
        torch.accelerator.synchronize(device)


def autocast_states() -> tuple[bool, ...]:
    """Returns whether autocast is on: (for the CPU,), or (for the CPU, for the accelerator) where there is one."""
    kinds = ["cpu", *([kind.type] if (kind := accelerator()) is not None else [])]
    return tuple(torch.is_autocast_enabled(kind) for kind in kinds)


def forget_settings() -> None:
    """Put autocast and the libraries of kernels at torch's defaults, on every kind of device."""
    for kind in {"cpu", current_device().type}:
        torch.set_autocast_enabled(kind, False)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()
    torch._C._set_mkldnn_enabled(True)  # these four directly: torch's own tests forbid to assign the flags
    torch._C._set_cudnn_enabled(True)
    torch._C._set_cudnn_benchmark(False)
    torch._C._set_cudnn_deterministic(False)
    for allow in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_math_sdp,
                  torch.backends.cuda.enable_mem_efficient_sdp):  # fmt: skip
        allow(True)


def profiler_activities(device: torch.device) -> list[Any]:
    """Returns the activities (CPU, and the device's kind) that torch's profiler records here."""
    from torch.profiler import ProfilerActivity

    own = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU"}.get(device.type, "PrivateUse1")
    return [ProfilerActivity.CPU, *([] if on_host(device) else [getattr(ProfilerActivity, own)])]


WARM_ROUNDS = 2  # of the fixed work, since caches hold what ran before


@cache
def _fixed_work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors of `pace_us`, cached: allocating them would add a varying time of its own."""
    return torch.ones(256, 256), torch.ones(256, 256), torch.ones(8)


def pace_us(device: torch.device, rounds: int = 100) -> float | None:
    """Returns the microseconds that a fixed piece of work takes on this rank's CPU now: a product, 60 tiny additions.

    A virtual CPU is as fast as its neighbours let it be; this says how fast that is. None on a GPU, whose clocks are
    its own.
    """
    if not on_host(device):
        return None
    times = []
    factor, out, tiny = _fixed_work()
    for _ in range(WARM_ROUNDS + rounds):
        began = time.perf_counter()
        torch.mm(factor, factor, out=out)
        for _ in range(60):
            torch.add(tiny, tiny)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[WARM_ROUNDS:])


def _initialized(device: torch.device) -> bool:
    """Whether this process has used the accelerator: its generators exist from then on."""
    return bool(getattr(torch.get_device_module(device), "is_initialized", lambda: True)())


def seed_generators(seed: int) -> None:
    """Seed the generators that torch draws from on every device."""
    seed &= 2**63 - 1
    torch.default_generator.manual_seed(seed)  # torch.manual_seed walks over every backend: 100 times the price
    kind = accelerator()
    if kind is not None and _initialized(kind):
        torch.get_device_module(kind).manual_seed_all(seed)


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Returns the state of the accelerator's own generator, bytes on the CPU; None for the CPU and before first use."""
    if on_host(device) or not _initialized(device):
        return None
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Put back what `generator_state` gave."""
    torch.get_device_module(device).set_rng_state(state, device)


def generators(device: torch.device) -> list[bytes]:
    """Returns the states of torch's CPU generator and the device's own, without a device synchronisation."""
    own = generator_state(device)
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), own) if state is not None]


def generators_now() -> Callable[[], None]:
    """Returns a function that puts torch's generators, the CPU's and the current device's, to where they are now."""
    device = current_device()
    state, own = torch.default_generator.get_state(), generator_state(device)

    def put_back() -> None:
        torch.default_generator.set_state(state)
        if own is not None:
            set_generator_state(device, own)

    return put_back


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context: puts the states of torch's generators, the CPU's and the current device's, back at the end."""
    put_back = generators_now()
    try:
        yield
    finally:
        put_back()


def allow_cudnn(yes: bool) -> bool:
    """Let torch take cuDNN's kernels, or not, from now on; returns whether it took them before."""
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(yes)  # directly: torch's own tests forbid to assign the flag
    return before


def attention_as_ops(yes: bool = True) -> AbstractContextManager[None]:
    """Returns a context in which an accelerator's attention runs, if `yes`, as single ops: modes see its dropout.

    Where there is none nothing changes: on a CPU, attention with dropout takes that path anyway.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH) if yes and not on_host(current_device()) else nullcontext()
