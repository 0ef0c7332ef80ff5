"""`Engine.predict`: the model's outputs in sample order, on rank 0. Into files, by tiles: data/tiles.

    every rank    forward of its part of the batch, in eval mode; outputs that tp or cp shard are gathered
    all ranks     one small message on what each holds: where its samples start, structure, shapes, dtypes
    to rank 0     each data rank's samples, from one rank of the last stage; ranks with the same samples send nothing

Bytes on the wire: each output once to rank 0 (beside what tp gathers), and nothing where rank 0 has it already.

What this does not do: concatenate outputs whose first dim is not samples (a loss that the model returns, a cache of
keys and values). `select` must leave these out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.comm import gather_json, receive, send
from shardwise.errors import InputError
from shardwise.layout.dealing import Share
from shardwise.part import forget, plain
from shardwise.step.state import RankState
from shardwise.step.train_step import take_written
from shardwise.trace.outside_reads import set_training

TAG = "predictions"
PLAIN = (type(None), bool, int, float, str)


def predict(state: RankState, steps: Iterator[list[Share]], select: Callable[[Any], Any] | None) -> Iterator[Any]:
    """Yields for each step the output for all its samples, on the CPU, on rank 0; None on other ranks. Collective.

    steps   this rank's parts of each batch
    select  as of `Engine.predict`
    Raises `InputError` on every rank for outputs whose first dim is not samples.
    """
    for parts in steps:
        outputs = [_micro_batch(state, part, select) for part in parts]
        yield _joined(outputs) if state.mesh.rank == 0 else None


def _micro_batch(state: RankState, part: Share, select: Callable[[Any], Any] | None) -> Any:
    """Returns (leaves for all samples, pytree spec as text) of a micro-batch's output on rank 0, else None."""
    leaves, row = _mine(state, part, select)
    table = [row for row in gather_json(row, state.mesh.world, state.device) if row is not None]
    _check(table)  # before anything is sent: all ranks raise, or none
    table.sort(key=lambda row: row["start"])
    pieces = [_brought(state, row, leaves) for row in table]
    if state.mesh.rank:
        return None
    spec = table[0]["spec"]
    return [_put([piece[i] for piece in pieces]) for i in range(len(pieces[0]))], spec


@torch.no_grad()
def _mine(state: RankState, part: Share, select: Callable[[Any], Any] | None) -> tuple[list[Any], dict | None]:
    """Returns (this rank's output leaves, a row that describes them); ([], None) if it has none to send. Collective.

    The row is {"rank": global rank, "start": index of its first sample in the micro-batch, "error": why the leaves
    cannot be sent or None, "spec": pytree spec as text, "leaves": [dtype, shape] of a tensor, or the plain value}.
    """
    forward = state.forward
    set_training(state.module, False)
    state.phase.samples = part.count
    try:
        output = forward.output(forward.to_device(part.batch))
        # the last stage alone has the model's output
        if state.staged is not None and not state.staged.has_loss:
            return [], None
        leaves, spec = pytree.tree_flatten(output if select is None else select(output))
        leaves = [plain(leaf) for leaf in leaves]  # gathers sharded leaves; all ranks with these samples join
    finally:
        set_training(state.module, True)
        forget()
        take_written(state)
    # one of the ranks with the same samples sends them; a stand-in (`count` 0) is not sent
    if state.mesh.tp.index or not state.mesh.counts or not part.count:
        return [], None
    row: dict[str, Any] = {"rank": state.mesh.rank, "start": part.start, "error": _wrong(leaves, part.count)}
    try:
        row["spec"] = pytree.treespec_dumps(spec)
    except NotImplementedError:  # a class that is registered as a pytree, without a name for it
        row["error"] = f"the output is a {type(output).__name__}, whose structure cannot be sent"
    row["leaves"] = [
        [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] if isinstance(leaf, torch.Tensor) else leaf
        for leaf in (leaves if row["error"] is None else [])
    ]
    return leaves, row


def _wrong(leaves: list[Any], count: int) -> str | None:
    """Returns why these leaves are no outputs for `count` samples, None if they are."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.shape[:1] != (count,):
                return f"for {count} samples the model returned a tensor of shape {tuple(leaf.shape)}"
        elif not isinstance(leaf, PLAIN):
            return f"the model returned a {type(leaf).__name__}"
    return None


def _check(table: list[dict]) -> None:
    """Raise `InputError` if leaves of ranks cannot be concatenated. All ranks have the same `table`, so all raise."""
    advice = (
        "predict puts outputs together by samples, their first dim: give select=, a function of the output that "
        "returns such tensors (lambda output: output.logits)"
    )
    for row in table:
        if row["error"] is not None:
            raise InputError(f"{row['error']}; {advice}")
    # all but the number of samples: shapes from the second dim on, dtypes, plain values
    like = [(row["spec"], [leaf[:1] + leaf[1][1:] if isinstance(leaf, list) else leaf for leaf in row["leaves"]])
            for row in table]  # fmt: skip
    if any(other != like[0] for other in like[1:]):
        raise InputError(f"outputs for samples of one batch have other shapes on other ranks: {advice}")


def _brought(state: RankState, row: dict, leaves: list[Any]) -> list[Any]:
    """Returns on rank 0 the leaves of the rank of `row`, on the CPU; that rank sends its `leaves`, others return [].

    row  of `_mine`; plain values are taken from it
    """
    world, source = state.mesh.world, row["rank"]
    if state.mesh.rank not in (0, source):
        return []
    brought, pending = [], []
    for number, leaf in enumerate(row["leaves"]):
        if not isinstance(leaf, list):  # a plain value: it came with the table
            brought.append(leaf)
        elif source == 0:
            brought.append(leaves[number].cpu())
        elif state.mesh.rank == source:
            whole = leaves[number].resolve_conj().resolve_neg().contiguous()  # bytes are sent, so no lazy bits
            data = whole.view(-1).view(torch.uint8)
            if data.numel():  # nothing is sent of an empty one, and nobody waits for it
                pending.append((send(data, world, 0, TAG, number), data))  # data stays until it is sent
        else:
            made = torch.empty(leaf[1], dtype=getattr(torch, leaf[0]), device=state.device)
            if made.numel():
                receive(made.view(-1).view(torch.uint8), world, source, TAG, number).wait()
            brought.append(made.cpu())
    for message, _ in pending:
        message.wait()
    return brought


def _joined(outputs: list[tuple[list[Any], str]]) -> Any:
    """Returns the output for a step's samples. `outputs`: (leaves, pytree spec as text) of each micro-batch."""
    first, spec = outputs[0]
    leaves = [_put([leaves[i] for leaves, _ in outputs]) for i in range(len(first))]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(spec))


def _put(pieces: list[Any]) -> Any:
    """Returns tensors concatenated along samples, or the first of the (equal) plain values."""
    return torch.cat(pieces) if isinstance(pieces[0], torch.Tensor) else pieces[0]
