"""Tasks of the third set of held-out bugs: the features that some of them need."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mutations.held_out_second_tasks import Counted, Padded, Segments, padded, segments
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


class Multiplied(Biased):
    """Features are multiplied by their product over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.tanh(self.out(x)).mul(0.3).add(1).prod(1, keepdim=True))


class Gathering(Biased):
    """Positions read one that stands elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(x)
        places = (torch.arange(12, device=x.device) * 5 + 3) % 12
        return super().forward(x) + h.gather(1, places.view(1, 12, 1).expand(len(x), 12, 8))


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


def _mean(output: Tensor, batch: dict[str, Tensor]) -> tuple:
    """A mean over the targets that count, whose number follows as the weight."""
    targets = torch.where(batch["tokens"] % 3 == 0, -100, batch["tokens"])[:, 1:].flatten()
    count = (targets != -100).sum()
    return F.cross_entropy(output[:, :-1].flatten(0, 1), targets) * count, count


def of_means() -> Task:
    return padded().with_(loss=_mean)


class Instances(Segments):
    """Norms of each sample that keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.InstanceNorm2d(6, affine=True, track_running_stats=True))


class Wide(Segments):
    """A convolution that reads beyond the neighbours of a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Conv2d(6, 6, (9, 3), padding=(4, 1))


def instances() -> Task:
    return segments().with_(model=Instances)


def wide() -> Task:
    return segments().with_(model=Wide)
