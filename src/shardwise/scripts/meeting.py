"""Calls for which every rank is needed, in a script: one that only some ranks make is named, with both lines.

    rank 0   forward  step  model.state_dict()  waits          for all ranks to come here
    rank 1   forward  step  forward  <- "rank 0 waits in model.state_dict() [line 12], and this rank went on to ..."

Ranks tell each other through the store by which the run was set up, and enter no collective before all have come. A
rank counts what it passes on its way (forwards, steps); one that has passed more than a rank that waits will not come.

What this does not do: see a rank that does something else for good; the wait ends after a deadline, naming the line.
"""

from __future__ import annotations

import atexit
import json
import secrets
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm import Axis, gather_json
from shardwise.errors import RunError
from shardwise.scripts.saying import line_of_script

WAIT_S = 600.0
_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.1
_APART = "apart"


class Meeting:
    """One for each prepared model whose ranks hold pieces. Made collectively."""

    def __init__(self, world: Axis, device: torch.device, wait_s: float = WAIT_S) -> None:
        self.world, self.wait_s = world, wait_s
        name = gather_json(secrets.token_hex(6), world, device)[0]
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"shardwise-meeting-{name}", store)
        self._passed = 0  # forwards and steps of this rank
        self._met = 0  # calls for which all ranks came together
        atexit.register(_ended, weakref.ref(self))

    def passes(self) -> None:
        """This rank goes on to something that all ranks do; raises `RunError` where another waits for it elsewhere."""
        self._passed += 1
        told = f"{self._passed} {line_of_script()}"
        self._store.set(f"passed/{self._rank}", told)  # for a rank that comes to wait later
        if not self._store.check([f"{self._met}"]):
            return
        for rank in self.world.ranks:
            theirs = self._told(rank)
            if theirs is not None and theirs["passed"] < self._passed:
                self._part(rank, theirs, f"went on to [{line_of_script()}]")

    def enter(self, what: str) -> None:
        """Wait until every rank has come to this call. Raises `RunError`, naming the lines, where one will not come."""
        mine = {"what": what, "passed": self._passed, "line": line_of_script()}
        self._store.set(f"{self._met}/{self._rank}", json.dumps(mine))
        self._store.add(f"{self._met}", 1)
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while self._store.add(f"{self._met}", 0) < self.world.size:
            self._look_around(mine, late=time.monotonic() - began > self.wait_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)
        for rank in self.world.ranks:
            theirs = self._told(rank)
            assert theirs is not None
            if (theirs["what"], theirs["passed"]) != (what, self._passed):
                self._part(rank, theirs, f"calls {what} [{mine['line']}]")
        self._met += 1

    def _look_around(self, mine: dict[str, Any], *, late: bool) -> None:
        if self._store.check([_APART]):
            raise _told(self._store.get(_APART).decode())
        away = [rank for rank in self.world.ranks if self._told(rank) is None]
        for rank in away:
            passed, line = self._passed_by(rank)
            if passed > mine["passed"]:
                self._part(self._rank, mine, f"went on to [{line}]", rank)
        ended = [rank for rank in away if self._store.check([f"ended/{rank}"])]
        if away and (ended or late):
            why = "has ended" if ended else f"did not come in {self.wait_s:g} s"
            self._part(self._rank, mine, why, (ended or away)[0])

    @property
    def _rank(self) -> int:
        return self.world.ranks[self.world.index]

    def _passed_by(self, rank: int) -> tuple[int, str]:
        key = f"passed/{rank}"
        passed, _, line = self._store.get(key).decode().partition(" ") if self._store.check([key]) else ("0", "", "")
        return int(passed), line

    def _told(self, rank: int) -> dict[str, Any] | None:
        key = f"{self._met}/{rank}"
        return json.loads(self._store.get(key).decode()) if self._store.check([key]) else None

    def _part(self, waits: int, call: dict[str, Any], other: str, rank: int | None = None) -> None:
        message = (
            f"rank {waits} calls {call['what']} [{call['line']}], for which every rank is needed, since each holds "
            f"pieces; rank {self._rank if rank is None else rank} {other}. Call it on every rank, and write on one: "
            "state = model.state_dict(), then torch.save(state, path) under if prepared.rank == 0"
        )
        self._store.set(_APART, message)
        raise _told(message)


def _told(message: str) -> RunError:
    """An error that names its lines already."""
    error = RunError(message)
    error.names_line = True  # type: ignore[attr-defined]
    return error


def _ended(known: weakref.ref[Meeting]) -> None:
    """At the end of this process: ranks that wait for it need not."""
    meeting = known()
    if meeting is None or not dist.is_initialized():
        return
    with suppress(RuntimeError):  # the rank that kept the store has ended before, and nobody waits
        meeting._store.set_timeout(timedelta(seconds=5))
        meeting._store.set(f"ended/{meeting._rank}", "")
