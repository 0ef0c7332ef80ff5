"""Clusters as data: text, TOML, provenance, and what is refused."""

from __future__ import annotations

import math
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster import Cluster, Figure, Node, collective_table, device_names, gemm_table, model, model_names
from shardwise.cluster.catalogue import device
from shardwise.cluster.cluster_words import in_words
from shardwise.errors import InputError

DATA = Path(__file__).parents[2] / "src" / "shardwise" / "cluster" / "data"


def test_text_gives_tiers_innermost_first() -> None:
    cluster = Cluster.parse("16x8 h100-sxm-80gb, ib-400")
    assert cluster.world_size == 128
    assert cluster.sizes == (8, 128)
    assert [tier.name for tier in cluster.tiers] == ["nvlink", "ib-400"]
    assert cluster.tiers[1].gbps.kind == "formula", "between nodes nothing was measured"


def test_one_node_needs_no_link_to_others() -> None:
    assert Cluster.parse("1x4 rtx-4090").sizes == Cluster.parse("4 rtx-4090").sizes


def test_three_tiers() -> None:
    cluster = Cluster.parse("4x18x4 gb200, nvlink-72, ib-400")
    assert cluster.sizes == (4, 72, 288)
    assert cluster.tiers[1].gbps == cluster.tiers[0].gbps


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("2x8 h100-sxm-80gb, eth-100", "(16 devices; eth-100: 100 Gb/s for each device)"),
        ("2x8 h100-sxm-80gb, eth-100x1", "(16 devices; eth-100x1: 1 port of 100 Gb/s, shared by 8 devices)"),
        ("4x18x4 gb200, nvlink-72, ib-400x9", "(288 devices; ib-400x9: 9 ports of 400 Gb/s, shared by 72 devices)"),
        ("8 h100-sxm-80gb", "(8 devices)"),
    ],
)
def test_the_echo_of_a_cluster_tells_whose_a_rate_is(text: str, means: str) -> None:
    assert in_words(Cluster.parse(text)) == f"{text} {means}"


def test_a_host_is_the_one_that_is_sold_with_the_device() -> None:
    node = Cluster.parse("16x8 h100-sxm-80gb, ib-400").node
    assert node.memory_gb is not None and node.memory_gb.value == 2000 and node.memory_gb.kind == "published"
    part = Cluster.parse("2 h100-sxm-80gb").node.memory_gb
    assert part is not None and part.value == 500 and part.kind == "formula" and "2 of 8 parts" in part.source
    assert Cluster.parse("2x72 gb200, ib-400").node.devices == 4, "of a tray, where the links join 72"
    assert Cluster.parse("1 rtx-4090").node == Node(), "what no source tells is not guessed"


def test_words_and_files_tell_what_a_node_has(tmp_path: Path) -> None:
    text = "2x8 h100-sxm-80gb, host-1.5tb, ib-400, disk-500gb, disk-12gb/s"
    cluster = Cluster.parse(text)
    node = cluster.node
    figures = node.memory_gb, node.disk_gb, node.disk_gbps
    assert [(f.value, f.kind) for f in figures if f] == [(1500, "given"), (500, "given"), (12, "given")]
    assert cluster.sizes == (8, 16), "the words are no links"
    (tmp_path / "cluster.toml").write_text(cluster.to_toml())
    assert Cluster.parse(str(tmp_path / "cluster.toml")) == cluster
    bare = cluster.as_dict() | {"node": {"memory_gb": 64, "devices": 2}}
    read = Cluster.from_dict(bare).node
    assert read == Node(memory_gb=Figure(64.0, "given", "the cluster file"), devices=2)


