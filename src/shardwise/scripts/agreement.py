"""Checks that ranks agree: on samples, random generators and settings once a step, and on the order of their calls.

    rank 0   1 forward  2 step  3 model.state_dict()  waits until all have come
    rank 1   1 forward  2 step  3 forward  <- "rank 0 calls model.state_dict() [line 12], rank 1 a forward [line 9]"

Each rank counts its collective calls. The first rank to reach call number n writes the call's name into the store of
the process group; each later one compares its own. So an evaluation, a save or an extra step under `if rank == 0:`
raises before ranks enter a collective that would hang. Cost: one short line to the store for each call.

What this does not do: see a rank that does something else for good; the wait ends after a deadline, naming the line.
"""

from __future__ import annotations

import atexit
import secrets
import socket
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path

from shardwise.comm import Axis, Trail, gather_json, gather_rows
from shardwise.device import generator_state
from shardwise.digest import bits_hash
from shardwise.engine.engine import Engine
from shardwise.errors import InputError, RunError
from shardwise.host import read, row_of
from shardwise.look.samples import checksum_of
from shardwise.part import plain
from shardwise.ranks.ended import has_ended, say_ended
from shardwise.scripts.common_files import watch_saves
from shardwise.scripts.script_lines import line_of_script
from shardwise.step.control import Tally


def note(engine: Engine, tally: Tally, checksum: int, *, generators: bool) -> None:
    """Sets `tally.alike` to three checksums, of batches, generators and settings, that all ranks must have alike.

    checksum    CRC-32 over the sample indices of all batches that this rank's loader has drawn
    generators  Whether torch's generators must be in one state on all ranks (randomness="global"); False writes 0
    """
    groups = engine.state.optimizer.param_groups
    plain = [
        [(k, v if type(v) in _PLAIN else _plain(v)) for k, v in group.items() if k != "params"] for group in groups
    ]
    settings = zlib.crc32(repr(plain).encode())
    tally.alike = [float(checksum), float(_generators(engine.device) if generators else 0), float(settings)]


def compare(engine: Engine, tally: Tally) -> None:
    """Raises `RunError` if `tally.alike` differs between ranks, naming which of batches, generators or settings do.

    tally   of a completed step, in which `note` set `alike`. Collective if the control row went to a part of the world
    """
    rows, step = tally.alike_by_rank, engine.steps_done + 1
    # the control row went round the ranks that add up gradients alone: those of other axes (tp) are compared here
    if engine.mesh.gradients.size < engine.mesh.world.size:
        rows = read(gather_rows(row_of(list(tally.alike), engine.device), engine.mesh.world), "what ranks draw and set")
    batches_apart, generators_apart, settings_apart = (any(row[at] != rows[0][at] for row in rows) for at in range(3))
    # samples first: a sampler that draws by torch's generator moves it too, and this message names the sampler
    if batches_apart:
        raise RunError(
            f"the ranks' loaders drew other samples in step {step}: the sampler draws from a generator "
            "that differs between ranks: seed it alike on every rank"
        )
    if generators_apart:
        raise RunError(
            f"the ranks' random generators stand apart in step {step}: something drew more on one than on "
            "another: what the script does under if rank == 0 (an evaluation that draws its batches: do it on every "
            "rank), or a dataset that draws while it reads (give the loader num_workers=1, or the dataset a generator "
            'of its own); or use prepare(..., randomness="fast")'
        )
    if settings_apart:
        raise RunError(
            f"the optimizer's settings (lr) differ between ranks in step {step}: set them from "
            "what is the same on every rank (prepared.loss, prepared.sum(...)), not from this rank's own loss"
        )


def same_on_all(tensors: Iterable[torch.Tensor], data: Axis, device: torch.device) -> bool:
    """Returns whether these tensors have equal bits on every rank of the axis `data`. Collective."""
    table = gather_rows(row_of([checksum_of([plain(tensor) for tensor in tensors])], device), data)
    return bool((table == table[0]).all())


