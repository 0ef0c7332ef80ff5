"""Tasks of the second set of held-out bugs: the features that some of them need."""

from __future__ import annotations

from functools import partial

import domain_tasks
import pipeline_tasks
import run_tasks
import taken_tasks
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
    return run_tasks.layered().with_(optimizer=partial(torch.optim.Adafactor, lr=1e-2))


def assigned() -> Task:
    return run_tasks.layered().with_(optimizer=Assigns)


class Centred(nn.Module):
    """Takes off a running mean of what it is given, which is brought up to date at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, given: Tensor) -> Tensor:
        x = given - self.mean
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.mean.lerp_(given.mean(0), 0.1)
        return x


def centred() -> Task:
    return Task(model=Centred, batch=_rows, inputs=lambda batch: ((batch["x"],), {}),
                loss=lambda output, batch: (output.square().sum(), len(output)),
                optimizer=partial(torch.optim.AdamW, lr=1e-2))  # fmt: skip


def _rows(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(step))}


class Plain(Biased):
    """A table in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0, 9, 1024 * 8).view(1024, 8).cos()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[1]].to(x.dtype))


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


class Uneven(Segments):
    """The second convolution reads further to one side than to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Conv2d(6, 6, 4, padding="same")


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


def uneven() -> Task:
    return segments().with_(model=Uneven)


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


class Halved(taken_tasks.Residual):
    """Layers give twice as much, of which the second half goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Half(2, 8), Half(8, 8), Half(8, 8), Half(8, 1)])


class Half(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.map = nn.Linear(before, 2 * after)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).chunk(2, 1)[1]


def halved() -> Task:
    return taken_tasks.residual().with_(model=Halved)


def _sometimes(output: Tensor, batch: tuple) -> tuple:
    """A term over the samples of one class, which some ranks do not have."""
    total, weight = tasks.feature_loss(output, batch)
    chosen = output[batch[1] == 1]
    return (total, weight, {"length": (chosen.square().sum(), len(chosen))} if len(chosen) else {})


def sometimes() -> Task:
    return mlp().with_(loss=_sometimes)


class Transposed(Padded):
    """Multiplies by a transposed weight in its own words."""

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.embed(tokens) @ self.first.weight.t() + self.first.bias)
        return h @ self.head.weight.t()


def transposed() -> Task:
    return padded().with_(model=Transposed)
