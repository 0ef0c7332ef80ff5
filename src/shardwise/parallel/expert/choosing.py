"""Find modules that route tokens in their own forward, yet treat each row (token) by itself.

Data-dependent operations (`nonzero`, `argsort` with counts that Python reads) have no rule on cut tensors. A module
that runs one, takes one float tensor (..., H) and returns one of the same shape can instead be called with a rank's own
rows, if a trial on random values shows

    f(x[rows]) = f(x)[rows]        along each dim but the last, for random halves in random order
    the same for equal rows, which all choose the same expert (a capacity would drop some)
    no state kept from the call except sums over rows in buffers (tokens per expert), which ranks then add up

What this does not do: modules with several input or output tensors, or with random numbers.
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
_MOST = 2**24  # a module with more elements in its weights is not tried, since that would take too long
_BAR = 1e-9  # tolerance in float64, times the largest absolute value
_ALIKE = "alike"  # marks a buffer whose value after a call does not depend on the rows


@dataclass(frozen=True)
class Chosen:
    """A call of a module whose only tensor is its rows.

    shape         of the rows (..., H);  call  which argument they are
    args, kwargs  the call's arguments, with None in place of the rows
    """

    shape: tuple[int, ...]
    call: ExpertCall
    args: tuple
    kwargs: dict


class Choices(TorchDispatchMode):
    """Mode that records calls of modules that themselves run a data-dependent operation.

    Such an operation's output shape depends on values (`nonzero`), or Python reads its value.

    calls  path of the innermost module that ran one -> its last such call, if its only tensor is rows
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
        """Context in which the mode is active and knows which modules are running."""
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
    """Returns {buffer's name: way} for the buffers in which a module adds up over its rows; None if rows interact.

    chosen  a call of the module
    value   from (name, tensor) to the value that stands in for that parameter or buffer in the trial
    held    number of elements in memory behind these values, if they overlap; None: as many as the weights have
    A way is a key of `part.buffer_ways.WAYS`. None also if the module keeps anything else than sums, fails on other
    numbers of rows, has no weights, or is too large to try.
    """
    # a module without weights is no mixture
    if not 0 < (sum(param.numel() for param in child.parameters()) if held is None else held) <= _MOST:
        return None
    before, generator = ModuleState(child), torch.Generator().manual_seed(0)
    rows = torch.randn(chosen.shape, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), standing_in(child, value):
            run = _Run(child, chosen)
            together = run(rows)
            # state in attributes (`keeps`) could not be combined over ranks
            if not isinstance(together, torch.Tensor) or together.shape != rows.shape or run.keeps:
                return None
            apart = all(_apart(run, rows, together, dim, generator) for dim in range(rows.dim() - 1))
            return _sums(run, rows) if apart else None
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):  # it needs a fixed number of rows
        return None
    finally:
        before.restore()


class _Run:
    """Runs a module on rows and restores its state after each run.

    keeps  whether any run has changed state other than buffers
    left   buffer's name -> its value after the last run
    """

    def __init__(self, child: nn.Module, chosen: Chosen):
        self.child, self._chosen = child, chosen
        self.keeps, self.left = False, dict[str, torch.Tensor]()

    def __call__(self, rows: torch.Tensor, start: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Returns the module's result for `rows`. `start`: name -> value of buffers to set before the run."""
        state = ModuleState(self.child)
        tables = {id(child._buffers) for child in self.child.modules()}
        try:
            for name, buffer in (start or {}).items():
                self.child.get_buffer(name).copy_(buffer)
            # contiguous, as in one process, since the module may call `view`
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
        """Returns, for each tensor in `rows`, `left` after a run on it from the buffers `start`."""
        lefts = []
        for some in rows:
            self(some, start)
            lefts.append(self.left)
        return lefts


def _sums(run: _Run, rows: torch.Tensor) -> dict[str, str] | None:
    """Returns {buffer's name: way} for buffers that add up over parts of the rows; None if some buffer does not.

    Tried on three pairs of parts, each from the buffers that the one before left; buffers that no rows change are
    left out.
    """
    parts = rows.tensor_split([rows.shape[-2] // 3], -2)
    # two equal parts first: a flag "expert was used" would add up by chance if the parts use different experts
    twice = torch.cat([parts[0], parts[0]], -2), (parts[0], parts[0])
    start, ways_by_name = {name: buffer.clone() for name, buffer in run.child.named_buffers()}, dict[str, list[str]]()
    for all_rows, split in (twice, (rows, parts), (rows, parts)):
        sizes = [part.shape[-2] for part in split]
        whole, *apart = run.all_left([all_rows, *split], start)
        for name, after in whole.items():
            each = [left[name] for left in apart]
            fitting = ways(start[name], after, each, sizes, _BAR)
            # the buffer does not depend on the rows, so ranks have nothing to add up
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
    """Whether results for two halves of the rows along `dim`, and for equal rows, are those for all rows together.

    together   the module's result for all of `rows`
    """
    count = rows.shape[dim]
    order = torch.randperm(count, generator=generator)
    parts = [order[: count // 2], order[count // 2 :]]
    alike = rows.narrow(dim, 0, 1)
    pairs = [(run(rows.index_select(dim, part)), together.index_select(dim, part)) for part in parts if len(part)]
    pairs.append((run(alike.expand_as(rows).contiguous()), run(alike).expand_as(rows)))
    bar = _BAR * max(1.0, together.abs().max().item())
    return all(torch.allclose(mine, theirs, rtol=0.0, atol=bar) for mine, theirs in pairs)


def read_rows(args: tuple, kwargs: dict) -> Chosen | None:
    """Returns the call if its only tensor is a float argument (..., H) of two or more dims; else None."""
    tensors = tensors_in((args, kwargs))
    key = next((key for key, value in [*enumerate(args), *kwargs.items()] if isinstance(value, torch.Tensor)), None)
    if key is None or len(tensors) != 1 or not tensors[0].is_floating_point() or tensors[0].dim() < 2:
        return None
    return Chosen(
        tuple(tensors[0].shape),
        ExpertCall(key),
        *tree_map_only(torch.Tensor, lambda tensor: None, (args, kwargs)),
    )
