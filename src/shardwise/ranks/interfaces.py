"""Chooses a network interface for gloo that other hosts reach.

gloo     listens at the address that the host's own name resolves to. If the name is unknown, or /etc/hosts maps it to
         loopback (Debian: 127.0.1.1), no other host can connect
here     takes the interface that the route to rank 0's host uses
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import InputError

CHOSEN = "GLOO_SOCKET_IFNAME"
_OTHER = ": other hosts do not reach it. Unset it, or give the interface of the hosts' network"
_POLL_S = 0.02
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux' sockios.h
_IPV6_TABLE = Path("/proc/net/if_inet6")  # address, index, prefix, scope, flags, name


def talk_over_reachable(first_host: str) -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface that reaches rank 0's host.

    first_host   name or address of rank 0's host, as seen from this host

    Does nothing if the user chose an interface, or if this host's own name resolves to an address that others reach.
    """
    if os.environ.get(CHOSEN) or sys.platform != "linux" or _name_is_reachable():
        return
    address = route_to(first_host)
    name = interface_of(address) if address is not None else None
    if name is not None:
        os.environ[CHOSEN] = name


def unreachable(first_host: str) -> str:
    """Returns why the interface that the user chose cannot reach other hosts; "" if it may, or none was chosen.

    first_host   name or address of rank 0's host
    """
    chosen, route = os.environ.get(CHOSEN), route_to(first_host)
    # nothing was chosen, or rank 0 is on this host: there is no other host to reach
    if not chosen or sys.platform != "linux" or route is None or _is_loopback(route):
        return ""
    own: dict[str, list[str]] = {}
    for name, address in addresses():
        own.setdefault(name, []).append(address)
    # gloo takes a comma-separated list
    for name in chosen.split(","):
        if name not in own:
            return f"{CHOSEN}={chosen} on {socket.gethostname()}, which has {', '.join(own)}{_OTHER}"
        if all(map(_is_loopback, own[name])):
            return f"{CHOSEN}={chosen} on {socket.gethostname()}, where {name} is the host itself{_OTHER}"
    return ""


def agree(store: Any, rank: int, world: int, problem: str, until: float) -> None:
    """Raises `InputError` on all ranks if any has a problem with its interface. Collective over the store.

    problem   description of this rank's problem; "" for none
    until     time of the monotonic clock until which ranks wait for each other
    """
    if problem:
        store.set("interfaces/problem", f"rank {rank}: {problem}")
    came = store.add("interfaces/came", 1)
    while came < world and time.monotonic() < until and not store.check(["interfaces/problem"]):
        time.sleep(_POLL_S)
        came = store.add("interfaces/came", 0)
    if store.check(["interfaces/problem"]):
        raise InputError(store.get("interfaces/problem").decode())


def own_addresses() -> list[str]:
    """Returns the addresses at which gloo may listen: those of the chosen interface, else of the host's name."""
    chosen = os.environ.get(CHOSEN, "").split(",")
    if chosen != [""] and sys.platform == "linux":
        return [address for name, address in addresses() if name in chosen]
    with suppress(OSError):
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)))
    return []


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _name_is_reachable() -> bool:
    """Whether this host's name resolves, and to no loopback address."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return bool(found) and not any(map(_is_loopback, found))


def route_to(host: str) -> str | None:
    """Returns this host's own address on the route to `host` (a name or address); None if there is no route."""
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
                probe.connect(place)  # of a datagram socket, which sends nothing
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this IPv4 or IPv6 address, else None."""
    if ":" in address:
        address = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, address.partition("%")[0]))
    return next((name for name, own in addresses() if own == address), None)


def addresses() -> list[tuple[str, str]]:
    """Returns (interface name, address) of each address of this host, IPv4 before IPv6. Linux only."""
    import fcntl

    rows = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, asked)
                rows.append((name, socket.inet_ntoa(reply[20:24])))
    with suppress(FileNotFoundError):  # a kernel without IPv6
        for line in _IPV6_TABLE.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            rows.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return rows
