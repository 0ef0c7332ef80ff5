"""`Tape` of a constructor, for trace/deferred: which ops wrote which storage, and on what each depends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.trace.leaves import tensors_in


class NotReplayable(Exception):
    """The tape cannot make this tensor; the module must be built for real."""


@dataclass(frozen=True)
class Ref:
    """A tensor on the tape: its storage, and its place in it."""

    storage: int  # its number (`storage_key`)
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass
class TapedOp:
    """One op of a constructor: the storages that it read and wrote, and whether it draws."""

    func: Any
    args: tuple
    kwargs: dict
    outputs: list[Ref]  # what it made, in the order of its results
    reads: set[int]
    writes: set[int]
    random: bool  # it draws from torch's own generator, in a state that replay sets
    generator: torch.Tensor | None = None  # the state of the generator that the constructor gave it
    whole: bool = False  # it gives the one storage that it writes a new content, whatever was there
    stored: bool = False  # the content comes from outside of the constructor: a file


@dataclass
class ConstructorTape:
    """Every op that makes or changes a tensor, in order."""

    ops: list[TapedOp] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> ops that write it
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # storage -> bytes it held when first met
    lost: set[int] = field(default_factory=set)  # meta storages that no op made
    deferred: set[int] = field(default_factory=set)  # storages whose values exist only on the tape
    alive: list[Any] = field(default_factory=list)  # storages, so that their addresses are not used again

    def add(self, op: TapedOp) -> None:
        """Append one op."""
        self.ops.append(op)
        for key in op.writes:
            self.writers.setdefault(key, []).append(len(self.ops) - 1)

    def slice(self, storage: int) -> list[int]:
        """Returns the indices of the ops, ascending, that a storage's content depends on."""
        needed: set[int] = set()
        queue = [(storage, len(self.ops))]
        horizon: dict[int, int] = {}
        while queue:
            key, before = queue.pop()
            # asked for as of no earlier time already, so nothing new depends on it
            if horizon.get(key, -1) >= before:
                continue
            horizon[key] = before
            writers = [op for op in self.writers.get(key, ()) if op < before]
            # an op that gives the whole storage makes what wrote it before forgotten
            anew = next((place for place in reversed(range(len(writers))) if self.ops[writers[place]].whole), 0)
            for op in writers[anew:]:
                if op not in needed:
                    needed.add(op)
                    queue.extend((read, op) for read in self.ops[op].reads)
        return sorted(needed)

    def lacks(self, storage: int) -> bool:
        """Whether a storage's content cannot be made again: an op reads one that none made, whose bytes are unknown."""
        made: set[int] = set()
        for op in map(self.ops.__getitem__, self.slice(storage)):
            # a storage that no operation of the slice made, and that was not met with bytes: its content came from
            # elsewhere
            if any(ref.storage not in made and ref.storage not in self.constants for ref in _refs(op)):
                return True
            made |= {ref.storage for ref in op.outputs}
        # nothing writes it at all
        return storage not in made and storage not in self.constants

    def outliving(self, named: Collection[int]) -> list[torch.UntypedStorage]:
        """Returns the deferred storages, but `named` ones, that more than this tape keeps, in order of their making."""
        storages = {storage._cdata: storage for storage in self.alive}
        unnamed = [storages[key] for key in storages if key in self.deferred and key not in named]
        return [storage for storage in unnamed if torch._C._storage_Use_Count(storage._cdata) > 1]

    def refuse_reading(self, tensor: torch.Tensor, how: str) -> None:
        """Raise `NotReplayable` where the constructor reads values that are random, or not made yet."""
        key = storage_key(tensor)
        if key in self.deferred or any(self.ops[op].random for op in self.slice(key)):
            raise NotReplayable(f"the constructor reads a random or large tensor's values through {how}")


def _refs(op: TapedOp) -> list[Ref]:
    return tensors_in((op.args, op.kwargs), Ref)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that names the storage of a tensor."""
    return tensor.untyped_storage()._cdata


def ref_of(tensor: torch.Tensor) -> Ref:
    """Returns the `Ref` that names a tensor on the tape: its storage, shape, strides, offset and dtype."""
    return Ref(storage_key(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's whole storage, as bytes on the CPU."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage().cpu()).clone()
