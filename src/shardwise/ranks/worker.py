"""A rank's process: it waits for jobs, runs each inside a process group, and reports.

It leaves by `os._exit`: tearing down gloo's threads in a regular interpreter exit can abort.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from shardwise.errors import InputError, ShardwiseError
from shardwise.guard import points
from shardwise.guard.records import RankRecord
from shardwise.guard.stacks import answer_with_stacks
from shardwise.progress import unbroken_stderr
from shardwise.ranks.allocation import keep_freed_memory
from shardwise.ranks.fresh import reset_process
from shardwise.ranks.pool_messages import IDLE, OWN, READY, Failure, RankCall, Report, dumps
from shardwise.ranks.scheduling import take_turns

BEAT_S = 1.0
MOST_THREADS = 24  # more threads in an idle process are those of leaked groups (without any, five are left)


class HandedFd:
    """A file descriptor that can be pickled into a new process, which gets an open duplicate."""

    def __init__(self, fd: int):
        self.fd = fd

    def __reduce__(self) -> Any:
        return _receive_fd, (reduction.DupFd(self.fd),)


def _receive_fd(handle: Any) -> HandedFd:
    return HandedFd(handle.detach())


def serve(channel: Connection, stacks: HandedFd, output: HandedFd, errors: HandedFd) -> None:
    """Runs a rank's process: says READY on `channel`, then runs jobs until the caller closes it. Never returns.

    stacks           file to write stacks into when asked
    output, errors   files for this process's stdout and stderr
    """
    code = 1
    try:
        _settle(stacks.fd, output.fd, errors.fd)
        channel.send_bytes(READY)
        while _serve_one(channel):
            pass
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # the caller is gone or has closed the pool
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _settle(stacks: int, output: int, errors: int) -> None:
    """Sets up the new process so that it ends with its caller, ignores Ctrl-C, and writes its stack when asked.

    stacks, output, errors   file descriptors: for stacks, stdout and stderr
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a launcher's request to stop, before the job listens for it
    answer_with_stacks(stacks)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    unbroken_stderr()
    multiprocessing.set_start_method(None, force=True)  # a job's own processes (a loader's workers) begin as elsewhere
    threading.Thread(target=_end_with_caller, name="end-with-caller", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked in the fork server, and inherited
    # what the fork server imported is never garbage: later collections need not walk it
    gc.freeze()


def _end_with_caller() -> None:
    """Ends this process as soon as the calling process has ended, in whatever way. Runs in a thread.

    Meanwhile it writes a beat into this rank's record each `BEAT_S`, which shows that Python's threads run.
    """
    caller = multiprocessing.parent_process()
    while caller is not None:
        if wait([caller.sentinel], BEAT_S):
            os._exit(1)
        record = points.record()
        if record is not None:
            record.beat()


def _serve_one(channel: Connection) -> bool:
    """Receives and runs one job, and reports; returns False if this process can run no further job.

    The process group is kept until the caller says that every rank has reported (RELEASE). A rank that failed drops its
    group at once, so that its peers see closed connections instead of waiting.
    """
    job: RankCall = pickle.loads(channel.recv_bytes())
    report = _perform(job)
    _flush()
    channel.send_bytes(pickle.dumps(report))
    if report.failure is None:
        channel.recv_bytes()  # RELEASE
    # a process of `launch` runs one job; one that cannot be cleaned up could spoil the next
    if job.once or report.spent or not _clean():
        return False
    channel.send_bytes(IDLE)
    return True


def _perform(job: RankCall) -> Report:
    """Runs a job's function in its process group; returns the report of its result or failure."""
    opened, record = False, None
    try:
        _look_like_caller(job)
        function, args = pickle.loads(job.call)
        reset_process(job.threads)
        record = _watched(job)
        _open_group(job)
        opened = True
        result = function(*args)
        if record is not None:
            record.ended(True)
        return Report(_pack_result(result), None)
    except BaseException as error:
        if record is not None:
            record.ended(False)
        # after a group that failed to open, torch's count of groups differs from the peers': no further job
        return Report(None, describe(job.rank, error), spent=not opened)


def _watched(job: RankCall) -> RankRecord | None:
    """Begins this rank's record in shared memory, which the caller watches; returns it, or None if nobody watches."""
    from shardwise.comm import recording

    record = RankRecord(f"{job.record}{job.rank}", job.rank, job.world_size) if job.record else None
    points.have(record)
    recording.begin(record, {rank: f"{job.record}{rank}" for rank in range(job.world_size)})
    return record


def _pack_result(result: Any) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(f"a result of type {type(result).__name__} cannot be sent to the caller: {error}") from error


def _look_like_caller(job: RankCall) -> None:
    """Takes the caller's directory, module search path and environment, and sets RANK, WORLD_SIZE and the like."""
    os.chdir(job.directory)
    sys.path[:] = job.search_path
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), GLOO_SOCKET_IFNAME=loopback)
    os.environ.update(WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # set by a torchrun that started the caller, which these ranks do not use


def _open_group(job: RankCall) -> None:
    """Opens the default process group of a job's ranks, over a FileStore."""
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # torch reads it at import, which the fork server did in another environment
    store = dist.FileStore(job.store, job.world_size)
    options = {}
    if job.group_timeout_s is not None:
        options["timeout"] = timedelta(seconds=job.group_timeout_s)
    backend = _shared_backend(job) if job.backend == OWN else job.backend or _backend_for(job)
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, **options)
    take_turns()
    keep_freed_memory()


