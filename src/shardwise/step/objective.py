"""What backward differentiates: the loss's sum, extra terms of the task, times the loss scale."""

from __future__ import annotations

import torch

from shardwise.comm import gather_rows
from shardwise.errors import RefusedPlan
from shardwise.host import row_of
from shardwise.step.loss import Extra, Loss
from shardwise.step.state import RankState


def objective_of(state: RankState, loss: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns (what backward differentiates, extra terms by name): the sum plus extras, times the loss scale.

    An extra (E, V) of its own weight enters as E w / V with the micro-batch's global weights w and V, so that
    the step's loss is sum_i (S_i + w_i E_i / V_i) / W. Collective where an extra has a weight of its own, and in the
    first call with a loss scale. Raises `RefusedPlan` for extra terms that this plan cannot add up.
    """
    loss = _with_all_terms(state, loss)
    objective = loss.total
    extras: dict[str, torch.Tensor] = {}
    factors = _extra_factors(state, loss)
    for name, extra in loss.extras.items():
        term = _times(extra.total, factors[name])
        objective = objective + term
        extras[name] = term.detach()
    if state.scale is not None:
        many = state.plan.step_microbatches
        objective = objective * state.scale.factor(loss.weight, state.mesh.data, state.device, many)
    return objective, extras


def _with_all_terms(state: RankState, loss: Loss) -> Loss:
    """Returns the loss with a term of value 0 for each extra term that this rank's samples do not have.

    Ranks meet for terms with a weight of their own, and for the control row: a rank whose samples reach no box would
    come to fewer of these than the others.
    """
    nothing = loss.total.detach() * 0
    missing = {name: weighted for name, weighted in state.terms.items() if name not in loss.extras}
    if missing and state.plan.sharded.weights and state.mesh.data.size > 1:
        raise RefusedPlan(
            f"zero=3: Task.loss gave no term '{min(missing)}' for the samples of rank {state.mesh.world.index}, so its "
            "backward may reach fewer units than other ranks', which would wait for it: return the term for every "
            'batch, as a sum that may be of nothing, or use zero=2 with Task(branches="per_sample")'
        )
    return loss.with_extras({name: Extra(nothing, 0.0 if weighted else None) for name, weighted in missing.items()})


def _extra_factors(state: RankState, loss: Loss) -> dict[str, torch.Tensor | float]:
    """Returns {extra term: its factor}: 1 or w / V, the latter on the device where it is made of weights."""
    factors: dict[str, torch.Tensor | float] = dict.fromkeys(loss.extras, 1.0)
    own = {name: extra.weight for name, extra in sorted(loss.extras.items()) if extra.weight is not None}
    if own and state.order is not None:
        raise RefusedPlan(
            f"deterministic: the extra loss '{min(own)}' has a weight of its own, which would be summed over the "
            "pieces that ranks happen to run at once: give it as a sum over samples, like the loss"
        )
    if own:
        row = row_of([loss.weight, *own.values()], state.device)
        main, *totals = gather_rows(row, state.mesh.data).sum(dim=0)
        # a term that counts nothing anywhere adds nothing
        factors |= {name: torch.where(t != 0, main / t, t) for name, t in zip(own, totals, strict=True)}
    return factors


def _times(total: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """Returns total * factor, rounded once to the total's dtype, as torch does with a number in Python."""
    if not isinstance(factor, torch.Tensor):
        return total * factor
    wide = torch.promote_types(total.dtype, torch.float32)
    return (total.to(wide) * factor.to(wide)).to(total.dtype)
