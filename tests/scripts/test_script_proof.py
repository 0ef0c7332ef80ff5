"""`verify SCRIPT.py`: equal scripts are equal, wrong ones are not and say why, and nothing of the user's is touched."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from changed_scripts import changed

from shardwise.cli.main import call
from shardwise.errors import InputError
from shardwise.proof.outcome import Parity
from shardwise.ranks import RankPool
from shardwise.scripts.prepared import Prepared
from shardwise.scripts.proof.plain import Plain
from shardwise.scripts.proof.receipts import files_of
from shardwise.scripts.proof.recorder import BLOCKS, content_of, sketch
from shardwise.scripts.proof.scratch import looking_like
from shardwise.scripts.proof.verify_script import verify_script

PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(22, 5)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "last.pt")
"""
PREPARE = """
import shardwise
prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan="dp_replicate=2")
for epoch"""
PREPARED = PLAIN.replace("\nfor epoch", PREPARE).replace("loss.backward()", "loss = prepared.backward(loss)")


@pytest.fixture(autouse=True)
def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where little lies: each run of a proof copies the present folder, which is the whole repository."""
    monkeypatch.chdir(tmp_path)


def prove(pool: RankPool, folder: Path, text: str, **options: object) -> Parity:
    path = folder / "train.py"
    path.write_text(text)
    return verify_script(path, pool=pool, timeout_s=120, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", [None, "dp_shard=2,zero=3", "tp=2", "dp_replicate=3"])
def test_a_right_script_is_equal(pool: RankPool, tmp_path: Path, plan: str | None) -> None:
    parity = prove(pool, tmp_path, PREPARED, plan=plan)
    assert parity.parity, parity.text()
    assert parity.plan == (plan or "dp_replicate=2")
    assert not (tmp_path / "last.pt").exists()  # it ran in a scratch folder
    assert any("shortened" in note for note in parity.notes)  # six batches: the first three and the last


def test_a_loader_that_takes_the_main_one_s_place_is_shortened_alike(pool: RankPool, tmp_path: Path) -> None:
    dataset = "TensorDataset(x, x.sum(1, keepdim=True))"
    stage = """    stage = DataLoader(data, batch_size=2 + epoch, shuffle=True)
    for x, y in prepared.split(stage, trains=True):"""
    curriculum = PREPARED.replace(dataset, "data").replace("loader =", f"data = {dataset}\nloader =", 1)
    curriculum = curriculum.replace("    for x, y in loader:", stage)
    parity = prove(pool, tmp_path, curriculum, steps=10)
    assert parity.parity, parity.text()


@pytest.mark.parametrize(
    ("name", "plan"), [("image_classifier", "dp_shard=2,zero=3"), ("gan", "dp_replicate=2"), ("seq2seq", "tp=2")]
)
def test_scripts_as_people_write_them(pool: RankPool, tmp_path: Path, name: str, plan: str) -> None:
    parity = prove(pool, tmp_path, changed(name, plan))
    assert parity.parity, parity.text()


def test_a_script_with_a_loss_scaler_is_proven_in_float64(pool: RankPool, tmp_path: Path) -> None:
    script = PREPARED.replace("for epoch", 'scaler = torch.amp.GradScaler("cpu", growth_interval=2)\nfor epoch')
    script = script.replace("backward(loss)", "backward(scaler.scale(loss))\n        scaler.unscale_(optimizer)")
    script = script.replace("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()")
    parity = prove(pool, tmp_path, script, plan="dp_shard=2,zero=3")
    assert parity.parity and parity.float64, parity.text()


LATER = """
torch.save({"first": model.state_dict()}, f"first{prepared.rank}.pt")
later = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
later.load_state_dict(torch.load(f"first{prepared.rank}.pt")["first"])
by = torch.optim.SGD(later.parameters(), lr=1e-2)
again = later, by, loader = shardwise.prepare(later, by, LOADER, plan="dp_replicate=2")
for x, y in loader:
    by.zero_grad()
    again.backward(nn.functional.mse_loss(later(x), y))
    by.step()