@pytest.mark.parametrize("name", device_names())
def test_every_device_survives_a_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(f"2x2 {name}, ib-200")
    (tmp_path / "cluster.toml").write_text(cluster.to_toml())
    assert Cluster.parse(str(tmp_path / "cluster.toml")) == cluster


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8 h100", "did you mean 'h100-sxm-80gb'"),
        ("8 h200-sxm-141g", "did you mean 'h200-sxm-141gb'"),
        ("2x8 h100-sxm-80gb", 'write "2x8 h100-sxm-80gb, ib-400"'),
        ("2x8 h100-sxm-80gb, ibx-400", "did you mean 'ib'"),
        ("2x8 h100-sxm-80gb, ib-0", "above 0"),
        ("0x8 h100-sxm-80gb, ib-400", "at least 1"),
        ("36x4 gb200, nvlink-72", "nvlink-72 joins 72 devices, and 36x4 are 144"),
        ("64 h100-sxm-80gb", "write 8x8"),
        ("some gpus", "a cluster is written as"),
        ("1 rtx-4090, host-64", "a node's memory is host-1.5tb"),
        ("1 rtx-4090, host-3gb/s", "a node's memory is host-1.5tb"),
        ("1 rtx-4090, disk-0tb", "a node's memory is host-1.5tb"),
        ("nowhere.toml", "no file nowhere.toml"),
    ],
)
def test_wrong_words_are_told(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["device"].pop("memory_gb"), "device: memory_gb is missing"),
        (lambda d: d["device"].update(memory_gb=-80), "device.memory_gb must be above 0, got -80"),
        (lambda d: d["device"].update(memory_gb={"value": "many"}), "must be a number"),
        (lambda d: d["device"].update(memory_gb={"value": 8, "kind": "guessed"}), "kind is one of"),
        (lambda d: d["device"].update(memry_gb=80), "did you mean 'memory_gb'"),
        (lambda d: d["tiers"][1].update(gbps=float("nan")), r"tiers\[1\].gbps must be a number"),
        (lambda d: d["tiers"][1].update(count=0), r"tiers\[1\].count must be a whole number"),
        (lambda d: d["tiers"].clear(), "one or more"),
    ],
)
def test_bad_figures_are_refused_with_their_place(change, told: str) -> None:
    data = tomllib.loads(Cluster.parse("2x8 a100-sxm-80gb, ib-200").to_toml())
    change(data)
    with pytest.raises(InputError, match=told):
        Cluster.from_dict(data, "cluster.toml")


def test_a_bare_number_in_a_file_is_a_given_one() -> None:
    data = tomllib.loads(Cluster.parse("8 a100-sxm-80gb").to_toml())
    data["device"]["memory_gb"] = 40
    assert Cluster.from_dict(data).device.memory_gb.kind == "given"


def test_the_packaged_data_is_small_and_names_its_sources() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 1_000_000
    text = (DATA / "README.md").read_text()
    assert all(path.name in text for path in DATA.glob("*.csv"))
    assert all(device(name)[0].bf16_tflops.source for name in device_names())


# --- tables


def test_products_at_grid_points_are_the_measured_ones() -> None:
    table = gemm_table("h100_sxm")
    assert table is not None
    for (m, n, k), rate in list(table.rate.items())[::97]:
        assert table.tflops(m, n, k) == pytest.approx(rate)


@given(m=st.integers(1, 200_000), n=st.integers(1, 200_000), k=st.integers(1, 200_000))
def test_products_of_any_shape_have_a_plausible_rate(m: int, n: int, k: int) -> None:
    table = gemm_table("a100_sxm")
    assert table is not None
    assert 0 < table.tflops(m, n, k) <= table.best * 1.0001


def test_collectives_read_between_their_points() -> None:
    table = collective_table("h100_sxm")
    assert table is not None
    points = table.times["all_reduce"][8]
    size, microseconds = points[len(points) // 2]
    assert table.seconds("all_reduce", 8, size) == pytest.approx(microseconds * 1e-6)
    times = [table.seconds("all_reduce", 8, 2.0**i) for i in range(8, 34)]
    assert all(b >= a * 0.7 for a, b in pairwise(times)), "measured noise, but no cliffs"
    assert table.seconds("all_gather", 6, 2**26) > 0, "a number of ranks that was not measured"


def test_no_table_for_a_device_without_one() -> None:
    assert gemm_table("abacus") is None
    assert collective_table("abacus") is None


# --- models


def test_spellings_of_a_model_meet() -> None:
    assert model("llama3-405b") == model("Llama-3.1-405B")
    assert model("llama3.2-1b")["layers"] == "16"
    with pytest.raises(InputError, match="did you mean 'llama-3-70b'"):
        model("llama-3-70bb")


@pytest.mark.parametrize(
    ("name", "billions"), [("llama3-8b", 8.030), ("llama-3.1-405b", 405.853), ("qwen3-30b-a3b", 30.532)]
)
def test_parameters_of_known_models(name: str, billions: float) -> None:
    from shardwise.costs.shapes import Shape

    assert Shape.from_row(model(name)).parameters / 1e9 == pytest.approx(billions, rel=2e-4)


def test_every_packaged_shape_is_a_shape() -> None:
    from shardwise.costs.shapes import Shape

    for name in model_names():
        assert math.isfinite(Shape.from_row(model(name)).flops_per_token(2048))
