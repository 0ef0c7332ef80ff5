"""Compare over ranks what a script gives to weights and gradients by hand, where each rank keeps a piece of it.

    p.grad = p.grad + noise            alike on every rank, since draws are
    p.grad.add_(y.mean())              of this rank's samples: pieces of different wholes would stand beside each other
    p.data.add_(p.grad, alpha=-rate)   a rate by this rank's own loss: likewise

Noted are the norm and a few elements of each tensor, and numbers, which go as one number with what ranks compare in the
next step.
Where ranks hold whole weights, those themselves are compared (`engine/alike`), before each takes its pieces of them.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from shardwise.comm import gather_json, gather_rows
from shardwise.errors import RefusedPlan
from shardwise.host import read, row_of
from shardwise.mesh import Mesh
from shardwise.scripts.saying import line_of_script

_FEW = 16  # elements of a tensor


class ByHand:
    """What one rank's script has given since ranks compared it. `note` it; `number` is compared."""

    def __init__(self, mesh: Mesh, *, alike: bool) -> None:
        """`alike`: what is drawn is the same on every rank, and so should be all that is given."""
        self._mesh, self._on = mesh, alike and mesh.world.size > 1
        self._clear()

    def _clear(self) -> None:
        self._noted: list[tuple[str, list[torch.Tensor | float]]] = []  # the script's line, and what was given there

    @torch.no_grad()
    def note(self, *given: Any) -> None:
        """Remember, to compare it, what a script gave by hand: tensors or numbers that ranks keep pieces of."""
        if self._on and given:
            self._noted.append((line_of_script(), [_few(one) for one in given]))

    def number(self) -> float:
        """Returns a number that differs between ranks which were given different things."""
        return float(zlib.crc32(repr(self._values()).encode())) if self._noted else 0.0

    def _values(self) -> list[list[float]]:
        """What was given, note by note; the device is waited for once."""
        leaves = [
            [one if isinstance(one, torch.Tensor) else torch.tensor([one]) for one in of] for _, of in self._noted
        ]
        flat = [torch.cat([one.to(self._mesh.device, torch.float64) for one in of]) for of in leaves]
        told = iter(read(torch.cat(flat), "what a script gives by hand"))
        return [[next(told) for _ in of] for of in flat]

    def compared(self, numbers: list[float]) -> None:
        """Raise `RefusedPlan` where ranks' numbers differ; else begin anew. Collective where it raises."""
        if len(set(numbers)) > 1:
            lines = [line for line, _ in self._noted]
            told = gather_json([lines, self._values() if lines else []], self._mesh.world, self._mesh.device)
            raise RefusedPlan(
                f"what the script gives to gradients or weights by hand differs between ranks{_where(told)}. Each rank "
                "keeps its piece of it, so it would be made of this rank's own samples or loss where one process has "
                'all: make it of prepared.loss or prepared.sum(...), or take prepare(..., loss_scope="global")'
            )
        self._clear()

    def compare(self) -> None:
        """Raise `RefusedPlan` where ranks were given different things, asked in a message of its own. Collective."""
        if self._on:
            table = gather_rows(row_of([self.number()], self._mesh.device), self._mesh.world)
            self.compared(table.view(-1).tolist())


def _where(told: list[Any]) -> str:
    """The first line at which a rank was given another thing than the first rank."""
    (lines, values), others = told[0], told[1:]
    for place, line in enumerate(lines):
        if any(place >= len(theirs) or repr(theirs[place]) != repr(values[place]) for _, theirs in others):
            return f", first at {line}"
    return ""


def _few(given: torch.Tensor | float) -> torch.Tensor | float:
    if not isinstance(given, torch.Tensor):
        return float(given)
    tensor = given.detach().as_subclass(torch.Tensor)
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    few = flat[:: max(1, flat.numel() // _FEW)][:_FEW].to(torch.float64, copy=True)
    return (
        torch.cat([few, torch.linalg.vector_norm(flat, dtype=torch.float64).view(1)])
        if flat.is_floating_point()
        else few
    )
