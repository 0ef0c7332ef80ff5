"""Communication: our collectives, observation of everybody's, and the ledger of what went over the wire."""

from shardwise.comm.collectives import (
    Axis,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather_rows,
    gather_samples,
    reduce_scatter,
    sum_over,
)
from shardwise.comm.ledger import Ledger
from shardwise.comm.observe import Observer, tagged

__all__ = [
    "Axis",
    "Ledger",
    "Observer",
    "Pending",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather_rows",
    "gather_samples",
    "reduce_scatter",
    "sum_over",
    "tagged",
]
