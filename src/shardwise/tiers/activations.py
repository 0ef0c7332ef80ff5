"""`offload=activations`: tensors that blocks save for backward lie in a store until backward needs them.

    forward    block k     |  block k + 1                      |  block k + 2
                            ── k's tensors go to its store ────|  freed
    backward   block k + 2 |  block k + 1                      |  block k
                            ── k's tensors come back ──────────|  used

Two blocks' activations lie in memory instead of all. Nothing is recomputed, and the bits do not change. With recompute
a block saves its inputs, and these move.

Storages are moved. Tensors that share one move once, also if the next block saves the same one. When a block's forward
ends, the copy of its storages begins; when the next block's forward ends, they are freed. A storage that somebody else
still holds then (a mask, a skip connection) stays, since nothing would be freed. So do weights, buffers and views of
them, small storages, and tensors that are not plain memory.

autograd checks the versions of tensors that it saves itself, but not of those that hooks hold. So they are checked
here: backward raises for a tensor that was written to in place, as it does without hooks.

Source: `torch.autograd.graph.saved_tensors_hooks`; Rajbhandari et al., "ZeRO-Infinity" (SC 2021), section 5.1.

What this does not do: move tensors that a block's own autograd functions keep otherwise than by `save_for_backward`, or
tensors saved outside the blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.layout.offload import Placement, placements
from shardwise.part.levels import Distributed
from shardwise.part.tensor import Part
from shardwise.tiers.stores import Nowhere, Store, Token

SMALL_BYTES = 4096  # smaller storages stay, since a disk moves whole pages


class Saved:
    """The object that autograd saves in place of a tensor.

    tensor   alias of the saved tensor; without its memory once that has moved
    version  its version counter when it was saved
    moved    the storage that has its memory; None: it stays
    layout   (size, stride, storage offset) of the tensor, once it has moved
    """

    __slots__ = ("__weakref__", "layout", "moved", "tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # shares its memory and its count of writes
        self.version = self.tensor._version
        self.moved: Moved | None = None
        self.layout: tuple[Any, ...] = ()

    @property
    def written(self) -> bool:
        """Whether the tensor was written to since it was saved."""
        return self.tensor._version != self.version

    def hollow(self, moved: Moved) -> None:
        """Replaces the tensor's memory, now in `moved`, by an empty one; its version counter stays."""
        lowest = memory_of(self.tensor)
        self.layout = (lowest.size(), lowest.stride(), lowest.storage_offset())
        self.moved = moved
        if isinstance(self.tensor, Part):
            _hollow(self.tensor)
        else:
            self.tensor.data = _nothing(self.tensor)

    def get(self) -> torch.Tensor:
        """Returns the saved tensor; raises `RuntimeError`, as autograd does, if it was written to since."""
        if self.written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self.tensor.shape)} of {self.tensor.dtype}, kept at version {self.version}, is at version "
                f"{self.tensor._version}"
            )
        if self.moved is None:
            return self.tensor
        plain = self.moved.bytes_for(self).view(self.tensor.dtype).as_strided(*self.layout)
        return _filled(self.tensor, plain) if isinstance(self.tensor, Part) else plain


class Moved:
    """One storage that is in a store.

    source   the storage as flat bytes, until `let_go` frees it; then None
    token    handle of its bytes in the store
    call     the last `BlockCall` whose block saved it
    counter  a saved tensor on it, for its version counter;  version  the counter's value when it was saved
    """

    def __init__(self, source: torch.Tensor, token: Token, call: BlockCall, first: Saved):
        self.source: torch.Tensor | None = source
        self.token, self.call = token, call
        self.counter, self.version = first.tensor, first.version
        self.waiting: weakref.WeakSet[Saved] = weakref.WeakSet()  # saved tensors that backward has not asked for yet
        self._back: torch.Tensor | None = None  # the bytes, back from the store
        self._elsewhere: torch.UntypedStorage | None = None  # the storage, if somebody else kept it alive

    def holds(self, storage: torch.UntypedStorage, saved: Saved) -> bool:
        """Whether its bytes are those of `storage` now, on which `saved` lies."""
        own = self._elsewhere if self.source is None else self.source.untyped_storage()
        same = own is not None and own._cdata == storage._cdata
        return same and self.counter._version == self.version == saved.version

    def let_go(self) -> None:
        """Waits until the bytes are stored, and drops the source; keeps it usable if somebody else holds it."""
        if self.source is None:
            return
        watched = StorageWeakRef(self.source.untyped_storage())
        self.token.written()
        self.source = None
        if not watched.expired():
            self._elsewhere = torch.UntypedStorage._new_with_weak_ptr(watched.cdata)

    def fetch(self) -> None:
        """Starts to bring the bytes back, if the source was freed."""
        if self.source is None and self._elsewhere is None and self._back is None:
            self.token.fetch()

    def bytes_for(self, saved: Saved) -> torch.Tensor:
        """Returns the storage's bytes for `saved`; they are kept until all tensors on it have been asked for."""
        if self._elsewhere is not None:
            # as float8, not uint8, since a rehearsal looks for the values of integers
            return torch.empty(0, dtype=torch.float8_e5m2, device=self.counter.device).set_(self._elsewhere)
        if self.source is not None:
            return self.source
        back = self._back if self._back is not None else self.token.bytes()
        self.waiting.discard(saved)
        self._back = back if len(self.waiting) else None
        return back

    def __del__(self) -> None:
        self.token.release()


