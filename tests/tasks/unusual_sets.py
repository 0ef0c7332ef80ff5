"""Tasks on rows of tables and on points: recommenders with embeddings, clouds of points, graphs of all pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from module_tasks import OUT, task
from torch import Tensor, nn
from unusual_kit import SAMPLES, draws, fields, listed, net_of

from shardwise import Task

SIZES = (11, 7, 5)


def _clicks(step: int) -> dict[str, Tensor]:
    g = draws(step)
    kinds = torch.stack([torch.randint(0, size, (SAMPLES, 3), generator=g) for size in SIZES], 1)
    return {"numbers": torch.randn(SAMPLES, 4, generator=g), "kinds": kinds, "y": torch.rand(SAMPLES, generator=g)}


def _clicked(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.binary_cross_entropy_with_logits(output, batch["y"].round(), reduction="sum"), len(output)


class Recommender(nn.Module):
    """DLRM: bags of embeddings with offsets, products of all pairs of fields, a net above."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, 6, mode="sum") for size in SIZES)
        self.bottom, self.top = net_of(4, 12, 6), net_of(6 + 6, 12, 1)
        self.register_buffer("pairs", torch.triu_indices(4, 4, 1))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        bottom = self.bottom(numbers)
        offsets = torch.arange(len(kinds)) * kinds.shape[-1]
        bags = [bag(kinds[:, place].flatten(), offsets) for place, bag in enumerate(self.bags)]
        fields = torch.stack([bottom, *bags], 1)
        products = torch.bmm(fields, fields.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], 1)).squeeze(-1)


@listed
def recommender() -> Task:
    """A recommender of embedding bags and products of their pairs (DLRM)"""
    return task(Recommender, _clicks, loss=_clicked, inputs=fields("numbers", "kinds"))


class Factorisation(nn.Module):
    """DeepFM: one table for all fields, whose rows begin at integer buffers; a factorisation machine beside a net."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("starts", torch.tensor([0, *SIZES[:-1]]).cumsum(0))
        self.linear, self.factors = nn.Embedding(sum(SIZES), 1), nn.Embedding(sum(SIZES), 6)
        self.deep, self.bias = net_of(len(SIZES) * 6, 12, 1), nn.Parameter(torch.zeros(()))

    def forward(self, kinds: Tensor) -> Tensor:
        rows = kinds[..., 0] + self.starts
        factors = self.factors(rows)
        pairs = factors.sum(1).square() - factors.square().sum(1)
        deep = self.deep(factors.flatten(1)).squeeze(-1)
        return self.bias + self.linear(rows).sum((1, 2)) + 0.5 * pairs.sum(-1) + deep


@listed
def factorisation_machine() -> Task:
    """A factorisation machine beside a net (DeepFM), one table for all fields, a bias without dims"""
    return task(Factorisation, _clicks, loss=_clicked, inputs=fields("kinds"))


def _points(step: int) -> dict[str, Tensor]:
    g = draws(step)
    return {"x": torch.randn(SAMPLES, 10, 3, generator=g), "y": torch.randn(SAMPLES, OUT, generator=g)}


class PointNet(nn.Module):
    """Points turned by a matrix that a net makes of them, features of each, the largest of all."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU())
        self.matrix = nn.Linear(8, 9)
        nn.init.zeros_(self.matrix.weight)
        self.matrix.bias.data.copy_(torch.eye(3).flatten())
        self.each = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 12, 1))
        self.leave = nn.Linear(12, OUT)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(x.mT).amax(-1)).view(-1, 3, 3)
        return self.leave(self.each(torch.bmm(x, matrix).mT).max(-1).values)


@listed
def point_net() -> Task:
    """Points of a cloud, turned, mapped each, and the largest of all (PointNet), with batch norm"""
    return task(PointNet, _points)


class EdgeConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2 * inside, outside, 1, bias=False), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(4, largest=False).indices  # (B, N, 4)
        rows = torch.arange(len(x))[:, None, None]
        beside = x[rows, near]
        here = x[:, :, None].expand_as(beside)
        return self.net(torch.cat([beside - here, here], -1).permute(0, 3, 1, 2)).amax(-1).mT


class DynamicGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.leave = EdgeConv(3, 8), EdgeConv(8, 8), nn.Linear(32, OUT)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        both = torch.cat([first, second], -1)
        return self.leave(torch.cat([both.amax(1), both.mean(1)], -1))


@listed
def dynamic_graph() -> Task:
    """Neighbours chosen anew in every layer (`cdist`, `topk`), features of edges (DGCNN)"""
    return task(DynamicGraph, _points)


class Equivariant(nn.Module):
    """Features and positions of nodes, moved along the lines to all others (EGNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.edges = nn.ModuleList(net_of(17, 12, 8) for _ in range(2))
        self.moves = nn.ModuleList(nn.Linear(8, 1, bias=False) for _ in range(2))
        self.nodes = nn.ModuleList(net_of(16, 12, 8) for _ in range(2))
        self.leave = nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h, n = self.enter(x.square().sum(-1, keepdim=True)), x.shape[1]
        apart = 1 - torch.eye(n, dtype=x.dtype)
        for edge, move, node in zip(self.edges, self.moves, self.nodes, strict=True):
            lines = x[:, :, None] - x[:, None]
            pairs = [h[:, :, None].expand(-1, n, n, -1), h[:, None].expand(-1, n, n, -1)]
            m = edge(torch.cat([*pairs, lines.square().sum(-1, keepdim=True)], -1)) * apart[..., None]
            x = x + (lines * move(m)).mean(2)
            h = h + node(torch.cat([h, m.sum(2)], -1))
        return self.leave(h.mean(1))


@listed
def equivariant_graph() -> Task:
    """A graph net over all pairs of points that moves the points too (EGNN)"""
    return task(Equivariant, _points)
