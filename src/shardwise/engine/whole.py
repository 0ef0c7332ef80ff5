"""Gather unsharded parameters, gradients and buffers from ranks' shards. Collective; small ones share messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm import Gathering, broadcast, gathered_alone, gathered_together, ready
from shardwise.comm.text import gather_json
from shardwise.host import read
from shardwise.step.state import RankState

if TYPE_CHECKING:
    from shardwise.step.staged import StagedForward


def full_parameters(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, unsharded master weight) of trained parameters, then frozen weights alike. Collective."""
    params, names = _held_parameters(state), state.all_names + state.frozen_names
    return params if state.staged is None else to_all_stages(state.staged, params, names)


def full_parameter(state: RankState, name: str) -> torch.Tensor:
    """Returns one parameter unsharded, a trained one as its master weight. Collective; not under a pipeline."""
    if name in state.names:
        return gathered_alone(together(state, name, state.technique.full_parameter(state.names.index(name))))
    return gathered_alone(together(state, name, _used(state, {}, name, dict(state.module.named_parameters())[name])))


def full_gradients(state: RankState) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields (name, unsharded gradient or None if unused) of each trained parameter in the last step. Collective."""
    gatherings = (together(state, name, state.technique.full_gradient(i)) for i, name in enumerate(state.names))
    grads = zip(state.names, gathered_together(gatherings), strict=True)
    return grads if state.staged is None else to_all_stages(state.staged, grads, state.all_names)


def full_buffers(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of every buffer, from the pipeline stage that uses it. Collective under a pipeline."""
    buffers = dict(state.module.named_buffers())
    if state.staged is None:
        yield from buffers.items()
        return
    for name, owner in (state.staged.cut.buffers | _born_later(state.staged, buffers)).items():
        mine = buffers.get(name) if owner == state.staged.axis.index else None
        buffer = _handed_out(state.staged, mine, owner)
        if buffer is not None:
            yield name, buffer


def _born_later(staged: StagedForward, buffers: dict[str, torch.Tensor]) -> dict[str, int]:
    """Returns {name: first pipeline rank that has it} of buffers that a forward has created. Collective."""
    later = gather_json(sorted(buffers.keys() - staged.cut.buffers.keys()), staged.axis, staged.device)
    # reversed, so that the first rank is the one that stays
    return {name: index for index, names in reversed([*enumerate(later)]) for name in names}


def used_parameters(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, unsharded weight) of the parameters of this rank's stages. Collective.

    These are the weights that modules compute with; `full_parameters` gives the masters, which are other tensors under
    zero=1 and 2 and in mixed precision.
    """
    here = {*state.names, *state.held_frozen}  # the others stand in for weights of other stages
    used = [(name, param) for name, param in state.module.named_parameters() if name in here]
    index_of = {name: index for index, name in enumerate(state.names)}
    wholes = gathered_together(together(state, name, _used(state, index_of, name, param)) for name, param in used)
    return zip((name for name, _ in used), wholes, strict=True)


def used_buffers(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of each buffer of which this rank has one process's values; nothing is sent.

    Under a pipeline each buffer that the constructor made is yielded by one stage's ranks only.
    """
    for name, buffer in state.module.named_buffers():
        if state.staged is None or state.staged.cut.buffers.get(name) == state.staged.axis.index:
            yield name, buffer


def _held_parameters(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, unsharded tensor) of the parameters of this rank's stages, trained ones first. Collective."""
    gatherings = {name: state.technique.full_parameter(index) for index, name in enumerate(state.names)}
    for name, param in state.module.named_parameters():
        if name in state.held_frozen:  # by name, since a forward may have set `requires_grad` since
            gatherings[name] = _used(state, {}, name, param)
    wholes = gathered_together(together(state, name, piece) for name, piece in gatherings.items())
    return zip(gatherings, wholes, strict=True)


def _used(state: RankState, index_of: dict[str, int], name: str, param: Any) -> Gathering:
    """Returns the gathering of a parameter as the module computes with it; only FSDP2's shards are gathered.

    index_of  {name: index among the trained parameters}
    """
    if not hasattr(param, "full_tensor"):
        return ready(state.outside(name, param.detach()))
    # A trained shard shares a message with others; a frozen one has no slot, so it is gathered by itself.
    if name in index_of:
        return state.technique.whole(index_of[name], state.outside(name, param.detach().to_local()))
    return ready(state.outside(name, param.full_tensor().detach()))


def together(state: RankState, name: str, piece: Gathering) -> Gathering:
    """Returns the gathering of the unsharded tensor over data ranks, ep and tp; it comes to None if `piece` does.

    name   of a parameter that is sharded like the tensor;  piece  the gathering over data ranks
    """
    share = yield from piece
    # ep before tp, since tp cuts the inside of each expert that ep deals
    share = share if state.experts is None else (yield from state.experts.whole(name, share))
    return share if state.tensor is None else (yield from state.tensor.whole(name, share))


def put_together(state: RankState, name: str, share: Any) -> Any:
    """Returns the unsharded tensor, gathered over tp and ep from `share`, which ZeRO has not sharded. Collective."""
    return gathered_alone(together(state, name, ready(share)))


# --- from the stage that holds a tensor to all


def to_all_stages(
    staged: StagedForward, tensors: Iterator[tuple[str, torch.Tensor | None]], names: list[str]
) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor or None) for all `names` on every stage, sent by the first stage that holds it. Collective.

    tensors  (name, tensor or None) of those names that this rank's stages hold, in the order of `names`
    """
    for name in names:
        ranks = staged.cut.holders[name]
        tensor = None
        if staged.axis.index in ranks:
            got, tensor = next(tensors)
            assert got == name, f"{got} came where {name} was expected"
        yield name, _handed_out(staged, tensor, ranks[0])


def _handed_out(staged: StagedForward, tensor: torch.Tensor | None, source: int) -> torch.Tensor | None:
    """Returns the tensor of pipeline rank `source` on every rank of the pipeline; None if that has none. Collective."""
    from shardwise.parallel.pipeline.stage_messages import DTYPES, MOST_DIMS

    axis, device = staged.axis, staged.device
    # [whether there is a tensor, dtype's index, dims, shape], since other ranks may not know these
    row = torch.zeros(3 + MOST_DIMS, dtype=torch.int64)
    if axis.index == source and tensor is not None:
        numbers = [1, DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        row[: len(numbers)] = torch.tensor(numbers)
    row = row.to(device)
    broadcast(row, axis, source, "control")
    present, kind, dims, *shape = read(row, "shapes of whole tensors")
    if not present:
        return None
    if axis.index != source or tensor is None:
        tensor = torch.empty(shape[:dims], dtype=DTYPES[kind], device=device)
    # an optimizer's count of steps lies on the host, and the others wait for it on their devices
    sent = tensor.detach().to(device).contiguous()
    # as bytes, which every backend sends whatever the dtype
    broadcast(sent.view(-1).view(torch.uint8), axis, source, "control")
    return sent
