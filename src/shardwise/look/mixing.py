"""Find modules that mix samples, and run them in a look as they will run on ranks: on the samples of all.

A tensor's rows are its entries along dim 0: samples, or several (tokens) for each sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.look.one_process import Untried
from shardwise.parallel.on_all_samples import LeafRows, Learnt, OnAllSamples, rows_from, rows_of, size_of, times_of
from shardwise.parallel.slots import Phase
from shardwise.part import plain
from shardwise.random import Drawn
from shardwise.trace.module_state import ModuleState

MOST_CALLS = 16  # calls of a module whose arguments are held


class MixesSamples(Exception):
    """Raised for modules, at `paths`, whose result for a sample depends on other samples; `problem`: the message."""

    def __init__(self, paths: list[str], problem: str):
        super().__init__(problem)
        self.paths, self.problem = paths, problem


def owners_of(names: Collection[str]) -> list[str]:
    """Returns the paths of the modules that hold the buffers of these names."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def modules_around(mixed: MixesSamples, tried: Collection[str]) -> list[str]:
    """Returns the paths of the modules that mix samples, each replaced by the module around it if it was `tried`.

    Raises `RefusedPlan` if one of them is the whole model.
    """
    paths = dict.fromkeys(mixed.paths)
    while any(path in tried for path in paths):
        paths = dict.fromkeys(path.rpartition(".")[0] if path in tried else path for path in paths)
    if "" in paths:
        raise RefusedPlan(mixed.problem)
    return list(paths)


def install(
    module: nn.Module, mixers: Mapping[str, Learnt | None], axis: Axis, phase: Phase, *, always: bool = True
) -> None:
    """Makes modules run on the samples of all ranks of the axis.

    mixers  path -> `OnAllSamples.learnt` of an earlier look; None: nothing is known yet
    phase   the state's, which tells whether every rank runs the same samples anyway
    always  whether they do so in evaluation too
    """
    for path, learnt in mixers.items():
        child = module.get_submodule(path)
        child.forward = OnAllSamples(child, axis, phase, learnt, always=always)


def refuse_mixed(module: nn.Module) -> None:
    """Raises `Untried` if modules run on all samples, since gradients of a part then belong to other losses too."""
    if mixers_of(module):
        raise Untried("modules of it mix samples, and run on those of all ranks")


def mixers_of(module: nn.Module) -> dict[str, OnAllSamples]:
    """Returns path -> the `OnAllSamples` in place of its forward, for modules that run on all samples."""
    named = ((path, getattr(child, "forward", None)) for path, child in module.named_modules())
    return {path: forward for path, forward in named if isinstance(forward, OnAllSamples)}


def told_mixing(paths: Sequence[str], ranks: int) -> str:
    """Returns the notice on modules, at `paths`, that run on the samples of all of `ranks` ranks."""
    more = f" (and {len(paths) - 1} more modules)" if paths[1:] else ""
    return (
        f"'{paths[0]}'{more} mixes the samples of a micro-batch: each of {ranks} data ranks runs it on all of them, "
        "and goes on with its own"
    )


def all_here(module: nn.Module) -> bool:
    """Whether a module is running that has been given the samples of all ranks."""
    return any(mixer.phase.same for mixer in mixers_of(module).values())


def dealt_draws(module: nn.Module, draws: Iterable[Drawn]) -> list[Drawn]:
    """Returns the random calls outside of modules that run on all samples, which draw for all of them on every rank."""
    mixers = [f"{path}." for path in mixers_of(module)]
    return [draw for draw in draws if not f"{draw.path}.".startswith(tuple(mixers))]


def modules_that_mix(module: nn.Module, run: Callable[[Any], Any], whole: Any, parts: Sequence[Any]) -> list[str]:
    """Returns the paths of the innermost modules whose results for a part's rows differ from those for the whole."""
    runs = [_calls_of(module, run, batch) for batch in (whole, *parts)]
    mixing = [path for path in runs[0] if path and _mixes(*[calls.get(path, []) for calls in runs])]
    return [path for path in mixing if not any(other.startswith(f"{path}.") for other in mixing)]


