"""Find which modules hold experts that can lie on different ranks: by how they are called, then by a trial.

A candidate holds parameters that share a first dim E, and is called with one float tensor (T, H), one integer tensor
(T, k) and one float tensor (T, k). On random values in its parameters' place it must then show

    f(x, e, w) = sum over j of f(x, e_j, w_j)           a pair of token and expert adds its own term
    the same for any order of tokens and any selection of them
    f on a slice of E, experts counted from the slice's first, = f on all of E

which together is all that sending pairs to the holders of their experts relies on. Names mean nothing.

The random parameters overlap in memory, so that the trial of a large stack needs the memory of one expert.

Experts that are modules of their own, in a list, are met in the same forward (`listed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.errors import RefusedPlan
from shardwise.parallel.expert.choosing import Choices, sums_of_rows
from shardwise.parallel.expert.expert_forward import ExpertCall, Stack, counting, other_forwards
from shardwise.parallel.expert.find_stacked import StackedReads, dealt_stacked
from shardwise.parallel.expert.listed import alike_lists, dealt_lists
from shardwise.parallel.expert.trial_weights import random_weight, random_weights
from shardwise.trace.deferred import Built
from shardwise.trace.fake import Fake
from shardwise.trace.known_values import as_real, given_to, known_values_read, values
from shardwise.trace.leaves import tensors_in
from shardwise.trace.module_state import ModuleState
from shardwise.trace.stand_in import standing_in

DtypeOf = Callable[[torch.Tensor], torch.dtype]
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest value
_TOKENS = 5


def find_experts(
    built: Built, batch: Any, run: Callable[[nn.Module, Any], Any], ranks: int, dtype_of: DtypeOf
) -> list[Stack]:
    """Returns the modules whose experts can be spread over `ranks`, from one forward and a trial of each.

    batch  a few samples on the CPU
    run    (module, batch) -> anything: one forward as the engine runs it, on tensors of `dtype_of` each
    Raises `RefusedPlan` with the reason where there is none, or one that is experts by its call and fails the trial.
    """
    calls, touched, listed = _look(built, batch, run, dtype_of)
    module = built.module
    stacks = [_tried(built, path, seen, ranks) for path, seen in calls.items()]
    of_lists, reasons = dealt_lists(built, listed, ranks)
    stacks += of_lists
    of_stacked, more = dealt_stacked(built, listed, stacks, ranks)
    stacks, reasons = [*stacks, *of_stacked], [*more, *reasons]
    if not stacks and reasons:
        raise RefusedPlan(f"ep={ranks}: {reasons[0]}: tp and zero=3 take it as it is; use those, or ep=1")
    if not stacks:
        raise RefusedPlan(
            f"ep={ranks}: no experts were found: modules in a list, each given rows that were chosen and that do not "
            "hang on what another gave; a module that chooses rows (topk, argmax, a mask) for stacked parameters "
            "(E, ...) of three dims or more, not of two that a view parts; or one that holds such and is called with "
            "tokens (T, H), experts (T, k) as integers and weights (T, k) (docs/techniques/expert.md); tp and zero=3 "
            "take the module as it is"
        )
    for stack in stacks:
        if not stack.members:  # those have been asked (`_dealt_lists`)
            # of a mixture that deals its rows itself, reads elsewhere have been looked for (`StackedReads`)
            _refuse_shared(module, stack, set() if stack.program else touched, ranks)
    return stacks


def find_row_wise(built: Built, batch: Any, run: Callable[[nn.Module, Any], Any], dtype_of: DtypeOf) -> list[Stack]:
    """Returns the modules of experts that treat each row by itself; arguments as of `find_experts`."""
    stacks = []
    choices = Choices(built.module)
    with choices.watching():
        seen_by_path = _look(built, batch, run, dtype_of).calls
    for path, seen in seen_by_path.items():
        try:
            stacks.append(_tried(built, path, seen, 1))
        except RefusedPlan:  # its operations are met one by one, as those of any other module
            continue
    tried = {stack.path for stack in stacks}
    for path, chosen in choices.calls.items():
        child = built.module.get_submodule(path)
        sums = None if not path or path in tried else sums_of_rows(child, chosen, random_weights(built, path))
        if sums is not None:
            stacks.append(Stack(path, 0, (), chosen.call, sums=tuple(sums.items())))
    return stacks


def holds_experts(
    built: Built, batch: Any, run: Callable[[nn.Module, Any], Any], dtype_of: DtypeOf
) -> bool:  # fmt: skip
    """Returns whether any module is called as experts are; see `find_experts`."""
    look = _look(built, batch, run, dtype_of)
    return bool(look.calls or look.listed.calls() or any(look.listed.mixtures()))


def _refuse_shared(module: nn.Module, stack: Stack, touched: set[str], ranks: int) -> None:
    """Raises `RefusedPlan` for experts that are used outside of their module's forward; `touched`: names used there."""
    inside = set(module.get_submodule(stack.path).modules())
    named = dict(module.named_parameters(remove_duplicate=False))
    mine = {name: named[name] for name in stack.names}
    for child in set(module.modules()) - inside:  # held by another module too, which may use them in other forwards
        own = {id(param) for param in child._parameters.values() if param is not None}
        touched = touched | {name for name, param in mine.items() if id(param) in own}
    used = sorted(touched & set(stack.names))
    if used:
        raise RefusedPlan(
            f"ep={ranks}: '{used[0]}' is used outside the forward of '{stack.path}', where a rank has only its own "
            "experts: use it inside, or use ep=1"
        )


