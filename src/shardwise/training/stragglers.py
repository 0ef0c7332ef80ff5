"""Finds ranks that work longer than others between collectives, and names each once, with the phase of the step.

A rank's own time (guard/records) is the time of its steps without its waits in collectives. It is compared, phase by
phase and for the whole step, with the median of the ranks that do the same work, those of its pipeline stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median_low

from shardwise.engine.engine import Engine
from shardwise.guard.points import PHASES, record

TIMES = 2.0  # a slow rank needs more than so many times the median
LOOKS = 5  # consecutive comparisons in which a rank must be slow
LEAST_S = 0.005  # seconds a step: below it, other work of the host decides
COSTS = 0.05  # smallest excess over the median, as a fraction of the step's time, that gives a notice
# phases of a step in `guard.points`; each lasts until the next one begins
PHASE_NAMES = {name: phase.words for name, phase in PHASES.items() if phase.words}


class Stragglers:
    """Finder of slow ranks. Every rank has one, and all get the same rows. `named`: ranks that had a notice."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._own_s = dict.fromkeys(PHASE_NAMES, 0.0)
        self._slow: Counter[tuple[int, str]] = Counter()
        self.named: set[int] = set()

    def row(self, steps: int) -> list[float]:
        """Returns [pipeline stage, own seconds per step in each phase of `PHASE_NAMES`] since the last call.

        steps   number of steps since then
        """
        mine = record()
        now = {phase: mine.own_s.get(phase, 0.0) if mine is not None else 0.0 for phase in PHASE_NAMES}
        own = [max(0.0, now[phase] - self._own_s[phase]) / max(steps, 1) for phase in PHASE_NAMES]
        self._own_s = now
        return [float(self.engine.mesh.pp.index), *own]

    def look(self, rows: list[list[float]], step_s: float) -> None:
        """Adds a notice on each rank that has been slow `LOOKS` times in a row.

        rows     `row` of every rank, in rank order
        step_s   seconds per step since the last call, with waits
        """
        stages: dict[float, list[list[float]]] = defaultdict(list)
        # pipeline stages have unequal work, so a rank is compared only with ranks of its own stage
        for stage, *own in rows:
            stages[stage].append([*own, sum(own)])
        for rank, (stage, *own) in enumerate(rows):
            of_stage = list(zip(*stages[stage], strict=True))
            # phases before the whole step (""), so that a notice names the phase
            for what, mine, others in zip([*PHASE_NAMES, ""], [*own, sum(own)], of_stage, strict=True):
                self._judge(rank, what, mine, others, step_s)

    def _judge(self, rank: int, what: str, own: float, others: tuple[float, ...], step_s: float) -> None:
        """Counts how often in a row a rank was slow in a phase, and adds a notice at `LOOKS`.

        what     the phase; "": the whole step
        own      the rank's own seconds per step in it; `others`: those of all ranks of its stage
        """
        usual = median_low(others)  # with two ranks this is the faster one's time
        slow = len(others) > 1 and own > TIMES * usual and own > LEAST_S and own - usual > COSTS * step_s
        self._slow[rank, what] = self._slow[rank, what] + 1 if slow else 0
        if self._slow[rank, what] == LOOKS and rank not in self.named:
            self.named.add(rank)
            where = f" in {PHASE_NAMES[what]}" if what else ""
            self.engine.notices.append(
                f"rank {rank} is slow{where}: {1e3 * own:.0f} ms of its own work in a step, where the median is "
                f"{1e3 * usual:.0f} ms, and the others wait for it"
            )
