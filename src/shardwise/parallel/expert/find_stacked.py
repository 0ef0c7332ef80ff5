"""Find modules that route tokens to stacked weights in their own forward, and try whether `stacked` can run them.

A candidate is the smallest module whose forward reads all weights (E, ...) of three or more dims that share an E, if
it chose rows (`topk`, `argmax`, a mask), ran a softmax over E, is called with rows of each expert, or is called with
choices by the module that made them. On random weights it must show what experts in a list must (`listed`), namely
that two forwards give the results and gradients of one, and that an expert treats rows independently. Weights (E, n)
may be biases of experts or a router's weight; the trial decides which of them are the experts'.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.comm import Axis
from shardwise.errors import RunError
from shardwise.parallel.expert.choosing import read_rows, sums_of_rows
from shardwise.parallel.expert.expert_forward import Stack
from shardwise.parallel.expert.expert_tensor import ReadOtherwise
from shardwise.parallel.expert.listed import (
    Chained,
    FailedTrial,
    ListedCall,
    ListedCalls,
    described,
    form_of,
    try_listed,
)
from shardwise.parallel.expert.stacked import StackedExperts
from shardwise.parallel.expert.trial_weights import Values, random_weight, random_weights
from shardwise.trace.deferred import Built
from shardwise.trace.leaves import tensors_in

_MOST_TRIALS = 16  # of subsets of the weights of two dims


class StackedReads(ListedCalls):
    """Mode that records, beside what `ListedCalls` does, which modules run while stacked weights are read.

    shapes   name of each parameter -> its shape
    readers  name of a weight with dim 0 of 2 or more -> the modules, outermost first, that ran at each of its reads
    given    module -> (args, kwargs) of its first call
    """

    def __init__(self, module: nn.Module, named: dict[str, torch.Tensor]):
        super().__init__(module)
        self._stacked = {id(p): name for name, p in named.items() if p.dim() >= 2 and p.shape[0] >= 2}
        self.shapes = {name: tuple(p.shape) for name, p in named.items()}
        self.readers: dict[str, tuple[nn.Module, ...]] = {}
        self.given: dict[nn.Module, tuple[tuple, dict]] = {}
        self._weighted: set[tuple[nn.Module, int]] = set()  # (module, size of a dim over which it ran a softmax)
        self.watched = True  # even if there are no lists of modules

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        running = tuple(child for child, _, _ in self._running)
        for leaf in tensors_in((args, kwargs or {})):
            name = self._stacked.get(id(leaf))
            if name is not None:
                before = self.readers.get(name, running)
                self.readers[name] = tuple(a for a, b in zip(before, running, strict=False) if a is b)
        if func is torch.ops.aten._softmax.default:
            self._weighted |= {(child, args[0].shape[args[1]]) for child in running}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _entered(self, child: nn.Module, args: tuple, kwargs: dict) -> None:
        self.given.setdefault(child, (args, kwargs))
        super()._entered(child, args, kwargs)

    def mixtures(self, *, softly: bool = False) -> Iterator[tuple[nn.Module, int, list[str], list[str]]]:
        """Yields (module, E, names of weights (E, ...) of three or more dims, names of weights (E, n)) of candidates.

        softly  whether to yield only modules that chose nothing, but ran a softmax over a multiple of E (soft routing
                to slots), in place of those that chose
        """
        groups: dict[tuple[nn.Module, int], list[str]] = {}
        for name, chain in self.readers.items():
            if chain and len(self.shapes[name]) > 2:
                groups.setdefault((chain[-1], self.shapes[name][0]), []).append(name)
        for (child, experts), large in groups.items():
            path = self.paths[child]
            small = [
                name for name, chain in self.readers.items()
                if len(self.shapes[name]) == 2 and self.shapes[name][0] == experts and chain[-1:] == (child,)
                and name.startswith(path and f"{path}.")
            ]  # fmt: skip
            strong = self._routes(child, experts, large)
            weak = any(child is other and size % experts == 0 for other, size in self._weighted)
            if child in self.given and ((weak and not strong) if softly else strong):
                yield child, experts, large, small

    def _routes(self, child: nn.Module, experts: int, large: list[str]) -> bool:
        """Whether rows were chosen in the module, or the caller chose and passed what looks like choices.

        large   names of its weights (E, ...) of three or more dims
        """
        if any(child in running for running in self._chose) or (child, experts) in self._weighted:
            return True
        integers = [t for t in tensors_in(self.given[child]) if not t.is_floating_point()]
        widths = {size for name in large for size in self.shapes[name][1:]}
        rows = [t for t in tensors_in(self.given[child]) if t.dim() > 2 and t.shape[-1] in widths]
        if any(t.dim() == 3 and t.shape[0] == experts for t in rows):  # rows of each expert
            return True
        chain = self.readers[large[0]]
        above = chain[chain.index(child) - 1] if chain.index(child) else None
        # arguments that may be choices are integer indices, or rows of each expert of each sample
        told = bool(integers) or any(experts in t.shape[:-1] for t in rows)
        return told and any(above in running[-2:] for running in self._chose)


def dealt_stacked(
    built: Built, reads: StackedReads, taken: Sequence[Stack], ranks: int
) -> tuple[list[Stack], list[str]]:  # fmt: skip
    """Returns (stacks of mixtures over stacked weights that can be dealt, [why others cannot]).

    reads  what one forward has shown;  taken  stacks that were found already;  ranks  size of ep
    """
    stacks, reasons = _dealt(built, reads, taken, ranks, softly=False)
    # stacked weights may also be attention heads, so modules with only a softmax are tried last
    if not stacks and not taken:
        stacks, more = _dealt(built, reads, taken, ranks, softly=True)
        reasons += more
    return stacks, reasons


def _dealt(
    built: Built, reads: StackedReads, taken: Sequence[Stack], ranks: int, *, softly: bool
) -> tuple[list[Stack], list[str]]:  # fmt: skip
    """Returns what `dealt_stacked` does, for the candidates of `reads.mixtures(softly=softly)`."""
    stacks, reasons = [], []
    # text of a mixture's form -> outcome of its trial, since most layers of a model are alike
    tried: dict[str, Stack | str] = {}
    names_taken = {name for stack in taken for name in stack.names}
    for child, experts, large, small in reads.mixtures(softly=softly):
        path = reads.paths[child]
        if names_taken & {*large, *small}:
            continue
        told = f"'{path}' deals rows to its stacked weights ('{large[0]}', ...)"
        if experts % ranks:
            reasons.append(f"{told}, but there are {experts} experts, which cannot be dealt evenly over {ranks} ranks")
            continue
        if outside := [name for name in large if not name.startswith(path and f"{path}.")]:
            reasons.append(f"{told}, but '{outside[0]}' is another module's")
            continue
        args, kwargs = tree_map_only(torch.Tensor, described, reads.given[child])
        call = ListedCall(path, (), args, kwargs, ())
        form = form_of(built.module, call)
        if form not in tried:
            tried[form] = _tried(built, call, reads.given[child], experts, large, small)
        outcome = tried[form]
        if isinstance(outcome, str):
            reasons.append(f"{told}, but {outcome}")
            continue
        names = tuple(f"{path}.{leaf}".removeprefix(".") for leaf in outcome.names)
        stacks.append(replace(outcome, path=path, names=names))
    return stacks, reasons


def _tried(
    built: Built, call: ListedCall, given: tuple[tuple, dict], experts: int, large: list[str], small: list[str]
) -> Stack | str:  # fmt: skip
    """Returns the stack of a mixture that passes the trial, with names relative to the mixture; else the reason.

    call, given   its call, and the (args, kwargs) of it;  experts  the number E
    large, small  names of the weights that are experts', and of weights (E, n), of which subsets are tried
    """
    child, why = built.module.get_submodule(call.path), ""
    large, small = ([name.removeprefix(f"{call.path}.") for name in names] for names in (large, small))
    subsets = (list(chosen) for count in range(len(small), -1, -1) for chosen in itertools.combinations(small, count))
    for chosen in itertools.islice(subsets, _MOST_TRIALS):
        names = [*large, *chosen]
        trial = StackedExperts(call.path, child, names, experts, Axis.alone("ep"))
        try:
            if try_listed(built.module, call, partial(_random, built, call.path, names), trial):
                raise FailedTrial("an expert draws (dropout), and its rank has no rows' places among all")
        except (FailedTrial, Chained, ReadOtherwise, RunError) as failed:
            why = why or str(failed)
            continue
        if trial.program is not None and trial.program.names == frozenset(names):
            stack = Stack(call.path, experts, tuple(names), None, program=trial.program.encoded())
            return _by_rows(built, child, stack, given)
        why = why or "not all of them are read by every expert"
    return why


def _by_rows(built: Built, child: nn.Module, stack: Stack, given: tuple[tuple, dict]) -> Stack:
    """Returns the stack, with `call` and `sums` set if the mixture may be called with a rank's own rows alone.

    given   (args, kwargs) of a call of the mixture
    """
    chosen = read_rows(*given)
    if chosen is None:
        return stack
    values = _random(built, stack.path, stack.names, torch.float64, torch.Generator().manual_seed(0))
    # random experts overlap in memory, so a stack counts as one expert
    held = sum(p.numel() // (stack.experts if name in stack.names else 1) for name, p in child.named_parameters())
    sums = sums_of_rows(child, chosen, values, held)
    return stack if sums is None else replace(stack, call=chosen.call, sums=tuple(sums.items()))


def _random(built: Built, path: str, names: Sequence[str], dtype: torch.dtype, generator: torch.Generator) -> Values:
    """Returns a function (name in the mixture, tensor) -> random values; those of `names` overlap across experts.

    A buffer keeps its own values.
    """
    own = random_weights(built, path, dtype, generator)

    def value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return random_weight(tensor, dtype, generator, stacked=True) if name in names else own(name, tensor)

    return value
