"""Collectives around a ring: every step is a possible one, and the end is what the collective promises."""

from __future__ import annotations

import pytest

from shardwise.cluster.tables import bus_factor
from shardwise.layout.ring_steps import COLLECTIVES, as_svg, as_text, ring

everything = pytest.mark.parametrize("ranks", [2, 3, 4, 7])
every_op = pytest.mark.parametrize("op", COLLECTIVES)


def promised(op: str, ranks: int, rank: int, piece: int) -> set[int] | None:
    """Whose values a rank holds of a piece at the end; None where it may hold anything."""
    everyone = set(range(ranks))
    if op == "reduce_scatter":
        return everyone if piece == rank else None
    return {"all_reduce": everyone, "all_gather": {piece}, "broadcast": {0}, "all_to_all": {piece}}[op]


@every_op
@everything
def test_the_end_is_what_the_collective_promises(op, ranks):
    end = ring(op, ranks).steps[-1].contents
    for rank in range(ranks):
        for piece in range(ranks):
            wanted = promised(op, ranks, rank, piece)
            assert wanted is None or end[rank][piece] == wanted


@every_op
@everything
def test_a_rank_sends_what_it_holds_once_a_step_and_adds_nothing_twice(op, ranks):
    drawn = ring(op, ranks)
    before = drawn.start
    for step in drawn.steps:
        assert len({send.source for send in step.sends}) == len(step.sends) == len({s.target for s in step.sends})
        for send in step.sends:
            if op == "all_to_all":
                continue  # every piece of its own is there from the start; a column shows who it came from
            given, had = before[send.source][send.piece], before[send.target][send.piece]
            assert given and (op != "reduce_scatter" or not given & had)
        before = step.contents


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
@everything
def test_bytes_are_those_of_the_formula_that_forecasts_use(op, ranks):
    assert ring(op, ranks).received() == pytest.approx([bus_factor(op, ranks)] * ranks)


@every_op
def test_text_and_picture_show_every_step(op):
    drawn = ring(op, 4)
    text, svg = as_text(drawn), as_svg(drawn)
    assert text.count("step ") == len(drawn.steps) and svg.count("<animate ") == len(drawn.steps) + 1
    assert "<script" not in svg and svg.count("<g") == svg.count("</g>")
