"""`ConstructorTape`, for trace/deferred: which ops of a constructor wrote which storage, and what each depends on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.trace.leaves import tensors_in


class NotReplayable(Exception):
    """Raised if the tape cannot make a tensor, so that the module must be built for real."""


@dataclass(frozen=True)
class Ref:
    """A tensor on the tape: the key of its storage (`storage_key`), and its view of that storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class TapedOp:
    """One op of a constructor: its call, the keys of the storages that it read and wrote, and how replay runs it."""

    func: Any
    args: tuple
    kwargs: dict
    outputs: list[Ref]  # the tensors of its result, in order
    reads: set[int]
    writes: set[int]
    random: bool  # whether it draws from torch's default generator, which replay seeds
    generator: torch.Tensor | None = None  # state of the generator that the constructor passed; None: it passed none
    whole: bool = False  # whether it replaces all of the one storage that it writes
    stored: bool = False  # whether the content comes from a file


@dataclass
class ConstructorTape:
    """Every op that makes or changes a tensor, in order."""

    ops: list[TapedOp] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> indices of the ops that write it
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # storage -> bytes it held when first met
    lost: set[int] = field(default_factory=set)  # meta storages that no op made
    deferred: set[int] = field(default_factory=set)  # storages whose values exist only on the tape
    alive: list[Any] = field(default_factory=list)  # all storages, held so that their addresses are not reused

    def add(self, op: TapedOp) -> None:
        """Appends one op."""
        self.ops.append(op)
        for key in op.writes:
            self.writers.setdefault(key, []).append(len(self.ops) - 1)

    def slice(self, storage: int) -> list[int]:
        """Returns the indices, ascending, of the ops on which the content of a storage depends."""
        needed: set[int] = set()
        queue = [(storage, len(self.ops))]
        horizon: dict[int, int] = {}
        while queue:
            key, before = queue.pop()
            # visited already for this time or a later one, so it adds nothing
            if horizon.get(key, -1) >= before:
                continue
            horizon[key] = before
            writers = [op for op in self.writers.get(key, ()) if op < before]
            # writes before an op that replaces all of the storage do not matter
            anew = next((place for place in reversed(range(len(writers))) if self.ops[writers[place]].whole), 0)
            for op in writers[anew:]:
                if op not in needed:
                    needed.add(op)
                    queue.extend((read, op) for read in self.ops[op].reads)
        return sorted(needed)

    def lacks(self, storage: int) -> bool:
        """Whether a storage's content cannot be made again, because an op reads one whose bytes are unknown."""
        made: set[int] = set()
        for op in map(self.ops.__getitem__, self.slice(storage)):
            # an input that no op of the slice made and whose bytes are not kept came from outside
            if any(ref.storage not in made and ref.storage not in self.constants for ref in _refs(op)):
                return True
            made |= {ref.storage for ref in op.outputs}
        # nothing writes it at all
        return storage not in made and storage not in self.constants

    def outliving(self, named: Collection[int]) -> list[torch.UntypedStorage]:
        """Returns the deferred storages not in `named` that anything but this tape holds, in order of creation."""
        storages = {storage._cdata: storage for storage in self.alive}
        unnamed = [storages[key] for key in storages if key in self.deferred and key not in named]
        return [storage for storage in unnamed if torch._C._storage_Use_Count(storage._cdata) > 1]

    def refuse_reading(self, tensor: torch.Tensor, how: str) -> None:
        """Raises `NotReplayable` if the constructor reads (by `how`, a text) values that are random or deferred."""
        key = storage_key(tensor)
        if key in self.deferred or any(self.ops[op].random for op in self.slice(key)):
            raise NotReplayable(f"the constructor reads a random or large tensor's values through {how}")


def _refs(op: TapedOp) -> list[Ref]:
    return tensors_in((op.args, op.kwargs), Ref)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns the key of a tensor's storage: its address, the same for all views of it."""
    return tensor.untyped_storage()._cdata


def ref_of(tensor: torch.Tensor) -> Ref:
    """Returns the `Ref` that names a tensor on the tape: its storage, shape, strides, offset and dtype."""
    return Ref(storage_key(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's whole storage, as bytes on the CPU."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage().cpu()).clone()
