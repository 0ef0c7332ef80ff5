"""Run a module that routes tokens to stacked weights (E, ...) in its own forward, while a rank holds some of E.

The forward runs twice, as for experts in a list (`two_passes`). In the first run experts' results are zeros, and the
rows that are multiplied with their weights are recorded (`expert_notes`). These rows travel to the ranks that hold the
experts, which run the experts' own operations (`expert_program`). Then the forward runs again with the results.

    first     made.index_add_(0, mine, 0 * gates)                   rows x[mine] are recorded for expert e
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
    """The experts of one mixture whose weights are stacked; runs them for all ranks of `axis`.

    path     of the mixture;  child  the mixture itself
    names    its stacked weights, of each of which this rank holds a block;  experts  their number E
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
        self._weights: dict[str, torch.Tensor] = {}  # this rank's blocks, while the forward reads stand-ins
        if program is not None:
            self._run_program(program)

    def _run_program(self, program: ExpertProgram) -> None:
        """Sets the operations of an expert; raises `ReadOtherwise` if its functions are not those set before."""
        # constants are not compared, since some differ from the trial's (a dtype)
        if self.program is not None and self.program.functions != program.functions:
            raise ReadOtherwise("its experts run other operations than before")
        self.program, self.keys = program, tuple(range(len(program.rows)))

    def run(self, child: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Returns the result of `forward`, the mixture's own, which runs twice. Collective over the axis.

        Raises `RunError` if weights are read differently than before step one, or the two forwards differ.
        """
        try:
            return super().run(child, forward, args, kwargs)
        except ReadOtherwise as error:
            raise RunError(f"ep={self.axis.size}: '{self.path}': {error}, unlike at the look before the first step; "
                           "use ep=1") from error  # fmt: skip

    def _places(self, names: Iterable[str]) -> Iterator[tuple[str, nn.Module, str]]:
        """Yields (name, the module that holds the tensor, its attribute there) for names in the mixture."""
        for name in names:
            owner, _, leaf = name.rpartition(".")
            yield name, self.child.get_submodule(owner), leaf

    @contextmanager
    def _answering(self, answer: Callable[[int, tuple, dict], Any]) -> Iterator[Callable[[Any], Any]]:
        """Context in which the mixture reads stand-ins for stacked weights, and experts give `answer`'s results.

        answer   called with (expert, its tensors of rows, {})
        Yields a function that fills in the values in the forward's result.
        """
        self._weights = self._read(self.names)
        # with tp or cut positions each read of a weight makes a new tensor, but `own` recognises tensors by identity
        shared = self._read(self.program.shared) if self.program is not None else {}
        named = {**dict(self.child.named_parameters()), **dict(self.child.named_buffers()), **shared}
        own = {id(tensor): name for name, tensor in named.items() if name not in self.names}

        def answered(expert: int, rows: list[torch.Tensor]) -> torch.Tensor:
            """Returns an expert's results, after a check that its program is the known one."""
            assert notes.program is not None
            self._run_program(notes.program)
            return answer(expert, tuple(rows), {})

        notes = ExpertNotes(self.count, answered, self._device(), own, self._known_forms)
        try:
            # instance attributes hide the parameters, which stay in `_parameters` for code that looks for them there
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
        """Returns name -> tensor, as the mixture's forward reads it (under tp a `Part`)."""
        return {name: getattr(holder, leaf) for name, holder, leaf in self._places(names)}

    def call(self, expert: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the results (n, ...) of an expert that this rank holds, for its tensors of rows (n, ...).

        expert   index among all E
        """
        assert self.program is not None
        weights, shared = self._weights or self._read(self.names), self._read(self.program.shared)
        return self.program.run(expert - self.first, list(tensors), weights.__getitem__, shared.__getitem__)

    @contextmanager
    def _own_forward(self) -> Iterator[None]:
        """Context that changes nothing, since programs do not call modules whose forward is replaced."""
        yield

    def _device(self) -> torch.device:
        """Returns the device of the weights."""
        _, holder, leaf = next(self._places(self.names))
        param = holder._parameters[leaf]
        assert param is not None
        return param.device

    def _of_owned(self, *args: Any) -> torch.Tensor:
        """Returns results of the rows that arrived, as `ListedExperts` does, tied to this rank's share of each weight.

        In one process a stacked weight gets a gradient if any expert ran, so here each rank's share must.
        """
        held = [holder._parameters[leaf] for _, holder, leaf in self._places(self.names)]
        trained = [param for param in held if param is not None and param.requires_grad]
        # tied here and not to the mixture's result, since a backward of weights alone (zero-bubble schedules) would
        # begin there, and run the exchange only on ranks whose experts have rows
        return tied(super()._of_owned(*args), trained)

    def _beside(self, called: list[int]) -> list[torch.Tensor]:
        """Returns [], since `_of_owned` ties the weights."""
        return []
