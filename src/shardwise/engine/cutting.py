"""Cut the recorded forward into pipeline stages, in runs and rehearsals (`cut_forward`), with notices on the result.

A parameter belongs to each stage whose part of the forward uses it. A parameter that the recorded forward did not use
(an expert that got no token) belongs to the stages in which its module ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.comm import gather_rows
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.host import put
from shardwise.layout import Plan
from shardwise.layout.schedules import Schedule, schedule_of
from shardwise.look.one_process import blame
from shardwise.look.samples import IN_WHOLE, few_samples
from shardwise.mesh import Mesh
from shardwise.parallel.pipeline.boundaries import CutPoint, Stage, StagePlacement
from shardwise.parallel.pipeline.chance import repeated
from shardwise.parallel.pipeline.cut_points import choose, make_stages
from shardwise.parallel.pipeline.lasting import kept_on, kept_twice
from shardwise.precision import Precision
from shardwise.step.batching import samples_in, slice_samples
from shardwise.step.forward import output_alone
from shardwise.task import Task
from shardwise.trace.blocks import Blocks
from shardwise.trace.deferred import Built, seed_of
from shardwise.trace.flow import Flow
from shardwise.trace.recorded import trace_forward

TRIES = 24  # forwards recorded, if random numbers leave out calls, to see all calls at least once
UNEVEN = 1.5  # times the mean, from which a stage's share is worth a notice


def cut_module(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, blocks: Blocks,
    inseparable: Sequence[str] = (),
) -> StagePlacement:  # fmt: skip
    """Returns the stages into which the task's forward is cut, from a forward of a few samples. Collective.

    blocks       the module's repeated blocks; stages begin between them if there are enough
    inseparable  paths of modules inside which no stage may begin, whatever the plan
    Raises `RefusedPlan`, with the reason, if the forward cannot be cut.
    """

    def agreed() -> StagePlacement:
        sample = few_samples(task, plan, mesh.world, mesh.device)
        cut, notice = cut_forward(task, plan, precision, sample, built, blocks, mesh.pp.index, inseparable)
        _agree(cut, mesh)
        cut.notices = _notices(cut, notice)
        # the look then takes whole micro-batches at once: if it failed on few samples in one stage, others would wait
        if cut.in_groups:
            mesh.found[IN_WHOLE] = True
        return cut

    return mesh.once("stages", agreed)


def cut_forward(
    task: Task, plan: Plan, precision: Precision, sample: Any, built: Built, blocks: Blocks, rank: int,
    inseparable: Sequence[str] = (),
) -> tuple[StagePlacement, str]:  # fmt: skip
    """Returns (stages as pipeline rank `rank` has them, a notice or ""). Needs no process group.

    sample       a batch of a few samples
    blocks       the module's repeated blocks
    inseparable  paths of modules inside which no stage may begin
    The notice says that the forward was recorded on real tensors, since fake tensors were not enough.
    Raises `RefusedPlan` as `cut_module` does, `InputError` for a forward that fails in one process as well.
    """
    schedule = schedule_of(plan)
    available = samples_in(sample)
    module = built.module
    sizes = _sizes(available)
    counts = sizes[0]
    few = [slice_samples(sample, 0, count) for count in counts]
    try:
        (flow, notice), (other, _) = (_traced(task, plan, precision, built, part, n) for n, part in enumerate(few))
    except ShardwiseError:
        # A module that cuts samples into groups may run on some numbers of them alone.
        runs = partial(_runs, task, precision, built, sample)
        counts = next(filter(runs, sizes[1:]), None) or counts
        if counts == sizes[0]:
            raise
        few = [slice_samples(sample, 0, count) for count in counts]
        (flow, notice), (other, _) = (_traced(task, plan, precision, built, part, n) for n, part in enumerate(few))
    # Random numbers may leave out calls (dropped layers), so one run may not show all of them.
    if flow.order != other.order or flow.moved or flow.read_draws:
        tries = (map(partial(_traced, task, plan, precision, built, part), range(TRIES)) for part in few)
        flow, other = _fullest((flow for flow, _ in traced) for traced in tries)
    # some modules are called once for each sample, for example; no stage begins among their calls
    if flow.order != other.order:
        # the fuller of the two is cut, so that all calls are known; `counts` follow
        flow, other, counts = (
            (flow, other, counts) if len(flow.order) > len(other.order) else (other, flow, counts[::-1])
        )
        flow.repeats = repeated(flow, other)
    # A block that is recomputed, compiled or gathered as one unit must lie in one stage.
    whole = plan.remat != "none" or plan.compile or plan.sharded.weights
    units = [*inseparable, *(blocks.paths if whole else ())]
    # only a forward that takes gradients itself has any that could go from stage to stage
    apart = _apart(plan, schedule) if flow.taken else ""
    places = _places(flow, module, schedule.stages, plan, blocks, units, apart)
    if schedule.stages > schedule.ranks and (kept := kept_twice(flow, places)):
        raise RefusedPlan(
            f"the forward changes {kept} for the next one to find, and under schedule={schedule.name} a rank runs it "
            "once for each of its stages: use schedule=1f1b"
        )
    stages = make_stages(flow, other, counts, places)
    holders, buffers = _holders(flow, module, stages, schedule)
    cut = StagePlacement(schedule, stages, holders, buffers, rank, _shares_draws(flow, stages))
    cut.in_groups = min(counts) > min(sizes[0])
    cut.by_values = bool(notice or flow.later or flow.varies or flow.repeats)  # or by what was left, or by chance
    tensors = (*module.named_parameters(), *module.named_buffers())
    cut.written = [name for name, t in tensors if id(t) in flow.stateful and t.is_floating_point()]
    return cut, notice


def _sizes(available: int) -> list[tuple[int, int]]:
    """Returns pairs of sample counts, at most `available`; the forward is recorded on the first pair on which it runs.

    Two counts show which shapes depend on the number of samples.
    """
    more = [(2**n, 2 ** (n + 1)) for n in range(1, 8)] + [(available // 2, available)]
    return [(min(2, available), min(3, available)), *(pair for pair in more if pair[0] and pair[1] <= available)]


def _runs(task: Task, precision: Precision, built: Built, sample: Any, counts: tuple[int, int]) -> bool:
    """Whether the forward can be recorded on the first `counts[0]`, and on the first `counts[1]`, samples."""
    built.module.train()
    try:
        for count in counts:
            part = slice_samples(sample, 0, count)
            trace_forward(built, output_alone(task, precision), part, 0, precision.dtype_of)
    except Exception:
        return False
    return True


def _traced(
    task: Task, plan: Plan, precision: Precision, built: Built, sample: Any, seed: int
) -> tuple[Flow, str]:  # fmt: skip
    """Returns (the forward recorded on `sample`, the notice of `cut_forward`). `seed`: of its random numbers.

    Raises `InputError` if the task fails without a plan too, else `RefusedPlan`.
    """
    built.module.train()  # a step runs it so, with dropout and batch norm
    try:
        return trace_forward(built, output_alone(task, precision), sample, seed, precision.dtype_of)
    except ShardwiseError:
        raise
    except Exception as error:
        what = f"pp={plan.pp}: the forward cannot be followed on {samples_in(sample)} samples to find stages"
        raise blame(error, what, task, precision, built.module, sample) from error


def _fullest(flows: Iterable[Iterator[Flow]]) -> tuple[Flow, Flow]:
    """Returns one recorded forward for each of two sample counts, both with all calls that any run made.

    flows  for each sample count an iterator of recorded forwards of different seeds, which are run when taken from it

    If no run has all calls, or the two counts differ in them, returns a forward of each count whose calls differ.
    """
    (first, *more), others = flows
    tries, second = [first, *more], list[Flow]()
    fullest = next((flow for flow in tries if all(_among(tried.order, flow.order) for tried in tries)), None)
    if fullest is not None:  # else no flow has all calls: two layers of which either one runs, never both
        second = [*others]
        # of the other number too: what one number of samples leaves out by chance must not be what decides by samples
        other = next((tried for tried in second if tried.order == fullest.order), None)
        if other is not None and all(_among(tried.order, fullest.order) for tried in second):
            always = set(fullest.order).intersection(*(tried.order for tried in (*tries, *second)))
            fullest.varies = frozenset(set(fullest.order) - always)
            return fullest, other
    for unlike in chain(second, others):
        if unlike.order != first.order:
            break
    return first, unlike


def _among(some: list[tuple[str, int]], calls: list[tuple[str, int]]) -> bool:
    """Whether `some` is a subsequence of `calls`, both lists of (module path, number of the call)."""
    left = iter(calls)  # `in` takes from it up to the call: a later one must come behind it
    return all(call in left for call in some)


def _places(
    flow: Flow, module: nn.Module, count: int, plan: Plan, blocks: Blocks, units: list[str], apart: str
) -> list[CutPoint]:  # fmt: skip
    """Returns the `count - 1` points at which stages begin, without the first stage's.

    units  paths of modules inside which no stage may begin
    apart  reason why no gradient taken by the forward may cross stages, "" if it may (`_apart`)
    Points lie between blocks if there are enough of these, else also inside blocks that are no `units`.
    """
    if plan.stages:
        return choose(flow, module, count, plan.stages, units, apart)
    try:
        return choose(flow, module, count, (), [*units, *blocks.paths], apart)
    except RefusedPlan:
        return choose(flow, module, count, (), units, apart)


def _apart(plan: Plan, schedule: Schedule) -> str:
    """Returns why a gradient that the forward takes (`torch.autograd.grad`) may not cross stages; "" if it may.

    The text is appended to a refusal, so it begins with a full stop.
    """
    what = (
        ". Over other places goes a gradient that the forward takes itself (torch.autograd.grad) of what other "
        "pipeline stages compute, which"
    )
    if schedule.stages > schedule.ranks:
        return f"{what} schedule={schedule.name} has on one rank: use schedule=1f1b"
    if plan.sharded.weights:
        return f"{what} free their weights under zero=3 before its second backward: use zero=2"
    return f"{what} hold shares of positions (cp, domain): leave out one or the other" if plan.cut_positions > 1 else ""


def _holders(
    flow: Flow, module: nn.Module, stages: list[Stage], schedule: Schedule
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Returns (parameter name -> pipeline ranks that hold it, buffer name -> pipeline rank with its right values)."""

    def ranks(indices: list[int]) -> tuple[int, ...]:
        return tuple(sorted({schedule.owner[index] for index in indices}))

    holders = {}
    where = _Where(flow, stages)
    for name, param in module.named_parameters():
        used = [stage.index for stage in stages if id(param) in stage.parameters]
        # a parameter unused here (an expert without a token) may be used on other samples, so its module's stage has it
        holders[name] = ranks(used or where.of(module, param))
    _check_union(module, holders, stages)
    buffers = {}
    kept = kept_on(flow, [stage.entry for stage in stages if stage.entry is not None])
    for name, buffer in module.named_buffers():
        used = [stage.index for stage in stages if id(buffer) in stage.buffers]
        # Of stages that use it, the last one, since each may write it and one process ends with the last write.
        right = kept.get(id(buffer)) or used or where.of(module, buffer)
        buffers[name] = schedule.owner[max(set(right) & set(used) or right)]
    return holders, buffers


