"""Configurations that widths and heads do not describe: built by transformers without values, and traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import InputError, Task, hf
from shardwise.cli.main import call
from shardwise.cluster import Cluster
from shardwise.cluster.catalogue import configuration
from shardwise.layout import Plan
from shardwise.planner.configured_task import configured
from shardwise.planner.decoders import FAMILIES
from shardwise.planner.door import layout_of, plan, simulate, subject_of
from shardwise.planner.subject import Subject
from shardwise.rehearsal.step_trace import trace

transformers = pytest.importorskip("transformers")

PAIR = Cluster.parse("1x2 h100-sxm-80gb")
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 96,
        "max_position_embeddings": 64}  # fmt: skip
IMAGE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 32,
         "patch_size": 8}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_ffn_dim": 48,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "vocab_size": 96, "pad_token_id": 1}  # fmt: skip
LATENT = {**TEXT, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
          "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip


def written(folder: Path, kind: str, architecture: str | None = None, **sizes: Any) -> str:
    """The path of a `config.json`."""
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    config.architectures = None if architecture is None else [architecture]
    path = folder / "config.json"
    config.to_json_file(path, use_diff=False)
    return str(path)


def alone(path: str, seq: int | None = None) -> Subject:
    """The subject of one plan: traced once."""
    return subject_of(path, PAIR, global_batch=2, seq=seq, plan=Plan(precision="bf16"))


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "seq", "sample", "head"),
    [
        ("bert", "BertForMaskedLM", TEXT, 16, "input_ids 16, labels 16", "masked-lm"),
        ("bert", "BertForSequenceClassification", TEXT, 16, "input_ids 16, labels 1", "sequence-classification"),
        ("bart", "BartForConditionalGeneration", BART, 16, "input_ids 16, labels 16", "seq2seq"),
        ("vit", "ViTForImageClassification", IMAGE, None, "pixel_values 3 x 32 x 32, labels 1", "image-classification"),
        ("whisper", "WhisperForConditionalGeneration", {**BART, "num_mel_bins": 8, "max_source_positions": 10,
                                                          "decoder_start_token_id": 2}, 16,
         "input_features 8 x 20, labels 16", "speech-seq2seq"),
        ("glm4_moe_lite", "Glm4MoeLiteForCausalLM", LATENT, 16, "input_ids 16, labels 16", "causal-lm"),
        ("mamba", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4},
         16, "input_ids 16, labels 16", "causal-lm"),
    ],
)  # fmt: skip
def test_a_model_is_traced_as_transformers_builds_it(
    tmp_path: Path, kind: str, architecture: str, sizes: dict, seq: int | None, sample: str, head: str
) -> None:
    path = written(tmp_path, kind, architecture, **sizes)
    subject = alone(path, seq)
    assert (subject.sample, subject.head, subject.own) == (sample, head, True)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(path))
    task = configured(path, seq).tasks[0]
    assert trace(task, 1).parameters == sum(parameter.numel() for parameter in model.parameters())
    assert subject.simulate(layout_of(Plan.parse("dp_replicate=2,precision=bf16"), subject)).step_s > 0


class OwnConfig(transformers.PretrainedConfig):
    model_type = "shardwise-test"

    def __init__(self, width: int = 16, vocab_size: int = 48, **rest: Any) -> None:
        super().__init__(**rest)
        self.width, self.vocab_size = width, vocab_size


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.out = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return transformers.modeling_outputs.CausalLMOutput(logits=self.out(self.table(input_ids)))


def test_a_model_type_that_nobody_knows_is_traced(tmp_path: Path) -> None:
    transformers.AutoConfig.register("shardwise-test", OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnModel, exist_ok=True)
    path = tmp_path / "config.json"
    OwnConfig(architectures=["OwnModel"]).to_json_file(path, use_diff=False)
    subject = alone(str(path), 8)
    assert (subject.head, subject.remarks) == ("causal-lm", [])
    products = 3 * 2 * 8 * 16 * 48  # of one matrix: forward, and two in backward
    assert subject.simulate(layout_of(Plan(precision="bf16"), subject)).flops == 2 * products


def test_numbers_that_are_not_those_of_the_model_give_way_to_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "llama", "LlamaForCausalLM", **TEXT)
    assert not alone(path, 16).own
    monkeypatch.setitem(FAMILIES, "llama", FAMILIES["gpt2"])
    subject = alone(path, 16)
    assert subject.own and "LlamaForCausalLM has" in subject.remarks[0]


@pytest.mark.parametrize(
    ("kind", "sizes", "seq", "told"),
    [
        ("vit", IMAGE, 16, "--seq: .* reads pixel_values 3 x 32 x 32"),
        ("bert", TEXT, None, "reads tokens: give --seq"),
        (
            "gpt2",
            {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 64, "add_cross_attention": True},
            65,
            "of 64 rows",
        ),
        ("wav2vec2", {"hidden_size": 32, "num_hidden_layers": 1}, None, "reads a waveform: give --seq"),
        ("blip_text_model", {}, 16, "one of the heads known here .*, nor without"),
    ],
)
def test_sizes_that_do_not_apply_are_refused(
    tmp_path: Path, kind: str, sizes: dict, seq: int | None, told: str
) -> None:
    with pytest.raises(InputError, match=told):
        alone(written(tmp_path, kind, **sizes), seq)


def test_a_batch_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give --global-batch"):
        plan(written(tmp_path, "vit", **IMAGE), PAIR)


def test_what_was_taken_for_granted_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    assert [note.split(": ")[1] for note in configured(path, None).notes][1].startswith("no size of images")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 64, "width": 96}}))
    assert configured(path, None).samples == ("pixel_values 3 x 64 x 96, labels 1",)


def test_the_command_names_a_task_that_is_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "bert", "BertForMaskedLM", **TEXT)
    where = ("--cluster", "1 h100-sxm-80gb", "--global-batch", "2", "--seq", "16", "--fix", "remat=none")
    assert call(["plan", path, *where]) == 0
    told = capsys.readouterr().out
    assert "2 samples of input_ids 16, labels 16" in told and "shardwise train MODULE:TASK --plan" in told
    way = next(line for line in told.splitlines() if line.startswith("MODULE:TASK is")).partition(": ")[2]
    made = way.partition(", data=...")[0] + ", batch=dict)"
    task = eval(made, {"hf": hf, "AutoConfig": transformers.AutoConfig, "dict": dict})
    assert type(task.model()).__name__ == "BertForMaskedLM"


CLIP = {"text_config": {**TEXT, "projection_dim": 16}, "vision_config": {**IMAGE, "projection_dim": 16}}


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "seq", "sample"),
    [
        ("bert", "BertModel", TEXT, 16, "input_ids 16"),
        ("bert", "BertForQuestionAnswering", TEXT, 16, "input_ids 16"),
        ("clip_vision_model", None, IMAGE, None, "pixel_values 3 x 32 x 32"),
        ("clip", "CLIPModel", CLIP, 16, "input_ids 16, pixel_values 3 x 32 x 32"),
        ("t5", "T5Model", {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 96},
         16, "input_ids 16, decoder_input_ids 16"),
    ],
)  # fmt: skip
def test_a_model_without_a_head_is_planned_with_a_made_up_loss(
    tmp_path: Path, kind: str, architecture: str | None, sizes: dict, seq: int | None, sample: str
) -> None:
    path = written(tmp_path, kind, architecture, **sizes)
    found = alone(path, seq)
    assert (found.head, found.sample) == ("base", sample)
    assert any("made-up loss" in each for each in found.remarks)
    assert architecture is None or any(architecture in each for each in found.remarks)
    assert not any("no gradient reaches" in each for each in found.remarks), "all of its outputs count"
    forecast = found.simulate(layout_of(Plan(precision="bf16"), found))
    assert forecast.step_s > 0 and forecast.mfu > 0


class _Absent(type):
    """Of transformers' stand-ins for classes whose library is not installed: to ask one for anything raises."""

    def __getattribute__(cls, name: str):
        if name == "forward":
            raise ImportError("Absent requires the torchaudio library but it was not found in your environment.")
        return super().__getattribute__(name)


