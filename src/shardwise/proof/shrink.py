"""Make a small proof of a large plan: the fewest ranks, blocks and samples that keep its structure.

    dp_replicate, dp_shard above 3   3, so that mistakes of sums or messages that pass a third rank show
    ep above 3                       the least divisor of 3 or more, so that ranks have the same number of experts
    accumulate above 3               3
    domain above 3 along a dim       the least number from 3 on that divides the field evenly, or not, as the plan's
    a field that is tiled            the least extents of 32 cells or more for each tile, with the same remainders by 32
                                     and the tiles, so that halvings reach odd sizes, and tiles differ, as in the plan
    pp above 3                       3, with as many stages on each rank, and more micro-batches than stages
    repeated blocks                  the first two of each program (`programs`), or as many as pipeline stages need
    samples                          two for each rank and micro-batch, and one more if the plan's batch is uneven

Blocks count as equal only if their programs are, which include buffers and backwards. The notes on what is covered
follow from what was really made smaller.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.engine.find_positions import field_dims, runs, tiled_sizes
from shardwise.errors import RefusedPlan, first_line
from shardwise.layout import Plan, check
from shardwise.proof.programs import programs_of
from shardwise.proof.settings import Settings, global_batch
from shardwise.step.batching import samples_in, slice_samples
from shardwise.task import Task
from shardwise.task_names import resolve_task
from shardwise.trace.blocks import find_blocks
from shardwise.trace.deferred import Built, build

KEPT_BLOCKS = 2  # of each program
MOST_RANKS = 3  # along an axis of data; along ep the least divisor of this or more
MOST_STAGES = 3  # ranks of a pipeline
MOST_ACCUMULATE = 3
MOST_TILES = 3  # along one dim
TILE = 32  # cells of a small field for each tile along a dim, at least: five halvings

Kept = Mapping[str, tuple[int, ...]]  # path of a list of blocks -> indices of the blocks that are kept
Corner = tuple[tuple[tuple[int, int], ...], ...]  # for each leaf of a batch: (dim, cells kept) of each spatial dim


@dataclass(frozen=True)
class Shrunk:
    """A small plan and task, and notes on what their proof covers of the large plan."""

    plan: Plan
    task: Any  # callable without arguments that makes the small `Task`, also on ranks
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _SmallTask:
    """Callable that makes the small task on each rank from the original reference."""

    reference: Any  # the original task, as `verify` got it
    samples: int  # of a batch
    kept: Kept
    corner: Corner = ()

    def __call__(self) -> Task:
        task = resolve_task(self.reference)
        model = _Shallow(task.model, self.kept) if self.kept else task.model
        return task.with_(model=model, batch=_FirstSamples(task, self.samples, self.corner), data=None)


@dataclass(frozen=True)
class _FirstSamples:
    task: Task
    samples: int
    corner: Corner = ()

    def __call__(self, step: int) -> Any:
        task, whole = self.task, getattr(self.task.data, "global_shape", ())
        region = next((tuple((0, size) for _, size in extents) for extents in self.corner if extents), ())
        if region and len(region) == len(whole):  # the source can read the corner without the whole field
            task = task.with_(data=_Corner(task.data, region))
        batch = global_batch(task, Settings(batch_samples=self.samples), step)
        return _corner_of(slice_samples(batch, 0, min(self.samples, samples_in(batch))), self.corner)


@dataclass(frozen=True)
class _Corner:
    """Source that reads one region, (start, stop) of each dim, of another source's fields."""

    source: Any
    region: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: list[int]) -> Any:
        return self.source.read(indices, self.region)


def _corner_of(batch: Any, corner: Corner) -> Any:
    """Returns a batch whose fields have only their first cells along each dim, as `corner` says."""
    leaves, spec = tree_flatten(batch)
    for place, extents in enumerate(corner):
        for dim, size in extents:
            leaves[place] = leaves[place].narrow(dim, 0, size)
        leaves[place] = leaves[place].contiguous() if extents else leaves[place]
    return tree_unflatten(leaves, spec)


@dataclass(frozen=True)
class _Shallow:
    model: Any
    kept: Kept

    def __call__(self) -> nn.Module:
        module = self.model()
        _cut(module, self.kept)
        return module


def _cut(module: nn.Module, kept: Kept) -> None:
    """Removes the blocks that are not kept from the module's lists."""
    for path, indices in kept.items():
        container: Any = module.get_submodule(path)
        for index in reversed(range(len(container))):  # from the end: deleting moves those behind
            if index not in indices:
                del container[index]


