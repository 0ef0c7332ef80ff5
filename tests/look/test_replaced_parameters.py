"""Code that may replace weights is known by what a forward comes to, and a replacement in the look is refused."""

from __future__ import annotations

import pytest
import torch
import written_tasks

from shardwise.errors import RefusedPlan
from shardwise.look.replaced_parameters import may_replace
from shardwise.look.watched_run import Seen


def test_code_that_may_replace_weights_is_told_by_what_a_forward_comes_to() -> None:
    assert may_replace(written_tasks.Averages())
    assert not may_replace(written_tasks.Scaled(8, 8)), "a constructor makes parameters"


def test_a_replacement_met_in_the_look_is_refused() -> None:
    module = written_tasks.Averages()
    seen = Seen(module)
    with pytest.raises(RefusedPlan, match=r"replaces parameter 'sums' by another nn\.Parameter"), seen.watching():
        module(torch.randn(4, written_tasks.WIDTH))
