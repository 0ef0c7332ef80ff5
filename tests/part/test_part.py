"""Every operation on parts and sums against the same operation on whole tensors, forward and backward."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shardwise.comm import Axis, Ledger
from shardwise.layout import Plan
from shardwise.layout.view_dims import groups
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Part, Sum, Uncut, plain, to_part
from shardwise.part.cuts import regrouped, unsliced
from shardwise.trace.elementwise import is_elementwise

DOUBLE = torch.float64
ONES = torch.ones(6, 6, 6, dtype=DOUBLE)
INDEX = torch.tensor([[0, 3], [1, 3]])
CLASSES = torch.tensor([[1], [5], [0], [3], [6], [2]])
TARGET = torch.tensor([1, 5, 0, 3, -100, 2])
MASK = torch.tensor([[True, False, True], [True, True, False]]).repeat(2, 1)


def _by_strides(x: torch.Tensor) -> torch.Tensor:
    """Slices of rows, one column, a turned view, as autograd reads gradients of what was written into."""
    read = x.detach()
    rows, column = read.as_strided((4, 2, 2), (9, 3, 2), 3), read.as_strided((4, 3), (9, 3), 1)
    turned = read.as_strided((3, 1, 4), (1, 9, 9), 6)
    return x * (column + turned[:, 0].mT + rows.sum((1, 2))[:, None])[:, None]


def _gqa(q: torch.Tensor) -> torch.Tensor:
    key = q[:, ::2].contiguous()
    return F.scaled_dot_product_attention(q, key, key, is_causal=True, enable_gqa=True)


# name -> (function of one whole tensor, its shape, dims along which it must work when cut)
CASES: dict[str, tuple[Callable, tuple[int, ...], set[int]]] = {
    "gelu": (F.gelu, (4, 6), {0, 1}),
    "silu times itself": (lambda x: F.silu(x) * x, (4, 6), {0, 1}),
    "where": (lambda x: torch.where(x > 0, x, 2 * x), (4, 6), {0, 1}),
    "plain broadcast": (lambda x: x * torch.arange(6.0, dtype=DOUBLE) + torch.ones(4, 1, dtype=DOUBLE), (4, 6), {0, 1}),
    "masked fill": (lambda x: x.masked_fill(MASK, 0.5), (4, 3), {0, 1}),
    "in place": (lambda x: (x * 1).mul_(2).add_(x), (4, 6), {0, 1}),
    "by strides": (_by_strides, (4, 3, 3), {0}),
    "clamp and power": (lambda x: x.clamp(-1, 1).pow(3).tanh(), (4, 6), {0, 1}),
    "split heads": (lambda x: x.view(3, 4, 2).transpose(0, 1), (3, 8), {0, 1}),
    "merge heads": (lambda x: x.transpose(1, 2).reshape(2, 3, 8), (2, 4, 3, 2), {0, 1, 2}),
    "permute, squeeze": (lambda x: x.unsqueeze(0).permute(2, 0, 1).squeeze(1), (4, 6), {0, 1}),
    "expand": (lambda x: x.unsqueeze(1).expand(-1, 3, -1).reshape(12, 6), (4, 6), {0, 1}),
    "another shape, in place": (
        lambda x: (x * 1).transpose_(0, 1).unsqueeze_(0).mul_(2).swapdims_(0, 1), (4, 6), {0, 1},
    ),
    "a view turned in place": (lambda x: (x * 1).view(4, 3, 2).transpose_(0, 1) * 2, (4, 6), {0}),
    "repeat": (lambda x: x.repeat(2, 3), (4, 6), {0, 1}),
    "repeat no times": (lambda x: x.repeat(1, 0), (4, 6), {0, 1}),
    "a vector's transpose": (lambda x: x.t() * 2, (6,), {0}),
    "pairs as complex numbers": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), (4, 6, 2), {0, 1}),
    "integers of two bytes": (lambda x: x * (x.detach() * 9).short().amax(1, keepdim=True), (4, 6), {0, 1}),
    "multi margin": (lambda x: F.multi_margin_loss(x, TARGET.abs() % 6, reduction="sum"), (6, 7), set()),
    "chunk": (lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1], (4, 8), {0}),
    "slices": (lambda x: x[1:3, ::2] + x[:2, 1::2], (4, 6), set()),
    "slice": (lambda x: x[1:, 2:5], (4, 6), {0, 1}),
    "rotary": (lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1), (4, 6), {0}),
    "cat": (lambda x: torch.cat([x, 2 * x], 1), (4, 6), {0, 1}),
    "stack": (lambda x: torch.stack([x, x * x], 1), (4, 6), {0, 1}),
    "unbind": (lambda x: x.view(4, 3, 2).unbind(1)[1], (4, 6), {0}),
    "windows": (lambda x: x.unfold(1, 3, 2) * 2, (4, 8), {0}),
    "scan in place": (lambda x: (x * 1).cumsum_(1) * (x * 1).cumprod_(1), (4, 6), {0}),
    "select": (lambda x: x[:, 2], (4, 6), {0}),
    "flip, cumsum": (lambda x: x.flip(1).cumsum(1), (4, 6), {0}),
    "index by another dim": (lambda x: x[torch.tensor([2, 0, 2])], (4, 6), {1}),
    "sum": (lambda x: x.sum(1), (4, 6), {0, 1}),
    "sum of all": (lambda x: x.sum(), (4, 6), {0, 1}),
    "mean": (lambda x: x.mean(0, keepdim=True), (4, 6), {0, 1}),
    "largest and where": (lambda x: x.max(1).values * x.max(1, keepdim=True).indices.squeeze(1), (4, 6), set()),
    "where the smallest is": (lambda x: x * (x.argmin(0) + x.argmax(0)), (4, 6), {1}),
    "variance": (lambda x: torch.var(x, 1) + x.std((0, 1), correction=0), (4, 6), {0, 1}),
    "variance and mean": (lambda x: sum(torch.var_mean(x, 0, keepdim=True)), (4, 6), {0, 1}),
    "amax": (lambda x: x.amax(1), (4, 6), {0, 1}),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), (4, 6), {0, 1}),
    "softmax": (lambda x: F.softmax(x, 1), (4, 6), {0, 1}),
    "softmax of infinity": (
        lambda x: x * F.softmax(torch.where(x > 0.5, torch.inf, x).detach(), 1).nan_to_num(2), (4, 6), {0, 1}
    ),
    "log softmax": (lambda x: F.log_softmax(x, 0), (4, 6), {0, 1}),
    "cross entropy": (lambda x: F.cross_entropy(x, TARGET, reduction="sum"), (6, 7), {0, 1}),
    "cross entropy, mean": (lambda x: F.cross_entropy(x, TARGET), (6, 7), {1}),
    "cross entropy, each": (lambda x: F.cross_entropy(x, TARGET, reduction="none"), (6, 7), {0, 1}),
    "cross entropy, smoothed": (
        lambda x: F.cross_entropy(x, TARGET, reduction="sum", label_smoothing=0.1), (6, 7), {0, 1}
    ),
    "cross entropy, weighted": (
        lambda x: F.cross_entropy(x, TARGET, weight=torch.arange(1.0, 8, dtype=DOUBLE), reduction="sum"), (6, 7), {1}
    ),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), (6, 7), {0, 1}),
    "logsumexp of all": (lambda x: x.logsumexp((0, 1)), (6, 7), {0, 1}),
    "gather": (lambda x: x.gather(-1, CLASSES), (6, 7), {0, 1}),
    "gather, the function": (lambda x: torch.gather(x, 1, CLASSES), (6, 7), {1}),
    "layer norm": (lambda x: F.layer_norm(x, (6,), torch.arange(6.0, dtype=DOUBLE)), (2, 4, 6), {0, 1}),
    "rms norm": (lambda x: F.rms_norm(x, (6,), torch.arange(6.0, dtype=DOUBLE)), (2, 4, 6), {0, 1}),
    "not tagged as elementwise": (
        lambda x: F.hardshrink(x, 0.3) + F.softshrink(x, 0.2) + F.logsigmoid(x) + F.prelu(x, ONES[0, 0, :1] / 3),
        (4, 6), {0, 1},
    ),
    "group norm": (lambda x: F.group_norm(x, 4), (2, 8, 3), set()),
    "linear": (lambda x: F.linear(x, torch.arange(12.0, dtype=DOUBLE).view(2, 6)), (2, 4, 6), {0, 1, 2}),
    "linear, biased": (lambda x: F.linear(x, ONES[0, :2], ONES[0, 0, :2]), (4, 6), {0, 1}),
    "weight": (lambda x: F.linear(torch.ones(2, 3, 6, dtype=DOUBLE), x), (4, 6), {0, 1}),
    "product with itself": (lambda x: x @ x.mT, (2, 4, 6), {0, 2}),
    "a product added in place": (
        lambda x: (x * 3).addmm_(x, ONES[0, :6, :6] / 7, beta=2, alpha=-1) * (x * 2).addmm_(x, ONES[0], beta=0),
        (4, 6), {0},
    ),
    "einsum": (lambda x: torch.einsum("bsh,oh->bso", x, torch.ones(3, 6, dtype=DOUBLE)), (2, 4, 6), {0, 1, 2}),
    "embedding": (lambda x: F.embedding(INDEX, x), (4, 6), {0, 1}),
    "embedding with padding": (lambda x: F.embedding(INDEX, x, padding_idx=-1), (4, 6), {0, 1}),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x, is_causal=True), (2, 4, 3, 2), {0, 1}),
    "grouped queries": (_gqa, (2, 8, 3, 2), {0}),
    "attention with whole keys": (
        lambda x: F.scaled_dot_product_attention(x, torch.ones(2, 2, 3, 2, dtype=DOUBLE) * x.mean(1, keepdim=True),
                                                 torch.ones(2, 2, 3, 2, dtype=DOUBLE), enable_gqa=True),
        (2, 4, 3, 2), {1},
    ),
    "convolution": (lambda x: F.conv1d(x, ONES[:3, :, :2], ONES[0, 0, :3]), (2, 6, 4), {0, 1}),
    "transposed convolution": (
        lambda x: F.conv_transpose2d(x, ONES[:3, :4, :4].unsqueeze(0).expand(6, 3, 4, 4), ONES[0, 0, :3], 2, 1, 1),
        (2, 6, 4, 3), {0, 1},
    ),
    "transposed filters": (
        lambda x: F.conv_transpose1d(ONES[:2, :4, :4], x, ONES[0, 0, :6], stride=2), (4, 6, 2), {0, 1}
    ),
    "filters": (lambda x: F.conv1d(ONES[:2, :, :4], x, ONES[0, 0, :4]), (4, 6, 2), {0, 1}),
    "two-dimensional filters": (lambda x: F.conv2d(ONES[:3, :4, :4].unsqueeze(0), x, padding=1), (4, 3, 3, 3), {0, 1}),
}  # fmt: skip


def _owners(n: int, ranks: int, kind: str, rng: random.Random) -> Owners:
    if kind == "blocks":
        return Owners.blocks(n, ranks)
    dealt = [index % ranks for index in range(n)]
    rng.shuffle(dealt)
    return Owners.of(np.array(dealt), ranks)


def _whole_run(function: Callable, whole: torch.Tensor, out_weight: torch.Tensor | None):
    whole = whole.clone().requires_grad_()
    out = function(whole)
    weight = torch.randn(out.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    (out * weight).sum().backward()
    return out.detach(), weight, whole.grad


def _apart(out: torch.Tensor, expected: torch.Tensor, grad: torch.Tensor, wanted: torch.Tensor) -> str:
    """How a result and its share of the gradient differ from those of one process; empty where they do not."""
    if tuple(out.shape) != tuple(expected.shape):
        return f"shape {tuple(out.shape)} for {tuple(expected.shape)}"
    with torch.no_grad():
        off = float((plain(out.detach()) - expected).abs().max()) if expected.numel() else 0.0
        back = wanted - grad
        grad_off = float(back.abs().max()) if back.numel() else 0.0
    return "" if off < 1e-12 and grad_off < 1e-12 else f"output off by {off:.1e}, gradient by {grad_off:.1e}"


def _try(name: str, dim: int, owners: Owners, may_gather: bool, axis) -> str:
    """Empty where equal, "uncut" where refused, else what differs."""
    function, shape, _ = CASES[name]
    whole = torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    expected, weight, gradient = _whole_run(function, whole, None)
    local = owners.take(whole, dim, axis.index).clone().requires_grad_()
    try:
        part = to_part(local, dim, owners, axis)
        part.may_gather = may_gather
        out = function(part)
        (out * weight).sum().backward()
    except Uncut:
        return "uncut"
    return _apart(out, expected, local.grad, owners.take(gradient, dim, axis.index))


def _all_cases(seed: int) -> list[tuple[str, str]]:
    """(case, outcome) for every operation, cut dim and kind of dealing. Runs on every rank."""
    rng = random.Random(seed)
    ranks = torch.distributed.get_world_size()
    axis = build_mesh(Plan(tp=ranks), torch.device("cpu")).tp
    found = []
    for name, (_, shape, _) in CASES.items():
        for dim, kind, may_gather in [
            (d, k, s) for d in range(len(shape)) for k in ("blocks", "dealt") for s in (False, True)
        ]:
            owners = _owners(shape[dim], ranks, kind, rng)
            found.append(
                (f"{name} / dim {dim} / {kind} / soft={may_gather}", _try(name, dim, owners, may_gather, axis))
            )
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_operations_on_parts_equal_whole_ones(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    sys.stderr.write(f"seed {seed}\n")  # a rank that aborts leaves no other trace
    outcomes = dict(pool.run(_all_cases, ranks, seed, timeout_s=240)[0])
    wrong = {case: outcome for case, outcome in outcomes.items() if outcome not in ("", "uncut")}
    assert not wrong, f"seed {seed}: {wrong}"
    missing = [
        f"{name} / dim {dim} / blocks / soft=False"
        for name, (_, _, dims) in CASES.items()
        for dim in dims
        if outcomes[f"{name} / dim {dim} / blocks / soft=False"] == "uncut"
    ]
    if ranks == 2:  # with three, blocks of four heads are no product of groups
        assert not missing, f"refused where they should work: {missing}"
    softly = [case for case, outcome in outcomes.items() if case.endswith("soft=True") and outcome == "uncut"]
    assert not softly, f"soft parts may always be gathered: {softly}"


def _try_twice_cut(name: str, cuts: list[tuple[int, Owners, Axis, bool]]) -> str:
    """As `_try`, cut over several axes, the outermost first."""
    function, shape, _ = CASES[name]
    whole = torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    expected, weight, gradient = _whole_run(function, whole, None)

    def share(tensor: torch.Tensor) -> torch.Tensor:
        for dim, owners, axis, _ in cuts:
            tensor = owners.take(tensor, dim, axis.index)
        return tensor

    local = share(whole).clone().requires_grad_()
    try:
        part = local
        for dim, owners, axis, may_gather in reversed(cuts):
            part = to_part(part, dim, owners, axis)
            part.may_gather = may_gather
        out = function(part)
        (out * weight).sum().backward()
    except Uncut:
        return "uncut"
    return _apart(out, expected, local.grad, share(gradient))


def _all_twice_cut(seed: int, most: int) -> list[tuple[str, str]]:
    """(case, outcome) of operations on tensors that are cut over two axes, along two dims or along one."""
    rng = random.Random(seed)
    mesh = build_mesh(Plan(cp=2, tp=2), torch.device("cpu"))
    (outer,), inner = mesh.inner, mesh.tp
    found = []
    for name, (_, shape, _) in CASES.items():
        pairs = [(a, b) for a in range(len(shape)) for b in range(len(shape))]
        for a, b in rng.sample(pairs, min(most, len(pairs))):
            kinds, may_gather = rng.choices(("blocks", "dealt"), k=2), rng.random() < 0.3
            first = _owners(shape[a], 2, kinds[0], rng)
            second = _owners(shape[b], 2, kinds[1], rng)
            if a == b and min(first.counts) < 2:
                continue  # one of a share's ranks would have nothing
            if a == b:  # of a share, contiguous blocks, so that all ranks come to the same collectives
                second = Owners.blocks(first.counts[outer.index], 2)
            cuts = [(a, first, outer, False), (b, second, inner, may_gather)]
            outcome = _try_twice_cut(name, cuts)
            found.append((f"{name} / dims {a} and {b} / {kinds} / soft={may_gather}", outcome))
    return found


def _slices_of_a_dim_cut_twice() -> list[str]:
    mesh = build_mesh(Plan(cp=2, tp=2), torch.device("cpu"))
    (outer,), inner = mesh.inner, mesh.tp
    dealt = Owners.of(np.array([1, 0, 1, 1, 0, 0]), 2)  # of every second index one rank has neighbours, the other not
    return [
        _try_twice_cut("slices", [(1, dealt, outer, False), (1, Owners.blocks(3, 2), inner, may_gather)])
        for may_gather in (False, True)
    ]


def test_ranks_take_indices_out_of_a_dim_that_is_cut_twice_in_the_same_way(pool) -> None:
    for outcomes in pool.run(_slices_of_a_dim_cut_twice, 4, timeout_s=60):
        assert set(outcomes) <= {"", "uncut"}


def test_operations_on_tensors_cut_over_two_axes(pool) -> None:
    seed = random.randrange(2**31)
    sys.stderr.write(f"seed {seed}\n")  # a rank that aborts leaves no other trace
    outcomes = dict(pool.run(_all_twice_cut, 4, seed, 3, timeout_s=240)[0])
    wrong = {case: outcome for case, outcome in outcomes.items() if outcome not in ("", "uncut")}
    assert not wrong, f"seed {seed}: {wrong}"
    right = sum(outcome == "" for outcome in outcomes.values())
    assert right > 0.5 * len(outcomes), f"seed {seed}: {right} of {len(outcomes)} could be done"


@pytest.mark.long
def test_all_operations_on_tensors_cut_over_two_axes(pool) -> None:
    seed = random.randrange(2**31)
    sys.stderr.write(f"seed {seed}\n")  # a rank that aborts leaves no other trace
    outcomes = dict(pool.run(_all_twice_cut, 4, seed, 100, timeout_s=900)[0])
    wrong = {case: outcome for case, outcome in outcomes.items() if outcome not in ("", "uncut")}
    assert not wrong, f"seed {seed}: {wrong}"


def _sums() -> dict[str, float]:
    ranks = torch.distributed.get_world_size()
    found = {}
    axis = build_mesh(Plan(tp=ranks), torch.device("cpu")).tp
    shares = torch.randn(ranks, 2, 5, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    whole = shares.sum(0)
    bias = torch.arange(4.0, dtype=DOUBLE)
    with torch.no_grad():
        for sequence, early in ((False, False), (True, False), (False, True), (True, True)):
            on = replace(axis, sequence=sequence, early=early)

            def new(on=on) -> Sum:
                made = Sum.of(shares[axis.index].reshape(10, 4).clone(), on, rows=(2, 5)).view(2, 5, 4)
                begun = (on.early and not on.sequence, on.early and on.sequence)
                assert (made.pending is not None, made.coming is not None) == begun
                return made

            def turned(on=on) -> Sum:
                return Sum(shares[axis.index].reshape(10, 4).t(), on)

            checks = {
                "alone": (new(), whole),
                "sum of sums": (new() + new() - new(), whole),
                "kept": (new() + new(), 2 * whole, *(() if early else (Sum,))),
                "turned and negated": (-(new().transpose(1, 2).reshape(8, 5)), -(whole.transpose(1, 2).reshape(8, 5))),
                "bias": (new() + bias, whole + bias, Sum),
                "bias, reshaped": ((new() + bias).view(10, 4).view(2, 5, 4) * 2, 2 * (whole + bias)),
                "bias, transposed": ((new() + bias).transpose(1, 2), (whole + bias).transpose(1, 2)),
                "two biases": ((new() + bias) + (new() + bias), 2 * (whole + bias)),
                "difference of biased": (new() - (new() + bias), -bias.expand(2, 5, 4)),
                "as rows": (new().view(10, 4) * 2, 2 * whole.view(10, 4)),
                "not linear": (new().exp(), whole.exp()),
                "in place": (new().mul_(3).add_(1), 3 * whole + 1),
                "another shape, in place": (new().transpose_(1, 2).mul_(2), 2 * whole.transpose(1, 2)),
                "writes another argument": (F.rrelu(new(), 0.2, 0.4), F.rrelu(whole, 0.2, 0.4)),
                "beside plain": (whole + new(), 2 * whole),
                "as it lay in memory": (turned().t().view(-1) * 1, whole.reshape(-1)),
            }
            if not sequence:  # where views are dealt by themselves, it is refused below
                written, seen, other = (new() for _ in range(3))
                written.transpose(1, 2)[0].add_(1)
                view, beside = seen.view(10, 4), other.view(-1)
                seen[:, 0] = 5
                other.unsqueeze(0).transpose(1, 2).mul_(2)
                expected = (whole.clone(), whole.clone())
                expected[0][0] += 1
                expected[1][:, 0] = 5
                checks["written into a view"] = (written * 1, expected[0])
                checks["a view of what was written into"] = (view * 1, expected[1].view(10, 4))
                checks["views beside a view that was written into"] = (beside * 1, 2 * whole.view(-1))
            part = Part(Owners.blocks(5, ranks).take(whole, 1, axis.index), 1, Owners.blocks(5, ranks), on)
            for what, saved in (("sum", new()), ("part", part)):
                read = pickle.loads(pickle.dumps(saved))
                assert type(read) is torch.Tensor
                checks[f"a {what} written to a file"] = (read, whole)
            twice = new()
            checks["read twice"] = (twice.exp() + twice.view(2, 5, 4), whole.exp() + whole)
            for name, (value, expected, *kind) in checks.items():
                assert all(isinstance(value, k) for k in kind), f"{name} was summed too early"
                found[f"{name} sequence={sequence} early={early}"] = float((plain(value) - expected).abs().max())
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_taken_when_needed_and_equal_the_whole(pool, ranks: int) -> None:
    off = pool.run(_sums, ranks)[0]
    assert all(value < 1e-12 for value in off.values()), off


def _rehearsed(shape: tuple[int, ...], dim: int, may_gather: bool) -> Part:
    """A part of two ranks of which one is here and nothing is sent."""
    axis = Axis("tp", 2, 0, None, (0, 1), rehearsal=Ledger())
    owners = Owners.blocks(shape[dim], 2)
    return Part(owners.take(torch.ones(shape), dim, 0), dim, owners, axis, may_gather=may_gather)


def test_reading_a_sum_after_a_view_dealt_apart_was_written_into_is_refused() -> None:
    axis = Axis("tp", 2, 0, None, (0, 1), rehearsal=Ledger(), sequence=True)
    made = Sum.of(torch.ones(2, 4, 3), axis)
    view = made.view(8, 3)
    view.add_(1).mul_(2)
    for read in (lambda: made + 1, lambda: made.view(4, 6)):
        with pytest.raises(Uncut, match="after a view of it was written into"):
            read()


def test_a_function_of_torch_reads_names_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.autograd.grad` calls is replaced for a while, by a look at a model: it stayed so for good."""
    axis = Axis("cp", 2, 0, None, (0, 1), rehearsal=Ledger())
    part = Part(torch.ones(2, 3), 0, Owners.blocks(4, 2), axis)
    for told in ("first", "second"):
        monkeypatch.setattr(torch.autograd, "_engine_run_backward", lambda *args, told=told, **kwargs: [told])
        assert torch.autograd.grad([part.requires_grad_()], [part], part) == [told]


