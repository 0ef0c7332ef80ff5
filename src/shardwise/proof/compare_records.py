"""Compare two `Record`s into a `Parity`: the largest error of each tensor.

A new kind of tensor also needs: record, oracle, rank, outcome (`KINDS` and a bar), locate.

    error of a tensor = max|a - b| / max(max|b|, floor)      b: one process
    floor   gradient: 1e-4 of the model's largest; parameter: the learning rate; buffer: 1;
            optimizer: 1e-4 of the largest under the same key

The floors keep a true zero (the gradient of a bias before batch norm) from failing a run by its rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from shardwise.proof.outcome import FLOAT64_BARS, GRADIENT_FLOOR, KINDS, Parity
from shardwise.proof.record import Deviation, Record, Tensors

Floor = Callable[[str], float]  # name of a tensor -> floor


def tensor_error(a: torch.Tensor, b: torch.Tensor, floor: float) -> float:
    """Returns max|a - b| / max(max|b|, floor); inf for unlike shapes, or unlike values that are not finite."""
    # without this, `==` below would find a complex tensor with zero imaginary parts equal to a real one
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    same = a == b  # equal infinities count as equal, though their difference is NaN
    if bool(same.all()):
        return 0.0
    a, b = a.to(wide), b.to(wide)
    error = float((a - b)[~same].abs().max()) / max(_largest([b]), floor)
    return error if error == error else float("inf")  # NaN > bar is False, so NaN would pass as no error


def number_error(a: float, b: float) -> float:
    """Returns |a - b| / |b|; inf if one of them is not finite."""
    return abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else float("inf")


def compare(parity: Parity, single: Record, ranks: Record) -> None:
    """Writes into `parity` the errors of `ranks` (the plan) against `single` (one process), by kind and step."""
    parity.notes += single.notices + ranks.notices
    parity.differences += single.differences + ranks.differences
    parity.bars = parity.bars or dict(FLOAT64_BARS)
    floors = _floors(single, -1)
    one, many = ({name: t for name, t in side.initial.items() if name not in side.late} for side in (single, ranks))
    _compare_named(parity, "parameter", one, many, floors["parameter"], -1)
    parity.loss_error = _numbers(parity, "loss", ranks.losses, single.losses)
    parity.norm_error = _numbers(parity, "norm", ranks.norms, single.norms)
    for step in range(len(single.losses)):
        floors = _floors(single, step)
        for kind in KINDS:
            if kind != "optimizer" or ranks.states_known:  # if unknown, a notice of the ranks says why
                _compare_named(parity, kind, single.of(kind, step), ranks.of(kind, step), floors[kind], step)
    for deviation in ranks.deviations:
        # a rank whose state is not known has nothing that could deviate
        if deviation.kind != "optimizer" or ranks.states_known:
            _compare_deviation(parity, single, deviation)
    _look_for_nothing(parity, single, ranks)


def _numbers(parity: Parity, kind: str, actual: list[float], expected: list[float]) -> float:
    """Returns the largest error of the losses or norms (`kind`) over the steps; records the first beyond its bar."""
    errors = [number_error(a, b) for a, b in zip(actual, expected, strict=True)]
    beyond = [step for step, error in enumerate(errors) if error > parity.bars[kind]]
    if beyond:
        parity.exceeded[kind, ""] = beyond[0]
    return max(errors)


def _floors(single: Record, step: int) -> dict[str, Floor]:
    """Returns kind -> function from a tensor's name to its floor after a step (-1: before the first)."""
    if step < 0:
        return {"parameter": lambda name: single.lr}
    gradient = GRADIENT_FLOOR * _largest(single.gradients[step].values())
    by_key: dict[str, list[torch.Tensor | None]] = {}
    for name, tensor in single.states[step].items():
        by_key.setdefault(_key(name), []).append(tensor)
    states = {key: GRADIENT_FLOOR * _largest(tensors) for key, tensors in by_key.items()}
    return {
        "gradient": lambda name: gradient,
        "parameter": lambda name: single.lr,
        "buffer": lambda name: 1.0,
        "optimizer": lambda name: states.get(_key(name), 1.0),
    }


def _key(name: str) -> str:
    """Returns the optimizer's key of a state's name: "exp_avg" of "exp_avg of blocks.0.weight"."""
    return name.partition(" of ")[0]


