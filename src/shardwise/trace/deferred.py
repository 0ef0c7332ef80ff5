"""Build a module without its weights, and make each weight later from (seed, name), one at a time.

While the module's own constructor runs, a dispatch mode gives large new tensors address space but no values (their
pages are never touched) and writes every op that makes or changes a tensor onto a tape. Small tensors stay real, so
constructors that read values (`linspace(...).tolist()`) work. Afterwards `value(name)` replays the ops that one
tensor depends on, at full size, each random draw seeded by (seed, name of the first tensor that uses it, its place),
so values depend neither on the layout nor on the order in which they are asked for.

    constructor --ops--> tape: empty(4096,4096) . uniform_(-.01,.01) . empty(16) . fill_(1) ...
    value("fc.weight")   replays the two ops that wrote that storage

What this does not do: follow a constructor that reads the values of a large tensor, or data that never passes
through an op. `build` then makes the whole module for real and says so.

The idea is that of deferred initialisation in torchdistX.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.device import on_host
from shardwise.errors import InputError, ShardwiseError
from shardwise.task_names import where
from shardwise.trace.double import as_written
from shardwise.trace.leaves import replaced, tensors_in
from shardwise.trace.tape import ConstructorTape, NotReplayable, Ref, TapedOp, ref_of, storage_key

MAP_NORESERVE = 0x4000  # of Linux; Python's mmap names it from 3.13 on
LARGE = 4096  # elements from which a new tensor gets no values


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any printable parts; the same on every machine and Python."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: ConstructorTape):
        super().__init__()
        self.tape = tape
        self.paused = False

    def initialise(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Record a call of one of `torch.nn.init`'s functions as a single op.

        Some of them loop until a random draw is accepted; op by op, such a loop cannot be replayed.
        """
        first = next((tensor for tensor in tensors_in((args, kwargs))), None)
        if self.paused or first is None:
            return function(*args, **kwargs)
        self._meet(first)
        state = _own_state(args, kwargs)
        result: Any = first
        self.paused = True
        try:
            if storage_key(first) not in self.tape.deferred:
                result = function(*args, **kwargs)
            elif state is not None:
                self._advance(function, args, kwargs)
        finally:
            self.paused = False
        key = storage_key(first)
        refs, named = replaced(torch.Tensor, ref_of, (args, kwargs))
        self.tape.add(TapedOp(function, refs, named, [], {key}, {key}, random=state is None, generator=state))
        return result

    def _advance(self, function: Callable, args: tuple, kwargs: dict) -> None:
        """Draw from the constructor's own generator as the call would, into tensors that are dropped."""

        def scratch(tensor: torch.Tensor) -> torch.Tensor:
            return (
                torch.zeros(tensor.shape, dtype=tensor.dtype) if storage_key(tensor) in self.tape.deferred else tensor
            )

        args, kwargs = replaced(torch.Tensor, scratch, (args, kwargs))
        function(*args, **kwargs)

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
        """An op that draws from a generator of the constructor's own, which must move on as it would by itself."""
        if any(storage_key(tensor) in self.tape.deferred for tensor in inputs):
            self._advance(func, args, kwargs)
            return self._defer(func, args, {**kwargs, "generator": None} if "generator" in kwargs else kwargs)
        output = func(*args, **kwargs)
        large = isinstance(output, torch.Tensor) and output.numel() >= LARGE and not func._schema.is_mutable
        return self._unfilled(output) if large else output

    def _meet(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        tape = self.tape
        if key in tape.writers or key in tape.constants or key in tape.lost:
            return
        tape.alive.append(tensor.untyped_storage())
        if tensor.device.type == "meta":
            tape.lost.add(key)
        else:
            tape.constants[key] = _bytes_of(tensor)

    def _execute(self, func, args, kwargs, inputs):
        if "device" in _argument_names(func) and torch.device(kwargs.get("device") or "cpu").type != "meta":
            kwargs = {**kwargs, "device": torch.device("cpu"), **_unpinned(kwargs)}
        if any(storage_key(tensor) in self.tape.deferred for tensor in inputs):
            return self._defer(func, args, kwargs)
        if inputs or "device" not in _argument_names(func):
            return func(*args, **kwargs)
        without = {"generator": None} if "generator" in kwargs else {}
        shape = func(*args, **{**kwargs, "device": torch.device("meta"), **without})
        if isinstance(shape, torch.Tensor) and shape.numel() >= LARGE:
            return self._unfilled(shape)
        return func(*args, **kwargs)

    def _defer(self, func, args, kwargs):
        """The op on tensors without values: a view for real, a write not at all, anything else by shape."""
        returned = func._schema.returns
        if returned and all(r.alias_info is not None and not r.alias_info.is_write for r in returned):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs):
                self.tape.deferred.add(storage_key(tensor))
            written = tuple(written_tensors(func, args, kwargs))
            return written[0] if len(returned) == 1 else written if returned else None
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        args, kwargs = replaced(torch.Tensor, _as_meta, (args, kwargs))
        return replaced(torch.Tensor, self._unfilled, func(*args, **kwargs))

    def _unfilled(self, shape: torch.Tensor) -> torch.Tensor:
        """Address space without values: the pages are never touched, so they take no memory."""
        try:
            tensor = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        except RuntimeError:  # more than this machine has, and Linux was asked to vouch for it
            tensor = _unvouched(shape)
        self.tape.deferred.add(storage_key(tensor))
        return tensor

    def _record(self, func, args, kwargs, inputs, output, state: torch.Tensor | None = None) -> None:
        outputs = tensors_in(output)
        before = {storage_key(tensor) for tensor in inputs}
        made = {storage_key(tensor) for tensor in outputs} - before
        written = set(made)
        written |= {storage_key(tensor) for tensor in written_tensors(func, args, kwargs)}
        if not written:
            return  # a view or a read: views are found again by size, stride and offset
        if func.overloadpacket in (torch.ops.aten.resize_, torch.ops.aten.set_):
            raise NotReplayable(f"the constructor swaps storages ({func})")
        tape = self.tape
        tape.alive.extend(tensor.untyped_storage() for tensor in outputs)
        args, kwargs = replaced(torch.Tensor, ref_of, (args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags and state is None
        tape.add(TapedOp(func, args, kwargs, [ref_of(t) for t in outputs], before, written, is_random, state))


def _own_state(args: tuple, kwargs: dict) -> torch.Tensor | None:
    """The state of the generator that a call is given, unless it is torch's own."""
    generator = _generator_in(args, kwargs)
    if generator is None or generator is torch.default_generator:
        return None
    if not on_host(generator.device):
        raise NotReplayable(f"the constructor draws from a generator on {generator.device}")
    return generator.get_state()


def _generator_in(args: tuple, kwargs: dict) -> torch.Generator | None:
    return next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)), None)


