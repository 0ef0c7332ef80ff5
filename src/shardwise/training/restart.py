"""Start a run again after a failure: which failures are worth it, from which checkpoint, on how many ranks.

    launch -> done
           -> a rank died, hung or raised -> journal -> wait -> launch anew from the newest checkpoint, in its folder

Every attempt has new processes and a new store. Without a checkpoint the run begins again. The journal
(`journal.jsonl`) has one line for each attempt: its cause, the rank, the steps that were lost, the wait.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpoint import manifest, publish
from shardwise.checkpoint.background import ALONE_S
from shardwise.checkpoint.remote import is_remote, place
from shardwise.errors import RefusedPlan, RunError, first_line
from shardwise.layout.elastic import smaller
from shardwise.observe import write_json
from shardwise.ranks.start_ranks import stop_signals
from shardwise.training.go_on import LOST, how_to_go_on
from shardwise.training.job import Job
from shardwise.training.resume import home_of

JOURNAL = "journal.jsonl"
METRICS = "metrics.jsonl"
FIRST_WAIT_S = 1.0
MOST_WAIT_S = 60.0
WRITERS_S = ALONE_S + 5.0
Launch = Callable[[Job], dict[str, Any]]


def until_done(job: Job, launch: Launch) -> dict[str, Any]:
    """Launch the run, up to `train.restarts` times again; returns its summary with figures of the attempts.

    launch   runs the job on ranks of its own and returns the summary, or raises
    Raises the last attempt's `RunError`, with a note on why there was no other, or `KeyboardInterrupt` as `stopped`.
    """
    attempts = _Attempts(job)
    while True:
        began, from_step = time.monotonic(), attempts.saved_step()
        try:
            summary = launch(attempts.job)
        except RunError as error:
            if not job.folder.is_dir():
                raise  # moved or deleted under the run, as its message says: there is nothing to go on from
            # otherwise the steps up to a checkpoint that is about to be published would be lost
            attempts.let_writers_end()
            entry = attempts.entry(began, from_step, error)
            why_not = attempts.why_not(entry, error)
            if why_not:
                attempts.write(entry)
                error.add_note(f"not started again: {why_not}" if attempts.budget else why_not)
                # after such a reason the same run may get further: the message says how
                if entry["reason"] in LOST:
                    error.args = (f"{error}\n{how_to_go_on(attempts.job)}",)
                raise
            attempts.begin_next(entry, error)
            attempts.write(entry)
            if not attempts.wait(entry):
                return attempts.stopped()
        else:
            attempts.write(attempts.entry(began, from_step, None))
            return attempts.with_attempts(summary)


class _Attempts:
    """The attempts of one run: their journal, and where and how the next one begins."""

    def __init__(self, job: Job) -> None:
        self.job, self.first_resume = job, job.resume
        self.home = home_of(job.effective, job.folder)
        self.budget: int = job.effective.config.train.restarts
        self.began = time.monotonic()
        self.entries: list[dict[str, Any]] = []
        self._ahead = ahead_of(self.home, job.resume)

    # --- where the run stands

    def checkpoint(self) -> Path | None:
        """Returns the newest checkpoint of this run, or None."""
        return _newest(self.home, self._ahead)

    def source(self) -> str | None:
        """Returns the checkpoint or folder that the next attempt resumes from, or None."""
        return source_of(self.home, self.first_resume, self._ahead)

    def let_writers_end(self) -> None:
        """Waits at most `WRITERS_S` seconds for a checkpoint that dead ranks' writer processes are about to publish."""
        until = time.monotonic() + WRITERS_S
        while time.monotonic() < until and publish.under_way(self.home):
            time.sleep(0.05)

    def saved_step(self) -> int:
        """Returns the step of the newest checkpoint, 0 without one."""
        newest = self.checkpoint()
        return 0 if newest is None else publish.step_of(newest)

    def entry(self, began: float, from_step: int, error: RunError | None) -> dict[str, Any]:
        """Returns the journal's entry, as JSON, of the attempt that ended now. `error`: None where the run is done."""
        steps = getattr(error, "steps", {})
        saved = self.saved_step()
        # the step of the rank that got furthest, of those that recorded one
        reached = self.job.steps if error is None else max(from_step, *steps.values(), 0) if steps else from_step
        seconds = time.monotonic() - began
        kept = _seconds_of_steps(self.job.folder / METRICS, from_step, reached if error is None else saved)
        return {
            "attempt": len(self.entries) + 1,
            "plan": str(self.job.effective.plan),
            "seconds": round(seconds, 3),
            "goodput": round(min(1.0, kept / max(seconds, 1e-9)), 4),
            "from_step": from_step,
            "reached_step": reached,
            "saved_step": saved,
            "lost_steps": 0 if error is None else max(0, reached - saved),
            "reason": "done" if error is None else getattr(error, "reason", "raised"),
            "rank": getattr(error, "rank", None),
            "what": "" if error is None else first_line(error),
        }

    def write(self, entry: dict[str, Any]) -> None:
        """Appends an entry to the journal, behind those of earlier commands on the same run."""
        self.entries.append(entry)
        with (self.job.folder / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    # --- whether to go on, and how

    def why_not(self, entry: dict[str, Any], error: RunError) -> str:
        """Returns why the run is not started again after this attempt; "" where it is."""
        # the error says of itself that it would come back
        if getattr(error, "retry", None) is False:
            return "starting again would come to the same place"
        before = self.entries[-1] if self.entries else None
        same = ("reason", "rank", "what", "reached_step")
        # the same error in the same step is no accident: starting again would repeat it
        if before is not None and entry["reason"] == "raised" and all(before[key] == entry[key] for key in same):
            return "two attempts came to the same error in the same step"
        # with a budget of 0 the user never asked for restarts, and learns of the option
        if len(self.entries) >= self.budget:
            used = f"its {self.budget} restart(s) are used up (train.restarts)"
            return used if self.budget else "train.restarts (--restarts N) would have started it again"
        return ""

    def begin_next(self, entry: dict[str, Any], error: RunError) -> None:
        """Settles the next attempt: from where, on how many ranks, after how long a wait."""
        log = self.job.folder / f"error-attempt{entry['attempt']}.log"
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self.job = self.job.with_(resume=self.source(), again=True)
        barren = 1 + len(self._without_progress(entry))
        # doubles with each attempt that saved nothing new
        entry["wait_s"] = min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** (barren - 1))
        self._shrink(entry)

    def _without_progress(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the entries of the attempts right before `entry` that ended with the same newest checkpoint."""
        barren = []
        for before in reversed(self.entries):
            if before["saved_step"] != entry["saved_step"]:
                break
            barren.append(before)
        return barren

    def _shrink(self, entry: dict[str, Any]) -> None:
        """Takes a smaller plan after the same rank was lost twice without progress, where train.min_ranks allows."""
        least = self.job.effective.config.train.min_ranks
        lost = entry["reason"] in ("died", "start", "late")
        again = [before for before in self._without_progress(entry)[:1] if before["rank"] == entry["rank"]]
        # one loss may be chance; the same rank lost twice without a checkpoint in between points at its device or host
        if least is None or not lost or not again:
            return
        plan = self.job.effective.plan
        try:
            fewer = smaller(plan, plan.world_size - 1)
        except RefusedPlan as refused:
            entry["not_fewer"] = str(refused)
            return
        if fewer.world_size >= least:
            self.job = self.job.with_(effective=replace(self.job.effective, plan=fewer))
            entry["next_plan"] = str(fewer)

    def wait(self, entry: dict[str, Any]) -> bool:
        """Report the failure and wait before the next attempt; returns False where a signal asked it to end."""
        saved = entry["saved_step"]
        place = f"from step {saved}" if saved else "from the beginning"
        plan = f" under plan {entry['next_plan']}" if "next_plan" in entry else ""
        sys.stderr.write(
            f"\nattempt {entry['attempt']} ended ({entry['reason']}, rank {entry['rank']}): {entry['what']}\n"
            f"going on {place}{plan} in {entry['wait_s']:g} s; {entry['lost_steps']} step(s) are taken again; "
            f"{self.budget - len(self.entries)} restart(s) are left\n"
        )
        with _asked_to_stop() as asked:
            return not asked.wait(entry["wait_s"])

    # --- the end

    def stopped(self) -> dict[str, Any]:
        """Returns {"folder", "stopped", "notices"}, the summary of a run that was asked to end between two attempts.

        Raises `KeyboardInterrupt` where no checkpoint was saved.
        """
        newest = self.checkpoint()
        # without a checkpoint there is nothing that the same command could resume
        if newest is None:
            raise KeyboardInterrupt
        state = {"step": publish.step_of(newest), "checkpoint": str(newest), "loss": None}
        return {"folder": str(self.job.folder), "stopped": state, "notices": []}

    def with_attempts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Returns the summary with attempts, lost steps and goodput, also written; of a stopped run as it is."""
        if summary.get("stopped") is not None:
            return summary
        kept = _seconds_of_steps(self.job.folder / METRICS, 0, self.job.steps)
        added = {
            "attempts": len(self.entries),
            "lost_steps": sum(entry["lost_steps"] for entry in self.entries),
            "goodput": min(1.0, kept / max(time.monotonic() - self.began, 1e-9)) if self.first_resume is None else None,
        }
        summary = {**summary, **added}
        write_json(self.job.folder / "summary.json", summary)
        return summary


def ahead_of(home: Path, resume: str | None) -> set[tuple[str, int]]:
    """Returns the `_identity` of each of a run's checkpoints that is newer than the one to resume from."""
    if resume is None or place(resume).parent.absolute() != home.absolute():
        return set()
    first = int(manifest.read(place(resume)).fields["step"])
    return {_identity(path) for path in publish.scan(home) if publish.step_of(path) > first}


def source_of(home: Path, resume: str | None, ahead: set[tuple[str, int]]) -> str | None:
    """Returns where a later attempt resumes: the run's own checkpoints, once it has written one; None: from the start.

    resume  the place from which the first attempt began, used until checkpoints `ahead` of it are set aside
    """
    there = {_identity(path) for path in publish.scan(home)}
    return resume if _newest(home, ahead) is None or there & ahead else str(home)


def _newest(home: Path, ahead: set[tuple[str, int]]) -> Path | None:
    return next((path for path in publish.scan(home) if _identity(path) not in ahead), None)


def _identity(checkpoint: Path) -> tuple[str, int]:
    """Returns (name, inode), which tells a checkpoint from a later one of the same name; inode 0 in a remote store."""
    return checkpoint.name, 0 if is_remote(checkpoint) else checkpoint.stat().st_ino


def _seconds_of_steps(metrics: Path, first: int, stop: int) -> float:
    """Returns the seconds of steps [first, stop), input included, by the run's records."""
    text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.exists() else ""
    total = 0.0
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # an evaluation, or half a line of a rank that died
            record = json.loads(line)
            total += record["seconds"] + record["input_seconds"] if first < record["step"] <= stop else 0.0
    return total


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Context: yields an event that `stop_signals` set, in the main thread."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in stop_signals()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
