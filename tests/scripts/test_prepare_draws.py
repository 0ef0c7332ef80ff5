"""Random numbers that a prepared script draws: however they are drawn, a sample's are those of one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_scripts import (
    batches,
    equals_one_process,
    made,
    mse,
    train,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.ranks import RankPool
from shardwise.scripts.sample_draws import SampleDraws, differentiate, may_draw

Function = Callable[[torch.Tensor], torch.Tensor]


class Noisy(torch.autograd.Function):
    """Adds noise, to gradients too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(gradient)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def gradient(function: Function) -> Function:
    """The gradient of a sum, as a prepared script's backward asks for it."""

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        differentiate(function(x).sum(), retain_graph=False)
        assert x.grad is not None
        return x.grad

    return call


dropped = partial(nn.functional.dropout, p=0.5)
DRAWS: dict[str, Function] = {
    "operation": lambda x: torch.ops.aten.bernoulli.default(torch.full_like(x, 0.5)),
    "packet": torch.ops.aten.rand_like,
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "of Python": lambda x: nn.functional.gumbel_softmax(x, dim=-1),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "function": Noisy.apply,
    "of a backward": gradient(Noisy.apply),
    "computed again": gradient(lambda x: checkpoint(dropped, x, use_reentrant=False)),
    "again, reentrant": gradient(lambda x: checkpoint(dropped, x, use_reentrant=True)),
    "scripted": scripted,
    "for each": lambda x: torch.vmap(lambda row: row + torch.rand_like(row), randomness="different")(x),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_of_every_way_are_one_process_s(draw: str) -> None:
    """For the samples 2 and 3 of 6, in the first periods and later, when only calls that may draw are followed."""
    whole, watched = torch.arange(72, dtype=torch.float64).reshape(6, 3, 4).sin(), SampleDraws()
    for _ in range(5):
        torch.manual_seed(0)
        expected, stand = DRAWS[draw](whole), torch.get_rng_state()
        torch.manual_seed(0)
        watched.begin(Share(None, 2, 2, 6), whole=False)
        found = DRAWS[draw](whole[2:4])
        watched.end()
        torch.testing.assert_close(found, expected[2:4], rtol=0, atol=1e-15)
        assert torch.equal(torch.get_rng_state(), stand)


def test_draws_that_hang_on_values_are_refused_where_they_are_for_samples() -> None:
    """How many numbers torch draws for the others' samples is not known here; what is no sample's is drawn alike."""
    whole, watched = torch.arange(72, dtype=torch.float64).reshape(6, 3, 4), SampleDraws()
    watched.begin(Share(None, 2, 2, 6), whole=False)
    try:
        torch.distributions.Beta(torch.full((5,), 0.2), 0.2).sample()
        for draw in (torch.poisson, lambda x: torch.distributions.Beta(x + 1, x + 1).sample()):
            with pytest.raises(RefusedPlan, match="asks for more random numbers or fewer, by the values"):
                draw(whole[2:4])
    finally:
        watched.end()


def test_only_what_draws_unseen_has_all_operations_followed() -> None:
    """Not attention that is called without dropout, though its kernel is one that may draw."""
    x, watched = torch.ones(2, 1, 3, 4), SampleDraws()
    watched.begin(Share(None, 2, 2, 6), whole=False)
    nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)
    nn.functional.dropout(x, 0.5, training=False)
    nn.functional.dropout(x, 0.5)
    assert not watched.follows_all
    scripted(x)
    assert watched.follows_all
    watched.end()


def test_what_may_draw_is_told_by_tags() -> None:
    """Of operations, and of torch's own functions by what they call; a backward may compute something again."""
    functions = nn.functional
    drawing = [torch.dropout, torch.Tensor.bernoulli_, torch.rand, torch.ops.aten.rand, torch._VF.lstm]
    drawing += [functions.dropout, functions.gumbel_softmax, functions.multi_head_attention_forward]
    drawing += [
        torch.Tensor.backward,
        torch.autograd.grad,
        torch.ops.aten.bernoulli_.float,
        test_what_may_draw_is_told_by_tags,
    ]
    assert all(map(may_draw, drawing)), [one for one in drawing if not may_draw(one)]
    plain = [torch.add, torch.Tensor.mul_, torch._C._nn.linear, torch.Tensor.shape.__get__, torch.Tensor.__getitem__]
    plain += [functions.rms_norm, functions.cross_entropy, functions.interpolate, functions.unfold, torch.Tensor.float]
    plain += [torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.einsum, torch.Tensor.unflatten]
    assert not any(map(may_draw, plain)), [one for one in plain if may_draw(one)]


ORDERS = {
    "first": lambda n: torch.zeros(n, 3, 4),
    "second": lambda n: torch.zeros(3, n, 4).transpose(0, 1),
    "last": lambda n: torch.zeros(3, 4, n).permute(2, 0, 1),
    "expanded": lambda n: torch.zeros(n, 3, 1).expand(n, 3, 4),
    "channels last": lambda n: torch.zeros(n, 3, 2, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 2])
def test_draws_into_a_tensor_follow_its_order_in_memory(order: str, count: int) -> None:
    """As attention gives it where a module computes time first: dropout draws in the order of memory."""
    make, watched = ORDERS[order], SampleDraws()
    into = [] if order == "expanded" else [lambda t: t.bernoulli_(0.5)]
    for draw in (*into, lambda t: nn.functional.dropout(t + 1, 0.5), torch.rand_like):
        torch.manual_seed(0)
        expected = draw(make(6))
        torch.manual_seed(0)
        watched.part = Share(None, count, 2, 6)
        with watched:
            assert torch.equal(draw(make(count)), expected[2 : 2 + count])


class DrawsWeights(nn.Module):
    """Weights are drawn anew in each forward, of as many rows as a rank has samples, and others are dropped."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mean, self.spread = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.ones(4, 6))
        self.drop, self.last, self.mixed = nn.Dropout(0.3), nn.Linear(4, 2), mixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.mean + 0.1 * self.spread * torch.randn_like(self.mean)
        x = x + 0.1 * torch.randn_like(x) if self.mixed else x
        return nn.functional.linear(
            self.drop(torch.tanh(x @ weight.T)), nn.functional.dropout(self.last.weight, 0.2), self.last.bias
        )


def drawn_weights(plan: str | None, mixed: bool) -> tuple[list[float], dict]:
    """Weights that a forward draws are alike on every rank."""
    return train(plan, made(lambda: DrawsWeights(mixed)), batches(22, 8), mse)


def test_weights_and_samples_drawn_in_one_shape_are_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match="no dim is sure to count"):
        pool.run(drawn_weights, 2, "dp_replicate=2", True)


def of_classes(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A class is drawn for each sample."""
    drawn = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), len(x), replacement=True).double()
    return mse(model, x * drawn[:, None], y)


def drawn_outside(plan: str | None, loss_of: Any, count: int, size: int) -> tuple[list[float], dict]:
    """What a script draws is one process s."""
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)))
    return train(plan, model, batches(count, size, shuffle=True), loss_of)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (drawn_weights, "dp_replicate=2", False), (drawn_outside, "dp_replicate=2", of_classes, 24, 8),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (drawn_weights, "dp_shard=2,zero=3", False),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


UNDRAWN = """
import random
random.seed(0)
before = random.getstate()
import shardwise, torch
model = torch.nn.Linear(2, 1)
shardwise.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(4, 2)])
print(before == random.getstate())
"""


def test_what_prepare_imports_draws_nothing_of_the_script_s() -> None:
    """In a process of its own: here all is imported already."""
    done = subprocess.run([sys.executable, "-c", UNDRAWN], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr
