"""What a rehearsal of one rank of a sharded module needs: `Cuts`, `TaskAnalysis`, `CutRehearsal`; rank_row plays it.

A new key of plans that changes what a rank computes or holds needs a field in `Cuts`.

The cuts are those of a run (`engine/tensor_cuts`, `engine/cutting`, `engine/find_positions`). The module gets one
rank's shards of the weights and runs that rank's row of the pipeline schedule. Nothing is sent; a tensor that another
rank would send is made up in its shape. So matrix products, bytes moved, messages and peak live bytes are that rank's.

    tp   weights and activations are this rank's shards; collectives are noted with their sizes
    domain  fields of the batch are this rank's tile; halos that it would fetch from other ranks are noted and made up
    cp, cp_ulysses  sequences are this rank's positions, in the batch or where they are made inside the module
    ep   this rank's experts alone, on as many tokens as this rank would send (all ranks are assumed to send as many)
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

ROUNDS = 2  # rounds of micro-batches through the pipeline, after which no rank holds more than before
LARGE_BYTES = 16 * 2**20  # a sample of more bytes is repeated, since reading a few more of them would take too long

Place = tuple[int, ...]  # a rank's index on each axis that cuts positions, in the order of `inner_axes`
# (this data rank's index among the data ranks of its ep groups, for each micro-batch the samples of each of these)
Beside = tuple[int, tuple[tuple[int, ...], ...]]
ALIKE: Beside = (0, ())  # all data ranks have as many samples
MessageSpec = list[TensorSpec]  # one entry for each tensor of a message from stage to stage


def axes_at(plan: Plan, place: Place = (), ledger: Ledger | None = None, gloo: bool = False) -> tuple[Axis, ...]:
    """Returns the axes of degree above 1 that cut positions, outermost first, as the rank at `place` has them.

    place   the rank's index on each axis; 0 on those that it leaves out
    ledger  counts the collectives of these axes
    gloo    whether ranks are CPUs, whose messages are copied
    """
    places = dict(enumerate(place))
    axes = [
        Axis(name, size, places.get(number, 0), None, tuple(range(size)), rehearsal=ledger, copies=gloo)
        for number, (name, size) in enumerate(inner_axes(plan.domain, **plan.along))
    ]
    # only axes of tiles exchange halos, which may overlap and serve several convolutions
    least, depth = overlap_from(plan, gloo), plan.domain_depth
    axes = [replace(axis, overlap_from=least, halo_depth=depth) if axis.name in SPACE else axis for axis in axes]
    return tuple(axis for axis in axes if axis.size > 1)


def alone(microbatches: int) -> Schedule:
    """Returns the schedule of one rank without a pipeline: F0 B0 F1 B1 and so on."""
    ops = [Op(kind, 0, index) for index in range(microbatches) for kind in "FB"]
    return Schedule("alone", microbatches, (0,), (tuple(ops),))


@dataclass(frozen=True)
class Cuts:
    """The part of a plan that changes what a rank computes, or which tensors it makes while its micro-batches run.

    Fields that are not listed have the name and meaning of a plan's key (`recompute`: its `remat`).

    microbatches  micro-batches that the rehearsal runs in one round, which may be fewer than the plan's
    zero    ZeRO stage whose gathers and reductions run in the rehearsal, over `shard` data ranks and the ranks that cut
            positions: 3, or 2 (on a GPU only with a pipeline or experts); else 0: the forecast adds gradients itself
    rounds  times that the pipeline is filled and emptied: twice if the first round leaves gradients behind
    joined  data ranks over which batch norms take their statistics: 0 if each rank takes its own, 2 for any more than 1
    gloo    whether ranks are CPUs: reductions work on copies, messages are kept to a step's end, a whole step is played
    fused   whether attention and dropout use the kernels of a GPU
    follow  whether random numbers are those of one process (randomness=global)
    along   (name, degree) of each axis that cuts positions along one dim
    wrap    names of the units of zero=3
    moved   what a plan's `offload` says of activations
    host    whether weights of units lie on the host, and their gradients too once they are reduced
    gradients  "together" or "as_made", as a plan says
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
        """Returns the cuts of a layout, with fewer micro-batches than its step has where fewer show the same peak.

        precision  as in a plan; `gloo`: whether ranks are CPUs
        """
        # gathers and reductions run only if they make tensors within micro-batches; else the forecast adds gradients
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
        """Returns the number of ranks that share a sample's positions, of a sequence or of space."""
        return math.prod(size for _, size in self.inner)

    @property
    def shard_ranks(self) -> int:
        """Returns the number of ranks over which `zero` shards."""
        return self.shard * self.cut_positions

    @property
    def sharded(self) -> ZeroStage:
        """Returns the `ZeroStage` of `zero`, which says what ranks hold as shards in the rehearsal."""
        return STAGES[self.zero]

    @property
    def differ(self) -> bool:
        """Whether a rank computes or holds something that a trace of the unsharded module does not show."""
        return self.tp * self.pp * self.ep * self.cut_positions * self.position_chunks > 1 or self.sharded.state

    @property
    def plan(self) -> Plan:
        """Returns a plan with these cuts."""
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


