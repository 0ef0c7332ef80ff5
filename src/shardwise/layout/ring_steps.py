"""Collectives around a ring, step by step, as data and pictures for `show ring` and the docs. Runs nothing.

    all_reduce       = reduce_scatter, then all_gather      2(n-1) steps, 2(n-1)/n of the bytes
    reduce_scatter     pieces travel around and are added     n-1 steps,   (n-1)/n
    all_gather         pieces travel around                   n-1 steps,   (n-1)/n
    broadcast          rank 0's pieces follow each other      2(n-1) steps, all of the bytes for all ranks but two
    all_to_all         in step s each rank sends to the s-th after it  n-1 steps, (n-1)/n

Pure arithmetic, for people: backends choose among rings, trees and others by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import InputError, did_you_mean

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
WHAT = {
    "all_reduce": "every rank ends with the sum of all",
    "reduce_scatter": "each rank ends with one piece of the sum of all",
    "all_gather": "every rank ends with the pieces of all",
    "broadcast": "every rank ends with what rank 0 had",
    "all_to_all": "each rank ends with the piece that every other had for it",
}
Contents = tuple[tuple[frozenset[int], ...], ...]  # rank, piece -> ranks whose values it has or sums; empty: nothing


@dataclass(frozen=True)
class Send:
    """One message, a piece (1/n of the tensor's bytes) from a rank to another."""

    source: int  # rank
    target: int  # rank
    piece: int


@dataclass(frozen=True)
class RingStep:
    """Messages that are sent at the same time, and what every rank has after them."""

    sends: tuple[Send, ...]
    contents: Contents


@dataclass(frozen=True)
class Ring:
    """The steps of collective `op` over `ranks` ranks."""

    op: str
    ranks: int
    start: Contents  # what each rank has before the first step
    steps: tuple[RingStep, ...]

    def received(self) -> list[float]:
        """Returns, for each rank, the bytes that it receives, as a multiple of the tensor's bytes."""
        count_by_rank = [0] * self.ranks
        for step in self.steps:
            for send in step.sends:
                count_by_rank[send.target] += 1
        return [count / self.ranks for count in count_by_rank]


def ring(op: str, ranks: int) -> Ring:
    """Returns the `Ring` of collective `op` (of `COLLECTIVES`); `InputError` for another, or fewer than two ranks."""
    if op not in COLLECTIVES:
        known = ", ".join(COLLECTIVES)
        raise InputError(f"ring: no collective {op!r} (known: {known}){did_you_mean(op, list(COLLECTIVES))}")
    if ranks < 2:
        raise InputError(f"ring: a collective needs at least 2 ranks, got {ranks}")
    # what a rank has of a piece is the set of ranks whose values are in it: sums are unions
    n, every = ranks, range(ranks)
    contents = [[frozenset(_at_first(op, rank, piece)) for piece in every] for rank in every]
    start, steps = _frozen(contents), []
    for sends in _sends(op, n):
        # all of it before any is written: messages of one step go at the same time
        arriving = [(send, contents[send.source][send.piece]) for send in sends]
        for send, values in arriving:
            if op == "all_to_all":  # a receiver's pieces are indexed by the rank that they came from
                contents[send.target][send.source] = frozenset({send.source})
            else:
                contents[send.target][send.piece] = contents[send.target][send.piece] | values
        steps.append(RingStep(tuple(sends), _frozen(contents)))
    return Ring(op, n, start, tuple(steps))


def _at_first(op: str, rank: int, piece: int) -> set[int]:
    """Returns the ranks whose values of a piece this rank has before the first step."""
    if op in ("all_gather", "all_to_all"):
        return {rank} if piece == rank else set()
    if op == "broadcast":
        return {0} if rank == 0 else set()
    return {rank}


def _frozen(contents: list[list[frozenset[int]]]) -> Contents:
    return tuple(tuple(row) for row in contents)


def _sends(op: str, n: int) -> list[list[Send]]:
    """Returns, for each step, its messages, `Send(from rank, to rank, piece)`, of `op` over `n` ranks."""
    every = range(n)
    scatter = [[Send(r, (r + 1) % n, (r - s - 1) % n) for r in every] for s in range(n - 1)]
    gather = [[Send(r, (r + 1) % n, (r - s) % n) for r in every] for s in range(n - 1)]
    # along a chain, piece by piece: rank r sends the piece that it received a step before
    if op == "broadcast":
        return [[Send(r, r + 1, s - r) for r in range(n - 1) if 0 <= s - r < n] for s in range(2 * n - 2)]
    # in step s each rank sends to the one s places further, so that no two send to the same
    if op == "all_to_all":
        return [[Send(r, (r + s) % n, (r + s) % n) for r in every] for s in range(1, n)]
    return {"all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": gather}[op]


def as_text(drawn: Ring) -> str:
    """Returns every step as a table: a row for each rank, a column for each piece, the ranks whose values it has."""
    most = max(drawn.received())
    lines = [
        f"{drawn.op} over {drawn.ranks} ranks: {WHAT[drawn.op]}",
        f"{len(drawn.steps)} steps; a rank receives at most {most:.3g} of the tensor's bytes",
        *_table("at first", (), drawn.start),
    ]
    for number, step in enumerate(drawn.steps, 1):
        lines += _table(f"step {number}", step.sends, step.contents)
    return "\n".join(lines)


def _table(title: str, sends: tuple[Send, ...], values_of: Contents) -> list[str]:
    """Returns the lines of one step as text: its messages, then what each rank has of each piece."""
    wide = max(4, len(values_of) + 1)
    messages = "  ".join(f"{s.source}→{s.target}:{_letter(s.piece)}" for s in sends)
    head = " " * 8 + "".join(f"{_letter(piece):<{wide}}" for piece in range(len(values_of)))
    lines = ("".join(f"{_ranks(values):<{wide}}" for values in row) for row in values_of)
    rows = [f"  rank {rank} " + line for rank, line in enumerate(lines)]
    return ["", f"{title}  {messages}".rstrip(), head, *rows]


def _letter(piece: int) -> str:
    return chr(ord("a") + piece) if piece < 26 else str(piece)


def _ranks(values: frozenset[int]) -> str:
    return "".join(map(str, sorted(values))) or "."


# --- as a picture that steps

BOX, GAP, TOP, SECONDS = 44, 14, 46, 1.4


def as_svg(drawn: Ring) -> str:
    """Returns an SVG that plays the steps in a loop, without a script; a darker box has the values of more ranks."""
    n, frames = drawn.ranks, [RingStep((), drawn.start), *drawn.steps]
    wide, high = 90 + n * BOX + 150, TOP + n * (BOX + GAP) + 10
    whole = SECONDS * (len(frames) + 1)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' font-family='sans-serif' font-size='13'>",
        f"<rect width='{wide}' height='{high}' fill='#fff'/>",
    ]
    for rank in range(n):
        parts.append(f"<text x='10' y='{_y(rank) + 27}'>rank {rank}</text>")
    for at, frame in enumerate(frames):
        last = at == len(frames) - 1
        title = "at first" if at == 0 else f"step {at} of {len(frames) - 1}"
        parts.append(f"<g visibility='{'visible' if at == 0 else 'hidden'}'>{_shown(at, last, len(frames), whole)}")
        parts.append(f"<text x='10' y='22' font-weight='bold'>{drawn.op}: {title}</text>")
        parts += [_boxes(rank, row, n) for rank, row in enumerate(frame.contents)]
        parts += [_arrow(send, n) for send in frame.sends]
        parts.append("</g>")
    return "".join([*parts, "</svg>\n"])


