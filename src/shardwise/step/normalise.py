"""Divide summed gradients by the global weight and clip them by their norm, in one multiplication.

g <- (sum over ranks and micro-batches of g) * min(1, clip / |g|) / (W * loss scale)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from shardwise.comm import all_reduce, gather_rows, gathered_together
from shardwise.device import by_device, on_host
from shardwise.errors import RunError
from shardwise.host import put, read
from shardwise.parallel.slots import Slot
from shardwise.step.control import Agreement
from shardwise.step.loss import not_negative
from shardwise.step.result import StepResult
from shardwise.step.state import RankState

RUN = 2**13  # elements whose squares a CPU adds up in float32, one after another, with an error of 1e-7
SKIP = 'or go on without such updates by on_nonfinite="skip"'
DIVERGED = "Lower the learning rate, set clip_norm, {}"
UNSET = "Give it values where the model is made: torch.empty holds what was in memory before"
NO_WEIGHT = (
    "Look at the weight that Task.loss returns (in a script, what prepared.backward is given), and at the batch: every "
    "target is ignored, or a mask is empty. Leave such batches out, {}"
)


class NotFinite(RunError):
    """The loss or the gradient norm of a step is not finite, or its weight is 0; raised on every rank.

    what  which value and step;  where  at which parameter or sample, or "";  remedy  what the user can do
    """

    def __init__(self, what: str, where: str, remedy: str):
        super().__init__(f"{what}{where}. {remedy}")
        self.what = what


def held_gradients(state: RankState) -> list[torch.Tensor]:
    """Returns the gradients of this rank's masters that have one, each unsharded or this rank's piece."""
    gradients = (slot.master.grad for slot in state.technique.slots)
    return [gradient for gradient in gradients if gradient is not None]


def _as_summed(state: RankState) -> list[torch.Tensor] | None:
    """Returns a step's gradients as a few flat tensors, one for each bucket; None if they do not lie so.

    Valid only while nobody has replaced a gradient since the sums. None also if a rank counts only some gradients (tp,
    a pipeline). Kernels over buckets take a tenth of the time of kernels over weights.
    """
    alone = state.tensor is None and state.staged is None and state.as_made is None
    return state.technique.flat_gradients() if alone else None


def square_norm(state: RankState, *, changed: bool = False) -> torch.Tensor:
    """Returns the squared L2 norm, () float64 on the device, of the gradients that this rank counts, summed over tp.

    Over the ranks that hold different pieces each element counts once. The host reads it with the control row.
    changed   whether a script may have replaced gradients since the sums over ranks
    """
    # plan.deterministic: one sum over whole gradients, whose order does not depend on ranks
    if state.order is not None:
        return _whole_square_norm(state)
    flat = None if changed else _as_summed(state)
    if flat is not None:
        return _sum_of_squares(flat, state.device)
    slots = _counted_slots(state)
    # gradients were freed within backward, and the norms of the flat tensors they lay in were noted
    if state.as_made is not None and (flats := state.as_made.flats):
        return _summed([norm for number in sorted(flats) for norm in flats[number]], state.device)
    # without shares every gradient of this rank counts
    if state.tensor is None:
        return sum_of_squares(state, slots)
    # tp ranks hold shares of cut weights, which add up, and equal gradients of the others, which the first rank counts.
    total = sum_of_squares(state, [slot for slot in slots if slot.name in state.tensor.cuts])
    if state.mesh.tp.index == 0:
        total = total + sum_of_squares(state, [slot for slot in slots if slot.name not in state.tensor.cuts])
    all_reduce(total, state.mesh.tp, "control")
    return total


def _whole_square_norm(state: RankState) -> torch.Tensor:
    """Returns the squared norm over unsharded gradients, one after another: the same bits on any number of ranks."""
    squares = torch.zeros((), dtype=torch.float64, device=state.device)
    for gradient in gathered_together(state.technique.full_gradient(index) for index in range(len(state.names))):
        if gradient is not None and gradient.numel():
            squares += _sum_of_squares([gradient.contiguous()], state.device)
    return squares


def _counted_slots(state: RankState) -> list[Slot]:
    """Returns the slots whose gradients this rank counts, so that each weight counts on one dp_shard rank and stage."""
    slots = [slot for slot in state.technique.slots if slot.counted]
    if state.staged is None:
        return slots
    return [slot for slot in slots if state.staged.cut.counts_here(slot.name)]


def sum_of_squares(state: RankState, slots: list[Slot]) -> torch.Tensor:
    """Returns the sum of squares of these slots' gradients on this rank, () float64 on the device."""
    # gradients that were used as made are freed, and their norms were noted; others are still there
    if state.as_made is not None:
        early = state.as_made.norms
        held = [[] if slot.master.grad is None else [slot.master.grad] for slot in slots]
        norms = [early.get(id(slot.master)) or norms_of(left) for slot, left in zip(slots, held, strict=True)]
        return _summed([norm for of_slot in norms for norm in of_slot], state.device)
    return _sum_of_squares([slot.master.grad for slot in slots if slot.master.grad is not None], state.device)