"""


def test_a_model_that_is_made_of_trained_weights_is_not_blamed_for_their_difference(
    pool: RankPool, tmp_path: Path
) -> None:
    """A second phase begins with what the first has saved; its own start is told where that alone differs."""
    script = PREPARED.replace("loader = Data", "loader = LOADER = Data").replace("range(3)", "range(1)") + LATER
    assert prove(pool, tmp_path, script).parity
    mixed = prove(pool, tmp_path, script.replace("mse_loss(model(x), y)", "mse_loss(model(x), y) * model(x).mean()", 1))
    assert mixed.cause is not None and mixed.cause.name == "loss_scope", mixed.text()
    assert mixed.first is not None and mixed.first.step == 0
    other = prove(pool, tmp_path, script.replace("again =", "later[0].bias.data += prepared.world_size\nagain ="))
    assert other.cause is not None and other.cause.name == "weights_at_start", other.text()


def test_the_script_as_it_was_is_the_one_process(pool: RankPool, tmp_path: Path) -> None:
    plain, wrong = tmp_path / "plain.py", PREPARED.replace("prepared.backward(loss)", "prepared.backward(loss, len(y))")
    plain.write_text(PLAIN)
    assert prove(pool, tmp_path, PREPARED, against=plain).parity
    parity = prove(pool, tmp_path, wrong, against=plain)
    assert parity.verdict == "NOT EQUAL to one process"


def test_what_rounding_explains_is_not_proven(pool: RankPool, tmp_path: Path) -> None:
    """A map that doubles the last bit with each turn, as quasi-Newton steps do."""
    turns = "z = torch.sigmoid(model(x))\n        for _ in range({}): z = 4 * z * (1 - z)\n        loss = z.mean()"
    text = PREPARED.replace("loss = nn.functional.mse_loss(model(x), y)", turns)
    assert prove(pool, tmp_path, text.format(2)).parity
    parity = prove(pool, tmp_path, text.format(26))
    assert parity.verdict == "NOT PROVEN" and "one process does not agree with itself" in parity.text()


STEEP = PREPARED.replace("AdamW", "SGD").replace(
    "nn.functional.mse_loss(model(x), y)", "torch.cos(3e3 * model(x)).mean()"
)


def test_rounding_that_grows_from_step_to_step_is_not_proven(pool: RankPool, tmp_path: Path) -> None:
    """Each step makes rounding a thousand times as large; a mistake of the first step is seen all the same."""
    parity = prove(pool, tmp_path, STEEP)
    assert parity.verdict == "NOT PROVEN" and max(parity.gradient_error.values()) > 1e-4, parity.text()
    wrong = prove(
        pool, tmp_path, STEEP.replace("backward(loss)", "backward(loss * (1 + 1e-5 * (prepared.world_size - 1)))")
    )
    assert wrong.verdict == "NOT EQUAL to one process" and "1.00001 times" in wrong.text(), wrong.text()


def test_a_bias_before_a_batch_norm_under_adam_is_told(pool: RankPool, tmp_path: Path) -> None:
    parity = prove(pool, tmp_path, PREPARED.replace("nn.Linear(5, 8),", "nn.Linear(5, 8), nn.BatchNorm1d(8),"))
    assert parity.parity and "the gradient of '0.bias' is zero but for rounding" in parity.text(), parity.text()
    assert "Adam's own eps of 1e-08" in parity.text()


def test_a_change_beside_prepare_is_told(pool: RankPool, tmp_path: Path) -> None:
    """The loss is doubled, which clipping hides in the gradients of the first step."""
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n        optimizer.step()"
    (tmp_path / "plain.py").write_text(PLAIN.replace("optimizer.step()", clip))
    wrong = PREPARED.replace("optimizer.step()", clip).replace("backward(loss)", "backward(2 * loss)")
    parity = prove(pool, tmp_path, wrong, against=tmp_path / "plain.py")
    assert parity.cause is not None and parity.cause.name == "changed", parity.text()
    assert "in one process already" in parity.cause.text and "plain.py" in parity.cause.text


TWO = """
import torch, shardwise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8, shuffle=True)
one, two = nn.Linear(6, 3), nn.Linear(3, 6)
first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
of_one = one, first, loader = shardwise.prepare(one, first, loader, plan="dp_replicate=2")
of_two = two, second, loader = shardwise.prepare(two, second, loader, plan="dp_replicate=2")
for epoch in range(2):
    for (x,) in loader:
        first.zero_grad(), second.zero_grad()
        z = one(x)
        of_one.backward(z.square().mean())
        first.step()
        of_two.backward((two(z.detach()) - x).square().mean(), summed=True)
        second.step()
