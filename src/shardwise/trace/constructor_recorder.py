"""Record each op of a constructor that makes or changes a tensor onto a tape, leaving large tensors without values.

A new tensor of `LARGE` elements or more is address space whose pages are never touched. Smaller ones get values, so
that constructors that read some (`linspace(...).tolist()`) work; reading a large tensor raises `NotReplayable`.

    with recording(tape):
        module = constructor()        empty(4096,4096) . uniform_(-.01,.01) . empty(16) . fill_(1) ...
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.device import on_host
from shardwise.trace.elementwise import is_random
from shardwise.trace.leaves import replaced, tensors_in, written_tensors
from shardwise.trace.tape import ConstructorTape, NotReplayable, TapedOp, bytes_of, ref_of, storage_key

MAP_NORESERVE = 0x4000  # of Linux; Python's mmap names it from 3.13 on
LARGE = 4096  # elements from which a new tensor gets no values


@contextmanager
def recording(tape: ConstructorTape) -> Iterator[None]:
    """Context that writes the constructor run inside onto `tape`.

    `NotReplayable` is raised inside if the constructor reads values that are random or deferred, or draws random
    numbers from a generator on a device.
    """
    recorder = _Recorder(tape)
    with _Guard(tape), recorder, _initialisers(recorder):
        yield


class _Recorder(TorchDispatchMode):
    """Dispatch mode that writes each op of a constructor onto the tape; large tensors get no values."""

    def __init__(self, tape: ConstructorTape):
        super().__init__()
        self.tape = tape
        self.paused = False

    def initialise(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Records a call of a `torch.nn.init` function as a single op and returns its result.

        If the tensor's values are deferred, the function does not run and that tensor is returned. The call is one op
        because some of these functions loop until a random value is accepted, and no tape of single ops replays a loop.
        """
        first = next((tensor for tensor in tensors_in((args, kwargs))), None)
        # inside another such function all is one op; without a tensor there is nothing to record
        if self.paused or first is None:
            return function(*args, **kwargs)
        self._meet(first)
        state = _own_state(args, kwargs)
        result: Any = first
        self.paused = True
        try:
            # a tensor with values gets new ones now: the constructor may read them
            if storage_key(first) not in self.tape.deferred:
                result = function(*args, **kwargs)
            elif state is not None:  # its next draw is to be what it would be had this one been made
                self._advance(function, args, kwargs)
        finally:
            self.paused = False
        key = storage_key(first)
        refs, named = replaced(torch.Tensor, ref_of, (args, kwargs))
        self.tape.add(TapedOp(function, refs, named, [], {key}, {key}, random=state is None, generator=state))
        return result

    def _advance(self, function: Callable, args: tuple, kwargs: dict) -> None:
        """Moves the constructor's own generator on as the call would, by running it on zeros for deferred tensors."""

        def scratch(tensor: torch.Tensor) -> torch.Tensor:
            return (
                torch.zeros(tensor.shape, dtype=tensor.dtype) if storage_key(tensor) in self.tape.deferred else tensor
            )

        args, kwargs = replaced(torch.Tensor, scratch, (args, kwargs))
        function(*args, **kwargs)

    def write_from(self, tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        """Records that the tensor gets the value that `read()` returns.

        A tensor with values gets it now too, if it has fewer than `LARGE` elements.
        """
        self._meet(tensor)
        key, ref = storage_key(tensor), ref_of(tensor)
        if tensor.numel() >= LARGE:
            self.tape.deferred.add(key)
        elif key not in self.tape.deferred:
            _write(tensor, read)
        if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes():
            value = partial(_laid_out, read, tensor.dtype)
            self.tape.add(TapedOp(value, (), {}, [ref], set(), {key}, random=False, whole=True, stored=True))
        else:  # a view of something larger, whose other elements stay
            self.tape.add(TapedOp(_write, (ref, read), {}, [], {key}, {key}, random=False, stored=True))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.tape.refuse_reading(args[0], "item()")
        for tensor in inputs:
            self._meet(tensor)
        state = _own_state(args, kwargs)
        output = self._execute(func, args, kwargs, inputs) if state is None else self._draw(func, args, kwargs, inputs)
        self._record(func, args, kwargs, inputs, output, state)
        return output

    def _draw(self, func, args, kwargs, inputs):
        """Returns the result of an op that draws from the constructor's own generator, and moves the generator on.

        A result that is large or made of deferred tensors has no values.
        """
        if any(storage_key(tensor) in self.tape.deferred for tensor in inputs):
            self._advance(func, args, kwargs)
            return self._defer(func, args, {**kwargs, "generator": None} if "generator" in kwargs else kwargs)
        output = func(*args, **kwargs)
        large = isinstance(output, torch.Tensor) and output.numel() >= LARGE and not func._schema.is_mutable
        return self._unfilled(output) if large else output  # replay draws it again, from the state noted

    def _meet(self, tensor: torch.Tensor) -> None:
        """Keeps the bytes of a storage that no op on the tape has made; a meta one has none and counts as lost."""
        key = storage_key(tensor)
        tape = self.tape
        if key in tape.writers or key in tape.constants or key in tape.lost:
            return
        tape.alive.append(tensor.untyped_storage())
        if tensor.device.type == "meta":  # it came from outside without values
            tape.lost.add(key)
        else:
            tape.constants[key] = bytes_of(tensor)

    def _execute(self, func, args, kwargs, inputs):
        """Returns the op's result, on the CPU; a large one is not computed but given address space without values."""
        # weights are made on the CPU whatever device the constructor names, since a rank has its own
        if "device" in _argument_names(func) and torch.device(kwargs.get("device") or "cpu").type != "meta":
            kwargs = {**kwargs, "device": torch.device("cpu"), **_unpinned(kwargs)}
        if any(storage_key(tensor) in self.tape.deferred for tensor in inputs):
            return self._defer(func, args, kwargs)
        # an op whose inputs have values, or one that takes no device and so is no factory
        if inputs or "device" not in _argument_names(func):
            return func(*args, **kwargs)
        # a factory: on the meta device first, which says how large its result would be
        without = {"generator": None} if "generator" in kwargs else {}
        shape = func(*args, **{**kwargs, "device": torch.device("meta"), **without})
        if isinstance(shape, torch.Tensor) and shape.numel() >= LARGE:
            return self._unfilled(shape)
        return func(*args, **kwargs)

    def _defer(self, func, args, kwargs):
        """Returns the result of an op with inputs without values, computing none.

        A view is made for real, a write only marks its tensor as deferred, and any other result is made by its shape.
        """
        returned = func._schema.returns
        # a view needs no values: it is made of the unfilled memory itself, and stays a view of it
        # t_ and unsqueeze_ write shapes and no values
        if _reshapes(func) or (returned and all(r.alias_info and not r.alias_info.is_write for r in returned)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs):
                self.tape.deferred.add(storage_key(tensor))
            written = tuple(written_tensors(func, args, kwargs))
            return written[0] if len(returned) == 1 else written if returned else None
        # by shape: the result is made on the meta device, then given address space
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        args, kwargs = replaced(torch.Tensor, _as_meta, (args, kwargs))
        return replaced(torch.Tensor, self._unfilled, func(*args, **kwargs))

    def _unfilled(self, shape: torch.Tensor) -> torch.Tensor:
        """Returns a CPU tensor like `shape` (meta), whose pages are never touched and so take no memory."""
        try:
            tensor = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        except RuntimeError:  # more memory than Linux agrees to reserve on this machine
            tensor = _unvouched(shape)
        self.tape.deferred.add(storage_key(tensor))
        return tensor

    def _record(self, func, args, kwargs, inputs, output, state: torch.Tensor | None = None) -> None:
        """Appends the op to the tape, its tensors as `Ref`s, if it makes or writes a storage.

        `state`: of the constructor's own generator before the op, if it draws from one.
        """
        outputs = tensors_in(output)
        before = {storage_key(tensor) for tensor in inputs}
        made = {storage_key(tensor) for tensor in outputs} - before
        written = set(made)
        written |= {storage_key(tensor) for tensor in written_tensors(func, args, kwargs)}
        # two storages that change places cannot be told apart by their ops
        if func.overloadpacket in _SWAPS:
            raise NotReplayable(f"the constructor swaps storages ({func})")
        if not written or _reshapes(func):
            return  # a view or a read: views are found again by size, stride and offset
        tape = self.tape
        tape.alive.extend(tensor.untyped_storage() for tensor in outputs)
        args, kwargs = replaced(torch.Tensor, ref_of, (args, kwargs))
        draws = is_random(func) and state is None
        tape.add(TapedOp(func, args, kwargs, [ref_of(t) for t in outputs], before, written, draws, state))


def write_from(tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
    """Writes the value that `read()` returns into a tensor: at once, or on replay if a constructor is being recorded.

    A tensor without values (meta, fake) gets none.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return
    if not _recording:
        _write(tensor, read)
        return
    with unrecorded():
        _recording[-1].write_from(tensor, read)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context whose ops do not go onto the tape of the constructor that is being recorded, if there is one."""
    if not _recording:
        yield
        return
    recorder, before = _recording[-1], _recording[-1].paused
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = before


@torch.no_grad()
def _write(tensor: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
    tensor.copy_(read())


def _laid_out(read: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return read().to(dtype).contiguous()


def _own_state(args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Returns the state of the generator passed in a call; None if none is, or if it is torch's default one.

    Raises `NotReplayable` for a generator on a device.
    """
    generator = _generator_in(args, kwargs)
    if generator is None or generator is torch.default_generator:
        return None
    if not on_host(generator.device):
        raise NotReplayable(f"the constructor draws from a generator on {generator.device}")
    return generator.get_state()


def _generator_in(args: tuple, kwargs: dict) -> torch.Generator | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)


def _unvouched(shape: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of this shape on address space for which the kernel reserves no memory."""
    pages = mmap.mmap(-1, shape.untyped_storage().nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    flat = torch.frombuffer(pages, dtype=shape.dtype)
    return flat.as_strided(shape.shape, shape.stride())


def _argument_names(func) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_SWAPS = (torch.ops.aten.resize_, torch.ops.aten.set_)


def _reshapes(func) -> bool:
    """Whether an op changes a tensor's shape in place, and none of its values."""
    return torch.Tag.inplace_view in func.tags and func.overloadpacket not in _SWAPS


_VALUE_READERS = {"numpy", "__array__", "tolist", "__dlpack__", "__reduce_ex__"}


class _Guard(TorchFunctionMode):
    """Function mode that refuses calls which read a tensor's memory without an op (`numpy()`)."""

    def __init__(self, tape: ConstructorTape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        # these copy or lend out the memory without an operation that the recorder would see
        if name in _VALUE_READERS:
            for tensor in tensors_in(args):
                self.tape.refuse_reading(tensor, f"{name}()")
        return func(*args, **(kwargs or {}))


def _unpinned(kwargs: dict) -> dict:
    return {"pin_memory": False} if kwargs.get("pin_memory") else {}


_recording: list[_Recorder] = []  # the recorders of builds under way, the innermost last


@contextmanager
def _initialisers(recorder: _Recorder) -> Iterator[None]:
    """Context in which the in-place functions of `torch.nn.init`, private ones included, are recorded as single ops.

    A library that the constructor imports may keep a replaced function for good, so this calls whichever recorder is
    innermost at the time, or the original function if there is none.
    """
    originals = {
        name: function
        for name, function in vars(torch.nn.init).items()
        # in-place functions end in "_"; without them (calculate_gain) nothing is written
        if name.endswith("_") and not name.endswith("__") and callable(function)
    }

    def recorded(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            # by the innermost build: a constructor may build another module within it
            return _recording[-1].initialise(function, args, kwargs) if _recording else function(*args, **kwargs)

        return call

    _recording.append(recorder)
    try:
        for name, function in originals.items():
            setattr(torch.nn.init, name, recorded(function))
        yield
    finally:
        _recording.pop()
        # put back whatever was raised, or the process would record for good
        for name, function in originals.items():
            setattr(torch.nn.init, name, function)
