"""`verify --thorough`: what goes wrong only with a third rank, a third step, an odd share, ties or zeros."""

from __future__ import annotations

from typing import Any

from mutations.plant import Bug, BuggyPool
from torch.utils._pytree import tree_leaves

from shardwise import Plan, verify
from shardwise.proof.outcome import FLOAT64_BARS, Parity
from shardwise.proof.parity import _in_own_precision
from shardwise.proof.settings import Settings
from shardwise.proof.thorough import OddTask, _extents, _thirds, add_precision, prove_thirds
from shardwise.ranks import RankPool
from shardwise.step.batching import samples_in

MLP = "shardwise.models.tasks:mlp"
DECODER = "shardwise.models.tasks:decoder"


def test_plans_with_three_of_an_axis_come_first() -> None:
    plans = list(_thirds(Plan.parse("dp_replicate=2,dp_shard=2,zero=2")))
    assert [(plan.dp_replicate, plan.dp_shard) for plan in plans] == [(2, 3), (3, 2), (2, 2)]
    assert all(plan.zero == 2 for plan in plans)
    assert next(_thirds(Plan.parse("domain=1x2"))).domain == (1, 3)
    assert Plan.parse("dp_shard=3,ep=3") in list(_thirds(Plan.parse("dp_shard=2,ep=2")))


def test_batches_are_odd_and_the_third_is_on_a_grid() -> None:
    batch: Any = OddTask(MLP)().batch
    assert samples_in(batch(0)) % 2 == 1
    floats = [value for value in tree_leaves(batch(2)) if value.is_floating_point()]
    assert floats and all((2 * value == (2 * value).round()).all() and (value == 0).any() for value in floats)


def test_sequences_and_fields_are_one_shorter_where_one_process_runs_on_them() -> None:
    length = max(leaf.shape[1] for leaf in tree_leaves(OddTask(DECODER)().batch(0)) if leaf.dim() > 1)  # type: ignore[misc]
    assert length in _extents(DECODER)
    less: Any = OddTask(DECODER, extents=_extents(DECODER))().batch
    assert all(leaf.shape[1] == length - 1 for leaf in tree_leaves(less(0)) if leaf.dim() > 1)
    assert not _extents(MLP)  # whose width the model has too


def test_what_is_right_is_equal(pool: RankPool) -> None:
    parity = verify(MLP, "dp_replicate=2", thorough=True, pool=pool, timeout_s=100)
    assert parity.parity and parity.further and parity.further[0].world_size == 3, parity.text()
    assert any(note.startswith("not met: ") and "a step after the third" in note for note in parity.notes)
    assert [proof.precision for proof in parity.further] == ["", "fp32"]


def test_the_proof_of_three_ranks_stands_beside_others() -> None:
    """A compiled proof that found a difference is not put out by the third rank's, which did not."""
    unequal = Parity("dp_replicate=2", 2, loss_error=1.0, bars=dict(FLOAT64_BARS))
    parity = Parity("dp_replicate=2", 2, loss_error=0.0, bars=dict(FLOAT64_BARS), further=[unequal])
    prove_thirds(parity, MLP, Plan(dp_replicate=2), lambda task, plan: Parity(str(plan), 3, 0.0, bars=parity.bars))
    assert len(parity.further) == 2 and not parity.parity and parity.verdict.startswith("NOT EQUAL")


def test_what_goes_wrong_on_the_third_rank_is_found(pool: RankPool) -> None:
    bug = Bug("", "shardwise.parallel.replicate:Replicate._reduce", "assert bucket.buffer is not None",
              "bucket.buffer.mul_(1 + (self.axis.index == 2))", MLP, "dp_replicate=2")  # fmt: skip
    parity = verify(MLP, "dp_replicate=2", thorough=True, pool=BuggyPool(pool, bug), timeout_s=100)
    assert parity.equal and not parity.parity and parity.verdict == "NOT EQUAL to one process"


def test_what_a_layout_rounds_in_between_is_found_in_the_precision_of_the_plan(pool: RankPool) -> None:
    """The proof in float64 widens casts, so that what is sent in bf16 and read in fp32 looks as it was."""
    bug = Bug("", "shardwise.parallel.sequence.ring_plan:from_axis", "tensor.contiguous())",
              "tensor.bfloat16().to(tensor.dtype).contiguous())", DECODER, "cp=2")  # fmt: skip
    own = _in_own_precision(DECODER, Plan(cp=2), Settings(2, 0, 1), BuggyPool(pool, bug), 100)
    assert not own.equal and own.precision == "fp32", own.text()


def test_a_precision_in_which_nothing_can_be_told_leaves_no_doubt() -> None:
    parity = Parity("cp=2", 2, loss_error=0.0, bars=dict(FLOAT64_BARS))
    own = Parity("cp=2", 2, loss_error=0.0, bars=dict(FLOAT64_BARS), precision="fp32", unproven=["as epsilon explains"])
    add_precision(parity, own)
    assert parity.parity and not parity.further and "fp32" in parity.notes[-1]
    own.differences.append("a dtype")
    add_precision(parity, own)
    assert not parity.parity
