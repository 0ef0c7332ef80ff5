"""How batches are read, dealt and known: joined with neighbours, ahead of time, turned, beside others, by no loader."""

from __future__ import annotations

import itertools
import queue
import random
import re
import subprocess
import sys
import threading
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_scripts import (
    back,
    batches,
    begin,
    close,
    equals_one_process,
    made,
    mse,
    refused_with_its_line,
    stepped,
    train,
    weights_of,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.ranks import RankPool
from shardwise.ranks.process import STARTED_BY_IMPORT
from shardwise.scripts.dealt import Dealer, deal
from shardwise.scripts.reading import from_workers, part_of_whole

WORDS = 9
Found = tuple[list[float], dict[str, torch.Tensor]]


def long(*cases: tuple) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


def noisy() -> Any:
    return made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)))


# --- which samples a rank holds, and which of them count


def test_every_sample_counts_once_however_a_batch_is_dealt() -> None:
    for ranks in range(1, 6):
        for total in range(1, 12):
            for several in (False, True):
                dealt = [deal(total, ranks, rank, several=several) for rank in range(ranks)]
                counted = [n for one in dealt for n in range(one.part.start, one.part.start + one.part.count)]
                assert counted == list(range(total))
                assert all(one.local.start + one.local.count <= total and one.local.count for one in dealt)
                assert {one.even for one in dealt} == {len({one.part.count for one in dealt}) == 1}
                assert not several or total < 2 or min(one.local.count for one in dealt) > 1
                assert sum(one.part.count for one in dealt) == total


def test_a_batch_that_is_smaller_than_others_is_dealt_two_to_a_rank() -> None:
    """Unless losses are of another loader's samples too, so that every rank should count some of this one's."""
    for beside in (False, True):
        dealer = Dealer(4, 0, lambda beside=beside: beside)
        assert [dealer.deal(total).local.count for total in (4, 8, 4, 1)] == [1, 2, 1 if beside else 2, 1]


def test_a_list_of_one_number_for_each_sample_is_cut_with_them() -> None:
    x, held = torch.arange(8.0).view(4, 2), Share(None, 2, 1, 4)
    given = (x, [5, 6, 7, 8], {"names": ["a", "b", "c", "d"], "size": (3, 4, 5, 6), "two": [1, 2]})
    part = part_of_whole(given, held, 4)
    assert torch.equal(part[0], x[1:3])
    assert part[1:] == ([6, 7], {"names": ["b", "c"], "size": (3, 4, 5, 6), "two": [1, 2]})


# --- batches whose samples change each other while they are read


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


def lines(plan: str | None, collate: Any = None, crops: str = "", workers: int = 0, divided: int = 1,
          **options: Any) -> tuple[list[float], dict, list[str]]:  # fmt: skip
    """As people write it: the mean over a batch's tokens, divided where batches are accumulated."""
    model = made(Reader)
    np.random.seed(0)
    random.seed(0)
    loader = DataLoader(Lines(crops), batch_size=4, shuffle=True, collate_fn=collate, num_workers=workers)
    prepared, model, optimizer, loader = begin(plan, model, loader, **options)
    if prepared and torch.distributed.get_rank():
        np.random.seed(5)  # a generator that the script has not seeded
    losses = []
    for number, batch in enumerate(loader):
        ids = batch["ids"] if isinstance(batch, UserDict) else batch
        ids = ids.T if collate is columns else ids
        targets = ids[:, 1:]
        loss = F.cross_entropy(model(ids)[:, :-1].mT, targets, ignore_index=0) / divided
        losses.append(back(prepared, loss, **({"mean_over": (targets != 0).sum()} if prepared else {})))
        if (number + 1) % divided == 0 or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights_of(prepared or model), prepared.notices if prepared else []


def lines_of(plan: str | None, options: dict) -> tuple:
    return lines(plan, **options)