def same_given(what: str, given: Any, world: Axis, device: torch.device) -> None:
    """Raises `InputError` if ranks pass different values to the call named `what`.

    Collective; sends one checksum per rank.

    given   a state dict: tensors, numbers and str in nested dicts and lists; leaves of other types are not compared
    """
    leaves = {dotted(path): _bits(leaf) for path, leaf in tree_flatten_with_path(given)[0]}
    mine = zlib.crc32(repr(sorted(leaves.items())).encode())
    told = gather_json(mine, world, device)
    # the usual case: one number from each rank, and no names
    if len(set(told)) == 1:
        return
    everybody = gather_json(leaves, world, device)
    # each rank is compared with the first alone: one name is enough to find the mistake
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
    """Returns the path of a leaf in nested dicts and lists as a dotted str such as "a.0.b"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _bits(value: Any) -> Any:
    """Returns what is compared of one leaf: [dtype, shape, hash of bits] of a tensor, else a `repr`."""
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
        bits = bits_hash(value.detach().resolve_conj().resolve_neg().reshape(-1)) if plain else 0
        return [str(value.dtype), list(value.shape), bits]
    return repr(_plain(value))


def same_samples(look: list[float], checksum: int, world: Axis, device: torch.device) -> None:
    """Raises `InputError` if ranks read different samples under the same index.

    Collective; sends a few floats per rank.

    look      `look_of` a sample, or of a batch, that every rank reads; compared within rounding
    checksum  CRC-32 of the batch's indices; if these differ nothing is compared here, and `compare` raises at the
              step's end
    """
    everybody = gather_json([checksum, look], world, device)
    # the loaders drew other indices, so other samples say nothing here: `compare` raises for that at the step's end
    if any(one != checksum for one, _ in everybody):
        return
    # within rounding: ranks may read on unlike processors
    told = [torch.tensor(one, dtype=torch.float64) for _, one in everybody]
    for rank, one in zip(world.ranks, told, strict=True):
        if one.shape != told[0].shape or not torch.allclose(one, told[0], rtol=1e-3, atol=1e-6, equal_nan=True):
            raise InputError(
                f"the first batch's first samples are others on rank {rank} than on rank 0: every rank deals out what "
                "one process would read. Split and shuffle the data alike on all (a seeded generator), and do not deal "
                'samples to ranks beforehand; or use prepare(..., randomness="fast") to take the difference'
            )


_PLAIN = {bool, int, float, str, type(None)}


def _plain(setting: Any) -> Any:
    """Returns a number, str, tuple or None as it is, a one-element tensor as its number, None for any other object.

    The `repr` of an object holds its address, which differs between ranks.
    """
    setting = setting.item() if isinstance(setting, torch.Tensor) and setting.numel() == 1 else setting
    return setting if isinstance(setting, bool | int | float | str | tuple | None) else None


def _generators(device: torch.device) -> int:
    """Returns a CRC-32 of the states of torch's CPU generator and of the device's."""
    check = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    own = generator_state(device)
    if own is not None:
        check = zlib.crc32(own.numpy().tobytes(), check)
    return check


WAIT_S = 600.0
_FIRST_PAUSE_S, _PAUSE_S = 0.001, 0.1  # between two looks at the store: at first, and at most, since the pause doubles
_APART = "apart"  # key of the store under which a rank that raises leaves its message
_KEPT = 1024  # records of this many last calls stay in the store
_AT_ONCE = 64  # older records that are deleted together
_STEPS = {
    "mean": "prepared.backward(loss)",
    "mean_over": "prepared.backward(loss, mean_over=n)",
    "weight": "prepared.backward(loss, weight)",
    "sum": "prepared.backward(loss, summed=True)",
    "step": "optimizer.step()",
}
_OFTEN = (
    "Every rank must make these calls, as often as the others: where its samples have nothing of a term, it gives a "
    "sum of nothing: prepared.backward(term.sum() / max(n, 1), mean_over=n)"
)


class Meeting:
    """Checks at each collective call of a prepared script that every rank makes the same call.

    Made on all ranks together.
        steps   cheap: calls of a step, compared in the shared memory of one host
        passes  one message to the store, does not wait
        enter   `passes`, then waits for all ranks
    """

    def __init__(self, world: Axis, device: torch.device, wait_s: float = WAIT_S) -> None:
        self.world, self.wait_s = world, wait_s
        name = gather_json(secrets.token_hex(6), world, device)[0]
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"shardwise-meeting-{name}", store)
        self._rank = world.ranks[world.index]
        self._number = 0  # `passes` of this rank so far
        self._written: set[str] = set()  # paths of files that this rank saved
        self._group_store = store
        self._trail = Trail(world, list(_STEPS.values()), device, _OFTEN)
        atexit.register(say_ended)
        watch_saves(self.writes)

    def steps(self, call: str) -> None:
        """Records that this rank makes `call`; raises `RunError` if a rank of this host recorded another one there.

        call    "step", or the form of the loss of a backward: "mean", "mean_over", "weight" or "sum" (`form_of`)

        Nothing is sent, since ranks of one host compare in shared memory.
        """
        self._trail.mark(_STEPS[call])

    def writes(self, path: str) -> bool:
        """Records that this rank saves the file `path`; returns whether it is the second rank of its host to do so.

        Only one of several ranks gets True, so that a warning is printed once. A rank's later saves to `path` get
        False.
        """
        if path in self._written:
            return False
        self._written.add(path)
        with suppress(RuntimeError):  # the rank that kept the store has ended before: nobody can be asked
            return self._store.add(f"file/{socket.gethostname()}/{path}", 1) == 2  # of many ranks one tells it
        return False

    def passes(self, what: str) -> None:
        """Records that this rank makes the call `what`; raises `RunError` if another rank's call there differs."""
        self._number += 1
        line = line_of_script()
        told = self._store.compare_set(f"at/{self._number}", "", f"{what}\n{self._rank}\n{line}").decode()
        first, rank, theirs = told.split("\n", 2)
        if first != what:
            self._part(f"rank {rank} comes to {first} [{theirs}], and rank {self._rank} to {what} [{line}]")
        # one rank deletes old numbers, which all ranks are taken to have passed: many at a time, as each is a request
        if self._rank == self.world.ranks[0] and self._number % _AT_ONCE == 0 and self._number > _KEPT:
            for number in range(self._number - _KEPT - _AT_ONCE, self._number - _KEPT):
                self._store.delete_key(f"at/{number}")

    def enter(self, what: str) -> None:
        """Waits until every rank makes the call `what`; raises `RunError` naming script lines if one will not come."""
        self.passes(what)
        here = f"came/{self._number}"
        self._store.set(f"{here}/{self._rank}", "")
        self._store.add(here, 1)
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while self._store.add(here, 0) < self.world.size:
            self._look_around(what, here, late=time.monotonic() - began > self.wait_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _look_around(self, what: str, here: str, *, late: bool) -> None:
        """Raises `RunError` if a rank will not come to the call `what`: it raised, its process ended, or it is `late`.

        here    prefix of the keys in the store under which ranks note that they came
        late    Whether this rank has waited longer than `wait_s`
        """
        # another rank has raised already, and will never come: raise its message here, not a timeout
        if self._store.check([_APART]):
            raise _as_error(self._store.get(_APART).decode())
        away = [rank for rank in self.world.ranks if not self._store.check([f"{here}/{rank}"])]
        ended = [rank for rank in away if has_ended(self._group_store, rank)]
        # `away` is empty where the last rank came since it was counted
        if away and (ended or late):
            why = "has ended" if ended else f"did not come in {self.wait_s:g} s"
            self._part(f"rank {self._rank} comes to {what} [{line_of_script()}], and rank {(ended or away)[0]} {why}")

    def _part(self, what: str) -> None:
        """Raises `RunError` with `what` and a remedy, after storing the message for the other ranks to raise."""
        message = (
            f"{what}: every rank is needed for these calls, in the same order, since each holds a part of what they "
            "need. Make them on every rank: decide by numbers that all share (the loss that backward returns, "
            "prepared.sum), and write on one: state = model.state_dict(), then torch.save(state, path) under if "
            "prepared.rank == 0"
        )
        self._store.set(_APART, message)
        raise _as_error(message)


def _as_error(message: str) -> RunError:
    """Returns a `RunError` that `names_line` leaves unchanged, because its text names lines of the script already."""
    error = RunError(message)
    error.names_line = True  # type: ignore[attr-defined]
    return error
