"""Compiled blocks: the same losses, gradients and weights as one process that compiles nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import sequence_tasks
import torch
import torch.nn.functional as F
from compiled_runs import Curve, Programs, curve
from domain_tasks import gated_stack
from module_tasks import WIDTH, task, vectors
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._subclasses import FakeTensorMode

from shardwise import Plan, Task, parallelize
from shardwise.comm import Axis, receive, send
from shardwise.engine.recipe import _compiled
from shardwise.mesh import build_mesh
from shardwise.models import tasks
from shardwise.models.decoder import Decoder
from shardwise.models.gpt2 import GPT2
from shardwise.parallel.sequence.pair_mask import PairMask, whole_mask
from shardwise.parallel.tensor import compile_block
from shardwise.part import Owners, plain, to_part
from shardwise.ranks import RankPool
from shardwise.step.batching import samples_in


def two_layers() -> Task:
    config = replace(tasks.TINY_DECODER, layers=2)
    return tasks.decoder().with_(model=partial(Decoder, config), batch=partial(tasks.token_batch, samples=7, length=10))


def fused() -> Task:
    """Queries, keys and values in one weight, whose shares are no contiguous rows."""
    config = replace(tasks.gpt2().model.args[0], hidden=16, heads=2, dropout=0.0, layers=2)
    return tasks.gpt2().with_(model=partial(GPT2, config), batch=partial(tasks.token_batch, samples=6, length=10))


def compare(found: Curve, wanted: Curve) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    assert found[1] == pytest.approx(wanted[1], rel=1e-10)
    for mine, alone in zip(found[2:], wanted[2:], strict=True):
        assert mine.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def uncached_window() -> Task:
    """Attention within windows of a transformers model, whose blocks are given no cache."""
    return sequence_tasks._of_transformers({"input_ids": "input_ids"}, sliding_window=20, use_cache=False)


CASES: list[Any] = [
    (two_layers, "tp=2,sp=true,remat=full"), (fused, "tp=2,tp_overlap=true"),
    (gated_stack, "domain=2"), (sequence_tasks.grouped, "cp=2,remat=full"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (two_layers, "tp=2"), (two_layers, "pp=2,tp=2,microbatches=2"), (gated_stack, "domain=2x2"),
        (two_layers, "tp=2,sp=true,dp_shard=2,zero=3,remat=full"),
        (gated_stack, "domain=1x2,dp_shard=2,zero=3,remat=full"), (gated_stack, "domain=3,domain_overlap=always"),
        (fused, "tp=2,sp=true,dp_shard=2,zero=1,accumulate=2"),
        (sequence_tasks.decoder, "cp_ulysses=2"), (sequence_tasks.decoder, "cp=2,cp_ulysses=2,remat=full"),
        (sequence_tasks.written, "cp=3"), (sequence_tasks.windowed, "cp=3,zero=3"),
        (uncached_window, "cp=2"), (sequence_tasks.decoder, "cp=2,tp=2"),
        (sequence_tasks.decoder, "cp=2,pp=2,microbatches=2"),
    )),
]  # fmt: skip
OTHERS: list[Any] = [
    (tasks.moe, "dp_shard=2,ep=2"), (two_layers, "pp=2"),
    pytest.param(tasks.moe, "pp=2,dp_shard=2,ep=2,zero=1", marks=pytest.mark.long),
    pytest.param(sequence_tasks.running_sums, "cp=3", marks=pytest.mark.long),  # of which no block is repeated
]  # fmt: skip


def both(make: Callable[[], Task], plan: str, backend: str, pool: RankPool) -> list[tuple[list[int], list[str]]]:
    """Compare every rank with one process; their programs and notices."""
    parsed = Plan.parse(plan)
    wanted, _, _ = curve(make, f"accumulate={parsed.step_microbatches}", "eager")
    ranks = pool.run(curve, parsed.world_size, make, f"{plan},compile=true", backend, timeout_s=400)
    for found, _, _ in ranks:
        compare(found, wanted)
    return [(counts, notices) for _, counts, notices in ranks]


@pytest.mark.parametrize(("make", "plan"), CASES)
def test_blocks_of_cut_weights(make: Callable[[], Task], plan: str, pool: RankPool) -> None:
    for counts, notices in both(make, plan, "aot_eager", pool):
        samples, micro = samples_in(make().batch(0)), Plan.parse(plan).microbatches
        sizes = len({samples // micro, -(-samples // micro)})  # of micro-batches
        assert set(counts) == {2 * sizes}, "one program for training and one for evaluation of each"
        assert not any("leaves" in notice for notice in notices)


def test_kernels_of_the_compiler(pool: RankPool) -> None:
    for counts, _ in both(partial(odd, ""), "tp=2", "inductor", pool):
        assert counts == [2, 2]


@pytest.mark.long
def test_kernels_of_the_compiler_for_a_decoder(pool: RankPool) -> None:
    for counts, _ in both(two_layers, "tp=2,sp=true", "inductor", pool):
        assert counts == [2, 2]


@pytest.mark.parametrize(("make", "plan"), OTHERS)
def test_around_stages_and_experts(make: Callable[[], Task], plan: str, pool: RankPool) -> None:
    both(make, plan, "aot_eager", pool)


class Attention(nn.Module):
    """Nothing else, under one of three masks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


