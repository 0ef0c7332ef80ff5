"""Lists legal layouts for a search. Keys in `SEARCHED` are varied; other keys (`SWITCHES`) are as the user fixed them.

Innermost to outermost: tp, cp_ulysses, cp, domain, dp_shard, pp, dp_replicate. Not listed: zero >= 2 with pp > 1 unless
the user fixed it (it reduces gradients and gathers weights for every micro-batch), offload if something fits without,
tiles together with tp or pp. "Asked" means fixed by the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from shardwise.costs.layout import RECOMPUTES, SAME_KEYS, Layout
from shardwise.costs.shapes import Shape
from shardwise.layout import Plan
from shardwise.layout.keys import keys_with
from shardwise.layout.offload import placements
from shardwise.layout.plan import ALONG
from shardwise.layout.schedule_kinds import KINDS, listed
from shardwise.layout.zero_stages import SHARDED

MOST_TOKENS = 2**19  # most tokens of a decoder's micro-batch, as no device holds more
FAR_FROM = 16384  # fewest positions of a rank for which heads are dealt beyond a node
FEW = 128  # samples of a rank up to which every divisor is tried as a micro-batch, above it powers of two
UNSEARCHED = (
    "not looked at: tp above two nodes, pp above 64 and cp above 16 (--max-tp, --max-pp, --max-cp ask for more), tp "
    "that splits a node unevenly; cp_ulysses beside cp, and beyond a node where a rank keeps under "
    f"{FAR_FROM} positions; ep beyond eight nodes, and beside tp or cp; data ranks that the batch does not divide "
    f"over; zero=2 and 3 beside a pipeline, and {listed(lambda kind: not kind.searched)}, or stages_per_rank other "
    "than 2, 4 and 8, unless they are asked for (--fix zero=3, --fix schedule=zbv); compile; the optimizer on the "
    "host, where something fits without (--fix offload=optimizer)"
)
SEARCHED = ("tp", "sp", "cp", "pp", "ep", "zero", "domain")  # plan keys that are varied, with those of other names
SWITCHES = tuple(sorted(set(SAME_KEYS) - {*SEARCHED, "tp_whole", "stages"}))  # plan keys that are never varied
MOST_SHARES, MOST_STAGES = 8, 4  # largest degrees of tp or ep, and pp, for a traced task, unless the user asks for more
MOST_TILES, GRIDS = 16, 2  # most tiles of a field, and most grids for each number of tiles, unless one is asked for
HEADROOM = 0.08  # default of `Constraints.headroom`
MOST_CP = 16  # largest degree of cp and cp_ulysses for a decoder, unless the user asks for more
NODES_OF_EXPERTS = 8  # most nodes over which experts are dealt, unless more are asked for
CHUNKS = (2, 4, 8)  # stages on each rank of an interleaved pipeline
CONTEXT_FROM = 4096  # with cp or cp_ulysses a rank keeps at least half as many positions


@dataclass(frozen=True)
class Constraints:
    """The limits and values that the user gives to a search.

    most          (axis, largest degree) of tp, pp and cp
    fixed         (key of a plan, value) that every plan must have
    headroom      share of a device's memory to leave free; nine of ten forecasts of published runs are off by at most
                  the default (`benchmarks/forecast.py`)
    check         leaves out a plan by raising `RefusedPlan`; None: takes all
    offload       whether plans with offloaded state are tried if nothing fits
    """

    most: tuple[tuple[str, int], ...] = ()
    fixed: tuple[tuple[str, object], ...] = ()
    headroom: float = HEADROOM
    check: Callable[[Plan], None] | None = None
    offload: bool = True

    def allows(self, plan: Plan) -> bool:
        """Whether a plan has all the values in `fixed`."""
        # domain=2x1 and domain=2 are the same grid
        return all(_written(getattr(plan, name)) == _written(value) for name, value in self.fixed)

    def applied(self, layout: Layout) -> Layout:
        """Returns the layout with the user's fixed values of keys that the search does not vary (`SWITCHES`)."""
        values = {name: value for name, value in self.fixed if name in SWITCHES}
        if not values:
            return layout
        # a key whose condition is not met (such as domain_depth without tiles) would make the plan invalid
        idle = {name for name, need in keys_with(Plan, "needs").items() if not need.met(layout)}
        return layout.with_(**{name: value for name, value in values.items() if name not in idle})

    def limit(self, name: str, usual: int) -> int:
        """Returns the largest degree of an axis to try: the user's limit, else `usual`."""
        return dict(self.most).get(name) or usual

    def value(self, name: str) -> object | None:
        return dict(self.fixed).get(name)

    @property
    def moves_weights(self) -> bool:
        """Whether the user fixed an offload of weights, which only units of zero=3 allow."""
        return bool(placements(str(self.value("offload") or "none"), "parameters"))

    def precision(self, asked: str) -> str:
        """Returns the precision that the fixed fields name, else `asked`."""
        return str(self.value("precision") or asked)


