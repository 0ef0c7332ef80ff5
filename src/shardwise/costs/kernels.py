"""`Kernels`: seconds of one kernel on one device (matrix products, attention, streams); costs/block, costs/ops add up.

A matrix product ("product" below) reads the device's measured table of rates by shape, times the share of these rates
that long runs sustain. A device without a table has one rate for large products, the sustained one if known, else
`ROOFLINE_SHARE` of the data sheet. Other shapes are then slower in the proportion of a measured device of the same
generation, or, if there is none, as a roofline says. `Kernels.basis` says which of these was used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from shardwise.cluster import Device, GemmTable, OpTable, gemm_table, measured_ops, measured_products
from shardwise.cluster.catalogue import read
from shardwise.errors import InputError

ROOFLINE_SHARE = 0.70  # of the data sheet's rate, for large products without a table (assumed)
WIDE_REACHED = 0.85  # of the data sheet's rate of float32 without tensor cores (assumed; with it a step of a small
# decoder in float32 is forecast 3% above what an H200 took)
STREAM_SHARE = 0.85  # of the data sheet's memory bandwidth, without a measurement (assumed)
# Adding a product into a float32 matrix costs this share of reading and writing that matrix. SimuMax's products with
# 4096 tokens: 0.43 on A100 (0.71 of peak against 0.75), 0.35 on B200 (0.455 against 0.49)
ACCUMULATED = 0.4
# Batch norm of bfloat16 in channels first: bytes of input and output a second over the data sheet's bandwidth, with at
# least PLANES_AT_ONCE channels, and in proportion with fewer. H200, torch 2.11, 128
# samples: 64 channels 0.05, 128 0.07, 256 0.13, 512 and more 0.16
BY_PLANES, PLANES_AT_ONCE = 0.16, 230.0
# The same share in channels_last, (forward, backward). H200, batch norms of a ResNet-50 with 256 samples
BY_PIXELS = (0.18, 0.33)
# Bytes of a convolution a second over the data sheet's bandwidth in cuDNN's kernels that convert channels first to
# channels_last and back. H200: 0.15 in a ResNet-50, 0.27 in twelve convolutions over 64 x 64
TURNED = 0.2
BATCHED_SHARE = 0.6  # of the best product: batched products over one head's width (assumed)
WIDE_SHARE = 1 / 15  # of the bf16 rate: float32 without tensor cores (data sheets: A100 1/16, H100 1/15)
OLD_ATTENTION = "memory-efficient"  # PyTorch's fused kernel on devices for which FlashAttention is not made
# of the data sheet's rate, without a table (assumed)
ATTENTION_SHARE = {"flash1": 0.30, "flash2": 0.55, "cudnn": 0.50, OLD_ATTENTION: 0.30}
BACKWARD_SHARE = 0.85  # attention's backward rate over its forward rate, without a table (assumed)

# device of attention.csv -> (bf16 TFLOP/s of the data sheet, those of its large products in long runs: devices.csv)
MEASURED = {"a100_sxm": (312.0, 271.2), "h100_sxm": (989.0, 794.5), "b200_sxm": (2250.0, 1745.0)}

# kinds of ops for which a probe measures the time inside a step over the time alone (`Device.factors`)
KINDS = ("products", "convolutions", "rest")


@cache
def streamed(device: str) -> float | None:
    """Returns the share of its memory bandwidth that a device's streaming kernels reach (sustained.csv), or None."""
    return next((float(row["value"]) for row in read("sustained.csv") if row["device"] == device), None)


@cache
def _attention_rates(device: str, kernel: str, direction: str) -> dict[int, tuple[tuple[int, float], ...]]:
    """Returns {head_dim: ((sequence length, TFLOP/s), ...)} of an attention kernel in attention.csv, {} if none.

    direction  "forward" or "backward"; a later kernel that was not measured ("cudnn-2026") is taken to be as fast as
               the earlier one ("cudnn")
    """
    out: dict[int, tuple[tuple[int, float], ...]] = {}
    for row in read("attention.csv"):
        if (row["device"], row["kernel"], row["direction"]) == (device, kernel, direction):
            out[int(row["head_dim"])] = tuple((int(k), float(v)) for k, v in row.items() if k.isdigit() and v)
    before = kernel.rpartition("-")[0]
    return out or (_attention_rates(device, before, direction) if before else out)


