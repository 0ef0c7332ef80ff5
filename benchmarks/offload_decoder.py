"""A decoder whose training state one host does not hold, on two ranks with weights and state on its disk.

    python benchmarks/offload_decoder.py [LAYERS WIDTH HEADS] [--cluster cluster.toml]

transformers' GPT-2 of its XL size by default (48 layers of 1,600: 1.56 billion parameters in fp32, AdamW: 24.9 GB of
weights, gradients and moments), built from its configuration, 2 samples of 64 tokens. The machine is probed first, or
a file of `shardwise probe` is read; then come the forecast and three steps. Memory is a rank's peak beyond what a step
of a small model left resident, beside the forecast of tensors. TMPDIR names the folder of the files.
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import partial
from pathlib import Path

import torch
from offload_limit import resident_gb
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shardwise import Task, parallelize, simulate
from shardwise.cluster import Cluster
from shardwise.measure.machine import probe
from shardwise.ranks import RankPool

PLAN = "dp_shard=2,zero=3,offload=optimizer:disk|parameters:disk"
STEPS, SAMPLES, TOKENS, VOCABULARY = 3, 2, 64, 50_257


def batch(step: int) -> Tensor:
    """Returns token ids of which each is the one before plus one, so that there is something to learn."""
    starts = torch.randint(VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(0))
    return (starts + torch.arange(TOKENS)) % VOCABULARY


def decoder_task(layers: int, width: int, heads: int) -> Task:
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=TOKENS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip

    def loss(output: Tensor, ids: Tensor) -> tuple[Tensor, int]:
        logits = output[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()

    return Task(
        name="gpt2", model=lambda: Logits(config), batch=batch, inputs=lambda ids: ((ids,), {}), loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4, fused=True),
    )  # fmt: skip


class Logits(torch.nn.Module):
    """transformers' decoder, whose forward returns logits alone."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.decoder = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(input_ids=ids).logits


def stepped(sizes: tuple[int, int, int]) -> tuple[float, float, list[float], list[float]]:
    """On a rank: returns the peak beyond a small model's step, GB on the disk, losses and seconds of each step."""
    small = decoder_task(2, 64, 2)
    engine = parallelize(small, PLAN)
    engine.step(batch(0))
    engine.close()
    del engine
    gc.collect()
    before = resident_gb()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    engine, losses, seconds = parallelize(decoder_task(*sizes), PLAN), [], []
    for step in range(STEPS):
        began = time.perf_counter()
        losses.append(engine.step(batch(step)).loss)
        seconds.append(time.perf_counter() - began)
    on_disk = (engine.memory().get("disk") or 0) / 1e9
    lines = Path("/proc/self/status").read_text().splitlines()
    peak_kb = int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return peak_kb * 1024 / 1e9 - before, on_disk, losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="*", default=[48, 1600, 25], metavar="SIZE")
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--quick", action="store_true", help="a quick probe")
    args = parser.parse_args()
    sizes = tuple(args.sizes)
    cluster = Cluster.from_toml(args.cluster) if args.cluster else probe(2, quick=args.quick)
    began = time.perf_counter()
    forecast = simulate(decoder_task(*sizes), PLAN, cluster)
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in forecast.parts.items() if seconds > 0.05)
    print(f"forecast in {time.perf_counter() - began:.0f} s: a step of {forecast.step_s:.1f} s ({parts})")
    print(f"  tensors {forecast.worst.allocated / 1e9:.3f} GB of a rank; {'; '.join(forecast.room.lines)}", flush=True)
    with RankPool(threads=1, quiet=True) as pool:
        rows = pool.run(stepped, 2, sizes, timeout_s=3000)
    for rank, (peak, on_disk, losses, seconds) in enumerate(rows):
        steps = ", ".join(f"{loss:.3f} in {took:.1f} s" for loss, took in zip(losses, seconds, strict=True))
        print(f"rank {rank}: peak {peak:.3f} GB, disk {on_disk:.2f} GB; losses {steps}")


if __name__ == "__main__":
    main()
