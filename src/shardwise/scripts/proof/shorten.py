"""Epochs of a few batches: a proof of six steps then meets an epoch's end, its uneven last batch, and the next epoch.

    batches of the script's sampler   0 1 2 3 4 5 6 7 8 9
    handed out                        0 1 2             9

Both sides of a proof do so. What a sampler draws, it draws for all. `len(loader)` is that of the shortened epoch.

What this does not do: shorten what has no batch sampler (an iterable dataset, a list of batches).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from shardwise.scripts.proof.recorder import ScriptRecorder


class FirstAndLast:
    """The first `count` batches of a batch sampler, and its last one."""

    def __init__(self, batches: Iterable[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return min(len(self.batches), self.count + 1)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        last, beyond = None, False
        for number, batch in enumerate(self.batches):
            if number < self.count:
                yield batch
            else:
                last, beyond = batch, True
        if beyond:
            yield last


def shortened(loader: Any, recorder: ScriptRecorder) -> Any:
    """Returns the loader, whose epochs have become short in place where the proof asks for it."""
    count = recorder.shorten
    if count is None or type(loader) is not DataLoader or loader.batch_sampler is None:
        return loader
    if isinstance(loader.batch_sampler, FirstAndLast):  # the loader of a second model
        return loader
    try:
        many = len(loader.batch_sampler)
    except TypeError:
        many = 0
    if many > count + 1:
        vars(loader)["batch_sampler"] = FirstAndLast(loader.batch_sampler, count)  # DataLoader refuses an assignment
        note = f"scope: epochs of {many} batches are shortened to their first {count} and their last; --steps all: none"
        recorder.record.notices.append(note)
    return loader
