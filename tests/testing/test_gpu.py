"""What only a CUDA device can show: the same code, on one device that ranks share, equal to one process on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_scripts import SCRIPTS as SOURCES
from changed_scripts import changed, run_script, same
from test_mock_device import CASES, MORE, Dropping, named
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

from shardwise import Task, parallelize, prepare, verify
from shardwise.errors import RunError
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.task_names import resolve_task
from shardwise.testing.machine_evidence import KINDS, large_messages

pytestmark = pytest.mark.gpu


def losses(device: str, plan: str, steps: int = 4, name: str = "shardwise.models.tasks:decoder") -> list[float]:
    task = resolve_task(name)
    engine = parallelize(task, plan, randomness="global", clip_norm=1.0, device=device)
    return [engine.step(task.batch(step)).loss for step in range(steps)]


def test_cuda_equals_cpu_in_float64():
    on_cpu, on_cuda = losses("cpu", "precision=fp64"), losses("cuda", "precision=fp64")
    assert max(abs(a - b) for a, b in zip(on_cpu, on_cuda, strict=True)) < 1e-8


PROVEN = [(task, plan) for task, plan, *_ in CASES + MORE if "precision" not in plan]
PROVEN += [("unlike_tasks:final_state", "dp_shard=2,zero=2"), ("unlike_tasks:final_state", "dp_shard=2,zero=3"),
           ("decoder", "dp_shard=2,offload=parameters"), ("decoder", "zero=3,offload=parameters,accumulate=2"),
           ("unlike_tasks:final_state_gru", "tp=2"), ("test_gpu:tagger", "dp_replicate=2")]  # fmt: skip


class Tagger(nn.Module):
    """A recurrent layer with dropout between its levels, which cuDNN draws in a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.out = nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.memory(x)[0])


def tagger() -> Task:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(6, 5, 6, generator=torch.Generator().manual_seed(step))

    return Task(Tagger, batch=batch, loss=lambda out, x: (out.square().sum(), len(x)), inputs=lambda x: ((x,), {}))


@pytest.mark.parametrize(("task", "plan"), PROVEN)
def test_ranks_on_the_device_equal_one_process(task: str, plan: str, pool: RankPool) -> None:
    """Ranks that share a device meet over gloo."""
    parity = verify(named(task), plan, device="cuda", pool=pool, timeout_s=180)
    assert parity.parity, parity.text()


@pytest.fixture(scope="module")
def over_nccl() -> Iterator[RankPool]:
    """Ranks that share the device and meet over its own backend."""
    with RankPool(quiet=True, accelerators=True, own_backend=True) as ranks:
        yield ranks


@pytest.mark.parametrize(("task", "plan"), KINDS)
def test_ranks_that_meet_over_nccl_equal_one_process(task: str, plan: str, over_nccl: RankPool) -> None:
    parity = verify(named(task), plan, device="cuda", backend="nccl", pool=over_nccl, timeout_s=240)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("ranks", [2, 4])
def test_large_messages_both_ways_arrive_over_nccl(ranks: int, over_nccl: RankPool) -> None:
    assert over_nccl.run(large_messages, ranks, timeout_s=240) == [[]] * ranks


@pytest.mark.parametrize("precision", ["bf16", "bf16-full", "fp16"])
def test_narrow_precision_follows_float32(precision):
    expected, found = losses("cuda", "precision=fp32"), losses("cuda", f"precision={precision}")
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.05


@pytest.mark.parametrize("plan", ["compile=true", "compile=true,precision=bf16", "compile=true,remat=full"])
def test_compiled_blocks_follow_eager_ones(plan):
    expected, found = losses("cuda", "single"), losses("cuda", plan)
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.05


def test_memory_counts_the_peak():
    task = tasks.decoder()
    torch.cuda.reset_peak_memory_stats()
    engine = parallelize(task, "single", device="cuda")
    engine.step(task.batch(0))
    assert engine.memory()["peak"] >= engine.memory()["parameters"]
    assert torch.cuda.max_memory_allocated() == engine.memory()["peak"]


def test_a_step_waits_for_the_device_once():
    """torch tells each call that makes the host wait: the control row alone."""
    task = tasks.decoder()
    engine = parallelize(task, "precision=bf16,accumulate=2", device="cuda", clip_norm=1.0)
    for step in range(2):
        engine.step(task.batch(step))
    with pytest.warns(UserWarning, match="synchronizing CUDA operation") as told:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step(task.batch(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in told if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, waits


# --- scripts, their models and batches moved to the device

PLACE = "for _each in [v for v in list(globals().values()) if isinstance(v, torch.nn.Module)]: _each.cuda()\n"
SCRIPTS = ("vae", "unet", "siamese", "image_classifier", "causal_lm", "dino", "detector", "mixup", "trainer", "lora",
           "lstm_lm", "masked_lm", "seq2seq", "unet3d", "graph_net", "swa", "early_stopping", "fine_tuning",
           "segmentation", "multitask", "rare_classes", "contrastive", "translation", "stages")  # fmt: skip


def placed(text: str) -> str:
    """The script with its modules moved where the first optimizer is made, which knows their parameters."""
    found = re.search(r"^\w+ = .*(optim\.|AdamW|SGD)", text, re.M)
    assert found is not None
    return text[: found.start()] + PLACE + text[found.start() :]


def run_placed(path: str) -> dict[str, Any]:
    own = DataLoader.__iter__
    torch.backends.cudnn.enabled = "lstm" not in path  # whose dropout cuDNN would draw in a kernel

    def moved(loader: DataLoader) -> Iterator[Any]:
        for batch in own(loader):
            yield tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), batch)

    DataLoader.__iter__ = moved
    try:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), run_script(path))
    finally:
        DataLoader.__iter__ = own
        torch.backends.cudnn.enabled = True


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_on_the_device_equal_one_process(name: str, pool: RankPool, tmp_path: Path) -> None:
    def run(ranks: int, text: str) -> list[dict[str, Any]]:
        path = tmp_path / f"{name}.py"
        path.write_text(placed(text))
        return pool.run(run_placed, ranks, str(path), timeout_s=120)

    try:
        (alone,) = run(1, (SOURCES / f"{name}.py").read_text())
    except RunError as error:
        pytest.skip(f"runs on the CPU alone: {str(error)[:200]}")
    for plan in ("dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3"):
        for found in run(2, changed(name, plan)):
            same(found, alone)


def recomputed(plan: str | None) -> list[float]:
    """Losses of a script whose blocks draw on the device."""
    torch.manual_seed(0)
    x, y = torch.randn(24, 6, dtype=torch.float64), torch.randint(0, 2, (24,))
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    model: Any = nn.Sequential(Dropping(), Dropping(), nn.Linear(6, 2)).double().cuda()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared: Any = prepare(model, optimizer, loader, plan=plan) if plan else None
    model, optimizer, loader = prepared or (model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss = prepared.backward(loss) if prepared else loss
        if not prepared:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", ["dp_replicate=2,remat=full", "dp_shard=2,zero=3,remat=full"])
def test_recompute_in_a_script_repeats_the_devices_draws(plan: str, pool: RankPool) -> None:
    (alone,) = pool.run(recomputed, 1, None)
    for losses in pool.run(recomputed, 2, plan):
        assert losses == pytest.approx(alone, rel=1e-9)
