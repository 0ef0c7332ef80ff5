"""Recognise parameters on which the loss does not depend: their gradient is rounding, no error of a plan.

A bias in front of a norm has a gradient whose summands cancel. What is left of them is rounding, another one in each
order of summation, and an optimizer may make an update of it. For such a parameter two other bounds are asked for:

    its gradient            in one process and under the plan no larger than what one epsilon in weights and inputs
                            changes it by, ten times over; which is no more than the bar of the model's largest
                            gradient, in float32 ten times the least bar
    its value and state     those that one process's optimizer makes of the plan's gradients, within the common bars

What this does not do: excuse a gradient that is larger than its rounding, or a rank that differs from the others.
"""

from __future__ import annotations

import torch

from shardwise.proof.compare_records import tensor_error
from shardwise.proof.literal import optimizer_of
from shardwise.proof.narrow import LEAST_BAR
from shardwise.proof.oracle import needs_closure, plain_module
from shardwise.proof.outcome import GRADIENT_BAR, GRADIENT_FLOOR, Parity
from shardwise.proof.record import Record, Tensors, kept, kept_state
from shardwise.proof.rounding import ALLOWANCE, nudged_runs
from shardwise.proof.settings import Settings, raise_eps
from shardwise.task import Task
from shardwise.trace.double import KeepDouble, default_dtype


def set_zero_gradients_apart(parity: Parity, task: Task, settings: Settings, single: Record, ranks: Record) -> None:
    """Replace errors that rounding explains in parameters whose gradient is zero, and note them in `parity`."""
    asked = {name.rpartition(" of ")[2] for _, name in parity.exceeded}
    kinds = {kind for kind, _ in parity.exceeded}
    deviating = {deviation.name.rpartition(" of ")[2] for deviation in ranks.deviations}
    # a loss, norm or buffer beyond its bar, or a rank unlike rank 0, has another cause than these parameters
    if parity.differences or not kinds <= {"gradient", "parameter", "optimizer"} or asked & deviating:
        return
    bounds = _bounds(task, settings, single, asked)
    if any(_size(ranks, name) > bounds.get(name, -1.0) or _size(single, name) > bounds[name] for name in asked):
        return
    errors = _of_the_same_gradients(task, settings, single, ranks, asked)
    if errors is None or any(error > parity.bar(*which) for which, error in errors.items()):
        return
    for (kind, name), error in errors.items():
        parity.errors(kind)[name] = error
    for name in asked:
        if name in parity.gradient_error:
            parity.own_bars["gradient", name] = max(parity.bar("gradient"), parity.gradient_error[name])
        parity.notes.append(
            f"the gradient of '{name}' is zero but for rounding: {_size(single, name):.1e} in one process and "
            f"{_size(ranks, name):.1e} under the plan, where one epsilon changes it by "
            f"{bounds[name] / ALLOWANCE:.1e}, of {_largest(single):.1e}, the largest; its update is what one "
            "process makes of the plan's gradient"
        )
    parity.exceeded = {which: step for which, step in parity.exceeded.items() if which[1] not in asked
                       and which not in errors}  # fmt: skip


def _bounds(task: Task, settings: Settings, single: Record, names: set[str]) -> dict[str, float]:
    """Returns the size up to which each gradient counts as rounding, where that is small beside the largest."""
    noise = dict.fromkeys(names, 0.0)
    for other in nudged_runs(task, settings):
        for name in names:
            for mine, theirs in zip(single.gradients, other.gradients, strict=True):
                a, b = mine.get(name), theirs.get(name)
                if a is None or b is None:
                    return {}
                noise[name] = max(noise[name], float((a - b).abs().max()) if a.numel() else 0.0)
    most = (GRADIENT_BAR if settings.dtype is torch.float64 else ALLOWANCE * LEAST_BAR) * _largest(single)
    return {name: ALLOWANCE * size for name, size in noise.items() if ALLOWANCE * size <= most}


def _size(record: Record, name: str) -> float:
    """Returns the largest element of a gradient over all steps."""
    of_steps = [gradients.get(name) for gradients in record.gradients]
    return max((float(g.abs().max()) for g in of_steps if g is not None and g.numel()), default=0.0)


def _largest(record: Record) -> float:
    """Returns the model's largest gradient element, of the step where that is least."""
    return min(max((float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0.0)
               for gradients in record.gradients)  # fmt: skip


def _of_the_same_gradients(
    task: Task, settings: Settings, single: Record, ranks: Record, names: set[str]
) -> dict[tuple[str, str], float] | None:  # fmt: skip
    """Returns (kind, name) -> error against an optimizer given the plan's gradients; None: it needs a closure."""
    named = [(name, p) for name, p in plain_module(task, settings).named_parameters() if p.requires_grad]
    optimizer = optimizer_of(task.optimizer, [param for _, param in named])
    if needs_closure(optimizer):  # it computes gradients itself, so it cannot be given the plan's
        return None
    raise_eps(optimizer)
    errors: dict[tuple[str, str], float] = {}

    def compare(kind: str, actual: Tensors, expected: dict[str, torch.Tensor], floor: float) -> None:
        for name, value in expected.items():
            other = actual.get(name)
            error = float("inf") if other is None else tensor_error(other, value, floor)
            errors[kind, name] = max(error, errors.get((kind, name), 0.0))

    for step, gradients in enumerate(ranks.gradients):
        for name, param in named:
            gradient = gradients.get(name)
            param.grad = None if gradient is None else gradient.to(param)
        with KeepDouble(), default_dtype(settings.dtype):
            optimizer.step()
        for name, param in named:
            if name not in names:
                continue
            compare("parameter", ranks.parameters[step], {name: kept(param)}, single.lr)
            if ranks.states_known:
                for key, value in kept_state(name, optimizer.state.get(param, {})).items():
                    like = [t for other, t in single.states[step].items() if other.startswith(key.partition(" of ")[0])]
                    largest = max((float(t.abs().max()) for t in like if t is not None and t.numel()), default=0.0)
                    compare("optimizer", ranks.states[step], {key: value}, max(GRADIENT_FLOOR * largest, 1e-300))
    return errors
