"""Lets ranks find each other without a fixed port if their launcher gives no master address.

    rank 0    listens on a port that the system chooses ---> (addresses, port, token)
              publishes these by mpi4py's broadcast | PMI's key-value space | a file that all ranks see
    rank r    reads them, connects, compares the token, and writes its host and CPUs into the store ("hello")
    rank 0    sets "ready" once all ranks have done so, and removes the file

The file lies in a private folder of the host if all ranks are on one host, else in the working directory, which must be
shared. Its name contains the launcher's id of the job. The token shows whether the process that answers is this job's
rank 0, so that a file left by a killed job is ignored.

Every wait is bounded and names who is missing. What this does not do: encrypt; between hosts the port is open to the
network, as torchrun's is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import socket
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, RunError, first_line
from shardwise.ranks import pmi
from shardwise.ranks.alike import in_host_order
from shardwise.ranks.interfaces import addresses, route_to
from shardwise.ranks.launchers import LaunchedPlace
from shardwise.ranks.mpi import world_communicator

MEET_S = 300.0  # ranks of a large job start minutes apart
_POLL_S = 0.05
_CONNECT_S = 5.0
_STORE_S = 60.0
OUTSIDE = ("192.0.2.1", "2001:db8::1")  # addresses reserved for documentation: only their route is looked up


@dataclass(frozen=True)
class Address:
    """The address of rank 0's store.

    hosts   names or addresses of its host, to be tried in order
    port    TCP port
    token   random text that the store has under "token"
    """

    hosts: tuple[str, ...]
    port: int
    token: str

    def pack(self) -> str:
        """Returns the address as one word of printable characters."""
        return base64.urlsafe_b64encode(
            zlib.compress(json.dumps([self.hosts, self.port, self.token]).encode())
        ).decode()

    @classmethod
    def unpack(cls, word: str) -> Address:
        """Returns the address that `pack` wrote as `word`; `ValueError` for any other text."""
        try:
            hosts, port, token = json.loads(zlib.decompress(base64.urlsafe_b64decode(word)))
        except zlib.error as error:
            raise ValueError(f"'{word}' is no address: {error}") from error
        return cls(tuple(hosts), int(port), str(token))


@dataclass(frozen=True)
class Met:
    """The store that all ranks share, and this rank's place on its host.

    rank         the launcher's rank; if ranks of a host were not consecutive, a new one, counted host by host
    local_rank   rank on this host
    threads      this rank's share of the CPUs that it may use
    first_host   name or address by which this host reaches rank 0's
    """

    store: Any
    rank: int
    local_rank: int
    threads: int
    first_host: str = ""


def meet(place: LaunchedPlace, timeout_s: float = MEET_S) -> Met:
    """Finds the other ranks; returns the shared store and this rank's place. Collective.

    place       this process's place, from the launcher; `timeout_s`: seconds to wait for the other ranks

    Raises `RunError` that names the ranks that did not come in time, `InputError` if two processes have the same rank
    or the job has neither an id nor an address.
    """
    until = time.monotonic() + timeout_s
    if place.master is not None:
        store = _at_master(place, until)
    elif (world := world_communicator()) is not None and world.Get_size() == place.world_size:
        store = _exchanged(place, until, lambda mine: world.bcast(mine, root=0))
    # PMI's key-value space is for launchers that give no job id; with an id a file can be named by it
    elif place.launcher == "PMI" and place.job is None and pmi.served(os.environ.get("PMI_FD", "")):
        store = _exchanged(
            place, until, lambda mine: pmi.exchange(os.environ["PMI_FD"], place.rank, mine, until - time.monotonic())
        )
    else:
        store = _through_file(place, until)
    return _everybody(place, store, until)


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(0.1, until - time.monotonic()))


def _at_master(place: LaunchedPlace, until: float) -> Any:
    """Returns the store at MASTER_ADDR and MASTER_PORT, which rank 0 opens; `RunError` if that fails."""
    import torch.distributed as dist

    assert place.master is not None
    host, port = place.master
    await_listener(place, until)
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": _left(until)}
    try:
        return dist.TCPStore(host, port, place.world_size, place.rank == 0, **options)
    except (dist.DistError, RuntimeError) as error:
        remedy = "Unset both, and the ranks agree on a free port by themselves"
        if place.launcher == "torchrun":
            remedy = "Give all ranks another MASTER_PORT, one that is free on rank 0's host"
        raise not_met(place, error, remedy) from error


def await_listener(place: LaunchedPlace, until: float) -> None:
    """Waits until a process listens at MASTER_ADDR and MASTER_PORT; returns at once on rank 0.

    Raises `RunError` if none does by `until` (monotonic clock).

    torch's own store retries in C++, where neither Ctrl-C nor SIGTERM is handled, and prints C++ frames.
    """
    assert place.master is not None
    host, port = place.master
    began = time.monotonic()
    while place.rank > 0:
        try:
            patience = max(0.1, min(_CONNECT_S, until - time.monotonic()))
            socket.create_connection((host, port), timeout=patience).close()
            return
        except OSError as error:
            if time.monotonic() >= until:
                waited = f"nobody listened there in {until - began:.0f} s ({error})"
                remedy = "Start rank 0, give every rank its host's address, or open the port between the hosts"
                raise not_met(place, RunError(waited), remedy) from None
            time.sleep(_POLL_S)


def not_met(place: LaunchedPlace, error: Exception, remedy: str) -> RunError:
    """Returns the error for a store that cannot be opened or reached at MASTER_ADDR and MASTER_PORT."""
    host, port = place.master or (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    what = "listen on" if place.rank == 0 else "reach"
    return RunError(
        f"rank {place.rank} cannot {what} MASTER_ADDR={host} MASTER_PORT={port}: {_first_line(error)}. {remedy}"
    )


def _exchanged(place: LaunchedPlace, until: float, exchange: Callable[[str], str]) -> Any:
    store, address = _listen(place, until) if place.rank == 0 else (None, None)
    try:
        shared = Address.unpack(exchange(address.pack() if address is not None else ""))
    except ValueError as error:
        raise RunError(
            f"rank {place.rank}: the launcher hands on something else than rank 0's address ({error}): start all ranks "
            "of the job by one launcher, with the same shardwise"
        ) from error
    return store if store is not None else _connect_until(shared, place, until)


def _listen(place: LaunchedPlace, until: float) -> tuple[Any, Address]:
    """Returns (new store of rank 0 on a free port, its address), on loopback if all ranks are on this host."""
    import torch.distributed as dist

    listener = _listener("127.0.0.1" if place.one_host else "")
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, None, True, timeout=_left(until), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    address = Address(("127.0.0.1",) if place.one_host else _own_addresses(), port, secrets.token_hex(8))
    store.set("token", address.token)
    return store, address


def _listener(address: str) -> socket.socket:
    """Returns a socket that listens on a free port of one IPv4 address or, for "", of all IPv4 and IPv6 addresses."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server((address, 0), backlog=1024)


