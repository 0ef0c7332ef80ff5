"""The tensors among an operation's arguments: ATen nests them in tuples, lists and dicts, and nothing else.

Torch's own tree functions do the same for any registered class, at twenty times the cost, which would be most of the
cost of an operation on parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NESTS = (torch.Tensor, tuple, list, dict)
_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # most of what is met


def tensors_in(tree: Any, kind: type = torch.Tensor) -> list[Any]:
    """All tensors of a kind, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree] if isinstance(tree, kind) else []
    found: list[Any] = []
    _gather(tree, kind, found)
    return found


def _gather(nest: Any, kind: type, found: list[Any]) -> None:
    """Add the tensors of a kind among what is nested."""
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, tuple | list):
        return
    for leaf in nest:
        if type(leaf) in _ATOMS:
            continue
        if isinstance(leaf, torch.Tensor):
            if isinstance(leaf, kind):
                found.append(leaf)
        else:
            _gather(leaf, kind, found)


def replaced(kind: type, make: Callable[[Any], Any], tree: Any) -> Any:
    """The same with `make(tensor)` for each tensor of a kind."""
    if isinstance(tree, torch.Tensor):
        return make(tree) if isinstance(tree, kind) else tree
    if isinstance(tree, dict):
        return {key: replaced(kind, make, leaf) for key, leaf in tree.items()}
    if not isinstance(tree, tuple | list):
        return tree
    leaves = [replaced(kind, make, leaf) if isinstance(leaf, _NESTS) else leaf for leaf in tree]
    return leaves if isinstance(tree, list) else tuple(leaves)
