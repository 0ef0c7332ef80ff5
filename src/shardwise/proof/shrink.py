"""A small proof of a large plan: the same structure with the least ranks, blocks and samples that keep it.

    dp_replicate, dp_shard above 1   2; dp_shard 3 where the plan's cuts are uneven and 2 would be even
    accumulate above 1               2
    pp above 2                       2, with as many stages on each rank and as many micro-batches as stages
    repeated blocks of one shape     the first two, or one for each pipeline stage; all where stages= names some
    samples                          two for each rank and micro-batch, and one more where the plan's batch is uneven

What it does not cover is printed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.layout import Plan
from shardwise.proof.settings import Settings, global_batch
from shardwise.step.batching import samples_in, slice_samples
from shardwise.task import Task
from shardwise.task_names import resolve_task
from shardwise.trace.blocks import find_blocks

KEPT_BLOCKS = 2


@dataclass(frozen=True)
class Shrunk:
    """What was made smaller, and what the small proof shows of the large plan."""

    plan: Plan
    task: Any  # a zero-argument callable, for the ranks
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _SmallTask:
    """Makes the small task on each rank from the original reference."""

    reference: Any
    samples: int
    kept_blocks: int  # 0: all

    def __call__(self) -> Task:
        task = resolve_task(self.reference)
        model = _Shallow(task.model, self.kept_blocks) if self.kept_blocks else task.model
        return task.with_(model=model, batch=_FirstSamples(task, self.samples), data=None)


@dataclass(frozen=True)
class _FirstSamples:
    task: Task
    samples: int

    def __call__(self, step: int) -> Any:
        batch = global_batch(self.task, Settings(batch_samples=self.samples), step)
        return slice_samples(batch, 0, min(self.samples, samples_in(batch)))


@dataclass(frozen=True)
class _Shallow:
    model: Any
    kept_blocks: int

    def __call__(self) -> nn.Module:
        module = self.model()
        cut_depth(module, self.kept_blocks)
        return module


def cut_depth(module: nn.Module, kept_blocks: int = KEPT_BLOCKS) -> list[str]:
    """Keep the first blocks of each list of equal ones; returns what was cut, in words."""
    cut = []
    parents = dict.fromkeys(path.rpartition(".")[0] for path in find_blocks(module).paths)
    for parent in parents:
        container = module.get_submodule(parent)
        if not isinstance(container, nn.ModuleList | nn.Sequential) or len(container) <= kept_blocks:
            continue
        kinds = {(type(b), tuple((n, p.shape) for n, p in b.named_parameters())) for b in container}
        if len(kinds) == 1:
            cut.append(f"{parent}: {len(container)} blocks -> {kept_blocks}")
            for index in reversed(range(kept_blocks, len(container))):
                del container[index]
    return cut


def _small_degree(plan: Plan, axis: str, uneven: bool) -> int:
    degree = getattr(plan, axis)
    if degree == 1:
        return 1
    return 3 if axis == "dp_shard" and uneven and degree > 2 else 2


def _has_uneven_cut(module: nn.Module, plan: Plan) -> bool:
    """Whether a parameter has no dim that dp_shard divides, so that ZeRO-3 cuts it unevenly."""
    return plan.zero == 3 and any(
        not any(size and size % plan.dp_shard == 0 for size in param.shape) for param in module.parameters()
    )


def shrink(reference: Any, task: Task, plan: Plan) -> Shrunk:
    """The small plan and task, with notes on what they keep and what they leave out."""
    from shardwise.trace.deferred import build

    module = build(task.model, 0).module
    batch = global_batch(task, Settings(), 0)
    uneven_batch = samples_in(batch) % (plan.data_ranks * plan.step_microbatches) != 0
    ep = (
        next(n for n in range(2, plan.ep + 1) if plan.ep % n == 0) if plan.ep > 1 else 1
    )  # the experts' number allows it
    shard = _small_degree(plan, "dp_shard", _has_uneven_cut(module, plan))
    small = plan.with_(
        dp_replicate=_small_degree(plan, "dp_replicate", False),
        dp_shard=shard if ep == 1 else ep * (1 if plan.dp_shard == plan.ep else 2),
        ep=ep,
        accumulate=min(plan.accumulate, 2),
        zero=plan.zero,
    )
    if plan.pp > 1 and not plan.stages:
        pp = min(plan.pp, 2)
        small = small.with_(pp=pp, microbatches=pp * plan.stages_per_rank)
    samples = min(2 * small.data_ranks * small.step_microbatches + uneven_batch, samples_in(batch))
    kept_blocks = max(KEPT_BLOCKS, small.pp * small.stages_per_rank) if not plan.stages else 0
    cut = cut_depth(module, kept_blocks) if kept_blocks else []
    works = bool(cut) and _runs(module, task, slice_samples(batch, 0, 1))
    notes = [f"shrunk: plan {plan} -> {small}; {samples} samples{' (uneven, as in the plan)' if uneven_batch else ''}"]
    if works:
        notes += [f"shrunk: {what}" for what in cut]
    elif cut:
        notes.append("depth was kept: the module does not run with fewer blocks")
    notes.append(
        "covered: every kind of block, cut, collective and its order, at the small degrees. Not covered: blocks beyond "
        "the first ones of a list, cuts that only the large degrees make uneven, rounding, memory and speed"
    )
    return Shrunk(small, _SmallTask(reference, samples, kept_blocks if works else 0), tuple(notes))


def _runs(module: nn.Module, task: Task, batch: Any) -> bool:
    """Whether the shallow module runs, on shapes alone."""
    meta = module.to("meta")
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), batch)
    args, kwargs = task.inputs(moved)
    try:
        with torch.no_grad():
            meta(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError):
        return False
    return True
