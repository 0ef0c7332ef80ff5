"""Check what ranks must agree on before a step's gradients are divided: samples, draws, settings. For stepping."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from shardwise.comm import Axis, gather_json, gather_rows
from shardwise.device import generator_state
from shardwise.digest import bits_hash
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RunError
from shardwise.host import read, row_of
from shardwise.part import plain
from shardwise.step.control import Tally


def note(engine: Engine, tally: Tally, checksum: int, *, generators: bool) -> None:
    """Write into a step's control row what is to be alike on every rank: what was drawn, and how the optimizer is set.

    checksum    of the batches that its loader drew, the same on ranks that drew the same
    generators  draws are those of one process, so torch's generators must stand alike
    """
    groups = engine.state.optimizer.param_groups
    plain = [[(key, _plain(value)) for key, value in group.items() if key != "params"] for group in groups]
    settings = zlib.crc32(repr(plain).encode())
    tally.alike = [float(checksum), float(_generators(engine.device) if generators else 0), float(settings)]


def compare(engine: Engine, tally: Tally) -> None:
    """Raise an error where this step would differ from one process. Sends nothing where the control row went to all.

    tally   of a step that is complete, with what `note` wrote
    """
    rows = tally.alike_by_rank
    if engine.mesh.gradients.size < engine.mesh.world.size:
        rows = read(gather_rows(row_of(list(tally.alike), engine.device), engine.mesh.world), "what ranks draw and set")
    batches_apart, generators_apart, settings_apart = (any(row[at] != rows[0][at] for row in rows) for at in range(3))
    if batches_apart:
        raise RunError(
            f"the ranks' loaders drew other samples in step {engine.steps_done}: the sampler draws from a generator "
            "that differs between ranks: seed it alike on every rank"
        )
    if generators_apart:
        raise RunError(
            f"the ranks' random generators stand apart in step {engine.steps_done}: something drew more on one than on "
            "another: what the script does under if rank == 0 (an evaluation that draws its batches: do it on every "
            "rank), or a dataset that draws while it reads (give the loader num_workers=1, or the dataset a generator "
            'of its own); or use prepare(..., randomness="fast")'
        )
    if settings_apart:
        raise _other_settings(engine)


def same_on_all(tensors: Iterable[torch.Tensor], data: Axis, device: torch.device) -> bool:
    """Returns whether every rank of an axis has these tensors alike. Collective."""
    check = 0
    for tensor in tensors:
        flat = plain(tensor.detach()).cpu().contiguous().reshape(-1)
        check = zlib.crc32(flat.view(torch.uint8).numpy(), check) if flat.numel() else check
    table = gather_rows(row_of([float(check)], device), data)
    return bool((table == table[0]).all())


def _other_settings(engine: Engine) -> RunError:
    """Returns what to raise where ranks have other settings of the optimizer, each with its rates. Collective."""
    mine = [float(group.get("lr", 0.0)) for group in engine.state.optimizer.param_groups]
    rates = gather_json(mine, engine.mesh.world, engine.device)
    told = "; ".join(f"{', '.join(f'{rate:g}' for rate in held)} on rank {rank}" for rank, held in enumerate(rates))
    return RunError(
        f"the optimizer's settings differ between ranks in step {engine.steps_done} (learning rates {told}): set "
        "them from what is the same on every rank (prepared.loss, prepared.sum(...)), not from this rank's own loss"
    )


def same_given(what: str, given: Any, world: Axis, device: torch.device) -> None:
    """Raise `InputError` where ranks give a call that all of them make other values. Collective; one number of each.

    given   a state dict: tensors, numbers and text in dicts and lists; what else lies in it is not compared
    """
    leaves = {dotted(path): _bits(leaf) for path, leaf in tree_flatten_with_path(given)[0]}
    mine = zlib.crc32(repr(sorted(leaves.items())).encode())
    told = gather_json(mine, world, device)
    if len(set(told)) == 1:
        return
    everybody = gather_json(leaves, world, device)
    rank = next(rank for rank, number in enumerate(told) if number != told[0])
    names = everybody[0].keys() | everybody[rank].keys()
    name = min((name for name in names if everybody[0].get(name) != everybody[rank].get(name)), default="")
    has = "is another" if name in everybody[0] and name in everybody[rank] else "is given to one of them alone"
    raise InputError(
        f"{what}: '{name}' {has} on ranks 0 and {world.ranks[rank]}. Each rank keeps its part of what it is given, so "
        "every rank must give the same: load the same file, and "
        "make nothing of what this rank alone has (its samples, NumPy's numbers under another seed)"
    )


def dotted(path: tuple[Any, ...]) -> str:
    """The place of a leaf in nested dicts and lists, as text."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _bits(value: Any) -> Any:
    """What tells a value from another one, as JSON."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
        bits = bits_hash(value.detach().resolve_conj().resolve_neg().reshape(-1)) if plain else 0
        return [str(value.dtype), list(value.shape), bits]
    return repr(_plain(value))


def same_samples(look: list[float], checksum: int, world: Axis, device: torch.device) -> None:
    """Raise `InputError` where ranks read other samples under the same index. Collective; a few numbers of each.

    look      numbers of a sample, or of a batch, that every rank read; equal but for rounding where it is the same
    checksum  of the indices; those that differ are told in the step
    """
    everybody = gather_json([checksum, look], world, device)
    if any(one != checksum for one, _ in everybody):
        return
    told = [torch.tensor(one, dtype=torch.float64) for _, one in everybody]
    for rank, one in zip(world.ranks, told, strict=True):
        if one.shape != told[0].shape or not torch.allclose(one, told[0], rtol=1e-3, atol=1e-6, equal_nan=True):
            raise InputError(
                f"the first batch's first samples are others on rank {rank} than on rank 0: every rank deals out what "
                "one process would read. Split and shuffle the data alike on all (a seeded generator), and do not deal "
                'samples to ranks beforehand; or use prepare(..., randomness="fast") to take the difference'
            )


def _plain(setting: Any) -> Any:
    """A number or the like; nothing for what differs from process to process by itself."""
    setting = setting.item() if isinstance(setting, torch.Tensor) and setting.numel() == 1 else setting
    return setting if isinstance(setting, bool | int | float | str | tuple | None) else None


def _generators(device: torch.device) -> int:
    """A number that differs where torch's generators stand elsewhere."""
    check = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    own = generator_state(device)
    if own is not None:
        check = zlib.crc32(own.numpy().tobytes(), check)
    return check
