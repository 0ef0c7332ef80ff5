"""Records a prepared model on a rank of a proof, as whole tensors that are gathered from all ranks' pieces.

What this does not do: record gradients of a closure's calls (LBFGS) before the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.scripts.over_ranks import OverRanks
from shardwise.scripts.proof.recorder import ScriptRecorder, shortened, sketch


class RankSide:
    """Records one prepared model on this rank, in every step. All methods are collective.

    number  of the model in the recorder
    """

    def __init__(self, prepared: OverRanks, recorder: ScriptRecorder) -> None:
        self.recorder = recorder
        trained = {name for name, param in prepared.model.named_parameters() if param.requires_grad}
        named = [*prepared.model.named_parameters(), *prepared.model.named_buffers()]
        self.number = recorder.add(prepared, named, trained)

    def apart(self, prepared: OverRanks, loss: torch.Tensor) -> None:
        """Records the gradient of this rank's loss alone, as a backward begins, in the run that looks for a cause."""
        # under tp a rank's gradient is of its shares of weights, not of its samples
        if not self.recorder.job.apart or prepared.engine.state.tensor is not None:
            return
        named = [(name, param) for name, param in prepared.model.named_parameters() if param.requires_grad]
        with prepared._gate.open():
            # the script's own backward still needs the graph
            found = torch.autograd.grad(loss, [param for _, param in named], retain_graph=True, allow_unused=True)
        gradients = {name: None if g is None else sketch(g) for (name, _), g in zip(named, found, strict=True)}
        self.recorder.local_gradients(self.number, gradients)

    def before(self, prepared: OverRanks) -> None:
        """Records whole gradients as the optimizer's step begins, after whatever the script did to them. Collective."""
        self.recorder.raise_eps(prepared.optimizer)
        with prepared._gate.open():
            named = list(prepared.engine.full_gradients())
            if prepared.gradients is not None and prepared.gradients.by_hand:  # perhaps in a step without a backward
                named = [(name, prepared.gradients.seen(name) if g is None else g) for name, g in named]
            self.recorder.before(self.number, named)

    def after(self, prepared: OverRanks) -> None:
        """Records whole weights, buffers and states after a step, once weights are published. Collective."""
        engine = prepared.engine
        with prepared._reading():
            parameters = list(engine.used_parameters())
            states = list(self._states(prepared))
            self.recorder.after(
                self.number, parameters, list(engine.full_buffers()), states, prepared.optimizer.param_groups
            )

    def _states(self, prepared: OverRanks) -> Iterator[tuple[str, Any]]:
        """Yields (name, whole optimizer state); adds a notice if it cannot be gathered. Collective."""
        record = self.recorder.record
        try:
            yield from prepared.engine.full_optimizer_state()
        except ShardwiseError as error:  # on every rank alike, before anything is sent
            if record.states_known:
                record.notices.append(f"the optimizer's state was not compared: {error}")
            record.states_known = False


def watched(loader: Any, recorder: ScriptRecorder | None) -> ScriptRecorder | None:
    """Returns `recorder`; if it is not None, `loader`'s epochs are shortened as in the one process."""
    if recorder is not None:
        shortened(loader, recorder)
    return recorder


def side_of(prepared: OverRanks, loader: Any, recorder: ScriptRecorder | None) -> RankSide | None:
    """Returns the `RankSide` of a model that is being prepared; None outside of a proof (`recorder` None)."""
    if recorder is None:
        return None
    watched(loader, recorder)
    recorder.raise_eps(prepared.optimizer)
    return RankSide(prepared, recorder)
