"""Texts of a search (propose): advice on the best plan, why other families lost, why no plan fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from shardwise.cluster import Cluster
from shardwise.costs.layout import RECOMPUTES, Layout
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.costs.offload import disk_rate
from shardwise.costs.room import Room
from shardwise.costs.units import bytes_text, seconds_text
from shardwise.errors import ShardwiseError
from shardwise.layout.offload import canonical, placements, weights_on_host
from shardwise.layout.plan import DEGREES, Plan
from shardwise.planner.candidates import Constraints, micro_batches, plan_of
from shardwise.planner.proposal_text import Proposal, Search, lacking
from shardwise.planner.subject import Reading, Subject

DRAWN = 1.1  # factor on a step's time by randomness=global from which a note says so
WITHIN = 1.03  # plans whose times differ by less than this factor count as equally fast
MOST_AWAY = 4096  # samples by which another global batch that is proposed may differ
LOOKED_AT = 200  # layouts that are tried for each such batch
MOST_TOLD, FEW_VALUES = 20_000, 12  # layouts read, and values of a field listed, in a message on possible values


def notes(subject: Subject, cluster: Cluster, result: Search, capacity: float) -> list[str]:
    """Returns lines of advice for people: when not to distribute, what limits the best plan, what to try first.

    capacity  bytes of a device that a plan may use
    """
    out = list(subject.remarks)
    best = result.best
    parts = best.forecast.parts
    reads = subject.reading() if subject.reading is not None else None
    if reads is not None and (wait := reads.wait(best.layout, subject.global_batch)) > best.forecast.step_s:
        out.append(_input_bound(reads, wait, best))
    if cluster.world_size > 1:
        single = _alone(subject, best.layout, capacity)
        if single is not None:
            layout, needed = single
            slow, fast = subject.estimate(layout), best.forecast.step_s
            if reads is not None:  # a step cannot be faster than its input is read
                slow = max(slow, reads.wait(layout, subject.global_batch))
                fast = max(fast, reads.wait(best.layout, subject.global_batch))
            bound = ", its input included" if slow > subject.estimate(layout) else ""
            verdict = "not worth distributing" if slow / fast < 1.5 else "distribute if the job is long"
            out.append(
                f"it fits on one device ({bytes_text(needed)}, a step of {seconds_text(slow)}{bound}), and "
                f"{cluster.world_size} devices are {slow / fast:.1f} times as fast: {verdict}"
            )
        waiting = sum(s for name, s in parts.items() if "communication" in name) / best.forecast.step_s
        if waiting > 0.4:
            out.append(f"links are the limit: {waiting:.0%} of the step is communication that nothing hides")
    if subject.draws is not None and (pair := subject.draws(best.layout)) and pair[0] > DRAWN * pair[1]:
        out.append(
            f"randomness: numbers of one process, the default, take {1 - pair[1] / pair[0]:.0%} of a step of replicas "
            f"({seconds_text(pair[0])} against {seconds_text(pair[1])}): each is hashed by its place, and attention "
            "with dropout writes its scores; --randomness fast draws as a GPU does, other numbers on other plans"
        )
    if best.layout.recompute == "full":
        smaller = "; smaller micro-batches were looked at, and are no faster" if best.layout.micro_batch > 1 else ""
        out.append(f"try first: shorter samples, or more devices; the best plan recomputes everything to fit{smaller}")
    return out


def _input_bound(reads: Reading, wait: float, best: Proposal) -> str:
    """Returns the line on input that takes `wait` seconds, longer than the step, and its remedy."""
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
    """Returns (fastest layout on one device that fits in `capacity` bytes, bytes that it needs), or None.

    like  layout whose recompute, offload and other choices it shares
    """
    fits: list[tuple[float, Layout, float]] = []
    zero = like.zero if placements(like.offload, "parameters") else 0  # only units of zero=3 can be offloaded
    for micro in micro_batches(subject.global_batch):
        # each micro-batch is tried: test_one_device_is_compared_at_its_own_best_micro_batch
        layout = like.with_(
            tp=1, sp=False, cp=1, ulysses=1, others=(), domain=(1,), domain_overlap="auto", domain_depth=1, pp=1, ep=1,
            shard=1, replicas=1, zero=zero, chunks=1, rounds=1, schedule="1f1b", stage_layers=(), micro_batch=micro,
            n_micro=subject.global_batch // micro,
        )  # fmt: skip
        needed = subject.memory(layout).reserved + CONTEXT_BYTES
        if needed <= capacity and not (layout.offload != "none" and subject.room(layout).lacks):
            fits.append((subject.estimate(layout), layout, needed))
    if not fits:
        return None
    _, layout, needed = min(fits, key=lambda item: item[0])
    return layout, needed


def never(subject: Subject, cluster: Cluster, seen: dict[str, tuple[float, Layout]]) -> dict[str, str]:
    """Returns {family of data parallelism without any layout: reason}; `seen`: families that had layouts."""
    world, batch = cluster.world_size, subject.global_batch
    if world == 1:
        return {}
    why = f"{batch} samples do not divide over {world} data ranks"
    return {name: why for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3") if name not in seen and batch % world}


def lost(
    result: Search, tightest: dict[str, tuple[float, Layout]], capacity: float, precision: str
) -> dict[str, str]:  # fmt: skip
    """Returns {family of plans: one line on why it lost} for each family but the winner's.

    tightest  {family: (bytes of its smallest layout, that layout)}
    """
    best = result.best
    out = {}
    for name, (needed, layout) in sorted(tightest.items()):
        if name == best.family:
            continue
        mine = [p for p in result.proposals if p.family == name]
        # a family that was simulated lost by time, any other one by memory or since this version cannot run it
        if mine:
            out[name] = _slower(min(mine, key=lambda p: p.forecast.step_s), best)
        elif needed > capacity:
            out[name] = f"needs {bytes_text(needed)} of {bytes_text(capacity)} at its smallest ({_short(layout)})"
        elif why := lacking(plan_of(layout, precision)):
            out[name] = f"not in this version: {why}"
        else:
            out[name] = "not simulated: the search was interrupted"
    return out


def _short(layout: Layout) -> str:
    degrees = [f"{n}={getattr(layout, n)}" for n in ("tp", "ulysses", "cp", "ep", "pp") if getattr(layout, n) > 1]
    tiles = [f"domain={shown(layout.domain)}"] if layout.tiles > 1 else []
    return ", ".join([*tiles, *degrees, f"micro-batch {layout.micro_batch}", f"remat={layout.recompute}"])


def _slower(rival: Proposal, best: Proposal) -> str:
    """Returns the line on a family that lost by time: the part of its step that exceeds the winner's by most."""
    slower = rival.forecast.step_s / best.forecast.step_s - 1
    names = set(rival.forecast.parts) | set(best.forecast.parts)
    more = {n: rival.forecast.parts.get(n, 0.0) - best.forecast.parts.get(n, 0.0) for n in names}
    cause = max(more, key=lambda n: more[n])
    share = more[cause] / best.forecast.step_s
    if slower < WITHIN - 1:
        return f"as fast within 3% ({slower:+.1%}), with more to know: {rival.plan}"
    recompute = ", since it recomputes" if cause == "compute" and _recomputes(rival) > _recomputes(best) else ""
    return f"{slower:+.0%}: {cause} {share:+.0%} of a step{recompute} ({_short(rival.layout)})"


