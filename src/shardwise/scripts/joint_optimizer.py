"""Presents several optimizers of one model (Muon for its matrices, Adam for the rest) to the plan as one.

    script   muon.step(), adam.step(), a scheduler for each    its own objects, each over its own groups
    plan     a `JointOptimizer` of them                        their groups in one list, their state in one mapping

Each member optimizer steps over its own groups; the other members' weights and state stay as they are. The trial of
which pieces an optimizer can run on is made for each group with its member; the group that needs most of a tensor
decides for all.

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
    """Several optimizers of one model under the attributes of one optimizer, as a view; made by `as_one_optimizer`.

    members  the optimizers, as a tuple
    given    the script's own tuple or list of them
    """

    def __init__(self, given: tuple[Optimizer, ...] | list[Optimizer]) -> None:
        # not torch's constructor, which would fill groups with defaults of its own
        """Holds the optimizers `given`; copies nothing."""
        self.members, self.given = tuple(given), given
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the members' own param groups, in the order of the members.

        Read anew each time, since loading a state replaces them.
        """
        return [group for one in self.members for group in one.param_groups]

    @property
    def state(self) -> JointState:
        """Returns a `JointState`, a view of the members' state."""
        return JointState(self.members)


class JointState(MutableMapping[Any, Any]):
    """The state of several optimizers as one mapping; a parameter's entry lies in the member whose groups hold it."""

    def __init__(self, members: tuple[Optimizer, ...]) -> None:
        self._members = members

    def _part_of(self, key: Any) -> Any:
        """Returns the state of the member that has an entry `key`, else of one whose groups hold it, else the first."""
        members = [*self._members]
        having = [one for one in members if key in one.state] or [one for one in members if holds(one, key)]
        return (having or members)[0].state

    def __contains__(self, key: object) -> bool:
        return any(key in one.state for one in self._members)

    def __getitem__(self, key: Any) -> Any:
        if key not in self:  # torch's defaultdict would make an entry
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
    """Returns whether a group of the optimizer lists this very tensor."""
    return any(param is own for group in optimizer.param_groups for own in group["params"])


def as_one_optimizer(optimizer: Any) -> Any:
    """Returns a tuple or list of optimizers as one `JointOptimizer`; any other value unchanged."""
    several = isinstance(optimizer, tuple | list) and all(isinstance(one, Optimizer) for one in optimizer)
    if not several or not optimizer:
        return optimizer
    # messages and checkpoints name an optimizer by its class
    name = " and ".join(type(one).__name__ for one in optimizer)
    return type(name, (JointOptimizer,), {})(optimizer)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Returns the optimizers that the script steps: the members of a `JointOptimizer`, else (optimizer,)."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


def optimizer_as_given(optimizer: Optimizer) -> Any:
    """Returns what `as_one_optimizer` was given: the script's tuple or list, or the single optimizer."""
    return optimizer.given if isinstance(optimizer, JointOptimizer) else optimizer


def stepping_over(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Returns the member whose groups include this one; `optimizer` itself for a group that is yet to be added."""
    having = (one for one in members_of(optimizer) if any(group is own for own in one.param_groups))
    return next(having, optimizer)


def refuse_several(optimizer: Optimizer, plan: Plan) -> None:
    """Raises `RefusedPlan` for several optimizers under a plan that steps over a few weights at a time.

    That is one with offload, optimizer_state or masters.
    """
    moved = plan.offload != "none" or plan.optimizer_state != "full" or plan.masters != "full"
    if moved and isinstance(optimizer, JointOptimizer):
        raise RefusedPlan(
            f"plan {plan}: offload, optimizer_state and masters beside several optimizers of one model: leave them "
            "out, or write the optimizers as one class whose groups tell which update they take"
        )


@names_line
def refuse_added(optimizer: Optimizer) -> None:
    """Raises `InputError` if `optimizer` is several, because a group cannot be added to one of them after `prepare`."""
    if isinstance(optimizer, JointOptimizer):
        raise InputError("optimizer.add_param_group of one of several optimizers of a model: do it before prepare")
