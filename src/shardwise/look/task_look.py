"""Run a task under a plan before its first step to check it: on a few samples, then on as many as a step has.

Collective.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.comm import gather_json, of_first
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout.dealing import cut, deal
from shardwise.look.first_samples import Findings, explained, gently, look
from shardwise.look.in_float64 import task_differs
from shardwise.look.mixing import MixesSamples, install, modules_around, refuse_mixed, told_mixing
from shardwise.look.one_process import MOST_ELEMENTS, Untried, blame, failure_alone
from shardwise.look.samples import IN_WHOLE, costly, few_samples, fewest_samples, looked_at
from shardwise.look.watched_run import InsideTransform, TakesGradients, WritesWeights
from shardwise.look.whole_against_parts import look_at_many, many_of, sizes_to_try, too_many
from shardwise.memory.recompute import note_written
from shardwise.parallel.full import FullShard
from shardwise.precision import met_at
from shardwise.random import HIDDEN, WITHOUT, GlobalRandom, has_kernel
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.loss import Loss, loss_on
from shardwise.step.state import RankState
from shardwise.step.task_metrics import METRICS
from shardwise.trace.outside_reads import OutsideReads


def look_at_task(state: RankState, *, masks: bool) -> Findings:
    """Returns `Findings` of a few samples before the first step. `masks`: as in `look`.

    Raises `RefusedPlan` if a run would not equal one process, `InputError` for the task's own errors, and what
    `make_and_look` handles: `TakesGradients` (its subclasses too) and `MixesSamples`.
    """
    task, share = state.task, partial(_on_all_ranks, state)
    sample = few_samples(task, state.plan, state.mesh.world, state.device)
    state.notices += [] if task.batch is None else costly(sample)
    whole = looked_at(sample, state.plan, state.data_ranks, IN_WHOLE in state.mesh.found)
    if state.staged is not None:
        _refuse_dtypes(state, whole)
    if state.same_samples and state.mesh.data.size > 1:
        state.notices.append(on_all_samples(state))
    findings = _look_at_few(state, sample, whole, share, masks=masks)
    _refuse_dealt(state, findings)
    if findings.outside or findings.into_arguments:
        pass  # the state will be made again, with other units
    elif task.batch is not None:
        total = deal(samples_in(sample), state.plan.step_microbatches, state.data_ranks, 0)[0][3]
        _look_at_many(state, findings, sample, total, share, may_mix(state))
    else:  # the number of samples of a step is not known yet
        state.look_first = partial(_look_at_many, state, findings, whole, share=share)
    state.keeps_samples = findings.keeps_samples
    state.notices += findings.notices
    state.notices += state.chunks.notices() if state.chunks is not None else []
    _follow_writes(state, findings)
    return findings


def _refuse_dealt(state: RankState, findings: Findings) -> None:
    """Raises `RefusedPlan` for a buffer that experts under ep compute from tokens, those of other ranks included."""
    stacks = state.experts.stacks if state.experts is not None else []
    # a mixture that distributes its tokens itself has its own rank's; only its experts get those of other ranks
    paths = [f"{path}." for stack in stacks for path in (stack.members if stack.chooses else (stack.path,))]
    if lost := [name for name in findings.joined if name.startswith(tuple(paths))]:
        raise RefusedPlan(
            f"'{lost[0]}' is made of the tokens of each expert, of which a rank of ep holds some: make it in the "
            "module around, which chooses the experts, or leave ep out"
        )


def _on_all_ranks(state: RankState, problems: list[str]) -> list[str]:
    """Returns the problems that any rank found, on every rank. Collective if a forward is.

    Otherwise a problem that one rank alone sees (a growing set of the user's, a thread's counter) would send it into
    forwards that the others do not run, and its collectives would meet other ones.
    """
    cut = state.staged is not None or state.tensor is not None or state.experts is not None or state.mesh.inner
    if not cut and not isinstance(state.technique, FullShard):
        return problems
    by_rank = gather_json(problems, state.mesh.world, state.device)
    return list(dict.fromkeys(problem for of_rank in by_rank for problem in of_rank))


def _look_at_few(
    state: RankState, sample: Any, whole: Any, share: Callable[[list[str]], list[str]], *, masks: bool
) -> Findings:
    """Returns the findings of `look` on the first samples, `whole`, and two parts of them. Collective.

    sample  the batch of which `whole` is the beginning;  share  as in `look`
    """
    task, n, staged = state.task, samples_in(whole), state.staged
    # Two samples rather than one if a run gives no rank so few, since a forward may fail on one. Unequal parts show a
    # loss that is a mean.
    first = fewest_samples(task, state.plan, sample) if n > 3 else 1
    if IN_WHOLE in state.mesh.found:  # a rank's share, or half of the samples
        first = cut(n, max(2, state.data_ranks), 0)[1]
    parts = (slice_samples(sample, 0, first), slice_samples(sample, first, n)) if n > 1 else None
    reads = OutsideReads(state.module)

    def loss_of(batch: Any) -> Loss:
        loss = state.forward.local(batch)
        terms = {name: extra for name, extra in loss.extras.items() if not name.startswith(METRICS)}
        state.terms |= {name: extra.weight is not None for name, extra in terms.items()}
        return loss

    try:
        # under zero=3 a unit's weights are gathered only while it runs, so other reads of them are recorded
        with reads if state.plan.sharded.weights else nullcontext():
            findings = look(
                state.module, loss_of, whole, parts, (n, first, n - first),
                joined=state.forward.joined if task.loss_scope == "global" else None,
                dtype=state.precision.compute, strict=state.data_ranks > 1, masks=masks, share=share,
                again=partial(_in_double, state, whole, parts),
                staged=None if staged is None else staged.cut.takes_gradients, functions=(task.loss, task.inputs),
                mixes=may_mix(state),
            )  # fmt: skip
    except (ShardwiseError, TakesGradients, MixesSamples):
        raise
    except Exception as error:
        what = f"under plan {state.plan} the forward fails on {n} samples"
        of = (task, state.precision, state.module, whole, state.device, parts or ())
        raise (explained(error) or blame(error, what, *of, more=sample)) from error
    if state.plan.sharded.weights:
        # Joined over ranks, so that all make the module again with the same units.
        by_rank = gather_json([sorted(reads.units), findings.into_arguments], state.mesh.world, state.device)
        findings.outside, findings.into_arguments = (
            sorted({path for paths in by_rank for path in paths[place]}) for place in (0, 1)
        )
    return findings


def _in_double(
    state: RankState, whole: Any, parts: tuple[Any, Any] | None, asked: bool, every: bool
) -> str | None:  # fmt: skip
    """Returns the difference that rank 0 finds in float64, as text, if any rank asks; else None. Collective.

    asked, every  whether this rank asks, and whether for every gradient

    Raises `Untried` on every rank.
    """
    by_rank = gather_json([asked, every], state.mesh.world, state.device)
    if not any(asks for asks, _ in by_rank):
        return None

    def tried() -> tuple[str | None, str | None]:
        assert parts is not None
        try:
            refuse_mixed(state.module)
            every_gradient = any(all_of_them for _, all_of_them in by_rank)
            return task_differs(state.task, state.module, whole, parts, state.seed, every=every_gradient), None
        except Untried as why:  # returned as a text, since `of_first` does not pass such an error on
            return None, str(why)

    differs, untried = of_first(tried, state.mesh.world, state.device)
    if untried is not None:
        raise Untried(untried)
    return differs


def _refuse_dtypes(state: RankState, batch: Any) -> None:
    """Raises `InputError` if the forward fails by mixed dtypes in 16 bits, which may show on one stage alone.

    The other stages would wait for that one.
    """
    if state.precision.compute.itemsize >= 4:
        return
    message = ""
    with suppress(Untried):
        small = sum(param.numel() for param in state.module.parameters()) <= MOST_ELEMENTS
        error = failure_alone(state.task, state.precision, batch, state.device) if small else None
        # only an error of mixed dtypes counts, for which `parallelize` then runs ops in one dtype
        message = "" if error is None or met_at(state.task, state.plan, error) is None else str(error)
    for failure in filter(None, gather_json(message, state.mesh.world, state.device)):
        raise InputError(f"the forward fails on {samples_in(batch)} samples in 16 bits: {failure}")


def _look_at_many(
    state: RankState, findings: Findings, sample: Any, total: int, share: Callable[[list[str]], list[str]],
    mixes: bool = False,
) -> None:  # fmt: skip
    """Runs the module on `total` samples, as many as a micro-batch has, and on the ranks' parts of them. Collective.

    Raises `RefusedPlan`, or with `mixes` `MixesSamples` (look_at_many), if the loss or the statistics of batch norms
    differ for the parts.
    """
    ranks, task = range(state.data_ranks), state.task
    sizes = [high - low for low, high in (cut(total, state.data_ranks, rank) for rank in ranks)]
    if state.order is not None:  # deterministic: a rank computes its samples in pieces, so these are the parts
        runs = [run for rank in ranks for run in state.order.pieces.samples(total, rank)]
        sizes = [last - first for first, last in runs]
    tried = sizes_to_try(sizes, findings.sample_bytes)
    if not tried and state.staged is not None:
        tried = [total]  # at least the whole, since stages were derived from fewer samples
    if not tried:
        state.notices += too_many(sizes, findings.widest)
        return
    many, forward, outputs = many_of(sample, tried), state.forward, []

    def keep_output(batch: Any) -> Loss:
        batch = forward.to_device(batch)
        outputs.append((forward.output(batch), batch))
        # A loss over pairs of samples means nothing on a part: only the whole's is computed, and the joined parts'.
        whole = len(outputs) == 1
        return forward.shared(lambda: loss_on(task, *outputs[0])) if whole else Loss(torch.zeros(()), 0.0)

    def look_at() -> list[str]:
        together = task.loss_scope == "global"
        joined = (lambda: forward.shared(lambda: forward.joined_of(*zip(*outputs, strict=True)))) if together else None
        outputs.clear()  # `gently` may try a second time, with gradients
        return look_at_many(
            state.module, keep_output if together else forward.local, many, dtype=state.precision.compute,
            joined=joined, functions=(task.loss, task.inputs), mixes=mixes,
        )  # fmt: skip

    staged = None if state.staged is None else state.staged.cut.takes_gradients
    state.phase.looked_at = True  # batch norms, already joined over ranks, use this rank's own samples meanwhile
    try:
        problems = share(gently(state.module, look_at, share=share, staged=staged))
    except (ShardwiseError, TakesGradients, MixesSamples):
        raise
    except Exception as error:
        what = f"under plan {state.plan} the forward fails on {sum(tried)} samples"
        raise blame(error, what, task, state.precision, state.module, many.whole, state.device, many.parts) from error
    finally:
        state.phase.looked_at = False
    if problems:
        raise RefusedPlan("; ".join(problems))


def on_all_samples(state: RankState) -> str:
    """Returns the notice for data ranks that all run the model on all samples; raises `RefusedPlan` if they cannot."""
    plan = state.plan
    for key, value in (("deterministic", plan.deterministic), ("ep", plan.ep if plan.ep > 1 else 0)):
        if value:
            raise RefusedPlan(
                f'loss_scope="model" has every data rank run the model on all samples, and {key} cuts a batch over '
                "data ranks: leave it out"
            )
    return (
        f'loss_scope="model": each of {state.mesh.data.size} data ranks runs the model on all samples of a '
        "micro-batch, so that it may mix them; what zero shards is saved, and no time"
    )


def may_mix(state: RankState) -> bool:
    """Whether modules that mix samples may run on all ranks' samples under this plan (parallel/on_all_samples)."""
    # experts under ep would get each token once from every rank
    whole = state.staged is None and state.experts is None and not state.plan.deterministic
    # ranks that take other branches would not meet in its collectives
    return state.data_ranks > 1 and whole and state.task.branches == "same"


