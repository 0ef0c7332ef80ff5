"""The pure arithmetic: plans as text, the rank grid, the dealing of samples, flat buckets, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import AXES, RULES, Grid, Plan, check
from shardwise.layout.dealing import cut, deal, micro_batches
from shardwise.layout.flat_buckets import lay_out, most_elements
from shardwise.layout.other_words import OURS_OF
from shardwise.layout.plan import CHOICES, REMATS, SCHEDULES
from shardwise.layout.precisions import PRECISIONS
from shardwise.layout.rules import as_markdown

degree = st.integers(1, 4)
OFFLOADS = ["none", "optimizer", "parameters", "optimizer:disk", "optimizer:host:0.5|optimizer:disk:0.25"]
PATTERNS = st.lists(st.sampled_from(["Block", "layers.*", "encoder.layers.0", "ResNet_2"]), max_size=3, unique=True)
ANY_PLAN = st.builds(
    Plan,
    dp_replicate=degree, dp_shard=degree, zero=st.integers(0, 3), tp=degree, sp=st.booleans(), pp=degree,
    schedule=st.sampled_from(["none", *SCHEDULES]), microbatches=degree, accumulate=degree, cp=degree,
    stages=PATTERNS.map(tuple),
    cp_ulysses=degree, ep=degree, domain=st.lists(degree, min_size=1, max_size=3).map(tuple),
    precision=st.sampled_from(list(PRECISIONS)), reduce_dtype=st.sampled_from(CHOICES["reduce_dtype"]),
    remat=st.sampled_from(REMATS), offload=st.sampled_from(OFFLOADS), compile=st.booleans(),
    optimizer_state=st.sampled_from(CHOICES["optimizer_state"]), masters=st.sampled_from(CHOICES["masters"]),
    gradients=st.sampled_from(CHOICES["gradients"]),
    wrap=PATTERNS.map(tuple), deterministic=st.sampled_from([0, 1, 12, 24]),
) | st.builds(Plan, pp=degree, schedule=st.sampled_from(["none", *SCHEDULES]), stages_per_rank=degree)  # fmt: skip
SMALL_GRID = st.builds(
    Plan, dp_replicate=degree, dp_shard=degree, zero=st.just(0), tp=st.integers(1, 2), pp=st.integers(1, 2),
    domain=st.sampled_from([(1,), (2,), (1, 3)]),
)  # fmt: skip


# --- a plan as text


@given(ANY_PLAN)
def test_text_and_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(plan) is plan


def test_an_offload_has_one_text() -> None:
    same = {"optimizer:host": "optimizer", "optimizer:host:1": "optimizer", "optimizer:disk:1.0": "optimizer:disk"}
    for text, canonical in same.items():
        assert str(Plan.parse(f"offload={text}")) == f"offload={canonical}"
    assert str(Plan.parse("offload=activations:disk:0.50|optimizer:host")) == "offload=activations:disk:0.5|optimizer"
    assert Plan(offload="optimizer:host:0.60") == Plan(offload="optimizer:host:0.6")


@given(ANY_PLAN)
def test_dict_and_back(plan: Plan) -> None:
    assert Plan.from_dict(plan.as_dict()) == plan
    assert Plan.from_dict(plan.as_dict(defaults=True)) == plan


@given(plan=ANY_PLAN)
def test_toml_and_back(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.toml"
    path.write_text(plan.to_toml())
    assert Plan.parse(str(path)) == plan


def test_toml_may_leave_out_the_table_and_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('dp_shard = 4\nzero = 2\ndomain = [1, 2]\nwrap = ["Block"]\n')
    assert Plan.parse(str(path)) == Plan(dp_shard=4, zero=2, domain=(1, 2), wrap=("Block",))


@given(ANY_PLAN)
def test_text_says_no_more_than_it_must(plan: Plan) -> None:
    text = str(plan)
    for part in text.split(",") if text != "single" else []:
        if part == "zero=3":
            continue  # the default of dp_shard > 1, written out for the reader
        rest = ",".join(p for p in text.split(",") if p != part) or "single"
        assert Plan.parse(rest) != plan, f"{part} could be left out of {text}"


def test_stages_are_named_or_counted() -> None:
    assert Plan.parse("pp=2,stages=a|b|c").stages_per_rank == 2
    assert Plan.parse("pp=2,schedule=interleaved1f1b,stages_per_rank=3").microbatches == 6
    assert Plan.parse("pp=4,schedule=interleaved1f1b,stages_per_rank=3").with_(pp=2).stages_per_rank == 3
    assert Plan.parse("pp=4,schedule=interleaved1f1b").with_(schedule="1f1b").stages_per_rank == 1
    assert Plan.parse("pp=4,schedule=interleaved1f1b,stages_per_rank=3").with_(pp=1) == Plan()
    with pytest.raises(InputError, match="make 2 stages for each of pp=2 ranks, not stages_per_rank=3"):
        Plan.parse("pp=2,stages=a|b|c,stages_per_rank=3")


def test_short_forms() -> None:
    assert Plan.parse("") == Plan.parse("single") == Plan()
    assert str(Plan()) == "single"
    assert Plan.parse(" dp_shard = 2 , zero = 1 ") == Plan(dp_shard=2, zero=1)
    assert Plan.parse("dp_shard=2").zero == 3
    assert Plan.parse("dp_replicate=2").zero == 0
    assert Plan.parse("precision=bf16-mixed").precision == "bf16"
    assert Plan.parse("dp_shard=2,wrap=Block|head").wrap == ("Block", "head")
    assert Plan.parse("domain=1x2").domain == (1, 2)
    assert Plan(domain=2).domain == (2,)  # type: ignore[arg-type]
    assert Plan.parse("pp=4") == Plan(pp=4, schedule="1f1b", microbatches=4)
    assert Plan.parse("pp=2,schedule=zbv").microbatches == 4
    assert Plan.parse("pp=2,stages=layers.3|head").stages == ("layers.3", "head")
    assert str(Plan.parse("pp=2,schedule=1f1b,microbatches=2")) == "pp=2"


def test_a_changed_copy_keeps_what_was_chosen() -> None:
    assert Plan(dp_shard=4, zero=1).with_(accumulate=2) == Plan(dp_shard=4, zero=1, accumulate=2)
    assert Plan(dp_shard=4, zero=1).with_(dp_shard=1).zero == 0
    assert Plan(dp_shard=4, zero=1).with_(dp_shard=2).zero == 1
    assert Plan(pp=4).with_(pp=2).microbatches == 2
    assert Plan(pp=4, microbatches=7).with_(pp=2).microbatches == 7
    assert Plan(pp=4, schedule="zbv").with_(pp=1) == Plan()


@given(ANY_PLAN)
def test_world_size_is_the_product_of_all_but_ep(plan: Plan) -> None:
    assert plan.world_size == math.prod(Grid(plan).shape)
    assert plan.with_(ep=plan.ep + 1).world_size == plan.world_size


# --- what a plan may not say


BAD_TEXT = [
    ("dp_shards=2", "unknown key 'dp_shards'; did you mean 'dp_shard'?"),
    ("zer=3", "unknown key 'zer'; did you mean 'zero'?"),
    ("nonsense=1", "unknown key 'nonsense' (known: dp_replicate, dp_shard, zero"),
    ("zero=1,zero=2", "zero is given twice in 'zero=1,zero=2'"),
    ("dp_shard=two", "dp_shard must be a whole number, got 'two'"),
    ("dp_shard=2.0", "dp_shard must be a whole number, got '2.0'"),
    ("dp_shard=0", "dp_shard must be a whole number of at least 1, got 0"),
    ("accumulate=-1", "accumulate must be a whole number of at least 1, got -1"),
    ("dp_shard=2,zero=4", "zero must be 0, 1, 2 or 3, got 4"),
    ("dp_shard=2,zero=-2", "zero must be 0, 1, 2 or 3, got -2"),
    ("dp_shard", "expected key=value, got 'dp_shard' in 'dp_shard'"),
    ("dp_shard=", "expected key=value, got 'dp_shard='"),
    ("dp_shard=2,", "there is a comma too many in 'dp_shard=2,'"),
    ("sp=yes", "sp must be true or false, got 'yes'"),
    ("compile=1", "compile must be true or false, got '1'"),
    ("domain=2xa", "domain must be tiles per spatial dim such as 1x2, got '2xa'"),
    ("domain=0x2", "domain must be tiles per spatial dim such as 1x2, got (0, 2)"),
    ("precision=bf61", "precision=bf61 is not one of fp32, fp64, bf16, bf16-full, fp16; did you mean 'bf16'?"),
    ("reduce_dtype=int8", "reduce_dtype=int8 is not one of auto, fp32, bf16, fp16, fp64"),
    ("remat=selectiv", "remat=selectiv is not one of none, selective, full; did you mean 'selective'?"),
    ("schedule=2f2b", "schedule=2f2b is not one of none, gpipe"),
    (
        "offload=disk",
        "disk is not one of none, optimizer, parameters, gradients, activations; write offload=optimizer:",
    ),
    ("offload=optimiser:disk", "did you mean 'optimizer'?"),
    ("offload=optimizer:nvme", "the tier nvme is not one of host, disk; host is the processor's memory"),
    ("offload=optimizer:disk:0", "a fraction lies above 0 and is at most 1, got '0'"),
    ("offload=optimizer:disk:half", "a fraction lies above 0 and is at most 1, got 'half'"),
    ("offload=optimizer:disk:0.6|optimizer:host:0.6", "moves 1.2 of optimizer: fractions add up to at most 1"),
    ("offload=optimizer:disk:0.2|optimizer:disk:0.3", "names a class twice for one tier"),
    ("offload=optimizer:disk:0.2:4", "a part is class:tier:fraction, such as optimizer:disk:0.6"),
    ("nowhere.toml", "no file nowhere.toml"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXT, ids=[text for text, _ in BAD_TEXT])
def test_bad_text_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        Plan.parse(text)
    assert message in str(raised.value)
    assert str(raised.value).startswith("plan: ")


@pytest.mark.parametrize("values", [{"dp_shard": True}, {"tp": 1.5}, {"pp": None}, {"zero": "three"}])
def test_bad_values_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Plan.from_dict(values)


def test_every_unknown_key_is_told() -> None:
    with pytest.raises(InputError, match=r"'dp_shrd'.*dp_shard.*'zoro'.*zero"):
        Plan.from_dict({"dp_shrd": 2, "zoro": 1})


def test_bad_toml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("dp_shard = = 2")
    with pytest.raises(InputError, match=r"broken\.toml is not TOML: .*line 1"):
        Plan.parse(str(path))


@pytest.mark.parametrize(
    "plan",
    [
        {"zero": True},
        {"zero": 2.0},
        {"domain": ()},
        {"domain": (True,)},
        {"sp": 1},
        {"wrap": 3},
        {"stages": 3},
        {"stages": (3,)},
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(plan))):
        Plan(**plan)


# --- the rank grid


@given(SMALL_GRID, st.data())
def test_rank_and_coordinates_are_a_bijection(plan: Plan, data: st.DataObject) -> None:
    grid = Grid(plan)
    seen = [tuple(grid.coordinates(rank).values()) for rank in range(plan.world_size)]
    assert len(set(seen)) == plan.world_size
    assert seen == sorted(seen), "ranks count with the innermost axis fastest"
    assert [grid.rank(grid.coordinates(rank)) for rank in range(plan.world_size)] == list(range(plan.world_size))
    for found in seen:
        assert all(0 <= at < size for at, size in zip(found, grid.shape, strict=True))


@given(SMALL_GRID, st.lists(st.sampled_from(AXES), max_size=3, unique=True).map(tuple))
def test_groups_partition_the_world(plan: Plan, axes: tuple[str, ...]) -> None:
    grid = Grid(plan)
    size = math.prod(degree for axis, degree in zip(AXES, grid.shape, strict=True) if axis in axes)
    groups = {tuple(grid.group(rank, axes)) for rank in range(plan.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
    assert all(len(group) == size and list(group) == sorted(group) for group in groups)
    assert all(rank in grid.group(rank, axes) for rank in range(plan.world_size))


def test_the_grid_by_hand() -> None:
    grid = Grid(Plan(dp_replicate=2, dp_shard=2))
    table = [(at["dp_replicate"], at["dp_shard"]) for at in map(grid.coordinates, range(4))]
    assert table == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert grid.group(3, ("dp_shard",)) == [2, 3]
    assert grid.group(3, ("dp_replicate",)) == [1, 3]


# --- who gets which samples


@given(samples=st.integers(1, 60), accumulate=st.integers(1, 7), ranks=st.integers(1, 9))
def test_every_sample_is_dealt_once(samples: int, accumulate: int, ranks: int) -> None:
    assume(samples >= accumulate)
    dealt = [deal(samples, accumulate, ranks, rank) for rank in range(ranks)]
    covered = [
        sample
        for micro_batch in range(accumulate)
        for rank in range(ranks)
        for sample in range(*dealt[rank][micro_batch][:2])
    ]
    assert covered == list(range(samples)), "in order: micro-batch by micro-batch, rank by rank"
    for micro_batch, (low, high) in enumerate(micro_batches(samples, accumulate)):
        counts = [last - first for first, last, _, _ in (d[micro_batch] for d in dealt)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == high - low
        for first, _, start, total in (d[micro_batch] for d in dealt):
            assert (start, total) == (first - low, high - low)


@given(samples=st.integers(1, 60), accumulate=st.integers(1, 7))
def test_micro_batches_do_not_depend_on_the_ranks(samples: int, accumulate: int) -> None:
    assume(samples >= accumulate)
    sizes = [high - low for low, high in micro_batches(samples, accumulate)]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1


@given(length=st.integers(0, 100), pieces=st.integers(1, 10))
def test_pieces_meet(length: int, pieces: int) -> None:
    ends = [cut(length, pieces, index) for index in range(pieces)]
    assert ends[0][0] == 0 and ends[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(ends))


def test_too_few_samples_for_the_micro_batches() -> None:
    with pytest.raises(InputError, match="a batch of 2 samples cannot be split into accumulate=3"):
        deal(2, 3, 1, 0)


# --- flat buckets


def test_a_bucket_is_larger_where_more_ranks_sum_it() -> None:
    """A message around a ring of 1,000 ranks takes 1,998 hops: of 25 MiB each would carry 26 KB."""
    assert [most_elements(4, ranks) for ranks in (1, 6, 7, 1000)] == [6_553_600, 6_553_600, 7_000_000, 1_000_000_000]
    assert most_elements(2, 8) == 13_107_200


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    cap=st.integers(1, 80),
    ranks=st.integers(1, 5),
    first_cap=st.none() | st.integers(1, 80),
)
def test_buckets_hold_every_element_once(sizes: list[int], cap: int, ranks: int, first_cap: int | None) -> None:
    buckets = lay_out(sizes, cap, ranks, first_cap)
    order = [entry.index for bucket in buckets for entry in bucket.entries]
    assert order == list(reversed(range(len(sizes)))), "last parameter first"
    for bucket in buckets:
        assert [e.stop - e.start for e in bucket.entries] == [sizes[e.index] for e in bucket.entries]
        filled = bucket.entries[-1].stop
        assert bucket.entries[0].start == 0
        assert all(b.start == a.stop + a.stop % 2 for a, b in pairwise(bucket.entries)), "each at an even element"
        assert bucket.size % ranks == 0 and 0 <= bucket.size - filled < ranks
        pieces = [piece for rank in range(ranks) for piece in bucket.pieces(ranks, rank)]
        padded = sum(stop - start for start, stop in bucket.gaps)
        assert sum(last - first for _, first, last in pieces) == bucket.size - padded
        assert len({bucket.shard(ranks, r)[1] - bucket.shard(ranks, r)[0] for r in range(ranks)}) == 1
    for place, bucket in enumerate(buckets):
        limit = first_cap if first_cap is not None and place == 0 else cap
        assert bucket.entries[-1].stop <= limit or len([e for e in bucket.entries if e.stop > e.start]) == 1


# --- what cannot combine


TRIGGERS: dict[str, list[str]] = {
    "optimizer_state with precision = fp64, or bf16 with precision = bf16-full": [
        "precision=fp64,optimizer_state=8bit",
        "precision=bf16-full,optimizer_state=bf16",
    ],
    "gradients = as_made with accumulate > 1 or pp > 1": [
        "accumulate=2,gradients=as_made",
        "pp=2,gradients=as_made",
    ],
    "gradients = as_made with precision = fp16 or deterministic": [
        "precision=fp16,gradients=as_made",
        "deterministic=true,gradients=as_made",
    ],
    "gradients = as_made with ep > 1, or offload of parameters": [
        "dp_shard=2,zero=1,ep=2,gradients=as_made",
        "dp_shard=2,zero=3,offload=parameters:disk,gradients=as_made",
    ],
    "optimizer_state = 8bit with deterministic and zero": ["dp_shard=2,deterministic=true,optimizer_state=8bit"],
    "masters = split without precision = bf16": ["masters=split", "masters=split,precision=fp16"],
    "masters = split with zero = 3": ["dp_shard=2,precision=bf16,masters=split"],
    "compile with tp > 1, cp, cp_ulysses or domain, and remat = selective": [
        "cp=2,compile=true,remat=selective",
        "tp=2,compile=true,remat=selective",
        "domain=2,compile=true,remat=selective",
    ],
    "compile with tp > 1, cp or cp_ulysses, and ep > 1": [
        f"{axis}=2,dp_shard=2,ep=2,compile=true" for axis in ("tp", "cp", "cp_ulysses")
    ],
    "compile with a schedule that splits backwards": ["pp=2,schedule=zbh1,compile=true"],
    "sp, tp_overlap or tp_whole with tp = 1": ["sp=true", "tp_overlap=true", "tp_whole=blocks.*"],
    "domain_overlap or domain_depth with domain = 1": ["domain_overlap=never", "domain_depth=2"],
    "domain_depth with domain_overlap = always": ["domain=2,domain_overlap=always,domain_depth=2"],
    "domain_depth with compile": ["domain=2,domain_depth=2,compile=true"],
    "schedule, microbatches, stages or stages_per_rank with pp = 1": [
        "schedule=1f1b",
        "microbatches=2",
        "stages=layers.3",
        "stages_per_rank=2",
    ],
    "stages that pp does not divide": ["pp=2,stages=a|b"],
    "schedule does not fit pp, microbatches, stages or stages_per_rank": [
        "pp=4,schedule=dualpipev,microbatches=7",
        "pp=4,schedule=interleaved1f1b,microbatches=6",
        "pp=2,stages=a|b|c",
        "pp=2,schedule=zbv,stages=a",
        "pp=2,schedule=interleavedzb,stages=a",
    ],
    "remat with a schedule that splits backwards": ["pp=2,schedule=zbh1,remat=full"],
    "zero = 3 with a schedule that splits backwards": ["pp=2,dp_shard=2,schedule=zbv"],
    "domain with ep > 1": ["domain=2,dp_shard=2,ep=2"],
    "position_chunks with compile": ["position_chunks=2,compile=true"],
    "position_chunks with domain": ["position_chunks=2,domain=2"],
    "position_chunks with pp": ["position_chunks=2,pp=2"],
    "domain with cp or cp_ulysses": ["domain=2,cp=2", "domain=2x2,cp_ulysses=2"],
    "domain with sp": ["domain=2,tp=2,sp=true"],
    "ep that does not divide dp_shard * cp * cp_ulysses": ["ep=2", "dp_shard=4,ep=3", "cp=2,ep=4", "tp=2,ep=2"],
    "deterministic with tp, pp, cp, cp_ulysses, domain or ep": [
        f"{axes},deterministic=true" for axes in ("tp=2", "pp=2", "cp=2", "domain=2", "dp_shard=2,ep=2")
    ],
    "deterministic with dp_replicate > 1 and dp_shard > 1": ["dp_replicate=2,dp_shard=2,deterministic=true"],
    "deterministic with compile, fp16 or bf16-full": [
        f"{field},deterministic=true" for field in ("compile=true", "precision=fp16", "precision=bf16-full")
    ],
    "deterministic that accumulate x data ranks does not divide": ["dp_replicate=5,deterministic=true"],
    "offload of activations with remat = selective": ["remat=selective,offload=optimizer:disk|activations:host:0.5"],
    "offload of gradients without parameters on the host": ["offload=gradients:disk", "dp_shard=2,offload=gradients"],
    "offload of a fraction of parameters to the host": ["offload=parameters:host:0.5"],
    "offload of parameters without zero=3": ["zero=0,offload=parameters", "dp_shard=2,zero=2,offload=parameters:disk"],
    "offload of parameters with ep > 1": ["dp_shard=2,zero=3,ep=2,offload=parameters:disk"],
    "zero >= 1 with dp_shard = 1": ["zero=1", "zero=3,dp_replicate=2"],
    "wrap with zero < 3": ["wrap=Block", "dp_shard=2,zero=2,wrap=Block"],
    "reduce_dtype narrower than fp64 with precision = fp64": ["precision=fp64,reduce_dtype=fp32"],
    "reduce_dtype = fp16 without precision = fp16": ["reduce_dtype=fp16", "precision=bf16,reduce_dtype=fp16"],
}
ACCEPTED = [
    "single", "dp_replicate=4", "dp_shard=2", "dp_shard=4,zero=0", "dp_shard=4,zero=1", "dp_shard=4,zero=2",
    "dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=2,zero=1", "dp_shard=2,wrap=Block", "precision=fp64",
    "precision=fp16,reduce_dtype=fp16", "precision=bf16", "precision=bf16,reduce_dtype=bf16", "precision=bf16-full",
    "deterministic=true", "dp_shard=4,zero=1,accumulate=3,deterministic=12",
    "accumulate=3", "remat=full", "remat=selective", "compile=true",
    "tp=2,sp=true,tp_overlap=true", "domain=2,domain_overlap=always", "domain=1x2,domain_depth=4",
    "domain=2x2,compile=true",
    "tp=2,sp=true,compile=true,remat=full", "dp_shard=2,ep=2,compile=true", "pp=2,dp_shard=2,ep=2,compile=true",
    "pp=2", "pp=4,schedule=zbv", "pp=2,stages=head", "pp=2,dp_shard=2", "pp=2,dp_shard=2,zero=2,schedule=zbh2",
    "pp=2,dp_shard=2,ep=2,schedule=zbh1,zero=1", "dp_shard=4,ep=2", "dp_shard=2,ep=2,zero=0,tp=2,sp=true", "cp=2,ep=2",
    "cp=2", "cp_ulysses=2,tp=2,sp=true", "cp=2,zero=3", "cp=2,cp_ulysses=2,dp_shard=2,zero=1", "cp=2,remat=full",
    "cp=2,zero=3,remat=full,position_chunks=8",
    "pp=3,schedule=interleaved1f1b,remat=full", "pp=2,dp_shard=2,schedule=interleaved1f1b",
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.combination)
def test_each_rule_refuses_its_own_plans(rule: Any) -> None:
    assert rule.combination in TRIGGERS, "give the new rule a plan here"
    for text in TRIGGERS[rule.combination]:
        plan = Plan.parse(text)
        assert [r.combination for r in RULES if r.when(plan)] == [rule.combination], text
        with pytest.raises(RefusedPlan) as raised:
            check(plan)
        assert rule.combination in str(raised.value) and rule.reason in str(raised.value)


def test_no_rule_is_dead_or_doubled() -> None:
    names = [rule.combination for rule in RULES]
    assert len(set(names)) == len(names)
    assert set(TRIGGERS) == set(names)
    assert {rule.kind for rule in RULES} <= {"not built", "illegal"}


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_is_built_is_accepted(text: str) -> None:
    check(Plan.parse(text))


@given(ANY_PLAN)
def test_exactly_the_refused_plans_trigger_a_rule(plan: Plan) -> None:
    reasons = [rule.reason for rule in RULES if rule.when(plan)]
    try:
        check(plan)
    except RefusedPlan as refusal:
        assert reasons and all(reason in str(refusal) for reason in reasons), "every reason is told at once"
    else:
        assert not reasons


def test_every_field_is_built_or_has_a_rule() -> None:
    built = {
        "dp_replicate",
        "dp_shard",
        "zero",
        "pp",
        "sp",
        "accumulate",
        "precision",
        "reduce_dtype",
        "remat",
        "compile",
        "wrap",
    }
    for field in fields(Plan):
        ruled = any(field.name in re.findall(r"\w+", rule.combination) for rule in RULES)
        assert field.name in built or ruled, f"{field.name} is neither built nor refused"


def test_the_documentation_is_the_table() -> None:
    assert as_markdown() in (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()


def test_tiles_have_an_axis_for_each_dim_of_space() -> None:
    grid = Grid(Plan(dp_shard=2, domain=(2, 3)))
    assert grid.plan.world_size == 12
    assert grid.coordinates(10) == {**dict.fromkeys(AXES, 0), "dp_shard": 1, "domain0": 1, "domain1": 1}
    assert grid.group(10, ("domain1",)) == [9, 10, 11] and grid.group(10, ("domain0",)) == [7, 10]


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("fsdp", "that is dp_shard=N,zero=3 here"),
        ("FULL_SHARD", "that is dp_shard=N,zero=3 here"),
        ("gradient-checkpointing=true", "that is remat=full or remat=selective here"),
        ("tp:2", "write tp=2"),
        ("offload=cpu", "offload=optimizer, or offload=optimizer:disk"),
        ("world_size=4", "the product of the plan's degrees"),
        ("sharding_strategy=HYBRID_SHARD", "that is dp_replicate=M,dp_shard=N,zero=3 here"),
        ("zero_stage=2", "that is dp_shard=N,zero=2 here"),
        ("tensor_parallel=4", "that is tp=4 here"),
        ("fsdp=8", "that is dp_shard=8,zero=3 here"),
        ("gradient checkpointing", "that is remat=full or remat=selective here"),
        ("bf16=true", "write precision=bf16"),
        ("zero-3", "that is dp_shard=N,zero=3 here"),
        ("batch_size=4", "train.batch_samples"),
        ("wandb", "train.sinks"),
    ],
)
def test_other_tools_words_are_answered_with_ours(text: str, ours: str) -> None:
    with pytest.raises(InputError, match=ours):
        Plan.parse(text)


def test_the_glossary_has_other_tools_words() -> None:
    text = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    for words, ours in OURS_OF.items():
        assert f"| {', '.join(f'`{word}`' for word in words)} | {ours} |" in text
