"""What ranks must agree on in a step before its gradients are divided: their samples, their draws, their means."""

from __future__ import annotations

import zlib

import torch

from shardwise.comm import gather_rows
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.scripts.divisor import Divisor
from shardwise.step.control import Tally

_KINDS = {"mean": 1.0, "sum": 2.0, "unknown": 3.0}


def compare(engine: Engine, forms: list[Divisor], tally: Tally, checksum: int, *, generators: bool) -> None:
    """Raise what would differ from one process. One small collective.

    forms       what the losses without a weight were divided by, by micro-batch
    tally       what this rank counted and added up
    checksum    of the batches that its loader drew, the same on ranks that drew the same
    generators  draws are those of one process, so torch's generators must stand alike
    """
    kind = max((_KINDS[form.kind] for form in forms), default=0.0)
    first = forms[0].numbers[0] if forms and forms[0].numbers else 0.0
    numbers = zlib.crc32(repr([form.numbers for form in forms]).encode())
    generator = _generators(engine.device) if generators else 0
    row = torch.tensor([kind, numbers, first, float(tally.samples), checksum, generator], dtype=torch.float64)
    table = gather_rows(row.to(engine.device), engine.mesh.world).cpu()
    kinds_apart, numbers_apart, _, samples_apart, batches_apart, generators_apart = (
        (table != table[0]).any(dim=0).tolist()
    )
    if batches_apart:
        raise RunError(
            f"the ranks' loaders drew other samples in step {engine.steps_done}: the sampler draws from a generator "
            "that differs between ranks: seed it alike on every rank"
        )
    if generators_apart:
        raise RunError(
            f"the ranks' random generators stand apart in step {engine.steps_done}: something drew more on one than on "
            "another, such as a dataset that draws while it reads (give the loader num_workers=1, or the dataset a "
            'generator of its own), or use prepare(..., randomness="fast")'
        )
    unknown = float(table[:, 0].max()) == _KINDS["unknown"]
    samples_apart &= kind != _KINDS["sum"]  # sums add up whatever they are over
    if kind and (kinds_apart or numbers_apart or samples_apart or unknown):
        raise InputError(_unequal(table, unknown))
    if engine.mesh.tp.size > 1:
        _same_losses(engine, tally)


def _same_losses(engine: Engine, tally: Tally) -> None:
    """Ranks of tp have the same samples, so that another loss can only come from their shares of the weights."""
    row = tally.row(0.0)[:1]
    totals = gather_rows(row, engine.mesh.tp).view(-1).tolist()
    if max(totals) - min(totals) > 1e-4 * max(map(abs, totals)):
        told = ", ".join(
            f"{total:.6g} on rank {rank}" for rank, total in zip(engine.mesh.tp.ranks, totals, strict=True)
        )
        raise RunError(
            f"the loss of the same samples is {told} in step {engine.steps_done}: the script computes a part of it "
            f"from weights, of which each rank has a share under tp={engine.plan.tp} (a penalty over "
            "model.parameters()): use the optimizer's weight_decay, or compute it inside the model's forward"
        )


def same_change(engine: Engine, before: torch.Tensor, now: torch.Tensor) -> None:
    """Whatever a script did to its gradients must have scaled those of every rank alike. One small collective.

    Where parameters are FSDP's shares of shares, torch's own clipping sees a norm that differs between ranks.
    """
    scaled = float(now) / float(before) if float(before) else float("nan")
    table = gather_rows(torch.tensor([scaled], dtype=torch.float64, device=engine.device), engine.mesh.world)
    known = [value for value in table.view(-1).tolist() if value == value]
    if known and max(known) - min(known) > 1e-4 * max(known):
        raise RefusedPlan(
            f"under plan {engine.plan} each rank has other shares of the gradients, and between backward and step they "
            "were not scaled alike on all ranks: clip with prepared.clip_grad_norm_(max_norm)"
        )


def _generators(device: torch.device) -> int:
    """A number that differs where torch's generators stand elsewhere."""
    check = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        check = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), check)
    return check


def _unequal(table: torch.Tensor, unknown: bool) -> str:
    told = (
        "one process divides by the number over all ranks. Give what this rank's mean is over: "
        "prepared.backward(loss, mean_over=n); or the sum and its weight: prepared.backward(loss * n, n)"
    )
    if unknown:
        return f"prepared.backward(loss) without a weight: what the loss is a mean over cannot be seen, and {told}"
    samples = ", ".join(f"{int(row[3])} samples on rank {rank}" for rank, row in enumerate(table))
    means = ", ".join(f"{row[2]:g} on rank {rank}" for rank, row in enumerate(table))
    return f"prepared.backward(loss) without a weight: the loss is a mean over {means} ({samples}), and {told}"