def test_a_class_whose_library_is_absent_is_refused_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.planner.configured_task.base_class", lambda config: _Absent("Absent", (), {}))
    with pytest.raises(InputError, match="Absent requires the torchaudio library"):
        alone(written(tmp_path, "clip_vision_model", **IMAGE), None)


def test_a_made_up_loss_says_how_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "clip_vision_model", **IMAGE)
    where = ("--cluster", "1 h100-sxm-80gb", "--global-batch", "2", "--fix", "remat=none")
    assert call(["plan", path, *where]) == 0
    told = capsys.readouterr().out
    assert "a task of your own with your head, loss and data around AutoModel" in told
    assert "planned as CLIPVisionModel, with a made-up loss" in told
    assert call(["simulate", path, "--plan", "precision=bf16", *where[:4], "--json"]) == 0
    assert "planned as CLIPVisionModel" in json.loads(capsys.readouterr().out)["notes"][0]


class Reads(nn.Module):
    """Four terabytes, after a look at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(2**20, 2**20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.rate


def test_a_constructor_that_reads_values_takes_no_memory_and_idle_parameters_are_counted() -> None:
    task = Task(model=Reads, loss=lambda out, batch: (out.sum(), len(out)), batch=lambda step: torch.zeros(2, 4))
    found = trace(task, 1)
    assert (found.parameters, found.idle) == (2**40 + 20, 2**40)


def test_from_python_a_configuration_is_simulated(tmp_path: Path) -> None:
    path = written(tmp_path, "vit", "ViTForImageClassification", **IMAGE)
    one, two = (simulate(path, "single", PAIR, global_batch=count) for count in (2, 4))
    assert two.flops == 2 * one.flops


class Grouped(nn.Module):
    """Four experts, of which each row sees one: one product of groups of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(4, 16, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1) * self.scale
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(rows) // 4)
        return nn.functional.grouped_mm(rows, self.weight, offs=ends)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_products_of_groups_are_counted(precision: str) -> None:
    """In forward, for what went in, and for the weights: each row meets one expert in each."""
    task = Task(
        model=Grouped, loss=lambda out, batch: (out.float().sum(), len(out)),
        batch=lambda step: torch.zeros(1, 32, 16),
    )  # fmt: skip
    assert trace(task, 1, precision).flops == 3 * 2 * 32 * 16 * 24


