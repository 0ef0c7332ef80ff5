"""The peak resident set of each rank while a folder of about 1 GB is loaded: on top of the process's own base.

python benchmarks/load_peak.py                          # a Llama of 540M parameters in bf16, 2 ranks, zero=3
python benchmarks/load_peak.py --layers 16 --plan "dp_shard=2,zero=3,precision=bf16"

`bar` is a rank's share of the weights and the largest tensor as the model has it (float32). The folder is made in a
temporary place and removed.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shardwise import parallelize
from shardwise.adapters import with_lora
from shardwise.config.schema import LoraSection
from shardwise.hf import task
from shardwise.ranks import RankPool

WIDTH, INNER, WORDS = 2048, 5632, 32000


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 100, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def made(folder: Path, layers: int, width: int, inner: int, words: int) -> Path:
    """Writes a Llama whose weights are constants, in bf16 and a file for each layer; returns the folder."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=words, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {
        name: torch.full(tensor.shape, 1e-3 * (place % 7 + 1), dtype=torch.bfloat16)
        for place, (name, tensor) in enumerate(model.state_dict().items())
    }
    folder.mkdir(parents=True, exist_ok=True)
    file_of = {name: f"{'.'.join(name.split('.')[:3])}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        own = {name: tensor for name, tensor in tensors.items() if file_of[name] == file}
        save_file(own, str(folder / file), metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    config.save_pretrained(str(folder))
    return folder


def resident(kind: str) -> int:
    """Returns a size from /proc/self/status in bytes: VmRSS now, VmHWM at its largest since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def loaded(small: str, folder: str, plan: str, rank: int | None) -> dict[str, Any]:
    """On a rank: what it holds of the folder's model, and how far loading it went above what the process had."""
    for path in (small, folder):  # the small one first, for what the process itself needs
        given = with_lora(task(path, batch=batch), LoraSection(rank=rank))
        gc.collect()
        base = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        engine = parallelize(given, plan, check_loss=False)
        peak, after = resident("VmHWM") - base, resident("VmRSS") - base
        share = engine.memory()["parameters"]
        largest = max(tensor.numel() for tensor in engine.module.parameters()) * 4
        engine.close()
        del engine, given
    return {"share": share, "largest": largest, "peak": peak, "after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--plan", default="dp_shard=2,zero=3,precision=bf16")
    parser.add_argument("--lora", type=int, default=16, help="the rank of adapters; 0: every weight is trained")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, RankPool(threads=1, quiet=True) as pool:
        small = made(Path(home) / "small", 1, 64, 64, 100)
        folder = made(Path(home) / "large", args.layers, WIDTH, INNER, WORDS)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        print(f"folder {sum(sizes) / 1e6:.0f} MB in {len(sizes)} files, {args.plan}, adapters of rank {args.lora}")
        ranks = pool.run(loaded, 2, str(small), str(folder), args.plan, args.lora or None, timeout_s=550)
    for place, row in enumerate(ranks):
        share, largest, peak, after = (row[key] / 1e6 for key in ("share", "largest", "peak", "after"))
        print(f"rank {place}: share {share:.0f} MB, largest tensor {largest:.0f} MB, peak {peak:.0f} MB "
              f"({peak / (share + largest):.2f} of the bar), afterwards {after:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
