"""The `Room` (costs/room) that offloading takes on one host: for a decoder given by its sizes, for a traced module."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.cluster import Cluster
from shardwise.costs.coded_state import resting
from shardwise.costs.layout import Layout
from shardwise.costs.memory import stage_parameters
from shardwise.costs.offload import lying
from shardwise.costs.room import Room, of_host
from shardwise.costs.software import STATES, States
from shardwise.layout.schedule_kinds import KINDS
from shardwise.simulator.counted import Model
from shardwise.simulator.parts import StepContext, updated
from shardwise.simulator.pipeline import stages_of
from shardwise.simulator.stages import dense_of, stage_layers
from shardwise.simulator.traced import activation_bytes, updated_elements


def decoder_room(step: StepContext) -> Room:
    """Returns the `Room` of one host for a decoder's step; empty without offload."""
    lay, shape = step.layout, step.shape
    if lay.offload == "none":
        return Room()
    # some schedules (a V) have several stages on each rank by definition
    if lay.pp > 1 and lay.chunks == 1:
        lay = lay.with_(chunks=KINDS[lay.schedule].stages_per_rank)
    layers = stage_layers(shape, lay)
    dense, last = dense_of(shape, layers), len(layers) - 1
    by_rank, states = [], resting(STATES[step.software.states], lay)
    for mine in stages_of(lay.schedule, lay.pp, lay.chunks):
        counts = (sum(of[stage] for stage in mine) for of in (layers, dense))
        # the first stage has the embedding, the last one the head
        parameters = stage_parameters(shape, lay, next(counts), dense=next(counts), first=0 in mine, last=last in mine)
        by_rank.append(lying(updated(step, parameters), states, lay, on_host=step.cluster.device.kind == "cpu"))
    return of_host(by_rank, lay, step.cluster)


def traced_room(ranks: Sequence[Model], layout: Layout, cluster: Cluster, states: States) -> Room:
    """Returns the `Room` of one host for a traced module; empty without offload.

    ranks   the `Model` of each rank that differs; `states`: bytes per parameter
    """
    if layout.offload == "none":
        return Room()
    by_rank = []
    for rank in ranks:
        rests = resting(states, layout, rank.update.coded)
        lies = lying(updated_elements(rank, layout), rests, layout, on_host=rank.batch_on_device)
        for tier, size in activation_bytes([rank], layout).items():
            lies[tier] += size * (min(layout.pp, layout.n_micro) if layout.pp > 1 else 1)  # micro-batches in flight
        by_rank.append(lies)
    return of_host(by_rank, layout, cluster)