def _unvouched(shape: torch.Tensor) -> torch.Tensor:
    """Address space for a tensor that no memory may stand behind."""
    pages = mmap.mmap(-1, shape.untyped_storage().nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    flat = torch.frombuffer(pages, dtype=shape.dtype)
    return flat.as_strided(shape.shape, shape.stride())


def _argument_names(func) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


def written_tensors(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Tensors that the op's schema says it writes."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_VALUE_READERS = {"numpy", "__array__", "tolist", "__dlpack__", "__reduce_ex__"}


class _Guard(TorchFunctionMode):
    """Refuses what reads a tensor's memory without passing through an op."""

    def __init__(self, tape: ConstructorTape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _VALUE_READERS:
            for tensor in tensors_in(args):
                self.tape.refuse_reading(tensor, f"{name}()")
        return func(*args, **(kwargs or {}))


def _unpinned(kwargs: dict) -> dict:
    return {"pin_memory": False} if kwargs.get("pin_memory") else {}


class Built:
    """A module together with the way to make its values.

    `module` may hold tensors without values; `value(name)` gives the full tensor of a parameter, buffer or tensor
    attribute on the CPU. `notice` says why, where the module had to be built for real.
    """

    def __init__(self, module: nn.Module, seed: int, tape: ConstructorTape | None, notice: str = ""):
        self.module = module
        self.seed = seed
        self.notice = notice
        self._tape = tape
        self._targets = dict(named_tensors(module))
        self._refs = {name: ref_of(tensor) for name, tensor in self._targets.items()} if tape else {}
        self._seeds: dict[int, int] = {}
        self.given: Callable[[str], torch.Tensor | None] | None = None  # values from elsewhere (a checkpoint)
        if tape is not None:
            self._check()
            self._assign_seeds()

    def value(self, name: str) -> torch.Tensor:
        """The full tensor on the CPU, newly made (a reference to the real one when nothing was deferred)."""
        found = self.given(name) if self.given is not None else None
        if found is not None:
            if found.shape != self._targets[name].shape:
                raise InputError(
                    f"the value given for '{name}' has shape {tuple(found.shape)}, but the model's has "
                    f"{tuple(self._targets[name].shape)}: it is another model's, or another configuration's"
                )
            return found
        if self._tape is None:
            return self._targets[name].detach()
        with as_written():
            return self._replay(self._refs[name])

    def fingerprint(self) -> int:
        """A number that is equal where names, shapes and captured constants are equal."""
        digest = xxhash.xxh3_64()  # fast: of a model that was made before, these are all its weights
        # by when the constructor met them, which is the same everywhere; their keys are addresses
        met = {} if self._tape is None else {key: place for place, key in enumerate(self._tape.constants)}
        for name, tensor in self._targets.items():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            if self._tape is None:
                continue
            if self._refs[name].storage in self._tape.constants:  # that a constructor returns as it found it
                digest.update(self._tape.constants[self._refs[name].storage].numpy().data)
            for op in map(self._tape.ops.__getitem__, self._tape.slice(self._refs[name].storage)):
                for key in sorted(op.reads & met.keys(), key=met.__getitem__):
                    digest.update(self._tape.constants[key].numpy().data)
                digest.update(b"" if op.generator is None else op.generator.numpy().tobytes())
        return digest.intdigest()

    def _check(self) -> None:
        tape = self._tape
        assert tape is not None
        for name, ref in self._refs.items():
            if ref.storage in tape.writers or ref.storage in tape.constants:
                if not tape.lacks(ref.storage):
                    continue
            elif self._targets[name].device.type != "meta":
                tape.constants[ref.storage] = _bytes_of(self._targets[name])
                continue
            raise NotReplayable(f"'{name}' was not made by recorded operations")

    def _assign_seeds(self) -> None:
        assert self._tape is not None
        for name, ref in self._refs.items():
            drawn = [op for op in self._tape.slice(ref.storage) if self._tape.ops[op].random]
            for place, op in enumerate(drawn):
                self._seeds.setdefault(op, seed_of("init", self.seed, name, place))

    @torch.no_grad()
    def _replay(self, target: Ref) -> torch.Tensor:
        tape = self._tape
        assert tape is not None
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor_of(ref: Ref) -> torch.Tensor:
            if ref.storage not in storages:
                storages[ref.storage] = tape.constants[ref.storage].clone().untyped_storage()
            empty = torch.empty(0, dtype=ref.dtype)
            return empty.set_(storages[ref.storage], ref.offset, ref.size, ref.stride)

        with torch.random.fork_rng(devices=[]):
            for index in tape.slice(target.storage):
                op = tape.ops[index]
                if op.random:
                    torch.default_generator.manual_seed(self._seeds[index])  # values are made on the CPU
                generator = torch.default_generator
                if op.generator is not None:
                    generator = torch.Generator()
                    generator.set_state(op.generator)
                args, kwargs = _drawing_from(generator, replaced(Ref, tensor_of, (op.args, op.kwargs)))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                output = op.func(*args, **kwargs)
                for ref, result in zip(op.outputs, tensors_in(output) if op.outputs else (), strict=True):
                    storages.setdefault(ref.storage, result.untyped_storage())
        return tensor_of(target)


def _drawing_from(generator: torch.Generator, arguments: Any) -> Any:
    """The arguments with this generator in place of those that a constructor gave."""
    return replaced(torch.Generator, lambda _: generator, arguments)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage().cpu()).clone()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and plain tensor attributes, each object once, by its path."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, torch.Tensor)}
        for table in (child._parameters, child._buffers, plain):
            for leaf, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{path}.{leaf}" if path else leaf), tensor


_recording: list[_Recorder] = []  # the recorders of builds under way, the innermost last


@contextmanager
def _initialisers(recorder: _Recorder) -> Iterator[None]:
    """Every in-place function of `torch.nn.init`, private helpers included, goes through the recorder.

    A library that the constructor imports may keep what it finds there for good: that leads to the recorder of the
    build that runs, and to the function itself where none does.
    """
    originals = {
        name: function
        for name, function in vars(torch.nn.init).items()
        if name.endswith("_") and not name.endswith("__") and callable(function)
    }

    def recorded(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            return _recording[-1].initialise(function, args, kwargs) if _recording else function(*args, **kwargs)

        return call

    _recording.append(recorder)
    try:
        for name, function in originals.items():
            setattr(torch.nn.init, name, recorded(function))
        yield
    finally:
        _recording.pop()
        for name, function in originals.items():
            setattr(torch.nn.init, name, function)


def _seed_everything(seed: int) -> None:
    import numpy

    torch.manual_seed(seed_of("build", seed))
    random.seed(seed_of("build", seed))
    numpy.random.seed(seed_of("build", seed) % 2**32)


def build(model: Callable[[], nn.Module], seed: int) -> Built:
    """Run the constructor with large tensors deferred; for real, with a notice, when it cannot be replayed.

    Raises `InputError` when the constructor fails by itself, in one process without shardwise.
    """
    tape = ConstructorTape()
    try:
        _seed_everything(seed)
        recorder = _Recorder(tape)
        with as_written(), _Guard(tape), recorder, _initialisers(recorder):
            module = model()
        return Built(checked(module), seed, tape)
    except ShardwiseError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return build_for_real(model, seed, reason)


def build_for_real(model: Callable[[], nn.Module], seed: int, reason: str) -> Built:
    """Build every weight here; the engine then hands rank 0's to all ranks, one by one."""
    _seed_everything(seed)
    try:
        with as_written():
            module = checked(model())
    except ShardwiseError:
        raise
    except Exception as error:
        alone = "on a rank" if dist.is_available() and dist.is_initialized() else "in one process too"
        raise InputError(
            f"the model's constructor fails {alone}, before anything is split: {told_of_constructor(error)}"
        ) from error
    notice = (
        f"the module's initialisation cannot be replayed ({reason}): it is built whole on every rank and "
        "rank 0's weights are handed out one by one"
    )
    return Built(module, seed, None, notice)


def told_of_constructor(error: BaseException) -> str:
    """What a constructor raised and where; and what to leave out of one that chooses a device or spreads the model."""
    told, frames = where(error, own_alone=True), traceback.extract_tb(error.__traceback__)
    if any(frame.name == "_lazy_init" for frame in frames):
        return f"{told.rstrip('.')}. Leave .cuda() and device= out: each rank places the module on its own device"
    if any("torch/nn/parallel/" in frame.filename or "torch/distributed/" in frame.filename for frame in frames):
        return f"{told.rstrip('.')}. {_PLAIN}"
    return told


_PLAIN = "Give the plain module: the plan spreads it"


def checked(module: Any) -> nn.Module:
    """What a constructor gave; `InputError` where it is no module, or has weights without a shape."""
    if not isinstance(module, nn.Module):
        raise InputError(f"Task.model must return an nn.Module, got {type(module).__name__}")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"Task.model returned a {type(module).__name__}. {_PLAIN}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise InputError(
                f"'{name}' ({kind}) has no shape before a first forward, and weights are dealt before there is one: "
                "give the layer the size of its input"
            )
    return module
