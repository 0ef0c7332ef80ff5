"""A folder's weights stay the folder's, whatever wraps, edits or extends its model, under every plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise import Task, parallelize
from shardwise.digest import digest
from shardwise.errors import InputError
from shardwise.hf import task
from shardwise.hf.folder_tensors import Checkpoint
from shardwise.layout import Plan
from shardwise.ranks import RankPool
from shardwise.trace.deferred import Built, build

transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed here")
peft = pytest.importorskip("peft", reason="needs peft, which is not installed here")

TEXT = {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: transformers.LlamaConfig(**TEXT, intermediate_size=48, num_key_value_heads=1), "causal-lm"),
    "qwen3, tied": (
        lambda: transformers.Qwen3Config(**TEXT, intermediate_size=48, num_key_value_heads=1, head_dim=16,
                                         tie_word_embeddings=True), "causal-lm"),
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=160, n_embd=32, n_layer=2, n_head=2, n_positions=32), "causal-lm"),
    "gpt_neox": (lambda: transformers.GPTNeoXConfig(**TEXT, intermediate_size=64), "causal-lm"),
    "mixtral": (
        lambda: transformers.MixtralConfig(**TEXT, intermediate_size=32, num_key_value_heads=1, num_local_experts=4),
        "causal-lm"),
    "bert": (lambda: transformers.BertConfig(**TEXT, intermediate_size=64, max_position_embeddings=32), "masked-lm"),
    "t5": (
        lambda: transformers.T5Config(vocab_size=160, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                                      decoder_start_token_id=0, pad_token_id=0), "seq2seq"),
    "vit": (
        lambda: transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                                       image_size=8, patch_size=4, num_labels=5), "image-classification"),
}  # fmt: skip


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 160, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def made(name: str, folder: Path) -> tuple[Task, dict[str, torch.Tensor]]:
    """Returns the task of a folder that transformers wrote, and what `from_pretrained` reads from it, by name."""
    config, head = CONFIGS[name]
    kind = getattr(transformers, HEAD_CLASSES[head])
    torch.manual_seed(1)
    kind.from_config(config()).save_pretrained(str(folder))
    return task(folder, head, batch=tokens), dict(kind.from_pretrained(str(folder)).state_dict())


HEAD_CLASSES = {"causal-lm": "AutoModelForCausalLM", "masked-lm": "AutoModelForMaskedLM",
                "seq2seq": "AutoModelForSeq2SeqLM",
                "image-classification": "AutoModelForImageClassification"}  # fmt: skip


def adapted(base: nn.Module) -> nn.Module:
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))


class Scored(nn.Module):
    """A head of one's own over a model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.score = base, nn.Linear(4, 160)