class _Where:
    """Finds the stages in which the module that holds a tensor runs."""

    def __init__(self, flow: Flow, stages: list[Stage]):
        self.stages = stages
        self.spans: dict[str, list[tuple[int, int]]] = {}
        # After the first value read in Python other samples may take another branch, in any later stage.
        first = min((*(op.time for op in flow.ops if op.reads_value), *flow.backwards), default=math.inf)
        self.decided = [stage.index for stage in stages if first < stage.stop]
        for call in flow.calls():
            self.spans.setdefault(call.path, []).append((call.enter, call.exit))

    def of(self, module: nn.Module, tensor: torch.Tensor) -> list[int]:
        """Returns indices of the stages in which the module that has `tensor` as its own parameter or buffer runs.

        If it did not run: the stages after the first value read in Python, which may take another branch on other
        samples; [0] without such a read, or if no module has the tensor.
        """
        for path, child in module.named_modules():
            if any(tensor is own for own in (*child._parameters.values(), *child._buffers.values())):
                while path and path not in self.spans:  # a container whose parent reads its weights
                    path = path.rpartition(".")[0]
                spans = self.spans.get(path, [])
                stages = {s.index for s in self.stages for enter, leave in spans if s.start < leave and enter < s.stop}
                return sorted(stages) or self.decided or [0]
        return [0]


