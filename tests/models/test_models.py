"""The reference models and the tasks on them, on one process."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.errors import InputError
from shardwise.layout.dealing import cut
from shardwise.models import (
    GPT2,
    MLP,
    Decoder,
    DecoderConfig,
    GPT2Config,
    MLPConfig,
    UNet,
    UNetConfig,
    ViT,
    ViTConfig,
    generate,
    tasks,
)
from shardwise.models.decoder import rotate, turns
from shardwise.step.task_optimizer import named_groups

TASKS = [
    tasks.decoder, tasks.decoder_tied, tasks.decoder_dropout, tasks.gpt2, tasks.vit, tasks.unet_group,
    tasks.unet_batchnorm, tasks.mlp, tasks.mlp_frozen_unused, tasks.hf_llama, tasks.hf_vit,
]  # fmt: skip
every_task = pytest.mark.parametrize("make", TASKS, ids=lambda make: make.__name__)

SMALL = DecoderConfig(vocab=13, hidden=16, layers=2, heads=4, kv_heads=2, intermediate=20, context=8)
SMALL_GPT2 = GPT2Config(vocab=13, hidden=16, layers=2, heads=2, context=8)
language_models = pytest.mark.parametrize(
    "make", [lambda: Decoder(SMALL), lambda: GPT2(SMALL_GPT2)], ids=["decoder", "gpt2"]
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def build(make):
    if make.__name__.startswith("hf_"):
        pytest.importorskip("transformers", reason="needs pip install 'shardwise[hf]'")
    task = make()
    return task, task.model()


def run(task, model, batch):
    args, kwargs = task.inputs(batch)
    return task.loss(model(*args, **kwargs), batch)


def count(model):
    return sum(p.numel() for p in model.parameters())


# --- models ---


@language_models
def test_the_language_models_give_logits_for_every_token(make):
    tokens = torch.randint(13, (3, 5))
    assert make()(tokens).shape == (3, 5, 13)


@language_models
def test_a_token_does_not_see_those_after_it(make):
    model = make().eval()
    tokens = torch.randint(13, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (tokens[:, 4:] + 1) % 13
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_rotary_scores_depend_on_the_distance_alone():
    cos, sin = turns(SMALL, 8, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)

    def score(i, j):
        turned = [rotate(x, cos[n : n + 1], sin[n : n + 1]) for x, n in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum()

    # The tables are float32 values, so angles agree to its rounding.
    torch.testing.assert_close(score(3, 1), score(6, 4), atol=1e-5, rtol=0)
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3


@language_models
def test_more_tokens_than_the_context_are_refused(make):
    with pytest.raises(ValueError, match="context of 8"):
        make()(torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize("shape", [(8, 8), (9, 7), (5, 1), (13, 10)])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_the_unet_keeps_every_size(norm, shape):
    model = UNet(UNetConfig(channels=2, out_channels=3, width=4, depth=3, norm=norm, groups=2))
    assert model(torch.randn(2, 2, *shape)).shape == (2, 3, *shape)


def test_the_vit_and_the_mlp_give_one_row_per_sample():
    assert ViT(ViTConfig(channels=2, classes=7))(torch.randn(3, 2, 8, 8)).shape == (3, 7)
    assert MLP(MLPConfig(features=5, outputs=2))(torch.randn(3, 5)).shape == (3, 2)


def test_a_tied_head_is_the_embedding():
    tied, untied = Decoder(replace(SMALL, tied=True)), Decoder(SMALL)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    assert count(untied) - count(tied) == 13 * 16
    gpt2 = GPT2(SMALL_GPT2)
    assert gpt2.head.weight is gpt2.embedding.weight


def test_rotary_tables_are_no_state():
    assert not list(Decoder(SMALL).buffers())


def test_residual_projections_start_smaller_with_depth():
    config = DecoderConfig(hidden=128, layers=8, intermediate=256)
    block = Decoder(config).blocks[3]
    for weight in (block.attention.out.weight, block.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    for weight in (block.attention.query.weight, block.up.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_the_presets_have_the_sizes_they_state():
    assert count(Decoder(DecoderConfig.preset("nano"))) == 1_049_728
    with torch.device("meta"):
        assert count(Decoder(DecoderConfig.preset("1b"))) == 1_235_814_400
        assert count(GPT2(GPT2Config())) == 124_439_808
    with pytest.raises(ValueError, match="nano, 1b"):
        DecoderConfig.preset("2b")


@pytest.mark.parametrize(
    "config",
    [
        lambda: DecoderConfig(hidden=30, heads=4),
        lambda: DecoderConfig(heads=4, kv_heads=3),
        lambda: GPT2Config(hidden=10, heads=3),
        lambda: ViTConfig(image=9, patch=2),
        lambda: ViTConfig(hidden=10, heads=4),
        lambda: UNetConfig(norm="layer"),
        lambda: UNetConfig(width=6, groups=4),
        lambda: MLPConfig(layers=0),
    ],
)
def test_shapes_that_do_not_fit_are_refused(config):
    with pytest.raises(ValueError):
        config()


def test_dropout_is_in_training_alone():
    dropped = (
        (Decoder(replace(SMALL, dropout=0.5)), torch.randint(13, (2, 5))),
        (GPT2(replace(SMALL_GPT2, dropout=0.5)), torch.randint(13, (2, 5))),
        (ViT(ViTConfig(dropout=0.5)), torch.randn(2, 1, 8, 8)),
    )
    for model, x in dropped:
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_generate_appends_and_repeats_itself_from_a_seed():
    model = Decoder(replace(SMALL, dropout=0.5))
    tokens = torch.randint(13, (2, 3))

    def sample(seed, temperature=1.0):
        return generate(model, tokens, 9, temperature, torch.Generator().manual_seed(seed))

    first = sample(1)
    assert first.shape == (2, 12)  # past the context of 8
    assert torch.equal(first[:, :3], tokens)
    assert torch.equal(first, sample(1))
    assert not torch.equal(first, sample(2))
    assert torch.equal(sample(1, temperature=0), sample(2, temperature=0))
    assert model.training
    assert generate(model, tokens, 0).shape == (2, 3)


# --- tasks ---


@every_task
def test_a_batch_is_a_function_of_the_step(make):
    task, _ = build(make)
    first, again, other = (tree_leaves(task.batch(step)) for step in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    sizes = {len(leaf) for leaf in first}
    assert len(sizes) == 1 and 6 <= sizes.pop() <= 8


@every_task
def test_a_task_survives_pickling(make):
    task, _ = build(make)
    copy = pickle.loads(pickle.dumps(task))
    assert copy.name == task.name == make.__name__


@every_task
def test_a_model_on_meta_has_the_same_tensors(make):
    task, model = build(make)
    with torch.device("meta"):
        deferred = task.model()
    for kind in ("named_parameters", "named_buffers"):
        real, meta = dict(getattr(model, kind)()), dict(getattr(deferred, kind)())
        assert list(real) == list(meta)
        for name, tensor in real.items():
            assert (meta[name].shape, meta[name].dtype) == (tensor.shape, tensor.dtype), name
            assert meta[name].is_meta, name


@every_task
def test_gradients_reach_every_parameter(make):
    task, model = build(make)
    run(task, model, task.batch(0))[0].backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    expected = {"layers.0.weight", "layers.0.bias", "unused.weight", "unused.bias"}
    assert without == (expected if make is tasks.mlp_frozen_unused else set())
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert p.grad.isfinite().all(), name
            zero_in_exact_numbers = name.endswith(("key.bias", "k_proj.bias"))
            assert zero_in_exact_numbers or p.grad.any(), name


@every_task
def test_the_loss_adds_up_over_unequal_parts(make):
    task, model = build(make)
    model.double().eval()
    batch = tree_map(lambda t: t.double() if t.is_floating_point() else t, task.batch(0))
    size = len(tree_leaves(batch)[0])
    total, weight = run(task, model, batch)
    low, high = cut(size, 3, 0)
    summed, weights = 0.0, 0
    for start, stop in ((low, high), (high, size)):
        part_sum, part_weight = run(task, model, tree_map(lambda t, a=start, b=stop: t[a:b], batch))
        summed, weights = summed + part_sum, weights + part_weight
    assert int(weight) == int(weights) > 0
    torch.testing.assert_close(summed, total, rtol=1e-12, atol=1e-12)


@every_task
def test_a_few_steps_lower_the_loss(make):
    task, model = build(make)
    optimizer = task.optimizer(named_groups([p for p in model.parameters() if p.requires_grad]))
    batch = task.batch(0)
    model.eval()
    before = run(task, model, batch)[0].item()
    model.train()
    for _ in range(8):
        total, weight = run(task, model, batch)
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    assert run(task, model.eval(), batch)[0].item() < before


def test_samples_of_tokens_differ_in_weight():
    labels = tasks.decoder().batch(0)["labels"]
    weights = (labels[:, 1:] != tasks.IGNORED).sum(1)
    assert weights.unique().numel() > 1


def test_gpt2_decays_matrices_only():
    task = tasks.gpt2()
    optimizer = task.optimizer(named_groups(list(task.model().parameters())))
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in spared["params"])


@pytest.mark.parametrize("make", [tasks.hf_llama, tasks.hf_vit], ids=lambda make: make.__name__)
def test_missing_transformers_say_how_to_get_them(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'shardwise\[hf\]'"):
        make()
