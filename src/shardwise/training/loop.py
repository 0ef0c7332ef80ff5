"""Runs one rank's training loop: steps, records, evaluations, and the weights at the end.

for each optimizer step:  parts or a global batch -> engine.step -> one metrics line, one step of the display
every eval_every steps:   held-out data -> engine.evaluate
at the end:               weights, memory of every rank, a few lines that the text model wrote
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.adapters.peft_files import are_prompts, has_adapters, of_adapters, write_adapters
from shardwise.comm import everybody, gather_json, gather_rows
from shardwise.data import evaluation_parts, own_tile, parts_of, samples_in
from shardwise.dataset import name_of
from shardwise.engine.ema import Ema
from shardwise.engine.engine import Engine
from shardwise.engine.weights_out import save_weights, trained_tensors
from shardwise.errors import InputError
from shardwise.guard.points import reach
from shardwise.host import put
from shardwise.look.samples import read_samples
from shardwise.measure.pace import Beat, over_ranks, pace_beside
from shardwise.observe import Flops, InputWatch, MetricsFile, count_flops, finite, peak_flops, write_inputs, write_json
from shardwise.observe.engine_sinks import engine_sinks
from shardwise.observe.peak_memory import imbalance, memory_of
from shardwise.observe.profile import StepProfile
from shardwise.observe.profile_steps import read_steps
from shardwise.observe.progress_display import Display
from shardwise.observe.sinks import open_sinks
from shardwise.observe.speed import Speed
from shardwise.progress import timing
from shardwise.step.optimizer_modes import evaluation_weights
from shardwise.step.result import StepResult
from shardwise.task import Task
from shardwise.training.failures import told_plainly
from shardwise.training.held_out import Spread
from shardwise.training.job import Job
from shardwise.training.keeping import BEST, Keeper
from shardwise.training.rank_parts import batches_of, engine_of, loader_of
from shardwise.training.replay import judging
from shardwise.training.resume import home_of, trim_metrics
from shardwise.training.writing import written_text

WEIGHTS = "model.safetensors"
EMA_WEIGHTS = "ema.safetensors"
ADAPTERS = "adapter"
OBSERVED = (
    1  # index of the process's step in which collectives are counted; step 0 differs (buffers are made, shapes learnt)
)
PACED = 4  # the CPU's pace is measured before each step up to this one, then at intervals


def run_rank(job: Job) -> dict[str, Any]:
    """Runs this rank's part of a run; returns the content of `summary.json`, the same on every rank. Collective."""
    with told_plainly(job.folder):
        return _run_rank(job)


def _run_rank(job: Job) -> dict[str, Any]:
    """Builds the task and its engine and runs every step; returns the run's summary. Collective."""
    reach("start")
    with ExitStack() as stack:
        with timing(_rank() == 0 and sys.stderr.isatty()) as say:
            say("train: building the task and its data")
            task = job.build_task()
            # only rank 0 reports FLOPs, so only it counts them
            flops = _flops(job, task) if _rank() == 0 else Flops(None, "")
            say(f"train: placing weights under plan {job.effective.plan}, then a look at a few samples")
            if job.proof is not None:  # entered before the engine is made, whose look at samples runs in float64 too
                stack.enter_context(job.proof.inside())
            engine = engine_of(job, task)
        if job.proof is not None:
            stack.enter_context(job.proof.around(engine))
        summary = _Rank(job, task, engine, flops, stack).run()
    engine.close()  # waits for all ranks, so never on the way out of an error
    return summary


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _flops(job: Job, task: Task) -> Flops:
    """Returns the FLOPs per sample, counted from shapes alone; called before the engine exists."""
    if task.batch is not None:
        batch = task.batch(0)
        sample = parts_of(batch, data_ranks=samples_in(batch))[0].batch
    else:
        sample = read_samples(task, [0])
    return count_flops(task, sample, job.tokens_per_sample)


