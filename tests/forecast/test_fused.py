"""Traces for a GPU: attention and dropout keep what its kernels keep, which ops of a CPU do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise import Task
from shardwise.cluster import Cluster
from shardwise.costs.software import software
from shardwise.layout import Plan
from shardwise.memory.live import LiveBytes
from shardwise.planner.door import layout_of
from shardwise.planner.traced_layouts import traced_subject
from shardwise.rehearsal.gpu_kernels import Fused
from shardwise.rehearsal.op_counts import Count
from shardwise.rehearsal.step_trace import trace
from shardwise.simulator.counted import StepTrace
from shardwise.trace.fake import Fake
from shardwise.trace.known_values import Values

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 512, 64
SCORES = BATCH * HEADS * LENGTH * LENGTH  # elements


def _attend(dtype: torch.dtype, mask: str, value: int, groups: int, dropout: float) -> tuple[StepTrace, int, list]:
    """Forward and backward: what it did, the most live bytes, and shapes of output and gradients."""
    seen, live = StepTrace(1), LiveBytes()
    with Fake(), Fused():
        shapes = (HEADS, LENGTH, WIDTH), (HEADS // groups, LENGTH, WIDTH), (HEADS // groups, LENGTH, value)
        q, k, v = (torch.empty(BATCH, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
        masks = {"bool": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool),
                 "float": torch.zeros(LENGTH, LENGTH, dtype=dtype), "none": None}  # fmt: skip
        with Count(seen), live:
            out = F.scaled_dot_product_attention(
                q, k, v, masks[mask], dropout_p=dropout, is_causal=mask == "none", enable_gqa=groups > 1
            )
            out.sum().backward()
    return seen, live.peak, [tuple(each.shape) for each in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("value", [WIDTH, 32])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_scores_are_written(dtype: torch.dtype, mask: str, value: int, groups: int, dropout: float) -> None:
    seen, peak, shapes = _attend(dtype, mask, value, groups, dropout)
    assert shapes == [(BATCH, HEADS, LENGTH, value), (BATCH, HEADS, LENGTH, WIDTH),
                      (BATCH, HEADS // groups, LENGTH, WIDTH), (BATCH, HEADS // groups, LENGTH, value)]  # fmt: skip
    assert not seen.products
    assert sum(seen.attention.values()) == 2
    causal = {shape[-1] for kind, shape, _ in seen.order if kind == "attention"}
    assert causal == {float(mask == "none")}
    assert peak < SCORES * dtype.itemsize


def test_scores_are_written_in_float64() -> None:
    seen, peak, _ = _attend(torch.float64, "none", WIDTH, 1, 0.1)
    assert seen.products and not seen.attention
    assert peak > SCORES * 8


def test_a_head_of_any_width_and_rows_of_any_length() -> None:
    with Fake(), Fused():
        q = torch.empty(2, 4, 13, 20, dtype=torch.bfloat16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        assert q.grad.shape == q.shape
        F.scaled_dot_product_attention(q, q, q, torch.ones(13, 13, dtype=torch.bool)).sum().backward()


@pytest.mark.parametrize("drop", [F.dropout, torch.dropout, lambda x, p, training: nn.Dropout(p)(x)])
def test_a_dropout_keeps_a_byte_for_each_element(drop) -> None:
    live = LiveBytes()
    with Fake(), Fused():
        x = torch.empty(1000, dtype=torch.float32, requires_grad=True)
        live.count([x])
        with live:
            out = drop(x, 0.1, True)
    assert live.now - x.nbytes - out.nbytes == 1000
    with Fake(), Fused():
        assert F.dropout(x, 0.1, training=False) is not None
        assert F.dropout(x, 0.0, True) is not None


class Encoder(nn.Module):
    """torch's own layer, whose attention is called from inside torch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 64, dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _task(dropout: float) -> Task:
    return Task(model=lambda: Encoder(dropout), loss=lambda out, batch: (out.sum(), 1),
                batch=lambda step: torch.ones(4, 256, 64), name="encoder")  # fmt: skip


