"""Check before a run that ranks issue matching collectives, from each one's rehearsal of its share (find_positions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.comm import Ledger, gather_rows
from shardwise.errors import RefusedPlan
from shardwise.host import put, read
from shardwise.mesh import Mesh
from shardwise.trace.deferred import seed_of

# hashes of the collectives of a rehearsal: for each axis one of their order, then for each axis one of their sizes
Met = tuple[int, ...]


class Collectives(Ledger):
    """A ledger that also keeps the order of collectives, but not ring messages, since some ranks skip these."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []  # (op, axis name, bytes; 0 for an all-to-all)

    def record(self, tag: str, op: str, axis: str, full_bytes: int, *numbers: Any, **more: Any) -> None:
        """Records a collective, by the arguments of `Ledger.record`, and appends it to `calls`."""
        super().record(tag, op, axis, full_bytes, *numbers, **more)
        if op != "point_to_point":  # blocks on their way around a ring visit those who read them
            self.calls.append((op, axis, full_bytes if op != "all_to_all" else 0))

    def numbers(self, axes: Sequence[str]) -> Met:
        """Returns 2 * len(axes) hashes, which ranks compare.

        axes  names, outermost first

        First, for each axis, the hash of the calls over it and the axes before it, in order; then, for each axis, the
        hash of the bytes of its calls. Gathers and sums have the same size on all ranks of an axis; the sizes of an
        all-to-all differ, so they count as 0.
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


MOST_SAID = 600  # bytes of a rank's refusal that are sent to the others, in a row of fixed size


def check_met(mesh: Mesh, place: tuple[int, ...], error: RefusedPlan | None, met: Met) -> None:
    """Raises `RefusedPlan` on all ranks if one refused its share, or if collectives do not match. Collective.

    place  this rank's index on each axis of `met`
    error  this rank's refusal of its own share, None without one
    met    this rank's hashes of collectives (`Collectives.numbers`), `len(place)` of calls, then as many of sizes

    Shares differ in size, and some are empty, so each rank rehearses its own. Ranks in different groups of an axis may
    make different calls over it, if their calls over axes further out come in the same order. Sizes must be equal
    within one group only.
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
    # (index of the hash, places of the ranks that must agree on it) -> (first rank with these, its hash)
    first: dict[tuple[float, ...], tuple[int, float]] = {}
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
