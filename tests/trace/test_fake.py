"""Tensors without values whose operations are remembered: the same as torch's own, operation by operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardwise.models import tasks
from shardwise.rehearsal import rank_row, step_trace
from shardwise.rehearsal.cut_module import CutRehearsal, Cuts, TaskAnalysis
from shardwise.rehearsal.rank_row import trace_of
from shardwise.trace import fake
from shardwise.trace.fake import Fake


def facts(tree: Any, before: list[FakeTensor]) -> list:
    """All that can be seen of results, and which arguments they are, or share their memory with."""
    found: list = []
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            found.append((type(leaf), leaf))
            continue
        storage = leaf.untyped_storage()
        same = [place for place, one in enumerate(before) if one.untyped_storage()._cdata == storage._cdata]
        itself = [place for place, one in enumerate(before) if one is leaf]
        shape = (leaf.shape, leaf.stride(), leaf.storage_offset(), storage.nbytes())
        kind = (type(leaf), leaf.dtype, leaf.device, leaf.requires_grad, torch._C._dispatch_key_set(leaf))
        found.append((kind, shape, same, itself))
    return found


class Compared(Fake):
    """Asks torch each time as well."""

    remembered = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        hits = len(ANSWERED)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if len(ANSWERED) > hits:
            tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, FakeTensor)]
            torchs = FakeTensorMode.__torch_dispatch__(self, func, types, args, kwargs or {})
            assert facts(output, tensors) == facts(torchs, tensors), func
            Compared.remembered += 1
        return output

    def _answer(self, answer: fake.OpResult, tensors: list[FakeTensor]) -> Any:
        ANSWERED.append(1)
        return super()._answer(answer, tensors)


ANSWERED: list[int] = []


def plain() -> FakeTensorMode:
    """torch's mode."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("name", ["decoder_dropout", "moe", "unet_group", "hf_llama"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_is_remembered_is_what_torch_gives(name: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = getattr(tasks, name)()
    counted = {}
    for how in (plain, Compared, Fake):
        monkeypatch.setattr(step_trace, "Fake", how)
        counted[how] = step_trace.trace(task, 2, "bf16", recompute)
    assert Compared.remembered > 100
    for how in (Compared, Fake):
        assert vars(counted[how]) == vars(counted[plain])


@pytest.mark.parametrize("cuts", [Cuts(tp=2, sp=True), Cuts(tp=2, recompute="full"), Cuts(zero=3, shard=2)])
def test_rehearsals_are_those_of_torchs_mode(cuts: Cuts, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.decoder()
    found = {}
    for how in (plain, Compared, Fake):
        monkeypatch.setattr(rank_row, "Fake", how)
        found[how] = trace_of(CutRehearsal(TaskAnalysis(task, step_trace.one_sample(task)), cuts), 0, 0, (2,))
    for how in (Compared, Fake):
        now, was = (vars(found[each]) | {"ops": {key: vars(op) for key, op in found[each].ops.items()}}
                    for each in (how, plain))  # fmt: skip
        assert now == was


def test_arguments_that_differ_in_type_alone_are_told_apart() -> None:
    """1, 1.0 and True are equal, and give tensors of other dtypes."""
    with Fake():
        ints = torch.ones(3, dtype=torch.int64)
        for _ in range(2):
            assert (ints + 1).dtype is torch.int64
            assert (ints + 1.0).dtype is torch.float32
            assert torch.full((2,), True).dtype is torch.bool
            assert torch.full((2,), 1).dtype is torch.int64


def test_views_and_writes_keep_their_storage() -> None:
    with Fake():
        for _ in range(2):
            x = torch.zeros(4, 6)
            for view in (x.view(24), x.t(), x[1:], x.reshape(2, 12), x.detach(), x.narrow(1, 2, 3)):
                assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x[1:].storage_offset() == 6
            assert x.t().reshape(24).untyped_storage()._cdata != x.untyped_storage()._cdata
            assert x.add_(1) is x
            x.transpose_(0, 1)
            assert x.shape == (6, 4)


def test_a_result_that_is_given_its_shape_gets_it_each_time() -> None:
    with Fake():
        x = torch.ones(3)
        for _ in range(3):
            out = torch.empty(0)
            assert torch.add(x, 1, out=out) is out and out.shape == (3,)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_data_pointers_are_as_torch_has_them() -> None:
    found = []
    for mode in (plain(), Fake()):
        with mode:
            for _ in range(3):
                last = torch.ones(3) + 1
        try:
            found.append(last.data_ptr())
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_values_are_still_asked_of_torch() -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    with Fake():
        x = torch.zeros(4)
        for _ in range(2):
            with pytest.raises(DataDependentOutputException):
                x.sum().item()
            with pytest.raises(DynamicOutputShapeException):
                x[x > 0]
            assert torch.tensor(3).item() == 3
            assert x[torch.tensor([0, 1, 1])].shape == (3,)


def test_default_dtype_counts() -> None:
    was = torch.get_default_dtype()
    try:
        with Fake():
            for dtype in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(dtype)
                assert torch.ones(2).dtype is dtype
                assert (torch.ones(2, dtype=torch.int64) / 2).dtype is dtype
    finally:
        torch.set_default_dtype(was)
