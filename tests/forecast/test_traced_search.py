"""What a search of one's own module looks at: both axes at once, dealt experts, and what it names and leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwise import InputError, Task, plan
from shardwise.cluster import Cluster, Figure
from shardwise.costs.layout import of_plan
from shardwise.costs.memory import CONTEXT_BYTES
from shardwise.costs.software import software
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.planner import propose, traced_layouts
from shardwise.planner.candidates import Constraints, cut_layouts, data_layouts, expert_layouts
from shardwise.planner.door import layout_of
from shardwise.planner.proposal_text import first_text
from shardwise.planner.propose import search
from shardwise.planner.subject import Subject
from shardwise.planner.traced_layouts import subject_of, traced_subject
from shardwise.planner.traced_task import Traced

NODE = Cluster.parse("8 h100-sxm-80gb")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Tied(nn.Module):
    """The first block is given what the embedding gave, untouched: under tp a sum that nobody has taken yet."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def tied() -> Task:
    return Task(model=Tied, loss=_loss, batch=lambda step: torch.zeros(32, 6, dtype=torch.long), name="tied")


def subject(task: Task, batch: int) -> Subject:
    return traced_subject(task, NODE, software("shardwise"), batch, "fp32", ("none",))


def test_a_stage_may_begin_where_a_sum_of_tp_is_received() -> None:
    seen = subject(tied(), 32)
    for text in ("tp=2,pp=2,stages=blocks.0,microbatches=4", "tp=2,pp=4,stages=blocks.0|blocks.1|blocks.2"):
        assert seen.simulate(layout_of(Plan.parse(text), seen)).step_s > 0


def test_both_axes_come_after_each_alone_and_only_where_they_divide_the_ranks() -> None:
    found = [(each.tp, each.pp) for each in cut_layouts(8, 32, 8, ["none"], Constraints())]
    both = [tp > 1 and pp > 1 for tp, pp in found]
    assert any(both) and both == sorted(both)
    assert {8 % (tp * pp) for tp, pp in found} == {0}
    asked = cut_layouts(8, 32, 8, ["none"], Constraints(fixed=(("tp", 2), ("pp", 4))))
    assert {(each.tp, each.pp) for each in asked} == {(2, 4)}


def test_experts_are_dealt_inside_a_node_and_over_ranks_that_shard() -> None:
    base = list(data_layouts(8, 32, 4, ["none"]))
    assert {each.ep for each in expert_layouts(base, 4, Constraints())} == {2, 4}
    assert all(each.shard % each.ep == 0 for each in expert_layouts(base, 4, Constraints()))
    assert {each.ep for each in expert_layouts(base, 8, Constraints(fixed=(("ep", 2),)))} == {2}


def test_a_search_of_routed_experts_looks_at_dealt_ones() -> None:
    two = Cluster.parse("2 h100-sxm-80gb")
    seen = traced_subject(tasks.moe(), two, software("shardwise"), 8, "fp32", ("none",))
    assert not Traced(tied(), two, software("shardwise"), "fp32", (1, 2), True).routed
    dealt = [each for each in seen.layouts(2, Constraints(fixed=(("ep", 2), ("zero", 1)))) if each.ep == 2]
    assert dealt
    assert min(seen.simulate(each).step_s for each in dealt) > 0


def test_micro_batches_are_all_that_divide_a_small_share() -> None:
    from shardwise.planner.candidates import micro_batches

    assert micro_batches(12) == [1, 2, 3, 4, 6, 12]
    assert micro_batches(7) == [1, 7]
    assert micro_batches(384) == [1, 2, 4, 8, 16, 32, 64, 128, 384], "a large share has enough powers of two"
    assert {each.micro_batch for each in data_layouts(4, 48, 4, ["none"])} == {1, 2, 3, 4, 6, 12}


@pytest.mark.parametrize(("batch", "world"), [(7, 2), (7, 4), (13, 4), (100, 8), (3, 2), (129, 64)])
def test_a_batch_that_does_not_divide_is_dealt_as_a_run_deals_it(batch: int, world: int) -> None:
    """Each layout comes back from its plan, and no rank of it is without samples in a micro-batch."""
    from shardwise.costs.layout import of_plan
    from shardwise.planner.candidates import plan_of
    from shardwise.planner.rehearsed_sizes import dealt

    found = list(data_layouts(world, batch, 8, ["none"]))
    over_all = [each for each in found if each.dp == world]
    assert {each.zero for each in over_all} == {0, 1, 2, 3}
    for each in over_all:
        back = of_plan(plan_of(each, "bf16"), global_batch=batch, seq=1, uneven=True)
        assert (back.micro_batch, back.n_micro) == (each.micro_batch, each.n_micro)
        counts = [dealt(each, batch, rank) for rank in range(world)]
        assert max(max(row) for row in counts) == each.micro_batch
        assert sum(sum(row) for row in counts) == batch, "a rank without samples runs a stand-in"


