"""Wide tensors in chunks of positions: equal to whole ones, none of them whole, and refused or made whole otherwise."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import verify
from shardwise.errors import RefusedPlan
from shardwise.memory.chunk_waiting import Waiting
from shardwise.memory.chunks import Chunks, chunked_forwards
from shardwise.ranks import RankPool

WORDS, WIDTH = 29, 6


class Network(nn.Module):
    """A gated feed-forward network with a residual, and a head: (B, S, H) -> (B, S, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Flat(Network):
    """The same with products of (B * S, H), and one product for gate and network."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).view(-1, WIDTH)
        wide = torch.addmm(self.up.bias.repeat(2), rows, torch.cat([self.gate.weight, self.up.weight]).t())
        gate, up = wide.view(*x.shape[:2], -1).chunk(2, -1)
        return (x + self.down(F.gelu(gate) * up)) @ self.head.weight.t()


def shifted(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(o[:, :-1].reshape(-1, WORDS), t[:, 1:].reshape(-1), reduction=reduction)


def smoothed(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(o.view(-1, WORDS), t.view(-1), reduction=reduction, label_smoothing=0.1, ignore_index=3)


def weighted(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=o.dtype)
    return F.cross_entropy(o.transpose(1, 2), t, weight, ignore_index=-100, reduction=reduction)


def each(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    mask = (t != 3).to(o.dtype)
    return (F.cross_entropy(o.float().transpose(1, 2), t, reduction="none") * mask).sum() / mask.sum()


def written(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    picked = o.log_softmax(-1).gather(-1, t.unsqueeze(-1))
    return -getattr(picked, reduction)() + getattr(o.logsumexp(-1).square(), reduction)()


def squares(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return getattr(o.square(), reduction)() + F.smooth_l1_loss(o.tanh(), o.detach().sign(), reduction=reduction)


def right(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return shifted(o, t, reduction) * (o.argmax(-1) == t).double().mean()


def changed(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    before = o.tanh()
    o.mul_(2)  # after what waits has read it
    return shifted(o, t, reduction) + before.square().sum()


def dropped(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    torch.manual_seed(1)
    return shifted(F.dropout(o, 0.5), t, reduction)


def mixed(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return shifted(o.cumsum(1), t, reduction)


# what becomes of the head's (B, S, V): None in chunks, else the operation before which it is made whole
LOSSES: list[tuple[Callable, str | None]] = [
    (shifted, None), (smoothed, None), (weighted, None), (each, None), (written, None), (right, None),
    (squares, None), (changed, "mul_"), (dropped, "dropout"), (mixed, "cumsum"),
]  # fmt: skip


def _gradients(
    run: Callable, model: Network, x: Tensor, t: Tensor, loss: Callable, reduction: str
) -> list[Tensor]:  # fmt: skip
    found = loss(run(x), t, reduction)
    assert type(found) is Tensor
    wants = [x, *(param for param in model.parameters() if type(model) is Network or param is not model.head.bias)]
    return [found, *torch.autograd.grad(found, wants)]


@pytest.mark.parametrize("kind", [Network, Flat])
@pytest.mark.parametrize(("loss", "before"), LOSSES, ids=lambda one: getattr(one, "__name__", None))
def test_chunks_give_the_loss_and_gradients_of_the_whole(kind: type, loss: Callable, before: str | None) -> None:
    draws = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randn(3, 13, WIDTH, generator=draws, dtype=torch.float64, requires_grad=True)
    t = torch.randint(WORDS, (3, 13), generator=draws)
    for reduction in ("sum", "mean"):
        whole = _gradients(model.forward, model, x, t, loss, reduction)
        for count in (2, 5, 13):
            chunks = Chunks(count)
            found = _gradients(chunks.inside(model.forward), model, x, t, loss, reduction)
            # `each` works in float32, whose kernels round otherwise on other strides, as the processor has it
            bar = torch.finfo(torch.float32).eps if loss is each else 1e-12
            assert max(float((a - b).abs().max()) for a, b in zip(whole, found, strict=True)) < bar
            assert set(chunks.whole) == ({before} if before else set())
            assert len(chunks.computed) >= (1 if before else 2)


def test_complex_results_have_gradients() -> None:
    x, a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 8, 4), (4, 8), (4, 8)))

    def made(x: Tensor) -> Tensor:
        return torch.complex(x @ a, x @ b).mean(-1)

    whole = torch.autograd.grad(made(x).abs().sum(), (x, a, b))
    chunks = Chunks(4)
    found = torch.autograd.grad(chunks.inside(made)(x).abs().sum(), (x, a, b))
    assert chunks.computed and all(torch.allclose(one, two) for one, two in zip(whole, found, strict=True))


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gave."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, tuple | list) else [out]:
            if type(leaf) is Tensor and not leaf.is_meta:  # not the shape of a part
                self.most = max(self.most, leaf.numel())
        return out


def test_no_wide_tensor_is_made_whole() -> None:
    """In a forward and backward nothing is larger than what comes in, or a chunk of what is wide."""
    model, x = Network(), torch.randn(2, 64, WIDTH)
    t = torch.randint(WORDS, (2, 64))
    most = {}
    for count in (1, 8):
        with _Largest() as seen:
            run = model.forward if count == 1 else Chunks(count).inside(model.forward)
            shifted(run(x), t, "sum").backward()
        most[count] = seen.most
    assert most[1] >= 2 * 63 * WORDS
    assert most[8] == max(2 * 64 * WIDTH, math.ceil(64 / 8) * 2 * WORDS)


def test_gradients_of_narrow_weights_are_added_up_wide() -> None:
    """bfloat16: a weight's gradient over 64 chunks is about as far from float32 as that of one product (5 times so far
    where the sum is taken in bfloat16)."""
    torch.manual_seed(0)
    narrow = Network().bfloat16()
    wide = Network()
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(2, 64, WIDTH).bfloat16()

    def gradient(run: Callable, model: Network, x: Tensor) -> Tensor:
        return torch.autograd.grad(run(x).float().square().sum(), model.head.weight)[0].float()

    exact = gradient(wide.forward, wide, x.float())
    errors = [float((gradient(run, narrow, x) - exact).norm())
              for run in (narrow.forward, Chunks(64).inside(narrow.forward))]  # fmt: skip
    assert errors[1] <= 1.25 * errors[0]


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return gradient * 2


def test_what_would_be_lost_is_refused() -> None:
    model, x = Network(), torch.randn(2, 16, WIDTH)
    wide = Chunks(4).inside(model.forward)(x)
    assert type(wide) is Waiting
    with pytest.raises(RefusedPlan, match=r"autograd.Function.*gradient would be lost"):
        _Own.apply(wide).sum().backward()
    wide = Chunks(4).inside(model.up.forward)(x)
    x.mul_(2)
    with pytest.raises(RefusedPlan, match="was written into after it had been given to a product"):
        wide.sum()


def test_what_is_asked_of_a_wide_tensor_makes_nothing() -> None:
    wide = Chunks(4).inside(nn.Linear(6, 24).forward)(torch.randn(2, 16, WIDTH))
    assert wide.shape == wide.size() == (2, 16, 24) and wide.dim() == 3 and len(wide) == 2 and wide.numel() == 768
    assert wide.dtype == torch.float32 and wide.device.type == "cpu" and wide.requires_grad and not wide.is_meta
    assert wide.call.values is None
    assert wide[0, 0, 0].item() == wide.tolist()[0][0][0] and wide.call.values is not None


M, S = "shardwise.models.tasks:", "sequence_tasks:"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(M + "decoder", "cp=3,position_chunks=2,remat=full", marks=LONG),
        (M + "decoder", "tp=2,sp=true,position_chunks=2"),
        (S + "averaged", "dp_shard=2,zero=3,position_chunks=3"),
        (S + "averaged", "cp=2,position_chunks=2"),
        (S + "low_rank", "tp=2,position_chunks=2,remat=full"),
        (M + "decoder", "cp=2,cp_ulysses=2,position_chunks=3"),
        (M + "moe", "cp_ulysses=2,zero=3,position_chunks=3"),
        (M + "moe", "dp_shard=2,ep=2,zero=1,position_chunks=3"),
        (S + "handed_on", "dp_shard=2,zero=3,position_chunks=2"),
        *(
            pytest.param(M + name, plan + ",position_chunks=3", marks=LONG)
            for name in ("decoder", "gpt2", "vit", "moe", "decoder_dropout")
            for plan in ("accumulate=2", "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2,remat=full", "tp=2",
                         "dp_shard=2,zero=3,remat=full", "tp=2,sp=true,remat=full", "cp=2,tp=2,sp=true",
                         "cp_ulysses=2,zero=3", "cp=2,cp_ulysses=2,remat=selective")
            if name != "vit" or "sp" not in plan
            if (name, plan) != ("moe", "cp_ulysses=2,zero=3")  # above
            if name != "gpt2" or "cp=2" not in plan  # three heads, with dropout: none for a fourth rank
        ),
    ],
)  # fmt: skip
def test_chunks_under_other_plans_equal_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(name, plan, pool=pool)
    assert parity.parity, parity.text()
    # an expert's wide product is seen by halves, which are narrow; what else is wide there, a unit returns
    whole = name in (M + "moe", S + "handed_on") and "zero=3" in plan
    told = "no effect.*what the model returns, or a block, is made whole" if whole else "computes in chunks"
    assert any(re.search(told, note) for note in parity.notes), parity.notes


def test_a_network_that_writes_in_place_is_told_by_name() -> None:
    """What stays whole, and why, beside what is chunked and alone."""
    torch.manual_seed(0)
    x = torch.randn(2, 13, WIDTH)

    def notes(inplace: bool) -> str:
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=inplace), nn.Linear(4 * WIDTH, WIDTH)]
        model = nn.Sequential(OrderedDict(feed=nn.Sequential(*layers)))
        expected = model(x)
        chunks = Chunks(3)
        chunked_forwards(model, [], chunks, False)
        assert (model(x) - expected).abs().max() < 1e-6
        return " ".join(chunks.notices())

    assert "'feed.1' keeps a wide tensor whole: relu writes into it" in notes(True)
    assert "keeps" not in notes(False) and "computes in chunks" in notes(False)