def _shown(at: int, last: bool, frames: int, whole: float) -> str:
    """Returns the SVG animation that shows frame `at` of `frames` in its part of the loop of `whole` seconds.

    last  Whether it is the last frame, which stays twice as long
    """
    begin, end = at / (frames + 1), 1.0 if last else (at + 1) / (frames + 1)
    times = [0.0, begin, end, 1.0]
    values = "hidden;visible;hidden;hidden"
    if at == 0:
        times, values = [0.0, end, 1.0], "visible;hidden;hidden"
    elif last:
        times, values = [0.0, begin, 1.0], "hidden;visible;visible"
    keys = ";".join(f"{time:.4f}" for time in times)
    return (
        f"<animate attributeName='visibility' values='{values}' keyTimes='{keys}' dur='{whole:.1f}s' "
        "calcMode='discrete' repeatCount='indefinite'/>"
    )


def _y(rank: int) -> int:
    return TOP + rank * (BOX + GAP)


def _boxes(rank: int, row: tuple[frozenset[int], ...], n: int) -> str:
    """Returns SVG: a box for each piece that a rank has, darker with the number of ranks whose values are in it."""
    boxes = []
    for piece, values in enumerate(row):
        shade = 1 - 0.75 * len(values) / n if values else 1.0
        colour = f"rgb({round(255 * shade)},{round(230 * shade + 25)},255)" if values else "#f4f4f4"
        x = 80 + piece * BOX
        boxes.append(
            f"<rect x='{x}' y='{_y(rank)}' width='{BOX - 4}' height='{BOX - 4}' fill='{colour}' stroke='#789'/>"
            f"<text x='{x + BOX / 2 - 2}' y='{_y(rank) + 25}' text-anchor='middle'>{_ranks(values)}</text>"
        )
    return "".join(boxes)


def _arrow(send: Send, n: int) -> str:
    """Returns SVG: an arrow beside the boxes from a rank to another, with the piece's letter."""
    x = 80 + n * BOX + 10
    start, end = _y(send.source) + BOX / 2, _y(send.target) + BOX / 2
    away = abs(send.target - send.source)
    out = x + 24 + 12 * away
    return (
        f"<path d='M{x} {start:.0f} C{out} {start:.0f} {out} {end:.0f} {x + 6} {end:.0f}' fill='none' stroke='#c50'/>"
        f"<path d='M{x} {end:.0f} l8 -4 v8 z' fill='#c50'/>"
        f"<text x='{x + 12 + 8 * away}' y='{(start + end) / 2 + 4:.0f}' fill='#c50'>{_letter(send.piece)}</text>"
    )
