"""Compact published measurements into the packaged catalogue: `python tools/compact_catalogue.py DIR`.

DIR holds gpus.csv, gemm_measured.csv, nccl_measured.csv and models.csv. What is written to
src/shardwise/cluster/data, and how it was made smaller:

devices.csv      one row for each GPU, free text in numeric cells turned into numbers; cells that the source marks as
                 uncertain keep that word in `notes`
gemm.csv         bf16 matrix products as `gpu,m,n,latencies`: the latencies in microseconds for the k of the header
                 line of that GPU, blank where not measured; same figures, to 4 digits
collectives.csv  half precision, one NVLink domain, the newest NCCL of each GPU, as `gpu,nccl,op,ranks,latencies`:
                 microseconds at the sizes of the header line; rows whose notes say uncertain are left out
models.csv       shapes of models whose cells are numbers; others are left out and named on stderr
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parents[1] / "src" / "shardwise" / "cluster" / "data"
DEVICE_FIELDS = [
    "name",
    "bf16_tflops",
    "fp8_tflops",
    "memory_gb",
    "memory_bandwidth_gbps",
    "sustained_bf16_tflops",
    "link_gbps",
    "link_domain",
    "host_gbps",
    "nic_gbps",
    "power_w",
    "table",
    "products_of",
    "source",
    "notes",
]
# the name under which a device's matrix products and collectives were measured
TABLES = {
    "A100-SXM-40GB": "a100_sxm", "A100-SXM-80GB": "a100_sxm", "H100-SXM-80GB": "h100_sxm",
    "H200-SXM-141GB": "h200_sxm", "B200-SXM": "b200_sxm", "B300-SXM": "b300_sxm", "GB200": "gb200",
    "L40S": "l40s", "RTX-PRO-6000": "rtx_pro_6000_server",
}  # fmt: skip
# the table of a device of the same generation, for what was not measured on this one
OF_GENERATION = {
    "A100-PCIE-80GB": "a100_sxm", "H100-PCIE-80GB": "h100_sxm", "H100-NVL-94GB": "h100_sxm",
    "H200-SXM-141GB": "h100_sxm", "B300-SXM": "b200_sxm", "GB200": "b200_sxm", "GB300": "b200_sxm",
    "A800-SXM-80GB": "a100_sxm", "H800-SXM-80GB": "h100_sxm", "H20-SXM-96GB": "h100_sxm", "A40": "a100_sxm",
    "A10": "a100_sxm", "RTX-3090": "a100_sxm", "RTX-A6000": "a100_sxm", "H100-SXM-96GB": "h100_sxm",
}  # fmt: skip


def by_sheet(name: str, rates: str, memory: str, link: str, watts: str, note: str) -> dict[str, str]:
    """A device in the columns of gpus.csv, by its data sheet: "bf16 fp8" TFLOP/s, "GB TB/s", "GB/s domain PCIe NIC"."""
    bf16, _, fp8 = rates.partition(" ")
    (size, rate), (own, domain, pcie, nic) = memory.split(), link.split()
    return {
        "gpu": name, "bf16_dense_tflops": bf16, "fp8_dense_tflops": fp8, "hbm_gb": size, "hbm_bw_tbs": rate,
        "mamf_bf16_tflops": "", "mamf_note": "", "nvlink_gbps_per_dir": own, "nvlink_domain": domain,
        "pcie_gbps_per_dir": pcie, "typical_nic_gbps_per_gpu": nic, "tdp_w": watts,
        "source": "NVIDIA data sheet (recalled)", "notes": f"uncertain: recalled; {note}",
    }  # fmt: skip


# devices that gpus.csv lacks, in its columns; they share a table with nobody
MORE = [
    by_sheet("A800-SXM-80GB", "312", "80 2.039", "200 8 32 25", "400", "an A100 with NVLink of 400 GB/s in all"),
    by_sheet("H800-SXM-80GB", "989 1979", "80 3.35", "200 8 64 50", "700", "an H100 with NVLink of 400 GB/s in all"),
    by_sheet("H20-SXM-96GB", "148 296", "96 4.0", "450 8 64 50", "400", "Hopper with few multiprocessors"),
    by_sheet("H100-SXM-96GB", "912 1824", "96 2.4", "450 8 64 50", "500",
             "Meta's with HBM2e and 500 W; by torchtitan its rate lies between SXM's and NVL's, here in the middle"),
    by_sheet("A40", "149.7", "48 0.696", "32 none 32 12.5", "300", "NVLink bridges of pairs are not counted"),
    by_sheet("A10", "125", "24 0.6", "32 none 32 12.5", "150", "no NVLink"),
    by_sheet("L4", "121 242", "24 0.3", "16 none 16 12.5", "72", "no NVLink; PCIe of 8 lanes"),
    by_sheet("RTX-3090", "71", "24 0.936", "32 none 32 1.25", "350", "sums in float32; NVLink bridges are not counted"),
    by_sheet("RTX-A6000", "154.8", "48 0.768", "32 none 32 12.5", "300", "NVLink bridges of pairs are not counted"),
    by_sheet("RTX-5090", "209.5 419", "32 1.792", "64 none 64 1.25", "575", "sums in float32; no P2P in stock driver"),
    {
        "gpu": "GB300", "bf16_dense_tflops": "2500", "fp8_dense_tflops": "5000", "hbm_gb": "288", "hbm_bw_tbs": "8.0",
        "mamf_bf16_tflops": "", "mamf_note": "", "nvlink_gbps_per_dir": "900", "nvlink_domain": "72",
        "pcie_gbps_per_dir": "128", "typical_nic_gbps_per_gpu": "100", "tdp_w": "1400",
        "source": "NVIDIA GB300 NVL72 datasheet (recalled)", "notes": "uncertain: recalled; 800 Gb/s ConnectX-8",
    },
]  # fmt: skip
OF_SOME = [
    "kv_latent", "q_latent", "rope_dim", "value_dim", "dense_layers", "dense_ffn", "window", "windowed", "parallel",
    "ahead",
]  # fmt: skip
MODEL_FIELDS = [
    "name",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "gated",
    "vocab",
    "tied",
    "qkv_bias",
    "qk_norm",
    "learned_positions",
    "max_seq",
    "experts",
    "top_k",
    "moe_ffn",
    "shared_experts",
    *OF_SOME,
    "norm",
    "source",
]


def by_paper(name: str, sizes: str, ffn: str, position: str, norm: str, source: str, **more: str) -> dict[str, str]:
    """A model in the columns of models.csv; `sizes`: layers, hidden, heads, kv_heads, head_dim, ffn, vocab, max_seq."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq")
    nothing = ("tie_embeddings", "qkv_bias", "qk_norm")
    return {
        "model": name, **dict(zip(names, sizes.split(), strict=True)), **dict.fromkeys(nothing, "0"), "ffn_type": ffn,
        "rope_theta": position, "n_experts": "", "top_k": "", "moe_ffn": "", "shared_experts": "", "norm": norm,
        "source": f"{source} (recalled)", **more,
    }  # fmt: skip


