"""How long one kernel takes on one device (products, attention, streams), which costs/block and costs/ops add up.

Products read the measured table of the device, times the share of it that long runs hold. A device without a table
has one rate for large products, the sustained one if known, else `ROOFLINE_SHARE` of the data sheet: other shapes
are as much slower as on a device of its generation, or, where no such one has a table, as a roofline says.
`Kernels.basis` says which.
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
WIDE_REACHED = 0.85  # of the data sheet's rate of float32 off tensor cores (assumed; with it a step of a small decoder
# in float32 is forecast 3% above what an H200 took)
STREAM_SHARE = 0.85  # of the data sheet's memory bandwidth, without a measurement (assumed)
# Adding a product into a float32 matrix costs this share of reading and writing that matrix. SimuMax's products with
# 4096 tokens: 0.43 on A100 (0.71 of peak against 0.75), 0.35 on B200 (0.455 against 0.49)
ACCUMULATED = 0.4
# Batch norm of bfloat16 by planes, as a share of the data sheet's bandwidth by bytes in and out, and the channels from
# which it does not grow. H200, torch 2.11, 128 samples: 64 channels 0.05, 128 0.07, 256 0.13, 512 and more 0.16
BY_PLANES, PLANES_AT_ONCE = 0.16, 230.0
# The same in channels_last (forward, backward). H200, those of a ResNet-50 with 256 samples
BY_PIXELS = (0.18, 0.33)
# The same of cuDNN's kernels that turn layouts, by bytes of the convolution. H200: a ResNet-50's 0.15, those of twelve
# convolutions over 64 x 64 0.27
TURNED = 0.2
BATCHED_SHARE = 0.6  # of the best product: batched products over one head's width (assumed)
WIDE_SHARE = 1 / 15  # of the bf16 rate: float32 off tensor cores (data sheets: A100 1/16, H100 1/15)
ATTENTION_SHARE = {"flash1": 0.30, "flash2": 0.55, "cudnn": 0.50}  # of the data sheet's rate, without a table (assumed)
BACKWARD_SHARE = 0.85  # attention's backward rate over its forward rate, without a table (assumed)

# devices of attention.csv: bf16 TFLOP/s by the data sheet, and of their large products (devices.csv)
MEASURED = {"a100_sxm": (312.0, 271.2), "h100_sxm": (989.0, 794.5), "b200_sxm": (2250.0, 1745.0)}

# kinds of ops with a factor of their own on a device that was probed: inside a step an op takes longer than alone
KINDS = ("products", "convolutions", "rest")


@cache
def streamed(device: str) -> float | None:
    """Returns the share of its memory bandwidth that a device's streams hold, from sustained.csv, or None."""
    return next((float(row["value"]) for row in read("sustained.csv") if row["device"] == device), None)


@cache
def _attention_rates(device: str, kernel: str, direction: str) -> dict[int, tuple[tuple[int, float], ...]]:
    """Returns, by head_dim, pairs (sequence length, TFLOP/s) of a packaged attention kernel.

    A later one that was not measured there ("cudnn-2026") is as fast as the one before it ("cudnn").
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
    """Returns {head width: ((length, TFLOP/s), ...)} of probed (kind, length, heads * samples, width, us)."""
    rates: dict[int, dict[int, float]] = {}
    for name, length, heads, width, us in products:
        if name == kind:
            flops = 2.0 * heads * length * length * width * (2.5 if kind == "attention_backward" else 1.0)
            rates.setdefault(width, {})[length] = flops / us / 1e6
    return {width: tuple(sorted(points.items())) for width, points in rates.items()}


def peak_tflops(device: Device, dtype: str) -> float:
    """Returns the data sheet's TFLOP/s for a dtype: of "fp32" the best, tf32 among them; of any other bf16's."""
    if dtype != "fp32":
        return device.bf16_tflops.value
    own = [rate.value for rate in (device.fp32_tflops, device.tf32_tflops) if rate is not None]
    return max(own, default=device.bf16_tflops.value / 2)


def wide_rate(device: Device) -> float:
    """Returns TFLOP/s of large float32 products by torch's default: not on tensor cores."""
    if device.fp32_tflops is None:
        return device.bf16_tflops.value * WIDE_SHARE * WIDE_REACHED
    return device.fp32_tflops.value * (1.0 if device.fp32_tflops.kind == "measured" else WIDE_REACHED)


