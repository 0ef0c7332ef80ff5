"""A run's second proof, in its own precision, by a plain loop of its own, for plan keys that round.

    one process   a plain loop of SGD steps, ten by default: weights in the compute dtype, made anew each step from
                  masters; gradients added up in the plan's `reduce_dtype`; fp16 with a loss scale, and one step that
                  overflows
    three more    the same, with every weight and input nudged by one epsilon of the compute dtype in each forward
    N ranks       the engine under the plan

    bar of a tensor = 3 * the largest difference of the three from the first, at least one unit in the last place of
                      its largest element, and at most how far it moved. An error above that which one epsilon explains
                      is NOT PROVEN, except for weights that moved by rounding alone, since their gradient is zero (the
                      biases of attention's keys)

SGD is used because its update is the gradient: a wrong factor, such as a loss scale that was not divided out, shows in
full, where Adam would cancel it. Its learning rate moves the weights by a few thousandths in each step.

`compile=true` is proven here: a compiled block has kernels of its own, which round in no other dtype than the plan's.

What this does not do: compiled blocks of a model that draws (masks by global index need eager ops), and errors as small
as rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine.engine import parallelize
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.proof import dtypes
from shardwise.proof.dtypes import SeenDtypes
from shardwise.proof.literal import count_of, loss_of, samples_of
from shardwise.proof.literal_dtypes import OneDtype
from shardwise.proof.oracle import plain_module
from shardwise.proof.outcome import Parity
from shardwise.proof.settings import Settings, global_batch, nudged
from shardwise.proof.sizes import small_of, small_sizes
from shardwise.random import BatchDims, GlobalRandom, Samples
from shardwise.random.follow_draws import HIDDEN
from shardwise.task import Task

OVERFLOWS = 2  # the step whose gradients are made infinite, if there is a loss scale
NUDGES = 3
ALLOWANCE = 3  # factor on the effect of one epsilon
FEW_THOUSAND = 2**13  # squares that a norm adds up at a time in the dtype of masters
MOST_BAR = 1.0  # relative to how far a weight moved
STILL = 1e-6  # fraction of the largest move of any weight below which a weight moved by rounding alone
MOVE, COARSE_MOVE = 0.002, 0.01  # relative size of the first update; the latter for masters in 16 bits, which lose less


@dataclass
class Narrow:
    """The outcome of steps in a narrow precision: each step's loss and norm, and weights in float64.

    rate     the learning rate
    initial  master weights before the first step; the final ones are in `weights`
    skipped  number of steps that overflowed
    scales   the loss scale after each step; 0 if there is none
    dtypes   of one process in the first step; of a rank in one step more
    adds_up  whether the loss is one sum over samples, however they are grouped
    notices  of the engine, on compiled blocks
    """

    rate: float
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of the gradient, before clipping
    # those norms with squares added up in the dtype of masters, (from the first on, from the last on)
    rounded: list[tuple[float, float]] = field(default_factory=list)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    skipped: int = 0
    scales: list[float] = field(default_factory=list)
    dtypes: SeenDtypes = field(default_factory=SeenDtypes)
    adds_up: bool = True
    notices: list[str] = field(default_factory=list)


def verify_precision(job: Any, plan: Plan, settings: Settings, on_ranks: Callable[..., list[Any]]) -> Parity:
    """Returns a `Parity` of losses and final weights, whose errors are relative to how far each weight moved.

    job        its `build_task()` makes the task, here and on every rank
    settings   seed, clip_norm, accumulate, own_steps and samples of a batch
    on_ranks   (function, world size, *args) -> the list of every rank's result
    """
    parity = Parity(str(plan), plan.world_size, bars={"loss": 0.0, "norm": 0.0, "parameter": 0.0})
    parity.precision = plan.precision
    task = job.build_task()
    try:
        reference = plain_steps(task, plan, settings)
    except Exception as failure:
        message = str(failure).splitlines()[0] if str(failure) else ""
        parity.loss_error = 0.0
        parity.unproven.append(f"one process cannot run in {plan.precision}: {type(failure).__name__}: {message}")
        return parity
    # if a loss is one sum over samples, one nudged run adds it up in parts, as ranks do
    parts = plan.data_ranks if reference.adds_up else 1
    nudges = [
        plain_steps(task, plan, replace(settings, nudge=n), reference.rate, parts if n == NUDGES else 1)
        for n in range(1, NUDGES + 1)
    ]
    ranks = _under_plan(parity, job, plan, settings, reference.rate, on_ranks)
    under_plan = ranks[0]
    parity.differences += dtypes.first_differences(plan, [rank.dtypes for rank in ranks], reference.dtypes)
    if under_plan.skipped != reference.skipped:
        skipped = f"{under_plan.skipped} steps skipped by overflow, in one process {reference.skipped}"
        # just after the loss scale has grown, an epsilon or a smaller part decides whether a step overflows
        chance = any(run.skipped == under_plan.skipped for run in nudges)
        (parity.unproven if chance else parity.differences).append(skipped)
    elif (under := _scales(plan, under_plan)) != (alone := _scales(plan, reference)):
        parity.differences.append(f"the loss scale is {under}, in one process {alone}")
    of = partial(_compare_numbers, parity, plan)
    parity.loss_error = of("loss", reference.losses, [run.losses for run in nudges], under_plan.losses)
    parity.norm_error = of(
        "norm",
        reference.norms,
        [run.norms for run in nudges] + [*map(list, zip(*reference.rounded, strict=True))],
        under_plan.norms,
    )
    distances = {name: _largest(value - reference.initial[name]) for name, value in reference.weights.items()}
    still: list[str] = []
    for name, value in reference.weights.items():
        moved, largest = distances[name], _largest(value)
        response = max(_largest(run.weights[name] - value) for run in nudges)
        # a weight that no nudge changed may still round the other way under the plan, by one unit
        ulp = torch.finfo(_master(plan)).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0
        unit = moved or max(largest, 1e-300)  # a weight that did not move is measured by its own size
        allowed = max(ALLOWANCE * response, ulp) / unit
        error = _largest(under_plan.weights[name] - value) / unit
        parity.parameter_error[name] = error = error if error == error else math.inf
        parity.own_bars["parameter", name] = bar = min(allowed, max(MOST_BAR, ulp / unit))
        if bar < error <= allowed:
            parity.noisy.add(("parameter", name))
            # a weight that rounding alone moved (its gradient is zero) proves nothing, but raises no doubt either
            why = f"'{name}' differs by {error:.1e} of how far it moved, as one epsilon explains"
            (still if moved <= STILL * max(distances.values()) else parity.unproven).append(why)
    if still:
        parity.notes.append(f"moved by rounding alone: {still[0]}" + (f" ({len(still)} such)" if still[1:] else ""))
    if reference.skipped == settings.own_steps:
        parity.unproven.append(
            f"all {settings.own_steps} steps overflowed in one process in {plan.precision}, so that none was taken: "
            "use smaller inputs or losses, or precision=bf16"
        )
    elif not any(not torch.equal(value, reference.initial[name]) for name, value in reference.weights.items()):
        parity.unproven.append("no weight moved in one process")
    parity.notes.append(
        f"{plan.precision}, gradients summed in {str(_reduce(plan)).removeprefix('torch.')}; {settings.own_steps} "
        f"steps of SGD at lr {reference.rate:.2g}; errors are relative to how far a weight moved, bars {ALLOWANCE} "
        "times what one epsilon does to one process"
    )
    if plan.compile and not parity.equal and verify_precision(job, plan.with_(compile=False), settings, on_ranks).equal:
        parity.notes.append(
            f"without compile the same plan is equal: what torch {torch.__version__} makes of these blocks on "
            f"{settings.device} computes something else; leave compile=true out"
        )
    return parity


def _under_plan(
    parity: Parity, job: Any, plan: Plan, settings: Settings, rate: float, on_ranks: Callable[..., list[Any]]
) -> list[Narrow]:
    """Returns every rank's `Narrow` under the plan; not compiled, with a note, if the model draws random numbers."""
    plan = plan.with_(optimizer_state="full")  # SGD has no state to encode
    try:
        ranks = on_ranks(narrow_rank, plan.world_size, job, plan, settings, rate)
    except RefusedPlan as refusal:
        if HIDDEN not in str(refusal):
            raise
        # a run itself compiles with randomness=fast, whose masks differ by rank and cannot be compared
        parity.notes.append(f"compile=true is left out: {refusal}")
        return on_ranks(narrow_rank, plan.world_size, job, plan.with_(compile=False), settings, rate)
    parity.notes += ["blocks are compiled on ranks, and not in the one process"] if plan.compile else []
    parity.notes += ranks[0].notices
    return ranks


