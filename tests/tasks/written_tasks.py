"""Modules whose forward writes into its weights, switches them off, or changes what several calls of one share."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, task, vectors
from torch import Tensor, nn
from unusual_kit import draws

from shardwise import Task


class Normalised(nn.Linear):
    """Rows brought back to one length in every forward, by a copy that autograd sees as a write (EDM2)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(self.weight / (1e-2 + self.weight.norm(dim=1, keepdim=True)))
        return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Powers(nn.Module):
    """Divides a weight by its largest singular value, whose vectors are parameters set by `.data` in every forward."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside))
        self.left = nn.Parameter(F.normalize(torch.randn(outside), dim=0), requires_grad=False)
        self.right = nn.Parameter(F.normalize(torch.randn(inside), dim=0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.right.data = F.normalize(self.weight.t().mv(self.left).detach(), dim=0)
        self.left.data = F.normalize(self.weight.mv(self.right).detach(), dim=0)
        return F.linear(x, self.weight / self.left.dot(self.weight.mv(self.right)))


class Bounded(nn.Linear):
    """Rows held to a largest length, by assigning to `.data` of a weight that is trained (EEGNet)."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Scaled(nn.Linear):
    """A scale set by the weight in the first forward and trained from there on (LSQ)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("begun", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.begun == 0:
            self.scale.data.copy_(self.weight.detach().abs().mean() / math.sqrt(7))
            self.begun.fill_(1)
        return F.linear(x, self.weight * self.scale, self.bias)


def _row(layer: type) -> nn.Module:
    return nn.Sequential(layer(WIDTH, 8), nn.Tanh(), layer(8, 8), nn.Tanh(), nn.Linear(8, OUT))


def normalised() -> Task:
    return task(lambda: _row(Normalised))


def powers() -> Task:
    return task(lambda: _row(Powers))


def bounded() -> Task:
    return task(lambda: _row(Bounded))


def scaled() -> Task:
    return task(lambda: _row(Scaled))


class Block(nn.Module):
    """A residual block, one of whose layers is brought back to one length in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = Normalised(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(torch.tanh(self.enter(x)))


class AfterUse(nn.Module):
    """A residual block that shrinks a weight and a buffer once it has used them, or before, where nothing notes it."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.enter, self.weight, self.first = nn.Linear(8, 8), nn.Parameter(0.7 * torch.eye(8)), first
        self.register_buffer("scale", torch.linspace(0.5, 1.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self._shrink()
        y = torch.tanh(self.enter(x) * self.scale) @ self.weight
        if not self.first:
            self._shrink()
        return x + torch.sin(y)

    def _shrink(self) -> None:
        if self.training:
            self.weight.data.mul_(0.9)
            self.scale.data.mul_(0.8)


def after_use() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, 8), AfterUse(False), AfterUse(False), nn.Linear(8, OUT)))


def before_use() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, 8), AfterUse(True), AfterUse(True), nn.Linear(8, OUT)))


def _stack() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), *(Block() for _ in range(3)), nn.Linear(8, OUT))


def blocks() -> Task:
    return task(_stack)


def blocks_by_matrices() -> Task:
    return task(_stack, optimizer=lambda groups: torch.optim.Adafactor(groups, lr=0.01))


class Followed(nn.Module):
    """A frozen copy follows the encoder at the beginning of every forward, and is what it predicts (I-JEPA)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8))
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    @torch.no_grad()
    def follow(self) -> None:
        for mine, other in zip(self.target.parameters(), self.encoder.parameters(), strict=True):
            mine.data.mul_(0.9).add_(0.1 * other.detach().data)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.follow()
        with torch.no_grad():
            target = self.target(x)
        return self.predictor(self.encoder(x.roll(1, 1))), target


def followed() -> Task:
    return task(Followed, loss=lambda o, batch: ((o[0] - o[1]).square().sum(), len(o[0])))


class Twice(nn.Module):
    """One tower called for two pictures, which moves what it keeps in each call; `wrap` makes its layers."""

    def __init__(self, norm: type, wrap=lambda layer: layer) -> None:
        super().__init__()
        self.tower = nn.Sequential(wrap(nn.Linear(WIDTH, 8)), norm(8), nn.Tanh(), wrap(nn.Linear(8, 8)))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, OUT))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.tower(a) * self.tower(b))


