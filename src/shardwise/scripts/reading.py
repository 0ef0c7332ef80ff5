"""Finds whether a rank may read its samples alone, or reading draws random numbers or depends on other samples.

A dataset that draws (a random crop) gives other samples if another process draws before it; a collate function of
the script's own may pad to the longest sample of the batch, or draw masks. Then a part that was read by itself differs
from the part of the whole batch, and ranks have to read all of it.

What this does not do: see random numbers from a generator that the dataset keeps to itself.
"""

from __future__ import annotations

import ast
import base64
import copy
import ctypes
import multiprocessing
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import DataLoader, default_collate, default_convert

from shardwise.checkpoint.holdings import generators as generators_held
from shardwise.checkpoint.holdings import set_generator
from shardwise.comm import Axis, gather_json
from shardwise.device import current_device, generators
from shardwise.errors import InputError
from shardwise.layout.dealing import Share
from shardwise.ranks.process import STARTED_BY_IMPORT
from shardwise.scripts.script_lines import refuse
from shardwise.scripts.spread import tensors_of
from shardwise.step.batching import check_samples, samples_in, slice_samples

_MT19937_BYTES = 624 * 4 + 4  # its words and the place of the next one
_LOOKED_AT = 16  # elements of a tensor that are compared
_ATOMS = (int, float, str, bytes, type(None))


IMPORTED = (
    "a process that this script starts (a loader's worker, by spawn or forkserver) imports it and comes to prepare: "
    'put what the script runs under `if __name__ == "__main__":`, or start workers by fork'
)


def refuse_unguarded(loader: Any) -> None:
    """Raises `InputError` if a loader's worker processes would import the running script and call `prepare` in it.

    Found, before they start, from the line of the script that runs now: a worker does not run what stands under
    `if __name__ == "__main__":`. Other `if` statements may keep a worker out too; `from_workers` covers those.
    """
    context = getattr(loader, "multiprocessing_context", None)
    # asked so, Python does not settle on a default that the script may still set
    method = (context or multiprocessing).get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[
        0
    ]
    # forked workers are copies of this process, and import nothing
    if not getattr(loader, "num_workers", 0) or method == "fork":
        return
    file = getattr(sys.modules["__main__"], "__file__", None)
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != "__main__"):
        frame = frame.f_back  # type: ignore[assignment]
    # prepare is not called from the top level of a script's file (a notebook, an import): no statement to look at
    if frame is None or file is None or frame.f_globals.get("__file__") != file or not Path(file).is_file():
        return
    statements = ast.parse(Path(file).read_bytes()).body
    before = [statement for statement in statements if statement.lineno <= frame.f_lineno]
    guards = [statement for statement in before if isinstance(statement, ast.If)]
    by_name = any(isinstance(node, ast.Name) and node.id == "__name__" for guard in guards for node in ast.walk(guard))
    # under an `if`, or behind a test of __name__ that may end a worker, this statement may not run in workers
    if before and before[-1] not in guards and not by_name:
        raise InputError(IMPORTED)


def from_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields a loader's batches; raises `InputError` if a worker has called `prepare` when it imported the script."""
    try:
        yield from batches
    except RuntimeError:  # torch's: a worker has ended
        if STARTED_BY_IMPORT in [worker.exitcode for worker in getattr(batches, "_workers", ())]:
            refuse(InputError(IMPORTED))
        raise


class Unfit(Exception):
    """Raised if batches cannot be read by the method that is tried; the message says why."""


class Fetched(NamedTuple):
    """Samples that a worker has read.

    samples  as the dataset gives them
    stood    `standing` before they were read, for an epoch's first batch; else None
    look     `look_of` the sample that every rank reads, for that batch; else []
    """

    samples: Any
    stood: int | None
    look: list[float]


class Indices(list):
    """Indices of a rank's samples.

    shared  the index of a sample that every rank reads beside them, to compare; None except in an epoch's first batch
    """

    shared: Any = None


