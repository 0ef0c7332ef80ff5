"""Put whole tensors together from ranks' shares: parameters, gradients, buffers. Collective; small ones in one go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.comm import Gathering, broadcast, gathered_alone, gathered_together, ready
from shardwise.comm.text import gather_json
from shardwise.host import read
from shardwise.parallel.pipeline.messages import DTYPES, MOST_DIMS
from shardwise.step.staged import StagedForward
from shardwise.step.state import RankState


def full_parameters(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of every parameter, frozen ones included, master weights first. Collective."""
    held = _held_parameters(state)
    return held if state.staged is None else to_all_stages(state.staged, held, state.all_names + state.frozen_names)


def full_parameter(state: RankState, name: str) -> torch.Tensor:
    """One whole parameter, its master first. Collective; not under a pipeline."""
    if name in state.names:
        return gathered_alone(together(state, name, state.technique.full_parameter(state.names.index(name))))
    return gathered_alone(together(state, name, _used(state, {}, name, dict(state.module.named_parameters())[name])))


def full_gradients(state: RankState) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole gradient, None where unused) of the step just done. Collective."""
    gatherings = (together(state, name, state.technique.full_gradient(i)) for i, name in enumerate(state.names))
    held = zip(state.names, gathered_together(gatherings), strict=True)
    return held if state.staged is None else to_all_stages(state.staged, held, state.all_names)


def full_buffers(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every buffer, as the stage has it that uses it. Collective under a pipeline."""
    held = dict(state.module.named_buffers())
    if state.staged is None:
        yield from held.items()
        return
    for name, owner in (state.staged.cut.buffers | _born_later(state.staged, held)).items():
        found = _handed_out(state.staged, held.get(name) if owner == state.staged.axis.index else None, owner)
        if found is not None:
            yield name, found


def _born_later(staged: StagedForward, held: dict[str, torch.Tensor]) -> dict[str, int]:
    """Name -> first stage that has it, of buffers that a forward made and the constructor did not. Collective."""
    later = gather_json(sorted(held.keys() - staged.cut.buffers.keys()), staged.axis, staged.device)
    return {name: index for index, names in reversed([*enumerate(later)]) for name in names}


def used_parameters(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each parameter of this rank's stages, as its module computes with it. Collective.

    Beside `full_parameters`, which tells the masters: under zero=1 and 2 and in mixed precision they are others.
    """
    held = {*state.names, *state.held_frozen}
    used = [(name, param) for name, param in state.module.named_parameters() if name in held]
    index_of = {name: index for index, name in enumerate(state.names)}
    wholes = gathered_together(together(state, name, _used(state, index_of, name, param)) for name, param in used)
    return zip((name for name, _ in used), wholes, strict=True)


def used_buffers(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each buffer that this rank's stages use, as they have it; under a pipeline of those that the
    constructor made."""
    for name, buffer in state.module.named_buffers():
        if state.staged is None or state.staged.cut.buffers.get(name) == state.staged.axis.index:
            yield name, buffer


def _held_parameters(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    held = {name: state.technique.full_parameter(index) for index, name in enumerate(state.names)}
    for name, param in state.module.named_parameters():
        if name in state.held_frozen:  # a forward may have thawed it since
            held[name] = _used(state, {}, name, param)
    wholes = gathered_together(together(state, name, piece) for name, piece in held.items())
    return zip(held, wholes, strict=True)


def _used(state: RankState, index_of: dict[str, int], name: str, param: Any) -> Gathering:
    """FSDP's parameters in full, others as they are."""
    if not hasattr(param, "full_tensor"):
        return ready(state.outside(name, param.detach()))
    if name in index_of:
        return state.technique.whole(index_of[name], state.outside(name, param.detach().to_local()))
    return ready(state.outside(name, param.full_tensor().detach()))


def together(state: RankState, name: str, piece: Gathering) -> Gathering:
    """The whole tensor of what this rank holds of a parameter, or of a tensor like it (None stays)."""
    share = yield from piece
    share = share if state.experts is None else (yield from state.experts.whole(name, share))
    return share if state.tensor is None else (yield from state.tensor.whole(name, share))


def put_together(state: RankState, name: str, share: Any) -> Any:
    """Returns the whole tensor of this rank's share over tp and ep, itself no piece by ZeRO. Collective."""
    return gathered_alone(together(state, name, ready(share)))


# --- from the stage that holds a tensor to all


def to_all_stages(
    staged: StagedForward, held: Iterator[tuple[str, torch.Tensor | None]], names: list[str]
) -> Iterator[tuple[str, Any]]:
    """(name, tensor) for all names, on every stage, from what each holds (in the order of the names)."""
    for name in names:
        ranks = staged.cut.holders[name]
        tensor = None
        if staged.axis.index in ranks:
            found, tensor = next(held)
            assert found == name, f"{found} came where {name} was expected"
        yield name, _handed_out(staged, tensor, ranks[0])


def _handed_out(staged: StagedForward, tensor: torch.Tensor | None, source: int) -> torch.Tensor | None:
    axis, device = staged.axis, staged.device
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
    tensor = tensor.detach().contiguous()
    broadcast(tensor.view(-1).view(torch.uint8), axis, source, "control")
    return tensor
