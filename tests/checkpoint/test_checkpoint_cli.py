"""`shardwise checkpoint`: what is in it, whether it is whole, its weights as other files, what two have not alike."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise
from shardwise.checkpoint.inspect import convert
from shardwise.checkpoint.save import Saver
from shardwise.cli.main import call
from shardwise.models import tasks

SMALL: dict[str, Any] = {"task": {"model": {"layers": 1, "hidden": 16, "heads": 2}}}


def asked(capfd, *words: str) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = call(["checkpoint", *words, "--json"])
    return code, json.loads(capfd.readouterr()[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of one rank with two checkpoints and an average."""
    out = tmp_path_factory.mktemp("runs")
    made = shardwise.train(
        "digits", config=SMALL, steps=4, checkpoint_every=2, ema_decay=0.5, eval_every=0, out=str(out)
    )
    return made.folder


def test_inspect_and_verify(run: Path, capfd):
    code, found = asked(capfd, "inspect", str(run))
    assert code == 0 and found["step"] == 4 and found["data"]["position"] == 4 * 64
    kinds = found["kinds"]
    assert kinds["optimizer"]["elements"] == 2 * kinds["model"]["elements"] == 2 * kinds["ema"]["elements"]
    assert call(["checkpoint", "inspect", str(run), "--tensors"]) == 0
    out = capfd.readouterr()[0]
    assert "step 4 of digits" in out and "head.weight" in out and "optimizer AdamW" in out
    assert asked(capfd, "verify", str(run))[0] == 0
    code, found = asked(capfd, "inspect", str(run / "nothing"))
    assert code == 2 and "there is no such file or folder" in found["error"]


def test_a_changed_byte_is_told_with_both_digests(run: Path, capfd, tmp_path: Path):
    import shutil

    bad = Path(shutil.copytree(run / "checkpoints" / "step-00000002", tmp_path / "step-00000002"))
    data = bytearray((bad / "rank-00000.safetensors").read_bytes())
    data[len(data) // 2] ^= 4
    (bad / "rank-00000.safetensors").write_bytes(data)
    code, found = asked(capfd, "verify", str(bad))
    assert code == 1 and "rank-00000.safetensors: its digest should be" in found["damaged"][0]
    code, found = asked(capfd, "convert", str(bad), str(tmp_path / "x.safetensors"))
    assert code == 2 and "its digest should be" in found["error"] and sorted(os.listdir(tmp_path)) == ["step-00000002"]


def test_weights_as_one_file_are_those_of_the_run(run: Path, capfd, tmp_path: Path):
    for words, file in (((), "model.safetensors"), (("--ema",), "ema.safetensors")):
        one = tmp_path / f"one-{file}"
        assert asked(capfd, "convert", str(run), str(one), *words)[0] == 0
        ours, theirs = load_file(one), load_file(run / file)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert asked(capfd, "diff", str(run), str(run / "model.safetensors"))[0] == 0
    code, found = asked(capfd, "diff", str(run), str(run / "ema.safetensors"))
    assert code == 1 and all(row["largest"] > 0 for row in found["differences"])
    code, found = asked(capfd, "convert", str(run), str(tmp_path / "one-model.safetensors"))
    assert code == 2 and "exists: give a new name" in found["error"]
    folder = tmp_path / "folder"
    files = convert(run, folder, file_bytes=2000)  # and back: a folder of several files is read as one
    assert len(files) > 2 and (folder / "model.safetensors.index.json").exists()
    assert asked(capfd, "diff", str(folder), str(run))[0] == 0


def test_diff_names_tensors_and_facts(run: Path, capfd, tmp_path: Path):
    steps = [str(run / "checkpoints" / f"step-0000000{n}") for n in (2, 4)]
    assert asked(capfd, "diff", steps[0], steps[0])[0] == 0
    code, found = asked(capfd, "diff", *steps)
    rows = {row["name"]: row for row in found["differences"]}
    assert code == 1 and "2 and 4" in rows["step"]["what"] and rows["model/head.weight"]["largest"] > 0
    weights = load_file(run / "model.safetensors")
    weights["head.weight"] = weights["head.weight"].bfloat16()
    del weights["head.bias"]
    save_file(weights, str(tmp_path / "other.safetensors"))
    rows = asked(capfd, "diff", str(run), str(tmp_path / "other.safetensors"))[1]["differences"]
    assert [row["name"] for row in rows] == ["head.bias", "head.weight"] and "BF16" in rows[1]["what"]


def saved(plan: str, folder: str) -> None:
    task = tasks.hf_llama()
    engine = shardwise.parallelize(task, plan)
    engine.step(task.batch(0))
    saver = Saver(engine, folder)
    saver.save()
    saver.finish()
    saver.close()
    engine.close()


def test_any_plan_to_a_folder_that_transformers_reads(pool, capfd, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pool.run(saved, 4, "tp=2,dp_shard=2,zero=2", str(tmp_path / "checkpoints"))
    model = tasks.hf_llama().model()
    model.config.save_pretrained(str(tmp_path / "like"))
    made, like = str(tmp_path / "checkpoints"), str(tmp_path / "like")
    code, found = asked(capfd, "convert", made, str(tmp_path / "hf"), "--like", like)
    assert code == 0, found["error"]
    read = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "hf"), dtype=torch.float32).eval()
    assert asked(capfd, "convert", made, str(tmp_path / "one.safetensors"))[0] == 0
    model.load_state_dict(load_file(tmp_path / "one.safetensors"))
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens).logits, read(tokens).logits)