def make_and_look(make: Callable[[Collection[str]], RankState], *, masks: bool) -> tuple[RankState, Findings]:
    """Returns (state, findings of the look at it), in which units of zero=3 hold what their own forwards read.

    make   `enclosed` of `assemble` -> a state
    masks  whether masks will follow global indices, so that these are tried too

    If the look finds a weight that is read while its unit does not run, the state is made again with that unit's
    parameters in the unit around it; if it finds one that is written, with that one unsharded; until there are none.
    Collective.
    """
    enclosed, mixing = dict[str, str](), list[str]()
    while True:
        state = make(enclosed)  # what is enclosed is no unit any more, so the loop ends
        install(state.module, dict.fromkeys(mixing), state.mesh.data, state.phase)
        try:
            new, findings = _looked(state, masks)
        except MixesSamples as mixed:
            mixing += modules_around(mixed, mixing)
            continue
        if findings is not None and not new:
            break
        enclosed |= new
        del state, findings
        gc.collect()  # modules and hooks form reference cycles, and their weights must not be held twice
    for why in sorted(set(enclosed.values())):
        first, *more = sorted(path for path, of in enclosed.items() if of == why)
        kind, then = ("parameters", _HELD_WHOLE) if why == _WRITTEN else ("units", _AROUND)
        state.notices.append(f"zero=3: '{first}'{f' (and {len(more)} more {kind})' if more else ''} {why}, {then}")
    if mixing:
        state.notices.append(told_mixing(mixing, state.data_ranks))
    paths = {child: path for path, child in state.module.named_modules()}
    norms = [paths[norm] for norm in findings.batch_norms]
    plain = replace(findings, batch_norms=[])
    mixers = {path: state.module.get_submodule(path).forward.learnt for path in mixing}
    state.mesh.found[LOOK] = Looked(plain, norms, enclosed, dict(state.terms), state.forward.batched, mixers)
    return state, findings


