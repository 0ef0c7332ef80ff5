"""What a task leaves beside its tensors: attributes on parameters, and terms of the loss that some ranks lack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, verify
from shardwise.ranks import RankPool


class ByMarks(torch.optim.Optimizer):
    """Descent whose rate and decay are written on the parameters."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group["lr"] * getattr(param, "rate", 1.0))

    def update(self, param: Tensor, lr: float) -> None:
        kept = 1 if getattr(param, "no_decay", False) else 1 - lr / 10
        param.mul_(kept).add_(self.direction(param), alpha=-lr)

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad


class ByNorms(ByMarks):
    """The same, each tensor's gradient brought to one length: pieces do not do."""

    def direction(self, param: Tensor) -> Tensor:
        gradient = super().direction(param)
        return gradient / (1 + gradient.norm())


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.gain = nn.Parameter(torch.ones(8))
        self.gain.no_decay = True  # type: ignore[attr-defined]
        self.second.weight.rate = 0.1  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)) * self.gain)))


def rows(step: int) -> dict[str, Tensor]:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.prod(1, keepdim=True)}


def marked() -> Task:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (output - batch["y"]).square().sum(), len(output)

    return Task(model=Marked, batch=rows, inputs=lambda b: ((b["x"],), {}), loss=loss, optimizer=ByMarks)


def marked_by_norms() -> Task:
    return replace(marked(), optimizer=ByNorms)


def marked_by_choice() -> Task:
    """The function that makes the optimizer chooses by marks."""

    def chosen(groups: list[dict]) -> torch.optim.Optimizer:
        params = [param for group in groups for param in group["params"]]
        rates = [getattr(param, "rate", 1.0) for param in params]
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * r} for p, r in zip(params, rates, strict=True)], lr=0.1)

    return replace(marked(), optimizer=chosen)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=1", "dp_shard=2,zero=3", "dp_replicate=2,precision=bf16", "tp=2"])
def test_an_optimizer_reads_marks_on_parameters(plan: str, pool: RankPool) -> None:
    assert verify("test_marks_and_terms:marked", plan, pool=pool).parity


@pytest.mark.parametrize("task", ["marked_by_norms", "marked_by_choice"])
def test_of_whole_tensors_and_of_groups_too(task: str, pool: RankPool) -> None:
    assert verify(f"test_marks_and_terms:{task}", "dp_shard=2,zero=2", pool=pool).parity


# --- terms


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Linear(5, 8), nn.Linear(8, 1)
        self.box = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.score(hidden), self.box(hidden)


def with_objects(step: int) -> dict[str, Tensor]:
    """The second half has none; in step 1 nobody has."""
    found = torch.tensor([True, False, True, False, False, False]) if step != 1 else torch.zeros(6, dtype=torch.bool)
    return rows(step) | {"found": found}


def detection() -> Task:
    def loss(output: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> tuple:
        score, box = output
        main = (score - batch["y"]).square().sum(), len(score)
        found = batch["found"]
        return (*main, {"box": (box[found].abs().sum(), found.sum())}) if found.any() else main

    inputs = lambda b: ((b["x"],), {})  # noqa: E731
    return Task(model=TwoHeads, batch=with_objects, inputs=inputs, loss=loss, branches="per_sample")


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2,accumulate=3"])
def test_ranks_whose_samples_lack_a_term_meet_the_others(plan: str, pool: RankPool) -> None:
    assert verify("test_marks_and_terms:detection", plan, pool=pool).parity


def test_under_zero3_a_term_that_is_lacking_is_refused_by_its_name(pool: RankPool) -> None:
    parity = verify("test_marks_and_terms:detection", "dp_shard=2,zero=3", pool=pool)
    assert "no term 'box' for the samples of rank 1" in parity.refused
