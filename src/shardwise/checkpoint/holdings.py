"""The tensors that a rank's engine holds, each as a piece of an unsharded one, by their names in a checkpoint.

    model/W        masters of trained weights, and frozen weights   pieces as the plan shards them
                   (frozen weights that the task reads from files are left out while unchanged: `ReadAgain`)
    buffer/B       buffers, of the stage that uses them             whole
    optimizer/W/K  state K of the optimizer for weight W            as the weight, or whole
    ema/W          the moving average                               as the weight
    random/R/G     generator G of rank R                            whole

Where a piece lies in the unsharded tensor is derived from tp's owners of indices, ep's experts, and the view that the
data-parallel technique's `select` returns of a meta tensor. A new kind of tensor needs code in save and load too.
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
    """A rank's piece of one tensor.

    key     name in the checkpoint, such as "model/W"
    piece   which elements of the unsharded tensor these are
    tensor  the local tensor with these elements, in the piece's order
    alike   Whether all ranks with the same piece have equal values; if not (buffers), one rank's values are saved
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
    """Returns (unsharded shape, index runs of each dim) of this rank's tp/ep share of the parameter `name`.

    shape   shape of the share
    """
    whole = shape
    for spread in (engine.state.experts, engine.state.tensor):
        whole = whole if spread is None else spread.full_shape(name, whole)
    # a dim of size 0 has no run at all
    runs: list[Runs] = [((0, size),) if size else () for size in whole]
    # along the dim that tp shards, the share is this rank's indices, which may be interleaved
    if engine.state.tensor is not None and name in engine.state.tensor.cuts:
        cut, axis = engine.state.tensor.cuts[name], engine.state.tensor.axis
        runs[cut.dim] = runs_of(cut.owners.indices(axis.index))
    if engine.state.experts is not None and name in engine.state.experts.dealt:
        rows = sum(stop - start for start, stop in runs[0])
        runs[0] = narrowed(runs[0], *engine.state.experts.span(name, rows))
    return whole, runs


def _boxed(whole: torch.Size, runs: list[Runs], starts: list[int], sizes: list[int]) -> Piece:
    """Returns the piece that is a box within a tp/ep share.

    whole   unsharded shape; `runs`: the share's index runs of each dim
    starts  first index of the box in each dim of the share; `sizes`: its size in each dim
    """
    kept = tuple(narrowed(of_dim, start, start + size) for of_dim, start, size in zip(runs, starts, sizes, strict=True))
    count = 1
    for size in sizes:
        count *= size
    return Piece(tuple(whole), kept, 0, count)


def trained_piece(engine: Engine, index: int, shape: torch.Size) -> Piece:
    """Returns this rank's piece of the `index`-th trained parameter; `shape`: of its tp/ep share, before ZeRO."""
    whole, runs = share_of(engine, engine.state.names[index], shape)
    # `select` on a meta tensor returns a view, whose shape and storage offset say where the piece lies
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
    """Returns (this rank's piece, its local tensor) of a frozen parameter, which may be a DTensor of FSDP2."""
    shape = engine.state.shapes()[name]
    whole, runs = share_of(engine, name, shape)
    if not isinstance(param, DTensor):
        return _boxed(whole, runs, [0] * len(whole), list(shape)), engine.state.outside(name, param.detach())
    sizes, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    piece = _boxed(whole, runs, list(offset)[: len(whole)], list(sizes)[: len(whole)])
    return piece, engine.state.outside(name, param.detach().to_local())


def trained(engine: Engine) -> dict[str, tuple[Piece, torch.Tensor]]:
    """Returns {name: (piece, master)} of each trained parameter of which this rank has elements."""
    shapes = engine.state.shapes()
    index_of = {name: index for index, name in enumerate(engine.state.names)}
    return {
        slot.name: (trained_piece(engine, index_of[slot.name], shapes[slot.name]), slot.master)
        for slot in engine.technique.slots
        if slot.master.numel()
    }


