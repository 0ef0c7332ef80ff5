"""Take a gradient through several stages: each differentiates its part, and asks the stage before it for the rest.

    stage 0   x . block 0 = h ---h--->          <---dE/dh---   d h/d x . dE/dh = the rest  ---->
    stage 1                     block 1 . E(h, x) . grad(E, x) = dE/dx here + the rest

What arrives is a leaf of a stage's graph, what leaves hangs in it. A `Tape` has both, in the order in which they
arrived and left, so that any derivative of what a stage has goes back through all of them, last first: a gradient of
h goes to where h came from, one of "the rest" to who worked it out, who may answer with one of dE/dh. What is worked
out on the way is on the tape too. So gradients of gradients, and the loss's, go the same way; of the loss, weights
get their gradients in one backward at the end (`last`).

    asked     a round with the stage before: what was given it, and what it answered
    answered  a round with the stage after: what came from it, and what it was given

What this does not do: keep two stages of one rank apart, or work out a gradient while a stage runs another forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.comm import Axis
from shardwise.errors import RefusedPlan
from shardwise.parallel.pipeline.backward import root_of
from shardwise.parallel.pipeline.boundaries import StagePlacement
from shardwise.parallel.pipeline.inner import By
from shardwise.parallel.pipeline.stage_messages import Talk
from shardwise.part.crossing import settled
from shardwise.trace.backwards import listed, takes_gradients
from shardwise.trace.functional import transforming
from shardwise.trace.leaves import tensors_in

Some = Sequence["torch.Tensor | None"]
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


@dataclass(eq=False)
class Round:
    """Tensors exchanged with a neighbouring stage in one question and answer, or as the forward's hidden states.

    with_next  the neighbour is the stage after, else the one before
    got        what came from it: leaves of this stage's graph
    gave       what went to it: results in this stage's graph
    """

    with_next: bool
    got: list[torch.Tensor | None]
    gave: list[torch.Tensor | None]


@dataclass
class Walk:
    """One gradient on its way back through a stage.

    index    which of the forward's gradients; -1: of the loss
    create   it is differentiated itself (`create_graph`)
    by       the tensors that it is taken with respect to; None where this stage lacks one
    until    rounds that were there when it began
    final    of the loss: every tensor that it was taken through, with the gradient that it was given
    grads    of each tensor of `by`: the sum so far
    pending  gradients of leaves, by id, for which the neighbours were not asked yet
    asked    the stage before was asked
    more     the stage before has something for a round that it was not asked for
    """

    index: int
    create: bool
    by: list[torch.Tensor | None]
    until: int
    final: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    grads: list[torch.Tensor | None] = field(default_factory=list)
    pending: dict[int, torch.Tensor] = field(default_factory=dict)
    asked: bool = False
    more: bool = False

    def __post_init__(self) -> None:
        self.grads = [None] * len(self.by)


class Tape:
    """What one stage exchanges with its neighbours in one micro-batch, for gradients that the forward takes itself.

    over      indices of those that go back over the stage's beginning
    by        index -> where this stage has the tensors that the gradient is taken with respect to
    """

    def __init__(self, talk: Talk, stage: int, batch: int, over: Collection[int], by: dict[int, By]):
        self.talk, self.stage, self.batch, self.over, self.by = talk, stage, batch, over, by
        self.rounds: list[Round] = []
        self.have: dict[int, list[torch.Tensor | None]] = {}  # `by` as tensors, once the stage's forward is over
        self._walk: Walk | None = None

    def received(self, leaves: Some) -> None:
        """Note what the stage before sent, as leaves."""
        self.rounds.insert(0, Round(False, list(leaves), []))

    def sent(self, tensors: Some) -> None:
        """Note what goes to the stage after."""
        self.rounds.append(Round(True, [], list(tensors)))

    # --- the forward's own gradient

    def take(self, index: int, take: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the gradients that `torch.autograd.grad(*args, **kwargs)`, which is `take`, gives in one process.

        Raises what that raises, and `RefusedPlan` for another number of inputs than at the look.
        """
        names = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args, strict=False))
        names |= kwargs
        outputs, inputs = listed(names["outputs"]), listed(names["inputs"])
        grad_outputs = names.get("grad_outputs")
        gradients = [None] * len(outputs) if grad_outputs is None else listed(grad_outputs)
        if not any(output.requires_grad for output in outputs) or any(
            gradient is None and output.numel() != 1 for output, gradient in zip(outputs, gradients, strict=False)
        ):
            return take(*args, **kwargs)  # which raises
        ones = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
        # one that the look did not meet is taken here; the stage raises behind its forward (stage: `_taken`)
        sent = self.by.get(index) or (None,) * len(inputs)
        if len(sent) != len(inputs):
            raise RefusedPlan(
                f"gradient {index} of the forward is taken by {len(inputs)} tensors, and was by {len(sent)} when the "
                "forward was looked at: one that takes different ways cannot be cut into stages"
            )
        # an input that was sent is a leaf of round 0: what is found of it goes back with that round
        here = [None if place is True else x for x, place in zip(inputs, sent, strict=True)]
        walk = Walk(index, bool(names.get("create_graph")), here, len(self.rounds))
        self._spread(walk, outputs, ones)
        self._back(walk, 0)
        if walk.asked:  # stages before this one have summands too
            self._collect(walk)
        grads = [self._as_torch(grad, x, names) for grad, x in zip(walk.grads, inputs, strict=True)]
        return tuple(grads)

    @staticmethod
    def _as_torch(grad: torch.Tensor | None, x: torch.Tensor, names: dict[str, Any]) -> torch.Tensor | None:
        """Returns what `torch.autograd.grad` gives, or raises, for a gradient by `x` that may be None."""
        if grad is None and names.get("materialize_grads"):
            return torch.zeros_like(x)
        if grad is None and not names.get("allow_unused"):
            raise RuntimeError(UNUSED)
        return grad

    # --- one stage's part

    def _spread(self, walk: Walk, outputs: Some, gradients: Some) -> None:
        """Differentiates `outputs` within this stage; adds to `walk.pending` (received leaves) and `walk.grads`."""
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True)
                 if o is not None and g is not None and o.requires_grad]  # fmt: skip
        if walk.final is not None:  # the loss's: the weights' gradients are taken through these at the end
            walk.final += pairs
        # rounds that are younger than the walk are its own: a gradient goes back through older ones alone
        leaves = [leaf for turn in self.rounds[: walk.until] for leaf in turn.got if self._counts(walk, turn, leaf)]
        wanted = [(place, x) for place, x in enumerate(walk.by) if x is not None and x.requires_grad]
        goals = [leaf for leaf in leaves if leaf is not None] + [x for _, x in wanted]
        if not pairs or not goals:
            return
        grads = torch.autograd.grad(  # the graph is kept: the loss's gradient goes back through it too
            [root_of(o) for o, _ in pairs], [root_of(goal) for goal in goals], [g for _, g in pairs],
            create_graph=walk.create, retain_graph=True, allow_unused=True,
        )  # fmt: skip
        for leaf, gradient in zip(leaves, grads, strict=False):
            if gradient is not None:
                walk.pending[id(leaf)] = _sum(walk.pending.get(id(leaf)), gradient)
        for (place, _), gradient in zip(wanted, grads[len(leaves) :], strict=True):
            walk.grads[place] = _sum(walk.grads[place], gradient)

    def _counts(self, walk: Walk, turn: Round, leaf: torch.Tensor | None) -> bool:
        """Returns whether the walk has to compute the gradient of this leaf of the round `turn`."""
        # the hidden states that the stage received: asked for only by gradients that go back over its beginning
        first = turn is self.rounds[0] and not turn.with_next
        if leaf is None or not leaf.requires_grad or (first and walk.index not in self.over):
            return False
        return not (first and walk.final is not None)  # goes back by the schedule's own message

    def _back(self, walk: Walk, start: int) -> None:
        """Ask the stage before for what is pending in rounds from `start` on, last first."""
        before = [turn for turn in self.rounds[: walk.until] if not turn.with_next]
        for turn in reversed([turn for turn in self.rounds[start : walk.until] if not turn.with_next]):
            gradients = [walk.pending.pop(id(leaf), None) for leaf in turn.got]
            target = before.index(turn)  # both stages number their rounds with each other alike
            # the loss's gradient of the hidden states received goes by the schedule's own message
            if (target == 0 and walk.final is not None) or not (walk.more or any(g is not None for g in gradients)):
                continue
            words, answer = self._ask(walk, "ask", gradients, target)
            walk.more = words["more"]
            self._spread(walk, turn.gave, answer)

    def _collect(self, walk: Walk) -> None:
        """Adds to `walk.grads` the summands that the stages before have."""
        _, answer = self._ask(walk, "collect", [])
        walk.grads = [_sum(here, there) for here, there in zip(walk.grads, answer, strict=True)]

    def _ask(self, walk: Walk, kind: str, gradients: Some, target: int = 0) -> tuple[dict, list]:
        """Asks the stage before; returns its answer ({"more": it has to be asked again}, gradients). Waits."""
        gave = [None if gradient is None else settled(gradient) for gradient in gradients]
        words = {"kind": kind, "batch": self.batch, "target": target, "index": walk.index, "create": walk.create,
                 "final": walk.final is not None, "first": not walk.asked}  # fmt: skip
        walk.asked = True
        self.talk.say(self.stage, self.stage - 1, words, gave)
        reply, answer = self.talk.hear(self.stage - 1, self.stage)
        got = _leaves(answer, walk.create)
        if walk.create:  # a later gradient goes back through this question and its answer
            self.rounds.append(Round(False, got, gave))
        return reply, got

    # --- what the stage after asks

    def answer(self, words: dict[str, Any], tensors: Some) -> None:
        """Does what the stage after asks (`words` and `tensors` as `_ask` sends them), and sends it the gradients."""
        # the first question of a gradient: this stage begins its own part of it
        if words["first"]:
            final: list | None = [] if words["final"] else None
            by = [] if words["final"] else self.have.get(words["index"], [])
            self._walk = Walk(words["index"], words["create"], by, len(self.rounds), final)
        walk = self._walk
        assert walk is not None
        record = Round(True, _leaves(tensors, words["create"]), [])
        # a later derivative goes back through this question and its answer too
        if words["create"]:
            self.rounds.append(record)
        # "ask": the gradient by what came from it in one round; "collect": the sums of all that is left
        if words["kind"] == "ask":
            target = [turn for turn in self.rounds if turn.with_next][words["target"]]
            self._spread(walk, target.gave, record.got)
            start = self.rounds.index(target) + 1
            self._back(walk, start)
            # what came from the stage after in that round is its to take further back
            gave: list[torch.Tensor | None] = [walk.pending.pop(id(leaf), None) for leaf in target.got]
        else:
            self._back(walk, 0)
            # stages before this one were asked, so they hold summands too
            if walk.asked:
                self._collect(walk)
            gave = walk.grads
        record.gave = [None if gradient is None else settled(gradient) for gradient in gave]
        self.talk.say(self.stage, self.stage + 1, {"more": self._more(walk)}, record.gave)

    def _more(self, walk: Walk) -> bool:
        """Returns whether the next stage has to ask again: a gradient waits in a round after the hidden states sent."""
        first = next(place for place, turn in enumerate(self.rounds) if turn.with_next)
        return any(id(leaf) in walk.pending for turn in self.rounds[first + 1 : walk.until] for leaf in turn.got)

    # --- the loss's gradient

    def last(self, outputs: Sequence[torch.Tensor], gradients: Some) -> tuple[list[torch.Tensor], list]:
        """Returns (tensors, their gradients): one backward call from them adds to `.grad` of this stage's weights.

        outputs  what it sent on, with their gradients
        """
        walk = self._walk
        if walk is None or walk.final is None:  # the stage after did not ask: none of its rounds leads to the loss
            walk = Walk(-1, False, [], len(self.rounds), [])
        # a result without a gradient counts with one of ones, as `backward()` does
        ones = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
        self._spread(walk, outputs, ones)
        self._back(walk, 0)
        self._walk = None
        assert walk.final is not None
        return [o for o, _ in walk.final], [g for _, g in walk.final]

    def clear(self) -> None:
        """Forget what backward left in leaves that nobody asks for."""
        for turn in self.rounds[1:]:
            for leaf in turn.got:
                if leaf is not None:
                    leaf.grad = None


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _leaves(tensors: Some, create: bool) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.requires_grad_(create) for tensor in tensors]


