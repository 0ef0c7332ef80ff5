"""Several optimizers of one model as one (Muon for its matrices, Adam for the rest), to the plan.

    script   muon.step(), adam.step(), a scheduler for each    its own objects, each over its own groups
    plan     a `JointOptimizer` of them                        their groups in one list, their state in one mapping

A member steps by itself, over its own groups; a step of another leaves its weights and state alone. The trial of which
pieces an optimizer bears goes group by group, each by its member, and what needs most of a tensor decides for all.

What this does not do: step; keep state in a tier; take a group that is added after `prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer

from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.scripts.script_lines import names_line


class JointOptimizer(Optimizer):
    """Optimizers of one model, in the fields of one: a view of them. Made by `as_one_optimizer`."""

    def __init__(self, given: tuple[Optimizer, ...] | list[Optimizer]) -> None:
        # not torch's constructor, which would fill groups with defaults of its own
        self.members, self.given = tuple(given), given
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the members' own groups in a row, as they are now: a load of state makes others."""
        return [group for one in self.members for group in one.param_groups]

    @property
    def state(self) -> JointState:
        """Returns a view of the members' state."""
        return JointState(self.members)


class JointState(MutableMapping[Any, Any]):
    """The state of several optimizers: a parameter's stands with the one whose groups hold it."""

    def __init__(self, members: tuple[Optimizer, ...]) -> None:
        self._members = members

    def _part_of(self, key: Any) -> Any:
        """Returns the state that has the key, else that of the member whose groups hold it, else the first one's."""
        members = [*self._members]
        having = [one for one in members if key in one.state] or [one for one in members if holds(one, key)]
        return (having or members)[0].state

    def __contains__(self, key: object) -> bool:
        return any(key in one.state for one in self._members)

    def __getitem__(self, key: Any) -> Any:
        if key not in self:  # torch's dict of state makes an entry of whatever it is asked for
            raise KeyError(key)
        return self._part_of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._part_of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._part_of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        return (key for one in self._members for key in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._members)


def holds(optimizer: Optimizer, param: Any) -> bool:
    """Whether a group of the optimizer holds this very tensor."""
    return any(param is own for group in optimizer.param_groups for own in group["params"])


def as_one_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer itself; a tuple or list of them as one, in a class named after theirs."""
    several = isinstance(optimizer, tuple | list) and all(isinstance(one, Optimizer) for one in optimizer)
    if not several or not optimizer:
        return optimizer
    # messages and checkpoints tell an optimizer by its class's name
    name = " and ".join(type(one).__name__ for one in optimizer)
    return type(name, (JointOptimizer,), {})(optimizer)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Returns the optimizers that the script steps: (the optimizer itself,), or those of a `JointOptimizer`."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


def optimizer_as_given(optimizer: Optimizer) -> Any:
    """Returns the optimizer, or the tuple or list of them, that `as_one_optimizer` was given."""
    return optimizer.given if isinstance(optimizer, JointOptimizer) else optimizer


def stepping_over(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Returns the member that steps over this group; of a group that is to be added, the optimizer itself."""
    having = (one for one in members_of(optimizer) if any(group is own for own in one.param_groups))
    return next(having, optimizer)


def refuse_several(optimizer: Optimizer, plan: Plan) -> None:
    """Raise `RefusedPlan` where the plan would step over several optimizers' weights a few at a time."""
    moved = plan.offload != "none" or plan.optimizer_state != "full" or plan.masters != "full"
    if moved and isinstance(optimizer, JointOptimizer):
        raise RefusedPlan(
            f"plan {plan}: offload, optimizer_state and masters beside several optimizers of one model: leave them "
            "out, or write the optimizers as one class whose groups tell which update they take"
        )


@names_line
def refuse_added(optimizer: Optimizer) -> None:
    """Raise `InputError` where a group is added to one of several optimizers."""
    if isinstance(optimizer, JointOptimizer):
        raise InputError("optimizer.add_param_group of one of several optimizers of a model: do it before prepare")
