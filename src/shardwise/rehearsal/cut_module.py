"""Rehearse one rank of a module that is cut. `Cuts`: plan keys, a new one too (rehearsals of whole modules read it).

The cuts are those of a run (`engine/tensor_cuts`, `engine/cutting`, `engine/find_positions`). A rank's share of the
weights is put into the module, and its row of the schedule is played: nothing is sent, what would arrive is made up in
the right shapes. So products, bytes moved, messages, and the peak of live bytes are those of that very rank.

    tp   weights are shares, activations parts; collectives are noted with their sizes
    domain  fields of the batch are this rank's tile; what it fetches of others is noted and made up
    cp, cp_ulysses  sequences are this rank's positions, in the batch or where they are born inside the module
    ep   experts of this rank alone, on as many rows as it would send: every rank is taken to send alike
    pp   F0 F1 B0 F2 B1 ...   a stage's forward and backward, its activations held as long as the schedule holds them

*What this does not do*: follow a module that looks at values while it runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from shardwise.comm import Axis, Ledger
from shardwise.costs.layout import SAME_KEYS, Layout
from shardwise.engine.cutting import cut_forward
from shardwise.engine.experts import look_for_experts, names_of, row_wise_experts, rows_alone
from shardwise.engine.find_positions import find_positions
from shardwise.engine.refused_modules import make_gradients_dense
from shardwise.engine.tensor_cuts import derive_cuts
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE, inner_axes
from shardwise.layout.offload import of_class, weights_on_host
from shardwise.layout.schedule_kinds import Op, in_flight
from shardwise.layout.schedules import Schedule, make_schedule
from shardwise.layout.zero_stages import STAGES, ZeroStage
from shardwise.look.samples import SAMPLES, a_few, few_samples
from shardwise.mesh import overlap_from
from shardwise.parallel.expert import holds_experts
from shardwise.parallel.expert.expert_forward import Stack
from shardwise.parallel.pipeline.boundaries import StagePlacement
from shardwise.parallel.pipeline.stage_messages import TensorSpec
from shardwise.parallel.tensor import Derived, Followed
from shardwise.part.pairs import hold_pairs
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.rehearsal.step_trace import batch_bytes, repeated
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.trace.blocks import blocks_of
from shardwise.trace.deferred import Built
from shardwise.trace.deferred import build as build_deferred

ROUNDS = 2  # of micro-batches through the pipeline, after which no rank holds more than before
LARGE_BYTES = 16 * 2**20  # of a sample, from which a few more are not worth reading

Place = tuple[int, ...]  # along each axis that cuts positions, of `inner_axes`
# a data rank's place among those that fill whole groups of ep; of each micro-batch, the samples of each of these
Beside = tuple[int, tuple[tuple[int, ...], ...]]
ALIKE: Beside = (0, ())  # all have as many
MessageSpec = list[TensorSpec]  # of the tensors of a message


def axes_at(plan: Plan, place: Place = (), ledger: Ledger | None = None, gloo: bool = False) -> tuple[Axis, ...]:
    """Returns the axes that cut positions, outermost first, of the rank at `place` (by default the first).

    ledger  what their collectives are counted in; `gloo`: whether ranks are CPUs, whose messages are copied
    """
    places = dict(enumerate(place))
    axes = [
        Axis(name, size, places.get(number, 0), None, tuple(range(size)), rehearsal=ledger, copies=gloo)
        for number, (name, size) in enumerate(inner_axes(plan.domain, **plan.along))
    ]
    least, depth = overlap_from(plan, gloo), plan.domain_depth
    axes = [replace(axis, overlap_from=least, halo_depth=depth) if axis.name in SPACE else axis for axis in axes]
    return tuple(axis for axis in axes if axis.size > 1)


def alone(microbatches: int) -> Schedule:
    """Returns the schedule of one rank without a pipeline: F0 B0 F1 B1 and so on."""
    ops = [Op(kind, 0, index) for index in range(microbatches) for kind in "FB"]
    return Schedule("alone", microbatches, (0,), (tuple(ops),))


@dataclass(frozen=True)
class Cuts:
    """The parts of a layout that cut the module itself, or make tensors while its micro-batches run.

    zero    3, or 2 (on a GPU beside a pipeline or experts alone), over `shard` data ranks and the tiles, whose tensors
            are played too; else 0, and the gradients are an account of their own
    rounds  times that the pipeline is filled and emptied: twice where the first leaves gradients behind
    joined  data ranks over which batch norms take their statistics: 0 for the module's own, and 2 stands for many
    gloo    reductions work on copies, and messages are kept to the end of a step, all of which is played
    fused   attention and dropout as a GPU has them
    follow  random numbers are one process's (randomness=global)
    along   (name, degree) of the axes that cut positions along one dim
    wrap    names the units of zero=3
    moved   what a plan's `offload` says of activations
    host    weights of units lie on the host, and so do their gradients once they are reduced
    gradients  as a plan says
    """

    tp: int = 1
    sp: bool = False
    tp_whole: tuple[str, ...] = ()
    pp: int = 1
    schedule: str = "none"
    microbatches: int = 1
    stages: tuple[str, ...] = ()
    stages_per_rank: int = -1
    recompute: str = "none"
    precision: str = "fp32"
    zero: int = 0
    shard: int = 1
    rounds: int = 1
    gloo: bool = False
    fused: bool = False
    follow: bool = False
    ep: int = 1
    joined: int = 0
    reduce_dtype: str = "auto"
    domain: tuple[int, ...] = (1,)
    domain_overlap: str = "auto"
    domain_depth: int = 1
    along: tuple[tuple[str, int], ...] = ()
    position_chunks: int = 1
    wrap: tuple[str, ...] = ()
    moved: str = "none"
    host: bool = False
    gradients: str = "together"

    @classmethod
    def of(cls, layout: Layout, precision: str, *, gloo: bool = False) -> Cuts:
        """Returns the cuts of a layout; a long step is played for a few rounds of micro-batches."""
        # shards are played where they come and go within micro-batches; else gradients are an account of their own
        played = layout.sharded.weights or (layout.sharded.gradients and (gloo or layout.pp * layout.ep > 1))
        count, rounds = (min(layout.n_micro, ROUNDS) if played else 1), 1
        if layout.pp > 1:
            count, rounds = layout.n_micro, layout.rounds if gloo else min(layout.rounds, ROUNDS) if played else 1
            # played in full: a schedule that holds all micro-batches at once; gloo keeps messages to a step's end
            kept = in_flight(layout.schedule, layout.pp, layout.n_micro, layout.chunks, 0)
            if kept < layout.n_micro and not gloo:
                count = min(count, ROUNDS * layout.pp)
            # some schedules deal micro-batches in rounds of pp: fewer of them must still be whole rounds
            if layout.n_micro % layout.pp == 0:
                count -= count % layout.pp
        own = cls(
            **{name: getattr(layout, name) for name in AS_THEY_ARE}, microbatches=count, recompute=layout.recompute,
            precision=precision, rounds=rounds, gloo=gloo, along=tuple(layout.along.items()),
            moved=of_class(layout.offload, "activations"), host=weights_on_host(layout.offload),
        )  # fmt: skip
        if layout.pp > 1:
            per_rank = layout.chunks if layout.chunks > 1 else -1
            own = replace(
                own, pp=layout.pp, schedule=layout.schedule, stages=layout.stages, stages_per_rank=per_rank
            )  # fmt: skip
        return replace(own, zero=layout.zero, shard=layout.shard, wrap=layout.wrap) if played else own

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """Returns (name, degree) of each axis that cuts positions, outermost first."""
        return inner_axes(self.domain, **dict(self.along))

    @property
    def cut_positions(self) -> int:
        """Returns over how many ranks positions are cut, of a sequence or of space."""
        return math.prod(size for _, size in self.inner)

    @property
    def shard_ranks(self) -> int:
        """Returns over how many ranks `zero` shards."""
        return self.shard * self.cut_positions

    @property
    def sharded(self) -> ZeroStage:
        """Returns what ranks hold as shards, as far as that is played."""
        return STAGES[self.zero]

    @property
    def differ(self) -> bool:
        """Whether a rank does or holds something else than a trace of the whole module shows."""
        return self.tp * self.pp * self.ep * self.cut_positions * self.position_chunks > 1 or self.sharded.state

    @property
    def plan(self) -> Plan:
        """Returns the plan whose cuts these are."""
        values: dict[str, object] = {
            **{name: getattr(self, name) for name in AS_THEY_ARE},
            **dict(self.along), "remat": self.recompute, "precision": self.precision,
        }  # fmt: skip
        if self.pp > 1:
            values |= {"pp": self.pp, "schedule": self.schedule, "microbatches": self.microbatches,
                       "stages": self.stages, "stages_per_rank": self.stages_per_rank}  # fmt: skip
        # ep is dealt over data ranks and positions: as many data ranks as it needs beside the positions
        if self.shard_ranks * self.ep > 1:
            least = self.ep // math.gcd(self.ep, self.cut_positions)
            values |= {"dp_shard": max(self.shard, least), "zero": self.zero, "wrap": self.wrap}
        if self.host:
            values |= {"offload": "parameters", "zero": self.zero, "wrap": self.wrap}
        return Plan.from_dict(values)


# keys of layouts and plans that are taken whatever is played; pipelines, and what zero shards, where they are
_SOMETIMES = {"pp", "stages", "zero", "wrap"}
AS_THEY_ARE = tuple(field.name for field in fields(Cuts) if field.name in SAME_KEYS and field.name not in _SOMETIMES)


class TaskAnalysis:
    """What the cuts of a task are derived from, computed once: a module without weights, a few samples, cuts of tp.

    sample  a batch of one sample
    """

    def __init__(self, task: Task, sample: Any):
        self.task, self.sample = task, sample
        self._derived: dict[tuple, Derived | ShardwiseError] = {}  # by the plan's keys that matter; refusals too
        self._followed: dict[str, Followed] = {}  # by precision
        self._stacks: dict[tuple, list[Stack] | ShardwiseError] = {}
        self._positions: dict[tuple, Positions | ShardwiseError] = {}
        self._row_wise: dict[tuple, list[Stack] | ShardwiseError] = {}
        self.enclosed: dict[tuple[str, ...], set[str]] = {}  # by wrap: those that are no units (`FakeFullShard`)

    @cached_property
    def built(self) -> Built:
        """Returns the task's module without values, built once."""
        built = build_deferred(self.task.model, 0)
        make_gradients_dense(built.module)
        built.pairs = hold_pairs(built.module)
        return built

    @cached_property
    def few(self) -> Any:
        """Returns the few samples from which cuts are derived; a large one is repeated: its shape alone counts."""
        if self.task.data is not None and self.task.batch is None and batch_bytes(self.sample) > LARGE_BYTES:
            return repeated(self.sample, min(SAMPLES, len(self.task.data)))
        return few_samples(self.task, Plan(), Axis.alone("data"), torch.device("cpu"))

    def derived(self, plan: Plan) -> Derived | None:
        """Returns the cuts of tp, None without tp; `RefusedPlan` as in a run."""
        if plan.tp == 1:
            return None
        dealt = names_of(self.stacks(plan))
        key = plan.tp, plan.sp, plan.tp_whole, plan.precision, dealt
        return once(self._derived, key, lambda: derive_cuts(
            self.task, plan, Precision.of(plan), self.built, a_few(self.few),
            self._followed.setdefault(plan.precision, {}), dealt,
        ))  # fmt: skip

    def positions(self, plan: Plan) -> Positions | None:
        """Returns which dims of the batch are cut into tiles or shares; None without; `RefusedPlan` as in a run."""
        if plan.cut_positions == 1:
            return None
        dealt = {"dp_shard": plan.dp_shard, "ep": plan.ep} if plan.ep > 1 else {}
        # what the answer depends on alone, so that plans that differ elsewhere share it
        plan = Plan.from_dict({
            "domain": plan.domain, **plan.along, "tp": plan.tp, "sp": plan.sp, "tp_whole": plan.tp_whole,
            "precision": plan.precision, **dealt,
        })  # fmt: skip
        derived, inner = self.derived(plan), axes_at(plan)
        return once(self._positions, (plan,), lambda: find_positions(
            self.task, plan, inner, Precision.of(plan), self.built, a_few(self.few), derived, self.row_wise(plan)
        ))  # fmt: skip

    def row_wise(self, plan: Plan) -> list[Stack]:
        """Returns the modules of experts that get a rank's own rows where positions are cut: under ep, all of them."""
        if plan.ep > 1:
            return rows_alone(self.stacks(plan))
        precision = Precision.of(plan)
        key = (precision,)
        return once(self._row_wise, key, lambda: row_wise_experts(self.task, precision, self.built, a_few(self.few)))

    @cached_property
    def holds_experts(self) -> bool:
        """Whether there are modules that are called as experts are."""
        precision = Precision.of(Plan())
        return holds_experts(self.built, a_few(self.few), run_alone(self.task, precision), precision.dtype_of)

    def stacks(self, plan: Plan) -> list[Stack]:
        """Returns the modules whose experts ep deals; [] without ep, `RefusedPlan` as in a run."""
        if plan.ep == 1:
            return []
        return once(self._stacks, (plan.ep, plan.precision), lambda: look_for_experts(
            self.task, plan, Precision.of(plan), self.built, a_few(self.few)
        ))  # fmt: skip