# keys that `Cuts.of` copies from a layout in every case; those in _SOMETIMES only with pp, or if zero is rehearsed
_SOMETIMES = {"pp", "stages", "zero", "wrap"}
AS_THEY_ARE = tuple(field.name for field in fields(Cuts) if field.name in SAME_KEYS and field.name not in _SOMETIMES)


class TaskAnalysis:
    """Derives the cuts of a task for any plan and caches them, from a module without weights and a few samples.

    sample  a batch of one sample
    """

    def __init__(self, task: Task, sample: Any):
        self.task, self.sample = task, sample
        self._derived: dict[tuple, Derived | ShardwiseError] = {}  # plan keys -> cuts of tp, or the refusal
        self._followed: dict[str, Followed] = {}  # precision -> labels of one forward
        self._stacks: dict[tuple, list[Stack] | ShardwiseError] = {}
        self._positions: dict[tuple, Positions | ShardwiseError] = {}
        self._row_wise: dict[tuple, list[Stack] | ShardwiseError] = {}
        self.enclosed: dict[tuple[str, ...], set[str]] = {}  # wrap -> blocks that are no units (`FakeFullShard`)

    @cached_property
    def built(self) -> Built:
        """Returns the task's module without values, built once."""
        built = build_deferred(self.task.model, 0)
        make_gradients_dense(built.module)
        built.pairs = hold_pairs(built.module)
        return built

    @cached_property
    def few(self) -> Any:
        """Returns a batch of the few samples from which cuts are derived; a sample of over LARGE_BYTES is repeated."""
        if self.task.data is not None and self.task.batch is None and batch_bytes(self.sample) > LARGE_BYTES:
            return repeated(self.sample, min(SAMPLES, len(self.task.data)))
        return few_samples(self.task, Plan(), Axis.alone("data"), torch.device("cpu"))

    def derived(self, plan: Plan) -> Derived | None:
        """Returns the cuts of tp, or None if tp=1; raises `RefusedPlan` as a run does."""
        if plan.tp == 1:
            return None
        dealt = names_of(self.stacks(plan))
        key = plan.tp, plan.sp, plan.tp_whole, plan.precision, dealt
        return once(self._derived, key, lambda: derive_cuts(
            self.task, plan, Precision.of(plan), self.built, a_few(self.few),
            self._followed.setdefault(plan.precision, {}), dealt,
        ))  # fmt: skip

    def positions(self, plan: Plan) -> Positions | None:
        """Returns which dims of the batch are cut over positions, or None if none is; raises `RefusedPlan`."""
        if plan.cut_positions == 1:
            return None
        dealt = {"dp_shard": plan.dp_shard, "ep": plan.ep} if plan.ep > 1 else {}
        # only the keys on which the answer depends, so that plans which differ in other keys share the cached answer
        plan = Plan.from_dict({
            "domain": plan.domain, **plan.along, "tp": plan.tp, "sp": plan.sp, "tp_whole": plan.tp_whole,
            "precision": plan.precision, **dealt,
        })  # fmt: skip
        derived, inner = self.derived(plan), axes_at(plan)
        return once(self._positions, (plan,), lambda: find_positions(
            self.task, plan, inner, Precision.of(plan), self.built, a_few(self.few), derived, self.row_wise(plan)
        ))  # fmt: skip

    def row_wise(self, plan: Plan) -> list[Stack]:
        """Returns the expert modules that may compute on a rank's own positions alone; with ep, of those it deals."""
        if plan.ep > 1:
            return rows_alone(self.stacks(plan))
        precision = Precision.of(plan)
        key = (precision,)
        return once(self._row_wise, key, lambda: row_wise_experts(self.task, precision, self.built, a_few(self.few)))

    @cached_property
    def holds_experts(self) -> bool:
        """Whether the task's module holds experts, found by how its modules are called."""
        precision = Precision.of(Plan())
        return holds_experts(self.built, a_few(self.few), run_alone(self.task, precision), precision.dtype_of)

    def stacks(self, plan: Plan) -> list[Stack]:
        """Returns the modules whose experts ep deals to ranks; [] if ep=1; raises `RefusedPlan` as a run does."""
        if plan.ep == 1:
            return []
        return once(self._stacks, (plan.ep, plan.precision), lambda: look_for_experts(
            self.task, plan, Precision.of(plan), self.built, a_few(self.few)
        ))  # fmt: skip


