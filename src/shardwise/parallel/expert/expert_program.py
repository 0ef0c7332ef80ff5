"""The operations of one expert over stacked weights as data, so that the rank that holds the expert can run them.

    steps   [w1[HERE]], [rows 0 @ step 0], [gelu(step 1)], [w2[HERE]], [step 2 @ step 3]

Functions are stored by torch's names, so that all ranks can read a program that one rank wrote.
"""

from __future__ import annotations

import base64
import functools
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import resolve_name

from shardwise.parallel.expert import ways
from shardwise.parallel.expert.ways import Here
from shardwise.trace.leaves import replaced, tensors_in


@dataclass(frozen=True)
class EarlierResult:
    """Stands for the result of step `step` of the program."""

    step: int


@dataclass(frozen=True)
class GivenRows:
    """Stands for the `place`-th tensor of rows that the expert is given."""

    place: int


@dataclass(frozen=True)
class StackedWeight:
    """Stands for a stacked weight, by its name in the mixture."""

    name: str


@dataclass(frozen=True)
class SharedTensor:
    """Stands for a parameter or buffer that all experts share, by its name in the mixture."""

    name: str


@dataclass(frozen=True)
class ExpertStep:
    """A call of the function named `func` (see `function_of`); "": the step's result is its first argument."""

    func: str
    args: tuple
    kwargs: dict


@dataclass(frozen=True)
class RowsDtype:
    """Stands for the dtype of the rows."""


HERE, ROWS_DTYPE = Here(), RowsDtype()
_STAND_INS = (EarlierResult, GivenRows, StackedWeight, SharedTensor, Here, RowsDtype)
_OUR_FUNCTIONS: dict[str, Callable] = {
    "getitem": operator.getitem, "product_of_sorted": ways.product_of_sorted, "get_one": ways.get_one,
}  # fmt: skip


@dataclass(frozen=True)
class ExpertProgram:
    """An expert's operations.

    steps  the operations in order; the last one's result is the expert's
    way    how the forward picks weights, a key of `ways.WAYS`
    rows   for each tensor of rows, the dim of the forward's tensor that counts experts; None if none does
    made   for `AllExperts` the dim of the result that counts experts; for `PickedExperts` the number of dims of the
           index; else None
    """

    steps: tuple[ExpertStep, ...]
    way: str
    rows: tuple[int | None, ...]
    made: int | None

    def run(
        self, place: int, rows: list[torch.Tensor], weight: Callable[[str], torch.Tensor],
        own: Callable[[str], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Returns the results (n, ...) of one expert for its tensors of rows (n, ...).

        place   index of the expert among those that this rank holds
        weight  from name to this rank's share of a stacked weight;  own  from name to a tensor that experts share
        """
        way = ways.WAYS[self.way]
        given = [way.given(tensor, dim) for tensor, dim in zip(rows, self.rows, strict=True)]
        results: list[Any] = []

        def read(leaf: Any) -> Any:
            """Returns the value that a stand-in in a step stands for."""
            match leaf:
                case EarlierResult(step):
                    return results[step]
                case GivenRows(number):
                    return given[number]
                case StackedWeight(name):
                    return way.weights(weight(name), place)
                case SharedTensor(name):
                    return own(name)
                case RowsDtype():
                    return next(tensor.dtype for tensor in rows if tensor.is_floating_point())
                case Here():
                    return way.here(place, rows, self.made)
            raise AssertionError(leaf)

        for step in self.steps:
            args, kwargs = replaced(_STAND_INS, read, (step.args, step.kwargs))
            results.append(function_of(step.func)(*args, **kwargs) if step.func else args[0])
        return way.result(results[-1], self.made)

    @property
    def functions(self) -> tuple[str, ...]:
        """Returns the names of the steps' functions, in order."""
        return tuple(step.func for step in self.steps)

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of the stacked weights that the program reads."""
        return frozenset(leaf.name for step in self.steps for leaf in step.args if isinstance(leaf, StackedWeight))

    @property
    def shared(self) -> frozenset[str]:
        """Returns the names of the tensors, shared by all experts, that the program reads."""
        leaves = (leaf for step in self.steps for leaf in tensors_in((step.args, step.kwargs), SharedTensor))
        return frozenset(leaf.name for leaf in leaves)

    def encoded(self) -> str:
        """Returns the program as text, which `decoded` reads."""
        return base64.b64encode(pickle.dumps(self)).decode()

    @staticmethod
    def decoded(text: str) -> ExpertProgram:
        """Returns the program that `encoded` made into this text, on a rank of the same job (it is unpickled)."""
        return pickle.loads(base64.b64decode(text))


@functools.lru_cache(1024)
def name_of(func: Callable) -> str | None:
    """Returns the name by which `function_of` finds a function; None if it is neither torch's nor of this package."""
    for name, known in _OUR_FUNCTIONS.items():
        if func is known:
            return name
    name = resolve_name(func)
    try:
        return name if name is not None and function_of(name) == func else None
    except AttributeError:
        return None


@functools.lru_cache(1024)
def function_of(name: str) -> Callable:
    """Returns the function that `name_of` gave this name (such as "torch.nn.functional.gelu")."""
    if name in _OUR_FUNCTIONS:
        return _OUR_FUNCTIONS[name]
    return functools.reduce(getattr, name.split(".")[1:], torch)
