"""Messages on rows of samples in a script's operations, and how such rows are told from shapes."""

from __future__ import annotations

import random
import sys
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.errors import RefusedPlan, first_line
from shardwise.layout.dealing import Share
from shardwise.part.levels import Distributed
from shardwise.scripts.outside import with_line
from shardwise.scripts.saying import line_of_script

FAILURES = (RuntimeError, ValueError, IndexError, AssertionError)  # of a line that is given other samples
HELD_OUT = (
    "the model is trained on batches of prepared.split(loader), which is for held-out data: their draws would not be "
    "one process's, and their losses are not looked at: prepared.split(loader, trains=True)"
)
UNCOUNTED = (
    "prepared.backward: this rank counts no sample of the main batch, of which there are {}, and its loss is of "
    "samples of prepared.split(...) too, which would be left out: give the main loader drop_last=True (or prepare "
    "check_loss=False, where a batch that is looked at is dealt to fewer ranks)"
)
OTHER_ROWS = (
    "the model is given a tensor of shape {} that it gave in an earlier step (a hidden state) for {}, and this rank's "
    "part of this batch is {}: its rows go with other samples. Where ranks would have one sample of a batch, those on "
    "which the loss is looked at are dealt two to a rank: prepare(..., check_loss=False) leaves that out"
)
_FAILS = (
    "an operation fails ({}) on the {} of the batch's {} samples that this rank is given: a line that needs the whole "
    "batch (an episode of classes, a shape by the batch's size) is given it by "
    'prepare(..., loss_scope="global")'
)
_UNEVEN_FAILS = (
    "the model fails ({}) on the {} of the batch's {} samples that this rank is given, more or fewer than before: what "
    "it keeps from batch to batch (a hidden state) has rows of those. A batch is dealt so where a number in the loss "
    "may count samples, or a draw may hang on them: tell what this rank's mean is over, prepared.backward(loss, "
    "mean_over=n), or prepare(..., check_loss=False)"
)
_DRAWN = (
    "an array of this rank's {} samples is made after NumPy's or Python's generator has drawn: every rank draws the "
    "same numbers there, where one process draws for each sample of the whole batch: draw by torch's operations "
    "(torch.randn(len(x), ...)), which are followed, or in the dataset; or take prepare(..., "
    'loss_scope="global"), by which every rank has the whole batch'
)
_MODEL_FAILS = (
    "the model fails ({}) on the {} of the first batch's {} samples that this rank is given: what it is given beside "
    "them, or made for them, has the size of the whole batch: make it by the size of the input at hand (len(x), "
    'x.shape); or prepare(..., loss_scope="global") for a hidden state of the whole batch, loss_scope="model" for one '
    "graph that is the batch, which then every rank computes"
)


def fails_on_uneven(error: Exception, held: Share) -> RefusedPlan:
    """Returns the refusal of a model that fails on a batch which was dealt so that ranks have other numbers of samples
    than before."""
    return with_line(_UNEVEN_FAILS.format(first_line(error), held.count, held.total), line_of_script())


def fails_on_part(error: Exception, held: Share) -> RefusedPlan:
    """Returns the refusal of a script's line that fails on a part of a batch and may need all of it."""
    return with_line(_FAILS.format(first_line(error), held.count, held.total), line_of_script())


def refuse_drawn(held: Share, sizes: list[int], stood: int) -> None:
    """Raise `RefusedPlan` for an array of this rank's samples where NumPy or Python drew since their generators stood
    so."""
    if held.count > 1 and held.count in sizes and stood != stand_of_generators():
        raise with_line(_DRAWN.format(held.count), line_of_script())


@contextmanager
def failing_on_part(held: Share | None) -> Iterator[None]:
    """Context: a model's call that fails on a rank's part of the first batch raises `RefusedPlan`."""
    try:
        yield
    except FAILURES as error:
        if held is None or held.count == held.total:
            raise
        told = _MODEL_FAILS.format(first_line(error), held.count, held.total)
        raise with_line(told, line_of_script()) from error


def told_of(held: Share) -> str:
    return f"samples {held.start} to {held.start + held.count - 1} of {held.total}"


def is_plain(value: Any, function: str) -> bool:
    """Whether a value is a NumPy array, or a list of elements or indices: elsewhere a list is a shape."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, list) and function in ("tensor", "as_tensor", "asarray", "__getitem__")


def is_array(tensor: torch.Tensor, weights: Collection[int]) -> bool:
    """Whether a tensor's memory is NumPy's or another library's; `weights`: storages of the model's own."""
    if isinstance(tensor, Distributed) or tensor.requires_grad:
        return False
    storage = tensor.untyped_storage()
    return not storage.resizable() and storage._cdata not in weights


def stand_of_generators() -> int:
    """Returns a number for the states of NumPy's and Python's generators."""
    state: Any = np.random.get_state(legacy=True)
    _, keys, *place = state
    return zlib.crc32(
        repr((place, random.getstate()[2:])).encode() + keys.tobytes(), hash(random.getstate()[1]) & 0xFFFFFFFF
    )


def in_a_forward(models: Iterable[weakref.ref[nn.Module]]) -> bool:
    """Returns whether a module of these models is running, by the frames of this call."""
    running = {id(child) for known in models if (model := known()) is not None for child in model.modules()}
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in running:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
