"""The score on published runs, and the page of rules of thumb."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, model
from shardwise.costs.shapes import Shape

ROOT = Path(__file__).parents[1]
LLAMA = Shape.from_row(model("llama3-8b"))
NODE = Cluster.parse("8 h100-sxm-80gb")


# --- the score


def published(tmp_path: Path, **changes: str) -> Path:
    """One made-up run in the columns of a published one."""
    row = {
        "source": "a run", "model": "llama", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
        "ffn": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-SXM-80GB", "n_gpus": "8", "tp": "2",
        "sp": "1", "cp": "1", "pp": "1", "vpp": "", "dp": "4", "dp_shard": "1", "ep": "1", "micro_batch": "1",
        "global_batch": "32", "recompute": "none", "precision": "bf16", "tflops_per_gpu": "",
        "tokens_per_s_per_gpu": "", "table": "",
        "step_time_s": "5.0", "mem_gb_per_gpu": "", "notes": "", **changes,
    }  # fmt: skip
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, row.keys())
        out.writeheader()
        out.writerow(row)
    return tmp_path


def score(folder: Path) -> dict:
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "forecast.py", "--data", folder, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(ran.stdout)["files"][0]


def test_a_run_is_scored(tmp_path: Path) -> None:
    found = score(published(tmp_path))
    assert found["time"]["rows"] == 1
    assert abs(found["time"]["bias"]) < 0.5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"notes": "recalled: uncertain"}, "uncertain"),
        ({"notes": "NOT A MEASUREMENT"}, "not a measurement"),
        ({"precision": "FP8"}, "FP8"),
        ({"gpu": "Abacus"}, "not in the catalogue"),
        ({"hidden": ""}, "hidden is not published"),
        ({"step_time_s": ""}, "neither time nor memory"),
        ({"global_batch": "33"}, "does not divide"),
    ],
)
def test_a_row_is_skipped_with_its_reason(changes: dict[str, str], told: str, tmp_path: Path) -> None:
    found = score(published(tmp_path, **changes))
    assert "time" not in found
    assert any(told in reason for reason in found["skipped"])


@pytest.mark.long
def test_the_rules_of_thumb_are_current() -> None:
    ran = subprocess.run([sys.executable, ROOT / "benchmarks" / "rules_of_thumb.py", "--check"], check=False)
    assert ran.returncode == 0, "run benchmarks/rules_of_thumb.py"
