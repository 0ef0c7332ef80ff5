"""Run a mixture that chooses and deals in its own forward, over stacked weights (E, ...) of which a rank holds some.

The forward runs twice, as that of experts in a list (`two_passes`): first what experts compute is zeros, and the rows
that meet their weights are noted (`expert_notes`); these travel to the ranks that hold the experts, which run the
experts' own operations (`expert_program`); then the forward runs with the results.

    first     made.index_add_(0, mine, 0 * gates)                   x[mine] is asked of expert e
    between   rows ══ all-to-all ══> gelu(rows @ w1[e]) @ w2[e] ══ all-to-all ══> results
    second    made.index_add_(0, mine, results * gates)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.comm import Axis
from shardwise.errors import RunError
from shardwise.parallel.expert.expert_forms import KnownForms
from shardwise.parallel.expert.expert_notes import ExpertNotes
from shardwise.parallel.expert.expert_program import ExpertProgram
from shardwise.parallel.expert.expert_tensor import ReadOtherwise
from shardwise.parallel.expert.two_passes import ListedExperts, tied


class StackedExperts(ListedExperts):
    """The experts of one mixture: `names` of its stacked weights, of each of which this rank holds a block.

    program  an expert's operations; None in a trial, which learns them
    """

    def __init__(
        self, path: str, child: nn.Module, names: Sequence[str], experts: int, axis: Axis,
        program: ExpertProgram | None = None,
    ):  # fmt: skip
        super().__init__(path, [], (), axis)
        self.child, self.names, self.count, self.program = child, tuple(names), experts, program
        self._divide()
        self._known_forms = KnownForms()
        self._weights: dict[str, torch.Tensor] = {}  # as the forward reads them, while it reads stand-ins
        if program is not None:
            self._run_program(program)

    def _run_program(self, program: ExpertProgram) -> None:
        """Sets the operations of an expert; `ReadOtherwise` for others than before."""
        # constants may be others: a dtype, say, in which the trial did not run
        if self.program is not None and self.program.functions != program.functions:
            raise ReadOtherwise("its experts run other operations than before")
        self.program, self.keys = program, tuple(range(len(program.rows)))

    def run(self, child: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns what `forward`, the mixture's own, gives. Collective over the axis.

        Raises `RunError` where weights are read otherwise than at the look, or in the second forward than the first.
        """
        try:
            return super().run(child, forward, args, kwargs)
        except ReadOtherwise as error:
            raise RunError(f"ep={self.axis.size}: '{self.path}': {error}, unlike at the look before the first step; "
                           "use ep=1") from error  # fmt: skip

    def _places(self, names: Iterable[str]) -> Iterator[tuple[str, nn.Module, str]]:
        """Yields (name, the module that holds it, its attribute there) of tensors of the mixture."""
        for name in names:
            owner, _, leaf = name.rpartition(".")
            yield name, self.child.get_submodule(owner), leaf

    @contextmanager
    def _answering(self, answer: Callable[[int, tuple, dict], Any]) -> Iterator[Callable[[Any], Any]]:
        """Context: stacked weights are stand-ins, experts give `answer`; yields what completes a result."""
        self._weights = self._read(self.names)
        # cut weights and positions make another tensor of a weight at each read: what experts share is read once
        shared = self._read(self.program.shared) if self.program is not None else {}
        named = {**dict(self.child.named_parameters()), **dict(self.child.named_buffers()), **shared}
        own = {id(tensor): name for name, tensor in named.items() if name not in self.names}

        def answered(expert: int, rows: list[torch.Tensor]) -> torch.Tensor:
            assert notes.program is not None
            self._run_program(notes.program)
            return answer(expert, tuple(rows), {})

        notes = ExpertNotes(self.count, answered, self._device(), own, self._known_forms)
        try:
            # in front of the parameters, which looks at writes and the like find where they were
            for name, holder, leaf in self._places(self.names):
                vars(holder)[leaf] = notes.weight(name, self._weights[name])
            for name, holder, leaf in self._places(shared):
                vars(holder)[leaf] = shared[name]
            yield notes.settled
        finally:
            for _, holder, leaf in self._places([*self.names, *shared]):
                vars(holder).pop(leaf, None)
            self._weights = {}

    def _read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns tensors of the mixture as its forward reads them."""
        return {name: getattr(holder, leaf) for name, holder, leaf in self._places(names)}

    def call(self, expert: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what an expert that lies here makes of these rows."""
        assert self.program is not None
        weights, shared = self._weights or self._read(self.names), self._read(self.program.shared)
        return self.program.run(expert - self.first, list(tensors), weights.__getitem__, shared.__getitem__)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        yield

    def _device(self) -> torch.device:
        _, holder, leaf = next(self._places(self.names))
        param = holder._parameters[leaf]
        assert param is not None
        return param.device

    def _of_owned(self, *args: Any) -> torch.Tensor:
        """Returns results of the rows that arrived, behind this rank's share of each weight in the graph.

        In one process a stacked weight has a gradient wherever any expert ran.
        """
        held = [holder._parameters[leaf] for _, holder, leaf in self._places(self.names)]
        trained = [param for param in held if param is not None and param.requires_grad]
        # not the mixture's result: a backward of weights alone (zero-bubble schedules) would begin there, and run
        # through the exchange on those ranks alone whose experts have rows
        return tied(super()._of_owned(*args), trained)

    def _beside(self, called: list[int]) -> list[torch.Tensor]:
        return []
