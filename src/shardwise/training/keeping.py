"""Decides when a run saves checkpoints and stops on a signal, and loads what it resumes from.

    after a step -> due by steps?  by time, or asked to stop by a signal? (about once a second ranks exchange these)
                 -> save in the background; if asked to stop: save, wait, end

A launcher's rank gets signals itself; ranks that this program started get SIGUSR2 from the parent. After a failed save
the run goes on with a notice; a second failure in a row ends it, unless every step is done.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import SafetensorError, safe_open

from shardwise.adapters.peft_files import adapters_at, refuse_other_adapters
from shardwise.checkpoint import publish
from shardwise.checkpoint.inspect import opened
from shardwise.checkpoint.load import Restored, load_weights, restore
from shardwise.checkpoint.remote import disk_of, place
from shardwise.checkpoint.replicas import ReplicaCheck
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.stored import Stored
from shardwise.comm import gather_json, gather_rows
from shardwise.data import Loader
from shardwise.engine.ema import Ema
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.host import put
from shardwise.layout import Plan
from shardwise.look.ranks_alike import HeldAlike
from shardwise.ranks.start_ranks import HeardSignals, stop_signals
from shardwise.training.job import Job
from shardwise.training.resume import STOPPED, changes, home_of, of_another_plan, settings_of, task_digest
from shardwise.training.stragglers import Stragglers

LOOK_S = 1.0  # seconds between exchanges of clocks and signals, or one step if that is longer
MOST_STEPS = 1000  # steps between exchanges at most
BEST = "best.safetensors"
GOES_ON = "; the run goes on, and the next save that fails will end it"
SAVED_ALL_THE_SAME = "; every step is done, and the weights are in"  # appended to the error of a last save
_REMEDY = (
    'loss_scope="model" of the task has every rank run the model on all samples; or add up what it is made of by '
    "torch.distributed.all_reduce in the forward"
)
_ANSWERS = ["", "well", "badly"]


class Stopping:
    """Handler of the signals that ask a run to stop; a second signal goes to the handler that was there before.

    asked      name of the signal that asked the run to stop; "": none
    starts     Whether no step has begun, so that Ctrl-C ends the run at once
    launched   Whether this program's parent process started this rank, and asks by SIGUSR2
    """

    def __init__(self, launched: bool) -> None:
        self.asked = ""
        self.starts = False
        self._numbers = (signal.SIGUSR2,) if launched else stop_signals()
        self._launched = launched
        self._before: dict[int, Any] = {}
        self._heard = HeardSignals()

    def start(self) -> None:
        """Installs the handlers; does nothing outside of the main thread."""
        # Python allows only the main thread to set signal handlers
        if threading.current_thread() is not threading.main_thread():
            return
        for_parent = (signal.SIGTERM, signal.SIGHUP) if self._launched else ()
        numbers = (*self._numbers, *for_parent)
        self._before = {number: signal.getsignal(number) for number in numbers}
        for number in self._numbers:
            signal.signal(number, self._hear)
        for number in for_parent:  # the parent gets these signals too, asks its ranks to stop, and ends them
            signal.signal(number, signal.SIG_IGN)

    def _hear(self, number: int, frame: Any) -> None:
        """Notes the first request to stop; a second one, or Ctrl-C before the first step, goes to the old handler."""
        came = self._heard.hear(number)
        # for launched ranks the parent counts signals, and ends the ranks at the second one
        if (self.starts and number == signal.SIGINT) or (came == "another" and not self._launched):
            self.stop()
            # raise the signal again for the handler that was there before
            os.kill(os.getpid(), number)
        elif came == "first":
            self.asked = signal.Signals(number).name

    def stop(self) -> None:
        """Restores the previous handlers."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)


