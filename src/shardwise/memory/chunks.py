"""`position_chunks=N`: compute wide products in chunks of positions, and again in backward.

    y = act(x @ A) @ B           (B, S, H) -> (B, S, 4H) -> (B, S, H)      a feed-forward network
    l = cross_entropy(x @ W)     (B, S, H) -> (B, S, V)  -> ()             a head and its loss

A matrix product whose result is wider than its input is deferred. It returns a `Waiting` tensor, which has a shape but
no values, and operations on that are deferred too, as long as they treat each position by itself. An operation whose
result has no more elements than the first product's input (the product that narrows again, the loss) runs all deferred
ones, for one chunk of positions after another. Backward recomputes chunk by chunk, so that only one chunk of the wide
tensors is in memory at a time.

Which operations treat positions by themselves is not listed here. A chunk is a `Part` of a tensor over an axis whose
"ranks" are turns of one rank, which cannot communicate (`memory/chunk_runs.py`), so an operation whose rule in `part/`
has to communicate is not chunked. Each is tried on tensors without values before it is deferred. Sums over positions
become sums over turns, and a rule still knows the whole size (of which a mean is taken).

Live bytes: those of the wide tensors divided by N. FLOPs: one more forward of what is chunked. On the wire: nothing
more, but sums over `tp` inside a chunk are done in N pieces.

*What this does not do*: chunk operations that use random numbers (dropout between the two products), write in place, or
mix positions; autocast; second derivatives. Before these the wide tensor is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.memory.chunk_trial import look, look_of_rows, without_values
from shardwise.memory.chunk_waiting import HERE, ChunkCounts, Waiting, WaitingCall, answered, rows_of, waits, whole
from shardwise.part import Part
from shardwise.part.levels import Distributed

# function that multiplies rows by a matrix -> index of the argument with the rows; the matrix is the next one
_ROWS: dict[Callable, int] = {
    F.linear: 0, torch.matmul: 0, torch.Tensor.matmul: 0, torch.Tensor.__matmul__: 0, torch.mm: 0, torch.Tensor.mm: 0,
    torch.addmm: 1, torch.Tensor.addmm: 1,
}  # fmt: skip


class Chunks(ChunkCounts):
    """Makes forwards compute wide tensors in `count` chunks, and keeps the counts of `ChunkCounts`."""

    def inside(self, forward: Callable[..., Any], *, leaves_whole: bool = False) -> Callable[..., Any]:
        """Returns `forward` in which wide products are deferred.

        leaves_whole  whether to compute deferred outputs before it returns; else its outputs may be `Waiting`
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                output = forward(*args, **kwargs)
                if leaves_whole and any(isinstance(leaf, Waiting) for leaf in torch.utils._pytree.tree_leaves(output)):
                    self.left_whole = True
                return whole(output) if leaves_whole else output

        return run

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context: wide products on this thread are deferred. Does nothing inside another such context."""
        if HERE.chunks is not None:
            yield
            return
        HERE.chunks = self
        try:
            with _Mode(self):
                yield
        finally:
            HERE.chunks = None

    def notices(self) -> list[str]:
        """Returns lines for the user on what was computed in chunks, and what was not and why."""
        stays = [
            f"{repr(path) if path else 'code'} keeps a wide tensor whole: {name} writes into it"
            for name, path in self.written.items()
        ]
        if self.left_whole:
            when = "under zero=3 its weights are there only while it runs"
            stays.append(f"what the model returns, or a block, is made whole: {when}")
        if not self.computed:
            before = f": before {', '.join(sorted(self.whole))} wide tensors are made whole" if self.whole else ""
            long = f"no product that widens, of {self.count} positions or more, was followed by one that narrows"
            return [f"position_chunks has no effect: {'; '.join([long + before, *stays])}"]
        runs = "; ".join([*self.computed, *stays])
        return [f"position_chunks={self.count} computes in chunks, and again in backward: {runs}"]


def chunked_forwards(
    module: nn.Module, blocks: Iterable[str], chunks: Chunks, leaves_whole: bool, sending: Iterable[str] = (), *,
    recomputed: bool = False,
) -> None:  # fmt: skip
    """Wraps the forwards of a module and its blocks so that they compute wide tensors in chunks.

    blocks        paths of the blocks, which are wrapped too, since recompute calls them alone
    leaves_whole  whether to compute what the module or a block returns before it does (zero=3, where weights are
                  unsharded only while it runs)
    sending       paths of modules of experts, which send tokens to other ranks and so need computed ones
    recomputed    whether blocks run again in backward; their outputs are then computed inside, since a deferred output
                  would be computed outside of the block in the first forward only
    """
    for child in map(module.get_submodule, sending):
        child.forward = _with_values(child.forward)
    chunks.paths = {id(child): path for path, child in module.named_modules()}
    for block in {id(block): block for block in map(module.get_submodule, blocks)}.values():
        forward = _with_values(block.forward) if recomputed else block.forward
        block.forward = chunks.inside(forward, leaves_whole=leaves_whole)
    # unless the module is a block, which is wrapped already
    if module not in map(module.get_submodule, blocks):
        module.forward = chunks.inside(module.forward, leaves_whole=leaves_whole)


def given_values(units: Iterable[nn.Module]) -> None:
    """Registers hooks that compute deferred arguments of FSDP2's units, before the units' earlier hooks run."""
    for unit in units:
        unit.register_forward_pre_hook(lambda m, *arguments: whole(arguments), prepend=True, with_kwargs=True)


def _with_values(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward whose deferred arguments and results are computed; tensors inside may still be deferred."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = whole((args, kwargs))
        return whole(forward(*args, **kwargs))

    return run


class _Mode(TorchFunctionMode):
    """Function mode in which products that widen their rows are deferred."""

    def __init__(self, chunks: Chunks):
        super().__init__()
        self.chunks = chunks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # an operation on deferred tensors
        if any(issubclass(kind, Waiting) for kind in types):
            return answered(func, args, kwargs)
        # nothing is deferred while deferred calls are computed (`making`)
        if func in _ROWS and not HERE.making:
            begun = _begun(func, args, kwargs, self.chunks)
            # None: the product does not widen its rows, or cannot be deferred
            if begun is not None:
                return begun
        return func(*args, **kwargs)


def _begun(func: Callable, args: tuple, kwargs: dict, chunks: Chunks) -> Waiting | None:
    """Returns the `Waiting` result of a product that widens its rows; None if it is not to be deferred."""
    place = _ROWS[func]
    rows, matrix = (args[place], args[place + 1]) if len(args) > place + 1 else (None, None)
    if not isinstance(rows, torch.Tensor) or not isinstance(matrix, torch.Tensor) or not _may_wait(rows, matrix):
        return None
    # a result that is no wider than the rows needs no more memory than they do
    if matrix.shape[0 if func is F.linear else 1] <= rows.shape[-1]:
        return None
    first = _rows(rows, chunks)
    if first is None:
        return None
    args = (*args[:place], first, *args[place + 1 :])
    tried = look(func, args, kwargs, rows.numel())
    return waits(WaitingCall(func, args, kwargs, tried, rows.numel(), chunks)) if tried.what == "waits" else None


def _may_wait(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether a product of these may be deferred: float rows, not a summand; no functorch transform or autocast."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    settled = rows
    # a shard can be chunked; a summand must be summed over ranks first
    while isinstance(settled, Part):
        settled = settled.local
    return (
        rows.is_floating_point() and rows.dim() > 1 and matrix.dim() == 2 and not isinstance(settled, Distributed)
        and not transforms and not rows.is_inference() and not torch.is_autocast_enabled(rows.device.type)
    )  # fmt: skip


def _rows(rows: torch.Tensor, chunks: Chunks) -> Waiting | None:
    """Returns rows as a `Waiting` tensor to be chunked along the longest dim but the last; None if it is too short.

    Rows (B * S, H) that are a view of (B, S, H) are chunked along B or S.
    """
    base = rows._base if rows.dim() == 2 else None
    if base is None or base.dim() < 3 or base.shape[-1] != rows.shape[-1] or base.numel() != rows.numel():
        base = rows  # no view of (batch, sequence, hidden)
    dim = max(range(base.dim() - 1), key=lambda d: (base.shape[d], d))
    # some chunks would be empty
    if base.shape[dim] < chunks.count:
        return None
    call = WaitingCall(
        rows_of, (base,), {}, look_of_rows(without_values(base), dim, chunks.count), base.numel(), chunks
    )
    call.dim = dim
    first = waits(call)
    if base is rows:
        return first
    tried = look(torch.reshape, (first, tuple(rows.shape)), {}, 0)
    return (
        waits(WaitingCall(torch.reshape, (first, tuple(rows.shape)), {}, tried, 0, chunks))
        if tried.what == "waits"
        else None
    )
