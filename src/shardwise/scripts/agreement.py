"""Check what ranks must agree on before a step's gradients are divided: samples, draws, means. For stepping, calls."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from shardwise.comm import Axis, gather_json, gather_rows
from shardwise.device import generator_state
from shardwise.digest import bits_hash
from shardwise.engine.alike import HeldAlike
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.host import read, row_of
from shardwise.scripts.additive import LossLook
from shardwise.scripts.by_hand import ByHand
from shardwise.scripts.divisor import Divisor
from shardwise.scripts.kept import Kept
from shardwise.scripts.outside import Outside, refuse_apart
from shardwise.scripts.outside import checksum as checksum_of
from shardwise.step.control import Tally

_KINDS = {"mean": 1.0, "sum": 2.0, "unknown": 3.0}
_NUMBERS = 3  # of those that a loss was divided by, each of which may count samples or be a constant
_WAYS = 2**_NUMBERS


def compare(
    engine: Engine, forms: list[tuple[Divisor, int]], tally: Tally, checksum: int,
    over: tuple[Divisor, float] | None, *, generators: bool, look: LossLook | None,
    whole: bool, kept: Kept | None = None, entered: Sequence[Outside] = (), by_hand: ByHand, alike: HeldAlike,
) -> None:  # fmt: skip
    """Raise an error where this step would differ from one process. One small collective.

    forms       by micro-batch: what the loss without a weight was divided by, and how many samples this rank held
    tally       what this rank counted and added up
    checksum    of the batches that its loader drew, the same on ranks that drew the same
    over        of a loss with a weight: what it was divided by, and the weight that was given
    generators  draws are those of one process, so torch's generators must stand alike
    look        at losses, which all ranks take where one asks for it
    kept, entered  what the step's losses were computed from that came from outside of it
    by_hand     what the script has given to pieces of weights and gradients since the last step
    alike       what ranks hold alike, as it was noted in the last step
    whole       every rank of the data axis computes the loss of all samples
    """
    kind = max((_KINDS[form.kind] for form, _ in forms), default=0.0)
    first = forms[0][0].numbers[0] if forms and forms[0][0].numbers else 0.0
    groups = engine.state.optimizer.param_groups
    settings = zlib.crc32(
        repr([sorted((k, _plain(v)) for k, v in g.items() if k != "params") for g in groups]).encode()
    )
    generator = _generators(engine.device) if generators else 0
    wanted = look.wanted + 2 * look.assumed + 4 * look.leaves_out if look is not None else 0
    row: list[Any] = [kind, first, float(tally.samples), wanted, checksum, generator, settings]
    row += [*_by_samples(forms), *_given(over)]
    row += [by_hand.number(), float(engine.mesh.data.ranks[0]), float(checksum_of(entered))]
    row = row_of([*alike.noted(), *row], engine.device)
    rows = read(gather_rows(row, engine.mesh.world), "a script's samples and means")
    held, gathered = torch.tensor(rows, dtype=torch.float64).tensor_split([4], dim=1)
    table, means, given = gathered[:, :7], gathered[:, 7 : 7 + _WAYS], gathered[:, 7 + _WAYS : -3]
    kinds_apart, _, _, _, batches_apart, generators_apart, settings_apart = (table != table[0]).any(dim=0).tolist()
    numbers_apart = bool((means != means[0]).any(dim=0).all())
    if look is not None:
        if bool((table[:, 3] > 3).any()):
            look.refuse_left_out()
        look.assumed, look.wanted = bool((table[:, 3] > 1).any()), bool(table[:, 3].any())
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
    by_hand.compared(gathered[:, -3].tolist())
    if kept is not None and _apart_in_groups(gathered[:, -2:]):
        refuse_apart(engine.mesh, kept.shapes, entered)
    alike.check_noted(held, engine.steps_done)
    if settings_apart:
        raise _other_settings(engine)
    unknown = float(table[:, 0].max()) == _KINDS["unknown"]
    if kind and (kinds_apart or numbers_apart or unknown):
        raise InputError(_unequal(table, unknown))
    _in_proportion(given)
    for axis in (engine.mesh.tp, *engine.mesh.inner, *([engine.mesh.data] if whole else [])):
        if axis.size > 1:
            _same_losses(engine, tally, axis)


def _other_settings(engine: Engine) -> RunError:
    """Returns what to raise where ranks have other settings of the optimizer, each with its rates. Collective."""
    mine = [float(group.get("lr", 0.0)) for group in engine.state.optimizer.param_groups]
    rates = gather_json(mine, engine.mesh.world, engine.device)
    told = "; ".join(f"{', '.join(f'{rate:g}' for rate in held)} on rank {rank}" for rank, held in enumerate(rates))
    return RunError(
        f"the optimizer's settings differ between ranks in step {engine.steps_done} (learning rates {told}): set "
        "them from what is the same on every rank (prepared.loss, prepared.sum(...)), not from this rank's own loss"
    )


def _apart_in_groups(pairs: torch.Tensor) -> bool:
    """Whether rows whose first number is the same have another second one."""
    return len(pairs.unique(dim=0)) > len(pairs[:, 0].unique())


def _by_samples(forms: list[tuple[Divisor, int]]) -> list[float]:
    """Checks of what means are over: where ranks agree in one of them, a mean over ranks' samples is one over all.

    The first: over the same numbers, of as many samples. The others: over numbers in proportion to the samples; one
    that stands in the script may be a constant (4 micro-batches).
    """
    checks = [[(form.numbers, 0 if form.kind == "sum" else held, form.beside) for form, held in forms]]
    for way in range(1, _WAYS):
        checks.append([(_each(form, held, way), 0, form.beside) for form, held in forms])
    return [float(zlib.crc32(repr(each).encode())) for each in checks]


def _each(form: Divisor, held: int, way: int) -> tuple[float, ...]:
    """The numbers for one sample; of those in the script, bit by bit of `way`, or as they are."""
    if not form.numbers:
        return ()  # a penalty on weights alone
    counts = [number not in form.written or way >> min(at, _NUMBERS - 1) & 1 for at, number in enumerate(form.numbers)]
    if not any(counts):
        return (float(held), *form.numbers)
    return tuple(number / (held if by else 1) for number, by in zip(form.numbers, counts, strict=True))


def _given(over: tuple[Divisor, float] | None) -> list[float]:
    """The weight of this rank, up to three numbers that its loss is a mean over, and which of them the script wrote."""
    nothing = float("nan")
    if over is None or over[0].kind != "mean" or not over[1]:
        return [nothing] * 7
    numbers = [*over[0].numbers[:3], nothing, nothing, nothing][:3]
    return [over[1], *numbers, *(float(number in over[0].written) for number in numbers)]


def _in_proportion(given: torch.Tensor) -> None:
    """Raise where a rank's mean is over more of something else than its weight says."""
    rows = given[~given[:, 0].isnan()]
    for column in (1, 2, 3):
        numbers, weights, written = rows[:, column], rows[:, 0], rows[:, column + 3]
        if len(rows) < 2 or bool(numbers.isnan().any()):
            continue
        ratios = numbers / weights
        constant = bool(written.all()) and bool((numbers == numbers[0]).all())
        if not constant and float(ratios.max() - ratios.min()) > 1e-6 * float(ratios.max()):
            raise InputError(
                f"prepared.backward: the loss is a mean over {_listed(numbers)} on the ranks, and the weights given "
                f"for it are {_listed(weights)}, so its mean over all ranks is not one process's: give what it "
                "is a mean over"
            )


