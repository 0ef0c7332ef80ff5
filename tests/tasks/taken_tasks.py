"""Forwards that take gradients themselves, or send what values shape: each name takes nothing, returns a `Task`."""

from __future__ import annotations

from functools import partial

import torch
from module_tasks import sgd, task
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unusual_kit import net_of

from shardwise import Task

SAMPLES = 5


def _draw(step: int, *shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(step))


def _states(step: int) -> dict[str, Tensor]:
    return {"x": _draw(step, 4), "y": _draw(step + 50, 4)}


class Hamiltonian(nn.Module):
    """A motion that keeps an energy: its derivatives by places and by momenta, crosswise."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = net_of(4, 8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.requires_grad_(True)
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        place, momentum = slope.chunk(2, -1)
        return torch.cat([momentum, -place], -1)


def hamiltonian() -> Task:
    return task(Hamiltonian, _states)


class Residual(nn.Module):
    """The residual of a differential equation with a slope in time, one in space, and a curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x.requires_grad_(True)
        t = t.clone().requires_grad_(True)
        u = torch.cat([x, t], 1)
        for layer in self.layers:
            u = layer(u).tanh()
        ones = torch.ones_like(u)
        in_time = torch.autograd.grad(u, t, ones, create_graph=True)[0]
        in_space = torch.autograd.grad(outputs=u, inputs=x, grad_outputs=ones, create_graph=True)[0]
        (curve,) = torch.autograd.grad([in_space.sum()], [x], create_graph=True)
        return torch.cat([u, in_time + u * in_space - self.viscosity * curve], 1)


def residual() -> Task:
    """Loss on both; `x` and `t` lie in one tensor of the batch."""
    return task(Residual, _states, loss=_first_two, inputs=lambda b: ((b["x"][:, :1], b["x"][:, 1:2]), {}))


