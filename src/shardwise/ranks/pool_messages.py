"""Messages between the calling process and its ranks: jobs one way, reports the other, always by value."""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError

READY = b"ready"  # rank -> caller: the process is up
IDLE = b"idle"  # rank -> caller: the process group is gone, give me the next job
RELEASE = b"release"  # caller -> rank: every rank has reported, the process group may go
OWN = "own"  # value of `RankCall.backend` that asks for the accelerator's own backend


@dataclass(frozen=True)
class RankCall:
    """One function call on one rank, with the caller's environment, directory and search path."""

    rank: int
    world_size: int
    store: str  # path of the FileStore
    backend: str | None  # None: chosen by this machine's devices; OWN: the accelerator's, even if ranks share a device
    threads: int  # of torch in the rank
    group_timeout_s: float | None  # of its process group's collectives; None: torch's own
    search_path: list[str]  # Python's, as the caller has it
    directory: str  # the caller's working directory
    environment: dict[str, str]
    call: bytes  # pickled (function, args)
    record: str = ""  # path of this rank's record, without its number; "": nobody watches
    once: bool = False  # the process ends with this job


@dataclass(frozen=True)
class Failure:
    """The end of one rank without a result: an exception, or the death of its process."""

    rank: int
    at: float  # seconds of the monotonic clock, which all processes of a machine share
    headline: str  # "CLASS: message", or how the process died
    message: str  # of the exception
    traceback: str = ""
    died: bool = False  # whether the process ended without a report
    own_class: bytes | None = None  # the pickled class of one of shardwise's errors; None: another exception


@dataclass(frozen=True)
class Report:
    """The message of a rank whose function has ended: a pickled result, or a failure."""

    result: bytes | None
    failure: Failure | None
    spent: bool = False  # whether the process must not take another job


class _ByValue(pickle.Pickler):
    """A pickler that writes tensors by value, only the elements in view and from the CPU, and shares no memory."""

    def reducer_override(self, value: Any) -> Any:
        """Returns pickle's reduction of a tensor as CPU elements; NotImplemented leaves `value` to torch or pickle."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        # sparse and meta tensors have no buffer of elements to copy
        if value.layout != torch.strided or value.device.type == "meta":
            return NotImplemented
        from shardwise.device import on_host  # here, since it imports torch

        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        # the storage holds just these elements: a plain tensor is written fast, others (hooks, names) by torch
        if on_host(value.device) and whole and value.is_leaf:
            return _as_bytes(value) if _is_plain(value) else NotImplemented
        # else copy the elements in view: off the device, without autograd graph, without the rest of the storage
        copy = value.detach().cpu().clone()
        if isinstance(value, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor has nothing beyond dtype, strides and elements: no hooks, names, attributes, lazy bits."""
    import torch

    lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or any(getattr(tensor, "names", ()))
    return type(tensor) is torch.Tensor and not (lazy or tensor._backward_hooks or tensor.__dict__)


def _as_bytes(tensor: Any) -> tuple:
    """Returns pickle's reduction (`_from_bytes`, arguments) of a plain CPU tensor, which is faster than torch's."""
    storage = tensor.untyped_storage()
    shape, strides = tuple(tensor.shape), tensor.stride()
    held = ctypes.string_at(storage.data_ptr(), storage.nbytes())
    return _from_bytes, (held, tensor.dtype, tensor.storage_offset(), shape, strides, tensor.requires_grad)


def _from_bytes(held: bytes, dtype: Any, offset: int, shape: tuple, strides: tuple, requires_grad: bool) -> Any:
    """Returns the tensor that `_as_bytes` described, in a storage of its own that can be resized (ZeRO-3 does that).

    held     bytes of the whole storage; `offset`, `shape`, `strides`: of the tensor, in elements
    """
    import torch

    storage = torch.UntypedStorage(len(held))
    ctypes.memmove(storage.data_ptr(), held, len(held))
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides).requires_grad_(requires_grad)


def dumps(value: Any) -> bytes:
    """Returns the value pickled, with tensors copied: torch.multiprocessing's shared memory ends with the rank."""
    stream = io.BytesIO()
    _ByValue(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def pack_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Returns (function, args) pickled.

    Raises `InputError` for a function that the ranks could not find by name, or arguments that cannot be pickled.
    """
    main = sys.modules.get("__main__")
    if getattr(function, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise InputError(
            f"`{function.__qualname__}` is defined in an interactive session or in `python -c`, which ranks cannot "
            "import; put it in a file"
        )
    try:
        return dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise InputError(
            f"`{name}` and its arguments cannot be sent to the ranks: {error}. Ranks find a function by its module "
            "and name, so define it at the top level of a module (no lambda, no nested function); a task with lambdas "
            'can be given by its name, "file.py:task"'
        ) from None