def _own_addresses() -> tuple[str, ...]:
    """Returns addresses by which other hosts may reach this one, most likely first.

    In order: addresses of the default routes, other addresses, the host's name, loopback. The name comes late, since
    resolving it may take long.
    """
    hosts = [address for far in OUTSIDE if (address := route_to(far)) is not None]
    if sys.platform == "linux":
        hosts += [address for _, address in addresses()]
    else:
        with suppress(OSError):  # a host that does not know its own name
            hosts += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    far = [host for host in hosts if not host.startswith(("127.", "fe80:")) and host != "::1"]
    return tuple(dict.fromkeys([*far, socket.gethostname(), "127.0.0.1"]))


def _connect(address: Address, until: float) -> Any | None:
    """Returns rank 0's store at an address; None if nothing listens there now, or the store has another token."""
    import torch.distributed as dist

    for host in address.hosts:
        try:
            socket.create_connection((host, address.port), timeout=_CONNECT_S).close()
            # torch's store looks up names, slowly without a name server, so it is tried only if a port answers
            patience = min(_left(until), timedelta(seconds=_STORE_S))
            store = dist.TCPStore(host, address.port, None, False, timeout=patience)
            if store.get("token").decode() == address.token:
                store.set_timeout(_left(until))
                return store
        except (OSError, RuntimeError):  # torch's own errors are RuntimeErrors
            continue
    return None


def _connect_until(address: Address, place: LaunchedPlace, until: float) -> Any:
    """Returns the store at rank 0's address; `RunError` if it cannot be reached by `until` (monotonic clock)."""
    while (store := _connect(address, until)) is None:
        if time.monotonic() >= until:
            raise RunError(
                f"rank {place.rank} on {socket.gethostname()} cannot reach rank 0 at {', '.join(address.hosts)}, port "
                f"{address.port}: a firewall between the hosts, or rank 0 has ended"
            )
        time.sleep(_POLL_S)
    return store


