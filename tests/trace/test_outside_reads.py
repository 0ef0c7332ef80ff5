"""What is seen of a module's arguments while its forward runs."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.trace.outside_reads import ArgumentWrites, set_training


def test_memory_that_an_argument_had_is_no_other_tensors() -> None:
    writes, block, given = ArgumentWrites(), nn.Linear(1, 1), torch.zeros(8)
    writes.enter(block, "block", (given,), {})
    given.data = torch.ones(8)  # as a stage puts what it received into what the caller holds
    others = [torch.zeros(8) for _ in range(100)]
    for other in others:
        writes.note(torch.ops.aten.add_.Tensor, (other, 1), {})
    assert not writes.paths
    kept = torch.zeros(8)
    writes.enter(block, "another", (kept,), {})
    writes.note(torch.ops.aten.add_.Tensor, (kept, 1), {})
    assert writes.paths == {"another"}


class Looping(nn.Linear):
    """A module whose `train` is a loop of its own."""

    def train(self, batches: list) -> None:  # type: ignore[override]
        raise AssertionError("nobody asked for training on batches")


def test_a_train_that_is_something_else_is_not_called() -> None:
    module = Looping(2, 2)
    assert set_training(module, True) is module and module.training
