"""What a proof says of state that rests by a code: bits of split masters, and how far a code is from state in full."""

from __future__ import annotations

from shardwise import verify
from shardwise.layout import Plan
from shardwise.proof.narrow_state import variants
from shardwise.ranks import RankPool


def test_a_proof_holds_split_masters_to_the_bit_and_measures_codes(pool: RankPool) -> None:
    plan = "dp_shard=2,zero=1,precision=bf16,optimizer_state=8bit,masters=split"
    parity = verify("shardwise.models.tasks:mlp", plan, pool=pool)
    told = "\n".join(parity.notes)
    assert parity.parity
    assert "masters=split: after 5 steps in bf16 every bit is that of a run without" in told
    assert (
        "optimizer_state=8bit rounds, and is left out of the proof; in 5 steps in bf16 it moves losses by up to" in told
    )


def test_a_proof_holds_offloaded_masters_to_the_bit(pool: RankPool) -> None:
    plan = "dp_replicate=2,precision=bf16,offload=optimizer:disk"
    assert "offload=optimizer:disk: after 5 steps in bf16 every bit is that of a run without" in "\n".join(
        verify("shardwise.models.tasks:mlp", plan, pool=pool).notes
    )
    assert len(variants(Plan.parse(plan))) == 2
    assert len(variants(Plan.parse("dp_replicate=2,offload=optimizer:disk"))) == 1  # float64 meets it


def test_what_an_optimizer_cannot_bear_is_refused_by_a_proof(pool: RankPool) -> None:
    parity = verify("mutations.tasks:adafactor", "dp_shard=2,zero=1,precision=bf16,masters=split", pool=pool)
    assert parity.refused is not None and "Adafactor updates whole tensors on their owners" in parity.refused


def test_a_rank_without_coded_state_meets_one_that_has_some(pool: RankPool) -> None:
    """Owners of whole tensors: one has matrices alone, whose state is rows and columns."""
    assert verify("mutations.tasks:adafactor", "dp_shard=2,zero=1,optimizer_state=bf16", pool=pool).parity


def test_variants_are_run_once_each() -> None:
    assert [str(plan) for plan in variants(Plan.parse("optimizer_state=bf16"))] == ["single", "optimizer_state=bf16"]
    assert len(variants(Plan.parse("precision=bf16,masters=split"))) == 2
