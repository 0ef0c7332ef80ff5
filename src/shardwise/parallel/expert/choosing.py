"""Find modules that choose by values and treat each row by itself: mixtures that route within their own forward.

Which rows an expert is given (`nonzero`), in which order (`argsort` and counts read in Python), is no operation on cut
tensors. A module that runs one, is called with one float tensor (..., H) and gives one of that shape may be given a
rank's own rows, if on random values it shows

    f(x[rows]) = f(x)[rows]        along each dim but the last, for any half of the rows and any order
    the same where all rows are equal, and so choose the same (a capacity would drop some)
    nothing kept from the call but sums over rows in buffers (how many each expert was given), which ranks then add up

What this does not do: modules that are given or give more than one tensor, or that draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.parallel.expert.expert_forward import ExpertCall
from shardwise.part.buffer_ways import SUMS, ways
from shardwise.trace.leaves import tensors_in
from shardwise.trace.module_state import ModuleState
from shardwise.trace.stand_in import standing_in

_BY_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_MOST = 2**24  # elements of the weights of a module that is tried
_BAR = 1e-9
_ALIKE = "alike"  # of a buffer that is the same whatever the rows are


@dataclass(frozen=True)
class Chosen:
    """A call of a module: the shape of its rows, which argument they are, and the arguments (of the rows None)."""

    shape: tuple[int, ...]
    call: ExpertCall
    args: tuple
    kwargs: dict


class Choices(TorchDispatchMode):
    """Mode that notes calls of the innermost modules that run an operation whose result's size, or branch, is values'.

    calls  by path
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.calls: dict[str, Chosen] = {}
        self._paths = {child: path for path, child in module.named_modules()}
        self._running: list[tuple[nn.Module, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(tag in func.tags for tag in _BY_VALUES) and self._running:
            child, given, named = self._running[-1]
            if (chosen := read_rows(given, named)) is not None:
                self.calls[self._paths[child]] = chosen
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context: notes which modules run."""
        handles = []
        for child in self._paths:
            handles += [
                child.register_forward_pre_hook(lambda m, a, k: self._running.append((m, a, k)), with_kwargs=True),
                child.register_forward_hook(lambda m, a, o: self._left(), always_call=True),
            ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _left(self) -> None:
        self._running.pop()


def sums_of_rows(
    child: nn.Module, chosen: Chosen, value: Callable[[str, torch.Tensor], torch.Tensor], held: int | None = None
) -> dict[str, str] | None:
    """Returns {name of a buffer: way} of what a module, with tensors `value(name, tensor)`, adds up over its rows.

    held  elements of which the values are made, where they overlap; None: as many as the weights have
    None where it does to a row what depends on others, or keeps anything else of them.
    """
    # without weights it is no mixture, and a large one would take too long to try
    if not 0 < (sum(param.numel() for param in child.parameters()) if held is None else held) <= _MOST:
        return None
    before, generator = ModuleState(child), torch.Generator().manual_seed(0)
    rows = torch.randn(chosen.shape, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), standing_in(child, value):
            run = _Run(child, chosen)
            together = run(rows)
            # rows in, rows out; and what it leaves in attributes (`keeps`) would be that of one rank's rows
            if not isinstance(together, torch.Tensor) or together.shape != rows.shape or run.keeps:
                return None
            apart = all(_apart(run, rows, together, dim, generator) for dim in range(rows.dim() - 1))
            return _sums(run, rows) if apart else None
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):  # on other numbers of rows
        return None
    finally:
        before.restore()


class _Run:
    """Runs a module on rows and puts it back as it was.

    keeps  a run has changed other things than buffers
    left   buffers as the last run has left them, by name
    """

    def __init__(self, child: nn.Module, chosen: Chosen):
        self.child, self._chosen = child, chosen
        self.keeps, self.left = False, dict[str, torch.Tensor]()

    def __call__(self, rows: torch.Tensor, start: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Returns what the module makes of rows, from other buffers than its own where `start` has them."""
        state = ModuleState(self.child)
        tables = {id(child._buffers) for child in self.child.modules()}
        try:
            for name, buffer in (start or {}).items():
                self.child.get_buffer(name).copy_(buffer)
            # as one process gives them: of parts of rows, a view by shape would fail
            args, kwargs = self._chosen.call.made(self._chosen.args, self._chosen.kwargs, rows.contiguous())
            made = self.child(*args, **kwargs)
            self.keeps |= any(id(table) not in tables for table, _ in state.changed())
            self.left = {name: buffer.clone() for name, buffer in self.child.named_buffers()}
            return made
        finally:
            state.restore()

    def all_left(
        self, rows: Sequence[torch.Tensor], start: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        """Returns `left` of a run on each."""
        lefts = []
        for some in rows:
            self(some, start)
            lefts.append(self.left)
        return lefts


def _sums(run: _Run, rows: torch.Tensor) -> dict[str, str] | None:
    """Returns the ways in which buffers add up over two parts of the rows, from two beginnings; None for others."""
    parts = rows.tensor_split([rows.shape[-2] // 3], -2)
    # equal rows first: what marks that a row came adds up by chance where rows differ
    twice = torch.cat([parts[0], parts[0]], -2), (parts[0], parts[0])
    start, ways_by_name = {name: buffer.clone() for name, buffer in run.child.named_buffers()}, dict[str, list[str]]()
    for all_rows, split in (twice, (rows, parts), (rows, parts)):
        sizes = [part.shape[-2] for part in split]
        whole, *apart = run.all_left([all_rows, *split], start)
        for name, after in whole.items():
            each = [left[name] for left in apart]
            fitting = ways(start[name], after, each, sizes, _BAR)
            # whatever rows it is given, the buffer ends alike: there is nothing to add up
            if all(torch.equal(one, after) for one in each):
                fitting.insert(0, _ALIKE)
            ways_by_name[name] = [way for way in ways_by_name.get(name, fitting) if way in fitting]
        start = whole
    chosen = {name: next(iter(fitting), None) for name, fitting in ways_by_name.items()}
    if not {*chosen.values()} <= {_ALIKE, *SUMS}:
        return None
    return {name: way for name, way in chosen.items() if way is not None and way != _ALIKE}


def _apart(
    run: _Run, rows: torch.Tensor, together: torch.Tensor, dim: int,
    generator: torch.Generator,
) -> bool:  # fmt: skip
    """Returns whether parts of the rows along a dim, and equal rows, give what they give together."""
    count = rows.shape[dim]
    order = torch.randperm(count, generator=generator)
    parts = [order[: count // 2], order[count // 2 :]]
    alike = rows.narrow(dim, 0, 1)
    pairs = [(run(rows.index_select(dim, part)), together.index_select(dim, part)) for part in parts if len(part)]
    pairs.append((run(alike.expand_as(rows).contiguous()), run(alike).expand_as(rows)))
    bar = _BAR * max(1.0, together.abs().max().item())
    return all(torch.allclose(mine, theirs, rtol=0.0, atol=bar) for mine, theirs in pairs)


def read_rows(args: tuple, kwargs: dict) -> Chosen | None:
    """Returns the call where its only tensor is an argument of floats (..., H); else None."""
    tensors = tensors_in((args, kwargs))
    key = next((key for key, value in [*enumerate(args), *kwargs.items()] if isinstance(value, torch.Tensor)), None)
    if key is None or len(tensors) != 1 or not tensors[0].is_floating_point() or tensors[0].dim() < 2:
        return None
    return Chosen(
        tuple(tensors[0].shape),
        ExpertCall(key),
        *tree_map_only(torch.Tensor, lambda tensor: None, (args, kwargs)),
    )