def test_attention_inside_torchs_own_modules_is_met() -> None:
    plain, dropped, on_cpu = trace(_task(0.0), 2, fused=True), trace(_task(0.1), 2, fused=True), trace(_task(0.1), 2)
    assert plain.attention == dropped.attention
    masks = 4 * 2 * 256 * 64  # at most, one byte each: beside attention, in the feed-forward, after both
    assert plain.peak <= dropped.peak <= plain.peak + masks + 2 * 256 * 64 * 4
    assert dropped.peak < on_cpu.peak / 2, "on a CPU the scores and their mask are written"


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_blocks_meet_them_too(recompute: str) -> None:
    def task() -> Task:
        model = lambda: nn.Sequential(*(Encoder(0.1) for _ in range(3)))  # noqa: E731
        return Task(model=model, loss=lambda out, batch: (out.sum(), 1), batch=lambda step: torch.ones(4, 256, 64))

    plain, again = trace(task(), 2, fused=True), trace(task(), 2, recompute=recompute, fused=True)
    assert again.peak < plain.peak
    assert sum(again.attention.values()) - sum(plain.attention.values()) == (3 if recompute == "full" else 0)


def test_nothing_is_left_behind() -> None:
    before = F.dropout, F.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="inside"), Fused():
        raise RuntimeError("inside")
    assert (F.dropout, F.scaled_dot_product_attention) == before


def test_a_plan_for_gpus_has_their_kernels_and_one_for_cpus_does_not() -> None:
    def peak(cluster: Cluster) -> float:
        where = (cluster, software("shardwise"), 4, "fp32")
        seen = traced_subject(_task(0.1), *where, cuts=False, randomness="fast")
        return seen.memory(layout_of(Plan(dp_replicate=2), seen)).terms["micro-batch"]

    gpus = Cluster.parse("2 h100-sxm-80gb")
    assert peak(gpus) < peak(_cpu(gpus)) / 2


def _cpu(like: Cluster) -> Cluster:
    return replace(like, device=replace(like.device, kind="cpu", table=""))


@pytest.mark.parametrize(
    ("dropout", "text", "randomness", "told"),
    [
        (0.1, "tp=2", "global", True), (0.1, "tp=2", "fast", True), (0.0, "tp=2", "global", False),
        (0.1, "dp_shard=2,zero=3", "global", True), (0.1, "dp_shard=2,zero=3", "fast", False),
    ],
)  # fmt: skip
def test_attention_whose_dropout_is_one_process_s_writes_its_scores_and_says_so(
    dropout: float, text: str, randomness: Any, told: bool
) -> None:
    """Beside cut heads always; without dropout a kernel does it, and where each rank draws its own."""
    where = (Cluster.parse("2 h100-sxm-80gb"), software("shardwise"), 4, "fp32")
    seen = traced_subject(_task(dropout), *where, randomness=randomness)
    found = seen.simulate(layout_of(Plan.parse(text), seen))
    assert ("its scores are written" in found.basis.get("attention", "")) is told


class Draws(nn.Module):
    """Draws floats and a mask of a thousand elements, and into eight numbers that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.empty(len(x), 1000).bernoulli_(0.5)
        kept = kept + torch.rand(len(x), 1000) + torch.randn_like(kept) + torch.bernoulli(kept)
        few = torch.zeros(8).uniform_() < 0.5
        return (self.weight * kept).sum() + self.weight * few.nonzero().shape[0]


def test_the_bits_of_draws_whose_values_nobody_knows_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trace counts is the same as if they were; on what is drawn into known values a choice may hang."""
    task = Task(model=Draws, loss=lambda out, batch: (out, 1), batch=lambda step: torch.ones(2, 1))
    computed: list[int] = []
    theirs = Values._on_values

    def on_values(self: Values, func: Any, args: tuple, kwargs: dict, leaves: list) -> Any:
        computed.extend(leaf.numel() for leaf in leaves)
        return theirs(self, func, args, kwargs, leaves)

    monkeypatch.setattr(Values, "_on_values", on_values)
    found = trace(task, 2, follow=True)
    assert max(computed) == 8
    monkeypatch.setattr("shardwise.rehearsal.trace_mode._unread", lambda *given: False)
    whole = trace(task, 2, follow=True)
    assert (found.order, found.peak, found.by_batch) == (whole.order, whole.peak, whole.by_batch)
    assert max(computed) == 2000


