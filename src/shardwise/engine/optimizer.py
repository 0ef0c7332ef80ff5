"""Make the optimizer over whole tensors or pieces, whichever a trial of it allows (`Nature`). See also step/owners.

`Task.optimizer` always sees parameters in their full shapes, so that it may choose by shape. Under ZeRO its groups
are then pointed at this rank's pieces. That equals one process only if each element's update depends on that
element's history alone, which is tried on small tensors before the first step: whole against pieces, in float64.

    elementwise   AdamW, SGD, Adagrad, Lion, ...     pieces of any kind
    per tensor    Adafactor, Muon, LAMB, ...         whole tensors: each updated by the rank that owns it
    joint         LBFGS                              all tensors at once, with a closure: replicas only
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.zero_stages import ZeroStage
from shardwise.parallel.slots import DataParallel, PieceSlots
from shardwise.parallel.tensor.cut_weights import TensorParallel
from shardwise.step.optimizer_modes import enter_training, has_mode
from shardwise.step.owners import OwnedMasters
from shardwise.step.task_optimizer import OptimizerFn, construct, needs_closure
from shardwise.tiers import only
from shardwise.trace.double import KeepDouble
from shardwise.trace.leaves import tensors_in

KINDS = ("elementwise", "per tensor", "joint")  # an update needs one element, one tensor, all tensors
_TRIAL_STEPS = 4
_TRIAL_TOLERANCE = 1e-9  # of the largest update


@dataclass(frozen=True)
class Nature:
    """What a trial shows of an optimizer.

    kind           one of `KINDS`
    narrow         the narrowest dtype in which it computes on float64 parameters; None: float64
    needs_closure  whether `step` must be given a closure that evaluates the loss
    """

    kind: str
    narrow: torch.dtype | None
    needs_closure: bool

    @property
    def whole(self) -> bool:
        """Whether an update needs unsharded tensors, which under ZeRO only a tensor's owner has."""
        return self.kind != "elementwise"

    @property
    def needs(self) -> int:
        """Returns the index of `kind` in `KINDS`: 0 elementwise, 1 per tensor, 2 joint."""
        return KINDS.index(self.kind)


class _NarrowDtypes(TorchDispatchMode):
    """Dispatch mode that collects in `seen` the floating-point dtypes, but float64, of results of float64 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        # only a result of float64 inputs shows that the optimizer rounds to less
        wide = any(leaf.dtype == torch.float64 for leaf in tensors_in(args))
        for leaf in tensors_in(output) if wide else ():
            if leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.seen.add(leaf.dtype)
        return output


def over_pieces(
    make: OptimizerFn, shapes: Sequence[torch.Size], pieces: dict[int, list[nn.Parameter]],
    marks: dict[int, dict[str, Any]] | None = None,
) -> Optimizer:  # fmt: skip
    """Returns an optimizer that `make` builds for unsharded shapes, and whose groups then hold pieces.

    shapes  of the unsharded parameters
    pieces  index of a parameter -> this rank's pieces of it; an index may be missing
    marks   index of a parameter -> attributes to set on it and its pieces, since an optimizer may choose by them
    """
    # dtype of a parameter of which this rank has no piece
    dtype = next((p.dtype.to_real() for params in pieces.values() for p in params), torch.float32)
    kinds = [pieces[index][0].dtype if pieces.get(index) else dtype for index in range(len(shapes))]
    full = [  # shapes without memory
        nn.Parameter(torch.empty(shape, dtype=kind, device="meta")) for shape, kind in zip(shapes, kinds, strict=True)
    ]
    for index, attributes in (marks or {}).items():
        for param in (full[index], *pieces.get(index, [])):
            param.__dict__.update(attributes)
    optimizer = construct(make, full)
    pieces_of = {id(param): pieces.get(index, []) for index, param in enumerate(full)}
    for group in optimizer.param_groups:
        group["params"] = [piece for param in group["params"] for piece in pieces_of[id(param)]]
    if optimizer.state:  # made by the constructor, of the meta tensors above
        optimizer = _remade(optimizer)
    enter_training(optimizer)
    return optimizer


def _remade(optimizer: Optimizer) -> Optimizer:
    """Returns a new optimizer of the same class over the same groups, whose constructor makes its state (Adagrad)."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    # Defaults hold more than the constructor takes in some classes.
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(optimizer.param_groups, **settings)


