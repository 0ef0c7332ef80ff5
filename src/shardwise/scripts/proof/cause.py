"""Names the likely cause of a difference between a script on ranks and in one process, if arithmetic shows it.

Looks at the first step that differs. If gradients differ there, ranks run once more as replicas and keep the gradient
of each rank's own loss; one process's gradient is then fitted by a sum of those:

    g_one = sum_r c_r * g_r         least squares over all sketches; the residual tells whether losses add up

    fits, c = 1 each                the loss is a sum, and was given as a mean
    fits, other c                   losses are means over other numbers than backward was told
    does not fit                    a sample's part of the loss depends on other samples, on random numbers, or on state

What this does not do: tell more than one cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from shardwise.layout import Plan
from shardwise.proof.outcome import Parity
from shardwise.proof.record import Tensors
from shardwise.scripts.proof.comparison_records import first_difference
from shardwise.scripts.proof.recorder import ScriptRecord

NEAR = 1e-6  # relative difference within which numbers count as equal
SCOPES = {
    "global": "by which every rank computes the loss of the whole batch",
    "model": "by which every rank runs the model on whole batches, which is no faster",
}
NO_SCOPE = (
    'Neither loss_scope="global" nor "model" of prepare makes it equal (both were tried): a hook on a parameter is '
    "given what is no sum yet (change param.grad after prepared.backward instead), or the script keeps numbers of a "
    "rank's own"
)
# name of a cause -> its sentence; {} are filled with its facts
CAUSES = {
    "not_deterministic": "the script does not equal itself in one process: {}. Seed what draws, and leave out clocks",
    "changed": "the changed script differs from {} in one process already: {}. {}",
    "weights_at_start": "weights differ before the first step: {}",
    "batch_norm_buffers": "gradients and weights are equal, buffers differ ({}): statistics of a rank's own samples",
    "other_samples": "ranks train on other samples than one process, from step {} on: the sum of all numbers in the "
    "batches differs. What a sampler, a dataset or a collate function draws must come from torch's, NumPy's or "
    'Python\'s own generator; prepare(..., reads="whole") reads all samples on every rank',
    "learning_rate": "a setting of the optimizer differs: {}. It follows from a number of a rank's own samples: add it "
    "up over ranks first (prepared.sum)",
    "update": "gradients are equal, and weights differ after step {}: what changes weights beside the gradient (a hook "
    "of the optimizer, marks on parameters, writes by one rank, under zero=3 by a forward) is not the same on ranks",
    "beside": "models are equal, and a module beside them is not: {}. A batch norm in training of a module that no "
    "plan has, or an average of weights, takes a rank's own samples: prepare it too, or give it whole batches",
    "optimizer_state": "all is equal but the optimizer's state ({})",
    "rank_differs": "rank {} has other values than rank 0 ({}): something is done on some ranks alone",
    "sum_not_divided": "the loss is a sum over samples that nothing divides, and backward took it for a mean: "
    "prepared.backward(loss, summed=True), or with the number it is to be divided by, prepared.backward(loss, n)",
    "mean_as_sum": "the loss is a mean, and summed=True says that nothing divides it: leave summed out",
    "weight_of_mean": "the loss is a mean already, and the weight beside it is what a sum is divided by: {}. Give "
    "prepared.backward(loss, mean_over=n), or the sum, prepared.backward(loss * n, n)",
    "mean_over": "ranks' losses are means over numbers out of proportion to what backward was told: one process weighs "
    "them {}, and ranks {}. Give what this rank's mean is over: prepared.backward(loss, mean_over=n), n the tokens, "
    "labels that count, or weights of classes; where a loss is scaled by its own size, scale by that of all ranks",
    "constant": "every gradient is {} times that of one process: the loss is divided by a constant that counts a whole "
    "batch's samples, or by len of a part: give the sum and its divisor, prepared.backward(loss_sum, n)",
    "share_missing": "the gradient lacks what rank {}'s samples ask: its loss did not come to prepared.backward",
    "own_backward": "the loss of one process never came to prepared.backward on ranks: loss.backward() gives "
    "gradients of a rank's own samples",
    "uneven_only": "ranks are equal to one process until the first batch that does not divide evenly over them (step "
    "{}, {} samples): a number of samples is taken for a constant, or a dim of one sample is squeezed",
    "clip": "every gradient is {} times that of one process: the loss is divided by another number than there, or "
    "clipped by the norm of a rank's own gradients (prepared.clip_grad_norm_(max_norm))",
    "kept": "the first step is equal, and from step {} on the loss or its gradients differ: it is computed from "
    "what the script or the model keeps of a rank's own samples (a queue, a running mean, a center). Make it of all "
    'samples, with prepared.sum or prepared.gather, or take prepare(..., loss_scope="global")',
    "draws": "the ranks' losses do not add up to that of one process, and random numbers are drawn in step {}: draw "
    "those for samples by torch, with a dim that counts the samples; else what one sample asks depends on others. {}",
    "loss_scope": "the loss does not add up over samples: what one sample asks depends on the others of the batch, and "
    "no sum of the ranks' gradients is that of one process ({:.0e} is left over). {}",
    "gradients_kept": "gradients of step {} begin with those of the step before, which one process takes away: call "
    "optimizer.zero_grad() before each step's first prepared.backward",
    "gradient_written": "what ranks' losses ask adds up to one process's gradient, and the optimizer finds another: "
    "the script or a hook changes gradients on the way, by numbers of a rank's own",
}

# the same for a script that sets up its ranks itself, whose wrapper takes the mean of the ranks' gradients
OF_OTHERS = {
    "weights_at_start": "weights differ before the first step: {}. Ranks draw their own: give all of them one seed, or "
    "rank 0's weights; pieces that are drawn after fully_shard (of a model on meta) are no part of one process's",
    "other_samples": "models are called with other samples than in one process, from step {} on: the sum of all "
    "numbers differs. Where ranks take theirs by a DistributedSampler (set_epoch in each epoch, none to fill up), one "
    "process needs one too: DistributedSampler(data, num_replicas=1, rank=0), and under Accelerate both "
    'use_seedable_sampler=True, under Lightning both strategy="ddp". Where samples are drawn, every rank '
    "draws those of all by one seed and takes its part; crops and flips follow from a sample's index, or are left out",
    "learning_rate": "a setting of the optimizer differs: {}. It follows from the number of ranks, or from a rank's "
    "own numbers",
    "update": "gradients are equal, and weights differ after step {}: on ranks some weights are in no optimizer, or "
    "something else changes them",
    "beside": "models are equal, and a module beside them is not: {}. It is made of a rank's own samples",
    "sum_not_divided": "what the ranks' losses ask adds up to one process's gradient, and the mean of it is taken: the "
    "loss is a sum, or is divided by the samples of all ranks: multiply it by the number of ranks",
    "mean_over": "losses are means over unequal numbers (tokens, labels that count, samples of a short batch): one "
    "process weighs ranks and micro-batches {}, and ranks {}. Divide sums by the number over all ranks and "
    "micro-batches, times the number of ranks",
    "constant": "every gradient is {} times that of one process: the loss is divided by another number",
    "clip": "every gradient is {} times that of one process: it is clipped by the norm of a rank's own gradients or "
    "pieces, or scaled",
    "share_missing": "the gradient on rank 0 lacks what rank {}'s samples ask, and is not reduced: the model is called "
    "beside its wrapper, or goes backward within no_sync",
    "gradient_written": "what ranks' losses ask adds up to one process's gradient, and the optimizer finds another: "
    "parameters lie outside of the wrapper, or gradients are clipped or changed before they are reduced",
    "kept": "the first step is equal, and from step {} on the loss or its gradients differ: by what is kept of a "
    "rank's own samples (a queue, a running mean, a state)",
    "own_backward": "the optimizer finds no gradient on ranks: none is reduced (no_sync, "
    "set_requires_gradient_sync(False)), or it was taken away before the step",
    "changed": "the script differs from {} in one process already: {}. {}",
    "loss_scope": "the loss does not add up over samples ({:.0e} is left over): what one sample asks depends on those "
    "beside it. Join batch norms (SyncBatchNorm), and the parts of a ratio or a contrast over ranks",
}


@dataclass(frozen=True)
class Cause:
    """One cause: its key in `CAUSES`, the facts in its sentence, whether the script sets up its own ranks."""

    name: str
    facts: tuple[object, ...]
    foreign: bool = False

    @property
    def text(self) -> str:
        """Returns the cause as a sentence with its numbers."""
        return (CAUSES | OF_OTHERS if self.foreign else CAUSES)[self.name].format(*self.facts).rstrip()


@dataclass(frozen=True)
class Difference:
    """The records of both sides of a proof, and how they differ.

    control     how one process compares with itself; parity: with the ranks
    apart       runs the ranks as replicas that record each rank's own gradients; returns None if that fails
    cures       loss_scope -> whether ranks that run with it are equal to one process
    """

    single: ScriptRecord
    ranks: list[ScriptRecord]
    parity: Parity
    plan: Plan
    control: Parity
    apart: Callable[[], list[ScriptRecord] | None] = field(default=lambda: None)
    cures: Callable[[str], bool] = field(default=lambda scope: False)
    foreign: bool = False  # the script sets up its ranks by itself


def cause_of(sides: Difference) -> Cause | None:
    """Returns the likely cause of a difference between the sides; None if none fits."""
    likely = _of_records(sides)
    return likely and replace(likely, foreign=sides.foreign)


def cause_of_change(sides: Difference, before: str) -> Cause:
    """Returns why a changed script trains otherwise in one process than the script before, whose path is `before`."""
    if not sides.control.equal:  # then any difference may be its own noise
        return _cause("not_deterministic", _first_of(sides.control))
    step, (now,) = first_step(sides), sides.ranks
    kept = [each.gradients for each in now.steps[:step] if each.model == sides.single.steps[step].model]
    if kept and step < len(now.steps):
        asked = sides.single.steps[step].gradients
        shares, rest = _fit(
            [_vector(asked, asked), _vector(kept[-1], asked)], _vector(now.steps[step].gradients, asked)
        )
        if rest < NEAR and all(abs(share - 1) < NEAR for share in shares):  # the last step's gradients were not zeroed
            return _cause("gradients_kept", step + 1)
    return replace(_cause("changed", before, _first_of(sides.parity), _done(sides)), foreign=sides.foreign)


def _done(sides: Difference) -> str:
    """Returns a sentence on what the changed script does otherwise, as far as arithmetic tells; never ""."""
    parity, step = sides.parity, first_step(sides)
    was, now = sides.single.steps[step], sides.ranks[0].steps[step]
    if any(at < 0 for at in parity.exceeded.values()):  # -1: before the first step
        return "Its weights at the start are others: more is drawn before they are, or by another seed"
    if settings := _settings_by(parity, step):
        return f"Another setting of the optimizer, {settings}"
    if abs(was.content - now.content) > NEAR * abs(was.content):
        return f"Its models are called with other numbers in step {step + 1}: samples, order, or how they are made"
    names = [name for (kind, name), at in parity.exceeded.items() if kind == "gradient" and at == step]
    for few in (was.gradients, {name: was.gradients[name] for name in names if name in was.gradients}):
        factor = _factor(_vector(now.gradients, few), _vector(few, few)) if few else None  # None: no one factor fits
        if factor is not None and abs(factor - 1) > NEAR:
            which = "Every gradient" if few is was.gradients else f"The gradient of {', '.join(names[:3])}"
            return (
                f"{which} is {factor:.6g} times as large there: a loss, or gradients, are scaled or divided otherwise"
            )
    if names:  # gradients differ by no factor
        return "The loss, or the model, is another one there"
    return "Gradients are equal: the optimizer is another, or weights, buffers or losses are changed beside it"


def _of_records(sides: Difference) -> Cause | None:
    """Returns the cause that the records of both sides show; None if they show none."""
    single, many, parity = sides.single, sides.ranks[0], sides.parity
    # in the order of a run: each test assumes that everything before it is equal
    if not sides.control.equal:
        return _cause("not_deterministic", _first_of(sides.control))
    if "initial value" in str(parity.differences) or any(step < 0 for step in parity.exceeded.values()):
        return _cause("weights_at_start", _first_of(parity))
    for number, rank in enumerate(sides.ranks):
        for mine, theirs in zip(rank.initial, many.initial, strict=False):
            if names := _unlike(mine, theirs):
                return _cause("weights_at_start", f"'{names[0]}' of rank {number} and of rank 0")
    if not single.steps or not many.steps:
        return _cause("own_backward") if not many.steps else None
    step = first_step(sides)
    kinds = {kind for (kind, _), at in parity.exceeded.items() if at == step}
    begun = tuple(f"model {n + 1}: " for n, steps in enumerate(single.began) if steps == step + 1)
    if kinds and all(name.startswith(begun) for (_, name), at in parity.exceeded.items() if at == step):
        return _cause("weights_at_start", _first_of(parity))
    if not parity.exceeded and (beside := next((e for e in parity.differences if "beside the models" in e), "")):
        return _cause("beside", beside)
    other = _other_samples(sides)
    if other is not None and other <= step:
        return _cause("other_samples", other + 1)
    if settings := _settings_by(parity, step):
        return _cause("learning_rate", settings)
    if kinds and kinds <= {"buffer"}:
        return _cause("batch_norm_buffers", _first_of(parity))
    # gradients are equal: what differs came in between gradient and weight
    if "gradient" not in kinds and "loss" not in kinds and "norm" not in kinds:
        if kinds == {"optimizer"}:
            return _cause("optimizer_state", _first_of(parity))
        deviating = next((rank for rank, each in enumerate(sides.ranks[1:], 1) if _apart(many, each, step)), None)
        if deviating is not None:
            return _cause("rank_differs", deviating, _first_of(parity))
        return _cause("update", step + 1) if kinds else None
    return _of_gradients(sides, step, kinds)


def _settings_by(parity: Parity, step: int) -> str:
    """Returns the text on a difference of the optimizer's settings in `step` (from 0) or earlier; "" without one."""
    settings = next((each for each in parity.differences if " of the optimizer's group " in each), "")
    # its text begins "step 3:", counted from 1
    return settings if settings and int(settings.split()[1].rstrip(":")) <= step + 1 else ""


