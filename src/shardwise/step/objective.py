"""Compute the scalar that backward differentiates: loss sum plus the task's extra terms, times the loss scale."""

from __future__ import annotations

import torch

from shardwise.comm import gather_rows
from shardwise.errors import RefusedPlan
from shardwise.host import row_of
from shardwise.step.loss import Extra, Loss
from shardwise.step.state import RankState


def objective_of(state: RankState, loss: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns (the scalar to differentiate, {extra term: its detached value in the loss}) of one micro-batch.

    The scalar is the loss's sum plus its extra terms, times the loss scale in fp16. An extra (E, V) with its own weight
    enters as E w / V with the micro-batch's global weights w and V, so that
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
    """Returns the loss with a zero for each extra term that other samples have (`state.terms`) and these lack.

    Ranks exchange the weights of terms, and the control row has a column for each, so all ranks need the same terms.
    For example, a box loss is missing on a rank whose samples have no boxes.
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
    """Returns {extra term: factor on its sum}: w / V, a tensor, for a term with its own weight, else 1.0.

    Collective if a term has its own weight.
    """
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
        # factor 0 if the term's weight is 0 on all ranks
        factors |= {name: torch.where(t != 0, main / t, t) for name, t in zip(own, totals, strict=True)}
    return factors


def _times(total: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """Returns total * factor, rounded once to the total's dtype, as torch does with a number in Python."""
    if not isinstance(factor, torch.Tensor):
        return total * factor
    wide = torch.promote_types(total.dtype, torch.float32)
    return (total.to(wide) * factor.to(wide)).to(total.dtype)