# models that models.csv lacks, in its columns
MORE_MODELS = [
    {
        "model": "DeepSeek-V2", "layers": "60", "hidden": "5120", "heads": "128",
        "kv_heads": "MLA q_lora 1536 kv_lora 512", "head_dim": "qk 128+64 rope, v 128",
        "ffn": "12288 (first 1 dense layers)", "ffn_type": "SwiGLU", "vocab": "102400", "tie_embeddings": "0",
        "qkv_bias": "0", "qk_norm": "0", "max_seq": "4096", "rope_theta": "10000", "n_experts": "160", "top_k": "6",
        "moe_ffn": "1536", "shared_experts": "2", "norm": "RMSNorm",
        "source": "arXiv:2405.04434, section 3.1.2; MooreThreads/SimuMax configs/models/deepseekv2.json",
    },
    {
        "model": "gpt-oss-120b", "layers": "36", "hidden": "2880", "heads": "64", "kv_heads": "8", "head_dim": "64",
        "ffn": "2880", "ffn_type": "SwiGLU", "vocab": "201088", "tie_embeddings": "0", "qkv_bias": "1", "qk_norm": "0",
        "max_seq": "131072", "rope_theta": "150000", "n_experts": "128", "top_k": "4", "moe_ffn": "2880",
        "shared_experts": "0", "window": "128", "windowed": "18", "norm": "RMSNorm",
        "source": "defaults of transformers' GptOssConfig",
    },
    by_paper("BLOOM-176B", "70 14336 112 112 128 57344 250880 2048", "GELU", "", "LayerNorm", "arXiv:2211.05100",
             tie_embeddings="1"),
    by_paper("OPT-175B", "96 12288 96 96 128 49152 50272 2048", "ReLU", "learned", "LayerNorm", "arXiv:2205.01068",
             tie_embeddings="1"),
    by_paper("GPT-NeoX-20B", "44 6144 64 64 96 24576 50432 2048", "GELU", "10000", "LayerNorm", "arXiv:2204.06745",
             parallel="2"),
    by_paper("Falcon-40B", "60 8192 128 8 64 32768 65024 2048", "GELU", "10000", "LayerNorm", "arXiv:2311.16867",
             tie_embeddings="1", parallel="2"),
    by_paper("Falcon-180B", "80 14848 232 8 64 59392 65024 2048", "GELU", "10000", "LayerNorm", "arXiv:2311.16867",
             tie_embeddings="1", parallel="2"),
    by_paper("Nemotron-4-340B", "96 18432 96 8 192 73728 256000 4096", "squared ReLU", "10000", "LayerNorm no bias",
             "arXiv:2406.11704"),
    by_paper("OLMo-7B", "32 4096 32 32 128 11008 50304 2048", "SwiGLU", "10000", "LayerNorm no bias",
             "arXiv:2402.00838"),
    by_paper("LLaMA-65B", "80 8192 64 64 128 22016 32000 2048", "SwiGLU", "10000", "RMSNorm", "arXiv:2302.13971"),
    by_paper("Mixtral-8x22B", "56 6144 48 8 128 16384 32768 65536", "SwiGLU", "1000000", "RMSNorm",
             "configuration of mistralai/Mixtral-8x22B", n_experts="8", top_k="2", moe_ffn="16384"),
    by_paper("PaLM-540B", "118 18432 48 1 256 73728 256000 2048", "SwiGLU", "10000", "LayerNorm no bias",
             "arXiv:2204.02311", tie_embeddings="1", parallel="1"),
    by_paper("GPT-J-6B", "28 4096 16 16 256 16384 50400 2048", "GELU", "10000", "LayerNorm",
             "configuration of EleutherAI/gpt-j-6b", parallel="1"),
    *(by_paper(f"Pythia-{name}", f"{sizes} 50304 2048", "GELU", "10000", "LayerNorm", "arXiv:2304.01373", parallel="2")
      for name, sizes in (("1.4B", "24 2048 16 16 128 8192"), ("2.8B", "32 2560 32 32 80 10240"),
                          ("6.9B", "32 4096 32 32 128 16384"), ("12B", "36 5120 40 40 128 20480"))),
    by_paper("StarCoder", "40 6144 48 1 128 24576 49152 8192", "GELU", "learned", "LayerNorm", "arXiv:2305.06161",
             tie_embeddings="1"),
    *(by_paper(f"LLaMA-{name}", f"{sizes} 32000 2048", "SwiGLU", "10000", "RMSNorm", "arXiv:2302.13971")
      for name, sizes in (("7B", "32 4096 32 32 128 11008"), ("13B", "40 5120 40 40 128 13824"),
                          ("33B", "60 6656 52 52 128 17920"))),
    by_paper("TinyLlama-1.1B", "22 2048 32 4 64 5632 32000 2048", "SwiGLU", "10000", "RMSNorm", "arXiv:2401.02385"),
    by_paper("Nemotron-4-15B", "32 6144 48 8 128 24576 256000 4096", "squared ReLU", "10000", "LayerNorm no bias",
             "arXiv:2402.16819"),
]  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(text: str, otherwise: str = "") -> str:
    """The first number of a cell such as "2 (bridge 300)" or "12.5-25"."""
    found = re.search(r"\d+(\.\d+)?", text)
    return found.group() if found else otherwise


