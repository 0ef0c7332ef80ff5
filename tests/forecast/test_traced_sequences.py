"""Forecasts of plans that cut sequences of a traced task: memory and bytes beside real ranks, balance, and a search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_traced import HERE, beyond, check_wire

from shardwise import Task
from shardwise.cluster import Cluster
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.layout import Plan
from shardwise.planner import Constraints, simulate
from shardwise.planner import search as search_plans
from shardwise.planner.traced_layouts import traced_subject
from shardwise.planner.traced_task import Traced

LONG = pytest.mark.long
DEGREES = ["cp=2", "cp=3", "cp_ulysses=2", "cp=2,cp_ulysses=2"]
BESIDE = ["", ",zero=1", ",zero=2,accumulate=2", ",zero=3", ",zero=3,accumulate=2", ",remat=full", ",remat=selective"]
COMPOSED = ["cp=2,dp_replicate=2", "cp=2,dp_shard=2,zero=1", "cp_ulysses=2,dp_shard=2,zero=3,remat=full",
            "cp=2,dp_replicate=2,accumulate=2", "cp=2,tp=2,sp=true", "cp=2,pp=2", "cp_ulysses=2,tp=2"]  # fmt: skip
CHUNKED = [f"{plan},position_chunks=2" for plan in ("accumulate=2", "dp_shard=2,zero=1,remat=full", "tp=2",
           "dp_shard=2,zero=3", "cp=2", "cp=2,zero=3,remat=full", "cp=2,tp=2,sp=true")]  # fmt: skip
ALL = [*([degree + more for more in BESIDE] for degree in DEGREES), COMPOSED]


def _with_three_heads(plans: list[str]) -> list[str]:
    """Those that do not deal gpt2's heads twice: with dropout, attention under cp is dealt by heads as well."""
    return [plan for plan in plans if not ("cp" in plan and "tp=2" in plan)]


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("sequence_tasks:decoder", ["cp=2,zero=1"], id="decoder"),
        pytest.param("sequence_tasks:grouped", ["cp=2,cp_ulysses=2,zero=3,remat=full"], id="grouped", marks=LONG),
        pytest.param("sequence_tasks:windowed", ["cp=3"], id="windowed"),
        pytest.param("sequence_tasks:averaged", ["position_chunks=3,remat=full"], id="chunks"),
        pytest.param("sequence_tasks:averaged", CHUNKED, id="chunks-all", marks=LONG),
        pytest.param("gpt2", _with_three_heads(CHUNKED), id="gpt2-chunks", marks=LONG),
        pytest.param("vit", ["cp=2,zero=2,accumulate=2"], id="born-inside"),
        pytest.param("sequence_tasks:decoder", ["cp=2,pp=2", "cp=2,tp=2,sp=true"], id="decoder-cut", marks=LONG),
        pytest.param("sequence_tasks:routed", ["cp=2"], id="routed", marks=LONG),
        *(
            pytest.param(f"sequence_tasks:{name}", plans, id=f"{name}-{plans[0]}-all", marks=LONG)
            for name in ("decoder", "grouped", "windowed", "encoder", "written", "pooled")
            for plans in ALL
        ),
        pytest.param(
            "vit", [*DEGREES, *COMPOSED[:-1]], id="vit-all", marks=LONG
        ),  # whose two heads are not dealt twice
        pytest.param("gpt2", _with_three_heads([*DEGREES[:3], *COMPOSED]), id="gpt2-all", marks=LONG),
    ],
)
def test_memory_of_every_rank_of_a_sequence_is_within_two_percent(name: str, plans: list[str], pool) -> None:
    """Uneven shares, in the batch and born inside: each rank's forecast against the peak of its live bytes."""
    wrong = beyond(pool, name, plans)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("grouped", "cp=2,dp_replicate=2", marks=LONG),
        ("windowed", "cp=3,dp_replicate=2"),
        ("grouped", "cp=2,cp_ulysses=2"),
    ],  # of one axis alone, the ledger would name its group by another axis that has the same ranks
)
def test_bytes_along_a_sequence_are_those_of_the_ledger(name: str, text: str, pool) -> None:
    """Rings and all-to-alls, shifted labels and the loss: calls and bytes of each rank, axis and operation."""
    check_wire(pool, f"sequence_tasks:{name}", text)


# --- a search


def _long(length: int, samples: int = 1, causal: bool = True, blocks: int = 2) -> Task:
    """A small decoder of long samples, of which one is larger than the weights."""
    from sequence_tasks import Block, Decoder, decoder

    class Long(Decoder):
        def __init__(self) -> None:
            super().__init__(causal=causal)
            self.blocks = torch.nn.ModuleList(Block(16, 4, 4, False, causal) for _ in range(blocks))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x, None)
            return self.head(self.norm(x))

    def text(step: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.zeros(samples, length, dtype=torch.int64)}

    return replace(decoder(), model=Long, batch=text, name="long")


def _small(cluster: str, gigabytes: float) -> Cluster:
    found = Cluster.parse(cluster)
    memory = replace(found.device.memory_gb, value=gigabytes)
    return replace(found, device=replace(found.device, memory_gb=memory))


