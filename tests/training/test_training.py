"""Runs: the folder is complete, options take effect, one rank and two agree, failures are told."""

from __future__ import annotations

import json
import math
import os
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise
import shardwise.training
from shardwise import Task
from shardwise.cli.main import call
from shardwise.config import load
from shardwise.errors import InputError
from shardwise.models import Decoder, tasks
from shardwise.observe.flops import BY_COUNTING, BY_PARAMETERS, Flops, count_flops, peak_flops
from shardwise.observe.folder import make_folder
from shardwise.observe.metrics import MetricsFile
from shardwise.observe.speed import Speed
from shardwise.training.builtin import text_task
from shardwise.training.held_out import Spread
from shardwise.training.job import make_job
from shardwise.training.optimizer_section import CLASSES, make_optimizer

TINY = (
    "task.seq_len=16", "task.model.layers=2", "task.model.hidden=16", "task.model.heads=2", "train.batch_samples=6",
    "train.eval_samples=5", "train.generate=8",
)  # fmt: skip


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_text_run_on_two_ranks_writes_the_run_folder_completely(here, capfd):
    args = ["train", "text", "--plan", "dp_shard=2,accumulate=2", "--steps", "3", "--json"]
    assert call([*args, *sets(*TINY, "train.eval_every=2", "train.name=tiny")]) == 0
    out, err = capfd.readouterr()
    summary = json.loads(out)
    (folder,) = (here / "runs").iterdir()
    assert folder.name.endswith("-tiny") and summary["folder"] == str(Path("runs") / folder.name)
    names = {
        "config.toml",
        "plan.toml",
        "versions.json",
        "metrics.jsonl",
        "journal.jsonl",
        "model.safetensors",
        "summary.json",
        "ranks",
        "ledger.json",
    }
    assert {path.name for path in folder.iterdir()} == names
    assert "step 3/3" in err and "step 3/3" in (folder / "ranks" / "rank1.log").read_text()

    assert tomllib.loads((folder / "plan.toml").read_text())["plan"]["accumulate"] == 2
    again = load(folder / "config.toml")
    assert again.config.train.eval_every == 2 and again.plan == shardwise.Plan.parse("dp_shard=2,accumulate=2")
    assert set(json.loads((folder / "versions.json").read_text())) == {
        "python", "torch", "shardwise", "platform", "device",
    }  # fmt: skip

    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record["samples"] == 6 and record["weight"] == 6 * 16 for record in steps)
    assert [record["step"] for record in records if "eval_loss" in record] == [2, 3]
    assert records[-1]["eval_weight"] == 5 * 16

    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == text_task(load(None, TINY).config.task).model().state_dict().keys()
    assert len(summary["memory"]) == 2 and summary["text"].startswith("def ")
    assert summary["loss"] == steps[-1]["loss"] and summary["unit"] == "tokens"


def test_the_files_of_a_run_have_one_mode(here):
    before = os.umask(0o002)  # of a group that works on one folder
    try:
        run = shardwise.train("digits", steps=2, checkpoint_every=1, checkpoint_background=False, ema_decay=0.9)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in run.folder.rglob("*") if path.is_file()}
    assert len(modes) > 8 and set(modes.values()) == {"0o664"}, modes


