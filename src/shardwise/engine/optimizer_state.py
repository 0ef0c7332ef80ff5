"""Gather whole optimizer state from ranks that hold pieces of it. Into checkpoints: checkpoint/optimizers.

    replicas          every rank has all of it
    zero=1, 2, 3      pieces like the parameter's own, gathered over dp_shard (experts: over the ranks that share them)
    whole tensors     (Adafactor, Muon under zero) the state lies on the rank that owns the parameter
    tp, ep            shares like the parameter's own, gathered
    pp                the stage that holds the parameter tells the others

One table of what every rank holds is exchanged first, so that all ranks know which collectives follow. A tensor is a
piece where on every rank it has the shape of that rank's piece of the parameter; one of a single element (a count of
steps) is the same for all pieces, and travels in the table.

What this does not do: tell what an optimizer keeps in its groups or attributes, beside `state`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import Gathering, broadcast, gather_json, gathered_together, ready
from shardwise.engine.whole import to_all_stages, together
from shardwise.errors import RefusedPlan, ShardwiseError
from shardwise.step.state import RankState


@dataclass
class _Row:
    """One rank's share of one parameter's state; plain JSON in the table that ranks gather.

    piece     shape of what its optimizer updates
    whole     that is the whole parameter
    template  the state, with the number of a tensor in the place of each; None: no state
    tensors   [dtype, shape, the value where it is one number] of each
    """

    piece: list[int]
    whole: bool
    template: Any
    tensors: list[list[Any]]


def full_optimizer_state(state: RankState) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields (name, state) of every trained parameter, as one process would have it; {} if there is none. Collective.

    Values are tensors (whole; they may be the optimizer's own), numbers, or lists, tuples and dicts of them. Raises
    `RefusedPlan` where nothing tells how a tensor is made of what the ranks hold, `ShardwiseError` where a rank lost
    the state of its piece.
    """
    # state in another tier is current only once its last move has ended well
    if state.tier is not None:
        state.tier.check()
    rows, tensors_of = _mine(state)
    table = gather_json({name: vars(row) for name, row in rows.items()}, state.mesh.world, state.device)
    by_rank = [{name: _Row(**row) for name, row in ranks_rows.items()} for ranks_rows in table]
    forms = {name: _Form(name, by_rank, _source(state, name)) for name in state.all_names}
    leaves = _leaves(state, forms, tensors_of, rows)
    if state.staged is not None:  # a rank has the state of its own stages alone
        leaves = to_all_stages(state.staged, leaves, [name for name in state.all_names for _ in forms[name].sent])
    for name in state.all_names:
        form = forms[name]
        tensors = dict(form.from_table)
        for place in form.sent:
            tensors[place] = next(leaves)[1]
        yield name, {} if form.template is None else _decoded(form.template, tensors)


def _source(state: RankState, name: str) -> int:
    """Returns the rank whose row describes a parameter's state: this rank; under a pipeline the first that holds it."""
    if state.staged is None:
        return state.mesh.rank
    return state.mesh.pp.ranks[state.staged.cut.holders[name][0]]


def _mine(state: RankState) -> tuple[dict[str, _Row], dict[str, list[torch.Tensor]]]:
    """Returns ({name: this rank's `_Row` of the table}, {name: the tensors of that row, by number})."""
    cuts = set(state.tensor.cuts if state.tensor is not None else ())
    cuts |= set(state.experts.dealt if state.experts is not None else ())
    # A share over tp or ep is whole to its technique, and a piece of the weight.
    masters = [(slot.name, slot.master, slot.whole and slot.name not in cuts) for slot in state.technique.slots]
    if state.owners is not None:
        # an optimizer of whole matrices has its state on a weight's owner alone
        masters = [(state.names[index], master, True) for index, master in state.owners.masters.items()]
    rows, tensors_of = {}, {}
    for name, master, whole in masters:
        kept = state.optimizer.state.get(master)
        tensors: list[torch.Tensor] = []
        template = _encoded(dict(kept), tensors, name) if kept else None
        described = [
            [str(t.dtype)[6:], list(t.shape), t.item() if t.numel() == 1 and not t.is_complex() else None]
            for t in tensors
        ]
        rows[name], tensors_of[name] = _Row(list(master.shape), whole, template, described), tensors
    return rows, tensors_of


