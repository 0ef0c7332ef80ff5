"""Give the module its weights: one tensor at a time is made or received unsharded, rounded, and put in its place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container

import torch
import xxhash
from torch import nn

from shardwise.comm import Axis, broadcast, gather_rows
from shardwise.errors import InputError, RefusedPlan
from shardwise.look.samples import has_samples
from shardwise.parallel.slots import ValueOf
from shardwise.precision import Precision
from shardwise.task import Task
from shardwise.trace.deferred import Built, build, build_for_real, named_tensors, refuse_compiled
from shardwise.trace.made_before import is_watched
from shardwise.trace.stand_in import exchange


def build_everywhere(
    task: Task, seed: int, world: Axis, device: torch.device, own: bool = True
) -> tuple[Built, ValueOf]:  # fmt: skip
    """Returns (the built module, a function from a parameter's name to its initial value, unsharded, on every rank).

    If the constructor cannot be replayed, or uses values that differ between ranks, rank 0's values are sent to all.
    The function is then collective, so ranks must call it for the same names in the same order.

    world  the axis of all ranks;  device  where values are received
    own    whether the task's constructor makes a new module; False for a script's module, which exists already
    Raises `RefusedPlan` if the constructor puts a hook on a weight's gradient, `InputError` if it fails, or if
    `Task.weights` has a value for none of the parameters.
    """
    has = has_samples(task)
    own = own and has
    built = build(task.model, seed, own=own)
    if has:  # a script's own may be compiled
        refuse_compiled(built.module)
    hooked = hooked_weight(built.given) if own else None  # `prepare` has looked at the hooks of a script's
    if hooked is not None:
        raise RefusedPlan(
            f"the constructor puts a hook on the gradient of parameter '{hooked}', and ranks hold this weight anew, in "
            "shares or with gradients that are summands, for which it was not made: scale or mask in the forward "
            "instead (w * m + (w * (1 - m)).detach()), or freeze the weight"
        )
    built.value_from = task.weights
    _refuse_unused(task, built)
    # the hash in 50 bits, since a float64 holds integers of up to 53 exactly
    mine = torch.tensor([float(built.fingerprint() % 2**50), float(bool(built.notice))], dtype=torch.float64)
    table = gather_rows(mine.to(device), world)
    if bool((table == table[0]).all()) and not built.notice:
        return built, built.value
    if not built.notice:
        reason = "its constructor takes values that differ between ranks"
        built = build_for_real(task.model, seed, reason, own=own)
        built.value_from = task.weights

    def received(name: str) -> torch.Tensor:
        value = built.value(name).detach().to(device).contiguous()
        broadcast(value, world, 0, "initial values")
        return value

    return built, received


def _refuse_unused(task: Task, built: Built) -> None:
    """Raise `InputError` if `Task.weights` is given but returns None for every parameter of the module."""
    names = [name for name, _ in built.module.named_parameters()]
    if task.weights is None or hasattr(task.weights, "into") or not names:
        return
    if all(task.weights(name) is None for name in names):
        raise InputError(
            f"Task.weights gives a value for none of the model's {len(names)} parameters ({', '.join(names[:2])}, "
            "...): the constructor makes others than it knows. Give weights=None for drawn ones"
        )


def told_of_drawn(built: Built) -> list[str]:
    """Returns [a notice] if some parameters come from files and others from the constructor; else [].

    It lists the latter by patterns of names, such as layers.*.weight.
    """
    new, stored = built.drawn()
    # all values, or none, come from files: nothing that the user may not expect
    if not new:
        return []
    patterns = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in new)
    # hundreds of patterns, one for each branch of a deep model: by their last names alone
    if len(patterns) > _MOST:
        patterns = Counter("*." + ".".join(name.split(".")[-3:]) for name in new)
    listed = [f"{pattern} ({count})" if count > 1 else pattern for pattern, count in patterns.items()]
    more = f", and {len(listed) - _MOST} more patterns" if len(listed) > _MOST else ""
    return [
        f"{stored} parameters have values from files; {len(new)} are made by the constructor, from the seed: "
        f"{', '.join(listed[:_MOST])}{more}"
    ]


_MOST = 4  # patterns of names in the notice, so that it stays a line or two


def noting_digests(value_of: ValueOf, names: Container[str], digests: dict[str, str]) -> ValueOf:
    """Returns a wrapper of `value_of` that, for a name in `names`, also sets `digests[name]` to "dtype hash"."""

    def value(name: str) -> torch.Tensor:
        whole = value_of(name)
        if name in names and name not in digests:
            bits = whole.detach().contiguous().view(-1).view(torch.uint8).numpy()
            digests[name] = f"{whole.dtype} {xxhash.xxh3_128_hexdigest(bits.data)}"
        return whole

    return value


def hooked_weight(module: nn.Module) -> str | None:
    """Returns the name of the first parameter with a user's hook on its gradient; None without one."""
    for name, param in module.named_parameters():
        if (param._backward_hooks and not is_watched(param)) or param._post_accumulate_grad_hooks:
            return name
    return None


def _replace(module: nn.Module, make: Callable[[str, torch.Tensor], torch.Tensor], kinds: tuple[str, ...]) -> None:
    """Replaces tensors of the module by `make(name, tensor)`, called once for a tensor that is shared.

    kinds  which ones: "parameter", "buffer", "plain" (a tensor that is an ordinary attribute)
    """
    names = {id(tensor): (name, tensor) for name, tensor in named_tensors(module)}
    made: dict[int, torch.Tensor] = {}
    for child in module.modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, torch.Tensor)}
        for kind, table in (("parameter", child._parameters), ("buffer", child._buffers), ("plain", plain)):
            for leaf, tensor in list(table.items()):
                if tensor is None or kind not in kinds:
                    continue
                if id(tensor) not in made:  # a tied tensor stays one
                    made[id(tensor)] = make(*names[id(tensor)])
                # `plain` is a copy: an attribute is replaced in the module itself
                if kind == "plain":
                    child.__dict__[leaf] = made[id(tensor)].requires_grad_(tensor.requires_grad)
                else:
                    table[leaf] = made[id(tensor)]
    exchange(module, made)  # also references to the old tensors in modules' own lists, dicts and objects


