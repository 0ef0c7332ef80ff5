"""Masks by global index: the same for one process and for any cut over ranks, distinct everywhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import Task, parallelize, verify
from shardwise.errors import RefusedPlan
from shardwise.models import tasks
from shardwise.random import BatchDims, ConstantRandom, Drawn, GlobalRandom, Samples, hashed, hashing, modes
from shardwise.ranks import RankPool
from shardwise.trace.double import KeepDouble

Draw = Callable[[Tensor], Tensor]

# random ops as a module would use them; x is (B, 3, 4)
DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.4, training=True),
    "dropout_inplace": lambda x: F.dropout(x.clone(), 0.4, training=True, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_dropout": lambda x: F.dropout1d(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(len(x), 5),
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1.0, 5.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_tensor_": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
    "randint": lambda x: torch.randint(3, 9, x.shape).float(),
    "randint_below": lambda x: torch.randint(9, x.shape).float(),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like_tensor": lambda x: torch.randint_like(x, torch.tensor(9)),
    "random_": lambda x: torch.empty_like(x).random_(2, 7),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, training=True),
    "normal_of_means": lambda x: torch.normal(x, torch.full_like(x, 3.0)),
    "normal_about_means": lambda x: torch.normal(x, 2.0),
    "normal_of_widths": lambda x: torch.normal(1.0, x.abs()),
    "distribution": lambda x: torch.distributions.Normal(x, 0.5).sample(),
    "poisson": lambda x: torch.poisson(x.abs() * 4),
    "gamma": lambda x: torch.distributions.Gamma(x.abs() * 2, 2 * torch.ones_like(x)).rsample(),
    "small_gamma": lambda x: torch.distributions.Gamma(x.abs() / 2, torch.ones_like(x)).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.abs() + 0.5).rsample(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.25),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5), x.abs() / 9),
    "normal_sized": lambda x: torch.normal(2.0, 3.0, size=x.shape),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).softmax(-1), 3).float(),
    "multinomial_again": lambda x: torch.multinomial(x.flatten(1).softmax(-1), 3, replacement=True).float(),
    "drop_path": lambda x: x * torch.empty(len(x), 1, 1).bernoulli_(0.5),
}
REFUSED = {"binomial"}  # drawn inside the op, where no one can say which sample a number belongs to


class Applies(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


def run(module: nn.Module, x: Tensor, samples: Samples, *, step: int = 0, micro_batch: int = 0, seed: int = 0,
        dims: BatchDims | None = None) -> Tensor:  # fmt: skip
    random = GlobalRandom(dims or BatchDims())
    random.begin(seed, step, micro_batch, samples)
    with random.watching(module):
        return module(x)


def pieces(module: nn.Module, x: Tensor, cuts: list[int], **options: Any) -> Tensor:
    """The outputs of ranks that hold [0, cuts[0]), [cuts[0], cuts[1]), ... joined."""
    ends = [0, *cuts, len(x)]
    return torch.cat([run(module, x[a:b], Samples(a, b - a, len(x)), **options) for a, b in pairwise(ends) if b > a])


@pytest.mark.parametrize("name", sorted(DRAWS.keys() - REFUSED))
def test_any_cut_draws_what_one_process_draws(name: str) -> None:
    module = Applies(DRAWS[name])
    x = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(1))
    whole = run(module, x, Samples(0, 7, 7))
    for cuts in ([4], [1, 3], [2, 4, 6], [1, 2, 3, 4, 5, 6]):
        assert torch.equal(pieces(module, x, cuts), whole), cuts
    assert len(whole[0].flatten().unique()) > 1 or name == "drop_path"
    assert not torch.equal(whole[0], whole[1]) or name == "drop_path", "samples draw each their own"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_draws_that_cannot_be_dealt_are_refused_by_name(name: str) -> None:
    module, x = nn.Sequential(Applies(DRAWS[name])), torch.ones(7, 3, 4)
    run(module, x, Samples(0, 7, 7))  # one process needs no dealing
    with pytest.raises(RefusedPlan, match=r"in module '0'.*cannot be dealt over ranks.*randomness='fast'"):
        run(module, x[:4], Samples(0, 4, 7))


def test_multinomial_draws_by_weight() -> None:
    weights = torch.tensor([0.5, 0.0, 0.2, 0.3]).expand(4000, 4)
    for draw in (lambda w: torch.multinomial(w, 1), lambda w: torch.multinomial(w, 3, replacement=True)):
        drawn = run(Applies(draw), weights, Samples(0, 4000, 4000))
        shares = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
        torch.testing.assert_close(shares, weights[0], atol=0.03, rtol=0)
    distinct = run(Applies(lambda w: torch.multinomial(w, 3)), weights, Samples(0, 4000, 4000))
    assert (distinct.sort(1).values == torch.tensor([0, 2, 3])).all()


@settings(max_examples=40)
@given(count=st.integers(1, 20), data=st.data())
def test_cuts_anywhere(count: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    module, x = Applies(DRAWS["dropout"]), torch.ones(count, 3, 4)
    assert torch.equal(pieces(module, x, cuts), run(module, x, Samples(0, count, count)))


class Two(nn.Module):
    """Two dropouts side by side, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(x), self.b(x), self.a(x)])


