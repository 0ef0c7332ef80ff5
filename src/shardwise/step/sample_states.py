"""Check models that keep a state of each sample for the next micro-batch (truncated backpropagation through time)."""

from __future__ import annotations

from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share, cut
from shardwise.step.state import RankState


def meet_kept(state: RankState, part: Share) -> None:
    """Raise `RefusedPlan` if a rank would continue from a state of other samples than one process does.

    part  this rank's share of the micro-batch that runs next
    If the number of samples changes, one process begins with new states. A rank whose own number is unchanged would
    continue from the old ones.
    """
    last, state.last_total = state.last_total, part.total
    # no state at the start (`last` 0); and if the total is unchanged one process continues too
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
