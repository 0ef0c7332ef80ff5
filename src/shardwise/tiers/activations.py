"""What blocks keep for backward lies in a store until backward comes to them: `offload=activations`.

    forward    block k     |  block k + 1                      |  block k + 2
                            ── what k keeps goes to its store ─|  let go of
    backward   block k + 2 |  block k + 1                      |  block k
                            ── what k keeps comes back ────────|  used

Two blocks' activations lie in memory instead of all. Nothing is computed again, and the bits are those that were kept.
With recompute a block keeps its inputs, and these move.

The unit is a storage: tensors that share one move once, also where the next block keeps the same. When a block's
forward is over its storages are put; when the next one's is over they are let go of. What is still held then by
somebody else (a mask, a skip connection) stays, since nothing would be freed. So do weights, buffers and views of them,
small storages, and tensors of kinds that are not plain memory.

autograd compares versions of what it keeps itself, and not of what hooks hold, so that is done here: a tensor that was
written to in place is refused in backward, as without hooks.

Source: `torch.autograd.graph.saved_tensors_hooks`; Rajbhandari et al., "ZeRO-Infinity" (SC 2021), section 5.1.

What this does not do: move what a block's own functions keep elsewhere than by `save_for_backward`, or what lies
outside the blocks.
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

SMALL_BYTES = 4096  # storages below stay: a disk moves whole pages


class Saved:
    """What autograd keeps in a tensor's place. moved: where its memory lies, None where it stays."""

    __slots__ = ("__weakref__", "layout", "moved", "tensor", "version")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # shares its memory and its count of writes
        self.version = self.tensor._version
        self.moved: Moved | None = None
        self.layout: tuple[Any, ...] = ()

    @property
    def written(self) -> bool:
        """Whether the tensor was written to since it was kept."""
        return self.tensor._version != self.version

    def hollow(self, moved: Moved) -> None:
        """Let go of the memory; the tensor, empty, still counts writes."""
        lowest = memory_of(self.tensor)
        self.layout = (lowest.size(), lowest.stride(), lowest.storage_offset())
        self.moved = moved
        if isinstance(self.tensor, Part):
            _hollow(self.tensor)
        else:
            self.tensor.data = _nothing(self.tensor)

    def get(self) -> torch.Tensor:
        """Returns the tensor as it was kept; `RuntimeError`, as autograd's, where it was written to since."""
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
    """One storage's bytes in a store.

    source   all bytes of the storage, until they are let go of
    call     the last one whose block keeps it
    counter  a tensor that counts writes to it, `version` what it counted
    """

    def __init__(self, source: torch.Tensor, token: Token, call: BlockCall, first: Saved):
        self.source: torch.Tensor | None = source
        self.token, self.call = token, call
        self.counter, self.version = first.tensor, first.version
        self.waiting: weakref.WeakSet[Saved] = weakref.WeakSet()  # those that backward has not asked for
        self._back: torch.Tensor | None = None
        self._elsewhere: torch.UntypedStorage | None = None  # the storage, where somebody else holds it too

    def holds(self, storage: torch.UntypedStorage, saved: Saved) -> bool:
        """Whether it has what a storage holds now."""
        own = self._elsewhere if self.source is None else self.source.untyped_storage()
        same = own is not None and own._cdata == storage._cdata
        return same and self.counter._version == self.version == saved.version

    def let_go(self) -> None:
        """Free the source once it is written, unless somebody else holds it."""
        if self.source is None:
            return
        watched = StorageWeakRef(self.source.untyped_storage())
        self.token.written()
        self.source = None
        if not watched.expired():
            self._elsewhere = torch.UntypedStorage._new_with_weak_ptr(watched.cdata)

    def fetch(self) -> None:
        """Start to bring it back."""
        if self.source is None and self._elsewhere is None and self._back is None:
            self.token.fetch()

    def bytes_for(self, saved: Saved) -> torch.Tensor:
        """Returns its bytes; kept until all that share it were asked for."""
        if self._elsewhere is not None:
            # of no integers, whose values a rehearsal would look for
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
    """One call of a block. store: where what it keeps goes, None where it stays; before: the call before it."""

    def __init__(self, store: Store | None, before: BlockCall | None):
        self.store, self.before = store, before
        self.kept: list[weakref.ref[Saved]] = []
        self.moved: list[weakref.ref[Moved]] = []
        self._asked = False

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Returns what autograd keeps."""
        saved = Saved(tensor)
        self.kept.append(weakref.ref(saved))
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        """Returns the tensor; starts to bring back what the call before keeps."""
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
    """Lets what blocks keep go to stores. Made by `parallelize`.

    blocks   with the store of each, None where what it keeps stays
    """

    def __init__(self, module: nn.Module, blocks: Sequence[tuple[nn.Module, Store | None]]):
        inside = {id(child) for block, _ in blocks for child in block.modules()}
        self._outside = [child for child in module.modules() if id(child) not in inside]
        self.stores = [*dict.fromkeys(store for _, store in blocks if store is not None)]
        self._called: set[int] = set()  # blocks, in this micro-batch
        self._last: BlockCall | None = None
        self._behind: BlockCall | None = None  # whose storages are not let go of
        self._known: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        for block, store in blocks:
            self._wrap(block, store)

    def _wrap(self, block: nn.Module, store: Store | None) -> None:
        """Lets what the block's forward keeps go to the store; None: it stays, and still starts what comes back."""
        forward = block.forward

        def moving(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():  # nothing is kept
                return forward(*args, **kwargs)
            call = self._begin(block, store)
            with saved_tensors_hooks(call.pack, call.unpack):
                output = forward(*args, **kwargs)
            self._end(block, call)
            return output

        if hasattr(forward, "inside"):  # of recompute, whose second forward runs within
            moving.inside = forward.inside  # type: ignore[attr-defined]
        block.forward = moving

    def _begin(self, block: nn.Module, store: Store | None) -> BlockCall:
        if id(block) in self._called:  # another micro-batch, whose backward begins where its own forward ends
            self._called.clear()
            self._last = None
        self._called.add(id(block))
        self._last = BlockCall(store, self._last)
        return self._last

    def _end(self, block: nn.Module, call: BlockCall) -> None:
        if call.store is not None:
            self._put(block, call, call.store)
        call.kept.clear()
        behind, self._behind = self._behind, call
        if behind is not None:
            for moved in _alive(behind.moved):
                if moved.call is behind:
                    moved.let_go()

    def _put(self, block: nn.Module, call: BlockCall, store: Store) -> None:
        """Starts to move the storages that a call keeps, each once; those that are small, or of weights, stay."""
        by_storage: dict[int, list[Saved]] = {}
        for saved in _alive(call.kept):
            lowest = memory_of(saved.tensor)
            # not moved: what was written since, which backward refuses, and tensors that are more than their memory
            if not saved.written and _is_plain(saved.tensor) and store.takes(lowest):
                by_storage.setdefault(lowest.untyped_storage()._cdata, []).append(saved)
        weights = self._weights(block) if by_storage else set()
        for key, group in by_storage.items():
            lowest = memory_of(group[0].tensor)
            storage = lowest.untyped_storage()
            # weights are kept anyway, small storages cost more than they free, and parts of an element cannot be viewed
            if key in weights or storage.nbytes() < max(SMALL_BYTES, 1) or storage.nbytes() % lowest.itemsize:
                continue
            moved = self._known.get(key)
            # else a block before keeps the same memory, unchanged, and it is moved once
            if moved is None or not moved.holds(storage, group[0]):
                source = lowest.as_strided((storage.nbytes() // lowest.itemsize,), (1,), 0).view(torch.uint8)
                moved = self._known[key] = Moved(source, store.put(source), call, group[0])
            moved.call = call
            for saved in group:
                moved.waiting.add(saved)
                saved.hollow(moved)
            call.moved.append(weakref.ref(moved))

    def _weights(self, block: nn.Module) -> set[int]:
        """Returns the storages of the block's parameters and buffers as they are now, and of what is outside blocks."""
        keys = set()
        for child in (*block.modules(), *self._outside):
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                if tensor is not None and tensor.layout is torch.strided:
                    keys.add(memory_of(tensor).untyped_storage()._cdata)
        return keys

    def put_bytes(self) -> dict[str, int]:
        """Returns the bytes that were put into each store so far, by the tier's name."""
        return {store.name: store.bytes_put for store in self.stores}

    def held_bytes(self) -> dict[str, int]:
        """Returns the bytes for which each store has room, by the tier's name."""
        return {store.name: store.held_bytes for store in self.stores}

    @property
    def notices(self) -> list[str]:
        """Returns what the user is told."""
        return [notice for store in self.stores for notice in store.notices]

    def close(self) -> None:
        """End what the stores have started."""
        for store in self.stores:
            store.close()


def rehearsed(module: nn.Module, paths: Iterable[str], offload: str) -> Activations | None:
    """Lets what blocks keep go nowhere, as a plan's `offload` says, on tensors without values; None where it stays."""
    placed = placements(offload, "activations")
    if not placed:
        return None
    blocks = [*{id(block): block for block in map(module.get_submodule, paths)}.values()]
    return Activations(module, spread(blocks, [(Nowhere(each.tier), each.fraction) for each in placed]))


def spread(blocks: Sequence[nn.Module], parts: Iterable[tuple[Store, float]]) -> list[tuple[nn.Module, Store | None]]:
    """Returns each block with its store: the first ones, by fractions of their number; None for the rest.

    What the first ones keep lies longest before backward comes to it.
    """
    stores: list[Store | None] = []
    reached = 0.0
    for store, fraction in parts:
        reached += fraction * len(blocks)
        stores += [store] * (round(reached) - len(stores))
    return [*zip(blocks, [*stores, *[None] * (len(blocks) - len(stores))], strict=True)]


def told_of_none(placed: Sequence[Placement], blocks: Sequence[nn.Module], offload: str) -> list[str]:
    """Returns a notice for each placement whose fraction of the blocks is none of them."""
    parts = [(Nowhere(placement.tier), placement.fraction) for placement in placed]
    used = {store for _, store in spread(blocks, parts)}
    return [
        f"offload={offload}: nothing moves for {placement}: that is none of this rank's {len(blocks)} blocks, to the "
        "nearest one: give a larger fraction"
        for placement, (store, _) in zip(placed, parts, strict=True)
        if blocks and store not in used
    ]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that has this rank's memory: of a part of a part, of a shard of FSDP2's."""
    while isinstance(tensor, Distributed):
        tensor = tensor.local
    return getattr(tensor, "_local_tensor", tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or a part to its lowest, is nothing but its memory."""
    while isinstance(tensor, Distributed):
        # a summand may be added up meanwhile; others are seen by what made them
        if type(tensor) is not Part or (tensor.source, tensor.recipe, tensor.margin) != (None, None, None):
            return False
        tensor = tensor.local
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _alive(references: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    return (target for target in (reference() for reference in references) if target is not None)


def _nothing(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _hollow(part: Part) -> None:
    """Put empty tensors in the place of a part's memory, in parts of its own all the way down."""
    inner = part.local.detach()
    if isinstance(inner, Part):
        _hollow(inner)
    else:
        inner.data = _nothing(inner)
    part.local = inner


def _filled(part: Part, plain: torch.Tensor) -> torch.Tensor:
    """Returns a hollow part with this memory."""
    lowest = part
    while isinstance(lowest.local, Part):
        lowest = lowest.local
    empty, lowest.local = lowest.local, plain
    try:
        return part.detach()
    finally:
        lowest.local = empty
