"""Whether ranks with their own shares of positions come to the same collectives, found before a step.

Each rank's rehearsal notes what it would send: which collective, of which submodule, at which line of the module's own
code. One small message settles whether all noted the same.

What this does not do: tell tensors of one size apart that one line of code exchanges in turns, in one submodule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from shardwise.comm import Ledger, gather_rows
from shardwise.errors import RefusedPlan
from shardwise.host import put, read
from shardwise.mesh import Mesh
from shardwise.part.crossing import Along, cuts_of
from shardwise.trace.deferred import seed_of

# of each axis, a number for the collectives met, in order, over it and those further out; then one for their sizes
Met = tuple[int, ...]


class Collectives(Ledger):
    """A ledger that notes in which order a forward and backward came to the collectives that all ranks come to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []
        self.inside = ""  # the submodule that was entered last

    def record(self, tag: str, op: str, axis: str, full_bytes: int, *numbers: Any, **more: Any) -> None:
        """As of any ledger."""
        super().record(tag, op, axis, full_bytes, *numbers, **more)
        if op != "point_to_point":  # blocks on their way around a ring visit those who read them
            said = f"{op} of {tag} in {self.inside} at {_line()}"  # tensors of one size are told apart
            self.calls.append((said, axis, full_bytes if op != "all_to_all" else 0))

    def numbers(self, axes: Sequence[str]) -> Met:
        """Returns a hash for each axis, outermost first, of the calls over it and those further out; then of sizes.

        What ranks gather or sum has one size on all ranks of an axis; what they exchange has not.
        """
        order = [
            " ".join(f"{op}:{axis}" for op, axis, _ in self.calls if axis in axes[: d + 1]) for d in range(len(axes))
        ]
        sizes = [" ".join(f"{op}:{size}" for op, on, size in self.calls if on == axis) for axis in axes]
        return tuple(seed_of(said) % 2**50 for said in (*order, *sizes))

    def clear(self) -> None:
        """Start again from nothing."""
        super().clear()
        self.calls.clear()
        self.inside = ""


def _line() -> str:
    """The line of a rehearsed module's own code that runs now, or of the rehearsal, where torch runs by itself."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_name}:{frame.f_lineno}" if frame is not None else ""


_NOT_OWN = ("torch.", *(f"shardwise.{room}." for room in ("comm", "part", "parallel", "trace", "random", "step")))

MOST_SAID = 600  # characters of a refusal that one rank alone came to


def agree(mesh: Mesh, place: tuple[int, ...], error: RefusedPlan | None, met: Met) -> None:
    """Every rank has tried its own share: all refuse where one does, or where they do not meet. Collective.

    The ends alone are tried by all; what lies between may have other extents, or none. Ranks that share no group of an
    axis may come to other collectives over it: those over axes further out, which they share, stay in one order. Sizes
    are those of a group's own ranks.
    """
    said = (str(error) if error is not None else "").encode()[:MOST_SAID]
    depth = len(place)
    mine = [*map(float, (*place, *met)), float(error is not None), *map(float, said.ljust(MOST_SAID))]
    rows = read(gather_rows(put(mine, mesh.device), mesh.world), "which shares were tried")
    for rank, (refused, *letters) in enumerate(row[depth + len(met) :] for row in rows):
        if refused:
            told = bytes(int(letter) for letter in letters).decode(errors="replace").strip()
            raise RefusedPlan(f"the share of rank {rank} cannot be computed, though those at either end can: {told}")
    first: dict[tuple[float, ...], tuple[int, float]] = {}  # by axis and place on those further out, or on all others
    for rank, row in enumerate(rows):
        for at in range(2 * depth):
            beside = row[:at] if at < depth else [*row[: at - depth], *row[at - depth + 1 : depth]]
            one, number = first.setdefault((at, *beside), (rank, row[depth + at]))
            if number == row[depth + at]:
                continue
            raise RefusedPlan(
                f"ranks {one} and {rank} would not come to the same collectives with their shares of the batch, and "
                "wait for each other: their sizes differ, or values that decide what is computed (a mask of which one "
                "share is all true, where another has padding), or a process has an order of its own (of a "
                "set): use sizes that divide evenly, masks alike, one order, or fewer ranks"
            )


@contextmanager
def noting(
    module: nn.Module, results: dict[tuple[str, int], tuple[Along, ...]], met: Collectives
) -> Iterator[None]:  # fmt: skip
    """Context: record how the result of each submodule's call is cut, in `results` by (path, number of the call)."""
    counts: dict[int, int] = {}
    handles = []

    def enter(child: nn.Module, args: tuple, path: str) -> None:
        counts[id(child)] = counts.get(id(child), -1) + 1
        met.inside = path

    def leave(child: nn.Module, args: tuple, output: Any, path: str) -> None:
        leaves = tree_flatten(output)[0]
        along = tuple(
            tuple((name, dim) for name, dim, _ in cuts_of(leaf)) if isinstance(leaf, torch.Tensor) else ()
            for leaf in leaves
        )
        if any(along):
            results[path, counts[id(child)]] = along

    seen = {id(module)}
    for path, child in module.named_modules():
        if id(child) not in seen:
            seen.add(id(child))
            handles.append(child.register_forward_pre_hook(partial(enter, path=path)))
            handles.append(child.register_forward_hook(partial(leave, path=path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
