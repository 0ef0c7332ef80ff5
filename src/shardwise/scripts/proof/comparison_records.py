"""Compares the records of a script's two sides, as `Record`s; sets apart what is zero but for rounding."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

from shardwise.proof.compare_records import compare
from shardwise.proof.eps import of_rounding
from shardwise.proof.float32_proof import MOST_BAR, set_noise_apart
from shardwise.proof.outcome import Parity
from shardwise.proof.record import Deviation, Record, Tensors
from shardwise.proof.settings import LEAST_EPS
from shardwise.scripts.proof.recorder import BESIDE, SUMMED, ScriptRecord

ROUNDING = 1e-11  # relative to the model's largest gradient element; smaller gradients are rounding of 0
# what a script should do within a proof -> the words for a proof in which it has not
MEETS = {
    "an epoch's end": "no epoch ended",
    "an uneven last batch": "no epoch had a last batch of fewer samples",
    "an evaluation": "the model was not evaluated",
    "a save": "nothing was saved by save_weights or shardwise.save",
}


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor or number that exceeds its tolerance.

    kind  such as "gradient";  name  of the tensor, or "";  step  from 0, -1 before the first
    """

    kind: str
    name: str
    step: int

    def as_dict(self) -> dict[str, object]:
        """Returns {"kind", "name", "step"} with steps from 1, as in `text`, and 0 for before the first."""
        return asdict(self) | {"step": self.step + 1}

    def text(self) -> str:
        """Returns the difference in words: "gradient of 'head.weight', step 2"."""
        what = f"{self.kind} of '{self.name}'" if self.name else self.kind
        return f"{what}, step {self.step + 1}" if self.step >= 0 else f"{what}, before the first step"


def first_difference(parity: Parity) -> FirstDifference:
    """Returns the earliest of the differences that exceed their tolerances; there must be one."""
    (kind, name), step = min(parity.exceeded.items(), key=lambda item: (item[1], item[0]))
    return FirstDifference(kind, name, step)


def joined(ranks: list[ScriptRecord], *, foreign: bool) -> ScriptRecord:
    """Returns rank 0's record; losses averaged and states joined in it if ranks have their own (`foreign`)."""
    first = ranks[0]
    # a plan's ranks have the whole loss already; each rank of a foreign script has its own
    if foreign:
        for number, step in enumerate(first.steps):
            mine = [rank.steps[number].losses for rank in ranks if number < len(rank.steps)]
            step.losses = [sum(each) / len(each) for each in zip(*mine, strict=False)]
            for rank in ranks[1:]:  # each rank's optimizer may hold a share of the state
                if number < len(rank.steps):
                    step.states = rank.steps[number].states | step.states
    return first


def record_of(script: ScriptRecord, ranks: list[ScriptRecord], steps: int, *, foreign: bool = False) -> Record:
    """Returns the first `steps` steps of rank 0's record as a `Record`, with the deviations of `ranks` from it.

    foreign  Whether the script sets up its ranks itself
    """
    # names of several models begin with their number, as two may have one name
    several = len(script.initial) > 1
    record = Record(states_known=script.states_known, notices=list(script.notices))
    buffers: Tensors = {}
    buffers_too = {_named(step.model, name, several) for step in script.steps for name in step.buffers}
    coming: dict[int, Tensors] = {}  # steps of other models at `prepare` -> initial tensors
    for number, began in enumerate(script.began):
        if began <= steps:
            record.trained |= {_named(number, name, several) for name in script.trained[number]}
            tensors = _labelled(number, script.initial[number], several)
            # initial tensors hold buffers too, and a record's parameters are compared without them
            coming.setdefault(began, {}).update({name: t for name, t in tensors.items() if name not in buffers_too})
    record.initial = {name: t for tensors in coming.values() for name, t in tensors.items()}
    # tensors made of weights that other models have trained are compared after these steps, whose results they show
    parameters = coming.pop(0, {})
    record.late = record.initial.keys() - parameters.keys()
    states: Tensors = {}
    # a learning rate may be a tensor, or no group may have one: 0.0 gives `max` a value
    rates = [0.0]
    for taken, step in enumerate(script.steps[:steps], 1):
        record.losses.append(sum(step.losses))
        record.norms.append(math.sqrt(step.squares))
        record.gradients.append(_labelled(step.model, step.gradients, several))
        # a model that did not step keeps the tensors of its last step
        parameters = parameters | _labelled(step.model, step.parameters, several) | coming.get(taken, {})
        buffers = buffers | _labelled(step.model, step.buffers, several)
        states = states | _labelled(step.model, step.states, several)
        record.parameters.append(parameters)
        record.buffers.append(buffers)
        record.states.append(states)
        rates += [abs(group["lr"]) for group in step.settings if isinstance(group.get("lr"), float)]
    record.lr = max(rates)
    for number, other in enumerate(ranks[1:], 1):
        record.deviations += _deviations(number, script, other, steps, several, foreign)
    return record


