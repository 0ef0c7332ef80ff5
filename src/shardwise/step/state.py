"""`RankState`: all that one rank's step reads and changes; the first argument of most functions of this package."""

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
    """The interface of step/as_made, which uses gradients within backward and keeps the norms of those it has freed.

    flats   number of a bucket -> norms whose squares add up to that of its gradients
    norms   id of a master -> the same of its gradient, if that came by itself
    """

    flats: dict[int, list[torch.Tensor]]
    norms: dict[int, list[torch.Tensor]]

    def forget(self, clip: float | None = None) -> None:
        """Forgets the last step; `clip`: factor on this one's gradients, if a first run has shown it, else None."""

    def begin(self, tally: Tally) -> None:
        """Called before the backward of a step's only micro-batch. Collective."""


@dataclass
class RankState:
    """One rank of a plan whose weights are in place.

    technique     data parallelism; owns the weights' storage, and its slots are what the optimizer updates
    tensor        weights sharded over tp;  experts  dealt over ep; None without that axis
    forward       runs the model and its loss; under a pipeline the same object as `staged`, which is None without one
    names         trained parameters of this rank's stages, by whose order indices count;  all_names  all stages'
    held_frozen   frozen parameters of this rank's stages;  frozen_names  all stages'
    owners        unsharded masters of the parameters that this rank owns, if the optimizer needs these; else None
    needs_closure whether the optimizer evaluates the loss itself (LBFGS)
    base_lrs      learning rate of each group, None without one;  schedule  step -> factor on these, or None
    scale         loss scale of fp16, else None
    clip_norm     largest global norm of the gradient, or None;  on_nonfinite  "raise", "skip", or "use" (in benchmarks)
    global_random random numbers by global index, None under randomness="fast";  watch  whether operations are watched
    phase         which samples the module runs now
    order         fixed order of sums, if the plan is deterministic; else None
    chunks        counts of tensors computed in chunks, under position_chunks; else None
    pairs         names of complex parameters that the module holds as real ones (part/pairs)
    read          name -> digest of the unsharded value of a frozen weight that comes from the task's files
    written       whether the forward writes into weights
    tier          offloaded or coded optimizer state;  as_made  updates within backward;  shards  file of weights;
    activations   offloaded tensors for backward; each is None if the plan does not ask for it
    reached       objects that the code of a step can reach, cached for steps that may be repeated
    used          indices of the parameters that any rank reached in the last step
    terms         extra term of the loss, as seen in the look at a few samples -> whether it has its own weight
    first_fields  description of the first batch's leaves (`fields_of`), for errors on a later batch
    look_first    function of a micro-batch's samples, called once before the first step; None when done
    hooks         contexts around parts of a step
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
    backwards: BackwardWrites | None = None  # buffers that backward changes, in the first step; then None
    norms: list[nn.Module] = field(default_factory=list)  # batch norms
    read_elsewhere: set[str] = field(default_factory=set)  # names of buffers that other pipeline stages use
    keeps_samples: str = ""  # attribute in which the forward keeps a state of each sample for the next one; "": none
    last_total: int = 0  # samples of the last micro-batch, over all ranks; kept if `keeps_samples`
    steps_done: int = 0
    skipped_steps: int = 0
    repeated_steps: int = 0  # steps run twice, since gradients used within backward had to be clipped

    @property
    def device(self) -> torch.device:
        """Returns this rank's device."""
        return self.mesh.device

    def outside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor like the parameter `name` as users see it: complex if the module holds it as real pairs."""
        return as_complex(tensor) if name in self.pairs else tensor

    def shapes(self) -> dict[str, torch.Size]:
        """Returns {name: shape} of the module's parameters on this rank; complex ones without their last dim of 2."""
        return {name: shape for name, (shape, _) in shapes_outside(self.module).items()}

    @property
    def data_rank(self) -> int:
        """Returns the index, from 0, of the part of each micro-batch that this rank runs."""
        return 0 if self.same_samples else self.mesh.data.index

    @property
    def data_ranks(self) -> int:
        """Returns the number of parts into which each micro-batch is split over ranks."""
        return 1 if self.same_samples else self.mesh.data.size

    @property
    def same_samples(self) -> bool:
        """Whether every data rank runs the model on all samples, since it mixes them (`loss_scope="model"`)."""
        return self.task.loss_scope == "model"

    @property
    def counts(self) -> bool:
        """Whether this rank's losses, weights and samples count; one of the ranks with the same samples does."""
        return self.mesh.counts and (not self.same_samples or self.mesh.data.index == 0)