def rings(backend: str) -> list[float]:
    """The largest error of compiled attentions and their gradients, whose ranks do not all read of each other."""
    axis = build_mesh(Plan(cp=torch.distributed.get_world_size()), torch.device("cpu")).inner[0]
    draws, owners = torch.Generator().manual_seed(0), Owners.blocks(13, axis.size)
    given = [torch.randn(2, 2, 13, 4, generator=draws, dtype=torch.float64) for _ in range(4)]
    back, errors = torch.tensor([2, 3]).view(2, 1, 1, 1), []
    pairs = PairMask(lambda b, h, q, k: (q >= k) & (q - k <= back[b, 0, 0, 0]), (2, 1, 13, 13), back.device, False)
    with Programs(backend) as programs:
        block = Attention()
        compile_block(block, "attention", [])
        for mask in (None, whole_mask(pairs), torch.randn(2, 13, 13, generator=draws, dtype=torch.float64), pairs):
            bias = mask.requires_grad_() if mask is not None and mask.is_floating_point() else None
            mask = mask.unsqueeze(0) if bias is not None else mask
            whole = [each.clone().requires_grad_() for each in given[:3]]
            out = F.scaled_dot_product_attention(*whole, mask, is_causal=mask is None)
            wanted = [out, *torch.autograd.grad(out, whole, given[3])]
            mine = [owners.take(each, 2, axis.index).contiguous().requires_grad_() for each in given]
            found = [block(*(to_part(each, 2, owners, axis) for each in mine[:3]), mask)]
            found += torch.autograd.grad(found[0], mine[:3], to_part(mine[3].detach(), 2, owners, axis))
            errors += [float((plain(a) - b if a.shape == b.shape else a - owners.take(b, 2, axis.index)).abs().max())
                       for a, b in zip(found, wanted, strict=True)]  # fmt: skip
            block(*(to_part(each, 2, owners, axis) for each in mine[:3]), mask)  # no program anew
        assert [len(one.programs) for one in programs.made or [block.forward]] == [4]
    return errors


def test_rings_in_which_ranks_read_unlike_blocks(pool: RankPool) -> None:
    """The first rank receives nothing under a causal mask, and a compiler drops and moves what it may."""
    for errors in pool.run(rings, 3, "aot_eager", timeout_s=240):
        assert max(errors) < 1e-14


@pytest.mark.long
def test_rings_in_kernels_of_the_compiler(pool: RankPool) -> None:
    for errors in pool.run(rings, 3, "inductor", timeout_s=400):
        assert max(errors) < 1e-14


# --- what tracing must not miss


class Block(nn.Module):
    """x + down(f(up(x))), with something that Python does."""

    def __init__(self, odd: str):
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), odd
        self.calls, self.factor, self.rows = 0, 1.0, []
        self.term: Tensor | None = None
        self.norm = nn.BatchNorm1d(8) if odd == "norm" else nn.Identity()
        self.idle = nn.Linear(WIDTH, 8)  # without a gradient
        self.register_buffer("seen", torch.zeros(()))
        if odd == "hook":
            self.up.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.odd == "counts":
            self.calls += 1
        if self.odd == "writes":
            self.seen += 1
            x = x * self.seen
        if self.odd == "leaves":
            self.term = x.square().mean(-1, keepdim=True)
        if self.odd == "sometimes" and (self.term is None or self.training):
            self.term = x.square().mean(-1, keepdim=True)
        if self.odd == "adds":
            before = 0 if self.term is None else self.term.detach().mean()
            self.term = x.square().mean(-1, keepdim=True) + before
        if self.odd == "lists":
            self.rows.append(x.square().mean(-1, keepdim=True))
            self.term = self.rows[-1]
        if self.odd == "draws" and random.random() < 2:
            x = x * 1.5
        if self.odd == "numpy":
            x = x * (1 + np.random.rand())
        if self.odd == "reads" and x.sum() > -1e9:
            x = x * 1.5
        return x + self.down(torch.tanh(self.norm(self.up(x))) * self.factor)


