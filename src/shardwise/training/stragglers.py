"""Name ranks that work longer than others between collectives, once each, with the phase. Times: guard/records.

A rank's own time is that of its steps without what it waited in collectives. It is compared, phase by phase and as a
whole, with the median of the ranks that do the same work: those of its pipeline stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median_low

from shardwise.engine.engine import Engine
from shardwise.guard.points import PHASES, record

TIMES = 2.0  # the median
LOOKS = 5  # in a row
LEAST_S = 0.005  # a step: below it, what a host does besides decides
COSTS = 0.05  # of a step's time that the others wait: less is not worth a word
# of a step, as `guard.points` names them, each until the next one begins
PHASE_NAMES = {name: phase.words for name, phase in PHASES.items() if phase.words}


class Stragglers:
    """Finds slow ranks from the rows of all ranks; each rank has one and sees the same rows."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._own_s = dict.fromkeys(PHASE_NAMES, 0.0)
        self._slow: Counter[tuple[int, str]] = Counter()
        self.named: set[int] = set()

    def row(self, steps: int) -> list[float]:
        """Returns [pipeline stage, seconds of own work per step by phase of `PHASE_NAMES`] since the last call."""
        mine = record()
        now = {phase: mine.own_s.get(phase, 0.0) if mine is not None else 0.0 for phase in PHASE_NAMES}
        own = [max(0.0, now[phase] - self._own_s[phase]) / max(steps, 1) for phase in PHASE_NAMES]
        self._own_s = now
        return [float(self.engine.mesh.pp.index), *own]

    def look(self, rows: list[list[float]], step_s: float) -> None:
        """Judge every rank by its `row`, in rank order; add a notice on a rank that was slow `LOOKS` times in a row.

        step_s   seconds of a step since the last look, waits and all
        """
        stages: dict[float, list[list[float]]] = defaultdict(list)
        # pipeline stages have unequal work, so a rank is compared only with ranks of its own stage
        for stage, *own in rows:
            stages[stage].append([*own, sum(own)])
        for rank, (stage, *own) in enumerate(rows):
            of_stage = list(zip(*stages[stage], strict=True))
            # a phase before the whole step, which it makes slow too
            for what, mine, others in zip([*PHASE_NAMES, ""], [*own, sum(own)], of_stage, strict=True):
                self._judge(rank, what, mine, others, step_s)

    def _judge(self, rank: int, what: str, own: float, others: tuple[float, ...], step_s: float) -> None:
        """Count how often in a row a rank was slow in a phase ("": the step), beside the `others` of its stage."""
        usual = median_low(others)  # of two ranks the other one's
        slow = len(others) > 1 and own > TIMES * usual and own > LEAST_S and own - usual > COSTS * step_s
        self._slow[rank, what] = self._slow[rank, what] + 1 if slow else 0
        if self._slow[rank, what] == LOOKS and rank not in self.named:
            self.named.add(rank)
            where = f" in {PHASE_NAMES[what]}" if what else ""
            self.engine.notices.append(
                f"rank {rank} is slow{where}: {1e3 * own:.0f} ms of its own work in a step, where the median is "
                f"{1e3 * usual:.0f} ms, and the others wait for it"
            )
