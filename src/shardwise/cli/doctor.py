"""The command `doctor`: checks whether this host can run ranks, as text for a report that contains no secrets."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from shardwise.cli.answer import Answer
from shardwise.cli.launcher_doctor import Check, launcher_checks
from shardwise.cli.options import common, given_plan
from shardwise.errors import InputError
from shardwise.progress import Say, silent, timing

# environment variables that ranks read; others are not shown
_TOLD = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_\w+|OMP_\w+|MKL_\w+|CUDA_\w+|NCCL_\w+|GLOO_\w+|TORCH_\w+|"
    r"TORCHELASTIC_\w+|PYTORCH_\w+|SLURM_(JOB_ID|NNODES)|PMI_\w+|SHARDWISE_\w+|MALLOC_\w+)$"
)
_SECRET = re.compile(r"(?i)(key|token|secret|password|passwd|credential|auth|cookie)")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
LEAST_FILES = 1024  # open files
LEAST_SHARED = 64 * 2**20  # bytes free in /dev/shm
LEAST_DISK = 2**30  # bytes free on the disk
SMOKE_S = 120.0  # seconds for two ranks to talk


@click.command()
@click.option("--folder", type=click.Path(file_okay=False), default="runs", show_default=True, help="Where runs go.")
@click.option("--plan", callback=given_plan, help="Under a launcher: the rate over each of its axes.")
@common
@click.pass_obj
def doctor(answer: Answer, folder: str, plan: str | None) -> None:
    """Look at this host before a run: versions, devices, memory, limits, disk, and two ranks that talk.

    \b
    shardwise doctor --folder /scratch/runs          where the runs are to go
    srun shardwise doctor --plan tp=8,dp_shard=4     every host, and the rate over each axis

    Under torchrun, srun or mpirun the launcher's ranks are the ones that talk, and hosts that differ are named.
    Prints one block of text for a report; values of variables that may be secret are left out. Exit code 0 when all is
    well, 1 when something is not.
    """
    # the two ranks that `doctor` starts itself have no axes to measure
    if plan is not None and _alone():
        raise click.UsageError("--plan is measured over a launcher's ranks, and there are none: srun shardwise doctor")
    with timing(not answer.as_json) as say:
        checks = list(look(Path(folder), say, plan))
    # every check is listed, and problems are repeated at the end
    answer.fields["checks"] = [asdict(check) for check in checks]
    bad = [check for check in checks if check.problem]
    lines = [f"{'!!' if check.problem else 'ok'}  {check.what:16} {check.found}" for check in checks]
    lines += ["", *(f"{check.what}: {check.problem}" for check in bad)] if bad else ["", "nothing is wrong here"]
    answer.text = redacted("\n".join(lines))
    answer.code = 1 if bad else 0


def _alone() -> bool:
    """Whether no launcher started this process; False if its variables contradict each other, which a check reports."""
    from shardwise.ranks import here

    try:
        return here() is None
    except InputError:
        return False


def look(folder: Path, say: Say = silent, plan: str | None = None) -> Iterator[Check]:
    """Yields the results of all checks; a check that raises gives a result with the error.

    folder   where runs are to go
    say      called with a text on each check before it runs
    plan     text of a plan whose axes are measured over a launcher's ranks; None: none
    """
    checks: tuple[tuple[str, Callable[[], Iterator[Check]]], ...] = (
        ("versions", _versions),
        ("environment", _environment),
        ("devices", _devices),
        ("host", _host),
        ("limits", _limits),
        ("shared memory", _shared_memory),
        ("disk", lambda: _disk(folder)),
        ("clock", _clock),
        ("names", _names),
        ("two ranks", lambda: _talking(plan)),
    )
    for what, check in checks:
        say(f"doctor: looking at {what}")
        try:
            yield from check()
        except Exception as error:
            yield Check(what, f"{type(error).__name__}: {error}", "this could not be looked at")


def redacted(text: str) -> str:
    """Returns the text without user names and passwords in URLs, and with ~ for the home folder."""
    home = os.path.expanduser("~")
    text = _IN_URL.sub("***@", text)
    return text.replace(home, "~") if len(home) > 1 else text


def _versions() -> Iterator[Check]:
    """Yields versions of Python and packages, and the platform."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "shardwise", "numpy", "safetensors", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    yield Check("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield Check("platform", f"{platform.platform()}, glibc {platform.libc_ver()[1] or 'unknown'}")


