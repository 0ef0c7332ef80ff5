"""Check what a run writes in its own precision against the weights that it has after each of its steps.

    average of the weights   those weights averaged in float64, up to the rounding of the average's dtype
    evaluations              one process in the compute dtype with those weights, up to 3 times what one epsilon does
    best weights             those after the best evaluation, bit by bit
    the file at the end      the last ones, bit by bit
    a step that overflows    must be skipped, without an update or a change of the average; one step's gradients are
                             made infinite for this

Compared with the run's own weights, an error here need not exceed the rounding of whole steps to be found.

What this does not do: say whether those weights are right; `own_precision` and `verify_run` do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.proof import dtypes
from shardwise.proof.oracle import plain_module
from shardwise.proof.own_dtypes import single_dtypes
from shardwise.proof.own_precision import ALLOWANCE, NUDGES, loss_in, moved_by_epsilon, spoiling
from shardwise.proof.plain_run import RunSettings, held_out, is_due
from shardwise.proof.settings import Settings
from shardwise.random.reading_seeds import drawing
from shardwise.step.optimizer_modes import evaluation_weights, has_mode
from shardwise.task import Task
from shardwise.training.keeping import BEST
from shardwise.training.loop import EMA_WEIGHTS, WEIGHTS

Weights = dict[str, torch.Tensor]
DECAY = 0.98  # least decay of a proof's average, so that it lags visibly behind the weights
SUMS = 4  # units in the last place by which one step of an average may be off


@dataclass
class SeenRun:
    """One rank's record of a run, tensors on rank 0 alone.

    weights   step -> weights and buffers as they are evaluated or written, for the steps that are due
    averages  step -> average of the weights in float64, for the same steps
    updated   steps that made an update
    states    dtypes of the optimizer's state, by key
    switched  whether the optimizer has modes, so that reading its weights rounds them
    """

    weights: dict[int, Weights] = field(default_factory=dict)
    averages: dict[int, Weights] = field(default_factory=dict)
    updated: list[int] = field(default_factory=list)
    states: dtypes.Named = field(default_factory=dict)
    switched: bool = False


@dataclass
class Watching:
    """Records a rank's weights while the training loop runs, and makes the gradients of step `spoilt` infinite."""

    due: tuple[int, ...]  # steps, from 0, whose weights are recorded
    decay: float | None  # of the average of the weights; None: there is none
    spoilt: int | None  # step that overflows; None: none does
    seen: SeenRun = field(default_factory=SeenRun)
    _average: Weights = field(default_factory=dict)  # float64, by name
    _engine: Engine | None = None

    @contextmanager
    def around(self, engine: Engine) -> Iterator[None]:
        """Context around a rank's steps: fills `seen`. Collective."""
        self._average = {name: value.double() for name, value in _whole(engine).items()}
        self._engine = engine
        with engine.around("update", partial(self._noting, engine)):
            yield
        self._engine = None  # this object is sent to the proof's process, which an engine cannot be
        self.seen.states = dtypes.of_states(engine.optimizer)
        if engine.rank:
            self.seen.weights, self.seen.averages = {}, {}

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss function, changed so that its backward gives infinite gradients in the step `spoilt`."""

        return spoiling(loss, lambda: self._engine is not None and self._engine.steps_done == self.spoilt)

    @contextmanager
    def _noting(self, engine: Engine) -> Iterator[None]:
        """Context around an update, after which weights and averages are recorded if the step is due. Collective."""
        yield
        step, now = engine.steps_done, _whole(engine)
        self.seen.updated.append(step)
        self.seen.switched = has_mode(engine.optimizer)
        # an average of its own, in float64
        if self.decay is not None:
            for name, value in self._average.items():
                self._average[name] = self.decay * value + (1 - self.decay) * now[name].double()
        if step in self.due:
            # an optimizer with modes evaluates, and writes, other weights than it trains
            with evaluation_weights(engine.state):
                now = _whole(engine) if has_mode(engine.optimizer) else now
            self.seen.weights[step] = now | {name: t.detach().cpu().clone() for name, t in engine.full_buffers()}
            self.seen.averages[step] = dict(self._average)


def _whole(engine: Engine) -> Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.full_parameters()}


def watching(task: Task, settings: RunSettings) -> Watching:
    """Returns the `Watching` of a run; `spoilt` is the first step after 0 that no evaluation follows, or None."""
    due = tuple(step for step in range(settings.steps) if is_due(task, settings, step) or step + 1 == settings.steps)
    free = [step for step in range(1, settings.steps) if step not in due]
    return Watching(due, settings.decay, free[0] if free else None)


def differences(task: Task, plan: Any, settings: RunSettings, ranks: list[Watching], folder: Path) -> list[str]:
    """Returns a sentence for each number or file that the run wrote and that does not follow from its own weights.

    ranks   each rank's `Watching`, filled by the run
    folder  the run folder
    """
    watched = ranks[0]
    seen, last = watched.seen, settings.steps - 1
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = {row["step"] - 1: row for row in rows if "eval_loss" in row}
    expected = [step for step in range(settings.steps) if step != watched.spoilt]
    told = []
    if seen.updated != expected:
        told.append(f"steps {seen.updated} were updates, where {expected} are finite")
        return told  # all that is compared below is numbered by these steps
    # exactly the spoilt step may be skipped
    skipped = [row["step"] - 1 for row in rows if row.get("skipped")]
    if skipped != [step for step in [watched.spoilt] if step is not None]:
        told.append(f"steps {skipped} are told to be skipped, and step {watched.spoilt} overflowed")
    # an optimizer with modes rounds weights at each switch between them, so they are compared up to that
    told += _unlike_file(folder / WEIGHTS, seen.weights[last], "the file of weights", rounded=seen.switched)
    if settings.decay is not None:
        told += _off_average(folder / EMA_WEIGHTS, seen, last, plan, settings.steps)
    # without an evaluation there are no best weights
    if evaluations:
        best = min(sorted(evaluations), key=lambda step: evaluations[step]["eval_loss"])
        told += _unlike_file(
            folder / BEST, seen.weights[best], f"the best weights, of step {best},", rounded=seen.switched
        )
        summary = json.loads((folder / "summary.json").read_text())["best"]
        if (summary["step"], summary["eval_loss"]) != (best + 1, evaluations[best]["eval_loss"]):
            told.append(f"the best weights are told to be those after step {summary['step']}, and are of {best + 1}")
        told += _off_evaluations(task, plan, settings, seen, evaluations)
    return told + _off_states(task, plan, ranks)


def _read(path: Path) -> Weights:
    from safetensors.torch import load_file

    return load_file(path)


def _unlike_file(path: Path, weights: Weights, what: str, *, rounded: bool) -> list[str]:
    """Returns [a sentence] on the first tensor of a file whose bits differ from `weights`; [] if none does.

    Names that only one of the two has are skipped. `rounded`: whether tensors may differ by rounding of their dtype.
    """
    if not path.exists():
        return [f"{what} was not written"]
    for name, value in _read(path).items():
        if name in weights and (value.dtype != weights[name].dtype or not _same(value, weights[name], rounded)):
            return [f"{what}: '{name}' is not the run's own weight, bit by bit"]
    return []


def _same(a: torch.Tensor, b: torch.Tensor, rounded: bool) -> bool:
    """Whether two tensors have the same bits, or, if `rounded`, differ by no more than switches of modes round."""
    if a.shape != b.shape or torch.equal(a.nan_to_num(), b.nan_to_num()):
        return a.shape == b.shape
    if not rounded or not a.is_floating_point():
        return False
    # each switch is an addition and a product, whose terms may be larger than the result
    return bool(((a - b).abs() <= 64 * torch.finfo(a.dtype).eps * b.abs().max()).all())


def _off_average(path: Path, seen: SeenRun, last: int, plan: Any, steps: int) -> list[str]:
    """Returns [a sentence] on the first average in a file that is further off than rounding allows; else [].

    last  step of the recorded average;  steps  of the run, each of which rounds
    """
    if not path.exists():
        return ["the average was not written"]
    stored, unit = _read(path), torch.finfo(dtypes.said(plan)[1]).eps
    for name, average in seen.averages[last].items():
        # names that one side lacks are reported when the run is compared with the plain loop
        if name not in stored or not average.numel():
            continue
        allowed = SUMS * steps * unit * float(average.abs().max())
        error = float((stored[name].double() - average).abs().max())
        if not error <= allowed:  # NaN too
            return [f"the average of '{name}' is off by {error:.1e} from that of the run's weights, over {allowed:.1e}"]
    return []


def _off_evaluations(
    task: Task, plan: Any, settings: RunSettings, seen: SeenRun, evaluations: dict[int, Any]
) -> list[str]:  # fmt: skip
    """Returns a sentence for each held-out loss that differs from one process's by more than rounding explains.

    evaluations  step -> the numbers that the run wrote for it
    """
    own = Settings(seed=settings.seed, dtype=torch.promote_types(dtypes.said(plan)[1], torch.float32))
    module, told = plain_module(task, own).eval(), []
    for step, numbers in sorted(evaluations.items()):
        for key, weights in (("eval_loss", {}), ("ema_eval_loss", seen.averages[step])):
            # the average is evaluated only if the run keeps one
            if key not in numbers:
                continue
            held = seen.weights[step] | weights
            runs = [_held_out(task, module, held, plan, settings, nudge) for nudge in range(NUDGES + 1)]
            least = 16 * torch.finfo(own.dtype).eps * abs(runs[0])
            allowed = max(ALLOWANCE * max(abs(run - runs[0]) for run in runs[1:]), least)
            if not abs(numbers[key] - runs[0]) <= allowed:  # NaN too
                told.append(f"{key} after step {step}: {numbers[key]:.6g}, of the run's own weights {runs[0]:.6g} "
                            f"in one process (up to {allowed:.1e} apart)")  # fmt: skip
    return told


@torch.no_grad()
def _held_out(task: Task, module: nn.Module, held: Weights, plan: Any, settings: RunSettings, nudge: int) -> float:
    """Returns the mean held-out loss of the weights and buffers `held` in the compute dtype.

    `nudge`: above 0, the seed by which weights and inputs move by one epsilon.
    """
    compute, own = dtypes.said(plan)[0], Settings(seed=settings.seed, nudge=nudge)
    for place, (name, param) in enumerate(module.named_parameters()):
        master = held[name].to(dtypes.said(plan)[1]) if name in held else param
        # a parameter that is not in the record keeps its initial value
        param.data = moved_by_epsilon(master.to(compute), own, 0, place)
    for name, buffer in module.named_buffers():
        if name in held:
            buffer.copy_(held[name])
    assert task.eval_data is not None
    chosen = held_out(len(task.eval_data), settings)
    total = weight = 0.0
    for first in range(0, len(chosen), settings.batch):
        # seeded as in the run's own evaluation, for sources that read at random (crops)
        with drawing(0, 0, first):
            batch = task.eval_data.read(chosen[first : first + settings.batch])
        loss, _ = loss_in(task, module, batch, compute, own, first, set())
        total, weight = total + float(loss.total), weight + float(loss.weight)
    # weighted, since the last batch may be short
    return total / weight


def _off_states(task: Task, plan: Any, ranks: list[Watching]) -> list[str]:
    """Returns a sentence for each key of the optimizer's state whose dtype differs from one process's."""
    single = dtypes.SeenDtypes(states=single_dtypes(task, plan, Settings()).states)
    return dtypes.first_differences(plan, [dtypes.SeenDtypes(states=rank.seen.states) for rank in ranks], single)
