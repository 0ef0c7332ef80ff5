"""`verify SCRIPT.py --against`: the script as it was is followed, however it steps and calls its modules."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_script_proof import PLAIN, PREPARE, PREPARED, TWO, prove, small_folder  # noqa: F401

from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.ranks import RankPool
from shardwise.scripts.proof.receipts import line_of

CLOSURE = """
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)"""
OF_PARTS = """
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
        self.two = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    def loss(self, x, y): return nn.functional.mse_loss(self.two(self.one(x)).sum(1, keepdim=True), y)
model = Parts()"""
OF_RANK = "import os\nif 'RANK' in os.environ: raise OSError('no device')\ntorch.manual_seed(0)"
ASKED = {  # what the script as it was has in another way -> (text, text in its place)
    "a closure": (
        "loss = nn.functional.mse_loss(model(x), y)\n        loss.backward()\n        optimizer.step()",
        CLOSURE,
    ),
    "parts that are called alone": ("nn.functional.mse_loss(model(x), y)", "model.loss(x, y)"),
    "a branch on RANK": ("torch.manual_seed(0)", OF_RANK),
}


@pytest.mark.parametrize("kind", ASKED)
def test_the_script_as_it_was_is_followed(kind: str, pool: RankPool, tmp_path: Path) -> None:
    plain = PLAIN.replace(*ASKED[kind])
    if "parts" in kind:
        plain = plain.replace("\nmodel = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))", OF_PARTS)
    assert plain != PLAIN
    changed = plain.replace("\nfor epoch", PREPARE).replace("loss.backward()", "loss = prepared.backward(loss)")
    plain = plain.replace("self.two(self.one(x))", "self.two.forward(self.one.forward(x))")  # other modules are called
    (tmp_path / "plain.py").write_text(plain.replace("model.state_dict()", "model"))  # which is pickled, hooks and all
    parity = prove(pool, tmp_path, changed, against=tmp_path / "plain.py")
    assert parity.parity, parity.text()
    assert any("RANK" in note and "no device" in note for note in parity.notes) == ("RANK" in kind)


def test_gradients_of_a_closure_are_those_of_its_last_call(pool: RankPool, tmp_path: Path) -> None:
    parity = prove(pool, tmp_path, PLAIN.replace(*ASKED["a closure"]), nproc=2, steps=1)
    assert parity.equal and len(parity.gradient_error) == 4 and parity.norm_error is not None


def test_models_are_prepared_in_any_order(pool: RankPool, tmp_path: Path) -> None:
    calls, plain = [line for line in TWO.splitlines() if "shardwise.prepare" in line], TWO.replace(", summed=True", "")
    changed = plain.replace("\n".join(calls), "\n".join(reversed(calls)))
    assert changed != plain
    for line, name in zip(calls, ("of_one", "of_two"), strict=True):
        plain = plain.replace(f"{line}\n", "").replace(f"{name}.backward(", "torch.Tensor.backward(")
    (tmp_path / "plain.py").write_text(plain)
    assert prove(pool, tmp_path, changed, against=tmp_path / "plain.py").parity


def test_a_script_without_an_optimizer_is_nothing_to_compare_with(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN.replace("optimizer.step()", "pass"))
    with pytest.raises(InputError, match=r"plain.py steps no optimizer.*leave --against out"):
        prove(pool, tmp_path, PREPARED, against=tmp_path / "plain.py")


OTHERWISE = {  # what the changed script does otherwise -> (text, text in its place, what is told)
    "rate": ("lr=1e-2", "lr=2e-2", "lr of the optimizer's group 0 is 0.02, in plain.py 0.01"),
    "one gradient": (
        "optimizer.step()",
        "model[2].weight.grad.mul_(3); optimizer.step()",
        "gradient of 2.weight is 3 t",
    ),
    "all gradients": ("backward(loss)", "backward(loss * 2)", "Every gradient is 2 times as large"),
    "order": ("shuffle=True", "shuffle=False", "called with other numbers in step 1"),
    "seed": ("manual_seed(0)", "manual_seed(1)", "before the first step. Its weights at the start are others"),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_what_was_changed_is_told_by_name_and_noted(kind: str, pool: RankPool, tmp_path: Path) -> None:
    old, new, told = OTHERWISE[kind]
    (tmp_path / "plain.py").write_text(PLAIN)
    parity = prove(pool, tmp_path, PREPARED.replace(old, new), against=tmp_path / "plain.py")
    text = parity.text().replace(str(tmp_path) + "/", "")
    assert not parity.parity and told in text and "parameter 0" not in text, text
    line = line_of(str(tmp_path / "train.py"), Plan.parse("dp_replicate=2"))
    assert line.startswith("NOT EQUAL to one process when it was proven")