def _environment() -> Iterator[Check]:
    """Yields the environment variables that ranks read, with secrets hidden, and the launcher that set them."""
    from shardwise.ranks import here
    from shardwise.ranks.launchers import LAUNCHERS

    # variables of launchers, and those that match `_TOLD`
    read = {name for launcher in LAUNCHERS for name in launcher.numbers}
    told = {name: value for name, value in sorted(os.environ.items()) if _TOLD.match(name) or name in read}
    shown = [f"{name}={'***' if _SECRET.search(name) else value}" for name, value in told.items()]
    yield Check("environment", " ".join(shown) or "nothing set that ranks read")
    place = here()
    where = "none: `train` starts ranks itself" if place is None else f"{place.launcher}, rank {place.rank}"
    yield Check("launcher", where)


def _devices() -> Iterator[Check]:
    """Yields each accelerator with its free memory, and whether they have direct links; the CPU if there is none."""
    import torch

    from shardwise.device import accelerator, device_count, device_name

    kind = accelerator()
    # a host without accelerators is no problem, since ranks run on the CPU
    if kind is None:
        built = "torch is built without CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}, no device"
        yield Check("devices", f"CPU ({built})")
        return
    module, count = torch.get_device_module(kind), device_count()
    room, reaches = (getattr(module, name, None) for name in ("mem_get_info", "can_device_access_peer"))
    for index in range(count):
        told, problem = device_name(torch.device(kind.type, index)) or kind.type, ""
        # not every device module of torch has these functions
        if room is not None:
            free, total = room(index)
            told += f", {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
            problem = "less than half of its memory is free: another process uses it" if free < total / 2 else ""
        yield Check(f"{kind.type}:{index}", told, problem)
    if count > 1 and reaches is not None:
        pairs = [reaches(0, other) for other in range(1, count)]
        yield Check("links", "devices reach each other directly" if all(pairs) else "through the host's memory")


def _host() -> Iterator[Check]:
    """Yields the host's CPUs, load and free memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    load = os.getloadavg()[0]
    problem = f"{load:.1f} processes want {cpus} CPU(s): steps will be slow and uneven" if load > 2 * cpus else ""
    yield Check("host", f"{cpus} CPUs, load {load:.1f}, {free / 1e9:.1f} of {whole / 1e9:.1f} GB free", problem)


def _limits() -> Iterator[Check]:
    """Yields the limits of open files, processes and locked memory."""
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_NPROC)[0]
    problem = "each pair of ranks needs connections, and each reader a few files: ulimit -n 65536"
    low = files != resource.RLIM_INFINITY and files < LEAST_FILES
    yield Check("open files", _number(files), problem if low else "")
    yield Check("processes", _number(processes))
    yield Check("locked memory", _number(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))


def _number(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _shared_memory() -> Iterator[Check]:
    """Yields the free bytes of /dev/shm."""
    if not os.path.isdir("/dev/shm"):
        yield Check("shared memory", f"no /dev/shm: {tempfile.gettempdir()} is used")
        return
    free = shutil.disk_usage("/dev/shm").free
    problem = "readers' processes and the ranks' records lie there: give a container --shm-size=1g"
    yield Check("shared memory", f"{free / 1e6:.0f} MB free", problem if free < LEAST_SHARED else "")


def _disk(folder: Path) -> Iterator[Check]:
    """Yields the free space in `folder` or above it, and the time to write and sync a megabyte there."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    # the folder need not exist yet, but a file in its path makes the run fail
    if not above.is_dir():
        yield Check("disk", f"{above} is a file", f"runs cannot go to {folder}, which lies below a file")
    # the nearest existing folder
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(near).free
    problem = (
        f"less than {LEAST_DISK / 1e9:.1f} GB is free in {near}: checkpoints may not fit" if free < LEAST_DISK else ""
    )
    with tempfile.TemporaryFile(dir=near) as file:
        began = time.perf_counter()
        file.write(os.urandom(2**20))
        file.flush()
        os.fsync(file.fileno())
        took = time.perf_counter() - began
    yield Check(
        "disk",
        f"{free / 1e9:.1f} GB free in {near}, 1 MB synced in {1e3 * took:.0f} ms",
        problem if free < LEAST_DISK else "",
    )


