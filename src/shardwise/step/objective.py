"""What is differentiated: the loss's sum, and what else the task adds to it."""

from __future__ import annotations

import torch

from shardwise.comm import gather_rows
from shardwise.step.loss import Loss
from shardwise.step.state import RankState


def objective_of(state: RankState, loss: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What is differentiated: the sum, plus extra terms brought to the main weight, times the loss scale.

    An extra (E, V) of its own weight enters as E w / V with the micro-batch's global weights w and V, so that
    the step's loss is sum_i (S_i + w_i E_i / V_i) / W.
    """
    objective = loss.total
    extras: dict[str, torch.Tensor] = {}
    factors = _extra_factors(state, loss)
    for name, extra in loss.extras.items():
        term = extra.total * factors[name]
        objective = objective + term
        extras[name] = term.detach()
    if state.scale is not None:
        objective = objective * state.scale.factor(loss.weight, state.mesh.data, state.device)
    return objective, extras


def _extra_factors(state: RankState, loss: Loss) -> dict[str, float]:
    own = [name for name, extra in sorted(loss.extras.items()) if extra.weight is not None]
    factors = dict.fromkeys(loss.extras, 1.0)
    if own:
        row = [float(loss.weight)] + [float(loss.extras[name].weight or 0.0) for name in own]
        table = gather_rows(torch.tensor(row, dtype=torch.float64, device=state.device), state.mesh.data)
        totals = table.sum(dim=0).tolist()
        factors |= {name: totals[0] / total if total else 0.0 for name, total in zip(own, totals[1:], strict=True)}
    return factors
