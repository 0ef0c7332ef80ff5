"""What the host spends on a step beside the same by hand: `python benchmarks/host_time.py --write`.

An accelerator waits for whichever takes longer, its kernels or Python. So one rank of eight runs as many operations as
a rank of an 8B decoder does (32 layers) on tensors so small that they cost next to nothing (hidden 64, 8 tokens),
with a `fake` process group, whose collectives return at once. A pipeline's stages wait for what a group without other
ranks does not send: its four ranks are there, and send over gloo; the one with the highest ratio stands in the table.
The loops by hand are those of `peers.py` and `model_parallel.py`. Steps alternate, and which goes first alternates too.
Times are CPU seconds of the process: a busy machine makes them longer, and both alike. A pair's ratio is
t_shardwise / t_hand.
"""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import model_parallel
import peers
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import parallelize
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.ranks import launch

RANKS, STAGES, WARM_UP = 8, 4, 3


def hand_ddp(model: nn.Module) -> peers.Step:
    """As `peers.hand_ddp`, with a hook whose result is there: works of the fake group have no future for DDP."""
    parallel = nn.parallel.DistributedDataParallel(model)

    def done(state, bucket):  # DDP compares annotations with classes, and these would be texts
        dist.all_reduce(bucket.buffer(), async_op=True)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(None, done)
    return peers._hand_loop(parallel, peers.adamw(peers.decay_groups(parallel)))


CONFIG = DecoderConfig(vocab=64, hidden=64, layers=32, heads=8, kv_heads=8, intermediate=176, context=8)
TABLE = Path(__file__).resolve().parent.parent / "docs" / "tables" / "host_time.md"
# plan -> (the loop by hand, its name, samples of the global batch)
ROWS = {
    "dp_replicate=8": (hand_ddp, "`DistributedDataParallel`", 8),
    "dp_shard=8,zero=3": (peers.hand_fsdp2, "`fully_shard`", 8),
    "tp=8": (model_parallel.hand_tensor, "`parallelize_module`", 1),
    "tp=8,sp=true": (partial(model_parallel.hand_tensor, sequence=True), "`parallelize_module`", 1),
    f"pp={STAGES},microbatches={model_parallel.MICRO_BATCHES}": (
        model_parallel.hand_pipeline, "`torch.distributed.pipelining`", model_parallel.MICRO_BATCHES,
    ),
}  # fmt: skip


class _Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and hasattr(kind, "__torch_dispatch__") for kind in types):
            return NotImplemented
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def batch_of(samples: int, step: int) -> peers.Batch:
    """Random tokens: 8 of them in each sample."""
    generator = torch.Generator().manual_seed(step)
    return {"tokens": torch.randint(CONFIG.vocab, (samples, CONFIG.context), generator=generator)}


Measured = tuple[list[float], list[float], int]


def measure(plan: str, pairs: int) -> Measured:
    """CPU seconds of each step by shardwise and by hand, in pairs, and operations of one of ours."""
    torch.set_num_threads(1)
    peers.RANKS = model_parallel.RANKS = RANKS
    by_hand, _, samples = ROWS[plan]
    task = peers.TASK.with_(model=partial(Decoder, CONFIG), batch=partial(batch_of, samples))
    engine = parallelize(task, plan, device="cpu", clip_norm=peers.CLIP_NORM)
    hand = by_hand(Decoder(CONFIG))
    mine = {"tokens": batch_of(samples, 0)["tokens"][: samples if plan.startswith("pp") else 1]}
    sides = [lambda: engine.step(batch_of(samples, 0)), lambda: hand(mine)]
    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for pair in range(WARM_UP + pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            began = time.process_time()
            sides[side]()
            if pair >= WARM_UP:
                times[side].append(time.process_time() - began)
        gc.collect()
    with _Operations() as seen:
        engine.step(batch_of(samples, 0))
    return *times, seen.counts.total()


def row(plan: str, pairs: int) -> str:
    """One line of the table, measured in this process, or on ranks of its own."""
    if plan.startswith("pp"):
        ours, theirs, operations = max(launch(measure, STAGES, (plan, pairs)), key=_ratio)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
        ours, theirs, operations = measure(plan, pairs)
    ratio = _ratio((ours, theirs, operations))
    each = 1e6 * median(ours) / operations
    cells = (f"`{plan}`", ROWS[plan][1], f"{1e3 * median(ours):.1f}", f"{1e3 * median(theirs):.1f}", f"{ratio:.2f}",
             f"{operations:,}", f"{each:.1f}")  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _ratio(measured: Measured) -> float:
    return median(a / b for a, b in zip(*measured[:2], strict=True))


def page(lines: list[str], pairs: int) -> str:
    """The whole page."""
    return (
        "# What the host spends on a step\n\n"
        f"Written by `benchmarks/host_time.py`, {pairs} pairs of steps. One rank of {RANKS} with the operations of a "
        f"rank of an 8B decoder ({CONFIG.layers} layers) on tiny tensors (hidden {CONFIG.hidden}, 8 tokens) and a "
        "process group whose collectives return at once: what is left is Python, and torch's own dispatching. On an "
        "accelerator this is hidden as long as its kernels take longer. Times are CPU milliseconds of the process, on "
        f"{_cpu()}, torch {torch.__version__}.\n\n"
        "| plan | by hand | shardwise (ms) | by hand (ms) | ratio | operations | µs each |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        "The ratio is the median over pairs. Operations are those below autograd on plain tensors, of one step of "
        f"shardwise. The pipeline's {STAGES} ranks are all there, and send over gloo, since a stage waits for what "
        "others send: of these ranks, the one with the highest ratio.\n"
    )


def _cpu() -> str:
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return found[0].partition(": ")[2] if found else platform.processor()


def main() -> None:
    """Measure each plan in a process of its own: a process has one default group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--plan", choices=ROWS, help="measure one plan here, and print its line")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args()
    if options.plan:
        print(row(options.plan, options.pairs))
        return
    lines = []
    for plan in ROWS:
        command = [sys.executable, __file__, "--plan", plan, "--pairs", str(options.pairs)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        lines.append(ran.stdout.splitlines()[-1])
        print(lines[-1], flush=True)
    if options.write:
        TABLE.write_text(page(lines, options.pairs), encoding="utf-8")


if __name__ == "__main__":
    main()
