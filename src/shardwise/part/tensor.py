"""`Part`: a tensor of which this rank holds some indices of one dim.

Its shape is the whole tensor's; its storage holds this rank's share. An operation on parts is answered by a rule that
gives exactly what the whole tensors would: local where indices stay apart, with a collective where they meet. Since
autograd runs above the rules, backward is made of the same operations and needs no bookkeeping of its own:

    x (plain)  @ W' cut by columns      -> cut by columns              no communication
    y (cut)    @ W' cut by rows         -> plain                       all-reduce
    backward   dy (cut) @ W (cut)       -> dx plain                    all-reduce

A plain tensor is the same on all ranks of the axis. What has no rule raises `Uncut`, naming the operation, on all
ranks alike, since rules look at global metadata alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardwise.comm import Axis, all_gather, all_reduce, reduce_scatter
from shardwise.part.cuts import Owners, Uncut
from shardwise.part.leaves import replaced, tensors_in

Rule = Callable[[Any, tuple, dict], Any]
RULES: dict[str, Rule] = {}  # name of an ATen operation -> how it is done on parts
FUNCTIONS: dict[Callable, Callable] = {}  # functions above autograd whose backward would otherwise not see the part


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the function as the rule of these operations."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


class Part(torch.Tensor):
    """This rank's share of a tensor: `local` along `dim`, whose indices `owners` deals over `axis`.

    soft    gathering it is part of the plan (sequence parallelism), so an operation without a rule may
    origin  the weight whose cut it goes back to
    rows    (B, S), where this is a (B, S, K) tensor seen as (B * S, K)
    """

    local: torch.Tensor
    dim_cut: int
    owners: Owners
    axis: Axis
    soft: bool
    origin: str
    rows: tuple[int, int] | None
    copied: bool  # a view that does not share its memory with what it is a view of

    observes_inside = True  # modes that count collectives look at what the rules do, not at the operation itself

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, dim: int, owners: Owners, axis: Axis, soft: bool = False, origin: str = ""
    ) -> Part:
        shape = list(local.shape)
        shape[dim] = owners.size
        part = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides_of(local, shape), dtype=local.dtype, device=local.device, requires_grad=False
        )
        part.local, part.dim_cut, part.owners, part.axis, part.soft = local, dim, owners, axis, soft
        part.origin, part.copied, part.rows = origin, False, None
        return part

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (
            f"Part(shape={tuple(self.shape)}, dim {self.dim_cut} over {self.axis.name}: {self.owners.counts}, "
            f"dtype={self.dtype})"
        )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        override = FUNCTIONS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            return (override or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        try:
            return answer(func, args, kwargs or {})
        except Uncut as error:
            error.origins |= {part.origin for part in parts_in((args, kwargs)) if part.origin}
            raise

    def with_local(self, local: torch.Tensor, dim: int | None = None, owners: Owners | None = None) -> Part:
        """Another tensor dealt alike."""
        dim, owners = self.dim_cut if dim is None else dim, self.owners if owners is None else owners
        return Part(local, dim, owners, self.axis, self.soft, self.origin)

    def share(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The share of a plain tensor that lies beside this part, along `dim`."""
        return self.owners.take(whole, dim, self.axis.index)

    def beside(self, other: Part) -> bool:
        """Whether the other's indices are dealt in the same way."""
        return self.owners is other.owners and self.axis is other.axis


