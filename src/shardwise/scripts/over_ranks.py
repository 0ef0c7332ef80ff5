"""`prepared.sum`, `prepared.gather`; publish weights that a script changed by hand.

prepared.sum(a, b)          each value's sum over the ranks that hold different samples
prepared.gather(keys)       the rows of all samples of a batch
optimizer.param_groups      what the script writes into its pieces is published before the weights are read again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.comm import gather_rows, gather_samples
from shardwise.errors import InputError
from shardwise.host import read, row_of
from shardwise.parallel.full import FullShard
from shardwise.part import whole
from shardwise.scripts.arrivals import weakly
from shardwise.scripts.calls import Calls
from shardwise.scripts.held import WeightAccess
from shardwise.scripts.loader import PartLoader
from shardwise.scripts.moved import FirstSteps, InPlace
from shardwise.scripts.own_pieces import OwnPieces, Stale
from shardwise.scripts.saying import names_line
from shardwise.scripts.seen_state import SeenState


class OverRanks(WeightAccess):
    """The methods of `Prepared` that add up, gather and publish over ranks."""

    optimizer: Optimizer
    calls: Calls
    loader: PartLoader
    _nothing: dict[str, nn.Parameter]  # a piece without elements, of parameters of which this rank holds none
    _groups: list[list[str]]  # names of what the plan trains, by the optimizer's groups
    _own_pieces: OwnPieces
    _first: FirstSteps
    _pieces: bool  # ranks' optimizers hold less than whole parameters
    _some_without: bool  # a rank holds no piece of any weight, and cannot tell whether the script changes them
    _in_place: InPlace | None  # where another parameter in a weight's place would not be seen
    _stale: Stale | None  # the script changed the optimizer's pieces, and the weights are as they were before

    @property
    def _of_whole_batches(self) -> bool:
        """Whether every rank of the data axis computes the loss of all samples (`loss_scope="global"`)."""
        return self.calls.whole is not None

    @property
    def _apart(self) -> int:
        """How many ranks' losses are of samples that others do not have."""
        return 1 if self._of_whole_batches else self.engine.data_ranks

    def _passes(self, what: str) -> None:
        """Check that all ranks are at the same call, `what`; raises `RunError` where another is elsewhere."""
        if self.meeting is not None and self._engine is not None:
            self.meeting.passes(what)

    @property
    def has_stray(self) -> bool:
        """Returns whether gradients have come to the model by another backward than the plan's."""
        return self.calls.stray and self.mesh.world.size > 1

    def _stray(self) -> str:
        """Returns whose samples gradients of another backward than the plan's are of: "", "part" or "all"."""
        part = self.calls.leader.in_loop and self._apart > 1
        return "" if not self.has_stray else "part" if part else "all"

    def compare(self) -> None:
        """Raise where what ranks hold alike has come apart since it was last compared. Collective."""
        self.settle()  # else a rank's own pieces are ahead of the others'
        with self._gate.open():
            self._first.again()

    @names_line
    def deal(self, *batch: Any) -> Any:
        """Returns this rank's samples of a batch that the script has made by itself, alike on every rank: in place of
        what a loader would hand out, for `prepare` without one. Collective.

        batch  tensors, or tuples, lists and dicts of them, samples first; of several arguments a tuple comes back
        """
        if not self.loader.is_pushed:
            raise InputError(
                "prepared.deal: a loader was given to prepare, which deals out its batches by itself: go through it, "
                "or prepare(model, optimizer, None, plan=...)"
            )
        return self.loader.whole.deal(self.loader, batch[0] if len(batch) == 1 else batch)

    @names_line
    def barrier(self) -> None:
        """Wait until every rank has come here: before all read what one has written. Collective."""
        self.meet("prepared.barrier()", always=True)

    @names_line
    def sum(self, *values: torch.Tensor | float) -> list[Any]:
        """Each value's sum over the ranks that hold different samples: of a number a float, of a tensor with dims a
        tensor of its shape, without gradient. Collective.
        """
        return self._sum(*self._counted(values))

    @names_line
    def gather(self, tensor: torch.Tensor, loader: PartLoader | None = None) -> torch.Tensor:
        """Returns the rows of all samples of the batch at hand, in its order, from tensors that have one for each of a
        rank's samples: what one process has (keys for a queue, outputs for a metric). Without gradient. Collective.

        loader  what `prepared.split` returned, whose batch it is; None: the main one's
        """
        self._passes("prepared.gather(...)")
        given, dealt = whole(tensor).detach(), self.calls.of_loss
        if self._apart == 1:
            return given
        part = loader.part if loader is not None else dealt.part if dealt is not None else None
        held = dealt.held.count if loader is None and dealt is not None else max(1, part.count if part else 0)
        if part is None or not given.dim() or len(given) != held:
            raise InputError(
                f"prepared.gather: a tensor of shape {tuple(given.shape)} has no row for each of the {held} samples "
                "that this rank has of the batch: give one whose first dim counts them"
            )
        told = gather_rows(row_of([float(part.count)], self.mesh.device), self.mesh.data)
        counts = tuple(int(count) for count in read(told.view(-1), "samples of each rank"))
        return gather_samples(given[: part.count].contiguous(), counts, self.mesh.data, "control")

    def _counted(self, values: tuple[Any, ...]) -> list[Any]:
        """The values; in the loop nothing of those of samples that this rank holds and another one counts."""
        lead, dealt = self.calls.leader, self.calls.of_loss
        apart = self._apart > 1 and lead.in_loop and not lead.other.since
        counts = dealt is None or dealt.part.count or not apart
        return [value if counts else value * 0 for value in values]

    def _sum(self, *values: torch.Tensor | float) -> list[Any]:
        self._passes("prepared.sum(...)")
        given: list[Any] = [whole(value).detach() if isinstance(value, torch.Tensor) else value for value in values]
        rows = [_as_row(value, self.mesh.device) for value in given]
        row = torch.cat(rows) if rows else row_of([], self.mesh.device)
        total = row if self._of_whole_batches else gather_rows(row, self.mesh.data).sum(dim=0)
        parts = list(zip(total.split([len(one) for one in rows]), given, strict=True))
        plain = [part for part, value in parts if _is_number(value)]
        numbers = iter(read(torch.cat(plain), "a script's sums") if plain else [])
        return [next(numbers) if _is_number(value) else part.view(value.shape).to(value) for part, value in parts]

    # --- what the script does to the optimizer's pieces

    def _watch_pieces(self) -> None:
        """The script's own code runs, on weights that are up to date."""
        engine = self._engine
        if engine is None:
            return
        self._fresh()
        self._own_pieces.leave()
        if not self._pieces and not engine.state.precision.mixed and engine.state.owners is None:
            return  # the optimizer holds the model's own parameters
        with self._gate.open():
            cuts = engine.state.tensor.cuts if engine.state.tensor is not None else {}
            whole = [slot.master for slot in engine.technique.slots if slot.whole and slot.name not in cuts]
            self._own_pieces.watch(self.optimizer, self.model, whole, self._listed())
            if self._pieces:
                self._own_pieces.states = SeenState(
                    self.optimizer, engine.state, self._gate, weakly(self.meet), engine.full_optimizer_state,
                    weakly(self._own_pieces.seen_in_state), weakly(self.plainly),
                )  # fmt: skip
        if self._some_without:
            self._changed()

    def _listed(self) -> list[list[nn.Parameter]]:
        """What the optimizer's groups list for the script: a piece of each parameter, on every rank."""
        state = self.engine.state
        if not self._pieces or state.owners is not None or state.tensor is not None or state.experts is not None:
            return []
        held: dict[str, list[nn.Parameter]] = {}
        for slot in state.technique.slots:
            held.setdefault(slot.name, []).append(slot.master)
        like = next(iter(state.technique.slots), None)
        for name in {name for group in self._groups for name in group} - held.keys():
            if name not in self._nothing:
                self._nothing[name] = nn.Parameter(torch.empty(0) if like is None else like.master.new_empty(0))
            held[name] = [self._nothing[name]]
        return [[piece for name in group for piece in held[name]] for group in self._groups]

    def _rows_of_pieces(self, row: Sequence[float]) -> list[list[float]]:
        """Numbers of the ranks whose pieces make up whole tensors. Collective."""
        self._passes("a norm, a sum or the like of tensors in optimizer.param_groups")
        found: list[list[float]] = gather_rows(row_of(list(row), self.mesh.device), self.mesh.shard).tolist()
        return found

    def _reaches(self, piece: nn.Parameter) -> bool:
        """Whether a piece without elements is one of a parameter that has a gradient in this step."""
        state = self.engine.state
        held = [(slot.name, slot.master) for slot in state.technique.slots] + list(self._nothing.items())
        return any(one is piece and state.names.index(name) in state.used for name, one in held)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Context: the optimizer finds its own pieces in its groups."""
        if self._engine is not None:
            self._own_pieces.leave()
        yield
        self._watch_pieces()

    def _fresh(self) -> None:
        stale, self._stale = self._stale, None
        if stale is not None:
            stale.end()

    def _changed(self) -> None:
        if self._stale is None:
            if not isinstance(self.engine.technique, FullShard):
                self._take_written()
            self._stale = Stale(self.model, self._gate, self.settle)

    def may_have_written(self) -> None:
        """Note that the script's own code may have written into sharded weights."""
        if isinstance(self.engine.technique, FullShard):
            self.engine.technique.written = True

    def _take_written(self) -> None:
        """Let the optimizer's own tensors follow what the script wrote into the model's weights."""
        if self._engine is None or self._stale is not None:
            return  # the weights are behind
        technique, owners = self._engine.technique, self._engine.state.owners
        told = not isinstance(technique, FullShard) or technique.written
        if owners is not None and told and isinstance(technique, FullShard) and self.meeting is not None:
            self.meeting.enter("weights that the script writes into")
        with self._gate.open():
            technique.take_weights()
            if owners is not None and told:
                owners.take_weights()
            if isinstance(technique, FullShard):
                technique.written = False

    def settle(self) -> None:
        """Publish the weights again where the script changed the optimizer's pieces. Collective then."""
        if self._in_place is not None:
            self._in_place.check()
        if self._stale is None:
            return
        self._fresh()
        state = self.engine.state
        if self.meeting is not None:
            self.meeting.enter("weights that the script changes in optimizer.param_groups")
        with self._gate.open():
            if state.owners is not None:
                state.owners.hand_out(set(range(len(state.names))))
            state.technique.publish()


def _as_row(value: Any, device: torch.device) -> torch.Tensor:
    return row_of([value], device) if _is_number(value) else value.to(device, torch.float64).reshape(-1)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()
