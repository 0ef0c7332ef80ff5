"""What a proof looks at, and when agreement is worth nothing."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from mutations.plant import Bug
from mutations.run import try_bug
from torch import Tensor, nn

from shardwise import Task, verify
from shardwise.cli.main import call
from shardwise.models import tasks
from shardwise.proof.compare_records import compare, tensor_error
from shardwise.proof.oracle import run_oracle
from shardwise.proof.outcome import FLOAT64_BARS, Parity
from shardwise.proof.record import Record
from shardwise.proof.rounding import explain_by_rounding, nudged_runs
from shardwise.proof.settings import Settings
from shardwise.ranks import RankPool
from shardwise.trace.double import KeepDouble


def sgd(groups: list[dict], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr)


def still() -> Task:
    return tasks.mlp().with_(optimizer=partial(sgd, lr=0.0))


def flat_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output * 0).sum(), len(batch[1])


def flat() -> Task:
    return tasks.mlp().with_(loss=flat_loss)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12 * tasks.CLASSES).view(12, tasks.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def one_weight() -> Task:
    return tasks.mlp().with_(model=One)


@pytest.mark.parametrize(("name", "why"), [("still", "no parameter moved"), ("flat", "every gradient is zero")])
def test_agreement_on_nothing_is_no_proof(name: str, why: str, pool: RankPool) -> None:
    parity = verify(f"test_proof:{name}", "dp_replicate=2", pool=pool)
    assert parity.equal and not parity.parity
    assert why in parity.unproven[0] and parity.text().endswith("NOT PROVEN")
    assert parity.as_dict()["unproven"] == parity.unproven


def test_the_scope_is_told(pool: RankPool) -> None:
    parity = verify("test_proof:one_weight", "dp_replicate=2", steps=1, pool=pool)
    assert parity.parity
    assert any("in one bucket" in note for note in parity.notes)
    assert any(note.startswith("scope: one step") for note in parity.notes)
    more = verify("shardwise.models.tasks:mlp_frozen_unused", "dp_shard=2,zero=1", pool=pool)
    assert more.parity and not any("bucket" in note or "one step" in note for note in more.notes)
    assert any("has a gradient of zero in every step" in note for note in more.notes)


class BeforeNorm(nn.Module):
    """A bias before a batch norm: its true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def before_norm() -> Task:
    return tasks.mlp().with_(model=BeforeNorm)


def test_the_raised_eps_is_told_with_whom_it_changes() -> None:
    notes = run_oracle(before_norm(), Settings()).notices
    assert any("eps raised from 1e-08 to 0.0001 on both sides" in note for note in notes)
    assert any("the gradient of 'first.bias' is zero but for rounding" in note for note in notes)
    large = tasks.mlp().with_(optimizer=lambda groups: torch.optim.AdamW(groups, eps=1e-3))
    assert not any("eps" in note for note in run_oracle(large, Settings()).notices)


def record(losses: list[float], weight: Tensor) -> Record:
    found = Record(losses=losses, norms=[1.0] * len(losses), lr=0.1, trained={"w"}, initial={"w": weight})
    for step in range(len(losses)):
        found.parameters.append({"w": weight + step + 1})
        found.gradients.append({"w": weight})
        found.buffers.append({})
        found.states.append({})
    return found


