"""Memory of one rank of a run: by the engine's account, and the process's peak where the device keeps none."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from shardwise.engine.engine import Engine

KEPT = ("parameters", "gradients", "optimizer")
REST = "activations and buffers, at the peak"
TIMES, LEAST_BYTES = 1.25, 2**26  # by which the fullest rank has more than the emptiest, for it to be told


def memory_of(engine: Engine) -> dict[str, int]:
    """Returns bytes by kind; `peak` on a GPU, `process peak` (all of the process that was resident) on a CPU."""
    bytes_by_kind = {name: count for name, count in engine.memory().items() if count is not None}
    if "peak" not in bytes_by_kind:
        peak = process_peak()
        if peak is not None:
            bytes_by_kind["process peak"] = peak
    return bytes_by_kind


def process_peak() -> int | None:
    """Returns the largest resident size of this process so far, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def imbalance(ranks: Sequence[Mapping[str, int]]) -> str:
    """Returns a sentence: which rank needs most memory, how much more than another, of what; "" where all are alike.

    ranks   what `memory_of` says of each
    """
    classes = [_classes(by_kind) for by_kind in ranks]
    totals = [sum(by_kind.values()) for by_kind in classes]
    most, least = (chosen(range(len(totals)), key=totals.__getitem__) for chosen in (max, min))
    # ranks are never alike to the byte: only a real difference is told
    if totals[most] < TIMES * totals[least] or totals[most] - totals[least] < LEAST_BYTES:
        return ""
    more = {kind: size - classes[least][kind] for kind, size in classes[most].items()}
    differences = [
        f"{kind} {classes[most][kind] / 1e6:,.0f} against {classes[least][kind] / 1e6:,.0f} MB"
        for kind in sorted(more, key=lambda kind: -abs(more[kind]))
        # kinds that differ little are left out: the sentence names what the difference is made of
        if abs(more[kind]) > (totals[most] - totals[least]) / 10
    ]
    return (
        f"memory is uneven: rank {most} needs {totals[most] / 1e6:,.0f} MB and rank {least} "
        f"{totals[least] / 1e6:,.0f} MB: {', '.join(differences)}"
    )


def _classes(bytes_by_kind: Mapping[str, int]) -> dict[str, int]:
    """Returns bytes by class, which add up to the rank's peak."""
    kept = {kind: bytes_by_kind.get(kind, 0) for kind in KEPT}
    peak = bytes_by_kind.get("peak") or bytes_by_kind.get("process peak") or 0
    return {**kept, REST: max(0, peak - sum(kept.values()))}
