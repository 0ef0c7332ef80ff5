"""Tries this package's claims on this machine within a quarter of an hour, for the command `evidence`.

    proofs        every kind of plan, against one process
    messages      32 MiB both ways between neighbours, and every collective, values checked
    collectives   times against a forecast from a cluster file that was probed just before, at other sizes
    steps         a decoder's step time, against the same loop over DDP by hand, and against `simulate`
    survival      a rank is killed; the run goes on from its checkpoint and ends with the same bits

The most important come first; a row says so if time did not suffice. Without an accelerator ranks use gloo on CPUs;
ranks that share an accelerator may use its own backend (`backend`).

What this does not do: judge speed. Ratios are shown with the figures that they are made of.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.comm import Axis, RankMessage, all_gather, all_reduce, all_to_all, exchange, reduce_scatter
from shardwise.costs.wire import RankGroup, Wire
from shardwise.device import current_device, synchronize
from shardwise.engine.engine import parallelize
from shardwise.errors import ShardwiseError, first_line
from shardwise.measure.collective_times import of_size
from shardwise.measure.machine import probe
from shardwise.measure.pace import Pace
from shardwise.planner.door import simulate
from shardwise.progress import Say, silent
from shardwise.proof.parity import verify
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task
from shardwise.testing import faults

TASKS = "shardwise.models.tasks:"
# (task, plan) of every kind of plan, the most used first
KINDS = [
    ("decoder", "dp_replicate=2"), ("decoder", "dp_shard=2,zero=3"), ("decoder", "tp=2,sp=true"),
    ("decoder", "pp=2,microbatches=4"), ("moe", "dp_shard=2,ep=2"), ("gpt2", "dp_shard=2,zero=1"),
    ("gpt2", "dp_shard=2,zero=2,accumulate=2"), ("decoder", "cp=2"), ("decoder", "cp_ulysses=2"),
    ("unet_group", "domain=2"), ("decoder", "pp=2,schedule=zbv,microbatches=4"),
    ("decoder", "pp=2,schedule=interleaved1f1b,stages_per_rank=2,microbatches=4"), ("unet_batchnorm", "dp_replicate=2"),
    ("decoder_dropout", "dp_shard=2,zero=3,remat=full"), ("decoder", "dp_shard=2,zero=3,tp=2"),
    ("decoder_tied", "pp=2,dp_replicate=2,microbatches=2"),
]  # fmt: skip
LARGE_BYTES = 32 * 2**20  # more than a backend buffers
SIZES = (3 * 2**14, 3 * 2**18, 3 * 2**22)  # bytes, between the sizes that a probe measures
PAIRS = 14  # steps of each of the two loops that are timed
DECODER = f"{TASKS}decoder"
RESUMED: dict[str, Any] = {"steps": 8, "eval_every": 0, "checkpoint_every": 3, "checkpoint_background": False}


@dataclass(frozen=True)
class EvidenceRow:
    """One claim that was tried."""

    part: str  # part of the page, such as "proofs"
    name: str  # of the claim within its part
    held: bool | None  # whether the claim held; None: not tried
    what: str  # the outcome in words, or why it was not tried
    seconds: float = 0.0  # that it took
    figures: dict[str, float] | None = None  # name -> measured figure; None: none


def collect(
    *, device: str = "cpu", backend: str | None = None, ranks: int = 2, limit_s: float = 900.0, say: Say = silent,
    kinds: list[tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Tries all claims; returns a row for each as a dict with the fields of `EvidenceRow`.

    device   "cpu" or the accelerator's type
    backend  name of the accelerator's backend, for ranks that share a device; None: chosen by the devices
    ranks    number of ranks for measurements
    limit_s  seconds after which no further claim is tried
    say      called with a text on what is tried next
    kinds    (task, plan) pairs to prove; None: `KINDS`
    """
    until, rows = time.monotonic() + limit_s, []
    with RankPool(quiet=True, accelerators=device != "cpu", own_backend=backend is not None) as pool:
        for part, name, attempt in _attempts(pool, device, backend, ranks, kinds or KINDS):
            say(f"evidence: {part}, {name}")
            rows.append(_tried(part, name, attempt, until))
    return [asdict(row) for row in rows]


