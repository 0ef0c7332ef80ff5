"""`prepared.sum`, `prepared.gather`, `prepared.deal`: numbers, rows and batches over ranks.

prepared.sum(a, b)          each value's sum over the ranks that hold different samples
prepared.gather(keys)       the rows of all samples of a batch
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.comm import gather_rows, gather_samples
from shardwise.errors import InputError
from shardwise.host import read, row_of
from shardwise.part import whole
from shardwise.scripts.gradients import Gradients
from shardwise.scripts.part_loader import PartLoader
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.weight_access import WeightAccess


class OverRanks(WeightAccess):
    """The methods of `Prepared` that add up, gather and publish over ranks."""

    loader: PartLoader
    gradients: Gradients | None  # as the script sees them, once the model is spread

    @property
    def _of_whole_batches(self) -> bool:
        """Whether every rank of the data axis computes the loss of all samples (`loss_scope="global"`)."""
        return self.calls.whole is not None

    @property
    def _apart(self) -> int:
        """How many ranks' losses are of samples that others do not have."""
        return 1 if self._of_whole_batches else self.engine.data_ranks

    def _passes(self, what: str) -> None:
        """Check that all ranks are at the same call, `what`; raises `RunError` where another is elsewhere."""
        if self.meeting is not None and self._engine is not None:
            self.meeting.passes(what)

    @names_line
    def deal(self, *batch: Any) -> Any:
        """Returns this rank's samples of a batch that the script has made by itself, alike on every rank: in place of
        what a loader would hand out, for `prepare` without one. Collective.

        batch  tensors, or tuples, lists and dicts of them, samples first; of several arguments a tuple comes back
        """
        if not self.loader.is_pushed:
            raise InputError(
                "prepared.deal: a loader was given to prepare, which deals out its batches by itself: go through it, "
                "or prepare(model, optimizer, plan=...)"
            )
        return self.loader.whole.deal(self.loader, batch[0] if len(batch) == 1 else batch)

    @names_line
    def barrier(self) -> None:
        """Wait until every rank has come here: before all read what one has written. Collective."""
        self.meet("prepared.barrier()", always=True)

    @names_line
    def sum(self, *values: torch.Tensor | float) -> list[Any]:
        """Each value's sum over the ranks that hold different samples: of a number a float, of a tensor with dims a
        tensor of its shape, without gradient. Collective.
        """
        return self._sum(*self._counted(values))

    @names_line
    def gather(self, tensor: torch.Tensor, loader: PartLoader | None = None) -> torch.Tensor:
        """Returns the rows of all samples of the batch at hand, in its order, from tensors that have one for each of a
        rank's samples: what one process has (keys for a queue, outputs for a metric). Without gradient. Collective.

        loader  what `prepared.split` returned, whose batch it is; None: the main one's
        """
        self._passes("prepared.gather(...)")
        rows, dealt = whole(tensor).detach(), self.calls.of_loss
        if self._apart == 1:
            return rows
        part = loader.part if loader is not None else dealt.part if dealt is not None else None
        held = dealt.local.count if loader is None and dealt is not None else max(1, part.count if part else 0)
        if part is None or not rows.dim() or len(rows) != held:
            raise InputError(
                f"prepared.gather: a tensor of shape {tuple(rows.shape)} has no row for each of the {held} samples "
                "that this rank has of the batch: give one whose first dim counts them"
            )
        told = gather_rows(row_of([float(part.count)], self.mesh.device), self.mesh.data)
        counts = tuple(int(count) for count in read(told.view(-1), "samples of each rank"))
        return gather_samples(rows[: part.count].contiguous(), counts, self.mesh.data, "control")

    def _counted(self, values: tuple[Any, ...]) -> list[Any]:
        """The values; in the loop nothing of those of samples that this rank holds and another one counts."""
        lead, dealt = self.calls.leader, self.calls.of_loss
        apart = self._apart > 1 and lead.in_loop and not lead.other.since
        counts = dealt is None or dealt.part.count or not apart
        return [value if counts else value * 0 for value in values]

    def _sum(self, *values: torch.Tensor | float) -> list[Any]:
        self._passes("prepared.sum(...)")
        given: list[Any] = [whole(value).detach() if isinstance(value, torch.Tensor) else value for value in values]
        rows = [_as_row(value, self.mesh.device) for value in given]
        row = torch.cat(rows) if rows else row_of([], self.mesh.device)
        total = row if self._of_whole_batches else gather_rows(row, self.mesh.data).sum(dim=0)
        parts = list(zip(total.split([len(one) for one in rows]), given, strict=True))
        plain = [part for part, value in parts if _is_number(value)]
        numbers = iter(read(torch.cat(plain), "a script's sums") if plain else [])
        return [next(numbers) if _is_number(value) else part.view(value.shape).to(value) for part, value in parts]


def _as_row(value: Any, device: torch.device) -> torch.Tensor:
    return row_of([value], device) if _is_number(value) else value.to(device, torch.float64).reshape(-1)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()
