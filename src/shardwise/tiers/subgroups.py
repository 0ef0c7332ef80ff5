"""Which parameters step together, and where each tensor of their state lies in the sub-group's bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shardwise.layout.offload import SUBGROUP_BYTES, SUBGROUPS, Placement
from shardwise.tiers.narrow import Codec, Halves
from shardwise.tiers.resting import Resting

PAGE = 4096  # bytes: O_DIRECT's unit for addresses, offsets and lengths on any disk of today
BUFFERS = 3  # of a disk's sub-groups, in turn: one is read into, one is stepped on, one is written
LINE = 64  # tensors begin at lines of a cache, as torch's own do


class Sized(Protocol):
    """Has bytes that move together."""

    @property
    def size(self) -> int:
        """Returns them."""


T = TypeVar("T", bound=Sized)
Path = tuple[Any, ...]  # of a tensor within the state of one parameter: keys of dicts, places in lists


@dataclass(frozen=True)
class Spec:
    """What a tensor's memory is like: it is dense, in any order of its dims. codec: how it rests; None: as it is."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    codec: Codec | Halves | None = None

    @property
    def size(self) -> int:
        """Returns its bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def resting_size(self) -> int:
        """Returns the bytes in which it rests."""
        return self.size if self.codec is None else self.codec.size(self.shape.numel())

    @property
    def like(self) -> torch.Tensor:
        """Returns a tensor of its kind without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def narrowed(self, codec: Codec | Halves) -> Spec:
        """Returns the same tensor, resting by a code."""
        return replace(self, codec=codec)

    def within(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Returns the view of `memory` (bytes) from `offset` on."""
        return memory[offset : offset + self.size].view(self.dtype).as_strided(self.shape, self.stride)

    def alone(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Returns a tensor on the same bytes of the host's `memory`, whose storage ends where it does.

        So a state that is saved by `torch.save` is no larger than itself.
        """
        bits = torch.from_numpy(memory.numpy()[offset : offset + self.size])
        return bits.view(self.dtype).as_strided(self.shape, self.stride)


def spec_of(tensor: torch.Tensor) -> Spec | None:
    """Returns what a tensor's memory is like; None for one that stays where it is: one number, or not dense."""
    ours = (torch.Tensor, nn.Parameter, Resting)
    # else an accelerator may have a class of its own
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
    """Yields (path, tensor) of all tensors in the state of one parameter."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_of(value, (*path, key))
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from tensors_of(value, (*path, place))


def tensor_at(state: Any, path: Path) -> torch.Tensor | None:
    """Returns the tensor at a path; None where there is none."""
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state if isinstance(state, torch.Tensor) else None


@dataclass
class Unit:
    """Parameters that move together: one, or those whose masters lie in one tensor (a bucket of flat pieces).

    wide    number, among the technique's `wide_masters`, of the master that moves with them; None: it stays
    states  of each parameter, path -> what its state's tensors are like
    weights bytes of the parameters themselves, where these lie in a file of their own (`shards`), or gradients do not
            all lie in memory
    """

    params: list[nn.Parameter]
    states: list[dict[Path, Spec]]
    wide: int | None = None
    master: Spec | None = None
    weights: int = 0

    @property
    def specs(self) -> list[Spec]:
        """Returns all that moves."""
        return [*filter(None, [self.master]), *(spec for state in self.states for spec in state.values())]

    @property
    def size(self) -> int:
        """Returns the bytes in which it rests, each tensor to a whole line."""
        return sum(_up(spec.resting_size, LINE) for spec in self.specs)

    @property
    def stepped_size(self) -> int:
        """Returns the bytes that a step works on, those of parameters that move with it too."""
        return self.weights + sum(_up(spec.size, LINE) for spec in self.specs)


@dataclass
class Entry:
    """One tensor of a sub-group. param: whose state has it at `path`; None: it is the `wide`-th master."""

    offset: int
    spec: Spec
    param: nn.Parameter | None = None
    path: Path = ()
    wide: int = -1
    rested: bool = False  # in the tier, when this step began

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns its bytes in those of a sub-group."""
        return memory[self.offset : self.offset + self.spec.resting_size]


@dataclass
class Subgroup:
    """Parameters that one call of the optimizer updates, and the bytes in which their state lies.

    rest    where these are between steps, `after` where this step puts them, `buffer` where it works on them
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
        """Returns the parameters that step together."""
        return [param for unit in self.units for param in unit.params]


def grouped(units: Sequence[Unit]) -> list[Subgroup]:
    """Returns the units in sub-groups, each closed once it has one of `SUBGROUPS` parts, or before `SUBGROUP_BYTES`."""
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
        # those of one large unit, embeddings say, go through the same buffer, so that the others are small
        first = large and (len(ordered) % BUFFERS == 0 or not others)
        ordered.append((large if first else others).pop(0))
    return [Subgroup(group, number) for number, group in enumerate(ordered)]


def dealt(units: Sequence[T], placed: Sequence[Placement]) -> list[list[T]]:
    """Returns for each placement the units that lie there, by fractions of bytes; what is left over stays."""
    total, at, reached, wanted = sum(unit.size for unit in units), 0, 0.0, 0.0
    parts: list[list[T]] = []
    for placement in placed:
        wanted += placement.fraction * total
        part = []
        # a unit goes where more than half of it lies
        while at < len(units) and reached + units[at].size / 2 <= wanted + 1e-6 * total:
            part.append(units[at])
            reached += units[at].size
            at += 1
        parts.append(part)
    return parts


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