def _parameter(old: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """Returns a parameter of this value, with the `requires_grad` and the attributes of `old`."""
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # marks that users or libraries left on it
    return new


def _not_here(old: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a stand-in for a parameter that other ranks hold: a view of its shape, NaN everywhere (integers: 0).

    It expands a single element, so it needs no memory of its size. If the last dim is 2, two elements lie side by
    side, since the parameter may be read through `view_as_complex`.
    """
    kind = dtype if old.is_floating_point() else old.dtype
    lying = old.shape[-1:] if old.shape[-1:] == (2,) else ()
    value = torch.full(lying, float("nan") if kind.is_floating_point else 0, dtype=kind, device=device)
    return nn.Parameter(value.expand(old.shape), requires_grad=False)


def fill_parameters(
    module: nn.Module, value_of: ValueOf, dtype: torch.dtype, device: torch.device, absent: Container[str] = ()
) -> None:
    """Gives the module unsharded parameters on the device, floating-point ones in `dtype`.

    absent  names of parameters that other ranks hold; they get NaN stand-ins without memory
    """

    def make(name: str, old: torch.Tensor) -> torch.Tensor:
        if name in absent:
            return _not_here(old, dtype, device)
        value = value_of(name)
        # a copy, since the value may be the constructor's own, which the module would then train in place
        return _parameter(old, value.to(device, _kind(value, dtype), copy=True))

    _replace(module, make, ("parameter",))


def _kind(value: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for `value`: `dtype` if it is floating-point, its complex kind if complex, else its own."""
    if value.is_complex():
        return dtype.to_complex()
    return dtype if value.is_floating_point() else value.dtype


def fill_only(
    module: nn.Module, names: Container[str], frozen: Container[str], value_of: ValueOf, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Gives the module unsharded parameters on the device for `names`; leaves its other parameters alone.

    frozen  names of parameters that do not require a gradient;  dtype  of floating-point ones
    """

    def make(name: str, old: torch.Tensor) -> torch.Tensor:
        if name not in names:
            return old
        value = value_of(name)
        # anew: what stood in the place of these had no values, and could not be trained
        new = nn.Parameter(value.to(device, dtype if value.is_floating_point() else None, copy=True))
        return new.requires_grad_(name not in frozen)

    _replace(module, make, ("parameter",))


def empty_parameters(
    module: nn.Module, precision: Precision, device: torch.device, absent: Container[str] = ()
) -> None:  # fmt: skip
    """Replaces parameters by meta tensors: trained ones in the masters' dtype, frozen ones in the compute dtype.

    absent  names of parameters that FSDP2 does not shard; they get NaN stand-ins without memory, on `device`
    """

    def make(name: str, old: torch.Tensor) -> torch.Tensor:
        if name in absent:
            return _not_here(old, precision.master, device)
        kind = precision.master if old.requires_grad else precision.compute
        kind = kind if old.is_floating_point() else old.dtype
        return _parameter(old, torch.empty(old.shape, dtype=kind, device="meta"))

    _replace(module, make, ("parameter",))


def fill_buffers(module: nn.Module, value_of: ValueOf, precision: Precision, device: torch.device) -> None:
    """Gives the module's buffers, and attributes that are tensors, their initial values on the device."""

    def make(name: str, old: torch.Tensor) -> torch.Tensor:
        value = value_of(name)
        return value.to(device, _kind(value, precision.buffers), copy=True)

    _replace(module, make, ("buffer", "plain"))


def hold_recurrent(module: nn.Module) -> None:
    """Disables `flatten_parameters` of the module's recurrent layers.

    It would move their weights to other memory, for cuDNN, in each forward that finds them changed; the plan would
    then gather and publish into memory that they no longer use.
    """
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters = _nothing


def _nothing() -> None:
    """Does nothing; stands in for `flatten_parameters`."""
