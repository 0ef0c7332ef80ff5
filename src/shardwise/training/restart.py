"""Starts a run again after a failure: after which failures, from which checkpoint, on how many ranks.

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
WRITERS_S = ALONE_S + 5.0  # seconds for which checkpoints of dead ranks may still be published
Launch = Callable[[Job], dict[str, Any]]


def until_done(job: Job, launch: Launch) -> dict[str, Any]:
    """Launches the run, after failures up to `train.restarts` times again; returns the summary of `with_attempts`.

    launch   runs the job on new ranks and returns the summary, or raises

    Raises the last attempt's `RunError`, with a note on why there was no other, or `KeyboardInterrupt` as `stopped`.
    """
    attempts = _Attempts(job)
    while True:
        began, from_step = time.monotonic(), attempts.saved_step()
        try:
            summary = launch(attempts.job)
        except RunError as error:
            if not job.folder.is_dir():
                raise  # the folder was moved or deleted, so there is no checkpoint to resume from
            # wait for a checkpoint that is about to be published, or its steps would be lost
            attempts.let_writers_end()
            entry = attempts.entry(began, from_step, error)
            why_not = attempts.why_not(entry, error)
            if why_not:
                attempts.write(entry)
                error.add_note(f"not started again: {why_not}" if attempts.budget else why_not)
                # after such a failure a later run may get further, so the message says how to resume
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
    """The attempts of one run. `job`: of the next attempt; `entries`: their journal; `budget`: restarts allowed."""

    def __init__(self, job: Job) -> None:
        self.job, self.first_resume = job, job.resume
        self.home = home_of(job.effective, job.folder)
        self.budget: int = job.effective.config.train.restarts
        self.began = time.monotonic()
        self.entries: list[dict[str, Any]] = []
        self._ahead = ahead_of(self.home, job.resume)

    # --- where the run stands

    def checkpoint(self) -> Path | None:
        """Returns the newest checkpoint that this run has written, or None."""
        return _newest(self.home, self._ahead)

    def source(self) -> str | None:
        """Returns the checkpoint, or folder of checkpoints, that the next attempt resumes from; None: the beginning."""
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
        """Returns the journal's entry (JSON) of the attempt that has just ended.

        began       its start, of the monotonic clock; `from_step`: step of the checkpoint that it began from
        error       what ended it; None: the run is done
        """
        steps = getattr(error, "steps", {})
        saved = self.saved_step()
        # the furthest step that any rank recorded
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
        """Appends an entry to `entries` and to the journal's file, which may have entries of earlier commands."""
        self.entries.append(entry)
        with (self.job.folder / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    # --- whether to go on, and how

    def why_not(self, entry: dict[str, Any], error: RunError) -> str:
        """Returns why the run is not started again after this attempt; "" if it is."""
        # the error is marked as one that would come back
        if getattr(error, "retry", None) is False:
            return "starting again would come to the same place"
        before = self.entries[-1] if self.entries else None
        same = ("reason", "rank", "what", "reached_step")
        # the same error in the same step twice will come a third time
        if before is not None and entry["reason"] == "raised" and all(before[key] == entry[key] for key in same):
            return "two attempts came to the same error in the same step"
        # with a budget of 0 the message names the option
        if len(self.entries) >= self.budget:
            used = f"its {self.budget} restart(s) are used up (train.restarts)"
            return used if self.budget else "train.restarts (--restarts N) would have started it again"
        return ""

    def begin_next(self, entry: dict[str, Any], error: RunError) -> None:
        """Sets `job` to that of the next attempt, adds "wait_s" (seconds) to the entry, and logs the error.

        If the plan shrinks, "next_plan" is added too.
        """
        log = self.job.folder / f"error-attempt{entry['attempt']}.log"
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self.job = self.job.with_(resume=self.source(), again=True)
        barren = 1 + len(self._without_progress(entry))
        # the wait doubles with each attempt that saved nothing new
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
        """Takes a smaller plan if the same rank was lost twice without progress and train.min_ranks allows it."""
        least = self.job.effective.config.train.min_ranks
        lost = entry["reason"] in ("died", "start", "late")
        again = [before for before in self._without_progress(entry)[:1] if before["rank"] == entry["rank"]]
        # one loss may be chance; the same rank lost twice without progress points at its device or host
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
        """Reports the failure and waits `entry["wait_s"]` seconds; returns False if a signal asked the run to stop."""
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
        """Returns the summary of a run that was asked to stop between two attempts: {"folder", "stopped", "notices"}.

        Raises `KeyboardInterrupt` if no checkpoint was saved.
        """
        newest = self.checkpoint()
        # without a checkpoint there is nothing that the same command could resume
        if newest is None:
            raise KeyboardInterrupt
        state = {"step": publish.step_of(newest), "checkpoint": str(newest), "loss": None}
        return {"folder": str(self.job.folder), "stopped": state, "notices": []}

    def with_attempts(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Returns the summary with "attempts", "lost_steps" and "goodput", and rewrites summary.json.

        goodput   seconds of steps that counted over all seconds; None for a run that was resumed

        The summary of a stopped run is returned unchanged.
        """
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
    """Returns the `_identity` of each checkpoint in `home` that is newer than the one to resume from.

    resume   a checkpoint of that folder; otherwise (None, a folder, another run's) the result is empty
    """
    if resume is None or place(resume).parent.absolute() != home.absolute():
        return set()
    first = int(manifest.read(place(resume)).fields["step"])
    return {_identity(path) for path in publish.scan(home) if publish.step_of(path) > first}


def source_of(home: Path, resume: str | None, ahead: set[tuple[str, int]]) -> str | None:
    """Returns what a later attempt resumes from: `home`, once this run has written a checkpoint there, else `resume`.

    home    folder of the run's checkpoints
    resume  what the first attempt resumed from; None: the beginning
    ahead   `ahead_of` at the first attempt; while any of those is still in `home`, `resume` is returned
    """
    there = {_identity(path) for path in publish.scan(home)}
    return resume if _newest(home, ahead) is None or there & ahead else str(home)


def _newest(home: Path, ahead: set[tuple[str, int]]) -> Path | None:
    return next((path for path in publish.scan(home) if _identity(path) not in ahead), None)


def _identity(checkpoint: Path) -> tuple[str, int]:
    """Returns (name, inode), which differs between checkpoints of the same name; inode 0 in a store."""
    return checkpoint.name, 0 if is_remote(checkpoint) else checkpoint.stat().st_ino


def _seconds_of_steps(metrics: Path, first: int, stop: int) -> float:
    """Returns the seconds of steps [first, stop), counted from 0, with reading input, from metrics.jsonl."""
    text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.exists() else ""
    total = 0.0
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # an evaluation, or half a line of a rank that died
            record = json.loads(line)
            total += record["seconds"] + record["input_seconds"] if first < record["step"] <= stop else 0.0
    return total


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Context that gives an event, which any of `stop_signals` sets; in other threads no signal sets it."""
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