def _deviations(
    rank: int, first: ScriptRecord, other: ScriptRecord, steps: int, several: bool, foreign: bool
) -> list[Deviation]:
    """Returns a `Deviation` for each tensor whose sketch on rank `rank` differs in a bit from rank 0's.

    several  Whether there are several models, which names then tell
    """
    record = []
    kinds = ("gradients", "parameters", "buffers", "states")
    # a foreign script's ranks may hold a share of the state, or buffers of their own samples: no sign of a mistake
    for kind in kinds[: 2 if foreign else 4]:
        for number, (mine, theirs) in enumerate(zip(first.steps[:steps], other.steps[:steps], strict=False)):
            for name, tensor in getattr(theirs, kind).items():
                here = getattr(mine, kind).get(name)
                # first by identity: both may be None, of a parameter without a gradient
                same = here is tensor or (here is not None and tensor is not None and torch.equal(here, tensor))
                if not same:
                    what = "optimizer" if kind == "states" else kind.removesuffix("s")
                    record.append(Deviation(rank, number, what, _named(mine.model, name, several), tensor))
    return record


def _named(model: int, name: str, several: bool) -> str:
    """Returns 'exp_avg of weight' of `model` 1 (from 0) as 'exp_avg of model 2: weight'; unchanged unless `several`."""
    key, of, param = name.rpartition(" of ")
    return f"{key}{of}model {model + 1}: {param}" if several else name


def _labelled(model: int, tensors: Tensors, several: bool) -> Tensors:
    """Returns the tensors with their names as `_named` gives them."""
    return {_named(model, name, several): tensor for name, tensor in tensors.items()}


def zero_gradients(parity: Parity, one: Record, many: Record) -> None:
    """Moves differences to `parity.noisy` that follow from gradients which are zero but for rounding on both sides.

    Such is the gradient of a bias in front of a batch norm; an optimizer that divides by a gradient's size turns its
    rounding into an update.
    """
    names = {name for _, name in parity.exceeded}
    # "exp_avg of head.weight" -> "head.weight": a state follows from its parameter's gradient
    bare = {name.rpartition(" of ")[2] for name in names}
    zero = {name for name in bare if _is_rounding(one, name) and _is_rounding(many, name)}
    for which in list(parity.exceeded):
        # a loss or a buffer does not follow from a gradient that is zero
        if which[1].rpartition(" of ")[2] in zero and which[0] in ("gradient", "parameter", "optimizer"):
            parity.noisy.add(which)
            del parity.exceeded[which]
    if zero:
        first = sorted(zero)[0]
        more = f" (and {len(zero) - 1} more)" if len(zero) > 1 else ""
        parity.notes.append(
            f"scope: the gradient of '{first}'{more} is zero but for rounding, so its update is not proven"
        )


def _is_rounding(record: Record, name: str) -> bool:
    """Whether a parameter has gradients, and each is tiny (`ROUNDING`) beside the largest element of the model's."""
    seen = False
    for gradients in record.gradients:
        gradient = gradients.get(name)
        # without a gradient in this step: others may have one
        if gradient is None or not gradient.numel():
            continue
        seen = True
        largest = max(float(g.abs().max()) for g in gradients.values() if g is not None and g.numel())
        if float(gradient.abs().max()) > ROUNDING * largest:
            return False
    return seen


def _is_zero(record: Record, name: str) -> bool:
    """Whether a parameter's gradient is exactly zero, or missing, in every step."""
    return not any(gradient is not None and gradient.any() for gradient in (g.get(name) for g in record.gradients))


