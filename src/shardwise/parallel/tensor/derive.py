"""Choose which weights are sharded, along which dim, and which rank owns which index, from the labels of part/labels.

Indices of weights with the same label, a *class*, must be on one rank. A *family* is a set of weight dims that share
classes, for example the rows of Wq, Wk, Wv and the columns of Wo, or gate, up and down of an MLP. A family can be cut
if it has at least as many classes as there are ranks, has dims that products keep and dims that products sum over (so
that one all-reduce ends it), and none of its weights is cut along another dim.

    q, k, v: rows | o: columns        family of heads         one all-reduce after o
    up, gate: rows | down: columns    family of the width     one all-reduce after down
    embedding: rows | head: rows      family of the words     one all-reduce after the embedding; sharded loss

Classes are distributed over ranks kind by kind, where a kind is the classes found in the same weights. So a skip
connection and the tensor that it is concatenated with are each spread over all ranks, and a group norm over either
finds whole groups on a rank.
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

SHARE = 0.01  # fraction of the model's elements below which a lone table or head is not worth its collectives


@dataclass
class WeightCut:
    """How one parameter is sharded.

    name    of the parameter;  dim  along which it is cut;  owners  rank of each index of `dim`
    role    what `dim` is in products: "output" (kept), "input" (summed over), "rows" (looked up), "beside" (in none, as
            of a bias or a per-head scale); KEPT or ONCE: only stored in shares, and gathered to read (`kept_shares`)
    family  id of the family that it is cut with
    """

    name: str
    dim: int
    owners: Owners
    role: str
    family: int


@dataclass
class Derived:
    """The cuts of a module, and why other parameters are not cut.

    cuts         name of a parameter -> its cut
    whole        name of each other parameter -> the reason why it is not cut
    uses         uses of weights in products, in the order of the forward
    frozen       names that are not cut so that more of the others can be (`starved`)
    needed_real  why the forward was run on real values, with all weights on one rank; "" if it was not
    ledger       what the rehearsal of a forward and backward would have sent; None before it
    """

    cuts: dict[str, WeightCut] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    needed_real: str = ""
    ledger: Ledger | None = None

    def encoded(self) -> dict[str, Any]:
        """Returns the cuts and the fields `whole`, `frozen`, `needed_real`, as JSON values that `decoded` reads."""
        cuts = [
            [cut.name, cut.dim, cut.owners.stops.tolist(), cut.owners.who.tolist(), cut.owners.ranks, cut.role,
             cut.family]
            for cut in self.cuts.values()
        ]  # fmt: skip
        return {"cuts": cuts, "whole": self.whole, "frozen": sorted(self.frozen), "needed_real": self.needed_real}

    @classmethod
    def decoded(cls, fields: dict[str, Any]) -> Derived:
        """Returns the `Derived` that another rank sent as `encoded()`, without `uses` and `ledger`."""
        cuts = {
            name: WeightCut(name, dim, Owners(np.array(stops), np.array(who), ranks), role, family)
            for name, dim, stops, who, ranks, role, family in fields["cuts"]
        }
        return cls(cuts, fields["whole"], frozen=set(fields["frozen"]), needed_real=fields["needed_real"])


@dataclass
class LinkedDims:
    """A family of weight dims that share classes.

    nodes    (name of a parameter, dim) of each
    classes  (n,) all classes of the nodes, ascending
    lead     class of each index along the node that has the most classes
    """

    nodes: list[tuple[str, int]]
    classes: np.ndarray
    lead: np.ndarray

    def order(self) -> np.ndarray:
        """Returns the classes in the order in which they first occur in `lead`, then those that do not occur there."""
        _, first = np.unique(self.lead, return_index=True)
        ordered = self.lead[np.sort(first)]
        return np.concatenate([ordered, np.setdiff1d(self.classes, ordered)])


def families(labels: WeightLabels) -> list[LinkedDims]:
    """Returns the families, in the order of their parameters, without those with class 0, which may not be cut."""
    nodes = list(labels.classes)
    root = list(range(len(nodes)))

    def find(i: int) -> int:
        """Returns the representative of node i, and shortens the path to it."""
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    uniques = [np.unique(labels.classes[node]) for node in nodes]
    # union-find joins each node with the last node seen of each of its classes
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
        if any((uniques[i] == 0).any() for i in group):
            continue
        lead = max(group, key=lambda i: len(uniques[i]))
        every = np.unique(np.concatenate([uniques[i] for i in group]))
        result.append(LinkedDims([nodes[i] for i in group], every, labels.classes[nodes[lead]]))
    return result


def derive(
    labels: WeightLabels, elements: dict[str, int], ranks: int, blocked: dict[str, str] | None = None, *,
    dealt: frozenset[str] = frozenset(),
) -> Derived:  # fmt: skip
    """Returns the cuts over `ranks` ranks.

    labels    of the weights in a forward
    elements  name of a parameter -> its number of elements
    blocked   name -> reason why no family with this parameter is cut
    dealt     names of stacked weights of experts, whose dim 0 `ep` distributes, so that it is not cut here
    """
    roles = _roles(labels.uses)
    derived = Derived(whole=dict(labels.whole_because), uses=labels.uses)
    total = sum(elements.values())
    # in the order of the forward, so that of two families with one weight the earlier is cut
    ordered = sorted(families(labels), key=lambda f: min(_first_use(labels.uses, name) for name, _ in f.nodes))
    for number, family in enumerate(ordered):
        barred = next((blocked[name] for name, _ in family.nodes if name in (blocked or {})), "") if blocked else ""
        if any(dim == 0 and name in dealt for name, dim in family.nodes):
            barred = "ep deals its experts"
        reason = barred or _unfit(family, roles, elements, total, ranks, derived)
        if reason:
            for name, _ in family.nodes:  # the reason of a family of one class is told only if there is no other
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
    """Returns (classes,) the rank of each class in `order`; classes found in the same weights are dealt in blocks.

    nodes   classes of each weight dim of the family
    So two tensors that are concatenated (a skip connection and another) are each spread over all ranks.
    """
    has_class = np.stack([np.isin(order, classes) for classes in nodes])  # (nodes, classes)
    _, kinds = np.unique(has_class, axis=1, return_inverse=True)
    owner = np.zeros(len(order), dtype=np.int16)
    few = np.zeros(len(order), dtype=bool)
    for kind in np.unique(kinds):
        same = kinds.reshape(-1) == kind
        if same.sum() < ranks:  # fewer than ranks, so distributed together with other such kinds
            few |= same
        else:
            owner[same] = Owners.blocks(int(same.sum()), ranks).array
    owner[few] = Owners.blocks(int(few.sum()), ranks).array
    return owner


def _roles(uses: list[Use]) -> dict[tuple[str, int], set[str]]:
    """Returns (parameter, dim) -> roles in products, of "inner" (summed over), "outer" (kept), "rows" (looked up)."""
    roles: dict[tuple[str, int], set[str]] = {}
    for use in uses:
        roles.setdefault((use.name, use.inner), set()).add("rows" if use.kind == "rows" else "inner")
        roles.setdefault((use.name, use.outer), set()).add("outer")
    return roles


def _main(roles: set[str]) -> str:
    """Returns the role that decides how a weight is cut; "" without any."""
    return next((role for role in ("inner", "rows", "outer") if role in roles), "")


def _first_use(uses: list[Use], name: str) -> int:
    """Returns the index in `uses` of a weight's first use; len(uses) if it has none."""
    return next((place for place, use in enumerate(uses) if use.name == name), len(uses))


