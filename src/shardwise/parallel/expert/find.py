"""Find modules whose experts can lie on different ranks, first by how they are called, then by a trial.

A candidate holds parameters that share a first dim E, and is called with one float tensor (T, H), one integer tensor
(T, k) and one float tensor (T, k). With random parameters it must then show

    f(x, e, w) = sum over j of f(x, e_j, w_j)           each pair of token and expert adds its own term
    the same for any order of tokens and any selection of them
    f on a slice of E, with experts counted from the slice's first, = f on all of E

Expert parallelism relies on nothing else. Names of classes and parameters are not used.

The random experts overlap in memory, so the trial of a large stack needs the memory of one expert.

The same forward also shows experts that are modules in a list (`listed`) or weights of a routing module (`stacked`).
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
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # times the largest absolute value
_TOKENS = 5  # in a trial


def find_experts(
    built: Built, batch: Any, run: Callable[[nn.Module, Any], Any], ranks: int, dtype_of: DtypeOf
) -> list[Stack]:
    """Returns the modules whose experts can be spread over `ranks` ranks, found by one forward and a trial of each.

    batch     a few samples on the CPU
    run       (module, batch) -> anything, runs one forward as the engine does
    dtype_of  from a parameter or buffer to its dtype in that forward
    Raises `RefusedPlan` with the reason if there are none, or if a module is called as experts are but fails the trial.
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
        if not stack.members:  # members' parameters have been checked by `dealt_lists`
            # with a `program`, `StackedReads` has checked that no other module reads the weights
            _refuse_shared(module, stack, set() if stack.program else touched, ranks)
    return stacks


def find_row_wise(built: Built, batch: Any, run: Callable[[nn.Module, Any], Any], dtype_of: DtypeOf) -> list[Stack]:
    """Returns the modules of experts that can be called with a rank's own rows; arguments as of `find_experts`."""
    stacks = []
    choices = Choices(built.module)
    with choices.watching():
        seen_by_path = _look(built, batch, run, dtype_of).calls
    for path, seen in seen_by_path.items():
        try:
            stacks.append(_tried(built, path, seen, 1))
        except RefusedPlan:  # then it runs on cut tensors, operation by operation, as any other module does
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
    """Whether any module is called as experts are, without a trial; arguments as of `find_experts`."""
    look = _look(built, batch, run, dtype_of)
    return bool(look.calls or look.listed.calls() or any(look.listed.mixtures()))


def _refuse_shared(module: nn.Module, stack: Stack, touched: set[str], ranks: int) -> None:
    """Raises `RefusedPlan` if experts' parameters are used outside of their module's forward.

    touched   names of parameters that operations read outside of candidates
    """
    inside = set(module.get_submodule(stack.path).modules())
    named = dict(module.named_parameters(remove_duplicate=False))
    mine = {name: named[name] for name in stack.names}
    for child in set(module.modules()) - inside:  # another module holds it too, and may use it in other forwards
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
    """A call of a candidate.

    call          which arguments are rows, experts and weights
    width         features H of a row;  k  experts of each token
    args, kwargs  the call's arguments, with None in place of tensors
    """

    call: ExpertCall
    width: int
    k: int
    args: tuple
    kwargs: dict


class _Touched(TorchDispatchMode):
    """Mode that records in `seen` the names of parameters that operations read. `names`: id of a parameter -> name."""

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
    """What one forward has shown.

    calls    path of each candidate -> its call
    touched  names of parameters that operations read outside of candidates
    listed   the record of lists of modules, and of stacked weights, that are used as experts are
    """

    calls: dict[str, CandidateCall]
    touched: set[str]
    listed: StackedReads


def _look(built: Built, batch: Any, run: Callable, dtype_of: DtypeOf) -> _Look:
    """Returns what one forward shows, on fake tensors if it can run on these (`known_values` follows the routing)."""
    with as_real():
        try:
            return _forward(built, batch, run, dtype_of, Fake())
        except Exception:  # a forward may do anything that fake tensors do not support, so real ones decide
            return _forward(built, batch, run, dtype_of, None)