def optimized(engine: Engine) -> dict[int, tuple[str, Piece, torch.Tensor]]:
    """Returns {id of tensor: (name, piece, tensor)} of the tensors that this rank's optimizer updates.

    These are its masters, or, if the optimizer needs whole tensors (`state.owners`), the whole masters it owns.
    """
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
        # by the names from when the engine was made, since a forward may have set requires_grad since
        if name in engine.state.held_frozen:
            piece, local = _frozen_piece(engine, name, param)
            yield Holding(f"model/{name}", piece, local)
    for name, buffer in engine.module.named_buffers():
        # several stages may hold a copy of a buffer: that of the stage it belongs to counts
        if engine.state.staged is None or engine.state.staged.cut.buffers.get(name) == engine.mesh.pp.index:
            yield Holding(f"buffer/{name}", Piece.whole(buffer.shape), buffer, alike=False)


class ReadAgain:
    """A record of frozen weights that the task reads from its files, and that a checkpoint omits while unchanged.

    Changes (another checkpoint that was loaded, a forward that writes into weights) show in hashes of this rank's
    pieces, which are taken when an instance is made, right after the weights were read, and again at each save.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._hashes = self._now()

    def _now(self) -> dict[str, int]:
        params = dict(self.engine.module.named_parameters())
        names = self.engine.state.read.keys() & params.keys()
        return {name: bits_hash(_frozen_piece(self.engine, name, params[name])[1].reshape(-1)) for name in names}

    def changed(self) -> list[str]:
        """Returns the sorted names of weights whose pieces on this rank have changed since they were read."""
        return sorted(name for name, value in self._now().items() if value != self._hashes[name])


def state_dict_names(engine: Engine) -> dict[str, str]:
    """Returns {name in the module's `state_dict`: key in the checkpoint}; a tied weight's names map to one key."""
    keys = {id(param): f"model/{name}" for name, param in engine.module.named_parameters()}
    keys |= {id(buffer): f"buffer/{name}" for name, buffer in engine.module.named_buffers()}
    state = engine.module.state_dict(keep_vars=True)
    return {name: keys[id(value)] for name, value in state.items() if id(value) in keys}


def averages(engine: Engine, ema: Ema | None) -> Iterator[Holding]:
    """Yields a `Holding` of the moving average of each trained weight on this rank; none if `ema` is None."""
    if ema is None:
        return
    pieces = trained(engine)
    for name, average in ema.named():
        yield Holding(f"ema/{name}", pieces[name][0], average)


# --- generators


def generators(rank: int, device: torch.device) -> Iterator[Holding]:
    """Yields a `Holding` of each RNG state in this process: torch's CPU and device, numpy's, Python's.

    Keys are "random/RANK/NAME". numpy's and Python's states are int64 tensors (see `set_generator`), torch's are bytes.
    """

    def holding(name: str, state: torch.Tensor) -> Holding:
        return Holding(f"random/{rank:05d}/{name}", Piece.whole(state.shape), state)

    yield holding("torch", torch.default_generator.get_state())
    own = generator_state(device)
    if own is not None:
        yield holding(device.type, own)
    # one int64 tensor, in which floats are stored by their bits
    numbers: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, gauss = numbers
    words = np.concatenate([keys.astype(np.int64), [position, has_gauss], np.array([gauss], np.float64).view(np.int64)])
    yield holding("numpy", torch.from_numpy(words))
    version, words_of, gauss_next = random.getstate()
    extra = [version, gauss_next is not None, int(np.float64(gauss_next or 0.0).view(np.int64))]
    yield holding("python", torch.tensor([*words_of, *extra], dtype=torch.int64))


def set_generator(name: str, state: torch.Tensor, device: torch.device) -> None:
    """Sets an RNG to a saved `state`, as `generators` yields it.

    name    "torch", "numpy", "python", or a kind of accelerator, which is ignored unless `device` is of that kind
    """
    if name == "torch":
        torch.default_generator.set_state(state)
    # a kind of accelerator, such as "cuda"
    elif name == device.type and not on_host(device):
        set_generator_state(device, state)
    elif name == "numpy":
        words = state.numpy()
        # in order: keys, position, whether a spare normal variate is cached, its bits
        gauss = float(words[-1:].view(np.float64)[0])
        np.random.set_state(("MT19937", words[:-3].astype(np.uint32), int(words[-3]), int(words[-2]), gauss))
    elif name == "python":
        words = state.numpy()
        # in order: state words, version, whether a spare normal variate is cached, its bits
        gauss_next = float(words[-1:].view(np.float64)[0]) if words[-2] else None
        random.setstate((int(words[-3]), tuple(words[:-3].tolist()), gauss_next))
