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
    is_written_down,
    reduce_scatter,
    sum_over,
)
from shardwise.comm.ledger import Ledger
from shardwise.comm.messages import RankMessage, beside, exchange, in_order_of_calls, meet, receive, send
from shardwise.comm.observe import Observer, tagged
from shardwise.comm.text import everybody, gather_json, of_first, refuse_shared_devices
from shardwise.comm.together import Gathering, broadcast_together, gathered_alone, gathered_together, ready
from shardwise.comm.trail import Trail

__all__ = [
    "Axis",
    "Gathering",
    "Ledger",
    "Observer",
    "Pending",
    "RankMessage",
    "Trail",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "beside",
    "broadcast",
    "broadcast_together",
    "everybody",
    "exchange",
    "gather_json",
    "gather_rows",
    "gather_samples",
    "gathered_alone",
    "gathered_together",
    "in_order_of_calls",
    "is_written_down",
    "meet",
    "of_first",
    "ready",
    "receive",
    "reduce_scatter",
    "refuse_shared_devices",
    "send",
    "sum_over",
    "tagged",
]
