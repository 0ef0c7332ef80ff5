"""Run modules of experts over the ranks of `ep`, each with a block of them (see exchange, find, checkpoint/holdings).

    rank 0   tokens 0..3 -> router -> pairs ==all-to-all==> experts 0, 1 of all tokens ==all-to-all==> sums for 0..3
    rank 1   tokens 4..6 -> router -> pairs ==all-to-all==> experts 2, 3 of all tokens ==all-to-all==> sums for 4..6

Equation: y_t = sum over the k experts e chosen for t of f_e(x_t, w_te); expert e lies on rank e // (E / ep).
Bytes on the wire, for a layer of T tokens on this rank and evenly used experts: 2 T k (ep-1)/ep rows of H in forward
(there and back), as many in backward, and one weight beside each row.
Bytes at rest: 1/ep of the experts, of their gradients and of their optimizer state.
Source: Lepikhin et al., "GShard" (2020), section 3.2; Rajbhandari et al., "DeepSpeed-MoE" (2022), section 5.

The axis folds onto dp_shard and the axes that cut positions. Ranks of `ep` have different tokens, so the gradients of
an expert, computed on the rank that holds it, are sums over all of `ep` already. Only ranks that hold the same experts
reduce them (`reduce`).

The module's own forward computes the experts. It is called with the rows that arrived and experts counted from this
rank's first, while its stacked parameters are this rank's share. Trials show which modules allow that (`find`).

If the plan cuts positions too, a rank sends the rows of its share.
Without `ep`, a module that treats rows independently is called with a rank's own rows (`compute_own_rows`).

What this does not do: overlap the exchange with computation, or send a token once if two of its experts share a rank.
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
    """Which arguments of a module's call are its rows, experts and weights, each as a position or a keyword.

    rows    tokens (T, H), or (..., H) for a module that chooses experts itself
    index   each token's experts (T, k), integers;  weight  their weights (T, k); both None if the module chooses itself
    """

    rows: int | str
    index: int | str | None = None
    weight: int | str | None = None

    @property
    def _keys(self) -> list[int | str]:
        return [key for key in (self.rows, self.index, self.weight) if key is not None]

    def read(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """Returns [rows (T, H), experts (T, k), weights (T, k)] of a call; [rows (..., H)] if the module chooses."""
        return [args[key] if isinstance(key, int) else kwargs[key] for key in self._keys]

    def made(self, args: tuple, kwargs: dict, *values: torch.Tensor) -> tuple[list, dict]:
        """Returns (args, kwargs) of the call, with `values` (rows, experts, weights) in place of its own."""
        new_args, new_kwargs = list(args), dict(kwargs)
        for key, value in zip(self._keys, values, strict=True):
            if isinstance(key, int):
                new_args[key] = value
            else:
                new_kwargs[key] = value
        return new_args, new_kwargs


@dataclass(frozen=True)
class Stack:
    """A module of experts that was found, of one of four kinds.

    called with (rows, experts, weights) (`find`)   has `names` and `counters`
    calls modules in a list (`listed`)              has `members`, `keys` and `draws`
    routes rows to stacked weights (`stacked`)      has `program`
    routes and is not dealt (`choosing`)            has experts=0 and no names; it is called with a rank's own rows

    path      of the module;  experts  their number E
    names     parameters that are dealt: stacked ones (E, ...), or all of the members'
    call      which arguments are rows; None if the module may not be called with a rank's own rows alone
    counters  integer attributes that must be set to the number of experts that this rank holds
    sums      (buffer, way) of the buffers that add up over rows; a way is a key of `part.buffer_ways.WAYS`
    members   paths of the experts;  keys  the arguments in which each gets its rows
    draws     whether members use random numbers (dropout)
    program   an expert's operations, as `ExpertProgram.encoded` gives them
    """

    path: str
    experts: int
    names: tuple[str, ...]
    call: ExpertCall | None
    counters: tuple[str, ...] = ()
    sums: tuple[tuple[str, str], ...] = ()
    members: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    draws: bool = False
    program: str = ""

    @property
    def chooses(self) -> bool:
        """Whether the module's own forward chooses which expert gets which row."""
        return bool(self.members or self.program) or not self.experts