def write(path: Path, header: list[str], lines: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header)
        out.writerows(lines)
    print(f"{path.name}: {len(lines)} rows, {path.stat().st_size} bytes", file=sys.stderr)


def devices(folder: Path) -> None:
    lines = []
    for row in [*rows(folder / "gpus.csv"), *MORE]:
        name = re.split(r" \(| Blackwell", row["gpu"])[0].replace(" ", "-").replace("-NVL72", "")
        if not row["bf16_dense_tflops"]:
            print(f"devices.csv: {name} left out, its rate is not published", file=sys.stderr)
            continue
        domain = "1" if row["nvlink_domain"].startswith("none") else number(row["nvlink_domain"])
        lines.append([
            name.lower(), row["bf16_dense_tflops"], row["fp8_dense_tflops"], row["hbm_gb"],
            f"{float(row['hbm_bw_tbs']) * 1000:g}", row["mamf_bf16_tflops"], row["nvlink_gbps_per_dir"], domain,
            row["pcie_gbps_per_dir"], number(row["typical_nic_gbps_per_gpu"]), row["tdp_w"], TABLES.get(name, ""),
            OF_GENERATION.get(name.upper(), ""), row["source"],
            "; ".join(filter(None, [row["mamf_note"], row["notes"]])),
        ])  # fmt: skip
    write(HERE / "devices.csv", DEVICE_FIELDS, lines)