class Odd(nn.Module):
    def __init__(self, odd: str = ""):
        super().__init__()
        self.blocks = nn.ModuleList(Block(odd) for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        terms = [block.term.mean() for block in self.blocks if block.term is not None]
        return self.out(x) + sum(terms)


def odd(kind: str) -> Task:
    return task(partial(Odd, kind))


EAGER = {
    "counts": "it changes attributes of its modules, and not to tensors alone", "lists": "it changes attributes",
    "adds": "it reads what the call before left in an attribute", "reads": "data-dependent",
    "draws": "it draws from Python's random generator", "numpy": "or numpy's", "hook": "'up' inside it has hooks",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "remat"), [("leaves", "full"), ("sometimes", "full"), ("writes", "full"),
                                             ("norm", "none")])  # fmt: skip
def test_what_blocks_leave_in_attributes_and_buffers(kind: str, remat: str, pool: RankPool) -> None:
    for _, notices in both(partial(odd, kind), f"tp=2,remat={remat}", "aot_eager", pool):
        assert not [notice for notice in notices if "leaves" in notice]


@pytest.mark.parametrize("kind", EAGER)
def test_what_cannot_be_written_down_runs_as_it_is(kind: str, pool: RankPool) -> None:
    for _, notices in both(partial(odd, kind), "tp=2", "aot_eager", pool):
        (notice,) = [notice for notice in notices if "leaves" in notice]
        assert notice.startswith("compile leaves 'blocks.0' and blocks like it as they are") and EAGER[kind] in notice


def test_messages_between_two_ranks_are_refused_in_a_program() -> None:
    """Attention around a ring has them; which of a block's operations cannot be written down is told with the block."""
    axis = Axis("domain0", 2, 0, None, (0, 1))
    with FakeTensorMode():
        for passes in (send, receive):
            with pytest.raises(TypeError, match="two ranks send each other a message"):
                passes(torch.empty(3), axis, 1, "ring", 0)


def changed_attribute(compiles: bool) -> list[float]:
    with Programs("aot_eager"):
        engine = parallelize(odd(""), f"tp=2,compile={str(compiles).lower()}", device="cpu")
        losses = [engine.step(vectors(0)).loss]
        for block in engine.module.blocks:
            block.factor = 3.0
        return [*losses, engine.step(vectors(0)).loss]


def test_another_attribute_is_another_program(pool: RankPool) -> None:
    kept, plain = pool.run(changed_attribute, 2, True)[0], pool.run(changed_attribute, 2, False)[0]
    assert kept == pytest.approx(plain, rel=1e-6)


def uneven(make: Callable[[], Task]) -> list[str]:
    return parallelize(make(), "tp=2,compile=true", device="cpu", randomness="fast").notices


def test_uneven_shares_run_as_they_are(pool: RankPool) -> None:
    notices = pool.run(uneven, 2, tasks.gpt2)[0]
    assert any("compile leaves 2 of 2 blocks as they are" in notice and "unevenly" in notice for notice in notices)


@pytest.mark.long
def test_positions_that_are_uneven_on_some_rank_run_as_they_are_on_all(pool: RankPool) -> None:
    """Eleven over cp are six and five, which sp deals evenly and unevenly: no rank may run a program alone."""
    for counts, _ in both(sequence_tasks.decoder, "cp=2,tp=2,sp=true", "aot_eager", pool):
        assert set(counts) == {0}


def test_no_block_is_compiled_with_reductions_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes such kernels for GPUs alone, and they leave gradients unwritten (pytorch/pytorch#193061)."""
    options: list[dict[str, bool]] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **settings: options.append(settings["options"]) or forward)
    _compiled(nn.Linear(2, 2), "0")
    assert options and all(asked == {"triton.mix_order_reduction": False} for asked in options)
    assert options[0].keys() <= inductor.get_config_copy().keys()