def _recomputes(proposal: Proposal) -> int:
    """Returns the index of the recompute policy in `RECOMPUTES`, which go from least to most recomputed."""
    return RECOMPUTES.index(proposal.layout.recompute)


# --- where there is nothing


def nothing(subject: Subject, cluster: Cluster, constraints: Constraints) -> str:
    """Returns a sentence on why a search had no layout to try, with the nearest batch that has one."""
    why = "no plan has the degrees asked for: the devices, the batch, the heads or the layers do not divide by them"
    world, batch = cluster.world_size, subject.global_batch
    other = subject.with_batch
    # a multiple of `world`, which divides over all data ranks, is at most this far away
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


def contradiction(world: int, constraints: Constraints) -> str:
    """Returns a sentence on fixed fields that contradict each other, a limit or the `world` devices, or ""."""
    if not constraints.fixed:
        return ""
    try:
        plan = Plan().with_(**dict(constraints.fixed))
    except ShardwiseError as error:
        return f"--fix contradicts itself: {error}"
    for name, most in constraints.most:
        asked = constraints.value(name)
        # a fixed degree above its own limit leaves nothing to search
        if isinstance(asked, int) and asked > most:
            return f"--fix {name}={asked} contradicts --max-{name} {most}: leave one of them out"
    if plan.world_size > world:
        degrees = " x ".join(
            f"{name}={shown(value)}"
            for name, value in constraints.fixed
            if name in (*DEGREES, "domain") and value not in (1, (1,))
        )
        return f"--fix asks for {degrees} = {plan.world_size} devices, more than the {world} of the cluster"
    return ""


