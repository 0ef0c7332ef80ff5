"""Check the dtypes that a step under a plan uses, in its collectives and tensors, against those that the plan asks for.

    gradients on the wire, and the buffers they add up in   `reduce_dtype`, or the precision's own
    weights that are gathered or published                  the compute dtype; one that is not sharded: its master's
    masters, their gradients                                the master dtype
    the optimizer's state                                   what it is in one process, of masters of that dtype
    what the model is given                                 what it is in one process
    what a module returns, its buffers                      no narrower than in one process
    control rows; statistics of batch norms                 64 bits; 32 bits or more
    anything else on the wire                               the compute dtype, one that a module returns in one
                                                            process, or a wider one

A sum in 16 bits, or a result that is cast to them, looks like rounding, so no bar on values finds it. `SAYS` repeats
the table of layout/precisions, so that a wrong row there shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.engine.engine import Engine
from shardwise.layout import Plan

# precision -> dtypes of (products, master weights, sums of gradients)
SAYS = {
    "fp32": ("float32", "float32", "float32"),
    "fp64": ("float64", "float64", "float64"),
    "bf16": ("bfloat16", "float32", "float32"),
    "bf16-full": ("bfloat16", "bfloat16", "float32"),
    "fp16": ("float16", "float32", "float32"),
}
NAMES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}
REDUCING = ("all_reduce", "reduce_scatter")
Named = dict[str, set[str]]  # name of a tensor, module or key -> names of the dtypes that were seen there


@dataclass
class SeenDtypes:
    """The dtypes that one rank, or one process, used in a step, each by its name in torch ("bfloat16").

    carried    by collectives: (tag, op) -> dtypes
    masters    of master weights, by the parameter's name; so are `gradients`
    buffers    of the buffers in which gradients add up, by index
    states     of the optimizer's state, by key
    given      of the model's inputs
    returned   of modules' outputs, by module path
    held       of the module's own buffers, by name
    read       of the model's output as the loss gets it
    """

    carried: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    masters: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    states: Named = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    returned: Named = field(default_factory=dict)
    held: Named = field(default_factory=dict)
    read: set[str] = field(default_factory=set)


def said(plan: Plan) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the dtypes that a plan asks for, of (products, master weights, sums of gradients)."""
    compute, master, summed = SAYS[plan.precision]
    summed = summed if plan.reduce_dtype == "auto" else NAMES[plan.reduce_dtype]
    return getattr(torch, compute), getattr(torch, master), getattr(torch, summed)


def named(values: Any) -> set[str]:
    """Returns the names of the floating-point dtypes in a tree of tensors; of complex ones that of their parts."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    dtypes = {leaf.dtype.to_real() if leaf.is_complex() else leaf.dtype for leaf in tensors}
    return {str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point}


@contextmanager
def returned(module: nn.Module, given: set[str]) -> Iterator[Named]:
    """Context that yields path -> dtypes of what the modules return inside; adds the root's input dtypes to `given`."""
    seen: Named = defaultdict(set)

    def of(path: str) -> Any:
        def note(child: nn.Module, args: tuple, output: Any) -> None:
            if torch.is_grad_enabled():  # a pipeline stage runs modules without gradients only to find shapes
                seen[path] |= named(output)

        return note

    handles = [child.register_forward_hook(of(path)) for path, child in module.named_modules()]
    note = lambda root, args, kwargs: given.update(named((args, kwargs)))  # noqa: E731
    handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def noting(loss: Callable[..., Any], seen: set[str]) -> Callable[..., Any]:
    """Returns the loss function, changed to add the dtypes of the model's output to `seen` in each call."""

    @wraps(loss)
    def noted(output: Any, *args: Any) -> Any:
        seen.update(named(output))
        return loss(output, *args)

    return noted


@contextmanager
def watched(engine: Engine) -> Iterator[SeenDtypes]:
    """Context around one step of an engine: yields the `SeenDtypes` of that step, complete when the context ends."""
    seen, forward = SeenDtypes(), engine.state.forward
    task = forward.task
    # replaced only now: the checks of a task, when an engine is made, follow what its loss writes
    forward.task = task.with_(loss=noting(task.loss, seen.read))
    try:
        with engine.observe() as ledger, returned(engine.module, seen.given) as seen.returned:
            yield seen
    finally:
        forward.task = task
    seen.carried = dict(ledger.dtypes)
    seen.returned = dict(seen.returned)
    seen.buffers = {str(place): named(tensor) for place, tensor in enumerate(engine.technique.gradient_buffers())}
    for slot in engine.technique.slots:
        seen.masters[slot.name], seen.gradients[slot.name] = named(slot.master), named(slot.master.grad)
    # with an optimizer that needs whole tensors, their owners hold master weights beside the pieces in the slots
    for index, master in engine.state.owners.masters.items() if engine.state.owners is not None else ():
        seen.masters[engine.state.names[index]] = named(master)
    seen.states = of_states(engine.optimizer)
    seen.held = {name: named(buffer) for name, buffer in engine.used_buffers()}


