"""What a command says while it works."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise import progress
from shardwise.observe.progress_display import Display


def test_a_log_is_told_of_work_that_goes_on(capfd, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LOG_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    said, until = "", time.monotonic() + 60
    with progress.timing(True) as say:
        say("a long part")
        while "..." not in said and time.monotonic() < until:
            time.sleep(0.1)
            said += capfd.readouterr().err
    assert said.startswith("a long part\na long part ... ")


def test_a_terminal_is_told_of_what_is_loaded_and_that_it_goes_on(capfd, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    said, until = "", time.monotonic() + 60
    with progress.timing(True, "loading"):
        while "loading ... 1 s" not in said and time.monotonic() < until:
            time.sleep(0.1)
            said += capfd.readouterr().err
    assert said.startswith("\r\x1b[2Kloading") and capfd.readouterr().err.endswith("\r\x1b[2K")


def test_a_log_is_not_told_of_what_is_loaded_soon(capfd) -> None:
    with progress.timing(True, "loading"):
        pass
    assert capfd.readouterr().err == ""


def test_a_log_is_told_of_what_is_loaded_before_it_is_over(capfd) -> None:
    progress._last_plain[0] = -progress.EVERY_S
    said, until = "", time.monotonic() + 60
    with progress.timing(True, "loading") as say:
        while not said and time.monotonic() < until:
            time.sleep(0.05)
            said += capfd.readouterr().err
        say("another part")
    assert said + capfd.readouterr().err == "loading\nanother part\n", "once, without a count of seconds"


def test_nothing_is_said_where_it_is_not_wanted(capfd) -> None:
    with progress.timing(False) as say:
        say("a part")
    assert capfd.readouterr().err == ""


def test_the_time_left_of_a_run_that_goes_on_is_by_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("shardwise.observe.progress_display.time", SimpleNamespace(monotonic=lambda: now[0]))
    speed: Any = SimpleNamespace(unit="samples")
    display = Display(1000, speed, log_every=1000, live=False)
    for step, left in ((901, "0:16:30"), (902, "0:16:20")):
        now[0] += 10.0
        display.step({"step": step})
        assert display._left(step) == left


def test_a_step_is_shown_with_the_numbers_of_the_task(capfd) -> None:
    speed: Any = SimpleNamespace(unit="samples")
    display = Display(3, speed, log_every=1, live=False)
    record: dict[str, Any] = {"step": 1, "loss": 0.5, "skipped": False, "lr": 1e-3, "samples_per_s": 8.0}
    display.step(record | {"extra/box": 0.25, "metric/rmse/0": 2 / 3})
    assert "step 1/3  loss 0.5000  box 0.25  rmse/0 0.6667  lr 1.00e-03  8 samples/s" in capfd.readouterr().err
    many = {f"metric/rmse/{variable}": 1.0 for variable in range(80)}
    display.step(record | many)
    assert "  rmse/5 1  (and 74 more)  lr " in capfd.readouterr().err
    assert display._text(record | many, 40).startswith("loss 0.5000  rmse/0 1  ")
    assert " lr " not in display._text(record | many, 40)
