"""`shardwise.save` and `load` of a prepared script, in the foreground; see checkpoint/save and checkpoint/load.

Every rank writes its own pieces of weights, optimizer state and buffers, with digests (`checkpoint/`); they load under
any plan. Beside them: the loader's place in its epoch, rank 0's random generators, and what the script gives.

    run      epoch: 7 2 | 9 4 | save | 0 5 | 1 3
    loaded                             0 5 | 1 3     the first loop over the loader hands out the rest of that epoch

What this does not do: restore generators in a loader's workers, or in iterables that draw by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.inspect import opened
from shardwise.checkpoint.optimizers import Node, NoJson, decoded, leaves, plain_node
from shardwise.checkpoint.remote import place
from shardwise.checkpoint.save import Saver
from shardwise.errors import InputError
from shardwise.scripts.prepared import Prepared
from shardwise.scripts.proof.plain import Plain, load_refused
from shardwise.scripts.proof.recorder import recorder
from shardwise.scripts.reading import Generators
from shardwise.scripts.script_lines import names_line

NO_SCHEDULE = (
    "a scheduler sets the optimizer's learning rate, and is not among what shardwise.save is given, so that a script "
    "which goes on begins its schedule anew: shardwise.save(prepared, folder, scheduler=scheduler.state_dict()), and "
    'scheduler.load_state_dict(shardwise.load(prepared, folder)["scheduler"])'
)


@names_line
def save(prepared: Prepared, folder: str | Path, *, keep: int = 2, **fields: Any) -> Path:
    """Writes a checkpoint of a prepared script below `folder` and returns its path. Collective.

    keep    how many published checkpoints stay, the newest
    fields  what the script needs to go on (an epoch, a scheduler's state), of which rank 0's is kept: numbers, str,
            lists and dicts of them; a tensor of one element is a number

    It is on the disk, digests checked, when this returns. Raises `RunError` if only some ranks call it, `InputError`
    for a field that is something else.
    """
    if isinstance(prepared, Plain):
        return prepared.save(folder, **fields)
    if prepared.side is not None:
        prepared.side.recorder.met("a save")
    engine, given = prepared.engine, {name: _node_of(name, value) for name, value in fields.items()}
    # on replicas too: every rank writes its part of the files
    prepared.meet("shardwise.save(...)", always=True)
    prepared.compare()
    # torch's schedulers write "initial_lr" into groups
    if not _has_schedule(fields) and any("initial_lr" in group for group in prepared.optimizer.param_groups):
        prepared._notices.say([NO_SCHEDULE])
    loader, calls = prepared.loader, prepared.calls
    stand = Generators(loader.whole).as_json()
    told = {"loader": loader.position(), "generators": stand, "forwards": calls.forwards, "given": given}
    with prepared._reading():
        saver = Saver(engine, folder, keep=keep, background=False)
        saver.built = prepared.built
        try:
            saver.save({"script": told})
            assert saver.last is not None
            return saver.last
        finally:
            saver.close()


@names_line
def load(prepared: Prepared, folder: str | Path) -> dict[str, Any]:
    """Loads the newest complete checkpoint below `folder`, of any plan; returns the script's own fields {name: value}.

    Collective. If cuts wait for the model's first forward in training, weights and state are loaded by that. Raises
    `InputError` if there is none, or it is another model's.
    """
    # a proof runs the script from its start, and refuses to go on from a checkpoint
    if recorder() is not None:
        load_refused(folder)
    with opened(folder) as stored:
        fields = stored.manifest.fields.get("script") if stored.manifest is not None else None
        chosen = stored.folder
    # a checkpoint of a run or of weights alone has no fields of a script's
    if fields is None:
        raise InputError(f"{folder} holds no checkpoint of a script; weights alone: model.load_state_dict(...)")
    if prepared.waits:  # no engine yet: the first training forward makes it and loads this
        prepared.pending = chosen
    else:
        prepared.meet("shardwise.load(...)", always=True)
        fields = prepared._restored(place(folder))
    prepared.loader.go_on(fields["loader"])
    prepared.calls.forwards = fields["forwards"]
    Generators.from_json(prepared.loader.whole, fields["generators"]).restore()
    given: dict[str, Node] = fields["given"]
    # the fields are JSON: a tensor in one would come from another rank's file
    if any(list(leaves(node)) for node in given.values()):
        raise InputError("the checkpoint's fields name tensors, which a script's have not")
    return {name: decoded(node, None, torch.device("cpu"), near=False) for name, node in given.items()}


def _has_schedule(fields: Any) -> bool:
    """Returns whether the state of a learning-rate scheduler is among the fields, or within one of them."""
    return isinstance(fields, dict) and ("last_epoch" in fields or any(map(_has_schedule, fields.values())))


def _node_of(name: str, value: Any) -> Node:
    """Returns a field's value as JSON that restores it exactly, number keys and infinity too; or `InputError`."""
    try:
        return plain_node(value)
    except NoJson as why:
        raise InputError(
            f"shardwise.save(..., {name}=...): there is {why} in it, and what a script gives is numbers, text, lists "
            "and dicts of them: write tensors beside the checkpoint, torch.save(...) under if prepared.rank == 0"
        ) from None