# --- pickles of others


class Runs:
    """Leaves a mark where a pickle of it is loaded."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> Any:
        return Path.touch, (self.at,)


@pytest.mark.parametrize("key", [None, "model"])
def test_a_folder_that_torch_loads_is_written(key: str | None, run: Path, capfd, tmp_path: Path):
    import torch.distributed.checkpoint as dcp

    weights, target = load_file(run / "model.safetensors"), tmp_path / "folder"
    of_key = () if key is None else ("--key", key)
    words = (str(run), str(target), "--dcp", *of_key)
    assert asked(capfd, "convert", *words)[0] == 0
    found = {name: torch.full_like(value, 7) for name, value in weights.items()}
    dcp.load(found if key is None else {key: found}, checkpoint_id=target, no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    back = ("convert", str(target), str(tmp_path / "back.safetensors"), "--allow-pickle", *of_key)
    assert asked(capfd, *back)[0] == 0
    assert load_file(tmp_path / "back.safetensors").keys() == weights.keys()
    code, told = asked(capfd, "convert", *words)
    assert code == 2 and "exists" in told["error"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_tensors_of_others_pickles_are_read_and_nothing_is_run(run: Path, capfd, tmp_path: Path):
    import pickle

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    weights = load_file(run / "model.safetensors")
    mark = tmp_path / "ran"
    optimizer = {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 0.1}]}
    torch.save(weights, tmp_path / "plain.pt")
    torch.save({"model": weights, "optimizer": optimizer, "epoch": 3}, tmp_path / "beside.pt")
    torch.save({"model": weights, "ema": weights}, tmp_path / "two.pt")
    dcp.save({"model": dict(weights), "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for number, (name, words) in enumerate(
        [("plain.pt", ()), ("beside.pt", ()), ("two.pt", ("--key", "ema")), ("dcp", ("--key", "model"))]
    ):
        target = str(tmp_path / f"{number}.safetensors")
        code, found = asked(capfd, "convert", str(tmp_path / name), target, "--allow-pickle", *words)
        assert code == 0, found
        assert asked(capfd, "diff", target, str(run / "model.safetensors"))[0] == 0
        code, found = asked(capfd, "convert", str(tmp_path / name), str(tmp_path / "x.safetensors"))
        assert code == 2 and "--allow-pickle" in found["error"], (name, found)  # without the flag
    told = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    hostile: list[tuple[str, tuple[str, ...], str]] = [("two.pt", (), "'model', 'ema'")]
    torch.save({"model": weights, "x": Runs(mark)}, tmp_path / "runs.pt")
    hostile.append(("runs.pt", (), "without running code that is in it"))
    torch.save({"w": torch.zeros(1).expand(2**40)}, tmp_path / "wide.pt")
    hostile.append(("wide.pt", (), "its tensors would have 4398046511104 bytes"))
    torch.save({"w": torch.zeros(2, device="meta")}, tmp_path / "meta.pt")
    hostile.append(("meta.pt", (), "is no plain array"))
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w") as packed:
        for one in plain.infolist():
            packed.writestr(one.filename, plain.read(one), zipfile.ZIP_DEFLATED)
    hostile.append(("packed.pt", (), "is compressed"))
    (tmp_path / "memory.pt").write_bytes(b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + b"\xff" * 7 + b"\x0f\x85R.")
    hostile.append(("memory.pt", (), "without running code that is in it"))
    (tmp_path / "old.pt").write_bytes(pickle.dumps(Runs(mark)))
    hostile.append(("old.pt", (), "without running code that is in it"))
    for name, change in {
        "runs": lambda: Runs(mark),
        "writes": lambda: FileSystemWriter(mark),
        "path": lambda: _changed(told, "relative_path", "../plain.pt"),
        "bomb": lambda: _changed(told, "size", torch.Size([10**9, 10**9])),
    }.items():
        folder = tmp_path / f"dcp-{name}"
        folder.mkdir()
        for path in (tmp_path / "dcp").glob("*.distcp"):
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change()))
        says = {"runs": "it names", "writes": "it names", "path": "no file of this folder", "bomb": "its tensors have"}[
            name
        ]
        hostile.append((folder.name, ("--key", "model"), says))
    hostile.append(("0.safetensors", (), "no file of torch.save"))
    for name, words, says in hostile:
        code, found = asked(capfd, "convert", str(tmp_path / name), str(tmp_path / "x"), "--allow-pickle", *words)
        assert code == 2 and says in found["error"], (name, found)
    code, found = asked(capfd, "convert", str(run), str(tmp_path / "x"), "--key", "model")
    assert code == 2 and "--allow-pickle" in found["error"]
    assert not mark.exists() and not (tmp_path / "x").exists() and not (tmp_path / "x.safetensors").exists()


def _changed(told: Any, field: str, value: Any) -> Any:
    """A description of a folder with another value in the first place that has this field."""
    import copy

    told = copy.deepcopy(told)
    places = [*told.storage_data.values(), *told.state_dict_metadata.values()]
    object.__setattr__(next(place for place in places if hasattr(place, field)), field, value)
    return told


def test_a_pickle_under_any_name_of_a_run_is_never_run(run: Path, capfd, tmp_path: Path, monkeypatch):
    """One message, or the file is not needed; going on sets aside what it can do without."""
    import pickle
    import shutil

    monkeypatch.chdir(tmp_path)
    mark, told = tmp_path / "ran", {}
    files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    for name in [*files, Path("best.safetensors"), Path("stopped.json"), Path("journal.jsonl")]:
        copy = Path(shutil.copytree(run, tmp_path / "copy"))
        (copy / name).write_bytes(pickle.dumps(Runs(mark)))
        codes = []
        for words in (
            ["checkpoint", "inspect"],
            ["checkpoint", "verify"],
            ["report"],
            ["train", "--steps", "5", "--resume"],
        ):
            code = call([*words, str(copy)])
            said = capfd.readouterr().err
            assert code in (0, 2) or words[1] == "verify", (name, words, said)
            assert not mark.exists() and "Traceback" not in said
            codes.append(code)
        told[str(name)] = codes
        shutil.rmtree(copy)
    in_need = {name for name, codes in told.items() if codes[3]}
    assert in_need == {"config.toml"} and told["checkpoints/step-00000004/manifest.json"] == [2, 1, 0, 0]
    assert told["best.safetensors"] == [0, 0, 0, 0] and told["summary.json"] == [0, 0, 2, 0]