class _Form:
    """The recipe for one parameter's whole state from the ranks' shares, the same on all ranks that exchange them.

    template  the state with numbers for tensors; None: there is none
    from_table  tensors of one element, by number: they came with the table
    sent      numbers of the others; `pieces` are those of them that are pieces, and the rest are whole
    """

    def __init__(self, name: str, table: list[dict[str, _Row]], source: int):
        """Decide, alike on every rank, how each tensor of a parameter's state comes: sent, as pieces, or a number.

        table   each rank's rows, by parameter
        source  the rank whose row describes the state where it is whole (`_source`)
        """
        rows = {rank: row[name] for rank, row in enumerate(table) if name in row}
        with_state = {rank: row for rank, row in rows.items() if row.template is not None}
        self.from_table: dict[int, torch.Tensor] = {}
        self.sent: list[int] = []
        self.pieces: set[int] = set()
        self.template = None
        whole = all(row.whole for row in rows.values())
        # A rank whose piece is empty keeps no state: any rank that has some says what it is like.
        first = rows.get(source) if whole and source in rows else next(iter(with_state.values()), None)
        if first is None or first.template is None:
            return
        self.template, self.tensors = first.template, first.tensors
        # every holder has all of it: each tensor is sent as it is, counts too
        if whole:
            self.sent = list(range(len(first.tensors)))
            return
        _refuse_lost(name, rows)
        for place, (dtype, shape, value) in enumerate(first.tensors):
            # Before the test of one element: a piece of one element is a piece on every rank, a count is not.
            if all(row.tensors[place][1] == row.piece for row in with_state.values()):
                self.pieces.add(place)
                self.sent.append(place)
            elif value is not None:
                self.from_table[place] = torch.tensor(value, dtype=getattr(torch, dtype)).reshape(shape)
            else:
                raise RefusedPlan(
                    f"the optimizer's state of '{name}' holds a tensor of shape {shape}, which is neither one number "
                    f"nor like this rank's piece {first.piece} of the parameter, so that nothing tells what the whole "
                    "of it is"
                )


def _refuse_lost(name: str, rows: dict[int, _Row]) -> None:
    """Raise `ShardwiseError` for a rank without state for its piece, unless the piece is empty."""
    for rank, row in rows.items():
        if row.template is None and 0 not in row.piece:
            raise ShardwiseError(
                f"rank {rank} has no optimizer state for its piece of '{name}', and other ranks have it for theirs"
            )


def _leaves(
    state: RankState, forms: dict[str, _Form], tensors_of: dict[str, list[torch.Tensor]], rows: dict[str, _Row]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole tensor) of the state of this rank's stages that is sent, in order. Collective over them."""

    homes = {slot.name: slot.master.device for slot in state.technique.slots}

    def leaf(index: int, name: str, place: int) -> Gathering:
        """Returns the gathering of one tensor of a parameter's state: pieces are joined, an owner's is broadcast."""
        form, mine = forms[name], tensors_of.get(name, [])
        dtype, shape, _ = form.tensors[place]
        nothing = rows[name].piece if name in rows else [0]  # of a share without indices; no state is kept of it
        empty = nothing if place in form.pieces else shape
        # a rank without state (an empty piece, or another owns it) takes part all the same
        tensor = mine[place].detach() if mine else torch.empty(empty, dtype=getattr(torch, dtype))
        # of a tensor that is sent and no piece, an owner or every rank has the whole
        if place in form.pieces:
            return together(state, name, state.technique.whole(index, tensor.to(homes.get(name, state.device))))
        if state.owners is not None:
            tensor = tensor.to(state.device).contiguous()
            for axis, sender in state.owners.route(index):
                broadcast(tensor, axis, sender, "control")
        return ready(tensor)

    sent = [(index, name, place) for index, name in enumerate(state.names) for place in forms[name].sent]
    return zip((name for _, name, _ in sent), gathered_together(leaf(*place) for place in sent), strict=True)


def _encoded(value: Any, tensors: list[torch.Tensor], name: str) -> Any:
    """Returns a state as JSON, its tensors replaced by their numbers in `tensors`, which grows; else `RefusedPlan`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    # as pairs: JSON would turn keys that are numbers into text
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(item, tensors, name)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_encoded(item, tensors, name) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise RefusedPlan(
        f"the optimizer's state of '{name}' holds a {type(value).__name__}; tensors, numbers, texts, and lists, tuples "
        "and dicts of them can be told to other ranks"
    )


def _decoded(template: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """Returns the state that `_encoded` made JSON of, with `tensors` in the place of their numbers."""
    # one key says what the node is
    ((kind, value),) = template.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _decoded(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_decoded(item, tensors) for item in value)
    return value
