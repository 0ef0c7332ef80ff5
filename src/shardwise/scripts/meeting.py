"""Check that every rank makes the script's collective calls in the same order; both lines are named if not.

    rank 0   1 forward  2 step  3 model.state_dict()  waits until all have come
    rank 1   1 forward  2 step  3 forward  <- "rank 0 calls model.state_dict() [line 12], rank 1 a forward [line 9]"

Each rank counts these calls, and the first to come to a number writes down what it does, in the store by which the run
was set up; the others compare. So an evaluation, a save or an extra step under `if rank == 0:` is told before a
collective is entered that would hang. Bytes: one line to the store for each call. Backwards and steps, of which there
are many, are compared in memory that ranks of one host share (comm/trail).

What this does not do: see a rank that does something else for good; the wait ends after a deadline, naming the line.
"""

from __future__ import annotations

import atexit
import secrets
import time

import torch
import torch.distributed as dist

from shardwise.comm import Axis, Trail, gather_json
from shardwise.errors import RunError
from shardwise.ranks.ended import has_ended, say_ended
from shardwise.scripts.script_lines import line_of_script

WAIT_S = 600.0
_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.1
_APART = "apart"
_KEPT = 1024  # numbers back to which what was done stays in the store
_AT_ONCE = 64
_STEPS = {
    "mean": "prepared.backward(loss)",
    "mean_over": "prepared.backward(loss, mean_over=n)",
    "weight": "prepared.backward(loss, weight)",
    "sum": "prepared.backward(loss, summed=True)",
    "step": "optimizer.step()",
}
_OFTEN = (
    "Every rank must make these calls, as often as the others: where its samples have nothing of a term, it gives a "
    "sum of nothing: prepared.backward(term.sum() / max(n, 1), mean_over=n)"
)


class Meeting:
    """Checks at each collective call of a prepared script that every rank makes the same call. Made collectively."""

    def __init__(self, world: Axis, device: torch.device, wait_s: float = WAIT_S) -> None:
        self.world, self.wait_s = world, wait_s
        name = gather_json(secrets.token_hex(6), world, device)[0]
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"shardwise-meeting-{name}", store)
        self._rank = world.ranks[world.index]
        self._number = 0  # of this rank's calls
        self._group_store = store
        self._trail = Trail(world, list(_STEPS.values()), device, _OFTEN)
        atexit.register(say_ended)

    def steps(self, call: str) -> None:
        """This rank comes to "step", or to a backward with a loss of this form; raises `RunError` as `passes` does.

        Nothing is sent: ranks of one host compare in shared memory.
        """
        self._trail.mark(_STEPS[call])

    def passes(self, what: str) -> None:
        """This rank goes on to a call that all ranks make; raises `RunError` where another makes another one."""
        self._number += 1
        line = line_of_script()
        told = self._store.compare_set(f"at/{self._number}", "", f"{what}\n{self._rank}\n{line}").decode()
        first, rank, theirs = told.split("\n", 2)
        if first != what:
            self._part(f"rank {rank} comes to {first} [{theirs}], and rank {self._rank} to {what} [{line}]")
        if self._rank == self.world.ranks[0] and self._number % _AT_ONCE == 0 and self._number > _KEPT:
            for number in range(self._number - _KEPT - _AT_ONCE, self._number - _KEPT):
                self._store.delete_key(f"at/{number}")

    def enter(self, what: str) -> None:
        """Wait until every rank has come to this call. Raises `RunError`, naming the lines, where one will not come."""
        self.passes(what)
        here = f"came/{self._number}"
        self._store.set(f"{here}/{self._rank}", "")
        self._store.add(here, 1)
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while self._store.add(here, 0) < self.world.size:
            self._look_around(what, here, late=time.monotonic() - began > self.wait_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _look_around(self, what: str, here: str, *, late: bool) -> None:
        if self._store.check([_APART]):
            raise _as_error(self._store.get(_APART).decode())
        away = [rank for rank in self.world.ranks if not self._store.check([f"{here}/{rank}"])]
        ended = [rank for rank in away if has_ended(self._group_store, rank)]
        if away and (ended or late):
            why = "has ended" if ended else f"did not come in {self.wait_s:g} s"
            self._part(f"rank {self._rank} comes to {what} [{line_of_script()}], and rank {(ended or away)[0]} {why}")

    def _part(self, what: str) -> None:
        message = (
            f"{what}: every rank is needed for these calls, in the same order, since each holds a part of what they "
            "need. Make them on every rank, and write or print on one: state = model.state_dict(), then "
            "torch.save(state, path) under if prepared.rank == 0"
        )
        self._store.set(_APART, message)
        raise _as_error(message)


def _as_error(message: str) -> RunError:
    """An error that names its lines already."""
    error = RunError(message)
    error.names_line = True  # type: ignore[attr-defined]
    return error