@dataclass(frozen=True)
class ExpertParallel:
    """The experts of a module, dealt over the axis `ep`, of which each rank holds a block of each stack's experts.

    stacks  the modules of experts;  axis  `ep`
    rows    name -> size of dim 0, on this rank after tp's cuts, of each dealt parameter. An expert that is a module of
            its own is whole on the rank that holds it, and its parameters have size 0 in dim 0 on other ranks.
    """

    stacks: list[Stack]
    axis: Axis
    rows: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def dealt(self) -> dict[str, tuple[Stack, int]]:
        """Returns name of each dealt parameter -> (its stack, index of the member that it belongs to, 0 if stacked)."""
        return {
            name: (stack, next((n for n, path in enumerate(stack.members) if name.startswith(f"{path}.")), 0))
            for stack in self.stacks for name in stack.names
        }  # fmt: skip

    def owner(self, name: str) -> int | None:
        """Returns the rank of the axis that holds a member's parameter whole; None for a stacked parameter."""
        stack, number = self.dealt[name]
        return number // (stack.experts // self.axis.size) if stack.members else None

    def span(self, name: str, size: int) -> tuple[int, int]:
        """Returns (start, stop), the indices of a dealt parameter's dim 0, of `size`, that this rank holds."""
        owner, place = self.owner(name), self.axis.index
        if owner is not None:
            return (0, size) if owner == place else (0, 0)
        here = size // self.axis.size
        return place * here, (place + 1) * here

    def here(self, absent: Collection[str]) -> ExpertParallel:
        """Returns the experts of this rank's pipeline stages alone. `absent`: parameters that other stages hold."""
        stacks = [stack for stack in self.stacks if not absent or set(stack.names) - set(absent)]
        return replace(self, stacks=stacks)

    def notices(self) -> list[str]:
        """Returns [a line for the user on how many experts of how many modules are spread]."""
        counts, first = sorted({stack.experts for stack in self.stacks}), self.stacks[0]
        # a trial decided which weights are experts', so they are listed for the author to check
        leaves = ", ".join(name.removeprefix(f"{first.path}.") for name in first.names) if first.program else ""
        return [
            f"ep={self.axis.size} spreads the experts of {len(self.stacks)} modules, "
            f"{' or '.join(map(str, counts))} in each ('{first.path}'{f': {leaves};' if leaves else ','} ...)"
        ]

    def local_values(self, value_of: ValueOf) -> ValueOf:
        """Returns a function from name to initial value, which for a dealt parameter is this rank's experts' alone."""

        def value(name: str) -> torch.Tensor:
            """Returns the parameter's initial value on this rank."""
            full = value_of(name)
            if name not in self.dealt:
                return full
            start, stop = self.span(name, full.shape[0])
            return full[start:stop]

        return value

    def whole(self, name: str, share: torch.Tensor | None) -> Gathering:
        """Returns the gathering of a parameter or gradient of all experts from each rank's `share`.

        Its result is `share` itself if that is None or the parameter is not dealt.
        """
        if share is None or name not in self.dealt:
            return share
        owner = self.owner(name)
        # a member's parameter is whole on one rank; all-gathers need equal sizes, so the others send zeros
        if owner is not None:
            shape = (self.rows[name], *share.shape[1:])
            sent = share.detach() if owner == self.axis.index else share.detach().new_zeros(shape)
            table = yield sent.reshape(-1), self.axis
            return table.view(self.axis.size, *shape)[owner]
        table = yield share.detach().reshape(-1), self.axis
        return table.view(share.shape[0] * self.axis.size, *share.shape[1:])

    def full_shape(self, name: str, share: torch.Size) -> torch.Size:
        """Returns the shape that a parameter has with all experts, from the shape of this rank's share."""
        if name not in self.dealt:
            return share
        stack = self.dealt[name][0]
        return torch.Size([self.rows[name] if stack.members else stack.experts, *share[1:]])


def install(module: nn.Module, experts: ExpertParallel, device: torch.device, *, traced: bool = False) -> None:
    """Replaces the forward of each module of experts, so that it sends rows to the ranks that hold its experts.

    traced  whether a compiler traces the blocks around; experts and exchanges are then excluded, since the number of
            rows differs in each step
    Collective.
    """
    # names ranks that run different experts, or none, before they would wait for each other in an exchange
    events = [f"the experts '{stack.path}'" for stack in experts.stacks]
    trail = Trail(experts.axis, [*events, _END], device, why=_WHY)
    module.register_forward_hook(lambda m, a, o: trail.mark(_END))
    for stack in experts.stacks:
        child = module.get_submodule(stack.path)
        dispatch = _dispatched_in_turns if stack.members or stack.program else _dispatched
        dispatched = dispatch(module, child, stack, experts.axis, trail)
        child.forward = _uncompiled(dispatched) if traced else dispatched


