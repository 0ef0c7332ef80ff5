"""Compare, before a run, the collectives that ranks met in rehearsals of their shares of positions (find_positions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.comm import Ledger, gather_rows
from shardwise.errors import RefusedPlan
from shardwise.host import put, read
from shardwise.mesh import Mesh
from shardwise.trace.deferred import seed_of

# of each axis, a number for the collectives met, in order, over it and those further out; then one for their sizes
Met = tuple[int, ...]


class Collectives(Ledger):
    """A ledger that also keeps the order of the collectives, but for messages around a ring, which some ranks skip."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []

    def record(self, tag: str, op: str, axis: str, full_bytes: int, *numbers: Any, **more: Any) -> None:
        """Note a collective, as any ledger does, and its place among the others."""
        super().record(tag, op, axis, full_bytes, *numbers, **more)
        if op != "point_to_point":  # blocks on their way around a ring visit those who read them
            self.calls.append((op, axis, full_bytes if op != "all_to_all" else 0))

    def numbers(self, axes: Sequence[str]) -> Met:
        """Returns hashes: for each axis, outermost first, of calls over it and those further out; then of sizes.

        What ranks gather or sum has one size on all ranks of an axis; what they exchange has not.
        """
        order = [
            " ".join(f"{op}:{axis}" for op, axis, _ in self.calls if axis in axes[: d + 1]) for d in range(len(axes))
        ]
        sizes = [" ".join(f"{op}:{size}" for op, on, size in self.calls if on == axis) for axis in axes]
        return tuple(seed_of(said) % 2**50 for said in (*order, *sizes))

    def clear(self) -> None:
        """Forget all collectives."""
        super().clear()
        self.calls.clear()


MOST_SAID = 600  # characters of a refusal that one rank alone came to


def check_met(mesh: Mesh, place: tuple[int, ...], error: RefusedPlan | None, met: Met) -> None:
    """Raises `RefusedPlan` on all ranks where one refused its share, or where collectives do not meet. Collective.

    place  this rank's index on each axis of `met`
    met    its hashes of collectives (`Collectives.numbers`): `len(place)` of calls, then as many of sizes

    Ranks between the ends, which all have tried, may have other extents, or none. Ranks that share no group of an axis
    may make other calls over it, as long as those over axes further out, which they share, stay in one order. Sizes are
    compared within a group alone.
    """
    # One row of a fixed size: whether each refuses, its text, and its collectives.
    said = (str(error) if error is not None else "").encode()[:MOST_SAID]
    depth = len(place)
    mine = [*map(float, (*place, *met)), float(error is not None), *map(float, said.ljust(MOST_SAID))]
    rows = read(gather_rows(put(mine, mesh.device), mesh.world), "which shares were tried")
    for rank, (refused, *letters) in enumerate(row[depth + len(met) :] for row in rows):
        if refused:
            reason = bytes(int(letter) for letter in letters).decode(errors="replace").strip()
            raise RefusedPlan(f"the share of rank {rank} cannot be computed, though those at either end can: {reason}")
    first: dict[tuple[float, ...], tuple[int, float]] = {}  # by axis and place on those further out, or on all others
    for rank, row in enumerate(rows):
        for at in range(2 * depth):
            # calls agree where axes further out are shared, sizes within one group of the axis alone
            beside = row[:at] if at < depth else [*row[: at - depth], *row[at - depth + 1 : depth]]
            other, number = first.setdefault((at, *beside), (rank, row[depth + at]))
            if number == row[depth + at]:
                continue
            raise RefusedPlan(
                f"ranks {other} and {rank} would not come to the same collectives with their shares of the batch, and "
                "wait for each other: their sizes differ, or values that decide what is computed (a mask of which one "
                "share is all true, where another has padding): use sizes that divide evenly, masks alike, or fewer "
                "ranks"
            )
