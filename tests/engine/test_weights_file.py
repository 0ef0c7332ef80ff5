"""A file of weights that is written tensor by tensor is one that safetensors reads, and nothing of it is kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardwise.engine.weights_file import DTYPES, WeightsFile
from shardwise.errors import RefusedPlan

TENSORS = {
    "of 'every\" name \u00e4": torch.arange(12.0).view(3, 4).t(),
    "a number": torch.tensor(7),
    "nothing": torch.empty(0, 5),
    "conjugated": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    **{f"in {code}": torch.arange(5).to(dtype) for code, dtype in DTYPES.items()},
}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "weights.safetensors"
    file = WeightsFile(path, TENSORS)
    for name, tensor in TENSORS.items():
        file.add(name, tensor)
    assert not path.exists()
    file.publish({"step": "3", "format": "pt"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.resolve_conj().flatten().view(torch.uint8))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"step": "3", "format": "pt"}


def test_larger_than_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.engine.weights_file._BLOCK", 64)
    file, value = WeightsFile(tmp_path / "w", ["a"]), torch.randn(33, 7, dtype=torch.float64)
    file.add("a", value)
    file.publish({})
    assert torch.equal(load_file(tmp_path / "w")["a"], value)


def test_what_was_added_is_not_kept(tmp_path: Path) -> None:
    file, tensor = WeightsFile(tmp_path / "w", ["a"]), torch.randn(1000)
    file.add("a", tensor)
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None
    file.discard()
    assert not list(tmp_path.iterdir())


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedPlan, match="'a' has dtype"):
        WeightsFile(tmp_path / "w", ["a"]).add("a", torch.ones(2, dtype=torch.complex128))