def _check_union(module: nn.Module, holders: dict[str, tuple[int, ...]], stages: list[Stage]) -> None:
    """Raise `RefusedPlan` if no stage holds some parameter, or if a stage has no parameter to train."""
    # such a parameter would be trained by nobody
    lost = [name for name, _ in module.named_parameters() if not holders.get(name)]
    if lost:
        raise RefusedPlan(f"parameters {lost[:3]} are on no pipeline stage")
    trained = {id(param) for param in module.parameters() if param.requires_grad}
    for stage in stages:
        # by identity, as a frozen parameter does not count
        if not stage.parameters & trained:
            begins = f"at {stage.entry.call.label}" if stage.entry is not None else "at the start"
            raise RefusedPlan(
                f"stage {stage.index}, which begins {begins}, has no parameter to train: use fewer stages, or name "
                "others with stages="
            )


def _shares_draws(flow: Flow, stages: list[Stage]) -> bool:
    """Whether a later stage uses, or branches by, random numbers that the forward draws before the stage begins."""
    starts = [stage.start for stage in stages[1:]]
    uses = [(made, last) for drawn, made, last in zip(flow.drawn, flow.made, flow.last_use, strict=True) if drawn]
    uses += [(time, flow.around(time).exit) for time in flow.read_draws]
    return any(made < start < last for made, last in uses for start in starts)