def test_one_rank_and_two_train_alike_and_a_run_can_be_repeated_from_its_folder(here):
    options = {"config": {"task": {"model": {"layers": 1, "hidden": 16, "heads": 2}}}, "steps": 3}
    alone = shardwise.train("digits", **options)
    both = shardwise.train("digits", "dp_replicate=2", **options)
    again = shardwise.train("digits", config=alone.folder / "config.toml")
    losses = [[record["loss"] for record in run.metrics if "loss" in record] for run in (alone, both, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == losses[2]
    assert both.eval_loss == pytest.approx(alone.eval_loss, rel=1e-5)
    assert "held-out" in str(alone) and alone.summary["unit"] == "samples"


SGD = {"name": "sgd", "lr": 1.0}


def weights_of(run: shardwise.training.Run) -> torch.Tensor:
    return torch.cat([value.flatten() for value in load_file(run.folder / "model.safetensors").values()])


def test_learning_rate_schedule_and_scaling_take_effect(here):
    optimizer = {**SGD, "scale_lr": "linear", "base_batch": 14}
    run = shardwise.train(tasks.mlp, steps=4, optimizer=optimizer, schedule={"name": "linear", "warmup_steps": 1})
    halved = [0.5, 1, 2 / 3, 1 / 3]  # times 7 samples / 14
    assert [record["lr"] for record in run.metrics] == pytest.approx([factor / 2 for factor in halved])


def own_sgd() -> shardwise.Task:
    return tasks.mlp().with_(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.03))


def test_scaling_alone_keeps_the_tasks_own_optimizer_and_what_replaces_it_is_said(here):
    scaled = shardwise.train(own_sgd, steps=2, optimizer={"scale_lr": "linear", "base_batch": 14})
    assert scaled.metrics[0]["lr"] == pytest.approx(0.03 * 7 / 14)
    assert any(
        "task's own optimizer are multiplied by 0.5 (linear, a batch of 7 over 14)" in n for n in notices(scaled)
    )
    replaced = shardwise.train(own_sgd, steps=1, optimizer=SGD)
    assert any("replaces the task's own optimizer by sgd with lr 1" in note for note in notices(replaced))
    assert not any("optimizer" in note for note in notices(shardwise.train(own_sgd, steps=1)))


def notices(run: shardwise.training.Run) -> list[str]:
    return run.summary["notices"]


def test_clip_norm_seed_and_batch_size_take_effect(here):
    small = {"config": {"task": {"model": {"layers": 1, "hidden": 16, "heads": 2}}}, "steps": 1, "eval_every": 0}
    still = shardwise.train("digits", optimizer={**SGD, "lr": 1e-30}, **small)
    clipped = shardwise.train("digits", optimizer=SGD, clip_norm=0.25, **small)
    assert float((weights_of(clipped) - weights_of(still)).norm()) == pytest.approx(0.25, rel=1e-4)
    assert still.eval_loss is None
    other = shardwise.train("digits", seed=1, batch_samples=9, **small)
    assert other.metrics[0]["samples"] == 9 and other.loss != still.loss


def nan_in_step_1() -> shardwise.Task:
    task = tasks.mlp()

    def batch(step: int):
        features, labels = task.batch(step)
        return features * (math.nan if step == 1 else 1), labels

    return task.with_(batch=batch)


def test_a_step_that_is_not_finite_is_skipped_or_ends_the_run(here):
    run = shardwise.train(nan_in_step_1, steps=3, on_nonfinite="skip")
    assert [record["skipped"] for record in run.metrics] == [False, True, False]
    assert run.metrics[1]["loss"] is None and run.summary["skipped"] == 1
    with pytest.raises(shardwise.RunError, match="not finite in step 2") as caught:
        shardwise.train(nan_in_step_1, steps=3)
    assert "Traceback" in caught.value.log.read_text()  # type: ignore[attr-defined]


def nan_in_step_0() -> shardwise.Task:
    task = tasks.mlp()

    def batch(step: int):
        features, labels = task.batch(step)
        return features * (math.nan if step == 0 else 1), labels

    return task.with_(batch=batch)


def test_a_first_loss_that_is_not_finite_is_kept_in_checkpoints(here):
    run = shardwise.train(nan_in_step_0, steps=2, on_nonfinite="skip", checkpoint_every=1)
    assert not [note for note in run.summary["notices"] if "checkpoint" in note]
    on = shardwise.train(nan_in_step_0, steps=3, on_nonfinite="skip", checkpoint_every=1, resume=run.folder)
    assert on.summary["first_loss"] is None and math.isfinite(on.loss)


def test_own_tasks_keep_their_optimizer_unless_the_section_is_set(here):
    assert shardwise.train(tasks.mlp, steps=1).metrics[0]["lr"] == 3e-3
    assert shardwise.train(tasks.mlp, steps=1, optimizer={"weight_decay": 0.5}).metrics[0]["lr"] == 1e-3


def fails_on_rank_1() -> shardwise.Task:
    return tasks.mlp().with_(batch=batch_that_fails)


def batch_that_fails(step: int):
    if step == 1 and torch.distributed.get_rank() == 1:
        raise ArithmeticError("boom")
    return tasks.feature_batch(step, samples=7)


def test_what_fails_on_a_rank_is_one_line_with_its_place(here, capfd):
    assert call(["train", "test_training:fails_on_rank_1", "--plan", "dp_replicate=2", "--steps", "2", "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert "the task's batch(1) failed: " in error and "ArithmeticError: boom" in error and "test_training.py:" in error
    (folder,) = (here / "runs").iterdir()
    details = (folder / "error.log").read_text()
    assert "Traceback" in details and "rank 1 of 2" in details


def test_a_plan_that_the_ranks_refuse_leaves_no_folder(here, capfd):
    assert call(["train", "test_training:with_lbfgs", "--plan", "dp_shard=2", "--steps", "1"]) == 3
    assert not list((here / "runs").iterdir())


class CountsLate(torch.nn.Module):
    """Keeps a sum of its samples from step 5 on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x, step):
        if int(step[0]) >= 5:
            self.total.add_(x.detach().sum(0))
        return self.layer(x)


def counting_late() -> shardwise.Task:
    def batch(step: int):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        return x, torch.full((4,), step)

    return shardwise.Task(
        model=CountsLate, batch=batch, inputs=lambda b: (b, {}), loss=lambda out, b: (out.square().sum(), len(out))
    )


@pytest.mark.long
def test_a_buffer_that_ranks_write_from_a_later_step_on_ends_the_run(here):
    with pytest.raises(shardwise.errors.RefusedPlan, match=r"after step 8 the buffer 'total' \(1 in all\)"):
        shardwise.train(counting_late, "dp_replicate=2", steps=20)


def with_lbfgs() -> shardwise.Task:
    return tasks.mlp().with_(optimizer=lbfgs)


def lbfgs(groups):
    return torch.optim.LBFGS([parameter for group in groups for parameter in group["params"]])


# --- without a run


def test_steps_from_epochs_and_batches_from_tokens():
    job = make_job(load(None, [*TINY[:4], "train.batch_tokens=64", "train.epochs=0.5"]))
    windows = len(text_task(job.effective.config.task).data)
    assert job.batch_samples == 4 and job.steps == math.ceil(0.5 * math.ceil(windows / 4))


def test_steps_of_a_part_of_an_epoch_are_not_one_more():
    of_epochs = [
        load(None, ["task.name=digits", "train.batch_samples=29", f"train.epochs={e}"]) for e in (1.1, 1.11, 2)
    ]
    assert [make_job(effective).steps for effective in of_epochs] == [55, 56, 100]  # 50 in an epoch: 55, 55.5, 100


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_steps_with_its_options(name):
    from shardwise.config.schema import OPTIMIZER_OPTIONS

    values = {"weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6, "momentum": 0.5}
    given = [f"optimizer.{key}={values[key]}" for key in OPTIMIZER_OPTIONS[name]]
    section = load(None, [f"optimizer.name={name}", *given]).config.optimizer
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(section, 0.5)([{"params": [parameter]}])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert type(optimizer).__name__ == CLASSES[name] and not parameter.equal(torch.ones(3))
    for key in OPTIMIZER_OPTIONS[name]:
        assert optimizer.defaults[key] == (tuple(values[key]) if key == "betas" else values[key])


def _of(model) -> Task:
    """Returns a task of which only the model and what it is given are asked for."""
    return Task(model=model, batch=lambda step: None, inputs=lambda batch: ((batch,), {}), loss=lambda out, batch: None)


def test_flops_of_torchs_own_transformer_layers_are_counted() -> None:
    """Without gradients torch runs such a layer as one operation, of which its counter knows nothing."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    counted = count_flops(_of(lambda: layer.eval()), torch.ones(1, 5, 16), None).per_sample
    assert counted is not None and counted >= 6 * 5 * (4 * 16 * 16 + 2 * 16 * 32)


def test_flops_of_a_linear_layer_by_hand():
    def layer():
        return torch.nn.Linear(4, 8, bias=False)

    counted = count_flops(_of(layer), torch.ones(1, 4), None)
    assert (counted.per_sample, counted.convention) == (3 * 2 * 4 * 8, BY_COUNTING)
    by_parameters = count_flops(_of(layer), None, 10)
    assert (by_parameters.per_sample, by_parameters.convention) == (6 * 10 * 4 * 8, BY_PARAMETERS)


def test_looked_up_embeddings_are_left_out_unless_they_are_tied():
    def flops(tied: bool) -> float:
        from dataclasses import replace

        config = replace(tasks.TINY_DECODER, tied=tied)
        found = count_flops(_of(lambda: Decoder(config)), None, 1).per_sample
        assert found is not None
        return found

    model = Decoder(tasks.TINY_DECODER)
    expected = 6 * (sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel())
    assert flops(tied=False) == flops(tied=True) == expected


def test_flops_of_a_model_that_reads_whole_numbers_are_counted():
    class AsLongAsTheRow(torch.nn.Linear):
        def forward(self, tokens):
            return super().forward(torch.ones(int(tokens.max()) + 1, 4))

    counted = count_flops(_of(lambda: AsLongAsTheRow(4, 8)), torch.tensor([[2, 6]]), None)
    assert counted.per_sample == 3 * 2 * 7 * 4 * 8


def test_flops_of_a_model_that_hands_a_parameter_to_a_module_are_counted():
    class OfASet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.asks, self.attend = torch.nn.Parameter(torch.ones(3, 8)), torch.nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.attend(self.asks, x[0], x[0], need_weights=False)[0]

    products = (3 + 3) * 8 * 8 + 2 * 5 * 8 * 8 + 2 * 3 * 5 * 8  # in and out of the questions, of the set, attention
    assert count_flops(_of(OfASet), torch.ones(1, 5, 8), None).per_sample == 3 * 2 * products


def test_a_model_that_needs_values_has_no_flops_but_a_reason():
    class Reads(torch.nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    found = count_flops(_of(Reads), torch.ones(1, 4), None)
    assert found.per_sample is None and "not counted" in found.convention
    assert peak_flops(torch.device("cpu"), "fp32") is None


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [("NVIDIA H200", "bf16", 989), ("NVIDIA H100 PCIe", "fp16", 756), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5)],
)
def test_mfu_is_told_where_the_peak_is_known(name, precision, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = peak_flops(torch.device("cuda"), precision)
    assert peak == pytest.approx(teraflops * 1e12)
    assert peak_flops(torch.device("cuda"), "fp64") is None
    speed = Speed("tokens", 100, Flops(peak, BY_PARAMETERS), peak, ranks=2).of(samples=3, seconds=6.0)
    assert speed["mfu"] == pytest.approx(0.25) and speed["tokens_per_s"] == pytest.approx(50)


def test_run_folders_of_one_second_differ(tmp_path):
    assert len({make_folder(tmp_path, "x") for _ in range(3)}) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"train\.out"):
        make_folder(tmp_path / "file", "x")


def test_equal_weights_are_equal_files(tmp_path):
    """safetensors writes its metadata in the order of a hash, which differs from call to call."""
    engine = shardwise.parallelize(shardwise.Task(
        model=lambda: torch.nn.Linear(2, 1), batch=lambda step: torch.ones(2, 2), loss=lambda o, b: (o.sum(), 2)
    ))  # fmt: skip
    paths = [tmp_path / f"{number}.safetensors" for number in range(9)]
    for path in paths:
        engine.save_weights(path)
    files = {path.read_bytes() for path in paths}
    assert len(files) == 1 and b'{"__metadata__":{"format":"pt","step":"0"},' in files.pop()
    torch.testing.assert_close(load_file(paths[0]), engine.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("again", [False, True], ids=["gone", "another in its place"])
def test_a_folder_that_is_moved_under_a_run_is_told(again: bool, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.write({"step": 1})
    (tmp_path / "runs").rename(tmp_path / "moved")
    if again:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
    with pytest.raises(shardwise.RunError, match=r"moved or deleted.*--resume .*runs/one"):
        metrics.write({"step": 2})
    metrics.close()


def test_metrics_are_on_disk_at_once_and_are_strict_json(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write({"loss": math.inf, "extras": [1.5, math.nan]})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"loss": None, "extras": [1.5, None]}
    metrics.close()


def test_held_out_samples_are_spread_over_the_source():
    class Numbers:
        def __len__(self):
            return 10

        def read(self, indices, region=None):
            return indices

    assert Spread(Numbers(), 5).read(list(range(5))) == [0, 2, 4, 6, 8]
    assert len(Spread(Numbers(), 0)) == len(Spread(Numbers(), 99)) == 10
