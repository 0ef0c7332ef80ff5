"""`prepare` where a sample's neighbours matter: padding, draws while reading, means of unequal micro-batches."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from test_prepare import BAR, adamw
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.ranks import RankPool
from shardwise.scripts.reading import part_of_whole

WORDS = 9


class Lines(Dataset):
    """Lines of unequal length; with `crops`, every reading begins at another place."""

    def __init__(self, crops: str = "") -> None:
        g = torch.Generator().manual_seed(2)
        lengths = torch.randint(4, 11, (14,), generator=g).tolist()
        self.lines = [torch.randint(1, WORDS, (n,), generator=g) for n in lengths]
        self.crops = crops

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> torch.Tensor:
        draw = {"torch": lambda: int(torch.randint(3, ())), "numpy": lambda: int(np.random.randint(3)),
                "random": lambda: random.randrange(3), "": lambda: 0}[self.crops]  # fmt: skip
        first = draw()
        return self.lines[index][first : first + 2] if self.crops else self.lines[index]


def padded(lines: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(lines, batch_first=True)


def padded_mapping(lines: list[torch.Tensor]) -> UserDict:
    return UserDict(ids=padded(lines), width=max(map(len, lines)))  # as tokenizers return


def hidden(lines: list[torch.Tensor]) -> UserDict:
    """A mask that is drawn where samples are joined."""
    ids = padded(lines)
    return UserDict(ids=ids * (torch.rand(ids.shape) > 0.2).long(), width=ids.shape[1])


def columns(lines: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(lines)  # samples lie in the second dim


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(self.embed(ids), 0.3, self.training))


def script(plan: str | None, collate: Any = None, crops: str = "", workers: int = 0, divided: int = 1,
           **options: Any) -> tuple[list[float], dict, list[str]]:  # fmt: skip
    """As people write it: the mean over a batch's tokens, divided where batches are accumulated."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model: Any = Reader().double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(Lines(crops), batch_size=4, shuffle=True, collate_fn=collate, num_workers=workers)
    prepared = shardwise.prepare(model, optimizer, loader, plan=plan, **options) if plan else None
    if prepared:
        model, optimizer, loader = prepared
        if torch.distributed.get_rank():
            np.random.seed(5)  # a generator that the script has not seeded
    losses = []
    for number, batch in enumerate(loader):
        ids = batch["ids"] if isinstance(batch, UserDict) else batch
        ids = ids.T if collate is columns else ids
        targets = ids[:, 1:]
        loss = F.cross_entropy(model(ids)[:, :-1].mT, targets, ignore_index=0) / divided
        n = (targets != 0).sum()
        loss = prepared.backward(loss, mean_over=n) if prepared else loss
        if not prepared:
            loss.backward()
        losses.append(loss.item())
        if (number + 1) % divided == 0 or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return losses, prepared.state_dict() if prepared else model.state_dict(), prepared.notices if prepared else []


def on_ranks(plan: str | None, options: dict) -> tuple:
    return script(plan, **options)


@pytest.mark.parametrize(
    ("plan", "options", "told"),
    [
        ("dp_shard=2,zero=2", {"collate": padded}, "whole batches"),
        ("dp_shard=3,zero=3", {"collate": padded_mapping}, "whole batches"),
        ("dp_replicate=2", {"collate": hidden}, "whole batches"),
        ("tp=2", {"collate": hidden}, "tp=2 cuts"),
        ("dp_replicate=2", {"crops": "torch"}, "random numbers are drawn"),
        ("dp_replicate=2", {"crops": "torch", "workers": 1}, "random numbers are drawn"),
        ("dp_shard=2,zero=1", {"crops": "numpy"}, "random numbers are drawn"),
        ("dp_replicate=2", {"crops": "random"}, "random numbers are drawn"),
        ("dp_shard=2,zero=3,accumulate=2", {"collate": padded, "divided": 2}, "whole batches"),
        ("tp=2,accumulate=2", {"collate": padded, "divided": 2}, "tp=2 cuts"),
    ],
)
def test_equal_to_one_process(plan: str, options: dict, told: str, pool: RankPool) -> None:
    ((losses, weights, _),) = pool.run(on_ranks, 1, None, options)
    for theirs, held, notices in pool.run(on_ranks, shardwise.Plan.parse(plan).world_size, plan, options):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
        assert any(told in notice for notice in notices), notices


def test_batches_that_cannot_be_cut_are_joined_in_parts(pool: RankPool) -> None:
    for _, _, notices in pool.run(on_ranks, 2, "dp_replicate=2", {"collate": columns, "randomness": "fast"}):
        assert not notices
    with pytest.raises(InputError, match=r"the loader's batches cannot be cut over ranks: .*batch has \d+ samples"):
        pool.run(on_ranks, 2, "dp_replicate=2", {"collate": columns, "reads": "whole"})


def read_ahead(plan: str | None, loss_of: str) -> tuple[list[float], dict]:
    """The next batch is asked for between a loss and its backward; the last one has one sample."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)).double()
    optimizer: Any = adamw(model)
    loader: Any = DataLoader(torch.randn(9, 3).double(), batch_size=4)
    prepared: Any = shardwise.prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses, batches = [], iter(loader)
    x = next(batches)
    while x is not None:
        out, n = model(x), len(x)
        loss = out.logsumexp(0).mean() if loss_of == "all" else (out - x[:, :2]).square().mean()
        x = next(batches, None)
        if prepared:
            loss = prepared.backward(loss * n, n) if loss_of == "sum" else prepared.backward(loss, mean_over=n)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert not any("not checked" in one for one in (prepared._told._said if prepared else []))
    return losses, model.state_dict()


@pytest.mark.parametrize(("plan", "loss_of"), [("dp_replicate=2", "sum"), ("dp_shard=2,zero=3", "each")])
def test_a_loss_is_of_the_batch_of_its_forward(plan: str, loss_of: str, pool: RankPool) -> None:
    ((losses, weights),) = pool.run(read_ahead, 1, None, loss_of)
    for theirs, held in pool.run(read_ahead, 2, plan, loss_of):
        assert theirs == pytest.approx(losses, rel=BAR)
        assert all(float((held[name] - weight).abs().max()) < BAR for name, weight in weights.items())
    with pytest.raises(RefusedPlan, match="no sum or mean over samples"):
        pool.run(read_ahead, 2, plan, "all")


def test_a_list_of_one_number_for_each_sample_is_cut_with_them() -> None:
    x, held = torch.arange(8.0).view(4, 2), Share(None, 2, 1, 4)
    given = (x, [5, 6, 7, 8], {"names": ["a", "b", "c", "d"], "size": (3, 4, 5, 6), "two": [1, 2]})
    part = part_of_whole(given, held, 4)
    assert torch.equal(part[0], x[1:3])
    assert part[1:] == ([6, 7], {"names": ["b", "c"], "size": (3, 4, 5, 6), "two": [1, 2]})
