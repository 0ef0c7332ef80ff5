"""One step at any scale: streams, pipelines, memory by rank, the timeline. No torch, no processes."""

from shardwise.simulator.forecast import Forecast
from shardwise.simulator.step import simulate

__all__ = ["Forecast", "simulate"]
