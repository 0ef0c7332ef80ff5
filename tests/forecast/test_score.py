"""The score on published runs, and the page of rules of thumb."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from shardwise.cluster import Cluster, model
from shardwise.costs.kernels import Kernels
from shardwise.costs.shapes import Shape

ROOT = Path(__file__).parents[2]
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


def scoring():
    """The benchmark as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import forecast
    finally:
        sys.path.pop(0)
    return forecast


def score(folder: Path) -> dict:
    """What the benchmark prints of a folder, run in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setattr(sys, "argv", ["forecast.py", "--data", str(folder), "--json"])
        scoring().main()
    return json.loads(said.getvalue())["files"][0]


def test_a_run_is_scored(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "forecast.py", "--data", published(tmp_path), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = score(tmp_path)
    assert json.loads(ran.stdout)["files"][0] == found
    assert found["time"]["rows"] == 1
    assert abs(found["time"]["bias"]) < 0.5


@pytest.mark.parametrize("precision", ["fp8", "FP8-CS (FP8-MX)", "fp8 (bf16 alt in parens)", "FP8-MX"])
def test_a_run_in_fp8_is_scored_by_the_first_of_its_figures(precision: str, tmp_path: Path) -> None:
    wide = score(published(tmp_path))["lines"][0]
    rate = "9000 (8000)" if "(" in precision else "9000"
    narrow = score(published(tmp_path, precision=precision, tokens_per_s_per_gpu=rate, step_time_s=""))["lines"][0]
    assert 0.5 < narrow["forecast_s"] / wide["forecast_s"] < 0.9
    assert narrow["measured_s"] == pytest.approx(32 * 8192 / 8 / 9000)


def test_what_a_row_leaves_out_follows_from_its_source(tmp_path: Path) -> None:
    """Utilisation as PaLM counts it; DeepSpeed's pipeline by the run's name; torchtitan's H100 with less power; tokens
    further ahead by the FLOPs of a token, and the layers of stages by the recipe."""
    (used,) = score(published(tmp_path, step_time_s="", mfu_pct="50"))["lines"]
    assert used["measured_s"] == pytest.approx(LLAMA.flops_per_token(8192, "6P+12Lhs") * 32 * 8192 / 8 / 494.5e12)
    lines = [score(published(tmp_path, source=text))["lines"][0] for text in ("FSDP", "torchtitan-like FSDP")]
    assert lines[1]["forecast_s"] != lines[0]["forecast_s"]
    scoring()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from forecast_ran_on import as_run, device_name, fp8_suffix, software_name
        from forecast_rows import _bridge
    finally:
        sys.path.pop(0)
    assert as_run("H100", "torchtitan docs") == "H100-SXM-96GB" and as_run("A100", "torchtitan") == "A100"
    assert software_name("papers", {"source": "MT-NLG 530B (DeepSpeed+Megatron)", "notes": ""}) == "megatron-deepspeed"
    of_date = {
        "NVIDIA NeMo performance summary, 24.07": "nemo-2024", "NVIDIA NeMo performance summary, 25.09": "nemo",
        "torchtitan, December 2024": "torchtitan", "torchtitan, 2025-06": "torchtitan-2025",
        "torchtitan, eager": "torchtitan-eager", "NeMo AutoModel": "automodel", "TinyLlama": "torchtitan-2025",
    }  # fmt: skip
    assert {text: software_name("papers", {"source": text, "notes": ""}) for text in of_date} == of_date
    fp8 = {"source": "NeMo 24.07", "notes": "", "precision": "FP8"}
    assert fp8_suffix(fp8) == "-fp8-delayed" and fp8_suffix(fp8 | {"precision": "NVFP4"}) == "-nvfp4"
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb", "A100 80GB": "a100-sxm-80gb", "A100-40G": "a100-sxm-40gb",
        "H100": "h100-sxm-80gb", "H100 PCIe": "h100-pcie-80gb", "V100-32GB": "v100-sxm2-32gb", "A6000": "rtx-a6000",
        "GB200-NVL72": "gb200",
    }  # fmt: skip
    assert {name: device_name(name) for name in names} == names
    assert _bridge(61, 16) == (*[4] * 15, 1) and _bridge(61, 32) == (1, *[2] * 30, 0) and _bridge(61, 8)[-1] == 5


def test_a_row_of_data_ranks_alone_need_not_say_tp(tmp_path: Path) -> None:
    said, unsaid = (score(published(tmp_path, tp=tp, dp="8", dp_shard="3"))["lines"][0] for tp in ("1", ""))
    assert unsaid["forecast_s"] == said["forecast_s"]
    found = score(published(tmp_path, tp="", dp_shard="0", dp="", n_gpus="8"))
    assert list(found["skipped"]) == ["tp is not published"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"notes": "recalled: uncertain"}, "uncertain"),
        ({"notes": "NOT A MEASUREMENT"}, "not a measurement"),
        ({"gpu": "Abacus"}, "not in the catalogue"),
        ({"hidden": ""}, "hidden is not published"),
        ({"step_time_s": ""}, "neither time nor memory"),
        ({"global_batch": "33"}, "does not divide"),
        ({"n_gpus": "16"}, "are not 16 GPUs"),
        ({"heads": "0"}, "heads is outside"),
        ({"step_time_s": "soon"}, "step_time_s is not one number"),
        ({"precision": "fp8", "gpu": "A100-SXM-80GB"}, "has no FP8 products"),
        ({"dp_shard": "64 (0)"}, "neither a ZeRO stage nor all data ranks"),
        ({"gpu": ""}, "may be empty"),
        ({"model": "nobody's-30B-A3B"}, "shape of its experts"),
        ({"model": "nobody's 8x7B"}, "shape of its experts"),
        ({"num_experts": "64"}, "shape of its experts"),
        ({"ep": "4"}, "shape of its experts"),
        ({"params_b": "30.5"}, "params_b says 30.5, and the columns give 8.03"),
        ({"model": "BERT-large"}, "bert is not a decoder"),
        ({"notes": "LoRA, rank 16"}, "lora, which is not modelled"),
        ({"step_time_s": "0.001"}, "shorter than its FLOPs take"),
    ],
)
def test_a_row_is_skipped_with_its_reason(changes: dict[str, str], told: str, tmp_path: Path) -> None:
    found = score(published(tmp_path, **changes))
    assert "time" not in found
    assert any(told in reason for reason in found["skipped"])


def test_a_file_as_a_spreadsheet_writes_it_is_the_same(tmp_path: Path) -> None:
    """A mark of the byte order, other capitals, another order of the columns, lines without cells."""
    plain = score(published(tmp_path))
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    head, cells = next(csv.reader(lines[:1])), next(csv.reader(lines[1:2]))
    order = sorted(range(len(head)), key=lambda place: head[place])
    with (tmp_path / "runs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        out = csv.writer(file)
        out.writerow(head[place].upper() for place in order)
        out.writerow(cells[place] for place in order)
        file.write("\r\n")
    assert score(tmp_path)["lines"] == plain["lines"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no rows"),
        (b"model,gpu\n", "no rows"),
        ("model,gpu\ncaf\xe9,H100\n".encode("latin-1"), "cannot be read"),
        (bytes(range(256)) * 9, "cannot be read"),
        ("model,gpu\nllama,H100\n".encode("utf-16"), "cannot be read"),
        (b"model,gpu\n" + b"x" * 200_000 + b",H100\n", "cannot be read"),
        (b"gpu,m,n,k\nH100,1,2,3\n", "there is no column model"),
    ],
)
def test_a_file_that_is_none_is_told(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(content)
    found = score(tmp_path)
    assert not found["lines"]
    assert any(told in reason for reason in found["skipped"])


def test_no_cell_makes_the_score_fall_over(tmp_path: Path) -> None:
    """Cells that nobody wrote, missing columns and columns without a name: scored, or skipped with a reason."""
    seed = 7
    draw, forecast = random.Random(seed), scoring()
    with (published(tmp_path) / "runs.csv").open(newline="") as file:
        plain = next(csv.DictReader(file))
    junk = ["", "n/a", "abc", "-1", "0", "3.5", "8 (16)", "GB999", "nan", "inf", "999999999", "1,2"]
    for _ in range(150):
        row: dict = dict(plain)
        for _ in range(draw.choice((1, 2, 3))):
            column = draw.choice(list(row))
            if draw.random() < 0.2:
                del row[column]
            else:
                row[column] = draw.choice(junk)
        row[None] = ["a column without a name"]
        found = forecast.score_file("runs", [row])
        assert len(found["lines"]) + sum(found["skipped"].values()) == 1, (seed, row)
        assert all(found["skipped"]), (seed, row)


def test_a_parameter_count_decides_what_the_columns_leave_open(tmp_path: Path) -> None:
    """A gated feed-forward and a head of its own, for a family of models that nobody named."""
    scoring()
    from forecast_cells import Row
    from forecast_rows import _shape

    with (published(tmp_path, model="nobody's", params_b="8.03") / "runs.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    shape = _shape("runs", Row(row))
    assert (shape.gated, shape.tied) == (True, False)
    assert abs(shape.parameters / 8.03e9 - 1) < 0.03


def test_bubble_rates_of_a_paper_from_its_times() -> None:
    """Table 5 of the zero-bubble paper: cells of three schedules, to a hundredth of a point."""
    scoring()
    from forecast_bubbles import bubble

    for name, layers, ranks, micro, rate in (
        ("GPT 1.5B", 22, 8, 24, 0.1585), ("GPT 28.3B", 62, 32, 256, 0.0594), ("GPT 14.6B", 46, 16, 64, 0.1088),
    ):  # fmt: skip
        notes = f"schedule=ZB-H1; num_microbatches={micro}; bubble_rate={rate} (not a measurement)"
        found = bubble({"model": name, "pp": str(ranks), "layers": str(layers), "notes": notes})
        assert found is not None
        assert found[2] == pytest.approx(rate, abs=1e-4)
    notes = "schedule=ZB-H2; num_microbatches=24; bubble_rate=0.0698 (not a measurement)"
    found = bubble({"model": "GPT 6.2B", "pp": "8", "notes": notes})
    assert found is not None
    assert found[2] == pytest.approx(0.0698, abs=1e-4)


@pytest.mark.long
def test_the_rules_of_thumb_are_current() -> None:
    ran = subprocess.run([sys.executable, ROOT / "benchmarks" / "rules_of_thumb.py", "--check"], check=False)
    assert ran.returncode == 0, "run benchmarks/rules_of_thumb.py"


def test_llama_3s_pipelines_are_interleaved_where_a_row_does_not_say_it() -> None:
    """126 layers on 16 ranks: eight stages each, one layer to a stage."""
    scoring()
    from forecast_ran_on import unsaid_chunks

    row = {"source": "The Llama 3 Herd of Models", "notes": ""}
    assert unsaid_chunks(row, 126, 16) == 8
    assert unsaid_chunks(row, 32, 1) == unsaid_chunks({"source": "Megatron-LM", "notes": ""}, 126, 16) == 1


def test_the_b200_that_simumax_measured_has_products_of_its_own() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from forecast_ran_on import cluster_of, software_name
    finally:
        sys.path.pop(0)
    theirs, others = (Kernels(cluster_of("B200-SXM", 8, text).device) for text in ("simumax v1.2", "a run"))
    assert theirs.share == pytest.approx(0.724) and others.share == 1.0
    named = {"source": "Megatron-Bridge model verification cards", "notes": "", "table": "26.06 containers"}
    assert software_name("papers", named) == "nemo-2026"
