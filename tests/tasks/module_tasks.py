"""Modules that nobody prepared for distribution: each function takes nothing and returns a `Task`."""

from __future__ import annotations

import random
import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from shardwise import Task
from shardwise.models import tasks

WIDTH = 6
OUT = 3


def vectors(step: int, samples: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step + 100)
    return {"x": torch.randn(samples, WIDTH, generator=g), "y": torch.randn(samples, OUT, generator=g)}


def sequences(step: int, samples: int = 7, length: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step + 100)
    return {"x": torch.randn(samples, length, WIDTH, generator=g), "y": torch.randn(samples, OUT, generator=g)}


def images(step: int, samples: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step + 100)
    return {"x": torch.randn(samples, 3, 6, 6, generator=g), "y": torch.randn(samples, OUT, generator=g)}


def tokens(step: int, samples: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step + 100)
    return {"x": torch.randint(20, (samples, 5), generator=g), "y": torch.randn(samples, OUT, generator=g)}


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch["y"]).square().sum(), len(batch["y"])


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def task(model: Any, batch: Any = vectors, **changes: Any) -> Task:
    fields = {"loss": squares, "inputs": lambda b: ((b["x"],), {}), "optimizer": sgd}
    return Task(model=model, batch=batch, **{**fields, **changes})


def several_buckets() -> Task:
    """Weights of 1.5 MB, whose gradients fill more than one bucket."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 256), *(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, OUT))

    return task(model, optimizer=tasks.adamw)


class Blocks(nn.Module):
    """Residual blocks of any kind; `step(block, x)` is what is done with each."""

    def __init__(self, make: Any = None, step: Any = None):
        super().__init__()
        self.blocks = nn.ModuleList([make() if make else nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, OUT)
        self.step = step or (lambda block, x: torch.tanh(block(x)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(x)


# --- randomness ---


def _two_draws(block, x):
    """Two draws of one op and one number of dims, along different dims."""
    return torch.tanh(block(x + torch.randn(x.shape[0], 1) + torch.randn(1, x.shape[1])))


def _layer_drop(block, x):
    return x + torch.tanh(block(x)) if torch.rand(1) > 0.6 else x


def _layer_drop_python(block, x):
    return x + torch.tanh(block(x)) if random.random() > 0.4 and np.random.rand() > 0.2 else x


def _categorical(block, x):
    drawn = torch.multinomial(x.softmax(-1), 2)
    return x + block(F.one_hot(drawn, WIDTH).sum(1).to(x)) + torch.normal(0.0, 0.1, x.shape)


def _masked_rows(block, x):
    """Dropout on the rows that a mask selects: no dim of it is the batch."""
    return x.index_put((x[:, 0] > 0,), F.dropout(block(x[x[:, 0] > 0]), 0.4))


def _time_before_samples(block, x):
    """A dim that holds (row, sample), samples last: it grows with the samples, but they do not lie in order."""
    rows = torch.stack([x, 2 * x]).flatten(0, 1)
    return torch.tanh(block(F.dropout(rows, 0.4).view(2, *x.shape).sum(0)))


def two_draws() -> Task:
    return task(lambda: Blocks(step=_two_draws))


def layer_drop() -> Task:
    return task(lambda: Blocks(step=_layer_drop))


def layer_drop_python() -> Task:
    return task(lambda: Blocks(step=_layer_drop_python))


def categorical() -> Task:
    return task(lambda: Blocks(step=_categorical))


def masked_rows() -> Task:
    return task(lambda: Blocks(step=_masked_rows))


def time_before_samples() -> Task:
    return task(lambda: Blocks(step=_time_before_samples))


def last_sample_first() -> Task:
    return task(lambda: Blocks(step=lambda block, x: torch.tanh(block(F.dropout(x.flip(0), 0.4).flip(0)))))


class TimeFirst(nn.Module):
    """Layers with the batch in dim 1, some of them dropped by chance, where time and samples are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2) for _ in range(2)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            if torch.rand([]).item() > 0.6:
                x = layer(x)
        return self.head(x.mean(0))


