"""What a loss is made of, read from its autograd graph: a number for its operations, and outputs of the model."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from shardwise.scripts.tape import ALIASED

_NODES = 4000  # of a graph that are followed
_BETWEEN = ("ViewBackward", "AliasBackward", ALIASED)  # modules, as a look itself puts there


def followed(loss: torch.Tensor, outputs: list[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """Returns a checksum of the names of the loss's operations, and the outputs that it is directly made of."""
    ends = {one.grad_fn: one for one in outputs}
    names, found = _walk([loss.grad_fn], ends.__contains__)
    reached = [ends[node] for node in found]
    if len(reached) > 1:
        above = [child for node in found for child, _ in node.next_functions if child is not None]
        behind = set(_walk(above, ends.__contains__)[1])
        reached = [one for one in reached if one.grad_fn not in behind]
    return zlib.crc32(" ".join(names).encode()), reached


def _walk(nodes: list[Any], is_end: Callable[[Any], bool]) -> tuple[list[str], list[Any]]:
    """The names of the nodes of a graph down to its ends, and the ends that were met."""
    waiting, seen, names, found = list(nodes), set(nodes), list[str](), list[Any]()
    while waiting and len(names) < _NODES:
        node = waiting.pop()
        if is_end(node):
            found.append(node)
            continue
        if not node.name().startswith(_BETWEEN):
            names.append(node.name())
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return names, found