def _forward(built: Built, batch: Any, run: Callable, dtype_of: DtypeOf, fake: FakeTensorMode | None) -> _Look:
    """Returns the `_Look` of one forward, on tensors of the mode `fake`; on real ones if that is None."""
    module = built.module
    state = ModuleState(module)
    calls: dict[str, CandidateCall] = {}

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what stands in for a parameter or buffer in the forward."""
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
    """Context in which candidates record their calls in `calls`, and return empty tensors instead of computing."""
    return other_forwards(
        {
            child: _recorder(child, path, calls)
            for path, child in module.named_modules()
            if path and not isinstance(child, nn.ModuleList | nn.ModuleDict) and _first_dims(child)
        }
    )


def _first_dims(child: nn.Module) -> list[int]:
    """Returns the sizes of dim 0 of a module's parameters of two or more dims, the size with most elements first.

    Sizes of 1 and parameters of alike modules in a list (`alike_lists`) are left out.
    """
    elements: dict[int, int] = {}
    listed = {id(param) for alike in alike_lists(child) for member in alike for param in member.parameters()}
    for param in child.parameters():
        if param.dim() >= 2 and param.shape[0] >= 2 and id(param) not in listed:
            elements[param.shape[0]] = elements.get(param.shape[0], 0) + param.numel()
    return sorted(elements, key=lambda size: -elements[size])


def _recorder(child: nn.Module, path: str, calls: dict[str, CandidateCall]) -> Callable:
    """Returns a forward that records calls of experts in `calls[path]` and returns uninitialised rows for them.

    Other calls run the module's own forward. The forward raises `RefusedPlan` if calls differ in their arguments.
    """
    own = child.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Records the call, or runs the module."""
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
    """Returns which arguments are rows (T, H), experts (T, k) and weights (T, k); None if the tensors are not these.

    If H equals k, rows and weights cannot be told apart, so the result is None too.
    """
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(key, value) for key, value in places if isinstance(value, torch.Tensor)]
    if len(tensors) != 3 or any(value.dim() != 2 for _, value in tensors):
        return None
    whole = [(key, value) for key, value in tensors if value.dtype in (torch.int64, torch.int32)]
    floats = [(key, value) for key, value in tensors if value.is_floating_point()]
    if len(whole) != 1 or len(floats) != 2:
        return None
    (index, experts), wanted = whole[0], whole[0][1].shape
    weights = [key for key, value in floats if value.shape == wanted]
    rows = [key for key, value in floats if value.shape != wanted and value.shape[0] == experts.shape[0]]
    return ExpertCall(rows[0], index, weights[0]) if len(weights) == len(rows) == 1 else None


# --- the trial ---


def _tried(built: Built, path: str, seen: CandidateCall, ranks: int) -> Stack:
    """Returns the stack of a candidate that passes the trial; raises `RefusedPlan` with the reason if it does not.

    seen   its call;  ranks  size of ep
    """
    child = built.module.get_submodule(path)
    sizes = _first_dims(child)
    reasons = []
    for experts in sizes:  # parameters may differ in dim 0, and any of these sizes may be the number of experts
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
    # as with peft's `target_parameters`: what trains is not stacked by expert, which the message then says
    if trained and even and not any(stacked for _, stacked in trained):
        more = f" and {len(trained) - 1} more" if trained[1:] else ""
        reasons[0] += f" ('{trained[0][0]}'{more}, which train, are of all experts together)"
        remedy += ", or adapt layers beside the experts"
    raise RefusedPlan(f"ep={ranks}: '{path}' is called as experts are, but {reasons[0]}: {remedy}")


class _Failed(Exception):
    """Raised if a trial fails; its text is the reason, for a refusal."""


