"""The control row: a few numbers of each data rank (loss, weight, norm, ...) that all ranks gather once a step."""

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

SQUARE_NORM = 5  # column of the squared norm in a control row


@dataclass
class Tally:
    """This rank's losses, weights and extra terms of a step's micro-batches; tensors stay on the device until `row`.

    counts         whether this rank's numbers count; False if another rank has the same samples
    totals         loss sum of each micro-batch; weights: its loss weight; extras: name of a term -> its values
    samples        number of samples so far
    used           for each micro-batch, indices of the parameters that backward reached
    stood_in       whether this rank ran a stand-in sample, which counts nothing
    pieces         under `deterministic`, the number of pieces of the global batch; else 0
    leaves         under `deterministic`, the index of the piece of each entry of `totals`
    alike          numbers of a script that must be equal on all ranks; alike_by_rank: each rank's, once gathered
    """

    device: torch.device
    counts: bool = True
    totals: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | float] = field(default_factory=list)
    samples: int = 0
    extras: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    used: list[set[int]] = field(default_factory=list)
    stood_in: bool = False
    pieces: int = 0
    leaves: list[int] = field(default_factory=list)
    alike: list[float] = field(default_factory=list)
    alike_by_rank: list[list[float]] = field(default_factory=list)

    def add(self, loss: Loss, count: int, extras: dict[str, torch.Tensor]) -> None:
        """Adds one micro-batch: its loss sum and weight, its `count` of samples, and its extra terms by name."""
        self.totals.append(loss.total.detach())
        self.weights.append(loss.weight)
        self.samples += count
        for name, value in extras.items():
            self.extras.setdefault(name, []).append(value)

    def row(self, square_norm: torch.Tensor | float) -> torch.Tensor:
        """Returns this rank's control row, (6 + extras + pieces' values + alike,) float64 on the device.

        Columns 0 to 5 are loss sum, weight, samples, hash of the used parameters, whether a stand-in ran, `square_norm`
        (of gradients). Then the extra terms in order of their names; with `pieces`, the values of each piece for loss,
        weight and each extra; last `alike`. A rank that does not count gives 0 for sums and samples.
        """
        others = (self.samples * self.counts, self.fingerprint(), self.stood_in, square_norm)
        sums = [self._sum(self.totals), self._sum(self.weights)]
        # by name: ranks may have met them in another order
        extras = [self._sum(self.extras[name]) for name in sorted(self.extras)]
        if not self.counts:
            sums, extras = ([value * 0 for value in values] for values in (sums, extras))
        return row_of([*sums, *others, *extras, *self._by_piece(), *self.alike], self.device)

    def _by_piece(self) -> list[torch.Tensor | float]:
        """Returns, for loss, weight and each extra in turn, `pieces` values: this rank's pieces', 0 for the others."""
        table: list[torch.Tensor | float] = []
        for values in (self.totals, self.weights, *(self.extras[name] for name in sorted(self.extras))):
            row: list[torch.Tensor | float] = [0.0] * self.pieces
            for leaf, value in zip(self.leaves, values, strict=True) if self.pieces else ():
                row[leaf] = value
            table += row
        return table

    def _sum(self, values: Sequence[torch.Tensor | float]) -> torch.Tensor | float:
        """Returns the sum of numbers and tensors, as a tensor on the device if any of them is a tensor."""
        # Tensors are added on the device: a value that is read here would make the host wait for the forward.
        if len(values) == 1:
            return values[0]
        plain = sum(value for value in values if not isinstance(value, torch.Tensor))
        tensors = [value.double().to(self.device) for value in values if isinstance(value, torch.Tensor)]
        return torch.stack(tensors).sum() + plain if tensors else plain

    @property
    def total(self) -> torch.Tensor | float:
        """Returns the sum of this rank's losses, also if `counts` is False."""
        return self._sum(self.totals)

    @property
    def reached(self) -> set[int]:
        """Returns the indices of the parameters that backward reached in any micro-batch."""
        return set().union(*self.used)

    def fingerprint(self) -> float:
        """Returns a checksum of the parameters used in each micro-batch, by which ranks find different branches."""
        check = 0
        for used in self.used:
            # with the count, so that the lists of two micro-batches cannot be split in another way
            check = zlib.crc32(array("q", [len(used), *sorted(used)]).tobytes(), check)
        return float(check)


@dataclass(frozen=True)
class Agreement:
    """What all ranks' control rows come to, the same on every rank.

    total, weight  sums of losses and of weights;  samples  that count;  extras  name of a term -> its sum
    same_branches  whether all ranks used the same parameters and none ran a stand-in
    square_norms   squared norm of the gradients, as each rank of the axis gave it
    """

    total: float
    weight: float
    samples: int
    extras: dict[str, float]
    same_branches: bool
    square_norms: list[float]


class PendingRow:
    """A control row whose all-gather has been issued; `answer` waits for all ranks' rows."""

    def __init__(self, tally: Tally, square_norm: torch.Tensor | float, axis: Axis):
        self.names = sorted(tally.extras)
        self.pieces, self._tally = tally.pieces, tally
        row = tally.row(square_norm)
        self._table = row.new_empty((axis.size, row.numel()))  # (ranks, 6 + extras + ...) float64
        self._pending = all_gather(self._table.view(-1), row, axis, "control", wait=False)

    def answer(self, square_norm: torch.Tensor | None = None) -> Agreement:
        """Returns the `Agreement` of all ranks' rows; the only read of device values by the host in a step.

        square_norm   () float64, the same on all data ranks, if it was unknown when the row was sent; else None
        """
        self._pending.wait()
        # replicas know the norm only after their reductions, which may still run when the rows are sent
        if square_norm is not None:
            self._table[:, SQUARE_NORM] = square_norm
        rows = read(self._table, "control row")
        # `alike` is at the end of the row
        if self._tally.alike:
            self._tally.alike_by_rank = [row[-len(self._tally.alike) :] for row in rows]
        total, weight, *extras = self._sums(rows)
        return Agreement(
            total=total,
            weight=weight,
            samples=int(sum(row[2] for row in rows)),
            extras=dict(zip(self.names, extras, strict=True)),
            # column 3 is the hash of used parameters, 4 whether a stand-in ran
            same_branches=all(row[3] == rows[0][3] and not row[4] for row in rows),
            square_norms=[row[SQUARE_NORM] for row in rows],
        )

    def _sums(self, rows: list[list[float]]) -> list[float]:
        """Returns [total, weight, *extras] summed over the rows, with `pieces` independently of the order of ranks."""
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
    """Returns the `Agreement` over the ranks of `axis`; `square_norm`: of this rank's gradients. Collective."""
    return PendingRow(tally, square_norm, axis).answer()


def gather_reached(tally: Tally, names: list[str], axis: Axis, device: torch.device, *, refuse: bool) -> set[int]:
    """Returns indices of the parameters that any rank's backward reached. Collective.

    names   of the parameters, for the message
    refuse  whether to raise `RunError` if ranks differ; ranks that ran a stand-in sample are not compared, since they
            may take another branch
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
