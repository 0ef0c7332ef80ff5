"""The step's control row: a few numbers from each data rank, gathered once, from which all ranks decide alike."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field

import torch

from shardwise.comm import Axis, all_gather, gather_rows
from shardwise.errors import RunError
from shardwise.step.loss import Loss


@dataclass
class Tally:
    """What this rank adds up over the micro-batches of a step; sums stay on the device until the control row."""

    device: torch.device
    totals: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | float] = field(default_factory=list)
    samples: int = 0
    extras: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    used: list[set[int]] = field(default_factory=list)  # parameters reached, by micro-batch
    stood_in: bool = False

    def add(self, loss: Loss, count: int, extras: dict[str, torch.Tensor]) -> None:
        """Add one micro-batch."""
        self.totals.append(loss.total.detach())
        self.weights.append(loss.weight)
        self.samples += count
        for name, value in extras.items():
            self.extras.setdefault(name, []).append(value)

    def row(self, square_norm: float) -> torch.Tensor:
        """This rank's control row (6 + extras,) in float64 on the device."""
        told = torch.tensor(
            [float(self.samples), self.fingerprint(), float(self.stood_in), square_norm],
            dtype=torch.float64, device=self.device,
        )  # fmt: skip
        sums = [self._sum(self.totals), self._sum(self.weights)]
        extras = [self._sum(self.extras[name]) for name in sorted(self.extras)]
        return torch.cat([torch.stack(sums), told, *([torch.stack(extras)] if extras else [])])

    def _sum(self, values: list) -> torch.Tensor:
        plain = sum(value for value in values if not isinstance(value, torch.Tensor))
        tensors = [value.double().to(self.device) for value in values if isinstance(value, torch.Tensor)]
        total = torch.tensor(float(plain), dtype=torch.float64, device=self.device)
        return total + torch.stack(tensors).sum() if tensors else total

    @property
    def reached(self) -> set[int]:
        """Parameters reached in any micro-batch."""
        return set().union(*self.used)

    def fingerprint(self) -> float:
        """A number that differs (almost surely) where ranks used other parameters in a micro-batch."""
        check = 0
        for used in self.used:
            check = zlib.crc32(array("q", [len(used), *sorted(used)]).tobytes(), check)
        return float(check)


@dataclass(frozen=True)
class Agreement:
    """The gathered rows, summed where they are sums."""

    total: float
    weight: float
    samples: int
    extras: dict[str, float]
    same_branches: bool
    square_norms: list[float]  # by data rank


class Asked:
    """A row on its way to every data rank; `answer` waits for theirs."""

    def __init__(self, tally: Tally, square_norm: float, axis: Axis):
        self.names = sorted(tally.extras)
        row = tally.row(square_norm)
        self._table = row.new_empty((axis.size, row.numel()))
        self._pending = all_gather(self._table.view(-1), row, axis, "control", wait=False)

    def answer(self) -> Agreement:
        """What the rows of all ranks come to."""
        self._pending.wait()
        rows = self._table.tolist()
        return Agreement(
            total=sum(row[0] for row in rows),
            weight=sum(row[1] for row in rows),
            samples=int(sum(row[2] for row in rows)),
            extras={name: sum(row[6 + i] for row in rows) for i, name in enumerate(self.names)},
            same_branches=all(row[3] == rows[0][3] and not row[4] for row in rows),
            square_norms=[row[5] for row in rows],
        )


def agree(tally: Tally, square_norm: float, axis: Axis) -> Agreement:
    """Gather every data rank's row. One small collective."""
    return Asked(tally, square_norm, axis).answer()


def gather_reached(tally: Tally, names: list[str], axis: Axis, device: torch.device, *, refuse: bool) -> set[int]:
    """Parameters that any rank reached. With `refuse`, ranks that differ in a micro-batch are named.

    Ranks that ran a stand-in sample may have taken another branch; they are not compared.
    """
    bits = torch.zeros(len(tally.used), len(names), dtype=torch.uint8, device=device)
    for micro_batch, used in enumerate(tally.used):
        bits[micro_batch, sorted(used)] = 1
    row = torch.cat([bits.view(-1), torch.tensor([tally.stood_in], dtype=torch.uint8, device=device)])
    table = gather_rows(row, axis).cpu()
    rows = table[:, :-1].view(axis.size, len(tally.used), len(names))
    compared = [rank for rank in range(axis.size) if not table[rank, -1]]
    if refuse and compared:
        by_rank = rows[compared]
        differing = (by_rank != by_rank[0]).any(dim=0).nonzero()
        if len(differing):
            micro_batch, index = differing[0].tolist()
            used_by = [axis.ranks[r] for r in compared if rows[r, micro_batch, index]]
            not_by = [axis.ranks[r] for r in compared if not rows[r, micro_batch, index]]
            raise RunError(
                f"a branch differs between ranks: parameter '{names[index]}' was used by rank "
                f"{_listed(used_by)} but not by rank {_listed(not_by)} in micro-batch {micro_batch}. One process "
                "would take one branch for all samples. If the choice is made sample by sample (routed experts), "
                'declare Task(branches="per_sample"); if it is random, use randomness="global"'
            )
    return set(rows.any(dim=0).any(dim=0).nonzero().view(-1).tolist())


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ("..." if len(ranks) > 8 else "")
