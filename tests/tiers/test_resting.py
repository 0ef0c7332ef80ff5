"""State that rests by a code: a run with split masters has its bits, one with coded moments its losses, nearly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Task, parallelize
from shardwise.digest import digest
from shardwise.engine.ema import Ema
from shardwise.engine.load_weights import load_state_dict
from shardwise.errors import RefusedPlan
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.tiers import Resting, resting, subgroups
from shardwise.tiers.narrow import HALVES, ROUNDED

Bits = dict[str, Any]


def ran(name: str | Callable[[], Task], plan: str, steps: int = 3) -> Bits:
    """Take steps in small sub-groups; returns losses, and digests of weights and state."""
    torch.set_num_threads(1)
    before, subgroups.SUBGROUP_BYTES = subgroups.SUBGROUP_BYTES, 30_000
    try:
        task = getattr(tasks, name)() if isinstance(name, str) else name()
        engine = parallelize(task, plan)
        assert task.batch is not None
        out: Bits = {"losses": [engine.step(task.batch(step)).loss for step in range(steps)]}
        out["weights"] = {key: digest(value) for key, value in engine.full_parameters()}
        out["used"] = {key: digest(value) for key, value in engine.used_parameters()}
        out["state"] = {
            f"{key}/{part}": digest(value)
            for key, kept in engine.full_optimizer_state()
            for part, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        out["held"] = engine.memory()
        engine.close()
    finally:
        subgroups.SUBGROUP_BYTES = before
    return out


def same(one: Bits, other: Bits) -> bool:
    return all(one[what] == other[what] for what in ("losses", "weights", "used", "state"))


SPLIT = ["single", "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "tp=2", "pp=2", "dp_shard=2,zero=1,ep=2"]
RANKS = {"single": 1}


@pytest.mark.parametrize("layout", [SPLIT[0], SPLIT[2]])
def test_split_masters_change_no_bit(layout: str, pool: RankPool) -> None:
    assert_split(layout, "", pool)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "accumulate=2", "offload=optimizer:disk", "offload=optimizer:disk:0.4"])
@pytest.mark.parametrize("layout", SPLIT)
def test_split_masters_change_no_bit_of_any_layout(layout: str, more: str, pool: RankPool) -> None:
    assert_split(layout, more, pool)


def assert_split(layout: str, more: str, pool: RankPool) -> None:
    name = "moe" if "ep" in layout else "decoder"
    plan = ",".join(part for part in (layout if layout != "single" else "", "precision=bf16", more) if part)
    plain, split = (pool.run(ran, RANKS.get(layout, 2), name, plan + end) for end in ("", ",masters=split"))
    assert all(same(one, other) for one, other in zip(plain, split, strict=True))
    if not more:
        saved = [
            one["held"]["parameters"] - other["held"]["parameters"] for one, other in zip(plain, split, strict=True)
        ]
        assert all(size > 0 for size in saved)


@pytest.mark.long
def test_split_masters_change_no_bit_in_a_hundred_steps() -> None:
    plain, split = (ran("decoder", f"precision=bf16{end}", 100) for end in ("", ",masters=split"))
    assert same(plain, split)


def ties() -> Task:
    """A decoder whose every weight lies halfway between two in bf16, half of them reached from above."""

    def model() -> nn.Module:
        module = tasks.decoder().model()
        for param in module.parameters():
            bits = torch.full_like(param, 0, dtype=torch.int32).view(-1)
            bits += 0x3C808000 + (torch.arange(bits.numel(), dtype=torch.int32) % 64 << 16)
            sign = (torch.arange(bits.numel(), dtype=torch.int32) // 64 % 2) << 31
            param.data = (bits | sign).view(torch.float32).view(param.shape)
        return module

    return tasks.decoder().with_(model=model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.9))


def test_ties_are_on_their_side() -> None:
    plain, split = (ran(ties, f"precision=bf16{end}", 1) for end in ("", ",masters=split"))
    assert same(plain, split)


def test_replicas_and_pieces_round_alike(pool: RankPool) -> None:
    """Draws are by an element's place in the whole: under deterministic plans the bits are those of one process."""
    plans = {"dp_replicate=2": 2, "dp_shard=2,zero=1": 2, "dp_shard=2,zero=3": 2}
    ends = "deterministic=4,optimizer_state=bf16"
    alone = ran("decoder", ends)
    for layout, ranks in plans.items():
        assert all(same(one, alone) for one in pool.run(ran, ranks, "decoder", f"{layout},{ends}"))


