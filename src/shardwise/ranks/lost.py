"""Which ranks of a launcher's job have gone, asked where a collective tells of a closed connection alone.

    rank that fails by itself       says in the store what it raised, before it leaves
    rank whose collective broke     says that it is there, and waits a few seconds for the others' words
    rank, or host, that is lost     says nothing: it is named

The store lies with rank 0 (under torchrun, with the agent of its host): where it does not answer, that host is lost.
What this does not do: see a rank that is alive and in no collective of those that broke; it is said to be silent.
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

ANSWER_S = 5.0  # in which ranks notice that a peer has gone, and say so
_POLL_S = 0.1
# what a collective says on a rank whose peer has gone or never came
_ECHO = re.compile(
    r"connection (closed|reset) by peer|broken pipe|timed out waiting|socket (timeout|closed)|"
    r"wait timeout|connection refused|remote process (exited|has)|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)


def is_echo(text: str) -> bool:
    """Whether a traceback's text is of an error that a lost or missing peer causes."""
    return bool(_ECHO.search(text))


def greet() -> None:
    """Say in the store of the default group which host this rank is on; a script that ends by an error names peers."""
    import torch.distributed as dist

    _store().set(_key("host", dist.get_rank()), socket.gethostname())
    # a second group in this process: the hook is there
    if getattr(sys.excepthook, "names_peers", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lost = named(error) if isinstance(error, Exception) else None
        # an error of this rank's own, which the hook before shows as ever
        if lost is None:
            return before(kind, error, trace)
        outermost = traceback.extract_tb(trace)[0]  # the script's own line; a hundred frames of torch follow
        sys.stderr.write(f"shardwise: {lost}; this rank was at {outermost.filename}:{outermost.lineno}\n")

    hook.names_peers = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def named(error: Exception) -> RunError | None:
    """Returns the error that names the ranks that have gone; None where this rank failed by itself, or is alone.

    Says in the store how this rank ended. Waits at most `ANSWER_S` seconds for the others.
    """
    import torch.distributed as dist

    # alone, nobody can have been lost
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    echo = not isinstance(error, ShardwiseError) and is_echo("".join(traceback.format_exception(error)))
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        store = _store()
        store.set(_key("end", rank), "" if echo else f"{type(error).__name__}: {first_line(error)}"[:300])
        return _roll_call(store, world) if echo else None
    except RuntimeError:  # of the store: who holds it has gone
        return _without_store() if echo else None


def _roll_call(store: Any, world: int) -> RunError | None:
    """Returns the error that names ranks which failed or are silent; None where all answer, so that a link broke."""
    until, silent = time.monotonic() + ANSWER_S, list(range(world))
    while silent and time.monotonic() < until:
        time.sleep(_POLL_S)
        silent = [rank for rank in silent if not store.check([_key("end", rank)])]
    ends = {rank: store.get(_key("end", rank)).decode() for rank in range(world) if rank not in silent}
    # "" is said by a rank whose collective broke by another's fault: it is there, and no cause
    failed = {rank: said for rank, said in ends.items() if said}
    # a rank that said what it raised is the cause; the silent ones may be its victims
    if failed:
        first = min(failed)
        return RunError(f"{_where(store, [first])} failed, and the others lost it: {failed[first]}")
    if not silent:
        return None  # all are there: what broke is between them
    return RunError(
        f"lost of {world} ranks: {_where(store, silent)}. Their processes or their host have ended, or the network "
        "between the hosts has; the launcher's output there, or the host's log, tells why"
    )


def _without_store() -> RunError:
    """Returns the error of a rank whose store is gone with rank 0."""
    from shardwise.ranks.mpi import here

    place = here()
    host = "" if place is None or place.master is None else f" ({place.master[0]})"
    return RunError(
        f"rank 0 is lost, and with it its host{host}, where ranks meet: its launcher's output, or its log, tells why"
    )


def _where(store: Any, ranks: Iterable[int]) -> str:
    """Returns `rank 1 on node-b; ranks 2, 3 on node-c`."""
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
