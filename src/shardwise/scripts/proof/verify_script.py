"""`verify_script(path, plan)`: compares a script on the plan's ranks with the same script in one process.

    one process    prepare only records (plain)                       -> a record of each optimizer step
    N ranks        the plan, in float64                               -> one from every rank
    compared       losses, gradients, weights, buffers, optimizer state after every step, and what is saved at the end
    NOT EQUAL      one process again, to see whether the script equals itself; then the cause, if arithmetic shows it

A script of another framework is recorded through torch's own hooks on both sides.

What this does not do: compare what the script prints, or writes by code of its own.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, RefusedPlan, RunError, ShardwiseError
from shardwise.layout import Plan, check
from shardwise.progress import Say, silent
from shardwise.proof.compare_records import compare
from shardwise.proof.float32_proof import LEAST_BAR, bar_of
from shardwise.proof.outcome import FLOAT64_BARS, KINDS, Parity
from shardwise.proof.record import Record
from shardwise.proof.rounding import NUDGES, Noise, add_noise, errors_of, explain_by_rounding
from shardwise.ranks.script import cause_of
from shardwise.scripts.proof import receipts
from shardwise.scripts.proof.cause import Difference, cause_of_change
from shardwise.scripts.proof.cause import cause_of as cause_of_difference
from shardwise.scripts.proof.comparison_records import joined, judge, record_of, zero_gradients
from shardwise.scripts.proof.recorder import PIECES, ScriptJob, ScriptRecord
from shardwise.scripts.proof.run_script import run_in_proof
from shardwise.scripts.proof.scratch import looking_like

STEPS = 6  # optimizer steps of each model that are compared by default
_OURS = "on rank"  # how the text of a shardwise error on a rank begins
KEPT = 3  # groups of micro-batches at the start of an epoch, beside its last batch


@dataclass(frozen=True)
class _Runs:
    """Runs jobs in the ranks of `pool`; for None each job in new processes, which leave no memory to those of the next.

    timeout_s  of each run
    """

    pool: Any
    timeout_s: float

    def on(self, ranks: int, job: ScriptJob) -> list[ScriptRecord]:
        """Returns the record of each of `ranks` ranks, by rank; with `job.stands_in` all run in one scratch folder."""
        # without a pool one is made for this call
        if self.pool is None:
            from shardwise.ranks import RankPool

            threads = max(1, os.cpu_count() or 1) if ranks == 1 else 1  # ranks share this machine's cores
            with RankPool(threads, quiet=True) as pool:
                return replace(self, pool=pool).on(ranks, job)
        with looking_like(job.folder) if job.stands_in else nullcontext() as scratch:
            return list(self.pool.run(run_in_proof, ranks, replace(job, scratch=scratch), timeout_s=self.timeout_s))

    def in_one(self, job: ScriptJob) -> ScriptRecord:
        """Returns the record of one process, failed or not; `InputError` if the script ends the process itself."""
        try:
            (record,) = self.on(1, job)
        except RunError as error:
            what = str(error).partition("rank 0: ")[2].splitlines() or [str(error)]
            raise InputError(f"verify: in one process {Path(job.path).name} {what[0]}") from None
        return record

    def alone(self, job: ScriptJob) -> ScriptRecord:
        """Returns the record of one process; `InputError` if the script fails in it."""
        record = self.in_one(job)
        if record.failed is None:
            return record
        what, trace = record.failed
        if what.startswith("SystemExit"):
            raise InputError(
                f"verify: the script ends itself in one process ({what}); arguments of its own stand behind --, as in "
                f"shardwise verify {Path(job.path).name} -- --lr 1e-3"
            )
        raise InputError(f"verify: the script fails in one process: {what}\n{trace}".rstrip())


def verify_script(
    path: str | Path,
    arguments: Sequence[str] = (),
    *,
    plan: Plan | str | None = None,
    steps: int | None = STEPS,
    epochs: int | None = None,
    against: str | Path | None = None,
    nproc: int | None = None,
    one: str | None = None,
    cwd: str | Path | None = None,
    pool: Any = None,
    timeout_s: float = 3600.0,
    say: Say = silent,
) -> Parity:
    """Proves a script: returns the `Parity` of its ranks with one process, with `refused` and `cause` as texts.

    arguments   of the script
    plan        in place of the one that the script gives to `prepare`
    steps       optimizer steps of each model; None: until the script ends. Unless None, epochs are shortened
    epochs      epochs over the prepared loader, in place of steps
    against     another script, the one before `prepare` was put in, to which it is first compared in one process
    nproc       ranks of a script that sets up its own (DDP, FSDP, Accelerate, ...), and never calls `prepare`
    one         arguments of the one process then, if they differ, as on a command line
    cwd         where the script runs, for real; None: in a scratch folder that looks like the present one
    pool        a `RankPool` to run in; None: one is made and closed
    timeout_s   seconds for each run of the script;  say  is given a line on what is done next
    Raises `InputError` for missing files, and for a script that fails in one process too, calls no `prepare` (without
    `nproc`), or trains nothing.
    """
    asked, runs = _asked(path, arguments, plan, steps, epochs, nproc, cwd, against), _Runs(pool, timeout_s)
    say(f"verify: {asked.path} in one process, in float64")
    parity = Parity("", 0, bars=dict(FLOAT64_BARS))
    asked, first, failed = _one_process(runs, asked, one)
    chosen = _plan_of(plan, first, asked)
    reference = _as_one_process(asked, one)
    if against is not None:
        say(f"verify: {against} in one process")
        changed = _compare_change(runs, reference, first, str(against), failed)
        if not changed.equal:
            return _noted(asked.path, chosen, changed, first)
        parity.notes.append(f"in one process the script equals {against}, as that stands")
        asked, reference = (job if job.foreign else replace(job, hooks="none") for job in (asked, reference))
    if chosen is not None:
        asked = replace(asked, plan=str(chosen), shorten=asked.shorten and KEPT * chosen.accumulate)
        reference = replace(reference, shorten=asked.shorten)
        if chosen.accumulate > 1 and asked.shorten:  # the script's own accumulate is known by now
            first = runs.alone(reference)
        parity.notes += _left_out(chosen)
    world = chosen.world_size if chosen is not None else int(nproc or 1)
    _refuse_not_finite(first)
    parity.plan, parity.world_size = str(chosen) if chosen is not None else f"{world} ranks of its own", world
    say(f"verify: the same on {world} ranks" + (f" under {chosen}" if chosen is not None else ""))
    records, asked = _shown_or_hidden(runs, asked, chosen, parity, say)
    if parity.error and asked.exact:
        say("verify: that fails; the same in the script's own precision")
        records = _on_ranks(runs, replace(asked, exact=False), chosen, replace(parity))
        if records is not None:
            failed, parity.error = parity.error, None
            asked, reference = replace(asked, exact=False), replace(reference, exact=False)
            first = runs.alone(reference)
    if records is None:  # refused, or failed both ways: `parity` tells
        return parity
    if not asked.exact:
        _set_bars(runs, reference, first, records, parity, failed)
    many = joined(records, foreign=asked.foreign)
    if not many.steps and not first.steps:
        raise InputError(f"verify: {asked.path} ended before any optimizer took a step, so there is nothing to prove")
    judge(parity, first, many, records, foreign=asked.foreign)
    if not parity.equal:
        say("verify: they differ; one process again, with weights moved by one epsilon")
        itself = _set_rounding_apart(runs, reference, first, records, parity, foreign=asked.foreign)
    if not parity.equal:
        if not itself.equal:  # perhaps by the moved weights
            say("verify: and as it was, to see whether the script equals itself")
            itself = _against(first, runs.alone(reference))
        layout = chosen or Plan(dp_replicate=world)
        parity.cause = cause_of_difference(_difference(runs, asked, layout, first, records, parity, itself))
    return _noted(asked.path, chosen, parity, many)


def _noted(path: str, plan: Plan | None, parity: Parity, record: ScriptRecord) -> Parity:
    """Writes the receipt of a plan's proof beside the script; returns `parity`."""
    if plan is not None:
        receipts.write(path, plan, parity, len(record.steps), record.files)
    return parity


