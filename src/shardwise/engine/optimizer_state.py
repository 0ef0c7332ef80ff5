"""Gather whole optimizer state from ranks that hold pieces of it. Into checkpoints: checkpoint/optimizers.

    replicas          every rank has all of it
    zero=1, 2, 3      pieces like the parameter's own, gathered over dp_shard (experts: over the ranks that share them)
    whole tensors     (Adafactor, Muon under zero) the state lies on the rank that owns the parameter
    tp, ep            shares like the parameter's own, gathered
    pp                the stage that holds the parameter sends it to the others

First ranks exchange one table of what each holds, so that all know which collectives follow. A state tensor is a piece
if on every rank it has the shape of that rank's piece of the parameter. A tensor of a single element (a count of steps)
is the same for all pieces, and is sent within the table.

What this does not do: gather what an optimizer keeps in its groups or attributes, beside `state`.
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
    """What one rank holds of one parameter's optimizer state, as JSON in the table that ranks gather.

    piece     shape of the tensor that this rank's optimizer updates
    whole     whether that tensor is the unsharded parameter
    template  the state of `_encoded`, with an id, an index into `tensors`, for each tensor; None: no state
    tensors   [dtype as "float32", shape, value if it has one real element else None] of each tensor
    """

    piece: list[int]
    whole: bool
    template: Any
    tensors: list[list[Any]]


def full_optimizer_state(state: RankState) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields (name, state as one process would have it, {} without any) of every trained parameter. Collective.

    Values are unsharded tensors (perhaps the optimizer's own), numbers, or lists, tuples and dicts of them. Raises
    `RefusedPlan` for a tensor of a shape from which it does not follow how ranks shard it, `ShardwiseError` if a rank
    lacks the state of its piece.
    """
    # offloaded state is valid only if the last step did not fail midway
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
    """Returns the global rank whose row describes a parameter's state: this one; under a pipeline its first holder."""
    if state.staged is None:
        return state.mesh.rank
    return state.mesh.pp.ranks[state.staged.cut.holders[name][0]]


def _mine(state: RankState) -> tuple[dict[str, _Row], dict[str, list[torch.Tensor]]]:
    """Returns ({name: this rank's `_Row`}, {name: the tensors whose ids the row has, in order})."""
    cuts = set(state.tensor.cuts if state.tensor is not None else ())
    cuts |= set(state.experts.dealt if state.experts is not None else ())
    # A share over tp or ep counts as whole to data parallelism (`slot.whole`), but is a piece of the parameter.
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
    """How to assemble one parameter's unsharded state, decided alike on all ranks that exchange it.

    template    the state, with ids for tensors; None: no state
    tensors     [dtype, shape, value] of each tensor, by id; set if there is a template
    from_table  id -> tensor of one element, whose value came with the table
    sent        ids of the tensors to gather or broadcast
    pieces      ids, among `sent`, of tensors that are pieces; the others are whole on their rank
    """

    def __init__(self, name: str, table: list[dict[str, _Row]], source: int):
        """Fills the attributes for the parameter `name`.

        table   for each rank, {parameter: `_Row`}
        source  the rank whose row describes the state if each holder has the whole of it (`_source`)
        """
        rows = {rank: row[name] for rank, row in enumerate(table) if name in row}
        with_state = {rank: row for rank, row in rows.items() if row.template is not None}
        self.from_table: dict[int, torch.Tensor] = {}
        self.sent: list[int] = []
        self.pieces: set[int] = set()
        self.template = None
        whole = all(row.whole for row in rows.values())
        # A rank with an empty piece has no state, so the structure is taken from any rank that has some.
        first = rows.get(source) if whole and source in rows else next(iter(with_state.values()), None)
        if first is None or first.template is None:
            return
        self.template, self.tensors = first.template, first.tensors
        # each holder has the whole state, so every tensor is sent as it is, also one-element counts
        if whole:
            self.sent = list(range(len(first.tensors)))
            return
        _refuse_lost(name, rows)
        for place, (dtype, shape, value) in enumerate(first.tensors):
            # Tested before the one-element case, since a rank's piece may have a single element too.
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
    """Raise `ShardwiseError` if a rank has no state for a piece with elements, while others have theirs."""
    for rank, row in rows.items():
        if row.template is None and 0 not in row.piece:
            raise ShardwiseError(
                f"rank {rank} has no optimizer state for its piece of '{name}', and other ranks have it for theirs"
            )


def _leaves(
    state: RankState, forms: dict[str, _Form], tensors_of: dict[str, list[torch.Tensor]], rows: dict[str, _Row]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, unsharded tensor) for the `sent` ids of each parameter of this rank's stages, in order.

    forms       {name: how to assemble its state};  tensors_of, rows  what `_mine` returned
    Collective over the ranks of a stage.
    """

    homes = {slot.name: slot.master.device for slot in state.technique.slots}

    def leaf(index: int, name: str, place: int) -> Gathering:
        """Returns the gathering of one state tensor of the parameter `name`: joins pieces, or broadcasts the owner's.

        index  of the parameter among `state.names`;  place  id of the tensor
        """
        form, mine = forms[name], tensors_of.get(name, [])
        dtype, shape, _ = form.tensors[place]
        nothing = rows[name].piece if name in rows else [0]  # shape of an empty piece
        empty = nothing if place in form.pieces else shape
        # a rank without state (its piece is empty, or another rank is the owner) must join the collectives too
        tensor = mine[place].detach() if mine else torch.empty(empty, dtype=getattr(torch, dtype))
        # pieces are joined; any other tensor is whole, on the owner if there is one, else on every rank
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
    """Returns `value` as JSON, each tensor replaced by its index in `tensors`, to which it is appended.

    name  of the parameter, for the message of the `RefusedPlan` for a value of another type
    """
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
    """Returns the value from which `_encoded` made `template`. `tensors`: id -> tensor to put in its place."""
    # one key says what the node is
    ((kind, value),) = template.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _decoded(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_decoded(item, tensors) for item in value)
    return value