"""


def test_a_mean_given_as_a_sum_is_named_where_two_models_share_a_loader(pool: RankPool, tmp_path: Path) -> None:
    parity = prove(pool, tmp_path, TWO)
    assert parity.cause is not None and parity.cause.name == "mean_as_sum", parity.text()
    assert prove(pool, tmp_path, TWO.replace(", summed=True", "")).parity


HELD_OUT = """
held_out = prepared.split(DataLoader(TensorDataset(torch.randn(8, 5)), batch_size=4))
for epoch in range(3):
    model.eval()
    with torch.no_grad():
        mean = sum(float(model(x).sum()) for (x,) in held_out)
    model.train()
"""


def test_an_evaluation_that_adds_nothing_up_is_told(pool: RankPool, tmp_path: Path) -> None:
    text = PREPARED.replace("\nfor epoch in range(3):\n", HELD_OUT)
    assert any("adds nothing up over ranks" in note for note in prove(pool, tmp_path, text).notes)
    right = text.replace("for (x,) in held_out)", "for (x,) in held_out)\n    (mean,) = prepared.sum(mean)")
    assert not any("adds nothing up" in note for note in prove(pool, tmp_path, right).notes)


def test_gradients_that_are_never_taken_away_are_named(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    parity = prove(pool, tmp_path, PREPARED.replace("optimizer.zero_grad()", "pass"), against=tmp_path / "plain.py")
    assert parity.cause is not None and parity.cause.name == "gradients_kept", parity.text()
    assert "optimizer.zero_grad()" in parity.cause.text


def test_what_lies_beside_the_folder_is_told(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "x.txt").write_text("")
    monkeypatch.chdir(tmp_path / "below")
    with pytest.raises(InputError, match=r"x.txt lies beside what a proof copies: give verify --cwd .*below"):
        prove(pool, tmp_path / "below", "open('../x.txt')\n")


def test_a_mean_with_a_weight_is_named(pool: RankPool, tmp_path: Path) -> None:
    parity = prove(pool, tmp_path, PREPARED.replace("backward(loss)", "backward(loss, len(y))"))
    assert parity.cause is not None and parity.cause.name == "weight_of_mean", parity.text()
    assert "mean_over" in parity.text()


UNIT = """
class Unit(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, g: g / (g.norm() + 1e-3))
class Shaped(nn.Tanh):
    def forward(self, x): return Unit.apply(super().forward(x))
model = nn"""


def test_means_of_micro_batches_over_unequal_weights_are_told(pool: RankPool, tmp_path: Path) -> None:
    script = """
import torch, shardwise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(48, 4), torch.randint(3, (48,))), batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)  # which moves nothing in its first step
prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan="dp_replicate=2,accumulate=2")
weight = torch.tensor([1.0, 2.0, 5.0])
for number, (x, y) in enumerate(loader, 1):
    prepared.backward(nn.functional.cross_entropy(model(x), y, weight=weight) / 2)
    if number % 2 == 0:
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
"""
    parity = prove(pool, tmp_path, script)
    assert parity.cause is not None and parity.cause.name == "mean_over", parity.text()


@pytest.mark.parametrize(("noise", "cause"), [("", "loss_scope"), (" + torch.randn_like(x)", "draws")])
def test_a_remedy_is_tried_before_it_is_told(noise: str, cause: str, pool: RankPool, tmp_path: Path) -> None:
    """A model that shapes gradients by all samples: the loss of whole batches is no remedy, the model on them is."""
    shaped = PREPARED.replace("nn.Tanh()", "Shaped()").replace("\nmodel = nn", UNIT)
    shaped = shaped.replace('="dp_replicate=2"', '="dp_replicate=2", check_loss=False')  # which would refuse it
    parity = prove(pool, tmp_path, shaped.replace("model(x", f"model(x{noise}"))
    assert parity.cause is not None and parity.cause.name == cause, parity.text()
    assert 'Take prepare(..., loss_scope="model")' in parity.cause.text and "it was tried" in parity.cause.text


def test_a_script_that_differs_from_itself_is_told(pool: RankPool, tmp_path: Path) -> None:
    text = PREPARED.replace("model = nn", "import time\ntorch.manual_seed(time.time_ns() % 2**31)\nmodel = nn")
    text = text.replace("for epoch", "torch.manual_seed(1)\nfor epoch")  # ranks take rank 0's weights
    parity = prove(pool, tmp_path, text)
    assert parity.cause is not None and parity.cause.name == "not_deterministic", parity.text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PLAIN, "never called shardwise.prepare"),
        (PREPARED.replace("range(3)", "range(0)"), "before any optimizer took a step"),
        (PREPARED.replace("nn.Linear(8, 1)", "nn.Linear(9, 1)"), "fails in one process"),
        (
            PREPARED.replace("prepare(model, optimizer,", "prepare(model, optimizer.state_dict(),"),
            "type dict, expected a",
        ),
        ("import sys\nsys.exit('give --data')\n", "give --data"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()\n",
            "SystemExit: 2: .*arguments are required: --data.; arguments of its own stand behind --",
        ),
    ],
)
def test_bad_input_is_one_message(pool: RankPool, tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        prove(pool, tmp_path, text)


def test_what_fails_on_ranks_alone_is_told(pool: RankPool, tmp_path: Path) -> None:
    text = PREPARED.replace(
        "optimizer.zero_grad()", "optimizer.zero_grad()\n        assert prepared.rank == 0, 'not here'"
    )
    parity = prove(pool, tmp_path, text)
    assert parity.error is not None and "rank 1" in parity.error and "not here" in parity.error


def test_nothing_of_the_user_is_overwritten(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = {"last.pt": "mine", "log.txt": "begun\n", "out/old.txt": "old"}
    (tmp_path / "out").mkdir()
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    text = PREPARED + "open('log.txt', 'a').write('more')\nimport os\n"
    text += "if prepared.rank == 0:\n    os.remove('out/old.txt')\n"
    assert prove(pool, tmp_path, text, steps=None).parity
    assert {name: (tmp_path / name).read_text() for name in kept} == kept
    (tmp_path / "runs.db").write_text("")
    base = "\nif prepared.rank == 0:\n    import sqlite3\n    sqlite3.connect('runs.db').execute('create table a(b)')\n"
    assert prove(pool, tmp_path, PREPARED + base, steps=None).parity
    assert (tmp_path / "runs.db").read_text() == ""
    absolute = PREPARED.replace('"last.pt"', repr(str(tmp_path / "last.pt")))
    with pytest.raises(InputError, match="by an absolute path"):
        prove(pool, tmp_path, absolute, steps=None)
    assert (tmp_path / "last.pt").read_text() == "mine"
    for removed in (
        f"os.rename({str(tmp_path / 'out')!r}, 'there')",
        f"__import__('shutil').rmtree({str(tmp_path / 'out')!r})",
    ):
        with pytest.raises(InputError, match="by an absolute path"):
            prove(pool, tmp_path, PREPARED + f"import os\nif prepared.rank == 0:\n    {removed}\n", steps=None)
        assert (tmp_path / "out/old.txt").read_text() == "old"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(PREPARED.replace("range(3)", "range(int(__import__('sys').argv[1]))"))
    assert call(["verify", str(path), "--plan", "dp_replicate=2", "--json", "--", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parity"] is True and told["world_size"] == 2 and told["cause"] is None
    assert call(["verify", str(path), "--seed", "1"]) == 2
    assert "--seed is not for a script" in capsys.readouterr().err


def test_an_error_on_ranks_alone_is_told_with_the_script_s_line(pool: RankPool, tmp_path: Path) -> None:
    text = PREPARED.replace("22, 5", "24, 5").replace("loss = nn", "x.view(-1, 4, 5); loss = nn")
    error = prove(pool, tmp_path, text).error
    line = text.splitlines().index(next(each for each in text.splitlines() if "x.view" in each)) + 1
    assert error and "on rank" in error and f"[train.py, line {line}: x.view(-1, 4, 5); loss = nn" in error


def test_batches_of_any_dtype_are_compared_by_their_numbers() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert content_of((mask, torch.tensor([3 + 4j]))) == 3 + 5
    assert content_of(mask[:, None].expand(2, 2, 2)) != content_of(mask[:, None].expand(2, 2, 2).flip(2))


def test_a_sketch_is_linear_and_sees_one_element() -> None:
    a, b = torch.randn(70, 70, dtype=torch.float64), torch.randn(70, 70, dtype=torch.float64)
    assert sketch(a).shape == (BLOCKS,)
    torch.testing.assert_close(sketch(a + 2 * b), sketch(a) + 2 * sketch(b), rtol=0, atol=1e-12)
    c = a.clone()
    c[41, 7] += 1e-7
    assert float((sketch(c) - sketch(a)).abs().max()) == pytest.approx(1e-7, rel=1e-5)
    assert torch.equal(sketch(torch.ones(3, 3)), torch.ones(3, 3, dtype=torch.float64))


def test_a_script_that_bears_no_float64_is_proven_in_its_own(pool: RankPool, tmp_path: Path) -> None:
    text = PREPARED.replace("loss = nn", "assert x.dtype == torch.float32; loss = nn")
    parity = prove(pool, tmp_path, text)
    assert parity.parity and not parity.float64, parity.text()
    assert any("own precision" in note for note in parity.notes)
    assert not prove(pool, tmp_path, text.replace("backward(loss)", "backward(loss, len(y))")).equal


GAN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shardwise
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(26, 40)), batch_size=8, shuffle=True)
judge = nn.Sequential(nn.Linear(40, 48), nn.LeakyReLU(), nn.Linear(48, 1))
maker = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 40))
of_judge, of_maker = torch.optim.Adam(judge.parameters(), 1e-3), torch.optim.Adam(maker.parameters(), 1e-3)
pj = judge, of_judge, loader = shardwise.prepare(judge, of_judge, loader, plan="dp_replicate=2")
pm = maker, of_maker, loader = shardwise.prepare(maker, of_maker, loader, plan="dp_replicate=2")
for epoch in range(3):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = maker(torch.randn(len(real), 6))
        of_judge.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(judge(real), ones)
        pj.backward(loss + nn.functional.binary_cross_entropy_with_logits(judge(fake.detach()), zeros))
        of_judge.step()
        of_maker.zero_grad()
        pm.backward(nn.functional.binary_cross_entropy_with_logits(judge(fake), ones))
        of_maker.step()
    if pm.rank == 0:
        torch.save(maker.state_dict(), "maker.pt")
    pm.barrier()
    maker.load_state_dict(torch.load("maker.pt"))
"""


def test_two_models_with_large_weights_that_save_and_load(pool: RankPool, tmp_path: Path) -> None:
    """Sketches draw nothing that is followed, ranks share one scratch folder, and files of float64 are read."""
    parity = prove(pool, tmp_path, GAN, steps=None)
    assert parity.parity and parity.float64, parity.text()


def test_a_rank_that_ends_itself_is_told(pool: RankPool, tmp_path: Path) -> None:
    text = PREPARED + "import sys\nif prepared.rank == 1:\n    sys.exit(3)\n"
    parity = prove(pool, tmp_path, text, steps=None)
    assert parity.error is not None and "sys.exit(3)" in parity.error


def test_modules_beside_the_script_are_made_anew(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from torch import nn\nmodel = nn.Linear(5, 1)\n")
    text = PREPARED.replace(
        "model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))", "from beside import model"
    )
    parity = prove(pool, tmp_path, text, steps=2, plan="dp_replicate=2,accumulate=1")
    assert parity.parity, parity.text()
    assert prove(pool, tmp_path, text, steps=2).parity


def test_ranks_that_were_never_set_up_prove_nothing(pool: RankPool, tmp_path: Path) -> None:
    parity = prove(pool, tmp_path, PLAIN, nproc=2)
    assert parity.equal and not parity.parity and "each may have trained by itself" in parity.text()


IN_PIECES = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 5)).square().mean().backward()
    optimizer.step()
