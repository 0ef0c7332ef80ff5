"""Memory of one rank: the engine's account, and the process's peak where the device keeps none."""

from __future__ import annotations

import sys

from shardwise.engine.engine import Engine


def memory_of(engine: Engine) -> dict[str, int]:
    """Bytes by kind; `peak` on a GPU, `process peak` (all of the process that was resident) on a CPU."""
    found = {name: count for name, count in engine.memory().items() if count is not None}
    if "peak" not in found:
        peak = process_peak()
        if peak is not None:
            found["process peak"] = peak
    return found


def process_peak() -> int | None:
    """The largest resident size of this process so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
