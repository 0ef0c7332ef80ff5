"""One causal attention whose positions are cut over two ranks, and the memory of a decoder over one, two and four.

    python benchmarks/sequence.py                  # speed, under two minutes
    python benchmarks/sequence.py --memory         # peak live bytes of a step, remat=full
    python benchmarks/sequence.py --chunks 8       # the same with and without position_chunks=8, of 2,048 words
    python benchmarks/sequence.py --precision      # errors of a ring of 1, 2, 4 and 8 ranks in float32 and bfloat16
    python benchmarks/sequence.py --balance        # unmasked pairs of the busiest rank, 2 to 8 of them
    python benchmarks/sequence.py --bytes          # received in an attention, beside what the page's formulas say

Speed: forward and backward of (1, H, S, D), float32, ranks of one thread each. Three ways take turns, so that whatever
else runs on the machine meets them alike; a figure is the median of the ratios of neighbours, each the slower rank's.

    overlap     the ring as it is: the next block comes while the one at hand is computed
    waiting     the same, but a block is waited for before anything is computed
    whole       one process with one thread computes all; half of its time is what two ranks could reach at best

What this does not do: compare with torch's own ring, which has rules for the kernels of CUDA alone (torch 2.13,
`torch/distributed/tensor/experimental/_context_parallel/_attention.py`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from slowest import timed

from shardwise import Task, parallelize
from shardwise.comm import Ledger, Observer
from shardwise.layout import Plan
from shardwise.memory.live import LiveBytes
from shardwise.mesh import build_mesh
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.parallel.sequence import passing
from shardwise.part import Owners, Part, plain, to_part
from shardwise.ranks import launch

HEADS, EACH, RANKS = 4, 32, 2


@contextmanager
def waiting() -> Iterator[None]:
    """Context: blocks are waited for as soon as they are asked for."""
    before = passing._Arriving.__init__

    def wait_at_once(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.found()
        self.pending.clear()

    passing._Arriving.__init__ = wait_at_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        passing._Arriving.__init__ = before  # type: ignore[method-assign]


def attention(given: list[torch.Tensor]) -> None:
    """Causal attention, forward and backward."""
    out = F.scaled_dot_product_attention(*given, is_causal=True)
    torch.autograd.grad(out, given, out.detach())


def speed(length: int, pairs: int) -> list[tuple[float, float, float]]:
    """(overlap, waiting, whole) seconds of each round; `whole` is run by rank 0 alone."""
    torch.set_num_threads(1)
    axis = build_mesh(Plan(cp=RANKS), torch.device("cpu")).inner[0]
    owners = Owners.zigzag(length, RANKS)
    whole = [torch.randn(1, HEADS, length, EACH, requires_grad=True) for _ in range(3)]
    shares = [owners.take(t.detach(), 2, axis.index).contiguous().requires_grad_() for t in whole]
    cut = [to_part(share, 2, owners, axis) for share in shares]

    def ring() -> None:
        attention(cut)

    def ring_waiting() -> None:
        with waiting():
            attention(cut)

    def alone() -> None:
        if axis.index == 0:
            attention(whole)

    ways = [ring, ring_waiting, alone]
    found = []
    for turn in range(-1, pairs):
        order = ways if turn % 2 else ways[::-1]
        times = {way: timed(way) for way in order}
        if turn >= 0:
            found.append(tuple(times[way] for way in ways))
    return found


def text(step: int, length: int, words: int) -> dict[str, torch.Tensor]:
    """One sample."""
    return {"tokens": torch.randint(words, (1, length), generator=torch.Generator().manual_seed(step))}


def summed(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The loss of the next token."""
    target = batch["tokens"][:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def decoder(length: int, words: int = 64) -> Task:
    """A small decoder of long samples."""
    config = DecoderConfig(vocab=words, hidden=32, layers=2, heads=1, kv_heads=1, intermediate=96, context=length)
    return Task(model=partial(Decoder, config), batch=partial(text, length=length, words=words), loss=summed,
                inputs=lambda batch: ((batch["tokens"],), {}),
                optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))  # fmt: skip


def peak(length: int, plan: str, words: int = 64) -> int:
    """Most live bytes of this rank in a step, beyond what is live between steps."""
    torch.set_num_threads(1)
    task = decoder(length, words)
    engine = parallelize(task, plan, check_loss=False)
    assert task.batch is not None
    batch = task.batch(0)
    engine.step(batch)
    with LiveBytes() as live:
        engine.step(batch)
    engine.close()
    return live.peak


def show_memory(lengths: list[int]) -> None:
    """Peaks, and what grows with the length for each position, times the ranks."""
    plans = {1: "remat=full", 2: "cp=2,remat=full", 4: "cp=4,remat=full"}
    found = {}
    print("| ranks | " + " | ".join(f"S = {n:,}" for n in lengths) + " | bytes for a position x ranks |")
    print("|---:|" + "---:|" * (len(lengths) + 1))
    for ranks, plan in plans.items():
        found[ranks] = [max(launch(peak, ranks, (n, plan))) for n in lengths]
        each = (found[ranks][-1] - found[ranks][0]) / (lengths[-1] - lengths[0]) * ranks
        print(f"| {ranks} | " + " | ".join(f"{n / 2**20:.2f} MiB" for n in found[ranks]) + f" | {each:.0f} |")


def show_chunks(length: int, count: int, words: int = 2048) -> None:
    """Peaks of plans with wide tensors whole and in chunks."""
    print(f"| plan, S = {length:,}, {words:,} words | whole | position_chunks={count} |\n|---|---:|---:|")
    for ranks, plan in ((1, ""), (1, "remat=full"), (2, "cp=2,remat=full")):
        chunks = ",".join(filter(None, (plan, f"position_chunks={count}")))
        found = [max(launch(peak, ranks, (length, each, words))) / 2**20 for each in (plan, chunks)]
        print(f"| `{plan or 'single'}` | {found[0]:.1f} MiB | {found[1]:.1f} MiB |", flush=True)


