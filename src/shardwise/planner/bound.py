"""The least that a step of a traced module takes under plans that cut it: what computing it costs, dealt evenly."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.costs.layout import Layout
from shardwise.costs.software import Software
from shardwise.simulator.counted import Model
from shardwise.simulator.parts import GAPS
from shardwise.simulator.traced import between, kernels_of, same_ops


def least_seconds(
    model: Model, batch: int, world: int, cluster: Cluster, software: Software, precision: str
) -> float:  # fmt: skip
    """Seconds of computing where each rank has its samples whole, at the best micro-batch; 0 where it cannot be told.

    A cut makes products narrower by as much as it gives a rank more samples, starts as many ops, and in a pipeline
    deals them over more micro-batches: it computes no faster for the same work.
    """
    if not same_ops(model.one, model.two):
        return 0.0
    kernels, _ = kernels_of(cluster, Layout(), software, {"fp32": "fp32", "fp64": "fp32"}.get(precision, "bf16"))
    own = max(model.one.samples, -(-batch // world))  # samples of a rank
    sizes = {own, *(2**place for place in range(own.bit_length()))}
    each = [between(model.one, model.two, n, kernels, software) / n for n in sizes if n >= model.one.samples]
    correction = cluster.device.correction.value if cluster.device.correction is not None else 1.0
    return min(each) * batch / world * correction * (1.0 if cluster.device.kind == "cpu" else GAPS)