CODED = [
    ("optimizer_state=bf16", 2.0, 1e-4), ("optimizer_state=8bit", 1 + 4 / 256, 1e-3),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "width", "bar"), CODED)
def test_coded_moments_train_nearly_the_same(plan: str, width: float, bar: float) -> None:
    plain, coded = ran("decoder", "single", 4), ran("decoder", plan, 4)
    assert plain["losses"] != coded["losses"] and plain["losses"] == pytest.approx(coded["losses"], rel=bar)
    assert coded["held"]["optimizer"] / plain["held"]["optimizer"] == pytest.approx(width / 4, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("end", ["", ",offload=optimizer:disk", ",offload=optimizer:disk:0.5"])
@pytest.mark.parametrize(("plan", "width", "bar"), CODED)
@pytest.mark.parametrize(
    "layout", ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=3", "tp=2", "pp=2", "cp=2,zero=3"]
)
def test_coded_moments_under_any_layout(
    layout: str, plan: str, width: float, bar: float, end: str, pool: RankPool
) -> None:
    plain, coded = (pool.run(ran, 2, "decoder", f"{layout}{more}", 4) for more in ("", f",{plan}{end}"))
    for one, other in zip(plain, coded, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=bar)
    assert coded[0]["used"] == coded[1]["used"] or "replicate" not in layout


class Fading(torch.optim.Optimizer):
    """SGD that keeps beside each element a number which fades by a thousandth a step."""

    def __init__(self, groups: Any):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if not self.state[param]:
                self.state[param]["kept"] = torch.linspace(1, 2, param.numel()).view(param.shape)
            self.state[param]["kept"].mul_(0.999)
            param.sub_(param.grad, alpha=0.01)


@pytest.mark.parametrize("code", ["bf16", "8bit"])
def test_what_fades_slowly_does_not_stand_still(code: str) -> None:
    """Less in a step than a code can say: each element steps down now and then, and their mean as it should."""
    torch.set_num_threads(1)
    task, steps = tasks.mlp().with_(optimizer=Fading), 40
    engine = parallelize(task, f"optimizer_state={code}")
    for step in range(steps):
        engine.step(task.batch(step))
    (kept,) = (kept["kept"] for name, kept in engine.full_optimizer_state() if name == "layers.0.weight")
    exact = torch.linspace(1, 2, kept.numel()).view(kept.shape) * 0.999**steps
    assert float((kept / exact).mean()) == pytest.approx(1, abs=4e-3)
    still = (kept.flatten() > exact.flatten() * 0.999 ** -(steps - 6)).float().mean()
    assert still < 0.06, f"{still:.0%} stand where they began"


def test_a_tier_holds_coded_bytes_and_the_same_values() -> None:
    here, there = (ran("decoder", f"optimizer_state=8bit{end}") for end in ("", ",offload=optimizer:disk"))
    assert same(here, there) and there["held"]["disk"] < 1.5 * here["held"]["optimizer"]


# --- tensors at rest


def test_a_tensor_at_rest_reads_and_writes_as_itself() -> None:
    values = torch.randn(5, 7).to(torch.bfloat16).float()
    tensor, memory = values.clone(), torch.empty(70, dtype=torch.uint8)
    rest = resting.Rest(memory, values.to("meta"), values.device, ROUNDED)
    rest.put(tensor)
    resting.lay(tensor, rest)
    assert isinstance(tensor, Resting) and torch.equal(tensor, values) and torch.equal(tensor + 1, values + 1)
    assert digest(tensor) == digest(values) and "tensor(" in repr(tensor)
    tensor.mul_(2)
    torch._foreach_add_([tensor], 1.0)
    assert torch.equal(tensor, (2 * values + 1).to(torch.bfloat16).float())
    resting.wake(tensor, torch.zeros(5, 7))
    assert type(tensor) is torch.Tensor and torch.equal(tensor, torch.zeros(5, 7))


def test_a_master_keeps_its_gradient_and_its_object() -> None:
    master = nn.Parameter(torch.randn(33))
    master.grad, before = torch.ones(33), master.detach().clone()
    weight, memory = before.to(torch.bfloat16), torch.empty(HALVES.size(33), dtype=torch.uint8)
    rest = resting.SplitRest(memory, before.to("meta"), weight)
    rest.put(master)
    resting.lay(master, rest)
    assert master.grad is not None and torch.equal(master.detach(), before)
    part = rest.part(5, before[5:16].to("meta"))
    assert torch.equal(part.take(), before[5:16])
    part.put(torch.full((11,), 1 / 3))
    assert torch.equal(master[5:16], torch.full((11,), 1 / 3)) and torch.equal(master[16:], before[16:])
    assert torch.equal(weight[5:16], torch.full((11,), 1 / 3).to(torch.bfloat16))
    resting.wake(master, rest.take())
    assert isinstance(master, nn.Parameter) and master.requires_grad and master.grad is not None


def test_an_average_changes_places_with_split_masters() -> None:
    torch.set_num_threads(1)
    task = tasks.mlp()
    engines = [parallelize(task, f"precision=bf16{end}") for end in ("", ",masters=split")]
    averages = [Ema(engine, 0.5) for engine in engines]
    for engine, average in zip(engines, averages, strict=True):
        engine.step(task.batch(0))
        average.update()
        with average.applied():
            engine.evaluate([task.batch(1)])
        engine.step(task.batch(1))
    plain, split = ({k: digest(v) for k, v in engine.full_parameters()} for engine in engines)
    assert plain == split


def loaded(plan: str) -> Bits:
    """Take a step, load other weights, take another."""
    torch.set_num_threads(1)
    task = tasks.mlp()
    engine = parallelize(task, plan)
    engine.step(task.batch(0))
    weights = {name: torch.full_like(value, 1 / 3) for name, value in engine.state_dict().items()}
    with torch.no_grad():
        load_state_dict(engine.state, weights, strict=True)
    engine.technique.publish()
    out: Bits = {"losses": [engine.step(task.batch(1)).loss]}
    out["weights"] = {key: digest(value) for key, value in engine.full_parameters()}
    return out


def test_weights_that_are_loaded_are_split(pool: RankPool) -> None:
    for layout in ("dp_replicate=2", "dp_shard=2,zero=1"):
        plain, split = (pool.run(loaded, 2, f"{layout},precision=bf16{end}") for end in ("", ",masters=split"))
        assert plain == split


# --- what is refused


def lbfgs(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([param for group in groups for param in group["params"]])


REFUSED = [
    ("optimizer_state=bf16", lbfgs, "does not give the same bits so .* leave optimizer_state out"),
    ("precision=bf16,masters=split", lbfgs, "leave masters out"),
    ("optimizer_state=8bit", lambda groups: torch.optim.SGD(groups, lr=0.1), "SGD keeps no real tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "optimizer", "message"), REFUSED)
def test_what_would_not_be_right_or_change_nothing_is_refused(plan: str, optimizer: Any, message: str) -> None:
    with pytest.raises(RefusedPlan, match=message):
        parallelize(tasks.mlp().with_(optimizer=optimizer), plan)


def every_pair() -> list[tuple[str, str]]:
    return [*product(["optimizer_state=bf16", "optimizer_state=8bit"], ["adagrad", "rmsprop"])]


@pytest.mark.long
@pytest.mark.parametrize(("plan", "name"), every_pair())
def test_other_optimizers(plan: str, name: str) -> None:
    make = {
        "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
        "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.001, momentum=0.9),
    }[name]
    plain, coded = (ran(lambda: tasks.mlp().with_(optimizer=make), end, 10) for end in ("single", plan))
    assert plain["losses"] == pytest.approx(coded["losses"], rel=0.02)