def time_first() -> Task:
    return task(TimeFirst, lambda step: sequences(step, 8, 8))


def random_loss() -> Task:
    """Diffusion-like: the loss itself draws times, weights and noise."""

    def loss(output: Tensor, batch: Any):
        times = torch.randint(0, 10, (len(output),))
        weights = torch.rand(len(output))
        error = (output - torch.randn_like(output)).square().mean(-1)
        return (error * weights * (times + 1)).sum(), weights.sum()

    return task(Blocks, loss=loss)


# --- complex weights, as pairs ---


class ComplexPairs(nn.Module):
    """Weights of odd sizes around one whose pairs are read as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH, 3, 2))
        self.head = nn.Linear(3, OUT)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.complex(x, x) @ torch.view_as_complex(self.pairs)
        return self.head(mixed.real * mixed.imag) * self.scale


def complex_pairs() -> Task:
    return task(ComplexPairs)


# --- batch norm and state ---


class Normed(nn.Module):
    def __init__(self, *, checkpointed: bool = False, **options: Any):
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, **options), nn.ReLU()) for _ in range(2)]
        )
        self.last = nn.BatchNorm1d(3, **options)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x.mean((2, 3)))


def norm_without_statistics() -> Task:
    return task(lambda: Normed(track_running_stats=False), images)


def norm_cumulative() -> Task:
    return task(lambda: Normed(momentum=None), images)


def norm_in_checkpoint() -> Task:
    """One process counts such a batch norm twice: forward, and again in backward."""
    return task(lambda: Normed(checkpointed=True), images)


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.head = nn.Linear(64, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.batch_norm(self.conv(x), self.mean, self.var, training=self.training).flatten(1))


def norm_functional() -> Task:
    return task(FunctionalNorm, images)


def instance_norm_statistics() -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten(), nn.Linear(108, OUT))

    return task(model, images)


class Counting(nn.Module):
    """Counts its forwards in a buffer, an attribute and a list, and computes with the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        self.history.append(self.number)
        return torch.tanh(self.linear(x)) * (1 + 0.1 * (self.calls.item() + self.number + len(self.history)))


def counting() -> Task:
    return task(lambda: Blocks(Counting))


def spectral() -> Task:
    return task(lambda: Blocks(lambda: nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())))


def spectral_by_hooks() -> Task:
    return task(lambda: Blocks(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))))


def weight_normed() -> Task:
    return task(lambda: Blocks(lambda: weight_norm(nn.Linear(WIDTH, WIDTH))))


class Teacher(nn.Module):
    """A student, and a teacher that follows it inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, OUT))
        self.teacher = deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.data.mul_(0.9).add_(ours.data * 1.1, alpha=0.1)
            target = self.teacher(x)
        return self.student(x) + 0.5 * target


def teacher() -> Task:
    return task(Teacher)


# --- parameters of unusual kinds ---


class Odd(nn.Module):
    """A parameter without dims, one without elements, integers, and one held in an unusual order of dims."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, OUT)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, OUT))
        self.index = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(OUT, OUT).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, self.index] @ self.turned * self.scale + self.empty.sum()


def odd_parameters() -> Task:
    return task(Odd)


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.part = nn.Parameter(self.whole.data[:OUT])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.whole @ self.part.t()


def shared_memory() -> Task:
    return task(Viewed)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, OUT))
        self.parts = [self.weight[: WIDTH // 2], self.weight[WIDTH // 2 :]]

    def forward(self, x: Tensor) -> Tensor:
        return sum(half @ part for half, part in zip(x.chunk(2, dim=1), self.parts, strict=True))


def kept_views() -> Task:
    return task(Kept)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, OUT, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


def complex_parameter() -> Task:
    return task(Complex)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x).mean(1))


def sparse_gradients() -> Task:
    return task(Rows, tokens, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))


