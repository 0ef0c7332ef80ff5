"""Times collectives and messages between nodes, by op, size, number of nodes and ranks of each node.

Two nodes of two ranks:

    one rank of each    [0 2] [1 3]    both groups at the same time, as in a layout, so they share a node's links
    all ranks           [0 1 2 3]
    messages            0 <-> 2, 1 <-> 3 at the same time, there and back

Four nodes: the same for two of them (both pairs at the same time) and for four.

*What this does not do*: groups with some of a node's ranks, which are interpolated between one and all; distances of
nodes.
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

LONG_US = 1e6  # microseconds of a call after which no larger size is timed, since time grows in proportion then

Nodes = Sequence[Sequence[int]]


def between_times(device: torch.device, nodes: Nodes, sizes: Sequence[int] = BYTES) -> list[Between]:
    """Returns rows (op, nodes, ranks of each, bytes of the full tensor, microseconds). Collective over all ranks.

    nodes   the ranks of each of two or more nodes, equally many
    sizes   bytes, ascending

    A message (op "send") takes half of the time there and back. If the number of nodes is odd, the last sends none.
    """
    rows: list[Between] = []
    # for each number of nodes that divides theirs, all groups of that many nodes measure at the same time
    for count in divisors(len(nodes))[1:]:
        # groups of one rank of each node, and groups of all ranks
        for per_node in sorted({1, len(nodes[0])}):
            with _axis(groups(nodes, count, per_node)) as axis:
                rows += _growing(device, axis, count, per_node, sizes)
    # an odd node has no partner for messages
    with _axis(groups(nodes[: len(nodes) // 2 * 2], 2, 1)) as axis:
        if axis is not None:
            rows += [("send", 2, 1, size, us) for size, us in _messages(device, axis, sizes)]
    return rows


def groups(nodes: Nodes, count: int, per_node: int) -> list[list[int]]:
    """Returns groups of ranks over `count` neighbouring nodes, with `per_node` (one or all) ranks of each node."""
    blocks = [nodes[at : at + count] for at in range(0, len(nodes), count)]
    # with one rank of each node, ranks of the same local index form a group
    if per_node == len(nodes[0]):
        return [[rank for node in block for rank in node] for block in blocks]
    return [list(ranks) for block in blocks for ranks in zip(*block, strict=True)]


@contextmanager
def _axis(members: list[list[int]]) -> Iterator[Axis | None]:
    """Context that makes process groups of `members` and yields this rank's as an axis, or None if it is in none."""
    group, every = dist.new_subgroups_by_enumeration(members)
    mine = next((tuple(ranks) for ranks in members if dist.get_rank() in ranks), None)
    yield None if mine is None else Axis("probe", len(mine), dist.get_rank(group), group, mine)
    for member in every:
        if dist.get_rank(member) >= 0:
            dist.destroy_process_group(member)


def _growing(device: torch.device, axis: Axis | None, nodes: int, per_node: int, sizes: Sequence[int]) -> list[Between]:
    """Returns rows of collectives over `nodes` nodes, by ascending size until one takes longer than `LONG_US`."""
    rows: list[Between] = []
    assert axis is not None  # the number of nodes is divided evenly
    for wanted in sizes:
        times = of_size(Pace(device, None), axis, wanted)  # a link does not slow down with the CPU
        rows += [(op, nodes, per_node, size, us) for op, _, size, us in times]
        if _slowest(max(us for *_, us in times), axis, device) > LONG_US:
            break
    return rows


def _messages(device: torch.device, axis: Axis, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Returns (bytes, microseconds one way) of messages, by ascending size until one takes longer than `LONG_US`."""
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
    """Returns the maximum of `value` over the axis, so that its ranks take the same decision. Collective."""
    most = torch.tensor([value], device=device)
    all_reduce(most, axis, "probe", op="max")
    return float(most)
