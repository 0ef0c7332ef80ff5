"""Derive what a plan shards of a module, and install it: weights (tp), experts (ep), positions (cp, domain)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.engine.experts import beside_cuts, names_of, own_row_experts, rows_alone, spread_experts
from shardwise.engine.tensor_cuts import cut_tensors
from shardwise.layout import Plan
from shardwise.mesh import Mesh
from shardwise.parallel.expert import ExpertParallel
from shardwise.parallel.expert import install as install_experts
from shardwise.parallel.expert.expert_forward import Stack, compute_own_rows
from shardwise.parallel.slots import ValueOf
from shardwise.parallel.tensor import TensorParallel, install
from shardwise.part.crossing import Along
from shardwise.part.parameters import read_past, refuse_past, see_parts
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.task import Task
from shardwise.trace.deferred import Built


@dataclass
class ModuleSpread:
    """What a plan shards of a module. Each field is None, or empty, without its axis.

    tensor     weights sharded over tp
    experts    experts dealt over ep
    row_wise   modules of experts that are called with this rank's own tokens only, since positions are sharded
    positions  dims of the batch that are sharded over the inner axes (cp, cp_ulysses, domain)
    """

    tensor: TensorParallel | None = None
    experts: ExpertParallel | None = None
    row_wise: list[Stack] = field(default_factory=list)
    positions: Positions | None = None

    @property
    def stacks(self) -> list[Stack]:
        """Returns the modules whose experts are dealt."""
        return [] if self.experts is None else self.experts.stacks

    @property
    def results(self) -> Mapping[tuple[str, int], tuple[Along, ...]]:
        """Returns (path of a submodule, index of its call) -> the (axis, dim) cuts of each leaf of its result."""
        return self.positions.results if self.positions is not None else {}

    def notices(self) -> list[str]:
        """Returns lines for the user on how weights, experts and positions are sharded."""
        notices = [*(self.tensor.notices() if self.tensor is not None else ())]
        notices += self.experts.notices() if self.experts is not None else ()
        return notices + ([self.positions.summary()] if self.positions is not None else [])

    def local_values(self, value_of: ValueOf) -> ValueOf:
        """Returns a function from a name to this rank's share of the initial value `value_of(name)`."""
        for technique in (self.tensor, self.experts):
            value_of = value_of if technique is None else technique.local_values(value_of)
        return value_of

    def install(self, module: nn.Module, absent: set[str], mesh: Mesh, *, traced: bool) -> None:
        """Replaces forwards so that the module runs on shards. Collective if experts are dealt.

        absent  names of weights that only other pipeline stages hold
        traced  whether blocks will be compiled; experts then stay out of the compiled code
        """
        # positions arise inside the module (image patches), not in the batch, so its forward shards them
        if self.positions is not None and self.positions.inside is not None:
            self.positions.inside.install(module)
        if self.tensor is not None:
            install(module, self.tensor, absent, mesh.inner)
        elif mesh.inner:  # weights are whole, but their products are with sharded activations
            see_parts(module, {}, mesh.tp, absent, mesh.inner)
        if self.experts is not None:
            self.experts = self.experts.here(absent)
            install_experts(module, self.experts, mesh.device, traced=traced)
        # experts that are not dealt (no ep), where positions are cut
        elif self.row_wise:
            compute_own_rows(module, self.row_wise)
        if self.positions is not None and self.positions.past:
            read_past(module)


def spread_module(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, few: Any, samples: int | None
) -> ModuleSpread:  # fmt: skip
    """Returns what the plan shards of the module, derived from a forward of a few samples. Collective.

    few      a batch of a few samples, the same on every rank; None if the plan has no tp, ep or inner axis
    samples  number of samples in `few`, if not all of its tensors have a batch dim
    """
    spread = ModuleSpread()
    # In this order, since tp cuts the inside of each expert, and positions are tried with tp's cuts in place.
    if plan.ep > 1:
        spread.experts = spread_experts(task, plan, mesh, precision, built, few)
    if plan.tp > 1:
        dealt = names_of(spread.stacks)
        spread.tensor = cut_tensors(task, plan, mesh, precision, built, few, dealt)
    if spread.experts is not None:
        spread.experts = beside_cuts(spread.experts, built.module, spread.tensor)
    if mesh.inner:
        from shardwise.engine.find_positions import find_positions  # a fifth of all files, for plans that cut positions

        own_rows = rows_alone(spread.stacks) if spread.experts else own_row_experts(task, mesh, precision, built, few)
        spread.row_wise = own_rows
        derived = None if spread.tensor is None else spread.tensor.derived
        spread.positions = find_positions(
            task, plan, mesh.inner, precision, built, few, derived, spread.row_wise, samples, mesh
        )
        if spread.positions.past:
            refuse_past(plan)
    return spread