@pytest.mark.parametrize(
    ("batch", "world", "node", "ranks"), [(64, 72, 72, {8, 64}), (64, 24, 8, {8, 16, 24}), (48, 32, 8, {16, 24, 32})]
)
def test_a_batch_is_dealt_evenly_over_the_most_ranks_that_it_divides_over(
    batch: int, world: int, node: int, ranks: set[int]
) -> None:
    """Of a node of 72 devices, 64 samples use 64: they divide over no larger part of all than 8."""
    assert {each.dp for each in data_layouts(world, batch, node, ["none"])} == ranks


def test_an_uneven_batch_counts_its_own_samples() -> None:
    task = tied()
    machine = Cluster.parse("4 h100-sxm-80gb")
    traced = traced_subject(task, machine, software("shardwise"), 7, "bf16", ("none",), cuts=False)
    proposals = search(traced, machine, precision="bf16").proposals
    best = next(each for each in proposals if each.plan.world_size == 4)
    even = traced_subject(task, machine, software("shardwise"), 8, "bf16", ("none",), cuts=False)
    assert best.forecast.flops == pytest.approx(even.simulate(best.layout).flops * 7 / 8, rel=0.02)


def deep() -> Task:
    return Task(model=lambda: nn.Sequential(*(Block(16) for _ in range(6))), loss=lambda out, batch: (out.sum(), 32),
                batch=lambda step: torch.ones(32, 64, 16), name="deep")  # fmt: skip


def test_cuts_that_cannot_pay_are_not_rehearsed_unless_they_are_asked_for() -> None:
    """Data ranks that wait for next to nothing leave nothing to gain; a batch of fewer samples than devices does."""
    one, many = wide(4096), wide(4)
    for found, samples, cut in ((one, 4096, False), (many, 4, True)):
        layouts = found.layouts(8, Constraints(most=(("tp", 2), ("pp", 1))))
        assert any(layout.tp > 1 for layout in layouts) is cut, samples
    assert any("tp, pp and ep are not looked at" in text for text in one.remarks)
    assert any(layout.tp == 2 for layout in one.layouts(8, Constraints(most=(("pp", 1),), fixed=(("tp", 2),))))


def wide(samples: int) -> Subject:
    """Products large enough to keep a device busy."""
    task = Task(model=lambda: nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), loss=lambda output, batch: (
        output.sum(), len(batch)), batch=lambda step: torch.ones(4, 128, 2048))  # fmt: skip
    return subject(task, samples)


def test_recompute_is_traced_only_where_memory_is_short() -> None:
    said: list[str] = []

    def remats(cluster: Cluster, **fixed: object) -> set[str]:
        said.clear()
        seen = traced_subject(deep(), cluster, software("shardwise"), 32, "fp32", say=said.append)
        constraints = Constraints(most=(("tp", 1), ("pp", 1)), fixed=tuple(fixed.items()), headroom=0.0)
        found = search(seen, cluster, constraints, precision="fp32")
        return {proposal.plan.remat for proposal in found.proposals}

    def traced() -> bool:
        return any("remat=full" in text for text in said)

    assert remats(NODE) == {"none"} and not traced()
    assert remats(NODE, remat="full") == {"full"} and traced()
    plain = subject(deep(), 32)
    needed = plain.memory(layout_of(Plan(dp_replicate=8), plain)).reserved + CONTEXT_BYTES
    small = replace(NODE.device, memory_gb=Figure((needed - 1) / 1e9, "assumed", "a byte too few"))
    assert "full" in remats(replace(NODE, device=small), dp_replicate=8) and traced()


def test_small_ops_on_a_gpu_take_as_long_as_the_host_needs_to_start_them() -> None:
    def seconds(op_us: float, samples: int) -> float:
        device = replace(NODE.device, op_us=Figure(op_us, "measured", "here"))
        seen = traced_subject(deep(), replace(NODE, device=device), software("shardwise"), samples, "fp32")
        return seen.simulate(layout_of(Plan(dp_replicate=1), seen)).parts["compute"]

    assert seconds(50.0, 1) == pytest.approx(5 * seconds(10.0, 1)), "of tiny ops the host is the limit"
    assert seconds(50.0, 2**22) == pytest.approx(seconds(10.0, 2**22)), "of large ones it is not"


