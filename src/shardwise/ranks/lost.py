"""Finds which ranks of a launcher's job were lost, after a collective failed with a closed connection.

    rank that raised an error itself    writes the error into the store before it ends
    rank whose collective failed        writes "" into the store, and waits a few seconds for the others' entries
    rank, or host, that is lost         writes nothing, and is named

The store is held by rank 0 (under torchrun by the agent of its host); if it does not answer, that host is lost. What
this does not do: recognise a rank that is alive but was in none of the failed collectives; it is named as lost too.
"""

from __future__ import annotations

import re
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from shardwise.errors import RunError, ShardwiseError, first_line

ANSWER_S = 5.0  # seconds to wait for the other ranks' entries
_POLL_S = 0.1
# texts of errors that a collective or the store raises if a peer has ended or never came
_ECHO = re.compile(
    r"connection (closed|reset) by peer|broken pipe|timed out waiting|socket (timeout|closed)|"
    r"wait timeout|connection refused|remote process (exited|has)|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


def is_echo(text: str) -> bool:
    """Whether a traceback's text contains an error that a lost or missing peer causes."""
    return bool(_ECHO.search(text))


def greet() -> None:
    """Writes this rank's host name into the store, and sets an `excepthook` that names lost peers.

    The hook replaces the report of an uncaught error by one line if the error only echoes a peer's end.
    """
    import torch.distributed as dist

    _store().set(_key("host", dist.get_rank()), socket.gethostname())
    # a second group in this process: the hook is already set
    if getattr(sys.excepthook, "names_peers", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lost = named(error) if isinstance(error, Exception) else None
        # this rank failed by itself: the hook that was there before shows the error
        if lost is None:
            return before(kind, error, trace)
        outermost = traceback.extract_tb(trace)[0]  # the script's own line; a hundred frames of torch follow
        sys.stderr.write(f"shardwise: {lost}; this rank was at {outermost.filename}:{outermost.lineno}\n")

    hook.names_peers = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def named(error: Exception) -> RunError | None:
    """Returns an error that names the lost ranks if `error` only echoes their end, else None.

    Writes into the store how this rank ended. Waits at most `ANSWER_S` seconds for the others.
    """
    import torch.distributed as dist

    # in a world of one there are no peers
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    echo = not isinstance(error, ShardwiseError) and is_echo("".join(traceback.format_exception(error)))
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        store = _store()
        store.set(_key("end", rank), "" if echo else f"{type(error).__name__}: {first_line(error)}"[:300])
        return _roll_call(store, world) if echo else None
    except RuntimeError:  # the process that holds the store has ended
        return _without_store() if echo else None


def _roll_call(store: Any, world: int) -> RunError | None:
    """Returns an error that names a rank that failed, or the silent ranks; None if all answer (a link broke)."""
    until, silent = time.monotonic() + ANSWER_S, list(range(world))
    while silent and time.monotonic() < until:
        time.sleep(_POLL_S)
        silent = [rank for rank in silent if not store.check([_key("end", rank)])]
    ends = {rank: store.get(_key("end", rank)).decode() for rank in range(world) if rank not in silent}
    # "" is the entry of a rank whose collective failed through another rank
    failed = {rank: said for rank, said in ends.items() if said}
    # a rank that wrote an error is the cause; silent ranks may have ended because of it
    if failed:
        first = min(failed)
        return RunError(f"{_where(store, [first])} failed, and the others lost it: {failed[first]}")
    if not silent:
        return None  # all ranks answered: a connection between them broke
    return RunError(
        f"lost of {world} ranks: {_where(store, silent)}. Their processes or their host have ended, or the network "
        "between the hosts has; the launcher's output there, or the host's log, tells why"
    )


def _without_store() -> RunError:
    """Returns the error for a store that does not answer, which means that rank 0 is lost."""
    from shardwise.ranks.mpi import here

    place = here()
    host = "" if place is None or place.master is None else f" ({place.master[0]})"
    return RunError(
        f"rank 0 is lost, and with it its host{host}, where ranks meet: its launcher's output, or its log, tells why"
    )


def _where(store: Any, ranks: Iterable[int]) -> str:
    """Returns a text of ranks with their hosts, such as "rank 1 on node-b; ranks 2, 3 on node-c"."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        key = _key("host", rank)
        host = store.get(key).decode() if store.check([key]) else "a host that said no name"
        by_host.setdefault(host, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(at) > 1)} {', '.join(at)} on {host}" for host, at in by_host.items())


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _key(what: str, rank: int) -> str:
    return f"shardwise/{what}/{rank}"