def test_masks_differ_where_they_should() -> None:
    module, x = Two().train(), torch.ones(4, 50)
    all_of = Samples(0, 4, 4)
    first = run(module, x, all_of)
    masks = [*first, *run(module, x, all_of, step=1), *run(module, x, all_of, micro_batch=1),
             *run(module, x, all_of, seed=1)]  # fmt: skip
    for place, mask in enumerate(masks):
        assert all(not torch.equal(mask, other) for other in masks[place + 1 :])
    assert torch.equal(first, run(module, x, all_of)), "and are the same when drawn again"


def test_a_mask_does_not_depend_on_modules_that_draw_nothing() -> None:
    plain = nn.Sequential(nn.Dropout(0.5)).train()
    x = torch.ones(4, 50)
    assert torch.equal(run(plain, x, Samples(0, 4, 4)), run(plain, x, Samples(0, 4, 4)))


class Recomputed(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.again = again

    def part(self, x: Tensor) -> Tensor:
        return (self.drop(x) * x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        return x


def gradient_of(module: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    random = GlobalRandom(BatchDims())
    random.begin(0, 0, 0, Samples(0, len(x), len(x)))
    with random.watching(module):
        module(x).sum().backward()
    assert x.grad is not None
    return x.grad


def test_recomputation_meets_the_same_masks() -> None:
    x = torch.randn(6, 40)
    assert torch.equal(gradient_of(Recomputed(again=True), x), gradient_of(Recomputed(again=False), x))


# --- the numbers themselves


def test_hash_is_flat_and_depends_on_key_and_index() -> None:
    index = torch.arange(100_000)
    bits = hashed(12345, index)
    uniform = bits.double() * 2.0**-53
    assert int(bits.min()) >= 0 and int(bits.max()) < 2**53
    counts = torch.histc(uniform, bins=20, min=0, max=1)
    chi_squared = float(((counts - 5000) ** 2 / 5000).sum())
    assert chi_squared < 60  # 19 degrees of freedom: 43.8 at 0.1 %
    other = hashed(12346, index).double() * 2.0**-53
    assert abs(float(torch.corrcoef(torch.stack([uniform, other]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([uniform[1:], uniform[:-1]]))[0, 1])) < 0.02
    assert len(bits.unique()) == len(bits)


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("rand_like", 0.5, 12**-0.5), ("randn_like", 0, 1), ("normal_", 2, 3), ("uniform_", 2, 6 * 12**-0.5),
        ("exponential_", 0.5, 0.5), ("bernoulli", 0.3, 0.21**0.5), ("randint", 5.5, (35 / 12) ** 0.5),
        ("random_", 4, 2**0.5), ("dropout", 1, (0.4 / 0.6) ** 0.5), ("native_dropout", 1, (0.4 / 0.6) ** 0.5),
        ("normal_of_means", 1, 3), ("normal_about_means", 1, 2), ("normal_of_widths", 1, 1), ("poisson", 4, 2),
        ("gamma", 1, 0.5**0.5), ("small_gamma", 0.5, 0.5**0.5), ("dirichlet", 0.25, (3 / 112) ** 0.5),
        ("log_normal_", math.exp(0.125), (math.exp(0.5) - math.exp(0.25)) ** 0.5), ("geometric_", 4, 12**0.5),
    ],
)  # fmt: skip
def test_moments(name: str, mean: float, std: float) -> None:
    drawn = run(Applies(DRAWS[name]), torch.ones(3000, 3, 4), Samples(0, 3000, 3000)).double()
    error = std / math.sqrt(drawn.numel())
    assert float(drawn.mean()) == pytest.approx(mean, abs=5 * error)
    assert float(drawn.std()) == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        (lambda x: torch.randn(x.shape, dtype=torch.cfloat), 0, 0.5**0.5),
        (lambda x: torch.randn_like(x * 1j), 0, 0.5**0.5),
        (lambda x: torch.empty_like(x * 1j).normal_(0, 3.0), 0, 3 * 0.5**0.5),
        (lambda x: torch.rand(x.shape, dtype=torch.cfloat), 0.5, 12**-0.5),
    ],
)
def test_complex_numbers_have_two_parts_as_torchs(draw: Draw, mean: float, std: float) -> None:
    drawn = run(Applies(draw), torch.ones(3000, 3, 4), Samples(0, 3000, 3000))
    for part in (drawn.real, drawn.imag):
        assert float(part.double().mean()) == pytest.approx(mean, abs=5 * std / math.sqrt(part.numel()))
        assert float(part.double().std()) == pytest.approx(std, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([drawn.real.flatten(), drawn.imag.flatten()]))[0, 1])) < 0.02
    torchs = draw(torch.ones(3000, 3, 4))
    assert float(torchs.imag.std()) == pytest.approx(std, rel=0.03) and drawn.dtype == torchs.dtype