def _first_two(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (output - batch["y"][:, :2]).square().sum(), len(output)


class Potential(nn.Module):
    """Atoms: distances of the batch alone go into every layer, some without gradient; forces by places."""

    def __init__(self, again: bool, unused: bool) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 6)
        self.filters = nn.ModuleList([net_of(3, 6) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.out = nn.Linear(6, 1)
        self.again, self.unused = again, unused

    def forward(self, kinds: Tensor, places: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            apart = (places[:, :, None] - places[:, None]).square().sum(-1).add(0.1)
            waves = torch.stack([apart.cos(), apart.sin(), apart.rsqrt()], -1)
            with torch.no_grad():
                near = 1 / (1 + apart)
            h = self.kinds(kinds)
            for filtered, layer in zip(self.filters, self.layers, strict=True):
                mixed = (filtered(waves) * near[..., None] * h[:, None]).sum(2)
                h = h + (checkpoint(layer, mixed, use_reentrant=False) if self.again else layer(mixed)).tanh()
            energy = self.out(h).sum((1, 2)) + (near * apart).sum((1, 2))
            if not self.unused:
                return {"energy": energy, "forces": -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]}
            idle = torch.zeros_like(places).requires_grad_()
            force, none = torch.autograd.grad(energy.sum(), [places, idle], create_graph=True, allow_unused=True)
            assert none is None
            return {"energy": energy, "forces": -force}


def _atoms(step: int) -> dict[str, Tensor]:
    kinds = torch.randint(5, (SAMPLES, 3), generator=torch.Generator().manual_seed(step))
    return {"z": kinds, "r": _draw(step, 3, 3), "e": _draw(step + 7).flatten(), "f": _draw(step + 9, 3, 3)}


def _both(output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    apart = (output["energy"] - batch["e"]).square().sum() + (output["forces"] - batch["f"]).square().sum()
    return apart, len(batch["e"])


def potential(again: bool = False, unused: bool = False) -> Task:
    model = partial(Potential, again, unused)
    return Task(model=model, batch=_atoms, loss=_both, optimizer=sgd, inputs=lambda b: ((b["z"], b["r"]), {}))


def potential_again() -> Task:
    """Its layers run again in backward."""
    return potential(again=True)


def potential_unused() -> Task:
    """Gradients of two tensors, of which the energy uses one."""
    return potential(unused=True)


class Descent(nn.Module):
    """Steps down an energy of what a layer made, each by a gradient through the steps before it."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.first, self.energy, self.out = nn.Linear(4, 6), net_of(6, 8, 8, 1), nn.Linear(6, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(1 if self.way else 3):
            if self.way == "jacobian":
                step = torch.autograd.functional.jacobian(lambda x: self.energy(x).sum(), x, create_graph=True)
            elif self.way == "backward":
                leaf = x.detach().requires_grad_()
                self.energy(leaf).sum().backward(inputs=[leaf], create_graph=True)
                step = leaf.grad
            elif self.way == "weights":
                (slope,) = torch.autograd.grad(self.energy(x).square().sum(), self.energy[2].weight, create_graph=True)
                step = x * slope.sum()
            else:
                (step,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            x = x - 0.1 * step
        return self.out(x)


def descent() -> Task:
    return task(Descent, _states)


def by_jacobian() -> Task:
    return task(partial(Descent, "jacobian"), _states)


def by_backward() -> Task:
    """The backward of a tensor in the forward, which fills `.grad`."""
    return task(partial(Descent, "backward"), _states)


def by_weights() -> Task:
    return task(partial(Descent, "weights"), _states)


class Packed(nn.Module):
    """Sentences of other lengths in each batch, in packed rows between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(9, 4), nn.GRU(4, 6, batch_first=True)
        self.between, self.second, self.out = nn.Linear(6, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(
            self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        rows, _ = self.first(rows)
        rows, _ = self.second(rows._replace(data=self.between(rows.data).tanh()))
        return self.out(nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0].sum(1))


def packed() -> Task:
    def batch(step: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(step)
        words = torch.randint(9, (SAMPLES, 6), generator=draws)
        return {"x": words, "n": torch.randint(1, 7, (SAMPLES,), generator=draws), "y": _draw(step, 4)}

    return task(Packed, batch, inputs=lambda b: ((b["x"], b["n"]), {}))


class Squeezed(nn.Module):
    """Drops a dim of one without saying which, so that a single sample loses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).unsqueeze(1).squeeze()).log_softmax(1)


def squeezed() -> Task:
    return task(Squeezed, _states)


class Tangents(nn.Module):
    """Derivatives by transforms in the forward: along time, and of each sample's code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.code, self.out = nn.Linear(4, 6), net_of(6, 8, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        code, along = torch.func.jvp(self.code, (x,), (torch.ones_like(x),))
        slopes = torch.func.vmap(torch.func.jacrev(self.code))(x)
        return self.out(code) + along.sum(1, keepdim=True) + slopes.square().sum((1, 2))[:, None]


def tangents() -> Task:
    return task(Tangents, _states)


class Hessians(nn.Module):
    """Accelerations of each sample by second derivatives of an energy (`torch.func.hessian` under `vmap`)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        def moved(row: Tensor) -> Tensor:
            curves = torch.func.hessian(lambda row: self.energy(row).sum())(row)
            return torch.linalg.solve(curves + torch.eye(4, dtype=row.dtype), row)

        return torch.func.vmap(moved)(self.first(x))


def hessians() -> Task:
    return task(Hessians, _states)


class Implicit(nn.Module):
    """The fixed point of a layer, whose gradient a hook solves for, where there is any to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.norm = nn.Linear(4, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.leave = nn.Linear(6, 4)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(0.3 * self.again(z) + x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        with torch.no_grad():
            z = self.step(self.step(torch.zeros_like(x), x), x)
        z = self.step(z, x)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            end = self.step(start, x)

            def solved(gradient: Tensor) -> Tensor:
                found = gradient
                for _ in range(6):
                    found = torch.autograd.grad(end, start, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(solved)
        return self.leave(z)


def implicit() -> Task:
    return task(Implicit, _states)


def table() -> Task:
    """A table whose rows are brought to a norm where they are read."""

    def batch(step: int) -> dict[str, Tensor]:
        words = torch.randint(9, (SAMPLES, 2), generator=torch.Generator().manual_seed(step))
        return {"x": words, "y": _draw(step, 4)}

    layers = (lambda: nn.Embedding(9, 4, max_norm=0.5)), nn.Flatten, (lambda: nn.Linear(8, 6)), nn.Tanh
    return task(lambda: nn.Sequential(*(make() for make in layers), nn.Linear(6, 4)), batch)