@pytest.mark.parametrize(
    ("plan", "options", "told"),
    [
        ("dp_shard=2,zero=2", {"collate": padded}, "whole batches"),
        ("dp_shard=3,zero=3", {"collate": padded_mapping}, "whole batches"),
        ("dp_replicate=2", {"collate": hidden}, "whole batches"),
        ("tp=2", {"collate": hidden}, "tp=2 cuts"),
        ("dp_replicate=2", {"crops": "torch"}, "random numbers are drawn"),
        ("dp_shard=2,zero=1", {"crops": "numpy"}, "random numbers are drawn"),
        ("dp_replicate=2", {"crops": "random"}, "random numbers are drawn"),
        ("dp_shard=2,zero=3,accumulate=2", {"collate": padded, "divided": 2}, "whole batches"),
        ("tp=2,accumulate=2", {"collate": padded, "divided": 2}, "tp=2 cuts"),
        *long(("dp_replicate=2", {"crops": "torch", "workers": 1}, "random numbers are drawn")),
    ],
)
def test_batches_that_are_joined_or_drawn(plan: str, options: dict, told: str, pool: RankPool) -> None:
    (alone,) = pool.run(lines_of, 1, None, options)
    for *found, notices in pool.run(lines_of, shardwise.Plan.parse(plan).world_size, plan, options):
        close(found, alone[:2])
        assert any(told in notice for notice in notices), notices


def test_batches_that_cannot_be_cut_are_joined_in_parts(pool: RankPool) -> None:
    for _, _, notices in pool.run(lines_of, 2, "dp_replicate=2", {"collate": columns, "randomness": "fast"}):
        assert not notices
    with pytest.raises(InputError, match=r"the loader's batches cannot be cut over ranks: .*batch has \d+ samples"):
        pool.run(lines_of, 2, "dp_replicate=2", {"collate": columns, "reads": "whole"})


# --- batches that are trained on in another order than they are handed out


class Prefetcher:
    """As scripts for GPUs have it: the next batch is on its way, scaled already, while one is trained on."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.scale = iter(loader), torch.full((6,), 1.1, dtype=torch.float64)
        self.preload()

    def preload(self) -> None:
        self.following = next(self.loader, None)
        if self.following is not None:
            x, y = self.following
            self.following = x.to("cpu", non_blocking=True).div(self.scale), y.clone()

    def __iter__(self) -> Iterator[Any]:
        while self.following is not None:
            batch = self.following
            self.preload()
            yield batch


def in_a_thread(loader: Any) -> Iterator[Any]:
    waiting: queue.Queue = queue.Queue(2)
    reader = threading.Thread(target=lambda: [waiting.put(one) for one in (*loader, None)], daemon=True)
    reader.start()
    yield from iter(waiting.get, None)


def of_several(loader: Any) -> Iterator[Any]:
    """Two batches are asked for before the first is trained on."""
    waiting = iter(loader)
    while together := [one for one in (next(waiting, None), next(waiting, None)) if one is not None]:
        yield from together


def shuffled(loader: Any) -> Iterator[Any]:
    kept = list(loader)
    for seed in range(2):
        random.Random(seed).shuffle(kept)
        yield from kept


def first_alone(loader: Any) -> Iterator[Any]:
    x, y = next(iter(loader))
    for _ in range(3):
        yield x, y


def cycled(loader: Any) -> Iterator[Any]:
    """Beyond the first round the loader is not asked; held-out data are gone through in the middle, which draws."""
    for number, batch in enumerate(itertools.islice(itertools.cycle(loader), 7)):
        yield batch
        if number == 3:
            list(batches(4, 2))


WAYS = {one.__name__: one for one in (Prefetcher, in_a_thread, of_several, shuffled, first_alone, cycled)}


def ahead(plan: str | None, way: str, drawn: str) -> Found:
    """The last batch is smaller, the model draws masks, and the script noise: like its samples, or by their count."""
    prepared, model, optimizer, loader = begin(plan, noisy(), batches(15, 6, shuffle=True))
    losses = []
    for _ in range(2):
        for x, y in WAYS[way](loader):
            x = x.to("cpu")  # is there, and stays the batch's own
            noise = torch.randn_like(x) if drawn == "like" else torch.randn(len(x), 6, dtype=x.dtype)
            loss = mse(model, x + 0.1 * noise, y)
            losses.append(stepped(prepared, optimizer, loss, **({"mean_over": len(x)} if prepared else {})))
        torch.rand(3)  # the script's own, as a sampled picture
    return losses, weights_of(model)


def asked_early(plan: str | None, form: str) -> Found:
    """The next batch is asked for between a loss and its backward; the last one has one sample."""
    prepared, model, optimizer, loader = begin(plan, noisy(), batches(9))
    losses, waiting = [], iter(loader)
    batch: Any = next(waiting)
    while batch is not None:
        loss, n = mse(model, *batch), len(batch[0])
        batch = next(waiting, None)
        if prepared:
            losses.append(back(prepared, loss * n, weight=n) if form == "sum" else back(prepared, loss, mean_over=n))
        else:
            losses.append(back(None, loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights_of(model)


# --- samples that are not along the first dim


class Language(nn.Module):
    """Time first, with a hidden state that goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(11, 6), nn.LSTM(6, 5, 2, dropout=0.3), nn.Linear(5, 11)

    def forward(self, x: torch.Tensor, state: Any) -> tuple:
        y, state = self.lstm(self.words(x), state)
        return self.out(y), state


