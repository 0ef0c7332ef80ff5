"""Optimizer state of any class as tensors of a checkpoint and a tree of JSON, and back.

State of an optimizer in a script: scripts/whole_optimizer_state.

Each value in the state of one weight becomes a node:

    ["like", key]                  a tensor of the weight's own shape, sharded as the weight is
    ["whole", key]                 any other tensor (Adafactor's rows, LBFGS's history), unsharded
    ["number", dtype, value, shape, on]   a tensor of one element (a step counter); `on`: "host", "device" or "any"
    ["float", value], ["plain", value], ["list" | "tuple", [...]], ["dict", {...}]
    ["pairs" | "counter", [[node, node], ...]]     a dict, or a Counter, whose keys are not all str

Options of param groups are saved together with their values when the optimizer was made. Options that have changed
since then are state, and loading puts them back; for all others the new run's values hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from shardwise.checkpoint.holdings import Holding, optimized
from shardwise.checkpoint.manifest import canonical
from shardwise.checkpoint.pieces import Piece
from shardwise.device import on_host
from shardwise.engine.engine import Engine
from shardwise.engine.weights_file import DTYPES, dtype_code
from shardwise.errors import InputError, RefusedPlan

Node = list[Any]
Options = list[dict[str, Any]]  # for each param group {option: node}, without its parameters


BESIDE = ""  # stands for a weight's name where state belongs to no weight


class NoJson(Exception):
    """Raised for a value that no node can represent; the message says what kind of value it is."""


# --- out


def state_of(engine: Engine) -> tuple[dict[str, dict[str, Node]], list[Holding]]:
    """Returns (weight -> state key -> node, holdings of the state's tensors) of this rank's optimizer.

    State of no weight stands under the name `BESIDE`. Raises `RefusedPlan` for a value that no node can represent.
    """
    # an offloaded state may have failed to be written
    if engine.state.tier is not None:
        engine.state.tier.check()
    tree: dict[str, dict[str, Node]] = {}
    holdings: list[Holding] = []
    pieces = optimized(engine)
    for param, state in engine.optimizer.state.items():
        # some optimizers keep counters or settings under keys that are no parameters
        if id(param) not in pieces:
            if isinstance(param, torch.Tensor) and not param.numel():
                continue  # stands for a weight of which this rank has no element
            tree.setdefault(BESIDE, {})[str(param)] = _beside(param, state)
            continue
        name, piece, master = pieces[id(param)]
        tree[name] = {
            str(key): _encoded(value, f"optimizer/{name}/{key}", piece, master, holdings)
            for key, value in state.items()
        }
    return tree, holdings


def _beside(key: Any, value: Any) -> Node:
    """Returns the node of state under a key that is no parameter; `RefusedPlan` unless it is numbers and text."""
    try:
        if not isinstance(key, str):
            raise NoJson(f"a name of type {type(key).__name__}")
        return plain_node(value)
    except NoJson:
        raise RefusedPlan(
            f"the optimizer keeps state under {str(key)[:40]!r}, which is none of its weights, and not as numbers and "
            "text: a checkpoint has no place for it"
        ) from None


def _encoded(value: Any, key: str, piece: Piece, master: torch.Tensor, holdings: list[Holding]) -> Node:
    """Returns the node of a value of a weight's state; `RefusedPlan` if no node can represent it.

    key       name of the value's tensors in the checkpoint, "optimizer/WEIGHT/STATE"
    piece     which elements of the weight this rank's optimizer updates; `master`: the tensor that holds them
    holdings  list to which the value's tensors are added
    """
    if isinstance(value, torch.Tensor):
        return _encoded_tensor(value, key, piece, master, holdings)
    # a list stays a list and a tuple a tuple, since an optimizer may compare or change them
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encoded(val, f"{key}/{i}", piece, master, holdings) for i, val in enumerate(value)]]
    # dicts with other keys become pairs in `plain_node`, and may not hold tensors
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return ["dict", {name: _encoded(val, f"{key}/{name}", piece, master, holdings) for name, val in value.items()}]
    try:
        return plain_node(value)
    except NoJson:
        raise RefusedPlan(
            f"'{key}' of the optimizer's state is of type {type(value).__name__}: a checkpoint holds tensors, numbers, "
            "text, and lists and dicts of them"
        ) from None


def _encoded_tensor(value: torch.Tensor, key: str, piece: Piece, master: torch.Tensor, holdings: list[Holding]) -> Node:
    """Returns the node of a state tensor; parameters as `_encoded`.

    Raises `RefusedPlan` for a tensor that has neither the shape of the master nor one element, beside a sharded weight.
    """
    if value.shape == master.shape:
        holdings.append(Holding(key, piece, value))
        return ["like", key]
    if value.numel() == 1 and not value.is_complex():
        # a step counter on the accelerator (fused, capturable) is restored there. If weights lie on the host, so does
        # the counter in any case, and the new run's options decide ("any")
        on = "device" if not on_host(value.device) else "host" if not on_host(master.device) else "any"
        number = value.item()
        return ["number", dtype_code(key, value.dtype), _exact(number), list(value.shape), on]
    if not piece.is_whole:
        raise RefusedPlan(
            f"'{key}' of the optimizer's state has shape {tuple(value.shape)} beside a piece of shape "
            f"{tuple(master.shape)}: it is neither an element's nor one number, so no other plan could take it up"
        )
    holdings.append(Holding(key, Piece.whole(value.shape), value))
    return ["whole", key]


def _exact(number: Any) -> Any:
    return number.hex() if isinstance(number, float) else number


def plain_node(value: Any) -> Node:
    """Returns the node of a plain value (number, text, None, one-element tensor, container of such); else `NoJson`."""
    if isinstance(value, float):  # in hexadecimal, which keeps every bit
        return ["float", value.hex()]
    if value is None or isinstance(value, bool | int | str):
        return ["plain", value]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [plain_node(item) for item in value]]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value) and not isinstance(value, Counter):
        return ["dict", {name: plain_node(item) for name, item in value.items()}]
    if isinstance(value, dict):  # JSON would make text of its numbers
        pairs = [[plain_node(name), plain_node(item)] for name, item in value.items()]
        return ["counter" if isinstance(value, Counter) else "pairs", pairs]
    if isinstance(value, np.generic):  # read back as a Python number
        return plain_node(value.item())
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return ["number", dtype_code("option", value.dtype), _exact(value.item()), list(value.shape), "any"]
    raise NoJson(f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}")


def options_of(engine: Engine) -> Options:
    """Returns {option: node} of each param group; options that no node can represent are left out."""
    options: Options = []
    for group in engine.optimizer.param_groups:
        own: dict[str, Any] = {}
        for key, value in group.items():
            if key == "params":
                continue
            try:
                own[key] = plain_node(value)
            except NoJson:
                continue
        options.append(own)
    return options


def groups_of(engine: Engine, built: Options) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns (weight -> group id, group id -> {"options", "built"}).

    built   what `options_of` returned right after the optimizer was made

    The id is a hash of the entry, so groups with equal options share one.
    """
    group_of: dict[str, str] = {}
    groups: dict[str, Any] = {}
    pieces = optimized(engine)
    for group, now, before in zip(engine.optimizer.param_groups, options_of(engine), built, strict=True):
        entry = {"options": now, "built": before}
        # an id by content: ranks' entries are merged, and under one id must be equal
        number = xxhash.xxh3_64_hexdigest(canonical(entry))
        groups[number] = entry
        group_of |= {pieces[id(param)][0]: number for param in group["params"] if id(param) in pieces}
    return group_of, groups


# --- in


def leaves(node: Node) -> Iterator[tuple[str, str]]:
    """Yields (kind, key) of each tensor in a node; kind is "like" or "whole". `InputError` if it is no valid node."""
    # a checkpoint may contain anything, so nothing about the node is taken for granted
    try:
        kind = node[0]
        # the two kinds that name a tensor
        if kind in ("like", "whole"):
            yield kind, node[1]
        elif kind in ("list", "tuple"):
            for child in node[1]:
                yield from leaves(child)
        elif kind == "dict":
            for child in node[1].values():
                yield from leaves(child)
        # pairs of keys and values, both of which may be nodes
        elif kind in ("pairs", "counter"):
            for child in (item for pair in node[1] for item in pair):
                yield from leaves(child)
        elif kind not in ("number", "float", "plain"):
            raise ValueError("these are not the names of an optimizer's state")
    except (TypeError, ValueError, IndexError, AttributeError):
        raise InputError(f"the optimizer's state has {str(node)[:60]} where a value is expected") from None


def decoded(node: Node, read: Callable[[str, str], torch.Tensor] | None, device: torch.device, near: bool) -> Any:
    """Returns the Python value or tensor that a saved node encodes.

    read    (kind, key) -> the tensor; None if nodes contain no tensors of several elements
    device  the weight's device, for one-element tensors that were saved as on the "device"
    near    Whether one-element tensors that were saved as on "any" go to `device` too, else to the CPU
    """
    kind = node[0]
    if kind in ("like", "whole"):
        assert read is not None
        return read(kind, node[1])
    if kind == "number":
        _, dtype, value, shape, on = node
        # floats are saved in hexadecimal, which keeps every bit, infinities and NaN
        number = float.fromhex(value) if isinstance(value, str) else value
        where = device if on == "device" or (near and on == "any") else torch.device("cpu")
        return torch.full(shape, number, dtype=DTYPES[dtype], device=where)
    if kind == "float":
        return float.fromhex(node[1])
    if kind == "plain":
        return node[1]
    if kind == "dict":
        return {name: decoded(item, read, device, near) for name, item in node[1].items()}
    # dicts with keys other than str, and counters, which JSON would change
    if kind in ("pairs", "counter"):
        pairs = {decoded(a, read, device, near): decoded(b, read, device, near) for a, b in node[1]}
        return pairs if kind == "pairs" else Counter(pairs)
    values = [decoded(item, read, device, near) for item in node[1]]
    return values if kind == "list" else tuple(values)


def put_options(engine: Engine, group_of: dict[str, str], groups: dict[str, Any]) -> None:
    """Sets those options of param groups that had changed during the saved run (a counter, an estimate).

    group_of  weight -> group id; `groups`: group id -> {"options", "built"}, as `groups_of` returned them

    Raises `InputError` if the weights of one group were in groups with other changed options.
    """
    pieces = optimized(engine)
    for group in engine.optimizer.param_groups:
        # the saved plan may have had other pieces, so a group is found by its weights' names
        names = [pieces[id(param)][0] for param in group["params"] if id(param) in pieces]
        numbers = {group_of[name] for name in names if name in group_of}
        moved = [_moved(groups[number]) for number in sorted(numbers)]
        # it is undecidable which of several groups' options hold
        if any(nodes != moved[0] for nodes in moved[1:]):
            raise InputError(
                f"param group {group.get('name', '')!r} holds weights that were in groups with other options: "
                f"{[sorted(nodes) for nodes in moved]}; keep the groups as they were, or start anew with --init-from"
            )
        # a group without weights on this rank has no device
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for key, node in (moved[0] if moved else {}).items():
            if key in group:
                # a capturable or fused optimizer needs such numbers as tensors on the device
                group[key] = decoded(node, None, device, bool(group.get("capturable") or group.get("fused")))


def _moved(group: dict[str, Any]) -> dict[str, Node]:
    """Returns {option: node} of the group's options that changed since the optimizer was made."""
    built = group["built"]
    return {key: node for key, node in group["options"].items() if key in built and node != built[key]}
