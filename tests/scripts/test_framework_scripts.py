"""`verify SCRIPT.py --nproc N`: DDP, FSDP, Accelerate, Trainer, Fabric and Lightning, right scripts and mistaken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwise.errors import InputError
from shardwise.proof.outcome import Parity
from shardwise.ranks import RankPool
from shardwise.scripts.proof.verify_script import verify_script

FOLDER = Path(__file__).parents[1] / "tasks" / "frameworks"
sys.path.insert(0, str(FOLDER))
import planted  # noqa: E402

RIGHT = [name for name in planted.BATCH_SIZES if name != "ddp_sync_batchnorm.py"]  # which torch has on GPUs alone
QUICK = ("ddp_images.py", "fsdp2_gpt.py", "ddp_zero_optimizer.py", "ddp_training_step.py")
QUICK_MISTAKES = ("mean_of_means", "module_called", "head_left_out", "seed_of_a_rank", "running_mean_of_a_rank")


@pytest.fixture(autouse=True)
def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where little lies: each run of a proof copies the present folder, which is the whole repository."""
    monkeypatch.chdir(tmp_path)


def prove(path: Path, script: str, pool: RankPool, against: Path | None = None) -> Parity:
    for library in ("accelerate", "fabric", "lightning", "trainer"):
        if script.startswith(library):
            pytest.importorskip({"fabric": "lightning_fabric", "trainer": "accelerate"}.get(library, library))
    batch = planted.BATCH_SIZES[script]
    return verify_script(
        path, ("--batch-size", str(batch)), nproc=2, one=f"--batch-size {2 * batch}", steps=None, against=against,
        timeout_s=200, pool=pool if script.startswith(("ddp", "fsdp")) else None,  # others keep a state of the process
    )  # fmt: skip


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in RIGHT]
)
def test_right_scripts_are_equal(script: str, pool: RankPool) -> None:
    parity = prove(FOLDER / script, script, pool)
    assert parity.parity, parity.text()


def test_a_script_that_insists_on_float32_is_proven_in_it(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "fsdp2_gpt.py"
    asserts = "assert loss.dtype == torch.float32; loss.backward()"
    text = (FOLDER / path.name).read_text().replace("loss.backward()", asserts)
    path.write_text(text)
    parity = prove(path, path.name, pool)
    assert parity.parity and not parity.float64, parity.text()
    path.write_text(text.replace("loss.backward()", "(1.001 * loss).backward()"))
    assert not prove(path, path.name, pool, FOLDER / path.name).equal


@pytest.mark.long
def test_rounding_of_16_bits_in_a_script_that_insists_on_float32_is_no_difference(
    pool: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "fsdp2_gpt.py"
    text = (FOLDER / path.name).read_text()
    policy = "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
    insists = "assert next(model.parameters()).dtype == torch.float32"
    for whole, by in (
        ("import fully_shard", "import MixedPrecisionPolicy, fully_shard"),
        ("fully_shard(block)", f"fully_shard(block, {policy})"),
        ("fully_shard(model)", f"{insists}; fully_shard(model, {policy})"),
    ):
        assert text.count(whole) == 1
        text = text.replace(whole, by)
    path.write_text(text)
    parity = prove(path, path.name, pool)
    assert parity.equal and not parity.parity and "16 bits" in parity.text(), parity.text()
    path.write_text(text.replace("loss.backward()", "(1.1 * loss).backward()"))
    assert not prove(path, path.name, pool, FOLDER / path.name).equal


def test_a_loss_that_is_not_finite_is_bad_input(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "ddp_images.py"
    path.write_text((FOLDER / path.name).read_text().replace("loss.backward()", "(loss * float('nan')).backward()"))
    with pytest.raises(InputError, match="in one process the loss of step 1 is not finite"):
        prove(path, path.name, pool)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK_MISTAKES else pytest.mark.long) for name in planted.MISTAKES],
)
def test_mistakes_are_found_where_they_begin_with_their_cause(name: str, pool: RankPool, tmp_path: Path) -> None:
    script, old, new, _ = planted.MISTAKES[name]
    reference, step, kind = planted.FIRST[name]
    text = (FOLDER / script).read_text()
    assert text.count(old) == 1
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(old, new))
    parity = prove(path, script, pool, None if reference == "own" else FOLDER / script)
    assert not parity.equal
    first = min(parity.exceeded.values())
    assert first == (-1 if kind == "start" else step)
    kinds = {each for (each, _), at in parity.exceeded.items() if at == first}
    assert ("parameter" if kind == "start" else kind) in kinds
    assert (parity.cause and parity.cause.name) == planted.CAUSES[name], parity.text()
    assert parity.first.step == first
