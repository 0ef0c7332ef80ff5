"""Simulates one step at any scale: streams, pipelines, memory by rank, a timeline. No torch, no processes."""

from shardwise.simulator.forecast import Forecast
from shardwise.simulator.step import simulate

__all__ = ["Forecast", "simulate"]