def answer(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func` on parts, by its rule."""
    from shardwise.part.sums import Sum, with_sums

    if tensors_in((args, kwargs), Sum):
        return with_sums(func, args, kwargs)
    known = facts(func)
    if known.writes and isinstance(args[0], Part) and args[0].copied:
        raise Uncut(f"{func} writes into a view that is a copy here ({args[0]!r})")
    try:
        if known.rule is None:
            raise Uncut(no_rule(func, parts_in((args, kwargs))))
        output = known.rule(func, args, kwargs)
    except Uncut:
        return _on_gathered(func, args, kwargs)
    if known.is_view:
        for part in parts_in([output]):
            part.copied = args[0].copied or not same_memory(part.local, args[0].local)
    return output


def _on_gathered(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operation on whole tensors, where the parts in its way are soft. Called while an `Uncut` is handled."""
    from shardwise.part.sums import Sum

    writes = facts(func).writes and isinstance(args[0], Part)
    if writes or not any(part.soft for part in parts_in((args, kwargs))):
        raise  # what is being handled
    args, kwargs = replaced(Part, lambda p: gather(p) if p.soft else p, (args, kwargs))
    output = func(*args, **kwargs)
    if facts(func).is_view:  # of a copy: reading it is right, writing into it would be lost
        return replaced(torch.Tensor, Sum.read_only, output)
    return output


@dataclass(frozen=True)
class Facts:
    """What is asked about an operation whenever it runs."""

    name: str
    rule: Rule | None
    writes: bool
    is_view: bool  # its result shares memory with its input


@cache
def facts(func: Any) -> Facts:
    """Looked up once for each operation, since schemas are slow to read."""
    name = func._schema.name.partition("::")[2]
    found = RULES.get(name)
    if found is None and torch.Tag.pointwise in func.tags:
        found = RULES["add"]
    returned = func._schema.returns
    writes = func._schema.is_mutable
    return Facts(name, found, writes, bool(returned) and returned[0].alias_info is not None and not writes)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in one storage."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def strides_of(local: torch.Tensor, shape: list[int]) -> list[int]:
    """Strides of the whole tensor in the memory order of the share."""
    strides, step = [0] * len(shape), 1
    order = sorted(range(len(shape)), key=lambda d: (local.stride(d), -d))
    for d in order:
        if local.stride(d) or local.shape[d] <= 1:
            strides[d] = step
            step *= max(shape[d], 1)
    return strides


def parts_in(tree: Any) -> list[Part]:
    """All parts in a pytree."""
    return tensors_in(tree, Part)


def no_rule(func: Any, parts: list[Part]) -> str:
    """The message for an operation that cannot be done on parts."""
    first = parts[0]
    shapes = ", ".join(f"{tuple(p.shape)} cut along dim {p.dim_cut}" for p in parts)
    return f"{func} is not known to be right on tensors cut over {first.axis.name} (here {shapes})"


class _Last:
    """The soft part that was gathered last, and the result: queries, keys and values read the same input."""

    key: tuple | None = None
    held: tuple[torch.Tensor, torch.Tensor] | None = None


def forget() -> None:
    """Let go of the last gathered tensor."""
    _Last.key = _Last.held = None


def gather(part: Part) -> torch.Tensor:
    """The whole tensor, on every rank, to read: of a soft part, the same object as the last time. Collective."""
    if not part.soft:
        return gathered(part)
    if part.dim() == 2 and part.local.stride(0) == 1 < part.local.stride(1):  # the transpose of what others gather
        return gather(Part(part.local.t(), 1 - part.dim_cut, part.owners, part.axis, True, part.origin)).t()
    local = part.local
    key = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), local._version,
           part.dim_cut, part.owners)  # fmt: skip
    if _Last.key != key or _Last.held is None:
        _Last.key, _Last.held = key, (local, gathered(part))
    return _Last.held[1]


def gathered(part: Part) -> torch.Tensor:
    """The whole tensor, newly made. Collective."""
    dim, owners, axis = part.dim_cut, part.owners, part.axis
    most = max(owners.counts)
    front = part.local.movedim(dim, 0)
    padded = front
    if front.shape[0] != most:
        padded = front.new_zeros((most, *front.shape[1:]))
        padded[: front.shape[0]] = front
    kind = padded.dtype
    flat = padded.contiguous().view(torch.uint8) if kind is torch.bool else padded.contiguous()
    table = flat.new_empty((axis.size * most, *front.shape[1:]))
    all_gather(table.view(-1), flat.view(-1), axis, "activations")
    table = table.view(kind) if kind is torch.bool else table
    if any(count != most for count in owners.counts):
        table = torch.cat([table[r * most : r * most + n] for r, n in enumerate(owners.counts)])
    if owners.order is not None:
        table = table.index_select(0, torch.from_numpy(owners.order).to(table.device))
    return table.movedim(0, dim).contiguous()


def reduced(local: torch.Tensor, part: Part, op: str = "sum") -> torch.Tensor:
    """The sum (max, min) over the ranks of what each has; plain. Collective."""
    return all_sum(local, part.axis, op)


def all_sum(local: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """The sum (max, min) of every rank's tensor. Collective."""
    total = local.clone(memory_format=torch.contiguous_format)
    all_reduce(total, axis, "activations", op=op)
    return total


def scatter_sum(local: torch.Tensor, dim: int, owners: Owners, axis: Axis) -> torch.Tensor:
    """This rank's share, along `dim`, of the sum of every rank's tensor. Collective."""
    return Scatter(local, dim, owners, axis).wait()


class Scatter:
    """A sum over ranks under way, of which each keeps its share along `dim`. Collective."""

    def __init__(self, local: torch.Tensor, dim: int, owners: Owners, axis: Axis):
        self.dim, self.owners, self.axis = dim, owners, axis
        self.sent = _in_blocks(local.movedim(dim, 0), owners, axis)  # kept until it is over
        self.share = self.sent.new_empty((max(owners.counts), *self.sent.shape[1:]))
        self.pending = reduce_scatter(self.share.view(-1), self.sent.view(-1), axis, "activations", wait=False)

    def wait(self) -> torch.Tensor:
        """The share."""
        self.pending.wait()
        return self.share[: self.owners.counts[self.axis.index]].movedim(0, self.dim).contiguous()


def _in_blocks(front: torch.Tensor, owners: Owners, axis: Axis) -> torch.Tensor:
    """The rows of each rank behind each other, in blocks of one size."""
    most = max(owners.counts)
    if owners.order is None and all(count == most for count in owners.counts):
        return front.contiguous()
    padded = front.new_zeros((axis.size * most, *front.shape[1:]))
    for rank, count in enumerate(owners.counts):
        padded[rank * most : rank * most + count] = owners.take(front, 0, rank)
    return padded


class _ToPart(torch.autograd.Function):
    """A plain tensor that is this rank's share, as a part. Backward takes the share of the gradient."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, dim: int, owners: Owners, axis: Axis, origin: str) -> Part:
        ctx.cut = dim, owners, axis
        return Part(local.detach(), dim, owners, axis, origin=origin)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        from shardwise.part.sums import Sum

        dim, owners, axis = ctx.cut
        if isinstance(gradient, Sum):
            gradient = gradient.value()
        if not isinstance(gradient, Part):
            return owners.take(gradient, dim, axis.index), None, None, None, None
        if gradient.dim_cut != dim or gradient.owners is not owners:
            return owners.take(gather(gradient), dim, axis.index), None, None, None, None
        return gradient.local, None, None, None, None


def to_part(local: torch.Tensor, dim: int, owners: Owners, axis: Axis, origin: str = "") -> Part:
    """Differentiable: this rank's share (a parameter) as a part of the whole."""
    if not local.requires_grad or not torch.is_grad_enabled():
        return Part(local.detach(), dim, owners, axis, origin=origin)
    return _ToPart.apply(local, dim, owners, axis, origin)
