"""A module's parameters as its code reads them: `self.weight` gives a part of the whole weight.

The parameter itself is this rank's share, a plain tensor, so that data parallelism, recompute and the optimizer need
to know nothing. What its gradient is, however activations are cut, is settled where it was read:

    over an axis that cuts weights        the share, or whole
    over an axis that cuts activations    this rank's summand; sums over ranks are taken once, with those of a step
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Axis
from shardwise.part.cuts import Owners
from shardwise.part.sums import whole_gradient, with_summed_gradient
from shardwise.part.tensor import to_part


class _Own(threading.local):
    """Backward, which may compute a block again, runs in threads of its own."""

    axes: tuple[Axis, ...] = ()


_OWN = _Own()


@contextmanager
def own_rows(axes: tuple[Axis, ...]) -> Iterator[None]:
    """While it lasts, what is computed is of this rank's share over `axes`, as plain tensors.

    A weight that is read then gets a gradient that is this rank's summand over them as it comes.
    """
    before, _OWN.axes = _OWN.axes, axes
    try:
        yield
    finally:
        _OWN.axes = before


_CLASSES: dict[tuple[type, tuple[str, ...]], type] = {}


class ParameterCut(Protocol):
    """How a parameter is cut."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def owners(self) -> Owners: ...


def see_parts(
    module: nn.Module, cuts: Mapping[str, ParameterCut], axis: Axis, absent: Collection[str] = (),
    summed: tuple[Axis, ...] = (),
) -> Callable[[], None]:  # fmt: skip
    """Let the module, whose parameters are shares, read them as parts of the whole. Returns what undoes it.

    cuts    by parameter; the others are whole over `axis`
    absent  parameters that stay as they are
    summed  axes that cut activations and no weights, outermost first: a gradient stays this rank's summand over them
    """
    names = {id(param): name for name, param in module.named_parameters()}
    before: list[tuple[nn.Module, type]] = []
    for child in list(module.modules()):
        held = {leaf: names[id(param)] for leaf, param in child._parameters.items() if param is not None}
        held = {leaf: name for leaf, name in held.items() if name not in absent}
        mine = {leaf: cuts.get(name) for leaf, name in held.items()}  # whole ones too: see `whole_gradient`
        if mine:
            before.append((child, type(child)))
            child.__dict__["_tensor_cuts"] = (mine, axis, summed)
            child.__class__ = _seeing_parts(type(child), tuple(sorted(mine)))

    def undo() -> None:
        for child, kind in before:
            child.__class__ = kind
            del child.__dict__["_tensor_cuts"]

    return undo


def _seeing_parts(kind: type, leaves: tuple[str, ...]) -> type:
    """A subclass whose named parameters read as parts of the whole."""
    if (kind, leaves) not in _CLASSES:
        body: dict[str, Any] = {leaf: property(_reader(leaf)) for leaf in leaves}
        body["__doc__"], body["__module__"] = kind.__doc__, kind.__module__
        made = type(kind.__name__, (kind,), body)
        made.__qualname__ = kind.__qualname__
        _CLASSES[kind, leaves] = made
    return _CLASSES[kind, leaves]


def _reader(leaf: str):
    def read(self: nn.Module) -> torch.Tensor:
        held = self._parameters[leaf]
        assert held is not None
        if isinstance(held, DTensor):
            return held  # sharded by zero=3 and not gathered now: for its dtype or device
        cuts, axis, summed = self.__dict__["_tensor_cuts"]
        cut = cuts[leaf]
        with torch._C.DisableTorchFunctionSubclass():  # a script's parameter, which beside this counts otherwise
            held = with_summed_gradient(held, tuple(each for each in summed if each not in _OWN.axes))
        if cut is None:
            return whole_gradient(held, axis)
        with torch._C.DisableTorchFunctionSubclass():  # a script's parameter, whose share nobody else may read
            return to_part(held, cut.dim, cut.owners, axis, cut.name)

    return read
