"""Sequences cut over ranks: attention alone against one process, and proofs of whole tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import sequence_tasks
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import parallelize, verify
from shardwise.comm import Axis
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.parallel.sequence import block_attention, candidates, ring_plan, rounds
from shardwise.parallel.sequence.pair_mask import At, PairMask, whole_mask
from shardwise.parallel.sequence.ring_plan import HEADS, Layers, key_heads_read
from shardwise.part import Owners, Part, plain, to_part
from shardwise.part.positions import Positions
from shardwise.trace.fake import Fake
from shardwise.trace.leaves import tensors_in

DOUBLE = torch.float64
BAR = 1e-10


def test_key_heads_are_found_without_values() -> None:
    """Owners tell which key head each query reads, also in a rehearsal: it would be repeated with all weights made."""
    tp, ring_axis = Axis("tp", 2, 1, None, (0, 1)), Axis("cp", 2, 0, None, (0, 1))

    def reads(queries: int, keys: int) -> torch.Tensor | None:
        q, k = torch.empty(1, queries // 2, 4, 2), torch.empty(1, keys, 4, 2)
        inner = Part(q, HEADS, Owners.blocks(queries, 2), tp)
        return key_heads_read(Layers(None, inner, ring_axis, q), Layers(None, None, ring_axis, k))

    assert reads(6, 3).tolist() == [1, 2, 2] and reads(8, 1) is None
    with Fake():
        assert reads(6, 3).shape == (3,) and reads(8, 1) is None


# --- attention alone


def _owners(n: int, ranks: int, kind: str) -> Owners:
    """Blocks; two blocks of each rank, one from either end (zigzag); or dealt like cards (striped)."""
    if kind == "blocks":
        return Owners.blocks(n, ranks)
    if kind == "zigzag":
        halves = Owners.blocks(n, 2 * ranks).array
        return Owners.of(np.minimum(halves, 2 * ranks - 1 - halves), ranks)
    return Owners.of(np.arange(n) % ranks, ranks)


def _mask(kind: str, s: int, t: int, heads: int, draws: torch.Generator) -> tuple[torch.Tensor | None, bool]:
    """(mask, is_causal). Every row may read something, but those of padding at the end of "padding"."""
    rows, columns = torch.arange(s)[:, None], torch.arange(t)
    if kind == "window":
        return (rows >= columns) & (rows - columns < 3), False
    if kind == "bias":
        return torch.randn(1, heads, s, t, generator=draws, dtype=DOUBLE), False
    if kind == "padding":
        return (columns < max(1, t - 2)).expand(1, 1, 1, t), False
    if kind in ("packed", "packed window"):
        document = torch.randint(3, (max(s, t),), generator=draws).sort().values
        near = rows - columns < (5 if kind == "packed window" else max(s, t))
        return (document[:s, None] == document[:t]) & (rows >= columns) & near, False
    return None, kind == "causal"


def _cases(seed: int, count: int, longest: int = 33) -> Iterator[dict]:
    rng = random.Random(seed)
    for number in range(count):
        keys = rng.choice((1, 2, 4))
        yield {
            "number": number, "axis": rng.choice(("cp", "cp_ulysses")),
            "s": rng.choice((1, 2, 3, 7, 16, 33)) if longest == 33 else rng.randint(1, longest),
            "heads": keys * rng.choice((1, 2, 4)), "keys": keys, "dealt": rng.choice(("blocks", "zigzag", "striped")),
            "mask": rng.choice(("full", "causal", "window", "bias", "padding", "packed", "packed window")),
            "learned": rng.random() < 0.3, "across": rng.random() < 0.2,
        }  # fmt: skip


def _try(case: dict, axes: dict) -> float:
    """The largest relative difference of output and gradients."""
    axis, s = axes[case["axis"]], case["s"]
    draws = torch.Generator().manual_seed(case["number"])
    t = s + 2 if case["across"] else s
    q = torch.randn(2, case["heads"], s, 4, generator=draws, dtype=DOUBLE)
    k, v = (torch.randn(2, case["keys"], t, 4, generator=draws, dtype=DOUBLE) for _ in range(2))
    mask, causal = _mask(case["mask"], s, t, case["heads"], draws)
    learned = mask is not None and mask.is_floating_point() and case["learned"]
    owners = [_owners(s, axis.size, case["dealt"]), *[_owners(t, axis.size, case["dealt"])] * 2]
    weight = torch.randn(q.shape, generator=draws, dtype=DOUBLE)
    found = []
    for cut in (False, True):
        leaves = [tensor.clone() for tensor in (q, k, v)]
        if cut:
            leaves = [o.take(x, 2, axis.index).clone() for o, x in zip(owners, leaves, strict=True)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        bias = mask.clone().requires_grad_() if learned and mask is not None else mask
        given = [to_part(x, 2, o, axis) for x, o in zip(leaves, owners, strict=True)] if cut else leaves
        out = F.scaled_dot_product_attention(*given, attn_mask=bias, is_causal=causal,
                                             enable_gqa=case["heads"] != case["keys"])  # fmt: skip
        (out * weight).sum().backward()
        gradients = [leaf.grad for leaf in leaves]
        found.append([plain(out.detach()), *gradients, *([plain(bias.grad)] if learned else [])])
    whole, here = found
    whole[1:4] = [o.take(x, 2, axis.index) for o, x in zip(owners, whole[1:4], strict=True)]
    return max(
        float((a - b).abs().max() / max(1.0, float(a.abs().max()))) if a.numel() else 0.0
        for a, b in zip(whole, here, strict=True)
    )


def _attention(seed: int, count: int, longest: int = 33) -> list[tuple[dict, float]]:
    ranks = torch.distributed.get_world_size()
    axes = {name: build_mesh(Plan(**{name: ranks}), torch.device("cpu")).inner[0] for name in ("cp", "cp_ulysses")}
    return [(case, _try(case, axes)) for case in _cases(seed, count, longest)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_of_cut_positions_is_that_of_whole_ones(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    for found in pool.run(_attention, ranks, seed, 30, timeout_s=240):
        wrong = [(case, off) for case, off in found if not off < BAR]
        assert not wrong, f"seed {seed}: {wrong[:3]}"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_attention_of_cut_positions_many(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    for found in pool.run(_attention, ranks, seed, 500, timeout_s=1200):
        wrong = [(case, off) for case, off in found if not off < BAR]
        assert not wrong, f"seed {seed}: {wrong[:3]}"


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_attention_of_every_length(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    found = pool.run(_attention, ranks, seed, 100, 257, timeout_s=1200)
    wrong = [(case, off) for each in found for case, off in each if not off < BAR]
    assert not wrong, f"seed {seed}: {wrong[:3]}"


def _from_zero(at: At) -> At:
    return (0, at[1] - at[0]) if isinstance(at, tuple) else np.arange(len(at))


def _with_bug(seed: int, count: int, bug: str) -> list[float]:
    """What `_attention` finds with a bug planted in the ring."""
    bias = rounds.bias_of
    pairs, passing = rounds.pairs, rounds.gradients_around
    try:
        if bug == "the mask's rows are those of the share":
            rounds.bias_of = lambda call, mask, q, k, *rest: bias(call, mask, _from_zero(q), k, *rest)
        elif bug == "causal blocks are taken for full ones":
            rounds.pairs = lambda call, *ranks: ((*p[:4], "full") for p in pairs(call, *ranks))
        elif bug == "gradients of keys stay where they were made":
            rounds.gradients_around = lambda call, mine, block: (
                [
                    sum(found)
                    for found in zip(*(block(s, *held) for s, held in rounds.blocks_passing(call, mine)), strict=True)
                ]
                if call.keys is None or len(set(call.keys.counts)) == 1
                else passing(call, mine, block)
            )
        elif bug == "rows of a block that are written later have the mask of the first":
            return [off for _, off in _few_rows_at_a_time(seed, count, first=True)]
        return [off for _, off in _attention(seed, count)]
    finally:
        rounds.pairs, rounds.gradients_around = pairs, passing
        rounds.bias_of = bias


def _few_rows_at_a_time(seed: int, count: int, first: bool = False) -> list[tuple[dict, float]]:
    """What `_attention` finds where a block's scores are written for some rows at a time, causal ones among them."""
    rows, most, kernel_for = block_attention._of_rows, block_attention.MOST_SCORES, block_attention.kernel_for
    block_attention.MOST_SCORES, block_attention.kernel_for = 100, lambda *_: None
    if first:
        block_attention._of_rows = lambda bias, some: rows(bias, slice(0, some.stop - some.start))
    try:
        return _attention(seed, count)
    finally:
        block_attention._of_rows, block_attention.MOST_SCORES, block_attention.kernel_for = rows, most, kernel_for