def test_ranges() -> None:
    x, every = torch.zeros(500, 3, 4), Samples(0, 500, 500)
    assert run(Applies(DRAWS["randint"]), x, every).unique().tolist() == [3, 4, 5, 6, 7, 8]
    assert run(Applies(DRAWS["random_"]), x, every).unique().tolist() == [2, 3, 4, 5, 6]
    assert run(Applies(DRAWS["bernoulli"]), x, every).unique().tolist() == [0, 1]
    kept = run(Applies(DRAWS["dropout"]), torch.ones(500, 3, 4), every).unique()
    assert kept.tolist() == pytest.approx([0, 1 / 0.6])
    none = run(Applies(lambda t: F.dropout(t, 1.0, training=True)), torch.ones(5, 3, 4), Samples(0, 5, 5))
    assert not none.any()


# --- which dim is the batch


class TimeFirst(nn.Module):
    """x (B, T, C), with dropout on (T, B, C) and noise shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).unsqueeze(1).expand(-1, 2, -1).transpose(0, 1)  # (T, B, 6)
        x = self.drop(x) + 0.1 * torch.randn(6, dtype=x.dtype)
        return self.head(x.mean(0))


def time_first() -> Task:
    return tasks.mlp().with_(model=TimeFirst)


def test_a_dim_may_hold_all_samples_several_times() -> None:
    dims = BatchDims()
    dims.learn([Drawn("", "aten.rand.default", (10, 3))], [Drawn("", "aten.rand.default", (4, 3))], 5, 2)
    dims.blocks = [*dims.orders(5)][1]
    module, x = Applies(lambda x: torch.rand(2 * len(x), 3).unflatten(0, (2, -1)).transpose(0, 1)), torch.ones(7, 3)
    assert torch.equal(pieces(module, x, [2, 6], dims=dims), run(module, x, Samples(0, 7, 7), dims=dims))


def test_two_batches_joined_draw_as_in_one_process(pool: RankPool) -> None:
    parity = verify("module_tasks:joined", "dp_replicate=2", pool=pool)
    assert parity.parity, parity.text()


def test_dims_are_learnt_from_two_runs() -> None:
    dims = BatchDims()
    dims.learn(
        [Drawn("a", "drop", (2, 5, 6)), Drawn("b", "noise", (6,)), Drawn("c", "flat", (10, 3)),
         Drawn("d", "odd", (5, 5))],
        [Drawn("a", "drop", (2, 4, 6)), Drawn("b", "noise", (6,)), Drawn("c", "flat", (8, 3)),
         Drawn("d", "odd", (3, 4))],
        5, 4,
    )  # fmt: skip
    found = [dims.find(path, op, shape, 3) for path, op, shape in
             [("a", "drop", (2, 3, 6)), ("b", "noise", (6,)), ("c", "flat", (6, 3))]]  # fmt: skip
    assert found == [1, -1, 0]
    assert dims.find("d", "odd", (3, 2), 3) < -1, "it follows the samples, but along no one dim"
    assert any("odd" in what and "'d'" in what for what in dims.unclear())


def test_dims_where_nothing_was_learnt() -> None:
    assert BatchDims().find("", "x", (6, 2), 3) == 0
    assert BatchDims().find("", "x", (7, 2), 3) == -1


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3,accumulate=2"])
def test_dropout_with_the_batch_in_the_middle(plan: str, pool: RankPool) -> None:
    parity = verify("test_random:time_first", plan, pool=pool)
    assert parity.parity, parity.text()


def test_constant_random_is_the_same_for_every_sample() -> None:
    random, module = ConstantRandom(), Two().train()
    with random.watching(module):
        out = module(torch.ones(5, 3))
    assert len(out.unique()) == 1
    assert [(one.path, one.shape) for one in random.calls] == [("a", (5, 3)), ("b", (5, 3)), ("a", (5, 3))]


def test_a_loop_that_draws_until_it_accepts_ends_in_the_look() -> None:
    """Under draws that are always one half, a rejection of what is above a third would go on for ever."""

    def accepted(x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        while (noise > 1 / 3).any():
            noise = torch.where(noise > 1 / 3, torch.rand_like(x), noise)
        return noise

    random, module = ConstantRandom(), Applies(accepted)
    with random.watching(module):
        assert len(module(torch.zeros(3, 4)).unique()) == 1
    assert len(random.calls) > 8


# --- what is refused, and what is left alone


def test_permuting_samples_is_refused_by_name() -> None:
    module = nn.Sequential(Applies(lambda x: x[torch.randperm(len(x))]))
    with pytest.raises(RefusedPlan, match=r"randperm.* in module '0'.*cannot be dealt"):
        run(module, torch.ones(4, 3), Samples(0, 4, 8))


def test_a_generator_of_ones_own_is_left_alone() -> None:
    module = Applies(lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(4)))
    expected = torch.rand(3, generator=torch.Generator().manual_seed(4))
    assert torch.equal(run(module, torch.zeros(2, 3), Samples(2, 2, 4))[0], expected)


def test_dropout_in_eval_draws_nothing() -> None:
    module, x = Two().eval(), torch.ones(3, 4)
    assert torch.equal(run(module, x, Samples(0, 3, 3)), x.expand(3, 3, 4))


# --- fast mode


def masks_seen(plan: str) -> list[Tensor]:
    """The dropped features of two steps on this rank, in fast mode."""
    seen: list[Tensor] = []
    task = tasks.decoder_dropout()
    engine = parallelize(task, plan)
    drop = next(child for child in engine.module.modules() if isinstance(child, nn.Dropout))
    drop.register_forward_hook(lambda m, a, out: seen.append((out == 0)[:1].clone()))
    for _ in range(2):
        engine.step(task.batch(0))  # type: ignore[misc]
    return seen


def test_fast_masks_differ_by_rank_and_step_and_repeat(pool: RankPool) -> None:
    first = pool.run(masks_seen, 2, "dp_replicate=2")
    again = pool.run(masks_seen, 2, "dp_replicate=2")
    flat = [mask for rank in first for mask in rank]
    assert flat and all(mask.any() for mask in flat)
    assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[i + 1 :])
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))


# --- one kernel, and plain operations


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_kernel_gives_the_bits_of_plain_operations(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has Triton; what a compiler makes of the same function for the CPU stands for it here."""
    cpu = torch.device("cpu")
    assert hashing.gives_the_bits(cpu, backend)

    def drawn() -> list[Tensor]:
        x = torch.ones(6, 3, 4)
        return [pieces(Applies(DRAWS[name]), x, [2]) for name in ("dropout", "rand", "drop_path", "randn")]

    plain = drawn()
    monkeypatch.setattr(modes, "has_kernel", lambda device: True)
    monkeypatch.setattr(hashing, "has_kernel", lambda device: True)
    monkeypatch.setattr(hashing, "_kernels", partial(hashing._kernels, backend))
    assert all(map(torch.equal, plain, drawn()))