@cache
def _own_rates(
    products: tuple[tuple[str, int, int, int, float], ...], kind: str
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Returns {head width: ((length, TFLOP/s), ...)} of the `kind` "attention" or "attention_backward".

    products  a probe's (kind, length, heads * samples, width, microseconds)
    """
    rates: dict[int, dict[int, float]] = {}
    for name, length, heads, width, us in products:
        if name == kind:
            flops = 2.0 * heads * length * length * width * (2.5 if kind == "attention_backward" else 1.0)
            rates.setdefault(width, {})[length] = flops / us / 1e6
    return {width: tuple(sorted(points.items())) for width, points in rates.items()}


def peak_tflops(device: Device, dtype: str) -> float:
    """Returns the data sheet's TFLOP/s: for "fp32" the higher of fp32 and tf32, for any other dtype that of bf16."""
    if dtype != "fp32":
        return device.bf16_tflops.value
    own = [rate.value for rate in (device.fp32_tflops, device.tf32_tflops) if rate is not None]
    return max(own, default=device.bf16_tflops.value / 2)


def wide_rate(device: Device) -> float:
    """Returns TFLOP/s of large float32 products without tensor cores, which is torch's default."""
    if device.fp32_tflops is None:
        return device.bf16_tflops.value * WIDE_SHARE * WIDE_REACHED
    return device.fp32_tflops.value * (1.0 if device.fp32_tflops.kind == "measured" else WIDE_REACHED)


@dataclass(frozen=True)
class Kernels:
    """Times of kernels on one device, in seconds.

    launch_us   microseconds that each kernel's launch adds on the device
    dtype       "bf16", or "fp32" for float32
    call_s      host's seconds to start an op or a view, if the host itself computes the ops; else 0
    cut_s       host's seconds for an op on sharded tensors, besides the ops that its rule starts
    host_s      host's seconds to start an op that a device computes, which is the least time that an op takes
    bits        bits of an element that the products of a decoder's layers read: 16, 8 (FP8) or 4 (FP4)
    """

    device: Device
    launch_us: float = 2.0
    dtype: str = "bf16"
    call_s: float = 0.0
    cut_s: float = 0.0
    host_s: float = 0.0
    bits: int = 16

    @property
    def table(self) -> GemmTable | None:
        """Returns the measured products of the device, else of one of its generation; None if the dtype has none."""
        if self.device.products:
            return measured_products(self.device.products, self.dtype)
        if self.dtype != "bf16":
            return None
        own = gemm_table(self.device.table) if self.device.table else None
        return own or (gemm_table(self.device.products_of) if self.device.products_of else None)

    @property
    def borrowed(self) -> bool:
        """Whether `table` is that of another device of the same generation."""
        return self.table is not None and not self.device.products and self.table.name != self.device.table

    @property
    def share(self) -> float:
        """Returns the factor on the table's rates: this device's best product in long runs over the table's best."""
        table = self.table
        if table is None or self.device.products:
            return 1.0
        if self.borrowed:
            return self.peak_tflops / table.best
        own = self.device.sustained_bf16_tflops
        return min(1.0, own.value / table.best) if own else 1.0

    @property
    def best_tflops(self) -> float:
        """Returns an upper bound of any product's TFLOP/s: the best measured on this device, or the data sheet's."""
        deeper = self.deeper
        if self.table is None or self.borrowed:  # a card may sustain more than its data sheet says
            return max(peak_tflops(self.device, self.dtype), self.peak_tflops) * deeper
        quicker = min(1.0, self.factor("products"))  # below 1: a probe found products quicker in a step
        best = max(self.table.best, peak_tflops(self.device, self.dtype) if not self.device.products else 0)
        return best / quicker * deeper

    @property
    def basis(self) -> str:
        """Returns one line on where the times of products come from."""
        if self.table is not None:
            if self.device.products:
                return f"products measured on {self.table.name}"
            if self.borrowed:
                return f"{self.peak_tflops:.0f} TFLOP/s for the largest products, by shape as on {self.table.name}"
            return f"measured products of {self.table.name} by shape x {self.share:.3g} (long runs)"
        return f"roofline: {self.peak_tflops:.3g} TFLOP/s for any large product, not measured by shape"

    @property
    def peak_tflops(self) -> float:
        """Returns TFLOP/s of large products in long runs, by the device's figures alone (no table of shapes)."""
        d = self.device
        if self.dtype == "fp32":
            return wide_rate(d)
        share = 1.0 if d.bf16_tflops.kind == "measured" else ROOFLINE_SHARE
        return d.sustained_bf16_tflops.value if d.sustained_bf16_tflops else d.bf16_tflops.value * share

    @property
    def element(self) -> float:
        """Returns the bytes of one element."""
        return 4.0 if self.dtype == "fp32" else 2.0

    @property
    def large_convolutions_tflops(self) -> float:
        """Returns TFLOP/s inside large convolutions, for which torch uses tensor cores (tf32) in float32 too."""
        wide = self.device.tf32_tflops if self.dtype == "fp32" else None
        return self.peak_tflops if wide is None else wide.value * ROOFLINE_SHARE

    def product(self, m: float, n: float, k: float, *, accumulate: bool = False) -> float:
        """Returns seconds of (m, k) x (k, n). `accumulate`: whether the result is added into a float32 matrix."""
        if m <= 0 or n <= 0 or k <= 0:
            return 0.0
        table = self.table
        if table is not None:
            seconds = table.seconds(m, n, k) / self.share
        else:
            moved = self.element * (m * k + k * n + m * n)
            seconds = max(2.0 * m * n * k / (self.peak_tflops * 1e12), moved / self.bandwidth)
        if accumulate:
            seconds += ACCUMULATED * 8.0 * m * n / self.bandwidth
        return seconds + self.launch_us * 1e-6

    @property
    def deeper(self) -> float:
        """Returns the data sheet's rate for `bits` over that of bf16; `InputError` if the device lacks FP8/FP4."""
        if self.bits == 16:
            return 1.0
        rate = self.device.fp8_tflops if self.bits == 8 else self.device.fp4_tflops
        if rate is None:
            later = "H100, L40S" if self.bits == 8 else "B200, RTX 5090"
            raise InputError(f"{self.device.name} has no FP{self.bits} products ({later} and later devices have)")
        return rate.value / self.device.bf16_tflops.value

    def layer_product(self, m: float, n: float, k: float, *, accumulate: bool = False) -> float:
        """Returns seconds of a product (m, k) x (k, n) inside a layer, in `bits` (FP8 or FP4 if below 16).

        In FP8 an instruction takes twice the elements at half the bytes each, so the time is that of k / 2 in bf16.
        cuBLASLt's products of 8192 on H200 reach 0.81 of the data sheet in FP8, and 0.80 to 0.84 in bf16.
        """
        return self.product(m, n, k / self.deeper, accumulate=accumulate)

    @property
    def bandwidth(self) -> float:
        """Returns the bytes per second that a streaming kernel moves."""
        rate = self.device.memory_bandwidth_gbps
        measured = (streamed(name) for name in (self.device.table, self.device.products_of) if name)
        share = next((share for share in measured if share), STREAM_SHARE)
        return rate.value * 1e9 * (1.0 if rate.kind == "measured" or self.device.kind == "cpu" else share)

    def stream(self, size_bytes: float, kernels: int = 1) -> float:
        """Returns seconds of `kernels` kernels that together read and write `size_bytes` of device memory."""
        return size_bytes / self.bandwidth + kernels * self.launch_us * 1e-6

    def norm_in_bf16(self, size_bytes: float, channels: float, *, backward: bool) -> float:
        """Returns the seconds of a bfloat16 batch norm on (N, C, H, W) by torch's own kernels, without cuDNN.

        size_bytes: bytes of its inputs and outputs.
        channels: C if channels are first in memory (one block of threads sums each); 0 if channels are last.
        """
        reached = BY_PLANES * min(1.0, channels / PLANES_AT_ONCE) if channels else BY_PIXELS[backward]
        return size_bytes / (self.device.memory_bandwidth_gbps.value * 1e9 * reached) + self.launch_us * 1e-6

    def turned(self, size_bytes: float) -> float:
        """Returns the seconds to convert a convolution's tensors of `size_bytes` to channels_last and back."""
        return size_bytes / (self.device.memory_bandwidth_gbps.value * 1e9 * TURNED)

    def convolution(self, kind: str, cells: float, out: float, deep: float) -> float | None:
        """Returns seconds of `kind` "conv" or "conv_backward" by the device's own measured table, None without one.

        cells: samples times output positions; out: output channels; deep: input channels times the kernel's area.
        """
        table = measured_products(self.device.products, kind) if self.device.products else None
        return table.seconds(cells, out, deep) if table is not None and cells > 0 else None

    def factor(self, kind: str) -> float:
        """Returns measured over computed time of a kind of op (of `KINDS`) inside steps; 1.0 if it was not probed."""
        return next((value for name, value in self.device.factors if name == kind), 1.0)

    @property
    def ops(self) -> OpTable | None:
        """Returns the table of ops measured one by one on this device, or None."""
        return measured_ops(self.device.ops)

    def batched(self, batch: float, m: float, n: float, k: float) -> float:
        """Returns seconds of a batched product, `batch` times (m, k) x (k, n) with a small k (a head's width)."""
        table = self.table
        best = table.best * self.share if table else self.peak_tflops
        moved = self.element * batch * (m * k + k * n + m * n)
        rate = best * BATCHED_SHARE * 1e12
        return max(2.0 * batch * m * n * k / rate, moved / self.bandwidth) + self.launch_us * 1e-6

    def attention(
        self, kernel: str, batch: float, heads: float, queries: float, keys: float, head_dim: float, *, backward: bool
    ) -> float:
        """Returns seconds of a causal fused attention kernel: of its forward, or of its backward (2.5 times the FLOPs).

        kernel  a name in attention.csv, or a key of `ATTENTION_SHARE`; FLOPs are those of the unmasked half
        """
        work = 2.0 * batch * heads * queries * keys * head_dim * (2.5 if backward else 1.0)
        return work / (self.attention_tflops(kernel, keys, head_dim, backward) * 1e12) + self.launch_us * 1e-6

    def runs_as(self, attention: str) -> str:
        """Returns the attention kernel that runs on this device where the software asks for `attention`.

        FlashAttention-2, FlashAttention-3 and cuDNN's need compute capability 8.0; before it, on devices whose tensor
        cores take fp16 alone (V100, T4), PyTorch runs its memory-efficient kernel.
        """
        old = self.device.own_bf16_tflops is not None
        return OLD_ATTENTION if old and attention not in ("unfused", "flash1") else attention

    def attention_basis(self, attention: str) -> str:
        """Returns which kernel the software's `attention` is here, and where its rate is from, for `rests on`."""
        kernel = self.runs_as(attention)
        if kernel != OLD_ATTENTION:
            return f"{kernel} kernel; see attention.csv"
        share = ATTENTION_SHARE[kernel]
        return (
            f"{kernel} kernel, since {attention} does not run on {self.device.name}; {share:.0%} of its rate (assumed)"
        )

    def attention_tflops(self, kernel: str, seq: float, head_dim: float, backward: bool) -> float:
        """Returns TFLOP/s (of the unmasked half) of a fused attention kernel at `seq` keys."""
        kernel = self.runs_as(kernel)
        direction = "backward" if backward else "forward"
        own = _own_rates(self.device.products, "attention_backward" if backward else "attention")
        rates, scale = own or _attention_rates(self.device.table, kernel, direction), 1.0
        if not rates:  # not measured on this device
            rates, scale = self._borrowed(kernel, direction, head_dim)
        if not rates:  # not measured on any device
            share = ATTENTION_SHARE.get(kernel, 0.5) * (BACKWARD_SHARE if backward else 1.0)
            return self.device.bf16_tflops.value * share * self._slower
        points = rates[min(rates, key=lambda d: abs(d - head_dim))]
        return scale * _log_read(points, seq) * (1.0 if own else self._slower)

    @property
    def _slower(self) -> float:
        """Returns the rate of `dtype` over bf16's, in which attention kernels were measured: below 1 for "fp32"."""
        if self.dtype != "fp32":
            return 1.0
        wide = self.device.fp32_tflops
        return WIDE_SHARE if wide is None else wide.value / self.device.bf16_tflops.value

    def _borrowed(self, kernel: str, direction: str, head_dim: float) -> tuple[dict, float]:
        """Returns (`_attention_rates` of another device, factor for this one), or ({}, 1.0) if no device has any.

        A device of the same generation comes first. From another generation the factor is at most the ratio of
        FlashAttention-2 on both, if measured, because an older kernel does not use a newer device's instructions.
        """
        near = self.device.products_of
        # the device's own generation first, then any that was measured
        for other in dict.fromkeys((near, *MEASURED)):
            rates = _attention_rates(other, kernel, direction)
            if not rates:
                continue
            peak, sustained_there = MEASURED[other]
            own, sheet = self.device.sustained_bf16_tflops, self.device.bf16_tflops.value
            # data sheets promise more than devices sustain, so long runs are compared if both are known
            scale = own.value / sustained_there if own is not None else sheet / peak
            here = _attention_rates(self.device.table, "flash2", direction) or _attention_rates(
                near, "flash2", direction
            )
            there = _attention_rates(other, "flash2", direction)
            # see the docstring: the ratio of one kernel measured on both is the limit
            if other != near and here and there:
                d = min(here, key=lambda width: abs(width - head_dim))
                scale = min(scale, here[d][-1][1] / there[d][-1][1])
            return rates, scale
        return {}, 1.0


def _log_read(points: tuple[tuple[int, float], ...], at: float) -> float:
    """Returns the rate at size `at`, interpolated between `points` (size, rate) over the logarithm of sizes."""
    if at <= points[0][0]:
        return points[0][1] * max(at / points[0][0], 0.25)
    for (low, slow), (high, fast) in pairwise(points):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return slow + (fast - slow) * share
    return points[-1][1]
