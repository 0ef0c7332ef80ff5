"""Seconds that the host takes to start a layer's kernels: the least time of a layer, however small it is.

Megatron's own tests run 12 layers of width 512, whose kernels take almost no time, so that an iteration's time is that
of Python, Transformer Engine and autograd. `benchmarks/forecast_host.py` reads these figures from the tests' golden
values on DGX H100, DGX A100 (`fp8` and `beside` as on H100) and GB200, whose Grace processor GB300 has too
(megatron_ci_golden.csv, iteration times, which no score uses). The time for each expert is from TransformerEngine's
issue 2897: 3.3 ms for 64 experts, kernels not included.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.costs.layout import Layout
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software


class Host(NamedTuple):
    """Milliseconds that one processor takes to start a layer's forward and backward.

    layer    for a dense layer in bf16
    fp8      added if products are in FP8, for scaling and casting their inputs
    experts  added if experts replace the feed-forward, for routing, sorting, exchanges and reading sizes
    beside   factor if tokens travel to experts during compute, which interleaves two micro-batches
    """

    layer: float
    fp8: float
    experts: float
    beside: float


HOST = Host(4.7, 1.7, 3.4, 1.3)  # of DGX H100, used for all that were not measured
HOSTS = {"a100": Host(6.2, 1.7, 4.4, 1.3), "gb200": Host(7.4, 1.2, 3.7, 1.1), "gb300": Host(7.4, 1.2, 3.7, 1.1)}
EXPERT_MS = 3.3 / 64  # milliseconds added for each expert that a rank holds
FORWARD = 38 / 109  # share of forward, by the ops that the host starts (`costs/block.LAYER_OPS`)
# basis of a forecast if the host is slower than the device; {} is the milliseconds of a layer
HOST_BASIS = (
    "the limit: Megatron-Core's Python takes {:.3g} ms to start a layer of one micro-batch (its own tests of tiny "
    "models); larger micro-batches cost no more"
)


class HostSeconds(NamedTuple):
    """Seconds of one layer on one micro-batch, of forward and of backward."""

    forward: float = 0.0
    backward: float = 0.0


def layer_host(shape: Shape, layout: Layout, software: Software, device: str = "") -> HostSeconds:
    """Returns the host's seconds of a layer; zeros if CUDA graphs replay the step, or layers are not Megatron's.

    device  name of the device in the catalogue, whose host it is
    """
    if software.graphs == "step" or not software.megatron:
        return HostSeconds()
    # graphs "attention" replay what is before the experts, whose own ops the host still starts
    host = HOSTS.get(device.split("-")[0], HOST)
    milliseconds = 0.0 if "attention" in software.graphs else host.layer + (host.fp8 if software.fp8 else 0.0)
    if shape.experts:
        milliseconds += 0.0 if "routing" in software.graphs else host.experts
        milliseconds += EXPERT_MS * max(1.0, shape.experts / layout.ep)
        milliseconds *= host.beside if software.overlap_ep else 1.0
    return HostSeconds(1e-3 * FORWARD * milliseconds, 1e-3 * (1 - FORWARD) * milliseconds)