def _trial(built: Built, seen: CandidateCall, stack: Stack, ranks: int) -> Stack:
    """Returns the stack with `counters` as a trial found them; raises `_Failed` if it does not behave as experts do."""
    try:
        return _trial_in(torch.float64, built, seen, stack, ranks)
    except (RuntimeError, NotImplementedError, TypeError) as error:  # some kernels have no float64
        try:
            return _trial_in(torch.float32, built, seen, stack, ranks)
        except (RuntimeError, NotImplementedError, TypeError):
            raise _Failed(f"it fails on tokens and experts drawn at random ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's text, or its class's name if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _trial_in(dtype: torch.dtype, built: Built, seen: CandidateCall, stack: Stack, ranks: int) -> Stack:
    """Returns the stack with its counters, from a trial on random weights of this dtype; raises `_Failed`."""
    child = built.module.get_submodule(stack.path)
    state = ModuleState(child)
    generator = torch.Generator().manual_seed(0)
    leaves = {name.removeprefix(f"{stack.path}.") for name in stack.names}
    made: dict[str, torch.Tensor] = {}

    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what stands in for a parameter or buffer in the trial."""
        # a forward may rely on values of buffers (tables, counters), but not of weights
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
    """The trial of a module whose parameters are random.

    seen     its call;  experts  the number E that is tried
    stacked  names in the module of the parameters (E, ...)
    """

    def __init__(self, child: nn.Module, seen: CandidateCall, experts: int, stacked: set[str], dtype: torch.dtype,
                 generator: torch.Generator):  # fmt: skip
        self.child, self.seen, self.experts, self.stacked, self.dtype = child, seen, experts, stacked, dtype
        self.generator = generator
        self.rows = torch.randn(_TOKENS, seen.width, generator=generator).to(dtype)

    def _call(self, rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the module's result (T, H) for rows (T, H), index (T, k), weight (T, k); else raises `_Failed`."""
        args, kwargs = self.seen.call.made(
            self.seen.args, self.seen.kwargs, rows.clone(), index.clone(), weight.clone()
        )
        out = self.child(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or out.shape != rows.shape:
            raise _Failed("it does not return one tensor of the shape of its tokens")
        return out

    def _same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two results agree up to rounding and are finite."""
        return bool(((a - b).abs().max() <= _TOLERANCE[self.dtype] * b.abs().max()) & b.isfinite().all())

    def _draw(self, low: int, high: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns random (experts (T, k), weights (T, k)); a token's experts are distinct and in [low, high)."""
        drawn = [low + torch.randperm(high - low, generator=self.generator)[:k] for _ in range(_TOKENS)]
        weight = 0.1 + torch.rand(_TOKENS, k, generator=self.generator)
        return torch.stack(drawn), weight.to(self.dtype)

    def pairs_add_up(self) -> None:
        """Raises `_Failed` unless one call equals the sum of calls for one choice each, on two parts of the tokens."""
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
        """Returns the names of integer attributes that must be set to a rank's number of experts.

        With these, each rank's slice of the parameters gives what all of them give; raises `_Failed` if none do.
        """
        named = [name for name, value in vars(self.child).items() if type(value) is int and value == self.experts]
        # not simply all: an attribute may equal the number of experts without counting them (a width)
        choices = [(), tuple(named), *((name,) for name in named)]
        choices += [pair for pair in itertools.combinations(named, 2) if len(named) > 2]
        owners = sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1} - {ranks})
        for counters in dict.fromkeys(choices):
            if all(self._slice_agrees(owner, ranks, counters) for owner in owners):
                return counters
        raise _Failed(
            f"on a slice of its {self.experts} stacked parameters, experts counted from the slice's first, it does not "
            "give what it gives on all of them"
        )

    def _slice_agrees(self, owner: int, ranks: int, counters: tuple[str, ...]) -> bool:
        """Whether rank `owner`'s slice of the experts gives what all of them give, with these counters set."""
        size = self.experts // ranks
        local = torch.cat([torch.randperm(size, generator=self.generator) for _ in range(-(-_TOKENS // size))])
        local, weight = local[:_TOKENS, None], self._draw(0, self.experts, 1)[1]
        whole = self._call(self.rows, local + owner * size, weight)
        named = {id(param): name for name, param in self.child.named_parameters()}

        def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
            """Returns the owner's slice of a stacked parameter; any other tensor unchanged."""
            return tensor.narrow(0, owner * size, size) if named.get(id(tensor)) in self.stacked else tensor

        with standing_in(self.child, cut), counting(self.child, counters, size):
            try:
                part = self._call(self.rows, local, weight)
            except (RuntimeError, IndexError, ValueError):  # sizes do not match with these counters
                return False
        return self._same(part, whole)