class Serving:
    """The gradients that a forward takes through several stages, seen from one rank. Made on all ranks together."""

    def __init__(self, cut: StagePlacement, axis: Axis, device: torch.device):
        self.stages = cut.stages
        self.talk = Talk(axis, cut.schedule.owner, device)
        self._tapes: dict[tuple[int, int], Tape] = {}  # by (stage, micro-batch), as below
        self._over: set[tuple[int, int]] = set()  # of which the stage after asks nothing more

    def tape(self, stage: int, batch: int) -> Tape:
        """Returns a new tape for a stage's forward of a micro-batch."""
        cut = self.stages[stage]
        self._tapes[stage, batch] = Tape(self.talk, stage, batch, cut.over, cut.by)
        return self._tapes[stage, batch]

    def until_end(self, stage: int, batch: int) -> None:
        """Answer what the stage after asks until it has no more to ask of this micro-batch."""
        if not self.stages[stage].answers:
            return
        while (stage, batch) not in self._over:
            # of any micro-batch: the stage after runs them in an order of its own, and says things in that order
            words, tensors = self.talk.hear(stage + 1, stage)
            if words["kind"] == "end":
                self._over.add((stage, words["batch"]))
            else:
                self._tapes[stage, words["batch"]].answer(words, tensors)
        self._over.remove((stage, batch))

    def end(self, stage: int, batch: int) -> None:
        """Tell the stage before that nothing more will be asked of a micro-batch."""
        if self.stages[stage].over:
            self.talk.say(stage, stage - 1, {"kind": "end", "batch": batch})

    def forget(self, stage: int, batch: int) -> None:
        """Drop the tape of a micro-batch that is over."""
        self._tapes.pop((stage, batch)).clear()

    def clear(self) -> None:
        """Drop all tapes, and wait until everything that was said has left."""
        self._tapes.clear()
        self.talk.flush()