class Keeper:
    """A run's checkpoints on one rank. Every rank makes one and calls `begin`, `after` each step, `end`, `close`."""

    def __init__(self, job: Job, engine: Engine, ema: Ema | None, loader: Loader | None) -> None:
        self.job, self.engine, self.ema, self.loader = job, engine, ema, loader
        config = job.effective.config.train
        self.every, self.minutes = config.checkpoint_every, config.checkpoint_minutes
        self.stopping = Stopping(job.launched)
        self.stopping.starts = True
        self.saver: Saver | None = None
        self.check_every = config.check_replicas
        self.check: ReplicaCheck | None = None
        self._hooked = ExitStack()
        if self.check_every is not None:
            self.check = ReplicaCheck(engine, self.check_every)
            self._hooked.enter_context(engine.around("update", self.check.before_update))
        self.stragglers = Stragglers(engine)
        self._alike = HeldAlike(engine.module, engine.mesh, _REMEDY)
        self.stalls_s: list[float] = []  # seconds for which each save stopped training
        self.first = 0  # the first step of this run
        self._plans = [(0, str(engine.plan))]  # (steps before it, plan), of resumed runs too
        self.first_loss: float | None = None  # of the run that is resumed
        self.best: dict[str, Any] | None = None  # step, held-out loss and weights of train.keep_best
        self._weights: Path | None = None  # where the weights of the last step are
        self._saves = self._failures = 0
        self._waited_for = True
        self._look_at, self._looked_after, self._looked, self._saved = 0, 0, time.monotonic(), time.monotonic()
        # 0: no checkpoints; None: by minutes
        if self.every != 0:
            self.stopping.start()
            keep, background = config.checkpoint_keep, config.checkpoint_background
            self.saver = Saver(engine, home_of(job.effective, job.folder), keep=keep, background=background, ema=ema)

    # --- before the first step

    def begin(self) -> int:
        """Loads the job's checkpoint or weights, if any; returns the first step. Collective; `InputError` if unfit."""
        if self.job.resume is not None:
            self._resume(place(self.job.resume))
        elif self.job.effective.config.train.init_from is not None:
            self._take_weights(self.job.effective.config.train.init_from)
        if self.every and self.saver is not None:
            self.saver.prepare()
        self.stopping.starts = False
        return self.first

    def _resume(self, source: Path) -> None:
        """Loads a checkpoint's state and position, adds notices of what differs; `InputError` if no step is left."""
        restored = restore(self.engine, source, ema=self.ema)
        fields = restored.manifest.fields
        self.first = self.engine.steps_done
        # after a crash at the end every step may be done, and only exports and reports are missing
        if self.first >= self.job.steps and not self.job.again:
            raise InputError(
                f"{restored.folder} is of step {self.first}, and this run has {self.job.steps} steps: there is nothing "
                f"left to do; give more with --steps, or start anew with --init-from"
            )
        if self.loader is not None:
            if fields.get("data") is None:
                raise InputError(f"{restored.folder} has no position in the data: it is of a task with other data")
            self.loader.load_state_dict(fields["data"])
        self.first_loss = _from_json((fields.get("run") or {}).get("first_loss"))
        self.best = self._best_of((fields.get("run") or {}).get("best"))
        # under another plan other ranks are replicas, so the first check finds anew which buffers may differ
        if self.check is not None and restored.same_plan:
            self.check.unlike = fields.get("unlike")
        notices = [*restored.notices, f"goes on from {restored.folder}, after step {self.first}"]
        notices += changes(fields.get("settings") or {}, settings_of(self.job.effective))
        digest, name = task_digest(self.job.effective), self.job.effective.config.task.name.rpartition(":")[0]
        # None: the task is not from a file, or the checkpoint has no digest
        if None not in (digest, fields.get("task_file")) and digest != fields["task_file"]:
            notices.append(
                f"{name} was edited since the checkpoint: what it says now (model, loss, data) is trained on"
            )
        before = (fields.get("run") or {}).get("plans") or [(0, fields["plan"])]
        under_way = self._plans[0][1]
        self._plans = before if before[-1][1] == under_way else [*before, (self.first, under_way)]
        if not restored.same_plan:
            notices.append(of_another_plan(Plan.parse(fields["plan"]), self.engine.plan))
        self.engine.notices.extend(notices)
        if self.engine.rank == 0:
            self._set_aside(restored)

    def _best_of(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns the checkpoint's record `best` with the file's path; None if the file is of another step. Collective.

        Such a file is of a step that is run again, and is renamed, as is one that cannot be read.
        """
        path = self.job.folder / BEST  # the recorded path may be wrong, since the folder may have been moved
        own = _step_in(path) if self.engine.rank == 0 else None
        step = gather_json(own, self.engine.mesh.world, self.engine.device)[0]
        # there is no file of best weights in this folder
        if step is None:
            return None
        if best is not None and step == best["step"]:
            return {**best, "weights": str(path)}
        aside = path.with_name("best.damaged.safetensors" if step < 0 else f"best.aside-step{step}.safetensors")
        if self.engine.rank == 0:
            path.rename(aside)
        why = "cannot be read" if step < 0 else f"is of step {step}, which is taken again"
        lost = "" if best is None else f", and those of step {best['step']} are not kept any more"
        self.engine.notices.append(f"{path} {why}: it is {aside.name} now{lost}")
        return None

    def _set_aside(self, restored: Restored) -> None:
        """Renames this run's checkpoints that are damaged or of later steps, so that later scans skip them."""
        own = home_of(self.job.effective, self.job.folder)
        # another run's checkpoints stay as they are
        if restored.folder.parent.absolute() != own.absolute():
            return
        for path in restored.damaged:
            publish.set_aside(path, "damaged", disk_of(own))
        for path in publish.scan(own):
            if publish.step_of(path) > restored.manifest.step:
                publish.set_aside(path, "aside", disk_of(own))
        (self.job.folder / STOPPED).unlink(missing_ok=True)

    def _take_weights(self, source: str) -> None:
        """Loads weights alone from a checkpoint, safetensors or adapters; `InputError` if unfit. Collective."""
        renames = self.job.effective.config.train.init_rename
        if (adapters := adapters_at(source)) is not None:
            refuse_other_adapters(adapters, self.engine.module)
        with opened(adapters or source) as stored:
            self._refuse_damage(stored)
            matched = load_weights(self.engine, stored, dict(pair.split("=", 1) for pair in renames))
        if adapters is not None and matched.unused:
            raise InputError(
                f"train.init_from: {adapters} are adapters of another model or of other layers: {len(matched.unused)} "
                f"of its tensors have no place of their shape in this one ({', '.join(matched.unused[:3])}). Give the "
                "folder that they were trained on, and the lora.targets of theirs"
            )
        drawn = sorted({*matched.missing} & {*self.engine.state.frozen_names})
        # unmatched names on both sides are most likely the same weights under other names
        if drawn and matched.unused:
            raise InputError(
                f"train.init_from: {len(drawn)} frozen weights, which no step would change, have no value in "
                f"{stored.folder} ({', '.join(drawn[:3])}), and {len(matched.unused)} of its tensors no place "
                f"({', '.join(matched.unused[:3])}): name them alike with train.init_rename"
            )
        every = len(matched.loaded) + len(matched.missing)
        self.engine.notices.append(
            f"weights from {stored.folder}: {len(matched.loaded)} of {every} tensors"
            + _some("; begun anew: ", matched.missing) + _some("; not used: ", matched.unused)
        )  # fmt: skip
        if self.ema is not None:
            self.ema.restart()

    def _refuse_damage(self, stored: Stored) -> None:
        """Raises `InputError` on all ranks if a file of a checkpoint differs from its digest. Collective."""
        rank, ranks = self.engine.rank, self.engine.world_size
        # each rank reads some of the files, and all raise together, or the others would wait for the one that raised
        mine = publish.verify(stored.folder, rank, ranks) if stored.manifest is not None else []
        wrong = [word for own in gather_json(mine, self.engine.mesh.world, self.engine.device) for word in own]
        if wrong:
            raise InputError("; ".join(dict.fromkeys(wrong)))

    # --- after each step

    def after(self, step: int, first_loss: float | None) -> bool:
        """Saves if a checkpoint is due; returns whether the run has to stop after this step. Collective.

        step   the step that is done, from 0; `first_loss`: the run's first loss, to save

        Raises `ReplicasDiffer` if replicas differ, `RunError` at a second failed save in a row.
        """
        done = step + 1
        # without train.check_replicas, replicas are compared after steps 1, 2, 4, ... and the last
        if self.check is None and (done == self.job.steps or self._alike.is_due(done)):
            self._alike(done)
        if self.check is not None and self.check_every is not None and done % self.check_every == 0:
            self.check()
        # the last step is saved by `end`, once its weights are written
        if self.saver is None or done == self.job.steps:
            return False
        due = bool(self.every) and done % int(self.every or 1) == 0
        stop = False
        # exchanging signals and clocks is a collective, so not at each step
        if done >= self._look_at:
            stop, by_time = self._look(done)
            due = due or by_time
        if due or stop:
            self._save(first_loss)
        elif self.every and done == self.first + 1:
            self.saver.make_room()  # the optimizer has its state now, so the first save will not have to wait
        # `_save` sets the saver to None if a checkpoint cannot hold the state
        if stop and self.saver is not None:
            self._finish_save(final=True)
            return True
        return False

    def _look(self, done: int) -> tuple[bool, bool]:
        """Exchanges signals, clocks and saves between ranks; returns (whether to stop, whether a save is due by time).

        done   steps done. Finishes a save that all ranks have written. Collective.
        """
        assert self.saver is not None
        now = time.monotonic()
        seconds = (now - self._looked) / max(done - self._looked_after, 1)
        by_time = not self.every and now - self._saved > 60 * self.minutes
        # a row: 0 asked to stop, 1 due by time, 2 index of the save's outcome, 3 seconds a step, 4.. `Stragglers.row`
        row = [float(bool(self.stopping.asked)), float(by_time), _ANSWERS.index(self.saver.answered()), seconds]
        row += self.stragglers.row(done - self._looked_after)
        table = gather_rows(put(row, self.engine.device), self.engine.mesh.world).tolist()
        slowest = max(row[3] for row in table)
        self.stragglers.look([row[4:] for row in table], slowest)
        self._looked, self._looked_after = now, done
        # the next exchange must be in the same step on all ranks, so it is computed from the slowest one's time
        self._look_at = done + max(1, min(MOST_STEPS, int(LOOK_S / max(slowest, 1e-9))))
        # a save is finished once every rank has written its part, or one has failed
        if all(row[2] for row in table) or any(row[2] == _ANSWERS.index("badly") for row in table):
            self._finish_save()
        # rank 0's clock decides for all, since ranks' clocks differ and saving is collective
        return any(row[0] for row in table), bool(table[0][1])

    def _save(self, first_loss: float | None) -> None:
        """Begins a checkpoint. Collective; raises as `_failed`, and `RefusedPlan` for state that it cannot hold."""
        assert self.saver is not None
        self._finish_save()
        if self.check is not None:  # wrong replicas must not be saved
            self.check()
        self._saved = time.monotonic()
        fields = {
            "data": None if self.loader is None else self.loader.state_dict(),
            "settings": settings_of(self.job.effective),
            "task_file": task_digest(self.job.effective),
            "run": {"first_loss": _as_json(first_loss), "name": self.job.name, "best": self.best, "plans": self._plans},
            "unlike": None if self.check is None else self.check.unlike,
        }
        try:
            began = time.perf_counter()
            self.saver.save(fields)
            self.stalls_s.append(time.perf_counter() - began)
            self._saves += 1
            self._waited_for = False
        except RunError as error:
            self._failed(error)
        except RefusedPlan as error:
            # train.checkpoint_every asked for checkpoints; by default a run goes on without them, with a notice
            # (test_state_that_has_no_place_is_told_by_default_and_ends_a_run_that_asked_for_checkpoints)
            if self.every:
                raise
            self.engine.notices.append(f"no checkpoints are made: {error}")
            self.stopping.stop()
            self.saver.close()
            self.saver = None

    def _finish_save(self, final: bool = False) -> None:
        """Waits for the save under way, if there is one; on failure acts as `_failed`. Collective."""
        assert self.saver is not None
        if self._waited_for:
            return
        self._waited_for = True
        try:
            self.saver.finish()
            self._failures = 0
        except RunError as error:
            self._failed(error, final)

    def _failed(self, error: RunError, final: bool = False) -> None:
        """Adds a notice of a failed save, or raises `error` if it is the second in a row or `final`.

        Once the weights of the last step are written, a failure is always a notice alone.
        """
        self._failures += 1
        # every step is done and the weights are written, so the run has not failed
        if self._weights is not None:
            self.engine.notices.append(f"{error}{SAVED_ALL_THE_SAME} {self._weights}")
            return
        if self._failures > 1 or final:
            raise error
        self.engine.notices.append(f"{error}{GOES_ON}")

    def end(self, first_loss: float | None, weights: Path) -> None:
        """Writes a last checkpoint if there were others; called once `weights`, their file, is written. Collective.

        A failed save becomes a notice; raises `ReplicasDiffer` as `after` does.
        """
        if self.first >= self.job.steps:
            return  # an earlier attempt has made it
        self._weights = weights
        if self.saver is not None and (self.every or self._saves or self.job.resume is not None):
            self._save(first_loss)
            if self.saver is not None:
                self._finish_save(final=True)

    def plans(self) -> list[str]:
        """Returns each plan of the run with its steps, as "tp=2 in steps 4 to 9"; [] if there was only one plan."""
        ends = [*(done for done, _ in self._plans[1:]), self.job.steps]
        if len(self._plans) == 1:
            return []
        return [f"{plan} in steps {done + 1} to {end}" for (done, plan), end in zip(self._plans, ends, strict=True)]

    def settle(self) -> None:
        """Waits for the save under way. Collective."""
        if self.saver is not None:
            self._finish_save()

    def cost(self) -> dict[str, Any] | None:
        """Returns the cost of saving, None for fewer than two saves.

        saves, bytes             how many saves; bytes of one, over all ranks
        first_stall_s, stall_s   seconds for which the first save stopped training, and the median of the others
        """
        if len(self.stalls_s) < 2 or self.saver is None:
            return None
        return {
            "saves": len(self.stalls_s),
            "first_stall_s": self.stalls_s[0],
            "stall_s": median(self.stalls_s[1:]),
            "bytes": self.saver.total_bytes,
        }

    def close(self) -> None:
        """Restores signal handlers and ends the writer process."""
        self.stopping.stop()
        self._hooked.close()
        if self.saver is not None:
            self.saver.close()


def _step_in(path: Path) -> int | None:
    """Returns the step in the metadata of a safetensors file; None if there is no file, -1 if it cannot be read."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, ValueError, KeyError, SafetensorError):
        return -1


def _as_json(loss: float | None) -> float | str | None:
    """Returns a loss as a JSON value; "nan" or "inf" if it is not finite, which JSON numbers cannot be."""
    return loss if loss is None or math.isfinite(loss) else str(loss)


def _from_json(loss: float | str | None) -> float | None:
    return None if loss is None else float(loss)


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return what + ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
