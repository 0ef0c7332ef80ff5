"""Pipeline schedules as tables: for each rank the order of its actions, and how long the whole takes.

    F  forward of a chunk for a micro-batch      B  backward (for the input, where W is separate)
    W  backward for the weights

GPipe, 1F1B and interleaved 1F1B follow their papers (Huang et al. 2019; Narayanan et al. 2021). The zero-bubble
family (Qi et al. 2024) is made by one greedy rule: backward first, then forward while fewer than `limit` micro-batches
are kept, then weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import InputError

Action = tuple[str, int, int]  # kind, chunk on this rank, micro-batch
SPLIT = ("zbh1", "zbh2", "interleavedzb", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")


def stage_of(name: str, rank: int, chunk: int, ranks: int) -> int:
    """The model's stage that a rank's chunk holds: round robin, or down and up again for V shapes."""
    if name in V_SHAPED:
        return rank if chunk == 0 else 2 * ranks - 1 - rank
    return chunk * ranks + rank


def table(name: str, ranks: int, n_micro: int, chunks: int = 1, costs: tuple[float, float, float] = (1, 1, 1)) -> list[list[Action]]:
    """The order of actions of each rank. `costs`: relative time of F, B, W, for the greedy ones."""
    if name == "gpipe":
        forward = [("F", c, m) for c in range(chunks) for m in range(n_micro)]
        backward = [("B", c, m) for c in reversed(range(chunks)) for m in range(n_micro)]
        return [forward + backward for _ in range(ranks)]
    if name in ("1f1b", "none") or (name == "interleaved1f1b" and chunks == 1):
        return [_one_f_one_b(rank, ranks, n_micro) for rank in range(ranks)]
    if name == "interleaved1f1b":
        if n_micro % ranks:
            raise InputError(f"interleaved1f1b: {n_micro} micro-batches do not divide over {ranks} stages")
        return [_interleaved(rank, ranks, n_micro, chunks) for rank in range(ranks)]
    if name in SPLIT:
        limit = {"zbh1": ranks, "zbh2": 2 * ranks - 1, "interleavedzb": ranks, "zbv": ranks, "dualpipev": ranks + 1}[name]
        return _greedy(name, ranks, n_micro, 2 if name in V_SHAPED else chunks, costs, limit)
    raise InputError(f"no schedule {name!r}")


def _one_f_one_b(rank: int, ranks: int, n_micro: int) -> list[Action]:
    warm = min(ranks - rank - 1, n_micro)
    out: list[Action] = [("F", 0, m) for m in range(warm)]
    for m in range(n_micro - warm):
        out += [("F", 0, warm + m), ("B", 0, m)]
    return out + [("B", 0, m) for m in range(n_micro - warm, n_micro)]


def _interleaved(rank: int, ranks: int, n_micro: int, chunks: int) -> list[Action]:
    """Narayanan et al. 2021, section 2.2: groups of `ranks` micro-batches go through chunk after chunk."""
    total = n_micro * chunks

    def at(step: int, forward: bool) -> Action:
        group, inside = divmod(step, ranks * chunks)
        chunk, micro = divmod(inside, ranks)
        return ("F", chunk, group * ranks + micro) if forward else ("B", chunks - 1 - chunk, group * ranks + micro)

    warm = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
    out = [at(i, True) for i in range(warm)]
    for i in range(total - warm):
        out += [at(warm + i, True), at(i, False)]
    return out + [at(i, False) for i in range(total - warm, total)]


def _greedy(name: str, ranks: int, n_micro: int, chunks: int, costs: tuple[float, float, float], limit: int) -> list[list[Action]]:
    """List scheduling in simulated time with the relative costs."""
    import heapq

    f, b, w = (cost / chunks for cost in costs)
    stages = ranks * chunks
    where = {stage_of(name, r, c, ranks): (r, c) for r in range(ranks) for c in range(chunks)}
    ready_f = [[0.0 if stage == 0 else None for _ in range(n_micro)] for stage in range(stages)]
    ready_b: list[list[float | None]] = [[None] * n_micro for _ in range(stages)]
    next_f, next_b = [0] * stages, [0] * stages
    waiting_w: list[list[Action]] = [[] for _ in range(ranks)]
    kept, free = [0.0] * ranks, [0.0] * ranks
    out: list[list[Action]] = [[] for _ in range(ranks)]
    heap = [(0.0, r) for r in range(ranks)]
    mine = [sorted((stage for stage, (r, _) in where.items() if r == rank), reverse=True) for rank in range(ranks)]
    left = [3 * n_micro * chunks] * ranks
    while heap:
        now, rank = heapq.heappop(heap)
        if now < free[rank] or not left[rank]:
            continue
        choice = None
        for stage in mine[rank]:  # deepest first
            m = next_b[stage]
            if m < n_micro and ready_b[stage][m] is not None and ready_b[stage][m] <= now + 1e-9:  # type: ignore[operator]
                choice = ("B", stage, m)
                break
        if choice is None:
            for stage in mine[rank]:
                m = next_f[stage]
                # the last chunk may always go on: what it keeps is what lets others be freed
                room = kept[rank] < limit * chunks - 1e-9 or (chunks > 1 and stage == mine[rank][0])
                if m < n_micro and room and ready_f[stage][m] is not None and ready_f[stage][m] <= now + 1e-9:  # type: ignore[operator]
                    choice = ("F", stage, m)
                    break
        if choice is None and waiting_w[rank]:
            kind, chunk, m = waiting_w[rank].pop(0)
            out[rank].append((kind, chunk, m))
            kept[rank] -= 1
            free[rank] = now + w
            left[rank] -= 1
            heapq.heappush(heap, (free[rank], rank))
            continue
        if choice is None:
            continue  # woken again when something becomes ready
        kind, stage, m = choice
        chunk = where[stage][1]
        out[rank].append((kind, chunk, m))
        left[rank] -= 1
        end = now + (f if kind == "F" else b)
        free[rank] = end
        heapq.heappush(heap, (end, rank))
        if kind == "F":
            next_f[stage] += 1
            kept[rank] += 1
            target = (ready_f, stage + 1) if stage + 1 < stages else (ready_b, stage)
        else:
            next_b[stage] += 1
            waiting_w[rank].append(("W", chunk, m))
            target = (ready_b, stage - 1)
        if target[1] >= 0:
            target[0][target[1]][m] = end
            heapq.heappush(heap, (max(end, free[where[target[1]][0]]), where[target[1]][0]))
    if any(left):
        raise InputError(f"{name} with {ranks} ranks, {chunks} chunks and {n_micro} micro-batches cannot be scheduled")
    return out


@dataclass
class Played:
    """A schedule in time: the makespan, busy seconds of each rank, and (rank, kind, chunk, micro, start, end)."""

    seconds: float
    busy: list[float]
    actions: list[tuple[int, str, int, int, float, float]]
    in_flight: list[float]  # the most micro-batches kept at once, in units of one chunk

    @property
    def bubble(self) -> float:
        """Share of the makespan in which the busiest rank waits."""
        return 1.0 - max(self.busy) / self.seconds if self.seconds else 0.0


def play(
    name: str,
    orders: list[list[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    send: Sequence[float],
    *,
    blocking: bool = False,
) -> Played:
    """Run the table: seconds of each model stage, `send[s]` between stages s and s + 1.

    `blocking`: the sender's and the receiver's compute waits for each message (batched send and receive in one call).
    """
    ranks = len(orders)
    stages = len(forward)
    split = any(kind == "W" for order in orders for kind, _, _ in order)
    free = [0.0] * ranks
    done: dict[tuple[str, int, int], float] = {}
    pointer = [0] * ranks
    busy, kept, most = [0.0] * ranks, [0] * ranks, [0] * ranks
    actions: list[tuple[int, str, int, int, float, float]] = []
    waiting: dict[tuple[str, int, int], list[int]] = {}
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        order = orders[rank]
        while pointer[rank] < len(order):
            kind, chunk, micro = order[pointer[rank]]
            stage = stage_of(name, rank, chunk, ranks)
            need, wire = _needs(kind, stage, micro, stages, send)
            if need is not None and need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            ready = done[need] + wire if need is not None else 0.0
            start = max(free[rank], ready)
            seconds = {"F": forward, "B": backward, "W": weight}[kind][stage]
            if kind == "B" and not split:
                seconds += weight[stage]
            end = start + seconds
            sent = 0.0
            if blocking and kind != "W":
                after = stage if kind == "F" else stage - 1
                if 0 <= after < stages - 1:
                    sent = send[after]
            free[rank] = end + sent
            busy[rank] += seconds
            done[kind, stage, micro] = end
            actions.append((rank, kind, stage, micro, start, end))
            if kind == "F":
                kept[rank] += 1
                most[rank] = max(most[rank], kept[rank])
            elif kind == ("W" if split else "B"):
                kept[rank] -= 1
            pointer[rank] += 1
            todo += waiting.pop((kind, stage, micro), [])
    if any(pointer[r] < len(orders[r]) for r in range(ranks)):
        raise InputError(f"{name}: the schedule waits for itself")
    return Played(max(free), busy, actions, [float(n) for n in most])


def _needs(kind: str, stage: int, micro: int, stages: int, send: Sequence[float]) -> tuple[tuple[str, int, int] | None, float]:
    if kind == "F":
        return (("F", stage - 1, micro), send[stage - 1]) if stage else (None, 0.0)
    if kind == "W":
        return ("B", stage, micro), 0.0
    return (("B", stage + 1, micro), send[stage]) if stage + 1 < stages else (("F", stage, micro), 0.0)