def errors(length: int, dtype: torch.dtype, seeds: int) -> dict[str, float]:
    """The largest relative error, over seeds, of a causal attention's output and gradients, against float64."""
    torch.set_num_threads(1)
    ranks = torch.distributed.get_world_size()
    axes = build_mesh(Plan(cp=ranks), torch.device("cpu")).inner
    worst = dict.fromkeys(("output", "queries", "keys", "values"), 0.0)
    for seed in range(seeds):
        draws = torch.Generator().manual_seed(seed)
        given = [torch.randn(1, HEADS, length, EACH, generator=draws).to(dtype) for _ in range(4)]
        exact = with_gradients([tensor.double() for tensor in given])
        if axes:
            owners = Owners.zigzag(length, ranks)
            given = [Part(owners.take(t, 2, axes[0].index).contiguous(), 2, owners, axes[0]) for t in given]
        found = [plain(tensor) for tensor in with_gradients(given)]
        for name, one, other in zip(worst, found, exact, strict=True):
            worst[name] = max(worst[name], float((one.double() - other).norm() / other.norm()))
    return worst


def with_gradients(given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of a causal attention of (queries, keys, values, the output's gradient)."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def show_precision(length: int) -> None:
    """Errors of rings, and of one rank."""
    print(f"| dtype, S = {length:,} | ranks | output | queries | keys | values |\n|---|---:|---:|---:|---:|---:|")
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (1, 2, 4, 8):
            found = launch(errors, ranks, (length, dtype, 8))[0]
            print(f"| {dtype} | {ranks} | " + " | ".join(f"{e:.3e}" for e in found.values()) + " |", flush=True)


def show_balance(lengths: list[int]) -> None:
    """Pairs of a causal attention that the busiest rank computes, over the mean."""
    print("| ranks | " + " | ".join(f"S = {n:,}" for n in lengths) + " |\n|---:|" + "---:|" * len(lengths))
    for ranks in range(2, 9):
        worst = []
        for n in lengths:
            owners = Owners.zigzag(n, ranks)
            pairs = [int((owners.indices(rank) + 1).sum()) for rank in range(ranks)]
            worst.append(max(pairs) * ranks / sum(pairs))
        print(f"| {ranks} | " + " | ".join(f"{each:.4f}" for each in worst) + " |")


def received(length: int, axis_name: str) -> tuple[float, float]:
    """Bytes that this rank receives in a forward and in a backward of an attention without a mask, in float32."""
    mesh = build_mesh(Plan(**{axis_name: torch.distributed.get_world_size()}), torch.device("cpu"))
    axis, ledgers = mesh.inner[0], (Ledger(), Ledger())
    owners = Owners.blocks(length, axis.size)
    cut = [
        to_part(torch.ones(1, HEADS, owners.counts[axis.index], EACH, requires_grad=True), 2, owners, axis)
        for _ in range(3)
    ]
    with Observer(ledgers[0], mesh.group_axes):
        out = F.scaled_dot_product_attention(*cut)
        summed = (out * out).sum()
    with Observer(ledgers[1], mesh.group_axes):
        summed.backward()
    rows = [[row for row in ledger.rows() if row["op"] != "all_reduce"] for ledger in ledgers]
    return sum(row["received_bytes"] for row in rows[0]), sum(row["received_bytes"] for row in rows[1])


def show_bytes(length: int) -> None:
    """What is received, and the formulas: gradients of keys and values go round a ring in float32."""
    print(f"| axis, S = {length:,} | forward | formula | backward | formula |\n|---|---:|---:|---:|---:|")
    for ranks in (2, 4):
        for name in ("cp", "cp_ulysses"):
            found = launch(received, ranks, (length, name))[0]
            row = HEADS * length * EACH * 4 * (ranks - 1) / ranks  # of queries, keys or values
            told = (2 * row, 4 * row) if name == "cp" else (4 * row / ranks, 4 * row / ranks)
            cells = [found[0], told[0], found[1], told[1]]
            print(f"| `{name}={ranks}` | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |", flush=True)


def show_speed(lengths: list[int], pairs: int) -> None:
    """Medians of ratios."""
    print("| S | overlap / waiting | overlap / (whole / 2) | rounds |")
    print("|---:|---:|---:|---:|")
    for length in lengths:
        times = launch(speed, RANKS, (length, pairs))[0]
        overlap = statistics.median(a / b for a, b, _ in times)
        scaled = statistics.median(2 * a / c for a, _, c in times)
        print(f"| {length:,} | {overlap:.3f} | {scaled:.3f} | {pairs} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--memory", action="store_true", help="peak live bytes in the place of speed")
    parser.add_argument("--lengths", default="", help="with commas between")
    parser.add_argument("--chunks", type=int, default=0, help="peak live bytes with and without so many chunks")
    parser.add_argument("--precision", action="store_true", help="errors as a ring grows")
    parser.add_argument("--balance", action="store_true", help="the busiest rank's pairs")
    parser.add_argument("--bytes", action="store_true", help="what is received")
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    lengths = [int(n) for n in options.lengths.split(",") if n] or [8192, 16384]
    if options.precision or options.balance or options.bytes:
        first = lengths[0] if options.lengths else 512
        if options.precision:
            show_precision(first)
        if options.balance:
            show_balance(lengths)
        if options.bytes:
            show_bytes(first)
        return
    if options.chunks:
        show_chunks(lengths[0] if options.lengths else 2048, options.chunks)
        return
    show_memory(lengths) if options.memory else show_speed(lengths, options.pairs)


if __name__ == "__main__":
    main()
