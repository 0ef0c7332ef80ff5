"""`Estimator`: a quick estimate of a decoder's step and memory under a layout, by which a search prunes.

It adds up the same parts as `step.py`, with closed forms for bubbles and perfect overlap of data-parallel
communication if the software overlaps it. So it is a little below the simulation, and never far above.
"""

from __future__ import annotations

from functools import lru_cache

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger, rank_memory, stage_parameters
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software, whole_gradients, whole_in_pipeline
from shardwise.layout.schedule_kinds import KINDS, in_flight
from shardwise.simulator.parts import (
    GAPS,
    LayerTimes,
    StepContext,
    crossing,
    layer_times,
    optimizer_seconds,
    reduction_seconds,
)
from shardwise.simulator.stages import dense_of, stage_layers


class Estimator:
    """Estimates layouts of one model on one cluster, and caches times that layouts share."""

    def __init__(self, shape: Shape, cluster: Cluster, software: Software) -> None:
        self.shape, self.cluster, self.software = shape, cluster, software
        self._parts = lru_cache(maxsize=4096)(self._compute_parts)

    def memory(self, layout: Layout) -> MemoryLedger:
        """Returns the memory of the rank that allocates most."""
        layers = stage_layers(self.shape, layout)
        dense = dense_of(self.shape, layers)
        per_rank, fronts = ([sum(by_stage[r :: layout.pp]) for r in range(layout.pp)] for by_stage in (layers, dense))
        # of ranks with the same layers the first one keeps the most micro-batches, so one rank of each kind is enough,
        # besides the first (with the embedding) and the last (with the loss)
        kinds = list(zip(per_rank, fronts, strict=True))
        ends = {0, layout.pp - 1, *(kinds.index(kind, 1) for kind in set(kinds[1:]))}
        return max(
            (
                rank_memory(
                    self.shape, layout, self.software, layers=per_rank[rank], dense=fronts[rank], first=rank == 0,
                    last=rank == layout.pp - 1,
                    in_flight=in_flight(layout.schedule, layout.pp, layout.n_micro, layout.chunks, rank),
                )
                for rank in ends
            ),
            key=lambda ledger: ledger.allocated,
        )  # fmt: skip

    def seconds(self, layout: Layout) -> float:
        """Returns the estimated seconds of a step under a layout."""
        step = StepContext(self.shape, layout, self.cluster, self.software)
        many = 2 if layout.n_micro * layout.rounds > 1 else 1  # a layer's time depends only on one or several
        # fields that do not change a layer's time are reset, so that layouts share the cached parts
        key = layout.with_(
            pp=1, chunks=1, shard=2 if layout.sharded.gradients else 1, replicas=1, n_micro=many,
            zero=layout.zero if layout.sharded.gradients else 0,
            rounds=1, schedule="1f1b", stage_layers=(),
        )  # fmt: skip
        parts = self._parts(key)
        layers = stage_layers(self.shape, layout)
        dense = dense_of(self.shape, layers)
        p, n, v = layout.pp, layout.n_micro, layout.chunks
        every = n * layout.rounds
        ends = [parts.first.seconds, parts.last.seconds]
        held = [(sum(layers[r::p]), sum(dense[r::p])) for r in range(p)]
        of_kind = {kind: parts.of(*kind).seconds for kind in set(held)}  # computed once for ranks with equal layers
        layers_s = [of_kind[kind] for kind in held]
        # rounds is 1 here
        if p == 1:
            seconds = n * (layers_s[0] + sum(ends))
        else:
            work = [h + (ends[0] if r == 0 else 0) + (ends[1] if r == p - 1 else 0) for r, h in enumerate(layers_s)]
            bubble = (p - 1) * min(work) / v * KINDS[layout.schedule].bubble
            seconds = layout.rounds * (n * max(work) + bubble)
        front = self.shape.dense_layers if p == 1 else 0  # with a pipeline an average stage, without dense layers
        parameters = stage_parameters(self.shape, layout, self.shape.layers / p, first=p == 1, last=True, dense=front)
        reduce_s, gather_s = reduction_seconds(step, parameters, self.shape.layers / p)
        # zero=3: messages overlap with compute only if the software gathers units ahead
        if layout.sharded.weights:
            gathered = 1 if whole_in_pipeline(self.software, layout) else every
            wire = gathered * layout.sharded.gathers * gather_s
            wire += (1 if whole_gradients(self.software, layout) else every) * reduce_s
            wire = max(wire, every * layout.sharded.gathers * crossing(step, sum(parameters.values())))
            seconds = max(seconds, wire) if self.software.prefetch != "none" else seconds + wire
        elif not self.software.overlap_dp:
            seconds += reduce_s + gather_s
        else:
            # assumed: 0.6 of a micro-batch, its backward, hides a reduction, 0.3 of it, its forward, a gather
            seconds += layout.sharded.reductions(every) * max(0.0, reduce_s - seconds * 0.6 / every)
            seconds += max(0.0, gather_s - seconds * 0.3 / every) if self.software.overlap_gathers else gather_s
        seconds += optimizer_seconds(step, parameters)
        return GAPS * seconds

    def _compute_parts(self, layout: Layout) -> LayerTimes:
        return layer_times(StepContext(self.shape, layout, self.cluster, self.software))
