"""Which ranks share a node; `apart` makes each node's ranks the default process group for a while.

    world    0 1 2 3          one group
    apart    0 1 | 0 1        the same processes, a group for each node
    world    0 1 2 3          again

What this does not do: nodes with unequal numbers of ranks, or ranks dealt to hosts in turns; both are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

from shardwise.errors import InputError
from shardwise.ranks.join import _backend
from shardwise.ranks.scheduling import take_turns

_TIMES = count()  # every rank parts as often as the others


def nodes_of(hosts: Sequence[tuple[str, int | None]]) -> list[list[int]]:
    """Returns the ranks of each node, from each rank's (host name, local rank or None).

    Local ranks decide where all have one. Raises `InputError`, with what to do, where the nodes have unequal numbers
    of ranks, or where a node's ranks do not follow each other.
    """
    # names of hosts may be the same on several (containers): local ranks tell them apart
    by_local = all(local is not None for _, local in hosts)
    rows = enumerate(hosts)
    first = [local == 0 if by_local else rank == 0 or hosts[rank - 1][0] != host for rank, (host, local) in rows]
    starts = [rank for rank, begins in enumerate(first) if begins]
    nodes = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(hosts)], strict=True)]
    if by_local:
        # local ranks count from 0 within each node, in order
        in_order = [rank - node[0] for node in nodes for rank in node] == [local for _, local in hosts]
    else:
        # each name begins once: a host that comes a second time had its ranks dealt in turns
        in_order = len({hosts[node[0]][0] for node in nodes}) == len(nodes)
    if not in_order:
        raise InputError(
            "ranks of one host do not follow each other, as plans lay them out: deal them host by host "
            "(srun --distribution=block, mpirun --map-by slot)"
        )
    # a cluster's text has one number of devices a node
    if len({len(node) for node in nodes}) > 1:
        sizes = ", ".join(str(len(node)) for node in nodes)
        raise InputError(
            f"the nodes have {sizes} ranks, and a cluster has as many in each: start the same number on every host "
            "(torchrun --nproc-per-node, srun --ntasks-per-node, mpirun --map-by ppr:N:node)"
        )
    return nodes


@contextmanager
def apart(ranks: Sequence[int], timeout_s: float) -> Iterator[None]:
    """Context: these ranks are the default process group inside; the group of all ranks is restored afterwards.

    Collective over all ranks, each of which names the ranks of its own part. Groups made before, or inside, are gone
    afterwards. `timeout_s`: of collectives, and of the wait for the ranks of other parts. An error inside is raised
    without a wait for others.
    """
    import torch.distributed as dist

    rank, size, name = dist.get_rank(), dist.get_world_size(), f"apart/{next(_TIMES)}"
    store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=timeout_s)

    def be(which: str, rank: int, members: int) -> None:
        """Open the default process group anew, of `members` ranks, over the part `which` of the store."""
        dist.init_process_group(
            _own_backend(),
            store=dist.PrefixStore(f"{name}/{which}", store),
            rank=rank,
            world_size=members,
            timeout=timeout,
        )
        take_turns()

    def end(which: str) -> None:
        """Close the group once every rank has come here, by the store: until then one may still use the group."""
        store.set(f"{name}/{which}/{rank}", "")
        store.wait([f"{name}/{which}/{other}" for other in range(size)], timeout)
        dist.destroy_process_group()

    end("before")
    be(f"part/{ranks[0]}", list(ranks).index(rank), len(ranks))
    yield
    end("inside")
    be("after", rank, size)


def _own_backend() -> Any:
    """Returns the backend of `join`, on the device this rank has."""
    from shardwise.device import current_device

    return _backend(current_device().index or 0)
