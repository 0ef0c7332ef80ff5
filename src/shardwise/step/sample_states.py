"""States that a forward keeps of each sample for the next micro-batch: each rank's are those of its own samples."""

from __future__ import annotations

from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share, cut
from shardwise.step.state import RankState


def meet_kept(state: RankState, part: Share) -> None:
    """Raise `RefusedPlan` where a rank would go on from states of other samples than one process.

    Where a micro-batch has another number of samples than the last one, a forward begins with new states; on a rank
    that has as many as before it would not.
    """
    last, state.last_total = state.last_total, part.total
    # nothing to go on from at the start, or where one process has as many samples as before
    if not state.keeps_samples or state.data_ranks == 1 or last in (0, part.total):
        return
    for rank in range(state.data_ranks):
        before, now = (cut(total, state.data_ranks, rank) for total in (last, part.total))
        if before[1] - before[0] == now[1] - now[0]:
            raise RefusedPlan(
                f"the forward keeps '{state.keeps_samples}' of each sample for the next micro-batch, and after one of "
                f"{last} samples comes one of {part.total}: rank {rank} of {state.data_ranks} has as many as before, "
                "and would go on from states of other samples: give batches and micro-batches of one size (drop_last)"
            )
