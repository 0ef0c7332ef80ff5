"""`RankPool`: rank processes that are started once and serve many short runs.

torch caches meshes, classes and communication plans in global tables, which keep process groups and their threads
alive. The tables are emptied after each job, and modules that a job imported are exempt from garbage collection, so
that a collection costs little. An engine that is closed destroys its own groups.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from shardwise.errors import InputError
from shardwise.guard.diagnose import RankWatch
from shardwise.ranks.pool_messages import OWN, RELEASE, pack_call
from shardwise.ranks.process import START_LIMIT_S, RankProcess, allow_files, refuse_beyond_memory
from shardwise.ranks.supervise import Outcome, make_job, meeting_place, records_of, start_error, unpack, watch

GRACE_S = 5.0  # seconds that the other ranks have to report after a first failure
CLEAN_LIMIT_S = 10.0  # seconds that a rank has to clean up after a job; then it is killed


class RankPool:
    """A set of rank processes that run functions. Processes are started on demand and reused.

        with RankPool() as pool:
            sums = pool.run(add_ranks, 4)

    threads       number of torch threads of each rank
    quiet         Whether the ranks' output is discarded
    accelerators  Whether rank N takes accelerator N, and groups use its backend (NCCL) if each rank has one of its own;
                  without it groups use gloo
    own_backend   Whether groups use the accelerator's backend even if several ranks share a device

    Each run has a process group of its own.
    """

    def __init__(self, threads: int = 1, *, quiet: bool = False, accelerators: bool = False, own_backend: bool = False):
        self.threads = threads
        self.quiet = quiet
        self.accelerators = accelerators
        self.own_backend = own_backend
        self._idle: list[RankProcess] = []
        self._started = 0
        self._closed = False
        atexit.register(_close, weakref.ref(self))

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of idle ranks, in the order of their ranks in the next run."""
        return [process.pid for process in self._idle]

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Calls `function(*args)` on `world_size` ranks; returns the results in rank order.

        The function is pickled by name, so it must stand at the top level of a module. An error on a rank is raised
        here, an error of shardwise with its own class and any other as RunError; both have `rank` and
        `remote_traceback`. `RunError` also after `timeout_s` seconds, which count from when all ranks are up, or for a
        hang. `InputError` for a closed pool, or ranks that cannot be started here.
        """
        if self._closed:
            raise InputError("this RankPool is closed; make a new one")
        if world_size < 1:
            raise InputError(f"world_size is {world_size}; a run needs at least one rank")
        refuse_beyond_memory(world_size)
        allow_files(world_size)
        call = pack_call(function, args)
        name = getattr(function, "__qualname__", repr(function))
        self._grow(world_size, getattr(function, "__module__", ""))
        ranks, self._idle = dict(enumerate(self._idle[:world_size])), self._idle[world_size:]
        try:
            outcome = self._supervise(ranks, call, timeout_s)
        except BaseException:
            for process in ranks.values():
                process.kill()
            raise
        return unpack(outcome, world_size, name, timeout_s)

    def _supervise(self, ranks: dict[int, RankProcess], call: bytes, timeout_s: float) -> Outcome:
        """Runs a packed call on these ranks, which are watched for hangs; returns the outcome.

        ranks      rank -> its process; `call`: as `pack_call` returns it
        timeout_s  seconds until the run ends as late
        """
        with meeting_place() as folder, records_of(len(ranks)) as (record, readers):
            store = os.path.join(folder, "store")
            choices = {
                "backend": OWN if self.own_backend else None if self.accelerators else "gloo",
                "threads": self.threads,
                "group_timeout_s": max(timeout_s - min(5.0, timeout_s / 10), 0.1),
            }
            for rank, process in ranks.items():
                process.send_job(make_job(rank, len(ranks), call, store, record=record, **choices))
            outcome = watch(ranks, time.monotonic() + timeout_s, GRACE_S, records=RankWatch(readers, None))
            self._take_back(ranks, outcome)
        return outcome

    def _take_back(self, ranks: dict[int, RankProcess], outcome: Outcome) -> None:
        """Puts ranks that reported and cleaned up back among the idle ones; kills the others."""
        for rank in outcome.results:
            ranks[rank].say(RELEASE)
        for rank in outcome.stacks:
            ranks[rank].kill()
        until = time.monotonic() + CLEAN_LIMIT_S
        kept = []
        for rank, process in ranks.items():
            if rank in outcome.stacks:
                continue
            if process.wait_idle(until):
                kept.append(process)
            else:
                process.kill()
        self._idle = kept + self._idle

    def _grow(self, world_size: int, imports: str) -> None:
        """Removes idle processes that have died, and starts new ones until there are `world_size`.

        imports   module of the function, which the first ranks may import once for all
        """
        # a rank that died, or whose device failed, would fail the next job too
        for process in [process for process in self._idle if not process.is_usable()]:
            process.kill()
            self._idle.remove(process)
        fresh = [self._start(imports) for _ in range(world_size - len(self._idle))]
        until = time.monotonic() + START_LIMIT_S
        for rank, process in enumerate(fresh, start=len(self._idle)):
            # one that does not start ends the run, since the others would wait for it
            if not process.wait_ready(until):
                error = start_error(rank, process.exit_code(wait_s=1.0))
                for other in fresh:
                    other.kill()
                raise error
        self._idle += fresh

    def _start(self, imports: str) -> RankProcess:
        """Returns a new rank process; its output is discarded if the pool is quiet."""
        self._started += 1
        name = f"shardwise-rank-{self._started}"
        if not self.quiet:
            return RankProcess(name, imports=imports)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            return RankProcess(name, nowhere, nowhere, imports=imports)
        finally:
            os.close(nowhere)

    def close(self) -> None:
        """Ends all idle ranks; the pool cannot run again. Safe to call twice."""
        self._closed = True
        leaving, self._idle = self._idle, []
        for process in leaving:
            process.dispose()
        for process in leaving:
            if process.exit_code(wait_s=2.0) is None:
                process.kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(reference: weakref.ref[RankPool]) -> None:
    pool = reference()
    if pool is not None:
        pool.close()