def _two(step: int) -> dict[str, Tensor]:
    g = draws(step)
    made = {name: torch.randn(8, WIDTH, generator=g) for name in ("a", "b")}
    return made | {"y": torch.randn(8, OUT, generator=g)}


def _twice(*given) -> Task:
    return task(lambda: Twice(*given), _two, inputs=lambda batch: ((batch["a"], batch["b"]), {}))


def twice() -> Task:
    return _twice(nn.BatchNorm1d)


def twice_by_hooks() -> Task:
    return _twice(nn.Identity, nn.utils.spectral_norm)


class Slopes(nn.Module):
    """A critic with spectral norm by hooks, and the slopes of its score, which its forward takes (R1)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.spectral_norm
        self.score = nn.Sequential(norm(nn.Linear(WIDTH, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_(True)
        score = self.score(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score, slope


def slopes() -> Task:
    return task(Slopes, loss=lambda o, batch: (F.softplus(-o[0]).sum() + o[1].square().sum(), len(o[0])))


class Switched(nn.Module):
    """A critic whose weights get no gradient by what the maker's samples score (a GAN in one forward)."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.maker(x)
        self.critic.requires_grad_(False)
        fooled = self.critic(made)
        self.critic.requires_grad_(True)
        return fooled, self.critic(made.detach()), self.critic(x)


def switched() -> Task:
    def loss(scores, batch):
        fooled, made, real = scores
        return (F.softplus(-fooled) + F.softplus(made) + F.softplus(-real)).sum(), len(real)

    return task(Switched, loss=loss)


class Averages(nn.Module):
    """A table whose weight every forward replaces by another parameter, of averages over what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.codes = nn.Linear(WIDTH, 8), nn.Linear(8, OUT), nn.Embedding(3, 8)
        self.sums = nn.Parameter(self.codes.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        nearest = torch.cdist(h, self.codes.weight).argmin(1)
        quantised = h + (self.codes(nearest) - h).detach()
        if self.training:
            chosen = F.one_hot(nearest, 3).to(h.dtype)
            self.sums = nn.Parameter(0.9 * self.sums + 0.1 * chosen.T @ h)
            self.codes.weight = nn.Parameter(self.sums / (1 + chosen.sum(0)).unsqueeze(1))
        return self.leave(quantised)


def averages() -> Task:
    return task(Averages, loss_scope="model")


class Untied(Averages):
    """The same, its table shared with another layer until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.also = nn.Embedding(3, 8)
        self.also.weight = self.codes.weight


def untied() -> Task:
    return task(Untied, loss_scope="model")


class Table(nn.Module):
    """A table that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(3, 8))

    def forward(self, places: Tensor) -> Tensor:
        return F.embedding(places, self.weight)


class SetFromOutside(nn.Module):
    """A layer's buffer, put in place by the code that calls the layer, after the call and of what came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.codes = nn.Linear(WIDTH, 8), nn.Linear(8, OUT), Table()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        chosen = torch.cdist(h, self.codes.weight).argmin(1)
        out = self.leave(h + (self.codes(chosen) - h).detach())
        each = F.one_hot(chosen, 3).to(h.dtype)
        self.codes.weight = (0.9 * self.codes.weight + 0.1 * each.T @ h).detach()
        return out


def set_from_outside() -> Task:
    return task(SetFromOutside, loss_scope="model")


class Listed(nn.Module):
    """Weights that are parameters, and read from a table of its own by name."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, nn.Parameter] = {}
        for name, shape in (("enter", (WIDTH, 8)), ("leave", (8, OUT))):
            self.named[name] = nn.Parameter(torch.randn(shape) / 3)
            self.register_parameter(name, self.named[name])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.named["enter"]) @ self.named["leave"]


def listed() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Listed()))


class InGroups(nn.Module):
    """Samples seen in four groups, so that it runs on multiples of four alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        groups = torch.tanh(self.enter(x)).view(4, -1, 8)
        return self.leave((groups - groups.mean(0)).flatten(0, 1))


def in_groups() -> Task:
    return task(InGroups, lambda step: vectors(step, samples=16), loss_scope="model")


class Stops(nn.Module):
    """Layers until the answer is sure enough, by its values; which those are changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            if self.leave(x).softmax(-1).amax() > 0.8:
                break
        return self.leave(x)


def stops() -> Task:
    return task(Stops, loss_scope="model")
