"""`position_chunks=N`: which wide products are computed in chunks of positions, and again in backward.

    y = act(x @ A) @ B           (B, S, H) -> (B, S, 4H) -> (B, S, H)      a feed-forward network
    l = cross_entropy(x @ W)     (B, S, H) -> (B, S, V)  -> ()             a head and its loss

A product with a matrix that widens its rows is not computed at once: it gives a `Waiting` tensor, which has a shape and
no values. What is done to it waits too, as long as each position stays by itself. An operation that leaves no more
elements than came in (the product that narrows again, the loss) computes all of them, for one chunk of positions after
the other; backward does so again, so that of the wide tensors one chunk is there at a time.

Which operations keep positions apart is not listed here. A chunk is a part of a tensor over an axis whose ranks are
turns of one rank, which can send nothing (`memory/chunk_runs.py`): an operation whose rule of `part/` has to send is
not done in chunks. Each is tried on tensors without values before it is waited for. Sums over positions are sums over
turns, and what a rule knows of the whole (the number that a mean is over) it still knows.

Live bytes: those of the wide tensors divided by N. FLOPs: one forward more of what is chunked. On the wire: nothing of
its own; sums over `tp` inside a chunk are taken in N pieces.

*What this does not do*: operations that draw (dropout between the two products), that write in place, or that mix
positions; autocast; second derivatives. Before them the wide tensor is made whole, as ever.
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

# functions that multiply rows by a matrix, and which argument has the rows; the matrix is the one behind it
_ROWS: dict[Callable, int] = {
    F.linear: 0, torch.matmul: 0, torch.Tensor.matmul: 0, torch.Tensor.__matmul__: 0, torch.mm: 0, torch.Tensor.mm: 0,
    torch.addmm: 1, torch.Tensor.addmm: 1,
}  # fmt: skip


class Chunks(ChunkCounts):
    """Makes forwards compute wide tensors in chunks, and counts them."""

    def inside(self, forward: Callable[..., Any], *, leaves_whole: bool = False) -> Callable[..., Any]:
        """Returns `forward` with wide tensors put off inside (`Waiting`); its outputs may be put off too, unless
        `leaves_whole`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                output = forward(*args, **kwargs)
                if leaves_whole and any(isinstance(leaf, Waiting) for leaf in torch.utils._pytree.tree_leaves(output)):
                    self.left_whole = True
                return whole(output) if leaves_whole else output

        return run

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context: wide tensors are put off (`Waiting`). Inside another such context nothing changes."""
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
        """Returns lines for the user: what was computed in chunks, and what stayed whole."""
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
    """Make a module's forward, and each block's that recompute runs again, compute wide tensors in chunks.

    leaves_whole  what the module or a block returns: where its weights are there while it runs alone (zero=3)
    sending       paths of modules of experts, which hand rows to other ranks
    recomputed    whether blocks run again in backward: what waits beyond one would be computed outside of it in the
                  forward and nowhere in the second run, which then keeps other tensors
    """
    for child in map(module.get_submodule, sending):
        child.forward = _with_values(child.forward)
    chunks.paths = {id(child): path for path, child in module.named_modules()}
    for block in {id(block): block for block in map(module.get_submodule, blocks)}.values():
        forward = _with_values(block.forward) if recomputed else block.forward
        block.forward = chunks.inside(forward, leaves_whole=leaves_whole)
    # a block is wrapped by itself as well, since recompute runs it without the module's forward around it
    if module not in map(module.get_submodule, blocks):
        module.forward = chunks.inside(module.forward, leaves_whole=leaves_whole)


def given_values(units: Iterable[nn.Module]) -> None:
    """Compute waiting arguments of zero=3's units, before hooks that were registered earlier look at them."""
    for unit in units:
        unit.register_forward_pre_hook(lambda m, *arguments: whole(arguments), prepend=True, with_kwargs=True)


def _with_values(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward whose waiting arguments and results are computed, as experts need that send their rows on.

    Between the two tensors may wait.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = whole((args, kwargs))
        return whole(forward(*args, **kwargs))

    return run


class _Mode(TorchFunctionMode):
    """Function mode in which products that widen their rows wait."""

    def __init__(self, chunks: Chunks):
        super().__init__()
        self.chunks = chunks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # what waits answers for itself: another product joins its program
        if any(issubclass(kind, Waiting) for kind in types):
            return answered(func, args, kwargs)
        # within a program that runs already (`making`) nothing waits again
        if func in _ROWS and not HERE.making:
            begun = _begun(func, args, kwargs, self.chunks)
            # None: this product does not widen its rows, or they are too few
            if begun is not None:
                return begun
        return func(*args, **kwargs)


def _begun(func: Callable, args: tuple, kwargs: dict, chunks: Chunks) -> Waiting | None:
    """Returns a `Waiting` result for a product that widens its rows; None where it is computed at once."""
    place = _ROWS[func]
    rows, matrix = (args[place], args[place + 1]) if len(args) > place + 1 else (None, None)
    if not isinstance(rows, torch.Tensor) or not isinstance(matrix, torch.Tensor) or not _may_wait(rows, matrix):
        return None
    # no wider than the rows: the result costs no more memory than what came in
    if matrix.shape[0 if func is F.linear else 1] <= rows.shape[-1]:
        return None
    first = _rows(rows, chunks)
    if first is None:
        return None
    args = (*args[:place], first, *args[place + 1 :])
    tried = look(func, args, kwargs, rows.numel())
    return waits(WaitingCall(func, args, kwargs, tried, rows.numel(), chunks)) if tried.what == "waits" else None


def _may_wait(rows: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether a product of these may be put off: of float rows that no summand, transform or autocast touches."""
    transforms = torch._C._functorch.peek_interpreter_stack() is not None
    settled = rows
    # shares are cut into chunks below the ranks' axes; a summand has to be summed over them first
    while isinstance(settled, Part):
        settled = settled.local
    return (
        rows.is_floating_point() and rows.dim() > 1 and matrix.dim() == 2 and not isinstance(settled, Distributed)
        and not transforms and not rows.is_inference() and not torch.is_autocast_enabled(rows.device.type)
    )  # fmt: skip


def _rows(rows: torch.Tensor, chunks: Chunks) -> Waiting | None:
    """Returns rows as a `Waiting` tensor, cut along the longest dim, of (B * S, H) along B or S; None if that fails."""
    base = rows._base if rows.dim() == 2 else None
    if base is None or base.dim() < 3 or base.shape[-1] != rows.shape[-1] or base.numel() != rows.numel():
        base = rows  # no view of (batch, sequence, hidden): cut as it is
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
