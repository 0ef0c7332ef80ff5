"""Activation checkpointing of blocks (`remat`). A new mode: layout/plan, costs/layout, costs/memory, costs/block too.

    full        save each block's inputs; its forward runs again in backward
    selective   save the results of matrix products, convolutions and attention too; recompute the rest

Bytes saved for each block: full, its inputs; selective, inputs plus the products' outputs. FLOPs added: full, one
forward; selective, that of norms, activations and elementwise ops.
Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); selective: Korthikanti et al. (2022),
section 5. The mechanism is `torch.utils.checkpoint`, non-reentrant.

If a block writes into a saved product afterwards (an in-place activation), a copy from before the write is saved. torch
would use the changed product, since it compares version counters, which a view by `_unsafe_view` (in each `linear` on
(B, S, H)) does not share.

Counters, running statistics and the contents of objects that a block is given (a key-value cache) advance once, since
the second forward starts from their values before the first. The same holds for weights and buffers into which the
block writes, also by `.data`, once a look has seen that (`note_written`). The second forward of such a block is not
stopped early, since one process's backward finds what was written after the last use.

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
# profiler labels need not be equal in both forwards; those of an FSDP2 unit inside a block are not
SAC_IGNORED_OPS.update(
    (torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction)
)


def _policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    """Returns whether selective recompute saves the result of `op`."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Keeping(_CachingTorchDispatchMode):
    """Mode of the first forward: saves the policy's results, and copies one before it is written into."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for written in written_tensors(func, args, kwargs or {}):
                self._copy(written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, written: torch.Tensor) -> None:
        """Replaces saved results that share memory with `written`, which is about to be written into, by copies."""
        for kept in tree_leaves(self.storage):
            value = getattr(kept, "val", None)  # recomputed results have no value
            if isinstance(value, torch.Tensor) and same_memory(value, written):
                kept.val = value.clone()
                kept.version = kept.val._version


# names of parameters of torch's `checkpoint`, and of what it calls, which a block's keyword argument may have too
_OF_CHECKPOINT = {"fn", "preserve_rng_state", *inspect.signature(checkpoint).parameters}


# recomputed block -> the weights and buffers into which its forward writes
_WRITTEN: WeakKeyDictionary[nn.Module, list[torch.Tensor]] = WeakKeyDictionary()


def note_written(module: nn.Module, names: Collection[str], norms: Collection[nn.Module] = ()) -> None:
    """Tells the recomputed blocks of `module` into which parameters and buffers forwards write.

    names   of these parameters and buffers
    norms   batch norms, whose running statistics are left out
    """
    # running statistics are handled where they are combined over ranks (parallel/batchnorm)
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
    named = (*module.named_parameters(), *module.named_buffers())
    written = {id(tensor) for name, tensor in named if name in names} - statistics
    for block, tensors in list(_WRITTEN.items()):
        # the table has blocks of other modules too
        if any(block is child for child in module.modules()):
            tensors[:] = [tensor for tensor in (*block.parameters(), *block.buffers()) if id(tensor) in written]


class _Weights:
    """Copies of parameters and buffers, from which a second forward starts that writes into them."""

    def __init__(self, params: list[torch.Tensor]):
        self._kept = [(param, param.detach().clone()) for param in params]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Context: the tensors have the copied values inside, in other memory, and their own data again afterwards."""
        now = [(param, param.data) for param, _ in self._kept]
        with _disable_current_modes():  # selective recompute matches ops in order, and this clone is not the block's
            for param, value in self._kept:
                param.data = value.clone()
        try:
            yield
        finally:
            for param, data in now:
                param.data = data


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Returns (context of a block's first forward, context of the second), for selective recompute."""
    keeping, kept = create_selective_checkpoint_contexts(_policy)
    return _Keeping(_policy, keeping.storage), kept


def recompute_block(block: nn.Module, policy: str, by_value: bool = False) -> None:
    """Replaces the block's forward by one that is run again in backward instead of saving intermediate results.

    policy    "full" or "selective"
    by_value  whether to find buffers that change by comparing values, once; for a module with torch's own batch norm
    The block object and its names stay. `block.forward.inside(wrap)` wraps the inner forward, which runs both times; a
    mode entered around the outer one is not active in backward.
    """
    options: dict[str, Any] = {} if policy == "full" else {"context_fn": _contexts}
    forward = block.forward
    changing: list[tuple[dict, str]] | None = None  # (table, key) of state that the forward changes; None: unknown yet
    written = _WRITTEN.setdefault(block, [])

    @torch.compiler.disable  # torch before 2.13 cannot follow it
    def looked_at(args: Any, kwargs: Any) -> tuple[ModuleState, PassedState, _Weights]:
        return ModuleState(block, changing, by_value), PassedState(args, kwargs), _Weights(written)

    @torch.compiler.disable
    def changes(before: ModuleState) -> Any:
        return before.changed()

    def recomputed(*args, **kwargs):
        nonlocal changing
        # no backward will come
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before, passed, weights = looked_at(args, kwargs)
        args, kwargs, alike = _apart(args, kwargs)
        # `checkpoint` would take a keyword argument that is named like one of its own (debug)
        own = {name: kwargs.pop(name) for name in _OF_CHECKPOINT & kwargs.keys()}
        again = _again(partial(alike(forward), **own), before, passed, weights)
        # no early stop if it writes into weights, since one process's backward finds what was written last
        output = checkpoint(again, *args, use_reentrant=False, early_stop=not written, **options, **kwargs)
        # later forwards snapshot only what the first one changed
        if changing is None:
            changing = changes(before)
        return output

    def inside(wrap: Callable[[Callable], Callable]) -> None:
        nonlocal forward
        forward = wrap(forward)

    recomputed.inside = inside  # type: ignore[attr-defined]
    block.forward = recomputed


def _apart(args: tuple, kwargs: dict) -> tuple[tuple, dict, Callable[[Callable], Callable]]:
    """Returns (args, kwargs, wrap) without repeated arguments; `wrap(forward)` takes these and repeats them.

    In the second forward each saved argument is a new tensor, so a forward that tests whether its query is its key
    would otherwise behave differently.
    """
    once = list({id(value): value for value in args}.values())
    places = {id(value): place for place, value in enumerate(once)}
    positions = [places[id(value)] for value in args]
    named = {name: places[id(value)] for name, value in kwargs.items() if id(value) in places}
    if len(once) == len(args) and not named:  # no argument is repeated
        return args, kwargs, lambda forward: forward

    def alike(forward: Callable) -> Callable:
        def run(*distinct: Any, **rest: Any) -> Any:
            return forward(
                *(distinct[at] for at in positions), **rest, **{name: distinct[at] for name, at in named.items()}
            )

        return run

    return tuple(once), {name: value for name, value in kwargs.items() if name not in named}, alike


def _again(forward: Callable, before: ModuleState, passed: PassedState, weights: _Weights) -> Callable:
    """Returns a wrapper of `forward` that, from its second call on, runs with the state from before the first call.

    before  snapshot of the module;  passed  of the arguments' contents;  weights  of parameters written into
    """
    calls = 0

    def run(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 1:
            return forward(*args, **kwargs)
        with before.standing_in(), passed.standing_in(), weights.standing_in():
            return forward(*args, **kwargs)

    return run
