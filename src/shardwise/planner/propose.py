"""`search`: the fastest plan that fits, and the order of results. Which layouts are tried: candidates.

    every layout ── memory ──> those that fit ── estimate ──> the best few of each family ── simulate ──> ranked

Plans that this version can run come first; faster ones that it cannot run yet are listed separately. Among plans within
3% of the fastest, the one that needs clearly less memory comes first, then the one with the fewest axes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import CONTEXT_BYTES, WEIGHTS_ALONE
from shardwise.costs.offload import disk_rate
from shardwise.costs.room import Room
from shardwise.costs.units import bytes_text, seconds_text
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.offload import canonical, in_tier
from shardwise.planner.candidates import Constraints, axes, family, plan_of
from shardwise.planner.proposal_text import Proposal, Search, lacking, senseless
from shardwise.planner.reasons import WITHIN, contradiction, lost, never, no_host, notes, nothing
from shardwise.planner.subject import Subject, counts_that_do, first_devices
from shardwise.progress import Say, silent
from shardwise.simulator.forecast import Forecast

EXACT = 3  # first proposals that are forecast again from traces of exactly their micro-batch
SIMULATED = 24  # layouts that are simulated, the best by estimate; the best of each further family is added
LATER = 3  # most plans listed that this version cannot run yet
OFFLOADED = (
    "nothing fits in the devices' memory alone: these plans keep the optimizer's state outside of it between steps, "
    "or also what blocks keep for backward, or weights, until they are used, which each step waits for; more devices, "
    "a smaller batch or sequence, or adapters alone (--lora 16), as frozen weights have no such state, would do "
    "without. The best keeps {}"
)
EVERY_S = 0.3  # seconds between two lines of progress
# The best FIRST_ROWS plans so far are shown once: after FIRST_S seconds, or before a slow trace, but only once the
# process's CPU time, that trace included, reaches SOON_S seconds, since a quick search needs no preliminary table
FIRST_S, SOON_S, FIRST_ROWS = 2.0, 5.5, 3
WAITING, HALF = 0.4, 1.15  # share of waiting from which half of the devices are tried; slower by at most this factor
ROOMY, CLASSES = 0.5, 10  # plans that fill less than half of a device count as equal; above, by tenths of its memory


@dataclass
class _Looked:
    """Result of `_look`.

    fits      (estimated seconds of a step, layout) of each layout that fits, fastest first
    tightest  {family: (bytes of its smallest layout, that layout)}
    crowded   (room that it needs on a host, layout) of the layout that fits the devices and misses the host's memory or
              disk by least; None: no such layout
    """

    fits: list[tuple[float, Layout]] = field(default_factory=list)
    tightest: dict[str, tuple[float, Layout]] = field(default_factory=dict)
    crowded: tuple[Room, Layout] | None = None
    considered: int = 0  # number of layouts tried
    stopped: bool = False  # whether an interrupt ended it before all were tried


def search(
    subject: Subject, cluster: Cluster, constraints: Constraints | None = None, *, precision: str = "bf16",
    say: Say = silent, show: Callable[[Sequence[Proposal], int], None] | None = None,
) -> Search:  # fmt: skip
    """Returns the `Search` of a subject's plans on a cluster; raises `InputError` with the nearest if none fits.

    An interrupt (ctrl-C) ends it with the best so far, if there is one.

    constraints  None: no constraints
    say   called with lines of progress
    show  called at most once during the search with (the best proposals so far, number of layouts tried); None: never
    """
    began = time.monotonic()
    constraints = constraints or Constraints()
    against = contradiction(cluster.world_size, constraints)
    if against:
        raise InputError(against)
    capacity = cluster.device.memory_bytes * (1 - constraints.headroom)
    looked = _look(subject, cluster.world_size, constraints, precision, capacity, say, show)
    # no layout exists at all, but the batch may divide over fewer devices
    if not looked.considered:
        return _on_part(subject, cluster, constraints, precision, say, show)
    tiers = _tiers(cluster, subject) if constraints.offload and constraints.value("offload") is None else []
    offloaded = not looked.fits and bool(tiers)
    for tier in tiers if offloaded else ():
        # once something fits, no further tier is tried for a task (another rehearsal) nor a disk (slower)
        if looked.fits and (subject.own or in_tier(tier, "optimizer", "disk")):
            break
        asked = replace(constraints, fixed=(*constraints.fixed, ("offload", tier)))
        more = _look(subject, cluster.world_size, asked, precision, capacity, say)
        more.considered += looked.considered
        more.fits = sorted([*looked.fits, *more.fits], key=_seconds)
        # keeps the families without offload, so that `lost` says that they need too much memory
        more.tightest |= looked.tightest
        more.crowded = _nearer(looked.crowded, more.crowded)
        looked = more
    if not looked.fits:
        needed, layout = min(looked.tightest.values(), key=lambda item: item[0])
        fewer = _on_fewer(subject, cluster.world_size, constraints, precision, capacity)
        further = "; a search goes further with --max-tp, --max-pp, --max-cp and --fix" if subject.unsearched else ""
        # some plan would fit the devices, but hosts or disks lack room for what it offloads
        if looked.crowded is not None:
            raise InputError(no_host(*looked.crowded, looked.considered, subject, cluster, precision))
        alone = subject.memory(layout).peak == WEIGHTS_ALONE  # adapters would not help then
        least, adapters = ("at least ", "") if alone else ("", _by_adapters(subject, layout, needed))
        raise InputError(
            f"no plan fits of {looked.considered:,} that were looked at: the nearest, {plan_of(layout, precision)}, "
            f"needs {least}{bytes_text(needed)} of {bytes_text(capacity)} on each device, of whose memory "
            f"{constraints.headroom:.0%} is kept free{further}{adapters}. "
            + (fewer or "Use more devices, or a smaller batch or sequence")
        )
    result = _ranked(subject, looked, precision, capacity, say)
    result.capacity, result.considered, result.fitted = capacity, looked.considered, len(looked.fits)
    result.lost = lost(result, looked.tightest, capacity, precision)
    result.lost |= never(subject, cluster, looked.tightest)
    result.notes = notes(subject, cluster, result, capacity)
    result.notes += _half_as_good(subject, cluster, constraints, result, capacity)
    result.notes.append(f"memory: {bytes_text(capacity)} may be planned for: {_kept_free(cluster, constraints)}")
    if offloaded:
        result.notes.insert(0, OFFLOADED.format("; ".join(result.best.forecast.room.lines)))
    if subject.unsearched:
        result.notes.append(subject.unsearched)
    if result.stopped:
        result.notes.insert(0, "interrupted: the best so far, of what had been looked at by then")
    result.seconds = time.monotonic() - began
    return result


def _tiers(cluster: Cluster, subject: Subject) -> list[str]:
    """Returns the `offload` texts to try in order if nothing fits; [] if a rate of the cluster is not known."""
    on_host = cluster.device.kind == "cpu"
    if (disk_rate(cluster) if on_host else cluster.device.host_gbps) is None:
        return []
    optimizer, activations = ("optimizer:disk", "activations:disk") if on_host else ("optimizer", "activations")
    weights = canonical(f"{optimizer}|parameters:disk" if on_host else "parameters")
    disks: list[str] = []
    if not on_host and disk_rate(cluster) is not None:  # for hosts of too little memory
        disks = ["optimizer:disk", canonical("optimizer:disk|parameters")]
    # offloaded activations are forecast only for traced tasks
    if not subject.own:
        return [optimizer, *([] if on_host else [weights]), *disks]
    return [optimizer, f"{optimizer}|{activations}", weights, canonical(f"{weights}|{activations}"), *disks]


def _on_part(
    subject: Subject, cluster: Cluster, constraints: Constraints, precision: str, say: Say,
    show: Callable[[Sequence[Proposal], int], None] | None,
) -> Search:  # fmt: skip
    """Returns the fastest search on fewer devices, called if no plan has all; raises `InputError` if none fits."""
    why = nothing(subject, cluster, constraints)
    counts = counts_that_do(subject, cluster, constraints)
    results: list[tuple[float, Search]] = []
    for count in counts:
        part = first_devices(cluster, count)
        try:
            result = search(subject, part, constraints, precision=precision, say=say, show=show)
        except InputError as error:
            why = f"{why}; on {count} devices: {error}"
            continue
        result.cluster = part
        results.append((result.best.forecast.step_s, result))
        # the first table is shown once, by the first of several searches
        show = None
    if not results:
        raise InputError(why)
    best = min(results, key=lambda item: item[0])[1]
    assert best.cluster is not None
    others = ", ".join(
        f"{other.cluster.world_size} take {seconds_text(seconds)}"
        for seconds, other in results
        if other is not best and other.cluster is not None
    )
    beside = f" ({others})" if others else ""
    best.notes.insert(0, f"planned on {best.cluster.world_size} of {cluster.world_size} devices{beside}: {why}")
    return best


def _half_as_good(
    subject: Subject, cluster: Cluster, constraints: Constraints, result: Search, capacity: float
) -> list[str]:
    """Returns [a note] if half of the devices are nearly as fast, else []; only for a decoder given by its sizes."""
    best, half = result.best, cluster.world_size // 2
    forecast = best.forecast
    waits = sum(s for name, s in forecast.parts.items() if "communication" in name or "bubble" in name)
    # a task would have to be rehearsed again; if ranks hardly wait, half of the devices take about twice as long
    if subject.own or cluster.world_size % 2 or waits < WAITING * forecast.step_s or constraints.fixed:
        return []
    looked = _look(subject, half, constraints, best.plan.precision, capacity, silent)
    run, _ = _chosen(looked.fits, best.plan.precision)
    if not run:
        return []
    fewer = _proposal(subject.simulate, run[0], best.plan.precision)
    if fewer.forecast.step_s > HALF * forecast.step_s:
        return []
    return [
        f"half of the devices are nearly as fast: on {half} of {cluster.world_size}, {fewer.plan} takes "
        f"{seconds_text(fewer.forecast.step_s)}; on all of them ranks wait {waits / forecast.step_s:.0%} of the step"
    ]


def _on_fewer(subject: Subject, world: int, constraints: Constraints, precision: str, capacity: float) -> str:
    """Returns a sentence with a plan that fits on the next lower power of two of `world` devices, or "".

    Always "" for a task, which would have to be rehearsed again.
    """
    count = 1 << (world.bit_length() - 1)
    if subject.own or count == world:
        return ""
    fits = _look(subject, count, constraints, precision, capacity, silent).fits
    if not fits:
        return ""
    return f"Every plan has all {world} devices; on {count} of them {plan_of(fits[0][1], precision)} fits"


def _kept_free(cluster: Cluster, constraints: Constraints) -> str:
    """Returns a sentence on the share of a device's memory that is kept free, and why."""
    memory = cluster.device.memory_gb
    return (
        f"{cluster.device.name} offers {bytes_text(memory.value * 1e9)} ({memory.kind}: {memory.source}), of which "
        f"{constraints.headroom:.0%} is kept free, as far as forecasts of memory are off and an allocator leaves gaps"
    )


