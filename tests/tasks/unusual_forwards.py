"""Tasks whose forward decides, iterates or takes several inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, sequences, task, vectors
from torch import Tensor, nn
from unusual_kit import LENGTH, SAMPLES, draws, listed

from shardwise import Task


class Users(nn.Module):
    """A mixture in which data, a user's number, says which expert computes a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, user: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(user == number)
            if len(mine):
                y = y.index_add(0, mine, torch.tanh(expert(x[mine])))
        return self.leave(x + y)


@listed
def routed_by_user() -> Task:
    """A mixture routed by the user's number, by a loop over experts (`branches="per_sample"`)"""
    return task(
        Users,
        lambda step: vectors(step) | {"user": torch.randint(3, (7,), generator=draws(step))},
        inputs=lambda batch: ((batch["x"], batch["user"]), {}),
        branches="per_sample",
    )


class Flow(nn.Module):
    """dx/dt = f(x), by Runge and Kutta's steps of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.step(x, 1 / 3)
        return self.leave(x)

    def step(self, x: Tensor, h: float) -> Tensor:
        a = self.field(x)
        b = self.field(x + h / 2 * a)
        c = self.field(x + h / 2 * b)
        return x + h / 6 * (a + 2 * b + 2 * c + self.field(x + h * c))


@listed
def neural_ode() -> Task:
    """A neural differential equation with steps of fixed size"""
    return task(Flow)


class AdaptiveFlow(Flow):
    """The size of each step follows from the largest error of the batch, as adaptive solvers do it."""

    def forward(self, x: Tensor) -> Tensor:
        time, h = 0.0, 0.3
        while time < 1:
            h = min(h, 1 - time)
            whole, halves = self.step(x, h), self.step(self.step(x, h / 2), h / 2)
            error = float((whole - halves).detach().abs().max())
            if error < 1e-5:
                x, time = halves, time + h
            h *= min(3.0, max(0.3, 0.9 * (1e-5 / (error + 1e-12)) ** 0.2))
        return self.leave(x)


@listed
def neural_ode_adaptive() -> Task:
    """A neural differential equation whose steps depend on the largest error of the batch"""
    return task(AdaptiveFlow)


class Equilibrium(nn.Module):
    """The fixed point of a layer, found without gradients, and one step with them (a deep equilibrium)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                z = torch.tanh(0.5 * self.again(z) + x)
        return self.leave(torch.tanh(0.5 * self.again(z) + x))


@listed
def equilibrium() -> Task:
    """A deep equilibrium: thirty steps towards a fixed point without gradients, one with them"""
    return task(Equilibrium)


class Halting(nn.Module):
    """Each sample is refined until it halts: weights of steps by sample, their number by the slowest one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        left, result = torch.ones_like(x[:, :1]), torch.zeros_like(x)
        for step in range(6):
            x = torch.tanh(self.cell(x)) + x / 2
            spent = left if step == 5 else left * torch.sigmoid(self.halt(x))
            result, left = result + spent * x, left - spent
        return self.leave(result)


@listed
def halting() -> Task:
    """Adaptive computation: steps weighed by each sample's halting probability"""
    return task(Halting)


class Capsules(nn.Module):
    """Routing by agreement in three rounds (Sabour, Frosst and Hinton 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 4 * 5)
        self.votes = nn.Parameter(torch.randn(4, OUT, 5, 6) / 3)  # input capsule, output capsule, in, out

    def forward(self, x: Tensor) -> Tensor:
        poses = self.enter(x).unflatten(1, (4, 5))
        votes = torch.einsum("bip,iopq->bioq", poses, self.votes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(3):
            total = torch.einsum("bio,bioq->boq", logits.softmax(2), votes)
            size = total.square().sum(-1, keepdim=True)
            out = total * size.sqrt() / (1 + size)
            logits = logits + torch.einsum("bioq,boq->bio", votes, out)
        return out.norm(dim=-1)


@listed
def capsules() -> Task:
    """Capsules with three rounds of routing by agreement"""
    return task(Capsules)


class Codebook(nn.Module):
    """Each vector is replaced by the nearest of a codebook; the encoder's gradient goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(4, OUT)
        self.codes = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        return self.decode(z + (code - z).detach()), (code - z.detach()).square().sum() + (
            z - code.detach()
        ).square().sum()


@listed
def codebook() -> Task:
    """A vector-quantised autoencoder: the nearest of a codebook, straight-through, with its own loss"""

    def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (output[0] - batch["y"]).square().sum() + output[1], len(batch["y"])

    return task(Codebook, loss=loss)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.enter(x).chunk(2, -1)
        return self.leave(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


@listed
def variational() -> Task:
    """A variational autoencoder: noise drawn for each sample in the forward"""

    def loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        made, mean, log_variance = output
        distance = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        return (made - batch["y"]).square().sum() + distance, len(made)

    return task(Variational, loss=loss)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * gradient


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Cubed.apply(self.first(x)))


@listed
def own_function() -> Task:
    """An activation that is a `torch.autograd.Function` of one's own"""
    return task(OwnFunction)


class Solved(nn.Module):
    """Ridge regression of each sample's rows in closed form (`torch.linalg`)."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.leave = nn.Linear(WIDTH, 4), nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.features(x))
        gram = rows.mT @ rows + torch.eye(4, dtype=x.dtype, device=x.device)
        factor = torch.linalg.cholesky(gram)
        return self.leave(torch.cholesky_solve(rows.mT @ x[..., :1], factor)[..., 0])


@listed
def closed_form() -> Task:
    """Ridge regression in closed form inside the model (`torch.linalg.cholesky`)"""
    return task(Solved, lambda step: sequences(step, SAMPLES, LENGTH))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.pairwise_distance(self.tower(left), self.tower(right))


@listed
def siamese() -> Task:
    """A siamese net: one tower called twice, a loss with a margin for each pair"""

    def pairs(step: int) -> dict[str, Tensor]:
        g = draws(step)
        left, right = torch.randn(2, 7, WIDTH, generator=g)
        return {"left": left, "right": right, "same": torch.randint(2, (7,), generator=g)}

    def loss(distance: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        same = batch["same"].to(distance.dtype)
        return (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).sum(), len(distance)

    return task(Siamese, pairs, loss=loss, inputs=lambda batch: ((batch["left"], batch["right"]), {}))


@listed
def contrastive() -> Task:
    """Two towers and a loss over all pairs of the batch (`loss_scope="global"`)"""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(OUT, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)

    def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
        logits = output[0] @ output[1].t() * 5
        return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)

    return task(Towers, loss=loss, loss_scope="global", inputs=lambda batch: ((batch["x"], batch["y"]), {}))
