"""Random numbers that a prepared script draws: however they are drawn, a sample's are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, samples
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import shardwise
from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.ranks import RankPool
from shardwise.scripts.draws import SampleDraws
from shardwise.scripts.following import differentiate, may_draw

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


def drawn_weights(
    plan: str | None, mixed: bool, check_loss: bool = True
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model: Any = DrawsWeights(mixed).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(22), batch_size=8)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan, check_loss=check_loss) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("plan", ["dp_replicate=2", pytest.param("dp_shard=2,zero=3", marks=pytest.mark.long)])
def test_weights_that_a_forward_draws_are_alike_on_every_rank(plan: str, pool: RankPool) -> None:
    losses, weights = drawn_weights(None, False)
    for theirs, held in pool.run(drawn_weights, 2, plan, False):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())


def test_weights_and_samples_drawn_in_one_shape_are_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match="no dim is sure to count"):
        pool.run(drawn_weights, 2, "dp_replicate=2", True)
    with pytest.raises(RefusedPlan, match=r"shape \(4, 6\), as one of its weights.*check_loss=False"):
        pool.run(drawn_weights, 2, "dp_replicate=2", False, False)


def of_size(n: int) -> torch.Tensor:
    return torch.rand(n, dtype=torch.float64)


def drawn_by_count(plan: str | None, mirrored: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A class drawn for each sample; or times, of which half are drawn and the others mirrored."""
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 2).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(samples(24), batch_size=8)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        if mirrored:
            half = torch.rand(len(x) // 2 + 1).double() if mirrored == "told" else of_size(len(x) // 2 + 1)
            drawn = torch.cat([half, 1 - half])[: len(x)]
        else:
            drawn = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), len(x), replacement=True).double()
        loss = (model(x * drawn[:, None]) - y).square().mean()
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_classes_drawn_for_samples_are_one_process_s_and_half_as_many_times_are_refused(pool: RankPool) -> None:
    losses, _ = drawn_by_count(None, "")
    assert all(
        theirs == pytest.approx(losses, rel=BAR) for theirs, _ in pool.run(drawn_by_count, 2, "dp_replicate=2", "")
    )
    with pytest.raises(RefusedPlan, match=r"drawn 3 at a time, by the number of samples.*test_prepare_draws.py, line"):
        pool.run(drawn_by_count, 2, "dp_replicate=2", "told")


@pytest.mark.long
def test_half_as_many_times_whose_number_nothing_tells_are_refused_in_the_second_batch(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"drawn 3 at a time for 4 samples.*test_prepare_draws.py, line"):
        pool.run(drawn_by_count, 2, "dp_replicate=2", "passed on")