def _look(
    subject: Subject, world: int, constraints: Constraints, precision: str, capacity: float, say: Say,
    show: Callable[[Sequence[Proposal], int], None] | None = None,
) -> _Looked:  # fmt: skip
    """Tries all layouts on `world` devices and returns those that fit in `capacity` bytes, with estimated seconds.

    An interrupt (ctrl-C) ends it if some fit. `say`, `show`: as in `search`.
    """
    looked, last_line_at, best = _Looked(), time.monotonic(), math.inf
    began, leader = last_line_at, ""
    shown = show is None

    def show_first(ahead: float = math.inf) -> None:
        nonlocal shown
        if shown or time.process_time() + ahead < SOON_S:
            return
        run = _chosen(sorted(looked.fits, key=_seconds), precision)[0]
        if run and show is not None:
            shown = True
            few = [_proposal(subject.simulate, layout, precision) for layout in run[:FIRST_ROWS]]
            show(_sorted(few, capacity), looked.considered)

    # a task calls this before a slow rehearsal, with its seconds
    if subject.when_long is not None:
        subject.when_long(show_first)
    try:
        for layout in map(constraints.applied, subject.layouts(world, constraints)):
            if constraints.fixed and not constraints.allows(plan_of(layout, precision)):
                continue
            # the user's check leaves out plans, such as those that this version cannot run
            if constraints.check is not None and not _passes(constraints.check, plan_of(layout, precision)):
                continue
            looked.considered += 1
            name = family(layout)
            needed = subject.memory(layout).reserved + CONTEXT_BYTES
            if name not in looked.tightest or needed < looked.tightest[name][0]:  # for `lost`
                looked.tightest[name] = (needed, layout)
            room = subject.room(layout) if needed <= capacity and layout.offload != "none" else Room()
            if room.lacks:  # it fits on the device, but its offloaded state not on the host or disk
                looked.crowded = _nearer(looked.crowded, (room, layout))
            elif needed <= capacity:
                seconds = subject.estimate(layout)
                looked.fits.append((seconds, layout))
                if seconds < best:
                    best, leader = seconds, f"; best so far {seconds_text(seconds)}, {name}"
            if not shown and time.monotonic() - began > FIRST_S:
                show_first()
            if time.monotonic() - last_line_at > EVERY_S:
                last_line_at = time.monotonic()
                say(f"{looked.considered:,} plans looked at, {len(looked.fits):,} fit{leader} (ctrl-C ends with it)")
    except KeyboardInterrupt:
        if not looked.fits:
            raise
        looked.stopped = True
    looked.fits.sort(key=_seconds)
    return looked


