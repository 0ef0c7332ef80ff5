"""Finds which ranks share a node (`nodes_of`), and splits the default process group for a while (`apart`).

    world    0 1 2 3          one group
    apart    0 1 | 0 1        the same processes, a group for each part, such as each node
    world    0 1 2 3          again

What this does not do: nodes with unequal numbers of ranks, or ranks placed on hosts in turns; both are refused.
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
    """Returns a list of each node's ranks, in order.

    hosts   (host name, local rank) of each rank, in rank order; local rank None if the launcher does not tell it

    Nodes are told apart by local ranks if all ranks have one, else by host names. Raises `InputError` if nodes have
    unequal numbers of ranks, or if a node's ranks are not consecutive.
    """
    # several hosts may have the same name (containers), which local ranks tell apart
    by_local = all(local is not None for _, local in hosts)
    rows = enumerate(hosts)
    first = [local == 0 if by_local else rank == 0 or hosts[rank - 1][0] != host for rank, (host, local) in rows]
    starts = [rank for rank, begins in enumerate(first) if begins]
    nodes = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(hosts)], strict=True)]
    if by_local:
        # local ranks count from 0 within each node, in order
        in_order = [rank - node[0] for node in nodes for rank in node] == [local for _, local in hosts]
    else:
        # a name that begins a second run of ranks belongs to a host whose ranks are not consecutive
        in_order = len({hosts[node[0]][0] for node in nodes}) == len(nodes)
    if not in_order:
        raise InputError(
            "ranks of one host do not follow each other, as plans lay them out: deal them host by host "
            "(srun --distribution=block, mpirun --map-by slot)"
        )
    # a cluster's description has one number of devices for all nodes
    if len({len(node) for node in nodes}) > 1:
        sizes = ", ".join(str(len(node)) for node in nodes)
        raise InputError(
            f"the nodes have {sizes} ranks, and a cluster has as many in each: start the same number on every host "
            "(torchrun --nproc-per-node, srun --ntasks-per-node, mpirun --map-by ppr:N:node)"
        )
    return nodes


@contextmanager
def apart(ranks: Sequence[int], timeout_s: float) -> Iterator[None]:
    """Context in which `ranks` are the default process group; afterwards the group of all ranks is restored.

    ranks      this rank's part, in the order of their new numbers; each rank passes its own part
    timeout_s  seconds, of collectives inside and of the wait for other parts

    Collective over all ranks. Groups made before, or inside, are destroyed. After an error inside, which is raised
    without a wait for other ranks, there is no restored group.
    """
    import torch.distributed as dist

    rank, size, name = dist.get_rank(), dist.get_world_size(), f"apart/{next(_TIMES)}"
    store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=timeout_s)

    def be(which: str, rank: int, members: int) -> None:
        """Opens a new default process group of `members` ranks, over the store's prefix `which`; `rank`: in it."""
        dist.init_process_group(
            _own_backend(),
            store=dist.PrefixStore(f"{name}/{which}", store),
            rank=rank,
            world_size=members,
            timeout=timeout,
        )
        take_turns()

    def end(which: str) -> None:
        """Destroys the group once every rank of the world has called this, since one may still be using it."""
        store.set(f"{name}/{which}/{rank}", "")
        store.wait([f"{name}/{which}/{other}" for other in range(size)], timeout)
        dist.destroy_process_group()

    end("before")
    be(f"part/{ranks[0]}", list(ranks).index(rank), len(ranks))
    yield
    end("inside")
    be("after", rank, size)


def _own_backend() -> Any:
    """Returns the backend text that `join` uses, for this rank's current device."""
    from shardwise.device import current_device

    return _backend(current_device().index or 0)