def _clock() -> Iterator[Check]:
    """Yields the clock's source and time, and a problem if the clock is set during 0.2 seconds."""
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown"
    began, wall = time.monotonic(), time.time()
    time.sleep(0.2)
    drift = abs((time.time() - wall) - (time.monotonic() - began))
    problem = (
        "the clock was set while this looked: times in logs of several hosts will not agree" if drift > 0.05 else ""
    )
    yield Check("clock", f"source {name}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}", problem)


def _names() -> Iterator[Check]:
    """Yields the address to which this host's name resolves, and how long that takes."""
    name = socket.gethostname()
    began = time.perf_counter()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Check("names", f"{name}: {error}", "other hosts must find this one by its name: set MASTER_ADDR")
        return
    took = time.perf_counter() - began
    problem = "asking for a name takes seconds, and every connection asks" if took > 1.0 else ""
    yield Check("names", f"{name} is {address}, found in {1e3 * took:.0f} ms", problem)


def _talking(plan: str | None) -> Iterator[Check]:
    """Yields checks of collectives: of two ranks on this host, or of those that a launcher started."""
    from shardwise.ranks import here

    try:
        place = here()
    except InputError:  # reported by the check of the environment
        place = None
    yield from _two_ranks() if place is None else launcher_checks(plan)


def _two_ranks() -> Iterator[Check]:
    """Yields whether two new ranks compute a right sum, and latency and rate of their all-reduce."""
    from shardwise.device import accelerator
    from shardwise.ranks import RankPool

    began = time.perf_counter()
    with RankPool(quiet=True, accelerators=accelerator() is not None) as pool:
        rows: list[Any] = pool.run(talk, 2, timeout_s=SMOKE_S)
    took = time.perf_counter() - began
    rate = min(row["bytes_per_s"] for row in rows)
    wrong = any(row["sum"] != 3.0 for row in rows)
    yield Check(
        "two ranks",
        f"up and done in {took:.1f} s over {rows[0]['backend']}; all-reduce "
        f"{1e6 * max(row['latency_s'] for row in rows):.0f} µs, {rate / 1e9:.2f} GB/s",
        "the sum over two ranks is wrong" if wrong else "",
    )


def talk() -> dict[str, Any]:
    """Runs all-reduces on a rank; returns {"sum", "latency_s", "bytes_per_s", "backend"}. Collective.

    sum           over ranks of rank + 1, so 3.0 for two ranks
    latency_s     seconds of an all-reduce of one element; bytes_per_s: rate of one of 4 MiB
    """
    import torch
    import torch.distributed as dist

    from shardwise.device import backend_of, current_device, group_on_host, synchronize

    device = torch.device("cpu") if group_on_host() else current_device()
    value = torch.tensor([float(dist.get_rank() + 1)], device=device)
    dist.all_reduce(value)
    small, large = torch.ones(1, device=device), torch.ones(2**20, device=device)
    times = []
    for tensor, count in ((small, 50), (large, 5)):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        synchronize(device)
        times.append((time.perf_counter() - began) / count)
    rate, backend = 4 * 2**20 / times[1], backend_of(dist.group.WORLD, device)
    return {"sum": float(value), "latency_s": times[0], "bytes_per_s": rate, "backend": backend}