class Distilled(nn.Module):
    """A frozen copy of a model beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = base, copy.deepcopy(base).requires_grad_(False)


def values_of(module: Task, seed: int = 0) -> tuple[Built, dict[str, torch.Tensor]]:
    """Returns the build, and every parameter's and kept buffer's first value by each of its names."""
    built = build(module.model, seed)
    by_id = {id(tensor): name for name, tensor in built._targets.items()}
    state = built.module.state_dict(keep_vars=True)
    return built, {name: built.value(by_id[id(tensor)]) for name, tensor in state.items() if id(tensor) in by_id}


def plain(name: str) -> str:
    """Returns the name without what wrappers put into it."""
    for part in ("base_model.model.", "base.", "student.", "teacher."):
        name = name.removeprefix(part)
    return name.replace(".base_layer", "")


@pytest.mark.parametrize("wrap", [adapted, Scored, Distilled], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrapped_model_keeps_its_weights(name: str, wrap: Any, tmp_path: Path) -> None:
    given, expected = made(name, tmp_path)
    built, values = values_of(given.with_(model=lambda: wrap(given.model())))
    # nothing is read while it is built; a copy of buffers goes past torch's operations, and then everything is
    assert not built.notice or (wrap is Distilled and "swaps storages" in built.notice)
    kept = {key: digest(value) for key, value in values.items() if plain(key) in expected}
    assert {plain(key) for key in kept} == expected.keys()
    assert all(mark == digest(expected[plain(key)]) for key, mark in kept.items())
    new, stored = built.drawn()
    assert (stored > 0) == (not built.notice) and all(plain(key) not in expected for key in new)
    assert bool(new) == (wrap is not Distilled)


def test_a_model_that_the_constructor_makes_is_the_folders(tmp_path: Path) -> None:
    given, expected = made("llama", tmp_path)
    config = CONFIGS["llama"][0]()
    ways: dict[str, Callable[[], nn.Module]] = {
        "configured": lambda: adapted(transformers.AutoModelForCausalLM.from_config(config)),
        "its class": lambda: transformers.LlamaForCausalLM(config),
        "loaded": lambda: adapted(transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path))),
        "by state": lambda: _by_state(config, tmp_path),
    }
    for way, model in ways.items():
        for other in (given.with_(model=model), task(tmp_path, batch=tokens, model=model)):
            _, values = values_of(other)
            same = [
                plain(key)
                for key, value in values.items()
                if digest(value) == digest(expected.get(plain(key), value[:0]))
            ]
            assert set(same) == expected.keys(), way


def test_a_class_around_the_folders_model_is_given_it(tmp_path: Path) -> None:
    _, expected = made("llama", tmp_path)
    built, values = values_of(task(tmp_path, batch=tokens, model=Distilled))
    assert isinstance(built.module, Distilled)
    assert {digest(value) for value in values.values()} == {digest(value) for value in expected.values()}
    own = task(tmp_path, batch=tokens, model=Distilled, loss=lambda output, batch: (output.sum(), 1))
    assert own.metrics is None and task(tmp_path, batch=tokens, model=Distilled).metrics is not None


def key_is(expected: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> bool:
    return key in expected and digest(value) == digest(expected[key])


def _by_state(config: Any, folder: Path) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def test_a_part_of_a_model_and_a_head_of_ones_own(tmp_path: Path) -> None:
    given, expected = made("llama", tmp_path)
    config = CONFIGS["llama"][0]()
    built, values = values_of(given.with_(model=lambda: Scored(transformers.AutoModel.from_config(config))))
    base = {key: value for key, value in values.items() if key.startswith("base.")}
    assert all(digest(value) == digest(expected[f"model.{plain(key)}"]) for key, value in base.items())
    assert sorted(built.drawn()[0]) == ["score.bias", "score.weight"]


def test_embeddings_that_grow_keep_their_rows(tmp_path: Path) -> None:
    given, expected = made("llama", tmp_path)

    def grown() -> nn.Module:
        model = given.model()
        model.resize_token_embeddings(170, mean_resizing=False)
        return model

    for _ in range(2):  # a constructor runs more than once, and its configuration stays
        _, values = values_of(given.with_(model=grown))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert values[name].shape == (170, 32)
            assert torch.equal(values[name][:160], expected[name])
            assert values[name][160:].abs().sum() > 0


def test_values_computed_from_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    given, expected = made("llama", tmp_path)
    dora = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    _, values = values_of(given.with_(model=lambda: peft.get_peft_model(given.model(), dora)))
    name = "model.layers.0.self_attn.q_proj"
    magnitude = values[f"base_model.model.{name}.lora_magnitude_vector.default.weight"]
    torch.testing.assert_close(magnitude, expected[f"{name}.weight"].norm(dim=1))


def first_values(given: Task, plan: str) -> tuple[dict[str, str], list[str]]:
    engine = parallelize(given, plan, check_loss=False)
    return {name: digest(value.cpu()) for name, value in engine.full_parameters()}, engine.notices


def adapted_task(folder: Path, name: str) -> Task:
    return task(folder, CONFIGS[name][1], batch=tokens, model=adapted)


PLANS = ("dp_shard=2,zero=3", "tp=2", "pp=2,microbatches=2", "cp=2", "dp_shard=2,zero=2")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(("llama", plan) for plan in PLANS),
        *(
            pytest.param(name, plan, marks=pytest.mark.long)
            for name in CONFIGS
            for plan in PLANS
            if name not in ("llama", "vit")
        ),
    ],
)  # fmt: skip
def test_a_plan_holds_the_folders_weights(name: str, plan: str, pool: RankPool, tmp_path: Path) -> None:
    _, expected = made(name, tmp_path)
    given = adapted_task(tmp_path, name)
    for marks, notices in pool.run(first_values, Plan.parse(plan).world_size, given, plan, timeout_s=120):
        held = {plain(key): mark for key, mark in marks.items() if plain(key) in expected}
        tied = {name for name, value in expected.items() if name not in held and digest(value) in held.values()}
        assert held.keys() | tied == expected.keys()
        assert all(mark == digest(expected[key]) for key, mark in held.items())
        assert any("are made by the constructor, from the seed" in word and "lora_A" in word for word in notices)


def test_weights_that_would_not_be_used_are_refused(tmp_path: Path) -> None:
    given, _ = made("llama", tmp_path)
    wider = transformers.LlamaConfig(**{**TEXT, "hidden_size": 64}, intermediate_size=48, num_key_value_heads=1)
    bert = CONFIGS["bert"][0]()
    cases: list[tuple[Callable[[], nn.Module], str]] = [
        (
            lambda: transformers.AutoModelForCausalLM.from_config(wider),
            r"would not be used: '.*' has shape \(160, 32\)",
        ),
        (
            lambda: transformers.AutoModelForMaskedLM.from_config(bert),
            "a BertConfig made the model, and the folder has a L",
        ),
        (lambda: nn.Linear(4, 4), "holds none of the model's tensors"),
    ]
    for model, words in cases:
        with pytest.raises(InputError, match=words):
            parallelize(given.with_(model=model), "single")
    drawn = given.with_(model=lambda: nn.Linear(4, 4), weights=None)
    assert build(drawn.model, 0).module.weight.shape == (4, 4)


def test_a_function_of_weights_that_knows_no_name_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(4, 4), "bias": torch.zeros(4)}, tmp_path / "w.safetensors")
    values = load_file(tmp_path / "w.safetensors")
    given = Task(model=partial(nn.Linear, 4, 4), loss=lambda o, b: (o.sum(), 4), weights=values.get,
                 batch=lambda step: torch.ones(2, 4))  # fmt: skip
    with pytest.raises(InputError, match=r"Task.weights gives a value for none of the model's 2 parameters \(0.weight"):
        parallelize(given.with_(model=lambda: nn.Sequential(nn.Linear(4, 4))), "single")


def test_a_file_is_read_without_being_mapped(tmp_path: Path) -> None:
    """Pages of a mapped file stay in the resident set: a rank would hold the folder, and not its share."""
    tensors = {"a": torch.randn(300, 7000).bfloat16(), "b": torch.tensor(3.0), "c": torch.arange(5), "d": torch.ones(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for name, expected in tensors.items():
        assert digest(checkpoint.read(name)) == digest(expected)
        assert checkpoint.outline(name).shape == expected.shape and checkpoint.outline(name).dtype == expected.dtype
    assert digest(checkpoint.read("a", torch.float32)) == digest(tensors["a"].float())
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