def _tried(part: str, name: str, attempt: Callable[[], EvidenceRow], until: float) -> EvidenceRow:
    """Runs an attempt and returns its row with the seconds it took.

    If it raises one of shardwise's errors, the row's `held` is False; after `until` (monotonic clock) it is not tried.
    """
    began = time.monotonic()
    if began > until:
        return EvidenceRow(part, name, None, "not tried: the time was over")
    try:
        row = attempt()
    except ShardwiseError as error:
        row = EvidenceRow(part, name, False, first_line(error))
    return EvidenceRow(part, name, row.held, row.what, round(time.monotonic() - began, 1), row.figures)


def _attempts(
    pool: RankPool, device: str, backend: str | None, ranks: int, kinds: list[tuple[str, str]]
) -> Iterator[tuple[str, str, Callable[[], EvidenceRow]]]:
    """Yields (part, name, function that tries the claim and returns its row), the most important first."""
    proofs = [("proofs", f"{task} {plan}", partial(_proof, pool, device, backend, task, plan)) for task, plan in kinds]
    yield from proofs[:5]
    yield "messages", f"{LARGE_BYTES >> 20} MiB both ways", partial(_messages, pool, ranks)
    yield "survival", "a rank is killed", partial(_survival, ranks, device)
    yield "steps", "a decoder beside DDP by hand", partial(_by_hand, pool, ranks)
    yield "forecast", "collectives and a decoder's step", partial(_forecast, pool, ranks)
    yield from proofs[5:]


def _proof(pool: RankPool, device: str, backend: str | None, task: str, plan: str) -> EvidenceRow:
    parity = verify(f"{TASKS}{task}", plan, device=device, backend=backend, pool=pool)
    errors = {"loss": parity.loss_error or 0.0, "gradient": max(parity.gradient_error.values(), default=0.0)}
    return EvidenceRow("proofs", plan, parity.parity, parity.refused or parity.verdict, figures=errors)


# --- messages


def _messages(pool: RankPool, ranks: int) -> EvidenceRow:
    wrong = pool.run(large_messages, ranks, timeout_s=120.0)
    bad = sorted({name for names in wrong for name in names})
    return EvidenceRow("messages", "", not bad, f"wrong: {', '.join(bad)}" if bad else "all values are right")


