"""`launch` starts a run's rank processes and their logs; the first failure ends all. Hangs: ranks/supervise."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, ShardwiseError
from shardwise.guard.diagnose import Deadlines, RankWatch
from shardwise.ranks.pool_messages import RELEASE, pack_call
from shardwise.ranks.process import START_LIMIT_S, RankProcess, allow_files, refuse_beyond_memory
from shardwise.ranks.supervise import Outcome, make_job, meeting_place, records_of, start_error, unpack, watch

TOGETHER_S = 1.0  # seconds within which a SIGTERM repeats the first signal instead of being a second request
GRACE_S = 2.0  # seconds after a first failure in which other ranks may report the true cause before they are ended


@dataclass(frozen=True)
class RankEvent:
    """An event of a rank. `kind`: "started", "finished" or "failed"; `text`: the failure in one line, else ""."""

    kind: str
    rank: int
    pid: int  # of the rank's process
    text: str = ""


def launch(
    function: Callable[..., Any], world_size: int, args: Sequence[Any] = (), *, timeout_s: float | None = None,
    log_dir: str | os.PathLike[str] | None = None, on_event: Callable[[RankEvent], None] | None = None,
    stop_wait_s: float = 5.0, on_stop: Callable[[str], None] | None = None, deadlines: Deadlines | None = None,
    name: str | None = None, imports: str = "",
) -> list[Any]:  # fmt: skip
    """Calls `function(*args)` in `world_size` new processes of this machine; returns the results in rank order.

    Rank 0 writes to this process's stdout and stderr. So do the others, unless `log_dir` is given; rank N then writes
    to `log_dir/rankN.log`. A failing rank ends the run: the others get SIGTERM, and SIGKILL `stop_wait_s` seconds
    later. Its error is raised as by `RankPool.run`, and `RunError` after `timeout_s` seconds (None: no limit). Ctrl-C
    and SIGTERM to this process end the ranks the same way before they take effect here.

    on_event  called with a `RankEvent` as a rank starts or ends
    on_stop   given if the function ends by itself after SIGUSR2. The first Ctrl-C, SIGTERM or SIGUSR1 to this process
              then calls `on_stop` with the signal's name and sends SIGUSR2 to the ranks; only a second one ends them.
              Ctrl-C before any rank began a step ends them at once
    deadlines seconds in which a rank must do something, by phase; None: only ranks that can never go on are found
    name      name of the function in messages; None: its own
    imports   module of shardwise that the fork server imports for all ranks; "": the function's module
    """
    if world_size < 1:
        raise InputError(f"world_size is {world_size}; a run needs at least one rank")
    refuse_beyond_memory(world_size)
    allow_files(world_size)
    call = pack_call(function, tuple(args))
    called = name or str(getattr(function, "__qualname__", function))
    logs = _open_logs(world_size, log_dir)
    ranks: dict[int, RankProcess] = {}
    try:
        with _sigterm_as_exception(), _asking_first(on_stop) as asked:
            try:
                _start_all(ranks, world_size, logs, on_event, imports or getattr(function, "__module__", ""))
                outcome = _supervise(ranks, call, timeout_s, on_event, asked, deadlines)
            except ShardwiseError:  # ranks did not start
                _end_early(asked)
                raise
            finally:
                _end_all(ranks, stop_wait_s if on_stop is None else 0.0)  # with on_stop, ranks ignore SIGTERM
    finally:
        for fd in logs.values():
            os.close(fd)
    try:
        return unpack(outcome, world_size, called, timeout_s)
    except Exception as error:
        _end_early(asked)
        rank = getattr(error, "rank", 0)
        if rank in logs and log_dir is not None:
            error.add_note(f"the output of rank {rank} is in {Path(log_dir) / f'rank{rank}.log'}")
        raise


def _open_logs(world_size: int, log_dir: str | os.PathLike[str] | None) -> dict[int, int]:
    """Returns {rank: file descriptor of its log} of ranks 1 and up, {} if `log_dir` is None; logs are appended to."""
    if log_dir is None:
        return {}
    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return {rank: os.open(folder / f"rank{rank}.log", mode, 0o666) for rank in range(1, world_size)}


def _start_all(
    ranks: dict[int, RankProcess],
    world_size: int,
    logs: dict[int, int],
    on_event: Callable[[RankEvent], None] | None,
    imports: str,
) -> None:
    """Starts the rank processes and waits until they are ready; raises if one does not start.

    ranks    filled in place, so that the caller can end those that run if an error is raised
    logs     rank -> file descriptor of its log; ranks without one share this process's output
    imports  module that the fork server imports for all ranks
    """
    for rank in range(world_size):
        ranks[rank] = RankProcess(f"shardwise-rank-{rank}", logs.get(rank, 1), logs.get(rank, 2), imports=imports)
    until = time.monotonic() + START_LIMIT_S
    for rank, process in ranks.items():
        if not process.wait_ready(until):
            raise start_error(rank, process.exit_code(wait_s=1.0))
        if on_event:
            on_event(RankEvent("started", rank, process.pid))


def _supervise(
    ranks: dict[int, RankProcess], call: bytes, timeout_s: float | None, on_event: Callable[[RankEvent], None] | None,
    asked: _Asked, deadlines: Deadlines | None,
) -> Outcome:  # fmt: skip
    """Runs a packed call on all ranks and watches them; returns their outcome. Parameters as `launch`.

    asked   event that makes `watch` ask ranks to stop; its `begun` is set here
    """

    def notice(kind: str, rank: int, text: str) -> None:
        if on_event:
            on_event(RankEvent(kind, rank, ranks[rank].pid, text))

    choices = {"backend": None, "threads": _threads(len(ranks)), "group_timeout_s": timeout_s, "once": True}
    with meeting_place() as folder, records_of(len(ranks)) as (record, readers):
        for rank, process in ranks.items():
            process.send_job(make_job(rank, len(ranks), call, f"{folder}/store", record=record, **choices))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watched = RankWatch(readers, deadlines)
        asked.begun = lambda: any(seen.step >= 0 for seen in watched.see().values())
        outcome = watch(ranks, deadline, GRACE_S, notice, asked, watched)
        for process in ranks.values():
            process.say(RELEASE)
    return outcome


def _threads(world_size: int) -> int:
    """Returns the user's OMP_NUM_THREADS, else an equal share of the CPUs this process may use."""
    wished = os.environ.get("OMP_NUM_THREADS", "")
    if wished.isdecimal() and int(wished) > 0:
        return int(wished)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // world_size)


