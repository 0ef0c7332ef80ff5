"""Gather unsharded weights of a running plan, as tensors or a file, and count the bytes that a rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from pathlib import Path

import torch

from shardwise.comm import of_first
from shardwise.device import on_host, peak_bytes
from shardwise.engine.weights_file import WeightsFile
from shardwise.engine.whole import full_buffers, full_parameters
from shardwise.errors import RefusedPlan, RunError
from shardwise.layout.offload import weights_on_host
from shardwise.memory.live import storage_bytes
from shardwise.step.state import RankState
from shardwise.tiers.activations import memory_of


def state_dict(state: RankState) -> dict[str, torch.Tensor]:
    """Returns {name in the module's state dict: unsharded tensor on the CPU}, of parameters and persistent buffers.

    Collective.
    """
    made = {name: value.cpu().clone() for name, value in _named_weights(state)}
    return {name: made[name] for name in state.module.state_dict(keep_vars=True) if name in made}


def _named_weights(state: RankState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name in the module's state dict, unsharded tensor), one tensor at a time. Collective.

    A tied weight is yielded under each of its names; a buffer that is not persistent is left out.
    """
    by_identity = {id(param): name for name, param in state.module.named_parameters()}
    by_identity |= {id(buffer): name for name, buffer in state.module.named_buffers()}
    names: dict[str, list[str]] = {}
    later: dict[str, torch.Tensor] = {}
    for name, value in state.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names.setdefault(by_identity.get(id(value), ""), []).append(name)
            later[name] = value
    for own, whole in chain(full_parameters(state), full_buffers(state)):
        for name in names.get(own, ()):
            # `later` keeps only tensors that the plan does not know
            later.pop(name)
            yield name, whole.detach()
    # parameters of a module that a script's forward has made since are not sharded
    yield from ((name, value.detach()) for name, value in later.items())


def trained_tensors(
    state: RankState, also: Collection[str] = (), *, rank_0_only: bool = False
) -> dict[str, torch.Tensor]:
    """Returns {name: unsharded tensor on the CPU} of trained parameters and buffers. Collective.

    also         names of frozen parameters to include
    rank_0_only  whether ranks other than 0 return {} (they take part in the gathers all the same)
    """
    keep = state.mesh.rank == 0 or not rank_0_only
    left_out = set(state.frozen_names).difference(also)
    # trained ones come before the frozen ones
    params = islice(full_parameters(state), None if also else len(state.all_names))
    named = chain(params, full_buffers(state))
    return {name: tensor.cpu().clone() for name, tensor in named if keep and name not in left_out}


def save_weights(state: RankState, path: str | Path, spare: str | Path | None = None) -> Path:
    """Writes unsharded weights and buffers as one safetensors file, by rank 0; returns its path. Collective.

    The file's metadata has the step. Rank 0 holds one unsharded tensor at a time.

    spare   path that is used instead if `path` cannot be written, with a notice; None: there is none
    Raises `RunError` on every rank if rank 0 could not write.
    """
    failure = _write(state, Path(path))
    if failure and spare is not None:
        state.notices.append(f"{path} could not be written ({failure}): the weights are in {spare}")
        path, failure = spare, _write(state, Path(spare))
    if failure:
        raise RunError(f"{path} could not be written: {failure}")
    return Path(path)


def _write(state: RankState, path: Path) -> str:
    """Writes the file on rank 0; returns why that failed, "" if it did not, on every rank. Collective."""
    writer = _Writer(state, path) if state.mesh.rank == 0 else None
    for name, tensor in _named_weights(state):  # to the end even if rank 0 cannot write, since the gathers need it
        if writer is not None:
            writer.add(name, tensor)
    return of_first(lambda: "" if writer is None else writer.publish(), state.mesh.world, state.device)


class _Writer:
    """Rank 0's file of weights; the first error of the disk stops the writing, and `publish` returns it."""

    def __init__(self, state: RankState, path: Path) -> None:
        self._step, self._failure = str(state.steps_done), ""
        self._file: WeightsFile | None = None
        self._trying(lambda: self._open(path, [*state.module.state_dict(keep_vars=True)]))

    def _open(self, path: Path, names: list[str]) -> None:
        self._file = WeightsFile(path, names)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a tensor; does nothing after an error."""
        file = self._file
        if file is not None and not self._failure:
            self._trying(lambda: file.add(name, tensor))

    def publish(self) -> str:
        """Gives the file its name; returns the first error as text, "" if the file is complete."""
        file = self._file
        if file is not None and not self._failure:
            self._trying(lambda: file.publish({"format": "pt", "step": self._step}))
        return self._failure

    def _trying(self, change: Callable[[], None]) -> None:
        """Calls `change`; if it fails, keeps the error's text and deletes the file."""
        try:
            change()
        except (OSError, RefusedPlan) as error:
            self._failure = str(error)
            if self._file is not None:
                self._file.discard()


def memory(state: RankState) -> dict[str, int | None]:
    """Returns {kind: bytes that this rank holds}, for "parameters" (with masters), "gradients", "optimizer", "peak".

    Offloaded tensors are not in these but in "host" and "disk" (activations: the most so far); coded state on the
    device is in "optimizer" or "parameters". "peak" is the device's most, None if the device does not count.
    """

    beside = weights_on_host(state.plan.offload)

    def lies_on_host(tensor: torch.Tensor) -> bool:
        return beside and on_host(memory_of(tensor).device)

    def here(tensor: torch.Tensor) -> bool:
        rests = lies_on_host(tensor) or (state.tier is not None and state.tier.rests(tensor))
        return not rests and (state.shards is None or not state.shards.holds(memory_of(tensor)))

    masters = [slot.master for slot in state.technique.slots]
    masters += list(state.owners.masters.values()) if state.owners is not None else []
    parameters = [*state.module.parameters(), *masters]
    gradients = [p.grad for p in parameters] + state.technique.gradient_buffers()
    states = state.optimizer.state.values()  # of weights, and what an optimizer keeps under names of its own
    tensors = [v for s in states for v in (s.values() if isinstance(s, dict) else (s,)) if isinstance(v, torch.Tensor)]
    made = [gradient for gradient in gradients if gradient is not None]
    own = {
        "parameters": storage_bytes(filter(here, parameters)),
        "gradients": storage_bytes(gradient for gradient in made if not lies_on_host(gradient)),
        "optimizer": storage_bytes(filter(here, tensors)),
    }
    tiers: Counter[str] = Counter()
    if beside:
        tiers["host"] = storage_bytes(filter(lies_on_host, [*parameters, *made, *tensors]))
    for tier in (state.tier, state.activations, state.shards):
        tiers.update(tier.held_bytes() if tier is not None else {})
    # coded state on the device is counted by its tier, under the same keys
    coded = {name: size + tiers.pop(name, 0) for name, size in own.items()}
    return {**coded, "peak": peak_bytes(state.device), **tiers}