def sparse_adam() -> Task:
    def optimizer(groups: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam([param for group in groups for param in group["params"]], lr=0.01)

    return task(lambda: nn.EmbeddingBag(20, OUT, sparse=True), tokens, optimizer=optimizer)


# --- structure ---


class Crossing(Blocks):
    """The root uses a weight of one of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.blocks[0].weight)


class Down(nn.Module):
    """Two layers, of which each is a block, as the whole is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Around(nn.Module):
    """A way down, what lies below it, and the sum."""

    def __init__(self, downsample: nn.Module, below: nn.Module):
        super().__init__()
        self.downsample, self.below = downsample, below

    def forward(self, x: Tensor) -> Tensor:
        return x + self.below(self.downsample(x))


class TwoNames(nn.Module):
    """Ways down with two names: where they are used, of which each layer is a block, and in a list, each a block."""

    def __init__(self) -> None:
        super().__init__()
        downs, self.skips = nn.ModuleList(Down() for _ in range(4)), nn.Module()
        for down in reversed(downs):
            self.skips = Around(down, self.skips) if isinstance(self.skips, Around) else Around(down, nn.Tanh())
        self.downs = downs
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.skips(x))


def two_names() -> Task:
    return task(TwoNames)


def weight_used_outside() -> Task:
    return task(Crossing)


def weight_used_outside_of_one_module() -> Task:
    """The task gives the module that it has, every time."""
    made = Crossing()
    return task(lambda: made)


class TableForEval(nn.Module):
    """Looks its biases up in a table, which `train` makes for eval mode, and by its own way the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.head = nn.Parameter(torch.randn(5)), nn.Linear(WIDTH, OUT)
        self.register_buffer("places", torch.arange(WIDTH) % 5)

    @torch.no_grad()
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode and hasattr(self, "table"):
            del self.table
        else:
            self.table = self.biases[self.places]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + (self.biases[self.places] if self.training else self.table)))


def table_for_eval() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), TableForEval()))


class Depthwise(nn.Module):
    """A convolution of each channel alone, two results for each, between two that mix channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, 4, 1), nn.Linear(WIDTH, OUT)
        self.each, self.last = nn.Conv1d(4, 8, 3, padding=1, groups=4), nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.each(torch.tanh(self.first(x.unsqueeze(1))))
        return self.head(self.last(torch.tanh(x)).squeeze(1))


def depthwise() -> Task:
    return task(Depthwise)


class Telling(Blocks):
    """The output holds a weight of a block, as a learned temperature would be."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.blocks[1].bias


def weight_of_a_block_in_the_output() -> Task:
    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        return squares(output[0] * output[1].sum().exp(), batch)

    return task(Telling, loss=loss)


def reentrant_twice() -> Task:
    """One block, run three times under a reentrant checkpoint."""
    shared: list[nn.Module] = []

    def step(block: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(shared[0], x.requires_grad_(), use_reentrant=True))

    def model() -> nn.Module:
        made = Blocks(step=step)
        shared[:] = [made.blocks[0]]
        return made

    return task(model)


class TiedReentrant(nn.Module):
    """A weight that is used in the open and, again, under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.again.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.enter(x))))
        return self.leave(torch.tanh(checkpoint(self.again, x, use_reentrant=True)))


def tied_reentrant() -> Task:
    return task(TiedReentrant)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        chosen = shares.argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                y[mine] = expert(x[mine]) * shares[mine, number, None]
        return x + y


def routed_experts() -> Task:
    return task(lambda: Blocks(Experts), branches="per_sample")


# --- contrastive ---


class Pairs(nn.Module):
    def __init__(self, returned: str, dims: tuple[int, ...]):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(OUT, 4)
        self.scale = nn.Parameter(torch.full(dims, 1.2))
        self.returned = returned

    def forward(self, x: Tensor, y: Tensor) -> Any:
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        if self.returned == "logits":
            return left @ right.t() * self.scale
        return left, right, self.scale


