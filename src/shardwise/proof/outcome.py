"""`Parity`: the outcome of a proof, all errors by name, and its text. Filled by compare_records and verify_run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

LOSS_BAR = 1e-10
NORM_BAR = 1e-9
PARAMETER_BAR = 1e-10
BUFFER_BAR = 1e-10
GRADIENT_BAR = 1e-9
OPTIMIZER_BAR = 1e-9
NUMBER_BAR = 1e-9  # for numbers that a run writes: losses, norms, learning rates, metrics
GRADIENT_FLOOR = 1e-4  # floor of a gradient's error (compare_records), relative to the model's largest gradient
FLOAT64_BARS = {
    "loss": LOSS_BAR,
    "norm": NORM_BAR,
    "gradient": GRADIENT_BAR,
    "parameter": PARAMETER_BAR,
    "buffer": BUFFER_BAR,
    "optimizer": OPTIMIZER_BAR,
}
KINDS = ("gradient", "parameter", "buffer", "optimizer")  # of tensors, compared by name
MOST_TOLD = 8  # differences, and reasons for NOT PROVEN, that a text lists


def _times(error: float, bar: float) -> float:
    """Returns error / bar; for a bar of 0, inf if there is an error and 0 if not."""
    return error / bar if bar else math.inf if error else 0.0


def _first_of(label: str, what: list[str]) -> list[str]:
    """Returns a line "label: text" for each of the first `MOST_TOLD` texts, and a line that counts the others."""
    rest = [f"and {len(what) - MOST_TOLD} more (--json)"] if len(what) > MOST_TOLD else []
    return [f"  {label}: {each}" for each in what[:MOST_TOLD] + rest]


@dataclass
class Parity:
    """The outcome of one proof; errors are relative, the largest over ranks and steps, by tensor name."""

    plan: str
    world_size: int
    loss_error: float | None = None  # None: no loss was compared, so nothing ran
    norm_error: float | None = None  # of the gradient's global norm, before clipping
    gradient_error: dict[str, float] = field(default_factory=dict)
    parameter_error: dict[str, float] = field(default_factory=dict)
    buffer_error: dict[str, float] = field(default_factory=dict)
    optimizer_error: dict[str, float] = field(default_factory=dict)  # "exp_avg of blocks.0.weight"
    bars: dict[str, float] = field(default_factory=dict)
    own_bars: dict[tuple[str, str], float] = field(default_factory=dict)  # (kind, name) -> bar in place of `bars`
    noise: dict[tuple[str, str], float] = field(default_factory=dict)  # (kind, name) -> error of one process vs itself
    noisy: set[tuple[str, str]] = field(default_factory=set)  # (kind, name) that rounding explains: NOT PROVEN
    worst: dict[tuple[str, str], str] = field(default_factory=dict)  # (kind, name): rank and step of the largest error
    exceeded: dict[tuple[str, str], int] = field(default_factory=dict)  # (kind, name): the first step beyond its bar
    first: Any = None  # a `Located`: where the plan first differs; None if that is not known
    cause: Any = None  # of the difference, with `name` and `text`; None if not known
    notes: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)  # sentences, such as on a gradient that one side lacks
    unproven: list[str] = field(default_factory=list)  # reasons for which agreement would prove nothing
    proven: str = ""  # the small plan that was run, if the proof was shrunk
    refused: str | None = None  # why the plan was refused
    error: str | None = None  # why the proof failed
    float64: bool = True  # False: float32, since a kernel of the task has no float64
    precision: str = ""  # the plan's, for a proof in the plan's own precision; "" for others
    further: list[Parity] = field(default_factory=list)  # proofs in the plan's own precision, compiled, or of 3 ranks

    def errors(self, kind: str) -> dict[str, float]:
        """Returns name of a tensor -> its largest error, for one of `KINDS`."""
        errors: dict[str, float] = getattr(self, f"{kind}_error")
        return errors

    def bar(self, kind: str, name: str = "") -> float:
        """Returns the largest error that a tensor of this kind and name may have."""
        return self.own_bars.get((kind, name), self.bars[kind])

    @property
    def equal(self) -> bool:
        """Whether everything compared is within its bar or explained by rounding, and nothing else differs."""
        # no loss was compared: nothing ran, so nothing is equal
        if self.refused or self.error or self.differences or self.loss_error is None:
            return False
        errors = [("loss", "", self.loss_error), ("norm", "", self.norm_error or 0.0)]
        errors += [(kind, name, error) for kind in KINDS for name, error in self.errors(kind).items()]
        # a NaN error fails `<=`, and so is no agreement
        return all(error <= self.bar(kind, name) or (kind, name) in self.noisy for kind, name, error in errors)

    @property
    def parity(self) -> bool:
        """Whether the plan is proven equal to one process, by this proof and all further ones."""
        return self.equal and not self.unproven and all(proof.parity for proof in self.further)

    def as_dict(self) -> dict[str, Any]:
        """Returns the outcome as values for JSON."""
        named = {f"{kind}_error": self.errors(kind) for kind in KINDS}
        return {
            "parity": self.parity,
            "loss_error": self.loss_error,
            "norm_error": self.norm_error,
            **named,
            "bars": self.bars,
            "refused": self.refused,
            "error": self.error,
            "differences": self.differences,
            "unproven": self.unproven,
            "cause": None if self.cause is None else {"name": self.cause.name, "text": self.cause.text},
            "first_difference": self.first.as_dict() if self.first is not None else None,
            "world_size": self.world_size,
            "plan": self.plan,
            "notes": self.notes,
            **({"further": [proof.as_dict() for proof in self.further]} if self.further else {}),
        }

    def text(self) -> str:
        """Returns the outcome in a few lines for a person."""
        if self.refused:
            return f"refused: {self.refused}"
        if self.error:
            return f"error: {self.error}"
        # `proven`: the small plan that was run in place of `plan`
        dtype = self.precision or ("float64" if self.float64 else "float32")
        lines = [f"plan {self.proven or self.plan} on {self.world_size} ranks against one process, {dtype}"]
        lines.append(f"  loss        {self.loss_error:.1e}   (bar {self.bars['loss']:.0e})")
        if self.norm_error is not None:
            lines.append(f"  norm        {self.norm_error:.1e}   (bar {self.bars['norm']:.0e})")
        lines += [self._line(kind) for kind in KINDS if self.errors(kind)]
        lines += _first_of("different", self.differences)
        lines += [f"  first: {self.first.text()}"] if self.first is not None else []
        lines += [f"  cause: {self.cause.text}"] if self.cause is not None else []
        lines += _first_of("not proven", self.unproven)
        lines += [f"  note: {note}" for note in self.notes]
        # further proofs have a text of their own; the last line is of all of them
        if self.further:
            lines += [proof.text() for proof in self.further]
            lines.append("both proofs:" if len(self._all) == 2 else "all proofs:")
        lines.append(self.verdict)
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """Returns the last line of the text, over this proof and all further ones."""
        if not all(proof.equal for proof in self._all):  # first, since a difference outweighs missing evidence
            return "NOT EQUAL to one process"
        return "NOT PROVEN" if any(proof.unproven for proof in self._all) else "EQUAL to one process"

    @property
    def _all(self) -> list[Parity]:
        """Returns this proof, its further proofs, and theirs."""
        return [self, *(inner for proof in self.further for inner in proof._all)]

    def _line(self, kind: str) -> str:
        """Returns the line of one kind of tensor: its largest error relative to the bar, and whose it is."""
        errors = self.errors(kind)
        worst = max(errors, key=lambda name: _times(errors[name], self.bar(kind, name)))
        where = self.worst.get((kind, worst), "") if errors[worst] > self.bar(kind, worst) else ""
        label = {"optimizer": "optimizer"}.get(kind, f"{kind}s")
        return (
            f"  {label:11s} {errors[worst]:.1e}   (bar {self.bar(kind, worst):.0e}; largest of {len(errors)}: {worst}"
            f"{', ' + where if where else ''})"
        )
