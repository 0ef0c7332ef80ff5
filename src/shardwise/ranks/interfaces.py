"""Which network interface ranks talk over: the one that reaches the other hosts, where gloo would take loopback.

gloo     listens at what the host's own name resolves to; a name that is not known, or that /etc/hosts gives to
         loopback (Debian: 127.0.1.1), makes it wait at an address where no other host can come
here     the interface whose address the route to rank 0's host has
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress

CHOSEN = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux' sockios.h


def talk_over_reachable(first_host: str) -> None:
    """Have gloo take the interface that reaches rank 0's host, unless the user chose one or the host's name does.

    first_host   its name or address, as this host knows it
    """
    if os.environ.get(CHOSEN) or sys.platform != "linux" or _name_is_reachable():
        return
    address = route_to(first_host)
    name = interface_of(address) if address is not None else None
    if name is not None:
        os.environ[CHOSEN] = name


def _name_is_reachable() -> bool:
    """Whether this host's name resolves to an address that other hosts can use."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return False
    return bool(found) and not any(address.startswith("127.") or address == "::1" for address in found)


def route_to(host: str) -> str | None:
    """Returns this host's address on the route to another one, or to itself; None where there is none."""
    with suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
                probe.connect(place)  # a datagram's: nothing is sent
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with this IPv4 address, else None."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, asked)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
