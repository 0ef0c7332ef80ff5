"""Names of the communicators that a rank of a plan creates on accelerators, one for each group of ranks it sends over.

    dp_shard=2,cp=2,tp=2    world . cp . tp . shard (dp_shard and cp) . gradients (the same ranks again)

Each takes memory outside torch's allocator and, with many ranks, seconds at the start. A group of all ranks is the
world's. tests/testing/test_nccl_order.py compares the names with the groups that ranks use.

What this does not do: count groups that do not follow from a plan, which are those that a task's own code makes, of a
stage that takes gradients within its forward (parallel/pipeline/stage_messages), of batch norms over samples beside cp
or domain.
"""

from __future__ import annotations

import math

from shardwise.layout.grid import AXES, INNER, Grid
from shardwise.layout.plan import Plan

# bytes of device memory, assumed: two neighbours' buffers (NCCL_BUFFSIZE 4 MiB, and those of its low-latency
# protocols) of about four channels; with more channels, as on NVLink, it is more
COMMUNICATOR_BYTES = 64e6


def communicators(plan: Plan) -> tuple[str, ...]:
    """Returns the names of the groups for which each rank creates a communicator, such as "world"; () for one rank."""
    if plan.world_size == 1:
        return ()
    degrees = dict(zip(AXES, Grid(plan).shape, strict=True))
    samples = ("dp_replicate", "dp_shard")
    inner = tuple(axis for axis in INNER if degrees[axis] > 1)
    together = {"data": samples, "shard": ("dp_shard", *inner)}
    apart = set(degrees)
    if inner:  # gradients are summed over positions too, so that groups of samples alone send nothing
        together = {"shard": together["shard"], "gradients": (*samples, *inner)}
        # only under zero replicas sum over a group of their own; else `gradients` includes them
        apart -= {"dp_shard", *([] if plan.zero and degrees["dp_shard"] > 1 else ["dp_replicate"])}
    made = ["world", *(axis for axis, degree in degrees.items() if axis in apart and 1 < degree < plan.world_size)]
    for name, axes in together.items():
        sizes = [degrees[axis] for axis in axes if degrees[axis] > 1]
        # of one axis its own group serves, of all ranks the world's
        if len(sizes) > 1 and math.prod(sizes) < plan.world_size:
            made.append(name)
    if plan.ep > 1:
        shards = degrees["dp_shard"] * math.prod(degrees[axis] for axis in inner) // plan.ep
        made += ["ep", *(["expert_shard"] if shards > 1 else [])]
        made += ["expert_data"] if degrees["dp_replicate"] > 1 else []  # else the same ranks, and nothing sent
    return tuple(made)
