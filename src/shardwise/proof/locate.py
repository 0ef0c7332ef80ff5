"""Find where a plan first differs from one process: both run again and are compared module by module.

Looked at in the order in which a step runs, in the first step in which anything differs:

    initial values . forward of each module . buffers . loss . backward of each module . gradients . norm . update

The first that differs is told: the module's path, the rank, the micro-batch, and what kind of difference it is where
that can be told (`kind`). A gradient that differs although every module's forward and backward agree was lost on its
way: in the module's own weight gradient, or in the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shardwise.proof.compare_records import number_error, tensor_error
from shardwise.proof.kind import kind_of
from shardwise.proof.oracle import Look
from shardwise.proof.outcome import Parity
from shardwise.proof.record import Deviation, Record
from shardwise.proof.watch import CallTrace, Key, SampledTensor, rows_of

FAR = 1e-8  # of a tensor's largest value; what is compared is float64


@dataclass(frozen=True)
class Located:
    """The first difference. `module` is the path of the module that made it, or that holds the tensor."""

    step: int  # -1: before the first
    phase: str  # "forward of", "gradient of", ... in the order of a step
    module: str
    tensor: str
    rank: int
    micro_batch: int | None
    error: float  # relative to the tensor's largest value
    kind: str  # what the difference looks like, in words; "" where nothing does

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as values that JSON holds; `step` from 1, as `text` has it, and 0 before the first."""
        return asdict(self) | {"step": self.step + 1}

    def text(self) -> str:
        """Returns the first difference as one line of text."""
        when = "before the first step" if self.step < 0 else f"step {self.step + 1}"
        where = f", micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        what = f" {self.tensor}" if self.tensor else ""
        # "forward of", "backward of": the phase is of a module, and has no tensor's name
        if self.phase.endswith(" of") and not what:
            # the outermost module's path is empty
            what = f" '{self.module}'" if self.module else " the whole model"
        kind = f"; {self.kind}" if self.kind else ""
        return f"{when}: {self.phase}{what}, rank {self.rank}{where}: off by {self.error:.1e}{kind}"


_DRAWN = "one that is drawn without a seed where the task's file is imported is another in each process"


def first_step(parity: Parity) -> int:
    """Returns the first step in which anything exceeds its bar, -1 for the initial values."""
    return min(parity.exceeded.values(), default=0)


def locate(parity: Parity, single: Record, ranks: Record, look: Look, traces: Sequence[CallTrace]) -> Located | None:
    """Returns the first difference in the step that was looked at; None where the second run does not show one."""
    step = look.step
    # different before the first step: initial weights, of which drawing is the likeliest cause
    if first_step(parity) < 0:
        first = _named(parity, single, ranks, "parameter", -1, "initial value of", [])
        return first if first is None or first.kind else replace(first, kind=_DRAWN)
    # ranks of one stage make the same calls: where they do not, the plan has stages
    pipelined = len({tuple(sorted(trace.forward)) for trace in traces}) > 1
    first = _modules(step, look.trace, traces, pipelined)
    # in the order of a step: the first that differs explains all later ones
    first = first or _named(parity, single, ranks, "buffer", step, "buffer", [])
    first = first or _number(parity, "loss", step, "the loss, of equal outputs", single.losses, ranks.losses)
    first = first or _gradients_of_modules(step, look.trace, traces, pipelined)
    first = first or _named(parity, single, ranks, "gradient", step, "gradient of", look.shares)
    first = first or _number(parity, "norm", step, "the gradient's norm, of equal gradients", single.norms, ranks.norms)
    first = first or _named(parity, single, ranks, "optimizer", step, "optimizer's", [])
    return first or _named(parity, single, ranks, "parameter", step, "update of", [])


def _number(
    parity: Parity, kind: str, step: int, phase: str, single: list[float], ranks: list[float]
) -> Located | None:
    """Returns the difference of the loss or the norm, where that exceeds its bar in this step first, else None."""
    if parity.exceeded.get((kind, "")) != step:
        return None
    words = kind_of(torch.tensor([ranks[step]], dtype=torch.float64), torch.tensor([single[step]], dtype=torch.float64))
    return Located(step, phase, "", "", 0, None, number_error(ranks[step], single[step]), words)


def _modules(step: int, single: CallTrace, traces: Sequence[CallTrace], pipelined: bool) -> Located | None:
    """Returns the first output of a module that differs on a rank, with the module that made it; None without one."""
    for key, expected in single.forward.items():
        for rank, trace in enumerate(traces):
            difference = _difference(expected, trace.forward.get(key), pipelined)
            if difference is not None:
                path = _maker(single, trace, key, pipelined)
                return Located(step, "forward of", path, "", rank, key[0], *difference)
    return None


