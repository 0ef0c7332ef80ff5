"""`RankState`: what one rank's step reads and changes. The functions of this room take it as their first argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.tree import FixedOrder
from shardwise.layout import Plan
from shardwise.memory.chunks import Chunks
from shardwise.mesh import Mesh
from shardwise.parallel.expert import ExpertParallel
from shardwise.parallel.slots import DataParallel, Phase
from shardwise.parallel.tensor import TensorParallel
from shardwise.part.pairs import as_complex, shapes_outside
from shardwise.precision import Precision
from shardwise.random import GlobalRandom, Watch
from shardwise.step.backward_writes import BackwardWrites
from shardwise.step.control import Tally
from shardwise.step.forward import Forward
from shardwise.step.hooks import Hooks
from shardwise.step.owners import OwnedMasters
from shardwise.step.scaler import LossScale
from shardwise.task import Task
from shardwise.tiers import Activations, ShardFile, StateTiers
from shardwise.trace.outside_state import Reached

if TYPE_CHECKING:
    from shardwise.step.staged import StagedForward


class UsedAsMade(Protocol):
    """What uses gradients within backward (as_made): norms of what it has used, by flat tensor or by master."""

    flats: dict[int, list[torch.Tensor]]
    norms: dict[int, list[torch.Tensor]]

    def forget(self, clip: float | None = None) -> None:
        """Forget the step before; `clip`: what this one's gradients are clipped by, where a first run has told."""

    def begin(self, tally: Tally) -> None:
        """Called before the backward of a step's only micro-batch. Collective."""


@dataclass
class RankState:
    """One rank of a plan whose weights are in place.

    technique     holds the weights' storage and reduces gradients; its slots are what the optimizer updates
    tensor        shares of tp, `experts` those of ep; None without that axis
    forward       the model and its loss; with pipeline stages it is `staged` too
    names         trained parameters that this rank's stages hold, in the order of indices; `all_names` of all stages
    held_frozen   frozen parameters that this rank's stages hold; `frozen_names` of all stages
    owners        where ZeRO's optimizer needs whole tensors: which rank updates which
    needs_closure the optimizer evaluates the loss itself (LBFGS)
    base_lrs      of each group, which `schedule` (optimizer step -> factor) multiplies
    scale         of fp16's losses
    clip_norm     largest global norm of the gradient; `on_nonfinite`: "raise", "skip", or "use" where one measures
    global_random masks by global index, where they were asked for; `watch`: whether operations are watched for them
    order         in which sums over pieces of a batch are taken, where the plan is deterministic
    chunks        what was computed in chunks of positions, where the plan has position_chunks
    pairs         complex parameters that the module holds as real ones (part/pairs)
    read          digests of the whole values that frozen weights have in the task's files, of those held here
    written       the forward writes into weights
    tier          where the optimizer's state lies between steps, where the plan has offload
    as_made       which gradients of a step have come, where the plan updates weights within backward
    shards        the file in which shards of weights lie, where the plan has that
    activations   where what blocks keep for backward lies until then, where the plan has that
    reached       what the code of a step reaches, once it was looked up for one that may be repeated
    used          indices of the parameters that any rank reached in the last step
    terms         extra terms of the loss that the look met, and whether they have a weight of their own
    first_fields  what the first batch held, for the error of a later one
    look_first    what is looked at before the first step, once the samples of a micro-batch are known to be so many
    hooks         contexts around parts of a step, for whoever measures
    """

    task: Task
    plan: Plan
    mesh: Mesh
    seed: int
    precision: Precision
    module: nn.Module
    technique: DataParallel
    tensor: TensorParallel | None
    experts: ExpertParallel | None
    forward: Forward
    staged: StagedForward | None
    names: list[str]
    all_names: list[str]
    held_frozen: set[str]
    frozen_names: list[str]
    optimizer: Optimizer
    owners: OwnedMasters | None
    needs_closure: bool
    base_lrs: list[float | None]
    scale: LossScale | None
    clip_norm: float | None = None
    schedule: Callable[[int], float] | None = None
    on_nonfinite: str = "raise"
    global_random: GlobalRandom | None = None
    watch: Watch = field(default_factory=Watch)
    phase: Phase = field(default_factory=Phase)
    terms: dict[str, bool] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    hooks: Hooks = field(default_factory=Hooks)
    written: bool = False
    used: set[int] = field(default_factory=set)
    first_fields: dict[str, str] = field(default_factory=dict)
    look_first: Callable[[int], None] | None = None
    order: FixedOrder | None = None
    chunks: Chunks | None = None
    pairs: frozenset[str] = frozenset()
    tier: StateTiers | None = None
    as_made: UsedAsMade | None = None
    activations: Activations | None = None
    shards: ShardFile | None = None
    reached: Reached | None = None
    read: dict[str, str] = field(default_factory=dict)
    backwards: BackwardWrites | None = None  # of the first step
    norms: list[nn.Module] = field(default_factory=list)  # that normalise by batches
    read_elsewhere: set[str] = field(default_factory=set)  # buffers that other pipeline stages use
    keeps_samples: str = ""  # the name of what the forward keeps of each sample for the next one
    last_total: int = 0  # samples of the last micro-batch, then
    steps_done: int = 0
    skipped_steps: int = 0
    repeated_steps: int = 0  # whose gradients had been used before they were to be clipped

    @property
    def device(self) -> torch.device:
        """Returns this rank's device."""
        return self.mesh.device

    def outside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor, shaped as the module's parameter, as users see it: complex where it is held as pairs."""
        return as_complex(tensor) if name in self.pairs else tensor

    def shapes(self) -> dict[str, torch.Size]:
        """Returns the shape of the module's parameters by name, of complex ones without the pairs' dim."""
        return {name: shape for name, (shape, _) in shapes_outside(self.module).items()}

    @property
    def data_rank(self) -> int:
        """Returns this rank's index among the ranks that a micro-batch is dealt over."""
        return 0 if self.same_samples else self.mesh.data.index

    @property
    def data_ranks(self) -> int:
        """Returns how many ranks each micro-batch is dealt over."""
        return 1 if self.same_samples else self.mesh.data.size

    @property
    def same_samples(self) -> bool:
        """Whether every data rank runs the model on all samples, since it mixes them (`loss_scope="model"`)."""
        return self.task.loss_scope == "model"

    @property
    def counts(self) -> bool:
        """Whether this rank counts its losses, weights and samples: of ranks that have the same samples, one does."""
        return self.mesh.counts and (not self.same_samples or self.mesh.data.index == 0)
