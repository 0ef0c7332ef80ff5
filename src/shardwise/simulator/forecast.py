"""`Forecast`: the figures of one step. A new one: set it in parts, traced, cut; show it in planner/proposal_text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.costs.memory import CONTEXT_BYTES, MemoryLedger
from shardwise.costs.room import Room

ROUNDING = 1.001  # a forecast may exceed the devices' best rate by this factor


@dataclass
class Forecast:
    """Time of one optimizer step, its parts, memory of the ranks that differ, and the sources of the figures.

    step_s        seconds of one optimizer step
    parts         {name: seconds of the busiest rank}, which add up to `step_s`
    memory        one ledger for each pipeline stage, or rank that differs
    flops         model FLOPs of the step over all ranks, by `convention`
    samples       samples of the step over all ranks
    tokens        tokens of the step over all ranks; None if samples are not known to be tokens
    peak_tflops   TFLOP/s of one device by its data sheet
    best_tflops   TFLOP/s of the best matrix product known for such a device
    convention    how FLOPs are counted (`Shape.flops_per_token`), or "counted" in a trace
    exposed       {axis: seconds of communication that does not overlap with compute}
    bubble        share of the pipeline's time in which the busiest rank waits
    timeline      (lane, name, start, end) of each op, in seconds
    halos         {tier: bytes that a tile receives over it in a step}
    basis         {kind of figure: line on its source (measured, formula, assumed)}
    room          bytes that offloading takes on one host, for all its ranks
    """

    step_s: float
    parts: dict[str, float]
    memory: list[MemoryLedger]
    flops: float
    world_size: int
    samples: int
    peak_tflops: float
    best_tflops: float
    tokens: int | None = None
    convention: str = "6P+6Lhs"
    exposed: dict[str, float] = field(default_factory=dict)
    bubble: float = 0.0
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)
    halos: dict[str, float] = field(default_factory=dict)
    basis: dict[str, str] = field(default_factory=dict)
    room: Room = field(default_factory=Room)

    @property
    def laid_out(self) -> list[tuple[str, str, float, float]]:
        """Returns the timeline, or, if there is none, one made of `parts` one after another."""
        if self.timeline:
            return self.timeline
        boxes, now = [], 0.0
        for name, seconds in self.parts.items():
            if seconds > 0:
                boxes.append(("one rank", name, now, now + seconds))
                now += seconds
        return boxes

    @property
    def mfu(self) -> float:
        """Returns model FLOP/s over the devices' peak by their data sheets, as a fraction."""
        return self.flops / self.step_s / self.world_size / (self.peak_tflops * 1e12)

    @property
    def samples_per_s(self) -> float:
        """Returns samples per second over all ranks."""
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Returns tokens per second over all ranks; None if `tokens` is None."""
        return None if self.tokens is None else self.tokens / self.step_s

    @property
    def rate(self) -> tuple[float, str]:
        """Returns (tokens per second, "tokens") over all ranks, or (samples per second, "samples") without tokens."""
        return (self.samples_per_s, "samples") if self.tokens_per_s is None else (self.tokens_per_s, "tokens")

    @property
    def impossible(self) -> str:
        """Returns a message if the step is faster than its devices can compute, else ""."""
        tflops = self.flops / self.step_s / self.world_size / 1e12
        if tflops <= self.best_tflops * ROUNDING:
            return ""
        return (
            f"a step of {self.step_s:.3g} s would compute {tflops:.4g} TFLOP/s on each device, whose best known "
            f"product computes {self.best_tflops:.4g}: a defect of shardwise's forecast, please report it with the task"
        )

    def cost_per_million(self, price: float) -> tuple[float, str]:
        """Returns (cost of a million, "samples" or "tokens") at `price` for one device and hour."""
        rate, what = self.rate
        return price * self.world_size / 3600 / rate * 1e6, what

    def fits(self, capacity: float) -> bool:
        """Whether the fullest rank fits in `capacity` bytes, and offloaded bytes in the host's `room` if known."""
        return self.needed_bytes <= capacity and not self.room.lacks

    def shortage(self, capacity: float) -> str:
        """Returns text on what does not fit in a device of `capacity` bytes or its host; "" if all fits."""
        lacks = [self.room.line(tier) for tier in self.room.lacks]
        if self.needed_bytes > capacity:
            lacks.insert(0, f"{self.needed_bytes / 1e9:.1f} GB of {capacity / 1e9:.1f} GB")
        return "; ".join(lacks)

    @property
    def worst(self) -> MemoryLedger:
        """Returns the ledger with the most allocated bytes."""
        return max(self.memory, key=lambda ledger: ledger.allocated)

    @property
    def needed_bytes(self) -> float:
        """Returns the bytes that a device needs: those reserved on the fullest rank, plus the driver's context."""
        return self.worst.reserved + CONTEXT_BYTES

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON, with units in their keys ("step_s"); the timeline is left out."""
        return {
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "convention": self.convention,
            "parts_s": dict(self.parts),
            "exposed_s": dict(self.exposed),
            "bubble": self.bubble,
            "halo_bytes": dict(self.halos),
            "memory": [
                {"allocated": m.allocated, "reserved": m.reserved, "peak": m.peak, "terms": dict(m.terms)}
                for m in self.memory
            ],
            "basis": dict(self.basis),
            "host": self.room.as_dict(),
        }