class Columns:
    """Batches as a language model has them: (time, samples)."""

    def __init__(self, length: int) -> None:
        text = torch.randint(0, 11, (3 * length + 1, 4), generator=torch.Generator().manual_seed(5))
        self.pairs = [(text[i : i + length], text[i + 1 : i + length + 1]) for i in range(0, 3 * length, length)]

    def __iter__(self):
        return iter(self.pairs)


def language(plan: str | None, length: int, options: dict) -> Found:
    """Samples along the second dim."""
    prepared, model, optimizer, loader = begin(plan, made(Language), Columns(length), **options)
    torch.manual_seed(3)
    losses, state = [], None
    for x, y in loader:
        if state is None:
            state = (torch.zeros(2, x.shape[1], 5).double(), torch.zeros(2, x.shape[1], 5).double())
        out, state = model(x, tuple(one.detach() for one in state))
        losses.append(stepped(prepared, optimizer, F.cross_entropy(out.view(-1, 11), y.reshape(-1))))
    return losses, weights_of(model)


@pytest.mark.parametrize("length", [8, 4])
def test_samples_along_the_second_dim_are_to_be_told(length: int, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match=r"batch_dim=1"):
        pool.run(language, 2, "dp_replicate=2", length, {})


class Turning(nn.Module):
    """(samples, time, 3), or (time, samples, 3) where it is `turned`, to (time, samples, words)."""

    def __init__(self, turned: bool, mixes: bool, drops: float, own: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, WORDS)
        self.turned, self.mixes, self.drops, self.own = turned, mixes, drops, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.turned else x.transpose(0, 1)
        x = x - x.mean(1, keepdim=True) if self.mixes else x
        out = self.head(F.dropout(self.rnn(x)[0], self.drops, self.training))
        return out.square().mean() if self.own else out