class Watched:
    """A map-style dataset that returns `Fetched`: samples, and the generators' state before an epoch's first batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[Any]) -> Fetched:
        shared, together = getattr(indices, "shared", None), getattr(self.dataset, "__getitems__", None)
        stood = None if shared is None else standing()
        samples = together(list(indices)) if together else [self.dataset[index] for index in indices]
        return Fetched(samples, stood, [] if shared is None else look_of(self.dataset[shared]))


class Collated:
    """A collate function that returns (batch, whether reading or joining it drew random numbers, `look`)."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, fetched: Fetched) -> tuple[Any, bool, list[float]]:
        joined, stood = self.collate(fetched.samples), fetched.stood
        return joined, stood is not None and standing() != stood, fetched.look


def look_of(samples: Any) -> list[float]:
    """Returns sizes and up to 16 elements of each leaf of `samples` as floats, for ranks to compare what they read."""
    look: list[float] = []
    for leaf in tree_flatten(dict(samples) if isinstance(samples, Mapping) else samples)[0]:
        # other tensors have no flat elements to compare
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested:  # without flat elements
                continue
            some = _some(leaf.detach().reshape(-1))
            numbers = torch.view_as_real(some.resolve_conj()).reshape(-1) if some.is_complex() else some
            look += [float(leaf.numel()), *numbers.double().tolist()]
        # arrays of objects and text have no numbers
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
            numbers = np.array(_some(np.reshape(leaf, -1)))
            look += [float(leaf.size), *numbers.view(numbers.real.dtype).astype(np.float64).tolist()]
        elif isinstance(leaf, bool | int | float):
            look.append(float(leaf))
        # text is compared by its hash
        elif isinstance(leaf, str | bytes):
            look.append(float(zlib.crc32(leaf.encode() if isinstance(leaf, str) else leaf)))
    return look


def _some(flat: Any) -> Any:
    """Returns at most 16 elements of a flat array or tensor, evenly spaced."""
    return flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT]


def standing() -> int:
    """Returns a hash of the states of this process's random generators, which any draw changes."""
    check = 0
    for state in generators(current_device()):
        check = zlib.crc32(state, check)
    words, gauss = random.getstate()[1:]  # a draw moves the position, which is last, or makes all words anew
    return hash((check, _standing_of_numpy(), words[0], words[-1], gauss))


def _standing_of_numpy() -> bytes | tuple:
    """Returns the state of NumPy's global generator, which any draw changes except one of a cached normal number."""
    # NumPy's own getter takes 40 us (624 words, one by one), more than reading the rest of a small batch
    source: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(source) is np.random.MT19937:
        return ctypes.string_at(source.ctypes.state_address, _MT19937_BYTES)
    numpys: Any = np.random.get_state(legacy=False)
    return (repr(numpys),)


class Generators:
    """The states of this process's and of a loader's random generators, to be restored later; also as JSON."""

    def __init__(self, loader: Any) -> None:
        self._own = [(generator, generator.get_state()) for generator in _own_generators(loader)]
        with torch.device("cpu"):  # whatever torch's default is
            self._states = {each.key.rpartition("/")[2]: each.tensor for each in generators_held(0, current_device())}

    def restore(self) -> None:
        """Sets all generators to the states noted."""
        for generator, state in self._own:
            generator.set_state(state)
        for name, state in self._states.items():
            set_generator(name, state, current_device())

    def as_json(self) -> dict[str, Any]:
        """Returns {"loader": [state of each of the loader's generators], name of a global one: its state} in base64."""
        return {"loader": [_text(state) for _, state in self._own], **{k: _text(v) for k, v in self._states.items()}}

    @classmethod
    def from_json(cls, loader: Any, saved: dict[str, Any]) -> Generators:
        """Returns the `Generators` whose states `as_json` gave, in this run or another."""
        restored = cls(loader)
        restored._own = [(g, _bytes(text)) for g, text in zip(_own_generators(loader), saved["loader"], strict=False)]
        for name, state in restored._states.items():
            restored._states[name] = _bytes(saved[name]).view(state.dtype) if name in saved else state
        return restored


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Returns the `torch.Generator`s that a loader and its sampler were given, each once."""
    found = [getattr(each, "generator", None) for each in (loader, getattr(loader, "sampler", None))]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def joins_by_itself(loader: DataLoader) -> bool:
    """Returns whether the loader has a collate function of the script's own, in which samples may affect each other."""
    return loader.collate_fn not in (default_collate, default_convert)


