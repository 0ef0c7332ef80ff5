"""Measure what `optimizer_state`, `masters`, `gradients` and `offload` change, on the plan's ranks in its precision.

    ranks   five steps with full state ── must have the same bits ──> split masters, gradients used as made, `offload`
                                       ── distance is reported ─────> coded (8-bit) state as well

The proof in float64 cannot test these, since it has no separate master weights and nothing to round to, and gradients
that are freed cannot be compared. Split masters, gradients used as they are made and offloaded masters must not change
a bit. What a code of the optimizer state changes is only reported, without a bar.

What this does not do: say whether a run of thousands of steps comes to as good a loss (docs/techniques/lean.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.digest import digest
from shardwise.engine.engine import parallelize
from shardwise.layout import Plan
from shardwise.precision import Precision
from shardwise.proof.outcome import Parity
from shardwise.proof.settings import Settings, global_batch
from shardwise.task import Task
from shardwise.task_names import resolve_task

STEPS = 5
EXACT = ("masters", "gradients", "offload")  # plan keys that must not change a bit


@dataclass
class FewSteps:
    """The outcome of `STEPS` steps: losses, and by name each weight's digest and its values in float64 (rank 0 alone).

    digests   of the weights after the steps
    repeated  how many of the steps were repeated, to be clipped
    """

    losses: list[float] = field(default_factory=list)
    repeated: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)


def variants(plan: Plan) -> list[Plan]:
    """Returns the plan with full state, then without codes alone, then unchanged; equal ones once, not compiled.

    Full state is unsplit masters, gradients held together and, where masters are wider than weights, no offload.
    """
    own = plan.with_(compile=False)
    uncoded = own.with_(optimizer_state="full")
    plain = uncoded.with_(masters="full", gradients="together")
    if Precision.of(plan).mixed:
        plain = plain.with_(offload="none")
    return list(dict.fromkeys([plain, uncoded, own]))


def run_variants(task: Any, plan: Plan, settings: Settings) -> list[FewSteps]:
    """Returns this rank's `FewSteps` of each of the variants. Collective."""
    return [_run(resolve_task(task), variant, settings) for variant in variants(plan)]


def _run(task: Task, plan: Plan, settings: Settings) -> FewSteps:
    """Returns this rank's `FewSteps` under the plan. Collective."""
    engine, run = parallelize(task, plan, **settings.of_engine), FewSteps()
    for step in range(STEPS):
        if not step:
            run.before = _weights(engine)
        run.losses.append(float(engine.step(global_batch(task, settings, step)).loss))
    run.after, run.repeated = _weights(engine), engine.state.repeated_steps
    run.digests = {name: digest(tensor) for name, tensor in engine.full_parameters()}
    if engine.rank:
        run.before, run.after = {}, {}
    return run


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().double().cpu().clone() for name, tensor in engine.full_parameters()}


def compare_variants(parity: Parity, plan: Plan, by_rank: list[list[FewSteps]]) -> None:
    """Compares the variants' runs into `parity`: bits of `EXACT` keys, equal weights on all ranks, and a note on codes.

    by_rank  for each rank its `FewSteps` of each of `variants(plan)`
    """
    uncoded = plan.with_(compile=False, optimizer_state="full")
    plain, *_ = variants(plan)
    # only these keys must keep every bit, so without one in the plan nothing is compared
    if keys := ",".join(f"{key}={getattr(plan, key)}" for key in EXACT if getattr(plan, key) != getattr(plain, key)):
        place = variants(plan).index(uncoded)
        _compare_bits(parity, [(runs[0], runs[place]) for runs in by_rank], keys, plan.precision)
    # the last run is the unchanged plan, in which all ranks must end with the same weights
    unlike = [rank for rank, runs in enumerate(by_rank) if runs[-1].digests != by_rank[0][-1].digests]
    if unlike:
        parity.differences.append(f"rank {unlike[0]} has other weights than rank 0 after {STEPS} steps under {plan}")
    if plan.optimizer_state != "full":
        _measure(parity, plan, by_rank[0][0], by_rank[0][-1])


def _compare_bits(parity: Parity, pairs: list[tuple[FewSteps, FewSteps]], keys: str, precision: str) -> None:
    """Compares each rank's two runs, (full state, with `keys`), bit by bit, into `parity`."""
    for rank, (full, split) in enumerate(pairs):
        other = [name for name, value in full.digests.items() if split.digests.get(name) != value]
        if other or [*map(str, full.losses)] != [*map(str, split.losses)]:  # NaN on both sides is the same
            what = f"{len(other)} weights have other bits, '{other[0]}' first" if other else "losses have other bits"
            parity.differences.append(f"{keys}: on rank {rank} {what} than without")
            return
    repeated = f", {pairs[0][1].repeated} of which were repeated to be clipped," if pairs[0][1].repeated else ""
    parity.notes.append(f"{keys}: after {STEPS} steps{repeated} in {precision} every bit is that of a run without")


def _measure(parity: Parity, plan: Plan, full: FewSteps, coded: FewSteps) -> None:
    """Adds a note on how far losses and weights with coded state are from those with full state."""
    losses = max(abs(a - b) / max(abs(a), 1e-300) for a, b in zip(full.losses, coded.losses, strict=True))
    apart = sum(float((coded.after[name] - value).square().sum()) for name, value in full.after.items())
    moved = sum(float((value - full.before[name]).square().sum()) for name, value in full.after.items())
    parity.notes.append(
        f"optimizer_state={plan.optimizer_state} rounds, and is left out of the proof; in {STEPS} steps in "
        f"{plan.precision} it moves losses by up to {losses:.1e} of themselves, and weights by "
        f"{(apart / max(moved, 1e-300)) ** 0.5:.1e} of how far they went"
    )
