"""What a rank's engine holds, each tensor as a piece of a whole one. A new kind of tensor: also save and load.

    model/W        masters of trained weights, and frozen ones      pieces as the plan cuts them
                   (frozen ones that the task reads from files are left out while they are as read: `ReadAgain`)
    buffer/B       buffers, of the stage that uses them             whole
    optimizer/W/K  state K of the optimizer for weight W            as the weight, or whole
    ema/W          the moving average                               as the weight
    random/R/G     generator G of rank R                            whole

Where a piece lies in the whole is asked of those who cut: tp's owners of indices, ep's experts, and the technique's
`select` on a tensor without values, whose view tells its place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.checkpoint.pieces import Piece, Runs, narrowed, runs_of
from shardwise.device import generator_state, on_host, set_generator_state
from shardwise.digest import bits_hash
from shardwise.engine.ema import Ema
from shardwise.engine.engine import Engine
from shardwise.engine.weights_file import dtype_code


@dataclass(frozen=True)
class Holding:
    """A rank's piece of one tensor. `alike`: ranks with the same piece have equal values.

    Where `alike` is not sure (buffers), the first rank's counts.
    """

    key: str
    piece: Piece
    tensor: torch.Tensor
    alike: bool = True

    @property
    def dtype(self) -> str:
        """Returns the name that the tensor's dtype has in a safetensors file."""
        return dtype_code(self.key, self.tensor.dtype)

    def flat(self) -> torch.Tensor:
        """Returns the tensor's elements, 1-d, in the piece's order."""
        return self.tensor.detach().reshape(-1)


# --- where a rank's tensors lie


def share_of(engine: Engine, name: str, shape: torch.Size) -> tuple[torch.Size, list[Runs]]:
    """Returns (whole shape, index runs of each dim) of this rank's tp/ep share; `shape` is the share's shape."""
    whole = shape
    for spread in (engine.state.experts, engine.state.tensor):
        whole = whole if spread is None else spread.full_shape(name, whole)
    # a dim of size 0 has no run at all
    runs: list[Runs] = [((0, size),) if size else () for size in whole]
    # under tp a weight's cut dim is this rank's indices of it, in the order in which the shares lie
    if engine.state.tensor is not None and name in engine.state.tensor.cuts:
        cut, axis = engine.state.tensor.cuts[name], engine.state.tensor.axis
        runs[cut.dim] = runs_of(cut.owners.indices(axis.index))
    if engine.state.experts is not None and name in engine.state.experts.dealt:
        rows = sum(stop - start for start, stop in runs[0])
        runs[0] = narrowed(runs[0], *engine.state.experts.span(name, rows))
    return whole, runs


def _boxed(whole: torch.Size, runs: list[Runs], starts: list[int], sizes: list[int]) -> Piece:
    """Returns the piece that is the box at `starts` of `sizes` within a share."""
    kept = tuple(narrowed(of_dim, start, start + size) for of_dim, start, size in zip(runs, starts, sizes, strict=True))
    count = 1
    for size in sizes:
        count *= size
    return Piece(tuple(whole), kept, 0, count)


