"""A shrunk proof keeps what makes a plan what it is, and says what it left out."""

from __future__ import annotations

from typing import Any

import pytest
import sequence_tasks
import torch
from mutations.bugs import SEQUENCE, bug
from mutations.plant import BuggyPool
from torch import Tensor, nn

from shardwise import Plan, Task, verify
from shardwise.models import tasks
from shardwise.proof.programs import programs_of
from shardwise.proof.shrink import shrink
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build

WIDTH, OUT = 8, 3


class Twice(torch.autograd.Function):
    """Forward leaves its input as it is, backward doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Block(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.linear, self.drop, self.kind = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), kind
        self.register_buffer("scale", torch.tensor(2.0 if kind == "buffer" else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mixes":
            x = x - 0.1 * x.mean(0, keepdim=True)
        if self.kind == "backward":
            x = Twice.apply(x)
        elif self.kind == "view":
            x = x.view_as(x)
        return x + self.drop(torch.tanh(self.linear(x))) * self.scale


class Deep(nn.Module):
    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(kind) for kind in kinds])
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def vectors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(40, WIDTH, generator=generator), "y": torch.randn(40, OUT, generator=generator)}


def squares(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (output - batch["y"]).square().sum(), output.numel()


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def deep_of(*kinds: str) -> Task:
    return Task(model=lambda: Deep(kinds), loss=squares, batch=vectors, inputs=lambda b: ((b["x"],), {}), optimizer=sgd)


def deep() -> Task:
    return deep_of(*[""] * 8)


def third_mixes() -> Task:
    return deep_of("", "", "mixes", "", "", "")


@pytest.mark.parametrize(
    ("kinds", "programs"),
    [(("", "", ""), 1), (("", "mixes", ""), 2), (("", "", "buffer"), 2), (("", "view", "backward", "view"), 3)],
)
def test_blocks_are_the_same_where_they_do_the_same(kinds: tuple[str, ...], programs: int) -> None:
    task = deep_of(*kinds)
    found = programs_of(build(task.model, 0), [f"blocks.{i}" for i in range(len(kinds))], task.inputs, vectors(0))
    assert all(found.values()) and len(set(found.values())) == programs


def test_what_is_kept() -> None:
    small = shrink(deep, deep(), Plan.parse("pp=8,microbatches=32,dp_replicate=4,accumulate=6"))
    assert (small.plan.pp, small.plan.microbatches, small.plan.dp_replicate, small.plan.accumulate) == (3, 4, 3, 3)
    assert len(small.task().model().blocks) == 4, "three stages, unevenly, as eight blocks are on three"
    text = " ".join(small.notes)
    assert "8 blocks, which all do the same -> 4 (0, 1, 2, 3)" in text
    assert "covered: 3 stages and 4 micro-batches under schedule 1f1b, accumulate=3, dp_replicate=3" in text
    assert "Not covered: more than 3 stages, more than 4 micro-batches, accumulate=6" in text
    chosen = shrink(third_mixes, third_mixes(), Plan.parse("dp_replicate=8"))
    assert "6 blocks, of 2 programs -> 3 (0, 1, 2)" in " ".join(chosen.notes)
    whole = shrink(deep, deep(), Plan.parse("dp_replicate=2,stages=blocks.2,pp=2,microbatches=2"))
    assert "stages= names blocks" in " ".join(whole.notes) and len(whole.task().model().blocks) == 8
    few = tasks.decoder  # of 7 samples, which are none for nine ranks
    assert shrink(few, few(), Plan.parse("dp_replicate=4,dp_shard=8,zero=3")).plan.data_ranks == 4


def test_a_block_that_mixes_samples_is_kept(pool: RankPool) -> None:
    whole = verify("test_shrink:third_mixes", "dp_replicate=2", pool=pool)
    small = verify("test_shrink:third_mixes", "dp_replicate=4", shrink=True, pool=pool)
    for parity in (whole, small):
        assert parity.parity and any("mixes the samples of a micro-batch" in note for note in parity.notes)
    assert small.proven == "dp_replicate=3"


HERE = "test_shrink:deep"
BUGS = [
    bug("the stages in the middle send half a gradient back", "step.pipelined:_Row._backward",
        "mail.send_backward(op",
        "[x.grad.div_(2) for x in saved.inputs if op.stage < self.staged.last]; mail.send_backward(op",
        HERE, "pp=4,microbatches=8"),
    bug("the third micro-batch is not told", "step.train_step:_micro_batch",
        "tally.add(loss, part.count, extras)", "tally.add(loss, part.count, extras) if index != 2 else None",
        HERE, "dp_replicate=2,accumulate=4"),
    bug("masks repeat after as many micro-batches as there are stages", "step.pipelined:_Row._forward",
        "seed_masks(state, index, part", "seed_masks(state, index % 3, part", HERE, "pp=4,microbatches=8"),
    bug("a third rank's loss is not counted", "step.control:PendingRow._sums",
        "return [sum(row[column] for row in rows)", "return [sum(row[column] for row in rows[:2])",
        HERE, "dp_replicate=4"),
    bug("only the first bucket is published", "parallel.flat:Flat.publish",
        "for part in self.shards:", "for part in self.shards[:1]:", HERE, "dp_shard=4,zero=1"),
]  # fmt: skip


@pytest.mark.parametrize("planted", BUGS, ids=lambda one: one.name)
def test_a_bug_that_the_whole_proof_finds_is_found(planted: Any, pool: RankPool) -> None:
    buggy = BuggyPool(pool, planted)
    parity = verify(planted.task, planted.plan, shrink=True, pool=buggy)
    assert parity.proven and not parity.parity and not parity.refused, parity.text()
    assert buggy.ran


def test_a_sequence_keeps_its_degrees_its_uneven_length_and_its_mask(pool: RankPool) -> None:
    plan = Plan(cp=3, dp_replicate=4, accumulate=4)
    task = sequence_tasks.windowed()
    small = shrink("sequence_tasks:windowed", task, plan)
    assert str(small.plan) == "dp_replicate=3,accumulate=3,cp=3"
    assert small.task().batch(0)["tokens"].shape[1] == task.batch(0)["tokens"].shape[1] == 11  # 4, 4 and 3
    assert small.task().model().window == task.model().window == 3
    planted = next(one for one in SEQUENCE if "a window's rows" in one.name)
    for ranks, sound in ((BuggyPool(pool, planted), False), (pool, True)):
        parity = verify(planted.task, "dp_replicate=2,cp=2", shrink=True, pool=ranks)
        assert parity.proven == "dp_replicate=2,cp=2" and parity.parity == sound and not parity.refused, parity.text()


@pytest.mark.parametrize("plan", ["pp=4,microbatches=8", "dp_replicate=4,accumulate=4", "dp_shard=4,zero=1"])
def test_a_sound_plan_is_equal(plan: str, pool: RankPool) -> None:
    parity = verify(HERE, plan, shrink=True, pool=pool)
    assert parity.parity, parity.text()
