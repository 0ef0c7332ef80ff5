"""The control row of each data rank, gathered once; columns by place, read by normalise and pipelined too."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shardwise.comm import Axis, all_gather, gather_rows
from shardwise.errors import RunError
from shardwise.host import read, row_of, to_device
from shardwise.step.loss import Loss

SQUARE_NORM = 5  # its place in a control row


@dataclass
class Tally:
    """This rank's sums over a step's micro-batches (losses, weights, extras); on the device until the control row."""

    device: torch.device
    counts: bool = True  # False where another rank has the same samples, and counts them
    totals: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | float] = field(default_factory=list)
    samples: int = 0
    extras: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    used: list[set[int]] = field(default_factory=list)  # parameters reached, by micro-batch
    stood_in: bool = False
    pieces: int = 0  # of a batch whose sums are taken in an order that does not hang on ranks
    leaves: list[int] = field(default_factory=list)  # the piece of each summand, then
    alike: list[float] = field(default_factory=list)  # numbers that are to be the same on every rank
    alike_by_rank: list[list[float]] = field(default_factory=list)  # once the rows are read

    def add(self, loss: Loss, count: int, extras: dict[str, torch.Tensor]) -> None:
        """Add one micro-batch's loss, weight and extra terms, and its `count` of samples."""
        self.totals.append(loss.total.detach())
        self.weights.append(loss.weight)
        self.samples += count
        for name, value in extras.items():
            self.extras.setdefault(name, []).append(value)

    def row(self, square_norm: torch.Tensor | float) -> torch.Tensor:
        """Returns this rank's control row, (6 + extras + summands + alike,) float64 on the device.

        total, weight, samples, fingerprint of what was used, whether a stand-in ran, squared norm; extras by name; with
        pieces, each piece's summand of total, weight and every extra; last `alike`. A rank that does not count gives 0
        for sums and samples.
        """
        others = (self.samples * self.counts, self.fingerprint(), self.stood_in, square_norm)
        sums = [self._sum(self.totals), self._sum(self.weights)]
        # by name: ranks may have met them in another order
        extras = [self._sum(self.extras[name]) for name in sorted(self.extras)]
        if not self.counts:
            sums, extras = ([value * 0 for value in values] for values in (sums, extras))
        return row_of([*sums, *others, *extras, *self._by_piece(), *self.alike], self.device)

    def _by_piece(self) -> list[torch.Tensor | float]:
        """Returns, for each sum in turn (total, weight, extras), every piece's summand; 0 for pieces of other ranks."""
        table: list[torch.Tensor | float] = []
        for values in (self.totals, self.weights, *(self.extras[name] for name in sorted(self.extras))):
            row: list[torch.Tensor | float] = [0.0] * self.pieces
            for leaf, value in zip(self.leaves, values, strict=True) if self.pieces else ():
                row[leaf] = value
            table += row
        return table

    def _sum(self, values: Sequence[torch.Tensor | float]) -> torch.Tensor | float:
        """Returns the sum of numbers and tensors, a tensor where any is one."""
        # Tensors are added on the device: a value that is read here would make the host wait for the forward.
        if len(values) == 1:
            return values[0]
        plain = sum(value for value in values if not isinstance(value, torch.Tensor))
        tensors = [value.double().to(self.device) for value in values if isinstance(value, torch.Tensor)]
        return torch.stack(tensors).sum() + plain if tensors else plain

    @property
    def total(self) -> torch.Tensor | float:
        """Returns the sum of this rank's losses, whether or not it counts them."""
        return self._sum(self.totals)

    @property
    def reached(self) -> set[int]:
        """Returns the indices of the parameters that backward reached in any micro-batch."""
        return set().union(*self.used)

    def fingerprint(self) -> float:
        """Returns a number that differs (almost surely) where ranks used other parameters in a micro-batch."""
        check = 0
        for used in self.used:
            # with the count, so that parameters of one micro-batch are not taken for the next one's
            check = zlib.crc32(array("q", [len(used), *sorted(used)]).tobytes(), check)
        return float(check)


@dataclass(frozen=True)
class Agreement:
    """The outcome of all data ranks' control rows: sums over ranks, and the numbers that must be alike."""

    total: float
    weight: float
    samples: int
    extras: dict[str, float]
    same_branches: bool
    square_norms: list[float]  # by data rank


