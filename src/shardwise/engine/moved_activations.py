"""Set up a plan's `offload=activations`: what this rank's blocks save for backward goes to the host or a disk."""

from __future__ import annotations

from torch import nn

from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.offload import Placement, placements
from shardwise.mesh import Mesh
from shardwise.tiers import Activations, ExtentFile, HostCopies, Store, places, spread, told_of_none
from shardwise.trace.blocks import Blocks

WITHOUT_BLOCKS = (
    "what blocks keep for backward would move, and no repeated blocks were found in the module: name them by wrap=, or "
    "leave offload out"
)


def refuse_without_blocks(plan: Plan, blocks: Blocks) -> None:
    """Raise `RefusedPlan` if the plan offloads activations and the module (all stages of it) has no blocks."""
    if placements(plan.offload, "activations") and not blocks.paths:
        raise RefusedPlan(f"offload={plan.offload}: {WITHOUT_BLOCKS}")


def move_activations(
    module: nn.Module, blocks: Blocks, plan: Plan, mesh: Mesh, notices: list[str]
) -> Activations | None:  # fmt: skip
    """Wraps the blocks so that what they save for backward is offloaded; returns the `Activations`.

    blocks   this rank's blocks
    notices  gets lines on the stores, and on a fraction that rounds to no block

    Returns None if the plan does not offload activations. Raises `RefusedPlan` for a tier that saves no memory (the
    host's, on a CPU), and if the folder for temporary files is not on a disk.
    """
    placed = placements(plan.offload, "activations")
    if not placed:
        return None
    if any(placement.tier == "host" for placement in placed) and not places.has_own_memory(mesh.device):
        raise RefusedPlan(f"offload={plan.offload}: {places.IN_MEMORY.format('activations')}")
    called = {id(block): block for block in map(module.get_submodule, blocks.paths)}
    moved = Activations(module, spread([*called.values()], [(_store(p, mesh), p.fraction) for p in placed]))
    notices += moved.notices + told_of_none(placed, [*called.values()], plan.offload)
    return moved


def _store(placement: Placement, mesh: Mesh) -> Store:
    """Returns a new store on the placement's tier: the host's memory, or a file of this rank."""
    return HostCopies(mesh.device) if placement.tier == "host" else ExtentFile(mesh.device, mesh.rank)