def part_of_whole(batch: Any, share: Share, samples: int, dim: int = 0) -> Any:
    """Returns the samples of `share` cut out of a batch of `samples`; `InputError` unless each tensor counts that many.

    A list of as many numbers or strings (lengths, names) is cut like a tensor.
    dim     which dim of a tensor counts samples; the first, for a tensor with fewer dims (lengths, labels)
    """
    plain = _plain(batch, dim)
    check_samples(plain, samples)
    part = _moved(slice_samples(plain, share.start, share.start + share.count), 0, dim)
    if dim:  # as a whole batch lies in memory: a script may view it
        part = tree_map_only(torch.Tensor, torch.Tensor.contiguous, part)
    return in_class_of(batch, _lists_cut(part, share, samples))


def in_class_of(given: Any, made: Any) -> Any:
    """Returns the dict `made` as a copy of the mapping `given` (a tokenizer's, a library's) with its values.

    Any `made` is returned unchanged if `given` is a plain dict or no mapping.
    """
    if not isinstance(given, Mapping) or type(given) is dict:
        return made
    kept: Any = copy.copy(given)
    for name, value in made.items():
        kept[name] = value
    return kept


def _lists_cut(tree: Any, share: Share, samples: int) -> Any:
    """Returns the tree with lists of one number or string per sample cut to the share; its tensors are cut already."""
    kind = type(tree)
    # lengths or names of samples; a list of anything else is a container
    if kind is list and len(tree) == samples and all(isinstance(one, _ATOMS) for one in tree):
        return tree[share.start : share.start + share.count]
    if kind in (list, tuple):
        return kind(_lists_cut(one, share, samples) for one in tree)
    return {key: _lists_cut(one, share, samples) for key, one in tree.items()} if kind is dict else tree


def samples_of(batch: Any, dim: int = 0) -> int:
    """Returns how many samples a batch has, by dim `dim` of its tensors; `InputError` if these differ."""
    return samples_in(_plain(batch, dim))


def _plain(batch: Any, dim: int) -> Any:
    """Returns the batch, a mapping as a dict, with dim `dim` of each tensor moved to the front."""
    return _moved(dict(batch) if isinstance(batch, Mapping) else batch, dim, 0)


def _moved(batch: Any, source: int, to: int) -> Any:
    """Returns the batch with dim `source` moved to `to` in each tensor that has both."""
    if source == to:
        return batch
    most = max(source, to)
    return tree_map_only(torch.Tensor, lambda t: t.movedim(source, to) if t.dim() > most else t, batch)


def dims_of_samples(batch: Any, samples: int) -> list[int]:
    """Returns which of the dims 0 and 1 have size `samples` in every tensor of a batch; vectors have dim 0 alone."""
    shapes = [tensor.shape for tensor in tensors_of(batch) if tensor.dim()]
    fits = [d for d in (0, 1) if all(shape[min(d, len(shape) - 1)] == samples for shape in shapes)]
    return fits if any(len(shape) > 1 for shape in shapes) else fits[:1]


def share_generators(ranks: Axis, device: torch.device) -> None:
    """Sets every rank's generators (torch's, NumPy's, Python's) to the states of the first rank's. Collective."""
    first = gather_json(Generators(None).as_json() if ranks.index == 0 else None, ranks, device)[0]
    Generators.from_json(None, first).restore()