def test_scores_that_are_written_for_some_rows_at_a_time(pool) -> None:
    seed = random.randrange(2**31)
    for found in pool.run(_few_rows_at_a_time, 2, seed, 30, timeout_s=240):
        wrong = [(case, off) for case, off in found if not off < BAR]
        assert not wrong, f"seed {seed}: {wrong[:3]}"


@pytest.mark.parametrize(
    "bug",
    [
        "the mask's rows are those of the share",
        "causal blocks are taken for full ones",
        "gradients of keys stay where they were made",
        "rows of a block that are written later have the mask of the first",
    ],
)
def test_planted_bugs_in_the_ring_show(pool, bug: str) -> None:
    found = [off for each in pool.run(_with_bug, 2, 1, 30, bug, timeout_s=240) for off in each]
    assert max(found) > 1e-3


def _bytes_received(ranks_axis: str) -> tuple[float, float]:
    """Received by this rank in a forward and in a backward of one attention, (B, H, H_kv, S, D) = (2, 4, 2, 12, 4)."""
    from shardwise.comm import Ledger, Observer

    ranks = torch.distributed.get_world_size()
    mesh = build_mesh(Plan(**{ranks_axis: ranks}), torch.device("cpu"))
    axis, owners = mesh.inner[0], Owners.blocks(12, ranks)
    leaves = [torch.ones(2, heads, 12 // ranks, 4, dtype=DOUBLE, requires_grad=True) for heads in (4, 2, 2)]
    ledgers = Ledger(), Ledger()
    with Observer(ledgers[0], mesh.group_axes):
        out = F.scaled_dot_product_attention(*(to_part(x, 2, owners, axis) for x in leaves), enable_gqa=True)
        summed = (out * out).sum()
    with Observer(ledgers[1], mesh.group_axes):
        summed.backward()
    tags = {"cp": "ring", "cp_ulysses": "activations"}[ranks_axis]
    return tuple(
        sum(row["received_bytes"] for row in ledger.rows() if row["tag"] == tags and row["op"] != "all_reduce")
        for ledger in ledgers
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_a_ring(pool, ranks: int) -> None:
    keys = 2 * (2 * 2 * 12 * 4) * 8 * (ranks - 1) / ranks  # keys and values, of two heads
    for forward, backward in pool.run(_bytes_received, ranks, "cp"):
        assert (forward, backward) == (pytest.approx(keys), pytest.approx(2 * keys))


def _bytes_of_masks(kind: str) -> tuple[float, float]:
    """Received by this rank around a ring in forward and backward of one attention of 48 positions, in blocks."""
    from shardwise.comm import Ledger, Observer

    ranks, s = torch.distributed.get_world_size(), 48
    mesh = build_mesh(Plan(cp=ranks), torch.device("cpu"))
    axis, owners = mesh.inner[0], Owners.blocks(s, ranks)
    leaves = [torch.ones(1, 2, s // ranks, 4, dtype=DOUBLE, requires_grad=True) for _ in range(3)]
    at = torch.arange(s)
    document = at // (s // 2)  # two, each of whole ranks' shares
    masks = {"causal": None, "window": (at[:, None] >= at) & (at[:, None] - at < 5),
             "documents": document[:, None] == document}  # fmt: skip
    found = []
    ledgers = Ledger(), Ledger()
    with Observer(ledgers[0], mesh.group_axes):
        out = F.scaled_dot_product_attention(*(to_part(x, 2, owners, axis) for x in leaves), attn_mask=masks[kind],
                                             is_causal=kind == "causal")  # fmt: skip
    with Observer(ledgers[1], mesh.group_axes):
        (out * out).sum().backward()
    for ledger in ledgers:
        found.append(sum(row["received_bytes"] for row in ledger.rows() if row["tag"] == "ring"))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("kind", "hops"), [("causal", (3, 2, 1, 0)), ("window", (1, 1, 1, 0)), ("documents", (1, 1, 1, 1))]
)
def test_blocks_that_nobody_reads_are_not_sent(pool, kind: str, hops: tuple[int, ...]) -> None:
    block = 2 * (2 * 12 * 4) * 8  # keys and values of one rank
    found = pool.run(_bytes_of_masks, 4, kind)
    assert sum(forward for forward, _ in found) == sum(hops) * block
    assert sum(backward for _, backward in found) == 2 * sum(hops) * block


def test_bytes_of_ulysses(pool) -> None:
    p, heads = 2, 2 * 4 + 2 * 2  # queries, output, keys, values
    for forward, backward in pool.run(_bytes_received, p, "cp_ulysses"):
        assert forward == backward == pytest.approx(heads * 2 * 12 * 4 * 8 * (p - 1) / p**2)


# --- precision


def _around(p: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """Causal attention and its gradients as a ring of `p` ranks computes them, one rank after another here."""
    dtype = q.dtype
    owners, found = Owners.zigzag(96, p), {name: torch.zeros_like(q, dtype=DOUBLE) for name in ("o", "q", "k", "v")}
    sums = [torch.zeros_like(t, dtype=rounds.wide(dtype)) for t in (k, v)]
    for rank in range(p):
        axis = Axis("cp", p, rank, None, tuple(range(p)))
        call = ring_plan.Call(axis, owners, owners, 96, True, 0.25, ())
        at = torch.from_numpy(owners.indices(rank))

        def blocks(call, mine, p=p, rank=rank):
            for step in range(p):
                source = (rank - step) % p
                yield source, tuple(owners.take(t, 2, source) for t in (k, v))

        def around(call, mine, block, blocks=blocks, p=p):
            for source, held in blocks(call, mine):
                for total, one in zip(sums, block(source, *held), strict=True):
                    total[:, :, torch.from_numpy(owners.indices(source))] += one
            return tuple(t.new_zeros(0) for t in mine)

        kept = rounds.blocks_passing, rounds.gradients_around
        try:
            rounds.blocks_passing, rounds.gradients_around = blocks, around
            mine = q[:, :, at]
            out, lse = rounds.forward_around(rounds.Rounds(call, None), mine, k, v, None)
            dq = rounds.backward_around(rounds.Rounds(call, None), g[:, :, at], mine, k, v, None, out, lse, False)[0]
        finally:
            rounds.blocks_passing, rounds.gradients_around = kept
        found["o"][:, :, at], found["q"][:, :, at] = out.double(), dq.double()
    found["k"], found["v"] = (total.to(dtype).double() for total in sums)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_a_ring_does_not_grow_with_its_ranks(dtype: torch.dtype) -> None:
    errors: dict[int, dict[str, float]] = {p: dict.fromkeys("oqkv", 0.0) for p in (1, 2, 8)}
    for seed in range(8):
        draws = torch.Generator().manual_seed(seed)
        given = [torch.randn(1, 2, 96, 16, generator=draws).to(dtype) for _ in range(4)]
        *leaves, gradient = (tensor.double().requires_grad_() for tensor in given)
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.25)
        out.backward(gradient.detach())
        exact = dict(zip("oqkv", (out.detach(), *(leaf.grad for leaf in leaves)), strict=True))
        for p, worst in errors.items():
            for name, value in _around(p, *given).items():
                worst[name] = max(worst[name], float((value - exact[name]).norm() / exact[name].norm()))
    for name in "oqkv":
        assert errors[8][name] <= 1.1 * errors[2][name], (name, errors)
        assert errors[8][name] <= 1.5 * errors[1][name], (name, errors)


# --- tasks

PLANS = (
    "cp=2", "cp_ulysses=2", "cp=3", "cp=2,cp_ulysses=2", "cp=2,tp=2", "cp_ulysses=2,tp=2,sp=true", "cp=2,zero=3",
    "dp_shard=2,cp=2,zero=2", "dp_replicate=2,cp_ulysses=2,accumulate=2", "cp_ulysses=2,zero=1,remat=full",
    "cp=2,tp=2,sp=true,dp_replicate=2", "cp=4", "cp=2,pp=2", "cp_ulysses=2,pp=2,microbatches=4,schedule=zbh1",
    "cp=2,pp=2,zero=2,remat=full,microbatches=2", "cp=2,dp_shard=2,ep=2", "cp_ulysses=2,dp_shard=2,ep=2,zero=3",
    "cp=2,ep=2", "cp=2,dp_shard=2,ep=4,zero=2", "cp_ulysses=2,cp=2,ep=4,zero=1", "cp=2,tp=2,ep=2",
)  # fmt: skip
TASKS = ("position_wise", "decoder", "grouped", "one_key_head", "written", "windowed", "encoder", "pooled", "routed")
# on every commit left to others of the walk: cp=2,tp=2 beside dp_replicate=2,cp_ulysses=2; cp=3; ep beside cp_ulysses
LONG = (
    "cp=2,tp=2,sp=true,dp_replicate=2", "cp=4", "cp=2,dp_shard=2,ep=2", "cp=2,dp_shard=2,ep=4,zero=2",
    "cp_ulysses=2,cp=2,ep=4,zero=1", "cp=2,tp=2,ep=2",
)  # fmt: skip


def _walk() -> list[tuple[str, str]]:
    """Every plan and every task at least once."""
    plain_tasks = TASKS[:-1]
    return [
        ("routed" if "ep=" in plan else plain_tasks[place % len(plain_tasks)], plan) for place, plan in enumerate(PLANS)
    ]


@pytest.mark.parametrize(("task", "plan"), [case for case in _walk() if case[1] not in LONG])
def test_a_cut_sequence_equals_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"sequence_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()
    assert "cuts the sequence of" in found.text()


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("task", TASKS)
def test_every_cut_sequence_equals_one_process(pool, task: str, plan: str) -> None:
    if "ep=" in plan and task != "routed":
        pytest.skip("it has no experts")
    if "pp=" in plan and task in ("position_wise", "pooled"):
        pytest.skip("it has no blocks to cut stages from")
    found = verify(f"sequence_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()


def _stage_bytes() -> list[float]:
    """Bytes that a rank of cp=2,pp=2 receives in a step: of hidden states, or of their gradients."""
    import sequence_tasks

    from shardwise import parallelize

    task = sequence_tasks.decoder()
    engine = parallelize(task, "cp=2,pp=2,precision=fp64")
    with engine.observe() as ledger:
        assert task.batch is not None
        engine.step(task.batch(0))
    engine.close()
    return [row["received_bytes"] for row in ledger.rows() if "hidden states" in row["tag"] and row["received_bytes"]]


def test_stages_exchange_shares(pool) -> None:
    whole = 4 * 11 * 16 * 8  # (B, S, H) in float64
    found = [size for rank in pool.run(_stage_bytes, 4) for size in rank]
    assert sum(found) == 2 * whole  # both ranks of a stage together, once forward and once back


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "bert",
        "whisper",
        "t5",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("mistral", "mixtral")),
    ],
)
def test_models_of_transformers(pool, name: str) -> None:
    found = verify(f"architectures:{name}", "cp=2" if name != "mistral" else "cp_ulysses=2", pool=pool)
    assert found.parity, found.text()


class _Largest(TorchDispatchMode):
    """Notes the most elements that a tensor of an operation has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            self.most = max(self.most, tensor.numel())
        return output


def _largest_of_a_step(name: str, plan: str) -> int:
    ring_plan.LEAST_TILE, before = 16, ring_plan.LEAST_TILE
    try:
        task = getattr(sequence_tasks, name)()
        engine = parallelize(task, plan)
        with _Largest() as watch:
            engine.step(task.batch(0))
        engine.close()
        return watch.most
    finally:
        ring_plan.LEAST_TILE = before


@pytest.mark.parametrize(
    ("name", "plan"), [("a_window", "cp=2"), ("padded_words", "cp_ulysses=2"), ("packed_words", "cp=2,remat=full")]
)
def test_masks_of_transformers_are_functions_that_nobody_makes_whole(pool, name: str, plan: str) -> None:
    parity = verify(f"sequence_tasks:{name}", plan, pool=pool)
    assert parity.parity, parity.text()
    assert max(pool.run(_largest_of_a_step, 2, name, plan)) < 160 * 160 // 2


def test_a_mask_that_is_a_function_is_the_tensor_that_it_stands_for() -> None:
    """Of every pair of tiles, what is looked at and what is made; anything else that is asked of it, too."""
    rows = torch.arange(40)
    documents = (rows // 13).expand(2, -1)

    def function(sample, head, query, key):
        return (documents[sample, query] == documents[sample, key]) & (key <= query) & (key > query - 9)

    mask = PairMask(function, (2, 1, 40, 40), torch.device("cpu"), True)
    expected = whole_mask(mask)
    assert expected.shape == (2, 1, 40, 40) and expected[1, 0, 20].nonzero().flatten().tolist() == list(range(13, 21))
    assert mask[:, :, :, :40] is mask and mask.to(torch.bool) is mask
    assert (mask[:, :, :, :7] == expected[..., :7]).all() and (~mask == ~expected).all()
    tiles = [(0, 8), (8, 24), (24, 40)]
    kinds = mask.kinds(tuple((q, k) for q in tiles for k in tiles))
    for (q, k), kind in kinds.items():
        block = expected[..., slice(*q), slice(*k)]
        assert (mask.values(q, k).expand(2, 1, -1, -1) == block).all()
        assert (kind == "empty") == (not block.any()) and (kind == "full") == bool(block.all())
    assert kinds[(0, 8), (0, 8)] == "diagonal" and kinds[(8, 24), (8, 24)] == "masked"


def test_shares_of_one_and_of_two_positions_come_to_the_same_collectives(pool) -> None:
    found = verify("sequence_tasks:three_words", "tp=2,sp=true", pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize("plan", ["cp=3", "cp=2,cp_ulysses=2", "cp=2,tp=2", "cp_ulysses=3,zero=3"])
def test_losses_of_the_next_token_as_people_write_them(pool, plan: str) -> None:
    parity = verify("sequence_tasks:losses", plan, pool=pool)
    assert parity.parity, parity.text()


def test_a_convolution_along_a_cut_sequence_equals_one_process(pool) -> None:
    found = verify("sequence_tasks:convolution", "cp=2", pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize("plan", ["cp=3", "cp=2,cp_ulysses=2"])
def test_one_position_that_all_read_equals_one_process(pool, plan: str) -> None:
    found = verify("sequence_tasks:one_for_all", plan, pool=pool)
    assert found.parity, found.text()


def test_a_memory_that_a_loop_corrects_equals_one_process(pool) -> None:
    found = verify("sequence_tasks:delta_rule", "cp=2,cp_ulysses=2", pool=pool, steps=1)
    assert found.parity, found.text()


def test_a_ring_is_proven_in_float32_where_a_kernel_has_no_float64(pool) -> None:
    found = verify("sequence_tasks:single", "cp=2", pool=pool)
    assert found.parity and "compared in float32" in found.text(), found.text()


def test_what_mixes_positions_in_a_way_unknown_is_done_whole_and_told(pool) -> None:
    found = verify("sequence_tasks:energy", "cp=2", pool=pool)
    assert found.parity and "vdot reads is gathered over cp=2" in found.text(), found.text()


@pytest.mark.parametrize("plan", ["cp=2", "cp=2,cp_ulysses=2"])
def test_sorted_positions_equal_one_process(pool, plan: str) -> None:
    found = verify("sequence_tasks:sorted_positions", plan, pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        ("running_sums", "cp=2"),
        ("running_sums", "cp_ulysses=3"),
        ("recurrent", "cp=2"),
        ("batch_first", "cp=2,tp=2,sp=true"),
        pytest.param("decays", "cp=2", marks=pytest.mark.long),
        ("decays", "cp_ulysses=3"),
    ],
)
def test_a_gated_recurrence_along_a_cut_sequence_equals_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"sequence_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()


def test_a_table_that_is_made_of_the_length_is_a_whole_buffer_after_a_step(pool) -> None:
    found = verify("architectures:length_buffer", "cp=2", pool=pool)
    assert found.parity, found.text()


@pytest.mark.parametrize(
    "plan",
    [pytest.param("cp=2,cp_ulysses=2", marks=pytest.mark.long), "cp=2,pp=2,remat=full", "cp=2,tp=2,sp=true,zero=3"],
)
def test_a_length_that_is_born_inside_the_module_is_cut_where_its_blocks_begin(pool, plan: str) -> None:
    found = verify("architectures:vit", plan, pool=pool)
    assert found.parity, found.text()
    assert "cuts the sequence that 'vit.layers.0' is given" in found.text()


def test_fewer_heads_than_the_ranks_they_are_dealt_over_are_refused(pool) -> None:
    for task, plan, axes in (
        ("architectures:vit", "cp_ulysses=2,tp=2", "cp_ulysses=2 x tp=2"),
        ("architectures:gpt2", "cp=2,cp_ulysses=2", "cp=2 x cp_ulysses=2"),  # it has dropout: by heads over both
    ):
        found = verify(task, plan, pool=pool)
        assert not found.parity and f"2 heads are dealt over {axes}, and every rank" in found.refused, found.text()


def test_dims_that_a_task_names_are_cut_and_no_others(pool) -> None:
    """Two lengths at once, of which one alone would be found; what is not named stays whole."""
    found = verify("sequence_tasks:two_lengths", "cp=2", pool=pool)
    assert found.parity and "cp=2 cuts the sequence of tokens and notes along dim 1" in found.text(), found.text()
    found = verify("sequence_tasks:notes_alone", "cp=2", pool=pool)
    assert found.parity and "cp=2 cuts the sequence of notes along dim 1" in found.text(), found.text()


@pytest.mark.parametrize(
    ("named", "told"),
    [({"words": 1}, r"a batch has no tensor 'words' \(it has tokens, notes\)"),
     ({"tokens": 2}, r"tokens has no dim 2 behind its samples \(it is \(4, 11\)\)"),
     ({"tokens": 0}, "tokens has no dim 0 behind its samples")],
)  # fmt: skip
def test_dims_that_a_batch_does_not_have_are_told(named: dict, told: str) -> None:
    batch, axis = sequence_tasks.two_lengths().batch(0), Axis("cp", 2, 0, None, (0, 1))
    with pytest.raises(InputError, match=told):
        next(candidates(batch, 4, (axis,), ("tokens", "notes"), 1, named))


def test_a_mask_too_large_to_build_is_told_before_it_is(monkeypatch) -> None:
    """Of the window of a task: found without values, told with what to pass."""
    from shardwise.engine.find_positions import find_positions
    from shardwise.look import memory_limits
    from shardwise.precision import Precision
    from shardwise.trace.deferred import build

    task, long = sequence_tasks.windowed(), 2**13
    task = task.with_(model=sequence_tasks.LongWindow)
    plan, axes = Plan(cp=2), (Axis("cp", 2, 0, None, (0, 1)),)
    few = {"tokens": torch.zeros(2, long, dtype=torch.int64)}
    positions = find_positions(task, plan, axes, Precision.of(plan), build(task.model, 0), few)
    assert positions.mask == ((long, long), long * long)
    monkeypatch.setattr(memory_limits, "memory_bytes", lambda device: 2**25)
    with pytest.raises(InputError, match=r"mask \(8192, 8192\), 0.1 GiB .* Say is_causal=True"):
        memory_limits.check_masks(positions, torch.device("cpu"), 1)
    monkeypatch.setattr(memory_limits, "memory_bytes", lambda device: 2**27)
    memory_limits.check_masks(positions, torch.device("cpu"), 2)


def test_an_allocation_of_all_pairs_of_positions_is_told_as_one() -> None:
    """As the allocators of a host and of a device put it."""
    from shardwise.look.memory_limits import of_pairs

    batch = {"tokens": torch.empty(1, 2**20, dtype=torch.uint8)}
    for said in ("can't allocate memory: you tried to allocate 1099511627776 bytes", "Tried to allocate 1024.00 GiB"):
        assert "all pairs of 1,048,576 positions" in of_pairs(batch, RuntimeError(said))
        assert "is_causal=True" in of_pairs(batch, RuntimeError(said))
    assert not of_pairs(batch, RuntimeError("Tried to allocate 20.00 MiB"))
    assert not of_pairs({"tokens": batch["tokens"][:, :10]}, RuntimeError("Tried to allocate 1024.00 GiB"))


@pytest.mark.parametrize(("task", "dim"), [("square", 1), pytest.param("square_turned", 2, marks=pytest.mark.long)])
def test_as_many_positions_as_features(task: str, dim: int, pool) -> None:
    found = verify(f"sequence_tasks:{task}", "cp=2", pool=pool)
    assert found.parity and f"the sequence of x along dim {dim}" in found.text().replace(" and y", ""), found.text()


def test_a_batch_without_a_sequence_is_refused(pool) -> None:
    found = verify("architectures:convnext", "cp=2", pool=pool)
    assert not found.parity and "does not run on half" in found.refused, found.text()
    assert "is not given (B, S, E) first" in found.refused


@pytest.mark.parametrize("plan", ["cp=2,zero=1", *(pytest.param(plan, marks=pytest.mark.long) for plan in (
    "cp=2,dp_shard=2,zero=2", "dp_replicate=2,cp=2,zero=1", "tp=2", "domain=2", "cp=2,zero=3", "cp=2,pp=2",
    "cp=2,zero=1,remat=full",
))])  # fmt: skip
def test_weights_that_are_read_past_their_attributes(plan: str, pool) -> None:
    """Where positions are cut they are given to torch as attributes are; under tp the loss would be that of shares."""
    if plan == "domain=2":
        assert verify("domain_tasks:penalised", plan, pool=pool).parity
        return
    assert verify("sequence_tasks:penalised", plan, pool=pool).parity
    found = verify("sequence_tasks:penalised_past_attributes", plan, pool=pool)
    if any(key in plan for key in ("zero=3", "pp=", "remat")):
        assert "as by parameters(), where positions are cut, and " in (found.refused or ""), found.text()
    else:
        assert found.refused if plan == "tp=2" else found.parity, found.text()


def test_weights_that_a_forward_freezes_are_read_past_no_attribute(pool) -> None:
    assert verify("sequence_tasks:freezing", "cp=2", pool=pool, steps=1).parity


def test_dims_of_one_size_are_cut_where_the_task_names_one_and_an_assertion_is_quoted(pool) -> None:
    refused = verify("sequence_tasks:of_pairs_alone", "cp=2", pool=pool).refused
    assert refused is not None and 'Task(sequence={"x": 1}) says which of several dims' in refused
    assert verify("sequence_tasks:of_pairs_named", "cp=2", pool=pool).parity
    refused = verify("sequence_tasks:of_pairs", "cp=2", pool=pool).refused
    assert refused is not None and "AssertionError: four by four" in refused


def test_a_sequence_of_one_length_is_told_how_to_name_it(pool) -> None:
    """What the refusal says to write is what `Task.sequence` takes, and with it the plan is equal."""
    refused = verify("sequence_tasks:one_length", "cp=2", pool=pool).refused
    assert 'Task(sequence={"x": 1, "y": 1})' in refused
    assert verify("sequence_tasks:one_length_named", "cp=2", pool=pool).parity


def test_a_sequence_shorter_than_its_ranks_is_refused() -> None:
    axis = Axis("cp", 4, 0, None, (0, 1, 2, 3))
    with pytest.raises(InputError, match="3 positions of a sequence over cp=4 leave some rank with 0"):
        Positions((((1, (axis,)),),)).cut({"tokens": torch.zeros(2, 3, dtype=torch.int64)})