def test_a_sequence_too_long_for_a_device_is_answered_by_cutting_it() -> None:
    """The wall is told, cuts of the sequence are ranked first, and `simulate` says the same of the best plan."""
    task, machine = _long(8192, samples=4), _small("1x4 l40s", 0.775)  # 0.7 of it lies outside the allocator
    subject = traced_subject(task, machine, software("shardwise"), 4, "fp32", ("none",))
    whole = Constraints(most=(("tp", 1), ("pp", 1)), fixed=(("position_chunks", 1), ("zero", 0)))
    found = search_plans(subject, machine, whole, precision="fp32")
    assert found.proposals and all(p.layout.split_sequence > 1 for p in found.proposals)
    assert found.best.runnable == ""
    assert any("cp and cp_ulysses, which cut a sequence, answer a wall: one sample" in note for note in found.notes)
    again = simulate(task, found.best.plan, machine, global_batch=4)
    assert again.step_s == pytest.approx(found.best.forecast.step_s, rel=0.02)
    assert again.worst.allocated == pytest.approx(found.best.forecast.worst.allocated, rel=0.02)


def test_wide_tensors_too_large_for_a_device_are_answered_by_chunks() -> None:
    """On one device, where nothing can be cut over ranks; `simulate` says the same; else no wall is told."""
    from sequence_tasks import Decoder, _mean_of_next

    class Wide(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.head = torch.nn.Embedding(2048, 16), torch.nn.Linear(16, 8192)

    task = _long(2048).with_(model=Wide, loss=_mean_of_next)
    for gigabytes, chunks in ((0.85, 8), (1.6, 1)):
        machine = _small("1x1 l40s", gigabytes)
        subject = traced_subject(task, machine, software("shardwise"), 1, "fp32", ("none",))
        found = search_plans(subject, machine, Constraints(), precision="fp32")
        assert found.best.plan.position_chunks == chunks
        said = [note for note in found.notes if "position_chunks=8" in note and "answers a wall: one sample" in note]
        assert bool(said) == (chunks > 1)
        again = simulate(task, found.best.plan, machine, global_batch=1)
        assert again.worst.allocated == pytest.approx(found.best.forecast.worst.allocated, rel=0.02)


def test_degrees_that_are_asked_for_are_looked_at() -> None:
    machine = Cluster.parse("1x4 a100-sxm-80gb")
    subject = traced_subject(_long(64, samples=4), machine, software("shardwise"), 4, "fp32", ("none",))
    asked = Constraints(most=(("tp", 1), ("pp", 1)), fixed=(("cp", 2), ("cp_ulysses", 2), ("zero", 1)))
    found = search_plans(subject, machine, asked, precision="fp32")
    assert {(p.plan.cp, p.plan.cp_ulysses, p.plan.zero) for p in found.proposals} == {(2, 2, 1)}
    assert not any("wall" in note for note in found.notes), "nothing stands against whole sequences"


def test_the_work_of_a_rank_is_what_its_mask_leaves() -> None:
    """Unmasked pairs: causal positions are dealt from either end, so that a rank of two has half of one process's."""
    for causal in (True, False):
        task = _long(256, causal=causal)
        scores = {}
        for text in ("single", "cp=2", "cp=4")[: 3 if causal else 2]:
            plan = Plan.parse(text)
            traced = Traced(task, HERE, software("shardwise"), "fp32", (1, 1), cuts=True)
            layout = of_plan(plan, global_batch=1, seq=1)
            ranks = traced.cut(layout, 1) if plan.cp > 1 else [traced.model("none", 1, 1)]
            scores[plan.cp] = [_pairs(rank.small) for rank in ranks]
        whole = scores[1][0]
        for ranks in scores.keys() - {1}:
            assert max(scores[ranks]) == min(scores[ranks]) == pytest.approx(whole / ranks, rel=0.01), (causal, ranks)
    forecast = simulate(_long(256), "cp=2", "4 h100-sxm-80gb", global_batch=1)
    assert "sequence" in forecast.basis and forecast.parts["tensor, context and expert communication"] > 0


def _pairs(trace: object) -> float:
    """Query-key pairs that fused attention computes in a forward, of a causal block the half below its diagonal."""
    return sum(
        rows * queries * keys * (0.5 if causal else 1.0) * times
        for (rows, queries, keys, _, back, causal), times in trace.attention.items()
        if not back
    )


@pytest.mark.parametrize(
    "plan", ["cp=2,cp_ulysses=2", *(pytest.param(f"{a}=2", marks=LONG) for a in ("cp", "cp_ulysses"))]
)
def test_recompute_keeps_the_inputs_of_blocks_alone(plan: str) -> None:
    """With remat=full a block more adds its input's share to the peak, and none of its queries, keys or values."""
    two, six = (
        simulate(_long(1024, blocks=blocks), f"{plan},remat=full", HERE, global_batch=1).worst.terms["micro-batch"]
        for blocks in (2, 6)
    )
    assert six - two == pytest.approx(4 * 1024 * 16 * 4 / Plan.parse(plan).cut_positions, rel=0.02)
