"""How sums of a loss are compared at the look before the first step."""

from __future__ import annotations

import torch

from shardwise.look.first_samples import added_up
from shardwise.step.loss import Loss


def test_sums_under_autocast_are_compared_as_its_dtype_rounds() -> None:
    """Terms that cancel leave the rounding of all of them; without autocast float32 has to add up."""

    class Cancelling(Loss):
        terms = 10.0

    whole = Cancelling(torch.tensor(0.4), 5.0)
    assert not added_up("sum", whole, 0.43, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert added_up("sum", whole, 0.43, torch.float32) and not added_up("sum", whole, 1.4, torch.float32)
        assert not added_up("weight", whole, 5.4, torch.float32) and not added_up("sum", whole, 0.43, torch.float64)
    assert not added_up("sum", Loss(torch.tensor(0.4), 5.0), 0.43, torch.bfloat16)