def _contrast(logits: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


def _pairs(returned: str, dims: tuple[int, ...]) -> Task:
    def loss(output: Any, batch: Any):
        return _contrast(output if returned == "logits" else output[0] @ output[1].t() * output[2].exp().sum())

    return task(lambda: Pairs(returned, dims), loss=loss, loss_scope="global", inputs=lambda b: ((b["x"], b["y"]), {}))


class _GivesViews(nn.Module):
    """A block that returns a view of what it computes, and one of what it is given."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x).tanh())[None].squeeze(0), x.view(-1, WIDTH)


def adds_to_views() -> Task:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(_GivesViews() for _ in range(3))
            self.head = nn.Linear(WIDTH, OUT)

        def forward(self, x):
            for block in self.blocks:
                y, same = block(x)
                y += same
                x = y.mul_(0.5)
            return self.head(x)

    return Task(model=Net, batch=vectors, loss=squares, inputs=lambda b: ((b["x"],), {}), optimizer=sgd)


def pairs() -> Task:
    return _pairs("embeddings", ())


def pairs_with_as_many_scales() -> Task:
    """A parameter in the output whose size is the number of samples on some rank."""
    return _pairs("embeddings", (3,))


def pairs_of_logits() -> Task:
    return _pairs("logits", ())


class Penalised(nn.Module):
    """Takes the gradient of its own score by its input, which the loss holds to a length (WGAN-GP)."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(WIDTH, 9), nn.Softplus(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, OUT))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        scores = self.score(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores * (slope.norm(dim=1, keepdim=True) - 1)


def penalised() -> Task:
    return task(Penalised)


def gradient_hook() -> Task:
    def make() -> nn.Module:
        layer = nn.Linear(WIDTH, OUT)
        layer.weight.register_hook(lambda gradient: gradient * 0.9)
        return layer

    return task(make)


class Hooked(nn.Module):
    """Asks, without looking whether there is a gradient, that it be scaled, held to a size, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(lambda gradient: (gradient * 0.5).clamp(-0.1, 0.1))
            x.retain_grad()
        return self.head(x)


def hooked() -> Task:
    return task(Hooked)


class _Reversed(torch.autograd.Function):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), whose backward finds x1 and x2 again; weights are among its arguments."""

    @staticmethod
    def forward(ctx: Any, x1: Tensor, x2: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor) -> tuple:
        y1 = x1 + f(x2)
        y2 = x2 + g(y1)
        ctx.modules = f, g
        ctx.save_for_backward(y1, y2)
        return y1, y2

    @staticmethod
    def backward(ctx: Any, d1: Tensor, d2: Tensor) -> tuple:
        (f, g), (y1, y2) = ctx.modules, (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            inner = g(y1)
            more, *of_g = torch.autograd.grad(inner, [y1, *g.parameters()], d2)
            x2 = (y2 - inner).detach().requires_grad_()
            d1 = d1 + more
            more, *of_f = torch.autograd.grad(f(x2), [x2, *f.parameters()], d1)
        return d1, d2 + more, None, None, *of_f, *of_g


class Reversible(nn.Module):
    """A reversible net (RevNet), whose function is given the weights of the blocks that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = (nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.sin(), x.cos()
        for f, g in zip(self.f, self.g, strict=True):
            a, b = _Reversed.apply(a, b, f, g, *f.parameters(), *g.parameters())
        return self.head(torch.cat([a, b], -1))


def reversible() -> Task:
    return task(Reversible)


def _over_neighbours(block, x):
    """Each sample's features added to their neighbours', by a sparse matrix that the forward makes."""
    at, size = torch.arange(x.numel()), (x.numel(), x.numel())
    ones = torch.ones(x.numel(), dtype=x.dtype)
    near = torch.sparse_coo_tensor(torch.stack([at, at - at % WIDTH]), ones, size, check_invariants=False)
    return torch.tanh(block(x) + torch.sparse.mm(near.coalesce(), x.reshape(-1, 1)).view(x.shape))


def sparse_graph() -> Task:
    return task(lambda: Blocks(step=_over_neighbours))


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) * torch.sigmoid(y) + x


class Scripted(Blocks):
    """Blocks joined by a function that torch.jit compiles, and changes in its first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.step = lambda block, x: gated(block(x), x)
        with warnings.catch_warnings(action="ignore"):
            gated = torch.jit.script(_gated)


def scripted() -> Task:
    return task(Scripted)


def drops_a_single_sample() -> Task:
    """Without its batch dim, where the batch has one sample."""
    return task(lambda: Blocks(step=lambda block, x: torch.tanh(torch.stack(block(x).squeeze().unbind(1), 1))))


class SharedModule(nn.Module):
    """One layer that lies in two of its blocks."""

    class Block(nn.Module):
        def __init__(self, both: nn.Module) -> None:
            super().__init__()
            self.both, self.own = both, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(torch.tanh(self.both(x)))

    def __init__(self) -> None:
        super().__init__()
        both = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block(both) for _ in range(2))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks[1](self.blocks[0](x)))