class Scaled(nn.Module):
    """Whose weights have one element each: tp has nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.PReLU() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_is_refused_is_refused_once(monkeypatch) -> None:
    """A degree whose cuts are refused is not derived again for each recompute, stage of ZeRO and micro-batch."""
    from shardwise.rehearsal import cut_module

    asked = []
    derive = cut_module.derive_cuts

    def counted(task: Task, plan: Plan, *rest: object) -> object:
        asked.append((plan.tp, plan.sp))
        return derive(task, plan, *rest)

    monkeypatch.setattr(cut_module, "derive_cuts", counted)
    task = Task(model=Scaled, loss=lambda o, b: (o.sum(), len(o)), batch=lambda step: torch.ones(32, 6))
    found = traced_subject(task, NODE, software("shardwise"), 32, "fp32")
    assert not [layout for layout in found.layouts(8, Constraints()) if layout.tp > 1]
    assert asked and len(asked) == len(set(asked))


def test_a_layout_that_cannot_be_rehearsed_is_not_tried_with_recompute_and_zero_3(monkeypatch) -> None:
    from shardwise.errors import RefusedPlan
    from shardwise.planner import traced_task

    tried = []

    def refused(shares, tp, pp, sizes, beside=None, place=()):
        cuts = shares.cuts
        tried.append((cuts.tp, cuts.sp, cuts.pp, cuts.microbatches, cuts.zero))
        raise RefusedPlan("not this one")

    made = Traced(tied(), NODE, software("shardwise"), "fp32", (1, 2), True)
    found = subject_of(made, 32, ("selective", "full"))
    monkeypatch.setattr(traced_task, "trace_of", refused)
    assert not [
        layout for layout in found.layouts(8, Constraints(most=(("tp", 2), ("pp", 2)))) if layout.tp * layout.pp > 1
    ]
    assert tried and len(set(tried)) == len(tried)


def picks(name: str) -> Task:
    """Modules that pick by scores: the largest of each channel, rows by an index, or as many rows as were picked."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.head = nn.Linear(3, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lift(x)
            if name == "max":
                return self.head(h.max(1).values)
            index = h[..., 0].topk(2, dim=1).indices
            if name == "topk":
                return self.head(h.gather(1, index[..., None].expand(-1, -1, 16)).sum(1))
            return self.head(h + (index == 0).nonzero().shape[0])

    return Task(model=Picks, loss=lambda o, b: (o.sum(), len(o)), batch=lambda step: torch.ones(8, 5, 3))


@pytest.mark.parametrize(("name", "counts"), [("max", False), ("topk", False), ("nonzero", True)])
def test_what_picks_by_scores_is_no_router_unless_work_hangs_on_it(name: str, counts: bool) -> None:
    made = Traced(picks(name), NODE, software("shardwise"), "fp32", (1, 2), True)
    found = subject_of(made, 8, ("none",))
    forecast = found.simulate(next(iter(found.layouts(8, Constraints()))))
    assert ("routing" in forecast.basis) is counts
    if not counts:
        assert not made.routed
        assert not any("ep=" in remark for remark in made.remarks)


def test_integers_of_the_batch_that_decide_are_told() -> None:
    """How often a layer runs is what the first sample says: no other is looked at, and the forecast says so."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            for _ in range(int(times.max())):
                x = self.layer(x)
            return x

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(8, 3), torch.arange(1, 9)

    for given, told in ((lambda b: (b, {}), True), (lambda b: ((b[0], torch.ones(1, dtype=torch.long)), {}), False)):
        task = Task(model=Repeats, loss=lambda o, b: (o.sum(), len(o)), batch=batch, inputs=given)
        found = traced_subject(task, NODE, software("shardwise"), 8, "fp32", ("none",))
        forecast = found.simulate(next(iter(found.layouts(8, Constraints()))))
        assert ("batch" in forecast.basis) is told


def test_every_key_of_a_fix_counts() -> None:
    """Several in one word, as in a plan: none is dropped in silence."""
    from shardwise.cli.foresee import _fixed

    both = (("dp_shard", 8), ("zero", 3))
    assert _fixed(("dp_shard=8,zero=3",)) == _fixed(("dp_shard=8", "zero=3")) == both


class Jointly(torch.optim.SGD):
    """A step is as long as all gradients together are large."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
        for gradient in gradients:
            gradient.div_(length)
        return super().step(closure)


