"""Tasks of the third set of held-out bugs: the features that some of them need."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import run_tasks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mutations.held_out_second_tasks import Counted, Padded, Segments, centred, padded, segments
from mutations.held_out_tasks import Biased, _before, _of_next, biased
from shardwise import Task
from shardwise.data import JsonlSource, TokenSource
from shardwise.models import tasks
from shardwise.models.tasks import decoder, mlp


def _file(name: str, write: str) -> Path:
    """Returns the path of a file of this text, written once."""
    path = Path(tempfile.gettempdir()) / f"shardwise-held-out-{name}"
    if not path.exists():
        own = path.with_name(f"{id(path)}-{path.name}")
        own.write_text(write, encoding="utf-8")
        own.replace(path)
    return path


def _tokens(name: str, count: int) -> Path:
    path = Path(tempfile.gettempdir()) / f"shardwise-held-out-{name}.npy"
    if not path.exists():
        own = path.with_name(f"{path.stem}-{id(path)}.npy")
        np.save(own, np.random.default_rng(count).integers(0, tasks.VOCAB, count).astype(np.uint16))
        own.replace(path)
    return path


def of_two_files() -> Task:
    """Windows of two files of tokens, four of which are trained on from each."""
    data = TokenSource([_tokens("few", 45), _tokens("more", 61)], 10)
    return decoder().with_(batch=None, data=data, eval_data=data, loss=_of_next, inputs=_before)


class OfBytes(Padded):
    """Learns bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(32, 256)


def answers() -> Task:
    """Answers to prompts, as JSON lines."""
    pairs = [{"prompt": "ab" * (1 + n % 3), "completion": "xyz"[: 1 + n % 2] * 2} for n in range(60)]
    path = _file("answers.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
    source = JsonlSource(path, 16, pack=False)
    return decoder().with_(model=OfBytes, batch=None, data=source, loss=_of_labels, inputs=_ids)


def _ids(batch: dict[str, Tensor]) -> tuple:
    return (batch["input_ids"],), {}


def _of_labels(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets, reduction="sum"), (targets != -100).sum()


class Kept(Counted):
    """Keeps features by chance."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h * torch.bernoulli(h.detach(), 0.8))


def kept() -> Task:
    return mlp().with_(model=Kept)


class Dropped(Counted):
    """Drops features by the operation that an accelerator has for it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.native_dropout(torch.tanh(self.first(x)), 0.4, True)[0])


def dropped() -> Task:
    return mlp().with_(model=Dropped)


class Multiplied(Biased):
    """Features are multiplied by their product over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.tanh(self.out(x)).mul(0.3).add(1).prod(1, keepdim=True))


class Gathering(Biased):
    """Features of three positions, each feature of its own ones, are added everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([[2, 9, 7, 0, 11, 4, 5, 6], [1, 3, 5, 7, 9, 11, 0, 2], [8, 8, 1, 1, 4, 4, 10, 10]])
        few = self.out(x).gather(1, places.to(x.device).expand(len(x), 3, 8))
        return super().forward(x) + few.mean(1, keepdim=True)


class Softened(Biased):
    """A soft maximum over positions is taken off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 3 * torch.logsumexp(3 * self.out(x), 1, keepdim=True)


class Split(Biased):
    """Positions in pieces of unlike lengths, put together in another order."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.out(x).split([3, 5, 4], 1)
        return super().forward(x) + torch.cat([third, first, second], 1)


def multiplied() -> Task:
    return biased().with_(model=Multiplied)


def gathering() -> Task:
    return biased().with_(model=Gathering, sequence={"x": 1})


def softened() -> Task:
    return biased().with_(model=Softened)


def split() -> Task:
    return biased().with_(model=Split, sequence={"x": 1})


class WithMean(Padded):
    """Returns the mean loss over the targets that count, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> tuple:
        targets = torch.where(tokens % 3 == 0, -100, tokens)[:, 1:].flatten()
        logits = self.head(torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens))))))
        mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        return mean, (targets != -100).sum()


def of_means() -> Task:
    return padded().with_(model=WithMean, loss=lambda output, batch: (output[0] * output[1], output[1]))


class Instances(Segments):
    """Norms of each sample that keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.InstanceNorm2d(6, affine=True, track_running_stats=True))


def instances() -> Task:
    return segments().with_(model=Instances)


class Normed(torch.optim.Optimizer):
    """Steps of one length for each weight, whatever its gradient's size."""

    def __init__(self, params: list, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad / (param.grad.norm() + 1e-4), alpha=-group["lr"])


def normed() -> Task:
    return mlp().with_(optimizer=Normed)


class Rows(nn.Module):
    """Four layers, each with what is left of it."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x))


class InPlace(Layer):
    """Writes into what its product gives."""

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).mul_(0.5).add_(1).tanh()


def in_place() -> Task:
    return centred().with_(model=lambda: Rows(InPlace))


class Offset(run_tasks.Net):
    """Adds a number of each sample to what comes out."""

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        return super().forward(x) + offset[:, None]


def offset() -> Task:
    return run_tasks.layered().with_(
        model=lambda: Offset(nn.LayerNorm), inputs=lambda batch: ((batch["x"], batch["x"][:, 0]), {})
    )


class Flattens(Layer):
    """Returns rows, of all samples and positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


class Flattened(nn.Module):
    """Sequences that the first layer makes rows of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Flattens(), Rows(Layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


def flattened() -> Task:
    return biased().with_(model=Flattened, loss=lambda output, batch: (output.square().sum(), len(output)))