def first_step(sides: Difference) -> int:
    """Returns the first step (from 0) in which anything exceeds its tolerance; the last if only the end differs."""
    steps = [at for at in sides.parity.exceeded.values() if at >= 0]
    return min(steps, default=len(sides.single.steps) - 1)


def _of_gradients(sides: Difference, step: int, kinds: set[str]) -> Cause | None:
    """Returns the cause of gradients or losses that differ in `step`; None if no known cause fits.

    kinds   what exceeds its tolerance there: "gradient", "loss", "norm", "parameter"
    """
    single, many = sides.single.steps[step], sides.ranks[0].steps[step]
    found = sides.apart()
    ranks = [rank.steps[step] for rank in found or [] if step < len(rank.steps)]
    form = next(iter(many.forms), "mean")
    expected, found_there = (_vector(each.gradients, single.gradients) for each in (single, many))
    factor = _factor(found_there, expected)
    if not many.losses and single.losses:  # ranks took gradients by themselves
        return _cause("own_backward")
    # micro-batches summed per rank, then one by one; a foreign script may weigh each as it likes: one by one alone
    for one_by_one in (False, True)[sides.foreign :]:
        asked = [(rank, part) for rank, each in enumerate(ranks) for part in _parts(each.locals, one_by_one)]
        locals_ = [_vector(part, single.gradients) for _, part in asked]
        if not locals_ or len({rank for rank, _ in asked}) < len(ranks):  # some rank's own gradients are not known
            return _by_factor(factor, kinds, form, sides)
        shares, rest = _fit(locals_, expected)
        if rest <= NEAR:
            break
    # one process's gradient is a sum of ranks' own: which sum did the optimizer step on?
    there, missing = _fit(locals_, _vector(ranks[0].gradients, single.gradients))
    if rest > NEAR:  # no sum of the ranks' own, unless one factor explains all
        scaled = factor is not None and abs(factor - 1) > NEAR
        return _by_factor(factor, kinds, form, sides) if scaled else _not_a_sum(sides, step, rest)
    if missing > NEAR:  # the optimizer's gradient is no sum of the ranks' own
        return _cause("gradient_written")
    lost = [rank for (rank, _), a, b in zip(asked, there, shares, strict=True) if abs(a) < NEAR < abs(b)]
    if lost:  # one process's gradient has this rank's, the optimizer's has not
        return _cause("share_missing", lost[0])
    return _weighed(sides, step, shares, there, form)