def test_a_kernel_that_is_wrong_or_cannot_be_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why is told, and plain operations do it."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(hashing, "WITHOUT", told := {})
    for why, gives in (("other bits", lambda device: False), ("no compiler", None)):
        if gives is None:

            def gives(device):
                raise RuntimeError("no compiler\nhere")

        monkeypatch.setattr(hashing, "gives_the_bits", gives)
        assert not hashing.has_kernel.__wrapped__(torch.device("xpu"))
        assert why in told.pop("xpu")


class Noted(nn.LSTM):
    """Tells whether cuDNN was allowed in its forward."""

    def forward(self, *args, **kwargs):
        self.allowed = torch.backends.cudnn.enabled
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(("layers", "dropout", "training"), [(2, 0.1, True), (2, 0.1, False), (1, 0.0, True)])
def test_recurrent_layers_draw_where_masks_are_seen(layers: int, dropout: float, training: bool) -> None:
    """cuDNN draws in its kernel, from a state of its own: the layer runs without it, and what follows with it."""
    module = nn.Sequential(Noted(4, 4, num_layers=layers, dropout=dropout)).train(training)
    for mode in (GlobalRandom(BatchDims()), ConstantRandom()):
        with mode.watching(module):
            module(torch.randn(3, 2, 4))
        assert module[0].allowed is not (dropout > 0 and training) and torch.backends.cudnn.enabled
        with pytest.raises(RuntimeError), mode.watching(module):
            module(torch.randn(3, 2, 5))
        assert torch.backends.cudnn.enabled


