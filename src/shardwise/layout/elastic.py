"""Make a plan for fewer ranks (restarts): the data degrees shrink, everything else stays."""

from __future__ import annotations

import math

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.plan import Plan
from shardwise.layout.rules import check


def smaller(plan: Plan, ranks: int) -> Plan:
    """Returns the plan on the most ranks that are at most `ranks`, of several plans the one with the largest dp_shard.

    Samples, their order and the micro-batches stay the same, and so does what is trained, up to rounding. Raises
    `RefusedPlan` if the degrees that cannot shrink (tp, pp, cp, domain, and ep within dp_shard and cp) need more.
    """
    candidates: list[tuple[int, int, Plan]] = []
    for replicate in range(1, plan.dp_replicate + 1):
        for shard in range(1, plan.dp_shard + 1):
            try:
                candidate = plan.with_(dp_replicate=replicate, dp_shard=shard)
                check(candidate)
            except (InputError, RefusedPlan):  # degrees that do not go together, as a dp_shard that ep does not divide
                continue
            if candidate.world_size <= ranks:
                candidates.append((candidate.world_size, shard, candidate))
    if not candidates:
        # dp_shard's least multiple with which ep divides the ranks of dp_shard and those that cut positions
        least = plan.ep // math.gcd(plan.ep, plan.cut_positions)
        fixed = plan.world_size // plan.data_ranks
        raise RefusedPlan(
            f"plan {plan} cannot go on with {ranks} rank(s): its degrees beside dp_replicate and dp_shard need "
            f"{fixed * least} by themselves, and weights that are cut over them cannot be cut over fewer in a run"
        )
    return max(candidates, key=lambda row: row[:2])[2]  # most ranks; of those, most shards: the least memory on each
