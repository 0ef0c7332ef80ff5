"""Tensor and sequence parallelism: equal to one process, derived without names, at the bytes that were told."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import architectures
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Plan, Task, parallelize, verify
from shardwise.engine.tensor_cuts import derive_cuts, describe
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.layout.grid import placement
from shardwise.models import tasks
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.tensor import Derived
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.trace.deferred import build

CASES = [
    ("decoder", "tp=2"), ("decoder", "tp=2,sp=true"),
    ("decoder_tied", "tp=2,sp=true,accumulate=3"),
    ("decoder_dropout", "tp=2,dp_shard=2,zero=3,remat=full"),
    ("decoder_dropout", "tp=3,sp=true"), ("gpt2", "tp=2,dp_shard=2,zero=2"),
    ("vit", "tp=2,sp=true"), ("vit", "dp_replicate=2,tp=2"), ("unet_group", "tp=2"),
    ("unet_batchnorm", "tp=2,dp_shard=2"), ("mlp_frozen_unused", "tp=2"),
    ("hf_llama", "tp=2,sp=true,dp_shard=2,zero=3"), ("hf_vit", "tp=2"),
    ("decoder", "tp=2,tp_overlap=true,remat=full"), ("gpt2", "tp=2,sp=true,tp_overlap=true,dp_shard=2"),
    ("decoder_tied", "tp=3,sp=true,tp_overlap=true,remat=full"),
]  # fmt: skip
LONG = [
    ("gpt2", "tp=2,tp_overlap=true,dp_shard=2"), ("gpt2", "tp=2,sp=true,dp_shard=2,zero=1"),
    ("decoder", "tp=4,remat=full"), ("decoder", "tp=3,sp=true"),
] + [
    (name, plan)
    for name in ("decoder", "decoder_tied", "decoder_dropout", "gpt2", "vit", "unet_group", "hf_llama", "hf_vit")
    for plan in ("tp=4,sp=true", "tp=2,sp=true,dp_shard=2,zero=1,accumulate=3", "tp=2,dp_shard=2,zero=2,remat=full",
                 "dp_replicate=2,dp_shard=2,tp=2", "tp=4,dp_shard=2,sp=true")
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"shardwise.models.tasks:{name}", plan, clip_norm=0.5, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), LONG)
def test_equal_to_one_process_in_full(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(f"shardwise.models.tasks:{name}", plan, clip_norm=0.5, pool=pool, timeout_s=240)
    assert parity.parity, parity.text()


def test_norms_over_all_heads_are_cut_with_their_weights(pool: RankPool) -> None:
    cuts = cuts_of(architectures.olmo2(), "tp=2").cuts
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight"} <= set(cuts)
    parity = verify("architectures:olmo2", "tp=2,sp=true", clip_norm=0.5, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


# --- what is derived


def cuts_of(task: Task, plan: str) -> Derived:
    parsed = Plan.parse(plan)
    return derive_cuts(task, parsed, Precision.of(parsed), build(task.model, 0), task.batch(0))


def as_rows(derived: Derived) -> dict[str, tuple]:
    return {name: (cut.dim, cut.role, cut.owners.counts) for name, cut in derived.cuts.items()}


def test_the_scheme_of_megatron_is_found() -> None:
    found = as_rows(cuts_of(tasks.decoder(), "tp=2"))
    block = {k.removeprefix("blocks.0."): v for k, v in found.items() if k.startswith("blocks.0.")}
    assert block == {
        "attention.query.weight": (0, "output", (16, 16)),
        "attention.key.weight": (0, "output", (8, 8)),
        "attention.value.weight": (0, "output", (8, 8)),
        "attention.out.weight": (1, "input", (16, 16)),
        "gate.weight": (0, "output", (24, 24)),
        "up.weight": (0, "output", (24, 24)),
        "down.weight": (1, "input", (24, 24)),
    }
    assert found["embedding.weight"] == (0, "rows", (24, 23))
    assert found["head.weight"] == (0, "output", (24, 23))


def test_fused_weights_are_cut_by_heads() -> None:
    cut = cuts_of(tasks.gpt2(), "tp=2").cuts["blocks.0.attention.qkv.weight"]  # (3, heads 3, head_dim 8)
    assert cut.owners.array.reshape(3, 3, 8).transpose(0, 2, 1).tolist() == [[[0, 0, 1]] * 8] * 3


def test_more_ranks_than_key_heads_leave_the_keys_whole() -> None:
    found = cuts_of(tasks.decoder(), "tp=4")  # four heads, two key heads
    assert found.cuts["blocks.0.attention.query.weight"].owners.counts == (8, 8, 8, 8)
    assert "blocks.0.attention.key.weight" not in found.cuts
    assert "fewer groups" in found.whole["blocks.0.attention.key.weight"]


class Renamed(nn.Module):
    """The same module with other names, in containers of other kinds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        scramble(inner)
        self.z = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.z(*args, **kwargs)


