"""Describes where a task runs: devices, links by tier, and a packaged catalogue of published figures. No torch."""

from shardwise.cluster.catalogue import device, device_names, model, model_names
from shardwise.cluster.cluster import Cluster, Device, Node, Tier
from shardwise.cluster.figure import Figure
from shardwise.cluster.tables import (
    BetweenTable,
    CollectiveTable,
    GemmTable,
    OpTable,
    collective_table,
    gemm_table,
    measured_between,
    measured_collectives,
    measured_ops,
    measured_products,
)

__all__ = [
    "BetweenTable",
    "Cluster",
    "CollectiveTable",
    "Device",
    "Figure",
    "GemmTable",
    "Node",
    "OpTable",
    "Tier",
    "collective_table",
    "device",
    "device_names",
    "gemm_table",
    "measured_between",
    "measured_collectives",
    "measured_ops",
    "measured_products",
    "model",
    "model_names",
]
