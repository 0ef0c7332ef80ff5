"""Find by trials which dims of a batch cp, cp_ulysses and domain shard, and whether cp deals blocks in zigzag.

`parallel/sequence` and `parallel/domain` propose dims (`Candidate`). The first one is taken with which a rehearsal of
forward and backward on shards, on fake tensors and without sending, ends without error. If a sequence is sharded, the
module must also run on half of it, which excludes dims whose size the weights fix.
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

POSITIONS = "positions"  # key in `Mesh.found` of the dict of `_search` on which all ranks agreed


def find_positions(
    task: Task, plan: Plan, inner: tuple[Axis, ...], precision: Precision, built: Built, batch: Any,
    derived: Derived | None = None, row_wise: Sequence[Stack] = (), samples: int | None = None,
    mesh: Mesh | None = None,
) -> Positions:  # fmt: skip
    """Returns which dims of the task's batches are sharded over the plan's inner axes. Collective if `mesh` is given.

    inner     axes that shard positions (cp, cp_ulysses, domain), outermost first
    batch     a few samples, the same on every rank
    derived   tp's cuts of weights, which are in place in the trials; None: no weight is cut
    row_wise  modules of experts that are called with a rank's own tokens only
    samples   number of samples in `batch`, if not all of its tensors have a batch dim (arguments of a script's model)
    mesh      None: search in this process only, as in a rehearsal. Else rank 0 searches for all, each rank tries the
              result on its own shard, and the result is kept in `mesh.found`

    Raises `RefusedPlan` if no dim can be sharded, with the reason for each.
    """
    samples = samples_in(batch) if samples is None else samples
    if plan.tiles > 1:
        domain.watch(built.module)
    trial = partial(_rehearse, task, plan, precision, built, batch, derived or Derived(), row_wise)

    def search() -> dict[str, Any]:
        return _search(task, plan, inner, precision, built, batch, samples, trial)

    # an earlier engine on this mesh has found it, and all ranks have agreed on it
    tried = None if mesh is None else mesh.found.get(POSITIONS)
    chosen = tried or (search() if mesh is None else of_first(search, mesh.world, mesh.device))
    # Rank 0 sends the candidate's index, since a `Candidate` is no JSON; every rank makes them in the same order.
    candidate = next(islice(_candidates(task, plan, inner, built, batch, samples), chosen["candidate"], None))
    positions = replace(candidate.positions, **{key: chosen[key] for key in ("zigzag", "tables", "stopped")})
    if mesh is not None and not tried:
        place, ends = tuple(axis.index for axis in positions.axes), _ends(positions)
        # rank 0 has tried the first and the last shard for all; those between may have other sizes
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
    """Returns the (axis name, dim) pairs of a leaf as tuples; JSON had made lists of them."""
    return tuple((name, dim) for name, dim in cuts)


def _ends(positions: Positions) -> list[tuple[int, ...]]:
    """Returns [index on each axis of the first rank, index on each axis of the last rank]."""
    return [tuple(0 for _ in positions.axes), tuple(axis.size - 1 for axis in positions.axes)]


@dataclass
class _Noted:
    """What the rehearsals of one candidate have shown, filled by `_rehearse`.

    results    (path of a submodule, index of its call) -> the (axis, dim) cuts of each leaf of its result
    attention  calls of attention on sharded positions, of the last rehearsal
    gathers    fields that each rank gathers whole for an operation on tiles, of the last rehearsal
    past       whether the module's code reads parameters otherwise than as attributes (part/parameters)
    """

    results: dict[tuple[str, int], tuple[Along, ...]] = field(default_factory=dict)
    attention: list[sequence.AttentionCall] = field(default_factory=list)
    gathers: list[domain.Gather] = field(default_factory=list)
    past: bool = False


ON_HALF = "the module does not run on half"
# (positions, index of the rehearsed rank on each axis, where to note) -> (refusal or None, hashes of collectives)
_Trial = Callable[[Positions, tuple[int, ...], _Noted], tuple[RefusedPlan | None, Met]]


def _search(
    task: Task, plan: Plan, inner: tuple[Axis, ...], precision: Precision, built: Built, batch: Any, samples: int,
    trial: _Trial,
) -> dict[str, Any]:  # fmt: skip
    """Returns a JSON dict on the first candidate whose rehearsals on shards succeed; else raises `RefusedPlan`.

    candidate  its index among `_candidates`
    zigzag     whether cp deals blocks in zigzag: attention is causal, and rehearsals succeed so
    tables     whether ranges that the module makes of positions are sharded like them
    met        hashes of the collectives of the first rank, and of the last
    routes     lines for the user on the routes of attention, and on what is gathered whole
    stopped    why the first candidate that was rejected, and on which the module runs, cannot be sharded; "" if none
    mask       (shape, bytes) of the largest attention mask over all pairs of positions; ((), 0) without one
    past       whether parameters are read otherwise than as attributes
    results    (path of a submodule, index of its call, cuts of each leaf of its result), if some leaf is cut

    `trial`: see `_Trial`. A first pass allows only candidates under which every operation has a rule; a second one,
    for sequences alone, lets an operation without a rule gather the sequence.
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
    """Returns (the dict of `_search`, None if no candidate passes; {reason of a rejection: remedy or ""})."""
    stopped: dict[str, str] = {}
    cannot = ""
    for place, candidate in enumerate(_candidates(task, plan, inner, built, batch, samples)):
        # A dim whose size the weights fix (features) is no sequence: the module fails on half of it.
        # (`half` is None for dims that the task names, which are not tested.)
        half = candidate.shorter
        stage = TrialModule(built, half, run_alone(task, precision), precision.dtype_of)
        if half is not None and (failed := _failure(stage)) is not None:
            why, by_name = f"of {candidate.said}, {ON_HALF}{_asserted(failed)}", _by_name(candidate.positions)
            stopped[why] = by_name
            # likely the tokens' sequence, so the user is told even if another dim can be sharded
            if _of_integers(candidate.positions, batch):
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
        # Under causal attention, with blocks dealt in order, a ring's last rank would do p times the first one's work.
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
    """Returns text to append to an `Uncut`: module and line of the operation, and a remedy; "" for other refusals."""
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
    """Returns advice: the `Task(sequence=...)` that declares these dims, for a module that runs on one length only."""
    pairs = zip(positions.names, positions.cuts, strict=True)
    dims = ", ".join(f'"{name}": {cuts[0][0]}' for name, cuts in pairs if cuts)
    return f"Task(sequence={{{dims}}}) says that they are positions, of a module that runs on one length alone"


def _of_integers(positions: Positions, batch: Any) -> bool:
    """Whether a tensor that would be sharded holds integers, as tokens do; a float tensor may be an image."""
    pairs = zip(tree_flatten(batch)[0], positions.cuts, strict=True)
    return any(cuts and not leaf.is_floating_point() for leaf, cuts in pairs)


def _at_both_ends(positions: Positions, trial: _Trial, noted: _Noted) -> tuple[RefusedPlan | None, list[Met]]:
    """Returns (the first refusal or None, [hashes of collectives of the first rank, of the last]; [] if refused).

    Both ends are tried since shards may be uneven, and a slice that drops an end of the sequence changes one shard.
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
    """Returns (positions, refusal or None, [hashes of collectives of the first rank, of the last]).

    The returned positions have `tables` set, so that ranges of positions inside the module are sharded too, if
    rehearsals succeed with that.
    """
    # First with sharded tables, which take less memory.
    if positions.what == "sequence" and positions.inside is None:
        cut = replace(positions, tables=True)
        error, met = _at_both_ends(cut, trial, noted)
        if error is None:
            return cut, None, met
    return positions, *_at_both_ends(positions, trial, noted)


def _nothing(
    task: Task, plan: Plan, inner: tuple[Axis, ...], batch: Any, samples: int, stopped: dict[str, str]
) -> RefusedPlan:  # fmt: skip
    """Returns the refusal for a batch without a dim to shard. `stopped`: {reason for each candidate: remedy or ""}."""
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
    """Yields proposals to try in turn: dims of fields under `domain`, else sequence dims of or inside the batch."""
    if plan.tiles > 1:
        return _fields(task, plan, {axis.name: axis for axis in inner}, batch, samples)
    least = plan.tp if plan.sp else 1  # sp cuts each share of positions again, over tp
    return chain(
        sequence.candidates(batch, samples, inner, _names(batch), least, task.sequence),
        # the task names its dims: nothing else is guessed
        () if task.sequence else _born_inside(inner, built, batch, least),
    )


def _born_inside(inner: tuple[Axis, ...], built: Built, batch: Any, least: int) -> Iterator[Candidate]:
    """Yields candidates that shard tensors between the module's blocks (image patches, audio frames), not the batch.

    least  indices that each shard must have at least
    """
    whole: tuple[Cuts, ...] = ((),) * len(tree_flatten(batch)[0])
    for inside in sequence.insides(find_blocks(built.module).paths, inner, least):
        positions = Positions(whole, _names(batch), "sequence", least, inside=inside)
        yield Candidate(positions, f"what '{inside.first}' to '{inside.last}' hand on")


def _fields(task: Task, plan: Plan, axes: Mapping[str, Axis], batch: Any, samples: int) -> Iterator[Candidate]:
    """Yields candidates that shard dims of space. `axes`: the plan's domain axes of degree over 1, by name."""
    tiles = tuple(axes.get(name) for name, _ in zip(SPACE, plan.domain, strict=False))
    args = {id(leaf) for leaf in tree_flatten(task.inputs(batch))[0]}
    return domain.candidates(batch, samples, tiles, _names(batch), task.spatial, args)


def _names(batch: Any) -> tuple[str, ...]:
    """Returns the names of a batch's leaves for messages: "x" in a dict, "batch[0]" in a tuple."""
    return tuple(name_of(path) for path, _ in tree_flatten_with_path(batch)[0])


def tiled_sizes(task: Task, plan: Plan, batch: Any) -> tuple[int, ...]:
    """Returns the first field's size along each dim for which `domain` has a degree; () if the batch has no field.

    Nothing is run. Raises `RefusedPlan` if `domain` has more degrees than `Task.spatial` names dims.
    """
    axes = {name: Axis(name, n, 0, None, tuple(range(n))) for name, n in zip(SPACE, plan.domain, strict=False)}
    for candidate in _fields(task, plan, axes, batch, samples_in(batch)):
        pairs = zip(tree_flatten(batch)[0], candidate.positions.cuts, strict=True)
        return next(tuple(leaf.shape[dim] for dim, _ in cuts) for leaf, cuts in pairs if cuts)
    return ()


def field_dims(task: Task, batch: Any) -> tuple[tuple[int, ...], ...]:
    """Returns, for each leaf of the batch, its dims of space, () for one without; as if a plan tiled all of them."""
    fields = [leaf.dim() - 2 for leaf in tree_flatten(task.inputs(batch))[0] if isinstance(leaf, torch.Tensor)]
    most = len(task.spatial.dims) if task.spatial is not None else max((n for n in fields if n <= 3), default=0)
    for count in range(most, 0, -1):  # the most dims that any candidate has
        axes = {name: Axis(name, 2, 0, None, (0, 1)) for name in SPACE[:count]}
        for candidate in _fields(task, Plan(domain=(2,) * count), axes, batch, samples_in(batch)):
            return tuple(tuple(dim for dim, _ in cuts) for cuts in candidate.positions.cuts)
    return ()


def runs(task: Task, built: Built, batch: Any) -> bool:
    """Whether the module and its loss run on a batch; on fake tensors, or real ones if the forward reads values."""
    precision = Precision.of(Plan())
    return _failure(TrialModule(built, batch, run_alone(task, precision), precision.dtype_of)) is None


def _rehearse(
    task: Task, plan: Plan, precision: Precision, built: Built, batch: Any, derived: Derived,
    row_wise: Sequence[Stack], positions: Positions, place: tuple[int, ...], noted: _Noted,
) -> tuple[RefusedPlan | None, Met]:  # fmt: skip
    """Returns (refusal or None, hashes of collectives) of a forward and backward on the shard of the rank at `place`.

    place  index on each axis of `positions`
    noted  filled with what the rehearsal shows
    Collectives are recorded, and nothing is sent.
    """
    met = Collectives()
    axes = zip(positions.axes, place, strict=True)
    silent = {axis.name: replace(axis, index=index, rehearsal=met) for axis, index in axes}
    positions = positions.over(lambda axis: silent[axis.name])
    alone = run_alone(task, precision, positions)

    def run(module: nn.Module, batch: Any) -> Any:
        """Returns the loss of a module on its share; notes how results are cut, and calls of attention."""
        met.clear()  # `run` is called again on real tensors if fake ones are not enough
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
    """Context that fills `results`: (path of a submodule, index of its call) -> cuts of each leaf of its result.

    Calls without a cut leaf are left out.
    """
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
    """Returns text to append on an assertion of the module that failed on other sizes; "" for other errors."""
    return f", whose sizes an assertion of its own forbids: {where(error)}" if isinstance(error, AssertionError) else ""


def _failure(stage: TrialModule) -> Exception | None:
    """Returns the error that the module or its loss raises on the stage's batch, or None if they run."""
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
