"""Load a checkpoint's state, or weights alone, renamed. Settings of a run for it: training/keeping; scripts: saved.

    choose    the newest checkpoint that every rank finds whole: digests of all files, each read by one rank
    compare   names, shapes and the kind of the optimizer with the engine's; every rank says alike what differs
    read      each rank the pieces it needs, from whichever files hold them; nothing is sent between ranks
    publish   as after an optimizer step

Up to the third line nothing of the engine has changed, and all that a damaged or foreign checkpoint leads to is an
error (or an older checkpoint). In the third a disk that fails ends the run.
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

MOST = 3  # names told of each kind of difference


@dataclass
class Restored:
    """A loaded checkpoint: its folder, its manifest, notices, and damaged checkpoints that were passed over."""

    folder: Path
    manifest: Manifest
    notices: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    same_plan: bool = False  # the engine's is the one that the checkpoint was written under


def restore(engine: Engine, folder: str | Path, *, ema: Ema | None = None) -> Restored:
    """Load weights, optimizer state, buffers and generators into an engine; returns what was found. Collective.

    folder   a checkpoint, or a folder of them: the newest that is whole is taken
    ema      the moving average to restore with the weights; one that the checkpoint lacks begins at its weights

    Raises `InputError` where there is none, or it is another model's or another optimizer's.
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
    """Returns the newest checkpoint whose files have their digests, with notices of damaged ones. Collective.

    Raises `InputError` where there is none.
    """
    paths = [str(path) for path in publish.scan(folder)] or [str(folder)]
    notices: list[str] = []
    damaged: list[Path] = []
    # rank 0's list decides for all: another rank may see a newer folder, or none yet
    for name in gather_json(paths, engine.mesh.world, engine.device)[0]:
        path = place(name)
        # each rank reads some of the files, and all see what each found wrong
        mine = publish.verify(path, engine.rank, engine.world_size)
        wrong = sorted({word for words in gather_json(mine, engine.mesh.world, engine.device) for word in words})
        if not wrong:
            with of_checkpoint(path) as stored:
                assert stored.manifest is not None
                # under another plan pieces have other bounds, which the loader then puts together
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
    """Run `work` on every rank; where it fails on one, every rank raises. Collective."""
    error: Exception | None = None
    # everyone must hear of a failure: the rest would wait in a collective that a raising rank never enters
    try:
        work()
    except Exception as problem:
        error = problem
    errors = gather_json("" if error is None else str(error) or type(error).__name__, engine.mesh.world, engine.device)
    # with its own class and traceback where it arose; elsewhere as what that rank said
    if error is not None:
        raise error
    for rank, word in enumerate(errors):
        if word:
            raise RunError(f"rank {rank} could not load the checkpoint: {word}")


# --- what has to fit


def _compare(engine: Engine, stored: Stored) -> None:
    """Raises `InputError` on every rank where the checkpoint is another model's or another optimizer's. Collective."""
    by_rank = gather_json(_differences(engine, stored), engine.mesh.world, engine.device)
    names_by_difference: dict[str, list[str]] = {}  # each rank has pieces of its own, and tells of those
    for what, name in dict.fromkeys((what, name) for own in by_rank for what, name in own):
        names_by_difference.setdefault(what, []).append(name)
    if names_by_difference:
        words = "; ".join(_listed(what, names) for what, names in names_by_difference.items())
        assert stored.manifest is not None
        saved, ours = stored.manifest.fields.get("task"), engine.task.name
        other = ""
        # the likeliest reason of all differences
        if saved != ours:
            words = _listed(*next(iter(names_by_difference.items())))
            other = f" (it is of the task {saved!r}, and this run's is {ours!r})"
        raise InputError(
            f"{stored.folder} does not fit{other}: {words}; --init-from begins a new run with the weights that agree"
        )


