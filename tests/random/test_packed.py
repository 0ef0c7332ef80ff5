"""Packed sequences: dropout between the layers of a packed LSTM is one process's, and forecasts know how many rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwise import Task, verify
from shardwise.errors import InputError
from shardwise.memory.live import LiveBytes
from shardwise.random import BatchDims, ConstantRandom, GlobalRandom, Samples
from shardwise.ranks import RankPool
from shardwise.rehearsal.step_trace import trace
from shardwise.trace.known_values import _padded, packed

LENGTHS = torch.tensor([3, 7, 1, 7, 5, 2])


class Tagger(nn.Module):
    """Two layers over words (B, T) of given lengths, both ways, with dropout between them."""

    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.memory = getattr(nn, kind)(8, 6, num_layers=2, bidirectional=True, dropout=0.4, batch_first=True)
        self.out = nn.Linear(12, 5)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(self.words(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.memory(rows)[0], batch_first=True, total_length=words.shape[1])[0])


class Alone(Tagger):
    """Draws for rows that no module was called with."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        rows = rows._replace(data=nn.functional.dropout(rows.data))
        return self.out(pad_packed_sequence(self.memory(rows)[0], batch_first=True, total_length=words.shape[1])[0])


def batch_of(lengths: Tensor, step: int = 0) -> dict[str, Tensor]:
    words = torch.arange(len(lengths) * 7).view(-1, 7).mul(step + 3).remainder(19) + 1
    return {"words": words * (torch.arange(7) < lengths[:, None]), "lengths": lengths}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    counts = batch["words"] > 0
    error = nn.functional.cross_entropy(output.transpose(1, 2), batch["words"] % 5, reduction="none")
    return (error * counts).sum(), counts.sum()


def inputs(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (batch["words"], batch["lengths"]), {}


def rolled(step: int) -> dict[str, Tensor]:
    return batch_of(LENGTHS.roll(step), step)


def short(step: int) -> dict[str, Tensor]:
    return batch_of(torch.full((6,), 4), step)


def lstm() -> Task:
    return Task(Tagger, loss, batch=rolled, inputs=inputs)


def gru() -> Task:
    return lstm().with_(model=partial(Tagger, "GRU"))


def alone() -> Task:
    return lstm().with_(model=Alone)


def outputs(module: nn.Module, batch: dict[str, Tensor], samples: Samples, dims: BatchDims) -> Tensor:
    random = GlobalRandom(dims)
    random.begin(0, 0, 0, samples)
    with random.watching(module):
        return module(batch["words"], batch["lengths"])


def learnt(module: nn.Module, batch: dict[str, Tensor]) -> BatchDims:
    """From the whole batch and its last sample, as the look at start does."""
    found, dims = [], BatchDims()
    for first in (0, len(LENGTHS) - 1):
        constant = ConstantRandom()
        with constant.watching(module):
            module(batch["words"][first:], batch["lengths"][first:])
        found.append(constant.calls)
    dims.learn(found[0], found[1], len(LENGTHS), 1)
    return dims


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS * 0 + 7], ids=["uneven", "even"])
def test_any_cut_of_packed_rows_draws_what_one_process_draws(lengths: Tensor, looked: bool) -> None:
    module = Tagger().train()
    batch = batch_of(lengths)
    dims = learnt(module, batch) if looked else BatchDims()
    whole = outputs(module, batch, Samples(0, 6, 6), dims)
    for cuts in ([0, 3, 6], [0, 1, 2, 6], [0, 4, 5, 6]):  # of one sequence alone, whose rows are taken apart, too
        parts = [
            outputs(module, {k: v[a:b] for k, v in batch.items()}, Samples(a, b - a, 6), dims)
            for a, b in pairwise(cuts)
        ]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6)
    assert not torch.equal(whole, outputs(module, batch, Samples(0, 6, 12), dims)), "a mask hangs on all samples' count"


@pytest.mark.parametrize(
    ("task", "plan"), [(lstm, "dp_shard=2,zero=3,accumulate=2"), (gru, "dp_replicate=3,tp=2,remat=full")]
)
def test_dropout_in_a_packed_layer_is_one_process_s(task: Callable[[], Task], plan: str, pool: RankPool) -> None:
    found = verify(task(), plan, pool=pool)
    assert found.parity, found.text()


def test_dropout_on_packed_rows_by_hand_is_refused_with_what_may_be_done(pool: RankPool) -> None:
    """Nobody says to which packed sequence a tensor belongs that no module was called with."""

    parity = verify(alone(), "dp_replicate=2", pool=pool)
    assert "in a module that is called with it" in (parity.refused or "")
    assert "at 0" in (parity.refused or ""), "a proof has no option for randomness"


@pytest.mark.parametrize("total", [-1, 9])
@pytest.mark.parametrize("first", [False, True])
def test_rows_are_padded_as_torch_does_it(first: bool, total: int) -> None:
    x = torch.randn(6, 7, 4)
    rows = pack_padded_sequence(x, LENGTHS.sort(descending=True)[0], batch_first=True)
    sizes, many = packed(LENGTHS.sort(descending=True)[0])
    assert sizes.tolist() == rows.batch_sizes.tolist() and many == len(rows.data)
    theirs, _ = torch._VF._pad_packed_sequence(rows.data, rows.batch_sizes, first, 0.5, total)
    assert torch.equal(_padded(rows.data, sizes.tolist(), first, 0.5, total), theirs)


class NumPy(Tagger):
    """Lengths, and a number of each sentence, as NumPy has them."""

    by = "lengths"

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        read = {"lengths": lengths, "words": self.words.weight.detach()}[self.by]
        assert (np.asarray(read) > -9).all() and int(lengths.numpy().max()) <= words.shape[1]
        return super().forward(words, torch.as_tensor([np.int64(length) for length in lengths.numpy()]))


@pytest.mark.parametrize("model", [Tagger, NumPy])
def test_a_packed_layer_is_traced_by_its_lengths(model: type) -> None:
    """FLOPs of its products by hand for rows that are there alone; live bytes as of a real step."""
    task = lstm().with_(batch=short, model=model)
    found = trace(task, 6)
    gates = 2 * 4 * 6 * (8 + 6 + 12 + 6)  # two directions, four gates, of two layers
    rows, places = 6 * 4, 6 * 7
    products = 3 * 2 * (rows * gates + places * 12 * 5)
    if torch.__version__ < (2, 13):  # op by op where mkldnn has packed layers since: first states need no gradient
        products -= 4 * 2 * 6 * (4 * 6) * 6
    assert found.flops == products
    assert found.by_batch, "told: the lengths are those of the first sample"
    assert found.peak == pytest.approx(_really_live(task), rel=0.02)


def test_numpy_of_what_nobody_knows_is_refused_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumPy, "by", "words")
    with pytest.raises(InputError, match="a value that only a real run has is asked for"):
        trace(lstm().with_(model=NumPy), 6)


def _really_live(task: Task) -> int:
    batch: Any = task.batch(0)
    model = task.model().train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    live = LiveBytes()
    live.count([*model.parameters(), *batch.values()])
    rests = live.now
    with live:
        output = model(batch["words"], batch["lengths"])
        total = task.loss(output, batch)[0]
        del output
        total.backward()
    return live.peak - rests
