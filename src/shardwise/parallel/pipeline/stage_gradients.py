"""Compute a gradient that the forward itself asks for through several stages, of which each adds its own part.

    stage 0   x . block 0 = h ---h--->          <---dE/dh---   dh/dx . dE/dh  ---->
    stage 1                     block 1 . E(h, x) . grad(E, x) = dE/dx of stage 1 + dh/dx . dE/dh

A stage differentiates its own part, and asks the stage before for the summands of what it received. A received tensor
is a leaf of the stage's graph, and a sent tensor is a result in it. A `Tape` keeps both in order, as rounds (`Round`),
so that any later derivative goes back through all rounds, the last first. A gradient of h goes to the stage that sent
h, and a gradient of dh/dx . dE/dh to the stage that computed it, which may answer with a gradient of dE/dh. Tensors
exchanged meanwhile are put on the tape too. So gradients of gradients, and the gradient of the loss, are computed in
the same way; for the loss, weights get their gradients in one backward at the end (`last`).

What this does not do: keep two stages on one rank apart, or compute a gradient while a stage runs another forward.
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

Some = Sequence["torch.Tensor | None"]  # tensors or gradients, None where there is none
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


@dataclass(eq=False)
class Round:
    """Tensors exchanged with a neighbouring stage, in one question and its answer, or as the forward's hidden states.

    with_next  whether the neighbour is the stage after; else it is the one before
    got        tensors that came from it, leaves of this stage's graph
    gave       tensors that went to it, results in this stage's graph
    """

    with_next: bool
    got: list[torch.Tensor | None]
    gave: list[torch.Tensor | None]


@dataclass
class Walk:
    """The state of one gradient while it is computed back through a stage.

    index    which of the forward's own gradients; -1: that of the loss
    create   whether it will be differentiated itself (`create_graph`)
    by       the tensors with respect to which it is taken; None for one that this stage lacks
    until    number of rounds on the tape when it began; later rounds are not differentiated
    final    for the loss, (tensor, its gradient) of each tensor from which it was computed; else None
    grads    for each tensor of `by` the sum of its gradient so far; None: nothing yet
    pending  id of a leaf -> its gradient, which the neighbour that sent the leaf was not yet given
    asked    whether the stage before was asked
    more     whether the stage before has pending gradients in a later round, so must be asked about that
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
    """The tensors that one stage exchanges with its neighbours in one micro-batch, for the forward's own gradients.

    talk   sends and receives;  stage, batch  index of the stage, and of the micro-batch
    over   indices of the gradients that go back over the stage's beginning
    by     index of a gradient -> where this stage has the tensors with respect to which it is taken (`Stage.by`)
    """

    def __init__(self, talk: Talk, stage: int, batch: int, over: Collection[int], by: dict[int, By]):
        self.talk, self.stage, self.batch, self.over, self.by = talk, stage, batch, over, by
        self.rounds: list[Round] = []
        self.have: dict[int, list[torch.Tensor | None]] = {}  # `by` as tensors, once the stage's forward is over
        self._walk: Walk | None = None

    def received(self, leaves: Some) -> None:
        """Adds the first round, the leaves that hold the stage before's hidden states."""
        self.rounds.insert(0, Round(False, list(leaves), []))

    def sent(self, tensors: Some) -> None:
        """Adds a round of the hidden states that go to the stage after."""
        self.rounds.append(Round(True, [], list(tensors)))

    # --- the forward's own gradient

    def take(self, index: int, take: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns what `take(*args, **kwargs)`, a call of `torch.autograd.grad`, returns in one process.

        index   of this gradient in the forward
        Raises what that raises, and `RefusedPlan` for another number of inputs than in the recorded forward.
        """
        names = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args, strict=False))
        names |= kwargs
        outputs, inputs = listed(names["outputs"]), listed(names["inputs"])
        grad_outputs = names.get("grad_outputs")
        gradients = [None] * len(outputs) if grad_outputs is None else listed(grad_outputs)
        if not any(output.requires_grad for output in outputs) or any(
            gradient is None and output.numel() != 1 for output, gradient in zip(outputs, gradients, strict=False)
        ):
            return take(*args, **kwargs)  # torch raises its own error
        ones = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
        # a gradient beyond the recorded ones is taken here, and the stage raises after its forward (`_check`)
        sent = self.by.get(index) or (None,) * len(inputs)
        if len(sent) != len(inputs):
            raise RefusedPlan(
                f"gradient {index} of the forward is taken by {len(inputs)} tensors, and was by {len(sent)} when the "
                "forward was looked at: one that takes different ways cannot be cut into stages"
            )
        # a received input is a leaf of round 0, with which its gradient goes back
        here = [None if place is True else x for x, place in zip(inputs, sent, strict=True)]
        walk = Walk(index, bool(names.get("create_graph")), here, len(self.rounds))
        self._spread(walk, outputs, ones)
        self._back(walk, 0)
        if walk.asked:  # the stages before have summands too
            self._collect(walk)
        grads = [self._as_torch(grad, x, names) for grad, x in zip(walk.grads, inputs, strict=True)]
        return tuple(grads)

    @staticmethod
    def _as_torch(grad: torch.Tensor | None, x: torch.Tensor, names: dict[str, Any]) -> torch.Tensor | None:
        """Returns what `torch.autograd.grad` with the arguments `names` returns, or raises, for a `grad` by `x`."""
        if grad is None and names.get("materialize_grads"):
            return torch.zeros_like(x)
        if grad is None and not names.get("allow_unused"):
            raise RuntimeError(UNUSED)
        return grad

    # --- one stage's part

    def _spread(self, walk: Walk, outputs: Some, gradients: Some) -> None:
        """Differentiates `outputs`, given their `gradients`, in this stage; adds to `walk.pending` and `walk.grads`."""
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True)
                 if o is not None and g is not None and o.requires_grad]  # fmt: skip
        if walk.final is not None:  # for the loss, the weights' gradients are computed from these at the end
            walk.final += pairs
        # later rounds were added by this walk itself, and its gradient does not depend on them
        leaves = [leaf for turn in self.rounds[: walk.until] for leaf in turn.got if self._counts(walk, turn, leaf)]
        wanted = [(place, x) for place, x in enumerate(walk.by) if x is not None and x.requires_grad]
        goals = [leaf for leaf in leaves if leaf is not None] + [x for _, x in wanted]
        if not pairs or not goals:
            return
        grads = torch.autograd.grad(  # the graph is retained, since the loss's backward runs through it too
            [root_of(o) for o, _ in pairs], [root_of(goal) for goal in goals], [g for _, g in pairs],
            create_graph=walk.create, retain_graph=True, allow_unused=True,
        )  # fmt: skip
        for leaf, gradient in zip(leaves, grads, strict=False):
            if gradient is not None:
                walk.pending[id(leaf)] = _sum(walk.pending.get(id(leaf)), gradient)
        for (place, _), gradient in zip(wanted, grads[len(leaves) :], strict=True):
            walk.grads[place] = _sum(walk.grads[place], gradient)

    def _counts(self, walk: Walk, turn: Round, leaf: torch.Tensor | None) -> bool:
        """Whether the walk has to compute the gradient of this leaf of the round `turn`."""
        # received hidden states need one only in gradients that go back over the stage's beginning
        first = turn is self.rounds[0] and not turn.with_next
        if leaf is None or not leaf.requires_grad or (first and walk.index not in self.over):
            return False
        return not (first and walk.final is not None)  # the loss's goes back in the schedule's own message

    def _back(self, walk: Walk, start: int) -> None:
        """Sends pending gradients of rounds from index `start` on to the stage before, the last round first."""
        before = [turn for turn in self.rounds[: walk.until] if not turn.with_next]
        for turn in reversed([turn for turn in self.rounds[start : walk.until] if not turn.with_next]):
            gradients = [walk.pending.pop(id(leaf), None) for leaf in turn.got]
            target = before.index(turn)  # the same on both stages, which count only rounds with each other
            # the loss's gradient of received hidden states goes back in the schedule's own message
            if (target == 0 and walk.final is not None) or not (walk.more or any(g is not None for g in gradients)):
                continue
            words, answer = self._ask(walk, "ask", gradients, target)
            walk.more = words["more"]
            self._spread(walk, turn.gave, answer)

    def _collect(self, walk: Walk) -> None:
        """Adds the summands that the stages before have computed to `walk.grads`. Waits."""
        _, answer = self._ask(walk, "collect", [])
        walk.grads = [_sum(here, there) for here, there in zip(walk.grads, answer, strict=True)]

    def _ask(self, walk: Walk, kind: str, gradients: Some, target: int = 0) -> tuple[dict, list]:
        """Asks the stage before; returns its answer ({"more": whether to ask again}, gradients). Waits.

        kind       "ask": differentiate by what it sent, given `gradients` of that;  "collect": return its sums
        gradients  of the tensors in its round number `target` with this stage
        """
        gave = [None if gradient is None else settled(gradient) for gradient in gradients]
        words = {"kind": kind, "batch": self.batch, "target": target, "index": walk.index, "create": walk.create,
                 "final": walk.final is not None, "first": not walk.asked}  # fmt: skip
        walk.asked = True
        self.talk.say(self.stage, self.stage - 1, words, gave)
        reply, answer = self.talk.hear(self.stage - 1, self.stage)
        got = _leaves(answer, walk.create)
        if walk.create:  # a later derivative goes back through this question and its answer
            self.rounds.append(Round(False, got, gave))
        return reply, got

    # --- what the stage after asks

    def answer(self, words: dict[str, Any], tensors: Some) -> None:
        """Does what the stage after asks (`words` and `tensors` as `_ask` sends them), and sends it the gradients."""
        if words["first"]:  # the first question about a gradient
            final: list | None = [] if words["final"] else None
            by = [] if words["final"] else self.have.get(words["index"], [])
            self._walk = Walk(words["index"], words["create"], by, len(self.rounds), final)
        walk = self._walk
        assert walk is not None
        record = Round(True, _leaves(tensors, words["create"]), [])
        # a later derivative goes back through this question and its answer too
        if words["create"]:
            self.rounds.append(record)
        if words["kind"] == "ask":
            target = [turn for turn in self.rounds if turn.with_next][words["target"]]
            self._spread(walk, target.gave, record.got)
            start = self.rounds.index(target) + 1
            self._back(walk, start)
            # gradients of what the stage after gave in that round are its to take further back
            gave: list[torch.Tensor | None] = [walk.pending.pop(id(leaf), None) for leaf in target.got]
        else:
            self._back(walk, 0)
            if walk.asked:
                self._collect(walk)
            gave = walk.grads
        record.gave = [None if gradient is None else settled(gradient) for gradient in gave]
        self.talk.say(self.stage, self.stage + 1, {"more": self._more(walk)}, record.gave)

    def _more(self, walk: Walk) -> bool:
        """Whether the stage after has to ask again, since a gradient is pending in a round after the hidden states."""
        first = next(place for place, turn in enumerate(self.rounds) if turn.with_next)
        return any(id(leaf) in walk.pending for turn in self.rounds[first + 1 : walk.until] for leaf in turn.got)

    # --- the loss's gradient

    def last(self, outputs: Sequence[torch.Tensor], gradients: Some) -> tuple[list[torch.Tensor], list]:
        """Returns (tensors, their gradients), from which one backward call computes all gradients of this stage.

        outputs, gradients   what the stage sent, or its loss, and gradients of these; None: ones
        """
        walk = self._walk
        if walk is None or walk.final is None:  # the stage after did not ask, as none of its rounds leads to the loss
            walk = Walk(-1, False, [], len(self.rounds), [])
        ones = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
        self._spread(walk, outputs, ones)
        self._back(walk, 0)
        self._walk = None
        assert walk.final is not None
        return [o for o, _ in walk.final], [g for _, g in walk.final]

    def clear(self) -> None:
        """Drops `.grad` of leaves in all rounds but the first, which nobody reads."""
        for turn in self.rounds[1:]:
            for leaf in turn.got:
                if leaf is not None:
                    leaf.grad = None


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a + b, where None counts as zero; None if both are."""
    return b if a is None else a if b is None else a + b


def _leaves(tensors: Some, create: bool) -> list[torch.Tensor | None]:
    """Returns received tensors, which require gradients if `create`."""
    return [None if tensor is None else tensor.requires_grad_(create) for tensor in tensors]


class Serving:
    """This rank's tapes for gradients that a forward computes through several stages. Its constructor is collective.

    cut   the stages;  axis  the pipeline's ranks
    """

    def __init__(self, cut: StagePlacement, axis: Axis, device: torch.device):
        self.stages = cut.stages
        self.talk = Talk(axis, cut.schedule.owner, device)
        self._tapes: dict[tuple[int, int], Tape] = {}  # (stage, micro-batch) -> tape
        self._over: set[tuple[int, int]] = set()  # (stage, micro-batch) of which the stage after asks nothing more

    def tape(self, stage: int, batch: int) -> Tape:
        """Returns a new tape for a stage's forward of a micro-batch."""
        cut = self.stages[stage]
        self._tapes[stage, batch] = Tape(self.talk, stage, batch, cut.over, cut.by)
        return self._tapes[stage, batch]

    def until_end(self, stage: int, batch: int) -> None:
        """Answers the stage after until it has said that it asks nothing more about this micro-batch. Waits."""
        if not self.stages[stage].answers:
            return
        while (stage, batch) not in self._over:
            # it may ask about other micro-batches meanwhile, as it runs them in another order
            words, tensors = self.talk.hear(stage + 1, stage)
            if words["kind"] == "end":
                self._over.add((stage, words["batch"]))
            else:
                self._tapes[stage, words["batch"]].answer(words, tensors)
        self._over.remove((stage, batch))

    def end(self, stage: int, batch: int) -> None:
        """Tells the stage before that `stage` asks nothing more about a micro-batch."""
        if self.stages[stage].over:
            self.talk.say(stage, stage - 1, {"kind": "end", "batch": batch})

    def forget(self, stage: int, batch: int) -> None:
        """Drops the tape of a stage's micro-batch that is over."""
        self._tapes.pop((stage, batch)).clear()

    def clear(self) -> None:
        """Drops all tapes, and waits until everything that was said has been sent."""
        self._tapes.clear()
        self.talk.flush()


Take = Callable[[Callable[..., Any], tuple, dict], Any]


class SharedGradients(TorchFunctionMode):
    """Mode for a stage's run of a forward that computes gradients itself.

    begun   returns whether the stage's own part has begun; before that, only results of the batch alone have a graph
    take    called as take(func, args, kwargs) in place of each call, from then on, by which the forward takes gradients
    count   called at each such call before
    """

    def __init__(self, begun: Callable[[], bool], take: Take, count: Callable[[], None]):
        super().__init__()
        self.begun, self.take, self.count = begun, take, count
        self.made_up = WeakIdKeyDictionary()  # made-up tensors, and tensors computed from them or from parameters

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Returns the function's result; before the stage's part without graph unless it depends on the batch alone."""
        kwargs = kwargs or {}
        if transforming():  # gradients inside `torch.func` are not counted in the recorded forward
            return func(*args, **kwargs)
        own = takes_gradients(func)
        if self.begun():
            return self.take(func, args, kwargs) if own else func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        # any parameter counts as made up, since before the stage's part those of other stages (NaN) are used
        of_batch = not any(isinstance(tensor, nn.Parameter) or tensor in self.made_up for tensor in tensors)
        # gradients of made-up values are made up too; those of the batch alone are computed
        if own:
            self.count()
            if not (of_batch and any(tensor.requires_grad for tensor in tensors)):
                return tuple(self._noted(torch.full_like(x, torch.nan)) for x in listed(_inputs(args, kwargs)))
        if of_batch:
            return func(*args, **kwargs)
        with torch.no_grad():  # a graph through made-up values would give NaN gradients
            output = func(*args, **kwargs)
        self.note(output)
        return output

    def note(self, result: Any) -> None:
        """Marks the tensors in a call's result as made up."""
        for tensor in tensors_in(result):
            self._noted(tensor)

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a tensor as made up, and returns it."""
        self.made_up[tensor] = True
        return tensor


def _inputs(args: tuple, kwargs: dict) -> Any:
    """Returns the argument `inputs` of a call of `torch.autograd.grad`."""
    return kwargs["inputs"] if "inputs" in kwargs else args[1]