def _difference(
    runs: _Runs, asked: ScriptJob, layout: Plan, first: ScriptRecord, ranks: list[ScriptRecord], parity: Parity,
    itself: Parity,
) -> Difference:  # fmt: skip
    """Returns the `Difference` of both sides, with runs that find its cause. itself: one process against itself."""
    return Difference(
        first, ranks, parity, layout, itself, apart=_apart(runs, asked, layout),
        cures=_cures(runs, asked, layout, first), foreign=asked.foreign,
    )  # fmt: skip


def _left_out(plan: Plan) -> list[str]:
    """Returns a note on the plan's keys that change rounding alone and are left out of the proof; [] without any."""
    exact = plan.exact("fp32").as_dict()
    rounding = [f"{key}={value}" for key, value in plan.as_dict().items() if key not in exact]
    told = "left out of the proof, which is of the layout, not of rounding"
    return [f"{told}: {', '.join(rounding)}"] if rounding else []


def _shown_or_hidden(
    runs: _Runs, asked: ScriptJob, chosen: Plan | None, parity: Parity, say: Say
) -> tuple[list[ScriptRecord] | None, ScriptJob]:
    """Returns (the ranks' records, the job they ran); if ranks that see RANK fail, those of ranks that do not.

    Records are None if both fail; `parity` then has the error of those that see it.
    """
    records = _on_ranks(runs, asked, chosen, parity)
    if not parity.error or asked.foreign or parity.error.startswith(_OURS):  # which says what differs
        return records, asked
    say("verify: that fails; the same without RANK and the like, as shardwise run hides them")
    hidden = replace(asked, hides=True)
    records = _on_ranks(runs, hidden, chosen, replace(parity, error=None))
    if records is None:  # it is not RANK that makes it fail
        return None, asked
    parity.notes.append(f"RANK and the like are hidden, as by shardwise run; shown (torchrun): {parity.error}")
    parity.error = None
    return records, hidden


