"""Watch the ranks that this program started (a launcher's: guard/watcher): reports, hangs, stacks; make the error."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from shardwise.errors import InputError, RunError, ShardwiseError, rebuilt
from shardwise.guard.diagnose import Finding, RankWatch
from shardwise.guard.records import Reader, memory_folder
from shardwise.guard.stacks import collect
from shardwise.ranks.lost import is_echo
from shardwise.ranks.pool_messages import Failure, RankCall
from shardwise.ranks.process import STARTED_BY_IMPORT, RankProcess

_LOOK_S = 0.5  # between looks at the ranks' records
_ASK_AGAIN_S = 0.5
Notice = Callable[[str, int, str], None]


@dataclass
class Outcome:
    """The end of a run: results by rank, failures in the order they came, stacks of ranks that had not ended.

    finding   what the ranks' records told: a hang, or what the first failure came from
    steps     of each rank, the last step that it began; -1 before the first
    waits     where ranks waited for others when the time was over
    """

    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    finding: Finding | None = None
    steps: dict[int, int] = field(default_factory=dict)
    waits: dict[int, str] = field(default_factory=dict)


@contextmanager
def meeting_place() -> Iterator[str]:
    """Context: a folder for the ranks' store, fresh for each run."""
    with tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def records_of(world_size: int) -> Iterator[tuple[str, dict[int, Reader]]]:
    """Context: a folder for the ranks' records. Yields (their path without the rank's number, {rank: its reader})."""
    folder = tempfile.TemporaryDirectory(prefix="shardwise-", dir=memory_folder(), ignore_cleanup_errors=True)
    readers: dict[int, Reader] = {}
    try:
        path = os.path.join(folder.name, "record-")
        readers = {rank: Reader(f"{path}{rank}") for rank in range(world_size)}
        yield path, readers
    finally:
        for reader in readers.values():
            reader.close()
        folder.cleanup()


def make_job(rank: int, world_size: int, call: bytes, store: str, **choices: Any) -> RankCall:
    """Returns a job that carries the caller's directory, search path and environment."""
    path = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    return RankCall(
        rank, world_size, store, search_path=path, directory=os.getcwd(),
        environment=dict(os.environ), call=call, **choices,
    )  # fmt: skip


def watch(
    ranks: Mapping[int, RankProcess], deadline: float | None, grace_s: float, notice: Notice | None = None,
    stop: threading.Event | None = None, records: RankWatch | None = None,
) -> Outcome:  # fmt: skip
    """Collect reports; returns the outcome. Ranks that do not end by the deadline are in its `stacks`, and run on.

    deadline  on the monotonic clock; None: none. After a first failure the others get `grace_s` seconds
    notice    called with ("finished" or "failed", rank, the failure's headline or "") as a rank ends

    stop      once it is set, ranks are asked to end by themselves, again and again: one may not listen yet
    records   the ranks' own, in which a hang is seen: it ends the run
    """
    outcome, pending, limit, looked = Outcome(), dict(ranks), deadline, time.monotonic()
    while pending and (limit is None or time.monotonic() < limit):
        left = None if limit is None else max(0.0, limit - time.monotonic())
        # a hang is a finding only while nobody has failed: others wait for a rank that has
        if records is not None and not outcome.failures:
            left = _LOOK_S if left is None else min(left, _LOOK_S)
            if time.monotonic() - looked >= _LOOK_S:
                looked = time.monotonic()
                outcome.finding = records.look(looked, set(ranks) - set(pending))
                if outcome.finding is not None:
                    break
        if stop is not None:
            left = _ASK_AGAIN_S if left is None else min(left, _ASK_AGAIN_S)
            for process in pending.values() if stop.is_set() else ():
                process.ask_to_stop()
        handles = [handle for rank in pending.values() for handle in (rank.connection, rank.sentinel)]
        wait(handles, left)
        for rank in [rank for rank in pending if _ended(rank, pending[rank], outcome, notice)]:
            del pending[rank]
        if outcome.failures:  # the others may fail by themselves, and say more, or wait for the one that has gone
            # a deadline that is about to pass leaves the others a second to report
            soon = outcome.failures[0].at + grace_s
            limit = soon if deadline is None else min(soon, max(deadline, outcome.failures[0].at + 1.0))
    # the deadline has passed: whom each waits for is still to be seen
    if records is not None and pending and not outcome.failures:
        outcome.waits = records.waiting()
    _take_stacks(pending, outcome)
    for process in pending.values() if outcome.finding is not None else ():
        process.end_at_once()  # one that was woken for its stack would go on with the run
    if records is not None:
        outcome.steps = {rank: seen.step for rank, seen in records.see().items()}
        if outcome.failures and outcome.finding is None:  # ranks that came to different collectives may fail, not hang
            outcome.finding = records.differing()
    return outcome


def _ended(number: int, process: RankProcess, outcome: Outcome, notice: Notice | None) -> bool:
    """Add this rank's report or exit to the outcome; returns whether it has ended."""
    # before the exit code: a rank that ended well has left its report in the pipe
    if process.connection.poll():
        report = process.read_report()
        failure = _death(number, process) if report is None else report.failure
    elif process.exit_code() is not None:  # ended without a report
        report, failure = None, _death(number, process)
    else:
        return False
    if failure is not None:
        outcome.failures.append(failure)
    elif report is not None and report.result is not None:
        outcome.results[number] = report.result
    if notice:
        notice("failed" if failure else "finished", number, failure.headline if failure else "")
    return True


def _death(number: int, process: RankProcess) -> Failure:
    """Returns the failure of a process that ended without a report."""
    text = describe_exit(process.exit_code(wait_s=5.0))
    crash = process.crash()
    place = f"rank {number} was here:\n{crash}" if crash else ""
    return Failure(number, time.monotonic(), text, f"rank {number} {text}", place, died=True)


def describe_exit(code: int | None) -> str:
    """Returns a process's end in words: `died of SIGKILL (...)`, `left with exit code 3`."""
    if code is None:
        return "closed its channel without a report"
    if code >= 0:
        return f"left with exit code {code} before it reported"
    # real-time signals have no names between the first and the last
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    hint = {
        "SIGKILL": " (the system may have run out of memory: see `dmesg`; accumulate=, zero=3, remat=full need less)",
        "SIGABRT": " (a collective whose ranks disagree on shapes aborts; TORCH_DISTRIBUTED_DEBUG=DETAIL tells)",
        "SIGBUS": " (shared memory may be full)",
    }.get(name, "")
    return f"died of {name}{hint}"


def start_error(number: int, code: int | None) -> ShardwiseError:
    """Returns the error for a rank that ended with `code`, or was not ready in time (None), before it took a job."""
    if code == STARTED_BY_IMPORT:
        return InputError(
            "ranks import this script, and importing it starts ranks: put what it runs under "
            '`if __name__ == "__main__":`'
        )
    why = f"it {describe_exit(code)}" if code is not None else "it was not ready in time"
    if code == 1:
        why += "; its error is printed above. Most often the program's main module cannot be imported by a rank"
    error: Any = RunError(f"rank {number} did not start: {why}")
    error.rank, error.remote_traceback, error.reason = number, "", "start"
    return error


def _take_stacks(pending: Mapping[int, RankProcess], outcome: Outcome) -> None:
    """Put the stacks of ranks that have not ended into the outcome."""
    running = {number: process for number, process in pending.items() if process.exit_code() is None}
    collect({number: process.pid for number, process in running.items()}, lambda number: running[number].dump())
    for number, process in pending.items():
        outcome.stacks[number] = process.stack() or "(no Python stack: the rank did not answer)"


def unpack(outcome: Outcome, world_size: int, what: str, timeout_s: float | None) -> list[Any]:
    """Returns the ranks' results in rank order; where the run failed, raises one error made of all failures."""
    if outcome.failures or outcome.stacks or outcome.finding:
        raise make_error(outcome, world_size, what, timeout_s)
    results = []
    for number in range(world_size):
        try:
            results.append(pickle.loads(outcome.results[number]))
        except Exception as error:
            raise RunError(f"rank {number}: the result of `{what}` cannot be read by the caller: {error}") from error
    return results


