"""An optimizer's own doors while this rank holds pieces: its state must neither leave nor come in as if it were whole.

Two ranks that save `optimizer.state_dict()` to one path would each overwrite the other's pieces, and a state of whole
tensors fits no piece. Where every rank holds whole tensors (replicas), state goes in and out as in one process.
"""

from __future__ import annotations

import types
from typing import Any

from torch.optim import Optimizer

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan


def guard_optimizer(optimizer: Optimizer, plan: Plan) -> None:
    """Make `state_dict`, `load_state_dict` and `add_param_group` raise where they would not do what they say.

    From the moment of `prepare` on: under tp a state that came in before the first forward would be lost with it.
    """

    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        raise InputError(
            "optimizer.add_param_group after prepare: the plan spread the parameters that the optimizer held then, and "
            "others would not be trained as in one process: add every group before prepare (with lr=0 or "
            "requires_grad=False until its time)"
        )

    vars(optimizer)["add_param_group"] = types.MethodType(add_param_group, optimizer)
    if not holds_pieces(plan):
        return
    reason = f"under plan {plan} each rank's optimizer holds pieces of its own"

    def leaves(optimizer: Optimizer) -> None:
        raise RefusedPlan(
            f"optimizer.state_dict(): {reason}, which one file cannot hold for all ranks and no other plan could read: "
            "save the weights alone (prepared.state_dict()), or use dp_replicate, under which every rank has all of it"
        )

    def comes(optimizer: Optimizer, state: dict[str, Any]) -> None:
        raise RefusedPlan(
            f"optimizer.load_state_dict(): {reason}, into which a state of whole tensors does not fit: start the "
            "optimizer anew, or use dp_replicate, under which every rank has all of it"
        )

    optimizer.register_state_dict_pre_hook(leaves)
    optimizer.register_load_state_dict_pre_hook(comes)


def holds_pieces(plan: Plan) -> bool:
    """Whether a rank's optimizer holds less than the whole parameters."""
    return plan.tp > 1 or plan.ep > 1 or (plan.zero > 0 and plan.dp_shard > 1)