def try_out(make: OptimizerFn, shapes: Sequence[torch.Size], numbers: Sequence[bool] = ()) -> Nature:
    """Returns the optimizer's `Nature`, by running it on small tensors: all at once, in pieces, and one by one.

    shapes   of the task's parameters; tensors of as many dims are tried
    numbers  for each shape, whether its parameter is complex; (): none is
    Results are compared relative to the largest update, with all arithmetic kept in float64. Raises `RefusedPlan` for
    an optimizer that fails on dense gradients.
    """
    small = _small(shapes, numbers or [False] * len(shapes))
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in small]
    gradients: list[list[torch.Tensor | None]] = [
        [torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in small] for _ in range(_TRIAL_STEPS)
    ]
    # An optimizer that evaluates the loss itself (LBFGS) cannot be tried on random gradients.
    if needs_closure(construct(make, [nn.Parameter(value.clone()) for value in values])):
        return Nature("joint", None, True)
    narrow = _NarrowDtypes()
    try:
        with narrow:
            whole = _whole(make, values, gradients)
    except RuntimeError as error:
        raise RefusedPlan(
            "the optimizer fails on gradients as every plan makes them, dense and without a graph behind them (not by "
            f"nn.Embedding(sparse=True), nor by backward(create_graph=True)): {error}"
        ) from error
    dtype = min(narrow.seen, key=lambda d: torch.finfo(d).bits, default=None)
    with KeepDouble():
        if dtype is not None:  # else there was nothing to keep in float64
            whole = _whole(make, values, gradients)
        bar = _TRIAL_TOLERANCE * max(
            float((a - b).abs().max()) for a, b in zip(whole, values, strict=True) if a.numel()
        )
        # the least demanding kind first: an elementwise update passes the other trials too
        if _same(whole, _trial(lambda: _in_pieces(make, values, gradients)), bar):
            return Nature("elementwise", dtype, False)
        if _same(whole, _trial(lambda: _one_at_a_time(make, values, gradients)), bar):
            return Nature("per tensor", dtype, False)
    return Nature("joint", dtype, False)


def _small(shapes: Sequence[torch.Size], numbers: Sequence[bool]) -> list[tuple[torch.Size, torch.dtype]]:
    """Returns small (shape, dtype) pairs to try, two equal ones for each number of dims, real or complex.

    numbers  for each shape, whether its parameter is complex
    """
    kinds: dict[tuple[int, bool], torch.Size] = {}
    for shape, of_complex in zip(shapes, numbers, strict=True):
        kind = len(shape), of_complex
        kinds.setdefault(kind, torch.Size(min(size, 5 + place) for place, size in enumerate(shape)))
    dtypes = {False: torch.float64, True: torch.complex128}
    # two, since a joint update shows only if one tensor's update depends on another's
    return [(shape, dtypes[of_complex]) for (_, of_complex), shape in kinds.items() for _ in range(2)]


def _run(optimizer: Optimizer, params: Sequence[torch.Tensor], gradients) -> None:
    """Takes one optimizer step for each list in `gradients`, which has a tensor or None for each parameter.

    A schedule-free optimizer is left in evaluation mode.
    """
    enter_training(optimizer)  # a script may enter it after `prepare` alone
    for group in optimizer.param_groups:
        if not group.get("lr", 1.0):
            group["lr"] = 1e-3  # a rate that starts at zero would make every trial agree
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    if has_mode(optimizer):  # what is compared went through both modes
        optimizer.eval()
        optimizer.train()
        optimizer.eval()


