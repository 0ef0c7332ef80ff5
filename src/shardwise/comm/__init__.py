"""Communication: our collectives, observation of everybody's, and the ledger of what went over the wire."""

from shardwise.comm.collectives import (
    Axis,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    copies_of,
    gather_rows,
    gather_samples,
    is_written_down,
    receive,
    reduce_scatter,
    send,
    sum_over,
)
from shardwise.comm.ledger import Ledger
from shardwise.comm.observe import Observer, tagged
from shardwise.comm.text import everybody, gather_json, of_first, refuse_shared_devices
from shardwise.comm.together import Gathering, gathered_alone, gathered_together, ready
from shardwise.comm.trail import Trail

__all__ = [
    "Axis",
    "Gathering",
    "Ledger",
    "Observer",
    "Pending",
    "Trail",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "copies_of",
    "everybody",
    "gather_json",
    "gather_rows",
    "gather_samples",
    "gathered_alone",
    "gathered_together",
    "is_written_down",
    "of_first",
    "ready",
    "receive",
    "reduce_scatter",
    "refuse_shared_devices",
    "send",
    "sum_over",
    "tagged",
]
