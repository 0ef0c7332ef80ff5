"""The memory of every rank of a traced task's grid, which runs are compared with."""

from __future__ import annotations

from itertools import product

from shardwise.costs.layout import Layout
from shardwise.costs.memory import MemoryLedger
from shardwise.planner.rehearsed_sizes import dealt, played
from shardwise.planner.traced_task import BlockMemory, Traced, places
from shardwise.rehearsal.cut_module import CutRehearsal
from shardwise.simulator.held import memory


def every_rank(traced: Traced, layout: Layout, batch: int) -> list[MemoryLedger]:
    """Returns the memory of every rank of the grid in rank order, each with its own share of the batch."""
    key = traced._cuts(layout)
    alike = CutRehearsal(traced.looks, key).alike if layout.tp > 1 else [0]
    kinds = list(dict.fromkeys(alike))
    ledgers = []
    outer = product(*map(range, (layout.replicas, layout.pp, layout.shard)))
    along = places(tuple(size for _, size in layout.inner))
    for (replica, pp, shard), place, tp in product(outer, along, range(layout.tp)):
        data = replica * layout.shard + shard
        most, what = max(dealt(layout, batch, data)), played(key, layout, batch, data)
        if key.differ:
            model = traced.ranks(key, *what, place)[pp * len(kinds) + kinds.index(alike[tp])]
        else:  # of the whole module, from a trace of just as many samples
            exact = traced._trace(most, BlockMemory.of(layout), key.joined)
            model = traced._model(exact, exact)
        piece = shard * layout.cut_positions + along.index(place)
        ledgers.append(memory(model, layout.with_(micro_batch=most), traced.precision, batch, piece))
    return ledgers