class PendingRow:
    """A control row that is being gathered; `answer` waits for all data ranks' rows."""

    def __init__(self, tally: Tally, square_norm: torch.Tensor | float, axis: Axis):
        self.names = sorted(tally.extras)
        self.pieces, self._tally = tally.pieces, tally
        row = tally.row(square_norm)
        self._table = row.new_empty((axis.size, row.numel()))  # (ranks, 6 + extras + ...) float64
        self._pending = all_gather(self._table.view(-1), row, axis, "control", wait=False)

    def answer(self, square_norm: torch.Tensor | None = None) -> Agreement:
        """Returns the `Agreement` of all ranks' rows; the only read of the device's values in a step.

        square_norm   () float64, the same on all data ranks, where it was not known when the rows went off
        """
        self._pending.wait()
        # the norm came from a reduction that was still under way when the rows went off: all ranks have the same
        if square_norm is not None:
            self._table[:, SQUARE_NORM] = square_norm
        rows = read(self._table, "control row")
        # what scripts compare over ranks stands at the end of the row
        if self._tally.alike:
            self._tally.alike_by_rank = [row[-len(self._tally.alike) :] for row in rows]
        total, weight, *extras = self._sums(rows)
        return Agreement(
            total=total,
            weight=weight,
            samples=int(sum(row[2] for row in rows)),
            extras=dict(zip(self.names, extras, strict=True)),
            # the same parameters were used on all, and no rank ran a stand-in, which reaches others
            same_branches=all(row[3] == rows[0][3] and not row[4] for row in rows),
            square_norms=[row[SQUARE_NORM] for row in rows],
        )

    def _sums(self, rows: list[list[float]]) -> list[float]:
        """Returns [total, weight, *extras] over all ranks; with pieces rounded once, whatever their order."""
        columns = [0, 1, *range(6, 6 + len(self.names))]
        # without pieces ranks' rows are added up in the order of ranks
        if not self.pieces:
            return [sum(row[column] for row in rows) for column in columns]
        first = 6 + len(self.names)
        starts = range(first, first + len(columns) * self.pieces, self.pieces)
        pieces = ([value for row in rows for value in row[start : start + self.pieces]] for start in starts)
        # `fsum` rounds once: the sum is the same whichever rank had which piece. It raises for infinities of both signs
        return [math.fsum(values) if all(map(math.isfinite, values)) else sum(values) for values in pieces]


def agree(tally: Tally, square_norm: torch.Tensor | float, axis: Axis) -> Agreement:
    """Returns the `Agreement` of every data rank's row. One small collective."""
    return PendingRow(tally, square_norm, axis).answer()


def gather_reached(tally: Tally, names: list[str], axis: Axis, device: torch.device, *, refuse: bool) -> set[int]:
    """Returns indices of the parameters that any rank reached. Collective. `refuse`: `RunError` where ranks differ.

    Ranks that ran a stand-in sample may have taken another branch; they are not compared.
    """
    bits = np.zeros((len(tally.used), len(names)), dtype=np.uint8)
    for micro_batch, used in enumerate(tally.used):
        bits[micro_batch, sorted(used)] = 1
    row = np.append(bits.reshape(-1), np.uint8(tally.stood_in))
    gathered = gather_rows(to_device(row, device), axis)
    table = np.array(read(gathered, "branches"), dtype=bool)  # (ranks, micro-batches * parameters + 1)
    rows = table[:, :-1].reshape(axis.size, *bits.shape)
    compared = [rank for rank in range(axis.size) if not table[rank, -1]]
    # all ranks have the whole table, so all of them raise or none
    if refuse and compared:
        by_rank = rows[compared]
        differing = np.argwhere((by_rank != by_rank[0]).any(axis=0))
        if len(differing):
            micro_batch, index = map(int, differing[0])
            used_by = [axis.ranks[r] for r in compared if rows[r, micro_batch, index]]
            not_by = [axis.ranks[r] for r in compared if not rows[r, micro_batch, index]]
            raise RunError(
                f"a branch differs between ranks: parameter '{names[index]}' was used by rank "
                f"{_listed(used_by)} but not by rank {_listed(not_by)} in micro-batch {micro_batch}. One process "
                "would take one branch for all samples. If the choice is made sample by sample (routed experts), "
                'declare Task(branches="per_sample"), in a script prepare(..., branches="per_sample"); if a term of '
                "the loss is left out where a batch has nothing of it, give it as a sum that may be of nothing, in a "
                "script prepared.backward(term.sum() / max(n, 1), mean_over=n) of its own; if it is random, use "
                'randomness="global"'
            )
    return {int(index) for index in np.flatnonzero(rows.any(axis=(0, 1)))}


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ("..." if len(ranks) > 8 else "")