def _shared_backend(job: RankCall) -> str:
    """Returns the backend text of gloo and the accelerator's own, for ranks that may share a device.

    Raises `InputError` if this machine has no accelerator with a backend.
    """
    from shardwise.device import group_backend, take

    # NCCL refuses two ranks of one host on a device, so each pretends to be a host of its own and uses sockets
    os.environ.update(NCCL_HOSTID=f"rank-{job.rank}", NCCL_NET="Socket", NCCL_IB_DISABLE="1")
    take(job.rank)
    backend = group_backend(None)
    if backend == "gloo":
        raise InputError("an own backend was asked for, but torch sees no accelerator that has one here: leave it out")
    return backend


def _backend_for(job: RankCall) -> str:
    """Returns the backend text: gloo, with the accelerator's own if this machine has a device for each rank."""
    from shardwise.device import group_backend, take

    take(job.rank)
    return group_backend(job.world_size)


def _clean() -> bool:
    """Destroys the group and empties caches, so that the next job starts afresh; returns False if that fails."""
    import torch.distributed as dist

    from shardwise.device import current_device, synchronize

    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        synchronize(current_device())
    except RuntimeError:
        return False  # after a failed kernel the process cannot use the accelerator any more
    try:
        _forget_meshes()
    except (ImportError, AttributeError):
        return False
    gc.collect()
    _freeze_imports()
    return not _is_crowded()


def _is_crowded() -> bool:
    """Whether this process has more than `MOST_THREADS` threads: those of leaked groups slow every later job."""
    try:
        return len(os.listdir("/proc/self/task")) > MOST_THREADS
    except OSError:  # not Linux
        return False


_imported = 0  # number of imported modules at the last `gc.freeze`


def _freeze_imports() -> None:
    """Exempts objects of newly imported modules from garbage collection, which makes it ten times shorter."""
    global _imported
    if len(sys.modules) > _imported:  # gc.get_freeze_count() would walk all frozen objects: 30 ms
        _imported = len(sys.modules)
        gc.freeze()


def _forget_meshes() -> None:
    """Empties DTensor's caches, since equal meshes of two runs hash alike and cached results refer to dead groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import _random, _redistribute, debug

    sharding = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if sharding is not None:  # its table keeps classes of scripts alive, and through them all that scripts hold
        sharding.cls_to_fsdp_cls.clear()
    _random._rng_tracker = None
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # planners keep meshes and their groups alive
        _redistribute.clear_redistribute_planner_cache()
    # else the recompile limit counts the compilations of earlier jobs, and silently ends compilation
    torch._dynamo.reset()


def describe(rank: int, error: BaseException) -> Failure:
    """Returns a rank's exception as a `Failure`, which can be sent to the caller."""
    at = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # this file's frames say nothing about the failure
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    kind, message = type(error).__qualname__, str(error)
    headline = f"{kind}: {message}" if message else kind
    return Failure(rank, at, headline, message, text, own_class=_own_class(error))


def _own_class(error: BaseException) -> bytes | None:
    """Returns the pickled class if the error is one of shardwise's, for the caller to raise again; else None."""
    if not isinstance(error, ShardwiseError):
        return None
    try:
        return pickle.dumps(type(error))
    except (pickle.PicklingError, AttributeError):
        return None


def _flush() -> None:
    """Flushes stdout and stderr, if they are still open."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