def _sum_of_squares(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the sum of squares of gradients, () float64 on `device`, also of gradients that lie on the host."""
    alike = by_device(gradient for gradient in gradients if gradient.numel())
    squares = [_summed(norms_of(held), device).to(device, non_blocking=True) for held in alike]
    if len(squares) == 1:
        return squares[0]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def norms_of(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns 1-d tensors of L2 norms whose squares add up to the squared norm of all `gradients` (of one device)."""
    if gradients and not on_host(gradients[0].device):
        return [norm.reshape(1) for norm in torch._foreach_norm(gradients)]
    return [norms for gradient in gradients for norms in _norms_of_runs(gradient)]


def _summed(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the sum of the squares of all these norms, () float64."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return (torch.cat(norms) if len(norms) > 1 else norms[0]).double().square().sum()


def _norms_of_runs(gradient: torch.Tensor) -> list[torch.Tensor]:
    """Returns the L2 norms of runs of `RUN` elements, (n,), and of the remaining elements, (1,), in the same dtype.

    A CPU adds up a tensor's squares one after the other, in float32: of 38 million, GPT-2's embeddings, the norm comes
    out 0.2% too small, and that of two halves otherwise.
    """
    flat = gradient.reshape(-1)
    whole = len(flat) // RUN * RUN
    rows = [flat[:whole].view(-1, RUN)] if whole else []
    if whole < len(flat):
        rows.append(flat[None, whole:])
    return [torch.linalg.vector_norm(row, dim=1) for row in rows]


def norm_of_gradients(state: RankState) -> float:
    """Returns the global L2 norm of the gradients as they are now, clipped or changed by a script too. Collective."""
    table = gather_rows(square_norm(state, changed=True).reshape(1), state.mesh.gradients)
    rows = read(table.view(-1), "the norm of gradients")
    # Squares of pieces add up over dp_shard, whose ranks come first; replicas have equal numbers, so one is read.
    summed = state.technique.in_pieces and state.order is None
    return math.sqrt(sum(rows[: state.mesh.shard.size] if summed else rows[:1]))


def divisor_of(state: RankState, weight: float) -> float:
    """Returns the divisor of a step's summed gradients: global `weight` x loss scale x ranks with the same samples."""
    # if all data ranks have the same samples (loss_scope="model"), their equal gradients were summed
    copies = state.mesh.data.size if state.same_samples else 1
    return weight * (state.scale.value if state.scale is not None else 1.0) * copies


def clip_of(state: RankState, norm: float) -> float:
    """Returns the factor that clips gradients of this norm to `clip_norm`; 1.0 without clipping."""
    return min(1.0, state.clip_norm / (norm + 1e-6)) if state.clip_norm is not None else 1.0


def normalise(state: RankState, agreed: Agreement) -> tuple[StepResult, bool]:
    """Divides gradients by the global weight and clips them; returns (`StepResult`, whether all ranks may update).

    If loss or norm is not finite, raises `NotFinite` on every rank under on_nonfinite="raise", unless an fp16 loss
    scale expects an overflow; returns False under "skip", True under "use". Raises `InputError` for a negative weight.
    """
    weight = not_negative(agreed.weight, f"weight of step {state.steps_done + 1}")
    scale, divisor = state.scale, divisor_of(state, weight)
    summed = state.technique.in_pieces and state.order is None
    rows = agreed.square_norms[: state.mesh.shard.size] if summed else agreed.square_norms[:1]
    norm = math.sqrt(sum(rows)) / divisor if divisor else math.nan
    loss = (agreed.total + sum(agreed.extras.values())) / weight if weight and math.isfinite(weight) else math.nan
    finite = math.isfinite(loss) and math.isfinite(norm)
    result = StepResult(
        step=state.steps_done,
        loss=loss,
        weight=weight,
        grad_norm=norm,
        lr=float(state.optimizer.param_groups[0].get("lr", math.nan)),
        samples=agreed.samples,
        skipped=not finite,
        extras={
            name: value / weight if weight and math.isfinite(weight) else math.nan
            for name, value in agreed.extras.items()
        },
    )
    # If the loss itself is infinite a smaller scale would not help, so that is no overflow.
    if scale is not None:
        scale.update(overflow=math.isfinite(loss) and not math.isfinite(norm))
    if not finite and state.on_nonfinite != "use":  # "use": one measures, and no update is refused
        # raises, unless a loss scaler expects an overflow
        if state.on_nonfinite != "skip":
            not_finite(state, result)
        return result, False
    clip = clip_of(state, norm)
    # Clipping and division in one multiplication, so that gradients are rounded once.
    flat = _as_summed(state)
    gradients = held_gradients(state) if flat is None else flat
    if gradients and divisor and clip / divisor != 1.0:
        for alike in by_device(gradients):
            torch._foreach_mul_(alike, clip / divisor)
    return result, True


def not_finite(state: RankState, result: StepResult, skip: str = SKIP) -> None:
    """Raise `NotFinite` on all ranks, unless the fp16 loss scaler expects an overflow. Collective.

    skip  text for the user on how to go on without such updates
    """
    # fp16: gradients that overflow are expected, and the next step has a smaller scale
    if state.scale is not None and math.isfinite(result.loss):
        return
    what = f"loss {result.loss}" if not math.isfinite(result.loss) else f"gradient norm {result.grad_norm}"
    # with weight 0 the batch is at fault, not the model
    if result.weight == 0:
        what = "global weight 0 (no sample or token counts), so the loss"
        raise NotFinite(f"{what} is not finite in step {state.steps_done + 1}", "", NO_WEIGHT.format(skip))
    # in the first step, before any update, uninitialised weights are the likeliest cause
    unset = None if state.steps_done or state.as_made is not None else _first_bad(state, lambda slot: slot.master)
    if unset:
        raise NotFinite(
            f"{what} is not finite in step 1", f": '{unset}' holds NaN or an infinite value at start", UNSET
        )
    bad = _first_bad(state, lambda slot: slot.master.grad)
    where = f"; the first bad gradient is that of '{bad}'" if bad else ""
    raise NotFinite(f"{what} is not finite in step {state.steps_done + 1}", where, DIVERGED.format(skip))


def _first_bad(state: RankState, of: Callable[[Slot], torch.Tensor | None]) -> str | None:
    """Returns the first parameter whose tensor `of(slot)` has a non-finite value on some rank, or None. Collective."""
    index_of = {name: index for index, name in enumerate(state.names)}
    tensors = [(index_of[slot.name], tensor) for slot in state.technique.slots if (tensor := of(slot)) is not None]
    bad = [index for index, tensor in tensors if not read(torch.isfinite(tensor).all(), "a finite tensor")]
    first = float(min(bad, default=len(state.names)))
    index = int(read(gather_rows(put([first], state.device), state.mesh.gradients).min(), "first bad tensor"))
    return state.names[index] if index < len(state.names) else None