class Skips(nn.Module):
    """A layer that is left out at random, as in layerdrop."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.layer, self.chance = nn.Linear(4, 4), chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.requires_grad_() * 2 if torch.rand([]) < self.chance else self.layer(x)


@pytest.mark.parametrize(("chance", "runs"), [(0.1, True), (0.9, False)])
def test_a_layer_that_is_left_out_at_random_goes_the_likelier_way(chance: float, runs: bool) -> None:
    task = Task(
        model=lambda: Skips(chance), loss=lambda out, batch: (out.sum(), len(out)), batch=lambda step: torch.zeros(2, 4)
    )
    found = trace(task, 1)
    assert found.drawn and (found.flops > 0) is runs and (found.idle == 0) is runs


def test_pictures_beside_labels_for_tokens_are_refused_by_name(tmp_path: Path) -> None:
    """pp_formulanet reads pixels and is told the next token; it ended in an `UnboundLocalError`."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "pp_formulanet"}))
    with pytest.raises(InputError, match="pixel_values and labels for tokens"):
        configured(str(tmp_path / "config.json"), 128)


# --- models that are no decoders, by name: parameters in millions, as their authors publish them
NAMED = {
    "bert-base": 110, "bert-large": 335, "roberta-base": 125, "roberta-large": 355, "t5-small": 60.5, "t5-base": 223,
    "t5-large": 738, "t5-3b": 2852, "t5-11b": 11307, "vit-base": 86.6, "vit-large": 304, "vit-huge": 633,
    "resnet-50": 25.6, "resnet-101": 44.5, "resnet-152": 60.2, "whisper-small": 242, "whisper-large": 1543,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_packaged_configuration_is_the_model_of_its_name(name: str) -> None:
    keys = configuration(name)
    assert keys is not None
    config = transformers.AutoConfig.for_model(**keys)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(NAMED[name], rel=0.015)


def test_a_model_that_is_no_decoder_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """ResNet-50 in float32 on a V100: 356 images a second (NVIDIA/DeepLearningExamples, ConvNets/resnet50v1.5)."""
    forecast = simulate("resnet50", "precision=fp32", "1 v100-sxm2-32gb", global_batch=256)
    assert forecast.samples_per_s == pytest.approx(356, rel=0.12)
    assert call(["plan", "bert-base", "--seq", "16", "--cluster", "1 v100-sxm2-32gb", "--global-batch", "2"]) == 0
    assert "hf.task(AutoConfig.for_model('bert', architectures=['BertForMaskedLM'])" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"did you mean 'bert-large'\?; nothing is fetched from a hub: any other"):
        simulate("bert-larg", "precision=bf16", "1 v100-sxm2-32gb", global_batch=2)


RESNET = {"embedding_size": 64, "hidden_sizes": [64, 128], "depths": [1, 1], "layer_type": "basic"}


def test_images_are_in_channels_last_on_accelerators(tmp_path: Path) -> None:
    """As NVIDIA/DeepLearningExamples has its nets of convolutions; transformers' own modules are turned on the way."""
    path = written(tmp_path, "resnet", "ResNetForImageClassification", **RESNET)

    def seconds(cluster: str, last: bool | None) -> float:
        return simulate(path, "dp_replicate=1", cluster, global_batch=64, channels_last=last).parts["compute"]

    gpu = "1 a100-sxm-80gb"
    assert seconds(gpu, None) == seconds(gpu, True) < 0.8 * seconds(gpu, False)
    told = subject_of(path, Cluster.parse(gpu), global_batch=2, plan=Plan(precision="bf16")).remarks
    assert any("memory_format=torch.channels_last" in text for text in told)
    model = configured(path, None, channels_last=True).tasks[0].model()
    assert model.resnet.embedder.embedder.convolution.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("task", ["gpt2", "bert-large"])
def test_a_layout_of_images_is_refused_where_there_are_none(task: str) -> None:
    with pytest.raises(InputError, match="--channels-last is for the images"):
        simulate(task, "dp_replicate=1", "1 a100-sxm-80gb", global_batch=2, seq=16, channels_last=True)
