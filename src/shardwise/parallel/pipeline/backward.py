"""Split a backward in two, I, the gradient of a stage's input, and W, the gradients of its weights (zero bubble).

    I   output gradient -> ... -> N -> ... -> input gradient     records the gradient that enters each N
    W   at each N:  the recorded gradient -> M -> weight gradient

In the graph of a stage, N are the nodes that lead to the input and have an edge to a node M that leads to weights
alone (of a linear layer, N is the matrix product and M the transposed weight). I runs the paths to the input and
keeps the gradient that entered each N. W starts at each N with that gradient and goes through M to its weights. Nodes
that share a weight are run together, each with the gradient that I recorded for it. No product is computed twice,
except on the path between two uses of one weight in one stage.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2; the graph is traversed as in
torch.distributed.pipelining.

What this does not do: split a graph that is recomputed in backward, which each W would repeat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import has_torch_function

from shardwise.errors import RefusedPlan


@dataclass
class DeferredWeightGrad:
    """What the weights' half of a backward (W) needs from the input's half (I).

    roots    (output, its gradient) of a stage without differentiable input, whose whole backward is W; else []
    entered  node N -> the gradients that entered it in I, one for each of its outputs
    weights  node N, or key of `apart` -> the nodes that accumulate the gradients of the weights below it
    apart    node of an output that no input leads to -> [(index of the node's output, gradient)], where W begins
    kept     the stage's outputs, which keep the graph alive until W
    """

    roots: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    entered: dict[Node, tuple] = field(default_factory=dict)
    weights: dict[Node, list[Node]] = field(default_factory=dict)
    apart: dict[Node, list[tuple[int, torch.Tensor | None]]] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)


def whole(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Runs the whole backward of a stage (B), which adds to `.grad` of its inputs and its weights.

    gradients   of each output; None for a scalar output means 1
    """
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward([root_of(o) for o, _ in pairs], [g for _, g in pairs])


def root_of(tensor: torch.Tensor) -> torch.Tensor | GradientEdge:
    """Returns what to give autograd for a tensor, the tensor itself, or its graph edge if it is of a subclass."""
    # else torch would run the whole backward inside the `__torch_function__` of the subclass (`Part`), and blocks that
    # are recomputed there would run without it
    return get_gradient_edge(tensor) if has_torch_function((tensor,)) else tensor


def of_input(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> DeferredWeightGrad:
    """Runs the first half of a stage's backward (I), which adds to `.grad` of its inputs; returns what W needs.

    outputs, gradients   the stage's results and their gradients;  inputs  leaves that need a gradient
    Raises `RefusedPlan` for a reentrant checkpoint in the graph.
    """
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if not inputs or not pairs:  # no input needs a gradient, so the whole backward is W
        return DeferredWeightGrad(roots=pairs)
    roots = [_node(output) for output, _ in pairs]
    targets = {_node(leaf) for leaf in inputs}
    weights, apart = _weights(roots, targets)
    later = DeferredWeightGrad(weights=weights, kept=[output for output, _ in pairs])
    for output, gradient in pairs:  # the backward of outputs that depend on weights alone belongs to W
        if _node(output) in apart:
            later.apart.setdefault(_node(output), []).append((output.output_nr, gradient))
    handles = [
        node.register_prehook(lambda grads, node=node: later.entered.__setitem__(node, grads))
        for node in later.weights
        if node not in apart
    ]
    try:
        # `grad` with respect to the inputs runs no node that leads to weights only, so these are left for W
        input_grads = torch.autograd.grad(
            [root_of(o) for o, _ in pairs], [root_of(leaf) for leaf in inputs], [g for _, g in pairs],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RefusedPlan(
            "the schedule splits a backward in two, which a reentrant checkpoint in the module's forward cannot do: "
            "give torch.utils.checkpoint use_reentrant=False there, or use a schedule that does not split "
            "(schedule=1f1b)"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for leaf, gradient in zip(inputs, input_grads, strict=True):
        if gradient is not None:  # None, not zeros, tells the stage before that backward did not reach this input
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return later


def of_weights(later: DeferredWeightGrad) -> None:
    """Runs the second half of a stage's backward (W), which adds to `.grad` of its weights."""
    if later.roots:
        whole([o for o, _ in later.roots], [g for _, g in later.roots])
        return
    sums: dict[Node, torch.Tensor] = {}
    for group in _groups(later):
        starts = [(node, output, g) for node in group for output, g in _starts(later, node) if g is not None]
        goals = list(dict.fromkeys(weight for node in group for weight in later.weights[node]))
        if not starts:  # no gradient entered these nodes in I
            continue
        # a node may lie below another one of its group, which would add to its gradient, so hooks reset that to I's
        fixed = [node for node in group if node in later.entered] if len(group) > 1 else []
        handles = [node.register_prehook(lambda _, grads=later.entered[node]: grads) for node in fixed]
        try:
            grads = torch.autograd.grad(
                [GradientEdge(node, output) for node, output, _ in starts],
                [GradientEdge(weight, 0) for weight in goals] + _asked_besides(group),
                [g for _, _, g in starts],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        # not strict, since the gradients for `_asked_besides` follow those of the goals
        sums |= {weight: gradient for weight, gradient in zip(goals, grads, strict=False) if gradient is not None}
    later.entered.clear()
    if sums:  # by the accumulating nodes, so that hooks on weights (gradient buckets) run
        torch.autograd.backward([GradientEdge(weight, 0) for weight in sums], list(sums.values()))


def _asked_besides(group: list[Node]) -> list[GradientEdge]:
    """Returns the edges to the inputs of group norms in `group`; their gradients are computed and dropped."""
    # the kernel for channels-last tensors on CPU (torch 2.13) writes the input's gradient even if it is not asked for,
    # into memory that does not exist, and crashes (`test_a_group_norm_in_channels_last_is_split`)
    norms = (node for node in group if node.name() == "NativeGroupNormBackward0")
    return [GradientEdge(node, place) for node, place in (norm.next_functions[0] for norm in norms) if node is not None]


def _starts(later: DeferredWeightGrad, node: Node) -> list[tuple[int, torch.Tensor | None]]:
    """Returns [(index of the node's output, gradient)] with which W begins at a node."""
    return list(enumerate(later.entered[node])) if node in later.entered else later.apart[node]


def _node(tensor: torch.Tensor) -> Node:
    """Returns the graph node that a gradient of this tensor enters; for a leaf the one that accumulates `.grad`."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    viewed = tensor.view_as(tensor).grad_fn  # torch has no other way to the node that accumulates a leaf's gradient
    assert viewed is not None
    node = viewed.next_functions[0][0]
    assert node is not None
    return node


def _weights(roots: list[Node], targets: set[Node]) -> tuple[dict[Node, list[Node]], set[Node]]:
    """Returns (node -> nodes that accumulate the gradients of its weights, the roots that lead to no target).

    roots    nodes of the outputs;  targets  nodes of the inputs
    A node that leads to a target is a key if it has edges that lead to weights alone, and its value is these weights.
    A root that leads to no target is a key with all weights below it.
    """
    below: dict[Node, tuple[Node, ...]] = dict.fromkeys(targets, ())
    reaches: dict[Node, bool] = {}
    order: list[Node] = []  # children before parents
    # (node, whether its children are done); not recursive, since graphs are deeper than Python's stack
    queue: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while queue:
        node, done = queue.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        if done:
            order.append(node)
            reaches[node] = node in targets or any(reaches[child] for child in children)
            own = _accumulating(node) if node not in targets else ()
            # a node that leads to a target is an N itself, so its weights are not counted for its parents
            below[node] = (
                () if reaches[node] else tuple(dict.fromkeys([*own, *(w for c in children for w in below[c])]))
            )
        elif node not in reaches:
            reaches[node] = False  # until its children are known; the graph has no cycles
            queue.append((node, True))
            queue += [(child, False) for child in children if child not in reaches]
    below_edges = {}
    for node in order:
        if reaches[node] and node not in targets:
            weights = [w for child, _ in node.next_functions if child is not None for w in below[child]]
            if weights:
                below_edges[node] = list(dict.fromkeys(weights))
    apart = {root for root in roots if not reaches[root] and below[root]}
    return below_edges | {root: list(below[root]) for root in apart}, apart


def _accumulating(node: Node) -> tuple[Node, ...]:
    """Returns (node,) if the node accumulates a leaf's gradient, else ()."""
    return (node,) if hasattr(node, "variable") else ()


def _groups(later: DeferredWeightGrad) -> list[list[Node]]:
    """Returns the nodes at which W begins, grouped so that nodes that share a weight are run together."""
    by_weight: dict[Node, list[Node]] = defaultdict(list)
    for node in later.weights:
        if node in later.entered or node in later.apart:  # else no gradient entered it
            for weight in later.weights[node]:
                by_weight[weight].append(node)
    group_of: dict[Node, list[Node]] = {}
    # weights that share a node are in one group too
    for nodes in by_weight.values():
        merged = list(dict.fromkeys(member for node in nodes for member in group_of.get(node, [node])))
        for member in merged:
            group_of[member] = merged
    unique = {id(group): group for group in group_of.values()}
    return list(unique.values())