def _differences(engine: Engine, stored: Stored) -> list[tuple[str, str]]:
    """Returns (difference, name) of everything that the checkpoint and the engine do not have alike."""
    assert stored.manifest is not None
    fields = stored.manifest.fields
    wanted = {holding.key: holding for holding in weights(engine)}
    mine = {f"model/{name}" for name in engine.state.all_names + engine.state.frozen_names}
    mine |= {f"buffer/{name}" for name, _ in engine.module.named_buffers()}
    elsewhere = stored.elsewhere
    differences = [
        # weights that the task's files hold are compared below, by what they are
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
        # pieces may be cut otherwise, but a whole tensor has one shape
        ("of another shape:", f"{key} is {stored.tensors[key].shape} there and {holding.piece.shape} here")
        for key, holding in wanted.items()
        if key in stored.tensors and stored.tensors[key].shape != holding.piece.shape
    ]
    kind = type(engine.optimizer).__name__
    # the keys of another optimizer's state differ as a whole: listing each would say nothing more
    if fields.get("optimizer_class") == kind:
        return differences + _state_differences(engine, stored, fields["optimizer"])
    other = f"{fields.get('optimizer_class')}, this run's {kind}: --init-from takes weights alone"
    return [*differences, ("its optimizer is", other)]


def _other(engine: Engine, stored: Stored) -> list[str]:
    """Returns the names of frozen weights, left to the task's files, that differ from those of the saved run."""
    held = engine.state.held_frozen
    return [name for name, mark in stored.elsewhere.items() if name in held and engine.state.read.get(name) != mark]


