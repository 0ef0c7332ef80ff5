"""How sums of a loss are compared at the look before the first step."""

from __future__ import annotations

import torch

from shardwise.look.first_samples import added_up, against
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


def test_sums_that_differ_are_told_with_as_many_digits_as_show_it() -> None:
    assert against(76.8341, 56.9418) == "76.8341 against 56.9418"
    assert against(225.92213, 225.92205) == "225.92213 against 225.92205"
    assert against(1.0, 1.0 + 2**-52) == "1 against 1.0000000000000002"