def scramble(module: nn.Module) -> None:
    """Every child under a name that means nothing, found by the module's code through `__getattr__`."""
    for child in module.children():
        scramble(child)
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) or not module._modules:
        return
    names = {name: f"m{len(name)}_{place}" for place, name in enumerate(module._modules)}
    module._modules = OrderedDict((names[name], child) for name, child in module._modules.items())
    kind = type(module)
    body = {old: property(lambda self, new=new: self._modules[new]) for old, new in names.items()}
    module.__class__ = type("Anonymous", (kind,), body)


@pytest.mark.parametrize("name", ["decoder", "gpt2", "vit", "unet_group", "hf_llama"])
def test_names_do_not_matter(name: str) -> None:
    task = getattr(tasks, name)()
    renamed = task.with_(model=lambda: Renamed(task.model()))
    plain, other = cuts_of(task, "tp=2"), cuts_of(renamed, "tp=2")
    named = [n for n, _ in task.model().named_parameters()]
    anonymous = [n for n, _ in renamed.model().named_parameters()]
    assert len(named) == len(anonymous) and set(named).isdisjoint(anonymous)
    of_plain, of_other = as_rows(plain), as_rows(other)
    assert [of_plain.get(n) for n in named] == [of_other.get(n) for n in anonymous]


def test_a_weight_can_be_kept_whole(pool: RankPool) -> None:
    whole = cuts_of(tasks.decoder(), "tp=2,tp_whole=blocks.1|head.weight")
    assert not [name for name in whole.cuts if name.startswith("blocks.1.") or name == "head.weight"]
    assert [name for name in whole.cuts if name.startswith("blocks.0.")]
    assert verify("shardwise.models.tasks:decoder", "tp=2,tp_whole=blocks.*.up.weight|blocks.1", pool=pool).parity


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"no parameter or module matches 'block\.1'; did you mean 'blocks\.1'"):
        cuts_of(tasks.decoder(), "tp=2,tp_whole=block.1")


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    def one(step: int) -> Tensor:
        return torch.ones(4, 3)

    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return output.sum(), 4

    with pytest.raises(RefusedPlan, match="no weight of the module can be cut"):
        cuts_of(Task(model=nn.PReLU, batch=one, loss=loss), "tp=2")


def test_more_ranks_than_heads_keep_attention_whole() -> None:
    found = cuts_of(tasks.gpt2(), "tp=4")  # three heads
    assert "blocks.0.attention.out.weight" not in found.cuts and "blocks.0.down.weight" in found.cuts
    assert "3 groups that must lie together, fewer than 4 ranks" in found.whole["blocks.0.attention.out.weight"]


def in_matrices() -> Task:
    """An optimizer that needs whole matrices, on weights that tp cuts along either dim, unevenly, or not at all."""
    return tasks.decoder_tied().with_(
        optimizer=lambda groups: torch.optim.Muon([group for group in groups if group["name"] == "decay"], lr=1e-2)
    )