def _largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Returns the largest absolute value of a finite element of these tensors; 0.0 without any."""
    finite = (t[torch.isfinite(t)].abs() for t in tensors if t is not None)
    return max((float(sizes.max()) for sizes in finite if sizes.numel()), default=0.0)


def _compare_named(parity: Parity, kind: str, expected: Tensors, actual: Tensors, floor: Floor, step: int) -> None:
    for name in sorted(expected.keys() | actual.keys()):
        _compare_one(parity, kind, name, actual.get(name), expected.get(name), floor(name), step, "rank 0")


def _compare_deviation(parity: Parity, single: Record, deviation: Deviation) -> None:
    kind, name, step = deviation.kind, deviation.name, deviation.step
    expected = single.of(kind, step).get(name)
    floor = _floors(single, step)[kind](name)
    _compare_one(parity, kind, name, deviation.tensor, expected, floor, step, f"rank {deviation.rank}")


def _compare_one(
    parity: Parity, kind: str, name: str, a: torch.Tensor | None, b: torch.Tensor | None, floor: float, step: int,
    rank: str,
) -> None:  # fmt: skip
    """Compares one tensor of ranks (`a`) with one process's (`b`), each None if that side has none, into `parity`.

    floor  below this size of `b` errors are absolute
    step   counted from 0; -1: before the first, for initial values
    rank   text that names whose tensor `a` is, such as "rank 0"
    """
    if (a is None) != (b is None):
        where = "" if rank == "rank 0" else f" on {rank}"
        message = f"{kind} of '{name}' exists only in {'one process' if a is None else 'the plan'}{where}"
        parity.differences += [message] if message not in parity.differences else []  # said once, not in each step
        parity.exceeded.setdefault((kind, name), step)
        return
    # neither side has one, such as the gradient of an unused parameter
    if a is None or b is None:
        return
    error = tensor_error(a, b, max(floor, 1e-300))  # a floor is 0 where all gradients are
    # initial values were not computed by steps, so their difference counts by itself, whatever rounding explains later
    if step < 0:
        where = "" if rank == "rank 0" else f" on {rank}"
        if error > parity.bar("parameter", name):
            parity.differences.append(f"initial value of '{name}' differs by {error:.1e}{where}")
    if error > parity.bar(kind, name):
        # deviations of other ranks come after all steps of rank 0, so an earlier step may follow a later one
        parity.exceeded[kind, name] = min(step, parity.exceeded.get((kind, name), step))
    errors = parity.errors(kind)
    if error > errors.get(name, -1.0):
        errors[name] = error
        parity.worst[kind, name] = f"{rank}, step {step + 1}" if step >= 0 else f"{rank}, before the first step"


def _look_for_nothing(parity: Parity, single: Record, ranks: Record) -> None:
    """Notes gradients that stay zero and parameters that do not move, since agreement on them proves nothing."""
    last = single.parameters[-1]
    # frozen parameters may stay: only what is trained must move for agreement to mean something
    still = {n for n in single.trained if (a := single.initial[n]) is not None and torch.equal(a, _there(last[n]))}
    reached = {n for gradients in single.gradients for n, g in gradients.items() if g is not None and bool(g.any())}
    # only the gravest is reported: without any gradient no parameter moves
    if not single.trained & reached:
        parity.unproven.append("every gradient is zero in one process, so that any plan would agree with it")
    elif single.trained == still:
        parity.unproven.append("no parameter moved in one process (a learning rate of zero?), so no update was seen")
    else:
        unreached = single.trained - reached
        _tell(parity, unreached, "has a gradient of zero in every step, so that its training is not proven")
        _tell(parity, still & reached, "did not move, so that its update is not proven")
    # 0: the technique has no buckets (FSDP2); with exactly 1 an order of buckets exists in a run, but not in this one
    if ranks.buckets == 1:
        parity.notes.append(
            "scope: gradients of a single parameter travel in one bucket; the order of several is not seen"
        )
    if len(single.losses) == 1:
        parity.notes.append("scope: one step; what is carried from step to step is proven from two steps on")


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _tell(parity: Parity, names: set[str], what: str) -> None:
    if names:
        first = sorted(names)[0]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        parity.notes.append(f"scope: '{first}'{more} {what}")