def _listed(numbers: torch.Tensor) -> str:
    return ", ".join(f"{number:g}" for number in numbers.tolist())


def _same_losses(engine: Engine, tally: Tally, axis: Axis) -> None:
    """Ranks of an axis that have the same samples have the same loss, unless the script looks at what each has."""
    totals = read(gather_rows(row_of([tally.total], engine.device), axis).view(-1), f"losses of ranks of {axis.name}")
    if max(totals) - min(totals) > 1e-4 * max(map(abs, totals)):
        told = ", ".join(f"{total:.6g} on rank {rank}" for rank, total in zip(axis.ranks, totals, strict=True))
        if axis is not engine.mesh.tp:
            raise RunError(
                f"the loss of the same samples is {told} in step {engine.steps_done}: under {axis.name}={axis.size} "
                "these ranks have the same batch, and the script computes a part of the loss from what differs between "
                "them (its rank, draws of its own)"
            )
        raise RunError(
            f"the loss of the same samples is {told} in step {engine.steps_done}: the script computes a part of it "
            f"from weights, of which each rank has a share under tp={engine.plan.tp} (a penalty over "
            "model.parameters()): use the optimizer's weight_decay, or compute it inside the model's forward"
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
        "every rank must give the same: load the same file on all of them"
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


def same_change(engine: Engine, before: torch.Tensor, now: torch.Tensor) -> None:
    """Raise `RefusedPlan` where a script scaled its gradients differently on some ranks. One small collective.

    Where parameters are FSDP's shares of shares, torch's own clipping sees a norm that differs between ranks.
    """
    scaled = torch.where(before != 0, now / before, torch.nan)
    told = read(gather_rows(scaled.view(1), engine.mesh.world).view(-1), "changes of gradients")
    known = [value for value in told if value == value]
    if known and max(known) - min(known) > 1e-4 * max(known):
        raise RefusedPlan(
            f"under plan {engine.plan} each rank has other shares of the gradients, and between backward and step they "
            "were not scaled alike on all ranks: clip with prepared.clip_grad_norm_(max_norm)"
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


def _unequal(table: torch.Tensor, unknown: bool) -> str:
    told = (
        "one process divides by the number over all ranks. Give what this rank's mean is over: "
        "prepared.backward(loss, mean_over=n); or the sum and its weight: prepared.backward(loss * n, n)"
    )
    if unknown:
        return f"prepared.backward(loss) without a weight: what the loss is a mean over cannot be seen, and {told}"
    if len(table[:, 1].unique()) == 1 == len(table[:, 2].unique()):
        return (
            "prepared.backward(loss) without a weight: the loss is multiplied or divided by a number that differs "
            "between ranks, as one that is made of this rank's own loss (loss.item(), a running mean): make it of what "
            'prepared.backward or prepared.sum(...) returns, or take prepare(..., loss_scope="global")'
        )
    samples = ", ".join(f"{int(row[2])} samples on rank {rank}" for rank, row in enumerate(table))
    means = ", ".join(f"{row[1]:g} on rank {rank}" for rank, row in enumerate(table))
    return f"prepared.backward(loss) without a weight: the loss is a mean over {means} ({samples}), and {told}"