def _end_all(ranks: dict[int, RankProcess], stop_wait_s: float) -> None:
    """Ends all ranks: waits 0.2 s, sends SIGTERM, waits `stop_wait_s` seconds, and kills those that remain."""
    try:
        until = time.monotonic() + 0.2
        for process in ranks.values():
            process.exit_code(wait_s=max(0.0, until - time.monotonic()))
        for process in ranks.values():
            process.terminate()
        until = time.monotonic() + stop_wait_s
        for process in ranks.values():
            process.exit_code(wait_s=max(0.0, until - time.monotonic()))
    finally:
        for process in ranks.values():
            process.kill()


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a run to save and end; SIGHUP is among them unless it is ignored (nohup)."""
    stays = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *(() if stays else (signal.SIGHUP,)))


class HeardSignals:
    """Distinguishes the first stop signal of a run from repetitions of it and from further requests."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def hear(self, number: int) -> str:
        """Returns "first", "same" (a SIGTERM within `TOGETHER_S` s of the first) or "another" for signal `number`."""
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            return "first"
        # `timeout` and batch systems send SIGTERM to a process and to its group; a fast second Ctrl-C is intended
        return "same" if number == signal.SIGTERM and now - self._first_s < TOGETHER_S else "another"


class _Asked(threading.Event):
    """An event that is set when ranks are to be asked to stop.

    begun  () -> whether a rank has begun a step
    early  Whether the signal was a SIGTERM that came before any rank began a step
    """

    early = False

    def __init__(self) -> None:
        super().__init__()
        self.begun: Callable[[], bool] = lambda: False


def _end_early(asked: _Asked) -> None:
    """Ends this process by SIGTERM if that signal came before the first step.

    A signal to the whole group (`timeout`) then ended the ranks too, and their failure would hide the cause.
    """
    if asked.early:
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _asking_first(on_stop: Callable[[str], None] | None) -> Iterator[_Asked]:
    """Context that gives an event, which the first stop signal sets; a second signal acts as without the context.

    on_stop   called with the first signal's name; None: no signal is handled
    """
    asked = _Asked()
    # only the main thread may set signal handlers
    if on_stop is None or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers, heard = stop_signals(), HeardSignals()
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: Any) -> None:
        """Sets the event at the first signal; a second one, or Ctrl-C before a first step, goes to the old handler."""
        came = heard.hear(number)
        # `timeout` and batch systems send one SIGTERM to a process and to its group
        if came == "same":
            return
        early = came == "first" and not asked.begun()
        # send the signal again to the old handler, which ends this process
        if came == "another" or (early and number == signal.SIGINT):
            restore()
            os.kill(os.getpid(), number)
            return
        asked.early = early and number == signal.SIGTERM
        asked.set()
        with suppress(OSError):  # the terminal may be gone
            on_stop(signal.Signals(number).name)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield asked
    finally:
        restore()


class _Terminated(BaseException):
    """Raised in the main thread when SIGTERM arrives."""


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    """Context in which SIGTERM raises an exception, so that the body ends its ranks; then the old handler gets it."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    arrived = False

    def handle(number: int, frame: Any) -> None:
        nonlocal arrived
        if not arrived:  # a second one must not interrupt the ending of the ranks
            arrived = True
            raise _Terminated

    signal.signal(signal.SIGTERM, handle)
    with suppress(_Terminated):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
    if arrived:
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)  # the earlier handler chose to go on; this run is over
