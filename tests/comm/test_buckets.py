"""Gradients are in their buckets when a backward is over, whatever the order in which it makes them."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.comm.buckets import Bucket, GradientBuckets, small_buckets


class _HeadFirst(nn.Module):
    """Declares the layer that runs last first, so that backward ends with a weight in the middle of a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.enter, self.spare = nn.Linear(4, 1), nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, spare: bool = False) -> torch.Tensor:
        hidden = self.enter(x).tanh()
        return self.head(self.spare(hidden) if spare else hidden).sum()


def _in_buckets(model: nn.Module, *, keep: bool) -> tuple[GradientBuckets, list[bool]]:
    """Returns buckets of the model, and for each that is launched whether backward was still running."""
    inside: list[bool] = []

    def launch(bucket: Bucket) -> None:
        inside.append(torch._C._current_graph_task_id() != -1)

    with small_buckets():
        named = list(model.named_parameters())
        return GradientBuckets(named, dtype=torch.float64, ranks=1, summing=1, keep=keep, launch=launch), inside


def _backward(buckets: GradientBuckets, loss: torch.Tensor, *, last: bool = True) -> None:
    buckets.start_micro_batch(sync=last)
    loss.backward()
    buckets.finish_micro_batch()


def _gradients(buckets: GradientBuckets) -> dict[str, torch.Tensor]:
    return {
        buckets.names[entry.index]: view.clone()
        for bucket in buckets.buckets
        for entry, view in zip(bucket.layout.entries, bucket.views_now, strict=True)
    }


def test_gradients_of_two_micro_batches_are_in_their_buckets() -> None:
    for keep in (True, False):
        torch.manual_seed(0)
        model, x = _HeadFirst().double(), torch.randn(5, 3, dtype=torch.float64)
        names = [name for name, _ in model.named_parameters()]
        sums = torch.autograd.grad(model(x) + model(2 * x, spare=True), [*model.parameters()])
        buckets, _ = _in_buckets(model, keep=keep)
        assert len(buckets.buckets) > 1
        for _ in range(2):
            buckets.start_step()
            _backward(buckets, model(x), last=False)
            assert buckets.used_now == {names.index(name) for name in names if "spare" not in name}
            _backward(buckets, model(2 * x, spare=True))
            assert buckets.used == set(range(len(names)))
            torch.testing.assert_close(_gradients(buckets), dict(zip(names, sums, strict=True)))


def test_from_the_second_backward_on_buckets_go_out_in_it() -> None:
    model, x = _HeadFirst().double(), torch.randn(5, 3, dtype=torch.float64)
    buckets, inside = _in_buckets(model, keep=True)
    for step in range(3):
        inside.clear()
        buckets.start_step()
        _backward(buckets, model(x, spare=True))
        assert len(inside) == len(buckets.buckets)
        assert step == 0 or all(inside)


def test_what_comes_between_two_steps_is_a_stray_and_in_no_bucket() -> None:
    model, x = _HeadFirst().double(), torch.randn(5, 3, dtype=torch.float64)
    buckets, _ = _in_buckets(model, keep=True)
    strays: list[nn.Parameter] = []
    buckets.strays, buckets.asleep = strays.append, True
    (model.head.weight.sum() + model.enter.bias.sum()).backward()
    buckets.tell_strays()
    assert strays and not buckets.used_now
    for param in model.parameters():
        param.grad = None
    strays.clear()
    buckets.asleep = False
    buckets.start_step()
    _backward(buckets, model(x))
    assert not strays and buckets.used == {0, 1, 2, 3}