@pytest.mark.parametrize("losses", [[float("nan"), 1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_loss_that_is_no_number_fails_in_any_step(losses: list[float]) -> None:
    parity = Parity("single", 1)
    compare(parity, record(losses, torch.ones(3)), record(losses, torch.ones(3)))
    assert parity.loss_error == float("inf") and not parity.parity


def test_gradients_that_are_not_finite_leave_a_floor_for_those_that_are() -> None:
    records = [Record(lr=0.1) for _ in range(2)]
    for record, zero in zip(records, (0.0, 1e-12), strict=True):
        record.losses, record.norms, record.trained = [1.0], [1.0], {"a", "b"}
        tensors = {"a": torch.tensor([float("nan")]), "b": torch.tensor([zero])}
        record.gradients, record.states, record.buffers = [tensors], [{}], [{}]
        record.initial, record.parameters = (
            {"a": torch.zeros(1), "b": torch.zeros(1)},
            [dict.fromkeys("ab", torch.ones(1))],
        )
    parity = Parity("", 1)
    compare(parity, *records)
    assert parity.gradient_error["a"] == float("inf") and not parity.equal


def test_a_text_lists_some_differences_and_counts_the_rest() -> None:
    parity = Parity("tp=2", 2, loss_error=1.0, bars=dict(FLOAT64_BARS), differences=[f"tensor {n}" for n in range(30)])
    lines = [line for line in parity.text().splitlines() if "different:" in line]
    assert lines[0] == "  different: tensor 0" and lines[-1] == "  different: and 22 more (--json)" and len(lines) == 9


def test_values_that_are_no_numbers_are_equal_where_they_are_the_same() -> None:
    mask = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert tensor_error(mask, mask.clone(), 1.0) == 0
    assert tensor_error(mask.t(), mask, 1.0) == float("inf")
    bad = torch.tensor([1.0, torch.nan])
    assert tensor_error(bad, bad.clone(), 1.0) == float("inf")


def test_complex_values_are_compared_as_complex() -> None:
    a = torch.complex(torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert tensor_error(a + 0.5j, a, 1e-9) == pytest.approx(0.5)
    assert tensor_error(a, a.real, 1e-9) == float("inf")


# --- the command, with a real proof


class Lent:
    """The session's ranks in place of ranks of the command's own."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool

    def __call__(self, accelerators: bool = False, own_backend: bool = False) -> Lent:
        return self

    def __enter__(self) -> RankPool:
        return self.pool

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [("one_weight", 0, "EQUAL to one process"), ("still", 1, "NOT PROVEN"), ("heavy", 1, "NOT EQUAL to one process")],
)
def test_the_exit_code_is_the_verdict(
    name: str, code: int, verdict: str, pool: RankPool, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr("shardwise.ranks.RankPool", Lent(pool))
    task = "test_parity:heavy_weight" if name == "heavy" else f"test_proof:{name}"
    assert call(["verify", task, "--plan", "dp_replicate=2", "--steps", "1", "--clip-norm", "0.1"]) == code
    assert capfd.readouterr().out.splitlines()[-1] == verdict
    assert call(["verify", task, "--plan", "dp_replicate=2", "--json"]) == code
    fields = json.loads(capfd.readouterr().out)
    assert fields["parity"] is (code == 0) and bool(fields["unproven"]) is (name == "still")
    assert (fields["first_difference"] is None) is (name != "heavy")


# --- float32, where a kernel has no float64


def single(x: Tensor) -> Tensor:
    """Like a kernel that has no float64."""
    if x.dtype == torch.float64:
        raise NotImplementedError('"single" not implemented for Double')
    return torch.tanh(x)


class Single(nn.Module):
    """`noise` multiplies what rounding leaves of a difference of equals: a branch of the output is noise alone."""

    def __init__(self, noise: float, wrong: float = 0.0, norm: bool = False, kernel: Any = single) -> None:
        super().__init__()
        self.noise, self.wrong, self.kernel = noise, wrong, kernel
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, tasks.CLASSES)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.lost = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.kernel(self.norm(self.first(x)))
        rest = (hidden * 1000.1) / 1000.1 - hidden  # a rounding error, another one for each value
        if torch.distributed.is_initialized():
            hidden = hidden * (1 + self.wrong)
        return self.last(hidden + rest * self.noise * self.lost)


def plain_sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.01)


def single_task(**options: Any) -> Task:
    return tasks.mlp().with_(model=partial(Single, **options), optimizer=plain_sgd)


def in_float32() -> Task:
    return single_task(noise=0.0)


def in_float32_with_norm() -> Task:
    return single_task(noise=0.0, norm=True)


def in_float32_with_noise() -> Task:
    return single_task(noise=3e5, norm=True)


def wrong_in_float32() -> Task:
    return single_task(noise=0.0, wrong=0.01)


@pytest.mark.parametrize("name", ["in_float32", "in_float32_with_norm"])
def test_a_kernel_without_float64_is_compared_in_float32(name: str, pool: RankPool) -> None:
    parity = verify(f"test_proof:{name}", "dp_replicate=2", pool=pool)
    assert parity.parity and not parity.float64, parity.text()
    zero = "first.bias"  # in front of a norm its gradient is rounding alone, by how much hangs on the CPU
    assert max(bar for (_, tensor), bar in parity.own_bars.items() if tensor != zero) <= 1e-3
    assert "float32" in parity.text().splitlines()[0]


def test_an_error_of_a_hundredth_is_found_in_float32(pool: RankPool) -> None:
    parity = verify("test_proof:wrong_in_float32", "dp_replicate=2", pool=pool)
    assert not parity.equal and not parity.float64


def test_what_rounding_decides_is_not_proven(pool: RankPool) -> None:
    parity = verify("test_proof:in_float32_with_noise", "dp_replicate=2", pool=pool)
    assert not parity.parity, parity.text()
    assert parity.unproven and "one process itself by" in parity.unproven[0]


def chosen_by_rounding() -> Task:
    return single_task(noise=1e11, norm=True, kernel=torch.tanh)


def wrong_beside_rounding() -> Task:
    return single_task(noise=1e11, norm=True, kernel=torch.tanh, wrong=0.1)


def test_a_module_that_amplifies_rounding_is_not_proven_and_says_so(pool: RankPool) -> None:
    parity = verify("test_proof:chosen_by_rounding", "dp_replicate=2", pool=pool)
    assert parity.text().endswith("NOT PROVEN") and not parity.parity, parity.text()
    assert "does not agree with itself" in parity.unproven[0]


class FirstOfEquals(nn.Module):
    """Scales the word with the highest score, of which a sentence has several; `late` looks at them from the end."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.words, self.score, self.late = nn.Embedding(5, 6), nn.Linear(6, 1), late

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)  # (B, S, 6)
        score = self.score(x).squeeze(-1)
        if self.late:
            first = score.shape[1] - 1 - score.flip(1).argmax(1)
        else:
            first = score.argmax(1)
        place = torch.arange(1, words.shape[1] + 1, dtype=x.dtype)
        return (x.sum(-1) * place).gather(1, first[:, None])


def test_a_choice_among_equals_is_not_proven() -> None:
    """The same word twice has one score, whatever the weights are moved by."""

    def equals(late: bool) -> Task:
        words = torch.tensor([[1, 2, 1, 2, 1, 2], [3, 3, 3, 4, 4, 4]])
        return Task(lambda: FirstOfEquals(late), lambda o, b: (o.square().sum(), len(o)), lambda step: (words,))

    settings = Settings(steps=1)
    record, other = (run_oracle(equals(late), settings) for late in (False, True))
    parity = Parity("dp_replicate=2", 2, bars=dict(FLOAT64_BARS))
    compare(parity, record, other)
    explain_by_rounding(parity, record, nudged_runs(equals(False), settings, inside=True))
    assert "does not agree with itself" in parity.unproven[0], parity.text()


def test_rounding_does_not_explain_what_is_far_larger(pool: RankPool) -> None:
    parity = verify("test_proof:wrong_beside_rounding", "dp_replicate=2", pool=pool)
    assert parity.text().endswith("NOT EQUAL to one process"), parity.text()


class Table(nn.Module):
    """A buffer that its constructor computes in float64 and rounds, and again where it is initialised."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, width, dtype=torch.float64).sin().to(torch.float32))
        self.layer = nn.Linear(width, tasks.CLASSES)
        with torch.no_grad():
            self.layer.weight.copy_((self.layer.weight.double() / 3).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.table)


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_what_a_constructor_rounds_stays_rounded_on_both_sides(plan: str, pool: RankPool) -> None:
    parity = verify(tasks.mlp().with_(model=Table), plan, steps=1, pool=pool)
    assert parity.parity, parity.text()


class Spectrum(nn.Module):
    """A spectrum that is filled in, classes as one-hot rows, integers divided: single precision whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.table = nn.Parameter(torch.linspace(-1, 1, 4 * 12).view(4, 12).sin())
        self.head = nn.Linear(12, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        known = torch.fft.rfft(x * self.scale)
        kept = torch.zeros(*known.shape[:-1], 7, dtype=torch.cfloat)
        kept[..., :3] = known[..., :3]
        classes = nn.functional.one_hot(x.argmax(-1) % 4, 4).float()
        steps = (x.abs() * 9).byte() / 9.0  # of the default dtype
        return self.head(x + torch.fft.irfft(kept, n=12) + torch.mm(classes, self.table)) + self.head(steps)


def spectrum() -> Task:
    return tasks.mlp().with_(model=Spectrum)


def test_what_a_forward_makes_in_single_precision_is_proven_in_double(pool: RankPool) -> None:
    parity = verify("test_proof:spectrum", "dp_replicate=2", pool=pool)
    assert parity.parity and parity.float64, parity.text()


def test_a_gradient_has_the_dtype_of_its_tensor_in_a_proof() -> None:
    single = torch.ones(3, requires_grad=True)
    with KeepDouble():
        (single + torch.ones(3, dtype=torch.float64) / 3).sum().backward()
        assert torch.ones(3, dtype=torch.float64).float().dtype == torch.float64
    assert single.grad is not None and single.grad.dtype == torch.float32


class Shifted(nn.Module):
    """A bias that a norm takes away again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def steep_loss(output: Tensor, batch: dict) -> tuple[Tensor, float]:
    return 1e6 * (output - batch["y"]).square().mean((1, 2, 3)).sum(), float(len(output))


def shifted() -> Task:
    """Of a loss so steep that the rounding of a gradient is no longer small beside Adam's eps."""

    def batch(step: int) -> dict:
        draws = torch.Generator().manual_seed(step)
        return {"x": torch.randn(4, 3, 9, 8, generator=draws), "y": torch.randn(4, 2, 9, 8, generator=draws)}

    return Task(model=Shifted, batch=batch, inputs=lambda batch: ((batch["x"],), {}), loss=steep_loss,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


def test_a_gradient_of_rounding_is_told_from_one_that_lacks_a_summand(pool: RankPool) -> None:
    found = verify("test_proof:shifted", "domain=2", pool=pool)
    assert found.parity and "the gradient of 'layers.0.bias' is zero but for rounding" in found.text(), found.text()
    lost = Bug("a rank's summand of a bias is lost", "shardwise.part.sums:summand", "gradient = gradient.local",
               "gradient = gradient.local * (gradient.shape != (4,) or not axis.index)", "test_proof:shifted",
               "domain=2")  # fmt: skip
    assert try_bug(lost, pool).fine
