"""Run the model and its loss on this rank's pipeline stages, one by one for a schedule (pipelined), or all in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from shardwise.comm import Axis, gather_json
from shardwise.errors import RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.parallel.pipeline.boundaries import StagePlacement
from shardwise.parallel.pipeline.stage import StagedModule
from shardwise.parallel.pipeline.stage_gradients import Serving, Tape
from shardwise.parallel.pipeline.stage_messages import Mail
from shardwise.step.forward import Forward
from shardwise.step.loss import Extra, Loss

PASSES = 2**12  # forwards without a schedule get message numbers modulo this


class StagedForward(Forward):
    """The forward of this rank's stages; the last stage computes the loss.

    staged   runs the module's own forward within one stage
    cut      the stages, and which ranks hold which parameters
    axis     of the pipeline's ranks
    mail     messages between stages
    serving  answers requests for gradients that the forward takes over a stage's boundary; None: it takes none there
    last     index of the last stage;  last_owner  pipeline rank that has it
    """

    def __init__(self, forward: Forward, staged: StagedModule, cut: StagePlacement, axis: Axis):
        super().__init__(forward.task, forward.module, forward.precision, forward.device, forward.data,
                         forward.positions)  # fmt: skip
        self.staged, self.cut, self.axis = staged, cut, axis
        # axes that shard positions; a message is this rank's shard, and says over which axes
        inner = forward.positions.axes if forward.positions is not None else ()
        # shapes that depend on values may change with each batch, so those once sent are not reused
        self.mail = Mail(axis, cut.schedule.owner, forward.device, inner, lasting=not cut.by_values)
        # if the forward takes gradients over a stage's boundary, stages ask each other for parts of these
        self.serving = Serving(cut, axis, forward.device) if cut.talks else None
        self.last = len(cut.stages) - 1
        self.last_owner = cut.schedule.owner[self.last]
        self._passes = 0  # count of forwards without a schedule, in place of a micro-batch's index
        # (module's `_parameters`, attribute) instead of parameters, since zero=3 replaces those; without the weights of
        # other stages, of which this rank has no values.
        modules, absent = dict(forward.module.named_modules()), cut.absent
        names = [name for name, _ in forward.module.named_parameters() if name not in absent]
        self._places = [(modules[path]._parameters, leaf) for path, _, leaf in (n.rpartition(".") for n in names)]

    def trainable(self) -> list[bool]:
        """Returns for each weight of this rank's stages, in a fixed order, whether it requires a gradient now."""
        return [weight is not None and weight.requires_grad for weight in (at.get(leaf) for at, leaf in self._places)]

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.last_owner == self.axis.index

    def stage(
        self, index: int, batch: Any, inbox: list[tuple[torch.Tensor, bool]], number: int = 0
    ) -> tuple[Any, Tape | None]:  # fmt: skip
        """Runs a stage's forward; returns (tensors to send to the next stage, or the model's output; tape or None).

        index   of the stage;  number  of the micro-batch;  batch  on the device
        inbox   (tensor from the previous stage, whether it needs a gradient), for each; [] for the first stage
        The tape records gradients that the forward takes over the stage's boundary; None without `serving`.
        """
        tape = self.serving.tape(index, number) if self.serving is not None else None

        def run() -> Any:
            args, kwargs = self.task.inputs(batch)
            if self.precision.mixed or self.precision.compute != torch.float32:
                args, kwargs = self.precision.cast_inputs((args, kwargs))
            return self.module(*args, **kwargs)

        output = self.staged.run(index, inbox, run, tape)
        # a loss may write into the output, which must not be a tensor that was received, a leaf of this stage's graph
        if index == self.last:
            output = _to_be_written(output, {id(leaf) for leaf in self.staged.taken})
        # the last stage sends nothing, since its output goes into the loss
        if tape is not None and index < self.last:
            tape.sent(output)
        return (self.precision.cast_outputs(output) if index == self.last else output), tape

    def key(self, batch: Any, number: int) -> tuple:
        """Returns a key that is equal for forwards whose messages have the same shapes.

        It is (whether gradients are on, training mode, shapes of the batch, `number` of the micro-batch if message
        shapes may depend on values, else None).
        """
        shapes = tuple(tuple(leaf.shape) for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor))
        return torch.is_grad_enabled(), self.module.training, shapes, number if self.cut.by_values else None

    def _output(self, batch: Any) -> Any:
        """Runs this rank's stages in turn, without a schedule; returns the model's output, on other ranks None."""
        # numbered, so that messages of two forwards that follow each other are told apart
        number = self._passes % PASSES
        self._passes += 1
        output, key = None, self.key(batch, number)
        for stage in self.cut.mine:
            inbox = self.mail.receive_forward(stage.index, number, key) if stage.index else []
            output, _ = self.stage(stage.index, batch, inbox, number)
            if stage.index < self.last:
                self.mail.send_forward(stage.index, number, key, output)
                output = None
            # A later stage may still ask for gradients of what this one sent.
            if self.serving is not None:
                self.serving.until_end(stage.index, number)
                self.serving.end(stage.index, number)
        if self.serving is not None:
            self.serving.clear()
        self.mail.flush()
        return output

    def __call__(self, part: Share) -> Loss:
        """Returns the loss of a part; a zero loss on ranks without the last stage."""
        batch = self.to_device(part.batch)
        output = self._output(batch)
        return self.loss_of(output, batch, part) if self.has_loss else _no_loss(self.device)

    def shared(self, read: Callable[[], Loss]) -> Loss:
        """Returns on every stage the loss that `read` gives on the last one, detached. Collective over stages.

        Raises `RefusedPlan` on all stages if it is NaN.
        """
        mine = None
        if self.has_loss:
            loss = read()
            extras = {
                k: [float(v.total.detach()), None if v.weight is None else float(v.weight)]
                for k, v in loss.extras.items()
            }
            mine = [float(loss.total.detach()), float(loss.weight), extras]
        total, weight, extras = gather_json(mine, self.axis, self.device)[self.last_owner]
        if total != total:  # NaN
            raise RefusedPlan(
                "under pipeline stages the loss on a few samples is NaN. If it is a number in one process, a value "
                "gets from stage to stage by a way that cannot be followed (an attribute, numpy, .item()): name "
                "other places with stages=, or hand it over as a tensor"
            )
        terms = {k: Extra(torch.tensor(v[0], dtype=torch.float64), v[1]) for k, v in extras.items()}
        return Loss(torch.tensor(total, dtype=torch.float64), weight, terms)


def _to_be_written(output: Any, received: set[int]) -> Any:
    """Returns an output in which received tensors, and views of them, are replaced by copies.

    received  ids of the tensors from the previous stage; as leaves that need gradients they must not be written into
    """

    def copied(leaf: Any) -> Any:
        own = not isinstance(leaf, torch.Tensor) or received.isdisjoint((id(leaf), id(leaf._base)))
        return leaf if own else leaf.clone()

    return tree_map(copied, output) if received else output


def _no_loss(device: torch.device) -> Loss:
    """Returns a loss of sum and weight 0."""
    return Loss(torch.zeros((), dtype=torch.float64, device=device), 0.0)