def _written(value: object) -> object:
    """Returns a grid of tiles without trailing ones, (2, 1) as (2,); any other value unchanged."""
    while isinstance(value, tuple) and len(value) > 1 and value[-1] == 1:
        value = value[:-1]
    return value


def divisors(n: int) -> list[int]:
    """Returns all divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


@cache
def micro_batches(samples: int, most: int | None = None) -> list[int]:
    """Returns the micro-batch sizes to try for a rank's `samples`, ascending and at most `most`.

    These are all divisors; with more than `FEW` samples those that are powers of two, and all samples at once.
    """
    powers = samples > FEW
    sizes = [d for d in divisors(samples) if d == samples or not (powers and d & (d - 1))]
    return [d for d in sizes if most is None or d <= most]


def decoder_layouts(
    shape: Shape, world: int, global_batch: int, seq: int, node: int, constraints: Constraints
) -> Iterator[Layout]:
    """Yields the layouts of a decoder over `world` devices, `node` of them in a node. `global_batch`: samples."""
    for tp in _limit(divisors(world), constraints.limit("tp", 2 * node), constraints.value("tp")):
        uneven = any(wide % tp for wide in (shape.heads, shape.ffn, shape.dense_ffn))
        # tp fits in a node or takes complete ones. Uneven heads and widths are listed only inside a node, with data
        # ranks alone, and with a kv head for each rank
        if (uneven and tp > shape.kv_heads) or (node % tp and (uneven or tp % node)):
            continue
        # every stage needs at least one layer
        for pp in _limit(
            divisors(world // tp), min(constraints.limit("pp", 64), shape.layers), constraints.value("pp")
        ):
            for cp, ulysses in _sequence(shape, seq, tp, world // tp // pp, node, constraints):
                dp = world // (tp * pp * cp * ulysses)
                # data ranks have equally many samples; uneven heads and widths run with data ranks alone
                if global_batch % dp or (uneven and pp * cp * ulysses > 1):
                    continue
                base = Layout(tp=tp, sp=tp > 1, cp=cp, ulysses=ulysses, pp=pp, seq=seq)
                yield from _data(shape, base, dp, global_batch // dp, node, constraints)


def _sequence(
    shape: Shape, seq: int, tp: int, ranks: int, node: int, constraints: Constraints
) -> Iterator[tuple[int, int]]:  # fmt: skip
    """Yields pairs (cp, cp_ulysses) for `ranks` ranks: a ring, or heads inside a node; both only if asked for.

    Heads are dealt beyond a node if asked for, or if sequences are so long that attention outweighs the messages.
    """
    most, asked = constraints.limit("cp", MOST_CP), constraints.value("cp_ulysses")
    for cp in _limit(divisors(ranks), most, constraints.value("cp")):
        for ulysses in _limit(divisors(ranks // cp), most, asked):
            if cp > 1 and ulysses > 1 and asked is None:
                continue
            # a causal ring gives each rank one block from either end of the sequence, so it has 2 cp blocks
            over = cp * ulysses
            if seq % ((2 if cp > 1 else 1) * over) or (over > 1 and 2 * seq < over * CONTEXT_FROM):
                continue
            inside = ulysses * tp <= max(node, tp)
            dealt = ulysses == 1 or shape.heads % (tp * ulysses) == 0
            if dealt and (inside or asked is not None or seq >= over * FAR_FROM):
                yield cp, ulysses


def _limit(values: list[int], most: int, fixed: object | None) -> list[int]:
    """Returns the degrees of `values` to try: `fixed` alone if it is not None, else some of those up to `most`."""
    if fixed is not None:
        return [value for value in values if value == fixed]
    # from 8 on only powers of two, and multiples of three for nodes of six devices:
    # test_nodes_of_six_are_cut_by_six_and_part_of_them_is_what_there_is
    return [value for value in values if value <= most and (value & (value - 1) == 0 or value % 3 == 0 or value < 8)]


def _data(shape: Shape, base: Layout, dp: int, per_rank: int, node: int, constraints: Constraints) -> Iterator[Layout]:
    """Yields `base` with ZeRO, micro-batch, recompute, schedule and ep, on `dp` data ranks of `per_rank` samples."""
    for zero, shard in _sharding(base, dp, node, constraints):
        for micro in micro_batches(per_rank, max(64, MOST_TOKENS // base.seq)):
            for recompute in RECOMPUTES:
                for schedule, chunks in _schedules(shape, base.pp, per_rank // micro, recompute, constraints):
                    for ep in _experts(shape, base, shard, node, constraints):
                        yield base.with_(
                            zero=zero, shard=shard, replicas=dp // shard, micro_batch=micro, n_micro=per_rank // micro,
                            recompute=recompute, schedule=schedule, chunks=chunks, ep=ep,
                        )  # fmt: skip


def _experts(shape: Shape, base: Layout, shard: int, node: int, constraints: Constraints) -> list[int]:
    """Returns degrees of ep that divide experts and dp_shard, in a node or over complete nodes; [1] with tp or cp."""
    if not shape.experts or base.tp * base.split_sequence > 1:
        return [1]
    asked = constraints.value("ep")
    return [
        d for d in divisors(shard)
        if shape.experts % d == 0 and (d <= node or d == asked or (d <= NODES_OF_EXPERTS * node and d % node == 0))
    ]  # fmt: skip


def _sharding(base: Layout, dp: int, node: int, constraints: Constraints) -> Iterator[tuple[int, int]]:
    """Yields pairs (zero, dp_shard) for `dp` data ranks."""
    asked = constraints.value("zero")
    if constraints.moves_weights:  # only units of zero=3 can be offloaded, even on a single rank
        yield from ((stage.number, dp) for stage in SHARDED if stage.weights and base.pp == 1)
        return
    yield 0, 1
    # a single rank holds these weights, so nothing can be sharded
    if dp * base.split_sequence == 1:
        return
    # with a pipeline, stages that communicate for every micro-batch only if asked for
    for stage in SHARDED:
        if not stage.gradients or base.pp == 1 or asked is not None:
            yield stage.number, dp
    inside = max((d for d in divisors(dp) if d * base.tp * base.split_sequence <= node), default=1)
    # hybrid sharding: weights are gathered within a node, gradients are summed over replicas across nodes
    if inside < dp and inside * base.split_sequence > 1 and base.pp == 1:
        yield from ((stage.number, inside) for stage in SHARDED if stage.weights)


def _stages(constraints: Constraints) -> list[int]:
    """Returns the ZeRO stages that are tried for a sharded module."""
    return [stage.number for stage in SHARDED if stage.searched or constraints.value("zero") is not None]


def _schedules(
    shape: Shape, pp: int, n_micro: int, recompute: str, constraints: Constraints
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Yields (schedule, stages on each rank) that a pipeline of `pp` ranks can run with `n_micro` micro-batches."""
    if pp == 1:
        yield "1f1b", 1
        return
    asked = constraints.value("stages_per_rank")
    for name, kind in KINDS.items():
        # a recomputed block would run twice in a split backward; some schedules are tried only if asked for
        if (kind.split and recompute != "none") or not (kind.searched or name == constraints.value("schedule")):
            continue
        several = CHUNKS if kind.placed == "around" else (kind.stages_per_rank,)
        for chunks in several if asked is None else (int(str(asked)),):
            if shape.layers >= pp * chunks and kind.misfit(pp, n_micro, chunks) is None:
                yield name, chunks


