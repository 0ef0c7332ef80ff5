"""Modules of a script's model that mix samples run on those of all ranks in training, or are refused."""

from __future__ import annotations

from typing import Any

import torch
from mixing_tasks import WIDTH, Codes, Ghosts, OwnNorm, Queue, Restarted, Spread
from small_scripts import back, batches, begin, equals_one_process, made, refused_with_its_line, samples, weights_of
from torch import nn

from shardwise.errors import RefusedPlan


class Rows(nn.Module):
    """Codes of single vectors, whose loss of the batch it leaves out."""

    def __init__(self, book: type[Codes] = Codes) -> None:
        super().__init__()
        self.codes = book()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.codes(x[:, None])[0][:, 0]


class Drawing(nn.Module):
    """Dropout before and behind codes that begin anew at drawn vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.rows, self.behind = nn.Dropout(0.2), Rows(Restarted), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.rows(self.before(x)))


MIXING = {"norm": OwnNorm, "queue": lambda: nn.Sequential(Queue(), nn.Linear(WIDTH + 1, WIDTH)), "codes": Rows,
          "ghosts": Ghosts, "drawing": Drawing,
          "spread": lambda: nn.Sequential(Spread(), nn.Linear(WIDTH + 1, WIDTH))}  # fmt: skip


def trained(plan: str | None, kind: str, read_by_one: bool = False) -> tuple:
    """Two epochs of batches of 4, 4 and (but where norms take more) 1, with an evaluation of all samples after each."""
    model = made(lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), MIXING[kind](), nn.Linear(WIDTH, 2)))
    prepared, model, optimizer, loader = begin(plan, model, batches(8 if kind in ("norm", "ghosts") else 9))
    held_out = torch.stack([x for x, _ in samples(5)])
    losses, outputs = [], list[Any]()
    for _ in range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(back(prepared, (model(x) - y).square().mean()))
            optimizer.step()
        model.eval()
        # as scripts do that write pictures; others run no forward then
        if not read_by_one or prepared is None or prepared.rank == 0:
            with torch.no_grad():
                outputs.append(model(held_out).sum().item())
    return losses, weights_of(prepared or model), outputs if not read_by_one else []


test_a_script_equals_one_process = equals_one_process(
    [
        (trained, "dp_replicate=2", "norm", True), (trained, "dp_shard=2,zero=3", "codes"),
        (trained, "dp_shard=2,zero=1", "queue"), (trained, "dp_replicate=2", "drawing"),
    ],
    [
        (trained, "dp_shard=2,zero=3", "ghosts"), (trained, "dp_replicate=2", "codes", True),
        (trained, "tp=2,dp_shard=2", "queue"), (trained, "dp_shard=2,zero=3", "drawing"),
    ],
)  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(
    [(trained, "dp_replicate=2", "spread", RefusedPlan, "mixes the samples of a batch, in evaluation too")]
)
