"""`Speed`: what a step's samples and seconds come to: samples or tokens a second, FLOP/s of each rank, MFU."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.observe.flops import Flops


@dataclass(frozen=True)
class Speed:
    """Converts samples per second into the units that are shown: tokens, FLOP/s, MFU."""

    unit: str  # "tokens" | "samples"
    per_sample: int  # of the unit
    flops: Flops
    peak: float | None  # FLOP/s of one device
    ranks: int

    def of(self, samples: int, seconds: float) -> dict[str, float]:
        """Returns {"samples_per_s" or "tokens_per_s", and where known "flops_per_s_per_rank", "mfu"}."""
        rate = samples / max(seconds, 1e-9)
        found = {f"{self.unit}_per_s": rate * self.per_sample}
        if self.flops.per_sample is not None:
            found["flops_per_s_per_rank"] = rate * self.flops.per_sample / self.ranks
            if self.peak is not None:
                found["mfu"] = found["flops_per_s_per_rank"] / self.peak
        return found
