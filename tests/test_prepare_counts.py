"""What a script counts of its samples: told with its line where it is a rank's own, one process's where summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_prepare import BAR, adamw, net, samples
from torch.utils.data import DataLoader, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.ranks import RankPool


def counted(plan: str | None, how: str, count: int = 8, batch: int = 4) -> tuple[list[Any], list[str]]:
    """What a script came to by its own counts, and what it was told of them."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(count), batch_size=batch)
    held: Any = DataLoader(samples(6), batch_size=3)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
        held = prepared.split(held) if how == "split" else held
    found: list[Any] = []
    right, running, total = 0, torch.zeros((), dtype=torch.float64), 0.0
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        near = ((out - y).abs() < 0.5).double()
        loss = (out - y).square().mean()
        if how == "weight":
            n = near.numel() if prepared is None else (near >= 0).sum().item()
            loss = prepared.backward(loss * n, n) if prepared else loss
        else:
            loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        if how == "item":
            right += near.sum().item()
        elif how == "shown":
            found.append(f"{near.mean():.6f}")
        elif how == "running":
            running += near.detach().sum()
        elif how == "summed":
            parts = (near.sum(), near.sum(0), len(x), near[:, 0].sum().item())
            whole = prepared.sum(*parts) if prepared else parts
            found += [number for one in whole for number in torch.as_tensor(one).double().reshape(-1).tolist()]
        elif how == "mean":
            mean = near.mean().item() * len(x)
            found.append(prepared.sum(mean)[0] if prepared else mean)
        elif how == "evaluated":
            with torch.no_grad():
                right += sum(((model(a) - b).abs() < 0.5).sum().item() for a, b in held)
        elif how == "split":
            for a, b in held:
                with torch.no_grad():
                    near = ((model(a) - b).abs() < 0.5).double()
                total += near.sum().item() * (held.part.count > 0 if prepared else 1)
            found.append(prepared.sum(total)[0] if prepared else total)
            found.append(prepared.sum(held.part.count)[0] if prepared else len(a))  # as many as the step's own samples
        found.append(loss.item())  # of all samples
    found += [right, running.item()]
    return found, sorted(prepared._told._said) if prepared else []


def told(notices: list[str]) -> list[str]:
    return [one for one in notices if "this rank's samples alone" in one]


@pytest.mark.parametrize(
    ("how", "line"),
    [("item", "right += near.sum().item()"), ("shown", 'f"{near.mean():.6f}"'), ("running", "running += near")],
)
def test_a_count_of_own_samples_is_told_with_its_line(how: str, line: str, pool: RankPool) -> None:
    for _, notices in pool.run(counted, 2, "dp_replicate=2", how):
        assert [one for one in told(notices) if "prepared.sum" in one and line in one]


@pytest.mark.parametrize("how", ["weight", "summed", "evaluated", "split"])
def test_what_is_alike_on_all_ranks_is_not_told(how: str, pool: RankPool) -> None:
    (_, notices), _ = pool.run(counted, 2, "dp_shard=2,zero=3", how)
    assert told(notices) == []


@pytest.mark.parametrize("how", ["summed", "mean", "evaluated", "split"])
@pytest.mark.parametrize(("plan", "count", "batch"), [("dp_replicate=3", 12, 5), ("dp_replicate=2", 7, 3)])
def test_sums_count_each_sample_once(how: str, plan: str, count: int, batch: int, pool: RankPool) -> None:
    """Five samples on three ranks, of which the first batch gives two to a rank; one or two samples at the end."""
    expected, _ = counted(None, how, count, batch)
    for found, _ in pool.run(counted, shardwise.Plan.parse(plan).world_size, plan, how, count, batch):
        assert found == pytest.approx(expected, abs=1e-9)


def test_where_samples_count_on_other_ranks_it_is_told(pool: RankPool) -> None:
    """Four samples on four ranks: the first batch is dealt two to a rank."""
    (_, notices), *_ = pool.run(counted, 4, "dp_replicate=4", "item")
    assert any("part.count" in one for one in told(notices))
    (_, notices), _ = pool.run(counted, 2, "dp_replicate=2", "item")
    assert not any("part.count" in one for one in told(notices))


def normalised(plan: str | None, how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Inputs scaled by a number that was read of the batch, or a loss divided by one that is its weight."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(8), batch_size=4)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        if how == "inputs":
            x = x / x.abs().max().item()
        n = float((y > -9).sum().item())
        loss = (model(x) - y).square().sum() / n
        loss = prepared.backward(loss, mean_over=n) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


def test_inputs_made_by_a_number_read_of_the_batch_are_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"what the model is given is computed from.*line \d+: x = x / x.abs"):
        pool.run(normalised, 2, "dp_replicate=2", "inputs")
    expected = normalised(None, "loss")
    for losses, weights in pool.run(normalised, 2, "dp_replicate=2", "loss"):
        assert losses == pytest.approx(expected[0], rel=BAR)
        for name, weight in expected[1].items():
            assert float((weights[name] - weight).abs().max()) < BAR, name


def episodes(plan: str | None, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Classes told by the place of a sample in its batch: two that are known, and others that are near one of them."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(16), batch_size=8)
    prepared: Any = None
    if plan:
        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan, **options)
    losses = []
    for x, _ in loader:
        optimizer.zero_grad()
        z = model(x)
        known = z[:4].reshape(2, 2, -1).mean(0)
        loss = torch.nn.functional.cross_entropy(-torch.cdist(z[4:], known).square(), torch.arange(2).repeat(2))
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, prepared.state_dict() if prepared else model.state_dict()


def test_episodes_are_whole_or_refused(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"batch_size.*on the 4 of the batch's 8 samples.*line \d+: loss = "):
        pool.run(episodes, 2, "dp_replicate=2", {})
    expected = episodes(None, {})
    for losses, weights in pool.run(episodes, 2, "dp_shard=2,zero=2", {"loss_scope": "global"}):
        assert losses == pytest.approx(expected[0], rel=BAR)
        for name, weight in expected[1].items():
            assert float((weights[name] - weight).abs().max()) < BAR, name


def weighed_by_its_mean(plan: str, ranks_alike: bool) -> None:
    """The loss is multiplied by a running mean of the losses that came before it."""
    model: Any = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(16, 4)), 8)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    mean = 0.5
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        mean = mean if ranks_alike else 0.9 * mean + 0.1 * loss.item()
        prepared.backward(loss * (1 + mean))
        optimizer.step()


def test_a_loss_weighed_by_what_this_rank_found_is_refused(pool: RankPool) -> None:
    pool.run(weighed_by_its_mean, 2, "dp_replicate=2", True)
    with pytest.raises(InputError, match="by a number that differs between ranks"):
        pool.run(weighed_by_its_mean, 2, "dp_replicate=2", False)


def times(by: str) -> None:
    """A mean times the number of samples is one process's sum; times a constant that looks like it, a mean."""
    model: Any = net()
    optimizer, loader = adamw(model), DataLoader(samples(24), batch_size=8)
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan="dp_replicate=2")
    for x, y in loader:
        optimizer.zero_grad()
        prepared.backward((model(x) - y).square().mean() * (len(x) if by == "len(x)" else 4.0))
        optimizer.step()


@pytest.mark.long
def test_a_mean_times_the_number_of_samples_is_refused_and_times_a_constant_is_not(pool: RankPool) -> None:
    pool.run(times, 2, "4.0")
    with pytest.raises(InputError, match="without a weight"):
        pool.run(times, 2, "len(x)")