def plan_of(layout: Layout, precision: str) -> Plan:
    """Returns the plan of a layout in a precision."""
    values: dict[str, object] = {
        **{name: getattr(layout, name) for name in (*SEARCHED, *SWITCHES)},
        **layout.along, "dp_shard": layout.shard, "dp_replicate": layout.replicas,
        "remat": layout.recompute, "precision": precision,
    }  # fmt: skip
    if layout.pp > 1:
        values |= {"schedule": layout.schedule, "microbatches": layout.n_micro, "accumulate": layout.rounds}
        if layout.chunks > 1:
            values["stages_per_rank"] = layout.chunks
    else:
        # without a pipeline, micro-batches are gradient accumulation
        values["accumulate"] = layout.n_micro
    return Plan.from_dict(values)


def family(layout: Layout) -> str:
    """Returns the name of a layout's kind, by its axes and its ZeRO stage, such as "ZeRO-1 + tp + pp"."""
    parts = []
    if layout.dp > 1 or layout.sharded.state:
        parts.append(layout.sharded.name + (" hybrid" if layout.sharded.state and layout.replicas > 1 else ""))
    if layout.tiles > 1:
        parts.append("domain")
    for name in ("tp", "ulysses", "cp", "ep", "pp"):
        if getattr(layout, name) > 1:
            parts.append(name)
    parts += [name for name, _ in layout.others]
    if layout.offload != "none":
        parts.append(f"offload {layout.offload}")
    return " + ".join(parts) or "one device"


def axes(layout: Layout) -> int:
    """Returns a number that orders layouts by complexity: 10 for each axis in use, plus its techniques."""
    count = sum(getattr(layout, name) > 1 for name in ("tp", "cp", "ulysses", "ep", "pp", "replicas")) + (
        layout.shard > 1
    )
    count += sum(tiles > 1 for tiles in layout.domain)
    return 10 * count + layout.zero + (layout.recompute != "none") + (layout.schedule != "1f1b") + (layout.chunks > 1)


# --- of a task of one's own, which is traced


def data_layouts(
    world: int, batch: int, node: int, recomputes: list[str], *, moves: bool = False
) -> Iterator[Layout]:  # fmt: skip
    """Yields layouts with data ranks alone: replicas, ZeRO 1 to 3 over all ranks, ZeRO-3 inside a node.

    moves  whether weights are offloaded, which only ZeRO-3 allows, even on one rank

    A batch that does not divide over all ranks is dealt unevenly, as in a run. Layouts with fewer ranks are listed too:
    the most ranks over which it divides, in one node or in complete ones, and the largest part of all that does.
    """
    whole = [d for d in divisors(batch) if d <= world and (d <= node or d % node == 0)]
    part = max(d for d in divisors(batch) if world % d == 0)
    for dp in dict.fromkeys([part, whole[-1], *([world] if batch >= world else [])]):
        # hybrid sharding: shards inside a node, replicas across nodes
        inside = max((d for d in divisors(dp) if d <= node), default=1)
        shardings = {(0, 1), *((stage.number, dp) for stage in SHARDED if dp > 1)}
        shardings |= {(stage.number, inside) for stage in SHARDED if stage.weights and 1 < inside < dp}
        if moves:
            shardings = {(stage.number, dp) for stage in SHARDED if stage.weights}
        for zero, shard in sorted(shardings):
            for micro, n_micro in _dealt_over(batch, dp):
                for recompute in recomputes:
                    yield Layout(
                        shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro, n_micro=n_micro, seq=1,
                        recompute=recompute,
                    )  # fmt: skip