LOOK = "look"  # key in `Mesh.found`


@dataclass(frozen=True)
class Looked:
    """Results of the look at one engine of a task, for use by another engine of it.

    findings  without batch norms, which are modules of the other engine
    norms     paths of the batch norms
    enclosed  path -> why `assemble` must not make it a unit or shard it
    terms     of `RankState`;  batched  of `Forward`
    mixers    path of a module that mixes samples -> `OnAllSamples.learnt`
    """

    findings: Findings
    norms: list[str]
    enclosed: dict[str, str]
    terms: dict[str, bool]
    batched: list[bool] | None
    mixers: dict[str, tuple]


def as_looked(state: RankState, looked: Looked) -> Findings:
    """Returns the findings of a look at another engine of the task, for this one's modules; runs nothing."""
    findings = replace(looked.findings, batch_norms=[*map(state.module.get_submodule, looked.norms)])
    state.terms, state.keeps_samples = dict(looked.terms), findings.keeps_samples
    state.forward.batched = looked.batched
    install(state.module, looked.mixers, state.mesh.data, state.phase)
    _follow_writes(state, findings)
    return findings


_WRITTEN = "is written by the forward"
_HELD_WHOLE = "so every rank holds it whole; its gradient and optimizer state are in pieces"
_AROUND = "so its weights are gathered with what lies around it, and stay whole while that runs"