def judge(
    parity: Parity, single: ScriptRecord, many: ScriptRecord, ranks: list[ScriptRecord], *, foreign: bool
) -> None:
    """Compares one process (`single`) with rank 0 (`many`) and all ranks; writes the outcome into `parity`.

    foreign  Whether the script sets up its ranks itself
    """
    steps = min(len(single.steps), len(many.steps))
    if len(single.steps) != len(many.steps):
        parity.differences.append(f"it took {len(many.steps)} optimizer steps, one process {len(single.steps)}")
    if not steps:  # nothing to compare, and the numbers of steps have been told
        parity.loss_error = 0.0
        return
    for name in sorted(single.shapes.keys() & many.shapes.keys()):
        if single.shapes[name] != many.shapes[name]:
            parity.differences.append(
                f"{name.partition(':')[2]} has shape {many.shapes[name]}, in one process {single.shapes[name]}"
            )
    mine, theirs = record_of(single, [single], steps), record_of(many, ranks, steps, foreign=foreign)
    if foreign and not any(theirs.states) and any(mine.states):
        theirs.states_known = False
        parity.notes.append("scope: the optimizer keeps its state to itself on ranks, and it is not compared")
    compare(parity, mine, theirs)
    zero_gradients(parity, mine, theirs)
    set_noise_apart(parity)
    if parity.exceeded:
        parity.first = first_difference(parity)
    for step in range(steps):
        if single.steps[step].settings != many.steps[step].settings:
            parity.differences.append(_settings_differ(step, single.steps[step].settings, many.steps[step].settings))
            break
    # if a step differs so does what is saved at the end, which need not be reported twice
    if not parity.exceeded and len(single.final) == len(many.final) and len(single.steps) == len(many.steps):
        _compare_saved(parity, single, many)
        _compare_beside(parity, single, ranks)
    unmet = [words for what, words in MEETS.items() if what not in single.met]
    # of a foreign script torch's hooks cannot see all of these
    if unmet and not foreign:
        parity.notes.append(f"scope: in these {steps} steps {', '.join(unmet)}")
    if {"an evaluation", BESIDE} <= single.met and SUMMED not in single.met:
        parity.notes.append(
            "scope: the script evaluates on a loader of prepared.split and adds nothing up over ranks: what it prints "
            "and decides by is of a rank's own samples (prepared.sum, prepared.gather)"
        )
    parity.notes = list(dict.fromkeys(parity.notes))
    if eps := single.raised_eps or many.raised_eps:
        parity.notes.append(f"an optimizer's eps below {LEAST_EPS:g} is {LEAST_EPS:g} on both sides")
        zero = {name for name in mine.trained if _is_rounding(mine, name) and not _is_zero(mine, name)}
        parity.notes += [of_rounding(zero, eps)] if zero else []


def _compare_saved(parity: Parity, one: ScriptRecord, many: ScriptRecord) -> None:
    """Compares what `state_dict()` gives at the end, into `parity`."""
    for number, (mine, theirs) in enumerate(zip(one.final, many.final, strict=True)):
        label = f"model {number + 1}: " if len(one.final) > 1 else ""
        # a script that prepares nothing has no state_dict() to ask for
        if mine and theirs and mine.keys() != theirs.keys():
            odd = sorted(mine.keys() ^ theirs.keys())
            parity.differences.append(f"{label}state_dict() has other names than in one process: {', '.join(odd[:3])}")
        for name in mine.keys() & theirs.keys():
            if error := _beyond(parity, theirs[name], mine[name]):
                parity.differences.append(f"{label}state_dict()['{name}'] differs by {error} at the end")
                return


def _beyond(parity: Parity, a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """Returns the relative difference of `a` from one process's `b` as text ("1.2e-05"); "" within the tolerance."""
    if a is None or b is None or a.shape != b.shape or not a.numel():
        return ""
    error = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3)
    return "" if error <= (1e-9 if parity.float64 else MOST_BAR) else f"{error:.1e}"


def _compare_beside(parity: Parity, one: ScriptRecord, ranks: list[ScriptRecord]) -> None:
    """Compares modules that the script has beside its models (a teacher, an average of weights), on every rank."""
    for rank, record in enumerate(ranks):
        for name in one.beside.keys() & record.beside.keys():
            if error := _beyond(parity, record.beside[name], one.beside[name]):
                parity.differences.append(f"'{name}', beside the models, differs by {error} on rank {rank}")
                return


def _settings_differ(step: int, single: list[dict], many: list[dict]) -> str:
    """Returns a sentence on the first setting of a step's optimizer that differs."""
    for place, (mine, theirs) in enumerate(zip(single, many, strict=False)):
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return (
                    f"step {step + 1}: {key} of the optimizer's group {place} is {theirs.get(key)}, in one process "
                    f"{mine.get(key)}"
                )
    return f"step {step + 1}: the optimizer has {len(many)} groups, in one process {len(single)}"
