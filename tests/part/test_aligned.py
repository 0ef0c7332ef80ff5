"""Losses over all alignments and packed sequences, of positions that are cut: gathered, and as one process has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shardwise import Task, verify

FRAMES, LENGTH = 23, 13


class Letters(nn.Module):
    """Sound to letters."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Conv1d(5, 12, 3, padding=1), nn.Linear(12, 7)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.mix(sound.mT)).mT).log_softmax(-1)


def _sounds(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    letters, many = torch.randint(1, 7, (8, 6), generator=g), torch.randint(1, 7, (8,), generator=g)
    frames = torch.randint(14, FRAMES + 1, (8,), generator=g)
    return {"sound": torch.randn(8, FRAMES, 5, generator=g), "letters": letters, "many": many, "frames": frames}


def _alignments(output: torch.Tensor, batch: dict) -> tuple[torch.Tensor, int]:
    found = F.ctc_loss(output.transpose(0, 1), batch["letters"], batch["frames"], batch["many"], reduction="none")
    return found.sum(), len(output)


def letters() -> Task:
    return Task(model=Letters, batch=_sounds, loss=_alignments, inputs=lambda batch: ((batch["sound"],), {}),
                sequence={"sound": 1})  # fmt: skip


class Packed(nn.Module):
    """Two directions over sequences of several lengths, which end where the padding (0) begins."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(23, 12), nn.Linear(24, 23)
        self.memory = nn.GRU(12, 12, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x != 0).sum(1).cpu()
        rows = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.memory(rows)[0], batch_first=True, total_length=x.shape[1])
        return self.out(found)


def _padded(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    x, lengths = torch.randint(1, 23, (8, LENGTH + 1), generator=g), torch.randint(1, LENGTH + 1, (8, 1), generator=g)
    lengths[3] = LENGTH
    inside = torch.arange(LENGTH) < lengths
    return {"x": x[:, :-1] * inside, "y": x[:, 1:].masked_fill(~inside, -100)}


def _words(output: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    y = batch["y"].flatten()
    return F.cross_entropy(output.flatten(0, 1), y, reduction="sum"), (y != -100).sum()


def packed() -> Task:
    return Task(model=Packed, batch=_padded, loss=_words, inputs=lambda batch: ((batch["x"],), {}),
                sequence={"x": 1, "y": 1})  # fmt: skip


def unnamed() -> Task:
    return replace(letters(), sequence=None)


@pytest.mark.parametrize(
    "plan", ["cp=3", "cp=2,cp_ulysses=2", "cp=2,tp=2,sp=true", "cp=2,dp_shard=2,zero=3", "cp=2,pp=2"]
)
@pytest.mark.parametrize("task", ["letters", "packed"])
def test_sequences_that_are_read_whole_equal_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"test_aligned:{task}", plan, pool=pool)
    assert found.parity, found.text()


def test_what_is_gathered_for_all_alignments_is_told(pool) -> None:
    found = verify("test_aligned:letters", "cp=2", pool=pool)
    assert found.parity and "what ctc_loss reads is gathered over cp=2" in found.text(), found.text()
    assert f"a rank receives {FRAMES * 7 // 2} elements for a sample" in found.text(), found.text()


def test_where_a_module_has_one_length_the_refusal_says_how_to_name_its_dims(pool) -> None:
    found = verify("test_aligned:unnamed", "cp=2", pool=pool)
    assert not found.parity and 'Task(sequence={"' in found.refused, found.text()
