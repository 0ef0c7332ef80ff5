"""Runs one stage's part of the module's own forward (`StagedModule`).

Every rank keeps the whole module object, with the parameters of its own stages alone. Its outermost forward runs as
written, except that

    a call before the stage      is left out, and returns a made-up result full of NaN
    the stage's first call       gets what was received in place of its arguments; gradients are on from here
    the next stage's first call  is not entered, and its arguments are the stage's result
    the code after it            is not run, unless it changes state for the next forward (`lasting`)

    def forward(self, tokens):               stage 1 of 2
        x = self.embedding(tokens)           runs on absent weights: NaN
        mask = make_mask(tokens)             runs: the same on every stage
        x = self.blocks[0](x, mask)          left out
        x = self.blocks[1](x, mask)          x becomes what stage 0 sent
        return self.head(x)

What was received is written into the tensor object that the caller holds, so that a caller that uses it again
(`x = x + block(x)`, a U-Net's skip connection) computes with it. Absent weights are NaN without memory, so a tensor
that should have been sent and was not shows in the loss.

If the plan cuts positions too, a stage is sent its rank's share, and made-up results are cut as those of the call were
when the whole forward was rehearsed.

New modules for the stages would need the forward rewritten or traced, and fail on code that branches, builds masks or
ties weights. torch.distributed.pipelining has such stages, and its zero-bubble backward writes gradients without
calling the hooks that data parallelism needs.

What this does not do: run a forward whose own code reads values that a stage lacks; `cut_points` refuses it.
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
    """Raised where a stage ends; `leaves` are the tensors that the next stage is sent."""

    def __init__(self, leaves: list[torch.Tensor]):
        super().__init__("the end of a pipeline stage")
        self.leaves = leaves


Action = Callable[[tuple, dict], Any]  # (args, kwargs of a call) -> None to make the call, else (its result,)
Results = Mapping[tuple[str, int], Sequence[Along]]  # (path, index of a call) -> how each leaf of its result is cut
# (path, index of a call; True for its arguments, False for its result; the torch function in its code, or None)
_Key = tuple[str, int, bool, Spot | None]


def _key(holder: Holder) -> _Key:
    """Returns the key under which the leaves that contain a holder's tensor are noted."""
    return holder.path, holder.place, holder.is_argument, holder.own[0] if holder.own is not None else None