class _Rank:
    """One rank's run: its engine, data, display and records. Making one resumes or loads weights; `run` trains."""

    def __init__(self, job: Job, task: Task, engine: Engine, flops: Flops, stack: ExitStack) -> None:
        self.job, self.task, self.engine, self.flops = job, task, engine, flops
        self.unit = "tokens" if job.tokens_per_sample else "samples"
        config, plan = job.effective.config.train, job.effective.plan
        peak = peak_flops(torch.device(engine.device), plan.precision)
        self.speed = Speed(self.unit, job.tokens_per_sample or 1, flops, peak, plan.world_size)
        self.ema = Ema(engine, config.ema_decay) if config.ema_decay is not None else None
        self.loader = loader_of(job, task, engine)
        if self.loader is not None:
            stack.enter_context(self.loader)
        if config.keep_best and task.eval_data is None:
            raise InputError("train.keep_best compares losses on held-out data, and Task.eval_data is None")
        self.keeper = Keeper(job, engine, self.ema, self.loader)
        stack.callback(self.keeper.close)
        self.first = self.keeper.begin()
        self.metrics: MetricsFile | None = None
        if engine.rank == 0:
            trim_metrics(job.folder / "metrics.jsonl", self.first)
            write_inputs(job.folder, job.effective, str(engine.device))
            sinks = open_sinks(list(config.sinks), job.folder, {"plan": str(plan), "task": job.name})
            sinks += engine_sinks(os.environ, home_of(job.effective, job.folder.absolute()), job.steps)
            self.metrics = stack.enter_context(closing(MetricsFile(job.folder / "metrics.jsonl", sinks)))
        self.display: Display | None = None
        # launched ranks write lines into files of their own; a proof's run shows nothing
        if (engine.rank == 0 or job.launched) and job.proof is None:
            live = None if engine.rank == 0 else False
            first = "first step: compiling the blocks" if plan.compile else "first step"
            self.display = stack.enter_context(closing(Display(job.steps, self.speed, config.log_every, live, first)))
        self.batches = batches_of(job, task, self.loader, self.first)
        steps = read_steps(config.profile_steps, job.steps)
        self.profile = StepProfile(steps, engine, job.folder)
        self.watch = InputWatch(self._of_all_ranks, self._input_advice())
        self.losses: list[float] = []
        self.shown_notices = len(engine.notices)  # notices that were shown at the start
        self.first_loss = self.keeper.first_loss
        # a resumed run adds to its checkpoint's number
        self.skipped = engine.state.skipped_steps
        self.peak_bytes = 0
        self.weights = job.folder / WEIGHTS
        self.adapters: Path | None = None
        self.timed = [0, 0.0]  # samples and seconds after the first step
        self.step_times: list[tuple[int, float]] = []
        # a forecast, which needs a cluster, is for the CPU's pace during its probe
        self.beat = Beat(torch.device(engine.device)) if config.cluster is not None else None
        self.eval_loss: float | None = None
        self.eval_metrics: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Runs every step, then saves weights and writes summary.json; returns its content. Collective.

        If the run was asked to stop, returns {"folder", "stopped", "notices"} as `_stopped`, without a file.
        """
        started = time.monotonic()
        self._announce()
        # an earlier attempt did every step, so no step here sets the losses that the summary needs
        if self.first >= self.job.steps:
            self._as_written()
        for step in range(self.first, self.job.steps):
            self._step(step)
            if self._evaluates_after(step):
                self._evaluate(step)
            with judging(self.job, self.engine, self.keeper):
                stops = self.keeper.after(step, self.first_loss)
            if stops:
                return self._stopped(step)
        seconds = time.monotonic() - started
        reach("end", self.job.steps, self.engine.state)
        self.weights = self._keep_weights(WEIGHTS)
        if self.ema is not None:
            with self.ema.applied():
                self._keep_weights(EMA_WEIGHTS)
        self._keep_adapters()
        with judging(self.job, self.engine, self.keeper):
            self.keeper.end(self.first_loss, self.weights)  # after the weights, in case it fills the disk
        self._tell()
        text = written_text(self.engine, self.task, self.job.effective.config)
        summary = self._summary(seconds, text)
        if self.engine.rank == 0:
            write_json(self.job.folder / "summary.json", summary)
        return summary

    def _as_written(self) -> None:
        """Reads losses from metrics.jsonl of an earlier attempt, which did every step and failed at the end."""
        lines = (self.job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for record in map(json.loads, lines):
            self.losses += [record["loss"]] if "loss" in record else []
            self.eval_loss = record.get("eval_loss", self.eval_loss)

    def _keep_weights(self, name: str) -> Path:
        """Writes the weights as file `name` of the run's folder; returns the path. Collective.

        If that fails (a full disk), they are written into a temporary folder.
        """
        spare = Path(tempfile.gettempdir()) / f"shardwise-{self.job.folder.name}" / name
        with evaluation_weights(self.engine.state):
            return save_weights(self.engine.state, self.job.folder / name, spare)

    def _keep_adapters(self) -> None:
        """Writes the model's adapters, if it has any, as a folder that peft reads, below the run's. Collective."""
        if not has_adapters(self.engine.module) or are_prompts(self.engine.module):
            return
        self.adapters = self.job.folder / ADAPTERS
        state = self.engine.state
        trained = trained_tensors(state, of_adapters(self.engine.module, state.frozen_names), rank_0_only=True)
        if self.engine.rank == 0:
            write_adapters(self.engine.module, trained, self.adapters)

    def _stopped(self, step: int) -> dict[str, Any]:
        """Returns the summary of a run that was asked to stop after `step`: {"folder", "stopped", "notices"}.

        "stopped" is {"step": steps done, "checkpoint": its path, "loss"}.
        """
        saver = self.keeper.saver
        assert saver is not None
        stopped = {"step": step + 1, "checkpoint": str(saver.last), "loss": self.losses[-1]}
        return {"folder": str(self.job.folder), "stopped": stopped, "notices": list(self.engine.notices)}

    def _announce(self) -> None:
        """Shows the run's notices, folder, task, plan and size on rank 0."""
        if self.display is None:
            return
        if self.engine.rank == 0:
            for note in (*self.job.effective.notes, *self.engine.notices):
                self.display.say(note)
            self.display.say(f"run {self.job.folder}: {self.job.name}, plan {self.job.effective.plan}")
            self.display.say(f"{self.job.steps} steps of {self.job.batch_samples} samples; FLOPs: {self._convention()}")

    def _convention(self) -> str:
        per_sample = self.flops.per_sample
        if per_sample is None or self.speed.peak is not None:
            return self.flops.convention
        return f"{self.flops.convention}; no MFU, for this device's peak is not known"

    def _of_all_ranks(self, share: float) -> list[float]:
        row = put([share], self.engine.device)
        return gather_rows(row, everybody()).view(-1).tolist()

    def _input_advice(self) -> str:
        """Returns advice on what makes this task's input faster, for a notice."""
        if self.task.batch is not None:
            return "make Task.batch cheaper, or give Task.data (a Source), which is read ahead"
        workers = self.job.effective.config.train.workers
        name = name_of(self.task.data)
        return f"set train.workers to {max(2, 2 * workers)} (now {workers}), or make reading of {name} cheaper"

    def _step(self, step: int) -> None:
        """Reads a batch, runs one optimizer step on it, and records its figures. Collective. `step`: from 0."""
        taken = step - self.first  # steps that this process has taken; a resumed run begins at `first`
        if self.beat is not None:
            # the mean over ranks, so that all measure the pace before the same steps
            if taken == PACED and self.beat.us:
                self.beat.spread(over_ranks(self.step_times[-1][1]))
            self.beat.before(step)
        self.profile.before(step)
        reach("input", step, self.engine.state)
        asked = time.perf_counter()
        with self.profile.inside(step, "input"):
            batch = next(self.batches)
        started = time.perf_counter()
        with self.profile.inside(step, "step"):
            # counting collectives slows a step, which would show in a profile
            observed = taken == OBSERVED and step not in self.profile.steps
            result = self._observed_step(step, batch) if observed else self.engine.step(batch)
        self._profiled(step)
        if self.ema is not None and not result.skipped:
            self.ema.update()
        seconds = time.perf_counter() - started
        self.losses.append(float(result.loss))
        self.first_loss = self.losses[0] if self.first_loss is None else self.first_loss
        self.skipped += bool(result.skipped)
        # the first step allocates, and the observed one is slowed, so they are timed only if there are no others
        if taken > OBSERVED or (taken > 0 and self.job.steps - self.first <= OBSERVED + 1):
            self.timed[0] += result.samples
            self.timed[1] += seconds
            self.step_times.append((step, seconds))
        if taken == 0 or (step + 1) % self.job.effective.config.train.log_every == 0:
            self.peak_bytes = self.engine.memory().get("peak") or 0
        record = {
            "step": step + 1,
            "loss": float(result.loss),
            "weight": float(result.weight),
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "skipped": bool(result.skipped),
            "samples": result.samples,
            "seconds": seconds,
            "input_seconds": started - asked,
            "peak_bytes": self.peak_bytes,
            **self.speed.of(result.samples, seconds),
            **{f"extra/{name}": float(value) for name, value in (result.extras or {}).items()},
            **{f"metric/{name}": value for name, value in result.metrics.items()},
        }
        if self.metrics is not None:
            self.metrics.write(record)
        word = self.watch.add(started - asked, seconds)
        if word is not None:
            self.engine.notices.append(word)
        # by now all buffers exist
        if taken == OBSERVED + 1:
            self._look_at_memory()
        if self.display is not None:
            self.display.step(record)
            self._tell()

    def _look_at_memory(self) -> None:
        """Adds a notice if ranks' peak memory is unbalanced, since the fullest decides what fits. Collective."""
        word = imbalance(gather_json(memory_of(self.engine), everybody(), self.engine.device))
        if word:
            self.engine.notices.append(word)

    def _tell(self) -> None:
        """Shows notices that were added since the last call, on rank 0."""
        if self.display is not None and self.engine.rank == 0:
            for note in self.engine.notices[self.shown_notices :]:
                self.display.say(note)
        self.shown_notices = len(self.engine.notices)

    def _profiled(self, step: int) -> None:
        """Shows the profile's table of all ranks after the last profiled step, in which it is collective."""
        table = self.profile.tell(step)
        if table and self.display is not None:
            self.display.say(table)

    def _observed_step(self, step: int, batch: Any) -> StepResult:
        """Runs one step and writes the collectives that rank 0 issued into ledger.json; returns the step's result."""
        if self.job.effective.plan.compile:  # collectives inside a compiled graph cannot be observed
            return self.engine.step(batch)
        with self.engine.observe() as ledger:
            result = self.engine.step(batch)
        if self.engine.rank == 0:
            write_json(self.job.folder / "ledger.json", {"step": step + 1, "rank": 0, "collectives": ledger.rows()})
        return result

    def _evaluates_after(self, step: int) -> bool:
        every = self.job.effective.config.train.eval_every
        if self.task.eval_data is None or every == 0:
            return False
        return step + 1 == self.job.steps or (every is not None and (step + 1) % every == 0)

    def _evaluate(self, step: int) -> None:
        """Records the mean loss on held-out data, also under averaged weights if there are any. Collective."""
        assert self.task.eval_data is not None
        source = Spread(own_tile(self.task.eval_data, self.engine), self.job.effective.config.train.eval_samples)
        ranks = self.engine.data_ranks
        # batches of a micro-batch's size, so that memory suffices, with at least one sample for each data rank
        batch = max(self.job.batch_samples // self.job.effective.plan.step_microbatches, ranks)

        def measured() -> tuple[float, float, dict[str, float]]:
            parts = evaluation_parts(source, batch, self.engine.data_rank, ranks)
            total, weight = self.engine.evaluate(parts)
            return float(total) / float(weight), float(weight), self.engine.metrics()

        self.eval_loss, weight, self.eval_metrics = measured()
        self._keep_best(step + 1)
        own = {f"eval_metric/{name}": value for name, value in self.eval_metrics.items()}
        if self.ema is not None:
            with self.ema.applied():
                own["ema_eval_loss"], _, of_average = measured()
            own |= {f"ema_eval_metric/{name}": value for name, value in of_average.items()}
        if self.metrics is not None:
            self.metrics.write({"step": step + 1, "eval_loss": self.eval_loss, "eval_weight": weight, **own})
        if self.display is not None and self.engine.rank == 0:
            metrics = "".join(f"  {name} {value:.4g}" for name, value in self.eval_metrics.items())
            self.display.say(f"step {step + 1}/{self.job.steps}  held-out loss {self.eval_loss:.4f}{metrics}")

    def _keep_best(self, steps: int) -> None:
        """Writes the weights if train.keep_best is set and the held-out loss is the smallest so far. Collective."""
        loss, best = self.eval_loss, self.keeper.best
        asked = self.job.effective.config.train.keep_best and loss is not None and math.isfinite(loss)
        if asked and (best is None or loss < best["eval_loss"]):
            self.keeper.best = {"step": steps, "eval_loss": loss, "weights": str(self._keep_weights(BEST))}

    def _pace(self) -> float | None:
        """Returns the time in us of the fixed work of measure/pace near the median step; None if it was not measured.

        Collective.
        """
        if self.beat is None or not self.beat.us or not self.step_times:
            return None
        self.beat.end(self.job.steps)
        seen = gather_rows(put(self.beat.us, self.engine.device), everybody())
        return pace_beside(self.step_times, self.beat.at, seen.tolist(), self.engine.plan.pp > 1)

    def _summary(self, seconds: float, text: str | None) -> dict[str, Any]:
        """Returns the content of `summary.json`, rank 0's on every rank. Collective.

        seconds   duration of the loop; `text`: what the text model generated, None without
        """
        plan = self.job.effective.plan
        # a run of one step has no timed step, so its speed is that of the whole loop
        samples, timed = self.timed if self.timed[0] else (self.job.batch_samples, seconds)
        summary = {
            "folder": str(self.job.folder),
            "task": self.job.name,
            "plan": str(plan),
            "plans": self.keeper.plans(),
            "world_size": plan.world_size,
            "steps": self.job.steps,
            "before": self.first,
            "skipped": self.skipped,
            "repeated": self.engine.state.repeated_steps,  # since this process began
            "seconds": seconds,
            "step_s": median(seconds for _, seconds in self.step_times) if self.step_times else None,
            "first_loss": self.first_loss,
            "loss": self.losses[-1],
            "eval_loss": self.eval_loss,
            "eval_metrics": self.eval_metrics,
            "best": self.keeper.best,
            "unit": self.unit,
            **self.speed.of(int(samples), timed),
            "flops_convention": self._convention(),
            "pace_us": self._pace(),
            "checkpoints": self.keeper.cost(),
            "memory": gather_json(memory_of(self.engine), everybody(), self.engine.device),
            "weights": str(self.weights),
            "adapters": self.adapters and str(self.adapters),
            "notices": [*self.job.effective.notes, *self.engine.notices],
            "text": text,
        }
        # rank 0's summary, so that every rank returns the same
        return gather_json(finite(summary), everybody(), self.engine.device)[0]
