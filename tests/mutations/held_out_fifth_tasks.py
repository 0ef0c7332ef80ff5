"""Tasks of the fifth set of held-out bugs: the features that some of them need."""

from __future__ import annotations

import tempfile
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from module_tasks import pairs
from torch import Tensor, nn

from mutations.held_out_second_tasks import Segments, _squares, segments
from mutations.held_out_tasks import Biased, biased
from shardwise import Task
from shardwise.data import FieldSource
from shardwise.models.tasks import mlp


class Learned(Biased):
    """Attention whose bias by distance has a slope that is learned, for each head its own."""

    def __init__(self) -> None:
        super().__init__()
        slopes = self.slopes
        del self.slopes
        self.slopes = nn.Parameter(slopes)


class Ranked(nn.Module):
    """Attention that looks back, and each feature of all positions in the order of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 4, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, 8)
        return self.out(x) + torch.sort(x, 1).values * torch.linspace(-1, 1, s, dtype=x.dtype)[:, None]


def learned() -> Task:
    return biased().with_(model=Learned)


def ranked() -> Task:
    return biased().with_(model=Ranked)


class Chosen(Segments):
    """Keeps each cell of each channel with a chance of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x * torch.bernoulli(0.2 + 0.6 * torch.sigmoid(x.detach()))


class FirstRows(Segments):
    """The largest number in the first rows, which is negative, is added to all cells."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x + (x[:, :, :3] - 10).amax((2, 3), keepdim=True)


def chosen() -> Task:
    return segments().with_(model=Chosen, loss=_squares)


def first_rows() -> Task:
    return segments().with_(model=FirstRows, loss=_squares)


def pairs_and_a_term() -> Task:
    """A loss over all ranks' samples, with a term beside it."""
    task = pairs()

    def loss(output: Any, batch: Any) -> tuple:
        total, count = task.loss(output, batch)
        return total, count, {"again": (0.3 * total.square() / count, count)}

    return task.with_(loss=loss)


class Slowing(torch.optim.Optimizer):
    """Momentum at a rate that falls in every step, and is kept as a number of each parameter."""

    def __init__(self, params: list, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    moment = state.setdefault("moment", torch.zeros_like(param))
                    state["rate"] = 0.987 * state.get("rate", 1.0)
                    moment.mul_(0.9).add_(param.grad)
                    param.add_(moment, alpha=-group["lr"] * state["rate"])


def slowing() -> Task:
    return mlp().with_(optimizer=Slowing)


@lru_cache(maxsize=1)
def _store() -> Path:
    """A zarr store of format 3, whose mark of missing values is written as xarray writes it."""
    import zarr

    path = Path(tempfile.mkdtemp(prefix="shardwise-held-out-")) / "fields"
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    heat = np.random.default_rng(5).normal(280, 4, (60, 5, 7))
    heat[:, :, 2] = -999.0
    for name, values, dims in (("heat", heat, ["time", "y", "x"]), ("time", np.arange(60.0), ["time"])):
        made = group.create_array(name, shape=values.shape, dtype="f8", chunks=values.shape, dimension_names=dims)
        made[...] = values
        made.attrs["_FillValue"] = "AAAAAAA4j8A="  # -999.0
    group["time"].attrs["units"] = "days since 2001-03-01"
    return path


def _of_inputs(batch: dict[str, Tensor]) -> tuple:
    return (batch["inputs"],), {}


def _of_those_there(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    there = batch["targets_valid"]
    return ((output - batch["targets"]) * there).square().sum(), there.sum()


def of_fields() -> Task:
    """Fields of a store in which a column is missing."""
    return Task(
        model=lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1)),
        data=FieldSource(_store(), ["heat"], missing="mask"), inputs=_of_inputs, loss=_of_those_there,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip
