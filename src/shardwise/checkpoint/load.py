"""Loads a checkpoint's state into an engine, or weights alone, which may be renamed.

    choose    take the newest checkpoint whose files all have their digests; each file is read by one rank
    compare   compare names, shapes and the optimizer's class with the engine's; all ranks raise the same error
    read      each rank reads the pieces it needs, from whichever files hold them; ranks send each other nothing
    publish   as after an optimizer step

Before `read` the engine is unchanged, so a damaged or unsuitable checkpoint only leads to an error (or to an older
checkpoint). If a disk fails during `read`, the run ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.checkpoint import publish
from shardwise.checkpoint.holdings import averages, generators, optimized, set_generator, weights
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.optimizers import BESIDE, decoded, leaves, put_options
from shardwise.checkpoint.pieces import Piece
from shardwise.checkpoint.remote import place
from shardwise.checkpoint.stored import ITEMS, Stored, of_checkpoint
from shardwise.comm import gather_json
from shardwise.engine.ema import Ema
from shardwise.engine.engine import Engine
from shardwise.engine.weights_file import DTYPES
from shardwise.errors import InputError, RunError
from shardwise.tiers import Resting

MOST = 3  # names that a message lists for each kind of difference


@dataclass
class Restored:
    """A checkpoint that was chosen for loading.

    folder     its path, and `manifest` its content
    notices    a sentence for each newer checkpoint that is damaged
    damaged    paths of those
    same_plan  Whether it was written under the engine's own plan
    """

    folder: Path
    manifest: Manifest
    notices: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    same_plan: bool = False


def restore(engine: Engine, folder: str | Path, *, ema: Ema | None = None) -> Restored:
    """Loads weights, optimizer state, buffers and step counts into an engine; returns the checkpoint. Collective.

    folder   a checkpoint, or a folder of them, of which the newest undamaged one is taken
    ema      the moving average to restore too; if the checkpoint has none, it starts at the checkpoint's weights

    RNG states are loaded under the same plan alone. Raises `InputError` if there is no undamaged checkpoint, or it is
    of another model or optimizer.
    """
    chosen = choose(engine, place(folder))
    with of_checkpoint(chosen.folder) as stored:
        _compare(engine, stored)
        _together(engine, lambda: _read(engine, stored, ema, chosen))
    engine.technique.publish()
    state = chosen.manifest.fields["engine"]
    engine.state.steps_done, engine.state.skipped_steps = int(state["steps"]), int(state["skipped"])
    if engine.state.scale is not None and state["scale"] is not None:
        engine.state.scale.load_state_dict(state["scale"])
    return chosen


def choose(engine: Engine, folder: Path) -> Restored:
    """Returns the newest checkpoint below `folder` (or `folder` itself) whose files have their digests. Collective.

    Raises `InputError` if there is none.
    """
    paths = [str(path) for path in publish.scan(folder)] or [str(folder)]
    notices: list[str] = []
    damaged: list[Path] = []
    # rank 0's list decides for all: another rank may see a newer folder, or none yet
    for name in gather_json(paths, engine.mesh.world, engine.device)[0]:
        path = place(name)
        # each rank verifies some of the files, and all get the list of damaged ones
        mine = publish.verify(path, engine.rank, engine.world_size)
        wrong = sorted({word for words in gather_json(mine, engine.mesh.world, engine.device) for word in words})
        if not wrong:
            with of_checkpoint(path) as stored:
                assert stored.manifest is not None
                # RNG states are restored under the same plan alone
                same = stored.manifest.fields["plan"] == str(engine.plan)
                return Restored(path, stored.manifest, notices, damaged, same)
        notices.append(f"checkpoint {path.name} is damaged and was not loaded: " + "; ".join(wrong[:MOST]))
        damaged.append(path)
    raise InputError(
        f"{folder} holds no checkpoint that can be loaded: "
        + "; ".join(notices)
        + ". Restore them from a copy, or begin anew"
    )


def _together(engine: Engine, work: Callable[[], None]) -> None:
    """Runs `work` on every rank; if it fails on one, every rank raises. Collective."""
    error: Exception | None = None
    # ranks that did not fail would hang in the next collective, which the failed one never enters
    try:
        work()
    except Exception as problem:
        error = problem
    errors = gather_json("" if error is None else str(error) or type(error).__name__, engine.mesh.world, engine.device)
    # the rank that failed raises its own exception, the others a `RunError` with its message
    if error is not None:
        raise error
    for rank, word in enumerate(errors):
        if word:
            raise RunError(f"rank {rank} could not load the checkpoint: {word}")


# --- what has to fit


def _compare(engine: Engine, stored: Stored) -> None:
    """Raises `InputError` on all ranks if the checkpoint is of another model or another optimizer. Collective."""
    by_rank = gather_json(_differences(engine, stored), engine.mesh.world, engine.device)
    names_by_difference: dict[str, list[str]] = {}  # each rank compares its own tensors; joined over ranks
    for what, name in dict.fromkeys((what, name) for own in by_rank for what, name in own):
        names_by_difference.setdefault(what, []).append(name)
    if names_by_difference:
        words = "; ".join(_listed(what, names) for what, names in names_by_difference.items())
        assert stored.manifest is not None
        saved, ours = stored.manifest.fields.get("task"), engine.task.name
        other = ""
        # another task explains all differences, so the first kind of them suffices
        if saved != ours:
            words = _listed(*next(iter(names_by_difference.items())))
            other = f" (it is of the task {saved!r}, and this run's is {ours!r})"
        raise InputError(
            f"{stored.folder} does not fit{other}: {words}; --init-from begins a new run with the weights that agree"
        )


def _differences(engine: Engine, stored: Stored) -> list[tuple[str, str]]:
    """Returns (kind of difference, name) of each tensor or optimizer that differs between checkpoint and engine.

    Compared are this rank's weights and buffers by name, whole shape and (frozen ones) digest, and the optimizer.
    """
    assert stored.manifest is not None
    fields = stored.manifest.fields
    wanted = {holding.key: holding for holding in weights(engine)}
    mine = {f"model/{name}" for name in engine.state.all_names + engine.state.frozen_names}
    mine |= {f"buffer/{name}" for name, _ in engine.module.named_buffers()}
    elsewhere = stored.elsewhere
    differences = [
        # weights that lie in the task's files are compared below, by digest
        ("it lacks", key)
        for key, holding in wanted.items()
        if key not in stored.tensors and key.partition("/")[2] not in elsewhere and holding.piece.count
    ]
    files = "trained beside other weights than this task's files hold:"
    differences += [(files, name) for name in _other(engine, stored)]
    differences += [
        ("it has beside", key) for key in stored.tensors if key.startswith(("model/", "buffer/")) and key not in mine
    ]
    differences += [
        # plans may shard a tensor differently, but its unsharded shape must agree
        ("of another shape:", f"{key} is {stored.tensors[key].shape} there and {holding.piece.shape} here")
        for key, holding in wanted.items()
        if key in stored.tensors and stored.tensors[key].shape != holding.piece.shape
    ]
    kind = type(engine.optimizer).__name__
    # for another class of optimizer all state keys would differ, so only the class is told
    if fields.get("optimizer_class") == kind:
        return differences + _state_differences(engine, stored, fields["optimizer"])
    other = f"{fields.get('optimizer_class')}, this run's {kind}: --init-from takes weights alone"
    return [*differences, ("its optimizer is", other)]


def _other(engine: Engine, stored: Stored) -> list[str]:
    """Returns the frozen weights that the checkpoint left to the task's files and whose digests differ now."""
    held = engine.state.held_frozen
    return [name for name, mark in stored.elsewhere.items() if name in held and engine.state.read.get(name) != mark]