def _weighed(sides: Difference, step: int, single: list[float], ranks: list[float], form: str) -> Cause | None:
    """Returns the cause if one process's gradient is the ranks' own, added with other weights; None without one.

    single, ranks  coefficients of each rank's own gradient in one process's, and in that of the ranks
    """
    size = sides.plan.data_ranks
    ratios = [b / a if a else 0.0 for a, b in zip(single, ranks, strict=True)]
    alike = max(ratios) - min(ratios) <= NEAR * abs(max(ratios))
    if form == "mean" and all(abs(share - 1) < NEAR for share in single):  # sums add up unweighted
        return _cause("sum_not_divided")
    if alike:
        return _by_factor(ratios[0], {"gradient"}, form, sides)
    if form == "weight" and min(ratios) > 1.5:  # one process divides 1 mean by W, n ranks n means
        return _cause(
            "weight_of_mean", f"gradients are {min(ratios):.3g} to {max(ratios):.3g} times those of one process"
        )
    even = [sum(each.samples) % size == 0 for each in sides.single.steps[:step]]
    samples = sum(sides.single.steps[step].samples)
    weighed_alike = max(single) - min(single) <= NEAR * max(map(abs, single))  # not by samples
    if all(even) and samples % size and form != "mean_over" and step and weighed_alike:
        return _cause("uneven_only", step + 1, samples)
    if sides.foreign and max(ranks) - min(ranks) > NEAR * max(map(abs, ranks)):  # a wrapper weighs all alike
        return _cause("gradient_written")
    return _cause("mean_over", _ratio(single), _ratio(ranks))