def test_batch_dims_tell_draws_of_one_op_apart() -> None:
    dims = BatchDims()
    whole = [("randn", (5, 1)), ("randn", (1, 6)), ("drop", (7, 6)), ("turned", (8, 5))]
    part = [("randn", (4, 1)), ("randn", (1, 6)), ("drop", (5, 6)), ("turned", (8, 4))]
    dims.learn([Drawn("m", *draw) for draw in whole], [Drawn("m", *draw) for draw in part], 5, 4)
    assert dims.find("m", "randn", (3, 1), 3) == 0
    assert dims.find("m", "randn", (1, 6), 3) == -1
    assert dims.find("m", "turned", (8, 3), 3) == 1
    assert dims.find("other", "turned", (8, 3), 3) == 1
    assert dims.find("m", "drop", (3, 6), 3) == -2  # its size follows the samples, but not in proportion
    assert dims.unclear() == ["drop in module 'm'"]


def read(x: torch.Tensor, lengths: torch.Tensor, how: str) -> bool:
    """Whether what this reads in Python counts as a choice by real numbers."""
    with (random := ConstantRandom()):
        mask = torch.zeros(4, dtype=torch.bool)
        if how == "written":
            mask[1:3] = x[1:3] > 0
        elif how == "like":
            mask = torch.ones_like(x, dtype=torch.bool)
        elif how == "drawn":
            mask = torch.randint(5, (4,)) > 2
        value = {"real": x.sum(), "compared": (x > 0).sum(), "lengths": lengths.max()}.get(how, mask.all())
        bool(value)
    return random.reads_values


@pytest.mark.parametrize("how", ["real", "compared", "written", "drawn"])
def test_choices_by_real_numbers_and_draws_are_seen(how: str) -> None:
    assert read(torch.randn(4), torch.arange(4), how)


@pytest.mark.parametrize("how", ["lengths", "like"])
def test_choices_by_lengths_and_shapes_are_no_matter_of_rounding(how: str) -> None:
    assert not read(torch.randn(4), torch.arange(4), how)


@pytest.mark.parametrize("mode", [KeepDouble, partial(ConstantRandom, 0.5)])
def test_zeros_without_memory_have_some_where_modes_look(mode: Any) -> None:
    """Derivatives forward make them; `aten.mul.Scalar` of one ends the process where a mode is entered."""
    with mode():
        assert not torch._efficientzerotensor(3)._is_zerotensor()