def in_whole_tensors() -> Task:
    return tasks.decoder_tied().with_(optimizer=torch.optim.Adafactor)


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        (in_whole_tensors, "tp=2"), (in_matrices, "tp=2,sp=true,dp_shard=2,zero=3"),
        pytest.param(in_matrices, "tp=3,dp_shard=2,zero=2,accumulate=2", marks=pytest.mark.long),
        pytest.param(in_matrices, "tp=2,pp=2", marks=pytest.mark.long),
        pytest.param(in_whole_tensors, "tp=2,dp_shard=2,zero=1", marks=pytest.mark.long),
        pytest.param(in_whole_tensors, "dp_replicate=2,tp=2", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_optimizers_of_whole_tensors(task: Any, plan: str, pool: RankPool) -> None:
    parity = verify(f"test_tensor:{task.__name__}", plan, clip_norm=0.5, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


def _refusal(plan: str) -> str:
    try:
        parallelize(tasks.mlp().with_(optimizer=lambda groups: torch.optim.LBFGS(groups[0]["params"])), plan)
    except RefusedPlan as error:
        return str(error)
    return ""


def test_an_optimizer_that_looks_at_all_tensors_is_refused(pool: RankPool) -> None:
    assert "tp=2 spreads parameters" in pool.run(_refusal, 2, "tp=2")[0]


def _by_hand(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits, targets = output[:, :-1], batch["tokens"][:, 1:]
    picked = logits.gather(-1, targets[..., None]).squeeze(-1)
    return (logits.logsumexp(-1) - picked).sum(), targets.numel()


def by_hand() -> Task:
    return tasks.decoder().with_(loss=_by_hand)


def test_a_loss_written_by_hand_does_not_gather_the_logits(pool: RankPool) -> None:
    assert cuts_of(by_hand(), "tp=2").cuts["head.weight"].dim == 0
    parity = verify(by_hand, "tp=2", pool=pool)
    assert parity.parity, parity.text()
    _, totals = describe(by_hand(), Plan(tp=2))
    assert [row["op"] for row in totals["collectives"]] == ["all_reduce"]


# --- modules that nobody prepared: each once, more under `long`


class Shared(nn.Module):
    """One layer used twice, and a table computed from the input's length."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 5)
        self.wide, self.narrow, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        x = self.enter(x) + place.cos()[:, None]
        for _ in range(2):
            x = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return self.leave(x)


class Einsums(nn.Module):
    """Attention and an MLP by einsum, weights with dims for heads: wq (D, H, K), wkv (2, D, H, K), wo (H, K, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.wq, self.wo = nn.Parameter(torch.randn(6, 4, 3) / 3), nn.Parameter(torch.randn(4, 3, 6) / 3)
        self.wkv = nn.Parameter(torch.randn(2, 6, 4, 3) / 3)
        self.wi, self.wf = nn.Parameter(torch.randn(2, 6, 10) / 3), nn.Parameter(torch.randn(10, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = torch.einsum("bsd,dhk->bshk", y, self.wq)
        k, v = torch.einsum("bsd,dhk->bshk", y, self.wkv[0]), torch.einsum("bsd,dhk->bshk", y, self.wkv[1])
        scores = torch.einsum("bshk,bthk->bhst", q, k).softmax(-1)
        x = x + torch.einsum("bshk,hkd->bsd", torch.einsum("bhst,bthk->bshk", scores, v), self.wo)
        y = self.norm(x)
        h = F.gelu(torch.einsum("bsd,df->bsf", y, self.wi[0])) * torch.einsum("bsd,df->bsf", y, self.wi[1])
        return x + torch.einsum("bsf,fd->bsd", h, self.wf)


class Branching(nn.Module):
    """Branches added after one norm, a functional weight, an in-place step, a slice in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(6, 10, bias=False)
        self.down = nn.Parameter(torch.randn(6, 10) / 4)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        h = F.silu(self.a(y)) * self.b(y)
        h.mul_(self.scale)
        left, right = h[..., :4], h[..., 4:]
        return x + F.linear(torch.cat([left * 2, right], -1), self.down)


def vectors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(5, 4, 6, generator=generator)}


def squares(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return output.square().sum(), batch["x"].shape[0]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 12), nn.Linear(12, 6))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def encoder_time_first() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 12), 2, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(),
                         nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.Conv1d(8, 4, 1))  # fmt: skip


def as_task(model: Any) -> Task:
    return Task(model=model, batch=vectors, loss=squares, inputs=lambda batch: ((batch["x"],), {}))


def made(name: str) -> Task:
    models = {"einsums": Einsums, "shared": Shared, "branching": Branching, "sequential": sequential,
              "encoder": encoder, "encoder_time_first": encoder_time_first, "convolutions": convolutions}  # fmt: skip
    return as_task(models[name])


@pytest.mark.parametrize(
    "name", ["einsums", "shared", "branching", "sequential", "encoder", "encoder_time_first", "convolutions"]
)
@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sp=true"])
def test_modules_that_nobody_prepared(name: str, plan: str, pool: RankPool) -> None:
    derived = cuts_of(made(name), plan)
    assert any(cut.role == "input" for cut in derived.cuts.values()), "nothing was paired"
    parity = verify(partial(made, name), plan, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


class CutBetween(nn.Module):
    """A stage that begins before a weight of its own is cut by columns, without a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def cut_between() -> Task:
    return as_task(CutBetween)


@pytest.mark.parametrize("plan", ["tp=2,pp=2,stages=blocks.1.2", "tp=2,pp=2,stages=blocks.2"])
def test_gradients_between_stages_are_whole(plan: str, pool: RankPool) -> None:
    parity = verify(cut_between, plan, pool=pool)
    assert parity.parity, parity.text()


@pytest.mark.long
def test_a_stage_begins_at_a_depthwise_convolution(pool: RankPool) -> None:
    parity = verify("module_tasks:depthwise", "tp=2,pp=2,stages=each", pool=pool)
    assert parity.parity, parity.text()


# --- bytes, and that replicas of what is whole stay the same


SAMPLES, LENGTH = 6, 8


def _even_batch(step: int) -> dict[str, Tensor]:
    return tasks.token_batch(step, samples=SAMPLES, length=LENGTH)


CONFIG = DecoderConfig(vocab=48, hidden=32, intermediate=48, layers=3, heads=4, kv_heads=4)


def even_decoder() -> Task:
    return tasks.decoder().with_(model=partial(Decoder, CONFIG), batch=_even_batch)


def _bytes(plan: str) -> list[dict]:
    engine = parallelize(even_decoder(), plan)
    engine.step(_even_batch(0))
    with engine.observe() as ledger:
        engine.step(_even_batch(1))
    return ledger.rows()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sp", "overlap"), [(False, False), (True, False), (True, True)])
def test_bytes_on_the_wire(ranks: int, sp: bool, overlap: bool, pool: RankPool) -> None:
    plan = f"tp={ranks},sp={str(sp).lower()},tp_overlap={str(overlap).lower()}"
    rows = [r for r in pool.run(_bytes, ranks, plan)[0] if r["tag"] == "activations"]
    assert {row["axis"] for row in rows} == {"tp"}
    received = {row["op"]: row["received_bytes"] for row in rows}
    hidden = SAMPLES * LENGTH * CONFIG.hidden * 4  # bytes of (B, S, H)
    tokens = SAMPLES * (LENGTH - 1) * 4  # one number for each token that has a target
    part = (ranks - 1) / ranks
    loss = 4 * 2 * part * tokens  # maximum, sum of exponentials, the target's logit; and a sum in backward
    if not sp:
        # forward: the embedding and two for each block; backward: two for each block and the head
        expected = {"all_reduce": (2 + 4 * CONFIG.layers) * 2 * part * hidden + loss}
    else:
        norms = (2 * CONFIG.layers + 1) * 2 * part * CONFIG.hidden * 4
        pairs = 2 * CONFIG.layers
        apart = 3 * CONFIG.layers if overlap else 0  # q, k and v, gate and up: begun one by one, not added before
        expected = {
            "reduce_scatter": (2 * pairs + 2 + apart) * part * hidden,
            # forward: before each pair and the head. Backward: the gradients after each pair, the pairs' inputs again
            # (the head's is still there), and the gradient of the table's rows
            "all_gather": (3 * pairs + 2) * part * hidden,
            "all_reduce": loss + norms,
        }
    for op, value in expected.items():
        assert received[op] == pytest.approx(value, rel=0.01), (op, received, expected)
    assert set(received) == set(expected)


def _whole_weights(plan: str) -> dict[str, Tensor]:
    engine = parallelize(tasks.gpt2(), plan, clip_norm=0.1)
    for step in range(5):
        engine.step(tasks.gpt2().batch(step))
    assert engine.state.tensor is not None
    cuts = engine.state.tensor.cuts
    return {name: p.detach().clone() for name, p in engine.module.named_parameters() if name not in cuts}


@pytest.mark.parametrize("plan", ["tp=2,dp_shard=2,zero=1", "tp=4", "tp=2,sp=true"])
def test_whole_weights_stay_the_same_on_all_ranks_of_tp(plan: str, pool: RankPool) -> None:
    first, *others = pool.run(_whole_weights, Plan.parse(plan).world_size, plan)
    assert first
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def _held(plan: str) -> int:
    return parallelize(even_decoder(), plan).memory()["parameters"] or 0


def test_each_rank_holds_its_share(pool: RankPool) -> None:
    _, totals = describe(even_decoder(), Plan.parse("tp=4"))
    for held in pool.run(_held, 4, "tp=4"):
        assert held == 4 * (totals["elements"] - totals["cut_elements"] + totals["cut_elements"] // 4)


def test_ranks_are_laid_innermost_first() -> None:
    rows, leaving = placement(Plan.parse("tp=4,pp=2,dp_shard=2"), devices=8)
    assert [row["tp"] for row in rows[:5]] == [0, 1, 2, 3, 0] and rows[4]["dp_shard"] == 1 and rows[8]["pp"] == 1
    assert rows[8]["node"] == 1 and leaving == ["pp"]
    assert placement(Plan.parse("tp=16"), devices=8)[1] == ["tp"]
    assert placement(Plan.parse("tp=3,dp_shard=4"), devices=8)[1] == ["tp", "dp_shard"]


def _told(plan: str, local: int) -> list[str]:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    try:
        return parallelize(even_decoder(), plan).notices
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_a_tp_axis_that_leaves_its_node_is_warned_of(pool: RankPool) -> None:
    assert any("leaves its node of 2 ranks" in line for line in pool.run(_told, 4, "tp=4", 2)[0])
    assert not any("leaves its node" in line for line in pool.run(_told, 4, "tp=2,dp_shard=2", 2)[0])


def _dropping_layers(plan: str) -> tuple[list[float], Tensor]:
    import module_tasks

    task = module_tasks.layer_drop_python()
    engine = parallelize(task, plan)
    losses = [engine.step(task.batch(step)).loss for step in range(6)]
    return losses, torch.cat([tensor.flatten() for _, tensor in engine.full_parameters()])


def test_ways_that_python_draws_are_the_same_on_ranks_that_share_samples(pool: RankPool) -> None:
    (losses, weights), (other_losses, other) = pool.run(_dropping_layers, 2, "tp=2")
    assert losses == other_losses and torch.equal(weights, other)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def beyond(wrong: str) -> Task:
    """A token, or a target, beyond the vocabulary in the second step."""

    def batch(step: int) -> dict[str, Tensor]:
        x, y = torch.ones(4, 6, dtype=torch.long), torch.ones(4, 6, dtype=torch.long)
        (x if wrong == "token" else y)[2, 3] = 57 if step else 1
        return {"x": x, "y": y}

    return Task(
        model=Tokens,
        batch=batch,
        inputs=lambda b: ((b["x"],), {}),
        loss=lambda o, b: (torch.nn.functional.cross_entropy(o.mT, b["y"], reduction="sum"), b["y"].numel()),
    )


def _two_steps(plan: str, wrong: str) -> None:
    task = beyond(wrong)
    engine = parallelize(task, plan)
    for step in range(2):
        engine.step(task.batch(step))  # type: ignore[misc]


@pytest.mark.parametrize("plan", ["single", "tp=2"])
def test_a_token_beyond_the_vocabulary_is_named(plan: str, pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"index 57 at \[2, 3\] .* beyond the table 'table' of 10 rows \(1 such"):
        pool.run(_two_steps, 2 if "tp" in plan else 1, plan, "token")


@pytest.mark.parametrize("plan", ["single", "tp=2"])
def test_a_target_beyond_the_classes_is_refused_where_they_are_cut_too(plan: str, pool: RankPool) -> None:
    with pytest.raises(RunError, match=r"(?i)target 57 is out of"):
        pool.run(_two_steps, 2 if "tp" in plan else 1, plan, "target")