def _set_rounding_apart(
    runs: _Runs, reference: ScriptJob, first: ScriptRecord, ranks: list[ScriptRecord], parity: Parity, *, foreign: bool
) -> Parity:
    """Makes the proof NOT PROVEN if one process differs as much from itself when weights are moved by one epsilon.

    Only the first step that differs is judged. Returns how the first of those runs compares with one process (`first`).
    """
    moved: list[ScriptRecord] = []

    def records(steps: int) -> Iterator[Record]:
        for seed in range(1, NUDGES + 1):
            moved.append(runs.alone(replace(reference, nudge=seed)))
            yield record_of(moved[-1], moved[-1:], steps)

    steps = min(parity.exceeded.values(), default=-1) + 1
    # in the script's own precision bars hold rounding already, and a difference before step 0 is none of rounding
    if parity.float64 and steps > 0:
        early, one = Parity("", 1, bars=dict(FLOAT64_BARS)), record_of(first, [first], steps)
        many = record_of(ranks[0], ranks, steps, foreign=foreign)
        compare(early, one, many)
        early.unproven.clear()  # of so few steps: the first of a warm-up moves nothing
        zero_gradients(early, one, many)
        explain_by_rounding(early, one, records(steps))
        if early.unproven:
            parity.unproven += early.unproven
            parity.noisy |= errors_of(parity).keys()  # later steps go on from there
            parity.differences, parity.first = [], None
    return _against(first, moved[0] if moved else runs.alone(reference))


def _refuse_not_finite(first: ScriptRecord) -> None:
    """Raises `InputError` if a loss of the one process is not finite, which no run would equal."""
    for step, record in enumerate(first.steps, 1):
        if any(not math.isfinite(loss) for loss in record.losses):
            raise InputError(f"verify: in one process the loss of step {step} is not finite: nothing equals that")


def _against(first: ScriptRecord, other: ScriptRecord) -> Parity:
    """Returns the `Parity` of another run of one process (`other`) with the first."""
    parity = Parity("single", 1, bars=dict(FLOAT64_BARS))
    judge(parity, first, other, [other], foreign=False)
    return parity