# --- the look at one forward ---


@dataclass(frozen=True)
class CandidateCall:
    """A candidate's call: rows of `width`, `k` experts each, and the arguments beside the tensors."""

    call: ExpertCall
    width: int
    k: int
    args: tuple
    kwargs: dict


class _Touched(TorchDispatchMode):
    """Mode that notes in `seen` the names of parameters that operations read."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names = names
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tensors_in((args, kwargs or {})):
            if id(leaf) in self.names:
                self.seen.add(self.names[id(leaf)])
        return func(*args, **(kwargs or {}))


class _Look(NamedTuple):
    """What one forward shows.

    calls      of candidates, by path
    touched    names of parameters that are used outside of candidates
    listed     which lists of modules are called as experts are
    """

    calls: dict[str, CandidateCall]
    touched: set[str]
    listed: StackedReads


def _look(built: Built, batch: Any, run: Callable, dtype_of: DtypeOf) -> _Look:
    """Returns what one forward shows, on tensors without values if it can run on these (routing: `known_values`)."""
    with as_real():
        try:
            return _forward(built, batch, run, dtype_of, Fake())
        except Exception:  # whatever a forward does that tensors without values cannot: real ones decide
            return _forward(built, batch, run, dtype_of, None)


def _forward(built: Built, batch: Any, run: Callable, dtype_of: DtypeOf, fake: FakeTensorMode | None) -> _Look:
    """Returns what `_look` does, from one forward on tensors of the mode `fake`, or, if None, on real ones."""
    module = built.module
    state = ModuleState(module)
    calls: dict[str, CandidateCall] = {}

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if fake is None:
            return built.value(name).to(dtype_of(tensor), copy=True)
        with fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype_of(tensor), device="cpu")

    batch = batch if fake is None else given_to(fake, batch)
    try:
        with standing_in(module, make) as named, _watched(module, calls), torch.random.fork_rng(devices=[]):
            touched, listed = _Touched({id(param): name for name, param in named.items()}), StackedReads(module, named)
            known = nullcontext() if fake is None else values(fake, draws=True)
            with torch.enable_grad(), known, known_values_read(), touched, listed.watching():
                run(module, batch)
    finally:
        state.restore()
    return _Look(calls, touched.seen, listed)


def _watched(module: nn.Module, calls: dict[str, CandidateCall]) -> AbstractContextManager[None]:
    """Context: candidates note their calls, and return tensors of the right shape instead of computing."""
    return other_forwards(
        {
            child: _recorder(child, path, calls)
            for path, child in module.named_modules()
            if path and not isinstance(child, nn.ModuleList | nn.ModuleDict) and _first_dims(child)
        }
    )


def _first_dims(child: nn.Module) -> list[int]:
    """Returns the sizes of its parameters' first dims, the parameter with most elements first; not those of lists."""
    elements: dict[int, int] = {}
    listed = {id(param) for alike in alike_lists(child) for member in alike for param in member.parameters()}
    for param in child.parameters():
        if param.dim() >= 2 and param.shape[0] >= 2 and id(param) not in listed:
            elements[param.shape[0]] = elements.get(param.shape[0], 0) + param.numel()
    return sorted(elements, key=lambda size: -elements[size])