def _by_factor(factor: float | None, kinds: set[str], form: str, sides: Difference) -> Cause | None:
    """Returns the cause if gradients are `factor` times one process's (None: no multiple of it); None if equal.

    form  how the script called backward: "mean", "mean_over", "weight" or "sum"
    """
    size = sides.plan.data_ranks
    if factor is None:
        return None if sides.foreign else _not_a_sum(sides, first_step(sides), 1.0)
    # factors of the number of ranks tell a sum taken for a mean from a mean taken for a sum
    if form == "mean" and abs(factor * size - 1) < NEAR and size > 1:
        return _cause("sum_not_divided")
    if form == "sum" and abs(factor - size) < NEAR and size > 1:
        return _cause("mean_as_sum")
    if form == "weight" and abs(factor - size) < 0.25 * size and size > 1:  # "about": ranks' weights may differ
        return _cause("weight_of_mean", f"every gradient is {factor:.3g} times that of one process")
    if abs(factor) <= NEAR:  # nothing was reduced
        return _cause("own_backward")
    if abs(factor - 1) <= NEAR:
        return None
    if "loss" not in kinds:  # losses are equal, so gradients were scaled after backward
        return _cause("clip", f"{factor:.6g}")
    return _cause("constant", f"{factor:.6g}")


def _not_a_sum(sides: Difference, step: int, rest: float) -> Cause:
    """Returns the cause if gradients are no sum of the ranks' own; `rest`: relative norm of the residual."""
    single = sides.single
    before = [each for each in single.steps[:step] if each.model == single.steps[step].model]
    samples = sum(single.steps[step].samples)
    ranks = max(1, sides.plan.data_ranks)
    if before and samples % ranks and not any(sum(each.samples) % ranks for each in before):  # first uneven step
        return _cause("uneven_only", step + 1, samples)
    if before and step not in single.drew:  # equal in earlier steps, and nothing is drawn: something is kept
        return _cause("kept", step + 1)
    tried = "" if sides.foreign else _tried(sides.cures)  # no prepare, no loss_scope
    return _cause("draws", step + 1, tried) if step in single.drew else _cause("loss_scope", rest, tried)


