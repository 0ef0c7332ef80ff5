"""A block that torch's compiler fails on for sizes that vary is compiled for each size, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.recipe import _compiled
from shardwise.errors import RefusedPlan


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * x


def failing(*, always: bool, after: bool) -> Callable[..., Any]:
    """Returns a `torch.compile` that fails: for sizes that vary, or `always`; `after` the forward has run in part."""

    def compile(forward: Callable[..., Any], dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
        def fails(*args: Any) -> Any:
            if after:
                forward(*args)
            raise torch._dynamo.exc.TorchDynamoException("no ranges")

        return fails if always or dynamic is None else forward

    return compile


def test_what_fails_for_sizes_that_vary_is_compiled_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing(always=False, after=False))
    block = Counting()
    run = _compiled(block, "blocks.0")
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0)) and run(torch.ones(3)).shape == (3,)
    assert block.calls == 2


@pytest.mark.parametrize(("always", "after"), [(True, False), (False, True)])
def test_what_cannot_be_compiled_is_refused(always: bool, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has changed a buffer by then, which a second try would change again."""
    monkeypatch.setattr(torch, "compile", failing(always=always, after=after))
    with pytest.raises(RefusedPlan, match=r"fails on 'blocks.0': .*no ranges.*leave compile=true out"):
        _compiled(Counting(), "blocks.0")(torch.ones(2))
