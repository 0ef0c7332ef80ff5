"""Compare a module's initial values with those of its constructor run directly: constants, means, variances, repeats.

Both sides of a proof replay a constructor (`trace/deferred`), so weights that are all alike, or twice as large as they
should be, would be on both. The constructor runs twice here, under two seeds:

    equal both times     a constant, which the module must have too
    different            random: mean and variance must be the constructor's, as far as so many numbers tell
    not alike            two weights that the constructor draws separately must not have the same random numbers

What this does not do: check models of more than `MOST` elements, values from files, or models that exist only once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.task import Task
from shardwise.trace.double import as_written

MOST = 2**22  # elements of a model
SIGMAS, RUNS = 6.0, 8  # standard errors by which means may differ; further runs of the constructor
FEW, FIRST = 16, 12  # elements from which a variance is compared; first elements whose order identifies random numbers
Values = dict[str, torch.Tensor]


def differences(task: Task, module: nn.Module) -> list[str]:
    """Returns a sentence for each constant, mean, variance or repeat of weights that is not the constructor's.

    module  as both sides of a proof build it
    """
    if not is_looked_at(task, module):
        return []
    values = _values(module)
    try:
        (one, first), (two, second) = _constructed(task.model, 1), _constructed(task.model, 2)
    except ShardwiseError:  # has a message for the user
        raise
    except Exception:  # building the module reports why it cannot be built
        return []
    # the model exists only once, or has other parameters in each run, so there is nothing to compare with
    if one is two or values.keys() != first.keys() or values.keys() != second.keys():
        return []
    unlike, drawn = list[str](), list[str]()
    for name, value in values.items():
        # random sizes, integers and sparse tensors have no elements to compare one by one
        if value.shape != first[name].shape or not value.is_floating_point() or value.layout != torch.strided:
            continue
        if not torch.equal(first[name], second[name]):
            drawn.append(name)
        elif not torch.allclose(value, first[name], rtol=1e-5, atol=1e-7, equal_nan=True):
            unlike.append(name)
    # equal under two seeds: a constant, or a choice among few values, which differs under more seeds
    others = [_constructed(task.model, seed)[1] for seed in range(3, 3 + RUNS)] if unlike else []
    constant = [name for name in unlike if all(torch.equal(first[name], other[name]) for other in others)]
    told = [f"'{name}' does not begin with the constant that its constructor gives it" for name in constant]
    told += _other_widths(task.model, drawn, values, first)
    return told + _alike(drawn, values, first)


def is_looked_at(task: Task, module: nn.Module) -> bool:
    """Whether `differences` runs the constructor again, after which the caller must build its module anew.

    Otherwise state that the constructor leaves outside of its module (a list that it fills) would be another module's.
    """
    elements = sum(param.numel() for param in module.parameters())
    return task.weights is None and task.model is not None and elements <= MOST


def _constructed(model: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Values]:
    """Returns (module, its values by name) of the constructor under a seed; restores the generators."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), as_written():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            module = model()
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
    return module, _values(module)


def _values(module: nn.Module) -> Values:
    return {name: param.detach().double().cpu() for name, param in module.named_parameters() if not param.is_complex()}


def _other_widths(model: Callable[[], nn.Module], drawn: list[str], values: Values, first: Values) -> list[str]:
    """Returns [a sentence] if random weights (`drawn`) have another mean or variance than the constructor's; else [].

    values, first  of the module, and of a run of the constructor
    """
    ours = _apart(drawn, values, first)
    if ours <= SIGMAS:
        return []
    # a random factor that all elements of a weight share differs as much between two runs of the constructor
    others = max(_apart(drawn, _constructed(model, seed)[1], first) for seed in range(2, 2 + RUNS))
    if ours <= 2 * others:
        return []
    return ["drawn weights begin with numbers of another mean or width than their constructor draws"]


def _apart(drawn: list[str], values: Values, first: Values) -> float:
    """Returns the largest difference in means of bounded functions of the tensors `drawn`, in standard errors."""
    most = 0.0
    for bounded in (torch.tanh, lambda numbers: torch.tanh(numbers).square()):
        units = []
        for name in drawn:
            unit = float(first[name].square().mean().sqrt()) or 1.0
            own, other = bounded(values[name] / unit), bounded(first[name] / unit)
            chance = math.sqrt(float(own.var() + other.var()) / own.numel()) + 1e-12 if own.numel() >= FEW else math.inf
            units.append(float(own.mean() - other.mean()) / chance)
        most = max([most, abs(math.fsum(units)) / math.sqrt(max(len(units), 1)), *map(abs, units)])
    return most if math.isfinite(most) else 0.0


def _alike(drawn: list[str], values: Values, first: Values) -> list[str]:
    """Returns [a sentence] if two weights share random numbers that the constructor draws separately; else []."""
    met: dict[tuple, str] = {}
    for name in drawn:
        if values[name].numel() < FIRST:
            continue
        other = met.setdefault(_order(values[name]), name)
        if other != name and _order(first[name]) != _order(first[other]):
            return [f"'{name}' and '{other}' begin with the same numbers, and their constructor draws them apart"]
    return []


def _order(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(value.reshape(-1)[:FIRST].argsort().tolist())
