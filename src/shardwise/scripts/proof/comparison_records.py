"""Records of scripts as the `Record` that a proof compares; what is zero but for rounding is set apart."""

from __future__ import annotations

import math

import torch

from shardwise.proof.outcome import Parity
from shardwise.proof.record import Deviation, Record, Tensors
from shardwise.scripts.proof.recorder import ScriptRecord

ROUNDING = 1e-11  # of the model's largest gradient: below it a gradient is what rounding leaves of a zero


def joined(ranks: list[ScriptRecord], *, foreign: bool) -> ScriptRecord:
    """Returns rank 0's record, with losses averaged over ranks that have their own (`foreign`)."""
    first = ranks[0]
    if foreign:
        for number, step in enumerate(first.steps):
            mine = [rank.steps[number].losses for rank in ranks if number < len(rank.steps)]
            step.losses = [sum(each) / len(each) for each in zip(*mine, strict=False)]
            for rank in ranks[1:]:  # optimizers that hold a rank's share of the state
                if number < len(rank.steps):
                    step.states = rank.steps[number].states | step.states
    return first


def record_of(script: ScriptRecord, ranks: list[ScriptRecord], steps: int, *, foreign: bool = False) -> Record:
    """Returns the first `steps` steps. Tensors of models that did not step are as they were before."""
    several = len(script.initial) > 1
    record = Record(states_known=script.states_known, notices=list(script.notices))
    record.trained = {_named(number, name, several) for number, names in enumerate(script.trained) for name in names}
    buffers: Tensors = {}
    buffers_too = {_named(step.model, name, several) for step in script.steps for name in step.buffers}
    initial = {
        name: t for n, tensors in enumerate(script.initial) for name, t in _labelled(n, tensors, several).items()
    }
    record.initial = parameters = {name: tensor for name, tensor in initial.items() if name not in buffers_too}
    states: Tensors = {}
    rates = [0.0]
    for step in script.steps[:steps]:
        record.losses.append(sum(step.losses))
        record.norms.append(math.sqrt(step.squares))
        record.gradients.append(_labelled(step.model, step.gradients, several))
        parameters = parameters | _labelled(step.model, step.parameters, several)
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
    """What a rank has otherwise than rank 0, in any bit of its sketch."""
    record = []
    kinds = ("gradients", "parameters", "buffers", "states")
    for kind in kinds[: 2 if foreign else 4]:
        for number, (mine, theirs) in enumerate(zip(first.steps[:steps], other.steps[:steps], strict=False)):
            for name, tensor in getattr(theirs, kind).items():
                here = getattr(mine, kind).get(name)
                same = here is tensor or (here is not None and tensor is not None and torch.equal(here, tensor))
                if not same:
                    what = "optimizer" if kind == "states" else kind.removesuffix("s")
                    record.append(Deviation(rank, number, what, _named(mine.model, name, several), tensor))
    return record


def _named(model: int, name: str, several: bool) -> str:
    """Returns a name with its model's number: "exp_avg of model 2: weight"."""
    key, of, param = name.rpartition(" of ")
    return f"{key}{of}model {model + 1}: {param}" if several else name


def _labelled(model: int, tensors: Tensors, several: bool) -> Tensors:
    return {_named(model, name, several): tensor for name, tensor in tensors.items()}


def zero_gradients(parity: Parity, one: Record, many: Record) -> None:
    """Set apart what follows from gradients that are zero but for rounding on both sides, in every step (a bias in
    front of a batch norm): an optimizer that divides by their size makes an update of the rounding."""
    names = {name for _, name in parity.exceeded}
    bare = {name.rpartition(" of ")[2] for name in names}
    zero = {name for name in bare if _is_rounding(one, name) and _is_rounding(many, name)}
    for which in list(parity.exceeded):
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
    """Whether a parameter's gradient is rounding beside the model's largest, wherever it has one."""
    seen = False
    for gradients in record.gradients:
        gradient = gradients.get(name)
        if gradient is None or not gradient.numel():
            continue
        seen = True
        largest = max(float(g.abs().max()) for g in gradients.values() if g is not None and g.numel())
        if float(gradient.abs().max()) > ROUNDING * largest:
            return False
    return seen
