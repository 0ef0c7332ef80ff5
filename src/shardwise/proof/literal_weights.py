"""A module's values before the first step, held against its constructor run plainly: constants, widths, who is alike.

Both sides of a proof replay a constructor (`trace/deferred`), so weights that all begin alike, or twice as wide as they
should, would be on both. The constructor is run twice here, under two seeds:

    the same both times    a constant: the module has it too
    drawn                  mean and width are those that the constructor draws, as far as so many numbers tell
    unlike each other      two weights that are drawn apart are not one draw

What this does not do: look at models of more than `MOST` elements, at values from files, or at modules that exist once.
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

MOST = 2**22
SIGMAS, RUNS = 6.0, 8
FEW, FIRST = 16, 12  # numbers of which a width is looked at; first ones whose order tells draws apart
Values = dict[str, torch.Tensor]


def differences(task: Task, module: nn.Module) -> list[str]:
    """Returns a sentence for each constant, mean, width or repeated draw of weights that is not the constructor's."""
    if not is_looked_at(task, module):
        return []
    values = _values(module)
    try:
        (one, first), (two, second) = _constructed(task.model, 1), _constructed(task.model, 2)
    except ShardwiseError:  # a refusal in words of its own, which the user is to read
        raise
    except Exception:  # whoever builds the module tells why it cannot be built
        return []
    # the model exists once, or has other parameters in each run: there is nothing to hold it against
    if one is two or values.keys() != first.keys() or values.keys() != second.keys():
        return []
    unlike, drawn = list[str](), list[str]()
    for name, value in values.items():
        # a size that each run draws, integers, or sparse: no values to compare place by place
        if value.shape != first[name].shape or not value.is_floating_point() or value.layout != torch.strided:
            continue
        if not torch.equal(first[name], second[name]):
            drawn.append(name)
        elif not torch.allclose(value, first[name], rtol=1e-5, atol=1e-7, equal_nan=True):
            unlike.append(name)
    # equal under two seeds: a constant, or one of a few values (a place in a list), which more seeds draw otherwise
    others = [_constructed(task.model, seed)[1] for seed in range(3, 3 + RUNS)] if unlike else []
    constant = [name for name in unlike if all(torch.equal(first[name], other[name]) for other in others)]
    told = [f"'{name}' does not begin with the constant that its constructor gives it" for name in constant]
    told += _other_widths(task.model, drawn, values, first)
    return told + _alike(drawn, values, first)


def is_looked_at(task: Task, module: nn.Module) -> bool:
    """Whether `differences` runs the constructor again; the caller then builds the module that it uses after that.

    What a constructor leaves outside of its module (a list that it fills) is then that module's.
    """
    elements = sum(param.numel() for param in module.parameters())
    return task.weights is None and task.model is not None and elements <= MOST


def _constructed(model: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Values]:
    """Returns (module, its values by name) of the constructor under a seed; generators are as before afterwards."""
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
    """Returns a sentence where the numbers that weights begin with have another mean or width than those drawn."""
    ours = _apart(drawn, values, first)
    if ours <= SIGMAS:
        return []
    # what all elements of a weight share is as far apart in two runs of the constructor
    others = max(_apart(drawn, _constructed(model, seed)[1], first) for seed in range(2, 2 + RUNS))
    if ours <= 2 * others:
        return []
    return ["drawn weights begin with numbers of another mean or width than their constructor draws"]


def _apart(drawn: list[str], values: Values, first: Values) -> float:
    """Returns the largest difference in means of bounded functions of drawn tensors, in standard errors."""
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
    """Returns a sentence where two weights that the constructor draws apart begin with one draw."""
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
