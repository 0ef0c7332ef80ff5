"""Find by trying which dims cp, cp_ulysses, domain cut, and how cp deals them (zigzag); refuse; notices of gathers.

What may be cut is proposed by the axes' own room; it is cut if a rehearsal of forward and backward on shares of it,
without values and without sending, comes to its end. Of a sequence the module must also run on half.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path

from shardwise.comm import Axis, of_first
from shardwise.engine.collectives_met import Collectives, Met, check_met
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE
from shardwise.mesh import Mesh
from shardwise.parallel import domain, sequence
from shardwise.parallel.expert.expert_forward import Stack, on_own_rows
from shardwise.parallel.tensor import Derived, TrialModule
from shardwise.part import Uncut
from shardwise.part.crossing import Along, cuts_of
from shardwise.part.done_whole import by_rules
from shardwise.part.positions import Candidate, Cuts, Positions, name_of
from shardwise.precision import Precision
from shardwise.step.batching import samples_in
from shardwise.step.forward import run_alone
from shardwise.task import Task
from shardwise.task_names import is_own, where
from shardwise.trace.blocks import find_blocks
from shardwise.trace.deferred import Built
from shardwise.trace.known_values import as_real
from shardwise.trace.without_gradient import HooksLeftOut

POSITIONS = "positions"  # of what is tried once for a mesh


def find_positions(
    task: Task, plan: Plan, inner: tuple[Axis, ...], precision: Precision, built: Built, batch: Any,
    derived: Derived | None = None, row_wise: Sequence[Stack] = (), samples: int | None = None,
    mesh: Mesh | None = None,
) -> Positions:  # fmt: skip
    """Returns the positions of the task's batches, cut over the plan's inner axes. Collective, given a mesh.

    batch     a few samples, the same on every rank
    samples   how many, where tensors without samples may lie beside them (arguments of a script's model)
    derived   the cuts of tp, with which positions are tried; None: no weight is cut
    row_wise  modules of experts that are given a rank's own rows
    mesh      of a run: rank 0 finds them for all, every rank tries its own share too, and all agree, once
    Raises `RefusedPlan` where no dim can be cut, with what stopped each.
    """
    samples = samples_in(batch) if samples is None else samples
    if plan.tiles > 1:
        domain.watch(built.module)
    trial = partial(_rehearse, task, plan, precision, built, batch, derived or Derived(), row_wise)

    def search() -> dict[str, Any]:
        return _search(task, plan, inner, precision, built, batch, samples, trial)

    # what the first engine on this mesh found, and all ranks agreed on, is taken as it is
    tried = None if mesh is None else mesh.found.get(POSITIONS)
    chosen = tried or (search() if mesh is None else of_first(search, mesh.world, mesh.device))
    # Candidates come in one order on every rank: the place says which, since classes do not travel as JSON.
    candidate = next(islice(_candidates(task, plan, inner, built, batch, samples), chosen["candidate"], None))
    positions = replace(candidate.positions, **{key: chosen[key] for key in ("zigzag", "tables", "stopped")})
    if mesh is not None and not tried:
        place, ends = tuple(axis.index for axis in positions.axes), _ends(positions)
        # rank 0 has tried the ends for all; a share between them may have other extents
        met = (None, chosen["met"][ends.index(place)]) if place in ends else trial(positions, place, _Noted())
        check_met(mesh, place, *met)
        mesh.found[POSITIONS] = chosen
    shape, size_bytes = chosen["mask"]
    positions = replace(
        positions, routes=tuple(chosen["routes"]), mask=(tuple(shape), size_bytes), past=chosen["past"],
        results={(path, call): tuple(map(_along, leaves)) for path, call, leaves in chosen["results"]},
    )  # fmt: skip
    return domain.as_read(positions, task, batch) if plan.tiles > 1 else positions


def _along(cuts: Sequence[Sequence[Any]]) -> Along:
    return tuple((name, dim) for name, dim in cuts)


def _ends(positions: Positions) -> list[tuple[int, ...]]:
    """Returns the indices on each axis of the first rank and of the last."""
    return [tuple(0 for _ in positions.axes), tuple(axis.size - 1 for axis in positions.axes)]


@dataclass
class _Noted:
    """Notes of the rehearsals of one candidate, filled by `_rehearse`.

    results    how each leaf of a submodule's result is cut, by (path, number of the call)
    attention  calls of attention
    gathers    what is made whole on every rank for an operation on tiles
    """

    results: dict[tuple[str, int], tuple[Along, ...]] = field(default_factory=dict)
    attention: list[sequence.AttentionCall] = field(default_factory=list)
    gathers: list[domain.Gather] = field(default_factory=list)
    past: bool = False  # parameters are read past their attributes


ON_HALF = "the module does not run on half"
# (positions, place on their axes, what to note in) -> (the refusal, if any; collectives)
_Trial = Callable[[Positions, tuple[int, ...], _Noted], tuple[RefusedPlan | None, Met]]


def _search(
    task: Task, plan: Plan, inner: tuple[Axis, ...], precision: Precision, built: Built, batch: Any, samples: int,
    trial: _Trial,
) -> dict[str, Any]:  # fmt: skip
    """Returns, as a JSON dict, the first candidate with which a rehearsal on shares succeeds; else `RefusedPlan`.

    candidate  its place among `_candidates`
    zigzag   whether it succeeds with shares dealt in zigzag, where attention is causal
    tables   whether ranges inside the module are dealt alike
    met      the collectives of the first rank and of the last
    routes   of attention, and what is gathered whole, for people
    stopped  why what was proposed before, on which the module runs, cannot be cut
    mask     the largest that attention is given for all pairs: shape, bytes
    past     parameters are read past their attributes
    results  path of a submodule, number of its call, and how each leaf of its result is cut, where some is
    Candidates under which every operation has a rule come before those that gather a sequence for some operations.
    """
    stopped: dict[str, str] = {}
    # Tiles are never gathered for an operation without a rule: a field may not fit one rank.
    for rules in (True,) if plan.tiles > 1 else (True, False):
        with by_rules(rules):
            chosen, stopped = _first_through(task, plan, inner, precision, built, batch, samples, trial)
        if chosen is not None:
            return chosen
    raise _nothing(task, plan, inner, batch, samples, stopped)


def _first_through(
    task: Task, plan: Plan, inner: tuple[Axis, ...], precision: Precision, built: Built, batch: Any, samples: int,
    trial: _Trial,
) -> tuple[dict[str, Any] | None, dict[str, str]]:  # fmt: skip
    """Returns (the dict of `_search`, None where no candidate passes; why others failed -> what to write instead)."""
    stopped: dict[str, str] = {}
    cannot = ""
    for place, candidate in enumerate(_candidates(task, plan, inner, built, batch, samples)):
        # A dim that weights fix (features) fails on half of it, and is no sequence.
        # (`half` is None of dims that the task itself names, which are taken at their word.)
        half = candidate.shorter
        stage = TrialModule(built, half, run_alone(task, precision), precision.dtype_of)
        if half is not None and (failed := _failure(stage)) is not None:
            why, by_name = f"of {candidate.said}, {ON_HALF}{_asserted(failed)}", _by_name(candidate.positions)
            stopped[why] = by_name
            if _of_integers(candidate.positions, batch):  # likely meant: told though another dim is cut
                cannot = cannot or f"{why} ({by_name})"
            continue
        noted = _Noted()
        positions, error, met = _tried(candidate.positions, trial, noted)
        if error is not None:
            said = f"{candidate.said} cannot be cut: {error}{_place_of(error, built.module, plan)}"
            cannot = cannot or said
            stopped[said] = ""
            continue
        zigzag = False
        # Dealt in order, a ring's last rank would attend to all blocks and its first to one.
        if any(call.causal and not call.heads and call.axis.name == "cp" for call in noted.attention):
            error, met_so = _at_both_ends(replace(positions, zigzag=True), trial, noted)
            zigzag, met = error is None, met if error is not None else met_so
        largest = max(noted.attention, key=lambda call: call.mask_bytes, default=None)
        return {
            "candidate": place, "zigzag": zigzag, "tables": positions.tables, "met": met, "stopped": cannot,
            "routes": [*sequence.explained(noted.attention), *domain.explained(noted.gathers)],
            "mask": (largest.mask, largest.mask_bytes) if largest is not None else ((), 0),
            "past": noted.past,
            "results": [(path, call, along) for (path, call), along in noted.results.items()],
        }, stopped  # fmt: skip
    return None, stopped


def _place_of(error: RefusedPlan, module: nn.Module, plan: Plan) -> str:
    """Returns where an operation has no rule, as text: module, line, and what to write there; "" for other refusals."""
    if not isinstance(error, Uncut):
        return ""
    inside, line = nn.Module(), where(error).partition(f": {type(error).__name__}")[0]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # the innermost submodule: frames run from the outermost call inwards
        me = frame.f_locals.get("self")
        inside = me if isinstance(me, nn.Module) and me is not module else inside
    path = next((f" in '{path}'" for path, child in module.named_modules() if child is inside), "")
    remedy = ". Where each rank may hold the field, shardwise.whole(x) gathers it there" if plan.tiles > 1 else ""
    return f"{path} ({line}){remedy}" if is_own(line.rpartition(":")[0]) else path + remedy


def _by_name(positions: Positions) -> str:
    """Returns the `Task(sequence=...)` to write for dims of positions, of a module that runs on one length alone."""
    pairs = zip(positions.names, positions.cuts, strict=True)
    dims = ", ".join(f'"{name}": {cuts[0][0]}' for name, cuts in pairs if cuts)
    return f"Task(sequence={{{dims}}}) says that they are positions, of a module that runs on one length alone"


def _of_integers(positions: Positions, batch: Any) -> bool:
    """Whether a tensor to be cut holds integers, as tokens do: a dim of a picture is seldom a sequence."""
    pairs = zip(tree_flatten(batch)[0], positions.cuts, strict=True)
    return any(cuts and not leaf.is_floating_point() for leaf, cuts in pairs)


def _at_both_ends(positions: Positions, trial: _Trial, noted: _Noted) -> tuple[RefusedPlan | None, list[Met]]:
    """Returns (the refusal of a trial as the first rank or the last, None without; the collectives of both).

    Shares may be uneven and what is cut off one end of a sequence is cut off one rank's share, so both ends are tried.
    """
    met = []
    for place in _ends(positions):
        error, calls = trial(positions, place, noted)
        if error is not None:
            return error, []
        met.append(calls)
    return None, met


def _tried(
    positions: Positions, trial: _Trial, noted: _Noted
) -> tuple[Positions, RefusedPlan | None, list[Met]]:  # fmt: skip
    """Returns (the positions, the refusal of a trial forward or None, the collectives of the first and the last rank).

    Tables inside the module (of a sequence's positions) are cut too, unless the trial refuses that.
    """
    # With tables cut first: then they grow with a rank's share alone.
    if positions.what == "sequence" and positions.inside is None:
        cut = replace(positions, tables=True)
        error, met = _at_both_ends(cut, trial, noted)
        if error is None:
            return cut, None, met
    return positions, *_at_both_ends(positions, trial, noted)


def _nothing(
    task: Task, plan: Plan, inner: tuple[Axis, ...], batch: Any, samples: int, stopped: dict[str, str]
) -> RefusedPlan:  # fmt: skip
    """Returns the refusal where no candidate can be cut; `stopped`: why not, for each, and what to write instead."""
    axes, what = ",".join(f"{axis.name}={axis.size}" for axis in inner), "sequence"
    nothing, reasons = "no tensor has a dim behind the samples", list(stopped)
    if plan.tiles > 1:
        axes, what = f"domain={'x'.join(map(str, plan.domain))}", "field"
        nothing = domain.without_space(task.spatial, len(plan.domain), batch, _names(batch))
        if reasons and task.spatial is None:
            reasons.append("Task(spatial=Domain(dims=...)) names the dims of space")
    elif any(isinstance(leaf, torch.Tensor) and leaf.dim() > 3 for leaf in tree_flatten(batch)[0]):  # a field?
        which = sequence.of_several(batch, samples, _names(batch)) if task.sequence is None else {}
        by_name = f"; Task(sequence={which}) says which of several dims of one size are positions" if which else ""
        reasons.append("domain= cuts space" + by_name.replace("'", '"'))
    elif stopped and all(stopped.values()):  # each candidate has a remedy: the first one's
        reasons[0] += f" ({stopped[reasons[0]]})"
    return RefusedPlan(
        f"{axes}: no dim of the batch can be cut as a {what} (dp_shard deals samples): "
        + ("; ".join(reasons) or nothing)
    )


def _candidates(
    task: Task, plan: Plan, inner: tuple[Axis, ...], built: Built, batch: Any, samples: int
) -> Iterator[Candidate]:  # fmt: skip
    """Returns the ways to cut positions that are tried in turn: of fields under `domain`, else of sequences."""
    if plan.tiles > 1:
        return _fields(task, plan, {axis.name: axis for axis in inner}, batch, samples)
    least = plan.tp if plan.sp else 1  # sp cuts each share of positions again, over tp
    return chain(
        sequence.candidates(batch, samples, inner, _names(batch), least, task.sequence),
        # the task names its dims: nothing else is guessed
        () if task.sequence else _born_inside(inner, built, batch, least),
    )


def _born_inside(inner: tuple[Axis, ...], built: Built, batch: Any, least: int) -> Iterator[Candidate]:
    """Yields candidates that cut tensors between blocks (patches of a picture, frames of a sound), not the batch."""
    whole: tuple[Cuts, ...] = ((),) * len(tree_flatten(batch)[0])
    for inside in sequence.insides(find_blocks(built.module).paths, inner, least):
        positions = Positions(whole, _names(batch), "sequence", least, inside=inside)
        yield Candidate(positions, f"what '{inside.first}' to '{inside.last}' hand on")


def _fields(task: Task, plan: Plan, axes: Mapping[str, Axis], batch: Any, samples: int) -> Iterator[Candidate]:
    tiles = tuple(axes.get(name) for name, _ in zip(SPACE, plan.domain, strict=False))
    args = {id(leaf) for leaf in tree_flatten(task.inputs(batch))[0]}
    return domain.candidates(batch, samples, tiles, _names(batch), task.spatial, args)


def _names(batch: Any) -> tuple[str, ...]:
    """Returns the names of a batch's leaves: `x` in a dict, `batch[0]` in a tuple."""
    return tuple(name_of(path) for path, _ in tree_flatten_with_path(batch)[0])


def tiled_sizes(task: Task, plan: Plan, batch: Any) -> tuple[int, ...]:
    """Returns the field's size along each dim that `domain` has a degree for; () where the batch has no field.

    Of the first field that is proposed, untried. Raises `RefusedPlan` for more degrees than `Task.spatial` names dims.
    """
    axes = {name: Axis(name, n, 0, None, tuple(range(n))) for name, n in zip(SPACE, plan.domain, strict=False)}
    for candidate in _fields(task, plan, axes, batch, samples_in(batch)):
        pairs = zip(tree_flatten(batch)[0], candidate.positions.cuts, strict=True)
        return next(tuple(leaf.shape[dim] for dim, _ in cuts) for leaf, cuts in pairs if cuts)
    return ()


def field_dims(task: Task, batch: Any) -> tuple[tuple[int, ...], ...]:
    """Returns each leaf's dims of space, as a plan that tiles all of them would find them; () for other leaves."""
    fields = [leaf.dim() - 2 for leaf in tree_flatten(task.inputs(batch))[0] if isinstance(leaf, torch.Tensor)]
    most = len(task.spatial.dims) if task.spatial is not None else max((n for n in fields if n <= 3), default=0)
    for count in range(most, 0, -1):  # the most dims that any candidate has
        axes = {name: Axis(name, 2, 0, None, (0, 1)) for name in SPACE[:count]}
        for candidate in _fields(task, Plan(domain=(2,) * count), axes, batch, samples_in(batch)):
            return tuple(tuple(dim for dim, _ in cuts) for cuts in candidate.positions.cuts)
    return ()


def runs(task: Task, built: Built, batch: Any) -> bool:
    """Whether the module and its loss run on a batch, on shapes alone where that can be."""
    precision = Precision.of(Plan())
    return _failure(TrialModule(built, batch, run_alone(task, precision), precision.dtype_of)) is None


def _rehearse(
    task: Task, plan: Plan, precision: Precision, built: Built, batch: Any, derived: Derived,
    row_wise: Sequence[Stack], positions: Positions, place: tuple[int, ...], noted: _Noted,
) -> tuple[RefusedPlan | None, Met]:  # fmt: skip
    """Returns (refusal or None, hashes of collectives) of a trial forward and backward as the rank at `place`.

    Nothing is sent.
    """
    met = Collectives()
    axes = zip(positions.axes, place, strict=True)
    silent = {axis.name: replace(axis, index=index, rehearsal=met) for axis, index in axes}
    positions = positions.over(lambda axis: silent[axis.name])
    alone = run_alone(task, precision, positions)

    def run(module: nn.Module, batch: Any) -> Any:
        """Returns the loss of a module on its share; notes how results are cut, and calls of attention."""
        met.clear()  # called again where tensors without values do not do
        gathered.clear()
        undo = positions.inside.install(module) if positions.inside is not None else lambda: None
        try:
            with (
                _noting(module, noted.results),
                on_own_rows(module, row_wise),
                sequence.watching() as attention,
            ):
                loss = alone(module, batch)
        finally:
            undo()
        noted.attention[:] = attention
        return loss

    ledger = derived.ledger  # tp's, which a rehearsal replaces
    try:
        stage = TrialModule(built, batch, run, precision.dtype_of)
        with domain.watching() as gathered:  # in backward too
            error = stage.rehearse(derived, plan.tp, plan.sp, positions.axes)
        noted.gathers[:] = gathered
        noted.past |= stage.past
        return error, met.numbers([axis.name for axis in positions.axes])
    except RefusedPlan as refused:
        return refused, (0,) * (2 * len(positions.axes))  # as long as `met.numbers`: two for each axis
    finally:
        derived.ledger = ledger


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

    seen = {id(module)}  # a module under two paths is counted under the first
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


def _asserted(error: Exception) -> str:
    """Returns what a module's own assertion on sizes says, as text to append; "" for errors of other kinds."""
    return f", whose sizes an assertion of its own forbids: {where(error)}" if isinstance(error, AssertionError) else ""


def _failure(stage: TrialModule) -> Exception | None:
    """Returns the error that the module raises on a batch, or None where it runs."""
    try:
        with as_real(), torch.no_grad(), HooksLeftOut(), stage.playing(stage.make) as (_, batch):
            stage.run(stage.built.module, batch)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever the module says to a batch of half the size
        if stage.fake is None:
            return error
        stage.go_on_real(error)  # it may be tensors without values that it cannot use
        return _failure(stage)
    return None
