"""One rank of a module that tensor or pipeline parallelism cuts, rehearsed on tensors without values.

The cuts are those of a run (`engine/tensor`, `engine/cutting`). A rank's share of the weights is put into the module,
and its row of the schedule is played: nothing is sent, what would arrive is made up in the right shapes. So products,
bytes moved, messages, and the peak of live bytes are those of that very rank.

    tp   weights are shares, activations parts; collectives are noted with their sizes
    pp   F0 F1 B0 F2 B1 ...   a stage's forward and backward, its activations held as long as the schedule holds them

*What this does not do*: follow a module that looks at values while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from shardwise.comm import Axis, Ledger
from shardwise.comm.ledger import FACTORS
from shardwise.costs.layout import Layout
from shardwise.engine.cutting import Cut, cut_forward
from shardwise.engine.samples import a_few, few_samples
from shardwise.engine.tensor import derive_cuts
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.schedules import Op, Schedule, make_schedule
from shardwise.memory.live import LiveBytes
from shardwise.memory.recompute import recompute_block
from shardwise.parallel.pipeline import backward
from shardwise.parallel.pipeline.stage import StagedModule
from shardwise.parallel.tensor import Derived, TensorParallel
from shardwise.parallel.tensor.apply import see_parts
from shardwise.part import forget
from shardwise.planner.counting import Count, Trace
from shardwise.planner.routed import Values
from shardwise.planner.tracing import DTYPES, Inside, as_real, build, drop, fake_batch, one_sample, untraced, wide
from shardwise.precision import Precision
from shardwise.task import Task
from shardwise.trace.blocks import find_blocks
from shardwise.trace.deferred import Built
from shardwise.trace.deferred import build as build_deferred

ROUNDS = 2  # of micro-batches through the pipeline, after which no rank holds more than before
ALONE = Schedule("alone", 1, (0,), ((Op("F", 0, 0), Op("B", 0, 0)),))  # a micro-batch without a pipeline


@dataclass(frozen=True)
class Cuts:
    """What of a layout cuts the module itself."""

    tp: int = 1
    sp: bool = False
    tp_whole: tuple[str, ...] = ()
    pp: int = 1
    schedule: str = "none"
    microbatches: int = 1
    stages: tuple[str, ...] = ()
    recompute: str = "none"
    precision: str = "fp32"

    @classmethod
    def of(cls, layout: Layout, precision: str) -> Cuts:
        """Those of a layout; a long step is played for a few rounds of micro-batches."""
        if layout.pp == 1:
            return cls(layout.tp, layout.sp, layout.tp_whole, recompute=layout.recompute, precision=precision)
        long = layout.schedule != "gpipe"
        count = min(layout.n_micro, ROUNDS * layout.pp) if long else layout.n_micro
        if layout.n_micro % layout.pp == 0:
            count -= count % layout.pp
        return cls(layout.tp, layout.sp, layout.tp_whole, layout.pp, layout.schedule, count, layout.stages,
                   layout.recompute, precision)  # fmt: skip

    @property
    def plan(self) -> Plan:
        """As a plan."""
        values: dict[str, object] = {
            "tp": self.tp, "sp": self.sp, "tp_whole": self.tp_whole, "remat": self.recompute,
            "precision": self.precision,
        }  # fmt: skip
        if self.pp > 1:
            values |= {"pp": self.pp, "schedule": self.schedule, "microbatches": self.microbatches,
                       "stages": self.stages}  # fmt: skip
        return Plan.from_dict(values)


@dataclass
class RankTrace(Trace):
    """The trace of one rank's whole row: `peak` is that of the row, products and bytes those of one micro-batch.

    ops       (kind, stage) -> what one such op does
    wire      (kind, stage) -> what it sends over the tp axis: (op, bytes of the whole tensor) -> times
    messages  stage -> bytes that it sends on for one micro-batch
    """

    ops: dict[tuple[str, int], Trace] = field(default_factory=dict)
    wire: dict[tuple[str, int], dict[tuple[str, float], int]] = field(default_factory=dict)
    messages: dict[int, float] = field(default_factory=dict)


class Looks:
    """What all cuts of a task rest on, looked at once: its module without weights, a few samples, the cuts of tp."""

    def __init__(self, task: Task):
        self.task = task
        self._derived: dict[tuple, Derived] = {}

    @cached_property
    def built(self) -> Built:
        """The module without its weights."""
        return build_deferred(self.task.model, 0)

    @cached_property
    def few(self) -> Any:
        """The samples from which the cuts are derived."""
        return few_samples(self.task, Plan(), Axis.alone("data"), torch.device("cpu"))

    @cached_property
    def one(self) -> Any:
        """A batch of one sample."""
        return one_sample(self.task)

    def derived(self, plan: Plan) -> Derived | None:
        """The cuts of tp."""
        if plan.tp == 1:
            return None
        key = plan.tp, plan.sp, plan.tp_whole, plan.precision
        if key not in self._derived:
            self._derived[key] = derive_cuts(self.task, plan, Precision.of(plan), self.built, a_few(self.few))
        return self._derived[key]


class Shares:
    """A task under `cuts`: `ranks` tells which ranks differ, `trace` rehearses one. `RefusedPlan` as in a run."""

    def __init__(self, looks: Looks, cuts: Cuts):
        self.looks, self.task, self.cuts = looks, looks.task, cuts
        self.plan = cuts.plan
        self.schedule = ALONE
        if cuts.pp > 1:
            self.schedule = make_schedule(cuts.schedule, cuts.pp, cuts.microbatches, self.plan.stages_per_rank)
        self.derived = looks.derived(self.plan)
        self._first = self._cut() if cuts.pp > 1 else None

    def _cut(self) -> Cut:
        module = self.looks.built.module
        blocks = find_blocks(module, nested=self.task.branches == "same")
        return cut_forward(self.task, self.plan, self.looks.few, module, blocks, 0)[0]

    def cut(self, rank: int) -> Cut | None:
        """The stages, seen from a rank of the pipeline."""
        return None if self._first is None else replace(self._first, rank=rank)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(tp, pp) of the ranks that differ: with even cuts, one rank of tp stands for all."""
        alike: dict[tuple[int, ...], int] = {}
        for rank in range(self.cuts.tp):
            cuts = self.derived.cuts.values() if self.derived is not None else ()
            alike.setdefault(tuple(cut.owners.counts[rank] for cut in cuts), rank)
        return [(tp, pp) for pp in range(self.cuts.pp) for tp in alike.values()]

    def trace(self, tp: int, pp: int, sizes: Sequence[int]) -> RankTrace:
        """Rehearse a rank; `InputError` for a module that cannot be traced.

        sizes  samples of each micro-batch; the last holds for those that follow
        """
        try:
            with as_real():
                return _Rehearsal(self, tp, pp, sizes).run()
        except (InputError, RefusedPlan):
            raise
        except Exception as error:
            raise InputError(untraced(error, Inside())) from error
        finally:
            forget()