def _maker(single: CallTrace, trace: CallTrace, key: Key, pipelined: bool) -> str:
    """Returns the path of the module in which a difference arose: the innermost whose arguments were right."""
    calls = [key[:3], *single.inside.get(key, [])]
    for call in calls:
        given = [other for other in single.arguments if other[:3] == call]
        if all(_difference(single.arguments[k], trace.arguments.get(k), pipelined) is None for k in given):
            return call[1]
    return calls[-1][1]


def _gradients_of_modules(step: int, single: CallTrace, traces: Sequence[CallTrace], pipelined: bool) -> Located | None:
    """Returns the first gradient of a module's output or argument that differs; None: none does."""
    for which, expected in single.backward.items():
        for rank, trace in enumerate(traces):
            if pipelined and not _ran(trace, which[0]):
                continue
            difference = _difference(expected, trace.backward.get(which), pipelined)
            if difference is not None:
                return Located(step, *_maker_of_gradient(single, *which), rank, which[0][0], *difference)
    return None


def _ran(trace: CallTrace, key: Key) -> bool:
    """Whether a rank ran this call: on ranks of other stages it has no outputs, or made-up ones (NaN)."""
    gave = [value for other, value in trace.forward.items() if other[:3] == key[:3]]
    return bool(gave) and not any(bool(torch.isnan(value.tensor).any()) for value in gave)


def _maker_of_gradient(single: CallTrace, key: Key, argument: bool) -> tuple[str, str, str]:
    """Returns (phase, module, tensor): an argument's gradient is made by the call itself, an output's by its caller.

    What its readers gave back came before, and was right.
    """
    if argument:
        return "backward of", key[1], ""
    while key in single.outer:  # a caller that returns it as its own output: the reader is further out
        key = single.outer[key]
    path = key[1]
    callers = single.inside.get(key, [])
    if not callers:
        return "gradient of the output of", path, ""  # made by the loss
    caller = callers[0][1]
    whose = f"'{caller}'" if caller else "the whole model"
    return "backward of", caller, f"{whose}, at the output of '{path}'"


def _difference(expected: SampledTensor, actual: SampledTensor | None, pipelined: bool) -> tuple[float, str] | None:
    """Returns (error, kind) where a rank's tensor is not that of one process, None where it is."""
    if actual is None or (pipelined and bool(torch.isnan(actual.tensor).any())):  # made up: another stage's
        return None
    rows = rows_of(expected, actual)
    # which of one process's rows are this rank's samples cannot be told
    if rows is None:
        return None
    error = tensor_error(actual.tensor, rows, 1e-300)  # without a floor: what is small is looked at too
    # and beside the largest of all samples: the rows of this rank alone may be rounding
    largest = float(expected.tensor.abs().max()) if expected.tensor.numel() else 0.0
    if error <= FAR or float((actual.tensor - rows).abs().max()) <= FAR * largest:
        return None
    return error, kind_of(actual.tensor, rows)


def _named(
    parity: Parity, single: Record, ranks: Record, kind: str, step: int, phase: str,
    shares: list[dict[str, torch.Tensor]],
) -> Located | None:  # fmt: skip
    """Returns the first tensor of a kind that exceeds its bar in this step, and on which rank; None without one."""
    exceeding = {name for (of, name), first in parity.exceeded.items() if of == kind and first == step}
    for name in (name for name in single.of(kind, step) if name in exceeding):
        others = [d for d in ranks.deviations if (d.kind, d.step, d.name) == (kind, step, name)]
        # `ranks` is rank 0's record, and other ranks kept only what differs from it
        for deviation in (Deviation(0, step, kind, name, ranks.of(kind, step).get(name)), *others):
            actual, expected = deviation.tensor, single.of(kind, step)[name]
            if actual is None or expected is None:
                if (actual is None) != (expected is None):
                    return _about(step, phase, name, deviation.rank, float("inf"), "on one side only")
                continue
            error = tensor_error(actual, expected, 1e-300)
            if error > FAR:
                own = [share[name] for share in shares if name in share]
                return _about(step, phase, name, deviation.rank, error, kind_of(actual, expected, own))
    return None


def _about(step: int, phase: str, name: str, rank: int, error: float, kind: str) -> Located:
    tensor = name.rpartition(" of ")[2]
    return Located(step, phase, tensor.rpartition(".")[0], f"'{name}'", rank, None, error, kind)
