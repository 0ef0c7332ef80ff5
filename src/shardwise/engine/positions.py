"""Which dims of a batch the inner axes cut, found by trying, on every rank alike: a sequence's positions, or space.

What may be cut is proposed by the axes' own room; it is cut if a rehearsal of forward and backward on shares of it,
without values and without sending, comes to its end. Of a sequence the module must also run on half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path

from shardwise.comm import Axis, Ledger, gather_rows
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.host import put, read
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE
from shardwise.mesh import Mesh
from shardwise.parallel import domain, sequence
from shardwise.parallel.expert.apply import Stack, on_own_rows
from shardwise.parallel.tensor import Derived, TrialModule
from shardwise.part.crossing import Along, cuts_of
from shardwise.part.positions import Candidate, Cuts, Positions, name_of
from shardwise.precision import Precision
from shardwise.step.batching import samples_in
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.trace.blocks import find_blocks
from shardwise.trace.deferred import Built, seed_of
from shardwise.trace.fake import unlogged


def find_positions(
    task: Task, plan: Plan, inner: tuple[Axis, ...], precision: Precision, built: Built, batch: Any,
    derived: Derived | None = None, row_wise: Sequence[Stack] = (), samples: int | None = None,
    mesh: Mesh | None = None,
) -> Positions:  # fmt: skip
    """The positions of the task's batches, cut over the inner axes of the plan's mesh. Collective, given a mesh.

    batch     a few samples, the same on every rank
    samples   how many, where tensors without samples may lie beside them (arguments of a script's model)
    row_wise  modules of experts that are given a rank's own rows
    mesh      of a run: its ranks try their own shares too, and agree
    Raises `RefusedPlan` where no dim can be cut, with what stopped each.
    """
    stopped: list[str] = []
    derived = derived if derived is not None else Derived()
    samples = samples_in(batch) if samples is None else samples
    for candidate in _candidates(task, plan, inner, built, batch, samples):
        half = candidate.shorter
        if half is not None and not _runs(TrialModule(built, half, run_alone(task, precision), precision.held)):
            stopped.append(f"of {candidate.said}, the module does not run on half")
            continue
        results: dict[tuple[str, int], tuple[Along, ...]] = {}

        seen: list[sequence.AttentionCall] = []
        gathers: list[domain.Gather] = []
        known: dict[tuple, tuple[RefusedPlan | None, str]] = {}

        def tries(
            tried: Candidate, place: tuple[int, ...], derived: Derived = derived, results: dict = results,
            seen: list = seen, gathers: list = gathers,
            known: dict[tuple, tuple[RefusedPlan | None, str]] = known,
        ) -> tuple[RefusedPlan | None, str]:  # fmt: skip
            key = (tried.positions.zigzag, place)
            if key not in known:
                known[key] = _rehearse(
                    task, plan, precision, built, batch, tried, derived, place, results, row_wise, seen, gathers
                )
            return known[key]

        def stops(tried: Candidate, tries: Callable = tries) -> RefusedPlan | None:
            axes = tried.positions.axes
            ends = (tuple(0 for _ in axes), tuple(axis.size - 1 for axis in axes))
            return next((error for place in ends if (error := tries(tried, place)[0]) is not None), None)

        error = stops(candidate)
        if error is None:
            positions = candidate.positions
            if any(one.causal and not one.heads and one.axis.name == "cp" for one in seen):
                zigzag = replace(candidate, positions=replace(positions, zigzag=True))
                candidate = zigzag if stops(zigzag) is None else candidate
                positions = candidate.positions
            said = (*sequence.explained(seen), *domain.explained(gathers))
            shapes = _shapes_of_fields(task, plan, batch, positions)
            largest = max(seen, key=lambda one: one.mask_bytes, default=None)
            mask = (largest.mask, largest.mask_bytes) if largest is not None else ((), 0)
            if mesh is not None:
                _agree(mesh, *tries(candidate, tuple(axis.index for axis in positions.axes)))
            return replace(positions, results=results, routes=said, shapes=shapes, mask=mask)
        stopped.append(f"{candidate.said} cannot be cut: {error}")
    axes, what = ",".join(f"{axis.name}={axis.size}" for axis in inner), "sequence"
    nothing = "no tensor has a dim behind the samples"
    if plan.tiles > 1:
        axes, what = f"domain={'x'.join(map(str, plan.domain))}", "field"
        nothing = f"no tensor has {len(plan.domain)} of them behind batch and channel (spatial=Domain(...) names them)"
    elif any(isinstance(leaf, torch.Tensor) and leaf.dim() > 3 for leaf in tree_flatten(batch)[0]):
        stopped.append("domain= cuts space")
    raise RefusedPlan(f"{axes}: no dim of the batch can be cut as a {what}: " + ("; ".join(stopped) or nothing))


def _shapes_of_fields(
    task: Task, plan: Plan, batch: Any, positions: Positions
) -> tuple[tuple[int, ...] | None, ...]:  # fmt: skip
    """The shape of each leaf behind the samples, where the task's source reads tiles (it has a `global_shape`)."""
    whole = getattr(task.data, "global_shape", None)
    if plan.tiles == 1 or whole is None:
        return ()
    leaves = tree_flatten(batch)[0]
    for leaf, cuts, name in zip(leaves, positions.cuts, positions.names, strict=True):
        for dim, (axis,) in cuts:
            place = SPACE.index(axis.name)
            if place >= len(whole) or leaf.shape[dim] != whole[place]:
                raise InputError(
                    f"Task.data has global_shape={tuple(whole)}, and {name} of a sample read whole is "
                    f"{tuple(leaf.shape[1:])}, of which dim {dim - 1} is cut over {axis.name}: a rank would read "
                    "another tile than it computes"
                )
    return tuple(tuple(leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def _candidates(
    task: Task, plan: Plan, inner: tuple[Axis, ...], built: Built, batch: Any, samples: int
) -> Iterator[Candidate]:  # fmt: skip
    if plan.tiles > 1:
        return _fields(task, plan, {axis.name: axis for axis in inner}, batch, samples)
    least = plan.tp if plan.sp else 1
    return chain(
        sequence.candidates(batch, samples, inner, _names(batch), least, task.sequence),
        () if task.sequence else _born_inside(inner, built, batch, least),
    )


def _born_inside(inner: tuple[Axis, ...], built: Built, batch: Any, least: int) -> Iterator[Candidate]:
    """Nothing of the batch, and what repeated blocks hand on: patches of a picture, frames of a sound."""
    whole: tuple[Cuts, ...] = ((),) * len(tree_flatten(batch)[0])
    for inside in sequence.insides(find_blocks(built.module).paths, inner, least):
        positions = Positions(whole, _names(batch), "sequence", least, inside=inside)
        yield Candidate(positions, f"what '{inside.first}' to '{inside.last}' hand on")


def _fields(task: Task, plan: Plan, axes: Mapping[str, Axis], batch: Any, samples: int) -> Iterator[Candidate]:
    tiles = tuple(axes.get(name) for name, _ in zip(SPACE, plan.domain, strict=False))
    given = {id(leaf) for leaf in tree_flatten(task.inputs(batch))[0]}
    return domain.candidates(batch, samples, tiles, _names(batch), task.spatial, given)


def _names(batch: Any) -> tuple[str, ...]:
    """The leaves for people: `x` of a dict, `batch[0]` of a tuple."""
    return tuple(name_of(path) for path, _ in tree_flatten_with_path(batch)[0])


def tiled_sizes(task: Task, plan: Plan, batch: Any) -> tuple[int, ...]:
    """The field's size along each dim that the plan's `domain` has a degree for; () where the batch has no field."""
    axes = {name: Axis(name, n, 0, None, tuple(range(n))) for name, n in zip(SPACE, plan.domain, strict=False)}
    for candidate in _fields(task, plan, axes, batch, samples_in(batch)):
        pairs = zip(tree_flatten(batch)[0], candidate.positions.cuts, strict=True)
        return next(tuple(leaf.shape[dim] for dim, _ in cuts) for leaf, cuts in pairs if cuts)
    return ()


def _rehearse(
    task: Task, plan: Plan, precision: Precision, built: Built, batch: Any, candidate: Candidate, derived: Derived,
    place: tuple[int, ...], results: dict[tuple[str, int], tuple[Along, ...]], row_wise: Sequence[Stack],
    seen: list[sequence.AttentionCall], gathers: list[domain.Gather],
) -> tuple[RefusedPlan | None, str]:  # fmt: skip
    """The refusal, or None, of a trial forward and backward at a place on the axes, nothing sent; its collectives.

    Shares may be uneven and what is cut off one end of a sequence is cut off one rank's share, so both ends are tried.
    """
    met = _Collectives()
    axes = zip(candidate.positions.axes, place, strict=True)
    silent = {axis.name: replace(axis, index=index, rehearsal=met) for axis, index in axes}
    positions = candidate.positions.over(lambda axis: silent[axis.name])
    alone = run_alone(task, precision, positions)

    def run(module: nn.Module, batch: Any) -> Any:
        met.clear()
        undo = positions.inside.install(module) if positions.inside is not None else lambda: None
        try:
            with (
                _noting(module, results),
                on_own_rows(module, row_wise),
                sequence.watching() as found,
                domain.watching() as gathered,
            ):
                loss = alone(module, batch)
        finally:
            undo()
        seen[:], gathers[:] = found, gathered
        return loss

    ledger = derived.ledger
    try:
        stage = TrialModule(built, batch, run, precision.held)
        return stage.rehearse(derived, plan.tp, plan.sp, positions.axes), " ".join(met.calls)
    except RefusedPlan as refused:
        return refused, ""
    finally:
        derived.ledger = ledger


class _Collectives(Ledger):
    """A ledger that notes in which order a forward and backward came to the collectives that all ranks come to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def record(self, tag: str, op: str, axis: str, *numbers: Any, **more: Any) -> None:
        """As of any ledger."""
        super().record(tag, op, axis, *numbers, **more)
        if op != "point_to_point":  # blocks on their way around a ring visit those who read them
            self.calls.append(f"{op}:{axis}")

    def clear(self) -> None:
        """Start again from nothing."""
        super().clear()
        self.calls.clear()


MOST_SAID = 600  # characters of a refusal that one rank alone came to


def _agree(mesh: Mesh, error: RefusedPlan | None, calls: str) -> None:
    """Every rank has tried its own share: all refuse where one does, or where they do not meet. Collective.

    The ends alone are tried by all; what lies between may have other extents, or none.
    """
    said = (str(error) if error is not None else "").encode()[:MOST_SAID]
    mine = [float(seed_of(calls) % 2**50), float(error is not None), *map(float, said.ljust(MOST_SAID))]
    rows = read(gather_rows(put(mine, mesh.device), mesh.world), "which shares were tried")
    for rank, (_, refused, *letters) in enumerate(rows):
        if refused:
            told = bytes(int(letter) for letter in letters).decode(errors="replace").strip()
            raise RefusedPlan(f"the share of rank {rank} cannot be computed, though those at either end can: {told}")
    other = next((rank for rank, row in enumerate(rows) if row[0] != rows[0][0]), None)
    if other is not None:
        raise RefusedPlan(
            f"ranks 0 and {other} would not come to the same collectives with their shares of the batch, and wait for "
            "each other: use sizes that divide evenly, or fewer ranks"
        )


@contextmanager
def _noting(module: nn.Module, results: dict[tuple[str, int], tuple[Along, ...]]) -> Iterator[None]:
    """Context: record how the result of each submodule's call is cut, in `results` by (path, number of the call)."""
    counts: dict[int, int] = {}
    handles = []

    def enter(child: nn.Module, args: tuple, path: str) -> None:
        counts[id(child)] = counts.get(id(child), -1) + 1

    def leave(child: nn.Module, args: tuple, output: Any, path: str) -> None:
        leaves = tree_flatten(output)[0]
        along = tuple(
            tuple((name, dim) for name, dim, _ in cuts_of(leaf)) if isinstance(leaf, torch.Tensor) else ()
            for leaf in leaves
        )
        if any(along):
            results[path, counts[id(child)]] = along

    seen = {id(module)}
    for path, child in module.named_modules():
        if id(child) not in seen:
            seen.add(id(child))
            handles.append(child.register_forward_pre_hook(partial(enter, path=path)))
            handles.append(child.register_forward_hook(partial(leave, path=path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _runs(stage: TrialModule) -> bool:
    """Whether the module runs on a batch at all."""
    try:
        with unlogged(), torch.no_grad(), stage.playing(stage.make) as (_, batch):
            stage.run(stage.built.module, batch)
    except ShardwiseError:
        raise
    except Exception:  # whatever the module says to a batch of half the size
        if stage.fake is None:
            return False
        stage.fake = None  # it may be tensors without values that it cannot use
        return _runs(stage)
    return True