def _compare_change(runs: _Runs, reference: ScriptJob, own: ScriptRecord, before: str, failed: str) -> Parity:
    """Returns the `Parity` of the changed script's one process (`own`) with the script `before`, by torch's hooks."""
    now = own.seen or own
    total = len(now.steps) if own.ended else None
    job = replace(reference, path=str(Path(before).resolve()), plan=None, hooks="alone", total=total, limit=None)
    was = runs.alone(job)
    if not was.steps:
        raise InputError(f"verify: {before} steps no optimizer, and there is nothing to compare: leave --against out")
    parity = Parity("single", 1, bars=dict(FLOAT64_BARS))
    if not reference.exact:
        _set_bars(runs, job, was, [now], parity, failed)  # `failed`: its error in float64
    weights = any("weight" in step.forms for step in own.steps)  # sums, which the other script divides
    for mine, theirs in zip(was.steps, now.steps, strict=False):
        mine.losses = theirs.losses if weights else mine.losses
        same = mine.buffers.keys() & theirs.buffers.keys()  # either script may call other modules by themselves
        mine.buffers, theirs.buffers = ({name: step.buffers[name] for name in same} for step in (mine, theirs))
    names = now.names if len(was.initial) == len(now.names) else []
    was.rename(names)
    now.rename(names)
    judge(parity, was, now, [now], foreign=False)
    if not parity.equal:
        _refuse_not_finite(was)
        again = runs.alone(job)
        again.rename(names)
        parity.differences = [each.replace("in one process", f"in {before}") for each in parity.differences]
        sides = Difference(was, [now], parity, Plan(), _against(was, again), foreign=reference.foreign)
        parity.cause = cause_of_change(sides, before)
    return parity


def _on_ranks(
    runs: _Runs, asked: ScriptJob, chosen: Plan | None, parity: Parity
) -> list[ScriptRecord] | None:  # fmt: skip
    """Returns the record of each rank; None if the plan is refused or a rank fails, which goes into `parity`."""
    try:
        if chosen is not None:
            check(chosen)
        records: list[ScriptRecord] = runs.on(parity.world_size, replace(asked, plain=False))
    except (RefusedPlan, InputError) as refusal:  # what the script does cannot run on ranks
        parity.refused = str(refusal).partition("\nraised on rank")[0]
        return None
    except RunError as error:
        parity.error = _failed_on_ranks(error, asked.path)
        return None
    losses = [[step.losses for step in record.steps] for record in records]
    alike = all(of_rank == losses[0] for of_rank in losses) and any(map(any, losses[0]))  # zeros tell nothing
    if asked.foreign and parity.world_size > 1 and alike and PIECES not in records[0].met:
        parity.unproven.append(
            "every rank has the same losses: each may have trained by itself on the same samples. A script for "
            "--nproc sets up its ranks from RANK and WORLD_SIZE (torch.distributed.init_process_group)"
        )
    return records


def _asked(
    path: str | Path, arguments: Sequence[str], plan: Any, steps: int | None, epochs: int | None, nproc: int | None,
    cwd: str | Path | None, against: str | Path | None,
) -> ScriptJob:  # fmt: skip
    """Returns the job of the one process from the arguments of `verify_script`; `InputError` if they contradict."""
    script = Path(path)
    if not script.is_file():
        raise InputError(f"verify: there is no file {path}")
    if against is not None and not Path(against).is_file():
        raise InputError(f"verify: there is no file {against} (--against)")
    if cwd is not None and not Path(cwd).is_dir():
        raise InputError(f"verify: --cwd {cwd} is no folder")
    if plan is not None and nproc is not None:
        raise InputError("verify: --nproc is for scripts that set up ranks by themselves, --plan for those of prepare")
    return ScriptJob(
        str(script.resolve()), tuple(arguments), plain=True, plan=None if plan is None else str(Plan.parse(plan)),
        limit=None if epochs is not None else steps, epochs=epochs,
        shorten=KEPT if steps is not None and epochs is None and nproc is None and against is None else None,
        foreign=nproc is not None, hooks="alone" if nproc is not None else "none" if against is None else "beside",
        folder=str(Path(cwd or ".").resolve()), stands_in=cwd is None,
    )  # fmt: skip


def _as_one_process(asked: ScriptJob, one: str | None) -> ScriptJob:
    """Returns the job for the one process, with arguments `one` (as on a command line) unless that is None."""
    return replace(asked, arguments=asked.arguments if one is None else tuple(shlex.split(one)))