def _nearer(first: tuple[Room, Layout] | None, second: tuple[Room, Layout] | None) -> tuple[Room, Layout] | None:
    """Returns the (room, layout) that exceeds the host's room by less; if one is None, the other."""
    if first is None or second is None:
        return first or second
    return min(first, second, key=lambda crowded: crowded[0].over)


def _seconds(item: tuple[float, Layout]) -> float:
    return item[0]


def _passes(test: Callable[[Plan], None], candidate: Plan) -> bool:
    """Whether `test` does not raise `RefusedPlan` for a plan."""
    try:
        test(candidate)
    except RefusedPlan:
        return False
    return True


def _chosen(fits: list[tuple[float, Layout]], precision: str) -> tuple[list[Layout], list[Layout]]:
    """Returns (layouts to simulate, layouts of plans that this version cannot run yet).

    To simulate: the best by estimate, and the best of each family. Of the others: the best of each family.

    fits  (estimated seconds, layout), fastest first
    """
    run: list[Layout] = []
    later: dict[str, Layout] = {}
    seen: set[str] = set()
    for _, layout in fits:
        name = family(layout)
        # beyond the best few, one of each family is still simulated, so that `lost` can compare its parts
        if len(run) >= SIMULATED and (name in seen or name in later):
            continue
        candidate = plan_of(layout, precision)
        # plans that this version cannot run are listed separately
        if lacking(candidate):
            if name not in later and not senseless(candidate):
                later[name] = layout
            continue
        run.append(layout)
        seen.add(name)
    return run, [*later.values()]