def _looked(state: RankState, masks: bool) -> tuple[dict[str, str], Findings | None]:
    """Returns (path -> why zero=3 must not make it a unit or shard it, findings; None if the look did not end).

    The paths are of units, which then belong to the unit around them, and of parameters, which stay unsharded.
    """
    units = [path for path, child in state.module.named_modules() if path and isinstance(child, FSDPModule)]
    try:
        findings = look_at_task(state, masks=masks)
    except InsideTransform as inside:
        if state.staged is not None:  # not handled, since other stages would wait for this one
            raise RefusedPlan(
                f"unit '{inside}' runs inside a torch.func transform, where zero=3 cannot gather its weights: let "
                "wrap= name modules whose own forward calls the transform, or use zero=2"
            ) from None
        # the transform may run the units beside this one too
        around = str(inside).rpartition(".")[0]
        beside = [path for path in units if not around or path.startswith(f"{around}.")]
        return dict.fromkeys(beside, "runs inside a torch.func transform"), None
    except WritesWeights as written:
        return dict.fromkeys(written.names, _WRITTEN), None
    except TakesGradients:  # its second backward needs all weights, which the root unit alone keeps until then
        return dict.fromkeys(units, "lies in a forward that takes gradients itself (torch.autograd.grad)"), None
    new = dict.fromkeys(findings.into_arguments, "writes into what it is given, which its hooks wrap")
    return new | dict.fromkeys(findings.outside, "has weights that are read outside its forward"), findings


def follow_draws(state: RankState, findings: Findings) -> None:
    """Makes random numbers follow global indices, if the look saw random ops. Raises `RefusedPlan` for compiled blocks.

    A compiled block hides single operations, so its random numbers could not equal one process's.
    """
    draws = findings.draws
    state.global_random = GlobalRandom(findings.dims, findings.scores or draws is None, lambda: state.phase.same)
    # with compile, a watched step would have to run the blocks eagerly
    state.watch.idle = draws == [] or (draws is None and state.plan.compile)
    # []: none was seen; None: nothing was looked for
    if not draws:
        return
    what = f"the model draws random numbers ({draws[0]}{f' and {len(draws) - 1} more' if len(draws) > 1 else ''})"
    if state.plan.compile:
        raise RefusedPlan(f"{what}, {HIDDEN}")
    slow = "" if has_kernel(state.device) else WITHOUT.get(state.device.type, "")
    cost = "a hash for each" + (f", by a dozen operations, since {slow}" if slow else "")
    cost += ", and attention with dropout writes its scores" if findings.scores else ""
    state.notices.append(
        f"{what}: they are those of one process under any plan of as many micro-batches, at {cost}; with "
        "randomness=fast each rank draws its own, faster"
    )


def _follow_writes(state: RankState, findings: Findings) -> None:
    """Records a forward that writes into parameters; raises `RefusedPlan` if master weights lie beside these."""
    if findings.written and state.precision.mixed:
        raise RefusedPlan(
            f"the forward writes into parameter '{findings.written[0]}', and precision={state.plan.precision} keeps "
            "its master beside it, so that the next update would undo the write: make it a buffer, or use fp32"
        )
    state.written, state.norms = bool(findings.written), findings.batch_norms
    # buffers that other stages read, since a backward that changes one is refused (step/backward_writes)
    if state.staged is not None:
        by_stage = gather_json(findings.read, state.mesh.pp, state.device)
        del by_stage[state.mesh.pp.index]
        state.read_elsewhere = {name for names in by_stage for name in names}
    # A block that runs again in backward must find weights and buffers as its first run did.
    if state.plan.remat != "none":
        note_written(state.module, [*findings.written, *findings.changed], findings.batch_norms)
