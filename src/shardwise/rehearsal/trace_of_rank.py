"""Rehearse one rank of a task that is cut: as a run does, anew until no unit's weights are read while it is at rest."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import InputError, RefusedPlan
from shardwise.part import forget
from shardwise.rehearsal.cut_module import ALIKE, Beside, CutRehearsal, Place
from shardwise.rehearsal.rank_row import Rehearsal
from shardwise.rehearsal.step_trace import ModulePath, as_real, untraced
from shardwise.simulator.counted import RankTrace


def trace_of(
    shares: CutRehearsal, tp: int, pp: int, sizes: Sequence[int], beside: Beside = ALIKE, place: Place = ()
) -> RankTrace:  # fmt: skip
    """Returns the trace of one rank of a task under cuts. Raises `InputError` for a module that cannot be traced.

    sizes   samples of each micro-batch; the last holds for those that follow
    beside  the rank's place in ep, and how many samples each rank there has
    place   along each axis that cuts positions
    """
    enclosed = shares.looks.enclosed.setdefault(shares.cuts.wrap, set())
    try:
        with as_real():
            while True:  # as a run does: all anew, until no unit's weights are read while it does not run
                rehearsal = Rehearsal(shares, tp, pp, sizes, beside, place)
                trace = rehearsal.run(enclosed)
                if not rehearsal.outside:
                    return trace
                enclosed |= rehearsal.outside
    except (InputError, RefusedPlan):
        raise
    except Exception as error:
        raise InputError(untraced(error, ModulePath())) from error
    finally:
        forget()  # a gathered tensor of this rehearsal is none of the next one's