def _trial(attempt: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
    """Returns `attempt()`, a list of tensors; None if the optimizer raises on pieces (Muon takes matrices only)."""
    try:
        return attempt()
    except (ValueError, RuntimeError, IndexError, TypeError):
        return None


def _same(whole: list[torch.Tensor], other: list[torch.Tensor] | None, bar: float) -> bool:
    """Whether all elements differ by at most `bar`; False if `other` is None."""
    return other is not None and all(
        float((a - b.view(a.shape)).abs().max()) <= bar for a, b in zip(whole, other, strict=True) if a.numel()
    )


def _whole(make: OptimizerFn, values, gradients) -> list[torch.Tensor]:
    """Returns the tensors after steps of one optimizer over all of them."""
    params = [nn.Parameter(value.clone()) for value in values]
    _run(construct(make, params), params, gradients)
    return [param.detach() for param in params]


def _in_pieces(make: OptimizerFn, values, gradients) -> list[torch.Tensor]:
    """Returns the tensors, flat, after steps of two optimizers, each over its uneven piece of every tensor."""
    flats = [value.clone().view(-1) for value in values]
    shapes = [value.shape for value in values]
    for rank in range(2):
        # uneven; of a tensor of one element the second rank has none
        cuts = [max(1, flat.numel() // 3) for flat in flats]
        spans = [((0, cut), (cut, flat.numel()))[rank] for cut, flat in zip(cuts, flats, strict=True)]
        pieces = {i: [nn.Parameter(flats[i][low:high])] for i, (low, high) in enumerate(spans) if low < high}
        optimizer = over_pieces(make, shapes, pieces)
        order = sorted(pieces)
        mine = [[step[i].view(-1)[slice(*spans[i])] for i in order] for step in gradients]
        _run(optimizer, [pieces[i][0] for i in order], mine)
    return flats


def _one_at_a_time(make: OptimizerFn, values, gradients) -> list[torch.Tensor]:
    """Returns the tensors after runs in each of which only one tensor has gradients, as on its owner's rank."""
    done = []
    for index in range(len(values)):
        params = [nn.Parameter(value.clone()) for value in values]
        alone = [[g if i == index else None for i, g in enumerate(step)] for step in gradients]
        _run(construct(make, params), params, alone)
        done.append(params[index].detach())
    return done


def same_by_subgroups(make: OptimizerFn, shapes: Sequence[torch.Size], numbers: Sequence[bool]) -> bool:
    """Whether, on small random tensors, the optimizer gives the same bits if it steps over one tensor at a time.

    shapes   of the parameters;  numbers  for each shape, whether its parameter is complex
    A step over some parameters is that of `tiers.only`.
    """
    generator = torch.Generator().manual_seed(0)
    small = _small(shapes, numbers)
    values = [torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in small]
    gradients = [[torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in small] for _ in range(4)]
    whole = _whole(make, values, gradients)
    parts = _trial(lambda: _by_subgroups(make, values, gradients))
    return parts is not None and all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def _by_subgroups(make: OptimizerFn, values, gradients) -> list[torch.Tensor]:
    """Returns the tensors after steps of one optimizer that is given one tensor at a time (`tiers.only`)."""
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = construct(make, params)
    step = optimizer.step

    def by_subgroups() -> None:
        with only(optimizer) as choose:
            for param in params:
                choose([param])
                step()

    optimizer.step = by_subgroups
    _run(optimizer, params, gradients)
    return [param.detach() for param in params]


def refuse(
    nature: Nature, zero: ZeroStage, tp: int = 1, ep: int = 1, stages: int = 1, named: str = "the optimizer"
) -> None:
    """Raise `RefusedPlan` if a rank would lack tensors that the optimizer's update needs.

    zero     which of parameters, gradients and state the ranks shard
    tp, ep   the plan's degrees
    stages   number of pipeline ranks
    named    the optimizer's name in the message
    """
    # experts of other ranks are not gathered, so an update that needs more than its element has not enough
    if ep > 1 and nature.whole:
        raise RefusedPlan(
            f"ep={ep} leaves each rank some of the experts, and on a trial {named}'s update of an element hangs on "
            "the rest of its tensor: leave it out, or use an optimizer that treats elements one by one (Adam, SGD)"
        )
    # owners make whole tensors again under ZeRO, but not the other tensors that a joint update reads
    if (zero.state or tp > 1) and nature.kind == "joint":
        spread, instead = (
            (f"zero={zero.number}", "zero=0 (dp_replicate)") if zero.state else (f"tp={tp}", "dp_replicate")
        )
        raise RefusedPlan(
            f"{spread} spreads parameters over ranks, and on a trial {named}'s update of one tensor depends on the "
            f"others (or it needs a closure): use {instead}, or an optimizer that treats tensors one by one"
        )
    # other stages' tensors lie on other ranks in any case
    if stages > 1 and nature.kind == "joint":
        raise RefusedPlan(
            f"on a trial {named}'s update of one tensor depends on the others, and pipeline stages hold different "
            "ones: use an optimizer that updates each tensor by itself"
        )


def make_optimizer(
    make: OptimizerFn, nature: Nature, technique: DataParallel, names: list[str], shapes: list[torch.Size],
    shard: Axis, *, plan: Plan, tensor: TensorParallel | None = None,
    marks: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> tuple[Optimizer, OwnedMasters | None]:  # fmt: skip
    """Returns (this rank's optimizer, its `OwnedMasters` if it needs unsharded tensors that ranks shard, else None).

    make    `Task.optimizer`;  nature  what `try_out` found of it
    names   of the trainable parameters, in order;  shapes  unsharded, of each
    shard   the axis over which ZeRO shards masters;  tensor  the cuts of tp, None without tp
    marks   name of a parameter -> attributes that a user has set on it (`p.lr_scale = 0.1`)

    Raises `RefusedPlan` if the optimizer can work neither on pieces nor tensor by tensor.
    """
    slots, stage = technique.slots, plan.sharded
    refuse(nature, stage, plan.tp, plan.ep, plan.pp)
    for slot in slots:
        slot.master.__dict__.update(marks.get(slot.name, {}))
    by_index = {index: marks[name] for index, name in enumerate(names) if name in marks}
    # Masters are unsharded, so the task's function gets them themselves instead of meta tensors.
    if all(slot.whole for slot in slots) and not stage.state and plan.tp == plan.ep == 1:
        return construct(make, [slot.master for slot in slots]), None
    if nature.kind == "per tensor":
        # if ZeRO shards masters, each tensor gets one owner among the ranks of the shard axis
        owners = OwnedMasters(cast(PieceSlots, technique), names, shapes, shard if stage.state else None, tensor)
        return over_pieces(make, shapes, {i: [m] for i, m in owners.masters.items()}, by_index), owners
    index_of = {name: index for index, name in enumerate(names)}
    pieces: dict[int, list[nn.Parameter]] = {}
    for slot in slots:
        if slot.master.numel():  # a rank may have no element of a weight, and no optimizer state for it
            pieces.setdefault(index_of[slot.name], []).append(slot.master)
    return over_pieces(make, shapes, pieces, by_index), None