def _plan_of(plan: Any, first: ScriptRecord, asked: ScriptJob) -> Plan | None:
    """Returns the plan to prove: the one asked for, else the script's own; None if the script sets up its ranks.

    Raises `InputError` for a plan of one rank, and for a script that never calls `prepare`.
    """
    if asked.foreign:
        return None
    plans = [Plan.parse(text) for text in first.plans]
    if not plans:
        raise InputError(
            f"verify: {asked.path} never called shardwise.prepare: put it in (docs/scripts.md), or give the number of "
            "ranks that it sets up by itself (--nproc 2)"
        )
    chosen = Plan.parse(plan) if plan is not None else plans[0]
    # a script's loop calls backward as often as its own plan says, whichever degrees are to be proven
    if chosen.accumulate == 1:
        chosen = chosen.with_(accumulate=plans[0].accumulate)
    # one process would be compared with itself
    if chosen.world_size == 1:
        raise InputError(
            "verify: the plan is of one rank, which is one process: say which one (--plan dp_shard=2,zero=3)"
        )
    return chosen


def _one_process(runs: _Runs, asked: ScriptJob, one: str | None) -> tuple[ScriptJob, ScriptRecord, str]:
    """Returns (job, record of one process, ""), in float64; (job, record, error) in its own precision if that fails.

    Raises `InputError` if the script fails there too, or takes no step.
    """
    exact = runs.in_one(_as_one_process(asked, one))
    if exact.failed is None:
        return asked, exact, ""
    own = replace(asked, exact=False)
    record = runs.alone(_as_one_process(own, one))
    what, trace = exact.failed
    if not record.steps:
        raise InputError(f"verify: the script runs in one process, and not in float64: {what}\n{trace.rstrip()}")
    return own, record, what


def _set_bars(
    runs: _Runs, reference: ScriptJob, first: ScriptRecord, ranks: list[ScriptRecord], parity: Parity, failed: str
) -> None:  # fmt: skip
    """Sets the tolerances of a proof in the script's own precision, from runs whose weights are moved by one epsilon.

    The epsilon is of the coarsest dtype that either side computes in; `failed`: the error in float64.
    """
    eps = max(record.eps for record in (first, *ranks))
    noise: Noise = {}
    for seed in range(1, NUDGES + 1):
        other = runs.alone(replace(reference, nudge=seed, eps=eps))
        steps = min(len(first.steps), len(other.steps))
        add_noise(noise, record_of(first, [first], steps), record_of(other, [other], steps))
    parity.float64, parity.noise = False, noise
    parity.own_bars = {which: bar_of(error) for which, error in noise.items()}
    parity.bars = dict.fromkeys(KINDS, LEAST_BAR) | {kind: bar_of(noise[kind, ""]) for kind in ("loss", "norm")}
    hides = ", of 16 bits, whose rounding hides what float64 finds" if eps else ""
    parity.notes.append(f"compared in the script's own precision{hides}, since in float64 it fails with: {failed}")


def _apart(runs: _Runs, asked: ScriptJob, plan: Plan) -> Callable[[], list[ScriptRecord] | None]:
    """Returns a function that runs the data ranks as replicas and returns their records, with own gradients.

    It returns None for one data rank, or if the run fails.
    """

    def run() -> list[ScriptRecord] | None:
        replicas = Plan(dp_replicate=plan.data_ranks, accumulate=plan.accumulate)
        if plan.data_ranks == 1:
            return None
        job = replace(asked, plain=False, plan=None if asked.foreign else str(replicas), apart=True)
        try:
            return runs.on(plan.data_ranks, job)
        except ShardwiseError:
            return None  # the cause is told without it

    return run


def _cures(
    runs: _Runs, asked: ScriptJob, plan: Plan, single: ScriptRecord
) -> Callable[[str], bool]:  # fmt: skip
    """Returns a function loss_scope -> whether ranks that run with it equal one process (`single`)."""

    def run(scope: str) -> bool:
        job = replace(asked, plain=False, scope=scope)
        try:
            records = runs.on(plan.world_size, job)
        except ShardwiseError:
            return False  # refused, or it fails: no remedy
        tried = Parity(str(plan), plan.world_size, bars=dict(FLOAT64_BARS))
        judge(tried, single, joined(records, foreign=False), records, foreign=False)
        return tried.equal

    return run


def _failed_on_ranks(error: RunError, path: str) -> str:
    """Returns a sentence on an error on a rank, with the script's own line."""
    trace = getattr(error, "remote_traceback", "").rstrip() or str(error)
    what, rank = cause_of(trace, path), getattr(error, "rank", 0)
    if trace.splitlines()[-1].startswith("shardwise."):  # an error of ours, found in a step: it says what to do
        return f"{_OURS} {rank}: {what}"
    return f"the script fails on rank {rank}, and not in one process: {what}"
