"""Metrics are quotients of sums on every plan, averages of weights are those of one process, and sinks hold one run."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import Task, parallelize, train
from shardwise.engine.ema import Ema
from shardwise.errors import InputError, RefusedPlan
from shardwise.observe.sinks import open_sinks
from shardwise.ranks import RankPool

PLANS = ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3", "dp_shard=3,zero=3",
         "dp_replicate=2,accumulate=2", "dp_replicate=2,dp_shard=2,zero=2"]  # fmt: skip
SAMPLES = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 6, generator=g)
    return x, torch.cat([x[:, :2].sin(), x[:, 2:3] + 3], 1)


def loss(output: Tensor, batch: tuple) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), len(output)


def measures(output: Tensor, batch: tuple) -> dict[str, tuple]:
    error = output - batch[1]
    return {
        "positive": ((output > 0).sum(), output.numel()),
        "rmse": (error.square().sum(0), len(error), "sqrt"),  # by variable
        "perplexity": (error.abs().sum(), error.numel(), "exp"),
        "where": (error[batch[1] > 1].sum(), (batch[1] > 1).sum()),  # a weight that ranks do not share
    }


def inputs(batch: tuple) -> tuple[tuple, dict]:
    return (batch[0],), {}


def task(metrics: Any = measures) -> Task:
    return Task(model=Net, loss=loss, batch=batch, inputs=inputs, metrics=metrics)


def steps(plan: str, decay: float = 0.8) -> dict[str, Any]:
    """Metrics of three steps and of an evaluation, weights, and their average."""
    engine = parallelize(task(), f"{plan},precision=fp64" if plan != "single" else "precision=fp64")
    ema = Ema(engine, decay)
    found = []
    for step in range(3):
        found.append(engine.step(batch(step)).metrics)
        ema.update()
    engine.evaluate([batch(7), batch(8)])
    held_out = engine.metrics()
    weights = engine.state_dict()
    with ema.applied():
        average = engine.state_dict()
        engine.evaluate([batch(7)])
        of_average = engine.metrics()
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), engine.state_dict().values(), strict=True))
    return {"steps": found, "held_out": held_out, "of_average": of_average, "average": average, "weights": weights}


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> dict[str, Any]:
    return pool.run(steps, 1, "single")[0]


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_and_averages_are_those_of_one_process(plan: str, alone: dict[str, Any], pool: RankPool) -> None:
    ranks = 4 if plan.count("=2") == 3 else 3 if "=3,z" in plan else 2
    for run in pool.run(steps, ranks, plan):
        for mine, theirs in zip([*run["steps"], run["held_out"], run["of_average"]],
                                [*alone["steps"], alone["held_out"], alone["of_average"]], strict=True):  # fmt: skip
            assert mine == pytest.approx(theirs, rel=1e-10)
        for name, value in alone["average"].items():
            assert float((run["average"][name] - value).abs().max()) < 1e-12, name


def test_metrics_by_hand(alone: dict[str, Any]) -> None:
    model = Net().double()
    model.load_state_dict(alone["weights"])
    with torch.no_grad():
        x, y = (torch.cat(pair).double() for pair in zip(batch(7), batch(8), strict=True))
        error = model(x) - y
    expected = {f"rmse/{i}": math.sqrt(error[:, i].square().mean()) for i in range(3)}
    expected |= {"perplexity": math.exp(error.abs().mean()), "where": float(error[y > 1].mean())}
    expected["positive"] = float(((error + y) > 0).double().mean())
    assert alone["held_out"] == pytest.approx(expected, rel=1e-12)
    assert not torch.equal(alone["average"]["head.weight"], alone["weights"]["head.weight"])


def refused(kind: str) -> None:
    bad = {
        "mean": lambda output, batch: {"error": (output.square().mean(), 1)},
        "number": lambda output, batch: {"error": output.square().sum()},
        "matrix": lambda output, batch: {"error": (output, 1)},
        "finish": lambda output, batch: {"error": (output.sum(), len(output), "log")},
    }
    parallelize(task(bad[kind]), "dp_replicate=2")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("mean", RefusedPlan, "the metric 'error' of Task.metrics does not add up"),
        ("number", InputError, "'error' is not a sum and a weight"),
        ("matrix", InputError, r"'error' has a sum of shape"),
        ("finish", InputError, "'error' ends with 'log'"),
    ],
)
def test_metrics_that_are_no_quotients_are_refused(kind: str, error: type, words: str, pool: RankPool) -> None:
    with pytest.raises(error, match=words):
        pool.run(refused, 2, kind)


class Rows:
    def __len__(self) -> int:
        return 28

    def read(self, indices: list[int], region: Any = None) -> tuple[Tensor, Tensor]:
        rows = [batch(index) for index in indices]
        return torch.stack([x[0] for x, _ in rows]), torch.stack([y[0] for _, y in rows])


def run_task() -> Task:
    return Task(model=Net, loss=loss, data=Rows(), eval_data=Rows(), inputs=inputs, metrics=measures)


def records(run: Any) -> dict[tuple[int, str], float]:
    """(step, name) -> number, of metrics.jsonl."""
    return {
        (record["step"], name): value
        for record in run.metrics
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def from_tensorboard(run: Any) -> dict[tuple[int, str], float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (file,) = (run.folder / "tensorboard").iterdir()  # one record, whatever the ranks
    events = accumulator.EventAccumulator(str(file), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    import tensorboard.util.tensor_util as tensor_util

    return {
        (event.step, name): float(tensor_util.make_ndarray(event.tensor_proto))
        for name in events.Tags()["tensors"]
        if not name.startswith("plan")
        for event in events.Tensors(name)
    }


def from_mlflow(run: Any) -> dict[tuple[int, str], float]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("shardwise")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == run.folder.name and found.info.status == "FINISHED"
    return {
        (metric.step, name): metric.value
        for name in found.data.metrics
        for metric in client.get_metric_history(found.info.run_id, name)
    }


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log file in LevelDB's format, after W&B's seven bytes: blocks of 32 KiB, records cut at them."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def from_wandb(run: Any) -> dict[tuple[int, str], float]:
    (file,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    return from_wandb_file(file)


def from_wandb_file(file: Path) -> dict[tuple[int, str], float]:
    from wandb.proto import wandb_internal_pb2

    found: dict[tuple[int, str], float] = {}
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = items.pop("step")
            found |= {(step, name): value for name, value in items.items() if not name.startswith("_")}
    return found


@pytest.fixture
def sinks_alone(sink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink's package is here, and the caller's settings do not reach it."""
    pytest.importorskip(sink, reason=f"needs {sink}, which is not installed here")
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("sink", "read"),
    [
        ("tensorboard", from_tensorboard),
        pytest.param("mlflow", from_mlflow, marks=pytest.mark.long),
        ("wandb", from_wandb),
    ],
)
def test_a_sink_holds_one_run_with_the_numbers_of_the_file(
    sink: str, read: Any, tmp_path: Path, sinks_alone: None
) -> None:
    run = train(run_task, "dp_replicate=2,dp_shard=2", steps=3, batch_samples=8, eval_every=2, ema_decay=0.5,
                sinks=[sink], out=str(tmp_path), eval_samples=0)  # fmt: skip
    expected = records(run)
    assert {"metric/rmse/2", "eval_metric/positive", "ema_eval_loss", "eval_loss"} <= {name for _, name in expected}
    until = time.monotonic() + 20
    while (found := read(run)) != expected and time.monotonic() < until:  # a process of the sink's own writes on
        time.sleep(0.1)
    assert found == expected
    assert (run.folder / "ema.safetensors").exists()


