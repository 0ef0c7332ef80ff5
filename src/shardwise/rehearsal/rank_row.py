"""Play one rank's row of a pipeline schedule without values, as step/pipelined runs it; for cut_module."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.comm import Axis, Ledger
from shardwise.comm.ledger import FACTORS
from shardwise.device import generators_kept
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE, inner_axes
from shardwise.layout.schedule_kinds import Op
from shardwise.memory.live import LiveBytes, resizes_told
from shardwise.mesh import overlap_from
from shardwise.parallel.expert import ExpertParallel
from shardwise.parallel.flat import Flat
from shardwise.parallel.pipeline import backward
from shardwise.parallel.pipeline.messages import Told as OfTensor
from shardwise.parallel.pipeline.stage import StagedModule
from shardwise.parallel.tensor import TensorParallel
from shardwise.part import forget
from shardwise.part.crossing import cuts_of, put_together, taken_apart
from shardwise.precision import Precision
from shardwise.rehearsal.dispatch import RehearsalMode, followed
from shardwise.rehearsal.gpu_kernels import Fused, like_gpu
from shardwise.rehearsal.known_values import Values, known_values_read
from shardwise.rehearsal.op_counts import Count
from shardwise.rehearsal.rank_module import RankModule
from shardwise.rehearsal.sharded import FakeFullShard, silent_mesh
from shardwise.rehearsal.short_rows import telling
from shardwise.rehearsal.step_trace import (
    Arrivals,
    batch_norms,
    fake_batch,
    inputs_of,
    objective,
    on_device,
)  # fmt: skip
from shardwise.rehearsal.update_trace import in_order
from shardwise.simulator.counted import Passed, RankTrace, Sent, StepTrace
from shardwise.trace.fake import Fake
from shardwise.trace.outside_reads import OutsideReads

if TYPE_CHECKING:
    from shardwise.rehearsal.cut_module import Shares


Place = tuple[int, ...]  # along each axis that cuts positions, of `inner_axes`
Beside = tuple[int, tuple[tuple[int, ...], ...]]  # place in ep; of each micro-batch, the samples of each rank there
ALIKE: Beside = (0, ())  # all have as many
Told = list[OfTensor]  # of the tensors of a message


def axes_at(plan: Plan, place: Place = (), ledger: Ledger | None = None, gloo: bool = False) -> tuple[Axis, ...]:
    """The axes that cut positions, outermost first, as the rank at `place` (by default the first) has them."""
    places = dict(enumerate(place))
    axes = [
        Axis(name, size, places.get(number, 0), None, tuple(range(size)), rehearsal=ledger, copies=gloo)
        for number, (name, size) in enumerate(inner_axes(plan.domain, **plan.along))
    ]
    least, depth = overlap_from(plan, gloo), plan.domain_depth
    axes = [replace(axis, overlap_from=least, halo_depth=depth) if axis.name in SPACE else axis for axis in axes]
    return tuple(axis for axis in axes if axis.size > 1)


class Rehearsal:
    """One rank's module on fake tensors, and its row."""

    def __init__(
        self, shares: Shares, tp: int, pp: int, sizes: Sequence[int], beside: Beside = ALIKE, place: Place = ()
    ):  # fmt: skip
        self.shares, self.task, self.rank = shares, shares.task, pp
        self.found = RankTrace(max(sizes))
        self.fake = Fake()
        self.ledger = Ledger()
        degree = shares.cuts.tp
        ranks = tuple(range(degree))
        axis = Axis("tp", degree, tp, None, ranks, sequence=shares.cuts.sp, rehearsal=self.ledger)
        self.place, self.inner = place, axes_at(shares.plan, place, self.ledger, shares.cuts.gloo)
        self.positions = None
        if shares.positions is not None:
            here = {each.name: each for each in self.inner}
            self.positions = shares.positions.over(lambda each: here[each.name])
        self.precision = Precision.of(shares.plan)
        self.count = Count(StepTrace(self.found.samples))
        self.ledger.clock = lambda: len(self.count.trace.order)
        self.tensor = None if shares.derived is None else TensorParallel(shares.derived, axis)
        place_in_ep, self.beside = beside
        group = Axis("ep", shares.cuts.ep, place_in_ep, None, tuple(range(shares.cuts.ep)), rehearsal=self.ledger)
        self.experts = ExpertParallel(shares.stacks, group)
        self.parts = RankModule(
            shares, self.fake, self.precision, self.tensor, self.experts, self.positions, self.inner
        )
        count = shares.schedule.microbatches * shares.cuts.rounds
        self.sizes = [*sizes, *[sizes[-1]] * (count - len(sizes))]
        self.batches = {n: fake_batch(self.fake, shares.looks.one, n) for n in {*self.sizes}}
        self.cut = shares.cut(pp)
        self.sent: list[torch.Tensor] = []  # messages that may be under way
        self.coming: dict[tuple[str, int], deque[tuple[int, int, int]]] = {}  # messages of a round, as in the mail
        self.begun: dict[tuple[str, int], list[torch.Tensor]] = {}  # memory of those that are awaited already
        self.resized: list[torch.UntypedStorage] = []  # since live bytes were last looked at

    def run(self, enclosed: Collection[str] = ()) -> RankTrace:
        """Play this rank's row of the schedule; returns its trace.

        enclosed  paths of blocks that are no units of zero=3; `outside` tells those that should be among them
        """
        told = {n: self._told_once(n) if self.cut is not None else {} for n in self.batches}
        model, self.blocks = self.parts.build(self.cut)
        staged = self.parts.staged(model, self.cut.mine) if self.cut is not None else None
        held = self._held(model)
        self._sizes(model, held)
        self.techniques = self._techniques(model, held, enclosed)
        held = self._held(model)
        reads = OutsideReads(model, _made_up) if self.shares.cuts.zero == 3 else None
        self.live, routed = LiveBytes(resized=self.resized), Values(self.fake)
        live = self.live
        rests = [*held.values(), *model.buffers(), *pytree.tree_leaves(self.batches)]
        live.count(leaf for leaf in rests if isinstance(leaf, torch.Tensor))
        base = live.now
        waiting: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]] = {}
        norms = batch_norms(model, self.shares.cuts.joined, self.ledger)
        follow = self.shares.cuts.follow
        draws, kernels = followed(follow), like_gpu(self.shares.cuts.fused, scores=follow or self.shares.cuts.tp > 1)
        seen = RehearsalMode(routed, live, self.count, draws, reads, fused=self.shares.cuts.fused)
        with norms, kernels, self.fake, generators_kept(), resizes_told(self.resized), seen, known_values_read():
            try:
                for at in range(self.shares.cuts.rounds):
                    self._round(at, model, staged, told, waiting)
            except Exception:
                if reads is None or not reads.units:
                    raise
        self.outside = reads.units if reads is not None else set()
        self.found.final = self.arrivals.final
        rests_here = base + self.found.shard_gradient_bytes
        self.found.peak, self.found.first = live.peak - rests_here, self.found.first - rests_here
        routed.tell(self.found)
        self.found.follows = draws is not None and draws.met
        self.found.wrote_scores = isinstance(kernels, Fused) and kernels.wrote_scores
        self.found.balanced |= bool(self.experts.stacks)  # whose exchange is rehearsed with an even load
        for part in self.found.ops.values():
            self.found.products.update(part.products)
            self.found.order += part.order
            self.found.attention.update(part.attention)
            self.found.conv_flops += part.conv_flops
            self.found.moved += part.moved
            self.found.kernels += part.kernels
            self.found.calls += part.calls
            self.found.cut_calls += part.cut_calls
        return self.found

    def _round(self, at: int, model: nn.Module, staged: StagedModule | None, told: dict, waiting: dict) -> None:
        """The row once, on the micro-batches of round `at`."""
        schedule, rounds = self.shares.schedule, self.shares.cuts.rounds
        final = schedule.last_backward(self.rank)
        sizes = self.sizes[at * schedule.microbatches :]
        row: Sequence[Op] = schedule.rows[self.rank]
        brought = schedule.brought[self.rank] if self.shares.cuts.gloo else {}
        self.coming = {way: deque(messages) for way, messages in brought.items()}
        for kind, rank in brought:
            if kind == "F":
                self._begin(kind, rank, told[sizes[0]])
        if not self.techniques and not self.shares.cuts.gloo:  # nothing is kept but what waits for its backward
            row = telling(row, sizes, len(schedule.owner))
        for place, op in enumerate(row):
            size = sizes[op.microbatch]
            self.ledger.loads = self._beside(at * schedule.microbatches + op.microbatch)
            self.count.trace = StepTrace(self.found.samples)
            if op.kind in "BW":
                for technique in self.techniques:
                    technique.start_micro_batch(last=place == final and at == rounds - 1)
            self._play(op, size, model, staged, told[size], waiting)
            if op.kind in "BW":
                with self._aside():
                    for technique in self.techniques:
                        technique.finish_micro_batch()
                self.found.first = self.found.first or self.live.peak
            gathers = [count for each in self.techniques if isinstance(each, FakeFullShard) for count in each.taken()]
            if (op.kind, op.stage) not in self.found.ops and size == self.found.samples:
                self.found.ops[op.kind, op.stage] = self.count.trace
                self.found.wire[op.kind, op.stage] = self._sent()
                self.found.arrivals[op.kind, op.stage] = self._arrived()
                self.found.overlaps[op.kind, op.stage] = self._passed()
                self.found.gathers[op.kind, op.stage] = gathers
            self.ledger.clear()

    def _beside(self, index: int) -> tuple[int, ...]:
        """Samples of a micro-batch on each rank of ep."""
        return self.beside[min(index, len(self.beside) - 1)] if self.beside else ()

    def _play(
        self, op: Op, size: int, model: nn.Module, staged: StagedModule | None, told: dict[int, Told], waiting: dict
    ) -> None:
        owner = self.shares.schedule.owner
        last, key = len(owner) - 1, (op.stage, op.microbatch)
        if op.kind == "F":
            if op.stage:
                self._await("F", owner[op.stage - 1], told)
            inbox = self._inbox(told, op.stage)
            batch = self._batch(size)
            output = self._forward(batch, op.stage, inbox, model, staged)
            if op.stage == last:
                output = self.precision.cast_outputs(output)
                outputs = [objective(self.task.loss(output, batch))]
            else:
                outputs = list(output)
                shares = [taken_apart(t.detach()) for t in outputs]
                self.found.messages[op.stage] = max(
                    self.found.messages.get(op.stage, 0.0), float(sum(t.numel() * t.element_size() for t in shares))
                )
                self._send(op.stage, op.stage + 1, outputs)
                self._begin("B", owner[op.stage + 1], told)
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
            self._await("B", owner[op.stage + 1], told)
            gradients = [torch.empty_like(one) if one.requires_grad else None for one in outputs]
        if op.kind == "I":
            later.append(backward.of_input(outputs, gradients, inputs))
            outputs.clear()
        else:
            backward.whole(outputs, gradients)
            del waiting[key]
        if inputs:
            self._send(op.stage, op.stage - 1, [leaf.grad for leaf in inputs if leaf.grad is not None])
        for leaf in inputs:
            leaf.grad = None

    def _send(self, stage: int, goal: int, tensors: list[torch.Tensor]) -> None:
        """Keep a message as the mail does: until it sends the next, or over gloo, which never says that one has
        arrived, until the step is over."""
        owner = self.shares.schedule.owner
        if owner[stage] == owner[goal]:
            return
        if not self.shares.cuts.gloo:
            self.sent.clear()
        self.sent += [taken_apart(tensor.detach()).contiguous() for tensor in tensors]

    def _await(self, kind: str, rank: int, told: dict[int, Told]) -> None:
        """A message of a rank is taken, and its next one awaited."""
        if (kind, rank) in self.coming:
            self.coming[kind, rank].popleft()
            self.begun.pop((kind, rank), None)
            self._begin(kind, rank, told)

    def _begin(self, kind: str, rank: int, told: dict[int, Told]) -> None:
        """Hold memory for a rank's next message, as `Mail._begin` does."""
        if (kind, rank) not in self.begun and self.coming.get((kind, rank)):
            start, goal, _ = self.coming[kind, rank][0]
            kept = [one for one in told[min(start, goal)] if kind == "F" or one.needs_gradient]
            self.begun[kind, rank] = [torch.empty(one.shape, dtype=one.dtype) for one in kept]

    def _batch(self, size: int) -> Any:
        """So many samples as the forward meets them: on the device, this rank's share of fields and sequences."""
        batch = on_device(self.batches[size], self.precision)
        if self.positions is None:
            return batch
        copied = torch.Tensor.clone if self.shares.cuts.fused else torch.Tensor.contiguous  # to a device, or in place
        return self.positions.cut(batch, copied)

    def _inbox(self, told: dict[int, Told], stage: int) -> list[tuple[torch.Tensor, bool]]:
        """What the stage before sends."""
        return [
            (put_together(torch.empty(one.shape, dtype=one.dtype), one.cuts, self.inner), one.needs_gradient)
            for one in told.get(stage - 1, ())
        ]

    def _forward(self, batch: Any, stage: int, inbox: list, model: nn.Module, staged: StagedModule | None) -> Any:
        def forward() -> Any:
            args, kwargs = inputs_of(self.task, batch, self.precision)
            return model(*args, **kwargs)

        return forward() if staged is None else staged.run(stage, inbox, forward)

    def _told_once(self, samples: int) -> dict[int, Told]:
        """The same for all ranks of the pipeline."""
        assert self.cut is not None
        known = self.shares.told
        key = self.place, self.tensor.axis.index if self.tensor is not None else 0, samples
        if key not in known:
            known[key] = self._told(samples)
        return known[key]

    def _told(self, samples: int) -> dict[int, Told]:
        """What each stage sends, from all stages in turn on one module that has everything."""
        assert self.cut is not None
        model, _ = self.parts.build(None)
        staged = self.parts.staged(model, self.cut.stages)
        told: dict[int, Told] = {}
        with batch_norms(model, self.shares.cuts.joined, Ledger()), self.fake, Values(self.fake):
            for stage in self.cut.stages[:-1]:
                inbox = self._inbox(told, stage.index)
                batch = self._batch(samples)
                sent: Sequence[torch.Tensor] = self._forward(batch, stage.index, inbox, model, staged)
                told[stage.index] = [
                    OfTensor(tuple(taken_apart(one).shape), one.dtype, one.requires_grad, cuts_of(one)) for one in sent
                ]
        forget()
        return told

    def _techniques(
        self, model: nn.Module, held: dict[str, nn.Parameter], enclosed: Collection[str]
    ) -> list[FakeFullShard | Flat]:  # fmt: skip
        """What owns the gradients while micro-batches run; without it they are an account of their own."""
        cuts, found = self.shares.cuts, self.found
        trained = {name: param for name, param in held.items() if param.requires_grad}
        mine = {name: param for name, param in trained.items() if name in self.experts.experts}
        rest = {name: param for name, param in trained.items() if name not in mine}
        found.experts = sum(param.numel() for param in mine.values())
        techniques: list[FakeFullShard | Flat] = []
        if cuts.zero == 3:
            units = [model.get_submodule(path) for path in self.blocks.paths if path not in enclosed]
            absent = {name for name, _ in model.named_parameters() if name not in held}
            spread = {name for name in held if name in self.experts.experts}
            with silent_mesh(self.shares.plan, cuts.shard_ranks) as mesh:
                sharded = FakeFullShard(model, units, mesh, self.precision, absent, spread, self.fake, copies=cuts.gloo)
            found.shard_elements, found.shard_gradient_bytes = sharded.held, sharded.held_gradients
            found.rows = sharded.rows
            found.units = sharded.sizes
            found.rest = found.parameters - sum(found.units)
            techniques.append(sharded)
        alone: dict[str, nn.Parameter] = {}  # in buckets that rest
        for named, ranks, played in (
            (rest, cuts.shard_ranks, cuts.zero == 2),
            (mine, cuts.shard_ranks // cuts.ep, cuts.zero >= 2 and cuts.shard_ranks > cuts.ep),
        ):
            if played and named:
                with self.fake:
                    techniques.append(self._flat(named, ranks))
            elif cuts.zero < 3 or named is mine:
                alone |= named
        self.arrivals = Arrivals(alone.values())
        return techniques

    def _flat(self, named: dict[str, nn.Parameter], ranks: int) -> Flat:
        """Gradients that are reduced after every micro-batch."""
        gloo = self.shares.cuts.gloo
        shard = Axis("dp_shard", ranks, 0, None, tuple(range(ranks)), rehearsal=Ledger(), copies=gloo)
        flat = Flat([*named.items()], shard, Axis.alone("dp_replicate"), self.precision, stage=2)
        into_bucket = flat.buckets._on_gradient

        def on_gradient(*of_bucket: Any) -> None:
            with self._aside():
                into_bucket(*of_bucket)

        vars(flat.buckets)["_on_gradient"] = on_gradient
        elements = sum(part.high - part.low for part in flat.shards)
        self.found.shard_gradient_bytes += elements * self.precision.reduce.itemsize
        return flat

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is made here is no work of the module's."""
        kept, self.count.trace = self.count.trace, StepTrace(0)
        try:
            with torch.no_grad():
                yield
        finally:
            self.count.trace = kept

    def _held(self, model: nn.Module) -> dict[str, nn.Parameter]:
        absent = self.cut.absent if self.cut is not None else set()
        return {name: param for name, param in model.named_parameters() if name not in absent}

    def _sizes(self, model: nn.Module, held: dict[str, nn.Parameter]) -> None:
        found = self.found
        found.parameters = sum(p.numel() for p in held.values())
        found.tensors = len(held)
        found.in_order = in_order(p for p in held.values() if p.requires_grad)
        found.sizes = Counter(found.in_order.values())
        found.gradients = sum(p.numel() * p.element_size() for p in held.values() if p.requires_grad)
        found.buffers_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
        found.units = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in self.blocks.paths]
        found.rest = found.parameters - sum(found.units)

    def _sent(self) -> dict[Sent, int]:
        """What the axes would have sent since the last time, by axis, op and the mean size of its calls."""
        found: dict[Sent, int] = {}
        degrees = {"tp": self.shares.cuts.tp, "ep": self.shares.cuts.ep, "data": self.shares.cuts.joined}
        degrees |= {axis.name: axis.size for axis in self.inner}
        for (_, op, axis), entry in self.ledger.entries.items():
            size = entry.received_bytes / FACTORS[op](degrees[axis]) / entry.calls
            found[axis, op, size] = found.get((axis, op, size), 0) + entry.calls
        return found

    def _passed(self) -> list[Passed]:
        """The exchanges since the last time that were under way beside operations."""
        places = {axis.name: axis.index for axis in self.inner}
        return [
            (each.axis, each.op, {rank - places[each.axis]: n for rank, n in each.came.items()}, each.start, each.stop)
            for each in self.ledger.overlaps
            if each.axis in places
        ]

    def _arrived(self) -> dict[tuple[str, str, int], int]:
        """What ranks with other positions would have sent since the last time, by axis, op and distance in ranks."""
        places = {axis.name: axis.index for axis in self.inner}
        return {
            (axis, op, source - places[axis]): size
            for (op, axis, source), size in sorted(self.ledger.arrivals.items())
            if axis in places
        }


def _made_up(weight: torch.Tensor) -> torch.Tensor:
    """The whole of a weight that lies in pieces, which nobody sends."""
    return torch.empty(weight.shape, dtype=weight.dtype)