def trained_piece(engine: Engine, index: int, shape: torch.Size) -> Piece:
    """Returns this rank's piece of the `index`-th trained parameter; `shape` is that of its share."""
    whole, runs = share_of(engine, engine.state.names[index], shape)
    # the technique cuts a tensor without values: the view that comes back says by its offset where the piece lies
    share = torch.empty(shape, device="meta")
    select = getattr(engine.technique, "select", None)
    view = share if select is None else select(index, share, engine.mesh.shard.index)
    if view.dim() == 1:  # an interval of the flattened share
        start = view.storage_offset()
        return Piece(tuple(whole), tuple(runs), start, start + view.numel())
    starts, rest = [], view.storage_offset()
    for stride in share.stride():
        starts.append(rest // stride if stride else 0)
        rest = rest % stride if stride else rest
    return _boxed(whole, runs, starts, list(view.shape))


def _frozen_piece(engine: Engine, name: str, param: torch.Tensor) -> tuple[Piece, torch.Tensor]:
    """Returns (this rank's piece, its local tensor) of a frozen parameter."""
    shape = engine.state.shapes()[name]
    whole, runs = share_of(engine, name, shape)
    if not isinstance(param, DTensor):
        return _boxed(whole, runs, [0] * len(whole), list(shape)), engine.state.outside(name, param.detach())
    sizes, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    piece = _boxed(whole, runs, list(offset)[: len(whole)], list(sizes)[: len(whole)])
    return piece, engine.state.outside(name, param.detach().to_local())


def trained(engine: Engine) -> dict[str, tuple[Piece, torch.Tensor]]:
    """Returns name -> (piece, master) of each trained parameter of which this rank has elements."""
    shapes = engine.state.shapes()
    index_of = {name: index for index, name in enumerate(engine.state.names)}
    return {
        slot.name: (trained_piece(engine, index_of[slot.name], shapes[slot.name]), slot.master)
        for slot in engine.technique.slots
        if slot.master.numel()
    }


def optimized(engine: Engine) -> dict[int, tuple[str, Piece, torch.Tensor]]:
    """Returns id -> (name, piece, tensor) of what this rank's optimizer updates: masters, or whole ones it owns."""
    if engine.state.owners is None:
        return {id(master): (name, piece, master) for name, (piece, master) in trained(engine).items()}
    return {
        id(master): (engine.state.names[index], Piece.whole(master.shape), master)
        for index, master in engine.state.owners.masters.items()
    }


def weights(engine: Engine) -> Iterator[Holding]:
    """Yields a `Holding` of each master, frozen parameter and buffer of which this rank has elements."""
    for name, (piece, master) in trained(engine).items():
        yield Holding(f"model/{name}", piece, master)
    for name, param in engine.module.named_parameters():
        # what was frozen when the engine was made has no master above
        if name in engine.state.held_frozen:  # a forward may have thawed it since
            piece, local = _frozen_piece(engine, name, param)
            yield Holding(f"model/{name}", piece, local)
    for name, buffer in engine.module.named_buffers():
        # stages may each hold a copy of a buffer: one of them counts
        if engine.state.staged is None or engine.state.staged.cut.buffers.get(name) == engine.mesh.pp.index:
            yield Holding(f"buffer/{name}", Piece.whole(buffer.shape), buffer, alike=False)


class ReadAgain:
    """Frozen weights that a checkpoint need not hold: the task reads them from its files, and nothing changed them.

    Whether something did (another checkpoint, a forward that writes into them) is seen by a hash of this rank's pieces,
    taken when this is made, right after they were read, and again at each save.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._hashes = self._now()

    def _now(self) -> dict[str, int]:
        params = dict(self.engine.module.named_parameters())
        names = self.engine.state.read.keys() & params.keys()
        return {name: bits_hash(_frozen_piece(self.engine, name, params[name])[1].reshape(-1)) for name in names}

    def changed(self) -> list[str]:
        """Returns the names of weights that this rank no longer has as they were read."""
        return sorted(name for name, value in self._now().items() if value != self._hashes[name])


def state_dict_names(engine: Engine) -> dict[str, str]:
    """Returns {name in the module's `state_dict`: key of a holding}; tied weights under each of their names."""
    keys = {id(param): f"model/{name}" for name, param in engine.module.named_parameters()}
    keys |= {id(buffer): f"buffer/{name}" for name, buffer in engine.module.named_buffers()}
    state = engine.module.state_dict(keep_vars=True)
    return {name: keys[id(value)] for name, value in state.items() if id(value) in keys}


def averages(engine: Engine, ema: Ema | None) -> Iterator[Holding]:
    """Yields the moving average of each master."""
    if ema is None:
        return
    pieces = trained(engine)
    for name, average in ema.named():
        yield Holding(f"ema/{name}", pieces[name][0], average)


# --- generators


def generators(rank: int, device: torch.device) -> Iterator[Holding]:
    """Yields the states of torch's, numpy's and Python's generators in this process."""

    def holding(name: str, state: torch.Tensor) -> Holding:
        return Holding(f"random/{rank:05d}/{name}", Piece.whole(state.shape), state)

    yield holding("torch", torch.default_generator.get_state())
    own = generator_state(device)
    if own is not None:
        yield holding(device.type, own)
    # as one tensor of integers: floats among the words are kept by their bits
    numbers: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = numbers
    words = np.concatenate([keys.astype(np.int64), [position, has_gauss], np.array([gauss], np.float64).view(np.int64)])
    yield holding("numpy", torch.from_numpy(words))
    version, words_of, gauss_next = random.getstate()
    extra = [version, gauss_next is not None, int(np.float64(gauss_next or 0.0).view(np.int64))]
    yield holding("python", torch.tensor([*words_of, *extra], dtype=torch.int64))


def set_generator(name: str, state: torch.Tensor, device: torch.device) -> None:
    """Put a generator's state back, as `generators` yields it; one of another kind of device is left out."""
    if name == "torch":
        torch.default_generator.set_state(state)
    # the name of an accelerator: a generator of another kind of device has no place here
    elif name == device.type and not on_host(device):
        set_generator_state(device, state)
    elif name == "numpy":
        words = state.numpy()
        # as `generators` lays them out: keys, position, whether a normal number is kept, that number by its bits
        gauss = float(words[-1:].view(np.float64)[0])
        np.random.set_state(("MT19937", words[:-3].astype(np.uint32), int(words[-3]), int(words[-2]), gauss))
    elif name == "python":
        words = state.numpy()
        # state words, version, whether a normal number is kept, that number by its bits
        gauss_next = float(words[-1:].view(np.float64)[0]) if words[-2] else None
        random.setstate((int(words[-3]), tuple(words[:-3].tolist()), gauss_next))
