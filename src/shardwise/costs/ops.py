"""Seconds of one op of a trace by its kind (`SECONDS`). A new kind goes here and into rehearsal/op_counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.costs.block import EAGER
from shardwise.costs.kernels import Kernels, wide_rate
from shardwise.costs.software import Software

# Share of large products' rate that convolutions reach on tensor cores if their bytes do not take longer: the 22 of
# a ResNet-50 with 64 channels and more, 256 images in channels_last on H200 (torch 2.11), take 4.6 ms forward and 10.7
# backward; with this share 5.0 and 9.8. Without tensor cores they compute as fast as products: ResNet-50 in float32 on
# V100, 367 images a second (NVIDIA/DeepLearningExamples, ConvNets/resnet50v1.5), is 9 TFLOP/s of the 13 that large
# products reach, batch norms and all
CONV_SHARE = 0.6
# Share of float32's rate without tensor cores that depthwise convolutions reach in 16 bits, (forward, backward), and
# how much slower they are in channels first. H200, areas of 3 to 7, 96 to 1152 channels: 0.18 to 0.24, 0.10 to 0.20;
# 3 to 6
BY_CHANNEL, FIRST = (0.2, 0.14), 4.0
# Factor on the bytes of inputs and outputs: a batch norm reads its input twice, in backward its gradient too
PASSES = {"native_batch_norm": 3 / 2, "native_batch_norm_backward": 5 / 3}


def op_seconds(kind: str, shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns the seconds of one `Entry` (kind, shape, times) of a trace (simulator/counted says what `shape` holds).

    times  batch of a batched matrix product, or time steps of a recurrence; else 1
    """
    if kind in SECONDS:
        group, alone = SECONDS[kind]
        return kernels.factor(group) * alone(shape, times, kernels, software)
    return kernels.factor("rest") * _streamed(kind, shape, kernels, software)


def _streamed(name: str, shape: Sequence[float], kernels: Kernels, software: Software) -> float:
    """Returns seconds of an op `name` by its bytes; `shape`: (bytes moved,) or, of a batch norm, (bytes, channels)."""
    moved, *channels = shape
    if kernels.ops is not None:
        return kernels.ops.seconds(name, moved)
    if channels and kernels.device.kind != "cpu":
        return kernels.norm_in_bf16(moved, channels[0], backward=name.endswith("backward"))
    passes = PASSES.get(name, 1.0) if kernels.device.kind != "cpu" else 1.0
    return kernels.stream(passes * moved / (EAGER if software.fused else 1.0), 1)


def _product(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns seconds of `times` products (m, k) x (k, n), one by one or batched, whichever is faster."""
    m, n, k = shape
    if times <= 1:
        return times * kernels.product(m, n, k)
    if kernels.device.kind == "cpu":  # a CPU computes one matrix after another in one call
        return kernels.product(times * m, n, k)
    return min(times * kernels.product(m, n, k), kernels.batched(times, m, n, k))


def _recurrence(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns seconds of a recurrence of `times` steps, each of them a product of shape (m, n, k) and one kernel."""
    m, n, k = shape
    return times * (kernels.product(m, n, k) + kernels.launch_us * 1e-6)


def _attention(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns seconds of fused attention: by a probe's table over FLOPs, a CPU's peak rate, or a kernel's table.

    shape  (samples x heads, queries, keys, head width, 1.0 for a backward, 1.0 if causal)
    """
    rows, queries, keys, width, back, causal = shape
    flops = 4.0 * rows * queries * keys * width * (2.5 if back else 1.0)
    if kernels.ops is not None:
        return kernels.ops.seconds("attention_backward" if back else "attention", flops)
    if kernels.device.kind == "cpu":
        return flops / (kernels.peak_tflops * 1e12)
    whole = 1 if causal else 2  # the kernel's figures count the causal half
    return whole * kernels.attention(software.attention, rows, 1, queries, keys, int(width), backward=bool(back))


def _convolution(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    return _convolved("conv", shape, kernels)


def _convolution_backward(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    return _convolved("conv_backward", shape, kernels)


def _convolved(kind: str, shape: Sequence[float], kernels: Kernels) -> float:
    """Returns seconds of `kind` "conv" or "conv_backward": measured, else the longer of its FLOPs and its bytes.

    shape   (cells, out, deep, bytes moved, turned, alone), the first three as in `Kernels.convolution`
    turned  1.0 if its tensors are converted to channels_last and back, for kernels that read no other format
    alone   1.0 if it is depthwise, for which there are no tensor cores
    """
    cells, out, deep, moved, turned, alone = shape
    seconds = kernels.convolution(kind, cells, out, deep)
    if seconds is not None:
        return seconds
    flops, rate = 2.0 * cells * out * deep, kernels.large_convolutions_tflops
    on_gpu, back = kernels.device.kind != "cpu", kind == "conv_backward"
    # a depthwise convolution uses no tensor cores
    if alone and on_gpu:
        rate = wide_rate(kernels.device) * BY_CHANNEL[back] / (FIRST if turned else 1.0)
    # only float32 without tensor cores reaches the rate of large products itself
    elif kernels.dtype != "fp32" or kernels.device.tf32_tflops is not None or not on_gpu:
        rate *= CONV_SHARE
    computed = (2.0 if back else 1.0) * flops / (rate * 1e12)
    # depthwise kernels read any format, so nothing is converted for them
    turning = turned * kernels.turned(moved) if on_gpu and not alone else 0.0
    return max(computed, kernels.stream(moved, 0)) + kernels.launch_us * 1e-6 + turning


# kind -> (its kind of `kernels.KINDS`, by which a probe corrects it, function that returns its seconds)
SECONDS: dict[str, tuple[str, Callable[[Sequence[float], float, Kernels, Software], float]]] = {
    "product": ("products", _product),
    "recurrence": ("rest", _recurrence),
    "attention": ("products", _attention),
    "conv": ("convolutions", _convolution),
    "conv_backward": ("convolutions", _convolution_backward),
}
