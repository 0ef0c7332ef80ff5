"""Modules with routed experts of many kinds: each function takes nothing and returns a `Task`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, task, vectors
from torch import Tensor, nn

from shardwise import Task
from shardwise.models import tasks
from shardwise.models.moe import Experts, MoEConfig

EXPERTS, CHOICES = 4, 2


class Layer(nn.Module):
    """Residual around experts that a router, or a fixed rule, chooses."""

    def __init__(self, experts: Any, rule: str = "router"):
        super().__init__()
        self.router, self.experts, self.rule = nn.Linear(WIDTH, EXPERTS), experts(), rule

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.rule == "first":  # experts 0 and 1 take everything, the others nothing
            index = torch.arange(CHOICES).expand(len(x), CHOICES)
        else:
            index = scores.detach().topk(CHOICES).indices
        return x + self.experts(x, index, scores.gather(-1, index))


class Net(nn.Module):
    def __init__(self, experts: Any = None, rule: str = "router"):
        super().__init__()
        make = experts or partial(Experts, EXPERTS, WIDTH, 5)
        self.layers = nn.ModuleList([Layer(make, rule) for _ in range(2)])
        self.out = nn.Linear(WIDTH, OUT)
        for module in self.modules():
            for param in module._parameters.values():
                if param is not None and param.dim() == 3:
                    nn.init.normal_(param, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def only_the_first() -> Task:
    """A rank that gets no row in any layer."""
    return task(partial(Net, rule="first"))


class Frozen(Net):
    """Experts of the first layer frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].experts.requires_grad_(False)


def frozen() -> Task:
    return task(Frozen)


class Shared(Net):
    """One module of experts in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].experts = self.layers[0].experts


def shared_experts() -> Task:
    return task(Shared)


class Late(Net):
    """A layer of its own before those with experts, for a stage that holds none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def dense_at_first() -> Task:
    return task(Late)


class Biased(nn.Module):
    """Batched products, weights taken by a counter of experts, a bias each, a norm that all experts share."""

    def __init__(self) -> None:
        super().__init__()
        self.count = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 5))
        self.norm = nn.LayerNorm(5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH))

    def forward(self, weight: Tensor, *, tokens: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        hit = F.one_hot(chosen, self.count).bool()  # (T, k, E)
        for expert, up, bias, down in zip(range(self.count), self.up, self.up_bias, self.down, strict=True):
            token, choice = hit[..., expert].nonzero(as_tuple=True)
            inner = self.norm(torch.tanh(tokens[token] @ up + bias)) @ down
            y = y.index_add(0, token, inner * weight[token, choice, None])
        return y


class Renamed(Net):
    """Called by keywords, weights first."""

    def __init__(self) -> None:
        super().__init__(Biased)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            scores = layer.router(x).softmax(-1)
            index = scores.detach().topk(CHOICES).indices
            x = x + layer.experts(scores.gather(-1, index), chosen=index, tokens=x)
        return self.out(x)


def renamed() -> Task:
    return task(Renamed)


def dropout() -> Task:
    """Masks by global index in attention, beside experts."""
    config = MoEConfig(replace(tasks.TINY_DECODER, layers=2, dropout=0.1), experts=4, width=20)
    return tasks.moe().with_(model=partial(tasks.MoEDecoder, config))


def few_samples() -> Task:
    """Micro-batches with fewer samples than ranks."""
    return tasks.moe().with_(batch=partial(tasks.token_batch, samples=7, length=6))


def grouped() -> Task:
    """Mixtral with the implementation that transformers takes by default."""

    def model() -> nn.Module:
        made = tasks._hf_mixtral_model()
        made.set_experts_implementation("grouped_mm")
        return made

    return tasks.hf_mixtral().with_(model=model)


# --- what must be refused ---


class Together(Experts):
    """The result is divided by the largest of all tokens."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        y = super().forward(x, index, weight)
        return y / y.abs().max()


class Normalised(Experts):
    """Weights are made to sum to one inside, so a pair's term depends on the other pair."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x, index, weight / weight.sum(-1, keepdim=True))


class Dropping(Experts):
    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return F.dropout(super().forward(x, index, weight), 0.5)


class Mixing(Experts):
    """Every expert works with the first one's weights added."""

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        first = torch.zeros_like(index)
        return super().forward(x, index, weight) + super().forward(x, first, weight)


class Counting(Experts):
    """The load balance is kept in a buffer that each forward changes from the tokens that it sees."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            self.load += torch.bincount(index.flatten(), minlength=EXPERTS)
        return super().forward(x, index, weight)


class Balanced(Layer):
    """A bias in a buffer, moved in each forward by the counts of the tokens that this process sees."""

    def __init__(self, experts: Any, rule: str = "router"):
        super().__init__(experts, rule)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        index = (scores.detach() + self.bias).topk(CHOICES).indices
        with torch.no_grad():
            counts = torch.bincount(index.flatten(), minlength=EXPERTS).to(scores.dtype)
            self.bias += 0.01 * (counts.mean() - counts).sign()
        return x + self.experts(x, index, scores.gather(-1, index))


class Outside(Net):
    """A penalty on the experts' weights, in the model's forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0].experts.down.square().mean()


class BalancedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        make = partial(Experts, EXPERTS, WIDTH, 5)
        self.layers = nn.ModuleList([Balanced(make)])
        for param in self.layers.parameters():
            nn.init.normal_(param, std=0.3)


def net(kind: type, *sizes: int) -> Task:
    return task(partial(Net, partial(kind, *(sizes or (EXPERTS, WIDTH, 5)))))


def balanced_by_buffer() -> Task:
    return task(BalancedNet)


class Sometimes(Net):
    """The second layer runs where the first feature of some sample is large."""

    def forward(self, x: Tensor) -> Tensor:
        mark = x[:, 0].max() > 50
        x = self.layers[0](x)
        return self.out(self.layers[1](x) if mark else self.layers[0](x))


def one_large(step: int) -> dict[str, Tensor]:
    batch = vectors(step)
    if step:
        batch["x"][0, 0] = 100.0
    return batch


def sometimes() -> Task:
    return task(Sometimes, batch=one_large, branches="per_sample")


class Dealt(nn.Module):
    """Deals rows to its experts by a product with masks, for one product over all of them."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Stacked()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        masks = torch.diag_embed(scores.T)  # (E, T, T): each expert has a place for each row
        return torch.einsum("etc,ecd->td", masks, self.experts(torch.einsum("etc,td->ecd", masks, x)))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.bmm(rows, self.weights)


def dealt() -> Task:
    return task(lambda: nn.Sequential(Dealt(), nn.Linear(WIDTH, OUT)))


class Capacity(nn.Module):
    """Experts that choose tokens: each token is given all experts, most with a weight of 0."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), experts

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight = scores * (scores > scores.median(-1, keepdim=True).values)
        return x + self.experts(x, torch.arange(EXPERTS).expand(len(x), EXPERTS), weight)


def of_the_page() -> Task:
    """The module of experts that the documentation gives."""
    experts = _block_of_the_page(1)["Experts"]
    return task(lambda: nn.Sequential(Capacity(experts(EXPERTS, WIDTH, 5)), nn.Linear(WIDTH, OUT)))


def routed_on_the_page() -> Task:
    """The forward that the documentation gives for stacked weights which it deals rows to itself."""
    forward = _block_of_the_page(0)["forward"]

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, EXPERTS)
            self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) / 3)
            self.w2 = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) / 3)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    return task(lambda: nn.Sequential(Mixture(), nn.Linear(WIDTH, OUT)), branches="same")


def _block_of_the_page(number: int) -> dict[str, Any]:
    """Returns the names that a block of Python on the page of experts makes."""
    page = Path(__file__).parents[2] / "docs" / "techniques" / "expert.md"
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    exec(page.read_text().split("```python\n")[1 + number].split("```")[0], names)
    return names
