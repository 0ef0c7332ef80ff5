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
MOST_THREADS = 24  # of an idle process: a job whose groups are all gone leaves five


class HandedFd:
    """A file descriptor that can be pickled for a new process, where it is open too."""

    def __init__(self, fd: int):
        self.fd = fd

    def __reduce__(self) -> Any:
        return _receive_fd, (reduction.DupFd(self.fd),)


def _receive_fd(handle: Any) -> HandedFd:
    return HandedFd(handle.detach())


def serve(channel: Connection, stacks: HandedFd, output: HandedFd, errors: HandedFd) -> None:
    """Run a rank's process: settle, say ready, then one job after another until told to leave. Never returns."""
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
    """Set up the new process: it ends with its caller, leaves Ctrl-C to it, and can write its stack."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a launcher's request to stop, before the job listens for it
    answer_with_stacks(stacks)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    unbroken_stderr()
    multiprocessing.set_start_method(None, force=True)  # a job's own processes (a loader's workers) begin as elsewhere
    threading.Thread(target=_end_with_caller, name="end-with-caller", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # which the process that forked it leaves to others
    # what the fork server imported is never garbage: later collections need not walk it
    gc.freeze()


def _end_with_caller() -> None:
    """Wait for the calling process to end, by whatever means, and end too: no rank outlives its run.

    Meanwhile a beat each second tells whoever watches that Python's threads run.
    """
    caller = multiprocessing.parent_process()
    while caller is not None:
        if wait([caller.sentinel], BEAT_S):
            os._exit(1)
        record = points.record()
        if record is not None:
            record.beat()


def _serve_one(channel: Connection) -> bool:
    """Run one job; returns False when it was the last. The group goes only when every rank has reported.

    A rank that failed drops its group at once: its peers notice the closed connections instead of waiting.
    """
    job: RankCall = pickle.loads(channel.recv_bytes())
    report = _perform(job)
    _flush()
    channel.send_bytes(pickle.dumps(report))
    if report.failure is None:
        channel.recv_bytes()  # RELEASE
    # a process of `launch` serves one job, and one that cannot be cleaned no further one
    if job.once or report.spent or not _clean():
        return False
    channel.send_bytes(IDLE)
    return True


def _perform(job: RankCall) -> Report:
    """Returns the report of a job: the function's result, or its failure."""
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
        # a half-made group leaves torch counting groups from another number than its peers
        return Report(None, describe(job.rank, error), spent=not opened)


def _watched(job: RankCall) -> RankRecord | None:
    """Begin this rank's record, for the caller to watch it; returns it, None where nobody watches."""
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
    """Take the caller's directory, module search path and environment, plus the variables every launcher sets."""
    os.chdir(job.directory)
    sys.path[:] = job.search_path
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), GLOO_SOCKET_IFNAME=loopback)
    os.environ.update(WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size))
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # a torchrun above us is not our rendezvous


def _open_group(job: RankCall) -> None:
    """Open the process group of a job's ranks, over a store in a file."""
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # read at import otherwise, and the fork server imported long ago
    store = dist.FileStore(job.store, job.world_size)
    options = {}
    if job.group_timeout_s is not None:
        options["timeout"] = timedelta(seconds=job.group_timeout_s)
    backend = _shared_backend(job) if job.backend == OWN else job.backend or _backend_for(job)
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, **options)
    take_turns()
    keep_freed_memory()


def _shared_backend(job: RankCall) -> str:
    """Returns gloo and the accelerator's own backend, for ranks that may share a device; `InputError` without one."""
    from shardwise.device import group_backend, take

    # NCCL refuses two ranks of one host on a device: each is a host of its own, and messages go through its sockets
    os.environ.update(NCCL_HOSTID=f"rank-{job.rank}", NCCL_NET="Socket", NCCL_IB_DISABLE="1")
    take(job.rank)
    backend = group_backend(None)
    if backend == "gloo":
        raise InputError("an own backend was asked for, but torch sees no accelerator that has one here: leave it out")
    return backend


def _backend_for(job: RankCall) -> str:
    """Returns gloo, joined by the accelerator's own where each rank can have a device to itself."""
    from shardwise.device import group_backend, take

    take(job.rank)
    return group_backend(job.world_size)


def _clean() -> bool:
    """Reset everything that the next job could notice of this one; returns False where that is impossible."""
    import torch.distributed as dist

    from shardwise.device import current_device, synchronize

    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        synchronize(current_device())
    except RuntimeError:
        return False  # an accelerator is of no more use to a process in which one of its kernels has failed
    try:
        _forget_meshes()
    except (ImportError, AttributeError):
        return False
    gc.collect()
    _freeze_imports()
    return not _is_crowded()


def _is_crowded() -> bool:
    """Whether threads of process groups that a job left still run here: each slows every later job."""
    try:
        return len(os.listdir("/proc/self/task")) > MOST_THREADS
    except OSError:  # not Linux
        return False


_imported = 0  # modules, when what they made was last set aside


def _freeze_imports() -> None:
    """Exempt what a job imported from garbage collection, which is then ten times shorter after each later job."""
    global _imported
    if len(sys.modules) > _imported:  # gc.get_freeze_count() walks all that is set aside: 30 ms
        _imported = len(sys.modules)
        gc.freeze()


def _forget_meshes() -> None:
    """Empty DTensor's caches: equal meshes of two runs hash alike, so a cached answer would name dead groups."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import _random, _redistribute, debug

    sharding = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if sharding is not None:  # it keeps every class it met, and the class of a script all that the script holds
        sharding.cls_to_fsdp_cls.clear()
    _random._rng_tracker = None
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # its planners hold meshes, and those their groups
        _redistribute.clear_redistribute_planner_cache()
    # else the recompile limit counts the compilations of earlier jobs, and silently ends compilation
    torch._dynamo.reset()


def describe(rank: int, error: BaseException) -> Failure:
    """Returns an exception of a rank as a failure, for its caller to raise."""
    at = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # this file's frames say nothing about the failure
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    kind, message = type(error).__qualname__, str(error)
    headline = f"{kind}: {message}" if message else kind
    return Failure(rank, at, headline, message, text, own_class=_own_class(error))


def _own_class(error: BaseException) -> bytes | None:
    """Returns the pickled class of one of shardwise's errors, for the caller to raise again; None for all others."""
    if not isinstance(error, ShardwiseError):
        return None
    try:
        return pickle.dumps(type(error))
    except (pickle.PicklingError, AttributeError):
        return None


def _flush() -> None:
    """Flush what the job has printed, where the streams are still open."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