@dataclass
class _Depth:
    """Blocks that a small model keeps.

    kept      path of a list -> indices of its blocks that are kept; a list that is missing keeps all
    notes     sentences on what was kept
    left_out  phrases on what the small proof then does not cover
    """

    kept: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def shrink(reference: Any, task: Task, plan: Plan) -> Shrunk:
    """Returns a `Shrunk`: the small plan and task, with notes on what they cover and what they leave out.

    reference  the task as `verify` got it;  task  the same as a `Task`
    """
    built = build(task.model, 0)
    batch = global_batch(task, Settings(), 0)
    small = _small_plan(plan, samples_in(batch)).with_(domain=_small_tiles(task, plan, batch))
    uneven = samples_in(batch) % (plan.data_ranks * plan.step_microbatches) != 0
    samples = min(2 * small.data_ranks * small.step_microbatches + uneven, samples_in(batch))
    depth = _Depth(notes=["depth was kept: stages= names blocks"]) if plan.stages else _depth(built, task, small, batch)
    corner, field_notes = _small_field(task, small, slice_samples(batch, 0, 1), depth)
    count = f"{samples} samples{' (uneven, as in the plan)' if uneven else ''}"
    notes = [f"shrunk: plan {plan} -> {small}; {count}", *(f"shrunk: {what}" for what in [*field_notes, *depth.notes])]
    notes.append(_scope(plan, small, samples, samples_in(batch), depth))
    return Shrunk(small, _SmallTask(reference, samples, depth.kept, corner), tuple(notes))


# --- the plan


def _small_plan(plan: Plan, samples: int) -> Plan:
    """Returns the plan with at most three ranks along each axis; at most two of data if a batch has too few samples."""
    three = _of_ranks(plan, MOST_RANKS)
    return three if three.data_ranks <= samples else _of_ranks(plan, MOST_RANKS - 1)


def _of_ranks(plan: Plan, most: int) -> Plan:
    """Returns the plan with at most `most` ranks on each data axis, and small ep, pp and accumulate."""
    ep = next((n for n in range(MOST_RANKS, plan.ep + 1) if plan.ep % n == 0), plan.ep)
    least = ep // math.gcd(ep, plan.cut_positions)  # dp_shard is a multiple of it, so that ep divides the shard ranks
    small = plan.with_(
        dp_replicate=min(plan.dp_replicate, most),
        dp_shard=least * min(plan.dp_shard // least, most) if plan.dp_shard >= least else plan.dp_shard,
        ep=ep,
        accumulate=min(plan.accumulate, MOST_ACCUMULATE),
        zero=plan.zero,
    )
    return small if plan.pp == 1 or plan.stages else _small_pipeline(small)


def _small_tiles(task: Task, plan: Plan, batch: Any) -> tuple[int, ...]:
    """Returns the number of tiles along each dim: 3 or more where the plan has that, and as uneven as the plan's."""
    sizes = tiled_sizes(task, plan, batch) if plan.tiles > 1 else ()
    small = list(plan.domain)
    for place, (tiles, size) in enumerate(zip(plan.domain, sizes, strict=False)):
        like = (n for n in range(MOST_TILES, tiles) if (size % n == 0) == (size % tiles == 0))
        small[place] = next(like, tiles)
    return tuple(small)


def _small_field(task: Task, small: Plan, batch: Any, depth: _Depth) -> tuple[Corner, list[str]]:
    """Returns (corner of a batch that is kept, notes); adds to `depth.left_out`. () if fields keep their size."""
    dims = field_dims(task, batch) if small.tiles > 1 else ()
    leaves = tree_flatten(batch)[0]
    # all fields have the same extents of space: one of them tells
    sizes = next((tuple(leaf.shape[d] for d in along) for leaf, along in zip(leaves, dims, strict=False) if along), ())
    few = tuple(map(_small_extent, sizes, (*small.domain, *[1] * len(sizes))))
    # the fields are as small already
    if few == sizes:
        return (), []
    corner = tuple(tuple(zip(along, few, strict=True)) if along else () for along in dims)
    named, smaller = (" x ".join(map(str, extents)) for extents in (sizes, few))
    # a module may ask for its own number of cells (weights for each of them)
    if not runs(task, build(task.model, 0), _corner_of(batch, corner)):
        return (), [f"the field was kept: the module and its loss do not run on {smaller} cells of {named}"]
    depth.left_out.append(f"fields of {named}")
    return corner, [f"fields of {named} -> {smaller} cells (the same remainders by {TILE} and by the tiles)"]


def _small_extent(size: int, tiles: int) -> int:
    """Returns the least extent with the same remainders by `TILE` and `tiles` as `size`, from `TILE * tiles` on."""
    step, least = math.lcm(TILE, tiles), TILE * tiles
    return size - (size - least) // step * step if size > least else size


def _small_pipeline(plan: Plan) -> Plan:
    """Returns the plan with at most three pipeline ranks and the fewest micro-batches that its schedule takes."""
    pp = min(plan.pp, MOST_STAGES)
    for microbatches in range(min(pp * plan.stages_per_rank + 1, plan.microbatches), plan.microbatches + 1):
        small = plan.with_(pp=pp, microbatches=microbatches)
        try:
            check(small)
        except RefusedPlan:
            continue
        return small
    return plan


# --- the module


def _depth(built: Built, task: Task, small: Plan, batch: Any) -> _Depth:
    """Returns which blocks are kept: the first two of each program, and as many as there are stages."""
    module = built.module
    lists = _lists(module)
    if not lists:
        return _Depth()
    paths = [f"{path}.{index}" if path else str(index) for path, count in lists.items() for index in range(count)]
    # blocks of one program are repetitions, so a few of them stand for all
    try:
        programs = programs_of(built, paths, task.inputs, slice_samples(batch, 0, min(2, samples_in(batch))))
    except Exception as error:  # a forward that needs values raises any kind of error
        first = first_line(error)
        return _Depth(notes=[f"depth was kept: the forward cannot be followed on shapes alone ({first})"])
    stages = small.pp * small.stages_per_rank
    depth = _Depth()
    for path, count in lists.items():
        of = [programs[f"{path}.{index}" if path else str(index)] for index in range(count)]
        # one more where the blocks do not divide over the stages, so that the small plan's stages are uneven too
        wanted = stages + (count % stages != 0) if stages > 1 else 0
        indices = _stay(of, wanted)
        if len(indices) < count:
            depth.kept[path] = indices
            depth.notes.append(_blocks_note(path, of, indices))
            depth.left_out.append(f"more than {len(indices)} blocks of '{path}'")
        elif len(set(of)) > 1:
            depth.notes.append(f"{path}: all {count} blocks are kept, of {len(set(of))} programs")
    if depth.kept and not _runs(build(_Shallow(task.model, depth.kept), 0).module, task, slice_samples(batch, 0, 1)):
        return _Depth(notes=["depth was kept: the module does not run with fewer blocks"])
    return depth


def _lists(module: nn.Module) -> dict[str, int]:
    """Returns path -> length of the lists that hold nothing but blocks."""
    blocks = set(find_blocks(module).paths)
    lengths = {}
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in blocks):
        container = module.get_submodule(parent)
        # in other containers a forward may ask for a removed entry by its key
        if isinstance(container, nn.ModuleList | nn.Sequential):
            children = [f"{parent}.{name}" if parent else name for name, _ in container.named_children()]
            # a list that has a stem or a head among its blocks is left alone, since those are no repetitions
            if blocks.issuperset(children):
                lengths[parent] = len(container)
    return lengths


