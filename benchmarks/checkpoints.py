"""What a checkpoint costs beside `torch.distributed.checkpoint`, `torch.save` and, where it is installed, others.

Two ranks under ZeRO-3 hold a model of equal linear layers with AdamW's state, and write and read the same tensors in
turn: shardwise with a digest of every byte, its files read back after they were synced; the peers without digests,
their files synced inside the timing. Which goes first changes from round to round. A time is that of the slower rank;
medians stand over the rounds. All files were just written, so that reading meets them in memory.

    python benchmarks/checkpoints.py throughput --gb 2      # save and load, seconds and the ratio to the fastest peer
    python benchmarks/checkpoints.py stall --gb 1           # what a step waits for a save in the background
    python benchmarks/checkpoints.py --write                # both, docs/tables/checkpoints.md

Everything that is written below --folder is removed again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise
from shardwise import Task, parallelize
from shardwise.checkpoint.holdings import weights
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.optimizers import state_of
from shardwise.checkpoint.save import Saver
from shardwise.ranks import launch

WIDTH, SAMPLES, RANKS = 2048, 4, 2
PLAN = "dp_shard=2,zero=3"
TABLE = Path(__file__).resolve().parent.parent / "docs" / "tables" / "checkpoints.md"
OURS, DCP, TORCH, TC = "shardwise", "torch.distributed.checkpoint", "torch.save", "torch-checkpointing"
Work = Callable[[Path], None]


def task(layers: int) -> Task:
    """Linear layers of one width: 12 bytes of state for each weight."""
    return Task(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))),
        batch=batch, inputs=lambda batch: ((batch,), {}), name="linear",
        loss=lambda output, batch: (output.square().mean(1).sum(), output.shape[0]),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )  # fmt: skip


def batch(step: int) -> torch.Tensor:
    """A global batch (SAMPLES, WIDTH)."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def slower(seconds: float) -> float:
    """The larger of both ranks' times."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the slower rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return slower(time.perf_counter() - began)


def synced(folder: Path) -> None:
    """Make this rank's files and their names last, as the digests of ours would have it."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# --- the peers: the same tensors


