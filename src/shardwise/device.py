"""Everything that depends on the kind of device, through `torch.accelerator`. For tests: testing/mock_device.

CUDA, ROCm, XPU, NPU and any other accelerator that torch knows are treated alike. Other packages call these functions
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
    """Returns this machine's accelerator as a `torch.device` without an index; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def device_count() -> int:
    """Returns how many accelerators this process sees."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def current_device() -> torch.device:
    """Returns the accelerator that is current in this process, with its index; the CPU if there is none."""
    kind = accelerator()
    return CPU if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def take(index: int) -> torch.device:
    """Makes accelerator `index` (modulo their number) this process's current device; returns it, or the CPU if none."""
    count = device_count()
    if count:
        torch.accelerator.set_device_index(index % count)
    return current_device()


def pick_device(requested: str | torch.device | None = None, local_rank: int | None = None) -> torch.device:
    """Returns a rank's device, and makes it current.

    requested   "cpu", "meta", or the accelerator's type, perhaps with an index; None: an accelerator, else the CPU
    local_rank  rank on this host, which takes the accelerator of this index; None: the current accelerator

    Raises `InputError` if the requested device does not exist.
    """
    if requested is None:
        return current_device() if local_rank is None else take(local_rank)
    device = torch.device(requested)
    # "meta" is for tests and rehearsals
    if on_host(device) or device.type == "meta":
        return device
    own = accelerator()
    if own is None or own.type != device.type:
        raise InputError(f"device {device} was asked for, but torch sees no {device.type.upper()} device")
    # a given index goes before the local rank
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
        return device
    return current_device() if local_rank is None else take(local_rank)


def check_device(kind: str, asked: str = "device", also: str = "") -> None:
    """Raises `InputError` unless `kind` is "cpu" or the type of this machine's accelerator.

    asked, also   for the message: name of the option, and a further choice
    """
    own = None if kind == "cpu" else accelerator()
    if kind != "cpu" and (own is None or own.type != kind):
        here = "no accelerator" if own is None else f'an accelerator of type "{own.type}"'
        raise InputError(f'{asked} = "{kind}", but torch sees {here} on this machine: use{also} "cpu"')


def describe() -> str:
    """Returns a line on torch's version and devices, such as `torch 2.13.0+cpu, 2 CPU cores, no accelerator`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind, count = accelerator(), device_count()
    devices = "no accelerator" if kind is None else f"{count} x {device_name(current_device()) or kind.type}"
    return f"torch {torch.__version__}, {cores} CPU cores, {devices}"


def can_pin(device: torch.device) -> bool:
    """Whether copies between the host and this device profit from pinned memory (all devices but the CPU)."""
    return not on_host(device)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a CPU tensor in pinned memory if `device` profits from that, else unchanged."""
    return tensor.pin_memory() if can_pin(device) else tensor


def on_host(device: torch.device) -> bool:
    """Whether the device is a CPU."""
    return device.type == "cpu"


def rounds_lse_up() -> bool:
    """Whether memory-efficient attention pads the rows of its log-sum-exp; ROCm's does not (pytorch#146848)."""
    return torch.version.hip is None


def by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the tensors in one list for each device, since operations on lists of tensors need a common device."""
    lists: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.device, []).append(tensor)
    return list(lists.values())


def group_backend(ranks_here: int | None) -> str:
    """Returns the backend text for a process group: "gloo", or such as "cpu:gloo,cuda:nccl".

    ranks_here  number of ranks that see the same devices; None: each may see its own (as under Slurm)

    The accelerator's backend is included if each rank has a device to itself, since NCCL refuses ranks that share one.
    """
    import torch.distributed as dist

    kind = None if ranks_here is not None and ranks_here > device_count() else accelerator()
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    return "gloo" if kind is None or own is None else f"cpu:gloo,{kind.type}:{own}"


def check_own_backend(name: str, asked: str) -> None:
    """Raises `InputError` unless `name` is torch's backend for this machine's accelerator; `asked` names the option."""
    import torch.distributed as dist

    kind = accelerator()
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    if name != own:
        here = "torch sees no accelerator here" if kind is None else f'the backend of "{kind.type}" is "{own}"'
        raise InputError(f"{asked} = {name!r}, but {here}: leave it out, and ranks that share a device meet over gloo")


def library_versions() -> dict[str, str]:
    """Returns {"cuda", "hip": version that torch was built with, "nccl": version}, without those that are missing."""
    found = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in found.items() if version is not None}


def group_on_host() -> bool:
    """Whether the default process group has no accelerator's backend, so that its collectives run on the CPU."""
    import torch.distributed as dist

    kind = accelerator()
    own = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    return own is None or own == "gloo" or own not in dist.get_backend_config()


def backend_of(group: Any, device: torch.device) -> str | None:
    """Returns the name of the backend that a process group uses for tensors of this device ("nccl", "gloo"), or None.

    `dist.get_backend` would return the text that the group was made with, such as "cpu:gloo,cuda:nccl".
    """
    if device.type not in {kind.type for kind in group._device_types}:
        return None
    return group._get_backend(torch.device(device.type)).name()


def device_name(device: torch.device) -> str | None:
    """Returns the device's product name from its driver; None for the CPU, or if the driver gives none."""
    tell = None if on_host(device) else getattr(torch.get_device_module(device), "get_device_name", None)
    return None if tell is None else tell(device)


def device_uuid(device: torch.device) -> str | None:
    """Returns the device's UUID from its driver; None for the CPU, or if the driver gives none."""
    tell = None if on_host(device) else getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if tell is None else getattr(tell(device), "uuid", None)
    return None if uuid is None else str(uuid)