"""


def test_ranks_that_hold_pieces_of_weights_may_have_the_same_losses(pool: RankPool, tmp_path: Path) -> None:
    parity = prove(pool, tmp_path, IN_PIECES, nproc=2)
    assert parity.parity, parity.text()


def test_modules_with_names_in_common_are_each_compared(pool: RankPool, tmp_path: Path) -> None:
    text = PLAIN.replace("model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))",
                         "one, two = nn.Linear(5, 4), nn.Linear(4, 1)")  # fmt: skip
    text = text.replace("model.parameters()", "[*one.parameters(), *two.parameters()]").replace(
        "model(x)", "two(one(x))"
    )
    parity = prove(pool, tmp_path, text.replace("model.state", "one.state"), nproc=2)
    assert set(parity.gradient_error) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_weights_of_other_ranks_that_differ_at_the_start_are_named(pool: RankPool, tmp_path: Path) -> None:
    wrapped = "torch.distributed.init_process_group('gloo')\nmodel = nn.parallel.DistributedDataParallel(model)\nwith "
    wrapped += "torch.no_grad(): model.module[2].bias.add_(torch.distributed.get_rank())\noptimizer ="
    parity = prove(pool, tmp_path, PLAIN.replace("optimizer =", wrapped, 1), nproc=2)
    assert parity.cause is not None and parity.cause.name == "weights_at_start", parity.text()
    assert "'2.bias' of rank 1" in parity.cause.text


def test_a_link_to_itself_stays_one_in_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").symlink_to("self")
    monkeypatch.chdir(tmp_path)
    with looking_like(str(tmp_path)) as folder:
        assert (Path(folder) / "self").is_symlink()


def test_a_scratch_folder_may_lie_in_what_it_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("a")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with looking_like(str(tmp_path)) as folder:
        assert (Path(folder) / "deep" / "a.txt").read_text() == "a"
        assert len(list(Path(folder).rglob("a.txt"))) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["deep"]


def test_links_are_followed_to_what_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, linked = tmp_path / "real", tmp_path / "linked"
    (real / "deep").mkdir(parents=True)
    for name in ("train.py", "part_by_folder.py", "deep/part_by_file.py"):
        (real / name).write_text("")
    linked.symlink_to(real)
    (real / "deep" / "again").symlink_to(real)
    (tmp_path / "part_by_file.py").symlink_to(real / "deep" / "part_by_file.py")
    (tmp_path / "part_outside.py").write_text("")
    for folder in (linked, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("part_by_folder", "part_by_file", "part_outside"):
        importlib.import_module(name)
    assert set(files_of(str(linked / "train.py"))) == {"train.py", "part_by_folder.py", "deep/part_by_file.py"}
    with looking_like(str(tmp_path)) as folder:
        names = {str(path.relative_to(folder)) for path in Path(folder).rglob("*.py") if not path.is_symlink()}
        assert {"linked/train.py", "linked/deep/part_by_file.py", "part_by_file.py", "part_outside.py"} <= names
        assert (Path(folder) / "real" / "train.py").is_file()
        assert (Path(folder) / "linked" / "deep" / "again").is_symlink()  # to what is being copied


def test_what_one_process_of_a_proof_offers_ranks_have_too() -> None:
    offered = {name for name in vars(Plain) if not name.startswith("_")} - {"save"}  # for shardwise.save
    assert offered <= set(dir(Prepared)), offered - set(dir(Prepared))


def test_a_decode_beside_forward_is_an_evaluation(pool: RankPool, tmp_path: Path) -> None:
    """It calls modules inside alone, and not the model that was prepared."""
    decode = "        model.eval()\n        with torch.no_grad(): model[2](model[0](x))\n        model.train()\n"
    told = [
        prove(pool, tmp_path, text).text()
        for text in (PREPARED, PREPARED.replace("    torch.save", f"{decode}    torch.save"))
    ]
    assert ["the model was not evaluated" in text for text in told] == [True, False]
