"""`Forecast`: one step of a plan. A new figure: its makers (parts, traced, cut), `as_dict`, planner/proposal_text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.costs.memory import CONTEXT_BYTES, MemoryLedger
from shardwise.costs.room import Room

ROUNDING = 1.001


@dataclass
class Forecast:
    """Time of a step, where it goes, memory of each stage, and what the figures rest on.

    step_s        one optimizer step
    parts         seconds of the busiest rank by name; they add up to `step_s`
    memory        one ledger for each pipeline stage
    flops         model FLOPs of the step over all ranks, by `convention`
    samples       of the step, over all ranks
    tokens        in them, where samples are known to be of tokens
    peak_tflops   of one device, by its data sheet
    best_tflops   of one device, the best product that was measured on such a one
    exposed       communication that nothing hides, by axis, in seconds
    bubble        share of the pipeline's time in which the busiest rank waits
    timeline      (lane, name, start, end), seconds
    halos         bytes that a tile is sent by others in a step, by the link over which they come
    basis         what each kind of figure rests on: measured, formula, assumed
    room          what tiers take of one host, over all its ranks
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
        """Returns the timeline; for a step without one, its parts one after another."""
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
        """Returns model FLOP/s over the devices' peak by their data sheets, a share of 1."""
        return self.flops / self.step_s / self.world_size / (self.peak_tflops * 1e12)

    @property
    def samples_per_s(self) -> float:
        """Returns samples a second over all ranks."""
        return self.samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Returns tokens a second over all ranks; None where samples are not known to be of tokens."""
        return None if self.tokens is None else self.tokens / self.step_s

    @property
    def rate(self) -> tuple[float, str]:
        """Returns (number per second, "samples" or "tokens") over all ranks."""
        return (self.samples_per_s, "samples") if self.tokens_per_s is None else (self.tokens_per_s, "tokens")

    @property
    def impossible(self) -> str:
        """Returns the message that this is faster than the devices can be; "" for a believable forecast."""
        tflops = self.flops / self.step_s / self.world_size / 1e12
        if tflops <= self.best_tflops * ROUNDING:
            return ""
        return (
            f"a step of {self.step_s:.3g} s would compute {tflops:.4g} TFLOP/s on each device, whose best known "
            f"product computes {self.best_tflops:.4g}: a defect of shardwise's forecast, please report it with the task"
        )

    def cost_per_million(self, price: float) -> tuple[float, str]:
        """Returns (cost of a million, "samples" or "tokens") at `price` for a device and hour."""
        rate, what = self.rate
        return price * self.world_size / 3600 / rate * 1e6, what

    def fits(self, capacity: float) -> bool:
        """Whether the fullest rank fits in `capacity` bytes, and its tiers in the host's room where that is known."""
        return self.needed_bytes <= capacity and not self.room.lacks

    def shortage(self, capacity: float) -> str:
        """Returns what a device of `capacity` bytes, or its host, has too little of; "" where all fits."""
        lacks = [self.room.line(tier) for tier in self.room.lacks]
        if self.needed_bytes > capacity:
            lacks.insert(0, f"{self.needed_bytes / 1e9:.1f} GB of {capacity / 1e9:.1f} GB")
        return "; ".join(lacks)

    @property
    def worst(self) -> MemoryLedger:
        """Returns the memory of the stage that allocates most."""
        return max(self.memory, key=lambda ledger: ledger.allocated)

    @property
    def needed_bytes(self) -> float:
        """Returns the bytes that a device needs: reserved on the fullest rank, and the driver's context."""
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