def of_states(optimizer: torch.optim.Optimizer) -> Named:
    """Returns key -> dtypes of an optimizer's state tensors; those without dims (step counts) are left out."""
    seen: Named = defaultdict(set)
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim():
                seen[str(key)] |= named(value)
    return dict(seen)


def differences(plan: Plan, ranks: SeenDtypes, single: SeenDtypes) -> list[str]:
    """Returns a sentence for each kind of tensor whose dtype on `ranks` is not the plan's or one process's."""
    compute, master, summed = (named(torch.empty(0, dtype=dtype)) for dtype in said(plan))
    inside = set().union(*single.returned.values())  # may include narrower ones, of a model that uses autocast
    told = [
        _unlike(f"{op} of {tag}", dtypes, _allowed(tag, op, compute, master, summed, inside))
        for (tag, op), dtypes in ranks.carried.items()
    ]
    told += [_first("the buffer of gradients", ranks.buffers, summed), _first("the master of", ranks.masters, master)]
    told += [_first("the gradient that the optimizer gets of", ranks.gradients, master)]
    told.append(_unlike("what the loss reads", ranks.read, _or_wider(single.read)))
    for key in sorted(ranks.states.keys() & single.states.keys()):
        told.append(_unlike(f"the optimizer's {key}", ranks.states[key], single.states[key]))
    told.append(_unlike("what the model is given", ranks.given, single.given))
    for name in sorted(ranks.held.keys() & single.held.keys()):
        allowed = _or_wider(single.held[name]) or {"whole numbers"}
        told.append(_unlike(f"buffer '{name}'", ranks.held[name], allowed))
    # with stages the outermost module returns messages; what the loss reads was compared above
    for path in sorted((ranks.returned.keys() & single.returned.keys()) - ({""} if plan.pp > 1 else set())):
        told.append(_unlike(f"what '{path or 'the model'}' returns", ranks.returned[path],
                            _or_wider(single.returned[path])))  # fmt: skip
    return [sentence for sentence in told if sentence]


def _allowed(tag: str, op: str, compute: set[str], master: set[str], summed: set[str], inside: set[str]) -> set[str]:
    """Returns the dtypes that a collective may carry. The tag "torch" is of FSDP2's gathers and reductions.

    op                        the collective, such as "all_gather"
    compute, master, summed   the plan's dtypes of products, of master weights, and of sums of gradients
    inside                    dtypes of what modules return in one process
    """
    # FSDP2 reduces nothing but gradients, so its reductions have the dtype of sums too
    if op in REDUCING and tag in ("gradients", "torch"):
        return summed
    if tag == "gradients":  # not a reduction: reduced gradients go to the rank that updates the tensor
        return master
    if tag == "torch":  # not a reduction: FSDP2 gathers weights
        return compute
    # weights are gathered for products; one that is not sharded is sent as its master
    if tag == "parameters":
        return compute if op == "all_gather" else compute | master
    if tag == "control":  # rows of float64 numbers are reduced; tensors are broadcast in their own dtype
        return {"float64"} if op in REDUCING else {"float64"} | master | compute
    # torch keeps statistics of batch norms in 32 bits beside an input of 16
    wide = tag == "batch_norm" and all(getattr(torch, name).itemsize < 4 for name in compute)
    return _or_wider({"float32"} if wide else compute | inside)


def _or_wider(dtypes: set[str]) -> set[str]:
    """Returns `dtypes`, with float32 and float64 if they are wider than the narrowest of them."""
    least = min((getattr(torch, name).itemsize for name in dtypes), default=8)
    return dtypes | {name for name in ("float32", "float64") if getattr(torch, name).itemsize > least}


def _first(what: str, seen: Named, allowed: set[str]) -> str:
    """Returns a sentence on the first entry of `seen` with a dtype outside of `allowed`; "" if there is none."""
    sentences = (_unlike(f"{what} '{name}'", dtypes, allowed) for name, dtypes in seen.items())
    return next((sentence for sentence in sentences if sentence), "")


def _unlike(what: str, dtypes: Iterable[str], allowed: set[str]) -> str:
    """Returns a sentence if `dtypes` has some outside of `allowed`; "" if not, or if `allowed` is empty."""
    wrong = sorted(set(dtypes) - allowed)
    return f"dtype of {what}: {', '.join(wrong)}, not {' or '.join(sorted(allowed))}" if wrong and allowed else ""


def first_differences(plan: Plan, ranks: list[SeenDtypes], single: SeenDtypes) -> list[str]:
    """Returns the sentences of `differences` over all ranks, each once, with the first rank of which it is true."""
    told: dict[str, int] = {}
    for rank, seen in enumerate(ranks):
        for sentence in differences(plan, seen, single):
            told.setdefault(sentence, rank)
    return [f"{sentence} (rank {rank})" for sentence, rank in told.items()]