@dataclass(frozen=True)
class Kernels:
    """Times of kernels on one device, in seconds.

    launch_us   what a kernel's launch adds on the device
    call_s      seconds in which the host starts an op or a view, where the host computes the ops itself
    cut_s       the host's seconds for an op on cut tensors, beside the ops that its rule starts
    host_s      seconds in which the host starts an op that a device computes: a lower bound of each op's time
    bits        of an element that the layers' products of a decoder read: 16, or 8 and 4 in FP8 and FP4
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
        """Returns the measured products of the device, or of one of its generation; None without any for the dtype."""
        if self.device.products:
            return measured_products(self.device.products, self.dtype)
        if self.dtype != "bf16":
            return None
        own = gemm_table(self.device.table) if self.device.table else None
        return own or (gemm_table(self.device.products_of) if self.device.products_of else None)

    @property
    def borrowed(self) -> bool:
        """Whether the table is that of another device of the generation."""
        return self.table is not None and not self.device.products and self.table.name != self.device.table

    @property
    def share(self) -> float:
        """Returns the share of the table's rates that long runs sustain: this device's best product over its best."""
        table = self.table
        if table is None or self.device.products:
            return 1.0
        if self.borrowed:
            return self.peak_tflops / table.best
        own = self.device.sustained_bf16_tflops
        return min(1.0, own.value / table.best) if own else 1.0

    @property
    def best_tflops(self) -> float:
        """Returns TFLOP/s of the best product measured on such a device, else the data sheet's: no step is faster."""
        deeper = self.deeper
        if self.table is None or self.borrowed:  # clocks of a card may hold more than its data sheet says
            return max(peak_tflops(self.device, self.dtype), self.peak_tflops) * deeper
        quicker = min(1.0, self.factor("products"))  # than a product alone, inside a step of a device that was probed
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
        """Returns TFLOP/s of large products on a device without a table."""
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
        """Returns the TFLOP/s of products inside large convolutions: tensor cores', since torch uses them there."""
        wide = self.device.tf32_tflops if self.dtype == "fp32" else None
        return self.peak_tflops if wide is None else wide.value * ROOFLINE_SHARE

    def product(self, m: float, n: float, k: float, *, accumulate: bool = False) -> float:
        """Returns seconds of (m, k) x (k, n). `accumulate`: the result is added into a float32 matrix."""
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
        """Returns the rate of the layers' products over bf16's; raises `InputError` where the device has no such."""
        if self.bits == 16:
            return 1.0
        rate = self.device.fp8_tflops if self.bits == 8 else self.device.fp4_tflops
        if rate is None:
            later = "H100, L40S" if self.bits == 8 else "B200, RTX 5090"
            raise InputError(f"{self.device.name} has no FP{self.bits} products ({later} and later devices have)")
        return rate.value / self.device.bf16_tflops.value

    def layer_product(self, m: float, n: float, k: float, *, accumulate: bool = False) -> float:
        """Returns seconds of a product inside a layer, in FP8 or FP4 where the software's layers are.

        An instruction takes twice the elements at half the bytes each: (m, k) x (k, n) then takes what k / 2 takes in
        bf16. cuBLASLt's products of 8192 on H200 reach 0.81 of the data sheet so, and 0.80 to 0.84 in bf16.
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
        """Returns seconds of `kernels` launches that together move `size_bytes`."""
        return size_bytes / self.bandwidth + kernels * self.launch_us * 1e-6

    def norm_in_bf16(self, size_bytes: float, channels: float, *, backward: bool) -> float:
        """Returns the seconds of a bfloat16 batch norm on (N, C, H, W), which cuDNN does not run.

        size_bytes: of what goes in and comes out, of which the kernels read some twice.
        channels: of planes, each of which one block of threads sums; 0 where channels are last.
        """
        reached = BY_PLANES * min(1.0, channels / PLANES_AT_ONCE) if channels else BY_PIXELS[backward]
        return size_bytes / (self.device.memory_bandwidth_gbps.value * 1e9 * reached) + self.launch_us * 1e-6

    def turned(self, size_bytes: float) -> float:
        """Returns the seconds of turning a convolution's tensors from (N, C, H, W) into channels_last, and back."""
        return size_bytes / (self.device.memory_bandwidth_gbps.value * 1e9 * TURNED)

    def convolution(self, kind: str, cells: float, out: float, deep: float) -> float | None:
        """Returns seconds of a "conv" or "conv_backward" by the device's own measured table, None without one.

        cells: samples times positions; out: channels; deep: inputs of one output, channels times the kernel's area.
        """
        table = measured_products(self.device.products, kind) if self.device.products else None
        return table.seconds(cells, out, deep) if table is not None and cells > 0 else None

    def factor(self, kind: str) -> float:
        """Returns measured over computed time of a kind of op (of `KINDS`) inside steps of this very device."""
        return next((value for name, value in self.device.factors if name == kind), 1.0)

    @property
    def ops(self) -> OpTable | None:
        """Returns the table of ops measured one by one on this device, or None."""
        return measured_ops(self.device.ops)

    def batched(self, batch: float, m: float, n: float, k: float) -> float:
        """Returns seconds of `batch` products with a short k: bound by the device's rate or by the bytes written."""
        table = self.table
        best = table.best * self.share if table else self.peak_tflops
        moved = self.element * batch * (m * k + k * n + m * n)
        rate = best * BATCHED_SHARE * 1e12
        return max(2.0 * batch * m * n * k / rate, moved / self.bandwidth) + self.launch_us * 1e-6

    def attention(
        self, kernel: str, batch: float, heads: float, queries: float, keys: float, head_dim: float, *, backward: bool
    ) -> float:
        """Returns seconds of a causal attention kernel, of its backward alone (2.5 times the FLOPs) if `backward`.

        FLOPs count the unmasked half. `kernel` is one of a device's table, or of `ATTENTION_SHARE`.
        """
        work = 2.0 * batch * heads * queries * keys * head_dim * (2.5 if backward else 1.0)
        return work / (self.attention_tflops(kernel, keys, head_dim, backward) * 1e12) + self.launch_us * 1e-6

    def attention_tflops(self, kernel: str, seq: float, head_dim: float, backward: bool) -> float:
        """Returns TFLOP/s of a fused attention kernel."""
        direction = "backward" if backward else "forward"
        own = _own_rates(self.device.products, "attention_backward" if backward else "attention")
        rates, scale = own or _attention_rates(self.device.table, kernel, direction), 1.0
        if not rates:  # those of another device
            rates, scale = self._borrowed(kernel, direction, head_dim)
        if not rates:  # of a kernel that was measured nowhere
            share = ATTENTION_SHARE.get(kernel, 0.5) * (BACKWARD_SHARE if backward else 1.0)
            return self.device.bf16_tflops.value * share * self._slower
        points = rates[min(rates, key=lambda d: abs(d - head_dim))]
        return scale * _log_read(points, seq) * (1.0 if own else self._slower)

    @property
    def _slower(self) -> float:
        """Returns float32's rate over that of the dtypes that attention kernels were measured in."""
        if self.dtype != "fp32":
            return 1.0
        wide = self.device.fp32_tflops
        return WIDE_SHARE if wide is None else wide.value / self.device.bf16_tflops.value

    def _borrowed(self, kernel: str, direction: str, head_dim: float) -> tuple[dict, float]:
        """Returns (rates as `_attention_rates`, of another device, its own generation's first; factor to scale them).

        Across generations by no more than what FlashAttention-2 reaches on both, where that is known: an older kernel
        does not use a newer device's instructions.
        """
        near = self.device.products_of
        # the device's own generation first, then any that was measured
        for other in dict.fromkeys((near, *MEASURED)):
            rates = _attention_rates(other, kernel, direction)
            if not rates:
                continue
            peak, sustained_there = MEASURED[other]
            own, sheet = self.device.sustained_bf16_tflops, self.device.bf16_tflops.value
            # scaled by what both reach in long runs, else by their data sheets
            scale = own.value / sustained_there if own is not None else sheet / peak
            here = _attention_rates(self.device.table, "flash2", direction) or _attention_rates(
                near, "flash2", direction
            )
            there = _attention_rates(other, "flash2", direction)
            # across generations never by more than the one kernel that was measured on both: data sheets promise more
            if other != near and here and there:
                d = min(here, key=lambda width: abs(width - head_dim))
                scale = min(scale, here[d][-1][1] / there[d][-1][1])
            return rates, scale
        return {}, 1.0


def _log_read(points: tuple[tuple[int, float], ...], at: float) -> float:
    """Returns the rate at a size, between measured points (size, rate) by the logarithm of the sizes."""
    if at <= points[0][0]:
        return points[0][1] * max(at / points[0][0], 0.25)
    for (low, slow), (high, fast) in pairwise(points):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return slow + (fast - slow) * share
    return points[-1][1]
