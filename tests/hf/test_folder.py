"""A checkpoint folder is a task by itself: trained on chats with adapters, and written as a folder again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_tokenizer import CHATML, tokenizer
from safetensors.torch import load_file, save_file

from shardwise.cli.main import call
from shardwise.config import load
from shardwise.errors import InputError
from shardwise.hf.export import merge_run
from shardwise.observe.summary import summary_text
from shardwise.task_names import resolve_task
from shardwise.training import execute

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
peft = pytest.importorskip("peft", reason="needs peft, which is not installed here")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a tokenizer, beside a file of chats."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "small"
    own = tokenizer(folder, CHATML)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(own), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=96,
                                      eos_token_id=2, pad_token_id=0, bos_token_id=None)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
    sums = [(a, b) for a in range(4) for b in range(4)]
    lines = [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in sums
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_a_folder_is_trained_merged_and_loaded(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = (
        "task.files=['chat.jsonl']",
        "lora.rank=4",
        "train.batch_samples=2",
        "train.device=cpu",
        "optimizer.lr=0.02",
    )
    run = execute(load(overrides=(f"task.name='{small}'", *keys, "train.steps=3", "train.checkpoint_every=0")))
    folder = Path(run.summary["folder"])
    weights = load_file(folder / "model.safetensors")
    base = load_file(small / "model.safetensors")
    for name, value in base.items():  # the base stays the folder's, bit for bit
        kept = weights.get(name, weights.get(name.replace("proj.", "proj.base_layer.")))
        assert kept is not None and torch.equal(kept, value), name
    ids = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(str(small))
    with torch.no_grad():
        before = plain(ids).logits
        adapted = peft.PeftModel.from_pretrained(plain, str(folder / "adapter")).eval()(ids).logits
        capfd.readouterr()
        folder_of_all = merge_run(folder, None, small.parent / "new" / "merged")
        assert "%|" not in capfd.readouterr().err  # transformers' progress bars
        merged = transformers.AutoModelForCausalLM.from_pretrained(str(folder_of_all))
        torch.testing.assert_close(merged.eval()(ids).logits, adapted, rtol=1e-5, atol=1e-6)
    assert (adapted - before).abs().max() > 1e-3
    assert transformers.AutoTokenizer.from_pretrained(str(folder_of_all)).chat_template == CHATML
    with pytest.raises(InputError, match=r"no run's folder \(it has no config.toml\)"):
        merge_run(small, None, small.parent / "other")


def test_adapters_and_a_plain_model_are_what_a_run_begins_with(small: Path) -> None:
    keys = ("task.files=['chat.jsonl']", "train.batch_samples=2", "train.device=cpu", "train.checkpoint_every=0")
    own = (f"task.name='{small}'", *keys, "train.steps=1", "lora.rank=4")
    first = Path(execute(load(overrides=(*own, "optimizer.lr=0.02"))).summary["folder"])
    adapter = first / "adapter" / "adapter_model.safetensors"
    again = execute(load(overrides=(*own, f"train.init_from='{adapter}'", "optimizer.lr=1e-9")))
    (notice,) = [word for word in again.summary["notices"] if "weights from" in word]
    assert "28 of 51 tensors" in notice and "not used" not in notice
    at = adapter.parent  # their folder will do too
    for key, words in (
        ([], r"holds adapters, and the model has none: --set lora.rank=4 --set lora.alpha=4"),
        (["lora.rank=2"], r"trained with lora.rank = 4, and this run has 2: --set lora.rank=4"),
        (["lora.rank=4", "lora.alpha=16"], r"trained with lora.alpha = 4, and this run has 16.0: --set lora.alpha=4"),
        (
            ["lora.rank=4", "lora.targets=['q_proj']"],
            r"of another model or of other layers: 24 of its tensors have no place",
        ),
    ):
        with pytest.raises(InputError, match=words):
            execute(load(overrides=(*keys, f"task.name='{small}'", "train.steps=1", *key, f"train.init_from='{at}'")))
    weights = load_file(Path(again.summary["folder"]) / "model.safetensors")
    for name, value in load_file(first / "model.safetensors").items():
        torch.testing.assert_close(weights[name], value)
    base = execute(load(overrides=(*own, f"train.init_from='{small}/model.safetensors'")))
    (notice,) = [word for word in base.summary["notices"] if "weights from" in word]
    assert "21 of 51 tensors" in notice and "not used" not in notice
    plain = load_file(small / "model.safetensors")
    other = {f"net.{name}" if "norm" in name else name: value for name, value in plain.items()}
    save_file(other, "other.safetensors")
    with pytest.raises(InputError, match=r"5 frozen weights, which no step would .*init_rename"):
        execute(load(overrides=(*own, "train.init_from=other.safetensors")))


def test_the_losses_are_those_of_peft_under_accelerate(small: Path) -> None:
    """A run without a line of Python against a script of forty, from the same adapters on."""
    pytest.importorskip("accelerate", reason="needs accelerate, which is not installed here")
    import peft_accelerate

    base = transformers.AutoModelForCausalLM.from_pretrained(str(small))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained("begun")
    theirs = peft_accelerate.main(str(small), "chat.jsonl", "begun", 3, 0.01)
    keys = (f"task.name='{small}'", "task.files=['chat.jsonl']", "lora.rank=4", "lora.alpha=8", "train.device=cpu",
            "train.init_from=begun", "optimizer.lr=0.01", "train.steps=3", "train.checkpoint_every=0")  # fmt: skip
    rows = len(resolve_task(str(small), load(overrides=keys).config.task).data)
    run = execute(load(overrides=(*keys, f"train.batch_samples={rows}", "train.log_every=1")))
    lines = (Path(run.summary["folder"]) / "metrics.jsonl").read_text().splitlines()
    own = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert theirs[0] - theirs[-1] > 0.01
    assert own == pytest.approx(theirs, rel=1e-5)


def test_packed_rows_have_the_losses_of_single_ones(small: Path) -> None:
    given = resolve_task(str(small), load(overrides=(f"task.name='{small}'", "task.files=['chat.jsonl']")).config.task)
    model = given.model().eval()
    source = given.data
    assert source is not None and len(source.rows) < 16
    sums = {}
    for name, rows in (("packed", source.rows), ("single", [[index] for index in range(16)])):
        source.rows = rows
        batch = source.read(list(range(len(rows))))
        args, kwargs = given.inputs(batch)
        with torch.no_grad():
            total, weight = given.loss(model(*args, **kwargs), batch)
        sums[name] = float(total), int(weight)
    assert sums["packed"][1] == sums["single"][1]
    assert sums["packed"][0] == pytest.approx(sums["single"][0], rel=1e-5)


def test_what_is_cut_and_where_adapters_lie_is_told(small: Path) -> None:
    (small.parent / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "completion": "b" * size}) + "\n" for size in (5, 5, 5, 90))
    )
    keys = ("task.files=['long.jsonl']", "task.seq_len=32", "train.batch_samples=2", "train.device=cpu", "lora.rank=2")
    run = execute(load(overrides=(f"task.name='{small}'", *keys, "train.steps=1", "train.checkpoint_every=0")))
    assert "1 of 4 documents are longer than 32 tokens and were cut" in run.summary["notices"]
    folder = Path(run.summary["adapters"])
    assert f"adapters  {folder}" in summary_text(run.summary)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(small.resolve())
    peft.AutoPeftModelForCausalLM.from_pretrained(str(folder))


def test_a_folder_without_examples_is_told_so(small: Path) -> None:
    with pytest.raises(InputError, match=r"has no examples to learn from: --data chat.jsonl"):
        resolve_task(str(small))
    with pytest.raises(InputError, match=r"task.model.layers = 2: would have no effect: the folder's model"):
        load(overrides=(f"task.name='{small}'", "task.model.layers=2"))


@pytest.mark.long
def test_what_a_folder_is_trained_on_is_proven(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "--data chat.jsonl --plan dp_replicate=2 --steps 1 --set lora.rank=2 --set train.batch_samples=4 --json"
    assert call(["verify", str(small), *words.split()]) == 0
    assert any("lora_A" in name for name in json.loads(capfd.readouterr().out)["optimizer_error"])