Told = list[tuple[torch.Size, torch.dtype, bool]]  # of the tensors of a message: shape, dtype, needs a gradient


class _Rehearsal:
    """One rank's module on fake tensors, and its row."""

    def __init__(self, shares: Shares, tp: int, pp: int, sizes: Sequence[int]):
        self.shares, self.task, self.rank = shares, shares.task, pp
        self.found = RankTrace(max(sizes))
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.dtype = DTYPES[shares.cuts.precision]
        self.ledger = Ledger()
        degree = shares.cuts.tp
        ranks = tuple(range(degree))
        axis = Axis("tp", degree, tp, None, ranks, sequence=shares.cuts.sp, rehearsal=self.ledger)
        self.tensor = None if shares.derived is None else TensorParallel(shares.derived, axis)
        self.sizes = [*sizes, *[sizes[-1]] * (shares.schedule.microbatches - len(sizes))]
        self.batches = {n: fake_batch(self.fake, shares.looks.one, n, self.dtype) for n in {*self.sizes}}
        self.cut = shares.cut(pp)
        self.sent: list[torch.Tensor] = []  # the last message: a rank keeps it until it sends the next

    def run(self) -> RankTrace:
        """Play the row."""
        told = {n: self._told(n) if self.cut is not None else {} for n in self.batches}
        model, staged = self._module(self.cut)
        held = self._held(model)
        self._sizes(model, held)
        live, count = LiveBytes(), Count(Trace(self.found.samples))
        rests = [*held.values(), *model.buffers(), *pytree.tree_leaves(self.batches)]
        live.count(leaf for leaf in rests if isinstance(leaf, torch.Tensor))
        base = live.now
        waiting: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]] = {}
        with self.fake, Values(self.fake) as routed, live, count:
            for op in self.shares.schedule.rows[self.rank]:
                count.trace = Trace(self.found.samples)
                self._play(op, model, staged, told[self.sizes[op.microbatch]], waiting)
                if (op.kind, op.stage) not in self.found.ops and self.sizes[op.microbatch] == self.found.samples:
                    self.found.ops[op.kind, op.stage] = count.trace
                    self.found.wire[op.kind, op.stage] = self._sent()
                self.ledger.clear()
        self.found.peak, self.found.balanced = live.peak - base, routed.assumed
        for part in self.found.ops.values():
            self.found.products.update(part.products)
            self.found.order += part.order
            self.found.attention.update(part.attention)
            self.found.conv_flops += part.conv_flops
            self.found.moved += part.moved
            self.found.kernels += part.kernels
            self.found.calls += part.calls
        return self.found

    def _play(
        self, op: Op, model: nn.Module, staged: StagedModule | None, told: dict[int, Told], waiting: dict
    ) -> None:
        last = len(self.shares.schedule.owner) - 1
        key = op.stage, op.microbatch
        if op.kind == "F":
            inbox = [(torch.empty(shape, dtype=kind), needs) for shape, kind, needs in told.get(op.stage - 1, ())]
            batch = self.batches[self.sizes[op.microbatch]]
            output = self._forward(batch, op.stage, inbox, model, staged)
            if op.stage == last:
                output = pytree.tree_map(wide, output)
                outputs = [self.task.loss(output, batch)[0]]
            else:
                outputs = list(output)
                self.found.messages[op.stage] = max(
                    self.found.messages.get(op.stage, 0.0), float(sum(t.numel() * t.element_size() for t in outputs))
                )
                self.sent = [one.detach() for one in outputs]
            del output
            waiting[key] = (outputs, staged.taken if staged is not None else [], [])
            return
        outputs, inputs, later = waiting[key]
        if op.kind == "W":
            backward.of_weights(later.pop())
            del waiting[key]
            return
        gradients: list[torch.Tensor | None] = [None]
        if op.stage < last:
            gradients = [torch.empty_like(one) if one.requires_grad else None for one in outputs]
        if op.kind == "I":
            later.append(backward.of_input(outputs, gradients, inputs))
            outputs.clear()
        else:
            backward.whole(outputs, gradients)
            del waiting[key]
        if inputs:
            self.sent = [leaf.grad for leaf in inputs if leaf.grad is not None]
        for leaf in inputs:
            leaf.grad = None

    def _forward(self, batch: Any, stage: int, inbox: list, model: nn.Module, staged: StagedModule | None) -> Any:
        def forward() -> Any:
            args, kwargs = self.task.inputs(batch)
            return model(*args, **kwargs)

        return forward() if staged is None else staged.run(stage, inbox, forward)

    def _told(self, samples: int) -> dict[int, Told]:
        """What each stage sends, from all stages in turn on one module that has everything."""
        assert self.cut is not None
        model, _ = self._module(None)
        staged = StagedModule(model, self.cut.stages, self.dtype)
        told: dict[int, Told] = {}
        with self.fake, Values(self.fake):
            for stage in self.cut.stages[:-1]:
                inbox = [
                    (torch.empty(shape, dtype=kind), needs) for shape, kind, needs in told.get(stage.index - 1, ())
                ]
                sent: Sequence[torch.Tensor] = self._forward(self.batches[samples], stage.index, inbox, model, staged)
                told[stage.index] = [(one.shape, one.dtype, one.requires_grad) for one in sent]
        forget()
        return told

    def _module(self, cut: Cut | None) -> tuple[nn.Module, StagedModule | None]:
        """The module with this rank's shares, in the order in which a run applies things."""
        model = build(self.task, self.fake, self.dtype)
        blocks = find_blocks(model, nested=self.task.branches == "same")
        absent = cut.absent if cut is not None else set()
        self._replace(model, absent)
        if self.tensor is not None:
            see_parts(model, self.tensor, absent)
        if cut is not None:
            blocks = cut.here(model, blocks)
        if self.shares.cuts.recompute != "none":
            for block in {id(b): b for b in map(model.get_submodule, blocks.paths)}.values():
                recompute_block(block, self.shares.cuts.recompute)
        self.blocks = blocks
        for parameter in model.parameters():
            if parameter.requires_grad:  # gradients are an account of their own: buckets, or shards
                parameter.register_post_accumulate_grad_hook(drop)
        return model, StagedModule(model, cut.mine, self.dtype) if cut is not None else None

    def _replace(self, model: nn.Module, absent: set[str]) -> None:
        """Shares in the place of what is cut, shapes without memory in the place of what other stages hold."""
        names = {id(param): name for name, param in model.named_parameters()}
        made: dict[str, nn.Parameter] = {}
        for child in model.modules():
            for leaf, param in list(child._parameters.items()):
                if param is None:
                    continue
                name = names[id(param)]
                cut = self.tensor.cuts.get(name) if self.tensor is not None else None
                if name not in absent and cut is None:
                    continue
                if name not in made:
                    made[name] = self._stand_in(param, name in absent, cut)
                child._parameters[leaf] = made[name]

    def _stand_in(self, param: nn.Parameter, absent: bool, cut: Any) -> nn.Parameter:
        with self.fake:
            if absent:
                value = torch.empty((), dtype=param.dtype).expand(param.shape)
                return nn.Parameter(value, requires_grad=False)
            assert self.tensor is not None
            shape = list(param.shape)
            shape[cut.dim] = cut.owners.counts[self.tensor.axis.index]
            share = nn.Parameter(torch.empty(shape, dtype=param.dtype), requires_grad=param.requires_grad)
        share.__dict__.update(param.__dict__)
        return share

    def _held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        absent = self.cut.absent if self.cut is not None else set()
        return {name: param for name, param in model.named_parameters() if name not in absent}

    def _sizes(self, model: nn.Module, held: dict[str, nn.Parameter]) -> None:
        found = self.found
        found.parameters = sum(p.numel() for p in held.values())
        found.tensors = len(held)
        found.sizes = Counter(p.numel() for p in held.values() if p.requires_grad)
        found.gradients = sum(p.numel() * p.element_size() for p in held.values() if p.requires_grad)
        found.buffers_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
        found.units = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in self.blocks.paths]
        found.rest = found.parameters - sum(found.units)

    def _sent(self) -> dict[tuple[str, float], int]:
        """What tp would have sent since the last time, by op and the mean size of its calls."""
        found: dict[tuple[str, float], int] = {}
        for (_, op, _), entry in self.ledger.entries.items():
            size = entry.received_bytes / FACTORS[op](self.shares.cuts.tp) / entry.calls
            found[op, size] = found.get((op, size), 0) + entry.calls
        return found
