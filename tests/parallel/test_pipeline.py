"""Pipelines: every schedule, on modules of many kinds, equals one process; what cannot be cut is refused by name."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pipeline_tasks
import pytest
import remembering_tasks
import taken_tasks
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shardwise import Plan, Task, parallelize, verify
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.plan import SCHEDULES
from shardwise.layout.schedules import schedule_of
from shardwise.models import tasks
from shardwise.parallel.pipeline import backward
from shardwise.parallel.pipeline.cut_points import choose, find_places, make_stages
from shardwise.parallel.pipeline.lasting import conflict
from shardwise.parallel.pipeline.left_out import LeftOutResults
from shardwise.precision import Precision
from shardwise.ranks import RankPool
from shardwise.step.batching import slice_samples
from shardwise.step.forward import output_alone
from shardwise.step.train_step import dealt
from shardwise.trace.deferred import Built, build
from shardwise.trace.flow import Flow
from shardwise.trace.own_calls import OwnCalls
from shardwise.trace.recorded import trace_forward

OURS = "shardwise.models.tasks"
HERE = "pipeline_tasks"


def prove(name: str, plan: str, pool: RankPool, **options: Any) -> None:
    """Equal to one process."""
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    room = HERE if hasattr(pipeline_tasks, name) else OURS
    parity = verify(f"{room}:{name}", plan, pool=pool, timeout_s=180, **options)
    assert parity.parity, parity.text()
    assert parity.gradient_error and parity.parameter_error


# --- every schedule

COVER = [
    ("residual", "pp=2,schedule=gpipe"), ("residual", "pp=4"), ("residual", "pp=2,schedule=interleaved1f1b"),
    ("gpt2", "pp=2,schedule=zbh1,microbatches=3"), ("residual", "pp=4,schedule=zbh2"),
    ("residual", "pp=2,schedule=interleavedzb"), ("gpt2", "pp=2,schedule=zbv"),
    ("conditioned", "pp=2,schedule=dualpipev"),
    ("gpt2", "pp=2,schedule=interleaved1f1b,stages_per_rank=3,microbatches=4"),
]  # fmt: skip
WHOLE = [(name, f"pp={p},schedule={s}") for name, p, s in product(("decoder", "gpt2"), (2, 4), SCHEDULES)]


@pytest.mark.parametrize(("name", "plan"), COVER)
def test_schedules(name: str, plan: str, pool: RankPool) -> None:
    prove(name, plan, pool)


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), WHOLE)
def test_every_schedule_on_two_and_four_ranks(name: str, plan: str, pool: RankPool) -> None:
    task = getattr(tasks, name)().with_(batch=sixteen_sequences)
    plan = f"{plan},microbatches={max(Plan.parse(plan).microbatches, 8)}"
    prove_task(task, plan, pool)


def sixteen_sequences(step: int) -> dict[str, Tensor]:
    return tasks.token_batch(step, samples=17, length=9)


def prove_task(task: Task, plan: str, pool: RankPool) -> None:
    parity = verify(task, plan, pool=pool, timeout_s=180)
    assert parity.parity, parity.text()


def test_all_schedules_are_covered() -> None:
    assert {Plan.parse(plan).schedule for _, plan in COVER} == set(SCHEDULES)


# --- with data parallelism, accumulation, clipping, recompute

TOGETHER = [
    ("decoder_tied", "pp=2,dp_shard=2,zero=1,schedule=zbh1"),
    ("decoder", "pp=2,dp_shard=2,zero=3,microbatches=3,remat=full"),
    ("decoder_dropout", "pp=2,schedule=interleaved1f1b,remat=selective,stages=blocks.0|blocks.1|head"),
    ("normed", "pp=2,dp_replicate=2,schedule=zbh1,microbatches=3"), ("mlp_frozen_unused", "pp=2,microbatches=3"),
    ("reads_its_weights", "pp=2,dp_shard=2,zero=1"), ("pairs", "pp=2,dp_replicate=2"),
    ("extra_terms", "pp=2,dp_replicate=2,schedule=zbh1"), ("one_by_one", "pp=2,microbatches=2"),
]  # fmt: skip
MORE_TOGETHER = [
    ("decoder_tied", "pp=2,dp_shard=2,zero=3"), ("decoder_tied", "pp=2,dp_shard=2,zero=2,accumulate=2,microbatches=3"),
    ("decoder_tied", "pp=2,dp_replicate=2"), ("gpt2", "pp=2,dp_shard=2,zero=2,schedule=zbv"),
    ("gpt2", "pp=2,dp_shard=2,zero=3,schedule=interleaved1f1b"), ("few_samples", "pp=2,dp_replicate=2,microbatches=3"),
    ("unet_batchnorm", "pp=2,dp_replicate=2"), ("vit", "pp=2,dp_shard=2,zero=2,schedule=zbh1,microbatches=3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), TOGETHER)
def test_together(name: str, plan: str, pool: RankPool) -> None:
    prove(name, plan, pool)


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), MORE_TOGETHER)
def test_more_together(name: str, plan: str, pool: RankPool) -> None:
    prove(name, plan, pool)


@pytest.mark.parametrize("plan", ["pp=2,microbatches=3,accumulate=2", "pp=2,dp_shard=2,zero=2"])
def test_clipping_counts_tied_parameters_once(plan: str, pool: RankPool) -> None:
    prove("decoder_tied", plan, pool, clip_norm=0.05, seed=3)


# --- modules that nobody prepared

MODULES = [
    ("sequential", "pp=4,schedule=zbh1"), ("widths", "pp=2,schedule=dualpipev"), ("encoder", "pp=2"),
    ("residual", "pp=2,stages=blocks.2.1"), ("reused", "pp=3,schedule=zbh2"),
    ("reused_block", "pp=2"), ("conditioned", "pp=4"),
    ("draws_at_root", "pp=2"), ("viewed", "pp=2,schedule=zbh1,stages=blocks.0"),
    ("viewed_with_base", "pp=2,stages=blocks.0"), ("skips", "pp=4,schedule=zbh1"), ("skips_given_twice", "pp=3"),
    ("unet_group", "pp=2,schedule=zbh1"), ("kept_to_itself", "pp=2,stages=blocks.1"), ("messages", "pp=3"),
    ("kept_by_a_module", "pp=3,schedule=gpipe"), ("own_weights", "pp=3,schedule=zbh1"), ("own_weights", "pp=2,tp=2"),
    ("reads_at_places", "pp=2,stages=last"), ("reads_early", "pp=2,tp=2"), ("reads_early", "pp=2,cp=2"),
    ("messages", "pp=2,dp_shard=2,zero=3,stages=nodes.0"), ("messages", "pp=2,tp=2,stages=edges.1"),
    ("hf_t5", "pp=2,schedule=zbv"), ("writes_into_slices", "pp=2,stages=blocks.2"), ("loss_that_writes", "pp=2,tp=2"),
    ("loss_that_writes", "pp=3,schedule=zbh1"), ("routed", "pp=2"), ("reads_the_base", "pp=2"),
    ("hooked", "pp=3,schedule=zbh1"), ("hooked", "pp=2,schedule=interleaved1f1b"),
    ("hooked", "pp=2,dp_shard=2,zero=3"), ("hooked_around", "pp=2"),
    ("head_by_step", "pp=2,stages=blocks.1"), ("head_by_step", "pp=2,dp_shard=2,zero=3,stages=blocks.1"),
]  # fmt: skip
ARCHITECTURES = [name for name in vars(pipeline_tasks) if name.startswith("hf_")]


@pytest.mark.parametrize(("name", "plan"), MODULES)
def test_modules(name: str, plan: str, pool: RankPool) -> None:
    prove(name, plan, pool)


@pytest.mark.long
@pytest.mark.parametrize("plan", ["pp=2", "pp=4", "pp=2,schedule=zbv", "pp=2,dp_shard=2", "pp=4,schedule=zbh1"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, plan: str, pool: RankPool) -> None:
    prove(name, plan, pool)


# --- what cannot be cut

REFUSED = [
    ("two_layers", "pp=4", "4 stages need 3 places to cut the forward, and it has 1: '1'"),
    ("no_parameters_late", "pp=2", "leave one without a trainable parameter"),
    ("decides", "pp=4", "decides by a value that depends on parameters"),
    ("writes_parameter", "pp=2", "the forward writes into 'head.weight' what depends on parameters"),
    ("kept_by_a_module", "pp=2,stages=blocks.1", "begin at 'blocks.1': a tensor made in 'blocks.0'"),
    ("reads_the_base", "pp=2,stages=blocks.2", "two tensors share one memory"),
    ("through_numpy", "pp=2", "the loss on a few samples is NaN"),
    ("residual", "pp=2,stages=blocks.9", "stages names 'blocks.9', which is no module; did you mean 'blocks.3'?"),
    ("hooked_around", "pp=4", "None begins in '1', whose backward hook is given"),
    ("hooked_around", "pp=2,stages=1.2", "it lies in '1', whose backward hook is given"),
    ("conditioned", "pp=3,stages=blocks.2|blocks.1", "in the order in which they run"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan", "told"), REFUSED)
def test_refusals(name: str, plan: str, told: str, pool: RankPool) -> None:
    try:
        parity = verify(f"{HERE}:{name}", plan, pool=pool)
    except InputError as error:
        assert told in str(error)
        return
    assert parity.refused is not None and told in parity.refused, parity.text()


def fast_draws(task: str) -> str:
    try:
        parallelize(getattr(pipeline_tasks, task)(), "pp=2", randomness="fast")
    except RefusedPlan as refusal:
        return str(refusal)
    return ""


def test_shared_noise_needs_masks_by_place(pool: RankPool) -> None:
    assert "use randomness='global'" in pool.run(fast_draws, 2, "draws_at_root")[0]
    assert pool.run(fast_draws, 2, "encoder")[0] == ""


def joint(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for g in groups for p in g["params"]])


def lbfgs() -> Task:
    return pipeline_tasks.residual().with_(optimizer=joint)


def test_an_optimizer_over_all_tensors_is_refused(pool: RankPool) -> None:
    refused = verify("test_pipeline:lbfgs", "pp=2", pool=pool).refused
    assert refused is not None and "pipeline stages hold different ones" in refused


# --- the look at a forward


def traced(built: Built, task: Task, samples: int) -> tuple[Flow, str]:
    built.module.train()
    run = output_alone(task, Precision.of(Plan()))
    return trace_forward(built, run, slice_samples(task.batch(0), 0, samples))  # type: ignore[misc]


def places_of(name: str) -> list[str]:
    task = getattr(pipeline_tasks, name)()
    flow, _ = traced(build(task.model, 0), task, 2)
    return [place.call.path for place in find_places(flow)[0]]


def test_places() -> None:
    assert {"blocks.1", "blocks.2", "blocks.3", "head"} <= set(places_of("residual"))
    assert "head" in places_of("kept_to_itself") and "blocks.2" not in places_of("kept_to_itself")
    assert {"blocks.1", "blocks.3"} <= set(places_of("conditioned"))
    assert places_of("decides") == []


def test_stages_share_the_work_and_lose_no_parameter() -> None:
    task = tasks.decoder()
    built = build(task.model, 0)
    module = built.module
    flow, notice = traced(built, task, 2)
    other, _ = traced(built, task, 3)
    stages = make_stages(flow, other, (2, 3), choose(flow, module, 4, (), [f"blocks.{i}" for i in range(4)]))
    assert notice == ""
    assert set().union(*(s.parameters for s in stages)) == {id(p) for p in module.parameters()}
    total = sum(s.cost for s in stages)
    assert max(s.cost for s in stages) < 1.3 * total / 4
    assert [skip.path for skip in stages[3].skips][-1] == "blocks.2"


def test_tracing_leaves_the_module_as_it_was() -> None:
    task = pipeline_tasks.normed()
    built = build(task.model, 0)
    module = built.module.train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    traced(built, task, 3)
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


# --- the backward in two parts


class Mixed(nn.Module):
    """Weights used twice, scalars, an output that comes from weights alone, one that is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)])
        self.shared, self.gain, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.shared(x) * self.gain.exp()
        for layer in self.layers:
            y = layer(y)
        y = self.shared(torch.tanh(y)) + self.gain * y * self.scale
        return y, self.gain.exp() * self.scale, x * 1.0