def _unfit(
    family: LinkedDims, roles: dict, elements: dict[str, int], total: int, ranks: int, derived: Derived
) -> str:  # fmt: skip
    """Returns why the family cannot be cut, or "" if it can.

    roles     as `_roles` returns them
    elements  name of a parameter -> its number of elements;  total  that of all
    derived   the cuts of earlier families
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
    # closed: a product sums over the dim, so that an all-reduce ends the family; otherwise it is a lone table or head
    closed = {"inner", "outer"} <= has_roles or {"rows", "outer"} <= has_roles
    if not closed and sum(elements[name] for name in names) < SHARE * total:
        return "cutting it would save less than it costs"
    if has_roles == {"inner"}:
        return "nothing before it is cut"
    return ""


def starved(labels: WeightLabels, ranks: int) -> list[str]:
    """Returns names of weights with too few heads (K, V of grouped queries), without which other weights can be cut.

    These are, in each family with fewer classes than `ranks`, the output weights that are smaller than the largest.
    """
    roles = _roles(labels.uses)
    names: list[str] = []
    for family in families(labels):
        if len(family.classes) >= ranks:
            continue
        # (size of the dim, name) of weights that only give outputs (those of K and V are smaller)
        outer = [(len(labels.classes[node]), node[0]) for node in family.nodes if roles.get(node) == {"outer"}]
        inner = [len(labels.classes[node]) for node in family.nodes if "inner" in roles.get(node, set())]
        # attention is output weights, at most a bias for each, input weights, and two more; not larger families
        if outer and inner and len(family.nodes) <= 2 * len(outer) + len(inner) + 2:
            largest = max(max(n for n, _ in outer), max(inner))
            names += [name for n, name in outer if n < largest]
    return names


def matching(names: list[str], patterns: tuple[str, ...]) -> set[str]:
    """Returns those of `names` whose path, or that of a module around them, matches one of the shell-style patterns.

    Raises `InputError` for a pattern that matches nothing.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if any(fnmatch.fnmatchcase(path, pattern) for path in _around(name))}
        if not hits:
            paths = sorted({path for name in names for path in _around(name)})
            raise InputError(f"tp_whole: no parameter or module matches '{pattern}'{did_you_mean(pattern, paths)}")
        chosen |= hits
    return chosen


