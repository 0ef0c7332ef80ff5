"""Full against hybrid sharding over a slow link: bytes on it and the time of a step, beside the forecast.

python benchmarks/slow_link.py [100mbit]      needs root: two network namespaces of two CPU ranks each, and `tc`

Bytes are what a host's interface sent in the later steps of a run, without headers. The forecast knows the link's rate
alone, less headers, which two ranks share; nothing else is measured beforehand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kit"))

from two_hosts import Host, finished, linked  # noqa: E402

from shardwise import Task  # noqa: E402
from shardwise.cluster import Cluster, Figure  # noqa: E402
from shardwise.planner.door import simulate  # noqa: E402

WIDTH, BLOCKS, SAMPLES, STEPS = 512, 4, 64, (3, 9)
HEADERS = 66  # bytes of a packet: Ethernet 14, IP 20, TCP 32 with its timestamps
# of the whole weights, each way between hosts: rings over four ranks, where gloo's reduce-scatter is an all-reduce;
# and replicas' sums of pieces, one from each rank of a host
PLANS = {"dp_shard=4,zero=3": 0.75 + 0.75 + 1.5, "dp_replicate=2,dp_shard=2,zero=3": 1.0}


class Wide(nn.Module):
    """Some 4.2 million weights, and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        ]
        self.blocks, self.head = nn.Sequential(*pairs), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def task() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        return torch.randn(SAMPLES, WIDTH, generator=drawn), torch.randint(10, (SAMPLES,), generator=drawn)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(output)

    return Task(Wide, batch=batch, loss=loss, inputs=lambda batch: ((batch[0],), {}))


def sent(host: Host) -> int:
    """Bytes that a host has sent over the link, without headers."""
    there = f"/sys/class/net/{host.name}/statistics"
    words = ["ip", "netns", "exec", host.name, "cat", f"{there}/tx_bytes", f"{there}/tx_packets"]
    sum_of, packets = map(int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    return sum_of - HEADERS * packets


def trained(hosts: list[Host], plan: str, steps: int, folder: Path) -> tuple[int, list[float]]:
    """(bytes that the first host sent, seconds of each step) of a run over both."""
    out = folder / f"{plan}-{steps}"
    line = ("torchrun --nnodes 2 --node-rank $NODE_RANK --master-addr $FIRST_HOST --master-port 29500 --nproc-per-node "
            f"2 --no-python shardwise train {Path(__file__)}:task --plan {plan} --steps {steps} --set train.out={out} "
            "--set train.log_every=1")  # fmt: skip
    before = sent(hosts[0])
    ran = finished([host.start(["bash", "-c", line], folder, NODE_RANK=str(at), FIRST_HOST=hosts[0].address)
                    for at, host in enumerate(hosts)], timeout_s=500)  # fmt: skip
    if any(code for code, _ in ran):
        raise SystemExit(ran[0][1][-2000:])
    [path] = out.rglob("metrics.jsonl")
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    return sent(hosts[0]) - before, [row["seconds"] for row in rows if "seconds" in row]


def shaped(rate: str) -> Cluster:
    """Two hosts of two CPU ranks that share a link of so many megabits a second."""
    base = Cluster.parse("2x2 l40s, eth-10")
    device = replace(base.device, kind="cpu", table="", fp32_tflops=Figure(0.03, "assumed", "a busy core"))
    payload = 1 - HEADERS / 1514  # of an Ethernet frame
    link = Figure(float(rate.removesuffix("mbit")) / 8e3 / 2 * payload, "assumed", f"{rate} of two ranks")
    near = Figure(1.0, "assumed", "shared memory")
    return replace(base, device=device, tiers=(replace(base.tiers[0], gbps=near), replace(base.tiers[1], gbps=link)))


def main() -> None:
    """Print a row for each plan."""
    rate = sys.argv[1] if len(sys.argv) > 1 else "100mbit"
    weights = sum(param.nbytes for param in Wide().parameters())
    print("| plan | MB each way in a step | computed | step, s | forecast, s |\n|---|---:|---:|---:|---:|")
    with linked(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        for plan, times in PLANS.items():
            (few, _), (many, seconds) = (trained(hosts, plan, steps, Path(folder)) for steps in STEPS)
            each = (many - few) / (STEPS[1] - STEPS[0])
            step = median(seconds[1:])
            forecast = simulate(task(), plan, shaped(rate), global_batch=SAMPLES)
            print(f"| `{plan}` | {each / 1e6:.2f} | {times * weights / 1e6:.2f} | {step:.2f} | {forecast.step_s:.2f} |")


if __name__ == "__main__":
    main()
