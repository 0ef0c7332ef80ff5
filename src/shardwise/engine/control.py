"""The step's control row: a few numbers from each data rank, gathered once, from which all ranks decide alike."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch

from shardwise.comm import Axis, gather_rows
from shardwise.engine.loss import Loss
from shardwise.errors import RunError


@dataclass
class Tally:
    """What this rank adds up over the micro-batches of a step."""

    total: float = 0.0
    weight: float = 0.0
    samples: int = 0
    extras: dict[str, float] = field(default_factory=dict)
    used: list[set[int]] = field(default_factory=list)  # parameters reached, by micro-batch
    stood_in: bool = False

    def add(self, loss: Loss, count: int, extras: dict[str, float]) -> None:
        """Add one micro-batch."""
        self.total += float(loss.total.detach())
        self.weight += loss.weight
        self.samples += count
        for name, value in extras.items():
            self.extras[name] = self.extras.get(name, 0.0) + value

    @property
    def reached(self) -> set[int]:
        """Parameters reached in any micro-batch."""
        return set().union(*self.used)

    def fingerprint(self) -> float:
        """A number that differs (almost surely) where ranks used other parameters in a micro-batch."""
        text = ";".join(",".join(map(str, sorted(used))) for used in self.used)
        return float(zlib.crc32(text.encode()))


@dataclass(frozen=True)
class Agreement:
    """The gathered rows, summed where they are sums."""

    total: float
    weight: float
    samples: int
    extras: dict[str, float]
    same_branches: bool
    square_norms: list[float]  # by data rank


def agree(tally: Tally, square_norm: float, axis: Axis, device: torch.device) -> Agreement:
    """Gather every data rank's row. One small collective."""
    names = sorted(tally.extras)
    row = [tally.total, tally.weight, float(tally.samples), tally.fingerprint(), float(tally.stood_in), square_norm]
    table = gather_rows(
        torch.tensor(row + [tally.extras[name] for name in names], dtype=torch.float64, device=device), axis
    ).cpu()
    real = table[table[:, 4] == 0]
    return Agreement(
        total=float(table[:, 0].sum()),
        weight=float(table[:, 1].sum()),
        samples=int(table[:, 2].sum()),
        extras={name: float(table[:, 6 + i].sum()) for i, name in enumerate(names)},
        same_branches=bool((real[:, 3] == real[0, 3]).all()) and len(real) == len(table) if len(real) else False,
        square_norms=table[:, 5].tolist(),
    )


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