def test_plans_for_which_the_optimizer_would_have_too_little_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run: one that needs whole tensors has owners of them, one that needs all of them bears neither."""
    monkeypatch.setattr(traced_layouts, "WORTH", -1.0)  # all are looked at, whatever they could gain
    for optimizer, zeros, cut in (
        (torch.optim.Adafactor, {0, 1, 2, 3}, {"tp"}),
        (Jointly, {0}, set()),
        (torch.optim.AdamW, {0, 1, 2, 3}, {"tp", "pp"}),
    ):
        made = Traced(replace(deep(), optimizer=optimizer), NODE, software("shardwise"), "fp32", (1, 2), True)
        found = list(subject_of(made, 32, ("none",)).layouts(8, Constraints(most=(("tp", 2), ("pp", 2)))))
        assert {layout.zero for layout in found if layout.tp * layout.pp == 1} == zeros
        assert {"tp" for layout in found if layout.tp > 1} == cut - {"pp"}
        assert all("optimizer's update" in remark for remark in made.remarks if "left out" in remark)
        assert any("left out" in remark and "tp=2" in remark for remark in made.remarks) is not bool(cut)


def test_a_forecast_says_where_the_host_is_the_limit() -> None:
    seen = subject(deep(), 2**22)
    assert "host" not in seen.simulate(layout_of(Plan(dp_replicate=1), seen)).basis
    few = subject(deep(), 8)
    for text in ("dp_replicate=1", "tp=2", "pp=2,microbatches=4"):
        assert "10 us each (assumed)" in few.simulate(layout_of(Plan.parse(text), few)).basis["host"]


class Steps(nn.Module):
    """Products whose sums of activations weigh more than their work, once tp cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_more_ranks_of_an_axis_that_is_behind_are_not_rehearsed(monkeypatch) -> None:
    """The fastest is the one that a look at all of them finds; what was left out is told, and looked at when asked."""
    from shardwise.planner.bound import Slower

    task = Task(model=Steps, loss=lambda o, b: (o.sum(), len(o)), batch=lambda step: torch.ones(64, 32, 64))
    made = Traced(task, Cluster.parse("4 h100-sxm-80gb"), software("shardwise"), "fp32", (2, 4), True)

    def found(**fixed: object) -> tuple[set[tuple[int, int]], float]:
        seen = subject_of(made, 2**11, ("none",))
        layouts = list(seen.layouts(4, Constraints(fixed=tuple(fixed.items()))))
        return {(one.tp, one.pp) for one in layouts}, min(seen.simulate(one).step_s for one in layouts)

    few, fastest = found()
    assert few == {(1, 1), (2, 1), (1, 2)}
    assert sum("beyond 2 is not looked at" in text for text in made.remarks) == 2
    assert (4, 1) in found(tp=4)[0]
    monkeypatch.setattr(Slower, "beyond", lambda self, layout: False)
    every, really = found()
    assert {(4, 1), (2, 2), (1, 4)} <= every
    assert fastest == really


def test_an_axis_that_memory_holds_back_is_looked_at_further() -> None:
    """Degree 2 is slower, but only since its largest micro-batch does not fit; where all fit, 4 is left out."""
    from shardwise.costs.layout import Layout
    from shardwise.planner.bound import Slower
    from shardwise.simulator.forecast import Forecast

    def forecast(seconds: float, compute: float) -> Forecast:
        return Forecast(seconds, {"compute": compute}, [], 1.0, 8, 8, 1.0, 1.0)

    def beyond(last: Forecast | None, layout: Layout, hopes: float = 1.0) -> bool:
        slower = Slower(fastest=1.0, least=0.5)
        slower.note(Layout(tp=2, shard=4, micro_batch=1), forecast(2.0, 0.4 + hopes))
        slower.note(Layout(tp=2, shard=4, micro_batch=2), last)
        return slower.beyond(layout)

    four, both, sequence = Layout(tp=4, shard=2), Layout(tp=2, pp=2, shard=2), Layout(tp=2, sp=True, shard=4)
    assert beyond(forecast(1.5, 0.6), four) and beyond(forecast(1.5, 0.6), both)
    assert not beyond(None, four), "with more room its micro-batch would be larger"
    assert not beyond(forecast(1.04, 0.6), four), "as fast, nearly"
    assert beyond(forecast(1.5, 0.6), sequence), "without a part of its computing it is behind still"
    assert not beyond(forecast(1.5, 1.2), sequence), "sp may deal what was computed by all"
    assert not beyond(forecast(1.5, 0.6), Layout(pp=2, shard=4)), "another axis alone"


