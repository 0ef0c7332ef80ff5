"""`LauncherRanks`: the ranks of a launcher in the place of a `RankPool`, for what rank 0 asks all of them to run.

    rank 0   run(function, N, ...) --> the call, in the store --> runs it too --> results of all --> end(exit code)
    rank r   serve(): waits for a call, runs it, leaves its result; returns the exit code

The process group is the launcher's own, which stays. What this does not do: fewer ranks than the launcher started.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from shardwise.errors import InputError, RunError
from shardwise.ranks.join import join
from shardwise.ranks.mpi import here
from shardwise.ranks.pool_messages import Report, dumps, pack_call
from shardwise.ranks.supervise import Outcome, unpack
from shardwise.ranks.worker import describe

POLL_S, GRACE_S = 0.02, 10.0
_ALL_GONE = "rank 0 has ended without a word: look at its own output"


class LauncherRanks:
    """The ranks that a launcher started; made on every rank, collectively. `code`: the exit code for all of them."""

    code = 0

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = join()
        self._store = dist.PrefixStore("shardwise-calls", dist.distributed_c10d._get_default_store())
        self._number = 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """Call `function(*args)` on every rank; returns the results in rank order. On rank 0 alone, others `serve`.

        Raises errors of ranks as `RankPool.run` does, `RunError` after `timeout_s`, and `InputError` for another
        `world_size` than the launcher's.
        """
        # a launcher has started its ranks before the plan was known
        if world_size != self.world_size:
            place = here()
            named = place.named if place is not None else "the launcher"
            raise InputError(f"{named} started {self.world_size} rank(s), and {world_size} are needed: start as many")
        self._number += 1
        self._store.set(f"call/{self._number}", pack_call(function, args))
        until = time.monotonic() + timeout_s
        reports = {0: self._perform(function, args)}
        failed_at = None
        while len(reports) < world_size:
            for rank in range(1, world_size):
                if rank not in reports and self._store.check([self._key(rank)]):
                    reports[rank] = pickle.loads(self._store.get(self._key(rank)))
            # the earliest failure is told as the cause: ranks that failed before this one get GRACE_S to report
            if failed_at is None and any(report.failure for report in reports.values()):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
                break  # the others wait for one that has failed
            if time.monotonic() > until:
                missing = sorted(set(range(world_size)) - reports.keys())
                raise RunError(f"rank {missing[0]} did not come to the end of its part in {timeout_s:g} s")
            time.sleep(POLL_S)
        outcome = Outcome(
            {rank: report.result for rank, report in reports.items() if report.result is not None},
            [report.failure for report in reports.values() if report.failure is not None],
        )
        return unpack(outcome, world_size, getattr(function, "__qualname__", repr(function)), timeout_s)

    def serve(self) -> int:
        """Run the functions that rank 0 asks for until it calls `end`; returns that exit code.

        Raises `RunError` where rank 0 has ended without a word.
        """
        while True:
            self._number += 1
            call = self._wait(f"call/{self._number}")
            if call.startswith(b"{"):
                return int(json.loads(call)["code"])
            function, args = pickle.loads(call)
            self._store.set(self._key(self.rank), dumps(self._perform(function, args)))

    def end(self, code: int) -> None:
        """Let the other ranks end, with this exit code. On rank 0."""
        self._number += 1
        self._store.set(f"call/{self._number}", json.dumps({"code": code}))

    def _key(self, rank: int) -> str:
        return f"done/{self._number}/{rank}"

    def _perform(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Report:
        try:
            return Report(dumps(function(*args)), None)
        except Exception as error:
            return Report(None, describe(self.rank, error))

    def _wait(self, key: str) -> bytes:
        """Returns the store's value of `key`, polled for: C++ answers no signals. `RunError` when rank 0 has ended."""
        self._store.set_timeout(timedelta(seconds=60))
        try:
            while not self._store.check([key]):
                time.sleep(POLL_S)
            value: bytes = self._store.get(key)
            return value
        except RuntimeError as error:
            raise RunError(_ALL_GONE) from error