def no_host(
    room: Room, layout: Layout, considered: int, subject: Subject, cluster: Cluster, precision: str
) -> str:  # fmt: skip
    """Returns the sentence on why no plan fits if hosts lack memory or disk for offloaded state, with remedies.

    room, layout  of the plan that misses by least; `considered`: number of layouts tried
    """
    nearest = f"the nearest that fits the devices, {plan_of(layout, precision)}, keeps {'; '.join(room.lines)}"
    weights = weights_on_host(layout.offload)
    on_disk = canonical("optimizer:disk|parameters" if weights else "optimizer:disk")
    more, cures = "", ["more hosts, or hosts with more", "adapters alone (--lora 16)"]
    # state that does not fit in the host's memory may fit on a disk, unless that layout is the one that failed
    if "host" in room.lacks and layout.offload != on_disk:
        moved = subject.room(layout.with_(offload=on_disk))
        kept = f"offload={on_disk}, which keeps {'; '.join(moved.lines)}"
        if moved.lacks:
            more = f" Nor would {kept}."
        else:
            unknown = "; it is looked at where the cluster tells the rate of its hosts' disks: disk-12gb/s in its text"
            cures.insert(0, kept + ("" if disk_rate(cluster) is not None else unknown))
    return f"no plan fits of {considered:,} that were looked at: {nearest}.{more} What would: {', or '.join(cures)}"


def _not_among(subject: Subject, world: int, constraints: Constraints) -> str:
    """Returns a sentence on fixed fields that no searched plan has, with possible values; "" if there is no plan."""
    limits = replace(constraints, fixed=(), check=None)
    plans = [plan_of(layout, _asked(constraints)) for layout in islice(subject.layouts(world, limits), MOST_TOLD)]
    # no plan even without the fixed fields, so these are not the reason
    if not plans:
        return ""
    problems = []
    for name, value in constraints.fixed:
        values = {getattr(plan, name) for plan in plans}
        if value not in values:
            choices = ", ".join(map(shown, sorted(values, key=lambda choice: (str(type(choice)), choice))[:FEW_VALUES]))
            problems.append(f"no plan that is looked at has {name}={shown(value)}; there are {name}={choices}")
    both = " and ".join(f"{name}={shown(value)}" for name, value in constraints.fixed)
    return "; ".join(problems) or f"no plan that is looked at has {both} together: leave one of them out"


def shown(value: object) -> str:
    """Returns the value of a plan's field as a plan's text has it (a tuple as "2x1")."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _has_any(subject: Subject, world: int, constraints: Constraints) -> bool:
    """Whether any of the first `LOOKED_AT` layouts on `world` devices meets the constraints."""
    some = islice(subject.layouts(world, constraints), LOOKED_AT)
    return any(not constraints.fixed or constraints.allows(plan_of(layout, _asked(constraints))) for layout in some)


def _asked(constraints: Constraints) -> str:
    """Returns the precision that is fixed, or "bf16"."""
    return str(constraints.value("precision") or "bf16")