def once(cache: dict[Any, Any], key: tuple, make: Callable[[], Any]) -> Any:
    """Returns `make()` for a key, or raises its refusal; each is computed once."""
    if key not in cache:
        try:
            cache[key] = make()
        except ShardwiseError as refused:
            cache[key] = refused
    if isinstance(result := cache[key], ShardwiseError):
        # the refusal is raised anew each time: else it would collect the frames of every caller
        raise result.with_traceback(None)
    return result


class CutRehearsal:
    """A task under `cuts`: `ranks` lists the ranks that differ, `trace` rehearses one. Refusals are those of a run."""

    def __init__(self, looks: TaskAnalysis, cuts: Cuts):
        self.looks, self.task, self.cuts = looks, looks.task, cuts
        self.plan = cuts.plan
        self.schedule = alone(cuts.microbatches)
        if cuts.pp > 1:
            self.schedule = make_schedule(cuts.schedule, cuts.pp, cuts.microbatches, self.plan.stages_per_rank)
        self.derived = looks.derived(self.plan)
        self.stacks = looks.stacks(self.plan)
        self.positions = looks.positions(self.plan)
        self._first = self._cut() if cuts.pp > 1 else None
        # (place, rank of tp, samples) -> what each stage sends
        self.sent_by_stage: dict[tuple[Place, int, int], dict[int, MessageSpec]] = {}

    def _cut(self) -> StagePlacement:
        """Returns the forward's stages, as the pipeline's first rank sees them; `RefusedPlan` if it takes gradients."""
        built, precision = self.looks.built, Precision.of(self.plan)
        blocks = blocks_of(built.module, self.plan.wrap, nested=self.task.branches == "same")
        apart = [stack.path for stack in self.stacks]
        cut = cut_forward(self.task, self.plan, precision, self.looks.few, built, blocks, 0, apart)[0]
        if cut.takes_gradients:
            raise RefusedPlan(
                f"pp={self.plan.pp}: the forward takes gradients itself (torch.autograd.grad), which a forecast does "
                "not follow from stage to stage, though a run does"
            )
        return cut

    def cut(self, rank: int) -> StagePlacement | None:
        """Returns the stages, as rank `rank` of the pipeline sees them; None without a pipeline."""
        return None if self._first is None else replace(self._first, rank=rank)

    @property
    def alike(self) -> list[int]:
        """Returns, by rank of tp, the first rank that holds as much of every weight: with even cuts, 0 for all."""
        first: dict[tuple[int, ...], int] = {}
        cuts = self.derived.cuts.values() if self.derived is not None else ()
        counts_by_rank = [tuple(cut.owners.counts[rank] for cut in cuts) for rank in range(self.cuts.tp)]
        return [first.setdefault(counts, rank) for rank, counts in enumerate(counts_by_rank)]

    @property
    def places(self) -> list[Place]:
        """Returns places that stand for all shares: along each axis both ends, and one between."""
        return [*product(*(sorted({0, min(1, size - 1), size - 1}) for _, size in self.cuts.inner))]

    @property
    def telling_places(self) -> list[Place]:
        """Returns the places that hold the most: of tiles one with neighbours on most sides; of a sequence both ends.

        Under a causal mask the last positions read the most, unless a rank has positions from either end; the first
        rank has one more where the ranks do not divide them.
        """
        zigzag = self.positions is not None and self.positions.zigzag

        def along(name: str, size: int) -> list[int]:
            # without zigzag the last rank of a causal ring computes most, and the first may hold one position more
            if name == "cp" and not zigzag:
                return sorted({0, size - 1})
            # a tile inside has neighbours on both sides; elsewhere all ranks are alike
            return [1 if name in SPACE and size > 2 else 0]

        return [*product(*(along(*axis) for axis in self.cuts.inner))]

    def ranks(self, places: Sequence[Place]) -> list[tuple[Place, int, int]]:
        """Returns (place, tp, pp) of the ranks that differ, at these places along the axes that cut positions."""
        return [
            (place, tp, pp) for place in places for pp in range(self.cuts.pp) for tp in dict.fromkeys(self.alike)
        ]  # fmt: skip


