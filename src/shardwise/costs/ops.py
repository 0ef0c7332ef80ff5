"""Time of one op of a trace by its kind (`SECONDS`): a new kind goes here, and is noted by rehearsal/op_counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.costs.block import EAGER
from shardwise.costs.kernels import Kernels, wide_rate
from shardwise.costs.software import Software

# Of the rate of large products that convolutions reach on tensor cores, where their bytes do not take longer: the 22 of
# a ResNet-50 with 64 channels and more, 256 images in channels_last on H200 (torch 2.11), take 4.6 ms forward and 10.7
# backward; with this share 5.0 and 9.8. Without tensor cores they compute as fast as products: ResNet-50 in float32 on
# V100, 367 images a second (NVIDIA/DeepLearningExamples, ConvNets/resnet50v1.5), is 9 TFLOP/s of the 13 that large
# products reach, batch norms and all
CONV_SHARE = 0.6
# Of float32's rate off tensor cores, what convolutions of one channel each reach in 16 bits (forward, backward), and
# that over the rate in channels first. H200, areas of 3 to 7, 96 to 1152 channels: 0.18 to 0.24, 0.10 to 0.20; 3 to 6
BY_CHANNEL, FIRST = (0.2, 0.14), 4.0
# A batch norm reads its input for the statistics, then again; in backward the gradient too (cuDNN, whole tensors)
PASSES = {"native_batch_norm": 3 / 2, "native_batch_norm_backward": 5 / 3}


def op_seconds(kind: str, shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns the seconds of one op of a trace, an `Entry`; `times`: a product's batch or a recurrence's steps."""
    if kind in SECONDS:
        group, alone = SECONDS[kind]
        return kernels.factor(group) * alone(shape, times, kernels, software)
    return kernels.factor("rest") * _streamed(kind, shape, kernels, software)


def _streamed(name: str, shape: Sequence[float], kernels: Kernels, software: Software) -> float:
    """Returns seconds of any other op from the bytes that it reads and writes; a batch norm by planes takes longer."""
    moved, *channels = shape
    if kernels.ops is not None:
        return kernels.ops.seconds(name, moved)
    if channels and kernels.device.kind != "cpu":
        return kernels.norm_in_bf16(moved, channels[0], backward=name.endswith("backward"))
    passes = PASSES.get(name, 1.0) if kernels.device.kind != "cpu" else 1.0
    return kernels.stream(passes * moved / (EAGER if software.fused else 1.0), 1)


def _product(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns seconds of `times` products (m, k) x (k, n): one by one or batched, whichever is faster."""
    m, n, k = shape
    if times <= 1:
        return times * kernels.product(m, n, k)
    if kernels.device.kind == "cpu":  # from matrix to matrix, in one call
        return kernels.product(times * m, n, k)
    return min(times * kernels.product(m, n, k), kernels.batched(times, m, n, k))


def _recurrence(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns seconds of a recurrence, each step of which is a product and an elementwise kernel in sequence."""
    m, n, k = shape
    return times * (kernels.product(m, n, k) + kernels.launch_us * 1e-6)


def _attention(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns seconds of fused attention: measured by FLOPs, at a CPU's peak rate, or by a kernel's table."""
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
    """Returns seconds of a convolution or its backward: measured, else at a share of a rate, or as its bytes take.

    shape   (cells, out, deep: of `Kernels.convolution`; bytes moved, turned, alone)
    turned  1.0 where its tensors are brought into channels_last and back, for kernels that read no other layout
    alone   1.0 where each channel is convolved by itself, for which there is no tensor core
    """
    cells, out, deep, moved, turned, alone = shape
    seconds = kernels.convolution(kind, cells, out, deep)
    # measured shapes need no rate
    if seconds is not None:
        return seconds
    flops, rate = 2.0 * cells * out * deep, kernels.large_convolutions_tflops
    on_gpu, back = kernels.device.kind != "cpu", kind == "conv_backward"
    # one channel by itself has no tensor core, on a GPU
    if alone and on_gpu:
        rate = wide_rate(kernels.device) * BY_CHANNEL[back] / (FIRST if turned else 1.0)
    # convolutions reach a share of large products' rate, but for float32 off tensor cores, where they reach it
    elif kernels.dtype != "fp32" or kernels.device.tf32_tflops is not None or not on_gpu:
        rate *= CONV_SHARE
    computed = (2.0 if back else 1.0) * flops / (rate * 1e12)
    # only a kernel that reads one layout turns its tensors
    turning = turned * kernels.turned(moved) if on_gpu and not alone else 0.0
    return max(computed, kernels.stream(moved, 0)) + kernels.launch_us * 1e-6 + turning


# kind -> which of the factors of a probed device it has (`kernels.KINDS`), and its seconds alone
SECONDS: dict[str, tuple[str, Callable[[Sequence[float], float, Kernels, Software], float]]] = {
    "product": ("products", _product),
    "recurrence": ("rest", _recurrence),
    "attention": ("products", _attention),
    "conv": ("convolutions", _convolution),
    "conv_backward": ("convolutions", _convolution_backward),
}
