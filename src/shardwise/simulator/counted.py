"""`Model`, `Counted`, `Update`: data that forecasts take from traces and optimizers. Times: traced, costs/ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Counted(Protocol):
    """What a trace says; see rehearsal/op_counts.py. Each is itself alone: two with the same counts differ."""

    def __hash__(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def parameters(self) -> int: ...

    @property
    def idle(self) -> int: ...

    @property
    def drawn(self) -> bool: ...

    @property
    def buffers_bytes(self) -> int: ...

    @property
    def units(self) -> list[int]: ...

    @property
    def rest(self) -> int: ...

    @property
    def tensors(self) -> int: ...

    @property
    def sizes(self) -> Mapping[int, int]: ...

    @property
    def in_order(self) -> Mapping[int, int]: ...

    @property
    def final(self) -> int: ...

    @property
    def products(self) -> Mapping[tuple[int, int, int], int]: ...

    @property
    def attention(self) -> Mapping[tuple[int, int, int, int, bool, bool], int]: ...

    @property
    def order(self) -> Sequence[tuple[str, tuple[float, ...], int]]: ...

    @property
    def conv_flops(self) -> float: ...

    @property
    def moved(self) -> float: ...

    @property
    def kernels(self) -> int: ...

    @property
    def calls(self) -> int: ...

    @property
    def cut_calls(self) -> int: ...

    @property
    def peak(self) -> int: ...

    @property
    def flops(self) -> float: ...

    @property
    def held(self) -> int: ...

    @property
    def held_gradients(self) -> int: ...

    @property
    def experts(self) -> int: ...

    @property
    def rows(self) -> Mapping[tuple[int, int], int]: ...

    @property
    def balanced(self) -> bool: ...

    @property
    def by_batch(self) -> bool: ...

    @property
    def wrote_scores(self) -> bool: ...

    @property
    def follows(self) -> bool: ...

    @property
    def chose(self) -> bool: ...

    @property
    def own_backward(self) -> bool: ...

    @property
    def enclosed(self) -> set[str]: ...

    @property
    def batch_norms(self) -> int: ...

    @property
    def alone(self) -> bool: ...

    @property
    def joined(self) -> Mapping[tuple[str, float], int]: ...


@dataclass(frozen=True)
class Update:
    """An optimizer's step for one tensor: elements of state it keeps and ops it runs, for each element of the tensor.

    work       (op, bytes it moves for each element of float32)
    calls      ops, views among them
    temporary  elements that live only while it runs
    left       of these, elements that the tensor before leaves behind until the next is done
    whole      it needs whole tensors: under ZeRO each has one rank that updates it (step/owners.py)
    """

    state_elements: float
    work: tuple[tuple[str, float], ...]
    calls: int
    temporary: float = 0.0
    left: float = 0.0
    whole: bool = False


@dataclass(frozen=True)
class Model:
    """Traces of two numbers of samples under one recompute policy, the optimizer's step, the batch."""

    one: Counted
    two: Counted
    update: Update
    name: str = ""
    batch_bytes: float = 0.0  # of one sample, where every rank makes the global batch
    batch_on_device: bool = True  # all of it; else a micro-batch at a time is copied there
    gathered: tuple[int, ...] | None = None  # parameters of each unit of zero=3, where that was rehearsed

    @property
    def units(self) -> Sequence[int]:
        """Parameters of each unit of zero=3, or of each repeated block."""
        return self.one.units if self.gathered is None else self.gathered

    @property
    def trained(self) -> int:
        """Elements of the weights that are trained: of those alone there are gradients, and pieces to publish."""
        return sum(size * count for size, count in self.one.sizes.items())

    def linear(self, first: float, second: float, samples: float) -> float:
        """The line through what was seen at one number of samples and at another; flat where both are the same."""
        low, high = self.one.samples, self.two.samples
        if low == high:
            return first * samples / low
        return max(0.0, first + (second - first) * (samples - low) / (high - low))

    def peak(self, samples: int) -> float:
        """Live bytes of a micro-batch beyond what rests."""
        return self.linear(self.one.peak, self.two.peak, samples)

    def flops(self, samples: float) -> float:
        return self.linear(self.one.flops, self.two.flops, samples)
