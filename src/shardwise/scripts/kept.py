"""Compare over ranks what a script keeps from one step and computes a later loss from (queues, running means).

    centers, queue, baseline        made of this rank's samples in one step
             |
    loss of a later step            enters beside the batch and the model's outputs: compared over ranks

Between a batch and its backward, each tensor and number that enters the script's operations and was not made of the
batch, of draws or of the model's outputs comes from outside. Those that the loss is computed from are compared by a
digest, which goes with the step's other numbers. Constants, frozen teachers, averages of weights and what was summed
over ranks are alike; centers of classes, queues and running means of a rank's own samples are not.

A recurrent model's state goes on with its samples: rows that the model gave and is given again are left alone. Numbers
that may be of this batch (something was read by `.item()` before, ranks have unequal parts, a batch is no tensors) are
not compared, since nothing tells them from what was kept.

What the model keeps in attributes of its own is found in its forwards (`carried`); its buffers are compared, `moved`.

What this does not do: see what is alike on all ranks and another than one process's (a count of samples).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from shardwise.device import generators
from shardwise.errors import InputError
from shardwise.layout.dealing import Share
from shardwise.mesh import Mesh
from shardwise.scripts import draws, tape
from shardwise.scripts.all_samples import AllSamples, scaled, takes_statistics
from shardwise.scripts.batches import Handed
from shardwise.scripts.carried import Carried
from shardwise.scripts.following import may_draw, put_on, take_off
from shardwise.scripts.guard import parameters_of, reads_values
from shardwise.scripts.loader import Events
from shardwise.scripts.origins import Origin, Origins
from shardwise.scripts.outside import AHEAD, Digests, Outside, digest, has_memory, held_of, number_of, with_line
from shardwise.scripts.own_numbers import OwnNumbers, Steered
from shardwise.scripts.rows import (
    FAILURES,
    HELD_OUT,
    OTHER_ROWS,
    UNCOUNTED,
    fails_on_part,
    in_a_forward,
    is_array,
    is_plain,
    refuse_drawn,
    stand_of_generators,
    told_of,
)
from shardwise.scripts.saying import Notices, is_called_by_engine, line_of_script
from shardwise.scripts.tape import tensors_in, writes
from shardwise.trace.drawn import overwrites
from shardwise.trace.functional import transforming

_COUNTS = {"__len__", "numel", "nelement", "ndimension", "__format__", "__repr__", "__str__"}  # no elements in them
_PASSAGES = (__file__, *(str(module.__file__) for module in (draws, tape)))
_NOTHING: Any = lambda: None  # noqa: E731


class Kept(Origins, TorchFunctionMode, Events):
    """Follows a loop from its batches to its losses. One for all models of the loop."""

    def __init__(self, mesh: Mesh, told: Notices) -> None:
        Origins.__init__(self)
        TorchFunctionMode.__init__(self)
        self._mesh = mesh
        self.on = False  # between a batch and the next
        self.after = False  # its backward is over
        self.dealing: Callable[[Handed], AbstractContextManager[Any]] = lambda of: nullcontext()
        self.draws_again: Callable[[], bool] = lambda: False  # where the script has drawn for samples before
        self.draws_of: Handed | None = None  # whose samples the operation under way is given
        self.drawn_for: Handed | None = None  # whose samples numbers were drawn for by their count alone
        self.draws_for: set[bool] = set()  # whether what the operation under way is given is another loader's
        self.beside: Share | None = None  # held of another loader's batch (`Prepared.split`), in a loop over it
        self.inside = 0  # the model's own forward, how deep
        self._entered = False
        self._usual = 0  # samples that this rank held of the first batch, once it is the one before
        self._others: dict[int, weakref.ref[torch.Tensor]] = {}  # of other loaders' batches
        self._given: list[tuple[StorageWeakRef, int, Share]] = []  # what models gave, and for which samples
        self._digests = Digests()
        self._weights: set[int] = set()  # storages of the parameters
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._tensors_alone = self._even = True
        self._transformed = False  # a transform of torch.func, in which operations are not followed, ran in this step
        self.steered = Steered(told)
        self._read = False  # a number was read from this rank's samples
        self._held, self._dim, self._generators = Share(None, 0, 0, 0), 0, 0
        self.shapes: list[list[int]] = []  # of the tensors of the batch at hand
        self.numbers, self.all_samples, self._carried = OwnNumbers(told), AllSamples(mesh), Carried(_PASSAGES)
        self._call = Origin(_NOTHING, True, frozenset())  # what the model's outputs are to be taken for

    # --- the loop

    def begin(self, handed: Handed, *, models: Iterable[torch.nn.Module], fresh: bool) -> None:
        """Begin to follow what is made of a batch, of which this rank holds `dealt.held`; `fresh`: just handed out."""
        dealt = handed.dealt
        if self._entered:
            self.numbers.end()
        self.numbers.begin(dealt, fresh=fresh)
        self.all_samples.begin(dealt)
        self._usual = self._usual or self._held.count
        self._turn_to(handed)
        self.following = self.expected = None
        self._given = [pair for pair in self._given if not pair[0].expired()]
        self._digests.forget()
        models = list(models)
        self._models = [weakref.ref(model) for model in models]
        weights = [one for model in models for one in parameters_of(model)]
        self._parameters = {id(one): weakref.ref(one) for one in weights}
        self._weights = {one.untyped_storage()._cdata for one in weights}
        self._tensors_alone, self._dim = handed.tensors_alone, handed.dim or 0
        self._even, self._read, self._held = dealt.even, False, dealt.held
        self.shapes = handed.shapes
        self._generators, self._transformed = stand_of_generators(), False

    def begin_again(self) -> None:
        """The batch at hand is trained on in another step: what was made in the last one is kept, but for rows."""
        self._keep(lambda _, one: not (one.stays or self._counts(one.shape, self._held)))

    def go_in(self, *, after: bool) -> None:
        """Follow operations from here on; `after` the backward, as the script's own."""
        self.after, self.inside = after, 0
        put_on(self)
        self._entered = self.on = True

    def go_out(self) -> None:
        """Stop following operations while the loader reads, and print which numbers were read."""
        self.on, self.after, self.inside = False, False, 0
        if self._entered:
            self._entered = False
            take_off(self)
            self.numbers.end()

    def pause(self) -> None:
        """Stop following operations while the engine runs the model for itself."""
        self.on = False

    def go_on(self) -> None:
        """Follow operations again where a batch is at hand: the script computes."""
        self.on = self._entered

    def before_batch(self, batch: Any, dealt: Any, checksum: int, dim: int | None) -> None:
        """Note another loader's part of a batch (`Prepared.split`), whose samples are this rank's too."""
        self._others = {key: known for key, known in self._others.items() if known() is not None}
        self._others |= {id(tensor): weakref.ref(tensor) for tensor in tensors_in(batch)}
        self.numbers.counts_others()
        self.all_samples.begin_beside(dealt)
        self.beside = dealt.held

    def after_epoch(self) -> None:
        """Called when the loop over another loader (`Prepared.split`) has ended."""
        self.beside = None

    # --- the model's calls

    def enter(self, call: Any, model: torch.nn.Module) -> frozenset[Outside]:
        """Note that a forward begins; returns what of its arguments is from outside, beside its own samples' rows."""
        if not self.on:
            return frozenset()
        given, trains = tensors_in(call), model.training and torch.is_grad_enabled()
        batch = self._now if trains else self.batch_of(call) or self._now
        for tensor in given:
            self._refuse_other_rows(tensor, model)
        if batch is not None:
            batch.met = True
        made = [self._of(tensor) for tensor in given]
        made = [self._beside(one, tensor, batch) for one, tensor in zip(made, given, strict=True)]
        found = frozenset(one for each in made for one in each.of | each.read)
        own, beside = trains or any(one.own for one in made), any(one.beside for one in made)
        self.draws_for = {one.beside for one in made if one.own}
        if trains:
            self._refuse_undealt(given, self._held.count)
            self._carried.begin(model, lambda one: self._known(one) is not None)
        self._call = Origin(_NOTHING, own, frozenset(), beside=beside, batch=batch)
        self.inside += 1
        return frozenset(one for one in found if one.model != id(model) or not self._counts(one.shape, self._held))

    def refuse_held_out(self) -> None:
        """Raise `InputError` for a forward in training in a loop over another loader's batches alone."""
        if self.beside is not None and not self._entered:
            raise InputError(HELD_OUT)

    def leave(self, output: Any, of: frozenset[Outside], model: torch.nn.Module) -> None:
        """Called when a model's forward has ended: notes whose samples its outputs are of."""
        if self.on:
            self.inside -= 1
            of |= self._carried.end()
            for tensor in tensors_in(output):
                self._add(tensor, self._call.own, of, beside=self._call.beside, batch=self._call.batch)
                if has_memory(held_of(tensor)):
                    self._given.append((StorageWeakRef(held_of(tensor).untyped_storage()), id(model), self._held))

    def entered(self, loss: torch.Tensor) -> frozenset[Outside]:
        """Returns what `loss` was computed from besides this step's batch, draws and model outputs."""
        found = self._made.get(id(loss))
        return found.of if found is not None and found.tensor() is loss else frozenset()

    def of_this_batch(self, value: Any) -> bool:
        """Whether a tensor or number is known to be of this rank's samples of the batch at hand, and no others."""
        if not isinstance(value, torch.Tensor):
            return self.on and self.numbers.has(value)
        found = self._made.get(id(value))
        return self.on and found is not None and found.tensor() is value and found.fresh

    def goes_beside(self) -> bool:
        """Whether the loop is over another loader's batches too."""
        return bool(self._others)

    def is_of_other(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is known to be of another loader's batch."""
        known, other = self._made.get(id(tensor)), self._others.get(id(tensor))
        found = known is not None and known.tensor() is tensor and known.beside
        return found or (other is not None and other() is tensor)

    def refuse_uncounted(self, loss: torch.Tensor) -> None:
        """Raise `InputError` where a rank without samples of the main batch has a loss of another loader's."""
        if self.beside is not None and self.is_of_other(loss):
            raise InputError(UNCOUNTED.format(self._held.total))

    # --- operations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.on:
            return func(*args, **kwargs)
        if transforming():
            self._transformed = True
            return func(*args, **kwargs)
        if self.inside:
            return self._within(func, args, kwargs)
        if not reads_values(func):
            return self._about_gradients(func, args, kwargs)
        if is_called_by_engine(*_PASSAGES):
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if self.after and not self._is_for_next(given):
            return self._afterwards(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if overwrites(name) and args and isinstance(args[0], torch.Tensor):
            given = given[1:]  # what it held is gone
        made = [self._of(tensor) for tensor in given]
        batch = self._batch(made)
        made = [self._beside(one, tensor, batch) for one, tensor in zip(made, given, strict=True)]
        self.draws_for, self.draws_of = {one.beside for one in made if one.own}, batch
        self._refuse_arrays([len(value) for value in (*args, *kwargs.values()) if is_plain(value, name)])
        numbers = [value for value in (*args, *kwargs.values()) if isinstance(value, float)]
        own = any(one.own for one in made)
        if own:
            self._refuse_undealt(given, self._held.count)
        of = frozenset[Outside]().union(*(one.of for one in made), self._numbers(numbers))
        stood = None if given else generators(self._mesh.device)
        beside = any(one.beside for one in made)
        try:
            if func is torch.autograd.grad and in_a_forward(self._models):
                output = func(*args, **kwargs)  # what it gives for a sample is that sample's
            else:
                output = self.all_samples.call(func, args, kwargs, own=lambda one: self._of(one).own, beside=beside)
        except FAILURES as error:
            if own and self._held.count < self._held.total and self._held.count != self._usual:
                raise fails_on_part(error, self._held) from error
            raise
        results = tensors_in(output)
        if not results and output is not None and name not in _COUNTS and not isinstance(output, bool):
            self._read |= own  # a branch alone (the checks of a distribution's arguments) makes no number
        since = any(one.since for one in made)
        read = frozenset[Outside]().union(*(one.read for one in made), self._numbers_read(numbers))
        self._tell_own(name, output, made)
        if stood is not None:
            own, of = self._from_nowhere(results, args, kwargs, drawn=stood != generators(self._mesh.device))
            batch, self.drawn_for = self.drawn_for or self.following, None
        if writes(name) and args and isinstance(args[0], torch.Tensor):
            results.append(args[0])
        for tensor in results:
            self._add(tensor, own, of, since=since, beside=beside, read=read, batch=batch, written=writes(name))
        if self._undealt and not own:
            self._note_undealt(given, results, self._held, drawn=False)
        self.draws_of = None
        return output

    def _beside(self, made: Origin, tensor: torch.Tensor, batch: Handed | None) -> Origin:
        """What is known of a tensor among others, of which the last batch's are of this batch."""
        if batch is None or made.batch is None or made.batch is batch or not made.own:
            return made
        if made.stays and made.batch.dealt == batch.dealt and self._counts(made.shape, made.batch.dealt.held):
            return made  # rows of a batch that is dealt alike (a replay of earlier ones)
        if tensor.grad_fn is not None:
            self._refuse_several(tensor, made.batch, batch)
            return made
        return made._replace(
            own=False, of=frozenset(self._from_outside(tensor, number=False, ahead=not made.batch.spent))
        )

    def _about_gradients(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What reads no values: a backward of the script's own, and the gradient that one has left."""
        name, of = getattr(func, "__name__", ""), args[0] if args else None
        if name == "backward" and self.leaves() and not is_called_by_engine(*_PASSAGES):
            with scaled(self.leaves(), self.all_samples.factor([args[0]])):
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if not (isinstance(output, torch.Tensor) and isinstance(of, torch.Tensor)):
            return output
        if name == "__get__" or (name.startswith("new_") and output.shape[:1] == of.shape[:1]):
            known = self._own(of)  # x.new_zeros(len(x)) has a row for each of the samples too
            if known is not None and output is not of:
                self._add(
                    output, True, known.of, since=known.since, beside=known.beside, read=known.read, batch=known.batch
                )
        return output

    def leaves(self) -> list[torch.Tensor]:
        """Returns what is made of this rank's samples and has a gradient of its own, as weights have not."""
        made = [(one.tensor(), one) for one in self._made.values()]
        found = [leaf for leaf, one in made if leaf is not None and one.own and leaf.requires_grad and leaf.is_leaf]
        return [leaf for leaf in found if not isinstance(leaf, torch.nn.Parameter) and not self._is_weight(leaf)]

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return has_memory(tensor) and tensor.untyped_storage()._cdata in self._weights

    def _within(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """In the model: what it makes without gradients may be handed out by hooks."""
        if takes_statistics(func, args, kwargs):  # of a module that the model has made since it was looked at
            return self.all_samples.call(func, args, kwargs, own=lambda _: True, beside=self._call.beside)
        output = func(*args, **kwargs)
        self._carried.see(func, args, kwargs, output, lambda shape: self._counts(shape, self._held))
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            self._add(output, True, written=writes(getattr(func, "__name__", "")))
        return output

    def _afterwards(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """After the backward: tell where a number is read that was added up over steps from this rank's samples."""
        name = getattr(func, "__name__", "")
        tensors = tensors_in((args, kwargs))
        given = [known for one in tensors if (known := self._own(one)) is not None]
        since, beside = any(one.since for one in given), any(one.beside for one in given)
        of_samples = lambda one: self._own(one) is not None  # noqa: E731
        batch, stood = self._batch(given), [] if given else generators(self._mesh.device)
        again = not given and self.expected is not None and may_draw(func) and self.draws_again()
        batch = self.expected if again else batch
        if given:
            self._refuse_undealt(tensors, self._held.count)
        with nullcontext() if batch is None or beside else self.dealing(batch):
            output = self.all_samples.call(func, args, kwargs, own=of_samples, beside=beside)
        for tensor in tensors_in(output) if given or again else []:
            self._add(tensor, True, since=since, beside=beside, batch=batch, written=writes(name))
        if not given and not again:
            self._note_undealt(tensors, tensors_in(output), self._held, drawn=stood != generators(self._mesh.device))
        if since and isinstance(output, bool | int | float) and name not in _COUNTS:
            self.steered.read()
        self._tell_own(name, output, given)
        return output

    def _tell_own(self, name: str, output: Any, given: list[Origin]) -> None:
        """Note for the script's reader what is read, or added up over steps, of this rank's samples alone."""
        fresh, since = any(one.fresh for one in given), any(one.since for one in given)
        if fresh and isinstance(output, torch.Tensor):
            if since and not output.requires_grad and name != "__setitem__":
                self.numbers.summed()
        elif fresh and not since and not any(one.beside for one in given):
            self.numbers.read(name, output)

    def _of(self, tensor: torch.Tensor) -> Origin:
        tensor = tensor.__dict__.get("successor", tensor)  # of a parameter that a plan put another in the place of
        known = self._made.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        before = self._before.get(id(tensor))
        kept = before is not None and before.tensor() is tensor
        of, own = frozenset[Outside](), True
        parameter, other = self._parameters.get(id(tensor)), self._others.get(id(tensor))
        if other is not None and other() is tensor:
            return Origin(other, True, of, beside=True)
        if parameter is not None and parameter() is tensor:
            own = False
        elif tensor.grad_fn is None and has_memory(held_of(tensor)) and (kept or self._unmade):
            array = not kept and is_array(tensor, self._weights)  # of this step or of an earlier one
            if array:
                self._refuse_arrays([len(tensor)] if tensor.dim() else [])
            if not (array and (self._read or not self._even)):
                own, of = False, frozenset(self._from_outside(tensor, number=array, ahead=False))
        self._add(tensor, own, of, since=before is not None and kept and before.own)
        return self._made[id(tensor)]

    @property
    def _unmade(self) -> bool:
        """Whether what no operation of this step was seen to make is from outside of it."""
        return self._tensors_alone and not self._transformed

    def _from_outside(self, tensor: torch.Tensor, *, number: bool, ahead: bool) -> list[Outside]:
        held = held_of(tensor)
        storage = StorageWeakRef(held.untyped_storage())
        model = next((model for known, model, _ in self._given if known == storage), 0)
        check, like = self._digests.of(tensor, held)
        if not check:
            return []
        trained = tensor.requires_grad and tensor.is_leaf
        shape = tuple(tensor.shape)
        what = f"a tensor of shape {shape}" if shape else "a tensor"
        what = f"{what} {AHEAD}" if ahead else what
        return [Outside(line_of_script(), what, check, like, number, trained=trained, model=model, shape=shape)]

    def _numbers(self, numbers: list[float]) -> list[Outside]:
        if not numbers or self._read or not self._even or not self._tensors_alone:
            return []
        where = line_of_script()
        return [number_of(where, float(one)) for one in numbers if one == one]

    def _numbers_read(self, numbers: list[float]) -> list[Outside]:
        """Those that the script read of this rank's samples in this step."""
        return [number_of(line_of_script(), one, read=True) for one in numbers if self.numbers.has_read(one)]

    def _from_nowhere(
        self, results: list[torch.Tensor], args: tuple, kwargs: dict, *, drawn: bool
    ) -> tuple[bool, frozenset[Outside]]:
        """Of tensors that were made of none: draws, constants, numbers and arrays of the script's."""
        if drawn or self._read or not self._even or not self._tensors_alone:
            return not drawn or any(one.numel() > 1 for one in results), frozenset()
        found = []
        for one in results:
            if one.is_floating_point() and has_memory(one):
                check, like = digest(one)
                what = f"a tensor of shape {tuple(one.shape)} made of numbers"
                found.append(Outside(line_of_script(), what, check, like, True))
        return False, frozenset(found)

    def _refuse_arrays(self, sizes: list[int]) -> None:
        refuse_drawn(self._held, sizes, self._generators)

    def _refuse_other_rows(self, tensor: torch.Tensor, model: torch.nn.Module) -> None:
        """Raise `RefusedPlan` for what the model gave for samples that are other ones than this rank's are now."""
        if not self._given or not has_memory(held_of(tensor)):
            return
        storage = StorageWeakRef(held_of(tensor).untyped_storage())
        for known, of, held in self._given:
            if known == storage and of == id(model) and held != self._held and self._counts(tuple(tensor.shape), held):
                raise with_line(
                    OTHER_ROWS.format(tuple(tensor.shape), *map(told_of, (held, self._held))), line_of_script()
                )

    def _counts(self, shape: tuple[int, ...], held: Share) -> bool:
        """Whether a tensor of this shape may have a row for each of these samples."""
        return any(dim < len(shape) and shape[dim] == held.count for dim in (self._dim, 0, 1))
