"""Modules and ways to make weights that a plan has to look at twice; each function returns a `Task`."""

from __future__ import annotations

import atexit
import os
import tempfile
import traceback
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from module_tasks import OUT, WIDTH, Blocks, images, sequences, task, vectors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as weight_norm_by_hooks

from shardwise import Task
from shardwise.models import tasks

# --- modules


class Recurrent(nn.Module):
    """A recurrent layer whose final state goes on, beside what it returned for each step."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.first = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True, **options)
        self.query, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        memory, state = self.first(self.enter(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.leave(memory.mean(1) + torch.tanh(self.query(last[-1])))


def final_state() -> Task:
    return task(Recurrent, sequences)


def final_state_gru() -> Task:
    return task(lambda: Recurrent("GRU", num_layers=2), sequences)


class Stacked(nn.Module):
    """Two recurrent layers, of which the second begins in the state in which the first ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        memory, state = self.first(x)
        memory, state = self.second(memory, state)
        return self.leave(memory[:, -1])


def states_go_on() -> Task:
    return task(Stacked, sequences)


class Unreached(nn.Module):
    """Two branches whose results go on together, of which the loss comes from one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = Joined()
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.both(torch.tanh(self.first(x)), torch.tanh(self.second(x))))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.where(gate > 0, self.linear(x), x)


def unreached() -> Task:
    """Its optimizer has weight decay, which moves what has a gradient of zero and not what has none."""
    return task(Unreached, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.05, weight_decay=0.1))


class Mapped(nn.Module):
    """Residual blocks, each run sample by sample by `torch.func.vmap`, or as a linear map (`jacrev`)."""

    def __init__(self, jacobian: bool = False) -> None:
        super().__init__()
        self.jacobian = jacobian
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.jacobian:
                slope = torch.func.vmap(torch.func.jacrev(lambda row, block=block: torch.tanh(block(row))))(x)
                x = x + torch.einsum("nij,nj->ni", slope, x)
            else:
                x = x + torch.func.vmap(lambda row, block=block: torch.tanh(block(row)))(x)
        return self.head(x)


def mapped() -> Task:
    return task(Mapped)


def jacobian() -> Task:
    return task(lambda: Mapped(jacobian=True))


class Sensitive(nn.Module):
    """How a network's scalar output changes with its input, sample by sample, and a linear map of that."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.leave = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.func.vmap(torch.func.grad(lambda row: self.net(row).sum()))(x))


def sensitivity() -> Task:
    return task(Sensitive)


class Jacobian(nn.Module):
    """A block whose own forward takes the derivative of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.func.vmap(torch.func.jacfwd(self.net))(x)).squeeze(1)


def jacobian_inside() -> Task:
    return task(lambda: Blocks(Jacobian))


class Rounded(nn.Module):
    """Convolutions on what it first turned into its weights' dtype, by way of a wider one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.leave = nn.Linear(4, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first((x.double() / 2).to(torch.float32))
        return self.leave(torch.tanh(self.second(torch.tanh(x))).mean((2, 3)))


def rounded_inside() -> Task:
    return task(Rounded, images)


class Fourier(nn.Module):
    """A spectral convolution with a complex weight, between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, 3, dtype=torch.cfloat) / WIDTH for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for weight in self.weights:
            modes = torch.fft.rfft(x, dim=1)
            x = torch.tanh(x + torch.fft.irfft(torch.einsum("nki,iok->nko", modes, weight), n=x.shape[1], dim=1))
        return self.leave(x.mean(1))


def complex_weights() -> Task:
    return task(Fourier, sequences, optimizer=tasks.adamw)


class Signs(torch.optim.Optimizer):
    """Moves each element by a step of one length in the gradient's direction, complex ones as one number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(torch.sgn(param.grad), alpha=group["lr"])


def complex_signs() -> Task:
    return complex_weights().with_(optimizer=lambda groups: Signs(groups))


# --- ways to make weights


def _net() -> nn.Module:
    return Blocks()


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, OUT))


def loaded() -> Task:
    """Weights from a state dict, as most people load them."""
    state = {name: torch.full_like(value, 0.1).cumsum(0) / 9 for name, value in _wide().state_dict().items()}

    def model() -> nn.Module:
        net = _wide()
        net.load_state_dict(state)
        return net

    return task(model)


@cache
def _saved(kind: str) -> str:
    """A file with the weights of a net."""
    path = Path(tempfile.gettempdir()) / f"shardwise-unlike-{os.getpid()}.{kind}"
    state = {name: torch.full_like(value, 0.1).cumsum(0) / 9 for name, value in _wide().state_dict().items()}
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    atexit.register(path.unlink, missing_ok=True)
    return str(path)


