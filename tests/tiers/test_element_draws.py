"""Draws are by an element's place in the whole, spread evenly, and others in each step and tensor."""

from __future__ import annotations

import pytest
import torch

from shardwise.tiers.element_draws import draws, key_of, places

CPU = torch.device("cpu")


def views() -> list[torch.Tensor]:
    whole = torch.arange(6 * 8).view(6, 8)
    return [whole, whole[2:4], whole[:, 3:7], whole.view(-1)[5:29], whole[1:5, 1:2]]


@pytest.mark.parametrize("number", range(len(views())))
def test_who_holds_an_element_draws_the_same(number: int) -> None:
    view, whole = views()[number], torch.empty(6, 8, device="meta")
    piece = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    assert torch.equal(places(piece, 1, view.numel() - 1, CPU), view.reshape(-1)[1:-1])
    everything = draws(9, whole, 0, 48, CPU)
    for first, last in ((0, view.numel()), (1, view.numel() - 1), (2, 3)):
        assert torch.equal(draws(9, piece, first, last, CPU), everything[view.reshape(-1)[first:last]])


def test_draws_are_even_and_their_own() -> None:
    like = torch.empty(100_000, device="meta")
    keys = [key_of(0, "w", 0), key_of(0, "w", 1), key_of(0, "v", 0), key_of(1, "w", 0)]
    drawn = torch.stack([draws(key, like, 0, 100_000, CPU) for key in keys]).double()
    assert drawn.min() >= 0 and drawn.max() < 2**16
    assert torch.allclose(drawn.mean(1), torch.tensor(2.0**15, dtype=torch.float64), rtol=0.01)
    assert (torch.corrcoef(torch.cat([drawn, drawn[:1].roll(1, 1)])) - torch.eye(5)).abs().max() < 0.02
