"""zero=3 as the engine makes it, in a rehearsal: units by name, inside one another, enclosed; groups; both verbs."""

from __future__ import annotations

import pytest
import torch
from rank_memory import every_rank
from test_traced import HERE, live_peak, task_of
from torch import nn

from shardwise import Task
from shardwise.cluster import Cluster
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.planner import Constraints, simulate
from shardwise.planner import search as search_plans
from shardwise.planner.traced_layouts import traced_subject
from shardwise.planner.traced_task import Traced
from shardwise.rehearsal.cut_module import CutRehearsal, Cuts, TaskAnalysis
from shardwise.rehearsal.rank_row import trace_of
from shardwise.rehearsal.step_trace import one_sample
from shardwise.step.batching import samples_in

WIDE = 64


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Outer(nn.Module):
    """Two units inside a third one, with weights of its own beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mix = Inner(), Inner(), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.second(self.first(x)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.blocks = nn.Linear(8, WIDE), nn.ModuleList(Outer() for _ in range(3))
        self.head = nn.Linear(WIDE, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reaching(Nested):
    """The root reads a weight of a block outside its forward; the first weights are frozen, two others are one."""

    def __init__(self) -> None:
        super().__init__()
        self.lift.requires_grad_(False)
        self.blocks[2].first.up.weight = self.blocks[2].second.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.blocks[0].mix.weight.sum()


class Overwriting(Nested):
    """Each block begins with an operation that writes into what the block is given."""

    def __init__(self) -> None:
        super().__init__()
        for at in range(3):
            self.blocks[at] = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDE, WIDE))


def _task(model: type[nn.Module]) -> Task:
    return Task(model=model, loss=lambda output, batch: (output.square().sum(), len(output)),
                batch=lambda step: torch.linspace(-1, 1, 8 * 6).view(6, 8).sin())  # fmt: skip


def nested() -> Task:
    return _task(Nested)


def reaching() -> Task:
    return _task(Reaching)


def overwriting() -> Task:
    return _task(Overwriting)


def rehearsed(name: str, text: str):
    """(ledgers of every rank, the rank's rehearsal) of a plan of data ranks."""
    task, plan = task_of(name), Plan.parse(text)
    samples = samples_in(task.batch(0))
    layout = of_plan(plan, global_batch=samples, seq=1, uneven=True)
    traced = Traced(task, HERE, software("shardwise"), plan.precision, (layout.micro_batch,) * 2, cuts=True)
    ledgers = every_rank(traced, layout, samples)
    return [ledger.allocated for ledger in ledgers], traced.cut(layout, samples)[0].small


def on_rank(name: str, text: str) -> tuple[int, tuple[int, float], list[float]]:
    """Peak of live bytes; calls and bytes of FSDP2's gathers in a step; what this rank's process forecasts of all."""
    import torch.distributed as dist

    from shardwise import parallelize

    peak = live_peak(name, text, look=True)[0]
    world = dist.group.WORLD
    forecast, _ = rehearsed(name, text)
    assert dist.group.WORLD is world
    engine = parallelize(task_of(name), text)  # whose groups are those of the run
    with engine.observe() as ledger:
        engine.step(task_of(name).batch(0))
    rows = [row for (tag, op, _), row in ledger.entries.items() if (tag, op) == ("torch", "all_gather")]
    return peak, (sum(row.calls for row in rows), sum(row.received_bytes for row in rows)), forecast


CASES = [
    ("nested", "wrap=Inner"),
    ("nested", "wrap=Inner|Outer,remat=selective,accumulate=2"),
    ("nested", "wrap=blocks.*|blocks.1.first,remat=full,precision=bf16"),
    ("reaching", ""),
    ("overwriting", ""),
    ("reaching", "wrap=Outer,precision=bf16"),
]
MORE = [
    *((name, f"wrap={wrap}{more}")
      for name, wrap in (("nested", "Inner"), ("nested", "Outer"), ("nested", "Inner|Outer"), ("reaching", "Outer"))
      for more in ("", ",remat=full", ",remat=selective,accumulate=2", ",precision=bf16")),
    ("reaching", "precision=bf16"), ("reaching", "remat=full,accumulate=3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE if case not in CASES)]
)
def test_units_are_the_engines(name: str, more: str, pool) -> None:
    """Memory of every rank within 2%, and the very gathers; the same figures in a rank that has groups of its own."""
    name, text = f"test_traced_units:{name}", "dp_shard=2,zero=3" + (more and f",{more}")
    forecast, one = rehearsed(name, text)
    count, size = Plan.parse(text).accumulate, 2 if "bf16" in text else 4
    gathered = [elements for each in one.gathers.values() for elements in each]
    for rank, (peak, gathers, there) in enumerate(pool.run(on_rank, 2, name, text)):
        assert forecast[rank] == pytest.approx(peak, rel=0.02), rank
        assert gathers == (count * len(gathered), pytest.approx(count * size * sum(gathered) / 2)), rank
        assert there == forecast


def weights_after_a_step(before: bool) -> dict[str, torch.Tensor]:
    """Whole weights of a rank that has rehearsed the plan `before`, or has not."""
    from shardwise import parallelize

    name, text = "test_traced_units:nested", "dp_shard=2,zero=3"
    if before:
        rehearsed(name, text)
    engine = parallelize(task_of(name), text)
    engine.step(task_of(name).batch(0))
    return engine.state_dict()


def test_a_rank_that_forecasts_its_run_takes_it(pool) -> None:
    """What DTensor remembers of a rehearsal, whose mesh has the same ranks and names, is not what a run is given."""
    after, plain = (pool.run(weights_after_a_step, 2, before) for before in (True, False))
    for one, other in zip(after, plain, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_unit_has_what_no_unit_inside_it_has() -> None:
    """Sizes by hand: two inside, what is beside them, the rest the root's; an enclosed unit is none."""
    inner = 2 * WIDE + (WIDE * 2 * WIDE + 2 * WIDE) + (2 * WIDE * WIDE + WIDE)
    mix = WIDE * WIDE + WIDE
    for name, wrap, units in (
        ("nested", ("Inner", "Outer"), [mix, inner, inner] * 3),
        ("nested", ("blocks.1",), [mix + 2 * inner]),
        ("reaching", ("Outer",), [mix + 2 * inner, mix + 2 * inner - 2 * WIDE * WIDE]),
    ):
        task = task_of(f"test_traced_units:{name}")
        found = trace_of(
            CutRehearsal(TaskAnalysis(task, one_sample(task)), Cuts(zero=3, shard=2, wrap=wrap)), 0, 0, (2,)
        )
        assert found.units == units, (name, wrap)
        assert found.rest == found.parameters - sum(units)


def test_plan_and_simulate_agree_on_units_by_name() -> None:
    """A search that is given units forecasts what `simulate` says of its plans, which is not that of other units."""
    cluster = Cluster.parse("2 l40s")
    subject = traced_subject(nested(), cluster, software("shardwise"), 4, "fp32", ("none",))
    found: dict[tuple[str, ...], dict[str, tuple[float, float]]] = {}
    for wrap in (("Inner",), ("Outer",)):
        fixed = Constraints(fixed=(("zero", 3), ("wrap", wrap)))
        proposals = search_plans(subject, cluster, fixed, precision="fp32").proposals
        found[wrap] = {str(p.plan.with_(wrap=())): (p.forecast.step_s, p.forecast.worst.allocated) for p in proposals}
        best = proposals[0]
        assert best.plan.wrap == wrap
        alone = simulate(nested(), best.plan, cluster, global_batch=4)
        assert alone.step_s == pytest.approx(best.forecast.step_s)
        assert alone.worst.allocated == pytest.approx(best.forecast.worst.allocated)
    fine, coarse = found.values()
    assert fine.keys() == coarse.keys() and len(fine) > 1
    for text in fine:
        assert fine[text][0] != coarse[text][0] and fine[text][1] < coarse[text][1], "other messages, less memory"


def test_names_that_fit_nothing_and_models_without_modules() -> None:
    with pytest.raises(InputError, match="nothing in the module matches 'Iner'; did you mean 'Inner'"):
        simulate(nested(), "dp_shard=2,zero=3,wrap=Iner", "2 l40s", global_batch=4)
    with pytest.raises(InputError, match=r"'blocks.2.first' holds a weight that a module outside it holds too"):
        simulate(reaching(), "dp_shard=2,zero=3,wrap=Inner", "2 l40s", global_batch=4)
    with pytest.raises(RefusedPlan, match="wrap names modules, and a decoder by its numbers has none"):
        simulate("llama3-8b", "dp_shard=8,zero=3,wrap=Block", "8 h100-sxm-80gb", seq=2048, global_batch=8)


@pytest.mark.parametrize("name", ["nested", "reaching"])
def test_one_micro_batch_is_the_first_of_two(name: str) -> None:
    """A search rehearses two, and knows the peak of one."""
    task = task_of(f"test_traced_units:{name}")
    looks = TaskAnalysis(task, one_sample(task))
    for gloo in (False, True):
        one, two = (
            trace_of(CutRehearsal(looks, Cuts(zero=3, shard=4, microbatches=n, gloo=gloo)), 0, 0, (3,)) for n in (1, 2)
        )
        assert one.peak == one.first == two.first < two.peak