def peak_bytes(device: torch.device) -> int | None:
    """Returns the peak of allocated bytes on the device since the last reset; None if the device counts none."""
    count = None if on_host(device) else getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return None if count is None else count(device)


def memory_bytes(device: torch.device) -> int | None:
    """Returns the total memory in bytes of an accelerator, or of this host or its container; None if unknown."""
    if not on_host(device):
        tell = getattr(torch.get_device_module(device), "get_device_properties", None)
        return None if tell is None else tell(device).total_memory
    return host_memory()[0]


def host_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Returns (total, available) bytes of memory of this host, or of a control group that limits this process to fewer.

    root   folder that contains Linux's /proc and /sys, for tests

    Either is None if it is unknown.
    """
    told = {line.split()[0]: int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if " kB" in line}
    total, available = ([told[name]] if name in told else [] for name in ("MemTotal:", "MemAvailable:"))
    for folder, most, used in _memory_groups(root):
        limit, use = (_number("".join(_lines(folder / name))) for name in (most, used))
        # "max" or a missing file: this group has no limit
        if limit is None:
            continue
        total.append(limit)
        if use is not None:
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            cache = sum(
                int(stat.get(name, 0)) for name in ("inactive_file", "active_file")
            )  # the page cache is reclaimed when memory is needed
            available.append(max(0, limit - max(0, use - cache)))
    return min(total, default=None), min([*available, *total], default=None) if available else None


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields (folder, name of the limit's file, name of the usage's file) of each control group around this process.

    Both versions of control groups are read.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        # version 1 has a line for each kind of resource; version 2 has one line without a kind
        if kinds and "memory" not in kinds.split(","):
            continue
        own = base / path.strip("/")
        # limits of enclosing groups hold too, up to the mount point
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                yield folder, *names


def _lines(path: Path) -> list[str]:
    """Returns a file's lines; [] if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all work queued so far; returns at once for the CPU."""
    if not on_host(device):
        torch.accelerator.synchronize(device)


def autocast_states() -> tuple[bool, ...]:
    """Returns (whether autocast is on for the CPU, the same for the accelerator if there is one)."""
    kinds = ["cpu", *([kind.type] if (kind := accelerator()) is not None else [])]
    return tuple(torch.is_autocast_enabled(kind) for kind in kinds)


def forget_settings() -> None:
    """Resets autocast, and the switches of cuDNN, oneDNN and attention kernels, to torch's defaults."""
    for kind in {"cpu", current_device().type}:
        torch.set_autocast_enabled(kind, False)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()
    torch._C._set_mkldnn_enabled(True)  # these four through _C, since torch's tests forbid assigning the flags
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


WARM_ROUNDS = 2  # first rounds of the fixed work that are not timed, since caches hold other data


@cache
def _fixed_work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the tensors of `pace_us`: two (256, 256) and one (8,); cached, since allocation takes a varying time."""
    return torch.ones(256, 256), torch.ones(256, 256), torch.ones(8)


def pace_us(device: torch.device, rounds: int = 100) -> float | None:
    """Returns the median time in us of fixed work on this rank's CPU: a matrix product and 60 tiny additions.

    rounds   how often it is timed

    The speed of a virtual CPU depends on its neighbours, and this measures it. None for an accelerator.
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
    """Whether this process has used the accelerator, whose RNG exists only from then on."""
    return bool(getattr(torch.get_device_module(device), "is_initialized", lambda: True)())


def seed_generators(seed: int) -> None:
    """Seeds torch's RNGs of the CPU and of all accelerators with `seed` modulo 2^63."""
    seed &= 2**63 - 1
    torch.default_generator.manual_seed(seed)  # torch.manual_seed visits every backend, which takes 100 times as long
    kind = accelerator()
    if kind is not None and _initialized(kind):
        torch.get_device_module(kind).manual_seed_all(seed)


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Returns the state of the accelerator's RNG as a uint8 CPU tensor; None for the CPU and before first use."""
    if on_host(device) or not _initialized(device):
        return None
    return torch.get_device_module(device).get_rng_state(device)


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the accelerator's RNG to a state that `generator_state` returned."""
    torch.get_device_module(device).set_rng_state(state, device)


def generators(device: torch.device) -> list[bytes]:
    """Returns the states of torch's CPU RNG and, for an accelerator, of the device's, as bytes, to be compared."""
    own = generator_state(device)
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), own) if state is not None]


def generators_now() -> Callable[[], None]:
    """Returns a function that restores torch's RNGs, of the CPU and the current device, to their present states."""
    device = current_device()
    state, own = torch.default_generator.get_state(), generator_state(device)

    def put_back() -> None:
        torch.default_generator.set_state(state)
        if own is not None:
            set_generator_state(device, own)

    return put_back


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context after which torch's RNGs, of the CPU and the current device, have the states from before."""
    put_back = generators_now()
    try:
        yield
    finally:
        put_back()


def allow_cudnn(yes: bool) -> bool:
    """Switches torch's use of cuDNN kernels on or off; returns whether it was on before."""
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(yes)  # through _C, since torch's tests forbid assigning the flag
    return before


def attention_as_ops(yes: bool = True) -> AbstractContextManager[None]:
    """Returns a context in which an accelerator's attention runs, if `yes`, as separate operations (the math backend).

    Dispatch modes then see its dropout. On a CPU nothing changes, since attention with dropout runs so anyway.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH) if yes and not on_host(current_device()) else nullcontext()
