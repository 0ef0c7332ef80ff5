"""`gradients=as_made` with clipping: a step taken before its norm is known, and taken back where that is too large."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from repeated_tasks import OwnAverages, own_averages
from test_as_made import branches, bursts, refused
from torch import Tensor, nn

from shardwise import RefusedPlan, RunError, Task, parallelize
from shardwise.comm.buckets import small_buckets
from shardwise.digest import digest
from shardwise.memory.live import LiveBytes
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.step import repeat
from shardwise.tiers import Undo, places, subgroups

STEPS = 5
DISK = "offload=optimizer:disk"
LAYOUTS = {
    "dp_replicate=1": 1, "dp_replicate=2": 2, "dp_shard=2,zero=1": 2, "dp_shard=2,zero=2": 2, "dp_shard=2,zero=3": 2,
    "tp=2": 2, "cp=2,zero=3": 2, "dp_replicate=2,dp_shard=2,zero=1": 4, "dp_replicate=2,dp_shard=2,zero=2": 4,
    "dp_replicate=2,dp_shard=2,zero=3": 4, "tp=2,dp_shard=2,zero=1": 4,
}  # fmt: skip
SETTINGS = ["", "precision=bf16", "remat=full", "optimizer_state=8bit", "precision=bf16,optimizer_state=bf16"]
CALLS = [0]


class Moody(nn.Module):
    """Keeps statistics, counts its calls in an attribute and in a file's list, draws from four kinds of generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.own = torch.Generator().manual_seed(3)
        self.calls, self.seen = 0, [0]
        self.register_buffer("mean_of_squares", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[0] += 1
        CALLS[0] += 1
        scale = random.random() + np.random.rand() + torch.rand((), generator=self.own)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.norm(x) * scale * (1 + self.calls + self.seen[0] + CALLS[0])


def moody() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        return torch.randn(8, 16, generator=drawn), torch.randn(8, 16, generator=drawn) * (1 + step % 3)

    return Task(
        name="moody", model=Moody, batch=batch, inputs=lambda pair: ((pair[0],), {}),
        loss=lambda output, pair: ((output - pair[1]).square().sum(), len(output)),
        metrics=lambda output, pair: {"size": (output.abs().sum(), output.numel())},
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
    )  # fmt: skip


def made(name: str | Callable[[], Task], plan: str, clip: float | None, **options: Any) -> dict[str, Any]:
    """Take steps in small buckets and sub-groups; returns what they came to, and how many were repeated."""
    forced, size = places.has_own_memory, subgroups.SUBGROUP_BYTES
    places.has_own_memory, subgroups.SUBGROUP_BYTES = lambda device: True, 20_000
    CALLS[0] = 0
    random.seed(0)
    np.random.seed(0)
    try:
        task = getattr(tasks, name)() if isinstance(name, str) else name()
        with small_buckets():
            engine = parallelize(task, plan, clip_norm=clip, **options)
        assert task.batch is not None
        results = [engine.step(task.batch(step)) for step in range(STEPS)]
        return {
            "losses": [result.loss for result in results], "norms": [result.grad_norm for result in results],
            "metrics": [result.metrics for result in results],
            "weights": {key: digest(value) for key, value in engine.full_parameters()},
            "used": {key: digest(value) for key, value in engine.used_parameters()},
            "buffers": {key: digest(value) for key, value in engine.full_buffers()},
            "state": {
                f"{key}/{part}": digest(value) if isinstance(value, torch.Tensor) else value
                for key, kept in engine.full_optimizer_state()
                for part, value in kept.items()
            },
            "draws": [random.random(), np.random.rand(), float(torch.rand(()))],
            "calls": CALLS[0], "repeated": engine.state.repeated_steps, "gradients": engine.memory()["gradients"],
        }  # fmt: skip
    finally:
        places.has_own_memory, subgroups.SUBGROUP_BYTES = forced, size


SAME = ("losses", "norms", "metrics", "weights", "used", "buffers", "state", "draws", "calls")
CLIPPED = (0, 1, 2, STEPS)  # of the steps: none, some, about half, all


def bound(norms: list[float], clipped: int) -> float:
    """Returns a bound that so many of the norms exceed."""
    ordered = sorted(norms, reverse=True)
    return (ordered[clipped - 1] + ordered[clipped]) / 2


def assert_same(
    name: str | Callable[[], Task], plan: str, ranks: int, pool: RankPool, clipped: int, **options: Any
) -> None:
    """Clip so many of the steps that are taken unclipped (later ones move with it), with gradients held and used."""
    text = plan if DISK in plan else f"{plan},{DISK}"
    run = partial(pool.run, partial(made, **options), ranks, name)
    clip = 1e-3 if clipped == STEPS else 1e6 if not clipped else bound(run(text, None)[0]["norms"], clipped)
    held, used = (run(text + more, clip) for more in ("", ",gradients=as_made"))
    for one, other in zip(held, used, strict=True):
        for what in SAME:
            assert one[what] == other[what], f"{what} differ"
        late = sum(norm + 1e-6 > clip for norm in one["norms"])
        assert other["repeated"] == late and not one["repeated"], "as many steps repeated as clipped"
        assert (late == 0) == (clipped == 0) and (clipped != STEPS or late == STEPS)
        assert one["gradients"] and other["gradients"] < one["gradients"]


QUICK = [
    ("decoder", "dp_replicate=1", "", 2), ("decoder", "dp_shard=2,zero=1", "precision=bf16", STEPS),
    ("decoder", "dp_shard=2,zero=3", "", 1), (moody, "dp_replicate=2", "", 2), ("decoder", "dp_shard=2,zero=2", "", 0),
    (own_averages, "dp_replicate=1", "", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "setting", "clipped"), QUICK)
def test_same_bits(name: Any, layout: str, setting: str, clipped: int, pool: RankPool) -> None:
    assert_same(name, ",".join(filter(None, [layout, setting])), LAYOUTS[layout], pool, clipped)


WITH_DATA = [layout for layout in LAYOUTS if layout[:2] == "dp"]
MATRIX = [
    *(("decoder", *case, (2, STEPS)[place % 2]) for place, case in enumerate(product(LAYOUTS, SETTINGS))),
    *((moody, *case) for case in product(WITH_DATA, [""], CLIPPED)),
    *((moody, layout, "precision=bf16", 2) for layout in WITH_DATA),
    *((branches, layout, "", 2) for layout in WITH_DATA),
    *(("decoder", layout, f"{DISK}|activations:disk", 2) for layout in WITH_DATA),
    *(("decoder", layout, "precision=bf16,masters=split", 2) for layout in WITH_DATA if "zero=3" not in layout),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout", "setting", "clipped"), [case for case in MATRIX if case not in QUICK])
def test_same_bits_in_full(name: Any, layout: str, setting: str, clipped: int, pool: RankPool) -> None:
    assert_same(name, ",".join(filter(None, [layout, setting])), LAYOUTS[layout], pool, clipped)


def drawn_on(*args: Any, **options: Any) -> dict[str, Any]:
    """Returns what `made` does where a repeated step does not find Python's and numpy's generators as they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "python_kept", lambda: lambda: None)
        patch.setattr(repeat, "APART", 1e9)  # else the norm tells
        return made(*args, **options)


def test_draws_that_no_step_seeds(pool: RankPool) -> None:
    """Each rank draws from Python's and numpy's generators as they are; one that draws on is seen."""
    assert_same(moody, "dp_replicate=1", 1, pool, STEPS, randomness="fast")
    plan = f"{DISK},gradients=as_made"
    sound, spoilt = (pool.run(partial(run, randomness="fast"), 1, moody, plan, 1e-3)[0] for run in (made, drawn_on))
    assert sound["draws"] != spoilt["draws"] and sound["weights"] != spoilt["weights"]


def not_finite(plan: str, on_nonfinite: str, clip: float | None) -> list[Any]:
    """Returns what four steps come to, the second one's norm being not finite: results, and weights after each."""
    task, told = bursts().with_(optimizer=OwnAverages), []
    engine = parallelize(task, plan, check_loss=False, clip_norm=clip, on_nonfinite=on_nonfinite)  # type: ignore[arg-type]
    assert task.batch is not None
    for step in range(4):
        try:
            result = engine.step(task.batch(step))
            told.append((result.loss, str(result.grad_norm), result.skipped))
        except RunError as error:
            told.append(str(error).partition(";")[0].partition(". ")[0])
        told.append({key: digest(value) for key, value in engine.full_parameters()})
    return told


@pytest.mark.parametrize(("on_nonfinite", "clip"), [("skip", None), ("skip", 1e-3), ("raise", 1e-3)])
@pytest.mark.parametrize("layout", ["dp_replicate=1", "dp_shard=2,zero=3"])
def test_a_norm_that_is_not_finite_is_as_ever(layout: str, on_nonfinite: str, clip: float, pool: RankPool) -> None:
    """Weights and state are those before the step, which is left out, or raises; steps after it go on from there."""
    plans = (f"{layout},{DISK}{more}" for more in ("", ",gradients=as_made"))
    held, used = (pool.run(not_finite, LAYOUTS[layout], plan, on_nonfinite, clip) for plan in plans)
    assert held == used
    assert held[0][2][2] if on_nonfinite == "skip" else "gradient norm nan is not finite in step 2" in held[0][2]


@pytest.mark.parametrize("plan", ["", "offload=optimizer:disk:0.5", "optimizer_state=8bit"])
@pytest.mark.parametrize(("options", "word"), [({"clip_norm": 1.0}, "clip_norm"), ({"on_nonfinite": "skip"}, "skip")])
def test_a_step_is_taken_back_from_the_disk_alone(plan: str, options: Any, word: str, pool: RankPool) -> None:
    told = pool.run(partial(refused, "mlp", ",".join(filter(None, [plan, "gradients=as_made"])), **options), 1)[0]
    assert told.startswith("gradients=as_made: ") and word in told and "use offload=optimizer:disk" in told


def live_peak(plan: str, clip: float | None) -> tuple[int, int]:
    """Returns the most live bytes of a second step, and how many steps were repeated."""
    task = tasks.decoder()
    assert task.batch is not None
    with LiveBytes() as live, small_buckets():
        engine = parallelize(task, f"{plan},{DISK},gradients=as_made", clip_norm=clip)
        engine.step(task.batch(0))
        gc.collect()
        live.reset_peak()
        live.settle = True
        engine.step(task.batch(1))
        return live.peak, engine.state.repeated_steps


@pytest.mark.parametrize("layout", ["dp_replicate=1", pytest.param("dp_shard=2,zero=3", marks=pytest.mark.long)])
def test_no_memory_beside(layout: str, pool: RankPool) -> None:
    """The peak is that of a run without clipping, whether steps stand or are repeated."""
    plain, standing, repeated = (pool.run(live_peak, LAYOUTS[layout], layout, clip)[0] for clip in (None, 1e6, 1e-3))
    assert (standing[1], repeated[1]) == (0, 2)
    assert standing[0] <= 1.01 * plain[0] and repeated[0] <= 1.01 * plain[0]


def test_a_disk_without_room_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RefusedPlan, match=r"no room for 3e-06 GB, a copy of this rank's weights \(No space"):
        Undo([1000, 2000], 0, tmp_path)
