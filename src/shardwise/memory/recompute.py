"""Recompute blocks (`remat`), by recipe, rank_module, step_trace. A new mode: layout/plan, costs/layout, memory, block.

    full        keep each block's inputs; its forward runs again in backward
    selective   keep the results of matrix products, convolutions and attention too; recompute the rest

Bytes kept for each block: full, its inputs; selective, inputs plus the products' outputs. FLOPs added: full, one
forward; selective, that of norms, activations and elementwise ops.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); selective: Korthikanti et al. (2022),
section 5. The mechanism is `torch.utils.checkpoint`, non-reentrant.

A product that the block writes into afterwards (an activation in place) is kept as it was: a copy of it, made before
it is written into. torch looks at versions of tensors alone, which a view by `_unsafe_view` (that of every `linear` of
rows of positions) does not share, and would go on from the changed one.

Counters, running statistics and what lies in objects that a block is given (a cache of keys and values) advance once:
the second forward meets them as the first did. So do weights and buffers into which the block writes, also where
nothing notes it (`.data`), once a look has seen it (`note_written`); it then runs to its end, since what is written
after its use is what one process's backward finds.

What this does not do: recompute what lies outside the blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardwise.part.tensor import same_memory
from shardwise.trace.leaves import written_tensors
from shardwise.trace.module_state import ModuleState, PassedState

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
# labels for profiles give nothing that is kept; a unit of zero=3 inside a block has others in its second forward
SAC_IGNORED_OPS.update(
    (torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction)
)


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Keeping(_CachingTorchDispatchMode):
    """Mode of the first forward: keeps the policy's results as they were before anything was written into them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for written in written_tensors(func, args, kwargs or {}):
                self._copy(written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, written: torch.Tensor) -> None:
        """Replace kept results in the memory of a tensor that is about to be written by copies."""
        for kept in tree_leaves(self.storage):
            value = getattr(kept, "val", None)  # of what is recomputed there is none
            if isinstance(value, torch.Tensor) and same_memory(value, written):
                kept.val = value.clone()
                kept.version = kept.val._version


# names by which torch's `checkpoint`, and what it calls, would take an argument for their own
_OF_CHECKPOINT = {"fn", "preserve_rng_state", *inspect.signature(checkpoint).parameters}


# of each block that runs again, the weights and buffers into which it writes
_WRITTEN: WeakKeyDictionary[nn.Module, list[torch.Tensor]] = WeakKeyDictionary()


def note_written(module: nn.Module, names: Collection[str], norms: Collection[nn.Module] = ()) -> None:
    """Note, for blocks that run again, into which of the module's parameters and buffers forwards write.

    norms   keep statistics, which are followed otherwise
    """
    # running statistics of norms are kept right by the room that joins them over ranks
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
    named = (*module.named_parameters(), *module.named_buffers())
    written = {id(tensor) for name, tensor in named if name in names} - statistics
    for block, tensors in list(_WRITTEN.items()):
        # blocks of another module stand in the same table
        if any(block is child for child in module.modules()):
            tensors[:] = [tensor for tensor in (*block.parameters(), *block.buffers()) if id(tensor) in written]


class _Weights:
    """Copies of parameters and buffers, for a second forward that writes into them as the first did."""

    def __init__(self, params: list[torch.Tensor]):
        self._kept = [(param, param.detach().clone()) for param in params]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context: the parameters have these values inside, in memory of their own, and afterwards their own again."""
        now = [(param, param.data) for param, _ in self._kept]
        with _disable_current_modes():  # selective recompute counts ops, and this is none of the block's
            for param, value in self._kept:
                param.data = value.clone()
        try:
            yield
        finally:
            for param, data in now:
                param.data = data


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Returns (context of a block's first forward, context of the recomputing one), of selective recompute."""
    keeping, kept = create_selective_checkpoint_contexts(_policy)
    return _Keeping(_policy, keeping.storage), kept


def recompute_block(block: nn.Module, policy: str, by_value: bool = False) -> None:
    """Make the block's forward run again in backward instead of keeping its intermediate results.

    The block object and its names stay as they are. `policy` is "full" or "selective". `block.forward.inside(wrap)`
    wraps what runs both times: a mode that is entered around this forward is not there in backward.
    by_value  look for buffers that change by their values, once: of a plain module with torch's own batch norm
    """
    options: dict[str, Any] = {} if policy == "full" else {"context_fn": _contexts}
    forward = block.forward
    changing: list[tuple[dict, str]] | None = None  # counters and statistics that the forward advances, once known
    written = _WRITTEN.setdefault(block, [])

    @torch.compiler.disable  # torch before 2.13 cannot follow it
    def looked_at(args: Any, kwargs: Any) -> tuple[ModuleState, PassedState, _Weights]:
        return ModuleState(block, changing, by_value), PassedState(args, kwargs), _Weights(written)

    @torch.compiler.disable
    def changes(before: ModuleState) -> Any:
        return before.changed()

    def recomputed(*args, **kwargs):
        nonlocal changing
        # no backward will come, so nothing has to be kept for it
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before, passed, weights = looked_at(args, kwargs)
        args, kwargs, alike = _apart(args, kwargs)
        # an argument of the block that is named like one of `checkpoint` (debug) would be taken by that
        own = {name: kwargs.pop(name) for name in _OF_CHECKPOINT & kwargs.keys()}
        again = _again(partial(alike(forward), **own), before, passed, weights)
        # to its end where it writes into weights: what is written after the last use is what one process finds
        output = checkpoint(again, *args, use_reentrant=False, early_stop=not written, **options, **kwargs)
        # the first forward has shown what it changes: later ones keep that alone
        if changing is None:
            changing = changes(before)
        return output

    def inside(wrap: Callable[[Callable], Callable]) -> None:
        nonlocal forward
        forward = wrap(forward)

    recomputed.inside = inside  # type: ignore[attr-defined]
    block.forward = recomputed


def _apart(args: tuple, kwargs: dict) -> tuple[tuple, dict, Callable[[Callable], Callable]]:
    """Returns (args, kwargs, wrap): each argument once, and `wrap(forward)`, which takes them and repeats them.

    What hooks have kept of a tensor is another tensor each time, and a forward may ask whether its query is its key.
    """
    once = list({id(value): value for value in args}.values())
    places = {id(value): place for place, value in enumerate(once)}
    positions = [places[id(value)] for value in args]
    named = {name: places[id(value)] for name, value in kwargs.items() if id(value) in places}
    if len(once) == len(args) and not named:  # most calls: nothing is given twice
        return args, kwargs, lambda forward: forward

    def alike(forward: Callable) -> Callable:
        def run(*distinct: Any, **rest: Any) -> Any:
            return forward(
                *(distinct[at] for at in positions), **rest, **{name: distinct[at] for name, at in named.items()}
            )

        return run

    return tuple(once), {name: value for name, value in kwargs.items() if name not in named}, alike


def _again(forward: Callable, before: ModuleState, passed: PassedState, weights: _Weights) -> Callable:
    """Returns the forward; from its second call on the module is put back to the first call's state while it runs."""
    calls = 0

    def run(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **kwargs)
        with before.standing_in(), passed.standing_in(), weights.standing_in():
            return forward(*args, **kwargs)

    return run
