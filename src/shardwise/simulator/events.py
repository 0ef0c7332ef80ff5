"""A discrete-event simulation of streams (`run`), in which overlap follows from dependencies alone.

An op runs on one stream, in the order of issue, once all ops that it depends on are done. While any communication
stream is busy, compute is slowed by `contention` (NCCL's kernels take part of the device's units and bandwidth).

    compute   | f0 | f1 | f2 | b2 | b1 | b0 |  opt |
    link 0       g1   g2        r2   r1   r0              time ->
"""

from __future__ import annotations

from dataclasses import dataclass, field

CONTENTION = 0.08  # compute is this much slower beside a collective (assumed; `probe` measures it where it can)
COMPUTE = "compute"


@dataclass
class StreamOp:
    """One piece of work, which takes `seconds` on `stream`, after the ops at the indexes `after` of the list."""

    name: str
    stream: str  # "compute", or the name of a communication stream
    seconds: float
    after: list[int] = field(default_factory=list)
    start: float = 0.0  # seconds from the beginning; set by `run`
    end: float = 0.0


def run(ops: list[StreamOp], contention: float = CONTENTION) -> float:
    """Sets `start` and `end` of each op and returns the seconds until all are done.

    contention  fraction by which compute is slower while any other stream is busy (0.08: takes 1.08 times as long)

    Raises `ValueError` if an op depends on a later one.
    """
    queues: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        queues.setdefault(op.stream, []).append(index)
        if any(before >= index for before in op.after):
            raise ValueError(f"op {op.name} depends on a later one")
    heads = dict.fromkeys(queues, 0)
    running: dict[str, tuple[int, float]] = {}  # stream -> (op, work left)
    done = [False] * len(ops)
    now, left = 0.0, len(ops)
    while left:
        for stream, queue in queues.items():
            while stream not in running and heads[stream] < len(queue):
                index = queue[heads[stream]]
                if not all(done[before] for before in ops[index].after):
                    break
                heads[stream] += 1
                ops[index].start = now
                running[stream] = (index, ops[index].seconds)
        busy = any(stream != COMPUTE for stream in running)
        speed = {s: 1.0 / (1.0 + contention) if s == COMPUTE and busy else 1.0 for s in running}
        step = min(work / speed[s] for s, (_, work) in running.items())
        now += step
        for stream, (index, work) in list(running.items()):
            remaining = work - step * speed[stream]
            # a remainder this small is rounding error, not work
            if remaining <= 1e-12:
                ops[index].end, done[index] = now, True
                del running[stream]
                left -= 1
            else:
                running[stream] = (index, remaining)
    return now
