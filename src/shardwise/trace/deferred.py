"""Build a module without its weights, and make each weight later from (seed, name), one at a time.

While the module's own constructor runs, large new tensors get address space but no values, and every op that makes or
changes a tensor is written onto a tape (`constructor_recorder`). Afterwards `value(name)` replays the ops that one
tensor depends on, at full size, each random op seeded by (seed, name of the first tensor that uses it, its index among
that tensor's random ops), so values depend neither on the layout nor on the order of the calls.

    constructor --ops--> tape: empty(4096,4096) . uniform_(-.01,.01) . empty(16) . fill_(1) ...
    value("fc.weight")   replays the two ops that wrote that storage

What this does not do: follow a constructor that reads the values of a large tensor, or data that never passes
through an op. `build` then makes the whole module for real and says so. A module that was there before the call
(`model=lambda: net`) is copied (trace/made_before), since a plan changes what it is given in place.

The idea is that of deferred initialisation in torchdistX.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import InputError, RefusedPlan, ShardwiseError, first_line
from shardwise.python_seeds import seed_python
from shardwise.task_names import is_own, where
from shardwise.trace.caches import forget_tables
from shardwise.trace.constructor_recorder import LARGE, recording
from shardwise.trace.double import as_written
from shardwise.trace.leaves import replaced, tensors_in
from shardwise.trace.made_before import copied, parameters_put, stand_ins
from shardwise.trace.tape import ConstructorTape, NotReplayable, Ref, bytes_of, ref_of, storage_key


def seed_of(*parts: object) -> int:
    """Returns a 63-bit seed from any printable parts, the same on every machine and Python."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Built:
    """A module whose large tensors may have no values yet, and `value(name)`, which makes those of one tensor.

    `value` takes the path of a parameter, buffer or tensor attribute. `notice` says why the module had to be built for
    real, with values; "" if it was not. `tape` is None in that case.
    """

    def __init__(self, module: nn.Module, seed: int, tape: ConstructorTape | None, notice: str = ""):
        self.module = module
        self.given = module  # what the constructor returned, where `module` is a copy
        self.seed = seed
        self.notice = notice
        self._tape = tape
        self._targets = dict(named_tensors(module))
        self._refs = {name: ref_of(tensor) for name, tensor in self._targets.items()} if tape else {}
        self._seeds: dict[int, int] = {}  # index of a random op on the tape -> its seed
        self.value_from: Callable[[str], torch.Tensor | None] | None = None  # name -> value from a checkpoint or None
        self.pairs: Collection[str] = ()  # names of complex parameters that the module holds as real (part/pairs)
        if tape is not None:
            self._check()
            self._assign_seeds()
            self._fill_unnamed(tape)

    def value(self, name: str) -> torch.Tensor:
        """Returns the unsharded tensor `name`: newly made on the CPU, or the module's own if it was built for real.

        A complex one in `pairs` is returned as real, with a last dim of 2. Raises `InputError` if `value_from` gives
        another shape.
        """
        value = self._value(name)
        return torch.view_as_real(value.resolve_conj()) if name in self.pairs and value.is_complex() else value

    def _value(self, name: str) -> torch.Tensor:
        """Returns what `value_from` gives, else the module's own tensor if it was built for real, else a replay."""
        value = self.value_from(name) if self.value_from is not None else None
        if value is not None:
            if value.shape != self._targets[name].shape:
                raise InputError(
                    f"the value given for '{name}' has shape {tuple(value.shape)}, but the model's has "
                    f"{tuple(self._targets[name].shape)}: it is another model's, or another configuration's"
                )
            return value
        if self._tape is None:
            return self._targets[name].detach()
        with as_written():
            return self._replay(self._refs[name])

    def drawn(self) -> tuple[list[str], int]:
        """Returns (names of parameters whose values come from no file, number of parameters whose values do).

        ([], 0) if no values come from a file, or if the module was built for real.
        """
        stored = self.stored()
        if not stored:
            return [], 0
        names = [name for name, target in self._targets.items() if isinstance(target, nn.Parameter)]
        return [name for name in names if name not in stored], len(stored)

    def stored(self) -> set[str]:
        """Returns the names of parameters whose values come at least partly from a file; none if built for real."""
        # asked first, as slices of the tape cost time for each parameter
        if self._tape is None or not any(op.stored for op in self._tape.ops):
            return set()
        ops, slice_ = self._tape.ops, self._tape.slice
        names = [name for name, target in self._targets.items() if isinstance(target, nn.Parameter)]
        return {name for name in names if any(ops[op].stored for op in slice_(self._refs[name].storage))}

    def fingerprint(self) -> int:
        """Returns a 64-bit hash of names, shapes, dtypes, captured constants and generator states, to compare ranks."""
        digest = xxhash.xxh3_64()  # fast: of a model that was made before, these are all its weights
        # in the order in which the constructor met them, equal on all ranks; their keys are addresses, which are not
        met = {} if self._tape is None else {key: place for place, key in enumerate(self._tape.constants)}
        for name, tensor in self._targets.items():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            if self._tape is None:
                continue
            if self._refs[name].storage in self._tape.constants:  # a tensor that the constructor met and did not make
                digest.update(self._tape.constants[self._refs[name].storage].numpy().data)
            for op in map(self._tape.ops.__getitem__, self._tape.slice(self._refs[name].storage)):
                for key in sorted(op.reads & met.keys(), key=met.__getitem__):
                    digest.update(self._tape.constants[key].numpy().data)
                digest.update(b"" if op.generator is None else op.generator.numpy().tobytes())
        return digest.intdigest()

    def set_apart(self) -> None:
        """Replaces `module` by a copy if any parameter of it existed before the constructor was called."""
        before = None if self._tape is None else self._tape.constants
        named = self._targets.items()
        # without a tape nothing tells which were there before the call, so all are copied
        tensors = [target for name, target in named if before is None or self._refs[name].storage in before]
        # a buffer alone may be shared: it is not trained
        if any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            with as_written():
                # with a tape large copies get no values here, since `value` makes them later
                self.module = copied(self.given, stand_ins(tensors, LARGE if before is not None else None))
            self._targets = dict(named_tensors(self.module))

    def _check(self) -> None:
        """Raises `NotReplayable` if the tape cannot make a named tensor; keeps the bytes of those that no op made."""
        tape = self._tape
        assert tape is not None
        for name, ref in self._refs.items():
            if ref.storage in tape.writers or ref.storage in tape.constants:
                # the tape makes it if each input of its ops was made on the tape or has its bytes kept
                if not tape.lacks(ref.storage):
                    continue
            elif self._targets[name].device.type != "meta":
                # no operation on the tape met it: data from outside (test_data_from_outside_is_kept)
                tape.constants[ref.storage] = bytes_of(self._targets[name])
                continue
            raise NotReplayable(f"'{name}' was not made by recorded operations")

    def _assign_seeds(self) -> None:
        """Seeds each random op by the first named tensor that depends on it and the op's index among that tensor's."""
        assert self._tape is not None
        for name, ref in self._refs.items():
            drawn = [op for op in self._tape.slice(ref.storage) if self._tape.ops[op].random]
            for place, op in enumerate(drawn):
                # the first name decides: a weight that is derived from another one replays the other's draws
                self._seeds.setdefault(op, seed_of("init", self.seed, name, place))

    @torch.no_grad()
    def _fill_unnamed(self, tape: ConstructorTape) -> None:
        """Makes in place the values of deferred tensors that outlive the constructor but have no name.

        Lists and dicts of a module, modules hidden in them, closures and tables of a file's own keep such tensors.
        """
        from shardwise.trace.stand_in import tensors_beside  # which reads this module's names of tensors

        named = {ref.storage for ref in self._refs.values()}
        # an unnamed view of a named tensor is filled here too, since `value` returns other memory
        if named & tape.deferred:
            targets = {id(tensor) for tensor in self._targets.values()}
            beside = [tensor for *_, tensor in tensors_beside(self.module) if id(tensor) not in targets]
            named -= {storage_key(tensor) for tensor in beside if tensor.layout is torch.strided}
        if not tape.outliving(named):
            return
        gc.collect()  # tensors that only a reference cycle keeps alive need no values
        for place, storage in enumerate(tape.outliving(named)):
            key, whole = storage._cdata, torch.empty(0, dtype=torch.uint8).set_(storage)
            # a tensor that came from elsewhere cannot be made again
            if tape.lacks(key):
                raise NotReplayable("a tensor outside the module's tables was not made by recorded operations")
            # it has no name to be seeded by: its place among such tensors stands for one
            for draw in (op for op in tape.slice(key) if tape.ops[op].random):
                self._seeds.setdefault(draw, seed_of("init", self.seed, "unnamed", place, draw))
            with as_written():
                whole.copy_(self._replay(ref_of(whole)))

    @torch.no_grad()
    def _replay(self, target: Ref) -> torch.Tensor:
        """Returns the tensor `target` by running, on the CPU, the ops of the tape that its storage depends on."""
        tape = self._tape
        assert tape is not None
        storages: dict[int, torch.UntypedStorage] = {}

        def tensor_of(ref: Ref) -> torch.Tensor:
            if ref.storage not in storages:
                # a copy, since operations of the replay may write into it
                storages[ref.storage] = tape.constants[ref.storage].clone().untyped_storage()
            empty = torch.empty(0, dtype=ref.dtype)
            return empty.set_(storages[ref.storage], ref.offset, ref.size, ref.stride)

        with torch.random.fork_rng(devices=[]):
            slice_ = tape.slice(target.storage)
            for index in slice_:
                op = tape.ops[index]
                if op.random:
                    torch.default_generator.manual_seed(self._seeds[index])  # values are made on the CPU
                generator = torch.default_generator
                if op.generator is not None:
                    generator = torch.Generator()
                    generator.set_state(op.generator)
                args, kwargs = _drawing_from(generator, replaced(Ref, tensor_of, (op.args, op.kwargs)))
                # whatever device the constructor asked for
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                output = op.func(*args, **kwargs)
                for ref, result in zip(op.outputs, tensors_in(output) if op.outputs else (), strict=True):
                    if op.whole:
                        # copied unless it is the last op, since a later one might write into a file's memory
                        alone = index == slice_[-1] and result.untyped_storage().nbytes() == result.nbytes
                        storages[ref.storage] = (result if alone else result.clone()).untyped_storage()
                    # an operation in place gives a storage that is there already
                    storages.setdefault(ref.storage, result.untyped_storage())
        return tensor_of(target)


