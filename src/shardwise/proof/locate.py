"""Find where a plan first differs from one process: both run again and are compared module by module.

In the first step in which anything differs, these are compared in the order in which a step computes them:

    initial values . forward of each module . buffers . loss . backward of each module . gradients . norm . update

The first difference is reported with the module's path, the rank, the micro-batch, and its kind if that is known
(`kind`). A gradient that differs although every module's forward and backward agree was changed afterwards, in the
module's own weight gradient or in the sum over ranks.
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

FAR = 1e-8  # tolerance, relative to a tensor's largest value; all is compared in float64


@dataclass(frozen=True)
class Located:
    """The first difference. `module` is the path of the module that made the wrong tensor, or that holds it."""

    step: int  # from 0; -1: before the first
    phase: str  # "forward of", "gradient of", ...
    module: str  # "" for the whole model
    tensor: str  # name of the parameter, buffer or state in quotes; "" for an output
    rank: int
    micro_batch: int | None  # None: the difference is of no single one
    error: float  # relative to the tensor's largest value
    kind: str  # what the difference looks like, in words (`kind_of`); "" if unknown

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as values for JSON, with `step` counted from 1, and 0 for before the first."""
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
    """Returns the first step in which anything exceeds its bar; -1 for initial values."""
    return min(parity.exceeded.values(), default=0)


def locate(parity: Parity, single: Record, ranks: Record, look: Look, traces: Sequence[CallTrace]) -> Located | None:
    """Returns the first difference in the step `look.step`; None if the second run shows none.

    parity, single, ranks  of the first run: the comparison, and the records of one process and of rank 0
    look, traces           of the second run: the trace of one process, and each rank's
    """
    step = look.step
    # initial weights differ, most likely because of random numbers drawn outside the constructor
    if first_step(parity) < 0:
        first = _named(parity, single, ranks, "parameter", -1, "initial value of", [])
        return first if first is None or first.kind else replace(first, kind=_DRAWN)
    # ranks that run the same stage make the same calls, so other calls mean that the plan has stages
    pipelined = len({tuple(sorted(trace.forward)) for trace in traces}) > 1
    first = _modules(step, look.trace, traces, pipelined)
    # in the order of a step, since the first difference causes all later ones
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
    """Returns the difference of the loss or norm (`kind`) if it exceeds its bar first in this step; else None."""
    if parity.exceeded.get((kind, "")) != step:
        return None
    words = kind_of(torch.tensor([ranks[step]], dtype=torch.float64), torch.tensor([single[step]], dtype=torch.float64))
    return Located(step, phase, "", "", 0, None, number_error(ranks[step], single[step]), words)


def _modules(step: int, single: CallTrace, traces: Sequence[CallTrace], pipelined: bool) -> Located | None:
    """Returns the first module output that differs on a rank, with the module that made it; None if none does."""
    for key, expected in single.forward.items():
        for rank, trace in enumerate(traces):
            difference = _difference(expected, trace.forward.get(key), pipelined)
            if difference is not None:
                path = _maker(single, trace, key, pipelined)
                return Located(step, "forward of", path, "", rank, key[0], *difference)
    return None


def _maker(single: CallTrace, trace: CallTrace, key: Key, pipelined: bool) -> str:
    """Returns the path of the module in which a difference arose: the innermost whose arguments are right."""
    calls = [key[:3], *single.inside.get(key, [])]
    for call in calls:
        given = [other for other in single.arguments if other[:3] == call]
        if all(_difference(single.arguments[k], trace.arguments.get(k), pipelined) is None for k in given):
            return call[1]
    return calls[-1][1]


def _gradients_of_modules(step: int, single: CallTrace, traces: Sequence[CallTrace], pipelined: bool) -> Located | None:
    """Returns the first gradient of a module's output or argument that differs; None if none does."""
    for which, expected in single.backward.items():
        for rank, trace in enumerate(traces):
            if pipelined and not _ran(trace, which[0]):
                continue
            difference = _difference(expected, trace.backward.get(which), pipelined)
            if difference is not None:
                return Located(step, *_maker_of_gradient(single, *which), rank, which[0][0], *difference)
    return None


def _ran(trace: CallTrace, key: Key) -> bool:
    """Whether a rank ran the call of `key`; ranks of other stages have no outputs of it, or made-up ones (NaN)."""
    gave = [value for other, value in trace.forward.items() if other[:3] == key[:3]]
    return bool(gave) and not any(bool(torch.isnan(value.tensor).any()) for value in gave)


def _maker_of_gradient(single: CallTrace, key: Key, argument: bool) -> tuple[str, str, str]:
    """Returns (phase, module, tensor) to blame for a wrong gradient.

    An argument's gradient is made by the call itself, an output's by the call around it. The gradients that later calls
    returned came before, and were right.
    """
    if argument:
        return "backward of", key[1], ""
    while key in single.outer:  # the caller returns this output as its own, so whatever reads it is further out
        key = single.outer[key]
    path = key[1]
    callers = single.inside.get(key, [])
    if not callers:
        return "gradient of the output of", path, ""  # made by the loss
    caller = callers[0][1]
    whose = f"'{caller}'" if caller else "the whole model"
    return "backward of", caller, f"{whose}, at the output of '{path}'"


def _difference(expected: SampledTensor, actual: SampledTensor | None, pipelined: bool) -> tuple[float, str] | None:
    """Returns (error, kind) if a rank's tensor is not one process's; None if it is, or if that cannot be told."""
    if actual is None or (pipelined and bool(torch.isnan(actual.tensor).any())):  # NaN: another stage computes it
        return None
    rows = rows_of(expected, actual)
    # unknown which elements of one process's tensor belong to this rank's samples
    if rows is None:
        return None
    error = tensor_error(actual.tensor, rows, 1e-300)  # without a floor, so that small tensors count too
    # also relative to the largest of all samples, since this rank's samples alone may be of rounding size
    largest = float(expected.tensor.abs().max()) if expected.tensor.numel() else 0.0
    if error <= FAR or float((actual.tensor - rows).abs().max()) <= FAR * largest:
        return None
    return error, kind_of(actual.tensor, rows)


def _named(
    parity: Parity, single: Record, ranks: Record, kind: str, step: int, phase: str,
    shares: list[dict[str, torch.Tensor]],
) -> Located | None:  # fmt: skip
    """Returns the first tensor of a kind that exceeds its bar first in this step, with its rank; None if none does.

    phase   of the `Located`
    shares  summands of the gradients by data rank, name -> tensor; [] if not known
    """
    exceeding = {name for (of, name), first in parity.exceeded.items() if of == kind and first == step}
    for name in (name for name in single.of(kind, step) if name in exceeding):
        others = [d for d in ranks.deviations if (d.kind, d.step, d.name) == (kind, step, name)]
        # `ranks` is rank 0's record; of other ranks there are only tensors that differ from it
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