def loaded_from_file() -> Task:
    """The same by safetensors, which puts its storages under new tensors."""
    file = _saved("safetensors")

    def model() -> nn.Module:
        net = _wide()
        net.load_state_dict(load_file(file))
        return net

    return task(model)


def half_loaded() -> Task:
    """torch.load, and the module takes the tensors of the file themselves."""
    file = _saved("pt")

    def model() -> nn.Module:
        net = _wide()
        net.load_state_dict(torch.load(file), assign=True)
        return net

    return task(model)


def copied() -> Task:
    """A model that starts as the average of two others."""

    def model() -> nn.Module:
        net, other = _wide(), _wide()
        net.load_state_dict(
            {n: (a + b) / 2 for (n, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True)}
        )
        return net

    return task(model)


def own_generator() -> Task:
    """A constructor that draws with a generator of its own."""

    def model() -> nn.Module:
        generator = torch.Generator().manual_seed(7)
        net = _wide()
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 9)
            net[0].weight.normal_(0, 0.1, generator=generator)
            nn.init.uniform_(net[2].weight, -0.1, 0.1, generator=generator)
        return net

    return task(model)


def drawn_by(seed: int) -> nn.Module:
    """Weights too few to be left out, drawn with a generator of their own."""
    net, generator = nn.Linear(WIDTH, OUT), torch.Generator().manual_seed(seed)
    for param in net.parameters():
        nn.init.normal_(param, generator=generator)
    return net


def own_generator_small() -> Task:
    return task(lambda: drawn_by(7))


class Alone(nn.Linear):
    """Fails where other ranks are, as a kernel of a library may."""

    def forward(self, x: Tensor) -> Tensor:
        inside = [
            frame.name
            for frame in traceback.extract_stack()
            if frame.filename.endswith(("first_samples.py", "flow.py", "trial.py"))
        ]
        if inside:
            raise NotImplementedError("no kernel for that")
        return super().forward(x)


def fails_beside_others() -> Task:
    return task(lambda: Blocks(lambda: Alone(WIDTH, WIDTH)))


_other = [nn.Linear(WIDTH, OUT)]


def foreign_optimizer() -> Task:
    """An optimizer over parameters that are another model's."""
    return task(_net, optimizer=lambda groups: torch.optim.SGD(_other[0].parameters(), lr=0.1))


def weight_norm_hooks() -> Task:
    return task(lambda: Blocks(lambda: weight_norm_by_hooks(nn.Linear(WIDTH, WIDTH))))


def weight_normed() -> Task:
    return task(lambda: Blocks(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))


def spectral() -> Task:
    return task(lambda: Blocks(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))))


def spectral_hooks() -> Task:
    return task(lambda: Blocks(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))))


def orthogonal() -> Task:
    return task(lambda: Blocks(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH).to_sparse())
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sparse.mm(self.weight, x.T).T)


def sparse_parameter() -> Task:
    return task(Sparse, vectors)


class Gathering(nn.Module):
    """A layer written for data ranks: it centres its features on all ranks' mean, by collectives of its own."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 8), nn.Linear(8, OUT)
        self.told = told
        self.others = dist.is_initialized() and dist.get_world_size() > 1  # as libraries ask, when they are built

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        if self.others and self.told == "asked":
            sizes = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(sizes, torch.full((1,), float(len(x))))
        elif dist.is_initialized() and self.told == "step":
            dist.all_reduce(torch.zeros(1))
        return self.leave(h)


def gathers_when_built() -> Task:
    return task(partial(Gathering, "asked"))


def gathers_in_forward() -> Task:
    return task(partial(Gathering, "step"))


class IntoItsInput(nn.Module):
    """Blocks whose first layer writes into what the block is given, as dense nets' classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(2))
        self.leave = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, OUT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)  # what is added to is what the block wrote
        return self.leave(x)


def into_its_input() -> Task:
    return task(IntoItsInput)


@cache
def _table(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.linspace(0.5, 1.5, size, dtype=dtype, device=device).sin()


class Remembering(nn.Module):
    """Layers with a table that lies in a cache outside of the module: the first forward makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, OUT)

    def table(self, x: Tensor) -> Tensor:
        return _table(x.shape[1], torch.float32, x.device)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.leave(x)


def remembering() -> Task:
    return task(Remembering)


_TABLES: dict[int, Tensor] = {}


class Keeping(Remembering):
    """The same in a dict of the file's."""

    def table(self, x: Tensor) -> Tensor:
        if x.shape[1] not in _TABLES:
            _TABLES[x.shape[1]] = torch.linspace(0.5, 1.5, x.shape[1], dtype=torch.float32, device=x.device).sin()
        return _TABLES[x.shape[1]]


def keeping() -> Task:
    return task(Keeping)
