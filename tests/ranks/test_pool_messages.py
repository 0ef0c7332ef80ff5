"""Tensors go from process to process by value, with all that they are."""

from __future__ import annotations

import pickle

import pytest
import torch

from shardwise.ranks.pool_messages import dumps


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.said = "an attribute"
    return tensor


TENSORS = {
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "sixteen bits": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "trained": torch.arange(4.0).requires_grad_(),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "booleans": torch.tensor([True, False]),
    "part of a storage": torch.arange(1000.0)[2:4],
    "expanded": torch.arange(4.0)[:, None].expand(4, 3),
    "a parameter": torch.nn.Parameter(torch.arange(3.0)),
    "with an attribute": with_attribute(torch.arange(3.0)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_arrives_as_it_was(kind: str) -> None:
    tensor = TENSORS[kind]
    arrived = pickle.loads(dumps(tensor))
    assert type(arrived) is type(tensor) and arrived.dtype == tensor.dtype and arrived.layout == tensor.layout
    assert torch.equal(arrived.to_dense(), tensor.to_dense()) and arrived.requires_grad == tensor.requires_grad
    assert getattr(arrived, "said", None) == getattr(tensor, "said", None)


def test_elements_out_of_view_stay_behind_and_memory_can_be_freed() -> None:
    arrived = pickle.loads(dumps([torch.arange(1000.0)[2:4], torch.arange(2.0)]))
    for tensor in arrived:
        assert tensor.untyped_storage().nbytes() == 8
        tensor.untyped_storage().resize_(0)  # as zero=3 frees a gathered weight