def resumed_tensorboard(folder: Path) -> dict[tuple[int, str], float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    import tensorboard.util.tensor_util as tensor_util

    events = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()  # one run is one folder, of as many files as there were openings
    return {(e.step, "loss"): float(tensor_util.make_ndarray(e.tensor_proto)) for e in events.Tensors("loss")}


def resumed_mlflow(folder: Path) -> dict[tuple[int, str], float]:
    return from_mlflow(SimpleNamespace(folder=folder))


def resumed_wandb(folder: Path) -> dict[tuple[int, str], float]:
    """Offline, each opening is a file; `wandb sync` joins those of one id."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and {file.name for file in files} == {f"run-{folder.name}.wandb"}
    found: dict[tuple[int, str], float] = {}
    for file in files:
        found |= from_wandb_file(file)
    return found


@pytest.mark.parametrize(
    ("sink", "read"),
    [
        ("tensorboard", resumed_tensorboard),
        pytest.param("mlflow", resumed_mlflow, marks=pytest.mark.long),
        ("wandb", resumed_wandb),
    ],
)
def test_a_run_that_is_opened_again_continues_its_record(
    sink: str, read: Any, tmp_path: Path, sinks_alone: None
) -> None:
    """Sinks alone: what a run that goes on after a stop would do."""
    folder = tmp_path / "the-run"
    folder.mkdir()
    for steps in ((1, 2), (3, 4)):
        (opened,) = open_sinks([sink], folder, {"plan": "single"})
        for step in steps:
            opened.write(step, {"loss": 1.0 / step})
        opened.close()
        if sink == "wandb" and steps == (1, 2):
            time.sleep(1.1)  # its folders are named by the second
    expected = {(step, "loss"): 1.0 / step for step in (1, 2, 3, 4)}
    deadline = time.monotonic() + 20
    while read(folder) != expected and time.monotonic() < deadline:
        time.sleep(0.2)  # W&B's own process may still be writing when `finish` returns
    assert read(folder) == expected


def test_a_sink_that_is_not_installed_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"wandb needs wandb: pip install 'shardwise\[wandb\]'"):
        train(run_task, steps=1, sinks=["wandb"], out=str(tmp_path))
    assert not list(tmp_path.iterdir())
