"""Experts' forward on the ranks of `ep`, each with a block of them (also exchange: rows; find; checkpoint/holdings).

    rank 0   tokens 0..3 -> router -> pairs ==all-to-all==> experts 0, 1 of all tokens ==all-to-all==> sums for 0..3
    rank 1   tokens 4..6 -> router -> pairs ==all-to-all==> experts 2, 3 of all tokens ==all-to-all==> sums for 4..6

Equation: y_t = sum over the k experts e chosen for t of f_e(x_t, w_te); expert e lies on rank e // (E / ep).
Bytes on the wire, for a layer of T tokens on this rank and evenly used experts: 2 T k (ep-1)/ep rows of H in forward
(there and back), as many in backward, and one weight beside each row.
Bytes at rest: 1/ep of the experts, of their gradients and of their optimizer state.
Source: Lepikhin et al., "GShard" (2020), section 3.2; Rajbhandari et al., "DeepSpeed-MoE" (2022), section 5.

The axis folds onto dp_shard and the axes that cut positions: ranks of `ep` have different tokens, and so the gradients
of an expert are sums over all of them already. Only ranks that hold the same ones reduce them (`reduce`).

The module's own forward computes the experts: it is called with the rows that arrived, their experts counted from
this rank's first, and its stacked parameters are this rank's share. Which module that can be done to is tried, not
recognised by name (`find`).

Where the plan cuts positions too, a rank sends the rows of its share.
Without `ep` such a module is given a rank's own rows (`compute_own_rows`), since what it does to a row needs no other.

What this does not do: overlap the exchange with computation (exchange), or send a token once where two of its experts
share a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.comm import Axis, Gathering, Trail, sum_over
from shardwise.parallel.expert.exchange import of_own_rows, through_owners
from shardwise.parallel.expert.expert_program import ExpertProgram
from shardwise.parallel.expert.stacked import StackedExperts
from shardwise.parallel.expert.two_passes import Key, ListedExperts
from shardwise.parallel.slots import ValueOf
from shardwise.part.crossing import axes_of

_END = "the end of the forward"
_WHY = (
    "Under ep every rank must come to the same experts in the same order, since tokens are exchanged between all; one "
    "process would take one branch for all samples. Route every token on every rank, or use ep=1"
)


@dataclass(frozen=True)
class ExpertCall:
    """Where a module's rows, experts and weights stand among its arguments: a position or a keyword each.

    A module that chooses experts by itself is given rows (..., H) alone.
    """

    rows: int | str
    index: int | str | None = None
    weight: int | str | None = None

    @property
    def _keys(self) -> list[int | str]:
        return [key for key in (self.rows, self.index, self.weight) if key is not None]

    def read(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """Returns rows (T, H), experts (T, k) and weights (T, k) of a call, as far as it has them."""
        return [args[key] if isinstance(key, int) else kwargs[key] for key in self._keys]

    def made(self, args: tuple, kwargs: dict, *values: torch.Tensor) -> tuple[list, dict]:
        """Returns the call's arguments with other rows, experts and weights in their places."""
        new_args, new_kwargs = list(args), dict(kwargs)
        for key, value in zip(self._keys, values, strict=True):
            if isinstance(key, int):
                new_args[key] = value
            else:
                new_kwargs[key] = value
        return new_args, new_kwargs


@dataclass(frozen=True)
class Stack:
    """One module of experts: its stacked parameters, and which of its integer attributes (`counters`) count them.

    A module that chooses by itself (`choosing`), for its own rows alone, has experts=0. One whose experts are modules
    of their own (`listed`) has `members`, their paths, and `keys`, the arguments by which each is given its rows; its
    `call` is None where it may not be given a rank's own rows alone. `draws`: members draw (dropout). One that deals
    rows to its stacked weights itself (`stacked`) has `program`, an expert's operations as text.
    """

    path: str
    experts: int
    names: tuple[str, ...]  # of parameters (E, ...), of members' all
    call: ExpertCall | None
    counters: tuple[str, ...] = ()  # attributes that must be the number of experts held here
    sums: tuple[tuple[str, str], ...] = ()  # buffers that add up over rows, and the way (part.buffer_ways)
    members: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    draws: bool = False
    program: str = ""

    @property
    def chooses(self) -> bool:
        """Whether its forward chooses which expert gets which row."""
        return bool(self.members or self.program) or not self.experts


