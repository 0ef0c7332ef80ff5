"""From sums of gradients to the mean's: the global norm, one division together with clipping, and what is not finite.

g <- (sum over ranks and micro-batches of g) * min(1, clip / |g|) / (W * loss scale)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shardwise.comm import all_reduce, gather_rows
from shardwise.engine.control import Agreement
from shardwise.engine.result import StepResult
from shardwise.errors import RunError
from shardwise.parallel.slots import Slot

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


def held_gradients(engine: Engine) -> list[torch.Tensor]:
    """Of every master on this rank, whole or a piece."""
    gradients = (slot.master.grad for slot in engine.technique.slots)
    return [gradient for gradient in gradients if gradient is not None]


def square_norm(engine: Engine) -> float:
    """Of the gradients that this rank counts, and of the shares of other ranks of tp; what is whole counts once."""
    slots = _counted_slots(engine)
    if engine.tensor is None:
        return float(sum_of_squares(engine, slots))
    total = sum_of_squares(engine, [slot for slot in slots if slot.name in engine.tensor.cuts])
    if engine.mesh.tp.index == 0:
        total = total + sum_of_squares(engine, [slot for slot in slots if slot.name not in engine.tensor.cuts])
    all_reduce(total, engine.mesh.tp, "control")
    return float(total)


def _counted_slots(engine: Engine) -> list[Slot]:
    """Without those that another rank of dp_shard or another pipeline stage holds too, and counts."""
    slots = [slot for slot in engine.technique.slots if slot.counted]
    if engine.pipeline is None:
        return slots
    return [slot for slot in slots if engine.pipeline.counts_here(slot.name)]


def sum_of_squares(engine: Engine, slots: list[Slot]) -> torch.Tensor:
    """float64, of the gradients of these slots on this rank."""
    gradients = [slot.master.grad for slot in slots if slot.master.grad is not None and slot.master.grad.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=engine.device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def normalise(engine: Engine, agreed: Agreement) -> tuple[StepResult, bool]:
    """Divide by the global weight and clip; decide, alike on all ranks, whether the update is finite."""
    weight = agreed.weight
    scale = engine.scale
    divisor = weight * (scale.value if scale is not None else 1.0)
    rows = agreed.square_norms[: engine.plan.dp_shard] if engine.technique.in_pieces else agreed.square_norms[:1]
    norm = math.sqrt(sum(rows)) / divisor if divisor else math.nan
    loss = (agreed.total + sum(agreed.extras.values())) / weight if weight else math.nan
    finite = math.isfinite(loss) and math.isfinite(norm)
    result = StepResult(
        step=engine.steps_done,
        loss=loss,
        weight=weight,
        grad_norm=norm,
        lr=float(engine.optimizer.param_groups[0].get("lr", math.nan)),
        samples=agreed.samples,
        skipped=not finite,
        extras={name: value / weight if weight else math.nan for name, value in agreed.extras.items()},
    )
    if scale is not None:
        scale.update(overflow=math.isfinite(loss) and not math.isfinite(norm))
    if not finite:
        _not_finite(engine, result)
        return result, False
    clip = min(1.0, engine.clip_norm / (norm + 1e-6)) if engine.clip_norm is not None else 1.0
    gradients = held_gradients(engine)
    if gradients and clip / divisor != 1.0:
        torch._foreach_mul_(gradients, clip / divisor)
    return result, True


def _not_finite(engine: Engine, result: StepResult) -> None:
    """Raise, unless skipping was asked for or the loss scaler expects this."""
    if engine.on_nonfinite == "skip" or (engine.scale is not None and math.isfinite(result.loss)):
        return
    what = f"loss {result.loss}" if not math.isfinite(result.loss) else f"gradient norm {result.grad_norm}"
    if result.weight == 0:
        what = "global weight 0 (no sample or token counts), so the loss"
    bad = _first_bad_gradient(engine)
    where = f"; the first bad gradient is that of '{bad}'" if bad else ""
    raise RunError(
        f"{what} is not finite in step {engine.steps_done}{where}. Lower the learning rate, set clip_norm, or go on "
        'without such updates by on_nonfinite="skip"'
    )


def _first_bad_gradient(engine: Engine) -> str | None:
    index_of = {name: index for index, name in enumerate(engine.names)}
    bad = [
        index_of[slot.name]
        for slot in engine.technique.slots
        if slot.master.grad is not None and not bool(torch.isfinite(slot.master.grad).all())
    ]
    first = float(min(bad, default=len(engine.names)))
    table = gather_rows(torch.tensor([first], dtype=torch.float64, device=engine.device), engine.mesh.data)
    found = int(table.min())
    return engine.names[found] if found < len(engine.names) else None
