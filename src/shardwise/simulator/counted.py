"""`StepTrace`, `RankTrace`, `Update`, `Model`: counts of traces and optimizers, from which forecasts take times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# An `Entry` is (kind, shape, times) of one op. Kinds and their shapes:
# product                (m, n, k) of a matrix product; times: batch of a batched one
# attention              (batch x heads, queries, keys, head width, whether backward, whether causal)
# conv, conv_backward    (samples x positions, output channels, inputs of one output, bytes moved,
#                         whether converted to channels_last, whether depthwise)
# recurrence             (m, n, k) of the product of one time step; times: steps, one after another
# the name of an op      (bytes moved,); of a bfloat16 batch norm (bytes, channels, or 0 if channels are last)
Entry = tuple[str, tuple[float, ...], int]
Tops = tuple[
    int, int, int
]  # peak live bytes (before the first repeated block, from its forward to its backward, after that)


@dataclass(eq=False)
class StepTrace:
    """Counts of one forward and backward of `samples` samples: ops, FLOPs, bytes moved, peak live bytes.

    A bool says whether the sentence holds.

    parameters   elements of all parameters held here; `tensors`: number of these parameters
    buffers_bytes bytes of the module's buffers
    order        the `Entry` of every op but views, in the order in which they ran
    products     {(m, n, k): number of such matrix products}
    attention    {(batch x heads, queries, keys, head width, backward, causal): number of calls}
    conv_flops   FLOPs of convolutions and Fourier transforms
    moved        bytes that all ops but products and attention read and write
    kernels      number of ops that compute something
    calls        number of ops, views included
    cut_calls    number of ops on sharded tensors, whose rules start some of `calls`
    peak         peak live bytes without parameters, buffers, inputs and gradients at rest
    tops         the same in three windows, see `Tops`
    idle         elements of trained parameters that got no gradient
    gradients    bytes of gradients of all trained parameters held here
    sizes        {elements of a trained parameter: number of parameters of that size}
    in_order     {index in the module's order: elements} of trained parameters, in the optimizer's order
    wholes       {index in the module's order: elements of the unsharded weight} of parameters that tp shards
    arrived      (index in the module's order, live bytes as in `peak`) at each gradient's arrival; [] if not asked for
    units        parameters of each repeated block, or unit of zero=3; `rest`: parameters outside of them
    shard_elements        elements of the weight shards that rest on a rank, if the trace includes a technique that
                          shards weights; `peak` then includes gathered weights; else 0
    shard_gradient_bytes  bytes of the gradient shards that rest, if the trace includes such a technique; else 0
    experts      elements of trained experts on this rank, if ep deals them; else 0
    rows         {(size of the dim that zero=3 shards, elements at each index of it): number of weights}
    chose        something was chosen by scores without values (top-k, sort, max over a dim)
    balanced     such choices decided shapes, and routers were assumed to load experts evenly
    by_batch     integers of the batch decided shapes, and those of one sample were repeated
    drawn        single random numbers were assumed to be their median
    follows      random operations ran as under randomness=global
    wrote_scores attention wrote its scores, because no fused kernel has dropout masks of one process
    own_backward the forward takes gradients itself
    enclosed     paths of modules that cannot be units of zero=3, since they write into their arguments, or the forward
                 takes gradients through them
    batch_norms  number of batch norms in a forward that take their statistics over one rank
    alone        one of these has one value for each channel, so no variance
    joined       {(op, bytes of the full tensor): calls} of batch norms over data ranks
    put          {tier: bytes of activations that blocks keep there for backward}
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
        """Returns FLOPs of products, convolutions, transforms and attention; a causal kernel counts half."""
        products = sum(2.0 * m * n * k * times for (m, n, k), times in self.products.items())
        scores = sum(
            4.0 * b * q * k * d * (2.5 if back else 1.0) * (0.5 if causal else 1.0) * times
            for (b, q, k, d, back, causal), times in self.attention.items()
        )
        return products + scores + self.conv_flops


Sent = tuple[str, str, float]  # (axis, op, bytes of the full tensor)
# An exchange during operations order[start:stop]: (axis, op, {sender's index minus this rank's: bytes}, start, stop)
Passed = tuple[str, str, dict[int, int], int, int]


@dataclass
class RankTrace(StepTrace):
    """The trace of one rank's pipeline row: `peak` is of the whole row, products and bytes are of one micro-batch.

    A key (kind, stage) is an op of the row: kind "F", "B", "I" or "W".

    ops       {(kind, stage): trace of that op}
    wire      {(kind, stage): {`Sent`: calls}} of collectives over tp, ep, axes of positions, and (batch norms) data
    arrivals  {(kind, stage): {(axis, op, sender's index minus this rank's): bytes received}}, of ops in which ranks may
              send different numbers of bytes
    overlaps  {(kind, stage): exchanges that ran during operations, in order; see `Passed`}
    gathers   {(kind, stage): elements of each all-gather of zero=3, in order}
    first     `peak` when the first backward was over, which is that of a row of one micro-batch
    first_tops  `tops` at that time
    messages  {stage: bytes that it sends to the next stage for one micro-batch}
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
    """Cost of an optimizer's step per element of a float32 weight.

    state_elements  elements of state
    work       (op, bytes that it moves) of each op
    calls      number of ops for one tensor, views included
    temporary  elements that live only while it runs
    left       elements of these that one tensor's update leaves alive until the next tensor's update is done
    whole      whether it needs unsharded tensors, so that ZeRO and tp have one rank update each (step/owners.py)
    coded      elements of state that may be encoded: floating-point tensors of the weight's shape
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
    """Two traces of a module, or of a rank, with different numbers of samples; its optimizer's step, its batch."""

    small: StepTrace  # of fewer samples
    large: StepTrace  # of more samples, or the same trace; figures are linear between both
    update: Update
    name: str = ""
    batch_bytes: float = 0.0  # bytes of one sample of the batch
    batch_on_device: bool = True  # whether ranks hold the whole global batch (CPUs), not a micro-batch at a time
    gathered: tuple[int, ...] | None = None  # parameters of each unit of zero=3; None: not rehearsed

    @property
    def units(self) -> Sequence[int]:
        """Returns the number of parameters of each unit of zero=3, or of each repeated block."""
        return self.small.units if self.gathered is None else self.gathered

    @property
    def trained(self) -> int:
        """Returns the number of elements of trained weights, which alone have gradients."""
        return sum(size * count for size, count in self.small.sizes.items())

    def linear(self, first: float, second: float, samples: float) -> float:
        """Returns a figure at `samples` on the line through `first` (of `small`) and `second` (of `large`), at least 0.

        If both traces have the same number of samples, the figure is `first` in proportion to `samples`.
        """
        low, high = self.small.samples, self.large.samples
        if low == high:
            return first * samples / low
        return max(0.0, first + (second - first) * (samples - low) / (high - low))

    def peak(self, samples: int) -> float:
        """Returns the peak live bytes of a micro-batch, without what rests between steps."""
        return self.linear(self.small.peak, self.large.peak, samples)

    def flops(self, samples: float) -> float:
        return self.linear(self.small.flops, self.large.flops, samples)
