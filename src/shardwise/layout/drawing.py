"""Draw pipeline schedules as text and as SVG, with what is counted from them."""

from __future__ import annotations

from shardwise.layout.schedule_kinds import Op
from shardwise.layout.schedules import Schedule, Times


def as_text(schedule: Schedule, times: Times | None = None) -> str:
    """Returns the schedule as a text table, a row for each rank and a column for each unit of time, then `summary`.

    "F3" is micro-batch 3's forward on the rank's first stage, "f3" on its second, "F'3" on its third.
    """
    times = times or Times()
    done = schedule.timeline(times)
    unit = min(times.forward, times.input, times.weight)
    columns = round(max(end for _, end in done.values()) / unit)
    lines = []
    # room for the kind and the largest number, and for the prime of a rank's third stage
    wide = len(str(schedule.microbatches - 1)) + 1 + (schedule.stages > 2 * schedule.ranks)
    for rank, row in enumerate(schedule.rows):
        cells = ["." + " " * (wide - 1)] * columns
        for op in row:
            start, end = (round(t / unit) for t in done[op])
            # an op of two units fills two cells
            cells[start:end] = [_label(schedule, op).ljust(wide)] * (end - start)
        lines.append(f"rank {rank}  " + " ".join(cells).rstrip())
    return "\n".join([*lines, "", *summary(schedule, times)])


def _label(schedule: Schedule, op: Op) -> str:
    """Returns an op as `as_text` writes it, such as "F3"."""
    chunk = schedule.stages_of(schedule.owner[op.stage]).index(op.stage)
    kind = op.kind.lower() if chunk % 2 else op.kind
    return f"{kind}{chr(39) * (chunk // 2)}{op.microbatch}"


def summary(schedule: Schedule, times: Times | None = None) -> list[str]:
    """Returns lines of text: the schedule's sizes, the share of time that ranks wait, forwards held by each rank."""
    per_rank = schedule.stages // schedule.ranks
    of = "" if per_rank == 1 else f" of 1/{per_rank} of a rank's layers each"
    return [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches",
        f"ranks wait {schedule.bubble(times):.1%} of the time, counted from the table with equal stages",
        f"forwards held for their backward, by rank: {', '.join(map(str, schedule.live()))}{of}",
    ]


_COLOURS = {"F": "#9ecae1", "B": "#fdd0a2", "I": "#fdae6b", "W": "#a1d99b"}


def as_svg(schedule: Schedule, times: Times | None = None) -> str:
    """Returns the table as an SVG picture: a row for each rank, a box for each op, `summary` below."""
    done = schedule.timeline(times)
    end_of_all = max(end for _, end in done.values())
    wide, high, left = 26.0, 26.0, 60.0
    width, height = left + wide * end_of_all + 10, high * schedule.ranks + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for rank, row in enumerate(schedule.rows):
        top = high * rank + 5
        parts.append(f'<text x="4" y="{top + 17:.0f}">rank {rank}</text>')
        for op in row:
            start, end = done[op]
            chunk = schedule.stages_of(rank).index(op.stage)
            border = "#444" if chunk % 2 == 0 else "#b22222"
            x, size = left + wide * start, wide * (end - start)
            parts.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{size - 1:.1f}" height="{high - 4:.1f}" '
                f'fill="{_COLOURS[op.kind]}" stroke="{border}"><title>{op}</title></rect>'
                f'<text x="{x + size / 2:.1f}" y="{top + 15:.1f}" text-anchor="middle">{_label(schedule, op)}</text>'
            )
    for place, line in enumerate(summary(schedule, times)):
        parts.append(f'<text x="4" y="{high * schedule.ranks + 22 + 15 * place:.0f}">{line}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
