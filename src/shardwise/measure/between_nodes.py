"""Time collectives and messages between nodes, by kind, size, number of nodes and ranks of each.

Two nodes of two ranks:

    one rank of each    [0 2] [1 3]    at once, as the groups of a layout are: they share what a node has of links
    all ranks           [0 1 2 3]
    messages            0 <-> 2, 1 <-> 3 at once, there and back

Four nodes: the same for two of them (both pairs at once) and for four.

*What this does not do*: part of a node's ranks in one group, which is read between one and all; far and near nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from shardwise.cluster.cluster import Between
from shardwise.comm import Axis, all_reduce, receive, send
from shardwise.measure.collective_times import BYTES, LARGE, OFTEN, SELDOM, after_work, of_size
from shardwise.measure.pace import Pace
from shardwise.planner.candidates import divisors

LONG_US = 1e6  # a size whose slowest call takes so long is a link's last: larger ones take as many times longer

Nodes = Sequence[Sequence[int]]


def between_times(device: torch.device, nodes: Nodes, sizes: Sequence[int] = BYTES) -> list[Between]:
    """Returns rows (op, nodes, ranks of each, bytes of the whole tensor, microseconds). Collective over all ranks.

    nodes   the ranks of each, all of the same number, two nodes or more
    sizes   bytes, ascending

    A message ("send") is half of what it takes there and back. Of an odd number of nodes the last sends none.
    """
    rows: list[Between] = []
    # each number of nodes that divides them: as many groups measure at once
    for count in divisors(len(nodes))[1:]:
        # one rank of each node shares no link; all of them do
        for per_node in sorted({1, len(nodes[0])}):
            with _axis(groups(nodes, count, per_node)) as axis:
                rows += _growing(device, axis, count, per_node, sizes)
    # an odd node has no partner for messages
    with _axis(groups(nodes[: len(nodes) // 2 * 2], 2, 1)) as axis:
        if axis is not None:
            rows += [("send", 2, 1, size, us) for size, us in _messages(device, axis, sizes)]
    return rows


def groups(nodes: Nodes, count: int, per_node: int) -> list[list[int]]:
    """Returns groups of ranks over `count` neighbouring nodes: of all their ranks, or of those at one place in each."""
    blocks = [nodes[at : at + count] for at in range(0, len(nodes), count)]
    # all ranks of the nodes are one group; else ranks at the same place in each node are one
    if per_node == len(nodes[0]):
        return [[rank for node in block for rank in node] for block in blocks]
    return [list(ranks) for block in blocks for ranks in zip(*block, strict=True)]


@contextmanager
def _axis(members: list[list[int]]) -> Iterator[Axis | None]:
    """Context: yields this rank's group among `members`; None where it is in none of them."""
    group, every = dist.new_subgroups_by_enumeration(members)
    mine = next((tuple(ranks) for ranks in members if dist.get_rank() in ranks), None)
    yield None if mine is None else Axis("probe", len(mine), dist.get_rank(group), group, mine)
    for member in every:
        if dist.get_rank(member) >= 0:
            dist.destroy_process_group(member)


def _growing(device: torch.device, axis: Axis | None, nodes: int, per_node: int, sizes: Sequence[int]) -> list[Between]:
    """Returns rows of collectives over `nodes` nodes, by size, until one takes longer than `LONG_US`."""
    rows: list[Between] = []
    assert axis is not None  # the number of nodes is divided evenly
    for wanted in sizes:
        times = of_size(Pace(device, None), axis, wanted)  # a link does not slow down with the CPU
        rows += [(op, nodes, per_node, size, us) for op, _, size, us in times]
        if _slowest(max(us for *_, us in times), axis, device) > LONG_US:
            break
    return rows


def _messages(device: torch.device, axis: Axis, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Returns (bytes, microseconds of one way) of messages there and back, until one takes longer than `LONG_US`."""
    rows: list[tuple[int, float]] = []
    for wanted in sizes:
        tensor = torch.zeros(max(1, wanted // 4), device=device)
        call = partial(_there_and_back, tensor, axis)
        rows.append((tensor.nbytes, 1e6 * after_work(call, device, OFTEN if wanted <= LARGE else SELDOM) / 2))
        if _slowest(rows[-1][1], axis, device) > LONG_US:
            break
    return rows


def _there_and_back(tensor: torch.Tensor, axis: Axis) -> None:
    turns = (send, receive) if axis.index == 0 else (receive, send)
    for turn in turns:
        turn(tensor, axis, 1 - axis.index, "probe", 0).wait()


def _slowest(value: float, axis: Axis, device: torch.device) -> float:
    """Returns the largest value on the axis, the same on its ranks, which go on together or not at all."""
    most = torch.tensor([value], device=device)
    all_reduce(most, axis, "probe", op="max")
    return float(most)