def test_an_operation_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(Uncut, match="linalg_det"):
        torch.linalg.det(_rehearsed((3, 4, 4), 1, may_gather=False))


def _reductions() -> list[tuple[str, str]]:
    """(what, how it differs from the whole tensor's) of reductions over the cut dim, in 16 bits and of complex x."""
    ranks = torch.distributed.get_world_size()
    axis = build_mesh(Plan(tp=ranks), torch.device("cpu")).tp
    owners, told = Owners.blocks(8192, ranks), []
    half = torch.full((8192, 3), 300.0, dtype=torch.float16)
    spread = torch.cat([half[:4096], -half[:4096]])
    turning = torch.randn(8192, 2, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    for what, x, reduce in [
        ("mean", half, lambda t: t.mean(0)), ("std", spread, lambda t: t.std(0)), ("var", turning, lambda t: t.var(0)),
        ("norm", half, lambda t: torch.linalg.vector_norm(t, 2, 0, dtype=torch.float32)),
        ("third", half / 10, lambda t: torch.linalg.vector_norm(t, 3, 0)),
    ]:  # fmt: skip
        expected, out = reduce(x), plain(reduce(to_part(owners.take(x, 0, axis.index).clone(), 0, owners, axis)))
        same = out.dtype == expected.dtype and torch.allclose(out, expected, rtol=1e-3)
        told.append((what, "" if same else f"{out} for {expected}"))
    return told


def test_reductions_add_up_as_wide_as_torch_does(pool) -> None:
    for told in pool.run(_reductions, 2):
        assert [what for what in told if what[1]] == []


def test_an_index_that_is_not_there_is_an_error_as_in_torch() -> None:
    part = _rehearsed((8, 3), 0, may_gather=True)
    for index in (8, -9):
        with pytest.raises(IndexError, match="out of range"):
            part.select(0, index)


def test_a_refusal_names_the_key_that_leaves_the_weight_whole() -> None:
    axis = Axis("tp", 2, 0, None, (0, 1), rehearsal=Ledger())
    part = Part(torch.ones(2, 4), 0, Owners.blocks(4, 2), axis, origin="head.weight")
    with pytest.raises(Uncut, match=r"the cut of 'head.weight' led here, which tp_whole=head.weight leaves out$"):
        torch.linalg.det(part)


@pytest.mark.parametrize(
    ("name", "args", "alone"),
    [
        ("hardshrink_backward", (ONES, ONES, 0.5), True),
        ("_prelu_kernel_backward", (ONES, ONES, ONES[:1, :1]), True),
        ("log_sigmoid_forward", (ONES,), True),
        ("gelu_backward", (ONES, ONES), True),
        ("_softmax", (ONES, 1, False), False),
        ("cumsum", (ONES, 0), False),
        ("flip", (ONES, [1]), False),
        ("triu", (ONES,), False),
        ("roll", (ONES, [1], [0]), False),
        ("renorm", (ONES, 2, 0, 1.0), False),
        ("glu_backward", (ONES, ONES, 0), False),
        ("rrelu_with_noise", (ONES, ONES), False),
        ("relu_", (ONES,), False),
    ],
)
def test_what_treats_each_element_alone_is_found_by_trying(name: str, args: tuple, alone: bool) -> None:
    assert is_elementwise(getattr(torch.ops.aten, name).default, args, {}) is alone


def test_a_trace_of_what_other_elements_are_is_seen() -> None:
    with torch.library._scoped_library("test_part", "FRAGMENT") as library:
        library.define("leaning(Tensor x) -> Tensor")
        library.impl("leaning", lambda x: x + 1e-4 * x.amax(-1, keepdim=True), "CompositeExplicitAutograd")
        assert not is_elementwise(torch.ops.test_part.leaning.default, (ONES,), {})


def test_writing_where_it_would_be_lost_is_refused() -> None:
    may_gather = _rehearsed((2, 4, 3), 1, may_gather=True)
    assert may_gather[:, 1].sum().shape == ()  # a copy may be read, and written into where no gradient is asked for
    may_gather[:, 1].mul_(2)
    factor = torch.ones((), requires_grad=True)
    for write in (
        lambda: may_gather[:, 1].mul_(factor),  # one index of the cut dim: gathered
        lambda: may_gather[:, 1].unsqueeze(0).mul_(factor),
        lambda: may_gather.view(2, 2, 2, 3).view(2, 4, 3)[:, 0].mul_(factor),
    ):
        with pytest.raises(Uncut, match="into a view"):
            write()
    strided = _rehearsed((2, 8), 1, may_gather=False)
    pieces = Part(strided.local, 1, Owners.of(np.array([0, 0, 1, 0, 1, 1, 0, 1]), 2), strided.axis)
    with pytest.raises(Uncut, match="a copy here"):
        pieces[:, ::3].mul_(2)
    with pytest.raises(Uncut, match="not cut alike"):
        torch.zeros(2, 8).add_(strided)


def test_owners_follow_views() -> None:
    fused = Owners.of(np.array([0, 0, 0, 0, 1, 1, 1, 1] * 3), 2)  # (3, heads 4, head_dim 2)
    dim, heads = regrouped((5, 24), 1, fused, (5, 3, 4, 2))
    assert dim == 2 and heads.array.tolist() == [0, 0, 1, 1]
    assert regrouped((5, 3, 4, 2), 2, heads, (5, 24)) == (1, fused)
    with pytest.raises(Uncut, match="mixes indices"):
        regrouped((6,), 0, Owners.of(np.array([0, 0, 0, 0, 1, 1]), 2), (2, 3))


def test_view_groups() -> None:
    assert groups((2, 3, 4), (6, 4)) == [(range(2), range(1)), (range(2, 3), range(1, 2))]
    assert groups((4,), (4, 1)) == [(range(1), range(1)), (range(1, 1), range(1, 2))]


def _largest_made(dim: int) -> int:
    """The most rows that a tensor has, of those made by the backward of an embedding cut along `dim`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(getattr(kind, "observes_inside", False) for kind in types):
                return NotImplemented
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and not isinstance(out, Part):
                self.most = max(self.most, out.shape[0])
            return out

    axis = build_mesh(Plan(tp=2), torch.device("cpu")).tp
    owners = Owners.blocks(100, 2)
    local = torch.ones(owners.counts[axis.index], 4, requires_grad=True)
    with Watch() as watch:
        F.embedding(torch.tensor([1, 99]), to_part(local, dim, owners, axis)).sum().backward()
    return watch.most


def test_the_gradient_of_a_table_cut_by_rows_is_never_whole(pool) -> None:
    assert pool.run(_largest_made, 2, 0)[0] <= 50


def test_an_operation_whose_inputs_do_not_fit_each_other_is_not_tried(monkeypatch):
    """Kernels of recurrent layers check no shapes: on other ones they write beyond their memory."""
    from shardwise.trace import elementwise

    monkeypatch.setattr(elementwise, "_tried", lambda *tried: pytest.fail(f"tried {tried[0]}"))
    assert not elementwise.is_elementwise(torch.ops.aten.mm.default, (torch.ones(2, 3), torch.ones(3, 4)), {})


def test_integers_that_may_tell_places_are_tried_as_zeros_first() -> None:
    """Kernels of max pooling read and write where integers tell them: others lie outside of memory."""
    seen = []
    with torch.library._scoped_library("test_part", "FRAGMENT") as library:

        def placed(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            seen.append(int(places.max()) if places.device.type == "cpu" else 0)
            return torch.zeros_like(x).put_(places, x, accumulate=True)

        library.define("placed(Tensor x, Tensor places) -> Tensor")
        library.impl("placed", placed, "CompositeExplicitAutograd")
        library.impl("placed", lambda x, places: torch.empty_like(x), "Meta")
        assert not is_elementwise(torch.ops.test_part.placed.default, (ONES, ONES.long()), {})
    assert seen and not any(seen)


def test_a_share_that_is_not_what_its_owner_has_raises() -> None:
    """Sums would count it, or miss some of it, without a word."""
    with pytest.raises(RuntimeError, match="a defect of shardwise"):
        Part(torch.zeros(3), 0, Owners.blocks(4, 2), Axis("tp", 2, 0, None, (0, 1)))


def test_slices_of_an_earlier_run_are_not_remembered() -> None:
    """Some ranks alone may have been in it: they would place a gradient otherwise than the others."""
    earlier, later = (Axis("cp", 2, 0, None, (0, 1), rehearsal=Ledger()) for _ in range(2))
    owners = Owners.of(np.array([1, 0, 0, 1, 0, 1]), 2)
    sliced = Part(torch.zeros(3), 0, owners, earlier)[1:4]
    gradient = (torch.zeros(2), [6], 0, 1, 4, 1)
    for axis, before in ((earlier, owners), (later, unsliced(sliced.owners, 6, 1, 1))):
        part = Part(gradient[0], 0, sliced.owners, axis)
        assert torch.ops.aten.slice_backward(part, *gradient[1:]).owners == before