Take = Callable[[Callable[..., Any], tuple, dict], Any]


class SharedGradients(TorchFunctionMode):
    """Mode of a forward that takes gradients itself; entered where gradients are on or off as the forward has them.

    Until `begun()` only what is computed of the batch alone has gradients.
    take    from then on, called with each gradient that the forward takes, in its place
    count   called at each gradient that the forward takes before
    """

    def __init__(self, begun: Callable[[], bool], take: Take, count: Callable[[], None]):
        super().__init__()
        self.begun, self.take, self.count = begun, take, count
        self.made_up = WeakIdKeyDictionary()  # tensors that stand for what was left out, or are computed of such

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if transforming():  # inside `torch.func`, whose own gradients are no gradients of stages
            return func(*args, **kwargs)
        own = takes_gradients(func)
        if self.begun():  # in the stage's own part tensors have values
            return self.take(func, args, kwargs) if own else func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        # a parameter may be another stage's, which is NaN here; those of this stage are used from its beginning on
        of_batch = not any(isinstance(tensor, nn.Parameter) or tensor in self.made_up for tensor in tensors)
        # a gradient of made-up values is made up too; of the batch alone it is right before the stage begins
        if own:
            self.count()
            if not (of_batch and any(tensor.requires_grad for tensor in tensors)):
                return tuple(self._noted(torch.full_like(x, torch.nan)) for x in listed(_inputs(args, kwargs)))
        if of_batch:
            return func(*args, **kwargs)
        with torch.no_grad():  # no way back through made-up values, whose gradients would be NaN
            output = func(*args, **kwargs)
        self.note(output)
        return output

    def note(self, result: Any) -> None:
        """Notes the made-up result of a call that was left out."""
        for tensor in tensors_in(result):
            self._noted(tensor)

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made_up[tensor] = True
        return tensor


def _inputs(args: tuple, kwargs: dict) -> Any:
    return kwargs["inputs"] if "inputs" in kwargs else args[1]