def flat_state(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's tensors by name, flat, as they lie in the engine."""
    holdings = [*weights(engine), *state_of(engine)[1]]
    return {one.key: one.flat() for one in holdings if one.tensor.numel() > 1}


def peers(engine: Any) -> dict[str, tuple[Work, Work]]:
    """Name -> (save, load) of this rank's tensors."""
    local = flat_state(engine)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {key: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for key, value in local.items()}

    def dcp_save(folder: Path) -> None:
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))

    def dcp_load(folder: Path) -> None:
        dcp.load(state, checkpoint_id=folder)

    def torch_save(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{dist.get_rank()}.pt").open("wb") as file:
            torch.save(local, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(folder: Path) -> None:
        read = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
        for key, value in local.items():
            value.copy_(read[key])

    found = {DCP: (dcp_save, dcp_load), TORCH: (torch_save, torch_load)}
    if importlib.util.find_spec("torch_checkpointing") is not None:
        found[TC] = _torch_checkpointing(local)
    return found


def _torch_checkpointing(local: dict[str, torch.Tensor]) -> tuple[Work, Work]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # with it, its unaligned last write fails here
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    manager = CheckpointManager(config)

    def save(folder: Path) -> None:
        manager.save(str(folder), {"state": local})
        dist.barrier()
        if dist.get_rank() == 0:
            synced(folder)

    return save, lambda folder: manager.load(str(folder), into={"state": local}) and None


# --- what is measured


def fresh(folder: Path) -> Path:
    """The folder's name, with nothing there, on every rank."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def throughput(layers: int, rounds: int, place: str) -> dict[str, list[list[float]]]:
    """Name -> [seconds of each save, seconds of each load]."""
    engine = parallelize(task(layers), PLAN)
    engine.step(batch(0))
    doors = peers(engine)

    def our_save(folder: Path) -> None:
        saver.folder, saver._made = folder, False
        saver.save()

    saver = Saver(engine, Path(place) / "ours", background=False)
    doors = {OURS: (our_save, lambda folder: restore(engine, folder) and None), **doors}
    before = {key: value.clone() for key, value in flat_state(engine).items()} if layers < 8 else {}
    times: dict[str, list[list[float]]] = {name: [[], []] for name in doors}
    for turn in range(rounds + 1):
        names = list(doors)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        for name in names:
            folder = fresh(Path(place) / name)
            save, load = (timed(partial(work, folder)) for work in doors[name])
            if turn:  # the first makes buffers
                times[name][0].append(save)
                times[name][1].append(load)
            fresh(folder)
    for key, value in flat_state(engine).items() if before else ():
        if not torch.equal(value, before[key]):
            raise SystemExit(f"{key} is not what it was")
    saver.close()
    return times


def stall(layers: int, rounds: int, place: str) -> dict[str, list[float]]:
    """What a step waits: ours from its call to its return; steps meanwhile, and without; the peers' saves."""
    engine = parallelize(task(layers), PLAN)
    engine.step(batch(0))
    doors = peers(engine)
    saver = Saver(engine, fresh(Path(place) / "ours"), keep=1)
    saver.prepare()
    found: dict[str, list[float]] = {"blocked": [], "while": [], "without": [], "writing": []}
    found |= {name: [] for name in doors}
    for turn in range(rounds + 1):
        found["blocked"].append(timed(saver.save))
        began, over = time.perf_counter(), False
        while not over:
            found["while"].append(timed(lambda: engine.step(batch(1))))
            over = slower(float(saver.answered() == "")) == 0
        found["writing"].append(time.perf_counter() - began)
        saver.finish()
        found["without"] += [timed(lambda: engine.step(batch(1))) for _ in range(4)]
        for name, (save, _) in doors.items() if turn else ():
            folder = fresh(Path(place) / name)
            found[name].append(timed(partial(save, folder)))
            fresh(folder)
    saver.close()
    fresh(Path(place) / "ours")
    return found


# --- told


def told_throughput(gb: float, times: dict[str, list[list[float]]]) -> str:
    """A table of medians, and the ratio of the fastest peer's time to ours."""
    lines = [f"| {gb:.2f} GB on {RANKS} ranks | save s | GB/s | load s | GB/s |", "|---|---:|---:|---:|---:|"]
    middle = {name: [median(one) for one in both] for name, both in times.items()}
    for name, (save, load) in middle.items():
        lines.append(f"| {name} | {save:.2f} | {gb / save:.2f} | {load:.2f} | {gb / load:.2f} |")
    sharded = [both for name, both in middle.items() if name in (DCP, TC)]
    ratios = [min(both[at] for both in sharded) / middle[OURS][at] for at in (0, 1)]
    return "\n".join(lines) + (
        f"\n\nThe faster sharded peer's time over ours: {ratios[0]:.2f} (save), {ratios[1]:.2f} (load), over "
        f"{len(times[OURS][0])} rounds. `torch.save` keeps a rank's tensors in a file that no other plan can read."
    )


def told_stall(gb: float, found: dict[str, list[float]]) -> str:
    """What a step waits, and what share of a peer's save that is."""
    blocked, steps, alone = median(found["blocked"][1:]), median(found["while"]), median(found["without"])
    lines = [f"| {gb:.2f} GB on {RANKS} ranks | seconds |", "|---|---:|"]
    lines.append(f"| {OURS} in the background: the first save's call | {found['blocked'][0]:.3f} |")
    lines.append(f"| later saves' calls | {blocked:.3f} |")
    lines += [f"| {name}, synchronous | {median(found[name]):.3f} |" for name in (DCP, TORCH, TC) if name in found]
    lines.append(f"| a step while files are written | {steps:.3f} |")
    lines.append(f"| a step while none are | {alone:.3f} |")
    share = blocked / median(found[DCP])
    return "\n".join(lines) + (
        f"\n\nFrom the second save on, a step waits {share:.1%} of a synchronous save by {DCP}; files are on the disk "
        f"{median(found['writing']):.1f} s after the call. {len(found[DCP])} rounds."
    )


def main() -> None:
    """Measure, tell, and with --write keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("throughput", "stall"))
    parser.add_argument("--gb", type=float, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="build/checkpoint-benchmark")
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    place, texts = Path(words.folder).absolute(), []
    place.mkdir(parents=True, exist_ok=True)
    try:
        for what, usual in (("stall", 1.0), ("throughput", 2.0)):
            if words.what in (None, what):
                layers = max(1, round((words.gb or usual) * 1e9 / (12 * WIDTH**2)))
                gb = 12 * WIDTH**2 * layers / 1e9
                measure, tell = (stall, told_stall) if what == "stall" else (throughput, told_throughput)
                texts.append(tell(gb, launch(measure, RANKS, (layers, words.rounds, str(place)))[0]))
                print(texts[-1] + "\n", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if words.write:
        load = os.getloadavg()[0]
        about = (
            f"# What a checkpoint costs\n\nMade by `benchmarks/checkpoints.py --write`; how it is measured stands "
            f"there. shardwise {shardwise.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, load "
            f"{load:.1f} at the end; digests are checked by shardwise alone.\n\n"
        )
        TABLE.write_text(about + "\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