def _ranked(subject: Subject, looked: _Looked, precision: str, capacity: float, say: Say) -> Search:
    """Simulates the layouts of `_chosen` and returns a sorted `Search`; raises `InputError` if none of them fits."""
    run, later = _chosen(looked.fits, precision)
    # if nothing that this version can run fits, plans that it only forecasts are shown
    if not run:
        run, later = [layout for _, layout in looked.fits[:SIMULATED]], []
    result = Search([], {}, stopped=looked.stopped)
    try:
        for place, layout in enumerate(run):
            say(f"simulating {place + 1} of {len(run)}: {plan_of(layout, precision)}")
            result.proposals.append(_proposal(subject.simulate, layout, precision))
        # unequal stages keep more than the estimate, which assumes equal ones
        fitting = [p for p in result.proposals if p.forecast.fits(capacity)]
        # if there are exact forecasts, these decide below
        if not fitting and subject.exact is None:
            raise _none_fits(result.proposals, capacity)
        result.proposals = fitting or result.proposals
        result.proposals = _sorted(result.proposals, capacity)
        if subject.exact is not None:
            result.proposals = _exact(subject, result.proposals, precision, capacity, say)
        fastest = min(p.forecast.step_s for p in result.proposals)
        others = [_proposal(subject.simulate, layout, precision) for layout in later[:LATER]]
        result.later = _sorted([p for p in others if p.forecast.step_s < fastest], capacity)
    except KeyboardInterrupt:
        if not result.proposals:
            raise
        result.proposals, result.stopped = _sorted(result.proposals, capacity), True
    _possible([*result.proposals, *result.later])
    return result