def _tried(cures: Callable[[str], bool]) -> str:
    """Returns advice: the loss_scope with which the script equals one process, or that there is none."""
    scope = next(filter(cures, SCOPES), None)
    if scope is None:
        return NO_SCOPE
    return f'Take prepare(..., loss_scope="{scope}"), {SCOPES[scope]}: it was tried, and is equal'


def _other_samples(sides: Difference) -> int | None:
    """Returns the first step whose batches' content differs between ranks and one process; None without one."""
    copies = len(sides.ranks) / max(1, sides.plan.data_ranks)
    for number, mine in enumerate(sides.single.steps):
        theirs = [rank.steps[number] for rank in sides.ranks if number < len(rank.steps)]
        if len(theirs) < len(sides.ranks) or not mine.content:  # a rank ended early, or no batch was told
            continue
        total = sum(each.content for each in theirs) / copies
        whole = [each.content for each in theirs]  # every rank has all samples
        if abs(total - mine.content) > NEAR * abs(mine.content) and any(
            abs(each - mine.content) > NEAR * abs(mine.content) for each in whole
        ):
            return number
    return None


# --- arithmetic


def _fit(parts: list[torch.Tensor], whole: torch.Tensor) -> tuple[list[float], float]:
    """Returns (coefficients by which `parts` add up nearest to `whole`, relative norm of the residual).

    With as many parts as elements anything fits, so it returns (zeros, 1.0).
    """
    if len(parts) >= len(whole):
        return [0.0] * len(parts), 1.0
    found = torch.linalg.lstsq(torch.stack(parts, 1), whole.unsqueeze(1), driver="gelsd").solution.flatten()
    rest = torch.stack(parts, 1) @ found - whole
    return found.tolist(), float(rest.norm() / max(float(whole.norm()), 1e-300))


