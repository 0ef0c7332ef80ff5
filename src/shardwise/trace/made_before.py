"""Copy a module that was there before a task's constructor was called (`Task(model=lambda: net)`).

A plan cuts and shards the module that it is given in place, and a process builds a task's module more than once: a
second call would return what the first plan left of it. So the copy is changed, and the user's module stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shardwise.errors import InputError, first_line
from shardwise.trace.tape import storage_key


@contextmanager
def parameters_put() -> Iterator[set[int]]:
    """Context that yields a set, to which the ids of all parameters registered in modules meanwhile are added."""
    new: set[int] = set()
    handle = register_module_parameter_registration_hook(lambda module, name, param: new.add(id(param)))
    try:
        yield new
    finally:
        handle.remove()


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a deep copy of a module. `memo`: id of a tensor -> the tensor that the copy holds in its place.

    A gradient that reaches a weight of `module` itself from now on raises `InputError`: the loss reads that weight,
    which is not trained. Raises `InputError` if the module cannot be copied.
    """
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise InputError(
            f"Task.model returned a {type(module).__name__} that was there before the call, which a plan changes in "
            f"place, and it cannot be copied ({first_line(error)}): build it anew in each call, model=Net"
        ) from error
    for param in module.parameters():
        if param.requires_grad and param.is_leaf and not is_watched(param):
            param.register_hook(_refuse_gradient)
    return made


def is_watched(param: torch.Tensor) -> bool:
    """Whether the only hook on a weight's gradient is the one that `copied` has set."""
    return [*(param._backward_hooks or {}).values()] == [_refuse_gradient]


def _refuse_gradient(gradient: torch.Tensor) -> None:
    """Raises `InputError`, because a weight got a gradient whose copy is trained in its place."""
    raise InputError(
        "the loss reads weights of a module that was there before Task.model was called; a copy of it is trained, so "
        "that these would not be: build the module in Task.model (model=Net), and let it return what the loss needs of "
        "its weights"
    )


def stand_ins(tensors: Iterable[torch.Tensor], large: int | None) -> dict[int, torch.Tensor]:
    """Returns id of a tensor -> a copy; tensors on one storage have copies on one new storage.

    large   bytes of a storage from which its copy gets no values, since they are made later; None: all get values
    """
    memories: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        memory = tensor.detach().untyped_storage()
        if storage_key(tensor) not in memories:
            empty = large is not None and memory.nbytes() >= large
            fresh = torch.UntypedStorage(memory.nbytes(), device=memory.device) if empty else memory.clone()
            memories[storage_key(tensor)] = fresh
        like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        like.set_(memories[storage_key(tensor)], tensor.storage_offset(), tensor.shape, tensor.stride())
        made[id(tensor)] = _with_marks(tensor, like)
    return made


def _with_marks(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `like`, as a parameter where `tensor` is one, with the Python attributes set on `tensor`."""
    if isinstance(tensor, nn.Parameter):
        like = nn.Parameter(like, requires_grad=tensor.requires_grad)
    like.__dict__.update(tensor.__dict__)
    return like
