"""`StepTrace`, `RankTrace`, `Update`, `Model`: what traces and optimizers tell forecasts. Times: traced, costs/ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# product                (m, n, k), times the batch of a batched one
# attention              (batch x heads, queries, keys, width, backward?, causal?)
# conv, conv_backward    (cells, channels out, inputs of a cell, bytes moved, turned?, each channel alone?)
# recurrence             (m, n, k) of the product of one step; its times are steps, one after another
# the name of an op      (bytes moved,), of a bfloat16 batch norm its channels too, 0 where they are last
Entry = tuple[str, tuple[float, ...], int]
Tops = tuple[
    int, int, int
]  # live bytes, at most, before the repeated blocks, while they wait for backward, and after it


@dataclass(eq=False)
class StepTrace:
    """What one forward and backward of `samples` samples did: ops, FLOPs, bytes moved, the peak of live bytes.

    order        (kind, shape, times) of every op but views, as they ran; see `Entry`
    products     (m, n, k) -> how often
    attention    (batch x heads, queries, keys, width, backward?, causal?) -> how often
    conv_flops   of convolutions and Fourier transforms
    moved        bytes that all other ops read and write
    kernels      ops that compute something
    calls        ops, views among them
    cut_calls    ops on tensors that are cut, whose rules start some of `calls`
    peak         the most live bytes beyond parameters, inputs and their summed gradients
    tops         the same before the first repeated block, from its forward to its backward, and after that
    idle         parameters that are trained and that no gradient reached
    tensors      parameter tensors
    sizes        elements of a trainable one -> how many
    in_order     place -> elements of each trained parameter, in the order in which the optimizer is given them
    wholes       place -> elements of the whole weight, of each that tp cuts
    arrived      (place in the module's order, live bytes as for `peak`) of each gradient as it came, if asked
    units        parameters of each repeated block, and of the rest
    shard_elements        elements of the weights that rest on a rank, where a technique that shards them was played
                          around the micro-batches; `peak` has what it makes besides
    shard_gradient_bytes  the same of the gradients, in bytes
    experts      elements of experts that are trained here, where ep deals them
    rows         of what zero=3 cuts: (indices along the dim that is cut, elements at each) -> how many
    chose        something was picked by scores without values (top-k, sort, max over a dim)
    balanced     such picks decided how much there is to do: a router's were taken to load its experts evenly
    by_batch     integers of the batch decided how much there is to do: those of one sample, repeated
    drawn        single random numbers were taken as their median
    follows      random ops were answered as a run does that follows them
    wrote_scores attention met dropout whose numbers no fused kernel draws: those of one process
    own_backward the forward takes gradients itself
    enclosed     paths of modules that are no units of zero=3: they write into what they are given, or the forward takes
                 gradients through them
    batch_norms  of a forward, where they are not joined over data ranks
    alone        one of them has one value for each channel, of which there is no variance
    joined       what joined ones send: (op, bytes of the whole tensor) -> times
    put          bytes that blocks keep for backward in a tier, by its name
    """

    samples: int
    parameters: int = 0
    buffers_bytes: int = 0
    units: list[int] = field(default_factory=list)
    rest: int = 0
    tensors: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    in_order: dict[int, int] = field(default_factory=dict)
    wholes: dict[int, int] = field(default_factory=dict)
    arrived: list[tuple[int, int]] = field(default_factory=list)
    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    order: list[Entry] = field(default_factory=list)
    attention: Counter[tuple[int, int, int, int, bool, bool]] = field(default_factory=Counter)
    conv_flops: float = 0.0
    moved: float = 0.0
    kernels: int = 0
    calls: int = 0
    cut_calls: int = 0
    peak: int = 0
    tops: Tops = (0, 0, 0)
    idle: int = 0
    gradients: int = 0
    shard_elements: int = 0
    shard_gradient_bytes: int = 0
    experts: int = 0
    rows: Counter[tuple[int, int]] = field(default_factory=Counter)
    chose: bool = False
    balanced: bool = False
    by_batch: bool = False
    drawn: bool = False
    follows: bool = False
    wrote_scores: bool = False
    own_backward: bool = False
    enclosed: set[str] = field(default_factory=set)
    batch_norms: int = 0
    alone: bool = False
    joined: Counter[tuple[str, float]] = field(default_factory=Counter)
    put: dict[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Returns FLOPs of products, convolutions and attention; of a causal kernel the half that it computes."""
        products = sum(2.0 * m * n * k * times for (m, n, k), times in self.products.items())
        scores = sum(
            4.0 * b * q * k * d * (2.5 if back else 1.0) * (0.5 if causal else 1.0) * times
            for (b, q, k, d, back, causal), times in self.attention.items()
        )
        return products + scores + self.conv_flops


Sent = tuple[str, str, float]  # axis, op, bytes of the whole tensor
# axis, op, bytes by how many ranks away their sender is, and the operations in whose time it passed: first, behind last
Passed = tuple[str, str, dict[int, int], int, int]


@dataclass
class RankTrace(StepTrace):
    """The trace of one rank's pipeline row: `peak` is of the whole row, products and bytes are of one micro-batch.

    ops       (kind, stage) -> what one such op does
    wire      (kind, stage) -> what it sends over tp, ep and axes of positions, and over data ranks for batch norms:
              (axis, op, bytes of the whole tensor) -> times
    arrivals  (kind, stage) -> bytes that it is sent apart by others: (axis, op, how many ranks away) -> bytes
    overlaps  (kind, stage) -> exchanges of this that were under way while operations ran, in order; see `Passed`
    gathers   (kind, stage) -> elements of the units that zero=3 gathers for it, in order
    first     the peak as it was when the first backward was over: that of a row of one micro-batch
    first_tops  `tops` as they were then
    messages  stage -> bytes that it sends on for one micro-batch
    """

    ops: dict[tuple[str, int], StepTrace] = field(default_factory=dict)
    wire: dict[tuple[str, int], dict[Sent, int]] = field(default_factory=dict)
    arrivals: dict[tuple[str, int], dict[tuple[str, str, int], int]] = field(default_factory=dict)
    overlaps: dict[tuple[str, int], list[Passed]] = field(default_factory=dict)
    gathers: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    messages: dict[int, float] = field(default_factory=dict)
    first: int = 0
    first_tops: Tops = (0, 0, 0)

    @property
    def of_one(self) -> RankTrace:
        """Returns this trace with the peak of a row of a single micro-batch."""
        return replace(self, peak=self.first, tops=self.first_tops)


@dataclass(frozen=True)
class Update:
    """Cost of an optimizer's step on one tensor: state that it keeps and ops that it runs, per element of the tensor.

    work       (op, bytes it moves for each element of float32)
    calls      ops, views among them
    temporary  elements that live only while it runs
    left       of these, elements that the tensor before leaves behind until the next is done
    whole      it needs whole tensors: under ZeRO and tp each has one rank that updates it (step/owners.py)
    coded      of the state, elements that may rest by a code: real ones, in tensors of the weight's shape
    """

    state_elements: float
    work: tuple[tuple[str, float], ...]
    calls: int
    temporary: float = 0.0
    left: float = 0.0
    whole: bool = False
    coded: float = 0.0


@dataclass(frozen=True)
class Model:
    """Traces of two numbers of samples under one recompute policy, the optimizer's step, the batch."""

    small: StepTrace  # fewer samples
    large: StepTrace  # more samples: figures are linear between both
    update: Update
    name: str = ""
    batch_bytes: float = 0.0  # of one sample, where every rank makes the global batch
    batch_on_device: bool = True  # all of it; else a micro-batch at a time is copied there
    gathered: tuple[int, ...] | None = None  # parameters of each unit of zero=3, where that was rehearsed

    @property
    def units(self) -> Sequence[int]:
        """Returns the number of parameters of each unit of zero=3, or of each repeated block."""
        return self.small.units if self.gathered is None else self.gathered

    @property
    def trained(self) -> int:
        """Returns the number of elements of trained weights, which alone have gradients."""
        return sum(size * count for size, count in self.small.sizes.items())

    def linear(self, first: float, second: float, samples: float) -> float:
        """Returns a figure at `samples`, on the line through `first` (of `small`) and `second` (of `large`), 0 or more.

        Where both are of the same number of samples, in proportion to `samples`.
        """
        low, high = self.small.samples, self.large.samples
        if low == high:
            return first * samples / low
        return max(0.0, first + (second - first) * (samples - low) / (high - low))

    def peak(self, samples: int) -> float:
        """Returns the most live bytes of a micro-batch beyond what rests between steps."""
        return self.linear(self.small.peak, self.large.peak, samples)

    def flops(self, samples: float) -> float:
        return self.linear(self.small.flops, self.large.flops, samples)
