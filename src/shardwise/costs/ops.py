"""Time of one op of a trace by its kind (`SECONDS`): a new kind goes here, and is noted by rehearsal/op_counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.costs.block import EAGER
from shardwise.costs.kernels import Kernels
from shardwise.costs.software import Software

# Of the rate of large products that convolutions reach on tensor cores (assumed). Without them they compute as fast:
# ResNet-50 in float32 on V100, 367 images a second (NVIDIA/DeepLearningExamples, ConvNets/resnet50v1.5), is 9 TFLOP/s
# of the 13 that large products reach, batch norms and all
CONV_SHARE = 0.5


def op_seconds(kind: str, shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    """Returns the seconds of one op of a trace, an `Entry`; `times`: the batch of a batched product."""
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
        return kernels.by_planes(moved, channels[0])
    return kernels.stream(moved / (EAGER if software.fused else 1.0), 1)


def _product(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
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
    rows, queries, keys, width, back, causal = shape
    flops = 4.0 * rows * queries * keys * width * (2.5 if back else 1.0)
    if kernels.ops is not None:
        return kernels.ops.seconds("attention_backward" if back else "attention", flops)
    if kernels.device.kind == "cpu":
        return flops / (kernels.peak_tflops * 1e12)
    whole = 1 if causal else 2  # the kernel's figures count the causal half
    return whole * kernels.attention(software.attention, rows, 1, queries, keys, int(width), backward=bool(back))


def _convolution(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    cells, out, deep, moved, turned = shape
    seconds = kernels.convolution("conv", cells, out, deep)
    return _of_large(2.0 * cells * out * deep, moved, turned, kernels) if seconds is None else seconds


def _convolution_backward(shape: Sequence[float], times: float, kernels: Kernels, software: Software) -> float:
    cells, out, deep, moved, turned = shape
    seconds = kernels.convolution("conv_backward", cells, out, deep)
    return _of_large(4.0 * cells * out * deep, moved, turned, kernels) if seconds is None else seconds


def _of_large(flops: float, moved: float, turned: float, kernels: Kernels) -> float:
    """Returns seconds of a convolution without measurements, at a share of the rate of large products.

    turned  1.0 where its tensors are brought into channels_last and back, for kernels that read no other layout
    """
    cores = kernels.dtype != "fp32" or kernels.device.tf32_tflops is not None or kernels.device.kind == "cpu"
    reached = kernels.large_convolutions_tflops * (CONV_SHARE if cores else 1.0)
    seconds = flops / (reached * 1e12) + kernels.stream(moved, 1)
    return seconds + (turned * kernels.turned(moved) if kernels.device.kind != "cpu" else 0.0)


# kind -> which of the factors of a probed device it has (`kernels.KINDS`), and its seconds alone
SECONDS: dict[str, tuple[str, Callable[[Sequence[float], float, Kernels, Software], float]]] = {
    "product": ("products", _product),
    "recurrence": ("rest", _recurrence),
    "attention": ("products", _attention),
    "conv": ("convolutions", _convolution),
    "conv_backward": ("convolutions", _convolution_backward),
}
