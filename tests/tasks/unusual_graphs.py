"""Tasks of graphs, trees, sets and fields."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from module_tasks import OUT, WIDTH, sequences, task
from torch import Tensor, nn
from unusual_kit import LENGTH, SAMPLES, draws, in_space, listed

from shardwise import Domain, Task


def graphs(step: int) -> dict[str, Tensor]:
    """Graphs of eight nodes and twelve edges: nodes (B, 8, WIDTH), edges (B, 12, 2)."""
    g = draws(step)
    return {
        "nodes": torch.randn(SAMPLES, 8, WIDTH, generator=g),
        "edges": torch.randint(8, (SAMPLES, 12, 2), generator=g),
        "y": torch.randn(SAMPLES, OUT, generator=g),
    }


def on_graphs(model: Any) -> Task:
    return task(model, graphs, inputs=lambda batch: ((batch["nodes"], batch["edges"]), {}))


class IndexAdd(nn.Module):
    """All graphs of the batch side by side as one, messages added by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        graphs, count = nodes.shape[:2]
        first = torch.arange(graphs, device=nodes.device)[:, None] * count
        source, target = (edges[..., 0] + first).flatten(), (edges[..., 1] + first).flatten()
        x = nodes.flatten(0, 1)
        for message, update in zip(self.messages, self.update, strict=True):
            sent = torch.relu(message(torch.cat([x[source], x[target]], -1)))
            got = torch.zeros_like(x).index_add(0, target, sent)
            x = x + torch.tanh(update(torch.cat([x, got], -1)))
        return self.leave(x.unflatten(0, (graphs, count)).mean(1))


@listed
def graph_index_add() -> Task:
    """A message-passing graph net: the batch's graphs as one, `index_add` of messages"""
    return on_graphs(IndexAdd)


class Scatter(nn.Module):
    """A graph attention layer within each graph, by `gather` and `scatter_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.score, self.leave = nn.Linear(16, 1), nn.Linear(8, OUT)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.enter(nodes)
        source, target = (edges[..., end, None].expand(-1, -1, 8) for end in (0, 1))
        theirs, ours = x.gather(1, source), x.gather(1, target)
        weight = F.leaky_relu(self.score(torch.cat([theirs, ours], -1))).exp()
        total = torch.zeros_like(x).scatter_add(1, target, weight.expand_as(theirs))
        got = torch.zeros_like(x).scatter_add(1, target, weight * theirs)
        return self.leave(torch.tanh(x + got / (total + 1e-3)).mean(1))


@listed
def graph_attention() -> Task:
    """A graph attention layer by `gather` and `scatter_add`"""
    return on_graphs(Scatter)


class Dense(nn.Module):
    """A graph convolution by the normalised adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(8, 8)])
        self.leave = nn.Linear(8, OUT)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        joined = F.one_hot(edges, nodes.shape[1]).to(nodes.dtype)
        adjacency = torch.einsum("bes,bet->bts", joined[:, :, 0], joined[:, :, 1])
        adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            nodes = torch.relu(adjacency @ layer(nodes))
        return self.leave(nodes.amax(1))


@listed
def graph_convolution() -> Task:
    """A graph convolution by dense adjacency matrices"""
    return on_graphs(Dense)


class Recursive(nn.Module):
    """A net over trees: nodes in an order in which children come first, each composed of two earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.compose = nn.Linear(WIDTH, 8), nn.Linear(16, 8)
        self.leave = nn.Linear(8, OUT)

    def forward(self, leaves: Tensor, children: Tensor) -> Tensor:
        known = list(torch.tanh(self.enter(leaves)).unbind(1))
        rows = torch.arange(len(leaves), device=leaves.device)
        for step in range(children.shape[1]):
            stacked = torch.stack(known, 1)
            left, right = stacked[rows, children[:, step, 0]], stacked[rows, children[:, step, 1]]
            known.append(torch.tanh(self.compose(torch.cat([left, right], -1))))
        return self.leave(known[-1])


def trees(step: int) -> dict[str, Tensor]:
    g = draws(step)
    children = torch.stack([torch.randint(4 + n, (SAMPLES, 2), generator=g) for n in range(3)], 1)
    return {
        "leaves": torch.randn(SAMPLES, 4, WIDTH, generator=g),
        "children": children,
        "y": torch.randn(SAMPLES, OUT, generator=g),
    }


@listed
def tree() -> Task:
    """A recursive net over trees, whose shape is data"""
    return task(Recursive, trees, inputs=lambda batch: ((batch["leaves"], batch["children"]), {}))


class InducedSet(nn.Module):
    """A set transformer: attention by way of a few learned points, and pooling by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.points, self.seed = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(1, 8))
        self.down, self.up, self.pool = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.norm, self.leave = nn.LayerNorm(8), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        points = self.points.expand(len(x), -1, -1)
        few = self.down(points, x, x, need_weights=False)[0]
        x = self.norm(x + self.up(x, few, few, need_weights=False)[0])
        return self.leave(self.pool(self.seed.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0])