def test_a_mask_of_one_process_is_one_kernel_on_a_gpu_and_a_dozen_elsewhere() -> None:
    """Of a thousand elements for each sample the kernel writes a byte; plain operations move eight, again and again."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.weight * x, 0.1).sum()

    task = Task(model=Dropped, loss=lambda out, batch: (out, 1), batch=lambda step: torch.ones(2, 1000))
    own = trace(task, 2, fused=True)
    for fused, kernels, moved in ((True, 5, 20), (False, 30, 400)):
        found = trace(task, 2, fused=fused, follow=True)
        assert found.kernels - own.kernels <= kernels, found.order
        assert (found.moved - own.moved) / 2000 <= moved, found.order
    assert (found.moved - own.moved) / 2000 > 100 and found.kernels - own.kernels > 10


KINDS: list[tuple[type[nn.RNNBase], int]] = [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)]


def _recur(kind: type[nn.RNNBase], steps: int, **options: Any) -> tuple[StepTrace, nn.RNNBase, Any]:
    """Forward and backward of 3 sequences of 5 numbers in two layers of 8: what was counted, and the output."""
    seen = StepTrace(1)
    with Fake(), Fused():
        layers = kind(5, 8, num_layers=2, batch_first=True, **options)
        x = torch.zeros(3, steps, 5, requires_grad=True)
        with Count(seen):
            out, end = layers(x)
            out.sum().backward()
    assert x.grad is not None and all(weight.grad is not None for weight in layers.parameters())
    return seen, layers, (out, end)


@pytest.mark.parametrize(("kind", "gates"), KINDS)
def test_a_recurrent_layer_is_one_call_whatever_its_steps(kind: type[nn.RNNBase], gates: int) -> None:
    """What goes step by step is a product of its own kind; all else is as many kernels of 7 steps as of 70."""
    seen, _, (out, end) = _recur(kind, 7)
    assert seen.kernels == _recur(kind, 70)[0].kernels
    by_steps = [(shape, times) for name, shape, times in seen.order if name == "recurrence"]
    assert by_steps == [((3, gates * 8, 8), 7)] * 2 + [((3, 8, gates * 8), 7)] * 2
    flops = sum(2 * m * n * k * times for (m, n, k), times in seen.products.items())
    assert flops == 3 * sum(2 * 3 * 7 * gates * 8 * wide for wide in (5, 8, 8, 8)), "of inputs and of states"
    states = end if kind is nn.LSTM else (end,)
    assert [tuple(state.shape) for state in states] == [(2, 3, 8)] * len(states)
    assert tuple(out.shape) == (3, 7, 8)


def test_recurrent_layers_in_both_directions_with_dropout_and_projected_states() -> None:
    seen, _, (out, (end, cell)) = _recur(nn.LSTM, 7, bidirectional=True, dropout=0.5, bias=False)
    assert tuple(out.shape) == (3, 7, 16) and tuple(end.shape) == tuple(cell.shape) == (4, 3, 8)
    assert sum(name == "native_dropout" for name, *_ in seen.order) == 1
    seen, _, (out, _) = _recur(nn.LSTM, 7, proj_size=4)
    assert tuple(out.shape) == (3, 7, 4) and not any(name == "recurrence" for name, *_ in seen.order)


class _Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(5, 8, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layers(rows)[0], batch_first=True)[0]


@pytest.mark.parametrize(("kind", "gates"), KINDS)
def test_packed_rows_go_through_one_call_too(kind: type[nn.RNNBase], gates: int) -> None:
    """Two sequences of 7 steps: 14 rows at once for what goes in, 2 in each step."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(2, 7, 5), "lengths": torch.tensor([7, 7])}

    task = Task(model=lambda: _Packed(kind), batch=batch, inputs=lambda b: ((b["x"], b["lengths"]), {}),
                loss=lambda out, b: (out.square().sum(), len(out)))  # fmt: skip
    found = trace(task, 2, fused=True)
    by_steps = [(shape, times) for name, shape, times in found.order if name == "recurrence"]
    assert by_steps == [((2, gates * 8, 8), 7)] * 2 + [((2, 8, gates * 8), 7)] * 2
    assert found.products[14, gates * 8, 5] == 1 and not found.idle