def gemm(folder: Path) -> None:
    table: dict[str, dict[tuple[int, int], dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(folder / "gemm_measured.csv"):
        m, n, k = (int(row[name]) for name in "mnk")
        table[row["gpu"]][m, n][k] = f"{float(row['latency_ms']) * 1000:.4g}"
    lines = []
    for gpu, cells in sorted(table.items()):
        inner = sorted({k for by_k in cells.values() for k in by_k})
        lines.append([gpu, "m", "n", " ".join(map(str, inner))])
        lines += [
            [gpu, str(m), str(n), " ".join(by_k.get(k, "-") for k in inner)] for (m, n), by_k in sorted(cells.items())
        ]
    write(HERE / "gemm.csv", ["gpu", "m", "n", "microseconds"], lines)


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


def collectives(folder: Path) -> None:
    kept = [r for r in rows(folder / "nccl_measured.csv") if r["dtype"] == "half" and "uncertain" not in r["notes"]]
    newest: dict[str, str] = {}
    for row in kept:
        newest[row["gpu"]] = max(newest.get(row["gpu"], ""), row["nccl"], key=version)
    table: dict[tuple[str, str, str, int], dict[int, str]] = defaultdict(dict)
    for row in kept:
        if row["nccl"] == newest[row["gpu"]]:
            key = (row["gpu"], row["nccl"], row["op"].replace("alltoall", "all_to_all"), int(row["n_gpus"]))
            table[key][int(row["bytes"])] = f"{float(row['latency_us']):.4g}"
    sizes = sorted({size for by_size in table.values() for size in by_size})
    lines = [["", "", "", "", " ".join(map(str, sizes))]]
    lines += [
        [*map(str, key), " ".join(by_size.get(size, "-") for size in sizes)] for key, by_size in sorted(table.items())
    ]
    write(HERE / "collectives.csv", ["gpu", "nccl", "op", "ranks", "microseconds"], lines)


def models(folder: Path) -> None:
    lines = []
    given = rows(folder / "models.csv")
    more = [
        {**row, "model": "DeepSeek-V3-MTP", "ahead": "1"} for row in given if row["model"].startswith("DeepSeek-V3")
    ]
    for row in [*given, *MORE_MODELS, *more]:
        name = re.sub(r"-hf$|-v0\.1$| \(.*\)$", "", row["model"]).replace(" ", "-").lower()
        moe = bool(row["n_experts"])
        latent = latent_attention(row)
        cells = [latent.pop(f, row[f]) for f in ("layers", "hidden", "heads", "kv_heads", "head_dim")]
        if not all(cell.isdigit() for cell in cells):
            print(f"models.csv: {name} left out, its attention is not described by heads and head_dim", file=sys.stderr)
            continue
        dense = re.fullmatch(r"(\d+) \(first (\d+) dense layers\)", row["ffn"])
        latent |= {"dense_ffn": dense[1], "dense_layers": dense[2]} if dense else {}
        lines.append([
            name, *cells, row["moe_ffn"] if dense else row["ffn"] or row["moe_ffn"],
            str(int(row["ffn_type"].startswith("SwiGLU"))), row["vocab"],
            row["tie_embeddings"] or "0", row["qkv_bias"] or "0", "0" if dense else row["qk_norm"] or "0",
            str(int("learned" in row["rope_theta"])), row["max_seq"],
            *([row["n_experts"], row["top_k"], row["moe_ffn"], row["shared_experts"] or "0"] if moe else ["0"] * 4),
            *(latent.get(field, row.get(field, "0")) for field in OF_SOME), row["norm"], row["source"],
        ])  # fmt: skip
    write(HERE / "models.csv", MODEL_FIELDS, lines)


def latent_attention(row: dict[str, str]) -> dict[str, str]:
    """Columns of a model whose keys and values come from a latent, as models.csv says it in words; {} for others."""
    ranks = re.fullmatch(r"MLA q_lora (\d+) kv_lora (\d+)", row["kv_heads"])
    widths = re.fullmatch(r"qk (\d+)\+(\d+) rope, v (\d+)", row["head_dim"])
    if not ranks or not widths:
        return {}
    return {
        "kv_heads": row["heads"], "head_dim": str(int(widths[1]) + int(widths[2])), "q_latent": ranks[1],
        "kv_latent": ranks[2], "rope_dim": widths[2], "value_dim": widths[3],
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    HERE.mkdir(parents=True, exist_ok=True)
    for make in (devices, gemm, collectives, models):
        make(folder)


if __name__ == "__main__":
    main()
