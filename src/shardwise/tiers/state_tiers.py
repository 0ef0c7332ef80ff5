"""`StateTiers`: an optimizer's step over sub-groups of parameters whose state is offloaded or coded between steps."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.device import on_host
from shardwise.errors import RunError
from shardwise.ranks.allocation import give_back_freed
from shardwise.tiers.narrow import Draw, Halves
from shardwise.tiers.places import DeviceMemory, Place
from shardwise.tiers.resting import Rest, Resting, SplitRest, lay, wake
from shardwise.tiers.shards import ShardFile
from shardwise.tiers.subgroups import BUFFERS, Entry, Path, Spec, Subgroup, spec_of, tensor_at, tensors_of
from shardwise.tiers.undo import Undo

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]


class StateTiers:
    """The offloaded or coded state of one rank's optimizer, and its step over sub-groups.

    places   (place, its sub-groups), updated in this order; parameters in no sub-group are updated last, as they are
    masters  returns (module's weight, wider master) pairs, the same in each call; [] if no masters are wider
    slots    parameters of the optimizer, some of which are views of masters
    rounds   whether `step` copies masters into the module's weights, as each sub-group is done
    shards   the file with the parameters themselves, or None;  undo  sizes of copies -> `Undo`; None: no undoing
    draws    (parameter, path of its state) -> random bits to round that in this step; None: to the nearest
    """

    def __init__(
        self, optimizer: Optimizer, places: Sequence[tuple[Place, list[Subgroup]]],
        masters: Callable[[], list[Pair]], slots: Sequence[nn.Parameter], *, rounds: bool,
        shards: ShardFile | None = None, draws: Callable[[nn.Parameter, Path], Draw] | None = None,
        undo: Callable[[list[int]], Undo] | None = None,
    ):  # fmt: skip
        self.optimizer = optimizer
        self.draws = draws
        self.places = [place for place, _ in places]
        self.groups = [(place, group) for place, groups in places for group in groups]
        self.masters = masters
        self.rounds = rounds
        self.shards = shards
        self._broken = self._stepping = False
        self._views = _views(masters(), slots)
        self._in_groups = {id(param) for _, group in self.groups for param in group.params}
        self._moved_masters = {entry.wide for _, group in self.groups for entry in group.entries if entry.param is None}
        self.settle_all()
        sizes = [sum(tensor.nbytes for tensor in self._in_memory(group)) for _, group in self.groups]
        self.undo = None if undo is None else undo(sizes)

    def check(self) -> None:
        """Raise `RunError` if a step failed midway, so that weights and state belong to different steps."""
        if self._broken:
            raise RunError(
                "a step failed on its way, so that weights and the optimizer's state belong to different steps: go on "
                "from the last checkpoint"
            )

    def step(self, step: Callable[[], T]) -> T | None:
        """Calls `step`, the optimizer's, for each sub-group with gradients; returns the last result or None."""
        self.begin()
        left = [number for number, (_, group) in enumerate(self.groups) if _has_gradients(group)]
        result = None
        try:
            for number, following in zip(left, [*left[1:], None], strict=False):
                result = self.update(number, step, following)
            if self._held or not self._begun:  # parameters of no sub-group; at least one call in any step
                self._choose(self._held)
                result = step()
            for running in self._running():
                running.finish()
        except BaseException:
            self.abandon()
            raise
        self._open.close()
        self._stepping = False
        for place in self.places:
            place.commit([group for other, group in self._begun if other is place])
        if self.undo is not None:  # the step is valid
            self.undo.forget()
        self._round_others()
        return result

    def begin(self) -> None:
        """Begins a step, unless one has begun; then `update` may be called for sub-groups."""
        self.check()
        if self._stepping:
            return
        self._stepping, self._open = True, ExitStack()
        self._begun: list[tuple[Place, Subgroup]] = []
        self._fetched: int | None = None  # index of the sub-group that was fetched ahead
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        self._held = [param for param in params if id(param) not in self._in_groups]
        for place in self.places:
            place.begin()
        self._choose = self._open.enter_context(only(self.optimizer))
        if self.undo is not None:
            self.undo.begin(self.optimizer)

    def update(self, number: int, step: Callable[[], T], following: int | None = None, *, kept: bool = False) -> T:
        """Calls `step`, the optimizer's, for sub-group `number` (its index) alone; returns its result.

        following  index of the sub-group to fetch meanwhile;  kept  whether the update may have to be undone
        """
        place, group = self.groups[number]
        if self._fetched != number:  # not read ahead
            self._fetch(place, group)
        self._fetched = None
        if following is not None and not _share_buffer(self.groups[number], self.groups[following]):
            self._fetched = following
            self._fetch(*self.groups[following])
        place.wait_for(group)
        if self.shards is not None:  # the parameters themselves lie in a file
            self.shards.wait_for(group.params)
        self._begun.append((place, group))
        if kept and self.undo is not None:
            rests = partial(_lies_at_rest, group=group)
            self.undo.keep(number, self._in_memory(group), self.optimizer.state, group.params, rests)
        self._bring(group)
        self._choose(group.params)
        result = step()
        self._leave(group)
        place.store(group)
        if self.shards is not None:
            self.shards.store(group.params)
        return result

    def abandon(self) -> None:
        """Ends a step that has begun and failed; tensors point to valid memory, but `check` raises from then on."""
        if self._stepping:
            self._stepping = False
            self._open.close()
            self._go_back([group for _, group in self._begun])

    @property
    def stepping(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._stepping

    @torch.no_grad()
    def take_back(self) -> None:
        """Undoes the step that has begun, if any; all its updates must have been made with `kept`."""
        if not self._stepping:
            return
        assert self.undo is not None
        self._stepping, self._broken = False, True  # broken until all is restored
        self._stop()
        self._choose([])  # restores groups' options and the optimizer's attributes
        self._open.close()
        self.undo.put_back_beside()
        pairs, number_of = self.masters(), {id(group): number for number, (_, group) in enumerate(self.groups)}
        for _, group in self._begun:
            self.undo.put_back(number_of[id(group)])
            for entry in group.entries:
                self._rest_again(entry, group)
                if entry.param is None and entry.spec.codec is None and self.rounds:  # the weight was rounded from it
                    weight, master = pairs[entry.wide]
                    weight.copy_(master)
        self._broken = False

    def settle(self, param: nn.Parameter) -> None:
        """Moves state that a parameter was given (by a checkpoint) to its tier."""
        self.check()
        for _, group in self.groups:
            for entry in group.entries:
                if entry.param is param:
                    self._rest(group, entry)

    def settle_all(self) -> None:
        """Moves all state and masters of the sub-groups to their tiers."""
        for _, group in self.groups:
            for entry in group.entries:
                self._rest(group, entry)
        for place in self.places:
            place.begin()  # drops pages that were written through the mapping
        give_back_freed()

    def wake_all(self) -> None:
        """Turns all coded tensors into ordinary ones, before another tier replaces this one."""
        for _, group in self.groups:
            for entry in group.entries:
                if entry.spec.codec is not None and isinstance(self._tensor(entry), Resting):
                    self._wake(entry, self._rest_of(entry, group.rest).take())

    def _rest(self, group: Subgroup, entry: Entry) -> None:
        """Moves a state tensor or master to its place in `group.rest`, unless it is there."""
        tensor = self._tensor(entry)
        if tensor is None or _rests(entry, tensor, group):
            return
        if entry.spec.codec is not None:
            rest = self._rest_of(entry, group.rest)
            rest.put(tensor)
            self._lay(entry, rest)
            return
        place = entry.spec.alone(group.rest, entry.offset)
        place.copy_(tensor.detach())
        self._point(entry, place)

    def rests(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is stored in a tier now."""
        return isinstance(tensor, Resting) or any(_lies_in(tensor, group.rest) for _, group in self.groups)

    def held_bytes(self) -> dict[str, int]:
        """Returns {"host" or "disk": bytes allocated there for state and masters}.

        Coded tensors on the device are under "optimizer" (state) and "parameters" (masters).
        """
        sizes = Counter[str]()
        if self.undo is not None:  # the file of copies
            sizes["disk"] += self.undo.size
        for place, group in self.groups:
            if isinstance(place, DeviceMemory):
                for entry in group.entries:
                    sizes["parameters" if entry.param is None else "optimizer"] += entry.spec.resting_size
            else:
                sizes[place.name] += group.size
        return {name: size for name, size in sizes.items() if size}

    def close(self) -> None:
        """Closes the places."""
        for place in self.places:
            place.close()

    # --- one sub-group

    def _fetch(self, place: Place, group: Subgroup) -> None:
        for entry in group.entries:
            tensor = self._tensor(entry)
            entry.rested = tensor is not None and _rests(entry, tensor, group)
        if any(entry.rested for entry in group.entries):
            place.fetch(group)
        if self.shards is not None:
            self.shards.fetch(group.params)

    def _running(self) -> list[Place | ShardFile]:
        return [*self.places, *([] if self.shards is None else [self.shards])]

    def _bring(self, group: Subgroup) -> None:
        for entry in group.entries:
            if entry.rested and entry.spec.codec is not None:
                self._wake(entry, self._rest_of(entry, group.buffer).take())
            elif entry.rested:
                here = entry.spec.within(group.buffer, entry.offset)
                self._point(entry, here if on_host(entry.spec.device) else here.to(entry.spec.device))

    @torch.no_grad()
    def _leave(self, group: Subgroup) -> None:
        """Moves a sub-group's updated tensors to its buffer, and copies masters into the module's weights."""
        pairs, came = self.masters(), False
        for entry in group.entries:
            tensor = self._tensor(entry)
            if tensor is None:
                continue  # no state yet, or of another kind than in the step on zeros, so it is not moved
            if entry.param is None:  # a master, whose pieces the optimizer may have given other memory
                self._gather_views(entry.wide, tensor)
                if self.rounds:
                    pairs[entry.wide][0].copy_(tensor)
            if entry.spec.codec is not None:
                draw = None if entry.param is None or self.draws is None else self.draws(entry.param, entry.path)
                self._rest_of(entry, group.buffer).put(tensor, draw)
                self._lay(entry, self._rest_of(entry, group.after))
                continue
            here = entry.spec.within(group.buffer, entry.offset)
            if not _lies_in(tensor, here):  # the update was on a device, or made a new tensor
                here.copy_(tensor.detach())
                came = came or on_host(tensor.device)
            self._point(entry, entry.spec.alone(group.after, entry.offset))
        if came:  # else the first step would fill the host, since malloc seldom reuses freed blocks of other sizes
            give_back_freed()

    def _go_back(self, begun: list[Subgroup]) -> None:
        """Points tensors of sub-groups `begun` to where they were stored, and drops state that the step created."""
        self._broken = True
        self._stop()
        for group in begun:
            for entry in group.entries:
                self._rest_again(entry, group)
                if not entry.rested and entry.param is not None:
                    self.optimizer.state.pop(entry.param, None)

    def _stop(self) -> None:
        for running in self._running():
            running.abandon()

    def _rest_again(self, entry: Entry, group: Subgroup) -> None:
        if entry.rested and entry.spec.codec is not None:
            self._lay(entry, self._rest_of(entry, group.rest))
        elif entry.rested:
            self._point(entry, entry.spec.alone(group.rest, entry.offset))

    def _in_memory(self, group: Subgroup) -> list[torch.Tensor]:
        """Returns the weights that a step over a sub-group changes in memory: parameters, split masters' weights."""
        pairs, masters = self.masters(), [entry for entry in group.entries if entry.param is None]
        split = [pairs[entry.wide][0] for entry in masters if entry.spec.codec is not None]
        return [*split, *(param for unit in group.units if unit.master is None for param in unit.params)]

    def _round_others(self) -> None:
        if self.rounds:
            for number, (weight, master) in enumerate(self.masters()):
                if number not in self._moved_masters:
                    with torch.no_grad():
                        weight.copy_(master)

    # --- tensors and their memory

    def _tensor(self, entry: Entry) -> torch.Tensor | None:
        """Returns an entry's state tensor or master; None if there is none of its shape, stride and dtype."""
        if entry.param is None:
            return self.masters()[entry.wide][1]
        tensor = tensor_at(self.optimizer.state.get(entry.param), entry.path)
        if tensor is None:
            return None
        spec = spec_of(tensor)
        # the device is not compared, since between steps a device's tensor is on the host
        alike = spec is not None and (spec.shape, spec.stride, spec.dtype) == (
            entry.spec.shape, entry.spec.stride, entry.spec.dtype,
        )  # fmt: skip
        return tensor if alike else None

    def _point(self, entry: Entry, memory: torch.Tensor) -> None:
        tensor = self._tensor(entry)
        assert tensor is not None
        tensor.data = memory
        for param, spec, offset in self._views.get(entry.wide, []) if entry.param is None else []:
            param.data = _view(memory, spec, offset)

    def _rest_of(self, entry: Entry, memory: torch.Tensor) -> Rest | SplitRest:
        """Returns the handle of an entry's coded values in `memory`, the bytes of its sub-group."""
        codec = entry.spec.codec
        assert codec is not None
        if isinstance(codec, Halves):
            return SplitRest(entry.within(memory), entry.spec.like, self.masters()[entry.wide][0])
        return Rest(entry.within(memory), entry.spec.like, entry.spec.device, codec)

    def _lay(self, entry: Entry, rest: Rest | SplitRest) -> None:
        tensor = self._tensor(entry)
        assert tensor is not None
        lay(tensor, rest)
        if isinstance(rest, SplitRest):
            for param, spec, offset in self._views.get(entry.wide, []):
                lay(param, rest.part(offset // spec.dtype.itemsize, spec.like))

    def _wake(self, entry: Entry, values: torch.Tensor) -> None:
        tensor = self._tensor(entry)
        assert tensor is not None
        wake(tensor, values)
        for param, spec, offset in self._views.get(entry.wide, []) if entry.param is None else []:
            wake(param, _view(values, spec, offset))

    def _gather_views(self, wide: int, master: torch.Tensor) -> None:
        """Copies pieces that the optimizer gave other memory (`.data = x`) back into the master that they view."""
        for param, spec, offset in self._views.get(wide, []):
            place = _view(master, spec, offset)
            if param.data_ptr() != place.data_ptr():
                place.copy_(param.detach())


def _views(pairs: list[Pair], slots: Sequence[nn.Parameter]) -> dict[int, list[tuple[nn.Parameter, Spec, int]]]:
    """Returns {index of a wide master: [(parameter that is a view of it, its `Spec`, its first byte in it)]}."""
    views: dict[int, list[tuple[nn.Parameter, Spec, int]]] = {}
    for number, (_, master) in enumerate(pairs):
        start, size = master.data_ptr(), master.numel() * master.element_size()
        for param in slots:
            offset = param.data_ptr() - start
            if param is master or not param.numel() or not 0 <= offset < size:
                continue
            spec = Spec(param.shape, param.stride(), param.dtype, param.device)
            views.setdefault(number, []).append((param, spec, offset))
    return views


def _view(master: torch.Tensor, spec: Spec, offset: int) -> torch.Tensor:
    return spec.within(master.detach().view(-1).view(torch.uint8), offset)


def _rests(entry: Entry, tensor: torch.Tensor, group: Subgroup) -> bool:
    return _lies_in(tensor, group.rest) if entry.spec.codec is None else isinstance(tensor, Resting)


def _lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    start = memory.data_ptr()
    return start <= tensor.data_ptr() < start + memory.numel() * memory.element_size() and memory.numel() > 0


def _lies_at_rest(tensor: torch.Tensor, group: Subgroup) -> bool:
    return isinstance(tensor, Resting) or _lies_in(tensor, group.rest)


def _has_gradients(group: Subgroup) -> bool:
    return any(param.grad is not None for param in group.params)


def _share_buffer(one: tuple[Place, Subgroup], other: tuple[Place, Subgroup]) -> bool:
    return one[0] is other[0] and one[1].number % BUFFERS == other[1].number % BUFFERS


@contextmanager
def only(optimizer: Optimizer) -> Iterator[Callable[[Sequence[nn.Parameter]], None]]:
    """Context: yields a function(params) that removes all other parameters from the groups for the next step.

    It also restores the groups' options and the optimizer's attributes to those at the beginning of the context, so
    that a counter counts once.
    """
    groups = optimizer.param_groups
    whole = [list(group["params"]) for group in groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    attributes = dict(vars(optimizer))

    def choose(params: Sequence[nn.Parameter]) -> None:
        chosen = {id(param) for param in params}
        vars(optimizer).update(attributes)
        for group, everything, before in zip(groups, whole, options, strict=True):
            group.update(before)
            group["params"] = [param for param in everything if id(param) in chosen]

    try:
        yield choose
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def kept_for(optimizer: Optimizer, number: int, like: torch.Tensor) -> dict[tuple, Spec]:
    """Returns {path: `Spec`} of the state that the optimizer keeps for a parameter like `like` in group `number`.

    A copy of the optimizer takes a step on zeros to find it.
    """
    copied = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    vars(copied).update(state=defaultdict(dict), _optimizer_step_pre_hooks=OrderedDict(),
                        _optimizer_step_post_hooks=OrderedDict())  # fmt: skip
    copied.param_groups = [dict(group, params=[]) for group in optimizer.param_groups]
    param = nn.Parameter(torch.zeros_like(like))
    param.__dict__.update(like.__dict__)
    param.grad = torch.zeros_like(like)
    copied.param_groups[number]["params"] = [param]
    type(optimizer).step(copied)
    specs = ((path, spec_of(tensor)) for path, tensor in tensors_of(copied.state.get(param, {})))
    return {path: spec for path, spec in specs if spec is not None}