def _recorder(child: nn.Module, path: str, calls: dict[str, CandidateCall]) -> Callable:
    """Returns a forward that notes the call in `calls` and returns empty rows, if it is a call of experts."""
    own = child.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = read_call(args, kwargs)
        if call is None:
            return own(*args, **kwargs)
        rows, index, *_ = call.read(args, kwargs)
        emptied = tree_map_only(torch.Tensor, lambda tensor: None, (args, kwargs))
        seen = CandidateCall(call, rows.shape[1], index.shape[1], *emptied)
        if calls.setdefault(path, seen).call != call:
            raise RefusedPlan(f"the experts '{path}' are called in two ways, with arguments in different places")
        return torch.empty_like(rows)

    return forward


def read_call(args: tuple, kwargs: dict) -> ExpertCall | None:
    """Returns where rows (T, H), experts (T, k) and weights (T, k) stand in a call; None if its tensors are others."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(key, value) for key, value in places if isinstance(value, torch.Tensor)]
    if len(tensors) != 3 or any(value.dim() != 2 for _, value in tensors):
        return None
    whole = [(key, value) for key, value in tensors if value.dtype in (torch.int64, torch.int32)]
    floats = [(key, value) for key, value in tensors if value.is_floating_point()]
    if len(whole) != 1 or len(floats) != 2:
        return None
    (index, experts), wanted = whole[0], whole[0][1].shape  # H == k: rows and weights look alike, and it is none
    weights = [key for key, value in floats if value.shape == wanted]
    rows = [key for key, value in floats if value.shape != wanted and value.shape[0] == experts.shape[0]]
    return ExpertCall(rows[0], index, weights[0]) if len(weights) == len(rows) == 1 else None


# --- the trial ---


def _tried(built: Built, path: str, seen: CandidateCall, ranks: int) -> Stack:
    """Returns the stack of a candidate. Raises `RefusedPlan` with what the trial showed."""
    child = built.module.get_submodule(path)
    sizes = _first_dims(child)
    reasons = []
    for experts in sizes:  # which of the first dims counts experts is not known: each is tried
        if experts % ranks:
            reasons.append(f"its {experts} experts cannot be dealt evenly over {ranks} ranks")
            continue
        names = tuple(f"{path}.{leaf}" for leaf, param in child.named_parameters() if param.shape[:1] == (experts,))
        try:
            return _trial(built, seen, Stack(path, experts, names, seen.call), ranks)
        except _Failed as failed:
            reasons.append(str(failed))
    trained = [
        (leaf, param.shape[:1] == (sizes[0],)) for leaf, param in child.named_parameters() if param.requires_grad
    ]
    even = sizes[0] % ranks == 0
    remedy = "use ep=1 (zero=3 over the same ranks shards what trains)" if even else "use another ep, or ep=1"
    if trained and even and not any(stacked for _, stacked in trained):  # as peft's target_parameters has it
        more = f" and {len(trained) - 1} more" if trained[1:] else ""
        reasons[0] += f" ('{trained[0][0]}'{more}, which train, are of all experts together)"
        remedy += ", or adapt layers beside the experts"
    raise RefusedPlan(f"ep={ranks}: '{path}' is called as experts are, but {reasons[0]}: {remedy}")


class _Failed(Exception):
    """The reason why a trial failed, for the refusal's text."""


def _trial(built: Built, seen: CandidateCall, stack: Stack, ranks: int) -> Stack:
    """Returns the stack with the `counters` that a trial found; `_Failed` where it does not behave as experts do."""
    try:
        return _trial_in(torch.float64, built, seen, stack, ranks)
    except (RuntimeError, NotImplementedError, TypeError) as error:  # kernels without float64
        try:
            return _trial_in(torch.float32, built, seen, stack, ranks)
        except (RuntimeError, NotImplementedError, TypeError):
            raise _Failed(f"it fails on tokens and experts drawn at random ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _trial_in(dtype: torch.dtype, built: Built, seen: CandidateCall, stack: Stack, ranks: int) -> Stack:
    """Returns the stack with its counters, by a trial on random weights of this dtype."""
    child = built.module.get_submodule(stack.path)
    state = ModuleState(child)
    generator = torch.Generator().manual_seed(0)
    leaves = {name.removeprefix(f"{stack.path}.") for name in stack.names}
    made: dict[str, torch.Tensor] = {}

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # buffers (tables, counters) have the values that the forward expects; of weights any will do
        if isinstance(tensor, nn.Parameter):
            made[name] = random_weight(tensor, dtype, generator, stacked=name in leaves)
            return made[name]
        value = built.value(f"{stack.path}.{name}")
        return value.to(dtype if value.is_floating_point() else None, copy=True)

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), standing_in(child, make):
            trial = _Trial(child, seen, stack.experts, leaves, dtype, generator)
            trial.pairs_add_up()
            return replace(stack, counters=trial.counters(ranks))
    finally:
        state.restore()


