"""Search: enumerate, prune by memory, rank by simulated time, and say why each other family lost.

    every layout ── memory ──> those that fit ── estimate ──> the best few of each family ── simulate ──> ranked

Of plans within 3% of the fastest the one with the fewest axes comes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES, Ledger
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software, as_planned
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout import Plan, check
from shardwise.planner.candidates import Constraints, axes, decoder_layouts, family, micro_batches, plan_of
from shardwise.planner.units import bytes_text, seconds_text
from shardwise.simulator.forecast import Forecast
from shardwise.simulator.quick import Estimator, Quick
from shardwise.simulator.step import simulate

SIXTEEN_BITS = ("bf16", "bf16-full", "fp16")
WITHIN = 1.03  # plans this close count as equal, and the simpler one comes first
MOST_AWAY = 4096  # samples, of the nearest batch that would do
LOOKED_AT = 200  # layouts of each other batch
MOST_TOLD, FEW_VALUES = 20_000, 12  # layouts, and values of a field, for a message on what there is
EXACT = 3  # proposals in front that are forecast from traces of their own micro-batch
SIMULATED = 24  # of all that fit, the best by estimate; beside them the best of each family


@dataclass
class Proposal:
    """A plan, its layout and its forecast."""

    plan: Plan
    layout: Layout
    forecast: Forecast
    family: str

    @property
    def runnable(self) -> str:
        """Empty where this version can run the plan, else what it lacks."""
        try:
            check(self.plan)
        except RefusedPlan as refused:
            return str(refused).partition("is refused: ")[2]
        return ""


@dataclass
class Search:
    """The result: proposals from best to worst, why each other family lost, and what to know."""

    proposals: list[Proposal]
    lost: dict[str, str]
    notes: list[str] = field(default_factory=list)
    considered: int = 0
    fitted: int = 0
    seconds: float = 0.0
    capacity: float = 0.0  # bytes of a device that a plan could have

    @property
    def best(self) -> Proposal:
        return self.proposals[0]


@dataclass(frozen=True)
class Subject:
    """What a search needs to know about a model: its layouts, a quick estimate, a simulation."""

    name: str
    layers: int
    global_batch: int
    seq: int
    layouts: Callable[[int, Constraints], Iterable[Layout]]
    estimate: Callable[[Layout], Quick]
    memory: Callable[[Layout], Ledger]
    simulate: Callable[[Layout], Forecast]
    remarks: Sequence[str] = ()  # may grow while layouts are looked at
    own: bool = False  # a task that can be trained, not a shape by name
    # the same with another global batch, where that is cheap to ask for
    with_batch: Callable[[int], Subject] | None = None
    reading: Callable[[], Reading] | None = None  # times the task's input
    # the same as `simulate`, from traces of the very micro-batch, where others are on a line between two
    exact: Callable[[Layout], Forecast] | None = None
    sample: str = ""  # made up for a model without data, in words
    head: str = ""  # of transformers, for a model that was built of a configuration


@dataclass(frozen=True)
class Reading:
    """What a task's input costs, as timed on the machine that plans.

    seconds   for one sample
    whole     every rank makes the global batch; else each reads its own samples
    """

    seconds: float
    whole: bool

    def wait(self, layout: Layout, batch: int) -> float:
        """Seconds that one reader of a rank takes for a step's samples."""
        return self.seconds * (batch if self.whole else -(-batch // layout.dp))


def decoder(shape: Shape, cluster: Cluster, soft: Software, global_batch: int, seq: int, precision: str) -> Subject:
    """A decoder by its numbers, computed in 16 bits; other precisions raise `InputError`."""
    if precision not in SIXTEEN_BITS:
        raise InputError(
            f"a decoder by its numbers is forecast in 16-bit arithmetic: use precision={' or '.join(SIXTEEN_BITS)}, "
            f"not {precision}; a task of your own is traced in any precision"
        )
    if soft.name == "shardwise":  # the others have one policy each
        soft = replace(soft, states="bf16-full" if precision == "bf16-full" else "bf16")
    estimators = cache(partial(Estimator, shape, cluster))
    node = cluster.sizes[0] if len(cluster.tiers) > 1 else cluster.world_size

    def layouts(world: int, constraints: Constraints) -> Iterable[Layout]:
        return decoder_layouts(shape, world, global_batch, seq, node, constraints)

    return Subject(
        shape.name or "decoder", shape.layers, global_batch, seq, layouts,
        lambda layout: estimators(as_planned(soft, layout)).estimate(layout),
        lambda layout: estimators(as_planned(soft, layout)).memory(layout),
        lambda layout: simulate(shape, layout, cluster, as_planned(soft, layout)),
        with_batch=lambda count: decoder(shape, cluster, soft, count, seq, precision),
    )  # fmt: skip


def search(
    subject: Subject, cluster: Cluster, constraints: Constraints | None = None, *, precision: str = "bf16"
) -> Search:
    """Search the plans of a subject on a cluster; raises `InputError` where none fits, with the nearest."""
    began = time.monotonic()
    constraints = constraints or Constraints()
    capacity = cluster.device.memory_bytes * (1 - constraints.headroom)
    fits: list[tuple[float, Layout]] = []
    tightest: dict[str, tuple[float, Layout]] = {}
    considered = 0
    for layout in map(constraints.applied, subject.layouts(cluster.world_size, constraints)):
        if constraints.fixed and not constraints.allows(plan_of(layout, precision)):
            continue
        if constraints.check is not None and not _passes(constraints.check, plan_of(layout, precision)):
            continue
        considered += 1
        name = family(layout)
        needed = subject.memory(layout).reserved + CONTEXT_BYTES
        if name not in tightest or needed < tightest[name][0]:
            tightest[name] = (needed, layout)
        if needed <= capacity:
            fits.append((subject.estimate(layout).seconds, layout))
    if not considered:
        raise InputError(_nothing(subject, cluster, constraints))
    if not fits:
        needed, layout = min(tightest.values(), key=lambda item: item[0])
        raise InputError(
            f"no plan fits: the nearest, {plan_of(layout, precision)}, needs {bytes_text(needed)} of "
            f"{bytes_text(capacity)} on each device; use more devices, a smaller batch or sequence, or LoRA"
        )
    fits.sort(key=lambda item: item[0])
    proposals = _ranked(subject, fits, precision, capacity)
    result = Search(proposals, _lost(proposals, tightest, capacity), [], considered, len(fits), capacity=capacity)
    result.lost |= _never(subject, cluster, tightest, proposals[0])
    result.notes = notes(subject, cluster, result, capacity)
    result.seconds = time.monotonic() - began
    return result


def _passes(test: Callable[[Plan], None], candidate: Plan) -> bool:
    try:
        test(candidate)
    except RefusedPlan:
        return False
    return True


def _never(subject: Subject, cluster: Cluster, seen: dict[str, tuple[float, Layout]], best: Proposal) -> dict[str, str]:
    """Families of data parallelism alone that had no layout at all."""
    world, batch = cluster.world_size, subject.global_batch
    if world == 1:
        return {}
    why = f"{batch} samples do not divide over {world} data ranks"
    return {name: why for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3") if name not in seen and batch % world}


def notes(subject: Subject, cluster: Cluster, found: Search, capacity: float) -> list[str]:
    """When not to distribute, and what to try first."""
    out = list(subject.remarks)
    best = found.best
    parts = best.forecast.parts
    reads = subject.reading() if subject.reading is not None else None
    if reads is not None and (wait := reads.wait(best.layout, subject.global_batch)) > best.forecast.step_s:
        out.append(_input_bound(reads, wait, best))
    if cluster.world_size > 1:
        single = _alone(subject, best.layout, capacity)
        if single is not None:
            layout, needed = single
            slow, fast = subject.estimate(layout).seconds, best.forecast.step_s
            if reads is not None:  # a step takes as long as its input does
                slow = max(slow, reads.wait(layout, subject.global_batch))
                fast = max(fast, reads.wait(best.layout, subject.global_batch))
            bound = ", its input included" if slow > subject.estimate(layout).seconds else ""
            verdict = "not worth distributing" if slow / fast < 1.5 else "distribute if the job is long"
            out.append(
                f"it fits on one device ({bytes_text(needed)}, a step of {seconds_text(slow)}{bound}), and "
                f"{cluster.world_size} devices are {slow / fast:.1f} times as fast: {verdict}"
            )
        waiting = sum(s for name, s in parts.items() if "communication" in name) / best.forecast.step_s
        if waiting > 0.4:
            out.append(f"links are the limit: {waiting:.0%} of the step is communication that nothing hides")
    if best.layout.recompute == "full":
        out.append(
            "try first: a smaller micro-batch or longer accumulation; the best plan recomputes everything to fit"
        )
    return out


def _input_bound(reads: Reading, wait: float, best: Proposal) -> str:
    """One line on input that is slower than the step."""
    step = best.forecast.step_s
    what = "every rank makes the global batch" if reads.whole else "a rank reads its samples"
    cure = (
        "give the task a data source, of which each rank reads its own samples"
        if reads.whole
        else f"{-(-wait // step):.0f} readers for each rank would keep up, or samples prepared beforehand"
    )
    return (
        f"input-bound: {what} in {seconds_text(wait)} for a step of {seconds_text(step)} "
        f"({seconds_text(reads.seconds)} a sample, timed on this machine): more devices do not help; {cure}"
    )


def _alone(subject: Subject, like: Layout, capacity: float) -> tuple[Layout, float] | None:
    """The fastest way to run on one device that fits, and the bytes it needs."""
    found: list[tuple[float, Layout, float]] = []
    for micro in micro_batches(subject.global_batch):
        layout = like.with_(
            tp=1, sp=False, cp=1, ulysses=1, pp=1, ep=1, shard=1, replicas=1, zero=0, chunks=1, rounds=1,
            schedule="1f1b", stage_layers=(), micro_batch=micro, n_micro=subject.global_batch // micro,
        )  # fmt: skip
        needed = subject.memory(layout).reserved + CONTEXT_BYTES
        if needed <= capacity:
            found.append((subject.estimate(layout).seconds, layout, needed))
    if not found:
        return None
    _, layout, needed = min(found, key=lambda item: item[0])
    return layout, needed


def _nothing(subject: Subject, cluster: Cluster, constraints: Constraints) -> str:
    """Why there was nothing to look at, and the nearest batch for which there would be."""
    why = "no plan has the degrees asked for: the devices, the batch, the heads or the layers do not divide by them"
    world, batch = cluster.world_size, subject.global_batch
    other = subject.with_batch
    for away in range(1, min(world, MOST_AWAY) + 1) if other is not None else ():
        near = [
            count
            for count in (batch - away, batch + away)
            if count > 0 and other is not None and _has_any(other(count), world, constraints)
        ]
        if near:
            return (
                f"no plan of {world} devices takes a global batch of {batch} samples: it does not divide over the data "
                f"ranks that are left; the nearest that would: {' or '.join(map(str, near))}"
            )
    return (_not_among(subject, world, constraints) if constraints.fixed else "") or why


def _not_among(subject: Subject, world: int, constraints: Constraints) -> str:
    """Which of the fixed fields no plan has that is looked at; empty where there is no plan without them either."""
    limits = replace(constraints, fixed=(), check=None)
    plans = [plan_of(layout, _asked(constraints)) for layout in islice(subject.layouts(world, limits), MOST_TOLD)]
    if not plans:
        return ""
    told = []
    for name, value in constraints.fixed:
        values = {getattr(plan, name) for plan in plans}
        if value not in values:
            known = ", ".join(map(str, sorted(values, key=lambda each: (str(type(each)), each))[:FEW_VALUES]))
            told.append(f"no plan that is looked at has {name}={value}; there are {name}={known}")
    both = " and ".join(f"{name}={value}" for name, value in constraints.fixed)
    return "; ".join(told) or f"no plan that is looked at has {both} together"


def _has_any(subject: Subject, world: int, constraints: Constraints) -> bool:
    """Whether there is a layout as asked for, among the first many."""
    some = islice(subject.layouts(world, constraints), LOOKED_AT)
    return any(not constraints.fixed or constraints.allows(plan_of(layout, _asked(constraints))) for layout in some)


def _asked(constraints: Constraints) -> str:
    """The precision that is fixed, or the default."""
    return str(constraints.value("precision") or "bf16")


def _ranked(
    subject: Subject, fits: list[tuple[float, Layout]], precision: str, capacity: float
) -> list[Proposal]:  # fmt: skip
    """The best by estimate and the best of each family, simulated and sorted."""
    chosen = [layout for _, layout in fits[:SIMULATED]]
    seen: set[str] = {family(layout) for layout in chosen}
    for _, layout in fits[SIMULATED:]:
        if family(layout) not in seen:
            seen.add(family(layout))
            chosen.append(layout)
    out = _sorted([_proposal(subject.simulate, layout, precision) for layout in chosen])
    if subject.exact is None:
        return _possible(out)
    done: set[Layout] = set()
    while rough := [p for p in out[:EXACT] if p.layout not in done]:
        better = [_proposal(subject.exact, p.layout, precision) for p in rough]
        done |= {p.layout for p in rough}
        left = [*(p for p in out if p not in rough), *(p for p in better if p.forecast.fits(capacity))]
        if not left:
            needed = min(p.forecast.needed_bytes for p in better)
            raise InputError(f"no plan fits: the nearest needs {bytes_text(needed)} of {bytes_text(capacity)}")
        out = _sorted(left)
    return _possible(out)


def _proposal(simulate: Callable[[Layout], Forecast], layout: Layout, precision: str) -> Proposal:
    return Proposal(plan_of(layout, precision), layout, simulate(layout), family(layout))


def _possible(proposals: list[Proposal]) -> list[Proposal]:
    """All of them; raises where one is faster than its devices can be: no figure of such a search is worth telling."""
    for proposal in proposals:
        if proposal.forecast.impossible:
            raise ShardwiseError(f"plan {proposal.plan}: {proposal.forecast.impossible}")
    return proposals


def _sorted(proposals: list[Proposal]) -> list[Proposal]:
    """From best to worst; of those within 3% of the fastest the one with the fewest axes first."""
    fastest = min(p.forecast.step_s for p in proposals)

    def order(p: Proposal) -> tuple[int, float, float]:
        near = p.forecast.step_s <= WITHIN * fastest
        return (0, float(axes(p.layout)), p.forecast.step_s) if near else (1, p.forecast.step_s, 0.0)

    return sorted(proposals, key=order)


def _lost(proposals: list[Proposal], tightest: dict[str, tuple[float, Layout]], capacity: float) -> dict[str, str]:
    """For each family but the winner's, one line."""
    best = proposals[0]
    out = {}
    for name, (needed, layout) in sorted(tightest.items()):
        if name == best.family:
            continue
        mine = [p for p in proposals if p.family == name]
        if not mine:
            out[name] = f"needs {bytes_text(needed)} of {bytes_text(capacity)} at its smallest ({_short(layout)})"
            continue
        rival = min(mine, key=lambda p: p.forecast.step_s)
        out[name] = _slower(rival, best)
    return out


def _short(layout: Layout) -> str:
    degrees = [f"{n}={getattr(layout, n)}" for n in ("tp", "cp", "ep", "pp") if getattr(layout, n) > 1]
    return ", ".join([*degrees, f"micro-batch {layout.micro_batch}", f"remat={layout.recompute}"])


def _slower(rival: Proposal, best: Proposal) -> str:
    """What of its step costs more than the winner's."""
    slower = rival.forecast.step_s / best.forecast.step_s - 1
    names = set(rival.forecast.parts) | set(best.forecast.parts)
    more = {n: rival.forecast.parts.get(n, 0.0) - best.forecast.parts.get(n, 0.0) for n in names}
    cause = max(more, key=lambda n: more[n])
    share = more[cause] / best.forecast.step_s
    if slower < WITHIN - 1:
        return f"as fast within 3% ({slower:+.1%}), with more to know: {rival.plan}"
    recompute = (
        ", since it recomputes" if cause == "compute" and rival.layout.recompute != best.layout.recompute else ""
    )
    return f"{slower:+.0%}: {cause} {share:+.0%} of a step{recompute} ({_short(rival.layout)})"
