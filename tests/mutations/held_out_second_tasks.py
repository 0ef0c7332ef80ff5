"""Tasks of the second set of held-out bugs: the features that some of them need."""

from __future__ import annotations

from functools import partial

import domain_tasks
import pipeline_tasks
import run_tasks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mutations.held_out_tasks import Biased, biased
from shardwise import Domain, Task
from shardwise.models import tasks
from shardwise.models.tasks import mlp


class Counted(nn.Module):
    """Multiplies features by how many trials each took."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 7), nn.Linear(7, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h * torch.empty_like(h).geometric_(0.4))


def counted() -> Task:
    return mlp().with_(model=Counted)


class Noised(Counted):
    """Adds normal noise to features."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + torch.randn_like(h))


def noised() -> Task:
    return mlp().with_(model=Noised)


class Assigns(torch.optim.Optimizer):
    """Momentum, whose weights are replaced rather than written into."""

    def __init__(self, params: list, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.mul_(0.9).add_(param.grad)
                    param.data = param.data - group["lr"] * moment


def assigning() -> Task:
    return mlp().with_(optimizer=Assigns)


def factored() -> Task:
    return run_tasks.classified().with_(optimizer=partial(torch.optim.Adafactor, lr=1e-2))


class Centred(nn.Module):
    """Keeps a running mean of what its first layer gives, and takes it off behind the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
        return x - self.mean


def centred() -> Task:
    return Task(model=Centred, batch=_rows, inputs=lambda batch: ((batch["x"],), {}),
                loss=lambda output, batch: (output.square().sum(), len(output)),
                optimizer=partial(torch.optim.AdamW, lr=1e-2))  # fmt: skip


def _rows(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(step))}


class Plain(Biased):
    """Slopes in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        slopes = self.slopes
        del self.slopes
        self.slopes = slopes * 1.5


class Scored(Biased):
    """Each position is weighed by a score of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = torch.sigmoid(self.score(x).squeeze(-1))
        return super().forward(x) * score.unsqueeze(-1)


def plain() -> Task:
    return biased().with_(model=Plain)


def scored() -> Task:
    return biased().with_(model=Scored)


class Segments(nn.Module):
    """A class for each cell of a field: a chain of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(6, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Highest(Segments):
    """What is largest over the field, of each channel, is added to all cells."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x + x.amax((2, 3), keepdim=True)


class Stretched(Segments):
    """A field that is scaled by a factor close to one."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.layers(x), scale_factor=1.05, mode="bilinear")


class Sloped(Segments):
    """Differences between neighbouring rows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x[:, :, 1:] - x[:, :, :-1]


def _field(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"x": torch.randn(4, 3, 12, 14, generator=g), "y": torch.randint(4, (4, 12, 14), generator=g)}


def _of_cells(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    return F.cross_entropy(output, batch["y"], reduction="sum"), batch["y"].numel()


def _squares(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    return output.square().mean((1, 2, 3)).sum(), len(output)


def segments() -> Task:
    return Task(model=Segments, batch=_field, inputs=lambda batch: ((batch["x"],), {}), loss=_of_cells,
                optimizer=partial(torch.optim.AdamW, lr=1e-2))  # fmt: skip


def highest() -> Task:
    return segments().with_(model=Highest, loss=_squares)


def stretched() -> Task:
    return segments().with_(model=Stretched, loss=_squares)


def sloped() -> Task:
    return segments().with_(model=Sloped, loss=_squares)


class Patches(nn.Module):
    """Reads the neighbours of each cell as a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(18, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(F.unfold(x, 3, padding=1).unflatten(2, x.shape[2:]))


def patches() -> Task:
    boundary = {"lat": "reflect", "lon": "periodic"}
    return domain_tasks._task(Patches, domain_tasks._fields(2, 12, 16, samples=4),
                              spatial=Domain((-2, -1), ("lat", "lon"), boundary))  # fmt: skip


class Padded(nn.Module):
    """Words of number 0 are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(tasks.VOCAB, 16, padding_idx=0), nn.Linear(16, 32)
        self.head = nn.Linear(32, tasks.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(self.embed(tokens))))


def padded() -> Task:
    return tasks.decoder().with_(model=Padded)


def granite() -> Task:
    """A model of transformers whose scores have a factor of their own, on sequences that end early."""
    task = pipeline_tasks._causal("Granite", **pipeline_tasks.SIZES, **pipeline_tasks.WIDE, num_key_value_heads=2,
                                  attention_multiplier=0.2)  # fmt: skip
    return task.with_(inputs=_with_mask)


def _with_mask(batch: dict[str, Tensor]) -> tuple:
    tokens = batch["tokens"]
    ends = 4 + torch.arange(len(tokens), device=tokens.device)[:, None] % 6
    mask = (torch.arange(tokens.shape[1], device=tokens.device)[None] <= ends).long()
    return (), {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
