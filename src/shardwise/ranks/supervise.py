"""Watches the ranks that this program started: reports, hangs, stacks, and the error. A launcher's: guard/watcher."""

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

_LOOK_S = 0.5  # seconds between reads of the ranks' records
_ASK_AGAIN_S = 0.5  # seconds between requests to stop
Notice = Callable[[str, int, str], None]  # (event, rank, text), as `watch` calls it


@dataclass
class Outcome:
    """The end of a run, as `watch` saw it.

    results   rank -> pickled result, of ranks that finished
    failures  in the order in which they came
    stacks    rank -> text of its stacks, of ranks that had not ended
    finding   the hang that the ranks' records showed, or the collectives that differed; None: no such thing
    steps     rank -> the last step that it began; -1 before the first
    waits     rank -> a line on what it waited for when the deadline passed
    """

    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    finding: Finding | None = None
    steps: dict[int, int] = field(default_factory=dict)
    waits: dict[int, str] = field(default_factory=dict)


@contextmanager
def meeting_place() -> Iterator[str]:
    """Context that gives the path of a new folder for the ranks' FileStore, and removes it afterwards."""
    with tempfile.TemporaryDirectory(prefix="shardwise-", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def records_of(world_size: int) -> Iterator[tuple[str, dict[int, Reader]]]:
    """Context that gives (path of records without the rank's number, {rank: reader of its record}).

    The records lie in a new folder in shared memory, which is removed afterwards.
    """
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
    """Returns a job for one rank, with this process's working directory, module search path and environment.

    call     packed function and arguments; `store`: path of the FileStore
    choices  further fields of `RankCall`
    """
    path = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
    return RankCall(
        rank, world_size, store, search_path=path, directory=os.getcwd(),
        environment=dict(os.environ), call=call, **choices,
    )  # fmt: skip


def watch(
    ranks: Mapping[int, RankProcess], deadline: float | None, grace_s: float, notice: Notice | None = None,
    stop: threading.Event | None = None, records: RankWatch | None = None,
) -> Outcome:  # fmt: skip
    """Waits until the ranks end, hang, or are late; returns the outcome.

    ranks     rank -> its process, which has been sent its job
    deadline  time of the monotonic clock; None: none. Ranks that are late go on; their stacks are in the outcome
    grace_s   seconds that the other ranks get after a first failure
    notice    called with ("finished" or "failed", rank, the failure's headline or "") as a rank ends
    stop      once it is set, ranks are asked to stop, repeatedly, since one may not listen yet
    records   watches the ranks' records; if it finds a hang, the remaining ranks are killed
    """
    outcome, pending, limit, looked = Outcome(), dict(ranks), deadline, time.monotonic()
    while pending and (limit is None or time.monotonic() < limit):
        left = None if limit is None else max(0.0, limit - time.monotonic())
        # after a failure other ranks wait for the failed one, which is no hang
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
        if outcome.failures:  # the others may still report the true cause, or wait for the failed rank forever
            # a deadline that is about to pass leaves the others a second to report
            soon = outcome.failures[0].at + grace_s
            limit = soon if deadline is None else min(soon, max(deadline, outcome.failures[0].at + 1.0))
    # the deadline has passed: the records still show what each rank waits for
    if records is not None and pending and not outcome.failures:
        outcome.waits = records.waiting()
    _take_stacks(pending, outcome)
    for process in pending.values() if outcome.finding is not None else ():
        process.end_at_once()  # a signal for its stack may have woken it from its wait
    if records is not None:
        outcome.steps = {rank: seen.step for rank, seen in records.see().items()}
        if outcome.failures and outcome.finding is None:  # ranks in different collectives may fail instead of hang
            outcome.finding = records.differing()
    return outcome


def _ended(number: int, process: RankProcess, outcome: Outcome, notice: Notice | None) -> bool:
    """Adds the report or the death of rank `number` to the outcome; returns whether it has ended."""
    # before the exit code is looked at, since a rank that ended may have left its report in the pipe
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
    """Returns the failure of rank `number`, whose process ended without a report."""
    text = describe_exit(process.exit_code(wait_s=5.0))
    crash = process.crash()
    place = f"rank {number} was here:\n{crash}" if crash else ""
    return Failure(number, time.monotonic(), text, f"rank {number} {text}", place, died=True)


def describe_exit(code: int | None) -> str:
    """Returns how a process ended, such as `died of SIGKILL (...)`; `code`: exit code, -N for signal N, None: alive."""
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
    """Returns the error for a rank that ended before it took a job.

    number  the rank
    code    its exit code; None: it is alive, but was not ready in time
    """
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
    """Asks the ranks that have not ended for their stacks and puts the texts into the outcome."""
    running = {number: process for number, process in pending.items() if process.exit_code() is None}
    collect({number: process.pid for number, process in running.items()}, lambda number: running[number].dump())
    for number, process in pending.items():
        outcome.stacks[number] = process.stack() or "(no Python stack: the rank did not answer)"


def unpack(outcome: Outcome, world_size: int, what: str, timeout_s: float | None) -> list[Any]:
    """Returns the ranks' unpickled results in rank order; raises the error of `make_error` if the run failed.

    what        name of the function, for messages; `timeout_s`: its limit, which the error of a late run tells
    """
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
    """Returns the error of a failed run, which tells the first cause and what followed; parameters as `unpack`.

    The cause is a hang, else the earliest failure that is no echo of a peer's end, else the ranks that were late.
    """
    # an error of shardwise's own class on a rank is the reason of a hang that followed
    if outcome.finding is not None and not any(failure.own_class for failure in outcome.failures):
        return _hang_error(outcome, outcome.finding, world_size, what)
    if not outcome.failures:
        # a rank that waits for others is not late itself, unless all of them wait
        late = {rank: text for rank, text in outcome.stacks.items() if rank not in outcome.waits} or outcome.stacks
        head = f"`{what}` on {world_size} ranks passed its deadline of {timeout_s:g} s; {_names(late)} had not finished"
        lines = [head, *(outcome.waits[rank] for rank in sorted(outcome.waits)), _stack_text(outcome)]
        return _finish(RunError("\n".join(lines)), min(late), outcome)
    first = min(outcome.failures, key=lambda failure: (_is_echo(failure), failure.at))
    kind = _class_of(first)
    # an error of shardwise keeps its class, from which callers and exit codes tell refusals from failures
    if kind is not None:
        error = rebuilt(kind, first.message)
        error.add_note(f"raised on rank {first.rank} of {world_size}:\n{first.traceback}")
        return _finish(error, first.rank, outcome, first)
    text = f"rank {first.rank}: {first.headline}\n{first.traceback}".rstrip()
    guilty = first.rank
    if outcome.stacks and _is_echo(first):
        # all failures are echoes: the cause lies with the ranks that have not finished
        guilty = min(outcome.stacks)
        text = f"{_names(outcome.stacks)} had not finished\n{_stack_text(outcome)}\n{text}"
    return _finish(RunError(f"`{what}` failed on {world_size} ranks. {text}"), guilty, outcome, first)


def _hang_error(outcome: Outcome, finding: Finding, world_size: int, what: str) -> ShardwiseError:
    """Returns the error of a hang: the finding from the ranks' records, failures that followed, and stacks."""
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
        return None  # the class is not importable in the caller


def _finish(error: Any, rank: int, outcome: Outcome, first: Failure | None = None) -> Any:
    """Returns `error` with attributes `rank`, `steps`, `reason` and `remote_traceback`, and later failures as notes.

    rank    the rank at fault
    first   the failure that is the cause; None: ranks were late, and their stacks are the traceback
    """
    error.rank, error.steps = rank, outcome.steps
    error.reason = "late" if first is None else "died" if first.died else "raised"
    # without a first failure the ranks were late, and their stacks say where
    for failure in outcome.failures if first is not None else ():
        if failure is not first:
            error.add_note(f"what followed: rank {failure.rank}: {failure.headline.splitlines()[0][:200]}")
    error.remote_traceback = _stack_text(outcome) if first is None else "" if first.died else first.traceback
    return error


def _is_echo(failure: Failure) -> bool:
    """Whether a rank failed only because a peer had ended or never came."""
    return is_echo(failure.traceback)


def _names(numbers: Mapping[int, Any]) -> str:
    listed = ", ".join(str(number) for number in sorted(numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"


def _stack_text(outcome: Outcome) -> str:
    return "\n".join(f"rank {number} was here:\n{text}" for number, text in sorted(outcome.stacks.items()))
