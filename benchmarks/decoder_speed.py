"""Tokens/s, MFU and peak memory of a decoder: by default 1B parameters, bf16, 4096 tokens, compiled, on CUDA.

    python benchmarks/decoder_speed.py                                        # on a CUDA device
    python benchmarks/decoder_speed.py --preset nano --seq 64 --device cpu    # the same code anywhere

FLOP convention: model FLOPs, 6 P + 6 L h s for each token (causal attention), P without looked-up embeddings.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn import functional

from shardwise import Task, parallelize
from shardwise.device import synchronize
from shardwise.models import Decoder, DecoderConfig
from shardwise.observe import peak_flops


def make_task(config: DecoderConfig, samples: int, seq: int) -> Task:
    """Random tokens: speed does not depend on what they say."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {"tokens": torch.randint(config.vocab, (samples, seq + 1), generator=generator)}

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        targets = batch["tokens"][:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    return Task(
        model=lambda: Decoder(config), loss=loss, batch=batch, inputs=lambda b: ((b["tokens"][:, :-1],), {}),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-4, fused=True),
    )  # fmt: skip


def flops_per_token(config: DecoderConfig, module: torch.nn.Module, seq: int) -> float:
    """6 P + 6 L h s; a tied table counts once, as the head's matrix product."""
    looked_up = 0 if config.tied else config.vocab * config.hidden
    parameters = sum(param.numel() for param in module.parameters()) - looked_up
    return 6 * parameters + 6 * config.layers * config.hidden * seq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=4, help="samples of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plan", default="precision=bf16,compile=true")
    options = parser.parse_args()
    config = DecoderConfig.preset(options.preset)
    task = make_task(config, options.samples, options.seq)
    engine = parallelize(task, options.plan, device=options.device, clip_norm=1.0)
    for step in range(3):
        engine.step(task.batch(step))
    seconds = []
    for step in range(options.steps):
        batch = task.batch(step)
        synchronize(engine.device)
        started = time.perf_counter()
        engine.step(batch)
        synchronize(engine.device)
        seconds.append(time.perf_counter() - started)
    rate = options.samples * options.seq / statistics.median(seconds)
    flops = rate * flops_per_token(config, engine.module, options.seq)
    peak = peak_flops(engine.device, engine.plan.precision)
    used = engine.memory()["peak"]
    print(f"{options.preset} on {engine.device}, plan {engine.plan}, {options.samples} x {options.seq} tokens a step")
    print(f"{rate:,.0f} tokens/s, {flops / 1e12:.2f} TFLOP/s (6P + 6Lhs causal, model FLOPs)", end="")
    print(f", MFU {flops / peak:.1%} of {peak / 1e12:.0f} TFLOP/s" if peak else ", no MFU: the peak is not known")
    print(f"peak memory {used / 2**30:.1f} GiB (allocated)" if used else "peak memory: not counted on this device")


if __name__ == "__main__":
    main()
