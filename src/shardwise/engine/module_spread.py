"""What a plan spreads of a module over ranks: weights (tp), experts (ep), positions (cp, domain); found, and put in."""

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
    """What a plan spreads of a module: weights over tp, experts over ep, positions over the inner axes.

    row_wise  modules of experts that are given a rank's own rows, where positions are cut
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
        """Returns how results of submodules' calls are cut, by (path, number of the call)."""
        return self.positions.results if self.positions is not None else {}

    def notices(self) -> list[str]:
        """Returns lines for the user on how weights, experts and positions lie over ranks."""
        notices = [*(self.tensor.notices() if self.tensor is not None else ())]
        notices += self.experts.notices() if self.experts is not None else ()
        return notices + ([self.positions.summary()] if self.positions is not None else [])

    def local_values(self, value_of: ValueOf) -> ValueOf:
        """Returns a function from a name to the initial value of this rank's share, of whole ones by `value_of`."""
        for technique in (self.tensor, self.experts):
            value_of = value_of if technique is None else technique.local_values(value_of)
        return value_of

    def install(self, module: nn.Module, absent: set[str], mesh: Mesh, *, traced: bool) -> None:
        """Replace forwards so that the module runs on shares; `absent`: names of other stages' weights. Collective with
        experts."""
        # no tensor of the batch has the positions: they are cut in the forward, where they are born
        if self.positions is not None and self.positions.inside is not None:
            self.positions.inside.install(module)
        if self.tensor is not None:
            install(module, self.tensor, absent, mesh.inner)
        elif mesh.inner:  # weights are whole, and still meet cut positions
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
    """Returns how a module is spread: cut weights, dealt experts, cut positions, by a few samples. Collective."""
    spread = ModuleSpread()
    # In this order: tp cuts the inside of what ep deals, and positions are tried with tp's cuts in place.
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
