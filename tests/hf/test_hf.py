"""Hugging Face models: read shard by shard, trained like one process, written as `from_pretrained` reads them."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise import Task, parallelize, verify
from shardwise.data import JsonlSource
from shardwise.errors import InputError
from shardwise.hf import export, task
from shardwise.hf.folder_tensors import INDEX, SINGLE, Checkpoint
from shardwise.layout import Plan
from shardwise.ranks import RankPool

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")


def llama(**changes: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    return transformers.LlamaConfig(**{**sizes, **changes})


def mixtral() -> Any:
    return transformers.MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
                                      num_experts_per_tok=2)  # fmt: skip


def bert() -> Any:
    return transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                   intermediate_size=32, max_position_embeddings=32,
                                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


def t5() -> Any:
    return transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                                 dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)  # fmt: skip


def vit() -> Any:
    return transformers.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                                  image_size=8, patch_size=4, num_channels=3, num_labels=5,
                                  hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


def tokens(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 64, (5, 9), generator=g)
    labels = ids.masked_fill(torch.rand(5, 9, generator=g) < 0.3, -100)
    return {"input_ids": ids, "labels": labels}


def pixels(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {"pixel_values": torch.randn(5, 3, 8, 8, generator=g), "labels": torch.randint(0, 5, (5,), generator=g)}


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05)


def saved(config: Any, head: Any, folder: Path, **options: Any) -> Path:
    """A checkpoint folder as transformers writes it."""
    torch.manual_seed(1)
    head.from_config(config).save_pretrained(str(folder), **options)
    return folder


HEADS = {
    "causal-lm": (llama, "AutoModelForCausalLM", tokens),
    "tied": (partial(llama, tie_word_embeddings=True), "AutoModelForCausalLM", tokens),
    "masked-lm": (bert, "AutoModelForMaskedLM", tokens),
    "seq2seq": (t5, "AutoModelForSeq2SeqLM", tokens),
    "experts": (mixtral, "AutoModelForCausalLM", tokens),  # merged when they are read
    "image-classification": (vit, "AutoModelForImageClassification", pixels),
}


# tied weights, merged tensors and renamed ones; the rest under `long`
OFTEN = [name if name in ("tied", "experts", "image-classification") else pytest.param(name, marks=pytest.mark.long)
         for name in HEADS]  # fmt: skip


def made(name: str, folder: Path) -> Task:
    config, head, batch = HEADS[name]
    saved(config(), getattr(transformers, head), folder)
    return task(folder, "causal-lm" if name in ("tied", "experts") else name, batch=batch, optimizer=sgd,
                branches="per_sample" if name == "experts" else "same")  # fmt: skip


@pytest.mark.parametrize("name", OFTEN)
def test_a_checkpoint_trains_like_one_process(name: str, pool: RankPool, tmp_path: Path) -> None:
    parity = verify(made(name, tmp_path / "model"), "dp_shard=2,zero=3", pool=pool, timeout_s=120)
    assert parity.parity, parity.text()


def first_values(given: Task, plan: str) -> dict[str, torch.Tensor]:
    return parallelize(given, plan).state_dict()


@pytest.mark.parametrize("name", HEADS)
def test_the_weights_are_those_of_the_folder(name: str, pool: RankPool, tmp_path: Path) -> None:
    given = made(name, tmp_path / "model")
    expected = getattr(transformers, HEADS[name][1]).from_pretrained(str(tmp_path / "model")).state_dict()
    for state in pool.run(first_values, 2, given, "dp_shard=2,zero=3"):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())


def trained(given: Task, plan: str, out: str, source: Any, options: dict) -> torch.Tensor:
    """Five steps, an export, and the logits of the trained engine."""
    engine = parallelize(given, plan)
    for step in range(5):
        engine.step(given.batch(step))
    export(engine, out, source, **options)
    engine.module.eval()
    with torch.no_grad():
        return engine.module(**given.inputs(given.batch(99))[1]).logits


def logits_of(folder: str, head: str, given: Task) -> torch.Tensor:
    """As anybody would load and run the model."""
    model = getattr(transformers, head).from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**given.inputs(given.batch(99))[1]).logits


@pytest.mark.parametrize(
    ("name", "plan", "options"),
    [
        ("causal-lm", "dp_shard=2,zero=3", {"file_bytes": 8000}),
        ("tied", "dp_shard=2,zero=3", {}),
        pytest.param("masked-lm", "dp_shard=2,zero=2", {}, marks=pytest.mark.long),
        pytest.param("seq2seq", "dp_shard=3,zero=3", {}, marks=pytest.mark.long),
        ("experts", "dp_shard=2,zero=3", {"file_bytes": 20000}),
        ("image-classification", "dp_replicate=2", {}),
    ],
)
def test_an_export_is_read_by_from_pretrained(
    name: str, plan: str, options: dict, pool: RankPool, tmp_path: Path
) -> None:
    given, out = made(name, tmp_path / "model"), tmp_path / "out"
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    ranks = 3 if "=3,z" in plan else 2
    logits = pool.run(trained, ranks, given, plan, str(out), str(tmp_path / "model"), options, timeout_s=60)
    head = getattr(transformers, HEADS[name][1])
    model, told = head.from_pretrained(str(out), output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    own = pool.run(logits_of, 1, str(out), HEADS[name][1], given)[0]  # the same number of threads as a rank
    assert all(torch.equal(each, own) for each in logits)
    again = head.from_pretrained(str(tmp_path / "model"))
    again.save_pretrained(str(tmp_path / "theirs"))
    assert set(Checkpoint(out).files) == set(Checkpoint(tmp_path / "theirs").files)  # the names that others look for
    assert (out / "tokenizer.json").exists() and (out / INDEX).exists() == bool(options)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32"
    names = {path.name for path in out.glob("*.safetensors")}
    if options:
        assert f"model-00001-of-{len(names):05d}.safetensors" in names
    assert not list(tmp_path.glob(".*partial"))


def read_again(given: Task, plan: str, out: str, source: str) -> list[bool]:
    """After two steps and an export: whether each logit of `from_pretrained` is that of the engine's whole weights."""
    engine = parallelize(given, plan)
    for step in range(2):
        engine.step(given.batch(step))
    before = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    drawn = before.state_dict()
    weights = engine.state_dict()
    export(engine, out, source)
    again = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert not any(torch.equal(drawn[name], value) for name, value in weights.items() if name.endswith("proj.weight"))
    before.load_state_dict(weights)
    ids = given.batch(99)["input_ids"]
    with torch.no_grad():
        return [torch.equal(before(input_ids=ids).logits, again(input_ids=ids).logits)]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("causal-lm", "tp=2"),
        *(
            pytest.param("causal-lm", plan, marks=pytest.mark.long)
            for plan in (
                "single", "dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2,precision=bf16", "cp=2",
                "cp=2,tp=2", "pp=2,microbatches=2", "tp=2,dp_shard=2,zero=2", "pp=2,dp_shard=2,zero=1,microbatches=2",
                "pp=2,tp=2,microbatches=2", "cp=2,dp_shard=2,zero=3", "dp_replicate=2,dp_shard=2,zero=3",
            )
        ),
        *(
            pytest.param("experts", plan, marks=pytest.mark.long)
            for plan in ("dp_shard=2,ep=2", "dp_shard=4,ep=2,zero=3", "pp=2,microbatches=2")
        ),
        *(pytest.param("tied", plan, marks=pytest.mark.long) for plan in ("tp=2", "pp=2,microbatches=2")),
    ],
)  # fmt: skip
def test_an_export_of_any_plan_has_the_bits_of_its_weights(
    name: str, plan: str, pool: RankPool, tmp_path: Path
) -> None:
    given = made(name, tmp_path / "model")
    folder = str(tmp_path / "model")
    found = pool.run(read_again, Plan.parse(plan).world_size, given, plan, str(tmp_path / "out"), folder, timeout_s=120)
    assert all(all(own) for own in found)


