"""Every operation that torch has samples of, on tensors cut over ranks: equal to the whole one, or refused.

The samples are those of torch's own tests (`op_db`). Of each, any tensor is cut along any dim, in blocks or dealt one
by one, alone or with the tensors of its shape; or given as a sum of which each rank holds a summand. Outputs and the
gradient of what was cut are compared. An error of the operation on shares is a refusal too, since a rehearsal without
values meets it before weights are made: what must not be is another result.

What this does not do: try every cut.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Sum, Uncut, plain, to_part
from shardwise.part.dimwise import DimwiseRule, named
from shardwise.part.tensor import RULES, facts
from shardwise.ranks import RankPool

DOUBLE = torch.float64
BAR = 1e-9
MOST_ELEMENTS = 5000  # of a sample: larger ones say no more
SAMPLED = 150  # cuts, in a run of a few seconds
UNSET = ("empty", "new_empty", "resize", "as_strided_partial")  # what they give is not said
Tree = Any


@dataclass(frozen=True)
class Cut:
    """One way to cut a sample: which leaves of its inputs, along which dim, dealt how; dim None: as a sum."""

    leaves: tuple[int, ...]
    dim: int | None
    kind: str
    soft: bool

    def __str__(self) -> str:
        way = "as a sum" if self.dim is None else f"dim {self.dim} {self.kind}{' soft' if self.soft else ''}"
        return f"leaves {self.leaves} {way}"


def seed_alone(seed: int = 1234) -> None:
    """Seed what samples are drawn from: the CPU's generator, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def operators() -> list[Any]:
    """torch's list of operators with samples, without random ones."""
    if "expecttest" not in sys.modules:  # torch's tests import it; no sample uses it
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # for each sample torch reads the source of all frames, for a report, and seeds devices that are not there
    for module in (common_utils, core):
        module.extract_test_fn = lambda: None
    common_utils.set_rng_seed = seed_alone
    return [op for op in op_db if DOUBLE in op.dtypes and not op.name.startswith(UNSET)]


def samples_of(op: Any) -> Iterator[tuple[Tree, Any]]:
    """(flattened inputs, their structure) of each sample in float64 with a tensor that can be cut."""
    try:
        for sample in op.sample_inputs("cpu", DOUBLE, requires_grad=False):
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if sum(t.numel() for t in tensors) <= MOST_ELEMENTS and all(t.layout is torch.strided for t in tensors):
                yield leaves, spec
    except Exception:  # a sample that cannot be made here (no LAPACK, no CUDA)
        return


def cuts_of(leaves: list[Any]) -> list[Cut]:
    """All ways to cut a sample."""
    found = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        alike = tuple(i for i, other in enumerate(leaves)
                      if isinstance(other, torch.Tensor) and other.shape == leaf.shape)  # fmt: skip
        groups = [(place,)] + ([alike] if len(alike) > 1 and alike[0] == place else [])
        for group in groups:
            ways = [(dim, kind, soft) for dim in range(leaf.dim()) for kind in ("blocks", "dealt")
                    for soft in (False, True) if leaf.shape[dim] > 1]  # fmt: skip
            found += [Cut(group, *way) for way in ways]
            if all(leaves[i].dtype == DOUBLE for i in group):
                found.append(Cut(group, None, "", False))
    return found


def call(op: Any, leaves: list[Any], spec: Any) -> list[Any]:
    """Its outputs, flattened."""
    given, args, kwargs = tree_unflatten(leaves, spec)
    return tree_flatten(op.op(given, *args, **kwargs))[0]


def fresh(leaves: list[Any]) -> list[Any]:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, leaves)


def differentiated(outputs: list[Any]) -> torch.Tensor | None:
    """A weighted sum of the outputs that have a gradient."""
    total = None
    for place, out in enumerate(outputs):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            weight = torch.randn(out.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(place))
            term = (out * weight).sum()
            term = term.real if term.is_complex() else term
            total = term if total is None else total + term
    return total


