"""`StagedModule`: runs one stage's part of the module's own forward.

Every rank keeps the whole module object, with the parameters of its own stages alone. Its outermost forward runs as
it was written; on the way

    a call before the stage      is left out: its result is made up, not a number (NaN) anywhere
    the stage's first call       takes what was received in place of its arguments; gradients are kept from here
    the next stage's first call  is not entered: its arguments are the stage's result
    what comes after it          is not run, but for what it leaves in the module for the next forward (`lasting`)

    def forward(self, tokens):               stage 1 of 2
        x = self.embedding(tokens)           runs on absent weights: NaN
        mask = make_mask(tokens)             runs: the same on every stage
        x = self.blocks[0](x, mask)          left out
        x = self.blocks[1](x, mask)          x becomes what stage 0 sent
        return self.head(x)

What was received is put into the very tensor that the caller holds, so that a caller that uses it again
(`x = x + block(x)`, a U-Net's skip connection) computes with it.
Absent weights are NaN without memory: whatever should have been sent and was
not would show in the loss.

Where the plan cuts positions too, a stage is sent its rank's share, and results that are made up are cut as those of
the call were when the whole forward was rehearsed.

New modules for the stages would need the forward rewritten or traced, and fail on code that branches, builds masks or
ties weights. torch.distributed.pipelining has such stages, and its zero-bubble backward writes gradients past the
hooks on which data parallelism hangs.

What this does not do: help a forward whose caller looks at values of what a stage does not have; `cuts` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.parallel.pipeline.boundaries import Edge, Holder, Stage
from shardwise.parallel.pipeline.hooks import ResultHooks
from shardwise.parallel.pipeline.left_out import RAISED, LeftOutResults, OnNothing
from shardwise.parallel.pipeline.skips import Skip
from shardwise.parallel.pipeline.stage_gradients import SharedGradients, Tape
from shardwise.part.crossing import Along, overwrite, settled
from shardwise.part.parameters import read_ahead
from shardwise.trace.functional import transforming
from shardwise.trace.own_calls import OwnCalls, Spot


class StageExit(Exception):
    """The stage is over: carries what the next one is sent."""

    def __init__(self, leaves: list[torch.Tensor]):
        super().__init__("the end of a pipeline stage")
        self.leaves = leaves


Action = Callable[[tuple, dict], Any]
Results = Mapping[tuple[str, int], Sequence[Along]]  # of a call (path, place): how each leaf of its result is cut


_Key = tuple[str, int, bool, Spot | None]  # of a call: path, place, its arguments or result, the function it called


def _key(holder: Holder) -> _Key:
    return holder.path, holder.place, holder.is_argument, holder.own[0] if holder.own is not None else None


class StagedModule:
    """Gives `module` the forwards of this rank's stages. `run` runs one of them.

    axes     that cut positions, outermost first
    results  how they cut the results of calls; those not named are whole
    hooks    the user's, on the outermost module's result: for the last stage alone
    """

    def __init__(
        self, module: nn.Module, stages: list[Stage], dtype: torch.dtype, axes: Sequence[Axis], results: Results,
        hooks: ResultHooks,
    ):  # fmt: skip
        self.module = module
        self._result_hooks = hooks
        self.dtype = dtype  # of what is computed
        self.axes, self.results = axes, results
        self._made_up = LeftOutResults(dtype, axes)
        self.stages = {stage.index: stage for stage in stages}
        self._actions: dict[int, dict[tuple[int, int], Action]] = {}  # by stage: `_actions_of`
        # stages before which some function fails on what is made up
        self._careful = {stage.index for stage in stages if stage.careful}
        self._stage: Stage | None = None
        self._running = False
        self._entered = False  # this run has come to the stage's own part
        self._grad = True  # whether gradients were on where the forward was called
        self._over: list[torch.Tensor] | None = None  # what is sent on, once a stage that runs on is over
        self._counts: dict[int, int] = {}  # by id of a module: its calls so far in this run
        self._inbox: list[tuple[torch.Tensor, bool]] = []
        self._noted: dict[_Key, list[Any]] = {}  # leaves of what calls were given and gave
        # by stage, then by (id of a module, its how-manieth call): what to note of that call
        self._notes: dict[int, dict[tuple[int, int], set[_Key]]] = {}
        self._own: dict[int, dict[tuple[int, int], dict[Spot, Holder]]] = {}  # (module, its call) -> functions it calls
        self._marks: dict[int, dict[tuple[int, int], dict[tuple[Spot, str], Action]]] = {}  # functions at which to act
        self._shared: SharedGradients | None = None  # of a forward that takes gradients itself
        self._tape: Tape | None = None  # where they go back to other stages
        self._taken = 0  # gradients that this run of the forward has come by
        self._calls: OwnCalls | None = None  # where something that a forward's own code makes is to be noted
        self.taken: list[torch.Tensor] = []  # by the last run: the leaves whose gradients go back, in order
        self.on_enter: Callable[[], None] | None = None  # called where the stage's own part begins
        self._insides: list[list[int]] = []  # modules that are called inside a call that is left out
        touched: dict[int, nn.Module] = {}
        for stage in stages:
            self._actions[stage.index] = self._actions_of(stage, touched)
        for child in touched.values():
            self._wrap(child)
        for inside in self._insides:  # calls of others are not counted
            inside[:] = [child for child in inside if child in touched]
        self._wrap_root()

    def _actions_of(self, stage: Stage, touched: dict[int, nn.Module]) -> dict[tuple[int, int], Action]:
        """Returns the action in place of a call's forward, by (id of the module, number of its call).

        touched  by id: modules whose calls must be counted; grows
        """
        actions: dict[tuple[int, int], Action] = {}
        followed: list[nn.Module] = []  # whose own calls are counted, or not to be counted with a caller's

        def add(path: str, place: int, action: Action) -> None:
            child = self.module.get_submodule(path)
            touched[id(child)] = child
            actions[id(child), place] = action

        for skip in stage.skips:
            along = self.results.get((skip.path, skip.place), ())
            inside = [id(self.module.get_submodule(call.path)) for call in skip.call.below()]
            self._insides.append(inside)
            add(skip.path, skip.place, partial(self._leave_out, skip, along, inside))
        marks: dict[tuple[int, int], dict[tuple[Spot, str], Action]] = {}
        edges = [(edge, self._enter) for edge in stage.entries] + [(edge, self._exit) for edge in stage.exits]
        for edge, action in edges:
            call, child = edge.point.call, self.module.get_submodule(edge.point.call.path)
            if call.own is None:  # at a call where the stage may both begin and end, it begins first
                at_hand = actions.get((id(child), call.place))
                add(call.path, call.place, partial(action, edge, at_hand))
            else:  # at a function of torch that the module's own code calls
                marks.setdefault((id(child), call.place), {})[call.own] = partial(action, edge, None)
                followed += [child, *map(self.module.get_submodule, edge.point.callees)]
        notes: dict[tuple[int, int], set[_Key]] = {}
        own: dict[tuple[int, int], dict[Spot, Holder]] = {}
        for holder in stage.holders:
            child = self.module.get_submodule(holder.path)
            if holder.own is not None:  # a value that the module's own code keeps to itself
                own.setdefault((id(child), holder.place), {})[holder.own[0]] = holder
            else:
                notes.setdefault((id(child), holder.place), set()).add(_key(holder))
            followed += [child, *map(self.module.get_submodule, holder.callees)]
        touched.update((id(child), child) for child in followed if child is not self.module)
        self._notes[stage.index], self._own[stage.index], self._marks[stage.index] = notes, own, marks
        return actions

    def _wrap(self, child: nn.Module) -> None:
        """Replaces a submodule's forward by one that does the stage's action at each call, and notes tensors."""
        inner, hooked = child.forward, bool(child._backward_hooks)
        if hooked:  # torch puts these on arguments that need a gradient by now
            child.register_forward_pre_hook(self._before_hooks, with_kwargs=True)

        def forward(*args, **kwargs):
            # a block that is computed again in backward, a module called outside of a stage or by `torch.func`: their
            # calls were not there when the forward was looked at, and are not counted
            if not self._running or self._stage is None or transforming():
                return inner(*args, **kwargs)
            place = self._counts.get(id(child), 0)
            self._counts[id(child)] = place + 1
            action = self._actions[self._stage.index].get((id(child), place))
            notes = self._notes[self._stage.index].get((id(child), place), ())
            for note in notes:
                if note[2] and not hooked:  # of the arguments, else of the result (hooked: `_before_hooks`)
                    self._noted[note] = tree_flatten((args, kwargs))[0]
            with self._inside(None):  # what an action calls of torch is nobody's own code
                made = action(args, kwargs) if action is not None else None
            with self._inside((id(child), place)):
                output = inner(*args, **kwargs) if made is None else made[0]
            if made is not None and self._shared is not None:  # gradients by made-up values are made up too
                self._shared.note(output)
            for note in notes:
                if not note[2]:
                    self._noted[note] = tree_flatten(output)[0]
            return output

        child.forward = forward

    def _before_hooks(self, child: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note the arguments of a call before hooks on their gradients lie around them; begin the stage there."""
        # recomputation in backward, and calls outside of a stage, are not what was looked at
        if not self._running or self._stage is None or transforming():
            return
        call = id(child), self._counts.get(id(child), 0)
        for note in self._notes[self._stage.index].get(call, ()):
            # note[2]: of the call's arguments; results are noted when it returns
            if note[2]:
                self._noted[note] = tree_flatten((args, kwargs))[0]
        action = self._actions[self._stage.index].get(call)
        # only a stage's entry must come before the hooks' views; what is sent at its exit goes through the wrapped
        # forward
        if isinstance(action, partial) and action.func == self._enter:
            with self._inside(None):
                action(args, kwargs)

    def _wrap_root(self) -> None:
        """Replaces the outermost forward by one that walks through it for the stage that runs now."""
        inner = self.module.forward

        def forward(*args, **kwargs):
            stage = self._stage
            if stage is None:
                raise RefusedPlan("the module is cut into pipeline stages: run it by Engine.step or Engine.evaluate")
            self._grad = torch.is_grad_enabled()
            self._noted[("", 0, True, None)] = tree_flatten((args, kwargs))[0]
            try:
                output, left = self._walk(stage, lambda: inner(*args, **kwargs))
            except RAISED as error:
                # before the stage's part a function may fail on NaN: once more, and from now on, with the mode that
                # answers such functions by shape, which costs time at every function
                if self._entered or stage.index in self._careful:
                    raise
                self._careful.add(stage.index)
                try:
                    output, left = self._walk(stage, lambda: inner(*args, **kwargs))
                except RAISED as again:
                    if self._entered or not isinstance(error, IndexError):  # else an index was computed of NaN
                        raise again from error
                    raise self._on_nothing(stage, error) from error
            self._check(stage, left)
            return output

        self.module.forward = forward

    def _walk(self, stage: Stage, forward: Callable[[], Any]) -> tuple[Any, bool]:
        """Run the outermost forward once. Returns (its result, or what is sent on; whether it was left at its exit)."""
        self._counts.clear()
        self._entered, self._running, self._taken, self._over = stage.entry is None, True, 0, None
        watched = self._own[stage.index] or self._marks[stage.index]
        self._calls = OwnCalls(self._note_own, (id(self.module), 0), self._before_own) if watched else None
        own_part = lambda: self._entered and self._over is None  # noqa: E731
        careful = OnNothing(own_part) if stage.index in self._careful else nullcontext()
        self._shared = SharedGradients(lambda: self._entered, self._take, self._count) if stage.taken else None
        try:
            # before its part a stage has nothing to differentiate, unless the forward takes gradients by its inputs
            torch.set_grad_enabled(self._grad and (self._entered or self._shared is not None))
            # a weight that is read now and used in the stage's part keeps its gradient, though gradients are off
            read_ahead(self._grad and not self._entered)
            with self._shared or nullcontext(), careful, self._calls or nullcontext():  # the last sees who calls
                output = forward()
                return (output, False) if self._over is None else (tuple(self._over), True)
        except StageExit as over:
            return tuple(over.leaves), True
        finally:
            torch.set_grad_enabled(self._grad)
            read_ahead(False)
            self._running, self._calls, self._shared = False, None, None

    def _count(self) -> None:
        self._taken += 1

    def _take(self, take: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the gradient that the forward takes by `take(*args, **kwargs)`, through other stages too."""
        index, self._running = self._taken, False  # blocks that run again in backward are no calls
        self._count()
        try:
            if self._tape is None or index not in self._tape.over:
                return take(*args, **kwargs)
            return self._tape.take(index, take, args, kwargs)
        finally:
            self._running = True

    def _inside(self, call: tuple[int, int] | None) -> AbstractContextManager[None]:
        """Context: functions of torch are called by this call's code; None: by nobody's."""
        return self._calls.inside(call) if self._calls is not None else nullcontext()

    def _before_own(self, call: tuple[int, int], number: Spot, name: str) -> None:
        """Begin the stage's part, or end it, where a forward's own code calls a function."""
        assert self._stage is not None
        action = self._marks[self._stage.index].get(call, {}).get((number, name))
        if action is not None:
            action((), {})

    def _note_own(self, call: tuple[int, int], number: Spot, name: str, output: Any) -> None:
        """Keep what a forward's own code made, where it crosses."""
        assert self._stage is not None
        holder = self._own[self._stage.index].get(call, {}).get(number)
        if holder is not None:
            self._noted[_key(holder)] = tree_flatten(output)[0]

    def _met(self, holder: Holder) -> torch.Tensor:
        """Returns the tensor that a holder of a boundary has now.

        Raises `RefusedPlan` where a forward's own code has made it more or less often than when it was looked at.
        """
        if holder.own is not None and self._calls is not None:
            whose = id(self.module.get_submodule(holder.path)), holder.place
            times = self._calls.times(whose, holder.own[0])
            if times != holder.times:
                raise RefusedPlan(
                    f"'{holder.own[1]}' in {holder.path or 'the outermost forward'} ran {times} times before a stage's "
                    f"boundary, and {holder.times} times when the forward was looked at: one that takes different ways "
                    "cannot be cut into stages"
                )
        return self._tensor_of(holder)

    def _on_nothing(self, stage: Stage, error: Exception) -> RefusedPlan:
        """Returns the refusal of a forward whose own code fails on results that were left out."""
        assert stage.entry is not None
        return RefusedPlan(
            f"the forward fails before {stage.entry.call.label}, where a pipeline stage begins and what was computed "
            f"before is made up: {type(error).__name__}: {error}. Its own code reads values of hidden states (indices "
            "that it computes of them): put that into a submodule, which a stage leaves out, or name other places with "
            "stages="
        )

    def _check(self, stage: Stage, left: bool) -> None:
        """Raises `RefusedPlan` where the forward took another way than when it was looked at."""
        expected = sum(taken.enter < stage.stop for taken in stage.taken)
        # gradients that go back over its beginning are told apart by their number, which all stages must count alike
        if stage.over and self._taken != expected:
            raise RefusedPlan(
                f"the forward takes {self._taken} gradients itself, and took {expected} when it was looked at: one "
                "that takes different ways cannot be cut into stages"
            )
        # the entry was never reached, or the exit was not: another way through the forward
        missed = stage.entry if not self._entered else stage.exit if not left else None
        if missed is not None:
            raise RefusedPlan(
                f"the forward did not come to {missed.call.label}, where a pipeline stage begins, though it did when "
                "it was looked at: one that takes different ways is cut where all of them meet: name calls that every "
                "forward makes (stages=), or use fewer stages"
            )

    def run(
        self, index: int, inbox: list[tuple[torch.Tensor, bool]], forward: Callable[[], Any], tape: Tape | None = None
    ) -> Any:  # fmt: skip
        """Returns the result of `forward` (which calls the module) on stage `index`; of all but the last, what is sent.

        Raises `RefusedPlan` where the forward takes another way, or has other shapes, than at the look.

        inbox   what was received, and whether each needs a gradient: `taken` then has the leaves that hold it
        tape    where gradients that the forward takes itself go from stage to stage
        """
        self._stage, self._inbox, self.taken, self._tape = self.stages[index], inbox, [], tape
        try:
            with self._result_hooks.of(last=self._stage.exit is None):
                output = forward()
            if tape is not None:  # while the forward's notes are there; the stage after asks by these later
                tape.have = {
                    which: [self._tensor_of(holder) if isinstance(holder, Holder) else None for holder in by]
                    for which, by in self._stage.by.items()
                }
            return output
        finally:
            self._stage, self._inbox, self._tape = None, [], None
            self._noted.clear()
            self._made_up.clear()

    def _leave_out(self, skip: Skip, along: Sequence[Along], inside: list[int], args: tuple, kwargs: dict) -> Any:
        """Returns a 1-tuple of the made-up result of a call that is left out."""
        assert self._stage is not None
        # the calls and gradients inside it count, since a module's later calls go by their number: without it a stage
        # that begins inside a block's later run would begin at the wrong one
        for child in inside:
            self._counts[child] = self._counts.get(child, 0) + 1
        self._taken += sum(skip.call.enter < taken.enter < skip.call.exit for taken in self._stage.taken)
        return (self._made_up.result(skip, along, args, kwargs),)

    def _exit(self, edge: Edge, at_hand: Action | None, args: tuple, kwargs: dict) -> Any:
        """End the stage at this call: raises `StageExit` with what is sent on.

        Where the stage runs on, returns what `at_hand` does, the made-up result of this call: what comes is made up.
        """
        stage = self._stage
        assert stage is not None and stage.exit is not None
        made = at_hand(args, kwargs) if at_hand is not None and not stage.runs_on else None
        leaves = [settled(self._met(holder)) for holder in edge.holders]
        # a stage that runs on has its exit behind it and goes on with made-up results
        if not stage.runs_on:
            raise StageExit(leaves)
        # the first exit of a stage that runs on: what is sent on is taken here
        if self._over is None:
            copied = zip(leaves, edge.holders, strict=True)  # the code that runs on writes into some of them
            self._over = [leaf.clone() if holder.written else leaf for leaf, holder in copied]
            torch.set_grad_enabled(False)
        return at_hand(args, kwargs) if at_hand is not None else made

    def _tensor_of(self, holder: Holder) -> torch.Tensor:
        return self._noted[_key(holder)][holder.leaf]

    def _enter(self, edge: Edge, at_hand: Action | None, args: tuple, kwargs: dict) -> None:
        """Begin the stage: put what was received into the tensors that the caller holds."""
        stage = self._stage
        assert stage is not None and stage.entry is not None
        if self._entered:  # at one of the calls before, which chance leaves out of other forwards
            return
        self._entered = True  # what follows is no longer answered by shape
        if self._shared is None:  # else gradients are on from the start, and the forward turns them off itself
            torch.set_grad_enabled(self._grad)
        read_ahead(False)  # which gave gradients to weights that are read before the stage and used in it
        if self.on_enter is not None:
            self.on_enter()
        on, leaves = torch.is_grad_enabled(), list[torch.Tensor | None]()
        for holder, (received, needs_gradient) in zip(edge.holders, self._inbox, strict=True):
            needed = needs_gradient and on
            self._put(self._met(holder), received, needed, holder.written)
            leaves.append(self.taken[-1] if needed else None)
        if self._tape is not None:  # gradients that the forward takes itself go back by these
            self._tape.received(leaves)
        self._made_up.clear()

    def _put(self, target: torch.Tensor, received: torch.Tensor, needs_gradient: bool, written: bool) -> None:
        """Write what was received into `target`, which the caller holds; `written`: the forward writes into it later.

        Notes in `taken` the leaf whose gradient goes back. `RefusedPlan` for another shape, or a `target` with a graph.
        """
        assert self._stage is not None and self._stage.entry is not None
        if target.shape != received.shape:
            raise RefusedPlan(
                f"at {self._stage.entry.call.label} a tensor of shape {tuple(received.shape)} arrives, where this "
                f"stage's own forward has {tuple(target.shape)}: a module before it gives a shape that cannot be told "
                "from the shapes of its arguments, so the stages would disagree about masks and positions"
            )
        if target.grad_fn is not None:
            raise RefusedPlan(
                f"at {self._stage.entry.call.label} a tensor arrives for one that this stage's own forward computes of "
                "the batch with gradients, which it takes itself: name other places with stages="
            )
        if needs_gradient and written and target._is_view():  # made without gradients, it would bear no step of a graph
            torch.utils.swap_tensors(target, received.detach())
        overwrite(target, received.detach(), self.axes)
        if not needs_gradient:
            return
        if written:  # a leaf may not be written into: a copy onto itself puts a step of the graph between
            self.taken.append(received.requires_grad_(True))
            target.copy_(received)
        else:
            self.taken.append(target.requires_grad_(True))