def turned(plan: str | None, steps: int, loss: str, turned: bool, drops: float, mixes: bool = False) -> Found:
    """Samples lie behind time in what a model gives, in what it is given, or in its modules alone."""

    def loss_of(model: Any, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        out = model(x.transpose(0, 1) if turned else x)
        lengths = [torch.full((len(x),), n) for n in (steps, words.shape[1])]
        if loss == "ctc":
            return F.ctc_loss(out.log_softmax(2), words, *lengths)
        return out if loss == "own" else F.cross_entropy(out[-1], words[:, 0])

    draws = torch.Generator().manual_seed(1)
    x, words = torch.randn(11, steps, 3, generator=draws).double(), torch.randint(1, 5, (11, 1), generator=draws)
    loader = DataLoader(TensorDataset(x, words), batch_size=4)
    return train(plan, made(lambda: Turning(turned, mixes, drops, loss == "own")), loader, loss_of, mean=True)


@pytest.mark.parametrize("steps", [4, 5])
def test_a_model_that_mixes_samples_behind_time_is_refused(steps: int, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match="does not add up over samples"):
        pool.run(turned, 2, "dp_replicate=2", steps, "words", False, 0.0, True)


# --- samples beside the main batch


def with_fixed_noise(plan: str | None, count: int, size: int) -> Found:
    """A forward on what every rank has, in training mode, behind each step."""
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
    fixed = torch.randn(count, 6).double()
    prepared, model, optimizer, loader = begin(plan, model, batches(15, size))
    losses = []
    for x, y in loader:
        losses.append(stepped(prepared, optimizer, mse(model, x, y)))
        with torch.no_grad():
            losses.append(model(fixed).sum().item())
    return losses, weights_of(model)


def another_loader(plan: str | None, trains: bool) -> Found:
    """A second stage with another loader and batch size."""
    prepared, model, optimizer, loader = begin(plan, noisy(), batches(14))
    torch.manual_seed(5)
    losses = []
    for stage in range(2):
        if stage:
            loader = batches(11, 6, shuffle=True)
            loader = prepared.split(loader, trains=trains) if prepared else loader
        for x, y in loader:
            losses.append(stepped(prepared, optimizer, mse(model, x, y)))
    return losses, weights_of(prepared or model)


def held_out_widths(plan: str | None) -> list[int]:
    """How wide held-out batches are: a script that decodes as many tokens runs its model as often."""
    loader = DataLoader(Lines(), batch_size=4, collate_fn=padded)
    prepared, *_ = begin(plan, made(Reader), DataLoader(Lines(), batch_size=4, collate_fn=padded))
    return [ids.shape[1] for ids in (prepared.split(loader) if prepared else loader)]


def test_held_out_batches_are_padded_as_whole_ones(pool: RankPool) -> None:
    (alone,) = pool.run(held_out_widths, 1, None)
    assert len(set(alone)) > 1
    assert pool.run(held_out_widths, 2, "dp_shard=2,zero=3") == [alone, alone]


def drawn_beside(plan: str | None) -> list[Any]:
    """What a loader beside the main one hands out, of a dataset that draws where it reads."""
    prepared, *_ = begin(plan, made(Reader), DataLoader(Lines(), batch_size=4, collate_fn=padded))
    loader = DataLoader(Lines("torch"), batch_size=4)
    if prepared is None:
        return [x.tolist() for x in loader]
    other = prepared.split(loader)
    return [prepared.gather(x, other).tolist() for x in other]


def test_a_loader_beside_the_main_one_draws_as_one_process_does(pool: RankPool) -> None:
    (alone,) = pool.run(drawn_beside, 1, None)
    assert pool.run(drawn_beside, 2, "dp_replicate=2") == [alone, alone]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, of_node: torch.Tensor, graphs: int) -> torch.Tensor:
        h = torch.tanh(self.inner(x))
        h = h.index_add(0, edges[1], h[edges[0]])
        return self.head(h.new_zeros(graphs, 8).index_add(0, of_node, h))


def joined(graphs: list[torch.Tensor]) -> SimpleNamespace:
    """Nodes of several graphs in one tensor, as a library joins them: no tensor of its own has samples first."""
    of_node = torch.cat([torch.full((len(x),), n) for n, x in enumerate(graphs)])
    y = torch.stack([x.cos().mean(0)[:2] for x in graphs])
    nodes = torch.arange(len(of_node))  # each of which is beside the next one of its graph
    edges = torch.stack([nodes[:-1], nodes[1:]])[:, of_node[:-1] == of_node[1:]]
    return SimpleNamespace(x=torch.cat(graphs), edges=edges, of_node=of_node, y=y)


def joined_graphs(plan: str | None, looks: bool = True) -> Found:
    """Six graphs to each of two ranks, whose nodes have six features."""
    model, lengths = made(Pooled), torch.randint(4, 9, (24,)).tolist()
    loader = DataLoader([torch.randn(n, 6).double() for n in lengths], batch_size=12, collate_fn=joined)  # type: ignore[arg-type]
    prepared, model, optimizer, loader = begin(plan, model, loader, reads="part", check_loss=looks)
    losses = [stepped(prepared, optimizer, F.mse_loss(model(g.x, g.edges, g.of_node, len(g.y)), g.y)) for g in loader]
    return losses, weights_of(model)


# --- workers that are not forked


UNGUARDED = """
import multiprocessing
from shardwise.ranks.process import leave_where_imported
leave_where_imported("told")
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
print(process.exitcode)
"""


def test_a_process_that_imports_the_script_leaves_at_once_and_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.stdout.strip(), ran.stderr.strip()) == (str(STARTED_BY_IMPORT), "told")

    class Loading:
        _workers = (SimpleNamespace(exitcode=STARTED_BY_IMPORT),)

        def __iter__(self) -> Iterator[Any]:
            yield 1
            raise RuntimeError("DataLoader worker exited unexpectedly")

    with pytest.raises(InputError, match=r"comes to prepare: put what the script runs under `if __name__"):
        list(from_workers(Loading()))
    Loading._workers = ()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(from_workers(Loading()))