class _Trial:
    """A module of experts on random values in place of its parameters."""

    def __init__(self, child: nn.Module, seen: CandidateCall, experts: int, stacked: set[str], dtype: torch.dtype,
                 generator: torch.Generator):  # fmt: skip
        self.child, self.seen, self.experts, self.stacked, self.dtype = child, seen, experts, stacked, dtype
        self.generator = generator
        self.rows = torch.randn(_TOKENS, seen.width, generator=generator).to(dtype)

    def _call(self, rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the module's result (T, H) of rows, experts and weights (T, k); `_Failed` for another shape."""
        args, kwargs = self.seen.call.made(
            self.seen.args, self.seen.kwargs, rows.clone(), index.clone(), weight.clone()
        )
        out = self.child(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or out.shape != rows.shape:
            raise _Failed("it does not return one tensor of the shape of its tokens")
        return out

    def _same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs().max() <= _TOLERANCE[self.dtype] * b.abs().max()) & b.isfinite().all())

    def _draw(self, low: int, high: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (distinct experts in [low, high), weights) for each token, (T, k) both."""
        drawn = [low + torch.randperm(high - low, generator=self.generator)[:k] for _ in range(_TOKENS)]
        weight = 0.1 + torch.rand(_TOKENS, k, generator=self.generator)
        return torch.stack(drawn), weight.to(self.dtype)

    def pairs_add_up(self) -> None:
        """Compare one call with one for each choice of every token, tokens in another order and in two parts.

        Raises `_Failed` where they differ.
        """
        index, weight = self._draw(0, self.experts, min(self.seen.k, self.experts))
        together = self._call(self.rows, index, weight)
        order = torch.randperm(_TOKENS, generator=self.generator)
        apart = torch.zeros_like(together)
        for choice in range(index.shape[1]):
            for part in (order[:2], order[2:]):
                apart[part] += self._call(self.rows[part], index[part, choice, None], weight[part, choice, None])
        if not self._same(apart, together):
            raise _Failed(
                "its result for a token and an expert depends on the token's other experts, on other tokens, on their "
                "order, or on chance"
            )

    def counters(self, ranks: int) -> tuple[str, ...]:
        """Returns the integer attributes to set to a rank's number of experts so that its slice gives what all give."""
        named = [name for name, value in vars(self.child).items() if type(value) is int and value == self.experts]
        # none, all, one, two: an attribute may equal the number of experts without counting them (a width)
        choices = [(), tuple(named), *((name,) for name in named)]
        choices += [pair for pair in itertools.combinations(named, 2) if len(named) > 2]
        owners = sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1} - {ranks})
        for counters in dict.fromkeys(choices):  # the first that is right
            if all(self._slice_agrees(owner, ranks, counters) for owner in owners):
                return counters
        raise _Failed(
            f"on a slice of its {self.experts} stacked parameters, experts counted from the slice's first, it does not "
            "give what it gives on all of them"
        )

    def _slice_agrees(self, owner: int, ranks: int, counters: tuple[str, ...]) -> bool:
        """Returns whether rank `owner`'s slice of the experts gives what all of them give, with these counters set."""
        size = self.experts // ranks
        local = torch.cat([torch.randperm(size, generator=self.generator) for _ in range(-(-_TOKENS // size))])
        local, weight = local[:_TOKENS, None], self._draw(0, self.experts, 1)[1]
        whole = self._call(self.rows, local + owner * size, weight)
        named = {id(param): name for name, param in self.child.named_parameters()}

        def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(0, owner * size, size) if named.get(id(tensor)) in self.stacked else tensor

        with standing_in(self.child, cut), counting(self.child, counters, size):
            try:
                part = self._call(self.rows, local, weight)
            except (RuntimeError, IndexError, ValueError):  # sizes that do not meet: these are not the counters
                return False
        return self._same(part, whole)