@dataclass(frozen=True)
class ExpertParallel:
    """The experts of a module, dealt over an axis (`ep`): each rank holds a block of each stack's.

    Of experts that are modules a rank holds some whole; the weights of others have no rows there. `rows`: the first
    dim of such a weight, whole, as tp cuts it on this rank.
    """

    stacks: list[Stack]
    axis: Axis
    rows: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def dealt(self) -> dict[str, tuple[Stack, int]]:
        """Returns the module of experts that holds each dealt parameter, and whose it is of its members (else 0)."""
        return {
            name: (stack, next((n for n, path in enumerate(stack.members) if name.startswith(f"{path}.")), 0))
            for stack in self.stacks for name in stack.names
        }  # fmt: skip

    def owner(self, name: str) -> int | None:
        """Returns the rank of the axis that holds all of a parameter; None of one that is stacked."""
        stack, number = self.dealt[name]
        return number // (stack.experts // self.axis.size) if stack.members else None

    def span(self, name: str, size: int) -> tuple[int, int]:
        """Returns which rows (start, stop) of a parameter's first dim, `size` long, this rank holds."""
        owner, place = self.owner(name), self.axis.index
        if owner is not None:
            return (0, size) if owner == place else (0, 0)
        here = size // self.axis.size
        return place * here, (place + 1) * here

    def here(self, absent: Collection[str]) -> ExpertParallel:
        """Returns the experts of this rank's pipeline stages alone. `absent`: names of parameters that others have."""
        stacks = [stack for stack in self.stacks if not absent or set(stack.names) - set(absent)]
        return replace(self, stacks=stacks)

    def notices(self) -> list[str]:
        """Returns one line for the user on how many experts of how many modules are spread."""
        counts, first = sorted({stack.experts for stack in self.stacks}), self.stacks[0]
        # which weights are its experts' was tried, not said: an author sees here whether these are meant
        leaves = ", ".join(name.removeprefix(f"{first.path}.") for name in first.names) if first.program else ""
        return [
            f"ep={self.axis.size} spreads the experts of {len(self.stacks)} modules, "
            f"{' or '.join(map(str, counts))} in each ('{first.path}'{f': {leaves};' if leaves else ','} ...)"
        ]

    def local_values(self, value_of: ValueOf) -> ValueOf:
        """Returns a function that gives a parameter's initial value, of experts those of this rank alone."""

        def value(name: str) -> torch.Tensor:
            full = value_of(name)
            if name not in self.dealt:
                return full
            start, stop = self.span(name, full.shape[0])
            return full[start:stop]

        return value

    def whole(self, name: str, share: torch.Tensor | None) -> Gathering:
        """Returns the gathering of all experts of a parameter or gradient; any other, and None, it gives as it is."""
        if share is None or name not in self.dealt:
            return share
        owner = self.owner(name)
        # of an expert that is a module of its own, in a list, one rank holds the parameter whole
        if owner is not None:  # one gather takes rows of one size: the others send as many, which are dropped
            shape = (self.rows[name], *share.shape[1:])
            sent = share.detach() if owner == self.axis.index else share.detach().new_zeros(shape)
            table = yield sent.reshape(-1), self.axis
            return table.view(self.axis.size, *shape)[owner]
        table = yield share.detach().reshape(-1), self.axis
        return table.view(share.shape[0] * self.axis.size, *share.shape[1:])

    def full_shape(self, name: str, share: torch.Size) -> torch.Size:
        """Returns the shape of a parameter with all its experts."""
        if name not in self.dealt:
            return share
        stack = self.dealt[name][0]
        return torch.Size([self.rows[name] if stack.members else stack.experts, *share[1:]])