WORKERS = """
from torch.utils.data import DataLoader
from shardwise.errors import InputError
from shardwise.scripts.part_loader import PartLoader

def main():
    for method in ("fork", "spawn", "forkserver"):
        try:
            PartLoader(DataLoader([1.0], num_workers=1, multiprocessing_context=method), 0, 1)
            print(method, "taken")
        except InputError as error:
            print(method, str(error)[:30])
"""


@pytest.mark.parametrize(
    ("ending", "is_refused"),
    [
        ("main()", True),
        ("for _ in range(1):\n    main()", True),
        ("if 1 > 0:\n    pass\nmain()", True),
        ('if __name__ == "__main__":\n    main()', False),
        ('if __name__ != "__main__":\n    raise SystemExit\nmain()', False),
    ],
)
def test_spawned_workers_of_a_script_that_they_would_run_are_refused_before_they_start(
    ending: str, is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(WORKERS + ending + "\n")
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    told = "a process that this script sta" if is_refused else "taken"
    assert ran.stdout.splitlines() == ["fork taken", f"spawn {told}", f"forkserver {told}"], ran.stderr


# --- batches that the script draws, keeps or generates by itself


def normed() -> Any:
    return made(lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)))


def permuted(plan: str | None, scope: str) -> Found:
    """Rows by `torch.randperm`, an uneven last batch, noise for the samples."""
    prepared, model, optimizer, _ = begin(plan, normed(), None, loss_scope=scope)
    data = torch.randn(14, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        order = torch.randperm(len(data))
        for i in range(0, len(data), 4):
            x = data[order[i : i + 4]]
            if prepared:
                x = prepared.deal(x)
            losses.append(stepped(prepared, optimizer, mse(model, x + 0.1 * torch.randn_like(x), x[:, :2].cos())))
    return losses, weights_of(model)


def replayed(plan: str | None, order: str) -> Found:
    """Steps on batches of other sizes than the loader's, drawn or of a second loader, after or before its own step."""
    loader, second = batches(22 if order == "alike" else 24, 8, shuffle=True), batches(15, 5)
    prepared, model, optimizer, loader = begin(plan, noisy(), loader)
    second = prepared.split(second, trains=True) if prepared else second
    data, losses = torch.randn(14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x = 1.5 * x if order in ("zipped", "alike") else x + 0.1 * torch.randn_like(x)
        losses.append(stepped(prepared, optimizer, mse(model, x, y)))

    def stored(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = data[(torch.arange(samples) * 5 + len(losses)) % 14]
        return prepared.deal(x, x[:, :2].cos()) if prepared else (x, x[:, :2].cos())

    for _ in range(2):
        for number, (own, other) in enumerate(zip(loader, second, strict=True)):
            if order == "after":
                step(*own)
            step(*(other if order in ("zipped", "alike") else stored(5 + number)))
            if order != "after":
                step(*own)
    return losses, weights_of(model)


def kept(plan: str | None, deals: str) -> Found:
    """Two passes over a list of the loader's batches, behind an iterator that is never begun; some of its own."""
    prepared, model, optimizer, loader = begin(plan, noisy(), batches(11, 4, shuffle=True))
    never_begun, held, losses = iter(loader), list(loader), []
    own = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def step(x: torch.Tensor, y: torch.Tensor, like: bool) -> None:
        x = x + 0.1 * torch.randn_like(x) if like else 1.5 * x
        losses.append(stepped(prepared, optimizer, mse(model, x, y)))

    for number, (x, y) in enumerate(held * 2):
        if deals == "between" or (deals == "first" and not number):
            step(*(prepared.deal(own, own[:, :2].cos()) if prepared else (own, own[:, :2].cos())), number > 2)
        step(x, y, deals == "never" or (deals == "first" and number > 2))
    assert next(never_begun, None) is not None
    return losses, weights_of(model)


class Graph(nn.Module):
    """One whole graph: no dim counts samples that could be dealt."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        links = torch.zeros(len(x), len(x), dtype=x.dtype).index_put((edges[0], edges[1]), torch.ones(1, dtype=x.dtype))
        return self.b(F.dropout(links @ self.a(x).relu(), 0.3, self.training))


def graph(plan: str | None, scope: str) -> Found:
    prepared, model, optimizer, _ = begin(plan, made(Graph), None, loss_scope=scope)
    torch.manual_seed(0)
    x, edges, known = torch.randn(9, 3, dtype=torch.float64), torch.randint(9, (2, 20)), torch.arange(9) % 2 == 0
    losses = []
    for _ in range(4):
        model.train()
        losses.append(stepped(prepared, optimizer, F.cross_entropy(model(x, edges)[known], torch.arange(9)[known] % 2)))
    return losses, weights_of(model)


def unlike(plan: str, deals: bool) -> None:
    prepared, model, *_ = begin(plan, normed(), None)
    x = torch.full((4, 3), float(prepared.rank), dtype=torch.float64)
    prepared.backward(model(prepared.deal(x) if deals else x).mean())


@pytest.mark.parametrize(
    ("deals", "words"),
    [(False, r"x, y = prepared.deal\(x, y\).*loss_scope"), *long((True, "first samples are others on rank 1"))],
)
def test_what_is_not_dealt_is_refused(deals: bool, words: str, pool: RankPool) -> None:
    with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
        pool.run(unlike, 2, "dp_replicate=2", deals)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (ahead, "dp_replicate=2", "Prefetcher", "count"), (ahead, "dp_shard=2,zero=3", "shuffled", "like"),
    (asked_early, "dp_replicate=2", "sum"),
    (asked_early, "dp_shard=2,zero=3", "mean"), 
    (language, "dp_shard=2,zero=3", 7, {"batch_dim": 1}),
    (language, "dp_replicate=2", 4, {"batch_dim": 1}), (turned, "dp_replicate=2", 4, "ctc", False, 0.0),
    (turned, "dp_shard=2,zero=3", 2, "ctc", False, 0.0), (turned, "dp_shard=2,zero=2", 5, "words", True, 0.3),
    (turned, "dp_replicate=2", 2, "words", False, 0.3), (turned, "dp_replicate=2", 4, "own", False, 0.0),
    (with_fixed_noise, "dp_replicate=2", 4, 8), (with_fixed_noise, "dp_replicate=2", 3, 8),
    (with_fixed_noise, "dp_replicate=2", 8, 8), (with_fixed_noise, "dp_replicate=2", 2, 5),
    (another_loader, "dp_shard=2,zero=2", True), (another_loader, "dp_shard=2,zero=3", True),
    (permuted, "dp_shard=2,zero=3", "sample"), (graph, "dp_shard=2,zero=1", "model"),
    (replayed, "dp_replicate=2", "after"), (replayed, "dp_shard=2,zero=3", "before"),
    (joined_graphs, "dp_replicate=2", False),
    (replayed, "dp_replicate=2", "zipped"), (replayed, "dp_replicate=2", "alike"),
    (kept, "dp_replicate=2", "never"), (kept, "dp_replicate=2", "between"), (kept, "dp_shard=2,zero=3", "first"),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (ahead, "dp_shard=2,zero=3", "cycled", "like"),
    (ahead, "dp_shard=2,zero=2", "of_several", "count"), (ahead, "dp_replicate=2", "first_alone", "like"),
    (ahead, "dp_shard=3,zero=1", "Prefetcher", "like"), (ahead, "tp=2", "Prefetcher", "count"),
    (permuted, "tp=2", "sample"), (permuted, "dp_replicate=3", "sample"),
    (permuted, "dp_shard=2,zero=3", "global"), (permuted, "tp=2", "global"), (permuted, "dp_replicate=3", "global"),
    (graph, "dp_shard=2,zero=3", "model"), (graph, "tp=2", "model"), (graph, "dp_replicate=3", "model"),
    (replayed, "tp=2", "before"), (replayed, "dp_replicate=3", "before"), (replayed, "dp_shard=2,zero=1", "after"),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


REFUSED: list[tuple] = [
    (ahead, "dp_replicate=2", "in_a_thread", "like", RefusedPlan,
     "in a thread of the script's own.*small_scripts.py, line"),
    (joined_graphs, "dp_replicate=2", RefusedPlan, "fails on 4 of its samples.*by size.*check_loss=False.*line"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED)
