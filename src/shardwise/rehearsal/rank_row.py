"""Runs one rank's row of a pipeline schedule on fake tensors, as step/pipelined runs it (`trace_of`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.comm import Axis, Ledger
from shardwise.comm.ledger import FACTORS
from shardwise.device import generators_kept
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.schedule_kinds import Op
from shardwise.memory.live import LiveBytes, resizes_told
from shardwise.parallel.expert import ExpertParallel
from shardwise.parallel.flat import Flat
from shardwise.parallel.pipeline import backward
from shardwise.parallel.pipeline.stage import StagedModule
from shardwise.parallel.pipeline.stage_messages import TensorSpec
from shardwise.parallel.tensor import TensorParallel
from shardwise.part import forget
from shardwise.part.crossing import cuts_of, put_together, taken_apart
from shardwise.precision import Precision
from shardwise.rehearsal.cut_module import ALIKE, Beside, CutRehearsal, MessageSpec, Place, axes_at, telling
from shardwise.rehearsal.fully_sharded import FakeFullShard, silent_mesh
from shardwise.rehearsal.gpu_kernels import Fused, like_gpu
from shardwise.rehearsal.op_counts import Count
from shardwise.rehearsal.peak_windows import PeakWindows
from shardwise.rehearsal.rank_module import RankModule
from shardwise.rehearsal.reduced_buckets import rehearsed_buckets
from shardwise.rehearsal.routed_rows import RoutedRows
from shardwise.rehearsal.step_trace import (
    Arrivals,
    ModulePath,
    batch_norms,
    fake_batch,
    in_run_dtype,
    inputs_of,
    note_sizes,
    objective,
    untraced,
)  # fmt: skip
from shardwise.rehearsal.trace_mode import RehearsalMode, followed
from shardwise.rehearsal.workspaces import TracedValues
from shardwise.simulator.counted import Passed, RankTrace, Sent, StepTrace
from shardwise.trace.fake import Fake
from shardwise.trace.known_values import as_real, known_values_read, unpadded
from shardwise.trace.outside_reads import OutsideReads


class Rehearsal:
    """Runs the row of one rank (`tp`, `pp`: its indexes; the others as in `trace_of`) on fake tensors, by `run`."""

    def __init__(
        self, shares: CutRehearsal, tp: int, pp: int, sizes: Sequence[int], beside: Beside = ALIKE, place: Place = ()
    ):  # fmt: skip
        self.shares, self.task, self.rank = shares, shares.task, pp
        self.trace = RankTrace(max(sizes))
        self.fake = Fake()
        self.ledger = Ledger()
        degree = shares.cuts.tp
        ranks = tuple(range(degree))
        axis = Axis("tp", degree, tp, None, ranks, sequence=shares.cuts.sp, rehearsal=self.ledger)
        self.place, self.inner = place, axes_at(shares.plan, place, self.ledger, shares.cuts.gloo)
        self.positions = None
        if shares.positions is not None:
            here = {inner.name: inner for inner in self.inner}
            self.positions = shares.positions.over(lambda inner: here[inner.name])
        self.precision = Precision.of(shares.plan)
        self.count = Count(StepTrace(self.trace.samples))
        # start and end of an overlapped exchange are noted as the number of operations done by then
        self.ledger.clock = lambda: len(self.count.trace.order)
        self.tensor = None if shares.derived is None else TensorParallel(shares.derived, axis)
        count = shares.schedule.microbatches * shares.cuts.rounds
        self.sizes = [*sizes, *[sizes[-1]] * (count - len(sizes))]
        self.batches = {n: fake_batch(self.fake, shares.looks.sample, n) for n in {*self.sizes}}
        data_place, self.beside = beside
        self.routed = RoutedRows.of(shares.cuts, data_place, place, shares.positions, self.batches[sizes[0]])
        degree = shares.cuts.ep
        group = Axis("ep", degree, self.routed.index, None, tuple(range(degree)), rehearsal=self.ledger)
        self.experts = ExpertParallel(shares.stacks, group)
        self.parts = RankModule(
            shares, self.fake, self.precision, self.tensor, self.experts, self.positions, self.inner
        )
        self.cut = shares.cut(pp)
        self.sent: list[torch.Tensor] = []  # messages that may not have arrived yet
        self.coming: dict[tuple[str, int], deque[tuple[int, int, int]]] = {}  # see `Schedule.brought`
        self.begun: dict[tuple[str, int], list[torch.Tensor]] = {}  # receive buffers, by ("F" or "B", sender)
        self.resized: list[torch.UntypedStorage] = []  # storages resized since live bytes were last read

    def run(self, enclosed: Collection[str] = ()) -> RankTrace:
        """Runs this rank's row and returns its trace.

        enclosed  paths of blocks that are no units of zero=3; `outside` then names further ones, if any
        """
        messages_by_size = {n: self._sent_by_stage(n) if self.cut is not None else {} for n in self.batches}
        model, self.blocks = self.parts.build(self.cut)
        staged = self.parts.staged(model, self.cut.mine) if self.cut is not None else None
        params = self._params_here(model)
        note_sizes(self.trace, model, params.values(), self.blocks.paths)
        self.techniques = self._techniques(model, params, enclosed)
        # zero=3 has replaced the parameters by shards
        params = self._params_here(model)
        reads = OutsideReads(model, _made_up) if self.shares.cuts.sharded.weights else None
        self.live = live = LiveBytes(resized=self.resized)
        routed, self.windows = TracedValues(self.fake), PeakWindows(live, model, self.blocks.paths)
        rests = [*params.values(), *model.buffers(), *pytree.tree_leaves(self.batches)]
        live.count(leaf for leaf in rests if isinstance(leaf, torch.Tensor))
        base = live.now
        self.arrivals.live = live if self.shares.cuts.gradients == "as_made" else None
        waiting: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]] = {}
        norms, follow = batch_norms(model, self.shares.cuts.joined, self.ledger), self.shares.cuts.follow
        draws, kernels = followed(follow), like_gpu(self.shares.cuts.fused, scores=follow or self.shares.cuts.tp > 1)
        seen = RehearsalMode(routed, live, self.count, draws, reads, fused=self.shares.cuts.fused)
        resizes = resizes_told(self.resized)
        with norms, kernels, self.fake, generators_kept(), resizes, seen, known_values_read(), unpadded():
            try:
                for turn in range(self.shares.cuts.rounds):
                    self._round(turn, model, staged, messages_by_size, waiting)
            except Exception:
                # if a unit's weights were read while it does not run, `trace_of` tries again without that unit
                if reads is None or not reads.units:
                    raise
        self.outside = reads.units if reads is not None else set()
        self.trace.arrived = [(place, live_then - base) for place, live_then in self.arrivals.moments]
        if self.parts.activations is not None:  # of all micro-batches, but a trace is of one
            put = self.parts.activations.put_bytes()
            self.trace.put = {tier: size // len(self.sizes) for tier, size in put.items()}
        # peaks exclude weights, buffers, batches and gradients at rest, which a forecast adds itself
        rests_here = base + self.trace.shard_gradient_bytes
        self.windows.tell(self.trace, rests_here)
        routed.tell(self.trace)
        self.trace.follows = draws is not None and draws.met
        self.trace.wrote_scores = isinstance(kernels, Fused) and kernels.wrote_scores
        self.trace.balanced |= bool(self.experts.stacks)  # their all-to-all is rehearsed with even load
        for part in self.trace.ops.values():
            self.trace.products.update(part.products)
            self.trace.order += part.order
            self.trace.attention.update(part.attention)
            self.trace.conv_flops += part.conv_flops
            self.trace.moved += part.moved
            self.trace.kernels += part.kernels
            self.trace.calls += part.calls
            self.trace.cut_calls += part.cut_calls
        return self.trace

    def _round(
        self, turn: int, model: nn.Module, staged: StagedModule | None, messages_by_size: dict, waiting: dict
    ) -> None:
        """Runs the row once, on the micro-batches of round `turn`; `staged`: `model` by stages, None if pp=1.

        messages_by_size  samples of a micro-batch -> {stage: spec of the message that it sends}
        waiting           (stage, micro-batch) -> (outputs, inputs, [what W needs]), kept until their backward
        """
        schedule, rounds = self.shares.schedule, self.shares.cuts.rounds
        final = schedule.last_backward(self.rank)
        sizes = self.sizes[turn * schedule.microbatches :]
        row: Sequence[Op] = schedule.rows[self.rank]
        brought = schedule.brought[self.rank] if self.shares.cuts.gloo else {}
        self.coming = {way: deque(messages) for way, messages in brought.items()}
        # activations are awaited from the start, gradients once the forward's output is sent (`_play_forward`)
        for kind, rank in brought:
            if kind == "F":
                self._begin(kind, rank, messages_by_size[sizes[0]])
        if not self.techniques and not self.shares.cuts.gloo:  # then the peak comes early
            row = telling(row, sizes, len(schedule.owner))
        for place, op in enumerate(row):
            size = sizes[op.microbatch]
            self.ledger.loads = self._loads(turn * schedule.microbatches + op.microbatch)
            self.count.trace = StepTrace(self.trace.samples)
            # B and W make gradients of weights for the techniques; I makes none
            if op.kind in "BW":
                for technique in self.techniques:
                    technique.start_micro_batch(last=place == final and turn == rounds - 1)
            if op.kind == "F":
                self._play_forward(op, size, model, staged, messages_by_size[size], waiting)
            else:
                self._play_backward(op, messages_by_size[size], waiting)
            if op.kind in "BW":
                with self._aside():
                    for technique in self.techniques:
                        technique.finish_micro_batch()
                self.windows.tell_first(self.trace)
            gathers = [n for zero3 in self.techniques if isinstance(zero3, FakeFullShard) for n in zero3.taken()]
            # the first op of a kind on a largest micro-batch stands for all ops of that kind
            if (op.kind, op.stage) not in self.trace.ops and size == self.trace.samples:
                self.trace.ops[op.kind, op.stage] = self.count.trace
                self.trace.wire[op.kind, op.stage] = self._sent()
                self.trace.arrivals[op.kind, op.stage] = self._arrived()
                self.trace.overlaps[op.kind, op.stage] = self._passed()
                self.trace.gathers[op.kind, op.stage] = gathers
            self.ledger.clear()

    def _loads(self, index: int) -> tuple[int, ...]:
        """Returns numbers in proportion to the tokens on each rank of ep in micro-batch `index`; () if equal."""
        return self.routed.loads(self.beside[min(index, len(self.beside) - 1)] if self.beside else ())

    def _play_forward(
        self,
        op: Op,
        size: int,
        model: nn.Module,
        staged: StagedModule | None,
        messages: dict[int, MessageSpec],
        waiting: dict,
    ) -> None:
        """Runs an F: receives, runs the stage, sends. `messages`: those of `size` samples; `waiting`: see `_round`."""
        owner = self.shares.schedule.owner
        if op.stage:
            self._await("F", owner[op.stage - 1], messages)
        inbox = self._inbox(messages, op.stage)
        batch = self._batch(size)
        output = self._forward(batch, op.stage, inbox, model, staged)
        if op.stage == len(owner) - 1:
            output = self.precision.cast_outputs(output)
            outputs = [objective(self.task.loss(output, batch))]
        else:
            outputs = list(output)
            shares = [taken_apart(t.detach()) for t in outputs]
            self.trace.messages[op.stage] = max(
                self.trace.messages.get(op.stage, 0.0), float(sum(t.numel() * t.element_size() for t in shares))
            )
            self._send(op.stage, op.stage + 1, outputs)
            self._begin("B", owner[op.stage + 1], messages)
        del output  # a run, too, keeps only what backward needs
        waiting[op.stage, op.microbatch] = (outputs, staged.taken if staged is not None else [], [])

    def _play_backward(self, op: Op, messages: dict[int, MessageSpec], waiting: dict) -> None:
        """Runs a B (full backward), I (gradients of inputs) or W (then of weights). `waiting`: see `_round`."""
        owner, key = self.shares.schedule.owner, (op.stage, op.microbatch)
        outputs, inputs, later = waiting[key]
        if op.kind == "W":
            backward.of_weights(later.pop())
            del waiting[key]
            return
        gradients: list[torch.Tensor | None] = [None]
        # the last stage starts from its loss and receives no gradient
        if op.stage < len(owner) - 1:
            self._await("B", owner[op.stage + 1], messages)
            gradients = [torch.empty_like(output) if output.requires_grad else None for output in outputs]
        if op.kind == "I":
            later.append(backward.of_input(outputs, gradients, inputs))
            outputs.clear()  # W uses the graph in `later`, and the outputs can go
        else:
            backward.whole(outputs, gradients)
            del waiting[key]
        if inputs:
            self._send(op.stage, op.stage - 1, [leaf.grad for leaf in inputs if leaf.grad is not None])
        for leaf in inputs:
            leaf.grad = None

    def _send(self, stage: int, goal: int, tensors: list[torch.Tensor]) -> None:
        """Holds the memory of a message from stage `stage` to `goal` until the next one is sent, as `Mail` does.

        With gloo, which never says that a message has arrived, until the step is over.
        """
        owner = self.shares.schedule.owner
        if owner[stage] == owner[goal]:
            return  # this rank runs both stages
        if not self.shares.cuts.gloo:
            self.sent.clear()
        self.sent += [taken_apart(tensor.detach()).contiguous() for tensor in tensors]

    def _await(self, kind: str, rank: int, messages: dict[int, MessageSpec]) -> None:
        """Frees the buffer of the oldest message from `rank` and makes one for its next; `kind`: as in `coming`."""
        if (kind, rank) in self.coming:
            self.coming[kind, rank].popleft()
            self.begun.pop((kind, rank), None)
            self._begin(kind, rank, messages)

    def _begin(self, kind: str, rank: int, messages: dict[int, MessageSpec]) -> None:
        """Allocates the receive buffers for the next message from `rank`, if one is due, as `Mail._begin` does."""
        if (kind, rank) not in self.begun and self.coming.get((kind, rank)):
            start, goal, _ = self.coming[kind, rank][0]
            awaited = [sent for sent in messages[min(start, goal)] if kind == "F" or sent.needs_gradient]
            self.begun[kind, rank] = [torch.empty(sent.shape, dtype=sent.dtype) for sent in awaited]

    def _batch(self, size: int) -> Any:
        """Returns a batch of `size` samples as the forward gets it, with this rank's tile or positions alone."""
        batch = in_run_dtype(self.batches[size], self.precision)
        if self.positions is None:
            return batch
        copied = torch.Tensor.clone if self.shares.cuts.fused else torch.Tensor.contiguous  # GPU: a copy in any case
        return self.positions.cut(batch, copied)

    def _inbox(self, messages: dict[int, MessageSpec], stage: int) -> list[tuple[torch.Tensor, bool]]:
        """Returns (made-up tensor, whether it needs a gradient) for each tensor that the stage before `stage` sends."""
        return [
            (put_together(torch.empty(sent.shape, dtype=sent.dtype), sent.cuts, self.inner), sent.needs_gradient)
            for sent in messages.get(stage - 1, ())
        ]

    def _forward(self, batch: Any, stage: int, inbox: list, model: nn.Module, staged: StagedModule | None) -> Any:
        """Returns the output of `stage` for a micro-batch, or of the whole model if `staged` is None."""

        def forward() -> Any:
            args, kwargs = inputs_of(self.task, batch, self.precision)
            return model(*args, **kwargs)

        return forward() if staged is None else staged.run(stage, inbox, forward)

    def _sent_by_stage(self, samples: int) -> dict[int, MessageSpec]:
        """Returns {stage: spec of its message} for a micro-batch; cached, since all pipeline ranks have the same."""
        assert self.cut is not None
        cache = self.shares.sent_by_stage
        key = self.place, self.tensor.axis.index if self.tensor is not None else 0, samples
        if key not in cache:
            cache[key] = self._rehearse_stages(samples)
        return cache[key]

    def _rehearse_stages(self, samples: int) -> dict[int, MessageSpec]:
        """Runs all stages in turn on an unstaged module; returns {stage: spec of the message that it sends}."""
        assert self.cut is not None
        model, _ = self.parts.build(None)
        staged = self.parts.staged(model, self.cut.stages)
        messages: dict[int, MessageSpec] = {}
        # a ledger and values of its own, since nothing of this run of all stages belongs to the rank's trace
        with batch_norms(model, self.shares.cuts.joined, Ledger()), self.fake, TracedValues(self.fake), unpadded():
            for stage in self.cut.stages[:-1]:
                inbox = self._inbox(messages, stage.index)
                batch = self._batch(samples)
                sent: Sequence[torch.Tensor] = self._forward(batch, stage.index, inbox, model, staged)
                messages[stage.index] = [
                    TensorSpec(tuple(taken_apart(t).shape), t.dtype, t.requires_grad, cuts_of(t)) for t in sent
                ]
        forget()
        return messages

    def _techniques(
        self, model: nn.Module, params: dict[str, nn.Parameter], enclosed: Collection[str]
    ) -> list[FakeFullShard | Flat]:  # fmt: skip
        """Returns the techniques that hold gradients in the row; all other gradients are dropped (`Arrivals`)."""
        cuts, trace = self.shares.cuts, self.trace
        trained = {name: param for name, param in params.items() if param.requires_grad}
        expert_params = {name: param for name, param in trained.items() if name in self.experts.dealt}
        other_params = {name: param for name, param in trained.items() if name not in expert_params}
        trace.experts = sum(param.numel() for param in expert_params.values())
        techniques: list[FakeFullShard | Flat] = []
        if cuts.sharded.weights:
            units = [model.get_submodule(path) for path in self.blocks.paths if path not in enclosed]
            absent = {name for name, _ in model.named_parameters() if name not in params}
            spread = {name for name in params if name in self.experts.dealt}
            with silent_mesh(self.shares.plan, cuts.shard_ranks) as mesh:
                sharded = FakeFullShard(
                    model, units, mesh, self.precision, absent, spread, self.fake, copies=cuts.gloo, host=cuts.host,
                    freed=cuts.gradients == "as_made",
                )  # fmt: skip
            trace.shard_elements, trace.shard_gradient_bytes = sharded.held_elements, sharded.held_gradients
            trace.rows = sharded.rows
            trace.units = sharded.sizes
            trace.rest = trace.parameters - sum(trace.units)
            techniques.append(sharded)
        alone: dict[str, nn.Parameter] = {}  # their gradients are added by the forecast
        for named, ranks, played in (
            (other_params, cuts.shard_ranks, cuts.sharded.flat),
            (expert_params, cuts.shard_ranks // cuts.ep, cuts.sharded.gradients and cuts.shard_ranks > cuts.ep),
        ):
            if played and named:
                with self.fake:
                    flat = rehearsed_buckets(named, ranks, cuts, self.precision, self._aside)
                techniques.append(flat)
                # "as_made" frees gradient shards at once; otherwise they rest until the optimizer's step
                if cuts.gradients != "as_made":
                    elements = sum(part.high - part.low for part in flat.shards)
                    trace.shard_gradient_bytes += elements * self.precision.reduce.itemsize
            # zero=3 holds gradients of all weights but experts', which only one rank holds
            elif not cuts.sharded.weights or named is expert_params:
                alone |= named
        self.arrivals = Arrivals(alone.values())
        return techniques

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context in which operations do not count as work of the module."""
        kept, self.count.trace = self.count.trace, StepTrace(0)
        try:
            with torch.no_grad():
                yield
        finally:
            self.count.trace = kept

    def _params_here(self, model: nn.Module) -> dict[str, nn.Parameter]:
        absent = self.cut.absent if self.cut is not None else set()
        return {name: param for name, param in model.named_parameters() if name not in absent}

    def _sent(self) -> dict[Sent, int]:
        """Returns {(axis, op, mean bytes of the full tensor): calls} since the ledger was cleared."""
        messages: dict[Sent, int] = {}
        degrees = {"tp": self.shares.cuts.tp, "ep": self.shares.cuts.ep, "data": self.shares.cuts.joined}
        degrees |= {axis.name: axis.size for axis in self.inner}
        for (_, op, axis), entry in self.ledger.entries.items():
            size = entry.received_bytes / FACTORS[op](degrees[axis]) / entry.calls
            messages[axis, op, size] = messages.get((axis, op, size), 0) + entry.calls
        return messages

    def _passed(self) -> list[Passed]:
        """Returns the exchanges since the ledger was cleared during which operations ran."""
        places = {axis.name: axis.index for axis in self.inner}
        return [
            (o.axis, o.op, {rank - places[o.axis]: n for rank, n in o.came.items()}, o.start, o.stop)
            for o in self.ledger.overlaps
            if o.axis in places
        ]

    def _arrived(self) -> dict[tuple[str, str, int], int]:
        """Returns {(axis, op, sender's index minus this rank's): bytes received} over axes that cut positions."""
        places = {axis.name: axis.index for axis in self.inner}
        return {
            (axis, op, source - places[axis]): size
            for (op, axis, source), size in sorted(self.ledger.arrivals.items())
            if axis in places
        }


def _made_up(weight: torch.Tensor) -> torch.Tensor:
    """Returns an unsharded weight, without values, in place of a sharded one."""
    return torch.empty(weight.shape, dtype=weight.dtype)


def trace_of(
    shares: CutRehearsal, tp: int, pp: int, sizes: Sequence[int], beside: Beside = ALIKE, place: Place = ()
) -> RankTrace:  # fmt: skip
    """Returns the trace of the rank at index `tp`, `pp`; raises `InputError` if untraceable, `RefusedPlan` as a run.

    sizes   samples of each micro-batch; the last one holds for those that follow
    beside  the data rank's index among the data ranks of its ep groups, and their samples (see `Beside`)
    place   the rank's index on each axis that cuts positions; () for the first
    """
    enclosed = shares.looks.enclosed.setdefault(shares.cuts.wrap, set())
    try:
        with as_real():
            while True:  # as a run: anew, until no unit's weights are read while it does not run
                rehearsal = Rehearsal(shares, tp, pp, sizes, beside, place)
                trace = rehearsal.run(enclosed)
                if not rehearsal.outside:
                    return trace
                enclosed |= rehearsal.outside
    except (InputError, RefusedPlan):
        raise
    except Exception as error:
        raise InputError(untraced(error, ModulePath())) from error
    finally:
        forget()  # the next rehearsal must not reuse gathered tensors of this one