def once(cache: dict[Any, Any], key: tuple, make: Callable[[], Any]) -> Any:
    """Returns `cache[key]`, made by `make()` at the first call; a `ShardwiseError` of `make` is cached and raised."""
    if key not in cache:
        try:
            cache[key] = make()
        except ShardwiseError as refused:
            cache[key] = refused
    if isinstance(result := cache[key], ShardwiseError):
        # without its traceback, since the cached error would collect the frames of every caller
        raise result.with_traceback(None)
    return result


class CutRehearsal:
    """A task under `cuts`, ready to be rehearsed rank by rank (`ranks`, `trace_of`); raises `RefusedPlan` as a run.

    sent_by_stage  (place, rank of tp, samples) -> {stage: spec of the message that it sends}
    """

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
        self.sent_by_stage: dict[tuple[Place, int, int], dict[int, MessageSpec]] = {}

    def _cut(self) -> StagePlacement:
        """Returns the stages as pipeline rank 0 has them; raises `RefusedPlan` if the forward differentiates."""
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
        """Returns the stages as pipeline rank `rank` has them, or None if pp=1."""
        return None if self._first is None else replace(self._first, rank=rank)

    @property
    def alike(self) -> list[int]:
        """Returns for each rank of tp the first rank with equally large weight shards: 0 if cuts are even."""
        first: dict[tuple[int, ...], int] = {}
        cuts = self.derived.cuts.values() if self.derived is not None else ()
        counts_by_rank = [tuple(cut.owners.counts[rank] for cut in cuts) for rank in range(self.cuts.tp)]
        return [first.setdefault(counts, rank) for rank, counts in enumerate(counts_by_rank)]

    @property
    def places(self) -> list[Place]:
        """Returns the places at which ranks may differ: on each axis the first, the second and the last index."""
        return [*product(*(sorted({0, min(1, size - 1), size - 1}) for _, size in self.cuts.inner))]

    @property
    def telling_places(self) -> list[Place]:
        """Returns the places that compute or hold the most.

        For tiles that is one with neighbours on most sides. For a sequence it is the first and the last rank of cp.
        Under a causal mask the last positions attend to the most keys, unless each rank has a block from either end
        (zigzag). The first rank has one position more if the ranks do not divide their number.
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
        """Returns (place, rank of tp, rank of pp) of each rank that differs from the others, at these places."""
        return [
            (place, tp, pp) for place in places for pp in range(self.cuts.pp) for tp in dict.fromkeys(self.alike)
        ]  # fmt: skip


Kind = tuple[str, int, int]  # (op: "F", "B", "I" or "W", stage, samples of the micro-batch)


@dataclass(frozen=True)
class _State:
    """What a rank holds when an op begins.

    waiting  numbers of micro-batches that wait for their backward, under their F; or for its part W, under their I
    sent     the op that sent the last message, which the rank holds until it sends the next; None if none was sent
    """

    waiting: Counter[Kind]
    sent: Kind | None

    def covers(self, other: _State) -> bool:
        """Whether this state holds at least as much memory as the other.

        One more waiting micro-batch, with its inputs and outputs, takes more memory than any message.
        """
        if self.sent == other.sent:
            return other.waiting <= self.waiting
        message: Counter[Kind] = Counter() if other.sent is None else Counter({("F", *other.sent[1:]): 1})
        return other.waiting + message <= self.waiting


def telling(row: Sequence[Op], sizes: Sequence[int], stages: int) -> list[Op]:
    """Returns the row cut off after the last op at which live memory may still reach a new peak.

    Such an op is the first of its kind, or begins with more memory held than every op of its kind before it.

    sizes   samples of each micro-batch
    stages  number of stages of all ranks (the first stage sends no gradient, the last no output)
    """
    waiting: Counter[Kind] = Counter()
    sent: Kind | None = None
    seen: dict[Kind, list[_State]] = {}
    last = 0
    for place, op in enumerate(row):
        kind = (op.kind, op.stage, sizes[op.microbatch])
        state = _State(waiting.copy(), sent)
        before = seen.setdefault(kind, [])
        # no earlier op of this kind began with as much memory held, so this one may reach a new peak
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
