"""Choose which weights are cut, along which dim, and who holds which index, from the labels of part/labels.

The labels of `part/labels` say which indices of which weights must lie together. A *family* is a set of weight dims
that share classes: the rows of Wq, Wk, Wv and the columns of Wo, or gate, up and down of an MLP. A family can be cut
when it has at least as many classes as there are ranks, gives and takes (so that one sum closes it), and no weight of
it is cut otherwise.

    q, k, v: rows | o: columns        family of heads         one all-reduce after o
    up, gate: rows | down: columns    family of the width     one all-reduce after down
    embedding: rows | head: rows      family of the words     one all-reduce after the embedding; the loss by parts

Classes are dealt kind by kind: indices that lie in the same weights among themselves, so that a skip and what it is
joined with are each spread over all ranks, and a group norm over either finds whole groups.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.comm import Ledger
from shardwise.errors import InputError, did_you_mean
from shardwise.part import Owners
from shardwise.part.labels import Use, WeightLabels
from shardwise.part.pairs import pairs_in
from shardwise.part.parameters import FLAT, KEPT

SHARE = 0.01  # of the model's elements, below which a lone table or head is not worth its collectives


@dataclass
class WeightCut:
    """How one parameter is cut: along which dim, who owns its indices, and what it does in products (`role`)."""

    name: str  # of the parameter
    dim: int
    owners: Owners  # of each index of `dim`
    role: str  # "output" | "input" | "rows" | "beside" (a bias, a per-head scale) | KEPT, ONCE (in shares; read whole)
    family: int  # number of the family that it is cut with


@dataclass
class Derived:
    """The cuts of a module, and why other parameters stay whole.

    cuts    by name of a parameter
    whole   by name of each other parameter: the reason
    uses    of weights in products, in the order of the forward
    frozen  names that stay whole so that more of the others can be cut (`starved`)
    needed_real  why the forward was followed on real weights, all of them on one rank; empty where it was not
    """

    cuts: dict[str, WeightCut] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    needed_real: str = ""
    ledger: Ledger | None = None  # what the rehearsal of a forward and backward would have sent

    def encoded(self) -> dict[str, Any]:
        """Returns the cuts and what stays whole, for JSON, without what they were derived from; see `decoded`."""
        cuts = [
            [cut.name, cut.dim, cut.owners.stops.tolist(), cut.owners.who.tolist(), cut.owners.ranks, cut.role,
             cut.family]
            for cut in self.cuts.values()
        ]  # fmt: skip
        return {"cuts": cuts, "whole": self.whole, "frozen": sorted(self.frozen), "needed_real": self.needed_real}

    @classmethod
    def decoded(cls, fields: dict[str, Any]) -> Derived:
        """Returns the cuts that another rank sent as `encoded()`."""
        cuts = {
            name: WeightCut(name, dim, Owners(np.array(stops), np.array(who), ranks), role, family)
            for name, dim, stops, who, ranks, role, family in fields["cuts"]
        }
        return cls(cuts, fields["whole"], frozen=set(fields["frozen"]), needed_real=fields["needed_real"])


@dataclass
class LinkedDims:
    """A family: weight dims that share classes.

    nodes    (name of a parameter, dim)
    classes  all of theirs, ascending
    lead     classes by index along the node that has the most of them
    """

    nodes: list[tuple[str, int]]
    classes: np.ndarray
    lead: np.ndarray

    def order(self) -> np.ndarray:
        """Returns the classes in the order in which the lead dim has them."""
        _, first = np.unique(self.lead, return_index=True)
        ordered = self.lead[np.sort(first)]
        return np.concatenate([ordered, np.setdiff1d(self.classes, ordered)])


def families(labels: WeightLabels) -> list[LinkedDims]:
    """Returns families of weight dims that share classes, in the parameters' order, but for those with class 0."""
    nodes = list(labels.classes)
    root = list(range(len(nodes)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    uniques = [np.unique(labels.classes[node]) for node in nodes]
    # nodes that have a class in common are joined: union-find over the first node of each class
    top = max((int(u.max()) for u in uniques if len(u)), default=0)
    first_node = np.full(top + 1, -1)
    for i, classes in enumerate(uniques):
        classes = classes[classes != 0]
        for j in np.unique(first_node[classes]):
            if j >= 0:  # -1: the class is new
                root[find(i)] = find(int(j))
        first_node[classes] = i
    members: dict[int, list[int]] = {}
    for i, classes in enumerate(uniques):
        if len(classes):
            members.setdefault(find(i), []).append(i)
    result = []
    for group in members.values():
        if any((uniques[i] == 0).any() for i in group):  # class 0: an index that must stay whole
            continue
        lead = max(group, key=lambda i: len(uniques[i]))
        every = np.unique(np.concatenate([uniques[i] for i in group]))
        result.append(LinkedDims([nodes[i] for i in group], every, labels.classes[nodes[lead]]))
    return result


def derive(
    labels: WeightLabels, elements: dict[str, int], ranks: int, blocked: dict[str, str] | None = None, *,
    dealt: frozenset[str] = frozenset(),
) -> Derived:  # fmt: skip
    """Returns the cuts over `ranks`; families with a `blocked` parameter stay whole, for its reason.

    labels    of one forward
    elements  of each parameter, by name
    dealt     stacked weights of experts whose first dim another axis deals: it is not cut here
    """
    roles = _roles(labels.uses)
    derived = Derived(whole=dict(labels.whole_because), uses=labels.uses)
    total = sum(elements.values())
    # in the order of the forward: of two families that meet in a weight, the earlier one is cut
    ordered = sorted(families(labels), key=lambda f: min(_first_use(labels.uses, name) for name, _ in f.nodes))
    for number, family in enumerate(ordered):
        barred = next((blocked[name] for name, _ in family.nodes if name in (blocked or {})), "") if blocked else ""
        if any(dim == 0 and name in dealt for name, dim in family.nodes):
            barred = "ep deals its experts"
        reason = barred or _unfit(family, roles, elements, total, ranks, derived)
        if reason:
            for name, _ in family.nodes:  # a family of one class is the least of reasons, if there is another
                if name not in derived.cuts and (len(family.classes) > 1 or name not in derived.whole):
                    derived.whole[name] = reason
            continue
        order = family.order()
        rank_of = np.zeros(int(order.max()) + 1, dtype=np.int16)
        rank_of[order] = _dealt(order, [labels.classes[node] for node in family.nodes], ranks)
        for name, dim in family.nodes:
            owners = Owners.of(rank_of[labels.classes[name, dim]], ranks)
            role = {"inner": "input", "outer": "output", "rows": "rows"}.get(
                _main(roles.get((name, dim), set())), "beside"
            )
            derived.cuts[name] = WeightCut(name, dim, owners, role, number)
            derived.whole.pop(name, None)
    return derived


def _dealt(order: np.ndarray, nodes: list[np.ndarray], ranks: int) -> np.ndarray:
    """Returns (classes,) the rank of each class in `order`: classes found in the same weights are dealt in blocks.

    So two tensors that are put side by side (a skip and what it is joined with) are each spread over all ranks.
    """
    has_class = np.stack([np.isin(order, classes) for classes in nodes])  # (nodes, classes)
    _, kinds = np.unique(has_class, axis=1, return_inverse=True)
    owner = np.zeros(len(order), dtype=np.int16)
    few = np.zeros(len(order), dtype=bool)
    for kind in np.unique(kinds):
        same = kinds.reshape(-1) == kind
        if same.sum() < ranks:  # too few to give each rank one: dealt together with other such kinds
            few |= same
        else:
            owner[same] = Owners.blocks(int(same.sum()), ranks).array
    owner[few] = Owners.blocks(int(few.sum()), ranks).array
    return owner


def _roles(uses: list[Use]) -> dict[tuple[str, int], set[str]]:
    """Returns {(parameter, dim): its roles in products}: "inner" (summed over), "outer" (kept), "rows"."""
    roles: dict[tuple[str, int], set[str]] = {}
    for use in uses:
        roles.setdefault((use.name, use.inner), set()).add("rows" if use.kind == "rows" else "inner")
        roles.setdefault((use.name, use.outer), set()).add("outer")
    return roles


def _main(roles: set[str]) -> str:
    return next((role for role in ("inner", "rows", "outer") if role in roles), "")


def _first_use(uses: list[Use], name: str) -> int:
    return next((place for place, use in enumerate(uses) if use.name == name), len(uses))


def _unfit(
    family: LinkedDims, roles: dict, elements: dict[str, int], total: int, ranks: int, derived: Derived
) -> str:  # fmt: skip
    """Returns why the family is not cut, or "" where it is.

    roles     {(weight's name, dim): its places in products, such as "inner", "outer", "rows"}
    elements  of each weight, by name; `total` of the whole module
    derived   cuts that families before this one were given
    """
    has_roles = set().union(*(roles.get(node, set()) for node in family.nodes)) if family.nodes else set()
    if not has_roles:
        return "it belongs to no product that is cut"
    names = [name for name, _ in family.nodes]
    if len(family.classes) == 1:
        return "all of its indices must lie together: something runs over them"
    if len(family.classes) < ranks:
        return f"its indices fall into {len(family.classes)} groups that must lie together, fewer than {ranks} ranks"
    if len(set(names)) < len(names):
        return "both of its dims would have to be cut alike"
    taken = [name for name in names if name in derived.cuts]
    if taken:
        return f"'{taken[0]}', which it is joined with, is cut along its other dim"
    # some weight gives what another takes, so that one sum closes the family; else a lone table or head
    closed = {"inner", "outer"} <= has_roles or {"rows", "outer"} <= has_roles
    if not closed and sum(elements[name] for name in names) < SHARE * total:
        return "cutting it would save less than it costs"
    if has_roles == {"inner"}:
        return "nothing before it is cut"
    return ""


def starved(labels: WeightLabels, ranks: int) -> list[str]:
    """Returns weights with fewer heads than ranks (K and V of grouped queries): with them whole, the rest can be cut.

    Of each family that gives and takes but has too few classes, the output weights smaller than the largest.
    """
    roles = _roles(labels.uses)
    names: list[str] = []
    for family in families(labels):
        # enough classes for every rank: the family can be cut
        if len(family.classes) >= ranks:
            continue
        # dims that only give, with their classes (K and V have those of fewer heads)
        outer = [(len(labels.classes[node]), node[0]) for node in family.nodes if roles.get(node) == {"outer"}]
        inner = [len(labels.classes[node]) for node in family.nodes if "inner" in roles.get(node, set())]
        # weights that give, each with a bias at most, those that take, and hardly more: attention; larger ones stay
        if outer and inner and len(family.nodes) <= 2 * len(outer) + len(inner) + 2:
            largest = max(max(n for n, _ in outer), max(inner))
            names += [name for n, name in outer if n < largest]
    return names


def matching(names: list[str], patterns: tuple[str, ...]) -> set[str]:
    """Returns the parameters that a pattern names, by their path or that of a module around them.

    Raises `InputError` for a pattern that matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if any(fnmatch.fnmatchcase(path, pattern) for path in _around(name))}
        # a pattern that matches nothing is a mistake; the message names the nearest path
        if not hits:
            paths = sorted({path for name in names for path in _around(name)})
            raise InputError(f"tp_whole: no parameter or module matches '{pattern}'{did_you_mean(pattern, paths)}")
        chosen |= hits
    return chosen


def _around(name: str) -> list[str]:
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(1, len(pieces) + 1)]


def kept_shares(
    module: nn.Module, ranks: int, whole: dict[str, str], barred: Collection[str], role: str = KEPT
) -> Derived:
    """Returns cuts of all weights that `ranks` can hold in shares, but for the `barred`; none where that spares little.

    whole  why no parameter's products can be shared
    role   KEPT: gathered whenever it is read; ONCE: once in a forward
    """
    named = dict(module.named_parameters())
    hidden, pairs = set(_beside_attributes(module)), pairs_in(module)
    derived = Derived(whole=dict(whole))
    for number, (name, param) in enumerate(named.items()):
        sizes = param.shape[:-1] if name in pairs else param.shape  # both parts of a complex number on one rank
        dim = next((d for d, size in enumerate(sizes) if size >= ranks), None)
        # `hidden`: read past its attribute, the module would meet a share of it
        if dim is None or name in barred or id(param) in hidden or not param.is_floating_point():
            continue
        derived.cuts[name] = WeightCut(name, dim, Owners.blocks(param.shape[dim], ranks), role, number)
        derived.whole.pop(name, None)
    spared = sum(named[name].numel() for name in derived.cuts)
    if spared < SHARE * sum(param.numel() for param in named.values()):
        return Derived(whole=dict(whole))
    return derived


def _beside_attributes(module: nn.Module) -> Iterator[int]:
    """Yields ids of parameters that a module holds in a list or dict of its own too: read there, past attributes."""
    for child in module.modules():
        # a recurrent layer's list of its flat weights is made anew from its attributes (`see_parts`)
        own = {"_parameters", "_modules", FLAT if isinstance(child, nn.RNNBase) else ""}
        for key, value in vars(child).items():
            # modules in a list have attributes by which their weights are read
            if key not in own and isinstance(value, list | tuple | dict):
                yield from (id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