def _uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that no compiler traces, even if `torch.compile` is called on this forward itself."""
    disabled = torch.compiler.disable(forward)

    # `torch.compile` of a disabled function would compile the function inside; at this call it breaks the graph
    def run(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs)

    return run


def _dispatched_in_turns(module: nn.Module, child: nn.Module, stack: Stack, axis: Axis, trail: Trail) -> Any:
    """Returns a forward that runs the module's own twice, with an exchange of its experts' rows in between.

    module  the root, for paths;  child  the module of experts, described by `stack`;  trail  compares ranks' branches
    """
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
    """Returns a forward that sends every pair to the rank that holds its expert, and brings results back.

    Arguments as of `_dispatched_in_turns`; `module` is not used.
    """
    assert stack.call is not None, "stacked experts are called by rows, experts and weights"
    own, call = child.forward, stack.call
    per_rank = stack.experts // axis.size

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        def compute(*values: torch.Tensor) -> Any:
            """Returns the module's own results for (rows, local experts, weights) that arrived."""
            new_args, new_kwargs = call.made(args, kwargs, *values)
            with counting(child, stack.counters, per_rank):  # its code may loop over the number of experts
                return own(*new_args, **new_kwargs)

        def exchanged(rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return through_owners(rows, index, weight, stack.experts, axis, compute)

        trail.mark(f"the experts '{stack.path}'")
        return of_own_rows(exchanged, *call.read(args, kwargs))

    return forward


@contextmanager
def other_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Context in which each module runs the given forward in place of its own."""
    before = {child: vars(child).get("forward") for child in forwards}
    for child, forward in forwards.items():
        vars(child)["forward"] = forward
    try:
        yield
    finally:
        for child, own in before.items():
            del vars(child)["forward"]  # the class's forward shows again
            if own is not None:
                vars(child)["forward"] = own


def on_own_rows(module: nn.Module, stacks: Sequence[Stack]) -> AbstractContextManager[None]:
    """Context, for tensors without values, in which modules of experts compute this rank's own rows.

    A module that chooses experts returns its rows unchanged, since its choices depend on values.
    """
    choosing = {module.get_submodule(stack.path): stack.call for stack in stacks if stack.chooses}
    handing = {
        child: lambda *args, call=call, **kwargs: call.read(args, kwargs)[0] * 1 for child, call in choosing.items()
    }
    return other_forwards({**_on_own_rows(module, stacks), **handing})


def compute_own_rows(module: nn.Module, stacks: Sequence[Stack]) -> None:
    """Replaces the forward of each module of experts by one that computes this rank's rows, if positions are cut."""
    for child, forward in _on_own_rows(module, stacks).items():
        vars(child)["forward"] = forward


def _on_own_rows(module: nn.Module, stacks: Sequence[Stack]) -> dict[nn.Module, Callable[..., Any]]:
    """Returns module of experts -> its forward on this rank's rows."""
    children = {module.get_submodule(stack.path): stack for stack in stacks}
    return {child: _of_own_rows(child, stack, child.forward) for child, stack in children.items()}


def _of_own_rows(child: nn.Module, stack: Stack, own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that runs `own` on this rank's rows of a call (`exchange.of_own_rows`).

    Buffers in `stack.sums` are then added up over the ranks that have other rows.
    """
    assert stack.call is not None, "only modules that treat rows apart are given a rank's own"
    call = stack.call

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        def compute(*values: torch.Tensor) -> Any:
            """Returns the result of `own` for this rank's (rows, experts, weights)."""
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
    """Sets a buffer to its value after the rows of all ranks of `axes`, from its value after this rank's. Collective.

    way     "added" to its old value, or "fresh", set anew;  before  its value before the forward
    """
    begun = before if way == "added" else torch.zeros_like(before)
    moved = buffer - begun
    for axis in axes:
        moved = sum_over(moved, axis, "buffers")
    buffer.copy_(begun + moved)


@contextmanager
def counting(child: nn.Module, counters: tuple[str, ...], experts: int) -> Iterator[None]:
    """Context in which the module's attributes `counters` are `experts`, the number of experts on this rank."""
    before = {name: vars(child)[name] for name in counters}
    vars(child).update(dict.fromkeys(counters, experts))
    try:
        yield
    finally:
        vars(child).update(before)