@listed
def set_transformer() -> Task:
    """A set transformer: attention over learned points, pooling by attention"""
    return task(InducedSet, lambda step: sequences(step, SAMPLES, LENGTH))


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)

    def forward(self, x: Tensor) -> Tensor:
        there = (x[..., :1] > -1).to(x.dtype)
        return self.all((torch.relu(self.each(x)) * there).sum(1) / there.sum(1).clamp(min=1))


@listed
def deep_set() -> Task:
    """A deep set: a sum over elements, of which some are masked"""
    return task(DeepSet, lambda step: sequences(step, SAMPLES, LENGTH))


def fields(step: int) -> dict[str, Tensor]:
    g = draws(step)
    return {"x": torch.randn(4, 3, 8, 9, generator=g), "y": torch.randn(4, 2, 8, 9, generator=g)}


def on_fields(model: Any, batch: Any = fields) -> Task:
    return task(model, batch, spatial=Domain(dims=(-2,)))


class Frames(nn.Module):
    """A convolutional LSTM over the frames of a film."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.leave = nn.Conv2d(3 + 4, 16, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, film: Tensor) -> Tensor:
        hidden = cell = film.new_zeros(len(film), 4, *film.shape[-2:])
        for frame in film.unbind(1):
            enter, forget, leave, new = self.gates(torch.cat([frame, hidden], 1)).chunk(4, 1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
        return self.leave(hidden)


@in_space
def convolutional_lstm() -> Task:
    """A convolutional LSTM over the frames of a film"""

    def films(step: int) -> dict[str, Tensor]:
        g = draws(step)
        return {"x": torch.randn(4, 3, 3, 8, 9, generator=g), "y": torch.randn(4, 2, 8, 9, generator=g)}

    return on_fields(Frames, films)


class Warped(nn.Module):
    """A spatial transformer: where each pixel is read is computed (`grid_sample`)."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.leave = nn.Linear(3, 6), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        plain = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=x.dtype)
        theta = (plain + 0.1 * torch.tanh(self.where(x.mean((2, 3))))).view(-1, 2, 3)
        return self.leave(
            F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        )


@in_space
def spatial_transformer() -> Task:
    """A spatial transformer: pixels read where the net says (`grid_sample`)"""
    return on_fields(Warped)


class Skipping(nn.Module):
    """Down and up again, with a skip, group norm and instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm, self.own = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.leave = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.enter(x)))
        low = F.gelu(self.own(self.down(x)))
        low = F.interpolate(low, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.leave(torch.cat([x, low], 1))


@in_space
def unet() -> Task:
    """A small U-Net: strided convolution, group and instance norm, a resize by the input's size"""
    return on_fields(Skipping)


class FourierLayer(nn.Module):
    """Weights on the lowest waves of a field (a Fourier neural operator)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.waves = nn.Parameter(torch.randn(4, 4, 3, 3, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        spectrum = torch.fft.rfft2(x)
        kept = torch.einsum("bihw,iohw->bohw", spectrum[..., :3, :3], torch.view_as_complex(self.waves))
        full = torch.zeros_like(spectrum)
        full[..., :3, :3] = kept
        return self.leave(F.gelu(x + torch.fft.irfft2(full, s=x.shape[-2:])))


@in_space
def fourier_operator() -> Task:
    """A Fourier neural operator: weights on the lowest waves of a field"""
    return on_fields(FourierLayer)
