"""Memory of one rank of a run: what the engine counts, and the peak of the device or else of the process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from shardwise.engine.engine import Engine

KEPT = ("parameters", "gradients", "optimizer")  # kinds that are there all the time
REST = "activations and buffers, at the peak"
TIMES, LEAST_BYTES = 1.25, 2**26  # least ratio and difference of two ranks that are reported


def memory_of(engine: Engine) -> dict[str, int]:
    """Returns bytes by kind, with "peak" on a GPU, or "process peak" (the largest resident size) on a CPU."""
    bytes_by_kind = {name: count for name, count in engine.memory().items() if count is not None}
    if "peak" not in bytes_by_kind:
        peak = process_peak()
        if peak is not None:
            bytes_by_kind["process peak"] = peak
    return bytes_by_kind


def process_peak() -> int | None:
    """Returns the largest resident size of this process so far, in bytes; None if the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def imbalance(ranks: Sequence[Mapping[str, int]]) -> str:
    """Returns a sentence on the ranks that need most and least memory and what of; "" if ranks are nearly equal.

    ranks   `memory_of` each rank
    """
    classes = [_classes(by_kind) for by_kind in ranks]
    totals = [sum(by_kind.values()) for by_kind in classes]
    most, least = (chosen(range(len(totals)), key=totals.__getitem__) for chosen in (max, min))
    # ranks are never equal to the byte, so only a real difference is reported
    if totals[most] < TIMES * totals[least] or totals[most] - totals[least] < LEAST_BYTES:
        return ""
    more = {kind: size - classes[least][kind] for kind, size in classes[most].items()}
    differences = [
        f"{kind} {classes[most][kind] / 1e6:,.0f} against {classes[least][kind] / 1e6:,.0f} MB"
        for kind in sorted(more, key=lambda kind: -abs(more[kind]))
        # kinds that differ little do not explain the difference
        if abs(more[kind]) > (totals[most] - totals[least]) / 10
    ]
    return (
        f"memory is uneven: rank {most} needs {totals[most] / 1e6:,.0f} MB and rank {least} "
        f"{totals[least] / 1e6:,.0f} MB: {', '.join(differences)}"
    )


def _classes(bytes_by_kind: Mapping[str, int]) -> dict[str, int]:
    """Returns bytes of each kind in `KEPT` and of the rest, which add up to the rank's peak."""
    kept = {kind: bytes_by_kind.get(kind, 0) for kind in KEPT}
    peak = bytes_by_kind.get("peak") or bytes_by_kind.get("process peak") or 0
    return {**kept, REST: max(0, peak - sum(kept.values()))}