def shared_module() -> Task:
    return task(SharedModule)


class Distributions(nn.Module):
    """Gives objects that hold its tensors, and a learned deviation among them, with no tensor beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, OUT))
        self.deviation = nn.Parameter(torch.ones(OUT))

    def forward(self, x: Tensor) -> dict[str, Any]:
        normal = torch.distributions.Normal(self.body(x), self.deviation)
        return {"next": torch.distributions.Independent(normal, 1)}


def distributions() -> Task:
    return task(Distributions, loss=lambda output, batch: (-output["next"].log_prob(batch["y"]).sum(), len(batch["y"])))


class WritesIntoProducts(nn.Module):
    """Blocks that write into what their products gave: an activation, a view, some rows."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.clamp_(min=0.1)
            h[:, :1].mul_(2.0)
            y = self.second(h)
            seen = y.view(-1, WIDTH)
            y.transpose(0, 1).add_(0.25)
            return y + x + seen.view(y.shape)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack((x, x.flip(1)), 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def writes_into_products() -> Task:
    return task(WritesIntoProducts)


class AssignsData(nn.Module):
    """A weight, and what products gave, replaced by way of `.data`: by values cut alike, a sum's, and whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.clamp(-0.3, 0.3)
        h = self.first(x)
        h.data = h.data.clamp(-0.5, 0.5)
        y = self.second(h)
        y.data = y.data * 2
        seen = torch.zeros_like(x)
        seen.data = self.second(h).detach()
        h = self.first(y * seen)
        h.data = x.new_full(h.shape, 0.5)
        return self.head(y + self.second(h * h))


def assigns_data() -> Task:
    return task(AssignsData)


def few_samples() -> Task:
    """Five samples: cut into three micro-batches over three or four ranks, some ranks have none and run a stand-in."""
    return tasks.decoder_dropout().with_(batch=five_sequences, name="few_samples")


def five_sequences(step: int) -> dict[str, Tensor]:
    return tasks.token_batch(step, samples=5, length=10)


class Joined(nn.Module):
    """Dropout on x and half of x as one batch, [x; x / 2], and on each sample's two rows in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 6), nn.Linear(6, tasks.CLASSES)
        self.joined, self.rows = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.joined(self.layer(torch.cat([x, x / 2]))).tanh().chunk(2)
        return self.head(self.rows(torch.stack([first, second], 1).flatten(0, 1)).view(len(x), 2, -1).sum(1))


def joined() -> Task:
    return tasks.mlp().with_(model=Joined)


class Autocast(nn.Module):
    """A body that computes in 16 bits whatever the precision, between layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            inside = self.body(self.stem(x).tanh())
        return self.out(inside.to(x.dtype))


def autocast() -> Task:
    return task(Autocast)
