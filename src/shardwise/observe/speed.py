"""`Speed`: converts a step's samples and seconds into samples or tokens per second, FLOP/s of each rank, and MFU."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.observe.flops import Flops


@dataclass(frozen=True)
class Speed:
    """Converts samples per second into the units that are shown: tokens, FLOP/s, MFU."""

    unit: str  # "tokens" | "samples"
    per_sample: int  # tokens of a sample, or 1
    flops: Flops
    peak: float | None  # FLOP/s of one device
    ranks: int

    def of(self, samples: int, seconds: float) -> dict[str, float]:
        """Returns the rates of `samples` (of all ranks) in `seconds`: {"samples_per_s" or "tokens_per_s": rate, ...}.

        Also "flops_per_s_per_rank" and "mfu" (0 to 1), if they are known.
        """
        rate = samples / max(seconds, 1e-9)
        found = {f"{self.unit}_per_s": rate * self.per_sample}
        if self.flops.per_sample is not None:
            found["flops_per_s_per_rank"] = rate * self.flops.per_sample / self.ranks
            if self.peak is not None:
                found["mfu"] = found["flops_per_s_per_rank"] / self.peak
        return found
