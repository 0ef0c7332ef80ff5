"""What a process met before changes neither the collectives nor the bits of a run: plans of one model in any order."""

from __future__ import annotations

import random
from typing import Any

import torch.distributed as dist
from pipeline_tasks import hf_mistral
from torch import nn

from shardwise import parallelize
from shardwise.digest import digest
from shardwise.ranks import RankPool

PLANS = ["tp=2", "cp=2", "dp_shard=2,zero=3"]
KEPT: list[nn.Module] = []  # of an earlier run, which nobody has collected yet


def _of_a_past() -> None:
    """Leaves behind what a model with cut positions does, and one with weights in shares; sends nothing."""
    from shardwise.parallel.sequence import hf_attention
    from shardwise.part.parameters import CUT_MODULES
    from shardwise.trace.caches import caches_of

    KEPT.append(nn.Linear(2, 2))
    CUT_MODULES.add(KEPT[-1])
    hf_attention.install()
    caches_of(hf_mistral().model())


def bits_of(plans: list[str], past: int | None) -> dict[str, Any]:
    """Returns, by plan, losses and weights of two steps, to the bit; rank `past` has met something else before."""
    if dist.get_rank() == past:
        _of_a_past()
    results = {}
    for plan in plans:
        task = hf_mistral()
        engine = parallelize(task, plan, device="cpu")
        losses = [engine.step(task.batch(step)).loss for step in range(2)]
        results[plan] = losses, {name: digest(value) for name, value in engine.full_parameters()}
    return results


def test_plans_of_one_model_have_the_same_bits_in_any_order_and_after_any_past() -> None:
    orders = [PLANS, random.Random(1).sample(PLANS, len(PLANS))]
    runs = []
    for order, past in zip(orders, (None, 1), strict=True):
        with RankPool() as own:
            runs.append(own.run(bits_of, 2, order, past, timeout_s=240))
    first = runs[0][0]
    assert all(results == first for results in (*runs[0], *runs[1]))