def _stay(programs: list[Any], wanted: int) -> tuple[int, ...]:
    """Returns the indices of the blocks that are kept: the first two of each program, then the first others.

    `wanted`: least number of blocks to keep.
    """
    met: Counter = Counter()
    stay = set()
    for index, program in enumerate(programs):
        met[program] += 1
        if met[program] <= KEPT_BLOCKS or not program:  # () of a block that did not run tells nothing, so it is kept
            stay.add(index)
    for index in range(len(programs)):
        if len(stay) >= wanted:
            break
        stay.add(index)
    return tuple(sorted(stay))


def _blocks_note(path: str, programs: list[Any], indices: tuple[int, ...]) -> str:
    kinds = len(set(programs))
    of = "which all do the same" if kinds == 1 else f"of {kinds} programs"
    return f"{path}: {len(programs)} blocks, {of} -> {len(indices)} ({', '.join(map(str, indices))})"


def _runs(module: nn.Module, task: Task, batch: Any) -> bool:
    """Whether the shallow module runs, on meta tensors."""
    meta = module.to("meta")  # small tensors, which a deferred build gave values, too
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), batch)
    args, kwargs = task.inputs(moved)
    try:
        with torch.no_grad():
            meta(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError):
        return False
    return True


# --- what to say


def _scope(plan: Plan, small: Plan, samples: int, of: int, depth: _Depth) -> str:
    """Returns the note on what the small proof covers of the plan, and what it does not.

    samples  of the small batch;  of  of the plan's batch
    """
    # only what is larger in the plan is left out
    has, not_has = [], []
    if small.pp > 1:
        stages = small.pp * small.stages_per_rank
        has.append(f"{stages} stages and {small.microbatches} micro-batches under schedule {small.schedule}")
    if plan.pp > small.pp:
        not_has.append(f"more than {small.pp * small.stages_per_rank} stages")
    if plan.microbatches > small.microbatches:
        not_has.append(f"more than {small.microbatches} micro-batches")
    if small.accumulate > 1:
        has.append(f"accumulate={small.accumulate}")
    if plan.accumulate > small.accumulate:
        not_has.append(f"accumulate={plan.accumulate}")
    larger = [axis for axis in ("dp_replicate", "dp_shard", "ep") if getattr(plan, axis) > getattr(small, axis)]
    has += [
        f"{axis}={getattr(small, axis)}"
        for axis in ("dp_replicate", "dp_shard", "tp", *plan.along, "ep")
        if getattr(small, axis) > 1
    ]
    has += [f"domain={'x'.join(map(str, small.domain))}"] * (small.tiles > 1)
    not_has += [f"cuts that only {axis}={getattr(plan, axis)} makes" for axis in larger]
    not_has += [f"cuts that only domain={'x'.join(map(str, plan.domain))} makes"] * (plan.tiles > small.tiles)
    not_has += depth.left_out
    if of > samples:
        not_has.append(f"batches of more than {samples} samples")
    return (
        f"covered: {', '.join(has) or 'one rank'}. Not covered: {', '.join([*not_has, 'rounding', 'memory', 'speed'])}"
    )