def test_another_dtype_and_a_file_of_weights(tmp_path: Path, pool: RankPool) -> None:
    given = made("tied", tmp_path / "model")
    pool.run(saved_weights, 2, given, str(tmp_path / "weights.safetensors"))
    out = export(tmp_path / "weights.safetensors", tmp_path / "out", tmp_path / "model", dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(out))
    assert model.dtype == torch.bfloat16
    with pytest.raises(InputError, match="exists: export writes a new folder"):
        export(tmp_path / "weights.safetensors", out, tmp_path / "model")


def test_weights_that_would_not_be_found_again_are_refused(tmp_path: Path) -> None:
    made("tied", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = next(iter(weights))
    wrapped = {f"base_model.model.{key}": value for key, value in weights.items()}
    cases = [
        (
            {**weights, f"{name}.lora_A.default.weight": weights[name].clone()},
            "have .*lora_A.*merge=True merges the adapters",
        ),
        (wrapped, r"lack .* and have base_model"),
        ({key: value for key, value in weights.items() if key != name}, f"lack .*{name}"),
    ]
    for number, (given, words) in enumerate(cases):
        save_file(given, tmp_path / f"{number}.safetensors")
        with pytest.raises(InputError, match=words):
            export(tmp_path / f"{number}.safetensors", tmp_path / "out", tmp_path / "model")
    assert not (tmp_path / "out").exists()


def saved_weights(given: Task, path: str) -> None:
    parallelize(given, "dp_shard=2,zero=3").save_weights(path)


def test_a_base_model_gets_a_new_head(tmp_path: Path, pool: RankPool) -> None:
    torch.manual_seed(0)
    transformers.BertModel(bert(), add_pooling_layer=False).save_pretrained(str(tmp_path / "base"))
    with pytest.raises(InputError, match=r"lacks 5 of the model's 42 tensors: .*cls\.predictions.*Give new=True"):
        task(tmp_path / "base", "masked-lm", batch=tokens)
    given = task(tmp_path / "base", "masked-lm", batch=tokens, new=True)
    (state, _) = pool.run(first_values, 2, given, "dp_shard=2,zero=3")
    base = transformers.BertModel.from_pretrained(str(tmp_path / "base"), add_pooling_layer=False).state_dict()
    assert all(torch.equal(state[f"bert.{name}"], value) for name, value in base.items())


def test_weights_are_drawn_for_a_configuration(pool: RankPool) -> None:
    given = task(llama(), batch=tokens)
    alone, two = pool.run(first_values, 1, given, "single"), pool.run(first_values, 2, given, "dp_shard=2,zero=3")
    assert all(torch.equal(two[1][name], value) for name, value in alone[0].items())


def held_while_loading(given: Task, plan: str) -> tuple[int, int]:
    """Anonymous memory at the peak of building, beyond what was held before, and bytes of this rank's shard."""

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    parallelize(task(llama(), batch=tokens), plan).step(tokens(0))  # what torch allocates once
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        engine = parallelize(given, plan, check_loss=False)
    finally:
        done.set()
        thread.join()
    return peak - before, sum(slot.master.nbytes for slot in engine.technique.slots)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc, where a process's memory is told")
def test_a_rank_holds_its_shard_and_a_block_while_loading(tmp_path: Path, pool: RankPool) -> None:
    config = llama(hidden_size=384, intermediate_size=1536, num_hidden_layers=12, vocab_size=512)
    given = task(saved(config, transformers.AutoModelForCausalLM, tmp_path / "model"), batch=tokens)
    block = (2 * 384 * 384 + 2 * 384 * 192 + 3 * 384 * 1536) * 4
    for peak, shard in pool.run(held_while_loading, 2, given, "dp_shard=2,zero=3", timeout_s=120):
        assert shard > 5 * block
        assert peak <= 1.2 * shard + block, f"{peak / 1e6:.1f} MB at the peak, shard {shard / 1e6:.1f} MB"


# --- bad input


def broken(folder: Path, how: str) -> Path:
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "missing shard":
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif how == "cut shard":
        path = folder / "model-00001-of-00002.safetensors"
        path.write_bytes(path.read_bytes()[:100])
    elif how == "bad index":
        (folder / INDEX).write_text("{")
    elif how == "pickle":
        for path in (*folder.glob("*.safetensors"), folder / INDEX):
            path.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif how == "other sizes":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    elif how == "other model":
        saved(vit(), transformers.AutoModelForImageClassification, folder / "vit")
        (folder / "vit" / "config.json").write_text((folder / "config.json").read_text())
        return folder / "vit"
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no config", r"has no config\.json"),
        ("missing shard", r"model-00002-of-00002\.safetensors is missing: .* holds \d+ of \d+ tensors"),
        ("cut shard", r"model-00001-of-00002\.safetensors cannot be read as safetensors"),
        ("bad index", rf"{INDEX} cannot be read"),
        ("pickle", r"has neither .*pytorch_model\.bin is a pickle"),
        ("other sizes", r"'model.layers.0.mlp.down_proj.weight' has shape \(16, 32\), but the model's has \(16, 48\)"),
        ("other model", "holds none of the model's tensors: it is another model's"),
    ],
)
def test_bad_folders_are_named(how: str, words: str, tmp_path: Path) -> None:
    folder = saved(llama(), transformers.AutoModelForCausalLM, tmp_path / "model", max_shard_size="20kB")
    assert not (folder / SINGLE).exists()
    with pytest.raises(InputError, match=words):
        parallelize(task(broken(folder, how), batch=tokens))


def test_heads_that_are_not_there() -> None:
    with pytest.raises(
        InputError, match=r"LlamaConfig has no model with the head 'seq2seq' .* it has causal-lm, token-"
    ):
        parallelize(task(llama(), "seq2seq", batch=tokens))
    with pytest.raises(InputError, match="did you mean 'causal-lm'"):
        task(llama(), "causal_lm", batch=tokens)


def test_packed_text_goes_in_as_it_is(tmp_path: Path, pool: RankPool) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * (i % 4), "completion": "b c"}) + "\n" for i in range(30)))
    data = JsonlSource(path, 24)
    parity = verify(task(llama(vocab_size=256), data=data), "dp_replicate=2", pool=pool)
    assert parity.parity, parity.text()