class BlockCall:
    """One call of a block, whose `pack` and `unpack` are autograd's hooks.

    store   where the tensors go that it saves; None: they stay
    before  the call of a block before it in this micro-batch, or None
    kept    its saved tensors, until its forward ends;  moved  its storages in the store
    """

    def __init__(self, store: Store | None, before: BlockCall | None):
        self.store, self.before = store, before
        self.kept: list[weakref.ref[Saved]] = []
        self.moved: list[weakref.ref[Moved]] = []
        self._asked = False

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Returns the object for autograd to save in place of `tensor`."""
        saved = Saved(tensor)
        self.kept.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Returns the saved tensor; also starts to bring back the tensors of the call before."""
        self._fetch()
        if self.before is not None:
            self.before._fetch()
        return saved.get()

    def _fetch(self) -> None:
        if not self._asked:
            self._asked = True
            for moved in reversed([*_alive(self.moved)]):
                moved.fetch()


class Activations:
    """Wraps blocks so that what they save for backward goes to stores.

    module  that contains the blocks
    blocks  (block, its store, or None if its tensors stay) for each
    """

    def __init__(self, module: nn.Module, blocks: Sequence[tuple[nn.Module, Store | None]]):
        inside = {id(child) for block, _ in blocks for child in block.modules()}
        self._outside = [child for child in module.modules() if id(child) not in inside]
        self.stores = [*dict.fromkeys(store for _, store in blocks if store is not None)]
        self._called: set[int] = set()  # ids of the blocks called in this micro-batch
        self._last: BlockCall | None = None  # the last call that began
        self._behind: BlockCall | None = None  # the last call that ended, whose storages are not freed yet
        self._known: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()  # by storage
        for block, store in blocks:
            self._wrap(block, store)

    def _wrap(self, block: nn.Module, store: Store | None) -> None:
        """Wraps the block's forward in autograd's hooks, also without a store, since they start the fetch before it."""
        forward = block.forward

        def moving(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is saved
                return forward(*args, **kwargs)
            call = self._begin(block, store)
            with saved_tensors_hooks(call.pack, call.unpack):
                output = forward(*args, **kwargs)
            self._end(block, call)
            return output

        if hasattr(forward, "inside"):  # recompute's handle to wrap the forward that it runs twice
            moving.inside = forward.inside  # type: ignore[attr-defined]
        block.forward = moving

    def _begin(self, block: nn.Module, store: Store | None) -> BlockCall:
        """Returns a new call of the block, linked to the one before."""
        if id(block) in self._called:  # a new micro-batch, whose backward must not fetch tensors of the last one
            self._called.clear()
            self._last = None
        self._called.add(id(block))
        self._last = BlockCall(store, self._last)
        return self._last

    def _end(self, block: nn.Module, call: BlockCall) -> None:
        """Stores the call's tensors, and frees those of the call before."""
        if call.store is not None:
            self._put(block, call, call.store)
        call.kept.clear()
        behind, self._behind = self._behind, call
        if behind is not None:
            for moved in _alive(behind.moved):
                if moved.call is behind:
                    moved.let_go()

    def _put(self, block: nn.Module, call: BlockCall, store: Store) -> None:
        """Starts to move the storages of a call's saved tensors, each once, but not small ones and weights'."""
        by_storage: dict[int, list[Saved]] = {}
        for saved in _alive(call.kept):
            lowest = memory_of(saved.tensor)
            # tensors written since are left alone (backward raises), and those that are more than their memory
            if not saved.written and _is_plain(saved.tensor) and store.takes(lowest):
                by_storage.setdefault(lowest.untyped_storage()._cdata, []).append(saved)
        weights = self._weights(block) if by_storage else set()
        for key, group in by_storage.items():
            lowest = memory_of(group[0].tensor)
            storage = lowest.untyped_storage()
            # weights stay in memory anyway; a storage that is no whole number of elements cannot be viewed as such
            if key in weights or storage.nbytes() < max(SMALL_BYTES, 1) or storage.nbytes() % lowest.itemsize:
                continue
            moved = self._known.get(key)
            # if an earlier block has saved the same storage, unchanged, it is moved already
            if moved is None or not moved.holds(storage, group[0]):
                source = lowest.as_strided((storage.nbytes() // lowest.itemsize,), (1,), 0).view(torch.uint8)
                moved = self._known[key] = Moved(source, store.put(source), call, group[0])
            moved.call = call
            for saved in group:
                moved.waiting.add(saved)
                saved.hollow(moved)
            call.moved.append(weakref.ref(moved))

    def _weights(self, block: nn.Module) -> set[int]:
        """Returns ids of the storages of parameters and buffers, of the block and of modules outside all blocks."""
        keys = set()
        for child in (*block.modules(), *self._outside):
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                if tensor is not None and tensor.layout is torch.strided:
                    keys.add(memory_of(tensor).untyped_storage()._cdata)
        return keys

    def put_bytes(self) -> dict[str, int]:
        """Returns {tier's name: bytes that were put into its store so far}."""
        return {store.name: store.bytes_put for store in self.stores}

    def held_bytes(self) -> dict[str, int]:
        """Returns {tier's name: bytes that its store has allocated}."""
        return {store.name: store.held_bytes for store in self.stores}

    @property
    def notices(self) -> list[str]:
        """Returns the stores' lines for the user."""
        return [notice for store in self.stores for notice in store.notices]

    def close(self) -> None:
        """Closes the stores."""
        for store in self.stores:
            store.close()


def rehearsed(module: nn.Module, paths: Iterable[str], offload: str) -> Activations | None:
    """Returns the `Activations` of a rehearsal, whose stores drop the bytes; None if `offload` moves no activations.

    paths  of the blocks
    """
    placed = placements(offload, "activations")
    if not placed:
        return None
    blocks = [*{id(block): block for block in map(module.get_submodule, paths)}.values()]
    return Activations(module, spread(blocks, [(Nowhere(each.tier), each.fraction) for each in placed]))


def spread(blocks: Sequence[nn.Module], parts: Iterable[tuple[Store, float]]) -> list[tuple[nn.Module, Store | None]]:
    """Returns (block, its store or None) for each: the first blocks get the first store, and so on.

    parts  (store, fraction of the number of blocks, rounded to the nearest block)
    The first blocks are offloaded since backward needs their tensors last.
    """
    stores: list[Store | None] = []
    reached = 0.0
    for store, fraction in parts:
        reached += fraction * len(blocks)
        stores += [store] * (round(reached) - len(stores))
    return [*zip(blocks, [*stores, *[None] * (len(blocks) - len(stores))], strict=True)]


def told_of_none(placed: Sequence[Placement], blocks: Sequence[nn.Module], offload: str) -> list[str]:
    """Returns a notice for each placement whose fraction rounds to no block. `offload`: the plan's text."""
    parts = [(Nowhere(placement.tier), placement.fraction) for placement in placed]
    used = {store for _, store in spread(blocks, parts)}
    return [
        f"offload={offload}: nothing moves for {placement}: that is none of this rank's {len(blocks)} blocks, to the "
        "nearest one: give a larger fraction"
        for placement, (store, _) in zip(placed, parts, strict=True)
        if blocks and store not in used
    ]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor with this rank's memory: a tensor itself, or the local one of a `Part` or DTensor."""
    while isinstance(tensor, Distributed):
        tensor = tensor.local
    return getattr(tensor, "_local_tensor", tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the local one of a `Part`, is fully described by its memory, size and strides."""
    while isinstance(tensor, Distributed):
        # a summand may be reduced meanwhile; other classes have state beside their memory
        if type(tensor) is not Part or (tensor.source, tensor.recipe, tensor.margin) != (None, None, None):
            return False
        tensor = tensor.local
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _alive(references: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    """Yields the objects that still exist."""
    return (target for target in (reference() for reference in references) if target is not None)


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor of the same dtype and device."""
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _hollow(part: Part) -> None:
    """Replaces the memory of a `Part`, whose local tensor may be a `Part` again, by an empty one."""
    inner = part.local.detach()
    if isinstance(inner, Part):
        _hollow(inner)
    else:
        inner.data = _nothing(inner)
    part.local = inner


def _filled(part: Part, plain: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a hollow `Part` whose innermost local tensor is `plain`."""
    lowest = part
    while isinstance(lowest.local, Part):
        lowest = lowest.local
    empty, lowest.local = lowest.local, plain
    try:
        return part.detach()
    finally:
        lowest.local = empty
