"""Expert parallelism: equal to one process, found without names, at the bytes that its page states."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import expert_tasks
import pytest
import torch
from test_tensor import Renamed, scramble  # noqa: F401 - `Renamed` scrambles every name

from shardwise import Plan, Task, parallelize, verify
from shardwise.comm import Axis
from shardwise.errors import RefusedPlan, RunError
from shardwise.layout.plan import SCHEDULES
from shardwise.layout.schedule_kinds import KINDS
from shardwise.models import tasks
from shardwise.models.moe import Experts, MoEConfig, MoEDecoder, Router
from shardwise.parallel.expert import find_experts
from shardwise.parallel.expert.find import read_call
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.step.forward import Forward
from shardwise.trace.deferred import build

MODELS = "shardwise.models.tasks:"
CASES = [
    (MODELS + "moe", "dp_shard=2,ep=2"), (MODELS + "moe", "dp_shard=2,ep=2,zero=0,accumulate=3"),
    (MODELS + "moe_shared", "dp_shard=4,ep=2,zero=1"),
    (MODELS + "moe_shared", "dp_replicate=2,dp_shard=2,ep=2,remat=full"),
    (MODELS + "moe", "tp=2,dp_shard=2,ep=2,zero=2"), (MODELS + "hf_mixtral", "dp_shard=4,ep=2"),
    ("expert_tasks:only_the_first", "dp_shard=2,ep=2,zero=1,remat=full"), ("expert_tasks:frozen", "dp_shard=2,ep=2"),
    ("expert_tasks:renamed", "dp_shard=4,ep=4,zero=0"), ("expert_tasks:dropout", "dp_shard=2,ep=2,remat=selective"),
    ("expert_tasks:few_samples", "dp_shard=2,ep=2,zero=2,accumulate=4"),
    ("expert_tasks:of_the_page", "dp_shard=2,ep=2"),
    (MODELS + "moe_shared", "pp=2,dp_shard=2,ep=2,zero=1,schedule=zbh1"),
    ("expert_tasks:shared_experts", "pp=2,dp_shard=2,ep=2,zero=3,accumulate=2"),  # tied over stages
    ("expert_tasks:dense_at_first", "pp=2,dp_shard=2,ep=2,stages=layers.0,zero=2,schedule=zbh2"),
]  # fmt: skip
PLANS = [
    *(f"dp_shard=2,ep=2,zero={zero}" for zero in range(4)), *(f"dp_shard=4,ep=2,zero={zero}" for zero in range(4)),
    "dp_replicate=2,dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2,ep=2,zero=1,accumulate=3", "dp_shard=4,ep=4,zero=2",
    "tp=2,dp_shard=2,ep=2", "tp=2,sp=true,dp_shard=2,ep=2,zero=1", "dp_shard=2,ep=2,remat=selective,accumulate=2",
]  # fmt: skip
STAGED = [
    *(f"pp=2,dp_shard=2,ep=2,schedule={schedule},microbatches=4,zero={zero}" for schedule in SCHEDULES
      for zero in ((2, 0) if KINDS[schedule].split else (3, 1))),
    "pp=2,dp_shard=2,ep=2,remat=full", "pp=2,dp_replicate=2,dp_shard=2,ep=2,accumulate=2",
    "pp=2,dp_shard=4,ep=2,zero=1",
    "pp=2,tp=2,dp_shard=2,ep=2,zero=1", "pp=2,tp=2,sp=true,dp_shard=2,ep=2,zero=2,schedule=zbh1",
]  # fmt: skip
LONG = [(MODELS + name, plan) for name in ("moe", "moe_shared", "hf_mixtral", "hf_qwen2_moe") for plan in PLANS + STAGED
        if not (name == "hf_qwen2_moe" and "ep=4" in plan)]  # fmt: skip
LONG += [
    (MODELS + "moe", "pp=2,dp_shard=2,ep=2"), ("expert_tasks:shared_experts", "pp=2,dp_shard=2,ep=2,zero=1"),
    ("expert_tasks:few_samples", "pp=2,dp_shard=2,ep=2,zero=2,microbatches=4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_equal_to_one_process(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(name, plan, clip_norm=0.5, pool=pool, timeout_s=120)
    assert parity.parity, parity.text()
    assert parity.float64


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), LONG)
def test_equal_to_one_process_in_full(name: str, plan: str, pool: RankPool) -> None:
    parity = verify(name, plan, clip_norm=0.5, pool=pool, timeout_s=240)
    assert parity.parity, parity.text()


@pytest.mark.long
def test_grouped_products_are_proven_in_float32(pool: RankPool) -> None:
    parity = verify("expert_tasks:grouped", "dp_shard=2,ep=2", pool=pool, timeout_s=240)
    assert parity.parity and not parity.float64, parity.text()


def without_a_weight(rows: Any, index: Any, weight: Any, *rest: Any) -> Any:
    from shardwise.parallel.expert.exchange import through_owners

    return through_owners(rows, index, weight * (1 + 1e-6 * (index == 3)), *rest)


def wrong_for_one_expert() -> Task:
    """On ranks, the pairs of one expert get a weight that is off by a millionth."""
    from shardwise.parallel.expert import expert_forward

    expert_forward.through_owners = without_a_weight
    return tasks.moe()


def right_again(task: Any) -> None:
    from shardwise.parallel.expert import exchange, expert_forward

    expert_forward.through_owners = exchange.through_owners


def test_the_proof_sees_an_expert_that_is_wrong(pool: RankPool) -> None:
    try:
        parity = verify("test_expert:wrong_for_one_expert", "dp_shard=2,ep=2", pool=pool, timeout_s=120)
    finally:
        right_again(None)
        pool.run(right_again, 2, None)
    assert not parity.parity and not parity.refused and not parity.error


# --- what is found


def found(task: Task, ranks: int = 2) -> dict[str, Any]:
    precision = Precision.of(Plan())
    alone = Axis.alone("data")
    stacks = find_experts(
        build(task.model, 0),
        task.batch(0) if task.batch is not None else None,
        lambda module, batch: Forward(task, module, precision, torch.device("cpu"), alone).local(batch),
        ranks,
        lambda tensor: tensor.dtype,
    )
    return {stack.path: stack for stack in stacks}


@pytest.mark.parametrize(
    ("make", "experts", "counters"),
    [(tasks.moe, 4, ()), (tasks.hf_mixtral, 4, ()), (tasks.hf_qwen2_moe, 6, ()), (expert_tasks.renamed, 4, ("count",)),
     (expert_tasks.grouped, 4, ("num_experts",))],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_experts_are_found_by_how_they_are_called(make: Any, experts: int, counters: tuple[str, ...]) -> None:
    stacks = found(make())
    assert [stack.experts for stack in stacks.values()] == [experts] * 2
    assert {stack.counters for stack in stacks.values()} == {counters}


def test_names_do_not_matter() -> None:
    task = tasks.hf_qwen2_moe()
    other = found(task.with_(model=lambda: Renamed(task.model())))
    plain = found(task)
    assert set(other).isdisjoint(plain)
    assert [len(stack.names) for stack in other.values()] == [len(stack.names) for stack in plain.values()]


def test_a_large_stack_is_tried_in_the_memory_of_one_expert() -> None:
    from shardwise.parallel.expert.trial_weights import random_weight

    drawn = random_weight(torch.empty(64, 256, 128, device="meta"), torch.float32, torch.Generator(), stacked=True)
    assert drawn.shape == (64, 256, 128)
    assert drawn.untyped_storage().nbytes() < 1.1 * 4 * 256 * 128
    assert not torch.equal(drawn[0], drawn[1])


def test_three_tensors_of_other_shapes_are_no_call_of_experts() -> None:
    rows, index, weight = torch.zeros(5, 6), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2)
    assert read_call((rows, index, weight), {}) is not None
    assert read_call((rows[:4], index, weight), {}) is None
    assert read_call((rows, index.float(), weight), {}) is None
    assert read_call((weight, index, weight), {}) is None, "rows and weights cannot be told apart"
    assert read_call((rows, index, weight, rows), {}) is None


REFUSED = {
    "tokens together": (partial(expert_tasks.net, expert_tasks.Together), "on other tokens"),
    "choices together": (partial(expert_tasks.net, expert_tasks.Normalised), "the token's other experts"),
    "chance": (partial(expert_tasks.net, expert_tasks.Dropping), "or on chance"),
    "experts together": (partial(expert_tasks.net, expert_tasks.Mixing), "on a slice of its 4"),
    "outside": (lambda: expert_tasks.task(expert_tasks.Outside), "used outside the forward of 'layers.0.experts'"),
    "uneven": (partial(expert_tasks.net, Experts, 5, 6, 5), "its 5 experts cannot be dealt evenly over 2"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_spread_is_refused_with_the_mechanism(why: str) -> None:
    make, reason = REFUSED[why]
    with pytest.raises(RefusedPlan, match=reason):
        found(make())


def test_adapters_of_stacked_weights_are_refused_with_what_works() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    task = tasks.hf_mixtral()
    words = (
        r"'base_layer.lora_A.default.weight' and 3 more, which train, are of all experts together\): use ep=1 \(zero=3"
    )
    with pytest.raises(RefusedPlan, match=words + ".* or adapt layers beside the experts"):
        found(task.with_(model=lambda: peft.get_peft_model(task.model(), config)))


# --- on ranks


def told(make: Any, plan: str, optimizer: Any = None) -> str:
    """What the plan is refused or ended with, on this rank."""
    task = make() if optimizer is None else make().with_(optimizer=optimizer)
    try:
        engine = parallelize(task, plan, device="cpu")
        for step in range(2):
            engine.step(task.batch(step))
    except RefusedPlan as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def adafactor(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups)


def test_refusals_before_the_first_step(pool: RankPool) -> None:
    plan = "dp_shard=2,ep=2"
    kept = pool.run(told, 2, expert_tasks.balanced_by_buffer, plan)[0]
    assert kept.startswith("RefusedPlan") and "'layers.0.bias' is computed from the samples" in kept
    counted = pool.run(told, 2, partial(expert_tasks.net, expert_tasks.Counting), plan)[0]
    assert counted.startswith("RefusedPlan")
    together = pool.run(told, 2, tasks.moe, plan, adafactor)[0]
    assert together.startswith("RefusedPlan: ep=2 leaves each rank some of the experts")


def test_ranks_that_come_to_other_experts_are_named(pool: RankPool) -> None:
    with pytest.raises(RunError, match=r"a branch differs between ranks: rank . comes to") as raised:
        pool.run(told, 2, expert_tasks.sometimes, "dp_shard=2,ep=2,zero=1")
    assert "the experts 'layers.0.experts'" in str(raised.value) and "or use ep=1" in str(raised.value)


def states(plan: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = parallelize(tasks.moe_shared(), plan, device="cpu", seed=3, check_loss=False)
    first = engine.state_dict()
    engine.step(engine.task.batch(0))
    return first, {name: tensor for name, tensor in engine.full_gradients() if tensor is not None}


def test_initial_weights_do_not_depend_on_the_plan(pool: RankPool) -> None:
    alone, gradients = states("single")
    for plan in ("dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2"):
        for state, summed in pool.run(states, Plan.parse(plan).world_size, plan):
            assert state.keys() == alone.keys()
            assert all(torch.equal(state[name], alone[name]) for name in alone)
            assert {n: g.shape for n, g in summed.items()} == {n: g.shape for n, g in gradients.items()}


def curve(plan: str) -> tuple[list[float], dict[str, int | None], torch.dtype]:
    task = tasks.moe()
    engine = parallelize(task, plan, device="cpu", clip_norm=1.0, check_loss=False)
    losses = [engine.step(task.batch(step)).loss for step in range(6)]
    expert = engine.module.get_parameter("blocks.0.experts.down")
    assert engine.evaluate([task.batch(9)])[1] > 0
    return losses, engine.memory(), expert.dtype


def held(plan: str) -> dict[str, int | None]:
    engine = parallelize(tasks.moe(), plan, device="cpu", check_loss=False)
    engine.step(engine.task.batch(0))
    return engine.memory()


def test_a_rank_holds_its_experts_alone(pool: RankPool) -> None:
    elements = {name: param.numel() for name, param in tasks.moe().model().named_parameters()}
    spread = sum(n for name, n in elements.items() if ".experts." in name)
    rest = sum(elements.values()) - spread
    for memory in pool.run(held, 2, "dp_shard=2,ep=2,zero=0"):
        assert memory["parameters"] == memory["gradients"] == 4 * (rest + spread // 2)
        assert memory["optimizer"] == pytest.approx(2 * 4 * (rest + spread // 2), rel=0.01)
    for memory in pool.run(held, 4, "dp_shard=4,ep=2,zero=3"):
        assert memory["parameters"] == pytest.approx(4 * (rest / 4 + spread / 2), rel=0.01)
        assert memory["optimizer"] == pytest.approx(2 * 4 * (rest + spread) / 4, rel=0.01)


@pytest.mark.parametrize("zero", [1, 3])
def test_bf16(zero: int, pool: RankPool) -> None:
    alone = curve("precision=bf16")
    spread = pool.run(curve, 2, f"dp_shard=2,ep=2,zero={zero},precision=bf16")
    assert spread[0][2] == torch.bfloat16
    assert spread[0][0] == spread[1][0]
    torch.testing.assert_close(torch.tensor(spread[0][0]), torch.tensor(alone[0]), rtol=2e-3, atol=0)


# --- bytes


def ledger(task: Task, plan: str) -> tuple[list[dict], float, float]:
    """(what went over the wire in the second step, pairs that came to this rank, pairs that it sent)."""
    engine = parallelize(task, plan, device="cpu", check_loss=False)
    batch = task.batch(0)
    engine.step(batch)
    each, me, sent, received = task.model().config.experts // engine.mesh.ep.size, engine.mesh.ep.index, 0, 0
    routed: list[torch.Tensor] = []
    for module in engine.module.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda m, args, out: routed.append(out[0]))
    with engine.observe() as seen:
        engine.step(batch)
    for index in routed:  # the same on other ranks is what they send: counted from their own hooks, by gathering
        owner = index.flatten() // each
        counts = torch.bincount(owner, minlength=engine.mesh.ep.size).double()
        table = torch.empty(engine.mesh.ep.size, engine.mesh.ep.size, dtype=torch.float64)
        torch.distributed.all_gather_into_tensor(table.view(-1), counts, group=engine.mesh.ep.group)
        sent += counts.sum() - counts[me]
        received += table[:, me].sum() - table[me, me]
    return seen.rows(), float(received), float(sent)


def moe_of_equal_parts() -> Task:
    return tasks.moe().with_(batch=partial(tasks.token_batch, samples=8, length=10))


@pytest.mark.parametrize("plan", ["dp_shard=2,ep=2,zero=1", "dp_shard=4,ep=2,zero=2"])
def test_bytes_are_the_closed_form(plan: str, pool: RankPool) -> None:
    task, parsed = moe_of_equal_parts(), Plan.parse(plan)
    config = task.model().config
    for rows, received, sent in pool.run(ledger, parsed.world_size, task, plan):
        by = {(row["tag"], row["axis"]): row["received_bytes"] for row in rows}
        width = 4 * config.decoder.hidden
        # forward: rows and weights come, results come back; backward: gradients of the same, the other way
        assert by["experts", "ep"] == received * (width + 4) + sent * width + received * width + sent * (width + 4)
        assert by["control", "ep"] == 2 * 8 * (config.experts // parsed.ep) * (parsed.ep - 1)
        elements = {name: param.numel() for name, param in task.model().named_parameters()}
        spread = 4 * sum(n for name, n in elements.items() if ".experts." in name) / parsed.ep
        rest = 4 * sum(n for name, n in elements.items() if ".experts." not in name)
        n, holders = parsed.dp_shard, parsed.dp_shard // parsed.ep
        assert by["gradients", "dp_shard"] == pytest.approx((n - 1) / n * rest, rel=0.01)
        held = by.get(("gradients", "expert_shard"), 0)
        assert held == pytest.approx((holders - 1) / holders * spread, rel=0.01)


def test_a_stage_sends_the_tokens_of_its_own_layers_alone(pool: RankPool) -> None:
    task, plan = moe_of_equal_parts(), "pp=2,dp_shard=2,ep=2,zero=1,microbatches=2"
    width, moved = 4 * task.model().config.decoder.hidden, 0.0
    for rows, received, sent in pool.run(ledger, 4, task, plan):
        by = {(row["tag"], row["axis"]): row["received_bytes"] for row in rows}
        assert by["experts", "ep"] == (received + sent) * (2 * width + 4)
        assert by["control", "ep"] == 2 * 8 * (4 // 2)  # counts, twice: one layer and two micro-batches
        moved += received
    alone = sum(row[1] for row in pool.run(ledger, 2, task, "dp_shard=2,ep=2,zero=1,accumulate=2"))
    assert 0 < moved == alone


# --- the reference model


def router(**changes: Any) -> Router:
    config = MoEConfig(tasks.replace(tasks.TINY_DECODER, hidden=8, heads=2), experts=4, top_k=2, **changes)
    made = Router(config)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(0))
    return made


def test_the_balance_loss_draws_tokens_from_a_crowded_expert() -> None:
    made = router(balance=1.0)
    x = torch.randn(3, 64, 8, generator=torch.Generator().manual_seed(1))
    x[..., 0] = 1.0
    with torch.no_grad():
        made.weight.zero_()
    torch.testing.assert_close(made(x)[2], torch.ones(3))  # scores are even, whatever is chosen
    with torch.no_grad():
        made.weight[0, 0] = 3.0
    terms = made(x)[2]
    assert bool((terms > 1.5).all())
    terms.sum().backward()
    assert made.weight.grad is not None
    assert made.weight.grad[0, 0] > 0, "descent lowers the crowded expert's scores"


def test_capacity_drops_the_later_tokens_of_a_sequence() -> None:
    free, tight = router(), router(capacity=0.5)
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    (index, weight, _), (same, kept, _) = free(x), tight(x)
    assert torch.equal(index, same)
    for sample in range(2):
        for expert in range(4):
            places = [(t, k) for t in range(16) for k in range(2) if index[sample, t, k] == expert]
            assert [bool(kept[sample, t, k]) for t, k in places] == [n < 4 for n in range(len(places))]
    assert torch.equal(weight[kept > 0], kept[kept > 0])


def test_bias_rows_move_against_what_their_experts_had_too_much() -> None:
    task = tasks.moe_shared()
    engine = parallelize(task, "single", device="cpu")
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters() if n.endswith("router.bias")}
    counts: list[torch.Tensor] = []
    made = engine.module.blocks[0].router
    assert isinstance(made, Router)
    hook = made.register_forward_hook(lambda m, a, out: counts.append(torch.bincount(out[0].flatten(), minlength=8)))
    result = engine.step(task.batch(0))
    hook.remove()
    moved = made.bias.detach()[0] - before["blocks.0.router.bias"][0]
    excess = counts[0] - counts[0].float().mean()
    torch.testing.assert_close(moved, -1e-2 * excess.sign(), rtol=1e-3, atol=1e-6)
    assert result.extras["balance"] == 0.0, "a gradient and no value"


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k=5 must lie between 1 and experts=4"):
        MoEConfig(experts=4, top_k=5)
    with pytest.raises(ValueError, match="more than the context"):
        MoEDecoder(MoEConfig())(torch.zeros(1, 300, dtype=torch.int64))


def test_whole_experts_are_saved(pool: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pool.run(save, 2, str(tmp_path / "spread"))
    MoEDecoder(tasks.moe().model().config).load_state_dict(load_file(tmp_path / "spread"), strict=True)


def save(path: str) -> None:
    engine = parallelize(tasks.moe(), "dp_shard=2,ep=2", device="cpu")
    engine.step(engine.task.batch(0))
    engine.save_weights(path)
