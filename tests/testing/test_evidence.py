"""What a machine shows, as rows, a page and a JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise import verify
from shardwise.cli.main import call
from shardwise.errors import InputError
from shardwise.layout import Plan, check
from shardwise.ranks import RankPool
from shardwise.testing import evidence_page, machine_evidence
from shardwise.testing.machine_evidence import KINDS, EvidenceRow, collect, large_messages


def test_all_kinds_of_plans_are_there_and_none_is_refused() -> None:
    for _, plan in KINDS:
        check(Plan.parse(plan))
    keys = ("tp=", "pp=", "zero=1", "zero=2", "zero=3", "ep=", "cp=", "cp_ulysses=", "domain=", "sp=", "dp_replicate=",
            "remat=", "zbv", "interleaved")  # fmt: skip
    assert not [key for key in keys if not any(key in plan for _, plan in KINDS)]


def test_what_the_time_does_not_reach_is_told() -> None:
    rows = collect(limit_s=-1.0)
    assert len(rows) == len(KINDS) + 4 and all(row["held"] is None and "time" in row["what"] for row in rows)


def test_large_messages_arrive(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(large_messages, 2, timeout_s=60) == [[], []]


def test_a_failure_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> EvidenceRow:
        raise InputError("no such thing\nand more")

    row = machine_evidence._tried("proofs", "x", fails, float("inf"))
    assert (row.held, row.what) == (False, "no such thing")


def test_the_page_and_the_file(tmp_path: Path) -> None:
    rows = [
        {"part": "steps", "name": "a", "held": True, "what": "x|y", "seconds": 1.0, "figures": {"ratio": 0.98}},
        {"part": "proofs", "name": "b", "held": None, "what": "not tried", "seconds": 0.0, "figures": None},
        {"part": "proofs", "name": "c", "held": False, "what": "NOT EQUAL", "seconds": 2.0, "figures": {"loss": 1.0}},
    ]
    facts = evidence_page.about("gloo", 2)
    page, data = evidence_page.write(tmp_path, facts, rows)
    text = page.read_text()
    assert "1 of 2 held; 1 not tried" in text and "2 ranks over gloo" in text and "| ratio | 0.98 |" in text
    assert "**no**" in text and "x/y" in text
    read = json.loads(data.read_text())
    assert read["rows"] == rows and len(read["about"]["code"]) == 16 and read["about"]["torch"]


def test_the_command_says_what_did_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(**words: object) -> list[dict]:
        assert words["device"] == "cpu" and words["ranks"] == 2
        return [{"part": "proofs", "name": "c", "held": False, "what": "no", "seconds": 0.0, "figures": None}]

    monkeypatch.setattr(machine_evidence, "collect", nothing)
    code = call(["evidence", "-o", str(tmp_path), "--device", "cpu", "--ranks", "2"])
    assert code == 1 and len(list(tmp_path.iterdir())) == 2


def test_nccl_without_an_accelerator_is_refused() -> None:
    with pytest.raises(InputError, match="sees no accelerator"):
        verify("shardwise.models.tasks:mlp", "dp_replicate=2", backend="nccl")
    with (
        RankPool(quiet=True, own_backend=True) as ranks,
        pytest.raises(InputError, match="no accelerator"),
    ):
        ranks.run(large_messages, 2)