def _by_adapters(subject: Subject, layout: Layout, needed: float) -> str:
    """Returns a sentence that proposes adapters, or "" if they would save less than a quarter of `needed` bytes."""
    fullest = max(subject.simulate(layout).memory, key=lambda ledger: ledger.allocated)
    of_trained = fullest.terms.get("gradients", 0.0) + fullest.terms.get("optimizer", 0.0)
    if of_trained < needed / 4:
        return ""
    return (
        f". Gradients and optimizer state take {bytes_text(of_trained)} of it, which frozen weights have not: train "
        "adapters alone (--lora 16)"
    )


def _none_fits(proposals: list[Proposal], capacity: float) -> InputError:
    """Returns the error that none of these proposals fits, with the bytes that the nearest one needs."""
    nearest = min((p.forecast for p in proposals), key=lambda forecast: forecast.needed_bytes)
    lacks = [nearest.room.line(tier) for tier in nearest.room.lacks]
    if nearest.needed_bytes > capacity:
        lacks.insert(0, f"{bytes_text(nearest.needed_bytes)} of {bytes_text(capacity)}")
    return InputError(f"no plan fits: the nearest needs {'; '.join(lacks)}")


def _exact(
    subject: Subject, proposals: list[Proposal], precision: str, capacity: float, say: Say
) -> list[Proposal]:  # fmt: skip
    """Returns the proposals sorted again, the first `EXACT` forecast from traces of exactly their micro-batch.

    Proposals that no longer fit are left out; raises `InputError` if none is left.
    """
    assert subject.exact is not None
    out, done = proposals, set[Layout]()
    # an exact forecast may be slower and bring another proposal to the front, hence the loop
    while rough := [p for p in out[:EXACT] if p.layout not in done]:
        say(f"looking closely at {rough[0].plan}")
        better = [_proposal(subject.exact, p.layout, precision) for p in rough]
        done |= {p.layout for p in rough}
        left = [*(p for p in out if p not in rough), *(p for p in better if p.forecast.fits(capacity))]
        if not left:
            raise _none_fits(better, capacity)
        out = _sorted(left, capacity)
    return out


def _proposal(simulate: Callable[[Layout], Forecast], layout: Layout, precision: str) -> Proposal:
    return Proposal(plan_of(layout, precision), layout, simulate(layout), family(layout))


def _possible(proposals: list[Proposal]) -> None:
    """Raises `ShardwiseError` if a forecast is faster than its devices can compute, since no figure is right then."""
    for proposal in proposals:
        if proposal.forecast.impossible:
            raise ShardwiseError(f"plan {proposal.plan}: {proposal.forecast.impossible}")


def _sorted(proposals: list[Proposal], capacity: float) -> list[Proposal]:
    """Returns proposals best first: within 3% of the fastest by tenths of `capacity`, then by number of axes."""
    fastest = min((p.forecast.step_s for p in proposals), default=0.0)

    def order(p: Proposal) -> tuple[float, ...]:
        if p.forecast.step_s > WITHIN * fastest:
            return 1, p.forecast.step_s
        # below half of a device all count as equal, since nobody needs the memory that more axes would save there
        # (test_of_plans_as_fast_the_leaner_comes_before_the_simpler)
        filled = max(ROOMY, p.forecast.needed_bytes / capacity)
        return 0, math.ceil(CLASSES * filled), axes(p.layout), p.forecast.step_s

    return sorted(proposals, key=order)