def install(module: nn.Module, experts: ExpertParallel, device: torch.device, *, traced: bool = False) -> None:
    """Let each module of experts send its tokens to the ranks that hold them. Collective.

    traced  a compiler goes through the blocks: it leaves experts and the way to them alone, since the number of rows
            is another in each step
    """
    # ranks that come to other experts, or to none, are named before they would wait for each other in an exchange
    events = [f"the experts '{stack.path}'" for stack in experts.stacks]
    trail = Trail(experts.axis, [*events, _END], device, why=_WHY)
    module.register_forward_hook(lambda m, a, o: trail.mark(_END))
    for stack in experts.stacks:
        child = module.get_submodule(stack.path)
        dispatch = _dispatched_in_turns if stack.members or stack.program else _dispatched
        dispatched = dispatch(module, child, stack, experts.axis, trail)
        child.forward = _uncompiled(dispatched) if traced else dispatched


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that a compiler leaves alone, be it asked to compile this very one."""
    disabled = torch.compiler.disable(forward)

    # `torch.compile` of a disabled function takes the function inside: this one it breaks at the call
    def run(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs)

    return run


def _dispatched_in_turns(module: nn.Module, child: nn.Module, stack: Stack, axis: Axis, trail: Trail) -> Any:
    """Returns a forward that runs twice, around an exchange of the rows that it gives to its experts."""
    own = child.forward
    if stack.program:
        leaves = [name.removeprefix(f"{stack.path}.") for name in stack.names]
        program = ExpertProgram.decoded(stack.program)
        listed: ListedExperts = StackedExperts(stack.path, child, leaves, stack.experts, axis, program)
    else:
        members = [module.get_submodule(path) for path in stack.members]
        listed = ListedExperts(stack.path, members, stack.keys, axis, draws=stack.draws)

    def forward(*args: Any, **kwargs: Any) -> Any:
        trail.mark(f"the experts '{stack.path}'")
        return listed.run(child, own, args, kwargs)

    return forward if stack.call is None else _of_own_rows(child, stack, forward)


def _dispatched(module: nn.Module, child: nn.Module, stack: Stack, axis: Axis, trail: Trail) -> Any:
    """Returns a forward that sends every row to the rank that holds its expert, and brings results back."""
    assert stack.call is not None, "stacked experts are called by rows, experts and weights"
    own, call = child.forward, stack.call
    per_rank = stack.experts // axis.size

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        def compute(*values: torch.Tensor) -> Any:
            new_args, new_kwargs = call.made(args, kwargs, *values)
            with counting(child, stack.counters, per_rank):  # its code loops over as many experts as lie here
                return own(*new_args, **new_kwargs)

        def exchanged(rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return through_owners(rows, index, weight, stack.experts, axis, compute)

        trail.mark(f"the experts '{stack.path}'")
        return of_own_rows(exchanged, *call.read(args, kwargs))

    return forward


@contextmanager
def other_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Context: modules run these forwards in the place of their own."""
    before = {child: vars(child).get("forward") for child in forwards}
    for child, forward in forwards.items():
        vars(child)["forward"] = forward
    try:
        yield
    finally:
        for child, own in before.items():
            del vars(child)["forward"]  # then it has its class's
            if own is not None:
                vars(child)["forward"] = own


def on_own_rows(module: nn.Module, stacks: Sequence[Stack]) -> AbstractContextManager[None]:
    """Context, for tensors without values: each module of experts has its own rows, and one that chooses hands its on.

    Which experts it would come to hangs on values.
    """
    choosing = {module.get_submodule(stack.path): stack.call for stack in stacks if stack.chooses}
    handing = {
        child: lambda *args, call=call, **kwargs: call.read(args, kwargs)[0] * 1 for child, call in choosing.items()
    }
    return other_forwards({**_on_own_rows(module, stacks), **handing})


def compute_own_rows(module: nn.Module, stacks: Sequence[Stack]) -> None:
    """Let each module of experts compute the rows of this rank alone, where positions are cut over ranks."""
    for child, forward in _on_own_rows(module, stacks).items():
        vars(child)["forward"] = forward


def _on_own_rows(module: nn.Module, stacks: Sequence[Stack]) -> dict[nn.Module, Callable[..., Any]]:
    children = {module.get_submodule(stack.path): stack for stack in stacks}
    return {child: _of_own_rows(child, stack, child.forward) for child, stack in children.items()}


def _of_own_rows(child: nn.Module, stack: Stack, own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that runs `own` on this rank's rows of a call of the module (`exchange.of_own_rows`)."""
    assert stack.call is not None, "only modules that treat rows apart are given a rank's own"
    call = stack.call

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        def compute(*values: torch.Tensor) -> Any:
            new_args, new_kwargs = call.made(args, kwargs, *values)
            return own(*new_args, **new_kwargs)

        before = [(name, way, child.get_buffer(name).clone()) for name, way in stack.sums]
        made = of_own_rows(compute, *call.read(args, kwargs))
        with torch.no_grad():
            for name, way, buffer in before:
                _add_up(child.get_buffer(name), way, buffer, axes_of(made))
        return made

    return forward


def _add_up(buffer: torch.Tensor, way: str, before: torch.Tensor, axes: Sequence[Axis]) -> None:
    """Add what other ranks' rows have left in their buffers. `before`: this one, before the forward."""
    begun = before if way == "added" else torch.zeros_like(before)
    moved = buffer - begun
    for axis in axes:
        moved = sum_over(moved, axis, "buffers")
    buffer.copy_(begun + moved)


@contextmanager
def counting(child: nn.Module, counters: tuple[str, ...], experts: int) -> Iterator[None]:
    """Context: the module's integer attributes `counters` hold `experts`, the number on this rank."""
    before = {name: vars(child)[name] for name in counters}
    vars(child).update(dict.fromkeys(counters, experts))
    try:
        yield
    finally:
        vars(child).update(before)