@pytest.mark.parametrize("needs_input", [True, False])
def test_two_parts_are_the_whole(needs_input: bool) -> None:
    torch.manual_seed(0)
    module = Mixed().double()
    fired: list[str] = []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    whole, split = (x.clone().requires_grad_(needs_input) for _ in range(2))

    def outputs(x: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        made = module(x)
        return made, [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape) for o in made]

    backward.whole(*outputs(whole))
    expected = {name: param.grad.clone() for name, param in module.named_parameters()}
    module.zero_grad()
    fired.clear()
    later = backward.of_input(*outputs(split), [split] if needs_input else [])
    assert not fired and all(param.grad is None for param in module.parameters())
    backward.of_weights(later)
    assert sorted(fired) == sorted(expected), "each weight's hook fires once"
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], rtol=1e-13, atol=1e-13)
    if needs_input:
        torch.testing.assert_close(split.grad, whole.grad, rtol=1e-13, atol=1e-13)


def test_no_product_is_computed_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    x = torch.randn(5, 16, requires_grad=True)
    output = [module(x)]
    product_flops = 2 * 5 * 16 * 16 * 3
    with FlopCounterMode(display=False) as first:
        later = backward.of_input(output, [torch.ones_like(output[0])], [x])
    with FlopCounterMode(display=False) as second:
        backward.of_weights(later)
    assert first.get_total_flops() == second.get_total_flops() == product_flops