def large_messages() -> list[str]:
    """Returns the names of collectives whose results on large tensors are wrong on this rank. Collective."""
    device, me, ranks = current_device(), dist.get_rank(), dist.get_world_size()
    axis = Axis("world", ranks, me, dist.group.WORLD, tuple(range(ranks)))
    count = LARGE_BYTES // 4 // ranks * ranks
    mine = torch.full((count,), float(me), device=device)
    results: dict[str, torch.Tensor] = {"all_reduce": mine.clone()}
    all_reduce(results["all_reduce"], axis, "evidence")
    came = torch.empty_like(mine)
    after, before = (me + 1) % ranks, (me - 1) % ranks
    going, coming = RankMessage(mine, after, 1, "evidence"), RankMessage(came, before, 1, "evidence")
    sent, received = exchange([going], [coming], axis)
    for pending in [*sent, *received]:
        pending.wait()
    full, part = mine.new_empty(count), mine[: count // ranks].contiguous()
    all_gather(full, part, axis, "evidence")
    shard = torch.empty_like(part)
    reduce_scatter(shard, mine, axis, "evidence")
    dealt = torch.empty_like(mine)
    all_to_all(dealt, mine, [count // ranks] * ranks, [count // ranks] * ranks, axis, "evidence")
    total = float(sum(range(ranks)))
    by_rank = torch.arange(float(ranks), device=device).repeat_interleave(count // ranks)
    right = {
        "all_reduce": bool((results["all_reduce"] == total).all()),
        "exchange": bool((came == before).all()),
        "all_gather": bool(torch.equal(full, by_rank)),
        "reduce_scatter": bool((shard == total).all()),
        "all_to_all": bool(torch.equal(dealt, by_rank)),
    }
    return [name for name, ok in right.items() if not ok]


# --- survival


def _survival(ranks: int, device: str) -> EvidenceRow:
    """Returns a row on whether a run whose rank is killed and restarted ends with the losses of an undisturbed run."""
    plan = f"dp_shard={ranks},zero=1"
    options: dict[str, Any] = {**RESUMED, "device": device}
    with tempfile.TemporaryDirectory(prefix="shardwise-evidence-") as folder:
        whole = shardwise.train("digits", plan, **options, out=str(Path(folder) / "whole"))
        with faults.injected(faults.Fault("kill", rank=1, step=5, at="update")) as struck:
            again = shardwise.train("digits", plan, **options, restarts=1, out=str(Path(folder) / "killed"))
            killed = faults.struck(struck)
        losses = [[row["loss"] for row in run.metrics if "loss" in row] for run in (whole, again)]
    same = killed == 1 and losses[0][-3:] == losses[1][-3:]
    return EvidenceRow("survival", "", same, f"killed {killed} time, at step 5; last losses {losses[1][-3:]}")


# --- steps, beside the same by hand


def _by_hand(pool: RankPool, ranks: int) -> EvidenceRow:
    """Returns a row that compares the engine's step time with that of a loop over DDP by hand."""
    rows = pool.run(pairs_of_steps, ranks, timeout_s=240.0)
    ours, theirs = ([max(row[which][i] for row in rows) for i in range(PAIRS)] for which in (0, 1))
    ratio = median(hand / own for own, hand in zip(ours, theirs, strict=True))
    figures = {"step_s": median(ours), "by_hand_s": median(theirs), "ratio": ratio}
    return EvidenceRow("steps", "", True, f"DDP by hand takes {ratio:.2f} of our step", figures=figures)


def pairs_of_steps() -> tuple[list[float], list[float]]:
    """Returns (seconds of `PAIRS` steps of the engine, of a loop over DDP), run in alternation. Collective."""
    task, device = resolve_task(DECODER), current_device()
    assert task.batch is not None
    engine = parallelize(task, f"dp_replicate={dist.get_world_size()}")
    module = torch.nn.parallel.DistributedDataParallel(resolve_task(DECODER).model().to(device))
    optimizer = task.optimizer([{"params": list(module.parameters())}])

    def by_hand(batch: Any) -> None:
        """Runs one step of DDP on this rank's samples, with the loss divided by the weight of all ranks."""
        mine = {key: value.tensor_split(dist.get_world_size())[dist.get_rank()].to(device) for key, value in
                batch.items()}  # fmt: skip
        args, kwargs = task.inputs(mine)
        total, weight = task.loss(module(*args, **kwargs), mine)
        whole = torch.tensor([float(weight)], device=device)
        dist.all_reduce(whole)
        optimizer.zero_grad()
        (total * dist.get_world_size() / whole).sum().backward()
        optimizer.step()
        float(total)

    times: tuple[list[float], list[float]] = ([], [])
    for step in range(PAIRS + 2):
        batch = task.batch(step)
        for which, call in enumerate((engine.step, by_hand)):
            dist.barrier()
            began = time.perf_counter()
            call(batch)
            synchronize(device)
            times[which].append(time.perf_counter() - began)
    return times[0][2:], times[1][2:]


# --- forecasts


def _forecast(pool: RankPool, ranks: int) -> EvidenceRow:
    """Returns a row with the ratios of forecast to measured times, of collectives and of a decoder's step."""
    cluster = probe(ranks, quick=True)
    wire, group = Wire(cluster), RankGroup(ranks)
    pace = None if cluster.device.pace_us is None else cluster.device.pace_us.value
    rows = pool.run(collectives_of_sizes, ranks, pace, timeout_s=180.0)[0]
    figures = {f"{op} {size >> 10} KiB": wire.collective(op, group, size) * 1e6 / took for op, _, size, took in rows}
    forecast = simulate(DECODER, f"dp_replicate={ranks}", cluster)
    steps = pool.run(pairs_of_steps, ranks, timeout_s=240.0)
    figures["decoder's step"] = forecast.step_s / median(max(row[0][i] for row in steps) for i in range(PAIRS))
    worst = max(figures, key=lambda name: abs(figures[name] - 1))
    return EvidenceRow("forecast", "", True, f"forecast over measured; furthest: {worst} {figures[worst]:.2f}",
                       figures=figures)  # fmt: skip


def collectives_of_sizes(reference: float | None) -> list[tuple[str, int, int, float]]:
    """Returns rows (op, ranks, bytes, microseconds) of each collective at `SIZES`. Collective.

    reference  time in us of the fixed work of measure.Pace, to which times are scaled; None: not scaled
    """
    ranks = dist.get_world_size()
    axis = Axis("world", ranks, dist.get_rank(), dist.group.WORLD, tuple(range(ranks)))
    pace = Pace(current_device(), reference)
    return [row for size in SIZES for row in of_size(pace, axis, size)]