def _around(name: str) -> list[str]:
    """Returns the paths of all modules around a parameter, and its name, outermost first."""
    pieces = name.split(".")
    return [".".join(pieces[:end]) for end in range(1, len(pieces) + 1)]


def kept_shares(
    module: nn.Module, ranks: int, whole: dict[str, str], barred: Collection[str], role: str = KEPT
) -> Derived:
    """Returns cuts by which weights are only stored in shares over `ranks`; without any if that saves little memory.

    whole   name -> why the products of a parameter cannot be sharded
    barred  names of parameters that are not cut
    role    KEPT: gathered whenever it is read; ONCE: gathered once in a forward
    """
    named = dict(module.named_parameters())
    hidden, pairs = set(_beside_attributes(module)), pairs_in(module)
    derived = Derived(whole=dict(whole))
    for number, (name, param) in enumerate(named.items()):
        sizes = param.shape[:-1] if name in pairs else param.shape  # not the dim of 2 of a complex parameter's pairs
        dim = next((d for d, size in enumerate(sizes) if size >= ranks), None)
        # a `hidden` parameter is read past its attribute, where the module would find a share
        if dim is None or name in barred or id(param) in hidden or not param.is_floating_point():
            continue
        derived.cuts[name] = WeightCut(name, dim, Owners.blocks(param.shape[dim], ranks), role, number)
        derived.whole.pop(name, None)
    spared = sum(named[name].numel() for name in derived.cuts)
    if spared < SHARE * sum(param.numel() for param in named.values()):
        return Derived(whole=dict(whole))
    return derived


def _beside_attributes(module: nn.Module) -> Iterator[int]:
    """Yields ids of tensors that modules also hold in a list, tuple or dict, through which their code may read them."""
    for child in module.modules():
        # not a recurrent layer's list of its flat weights, which `see_parts` makes anew from attributes
        own = {"_parameters", "_modules", FLAT if isinstance(child, nn.RNNBase) else ""}
        for key, value in vars(child).items():
            if key not in own and isinstance(value, list | tuple | dict):
                yield from (id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
