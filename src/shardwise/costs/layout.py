"""`Layout`: a plan's numbers that forecasts need (`SAME_KEYS`: taken by name). A new key: also rehearsal/cut_module."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.grid import inner_axes
from shardwise.layout.offload import placements
from shardwise.layout.zero_stages import STAGES, UNSHARDED, ZeroStage

RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """The degrees of a plan's axes, and the samples, micro-batches and rounds of a rank's step.

    micro_batch   samples of one micro-batch on one data rank
    n_micro       micro-batches of a step (accumulation, or those of the pipeline)
    rounds        times that the pipeline is filled and emptied in a step
    chunks        model chunks that a pipeline rank holds (virtual stages)
    zero          over `shard` ranks: of layout/zero_stages
    shard         dp_shard: data ranks that `zero` shards over; `replicas` of those groups
    domain        tiles along each dim of space
    others        (name, degree) of axes that cut positions along one dim and have no field here, of a traced module
    position_chunks  chunks of positions in which wide tensors are computed; of a traced module alone
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    ulysses: int = 1
    pp: int = 1
    chunks: int = 1
    ep: int = 1
    shard: int = 1
    replicas: int = 1
    zero: int = 0
    micro_batch: int = 1
    n_micro: int = 1
    rounds: int = 1
    seq: int = 2048
    recompute: str = "none"
    position_chunks: int = 1
    schedule: str = "1f1b"
    # blocks compiled; halos beside computing; sums of tp begun early; the dtype in which gradients are summed
    compile: bool = False
    domain_overlap: str = "auto"
    domain_depth: int = 1
    tp_overlap: bool = False
    reduce_dtype: str = "auto"
    offload: str = "none"  # what lies outside of the device between steps, as a plan says
    optimizer_state: str = "full"  # how it rests, and masters, as a plan says
    masters: str = "full"
    gradients: str = "together"  # when the optimizer uses them, as a plan says
    # layers of each stage where they are not even, first stage first
    stage_layers: tuple[int, ...] = ()
    # of a plan for a module: what tp leaves whole, and where the stages begin
    tp_whole: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    domain: tuple[int, ...] = (1,)
    others: tuple[tuple[str, int], ...] = ()
    wrap: tuple[str, ...] = ()  # units of zero=3 by name

    def __post_init__(self) -> None:
        for field in ("tp", "cp", "ulysses", "pp", "chunks", "ep", "shard", "replicas", "micro_batch", "n_micro",
                      "rounds", "seq"):  # fmt: skip
            if getattr(self, field) < 1:
                raise InputError(f"layout: {field} must be at least 1, got {getattr(self, field)}")
        if self.recompute not in RECOMPUTES:
            raise InputError(f"layout: recompute is one of {', '.join(RECOMPUTES)}, got {self.recompute!r}")

    @property
    def dp(self) -> int:
        return self.shard * self.replicas

    @property
    def world_size(self) -> int:
        return self.tp * self.cut_positions * self.pp * self.dp

    @cached_property
    def tiles(self) -> int:
        """Returns over how many ranks space is cut."""
        return math.prod(self.domain)

    @property
    def along(self) -> dict[str, int]:
        """Returns {axis: degree} of the axes that cut positions along one dim."""
        return {"cp": self.cp, "cp_ulysses": self.ulysses, **dict(self.others)}

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """Returns (name, degree) of each axis that cuts positions, outermost first."""
        return inner_axes(self.domain, **self.along)

    @cached_property
    def cut_positions(self) -> int:
        """Returns how many ranks share one sample's positions, of a sequence or of space."""
        return self.tiles * self.split_sequence

    @cached_property
    def shard_ranks(self) -> int:
        """Returns over how many ranks `zero` shards: dp_shard, and those that cut positions."""
        return self.shard * self.cut_positions

    @property
    def sharded(self) -> ZeroStage:
        """Returns the `ZeroStage`: what each rank keeps as a shard; as a plan's, stage 0 where one rank has it all."""
        stage = STAGES[self.zero]
        alone = self.shard_ranks == 1 and not (stage.weights and placements(self.offload, "parameters"))
        return UNSHARDED if alone else stage

    @property
    def gradient_ranks(self) -> int:
        """Returns how many ranks hold equal weights and sum their gradients."""
        return self.replicas * self.shard_ranks

    @cached_property
    def split_sequence(self) -> int:
        """Returns over how many ranks a sequence's positions are dealt."""
        return self.cp * self.ulysses * math.prod(degree for _, degree in self.others)

    @cached_property
    def tokens(self) -> float:
        """Returns the number of tokens of a micro-batch on one rank, before tensor parallelism."""
        return self.micro_batch * self.seq / self.split_sequence

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.n_micro * self.rounds * self.dp

    def with_(self, **changes: object) -> Layout:
        """Returns a copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]


# keys that a plan has too, of the same name and meaning, which go from one to the other
SAME_KEYS = tuple(
    sorted({field.name for field in fields(Plan)} & {field.name for field in fields(Layout)} - {"schedule"})
)


def of_plan(plan: Plan, *, global_batch: int, seq: int, uneven: bool = False) -> Layout:
    """Returns the layout of a plan for a global batch in samples; raises `InputError` where that does not divide.

    `uneven`: it is rounded up to the rank that is dealt most. Raises `RefusedPlan` for what is not forecast:
    deterministic plans.
    """
    if plan.deterministic:
        raise RefusedPlan(
            f"plan {plan}: deterministic is not forecast: a rank computes its pieces one after the other, whose small "
            "products and exchanges are not in the model; leave it out for the step of whole micro-batches, or measure"
        )
    # under a pipeline a round fills and drains it: micro-batches in flight, times rounds; else one after the other
    n_micro = plan.accumulate * plan.microbatches
    over = plan.data_ranks * n_micro
    if uneven:
        global_batch = -(-global_batch // over) * over
    if global_batch % over:
        lower = global_batch // over * over
        raise InputError(
            f"a global batch of {global_batch} samples does not divide over {plan.data_ranks} data ranks x {n_micro} "
            f"micro-batches; the nearest that do are {', '.join(str(n) for n in (lower, lower + over) if n)}"
        )
    return Layout(
        **{name: getattr(plan, name) for name in SAME_KEYS},
        ulysses=plan.cp_ulysses, chunks=plan.stages_per_rank, shard=plan.dp_shard, replicas=plan.dp_replicate,
        micro_batch=global_batch // over, n_micro=plan.microbatches if plan.pp > 1 else n_micro,
        rounds=plan.accumulate if plan.pp > 1 else 1, seq=seq, recompute=plan.remat,
        schedule=plan.schedule if plan.schedule != "none" else "1f1b",
        others=tuple((name, n) for name, n in plan.along.items() if n > 1 and name not in ("cp", "cp_ulysses")),
    )  # fmt: skip
