"""Whether hosts reach each other over the ports that ranks will talk over, found in seconds: gloo may wait for hours.

    first rank of each host    listens on a port of the system's choice ──store──> the next few hosts connect to it

gloo's own ports are of the same range (Linux: net.ipv4.ip_local_port_range). Where a firewall drops what comes to them,
gloo tries for seven minutes and then waits as long as collectives may take.

What this does not do: look at the network of an accelerator's own backend (NCCL's interfaces).
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from shardwise.ranks.interfaces import agree, own_addresses, talk_over_reachable, unreachable

NEXT = 8  # hosts that each connects to: with thousands, all of them would take as many seconds
CONNECT_S = 15.0  # three times that a lost packet is sent again
_POLL_S = 0.02


def talk_between_hosts(store: Any, rank: int, world: int, local_rank: int, first_host: str, until: float) -> None:
    """Have gloo take an interface that reaches the other hosts; raise `InputError` on all ranks where one reaches none.

    first_host   rank 0's, by name or address
    until        on the monotonic clock: how long ranks wait for each other
    Collective over the store.
    """
    talk_over_reachable(first_host)
    with _listener() as listener:  # open until all have agreed
        problem = unreachable(first_host)
        # asked in any case, since the others wait for this rank in it; with a problem of its own no host is tried
        silent = unanswered(store, world, local_rank == 0, listener, until, [] if problem else own_addresses())
        agree(store, rank, world, problem or silent, until)


def unanswered(store: Any, world: int, first: bool, listener: socket.socket, until: float, own: list[str]) -> str:
    """Returns which other host does not answer the first rank of this one, as text. Collective.

    "" where all do, on other ranks of this host, without `own`, and where ranks are missing at `until`.

    own   addresses at which this host is reached; none: it says by itself why
    """
    mine = -1
    # one rank of a host speaks for it; the others only count as come
    if first:
        mine = store.add("reach/hosts", 1) - 1
        place = [socket.gethostname(), listener.getsockname()[1], own]
        store.set(f"reach/{mine}", json.dumps(place))
    came = store.add("reach/came", 1)
    while came < world and time.monotonic() < until:
        time.sleep(_POLL_S)
        came = store.add("reach/came", 0)
    if not first or not own or came < world:  # who did not come is told by others
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