class Asked(TorchDispatchMode):
    """Refuses what ends the process: a group norm's backward in channels-last without its input's gradient."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        assert func is not torch.ops.aten.native_group_norm_backward.default or args[-1][0]
        return func(*args, **(kwargs or {}))


def test_a_group_norm_in_channels_last_is_split() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 1)).double()
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    y = [module(x)]
    expected = torch.autograd.grad(y[0].sum(), list(module.parameters()), retain_graph=True)
    with Asked():
        backward.of_weights(backward.of_input(y, [torch.ones_like(y[0])], [x]))
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))


# --- what the engine offers


def surfaces(plan: str, steps: int) -> dict[str, Any]:
    task = tasks.decoder_tied()
    engine = parallelize(task, plan, seed=4)
    start = {name: tensor.clone() for name, tensor in engine.full_parameters()}
    held_out = engine.evaluate([task.batch(50), task.batch(51)])
    results = [engine.step(task.batch(step)) for step in range(steps)]
    state = engine.state_dict()
    own = {name: p.detach().clone() for name, p in engine.module.named_parameters() if p.requires_grad}
    norms = [result.grad_norm for result in results]
    losses = [result.loss for result in results]
    samples = [result.samples for result in results]
    return {"start": start, "eval": held_out, "losses": losses, "norms": norms, "state": state, "own": own,
            "samples": samples, "notices": engine.notices}  # fmt: skip


def test_every_rank_has_the_results_and_whole_weights(pool: RankPool) -> None:
    one = pool.run(surfaces, 1, "accumulate=2,precision=fp64", 20)[0]
    ranks = pool.run(surfaces, 2, "pp=2,precision=fp64", 20)
    for rank in ranks:
        assert rank["start"].keys() == one["start"].keys()
        assert all(torch.equal(rank["start"][name], one["start"][name]) for name in one["start"])
        assert rank["eval"] == pytest.approx(one["eval"], rel=1e-12)
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-8)
        assert rank["norms"] == pytest.approx(one["norms"], rel=1e-6)
        assert rank["samples"] == one["samples"]
        assert rank["state"].keys() == one["state"].keys()
        for name in one["state"]:
            torch.testing.assert_close(rank["state"][name], one["state"][name], rtol=1e-6, atol=1e-8)
    first, last = (rank["own"] for rank in ranks)
    tied = set(first) & set(last)
    assert tied == {"embedding.weight"}, "every other weight is on one stage"
    assert torch.equal(first["embedding.weight"], last["embedding.weight"]), "both ends, bit for bit, after 20 steps"
    assert any("pipeline of 2 stages on 2 ranks, schedule 1f1b" in notice for notice in ranks[0]["notices"])


def message_bytes(plan: str) -> list[dict[str, float]]:
    task = tasks.decoder()
    engine = parallelize(task, plan)
    engine.step(task.batch(0))
    with engine.observe() as ledger:
        engine.step(task.batch(1))
    return [row for row in ledger.rows() if row["axis"] == "pp" and row["tag"] != "control"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_bytes_are_the_hidden_states_and_their_gradients(schedule: str, pool: RankPool) -> None:
    first, last = pool.run(message_bytes, 2, f"pp=2,schedule={schedule},microbatches=3")
    hidden = 7 * 10 * 32 * 4  # (samples, positions, width) in fp32, over the micro-batches together
    assert [(row["tag"], row["received_bytes"]) for row in first if row["received_bytes"]] == [
        ("gradients of hidden states", hidden)
    ]
    assert [(row["tag"], row["received_bytes"]) for row in last if row["received_bytes"]] == [("hidden states", hidden)]


def without_tags(plan: str) -> list[float]:
    """Losses where messages between two ranks cannot be told apart but by their order."""
    from shardwise.parallel.pipeline import stage_messages

    number = stage_messages.Mail._number
    stage_messages.Mail._number = lambda self, source, goal, *_: int(goal < source)  # type: ignore[method-assign]
    try:
        task = tasks.decoder()
        engine = parallelize(task, plan)
        return [engine.step(task.batch(step)).loss for step in range(3)]
    finally:
        stage_messages.Mail._number = number  # type: ignore[method-assign]


def through_host_memory(plan: str) -> list[float]:
    """Losses where every message is staged in host memory, as for a device under gloo."""
    from shardwise.comm import messages

    needs_host = messages._needs_host
    messages._needs_host = lambda tensor, axis: True
    try:
        return losses(plan)
    finally:
        messages._needs_host = needs_host


def losses(plan: str) -> list[float]:
    task = tasks.decoder()
    engine = parallelize(task, plan)
    return [engine.step(task.batch(step)).loss for step in range(3)]


def test_messages_arrive_in_their_order_without_tags(pool: RankPool) -> None:
    one = pool.run(losses, 1, "accumulate=4")[0]
    plan = "pp=2,schedule=dualpipev"
    assert pool.run(without_tags, 2, plan)[1] == pytest.approx(one, rel=1e-5)
    assert pool.run(through_host_memory, 2, plan)[0] == pytest.approx(one, rel=1e-5)


def uneven_epoch(plan: str) -> list[int]:
    task = tasks.decoder()
    engine = parallelize(task, plan)
    parts = dealt(engine.state, task.batch(0))
    return [engine.step(parts).samples, engine.step(parts[:3]).samples, engine.step(parts[:1]).samples]


def test_the_end_of_an_epoch_may_have_fewer_micro_batches(pool: RankPool) -> None:
    sizes = pool.run(uneven_epoch, 2, "pp=2,schedule=zbv,microbatches=4")
    assert sizes[0] == sizes[1] and sizes[0][0] == 7 and sizes[0][2] < sizes[0][1] < 7


def test_the_schedule_is_the_plans() -> None:
    assert schedule_of(Plan.parse("pp=2,schedule=zbv")).stages == 4


def test_a_call_keeps_its_place_when_python_has_learnt_it() -> None:
    """CPython 3.11 runs a builtin that calls back into torch in other halves of its call the more often it has run."""

    def total(x: Tensor) -> Any:
        return sum(x * n for n in (1.0, 2.0))

    def spots() -> list[tuple]:
        met: list[tuple] = []
        with OwnCalls(lambda whose, spot, name, output: met.append((name, spot)), "whose"):
            total(torch.ones(2))
        return met

    first = spots()
    assert [spots() for _ in range(40)] == [first] * 40


def test_results_that_are_left_out_share_memory_until_somebody_writes_into_it() -> None:
    leaf = SimpleNamespace(tensor=1, dtype=torch.float32, shape=(2, 3), value=None)
    call = SimpleNamespace(arguments=[0], leaves=[leaf], shapes=[(2, 3)], spec=tree_flatten(0)[1])
    skip: Any = SimpleNamespace(path="block", place=0, like=(0,), call=call, other=call, samples=(2, 4))
    results, given = LeftOutResults(torch.float32, ()), torch.zeros(2, 3)
    first, second = (results.result(skip, (), (given,), {}) for _ in range(2))
    assert first is not second and first.data_ptr() == second.data_ptr() and bool(first.isnan().all())
    second.zero_()
    third = results.result(skip, (), (given,), {})
    assert third.data_ptr() != second.data_ptr() and bool(third.isnan().all())


def test_which_cuts_have_a_stage_run_on() -> None:
    """Where the code around a cut leaves something behind it; not where a layer keeps what is its own."""

    def kept(model: type[nn.Module]) -> list[tuple[bool, str]]:
        x = torch.randn(3, remembering_tasks.WIDTH)
        flow, _ = trace_forward(build(model, 0), lambda module, batch: module(batch), x)
        return [conflict(flow, call) for call in flow.calls() if call.path in ("layers.1", "layers.2")]

    assert kept(remembering_tasks.Listed) == [(True, "")] * 2
    assert kept(remembering_tasks.Turns) == [(False, "")] * 2
    assert [why[:20] for _, why in kept(remembering_tasks.First)] == ["what one forward lea"] * 2
    assert [on for on, _ in kept(remembering_tasks.Counted)] == [True] * 2


def _evaluated(name: str, plan: str) -> float:
    task = getattr(taken_tasks, name)()
    engine = parallelize(task, plan)
    assert task.batch is not None
    total, weight = engine.evaluate([task.batch(step) for step in (3, 4)])
    engine.close()
    return float(total / weight)


@pytest.mark.parametrize("name", ["hamiltonian"])
def test_in_evaluation_gradients_go_through_stages_too(name: str, pool: RankPool) -> None:
    (alone,) = pool.run(_evaluated, 1, name, "precision=fp64")
    assert pool.run(_evaluated, 2, name, "pp=2,precision=fp64") == pytest.approx([alone, alone], rel=1e-12)