class StagedModule:
    """Replaces the module's forwards by ones that can run each of this rank's stages (`run`).

    stages   of this rank;  dtype  in which the module computes
    axes     that cut positions, outermost first;  results  how they cut results of calls; others are uncut
    hooks    the user's hooks on the outermost module, which run on the last stage alone
    """

    def __init__(
        self, module: nn.Module, stages: list[Stage], dtype: torch.dtype, axes: Sequence[Axis], results: Results,
        hooks: ResultHooks,
    ):  # fmt: skip
        self.module = module
        self._result_hooks = hooks
        self.dtype = dtype
        self.axes, self.results = axes, results
        self._made_up = LeftOutResults(dtype, axes)
        self.stages = {stage.index: stage for stage in stages}
        # below, a call is (id of the module, index of its call in the forward)
        self._actions: dict[int, dict[tuple[int, int], Action]] = {}  # stage -> call -> `_actions_of`
        # stages before which functions may fail on made-up results, so that they run under `OnNothing`
        self._careful = {stage.index for stage in stages if stage.careful}
        self._stage: Stage | None = None  # that is running
        self._running = False  # whether calls are counted
        self._entered = False  # whether this run has reached the stage's own part
        self._grad = True  # whether gradients were on where the forward was called
        self._over: list[torch.Tensor] | None = None  # what is sent, once the part of a stage that runs on is over
        self._counts: dict[int, int] = {}  # id of a module -> its calls so far in this run
        self._inbox: list[tuple[torch.Tensor, bool]] = []  # (received tensor, whether it needs a gradient)
        self._noted: dict[_Key, list[Any]] = {}  # leaves of arguments and results of calls
        self._notes: dict[int, dict[tuple[int, int], set[_Key]]] = {}  # stage -> call -> what to note of it
        self._own: dict[int, dict[tuple[int, int], dict[Spot, Holder]]] = {}  # stage -> call -> function -> its holder
        # stage -> call -> (torch function, its name) at which a stage begins or ends -> action
        self._marks: dict[int, dict[tuple[int, int], dict[tuple[Spot, str], Action]]] = {}
        self._shared: SharedGradients | None = None  # set if the forward itself computes gradients
        self._tape: Tape | None = None  # set if such gradients go through several stages
        self._taken = 0  # number of such gradients so far in this run
        self._calls: OwnCalls | None = None  # watches torch functions that forwards' own code calls
        self.taken: list[torch.Tensor] = []  # of the last run, the received leaves whose gradients go back, in order
        self.on_enter: Callable[[], None] | None = None  # called where the stage's own part begins
        self._insides: list[list[int]] = []  # for each left-out call, ids of the modules called inside, once a call
        touched: dict[int, nn.Module] = {}
        for stage in stages:
            self._actions[stage.index] = self._actions_of(stage, touched)
        for child in touched.values():
            self._wrap(child)
        for inside in self._insides:  # calls of other modules are not counted
            inside[:] = [child for child in inside if child in touched]
        self._wrap_root()

    def _actions_of(self, stage: Stage, touched: dict[int, nn.Module]) -> dict[tuple[int, int], Action]:
        """Returns (id of a module, index of its call) -> action before or in place of the call; fills `_notes` etc.

        touched  id -> module whose calls must be counted; modules are added to it
        """
        actions: dict[tuple[int, int], Action] = {}
        followed: list[nn.Module] = []  # wrapped so that torch functions can be told apart by whose code calls them

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
            if call.own is None:  # if a call also has an action (it may begin and end the stage), that runs first
                at_hand = actions.get((id(child), call.place))
                add(call.path, call.place, partial(action, edge, at_hand))
            else:  # at a torch function that the module's own code calls
                marks.setdefault((id(child), call.place), {})[call.own] = partial(action, edge, None)
                followed += [child, *map(self.module.get_submodule, edge.point.callees)]
        notes: dict[tuple[int, int], set[_Key]] = {}
        own: dict[tuple[int, int], dict[Spot, Holder]] = {}
        for holder in stage.holders:
            child = self.module.get_submodule(holder.path)
            if holder.own is not None:  # a value that the module's own code computes
                own.setdefault((id(child), holder.place), {})[holder.own[0]] = holder
            else:
                notes.setdefault((id(child), holder.place), set()).add(_key(holder))
            followed += [child, *map(self.module.get_submodule, holder.callees)]
        touched.update((id(child), child) for child in followed if child is not self.module)
        self._notes[stage.index], self._own[stage.index], self._marks[stage.index] = notes, own, marks
        return actions

    def _wrap(self, child: nn.Module) -> None:
        """Replaces a submodule's forward by one that runs the stage's action at each call, and notes tensors."""
        inner, hooked = child.forward, bool(child._backward_hooks)
        if hooked:  # torch attaches backward hooks to arguments before `forward`, so these are noted in a pre-hook
            child.register_forward_pre_hook(self._before_hooks, with_kwargs=True)

        def forward(*args, **kwargs):
            # calls in recompute, outside of a stage or by `torch.func` are not among those of the recorded forward
            if not self._running or self._stage is None or transforming():
                return inner(*args, **kwargs)
            place = self._counts.get(id(child), 0)
            self._counts[id(child)] = place + 1
            action = self._actions[self._stage.index].get((id(child), place))
            notes = self._notes[self._stage.index].get((id(child), place), ())
            for note in notes:
                if note[2] and not hooked:  # note[2]: whether of the arguments (hooked: see `_before_hooks`)
                    self._noted[note] = tree_flatten((args, kwargs))[0]
            with self._inside(None):  # torch functions that an action calls are not the module's own
                made = action(args, kwargs) if action is not None else None
            with self._inside((id(child), place)):
                output = inner(*args, **kwargs) if made is None else made[0]
            if made is not None and self._shared is not None:  # so that gradients by made-up values are made up too
                self._shared.note(output)
            for note in notes:
                if not note[2]:
                    self._noted[note] = tree_flatten(output)[0]
            return output

        child.forward = forward

    def _before_hooks(self, child: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes a call's arguments, and begins the stage there, before torch wraps arguments for backward hooks."""
        if not self._running or self._stage is None or transforming():
            return
        call = id(child), self._counts.get(id(child), 0)
        for note in self._notes[self._stage.index].get(call, ()):
            if note[2]:  # of the arguments
                self._noted[note] = tree_flatten((args, kwargs))[0]
        action = self._actions[self._stage.index].get(call)
        # received tensors must be put in before torch's hooks make views; other actions run in the wrapped forward
        if isinstance(action, partial) and action.func == self._enter:
            with self._inside(None):
                action(args, kwargs)

    def _wrap_root(self) -> None:
        """Replaces the outermost forward by one that runs the part of the stage set by `run`."""
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
                # before the stage's part a function may fail on NaN, so it is run again, from now on in the mode that
                # answers such functions by shape (not from the first, since that costs time at every function)
                if self._entered or stage.index in self._careful:
                    raise
                self._careful.add(stage.index)
                try:
                    output, left = self._walk(stage, lambda: inner(*args, **kwargs))
                except RAISED as again:
                    if self._entered or not isinstance(error, IndexError):  # else an index was computed from NaN
                        raise again from error
                    raise self._on_nothing(stage, error) from error
            self._check(stage, left)
            return output

        self.module.forward = forward

    def _walk(self, stage: Stage, forward: Callable[[], Any]) -> tuple[Any, bool]:
        """Runs the outermost forward once; returns (its result or the tensors to send, whether it reached its exit)."""
        self._counts.clear()
        self._entered, self._running, self._taken, self._over = stage.entry is None, True, 0, None
        watched = self._own[stage.index] or self._marks[stage.index]
        self._calls = OwnCalls(self._note_own, (id(self.module), 0), self._before_own) if watched else None
        own_part = lambda: self._entered and self._over is None  # noqa: E731
        careful = OnNothing(own_part) if stage.index in self._careful else nullcontext()
        self._shared = SharedGradients(lambda: self._entered, self._take, self._count) if stage.taken else None
        try:
            # before its part a stage has no graph to build, unless the forward computes gradients by its inputs
            torch.set_grad_enabled(self._grad and (self._entered or self._shared is not None))
            # a weight that is read before the stage's part, with gradients off, and used in it must get its gradient
            read_ahead(self._grad and not self._entered)
            with self._shared or nullcontext(), careful, self._calls or nullcontext():  # innermost: it sees the caller
                output = forward()
                return (output, False) if self._over is None else (tuple(self._over), True)
        except StageExit as over:
            return tuple(over.leaves), True
        finally:
            torch.set_grad_enabled(self._grad)
            read_ahead(False)
            self._running, self._calls, self._shared = False, None, None

    def _count(self) -> None:
        """Counts a gradient that the forward itself computes."""
        self._taken += 1

    def _take(self, take: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the gradients that the forward asks for by `take(*args, **kwargs)`, if needed by other stages too."""
        index, self._running = self._taken, False  # blocks that are recomputed meanwhile are not counted
        self._count()
        try:
            if self._tape is None or index not in self._tape.over:
                return take(*args, **kwargs)
            return self._tape.take(index, take, args, kwargs)
        finally:
            self._running = True

    def _inside(self, call: tuple[int, int] | None) -> AbstractContextManager[None]:
        """Context in which torch functions count as called by this call's own code; None: by nobody's."""
        return self._calls.inside(call) if self._calls is not None else nullcontext()

    def _before_own(self, call: tuple[int, int], number: Spot, name: str) -> None:
        """Begins or ends the stage's part if that is to happen at this torch function of `call`'s own code."""
        assert self._stage is not None
        action = self._marks[self._stage.index].get(call, {}).get((number, name))
        if action is not None:
            action((), {})

    def _note_own(self, call: tuple[int, int], number: Spot, name: str, output: Any) -> None:
        """Notes the result of a torch function of `call`'s own code, if a holder names it."""
        assert self._stage is not None
        holder = self._own[self._stage.index].get(call, {}).get(number)
        if holder is not None:
            self._noted[_key(holder)] = tree_flatten(output)[0]

    def _met(self, holder: Holder) -> torch.Tensor:
        """Returns the tensor that a boundary's holder has now.

        Raises `RefusedPlan` if the code that makes it has run another number of times than in the recorded forward.
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
        """Returns the refusal for a forward whose own code fails on made-up results with `error`."""
        assert stage.entry is not None
        return RefusedPlan(
            f"the forward fails before {stage.entry.call.label}, where a pipeline stage begins and what was computed "
            f"before is made up: {type(error).__name__}: {error}. Its own code reads values of hidden states (indices "
            "that it computes of them): put that into a submodule, which a stage leaves out, or name other places with "
            "stages="
        )

    def _check(self, stage: Stage, left: bool) -> None:
        """Raises `RefusedPlan` if the forward took another branch than recorded. `left`: whether it met its exit."""
        expected = sum(taken.enter < stage.stop for taken in stage.taken)
        # stages identify such gradients by their index, which all must count alike
        if stage.over and self._taken != expected:
            raise RefusedPlan(
                f"the forward takes {self._taken} gradients itself, and took {expected} when it was looked at: one "
                "that takes different ways cannot be cut into stages"
            )
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
        """Runs `forward`, which calls the module, on stage `index`; returns its result, or if not last a tuple to send.

        inbox   (received tensor, whether it needs a gradient); `taken` then has the leaves that hold the gradients
        tape    exchanges gradients that the forward itself computes with other stages; None: there are none
        Raises `RefusedPlan` if the forward takes another branch, or has other shapes, than the recorded one.
        """
        self._stage, self._inbox, self.taken, self._tape = self.stages[index], inbox, [], tape
        try:
            with self._result_hooks.of(last=self._stage.exit is None):
                output = forward()
            if tape is not None:  # the stage after will ask for gradients by these tensors, after the notes are gone
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
        """Returns (made-up result,) of a left-out call. `along`: its cuts; `inside`: ids of modules called in it."""
        assert self._stage is not None
        # calls and gradients inside it are counted, since later ones are identified by their index
        for child in inside:
            self._counts[child] = self._counts.get(child, 0) + 1
        self._taken += sum(skip.call.enter < taken.enter < skip.call.exit for taken in self._stage.taken)
        return (self._made_up.result(skip, along, args, kwargs),)

    def _exit(self, edge: Edge, at_hand: Action | None, args: tuple, kwargs: dict) -> Any:
        """Ends the stage at this call by raising `StageExit` with the tensors of `edge`'s holders.

        If the stage runs on, notes them and returns the result of `at_hand`, the action that leaves this call out.
        """
        stage = self._stage
        assert stage is not None and stage.exit is not None
        made = at_hand(args, kwargs) if at_hand is not None and not stage.runs_on else None
        leaves = [settled(self._met(holder)) for holder in edge.holders]
        if not stage.runs_on:
            raise StageExit(leaves)
        if self._over is None:  # the first of its exits that this forward reaches
            copied = zip(leaves, edge.holders, strict=True)  # cloned if the code that runs on writes into it
            self._over = [leaf.clone() if holder.written else leaf for leaf, holder in copied]
            torch.set_grad_enabled(False)
        return at_hand(args, kwargs) if at_hand is not None else made

    def _tensor_of(self, holder: Holder) -> torch.Tensor:
        """Returns the tensor that was noted for a holder."""
        return self._noted[_key(holder)][holder.leaf]

    def _enter(self, edge: Edge, at_hand: Action | None, args: tuple, kwargs: dict) -> None:
        """Begins the stage, and writes what was received into the tensors that `edge`'s holders name."""
        stage = self._stage
        assert stage is not None and stage.entry is not None
        if self._entered:  # at an earlier one of the calls at which the stage may begin
            return
        self._entered = True
        if self._shared is None:  # else gradients have been as the forward sets them from the start
            torch.set_grad_enabled(self._grad)
        read_ahead(False)
        if self.on_enter is not None:
            self.on_enter()
        on, leaves = torch.is_grad_enabled(), list[torch.Tensor | None]()
        for holder, (received, needs_gradient) in zip(edge.holders, self._inbox, strict=True):
            needed = needs_gradient and on
            self._put(self._met(holder), received, needed, holder.written)
            leaves.append(self.taken[-1] if needed else None)
        if self._tape is not None:
            self._tape.received(leaves)
        self._made_up.clear()

    def _put(self, target: torch.Tensor, received: torch.Tensor, needs_gradient: bool, written: bool) -> None:
        """Writes `received` into `target`, which the caller holds. `written`: whether the forward writes into it later.

        Adds to `taken` the leaf whose gradient goes back. Raises `RefusedPlan` if shapes differ or `target` has graph.
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
        if needs_gradient and written and target._is_view():  # autograd refuses `copy_` below on a view made in no_grad
            torch.utils.swap_tensors(target, received.detach())
        overwrite(target, received.detach(), self.axes)
        if not needs_gradient:
            return
        if written:  # a leaf must not be written in place, so the caller's tensor becomes a copy of the leaf
            self.taken.append(received.requires_grad_(True))
            target.copy_(received)
        else:
            self.taken.append(target.requires_grad_(True))
