"""Seconds that the host takes for a layer, below which no layer is however little the device has to do.

Megatron's own tests run 12 layers of width 512, which any GPU computes in no time: what an iteration takes is what
Python, Transformer Engine and autograd take to start it. `benchmarks/forecast_host.py` reads these figures from their
golden values on DGX H100, DGX A100 (FP8 and rows beside as on H100) and GB200, whose Grace GB300 has too
(megatron_ci_golden.csv, iteration times, which no score uses). An expert's share: TransformerEngine's issue 2897,
3.3 ms for 64 of them, kernels apart.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.costs.layout import Layout
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software


class Host(NamedTuple):
    """Milliseconds of a layer, forward and backward, by the processor that starts its kernels.

    layer    of a dense layer in bf16
    fp8      more where its products are in FP8: their inputs are scaled and cast
    experts  more where experts take the place of the feed-forward: routing, sorting, exchanges, sizes read
    beside   times as much where rows of experts travel beside computing: two micro-batches, part by part
    """

    layer: float
    fp8: float
    experts: float
    beside: float


HOST = Host(4.7, 1.7, 3.4, 1.3)  # of DGX H100, and where none was measured
HOSTS = {"a100": Host(6.2, 1.7, 4.4, 1.3), "gb200": Host(7.4, 1.2, 3.7, 1.1), "gb300": Host(7.4, 1.2, 3.7, 1.1)}
EXPERT_MS = 3.3 / 64  # and for each expert that a rank holds
FORWARD = 38 / 109  # of it in forward: the ops that the host starts in either (`costs/block.LAYER_OPS`)
# What a forecast rests on where the host is slower than the device, with the milliseconds of a layer
HOST_BASIS = (
    "the limit: Megatron-Core's Python takes {:.3g} ms to start a layer of one micro-batch (its own tests of tiny "
    "models); larger micro-batches cost no more"
)


class HostSeconds(NamedTuple):
    """Seconds of one layer on one micro-batch, of forward and of backward."""

    forward: float = 0.0
    backward: float = 0.0


def layer_host(shape: Shape, layout: Layout, software: Software, device: str = "") -> HostSeconds:
    """Returns the host's seconds of a layer; none where they were not measured, or where CUDA graphs replay it.

    device  whose host it is, by the catalogue's name
    """
    # captured graphs replay without the host; only Megatron's layers were measured
    if software.graphs == "step" or not software.megatron:
        return HostSeconds()
    # what is before the experts is replayed then; their own ops are still started by the host
    host = HOSTS.get(device.split("-")[0], HOST)
    milliseconds = 0.0 if "attention" in software.graphs else host.layer + (host.fp8 if software.fp8 else 0.0)
    if shape.experts:
        milliseconds += 0.0 if "routing" in software.graphs else host.experts
        milliseconds += EXPERT_MS * max(1.0, shape.experts / layout.ep)
        milliseconds *= host.beside if software.overlap_ep else 1.0
    return HostSeconds(1e-3 * FORWARD * milliseconds, 1e-3 * (1 - FORWARD) * milliseconds)