def _compare_numbers(
    parity: Parity, plan: Plan, kind: str, reference: list[float], nudges: list[list[float]], actual: list[float]
) -> float:  # fmt: skip
    """Returns the largest relative error of any step, and sets the bar of `kind` ("loss", "norm") in `parity`.

    The bar is `ALLOWANCE` times the largest change by one epsilon in any step, since the rounding of one sum is random
    and may be zero in the step in which ranks differ. It is at least two units in the last place, since both sides add
    up in another order, which nudged weights do not show.

    reference, nudges, actual  the numbers of each step in one process, in each nudged run, and under the plan
    """
    finite = [step for step, value in enumerate(reference) if math.isfinite(value)]  # overflows are counted elsewhere
    of = {step: max(abs(reference[step]), 1e-300) for step in finite}
    responses = [abs(nudged[step] - reference[step]) / of[step] for nudged in nudges for step in finite]
    least = 2 * torch.finfo(torch.promote_types(_compute(plan), torch.float32)).eps
    parity.bars[kind] = max(ALLOWANCE * max(responses, default=0.0), least)
    errors = [abs(actual[step] - reference[step]) / of[step] for step in finite]
    return max((error if error == error else math.inf for error in errors), default=0.0)


def _scales(plan: Plan, run: Narrow) -> list[float]:
    """Returns the loss scale after each step; relative to the first if that depends on the split of micro-batches."""
    first = run.scales[0] or 1.0 if plan.deterministic else 1.0
    return [scale / first for scale in run.scales]