def _agree(cut: StagePlacement, mesh: Mesh) -> None:
    """Raise `RefusedPlan` on all ranks if they did not cut the forward at the same places. Collective."""
    text = "|".join(f"{stage.start},{stage.stop},{stage.entry and stage.entry.call.label}" for stage in cut.stages)
    mine = put([float(seed_of(text) % 2**50)], mesh.device)
    table = gather_rows(mine, mesh.world)
    if not bool((table == table[0]).all()):
        raise RefusedPlan(
            "the forward does other operations on one rank than on another, so that they would cut it at different "
            "places: something outside of the module keeps what an earlier forward made (a cache of tables, which one "
            "rank filled while it searched for all), or Task.model and Task.inputs differ by rank. Use pp alone, or "
            "make the table in the constructor"
        )


def _notices(cut: StagePlacement, notice: str) -> list[str]:
    """Returns lines for the user on where stages begin, their shares of the work, and the pipeline bubble.

    notice  of `cut_forward`, appended unless it is ""
    """
    total = sum(stage.cost for stage in cut.stages)
    shares = [stage.cost / total for stage in cut.stages]
    entries = [stage.entry.call for stage in cut.stages if stage.entry is not None]
    # a stage may begin at a function of torch within a module's own code, which has no path
    begins = [call.path if call.own is None else call.label for call in entries]
    notices = [
        f"pipeline of {len(cut.stages)} stages on {cut.schedule.ranks} ranks, schedule {cut.schedule.name}; stages "
        f"begin at {', '.join(begins)}; shares of the work {', '.join(f'{share:.0%}' for share in shares)}; were they "
        f"equal, ranks would wait {cut.schedule.bubble():.0%} of the time"
    ]
    if max(shares) > UNEVEN / len(shares):
        notices.append(
            f"stage {shares.index(max(shares))} has {max(shares) * len(shares):.1f} times the mean work, for which the "
            "others wait: there is no better place to cut, unless stages= names one"
        )
    return notices + ([notice] if notice else [])