def _drawing_from(generator: torch.Generator, arguments: Any) -> Any:
    """Returns the tree `arguments` with each generator that the constructor gave replaced by `generator`."""
    return replaced(torch.Generator, lambda _: generator, arguments)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (path, tensor) of parameters, buffers and tensor attributes; a tied weight once, by its first name."""
    seen: set[int] = set()
    for path, child in module.named_modules():
        # a constructor may keep a tensor as a plain attribute, which is no buffer
        plain = {k: v for k, v in vars(child).items() if isinstance(v, torch.Tensor)}
        for table in (child._parameters, child._buffers, plain):
            for leaf, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"{path}.{leaf}" if path else leaf), tensor


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed_of("build", seed))
    seed_python(seed_of("build", seed))


def build(model: Callable[[], nn.Module], seed: int, *, own: bool = True) -> Built:
    """Returns the module with large tensors deferred, or built for real, with a notice, if it cannot be replayed.

    own     whether a module whose weights existed before the call is copied; False if a script's is to change itself
    Raises `InputError` if the constructor fails by itself, in one process without shardwise, and as `checked` does.
    """
    tape = ConstructorTape()
    try:
        _seed_everything(seed)
        with as_written(), recording(tape):
            module = checked(model())
        forget_tables(module)  # what a function cached inside has no values
        built = Built(module, seed, tape)
        if own:
            built.set_apart()
        return built
    except ShardwiseError:
        raise
    except Exception as error:
        reason = first_line(error)
    return build_for_real(model, seed, reason, own=own)


def build_for_real(model: Callable[[], nn.Module], seed: int, reason: str, *, own: bool = True) -> Built:
    """Returns the module with all weights made here; the engine then broadcasts rank 0's, one by one.

    reason  why it is not deferred, for the notice;  own  and what is raised: as in `build`
    """
    _seed_everything(seed)
    try:
        with as_written(), parameters_put() as new:
            module = checked(model())
        forget_tables(module)  # the recorded attempt before may have left tensors without values in caches
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
    built = Built(module, seed, None, notice)
    # a parameter that was there before the call belongs to others too: the module becomes a copy
    if own and not all(id(param) in new for param in module.parameters()):
        built.set_apart()
    return built


def told_of_constructor(error: BaseException) -> str:
    """Returns the message for an error in a constructor: its text and place, and advice for known causes.

    Known are a device or memory that is lacking, torch's own parallel wrappers, and a constructor that takes arguments.
    """
    text, frames = where(error, own_alone=True), traceback.extract_tb(error.__traceback__)
    # user code that places the module itself
    if of_a_device(error):
        return f"{text.rstrip('.')}. {LEAVE_OUT}"
    # an allocation that failed, whose bytes torch's message has
    if asked := re.search(r"you tried to allocate (\d+) bytes", str(error)):
        return f"{text}: one tensor of {int(asked[1]) / 2**30:,.0f} GiB: make the sizes of the model smaller"
    if any("torch/nn/parallel/" in frame.filename or "torch/distributed/" in frame.filename for frame in frames):
        return f"{text.rstrip('.')}. {_PLAIN}"
    # a class whose constructor takes arguments: no line of the user's code has run
    if isinstance(error, TypeError) and "missing" in text and not any(is_own(frame.filename) for frame in frames):
        return f"{text}. Task.model is called with nothing: give a function that builds it, as lambda: Net(8)"
    return text


LEAVE_OUT = "Leave .cuda() and device= out: each rank places the module and its batch on its own device"


def of_a_device(error: BaseException) -> bool:
    """Whether the error comes from code that names a device which this build of torch lacks."""
    lazily = any(frame.name == "_lazy_init" for frame in traceback.extract_tb(error.__traceback__))
    return lazily or "PyTorch is not linked with support for" in str(error)  # the second of fake tensors


_PLAIN = "Give the plain module: the plan spreads it"


def refuse_compiled(module: nn.Module) -> None:
    """Raises `InputError` if a task's model is the result of torch.compile or torch.jit."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        by = "torch.jit" if isinstance(module, torch.jit.ScriptModule) else "torch.compile"
        raise InputError(f"Task.model returned what {by} made. {_PLAIN}, and compile=true of a plan compiles it")


def checked(module: Any) -> nn.Module:
    """Returns the constructor's result if a plan can take it: a plain module whose weights have shapes.

    Raises `InputError` if it is no module or a data-parallel wrapper, `RefusedPlan` for weights without a shape.
    """
    if not isinstance(module, nn.Module):
        got = type(module).__name__
        if inspect.isclass(module):
            got = f"the class {module.__name__}: call it, {module.__name__}()"
        raise InputError(f"Task.model must return an nn.Module, got {got}")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"Task.model returned a {type(module).__name__}. {_PLAIN}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise RefusedPlan(
                f"'{name}' ({kind}) has no shape before a first forward, and weights are dealt before there is one: "
                "call the module on a sample where it is made (model = Net(); model(x)), or give the layer the size of "
                "its input"
            )
    return module