def _state_differences(engine: Engine, stored: Stored, tree: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns (kind of difference, name) of optimizer tensors that are missing, or not of their weight's shape.

    tree   weight -> state key -> node, as saved
    """
    differences = []
    for name, piece, _ in optimized(engine).values():
        for key, node in tree.get(name, {}).items():
            for kind, tensor in leaves(node):
                if tensor not in stored.tensors:
                    differences.append(("of the optimizer's state it lacks", f"'{key}' of '{name}'"))
                # a "like" tensor must have the weight's shape; a "whole" one has a shape of its own
                elif kind == "like" and stored.tensors[tensor].shape != piece.shape:
                    differences.append(("of the optimizer's state of another shape:", f"'{key}' of '{name}'"))
    return differences


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{what} {', '.join(names[:MOST])}{more}"


# --- into place


@torch.no_grad()
def _read(engine: Engine, stored: Stored, ema: Ema | None, chosen: Restored) -> None:
    """Reads this rank's pieces of weights, averages, optimizer state and (same plan) RNG states into the engine."""
    for child in engine.module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # else the next forward would use the old weights that are still gathered
    for holding in weights(engine):
        # a weight that the checkpoint lacks was read from the task's files and compared in `_other`
        if holding.piece.count and holding.key in stored.tensors:
            _put(stored, holding.key, holding.piece, holding.tensor)
    if engine.state.owners is not None:
        # the optimizer of an owner updates a whole master beside the pieces
        for index, master in engine.state.owners.masters.items():
            _put(stored, f"model/{engine.state.names[index]}", Piece.whole(master.shape), master)
    for holding in averages(engine, ema):
        # if the checkpoint has no averages, they start at its weights
        name = holding.key if holding.key in stored.tensors else holding.key.replace("ema/", "model/", 1)
        _put(stored, name, holding.piece, holding.tensor)
    fields = chosen.manifest.fields
    _read_optimizer(engine, stored, fields["optimizer"])
    put_options(engine, fields["group_of"], fields["groups"])
    if chosen.same_plan:  # under another plan a rank's RNG state belongs to other samples and shards
        for holding in generators(engine.rank, engine.device):
            if holding.key in stored.tensors:
                state = tensor_of(stored, holding.key, Piece.whole(stored.tensors[holding.key].shape))
                set_generator(holding.key.rpartition("/")[2], state, engine.device)


def _read_optimizer(engine: Engine, stored: Stored, tree: Mapping[str, Mapping[str, Any]]) -> None:
    """Reads this rank's pieces of the optimizer state into the optimizer.

    tree   weight -> state key -> node, as saved; state of no weight under `BESIDE`
    """
    for key, node in tree.get(BESIDE, {}).items():
        engine.optimizer.state[key] = decoded(node, None, engine.device, near=False)
    for group in engine.optimizer.param_groups:
        # a capturable or fused optimizer needs its step counters on the device
        near = bool(group.get("capturable") or group.get("fused"))
        pieces = optimized(engine)
        for param in group["params"]:
            if id(param) not in pieces:
                continue  # a frozen one
            name, piece, master = pieces[id(param)]
            saved = stored.tensors[f"model/{name}"].dtype

            def read(kind: str, key: str, piece=piece, master=master, saved=saved) -> torch.Tensor:
                shape = stored.tensors[key].shape
                value = tensor_of(stored, key, piece if kind == "like" else Piece.whole(shape))
                value = value.view(master.shape if kind == "like" else shape)
                # state of the weight's dtype is converted to this run's dtype of the weight, other state is not
                as_weight = stored.tensors[key].dtype == saved and value.is_floating_point()
                return value.to(master.device, master.dtype if as_weight else None)

            state = {k: decoded(node, read, master.device, near) for k, node in tree.get(name, {}).items()}
            if state:
                engine.optimizer.state[param] = state
                if engine.state.tier is not None:  # offload now, since the state of all weights may not fit
                    engine.state.tier.settle(param)
            # nothing was saved for this weight, so state of earlier steps must go
            else:
                engine.optimizer.state.pop(param, None)


def tensor_of(stored: Stored, key: str, piece: Piece) -> torch.Tensor:
    """Returns the elements of a piece as a 1-d tensor (piece.count,) on the CPU, in the stored dtype."""
    array = stored.read(key, piece)
    dtype = DTYPES[stored.tensors[key].dtype]
    return torch.from_numpy(array.view(np.uint8)).view(dtype)


def _put(stored: Stored, key: str, piece: Piece, place: torch.Tensor) -> None:
    """Reads the elements of a piece into the tensor `place`, converting dtype and device as needed."""
    dtype = DTYPES[stored.tensors[key].dtype]
    own = not isinstance(place, Resting)
    # same layout and dtype: the file is read into the tensor's memory, without a copy
    if own and place.is_cpu and place.is_contiguous() and place.dtype == dtype and place.numel() == piece.count:
        bits = place.detach().view(-1).view(torch.uint8).numpy()
        stored.read(key, piece, bits.view(ITEMS[place.element_size()]))
    else:
        place.copy_(tensor_of(stored, key, piece).view(place.shape))


# --- weights alone


@dataclass(frozen=True)
class Matched:
    """The outcome of `load_weights`, as sorted names.

    loaded   the model's weights and buffers that were read
    missing  the model's weights and buffers that the files lack, or have in another shape
    unused   (renamed) tensors of the files that were not read
    """

    loaded: list[str]
    missing: list[str]
    unused: list[str]


def load_weights(engine: Engine, stored: Stored, renames: Mapping[str, str] | None = None) -> Matched:
    """Loads those weights and buffers into an engine whose name and shape agree; returns `Matched`. Collective.

    stored    tensors of a checkpoint or of safetensors
    renames   pattern -> replacement, as `re.sub` takes them, applied to the files' names in turn; None: none

    Raises `InputError` if no tensor agrees, or two names become one.
    """
    names = _renamed(stored, renames or {})
    # keys are "model/NAME" or "buffer/NAME"; in a module a name is unique
    wanted = {holding.key.partition("/")[2]: holding for holding in weights(engine)}
    _beside_adapters(names, engine)
    # a tensor of another shape (another head or vocabulary) stays as initialised, and is reported as missing
    fits = {
        name: holding
        for name, holding in wanted.items()
        if name in names and stored.tensors[names[name]].shape == holding.piece.shape
    }
    # ranks hold different tensors: a name is loaded if any rank found it, and missing if none did
    by_rank = gather_json([sorted(fits), sorted(wanted.keys() - fits.keys())], engine.mesh.world, engine.device)
    loaded = sorted({name for own, _ in by_rank for name in own})
    missing = sorted({name for _, own in by_rank for name in own} - set(loaded))
    if not loaded:
        some = ", ".join(sorted(names)[:MOST])
        raise InputError(
            f"{stored.folder}: no weight of this model has a name and shape in it; it has {some}, ...: it is another "
            "model's, or train.init_rename changes its names"
        )

    @torch.no_grad()
    def read() -> None:
        """Reads this rank's pieces of all matching tensors, and the whole masters that it owns."""
        # the shards are overwritten: a unit that is still gathered would compute with its old weights
        for child in engine.module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()
        for name, holding in fits.items():
            _put(stored, names[name], holding.piece, holding.tensor)
        # the owner of a weight holds it whole beside its piece
        if engine.state.owners is not None:
            for index, master in engine.state.owners.masters.items():
                if engine.state.names[index] in loaded:
                    _put(stored, names[engine.state.names[index]], Piece.whole(master.shape), master)

    _together(engine, read)
    engine.technique.publish()
    return Matched(loaded, missing, sorted(names.keys() - set(loaded)))


def _beside_adapters(names: dict[str, str], engine: Engine) -> None:
    """Renames keys of `names` to the engine's names if the model has adapters of peft and the files have other names.

    names   name -> name in the files, changed in place

    Two forms are recognised: names of the plain model (without ".base_layer."), and names in an adapter file of peft
    ("base_model.model." before, without ".default." and perhaps without ".weight").
    """
    for name in (*engine.state.all_names, *engine.state.frozen_names):
        plain, in_file = name.replace(".base_layer.", "."), f"base_model.model.{name.replace('.default.', '.')}"
        for other in (plain, in_file, in_file.removesuffix(".weight")):
            if name not in names and other in names:
                names[name] = names.pop(other)


def _renamed(stored: Stored, renames: Mapping[str, str]) -> dict[str, str]:
    """Returns {renamed name: name in the files} of weights and buffers; `InputError` if two names become one.

    renames   pattern -> replacement, as `re.sub` takes them, applied in turn
    """
    names: dict[str, str] = {}
    for key in stored.tensors:
        name = key
        if stored.manifest is not None:
            # a checkpoint also holds optimizer state, averages and RNG states
            kind, _, name = key.partition("/")
            if kind not in ("model", "buffer"):
                continue
        for pattern, replacement in renames.items():
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise InputError(f"{pattern!r} -> {replacement!r} is no renaming: {error}") from None
        # one of the two tensors would be lost silently
        if name in names:
            raise InputError(f"'{names[name]}' and '{key}' would both be '{name}'")
        names[name] = key
    return names