def test_a_first_table_is_there_before_anything_is_rehearsed(monkeypatch) -> None:
    """Data ranks as the two traces tell them, then what takes long; where even the second takes long, of the first."""
    events: list[str] = []
    first = []

    def show(proposals, looked_at: int) -> None:
        events.append("shown")
        first.append((proposals, looked_at))

    for soon, traces in ((float("inf"), 2), (0.0, 1)):
        monkeypatch.setattr(propose, "SOON_S", soon)
        events.clear()
        subject = traced_subject(tied(), NODE, software("shardwise"), 256, "fp32", say=events.append)
        found = search(
            subject, NODE, Constraints(most=(("tp", 2), ("pp", 1))), precision="fp32", say=events.append, show=show
        )
        before = events[: events.index("shown")]
        assert events.count("shown") == 1 and not any("rehearsing" in each for each in before)
        assert sum("tracing" in each for each in before) == traces and any("rehearsing" in each for each in events)
        told = {str(each.plan): each.forecast.step_s for each in found.proposals}
        for each in first[-1][0]:
            assert each.layout.zero < 3 and each.layout.tp == 1
            assert told.get(str(each.plan), each.forecast.step_s) == pytest.approx(each.forecast.step_s, rel=1e-6)
    assert first[0][1] > first[1][1] == 3, "replicas, ZeRO-1 and 2 of one micro-batch are told by its trace"
    text = first_text(*first[0])
    assert text.startswith("so far, of ") and str(first[0][0][0].plan) in text


def test_what_draws_of_one_process_cost_is_told() -> None:
    """A search says it of a module with dropout, and of none without; of a GPU's own draws there is nothing to say."""
    task = tasks.decoder_dropout()
    notes = []
    for randomness, made in (("global", task), ("fast", task), ("global", tied())):
        subject = traced_subject(made, NODE, software("shardwise"), 64, "bf16", randomness=randomness, cuts=False)
        found = search(subject, NODE, Constraints(fixed=(("zero", 0), ("remat", "none"))))
        notes.append([each for each in found.notes if each.startswith("randomness:")])
    assert [len(each) for each in notes] == [1, 0, 0]
    assert "--randomness fast" in notes[0][0]


class Adapted(nn.Module):
    """A frozen product with a narrow one beside it that is trained, as adapters (LoRA) are written."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.into, self.out_of = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.out_of(self.into(x))


def test_frozen_weights_are_neither_reduced_nor_published() -> None:
    """ZeRO-1 sends what is trained; ZeRO-3 gathers the frozen weights too, and scatters no gradients of them."""
    task = Task(
        model=lambda: nn.Sequential(*(Adapted(2048) for _ in range(4))), batch=lambda step: torch.zeros(16, 2048),
        loss=lambda out, batch: (out.square().sum(), len(out)),
    )  # fmt: skip
    subject = traced_subject(task, NODE, software("shardwise"), 16, "bf16", ("none",), cuts=False)
    named = "data-parallel communication"
    plans = ("dp_shard=8,zero=1,precision=bf16", "dp_shard=8,zero=3,precision=bf16")
    one, three = (subject.simulate(layout_of(Plan.parse(text), subject)).parts[named] for text in plans)
    assert one < 1e-3 and three > 2 * one, "64 thousand weights of 17 million"


def test_what_cannot_hold_its_weights_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rehearsed(*_: object) -> None:
        raise AssertionError("rehearsed")

    monkeypatch.setattr(Traced, "_rehearsed", rehearsed)
    wide = Task(
        model=lambda: torch.nn.Linear(100_000, 200_000, bias=False), batch=lambda step: torch.zeros(4, 100_000),
        loss=lambda y, batch: (y.sum(), len(batch)), name="wide",
    )  # fmt: skip
    asked = Constraints(fixed=(("offload", "none"),))
    with pytest.raises(InputError, match=r"needs at least 2\d\.\d GB of"):  # 40 GB of weights over two ranks
        plan(wide, "2 t4", global_batch=4, precision="fp16", constraints=asked)


@pytest.mark.parametrize(
    "text", ["dp_replicate=2", "dp_shard=2,zero=3", "tp=2", "pp=2,microbatches=2", "tp=2,dp_shard=2"]
)
def test_weights_alone_are_no_more_than_a_rank_holds(text: str) -> None:
    small = Cluster.parse("4 a100-sxm-80gb")
    small = replace(small, device=replace(small.device, memory_gb=Figure(1e-9, "given", "")))
    traced = Traced(tasks.decoder(), small, software("shardwise"), "bf16", (2, 2), True)
    layout = of_plan(Plan.parse(text), global_batch=8, seq=1, uneven=True)
    held = max(ledger.allocated for ledger in traced.ledgers(layout, 8))
    assert 0 < traced.weights_alone(layout) < held
