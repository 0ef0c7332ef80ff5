"""Checks within seconds that hosts reach each other's ports, where gloo would wait for minutes or hours.

    first rank of each host    listens on a port of the system's choice ──store──> the next few hosts connect to it

gloo's own ports are of the same range (Linux: net.ipv4.ip_local_port_range). If a firewall drops packets to them, gloo
tries for seven minutes and then waits for the timeout of collectives.

What this does not do: look at the network of an accelerator's own backend (NCCL's interfaces).
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from shardwise.ranks.interfaces import agree, own_addresses, talk_over_reachable, unreachable

NEXT = 8  # hosts that each host connects to; connecting to thousands would take as many seconds
CONNECT_S = 15.0  # seconds; enough for three retransmissions of a lost packet
_POLL_S = 0.02


def talk_between_hosts(store: Any, rank: int, world: int, local_rank: int, first_host: str, until: float) -> None:
    """Sets an interface for gloo that reaches the other hosts, and checks that they are reached. Collective.

    store        shared by all ranks, through which they meet
    rank, world  this rank and the number of ranks; `local_rank`: on its host
    first_host   name or address of rank 0's host
    until        time of the monotonic clock until which ranks wait for each other

    Raises `InputError` on all ranks if a host does not reach another.
    """
    talk_over_reachable(first_host)
    with _listener() as listener:  # open until all ranks have tried
        problem = unreachable(first_host)
        # called even if this rank has a problem (then without own addresses), since the others wait for it there
        silent = unanswered(store, world, local_rank == 0, listener, until, [] if problem else own_addresses())
        agree(store, rank, world, problem or silent, until)


def unanswered(store: Any, world: int, first: bool, listener: socket.socket, until: float, own: list[str]) -> str:
    """Returns a message on the first of the next `NEXT` hosts that does not answer; "" if all do. Collective.

    first      Whether this is its host's first rank; on other ranks the result is ""
    listener   socket to which other hosts connect
    until      time of the monotonic clock; if ranks are still missing then, the result is ""
    own        addresses of this host; []: unknown, and the result is ""
    """
    mine = -1
    # one rank of each host listens and connects; the others are only counted
    if first:
        mine = store.add("reach/hosts", 1) - 1
        place = [socket.gethostname(), listener.getsockname()[1], own]
        store.set(f"reach/{mine}", json.dumps(place))
    came = store.add("reach/came", 1)
    while came < world and time.monotonic() < until:
        time.sleep(_POLL_S)
        came = store.add("reach/came", 0)
    if not first or not own or came < world:  # missing ranks are reported elsewhere
        return ""
    hosts = store.add("reach/hosts", 0)
    for step in range(1, min(hosts, NEXT + 1)):
        name, port, addresses = json.loads(store.get(f"reach/{(mine + step) % hosts}"))
        error = _connect(addresses, port)
        if error is not None:
            return (
                f"{socket.gethostname()} does not reach {name} ({', '.join(addresses)}, port {port}): {error}. Ranks "
                "talk over ports that the system chooses (Linux: net.ipv4.ip_local_port_range): a firewall between "
                "hosts must let these through"
            )
    return ""


def _listener() -> socket.socket:
    """Returns a socket that listens at every address of this host, on a port of the system's choice."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=NEXT * 8)
    return socket.create_server(("", 0), backlog=NEXT * 8)


def _connect(addresses: list[str], port: int) -> OSError | None:
    """Returns None if one of the addresses answers within the time for all of them, else the last error."""
    last: OSError | None = None
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=CONNECT_S / len(addresses)).close()
            return None
        except OSError as error:
            last = error
    return last
