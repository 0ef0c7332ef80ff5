"""Schedules against values worked out by hand, and the rules for the learning rate of another batch size."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.schema import ScheduleSection
from shardwise.errors import InputError
from shardwise.training.learning_rates import constant, cosine, linear, make_schedule, scaled_lr, wsd


def section(**values) -> ScheduleSection:
    return ScheduleSection.model_validate(values)


def test_warmup_rises_in_equal_steps_and_never_starts_at_zero():
    assert [constant(step, warmup=3) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert constant(0) == 1.0


def test_cosine_by_hand():
    found = [cosine(step, total=6, warmup=2, final=0.1) for step in range(7)]
    halves = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert found == pytest.approx([1 / 3, 2 / 3, *(0.1 + 0.9 * half for half in halves)])


def test_linear_by_hand():
    assert [linear(step, total=4) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_wsd_is_flat_then_falls_in_the_last_steps():
    found = [wsd(step, total=8, decay=3, warmup=1) for step in range(9)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@given(
    name=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    total=st.integers(1, 300),
    warmup=st.integers(0, 299),
    final=st.floats(0, 1),
)
def test_every_step_of_a_run_has_a_useful_factor(name, total, warmup, final):
    if warmup >= total:
        with pytest.raises(InputError, match="warmup_steps"):
            make_schedule(section(name=name, warmup_steps=warmup), total)
        return
    try:
        schedule = make_schedule(section(name=name, warmup_steps=warmup, final_factor=final), total)
    except InputError:
        assert name == "wsd" and warmup + max(1, round(0.2 * total)) > total
        return
    factors = [schedule(step) for step in range(total)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    if name != "wsd" or warmup < total - max(1, round(0.2 * total)):
        assert factors[warmup] == pytest.approx(1)


def test_wsd_takes_decay_steps_or_a_fraction():
    by_steps = make_schedule(section(name="wsd", decay_steps=5), 20)
    by_fraction = make_schedule(section(name="wsd", decay_fraction=0.25), 20)
    assert [by_steps(step) for step in range(20)] == [by_fraction(step) for step in range(20)]


def test_wsd_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="do not fit into 10 steps"):
        make_schedule(section(name="wsd", warmup_steps=6, decay_steps=5), 10)


@pytest.mark.parametrize(("rule", "expected"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_scaled_lr(rule, expected):
    assert scaled_lr(1e-3, batch=128, base_batch=32, rule=rule) == pytest.approx(expected)