def _factor(ratios: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Returns the factor by which `ratios` is a multiple of `expected`; None if it is no multiple."""
    size = float(expected @ expected)
    if not size or not bool(torch.isfinite(ratios).all()):
        return None
    factor = float(ratios @ expected) / size
    return factor if float((ratios - factor * expected).norm()) <= NEAR * float(ratios.norm()) else None


def _vector(tensors: Tensors, like: Tensors) -> torch.Tensor:
    """Returns all sketches as one float64 vector, in the order of the names in `like`; zeros for missing ones."""
    rows = []
    for name, other in like.items():
        mine = tensors.get(name)
        if other is None and mine is None:  # an unused parameter on both sides
            continue
        shown = mine if mine is not None else torch.zeros_like(other)
        flat = torch.view_as_real(shown).flatten() if shown.is_complex() else shown.flatten().double()
        rows.append(flat)
    return torch.cat(rows) if rows else torch.zeros(1, dtype=torch.float64)


def _sum(backwards: list[Tensors]) -> Tensors:
    total: Tensors = {}
    for each in backwards:
        for name, gradient in each.items():
            held = total.get(name)
            total[name] = held if gradient is None else gradient if held is None else held + gradient
    return total


def _parts(backwards: list[Tensors], one_by_one: bool) -> list[Tensors]:
    """Returns a rank's gradients of each backward (`one_by_one`), or [their sum]; [] without a backward."""
    heard = [each for each in backwards if any(gradient is not None for gradient in each.values())]
    return heard if one_by_one or not heard else [_sum(heard)]


def _unlike(mine: Tensors, theirs: Tensors) -> list[str]:
    """Returns the names of tensors that both have with different values."""
    pairs = ((name, tensor, theirs.get(name)) for name, tensor in mine.items())
    return [name for name, a, b in pairs if a is not None and b is not None and not torch.equal(a, b)]


def _apart(first: ScriptRecord, other: ScriptRecord, step: int) -> bool:
    """Whether a rank's weights differ from rank 0's after a step, or one of them has no such step."""
    if step >= len(first.steps) or step >= len(other.steps):
        return True
    return bool(_unlike(other.steps[step].parameters, first.steps[step].parameters))


# --- words


def _ratio(shares: list[float]) -> str:
    total = sum(abs(share) for share in shares) or 1.0
    return " : ".join(f"{share / total:.3g}" for share in shares)


def _first_of(parity: Parity) -> str:
    """Returns what exceeds its tolerance first, in words."""
    if parity.exceeded:
        return first_difference(parity).text()
    return parity.differences[0] if parity.differences else "what is saved at the end"


def _cause(name: str, *facts: object) -> Cause:
    return Cause(name, facts)