Kind = tuple[str, int, int]  # F, B, I or W; stage; samples of the micro-batch


@dataclass(frozen=True)
class _State:
    """What a rank holds when an op begins.

    waiting  micro-batches between their forward and backward (F), or between the two parts of it (I)
    sent     the op whose message was the last: a rank keeps it until it sends the next
    """

    waiting: Counter[Kind]
    sent: Kind | None

    def covers(self, other: _State) -> bool:
        """Whether this state holds at least as much memory as the other.

        A micro-batch more, with its inputs and outputs, is more than any message.
        """
        if self.sent == other.sent:
            return other.waiting <= self.waiting
        message: Counter[Kind] = Counter() if other.sent is None else Counter({("F", *other.sent[1:]): 1})
        return other.waiting + message <= self.waiting


def telling(row: Sequence[Op], sizes: Sequence[int], stages: int) -> list[Op]:
    """Returns the row up to the last op that may hold more memory than ops of its kind before it, or is the first.

    sizes   samples of each micro-batch
    stages  of all ranks: the first sends no gradient, the last no output
    """
    waiting: Counter[Kind] = Counter()
    sent: Kind | None = None
    seen: dict[Kind, list[_State]] = {}
    last = 0
    for place, op in enumerate(row):
        kind = (op.kind, op.stage, sizes[op.microbatch])
        state = _State(waiting.copy(), sent)
        before = seen.setdefault(kind, [])
        # no op of its kind has begun with as much beside it: its peak may be a new one
        if not any(other.covers(state) for other in before):
            before.append(state)
            last = place + 1
        # a whole backward (B) or its first part (I) ends a forward's wait, and W that of its I
        if op.kind != "F":
            waiting["I" if op.kind == "W" else "F", op.stage, sizes[op.microbatch]] -= 1
        if op.kind in ("F", "I"):
            waiting[kind] += 1
        if (op.kind == "F" and op.stage < stages - 1) or (op.kind in ("B", "I") and op.stage > 0):
            sent = kind
    return list(row[:last])