def _through_file(place: LaunchedPlace, until: float) -> Any:
    """Returns rank 0's store, whose address rank 0 writes into a file for all; `RunError` if ranks are missing."""
    path = _file(place)
    if place.rank > 0:
        return _read(path, place, until)
    store, address = _listen(place, until)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(address.pack())
        draft.replace(path)
        _hear(place, store, until)
    except OSError as error:
        raise RunError(f"rank 0 cannot write {path}, where the other ranks look for its address: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return store


def _file(place: LaunchedPlace) -> Path:
    """Returns the path of the file with rank 0's address; `InputError` for a job without an id."""
    if place.job is None:
        raise InputError(
            f"{place.launcher} gives the ranks no id of their job, so they cannot find each other by themselves: set "
            "MASTER_ADDR and MASTER_PORT for all of them, or import mpi4py before shardwise joins"
        )
    key = hashlib.sha256(f"{place.launcher}/{place.job}".encode()).hexdigest()[:16]
    return (_private_folder() if place.one_host else Path.cwd()) / f".shardwise-{place.launcher.lower()}-{key}"


def _private_folder() -> Path:
    """Returns this user's private folder below the temporary one; `InputError` if other users can access it."""
    folder = Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise InputError(f"{folder} is not a private folder of yours: remove it, or set TMPDIR to another place")
    return folder


def _read(path: Path, place: LaunchedPlace, until: float) -> Any:
    """Returns rank 0's store, once the file has its address and it answers; `RunError` after `until`."""
    while True:
        try:
            os.listdir(path.parent)  # makes a network file system drop its cached absence of the file
            store = _connect(Address.unpack(path.read_text()), until)
        except (OSError, ValueError):
            store = None  # not there yet
        if store is not None:
            _say_hello(place, store)
            return store
        if time.monotonic() >= until:
            left = "" if not path.exists() else "; the file that is there belongs to a job that has ended"
            raise RunError(
                f"rank {place.rank} on {socket.gethostname()} found no address of rank 0 in {path}{left}. Rank 0 has "
                "not started, or this host sees another folder: start in a folder that all hosts share, or set "
                "MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(_POLL_S)


def _hello(rank: int) -> str:
    return f"hello/{rank}"


def _say_hello(place: LaunchedPlace, store: Any) -> None:
    """Writes this rank's host and CPUs into the store; `InputError` if another process has the same rank."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if store.add(f"taken/{place.rank}", 1) != 1:
        raise InputError(
            f"two processes say that they are rank {place.rank} of {place.world_size} ({place.names[0]}, "
            f"{place.launcher}): start each rank once"
        )
    store.set(_hello(place.rank), json.dumps([socket.gethostname(), cpus]))


def _hear(place: LaunchedPlace, store: Any, until: float) -> None:
    """Waits on rank 0 for the hello of all ranks and sets "ready"; `RunError`, on all, that names missing ranks."""
    _say_hello(place, store)
    waiting = list(range(place.world_size))
    while waiting and time.monotonic() < until:
        waiting = [rank for rank in waiting if not store.check([_hello(rank)])]
        if waiting:
            time.sleep(_POLL_S)
    if not waiting:
        store.set("ready", "")
        return
    shown = ", ".join(map(str, waiting[:8])) + ("..." if len(waiting) > 8 else "")
    text = (
        f"rank {shown} of {place.world_size} did not come to the meeting of ranks ({place.launcher}): look for why it "
        "did not start, or ended, in its own output"
    )
    store.set("ready", text)
    time.sleep(1.0)  # the store ends with this process; let the others read why
    raise RunError(text)


def _everybody(place: LaunchedPlace, store: Any, until: float) -> Met:
    """Waits until all ranks have come; returns the store and this rank's place, `RunError` if some are missing."""
    # ranks that read the address from a file have already said hello
    if not store.check([_hello(place.rank)]):
        _hear(place, store, until) if place.rank == 0 else _say_hello(place, store)
    try:
        while (
            not store.check(["ready"]) and time.monotonic() < until + 5
        ):  # a `get` would block in C++, where no signal is handled
            time.sleep(_POLL_S)
        refusal = store.get("ready").decode()
    except RuntimeError as error:
        raise RunError(f"rank {place.rank} lost rank 0 while the others were joining: {_first_line(error)}") from error
    if refusal:
        raise RunError(refusal)
    greetings = [json.loads(value) for value in store.multi_get([_hello(rank) for rank in range(place.world_size)])]
    mine = greetings[place.rank]
    below = [rank for rank in range(place.rank) if greetings[rank][0] == mine[0]]
    sharing = sum(1 for greeting in greetings if greeting == mine)
    local_rank = len(below) if place.local_rank is None else place.local_rank
    first_host = place.master[0] if place.master is not None else store.host
    if place.rank == 0 and place.master is None:  # its own store's host is loopback, which no other host reaches
        first_host = _own_addresses()[0]
    rank = place.rank
    if world_communicator() is None:  # with mpi4py, ranks stay those of COMM_WORLD, which a script may use
        rank = in_host_order([greeting[0] for greeting in greetings])[rank]
    return Met(store, rank, local_rank, max(1, len(mine[1]) // sharing), first_host)


def _first_line(error: Exception) -> str:
    return first_line(error)
