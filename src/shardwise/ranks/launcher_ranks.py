"""`LauncherRanks` runs functions on the ranks of a launcher, as `RankPool` does on processes of its own.

    rank 0   run(function, N, ...) writes the call into the store, runs it too, collects all results; end(exit code)
    rank r   serve() waits for calls, runs them, writes results into the store; returns the exit code

All calls use one process group, which `join` opened. What this does not do: run on fewer ranks than were started.
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

POLL_S, GRACE_S = 0.02, 10.0  # seconds: between polls of the store, and for late reports after a failure
_ALL_GONE = "rank 0 has ended without a word: look at its own output"


class LauncherRanks:
    """The ranks that a launcher started. Every rank makes one, collectively; it has `rank` and `world_size`."""

    code = 0

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = join()
        self._store = dist.PrefixStore("shardwise-calls", dist.distributed_c10d._get_default_store())
        self._number = 0

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """Calls `function(*args)` on every rank; returns the results in rank order. Called on rank 0, others `serve`.

        Raises errors of ranks as `RankPool.run` does, `RunError` after `timeout_s` seconds, and `InputError` if
        `world_size` is not the launcher's.
        """
        # the launcher started its ranks before the plan was known
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
            # the earliest failure is the cause, so ranks that may have failed before get GRACE_S to report
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
        """Runs the functions that rank 0 asks for, until it calls `end`; returns the exit code given there.

        Raises `RunError` if rank 0 has ended without calling `end`.
        """
        while True:
            self._number += 1
            call = self._wait(f"call/{self._number}")
            if call.startswith(b"{"):
                return int(json.loads(call)["code"])
            function, args = pickle.loads(call)
            self._store.set(self._key(self.rank), dumps(self._perform(function, args)))

    def end(self, code: int) -> None:
        """Makes `serve` on the other ranks return `code`. Called on rank 0."""
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
        """Waits until the store has `key` and returns its value; `RunError` if rank 0, which holds it, has ended.

        It polls, since a blocking `get` in C++ handles no signals.
        """
        self._store.set_timeout(timedelta(seconds=60))
        try:
            while not self._store.check([key]):
                time.sleep(POLL_S)
            value: bytes = self._store.get(key)
            return value
        except RuntimeError as error:
            raise RunError(_ALL_GONE) from error
