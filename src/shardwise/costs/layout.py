"""`Layout`: the numbers of a plan and a batch that forecasts need. A new field may need one in rehearsal/cut_module."""

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
    n_micro       micro-batches of a step (accumulation), or of one round of the pipeline
    rounds        times that the pipeline is filled and emptied in a step
    seq           tokens of a sample before any axis cuts it
    ulysses       the plan's cp_ulysses
    chunks        model chunks that a pipeline rank holds (virtual stages)
    zero          ZeRO stage (layout/zero_stages) over `shard` ranks
    shard         the plan's dp_shard, the data ranks over which `zero` shards; `replicas` is the number of such groups
    recompute     the plan's remat, one of RECOMPUTES
    domain        number of tiles along each dim of space
    others        (name, degree) of further axes that cut positions along one dim (traced modules only)
    position_chunks  number of chunks of positions in which wide tensors are computed (traced modules only)
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
    # as in a plan: blocks compiled, overlap and depth of halos, sums of tp begun early, dtype of gradients' sums
    compile: bool = False
    domain_overlap: str = "auto"
    domain_depth: int = 1
    tp_overlap: bool = False
    reduce_dtype: str = "auto"
    offload: str = "none"  # what lies outside of the device between steps, as in a plan
    optimizer_state: str = "full"  # its encoding between steps, and that of masters, as in a plan
    masters: str = "full"
    gradients: str = "together"  # or "as_made", as in a plan
    # layers of each stage, first stage first; (): dealt evenly
    stage_layers: tuple[int, ...] = ()
    # for traced modules: names that tp leaves unsharded, and names of modules at which stages begin
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
        """Returns the number of tiles into which space is cut, each on a rank."""
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
        """Returns the number of ranks over which `zero` shards: dp_shard times those that cut positions."""
        return self.shard * self.cut_positions

    @property
    def sharded(self) -> ZeroStage:
        """Returns the `ZeroStage`, which says what ranks keep as shards; stage 0 if one rank alone shards."""
        stage = STAGES[self.zero]
        alone = self.shard_ranks == 1 and not (stage.weights and placements(self.offload, "parameters"))
        return UNSHARDED if alone else stage

    @property
    def gradient_ranks(self) -> int:
        """Returns how many ranks hold equal weights and sum their gradients."""
        return self.replicas * self.shard_ranks

    @cached_property
    def split_sequence(self) -> int:
        """Returns the number of ranks over which a sequence's positions are dealt."""
        return self.cp * self.ulysses * math.prod(degree for _, degree in self.others)

    @cached_property
    def tokens(self) -> float:
        """Returns the tokens of a micro-batch on one rank (sp, which cuts them further, is not counted)."""
        return self.micro_batch * self.seq / self.split_sequence

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.n_micro * self.rounds * self.dp

    def with_(self, **changes: object) -> Layout:
        """Returns a copy with some fields replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]


# names of fields that `Plan` and `Layout` share with the same meaning; `of_plan` copies them
SAME_KEYS = tuple(
    sorted({field.name for field in fields(Plan)} & {field.name for field in fields(Layout)} - {"schedule"})
)


def of_plan(plan: Plan, *, global_batch: int, seq: int, uneven: bool = False) -> Layout:
    """Returns the layout of a plan for a global batch of `global_batch` samples of `seq` tokens.

    uneven  whether a batch that does not divide over ranks and micro-batches is rounded up until it does; if not,
            raises `InputError`

    Raises `RefusedPlan` for deterministic plans, which are not forecast.
    """
    if plan.deterministic:
        raise RefusedPlan(
            f"plan {plan}: deterministic is not forecast: a rank computes its pieces one after the other, whose small "
            "products and exchanges are not in the model; leave it out for the step of whole micro-batches, or measure"
        )
    # with a pipeline a round has `microbatches`, and `accumulate` is the number of rounds
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
