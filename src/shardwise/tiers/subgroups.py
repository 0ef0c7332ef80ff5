"""Group parameters into sub-groups that the optimizer updates together, and lay out their state in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shardwise.layout.offload import SUBGROUP_BYTES, SUBGROUPS, Placement
from shardwise.tiers.narrow import Codec, Halves
from shardwise.tiers.resting import Resting

PAGE = 4096  # bytes; alignment of addresses, offsets and lengths that O_DIRECT needs on common disks
BUFFERS = 3  # of a disk, used in turn, since one sub-group is read while one is updated and one is written
LINE = 64  # bytes of a cache line, at which tensors begin, as torch's own do


class Sized(Protocol):
    """An object whose bytes move together."""

    @property
    def size(self) -> int:
        """Returns the number of bytes."""


T = TypeVar("T", bound=Sized)
Path = tuple[Any, ...]  # of a tensor within the state of one parameter: keys of dicts, places in lists


@dataclass(frozen=True)
class Spec:
    """Description of a dense tensor, whose dims may be in any order in memory. codec: how it is stored; None: as is."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    codec: Codec | Halves | None = None

    @property
    def size(self) -> int:
        """Returns the tensor's bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def resting_size(self) -> int:
        """Returns the bytes in which it is stored."""
        return self.size if self.codec is None else self.codec.size(self.shape.numel())

    @property
    def like(self) -> torch.Tensor:
        """Returns a meta tensor of this description."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def narrowed(self, codec: Codec | Halves) -> Spec:
        """Returns the same description, stored by `codec`."""
        return replace(self, codec=codec)

    def within(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Returns a tensor of this description that is a view of `memory` (uint8) from byte `offset` on."""
        return memory[offset : offset + self.size].view(self.dtype).as_strided(self.shape, self.stride)

    def alone(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Returns the same as `within`, but with a storage of its own size, for `memory` on the host.

        `torch.save`, which writes whole storages, then writes no more than the tensor.
        """
        bits = torch.from_numpy(memory.numpy()[offset : offset + self.size])
        return bits.view(self.dtype).as_strided(self.shape, self.stride)


def spec_of(tensor: torch.Tensor) -> Spec | None:
    """Returns a tensor's `Spec`; None if it is not moved: at most one element, not dense, or of an unknown subclass."""
    ours = (torch.Tensor, nn.Parameter, Resting)
    # an accelerator may have a tensor class of its own
    plain = type(tensor) in ours or type(tensor) is type(torch.empty(0, device=tensor.device))
    if not plain or tensor.layout is not torch.strided or tensor.numel() <= 1:
        return None
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:  # a gap, or elements that share memory
            return None
        expected *= size
    return Spec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def tensors_of(state: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yields (path, tensor) of all tensors in nested dicts, lists and tuples; `path`: prefix of all."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_of(value, (*path, key))
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from tensors_of(value, (*path, place))


def tensor_at(state: Any, path: Path) -> torch.Tensor | None:
    """Returns the tensor at a path in nested state; None if there is none."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state if isinstance(state, torch.Tensor) else None


@dataclass
class Unit:
    """Parameters whose state moves together: one, or all that are pieces of one wide master (a bucket).

    states  for each parameter, {path: `Spec` of a state tensor that moves or is coded}
    wide    index, among the technique's `wide_masters`, of the master that moves with them; None: none does
    master  `Spec` of that master
    weights bytes of the parameters themselves, if these or their gradients are in memory only during a step; else 0
    """

    params: list[nn.Parameter]
    states: list[dict[Path, Spec]]
    wide: int | None = None
    master: Spec | None = None
    weights: int = 0

    @property
    def specs(self) -> list[Spec]:
        """Returns the `Spec`s of all tensors that move."""
        return [*filter(None, [self.master]), *(spec for state in self.states for spec in state.values())]

    @property
    def size(self) -> int:
        """Returns the bytes in which the unit's tensors are stored, each rounded up to a cache line."""
        return sum(_up(spec.resting_size, LINE) for spec in self.specs)

    @property
    def stepped_size(self) -> int:
        """Returns the bytes that are in memory while the unit is updated, `weights` included."""
        return self.weights + sum(_up(spec.size, LINE) for spec in self.specs)


@dataclass
class Entry:
    """One tensor of a sub-group.

    offset  of its stored bytes in the sub-group's;  spec  of the tensor
    param   the parameter whose state has it at `path`; None: it is the `wide`-th of the technique's `wide_masters`
    rested  whether it was in the tier when the running step began
    """

    offset: int
    spec: Spec
    param: nn.Parameter | None = None
    path: Path = ()
    wide: int = -1
    rested: bool = False

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the view of its stored bytes in `memory`, the bytes of its sub-group."""
        return memory[self.offset : self.offset + self.spec.resting_size]


@dataclass
class Subgroup:
    """Parameters that one call of the optimizer updates, and the bytes (uint8) of their state.

    number  its index among the sub-groups of a `Place`;  size  bytes of its state, in whole pages
    rest    bytes where the state is stored now;  after  where a step stores it;  buffer  where a step works on it
    """

    units: list[Unit]
    number: int
    entries: list[Entry] = field(default_factory=list)
    size: int = 0
    rest: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    after: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def __post_init__(self) -> None:
        for unit in self.units:
            if unit.wide is not None and unit.master is not None:
                self._add(Entry(0, unit.master, wide=unit.wide))
            for param, specs in zip(unit.params, unit.states, strict=True):
                for path, spec in specs.items():
                    self._add(Entry(0, spec, param, path))
        self.size = _up(self.size, PAGE)

    def _add(self, entry: Entry) -> None:
        entry.offset = self.size
        self.entries.append(entry)
        self.size += _up(entry.spec.resting_size, LINE)

    @property
    def params(self) -> list[nn.Parameter]:
        """Returns the parameters that are updated together."""
        return [param for unit in self.units for param in unit.params]


def grouped(units: Sequence[Unit]) -> list[Subgroup]:
    """Returns the units in sub-groups of about 1/`SUBGROUPS` of all bytes each.

    A sub-group exceeds `SUBGROUP_BYTES` only if it is a single large unit. Every `BUFFERS`-th place has such a one, as
    long as there are some.
    """
    eighth = sum(unit.stepped_size for unit in units) // SUBGROUPS
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if groups[-1] and (size >= eighth or size + unit.stepped_size > SUBGROUP_BYTES):
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.stepped_size
    large: list[list[Unit]] = []
    others: list[list[Unit]] = []
    for group in filter(None, groups):
        (large if sum(unit.stepped_size for unit in group) > SUBGROUP_BYTES else others).append(group)
    ordered: list[list[Unit]] = []
    while large or others:
        # large units, such as embeddings, all use the same buffer, so that the other buffers stay small
        first = large and (len(ordered) % BUFFERS == 0 or not others)
        ordered.append((large if first else others).pop(0))
    return [Subgroup(group, number) for number, group in enumerate(ordered)]


def dealt(units: Sequence[T], placed: Sequence[Placement]) -> list[list[T]]:
    """Returns for each placement the units to put there, in order, by its fraction of all bytes; the rest stay."""
    total, at, reached, wanted = sum(unit.size for unit in units), 0, 0.0, 0.0
    parts: list[list[T]] = []
    for placement in placed:
        wanted += placement.fraction * total
        part = []
        # a unit goes where more than half of its bytes would
        while at < len(units) and reached + units[at].size / 2 <= wanted + 1e-6 * total:
            part.append(units[at])
            reached += units[at].size
            at += 1
        parts.append(part)
    return parts


def _up(size: int, unit: int) -> int:
    """Returns `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