def _calls_of(module: nn.Module, run: Callable[[Any], Any], batch: Any) -> dict[str, list[tuple[list, list]]]:
    """Returns path -> [(leaves of arguments, leaves of results) of each call] of a run on a batch."""
    calls: dict[str, list[tuple[list, list]]] = {}

    def note(path: str, child: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls.setdefault(path, []).append((tree_flatten((args, kwargs))[0], tree_flatten(output)[0]))

    handles = [
        child.register_forward_hook(partial(note, path), with_kwargs=True) for path, child in module.named_modules()
    ]
    try:
        run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _mixes(whole: list, *parts: list) -> bool:
    """Whether a module gave, in some call, other result rows for a part than for the whole, from equal arguments.

    whole, parts  its calls, as in `_calls_of`
    """
    if any(len(calls) != len(whole) for calls in parts):
        return False
    for number, (arguments, results) in enumerate(whole):
        first = 0
        for calls in parts:
            leaves, made = calls[number]
            rows, of_part = rows_of(arguments), rows_of(leaves)
            try:
                given = [leaf.times for leaf in _learnt(arguments, leaves)]
                times = [leaf.times for leaf in _learnt(results, made, rows, of_part)]
            except RefusedPlan:
                return False
            if first + of_part > rows or not _alike(rows_from(arguments, given, first, of_part), leaves):
                return False
            expected = rows_from(results, times, first, of_part)
            # n = 0: a result without rows, such as a mean, tells nothing
            if any(n and not _alike([leaf], [own]) for n, leaf, own in zip(times, expected, made, strict=True)):
                return True
            first += of_part
    return False


@contextmanager
def known_rows(module: nn.Module, aside: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Context of a look, in which modules that run on all samples do so without ranks.

    `aside`: returns a context for calls that are not to be counted.
    """
    mixers = mixers_of(module).values()
    for mixer in mixers:
        mixer.looking = _KnownRows(mixer, aside)
    try:
        yield
    finally:
        for mixer in mixers:
            mixer.looking = None


class _KnownRows:
    """Stands in for a module that mixes samples: for a part of a batch it returns the part's rows of the whole.

    mixer  the module's `OnAllSamples`;  aside  as in `known_rows`
    """

    def __init__(self, mixer: OnAllSamples, aside: Callable[[], AbstractContextManager]) -> None:
        self.mixer, self.aside = mixer, aside
        self._wholes: deque[tuple[tuple, dict]] = deque(maxlen=MOST_CALLS)  # arguments, the latest first
        self._first = 0  # row of the whole at which the next part begins

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        """Returns the module's result; for rows of an earlier whole, their rows of the result on that whole."""
        if self.mixer.is_own:
            return self.mixer.forward(*args, **kwargs)
        leaves, _ = tree_flatten((args, kwargs))
        for call in self._wholes:
            whole, _ = tree_flatten(call)
            if rows_of(leaves) < rows_of(whole) and len(leaves) == len(whole):
                given = _learnt(whole, leaves)
                # parts come in order, each perhaps twice, so these rows are tried first
                behind, rows = rows_of(whole) - rows_of(leaves), rows_of(leaves)
                for first in dict.fromkeys([self._first, self._first - rows, 0, behind]):
                    if 0 <= first <= behind and _alike(
                        rows_from(whole, [leaf.times for leaf in given], first, rows), leaves
                    ):
                        self._first = first + rows
                        return self._part(call, (args, kwargs), given, first)
        # another batch, or rows that an earlier module has mixed, which the loss will show
        self._wholes.appendleft((args, kwargs))
        return self.mixer.forward(*args, **kwargs)

    def _part(self, whole: tuple[tuple, dict], part: tuple[tuple, dict], given: list[LeafRows], first: int) -> Any:
        """Returns the rows of the module's result on `whole` that are the part's; its state is as after that run.

        whole, part  (args, kwargs) of both;  given  rows of each argument leaf;  first  row at which the part begins
        """
        results, spec = tree_flatten(self.mixer.run_on_all(*whole[0], **whole[1]))
        rows, of = rows_of(tree_flatten(part)[0]), rows_of(tree_flatten(whole)[0])
        state, of_part = ModuleState(self.mixer.module), None
        # only for the sizes of its results; the part may be too small to run (batch norm of one sample)
        with suppress(ValueError, RuntimeError, IndexError), self.aside():
            of_part = tree_flatten(self.mixer.run_on_all(*part[0], **part[1]))[0]
        state.restore()
        if of_part is not None:
            self.mixer.learnt = given, _learnt(results, of_part, of, rows)
        # if unknown, by size: another part will be large enough to tell, or else the run is refused
        sizes = [size_of(leaf) for leaf in results]
        by_size = [0 if size % of else size // of for size in sizes]
        made = by_size if self.mixer.learnt is None else times_of(self.mixer.learnt[1], results, of)
        return tree_unflatten(rows_from(results, made, first, rows), spec)


def _learnt(whole: Sequence[Any], part: Sequence[Any], rows: int = 0, of_part: int = 0) -> list[LeafRows]:
    """Returns the `LeafRows` of each leaf of a module's arguments or results, from those of a whole and of a part.

    rows, of_part  rows of the whole's and the part's call; 0: the leaves' own
    Raises `RefusedPlan` if the leaves do not correspond, or their rows are no whole multiple of the call's.
    """
    rows, of_part = rows or rows_of(whole), of_part or rows_of(part)
    if len(whole) != len(part):
        raise RefusedPlan("a module that mixes samples takes or gives other tensors for other numbers of them")
    learnt = []
    for leaf, other in zip(whole, part, strict=True):
        size, small = size_of(leaf), size_of(other)
        times = size // rows if size % rows == 0 else 0
        if size != small and (not times or small != times * of_part):
            raise RefusedPlan(
                f"a module that mixes samples has a tensor of {size} rows for {rows} rows of its first argument, and "
                f"of {small} for {of_part}: which belong to which sample is not known"
            )
        learnt.append(LeafRows(times, 0) if size != small else LeafRows(0, size))
    return learnt


def _alike(given: Sequence[Any], leaves: Sequence[Any]) -> bool:
    """Whether floating-point tensors in two lists of leaves are equal up to rounding; other leaves are not compared."""
    for leaf, other in zip(given, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        a, b = plain(leaf.detach()), plain(other.detach())
        if a.shape != b.shape:
            return False
        # outside of the look's modes, which would take this for a read of values by the module
        with _disable_current_modes():
            bar = 2.0**6 * torch.finfo(a.dtype).eps * float(a.abs().max()) if a.numel() else 0.0
            if not torch.allclose(a, b, rtol=0.0, atol=bar, equal_nan=True):
                return False
    return True