def _dealt_over(batch: int, dp: int) -> list[tuple[int, int]]:
    """Returns pairs (samples of the largest micro-batch, number of micro-batches) for a rank of `dp` data ranks."""
    # even: every rank has the same micro-batches
    if batch % dp == 0:
        return [(micro, batch // dp // micro) for micro in micro_batches(batch // dp)]
    splits = []
    most = -(-batch // dp)
    powers = [2**place for place in range(most.bit_length())]
    for micro in sorted({*powers, *([3] if most >= 3 else []), most}):
        n_micro = -(-batch // (dp * micro))
        fits = -(-batch // (dp * n_micro)) == micro  # else as many smaller ones are enough
        # every rank has a sample of every micro-batch
        if fits and batch // n_micro >= dp:
            splits.append((micro, n_micro))
    return splits


def cut_layouts(
    world: int, batch: int, node: int, recomputes: list[str], constraints: Constraints
) -> Iterator[Layout]:  # fmt: skip
    """Yields layouts with tp (inside a node), pp, or both, and replicas, ZeRO-1 or 3 (ZeRO-2 if asked for).

    Small degrees come first. Stages are at most `MOST_STAGES`, since every rank that differs is rehearsed.
    """
    tps = [d for d in divisors(world) if 1 < d <= min(node, constraints.limit("tp", MOST_SHARES))]
    pps = [d for d in divisors(world) if 1 < d <= constraints.limit("pp", MOST_STAGES)]
    degrees = [
        (tp, sp, pp)
        for tp in (1, *tps)
        for sp in ((False, True) if tp > 1 else (False,))
        for pp in (1, *pps)
        if tp * pp > 1
    ]
    # small degrees and single axes first: from their times `bound.Slower` prunes larger and combined ones
    for tp, sp, pp in sorted(degrees, key=lambda d: (d[0] > 1 and d[2] > 1, d[0] * d[2], d[1], d)):
        dp, left_over = divmod(world, tp * pp)
        if (
            left_over
            or batch % dp
            or not all(constraints.value(name) in (None, have) for name, have in (("tp", tp), ("pp", pp), ("sp", sp)))
        ):
            continue
        for micro in micro_batches(batch // dp):
            n_micro = batch // dp // micro
            if n_micro < 2 * pp * (pp > 1):  # fewer would leave half of the pipeline waiting
                continue
            for zero, shard in [(0, 1), *((zero, dp) for zero in _stages(constraints) if dp > 1)]:
                for recompute in recomputes:
                    yield Layout(
                        tp=tp, sp=sp, pp=pp, shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro,
                        n_micro=n_micro, seq=1, recompute=recompute,
                    )  # fmt: skip


def tile_layouts(world: int, sizes: tuple[int, ...], constraints: Constraints) -> Iterator[Layout]:
    """Yields layouts that cut fields into tiles (`domain`), with few tiles first; all other degrees are 1.

    sizes  size of the field along each dim of space
    """
    asked = constraints.value("domain")
    for grid in [_grid(asked)] if isinstance(asked, tuple) else tile_grids(world, sizes):
        yield Layout(domain=grid, seq=1)


def sequence_layouts(world: int, node: int, constraints: Constraints) -> Iterator[Layout]:
    """Yields layouts that cut sequences: a ring, heads inside a node, both if asked for; small degrees first."""
    most = constraints.limit("cp", MOST_SHARES)
    rings, heads = (constraints.value(name) for name in ("cp", "cp_ulysses"))
    asked = {name: int(str(constraints.value(name) or 1)) for name in ALONG if name not in ("cp", "cp_ulysses")}
    others = tuple((name, degree) for name, degree in asked.items() if degree > 1)
    for degree in divisors(world):
        for cp in divisors(degree):
            ulysses = degree // cp
            # both at once would multiply the layouts
            both = cp > 1 and ulysses > 1
            if rings not in (None, cp) or heads not in (None, ulysses) or (both and (rings is None or heads is None)):
                continue
            # an all-to-all is fast inside a node alone
            if (cp <= most or rings is not None) and (ulysses <= min(most, node) or heads is not None):
                yield Layout(cp=cp, ulysses=ulysses, others=others, seq=1)


def spread_layouts(
    bases: Iterable[Layout], world: int, batch: int, recomputes: list[str], constraints: Constraints
) -> Iterator[Layout]:  # fmt: skip
    """Yields each of `bases` (which cut positions) with replicas, ZeRO-1 or 3 (ZeRO-2 if asked) on the other ranks.

    Data ranks are as many as the batch divides over. zero shards over the ranks that cut positions too.
    """
    for base in bases:
        ranks, left_over = divmod(world, base.cut_positions)
        if left_over or base.cut_positions == 1:
            continue
        # ranks over which the batch does not divide stay idle
        dp = max(d for d in divisors(ranks) if batch % d == 0)
        for micro in micro_batches(batch // dp):
            for zero, shard in [(0, 1), *((zero, dp) for zero in _stages(constraints))]:
                for recompute in recomputes:
                    yield base.with_(
                        shard=shard, replicas=dp // shard, zero=zero, micro_batch=micro, n_micro=batch // dp // micro,
                        recompute=recompute,
                    )  # fmt: skip


def tile_grids(world: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns grids (tiles along each dim), fewest tiles first, with the shortest borders for each number."""
    chosen: list[tuple[int, ...]] = []
    for tiles in divisors(world):
        if 1 < tiles <= MOST_TILES:
            every = product(*(divisors(tiles) for _ in sizes))
            # a grid of more tiles than cells along a dim has empty ones
            grids = [g for g in every if math.prod(g) == tiles and all(n <= s for n, s in zip(g, sizes, strict=True))]
            chosen += sorted(grids, key=lambda grid: _border(grid, sizes))[:GRIDS]
    return [_grid(grid) for grid in chosen]


def _border(grid: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Returns the number of cells along the borders that an inner tile shares with its neighbours."""
    tile = [size / n for n, size in zip(grid, sizes, strict=True)]
    return sum(min(2, n - 1) * math.prod(tile) / side for n, side in zip(grid, tile, strict=True))


def _grid(written: tuple[int, ...]) -> tuple[int, ...]:
    grid = _written(written)
    assert isinstance(grid, tuple)
    return grid


def expert_layouts(layouts: Iterable[Layout], node: int, constraints: Constraints) -> Iterator[Layout]:
    """Yields `layouts` with each degree of ep that divides the ranks that shard, in a node, up to `MOST_SHARES`."""
    asked = constraints.value("ep")
    for layout in layouts:
        for degree in divisors(layout.shard_ranks):
            if 1 < degree <= min(node, MOST_SHARES) and asked in (None, degree):
                yield layout.with_(ep=degree)