def make_error(outcome: Outcome, world_size: int, what: str, timeout_s: float | None) -> ShardwiseError:
    """Returns the error of the first cause: the earliest failure that is not merely an echo of a peer's end."""
    # a rank that raised an error of ours is a better reason than the hang that followed from it
    if outcome.finding is not None and not any(failure.own_class for failure in outcome.failures):
        return _hang_error(outcome, outcome.finding, world_size, what)
    if not outcome.failures:
        # ranks that wait for others are not at fault, unless all of them wait
        late = {rank: text for rank, text in outcome.stacks.items() if rank not in outcome.waits} or outcome.stacks
        head = f"`{what}` on {world_size} ranks passed its deadline of {timeout_s:g} s; {_names(late)} had not finished"
        lines = [head, *(outcome.waits[rank] for rank in sorted(outcome.waits)), _stack_text(outcome)]
        return _finish(RunError("\n".join(lines)), min(late), outcome)
    first = min(outcome.failures, key=lambda failure: (_is_echo(failure), failure.at))
    kind = _class_of(first)
    # an error of ours keeps its class, by which callers and exit codes tell refusals from failures
    if kind is not None:
        error = rebuilt(kind, first.message)
        error.add_note(f"raised on rank {first.rank} of {world_size}:\n{first.traceback}")
        return _finish(error, first.rank, outcome, first)
    text = f"rank {first.rank}: {first.headline}\n{first.traceback}".rstrip()
    guilty = first.rank
    if outcome.stacks and _is_echo(first):
        # nobody failed by itself: what matters is where the ranks are that the others waited for
        guilty = min(outcome.stacks)
        text = f"{_names(outcome.stacks)} had not finished\n{_stack_text(outcome)}\n{text}"
    return _finish(RunError(f"`{what}` failed on {world_size} ranks. {text}"), guilty, outcome, first)


def _hang_error(outcome: Outcome, finding: Finding, world_size: int, what: str) -> ShardwiseError:
    """Returns the error of a hang: the `Finding` from the ranks' records, then failures that followed from it."""
    followed = [f"what followed: rank {failure.rank}: {failure.headline}" for failure in outcome.failures]
    parts = [f"`{what}` hangs on {world_size} ranks: {finding.text()}", *followed, _stack_text(outcome)]
    if outcome.failures:
        parts[0] = f"`{what}` failed on {world_size} ranks: {finding.text()}"
    error = _finish(RunError("\n".join(part for part in parts if part)), finding.rank, outcome)
    error.reason, error.retry = finding.reason, finding.retry
    error.remote_traceback = ""  # the message has every rank's stack
    return error


def _class_of(failure: Failure) -> type[ShardwiseError] | None:
    try:
        return pickle.loads(failure.own_class) if failure.own_class else None
    except (ImportError, AttributeError):
        return None  # the rank knows a class that the caller does not


def _finish(error: Any, rank: int, outcome: Outcome, first: Failure | None = None) -> Any:
    """Returns the error with the rank, the reason and the steps done; what followed from the first failure as notes."""
    error.rank, error.steps = rank, outcome.steps
    error.reason = "late" if first is None else "died" if first.died else "raised"
    # without a first failure the ranks were late, and their stacks say where
    for failure in outcome.failures if first is not None else ():
        if failure is not first:
            error.add_note(f"what followed: rank {failure.rank}: {failure.headline.splitlines()[0][:200]}")
    error.remote_traceback = _stack_text(outcome) if first is None else "" if first.died else first.traceback
    return error


def _is_echo(failure: Failure) -> bool:
    """Returns whether a rank failed because a peer had gone or never came."""
    return is_echo(failure.traceback)


def _names(numbers: Mapping[int, Any]) -> str:
    listed = ", ".join(str(number) for number in sorted(numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _stack_text(outcome: Outcome) -> str:
    return "\n".join(f"rank {number} was here:\n{text}" for number, text in sorted(outcome.stacks.items()))