def _largest(tensor: torch.Tensor) -> float:
    """Returns the largest absolute value; 0 for a tensor without elements."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _compute(plan: Plan) -> torch.dtype:
    return dtypes.said(plan)[0]


def _master(plan: Plan) -> torch.dtype:
    return dtypes.said(plan)[1]


def _reduce(plan: Plan) -> torch.dtype:
    return dtypes.said(plan)[2]


def _sgd(rate: float, groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=rate)


def narrow_rank(job: Any, plan: Plan, settings: Settings, rate: float) -> Narrow:
    """Returns one rank's losses, norms and loss scales in the plan's own precision, rank 0's with weights.

    Collective.
    """
    task, now = job.build_task(), [-1]
    # one step is made to overflow, so that the loss scale of fp16 has to shrink
    loss = spoiling(task.loss, lambda: now[0] == OVERFLOWS and _compute(plan) == torch.float16)
    engine = parallelize(task.with_(optimizer=partial(_sgd, rate), loss=loss), plan, **settings.of_engine)
    record = Narrow(rate)
    for step in range(settings.own_steps):
        now[0] = step
        with small_sizes():
            result = engine.step(global_batch(task, settings, step))
        # 0.0 stands for no loss scale (fp16 alone has one)
        record.scales.append(engine.state.scale.value if engine.state.scale is not None else 0.0)
        record.losses.append(float(result.loss))
        record.norms.append(float(result.grad_norm))
        record.skipped += bool(result.skipped)
    # collective, so every rank gathers the weights, though rank 0 alone keeps them
    weights = {name: tensor.detach().double().cpu().clone() for name, tensor in engine.full_parameters()}
    record.weights = weights if engine.rank == 0 else {}
    # dtypes are recorded in one step more, so that recording cannot change the compared steps
    with dtypes.watched(engine) as record.dtypes:
        engine.step(global_batch(task, settings, settings.own_steps))
    record.notices = [notice for notice in engine.notices if notice.startswith("compile leaves")]
    return record


def spoiling(loss: Callable[..., Any], now: Callable[[], bool]) -> Callable[..., Any]:
    """Returns the loss function, changed so that its backward gives infinite gradients while `now()` is true."""

    @wraps(loss)
    def spoilt(output: Any, *args: Any) -> Any:
        if now() and torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda gradient: gradient * math.inf)
        return loss(output, *args)

    return spoilt


def plain_steps(task: Task, plan: Plan, settings: Settings, rate: float | None = None, parts: int = 1) -> Narrow:
    """Returns the `Narrow` of one process in the plan's precision, by a plain loop.

    rate   learning rate; None: chosen in the first step
    parts  number of parts into which the samples of each micro-batch are split, as over ranks. What 16 bits lose where
           a kernel adds up many rows (an embedding's gradient) is less in a part, which nudged weights do not show
    """
    compute, master = _compute(plan), _master(plan)
    module = plain_module(task, replace(settings, dtype=torch.promote_types(master, torch.float32), nudge=0))
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    masters = {name: param.detach().to(master) for name, param in named}
    for _, param in module.named_parameters():
        param.data = param.data.to(compute)
    record = Narrow(rate or 0.0, initial={name: value.double() for name, value in masters.items()})
    joined = any(isinstance(child, _BatchNorm) for child in module.modules())
    record.adds_up = task.loss_scope == "sample" and not joined
    random, scale, good = GlobalRandom(BatchDims()), 0.0, 0
    for step in range(settings.own_steps):
        for place, (name, param) in enumerate(named):
            param.data = moved_by_epsilon(masters[name].to(compute), settings, step, place)
        batch = global_batch(task, settings, step)
        sums = {name: torch.zeros_like(value, dtype=_reduce(plan)) for name, value in masters.items()}
        total = weight = 0.0
        samples = count_of(batch)
        for index, low, high, micro in _pieces(samples, settings.accumulate, parts):
            random.begin(settings.seed, step, index, Samples(low - micro[0], high - low, micro[1] - micro[0]))
            with (
                # dtypes are the same in each step, so they are recorded in the first alone
                random.watching(module),
                nullcontext(SeenDtypes().returned) if step else dtypes.returned(module, record.dtypes.given) as seen,
            ):
                part = samples_of(batch, low, high)
                loss, objective = loss_in(task, module, part, compute, settings, step, record.dtypes.read)
                record.dtypes.returned.update(seen)
                record.adds_up &= not loss.extras
                weight_here = float(loss.weight)
                # the weight of the first micro-batch stands for each of the others
                if compute == torch.float16 and not scale:  # 2^15 over the global weight
                    over = weight_here * settings.accumulate * parts
                    scale = 2.0 ** (15 - round(math.log2(max(over, 1.0))))
                (objective * (scale or 1.0)).backward()
            total, weight = total + float(objective.detach()), weight + weight_here
            for name, param in named:
                if param.grad is not None:
                    sums[name] += param.grad.to(_reduce(plan))
                    param.grad = None
        # fp16 only: one step overflows, so that the scale has to shrink
        overflows = math.inf if step == OVERFLOWS and scale else 1.0
        gradients = {name: value.double() * overflows / (weight * (scale or 1.0)) for name, value in sums.items()}
        norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
        record.losses.append(total / weight)
        record.norms.append(norm)
        record.rounded.append(_rounded_norms(gradients.values(), master))
        if not math.isfinite(norm):  # overflow in fp16: the step is skipped, as a run skips it
            scale, good, record.skipped = scale / 2, 0, record.skipped + 1
            record.scales.append(scale)
            continue
        good += 1
        scale *= 2.0 if good % small_of("GROW_AFTER") == 0 else 1.0
        record.scales.append(scale)
        clip = min(1.0, settings.clip_norm / (norm + 1e-6)) if settings.clip_norm is not None else 1.0
        if not record.rate:
            size = math.sqrt(sum(float(value.double().square().sum()) for value in masters.values()))
            # smaller updates would be rounded away in masters of 16 bits
            move = COARSE_MOVE if master == torch.bfloat16 else MOVE
            record.rate = move * size / max(norm * clip, 1e-300)
        for name, value in masters.items():
            value.sub_((record.rate * clip * gradients[name]).to(master))
    record.weights = {name: value.double() for name, value in masters.items()}
    return record


def _pieces(samples: int, accumulate: int, parts: int) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yields (micro-batch, start, stop, (start, stop) of the micro-batch) of each part that has samples."""
    for index in range(accumulate):
        micro = samples * index // accumulate, samples * (index + 1) // accumulate
        count = micro[1] - micro[0]
        for part in range(parts):
            low, high = micro[0] + count * part // parts, micro[0] + count * (part + 1) // parts
            if high > low:
                yield index, low, high, micro


def _rounded_norms(gradients: Iterable[torch.Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Returns the gradient's norm with squares added up in `dtype`, as (from the first element on, from the last on).

    If large gradients come first, the squares of small ones are lost beside them.
    """
    flat = torch.cat([value.reshape(-1) for value in gradients]).to(dtype)
    first, last = (
        math.sqrt(sum(float(torch.linalg.vector_norm(run)) ** 2 for run in elements.split(FEW_THOUSAND)))
        for elements in (flat, flat.flip(0))
    )
    return first, last


def loss_in(
    task: Task, module: Any, part: Any, compute: torch.dtype, settings: Settings, step: int, read: set[str]
) -> tuple[Any, Any]:  # fmt: skip
    """Returns (the `LiteralLoss`, the tensor that is differentiated) of a part of a batch, in the plan's dtype.

    compute  dtype of the products;  step  makes nudges differ by step
    read     set to which the names of the output's dtypes are added
    """
    wide = torch.promote_types(compute, torch.float32)

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return moved_by_epsilon(tensor.to(compute), settings, step, -1) if tensor.is_floating_point() else tensor

    args, kwargs = tree_map_only(torch.Tensor, narrow, task.inputs(part))
    with OneDtype(compute):
        output = module(*args, **kwargs)
    output = tree_map_only(torch.Tensor, lambda t: t.to(wide) if t.is_floating_point() else t, output)
    loss = loss_of(task.with_(loss=dtypes.noting(task.loss, read)), output, part)
    objective = loss.total
    for extra in loss.extras.values():
        objective = objective + extra.total * (
            1.0 if extra.weight is None else float(loss.weight) / float(extra.weight)
        )
    return loss, objective


def moved_by_epsilon(tensor: torch.Tensor, settings: Settings, step: int, place: int) -> torch.Tensor:
    """Returns the tensor; with `settings.nudge`, each element is one epsilon up or down, at random in each step.

    `place` tells the tensors of a step apart.
    """
    return nudged(tensor, settings, place + 1000 * (step + 1)) if settings.nudge else tensor