def whole_run(op: Any, leaves: list[Any], spec: Any, cut: Cut) -> tuple[list[Any], list[torch.Tensor | None]]:
    """The outputs in one process, and the gradients of the leaves that are cut."""
    given = fresh(leaves)
    for i in cut.leaves:
        if op.supports_autograd and given[i].dtype == DOUBLE:
            given[i].requires_grad_()
    torch.manual_seed(1)
    outputs = call(op, given, spec)
    total = differentiated(outputs)
    if total is not None:
        total.backward()
    return outputs, [given[i].grad for i in cut.leaves]


def off(a: Any, b: Any) -> float:
    """How far apart two outputs are, relative to the largest value (at least 1)."""
    if isinstance(b, float | complex) and isinstance(a, float | complex):
        a, b = torch.tensor(a, dtype=torch.complex128), torch.tensor(b, dtype=torch.complex128)
    if not isinstance(b, torch.Tensor):
        return 0.0 if a == b else float("inf")
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not (b.is_floating_point() or b.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    finite = b[b.isfinite()].abs()
    largest = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
    return float((a - b)[~same].abs().nan_to_num(float("inf")).max()) / largest


def outcome(op: Any, leaves: list[Any], spec: Any, cut: Cut, axis: Any, rng: random.Random) -> str:
    """ "" where equal, "refused", "error: ..." or what differs."""
    try:
        expected, gradients = whole_run(op, leaves, spec, cut)
        torch.manual_seed(2)
        again = call(op, fresh(leaves), spec)
    except Exception:
        return "no sample"
    if any(isinstance(out, torch.Tensor) and out.layout is not torch.strided for out in expected):
        return "no sample"
    expected = [out.detach() if isinstance(out, torch.Tensor) else out for out in expected]
    if any(off(a, b) > BAR for a, b in zip(again, expected, strict=True)):
        return "random"
    given, locals_, owners = fresh(leaves), [], None
    size = 0 if cut.dim is None else leaves[cut.leaves[0]].shape[cut.dim]
    if cut.dim is not None:
        if cut.kind == "blocks":
            owners = Owners.blocks(size, axis.size)
        else:
            dealt = [index % axis.size for index in range(size)]
            rng.shuffle(dealt)
            owners = Owners.of(np.array(dealt), axis.size)
    try:
        for i, gradient in zip(cut.leaves, gradients, strict=True):
            if owners is None:
                shares = torch.randn(axis.size, *leaves[i].shape, dtype=DOUBLE,
                                     generator=torch.Generator().manual_seed(i))  # fmt: skip
                shares[-1] = leaves[i] - shares[:-1].sum(0)  # a zero of the sample is zero, not its rounding
                given[i] = Sum(shares[axis.index].clone(), axis)
            else:
                local = owners.take(leaves[i], cut.dim, axis.index).clone()
                locals_.append(local.requires_grad_(gradient is not None))
                given[i] = to_part(local, cut.dim, owners, axis)
                given[i].may_gather = cut.soft
        torch.manual_seed(1)
        outputs = call(op, given, spec)
        total = differentiated(outputs)
        if total is not None:
            total.backward()
        with torch.no_grad():
            outputs = [plain(out.detach()) if isinstance(out, torch.Tensor) else out for out in outputs]
    except Uncut:
        return "refused"
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs for {len(expected)}"
    for place, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        if off(a, b) > BAR:
            return f"output {place} off by {off(a, b):.1e}"
    if owners is not None:
        for i, local, gradient in zip(cut.leaves, locals_, gradients, strict=True):
            if gradient is None:
                continue
            found = torch.zeros_like(local) if local.grad is None else plain(local.grad)
            if off(found, owners.take(gradient, cut.dim, axis.index)) > BAR:
                return f"gradient of leaf {i} off"
    return ""


def all_outcomes(seed: int, most: int | None, names: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(what was tried, outcome), of `most` cuts drawn by the seed or of all. Runs on every rank."""
    warnings.simplefilter("ignore")
    ranks = torch.distributed.get_world_size()
    axis = build_mesh(Plan(tp=ranks), torch.device("cpu")).tp
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    ops = [op for op in operators() if not names or op.name in names]
    if most is not None:
        ops = rng.sample(ops, most)
    for op in ops:
        torch.manual_seed(seed)
        tried = [(at, leaves, spec, cut) for at, (leaves, spec) in enumerate(samples_of(op)) for cut in cuts_of(leaves)]
        if most is not None and tried:
            tried = [rng.choice(tried)]
        for at, leaves, spec, cut in tried:
            which = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} sample {at} {cut}"
            found.append((which, outcome(op, leaves, spec, cut, axis, rng)))
    return found


def with_a_wrong_rule() -> list[tuple[str, str]]:
    """Outcomes where the rule of `sum` forgets the other ranks."""

    def own_sum(func: Any, part: Any, dims: set[int], keepdim: bool, arguments: dict) -> torch.Tensor:
        return part.local.sum(sorted(dims), keepdim)

    kept = RULES["sum"]
    RULES["sum"] = DimwiseRule(named, own_sum).on_shares
    facts.cache_clear()
    try:
        return all_outcomes(0, None, ("sum",))
    finally:
        RULES["sum"] = kept
        facts.cache_clear()


FINE = ("", "refused", "random", "no sample")


def tell(outcomes: list[tuple[str, str]]) -> dict[str, str]:
    """What came to another result: the errors of an operation on shares are refusals."""
    return {which: what for which, what in outcomes if what not in FINE and not what.startswith("error: ")}


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """torch's tests set backends fixed for good where they are imported: not on the ranks that all tests share."""
    with RankPool(quiet=True) as ranks:
        yield ranks


def check(ranks: RankPool, seed: int, most: int) -> None:
    for outcomes in ranks.run(all_outcomes, 2, seed, most, timeout_s=240):
        assert not tell(outcomes)
        equal = sum(what == "" for _, what in outcomes)
        assert equal > 0.7 * len(outcomes) > 0.6 * most, f"{equal} of {len(outcomes)} could be done"


def test_operators_drawn_by_a_seed_on_cut_tensors_are_equal_or_refused(own_ranks: RankPool) -> None:
    check(own_ranks, 0, SAMPLED)


def attention_of_one_query_for_all(cut: int) -> list[float]:
    """How far attention of a (4, 3, 8) query is off, with (4, 4, 6, 8) keys and values cut along a dim. On a rank."""
    axis = build_mesh(Plan(tp=2), torch.device("cpu")).tp
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(s, dtype=DOUBLE, generator=draws) for s in ((4, 3, 8), (4, 4, 6, 8), (4, 4, 6, 8)))
    owners = Owners.blocks(key.shape[cut], axis.size)
    parts = [to_part(owners.take(t, cut, axis.index), cut, owners, axis) for t in (key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return [
        off(plain(attend(query, *parts, is_causal=c)), attend(query, key, value, is_causal=c)) for c in (True, False)
    ]


@pytest.mark.parametrize("cut", [0, 1])
def test_attention_of_a_query_with_fewer_dims_than_its_keys(own_ranks: RankPool, cut: int) -> None:
    assert max(max(found) for found in own_ranks.run(attention_of_one_query_for_all, 2, cut)) < BAR


def test_an_operator_that_is_wrong_on_shares_is_seen(own_ranks: RankPool) -> None:
    outcomes = own_ranks.run(with_a_wrong_rule, 2, timeout_s=240)
    assert any(tell(each) for each in outcomes)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_nearly_every_operator_on_cut_tensors_is_equal_or_refused(own_ranks: RankPool, seed: int) -> None:
    check(own_ranks, seed, 600)