def _state_differences(engine: Engine, stored: Stored, tree: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns (difference, name) of optimizer tensors that are missing, or not of their weight's shape."""
    differences = []
    # what an optimizer of another kind keeps is refused above; here a weight's own state must be there
    for name, piece, _ in optimized(engine).values():
        for key, node in tree.get(name, {}).items():
            for kind, tensor in leaves(node):
                if tensor not in stored.tensors:
                    differences.append(("of the optimizer's state it lacks", f"'{key}' of '{name}'"))
                # "like": as large as the weight, so its shape is checked; "whole" has its own
                elif kind == "like" and stored.tensors[tensor].shape != piece.shape:
                    differences.append(("of the optimizer's state of another shape:", f"'{key}' of '{name}'"))
    return differences


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"{what} {', '.join(names[:MOST])}{more}"


# --- into place


@torch.no_grad()
def _read(engine: Engine, stored: Stored, ema: Ema | None, chosen: Restored) -> None:
    """Read this rank's pieces of weights, averages, optimizer state and generators into the engine."""
    for child in engine.module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()  # else the next forward would use what was gathered before
    for holding in weights(engine):
        if holding.piece.count and holding.key in stored.tensors:  # else the task's files have it: `_other`
            _put(stored, holding.key, holding.piece, holding.tensor)
    if engine.state.owners is not None:
        # each parameter's master lies whole with one owner, beside the pieces
        for index, master in engine.state.owners.masters.items():
            _put(stored, f"model/{engine.state.names[index]}", Piece.whole(master.shape), master)
    for holding in averages(engine, ema):
        # a checkpoint without averages: they begin at its weights
        name = holding.key if holding.key in stored.tensors else holding.key.replace("ema/", "model/", 1)
        _put(stored, name, holding.piece, holding.tensor)
    fields = chosen.manifest.fields
    _read_optimizer(engine, stored, fields["optimizer"])
    put_options(engine, fields["group_of"], fields["groups"])
    if chosen.same_plan:  # a rank's draws belong to the share that it has under that plan
        for holding in generators(engine.rank, engine.device):
            if holding.key in stored.tensors:
                state = tensor_of(stored, holding.key, Piece.whole(stored.tensors[holding.key].shape))
                set_generator(holding.key.rpartition("/")[2], state, engine.device)


def _read_optimizer(engine: Engine, stored: Stored, tree: Mapping[str, Mapping[str, Any]]) -> None:
    """Read optimizer state, cut to this rank's pieces. `tree`: {parameter: {key: node}}, other state by `BESIDE`."""
    for key, node in tree.get(BESIDE, {}).items():
        engine.optimizer.state[key] = decoded(node, None, engine.device, near=False)
    for group in engine.optimizer.param_groups:
        # such an optimizer reads its numbers on the device: those whose old place is open go there
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
                # what had the weight's dtype follows it into this run's precision; a step counter stays as it is
                as_weight = stored.tensors[key].dtype == saved and value.is_floating_point()
                return value.to(master.device, master.dtype if as_weight else None)

            state = {k: decoded(node, read, master.device, near) for k, node in tree.get(name, {}).items()}
            if state:
                engine.optimizer.state[param] = state
                if engine.state.tier is not None:  # at once: all of it may be more than there is memory
                    engine.state.tier.settle(param)
            # nothing was saved for it: state of earlier steps must not stay
            else:
                engine.optimizer.state.pop(param, None)


def tensor_of(stored: Stored, key: str, piece: Piece) -> torch.Tensor:
    """Returns the elements of a piece, flat, on the CPU, in the dtype that was stored."""
    array = stored.read(key, piece)
    dtype = DTYPES[stored.tensors[key].dtype]
    return torch.from_numpy(array.view(np.uint8)).view(dtype)


def _put(stored: Stored, key: str, piece: Piece, place: torch.Tensor) -> None:
    """Read the elements of a piece into a tensor: straight into its memory where that has the same layout and dtype."""
    dtype = DTYPES[stored.tensors[key].dtype]
    own = not isinstance(place, Resting)
    if own and place.is_cpu and place.is_contiguous() and place.dtype == dtype and place.numel() == piece.count:
        bits = place.detach().view(-1).view(torch.uint8).numpy()
        stored.read(key, piece, bits.view(ITEMS[place.element_size()]))
    else:
        place.copy_(tensor_of(stored, key, piece).view(place.shape))


# --- weights alone


@dataclass(frozen=True)
class Matched:
    """Names of the model's tensors that were loaded, that files lack or have in another shape; files' unused names."""

    loaded: list[str]
    missing: list[str]
    unused: list[str]


def load_weights(engine: Engine, stored: Stored, renames: Mapping[str, str] | None = None) -> Matched:
    """Loads weights and buffers by name into an engine, where names and shapes agree; returns `Matched`. Collective.

    renames   pattern -> replacement, as `re.sub` takes them, applied to the files' names in turn

    Raises `InputError` where nothing agrees, or two names become one.
    """
    names = _renamed(stored, renames or {})
    # buffers and weights are two kinds in the manifest, and one name each in a module
    wanted = {holding.key.partition("/")[2]: holding for holding in weights(engine)}
    _beside_adapters(names, engine)
    # another head or vocabulary has another shape: it stays as it was initialised, and is told
    fits = {
        name: holding
        for name, holding in wanted.items()
        if name in names and stored.tensors[names[name]].shape == holding.piece.shape
    }
    # ranks hold different pieces: a name is missing where no rank found it, and loaded where any did
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
        """Read this rank's pieces of all tensors that fit, into owners' whole masters too."""
        # the shards are written: a unit that is still gathered would go on with its old whole weights
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
    """Rename in `names` a plain model's weights, and those of a file of peft, to those of a model with adapters."""
    for name in (*engine.state.all_names, *engine.state.frozen_names):
        plain, in_file = name.replace(".base_layer.", "."), f"base_model.model.{name.replace('.default.', '.')}"
        for other in (plain, in_file, in_file.removesuffix(".weight")):
            if name not in names and other in names:
                names[name] = names.pop(other)


def _renamed(stored: Stored, renames: Mapping[str, str]) -> dict[str, str]:
    """Returns {name by `renames`: name in the files} of weights and buffers; `InputError` where two become one."""
    names: dict[str, str] = {}
    for key in stored.tensors:
        name = key
        if stored.manifest is not None:
            # optimizer state and averages are no weights of a module
            kind, _, name = key.partition("/")
            if kind not in ("model", "buffer"):
                continue
        for pattern, replacement in renames.items():
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise InputError(f"{pattern!r} -> {replacement!r} is no renaming: {error}") from None
        # two names that become one: one of the two tensors would be lost silently
        if name in names:
            raise InputError(f"'{names[name]}' and '{key}' would both be '{name}'")
        names[name] = key
    return names
