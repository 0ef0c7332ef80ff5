"""Which parts of a module are its blocks: found by structure alone, or named by the user."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise import Plan, parallelize, verify
from shardwise.errors import InputError
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.trace.blocks import FINE_ELEMENTS, choose_blocks, find_blocks


def model(name: str) -> nn.Module:
    return getattr(tasks, name)().model()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.q(x) * self.k(x) * self.v(x))


class Stage(nn.Module):
    """A stage as in Swin: repeated blocks and a way down."""

    def __init__(self, width: int, depth: int, down: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.down = nn.Linear(width, 2 * width) if down else nn.Identity()


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 16)
        self.stages = nn.ModuleList([Stage(16, 2, True), Stage(32, 2, True), Stage(64, 4, False)])
        self.head = nn.Linear(64, 5)


# --- found


def test_a_decoder_has_its_layers() -> None:
    found = find_blocks(model("decoder"))
    assert found.paths == tuple(f"blocks.{i}" for i in range(4))
    assert not found.warnings


def test_transformers_models_have_their_layers() -> None:
    assert find_blocks(model("hf_llama")).paths == ("model.layers.0", "model.layers.1")
    paths = find_blocks(model("hf_vit")).paths
    assert len(paths) == 2 and all(path.rsplit(".", 1)[1] in "01" for path in paths)


def test_a_unet_has_its_stages() -> None:
    module = model("unet_group")
    found = find_blocks(module)
    assert {"downs.0", "ups.0", "ups.1"} <= set(found.paths)
    covered = sum(p.numel() for path in found.paths for p in module.get_submodule(path).parameters())
    assert covered > 0.7 * sum(p.numel() for p in module.parameters())


def test_a_unet_has_no_norms_for_units() -> None:
    module = model("unet_group")
    assert nn.GroupNorm not in {type(module.get_submodule(path)) for path in find_blocks(module).paths}


def test_linear_layers_of_a_sequential_are_blocks() -> None:
    found = find_blocks(nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40)))
    assert found.paths == ("0", "2", "4")


def test_large_stages_are_opened_and_small_ones_are_not() -> None:
    found = find_blocks(Staged())
    assert [path for path in found.paths if path.startswith("stages.2")] == [f"stages.2.blocks.{i}" for i in range(4)]
    assert "stages.0" in found.paths and "stages.1" in found.paths


def test_queries_keys_and_values_are_not_blocks() -> None:
    assert find_blocks(Block(8)).paths == ()


def test_blocks_do_not_overlap() -> None:
    for module in (Staged(), model("unet_group"), model("decoder"), model("hf_vit")):
        paths = find_blocks(module).paths
        assert len(set(paths)) == len(paths)
        assert not [(a, b) for a in paths for b in paths if a != b and b.startswith(a + ".")]


def test_one_object_under_two_names_is_one_block() -> None:
    block = Block(16)
    assert find_blocks(nn.Sequential(block, block, Block(16))).paths == ("0", "2")


def test_a_block_that_shares_its_weight_is_left_to_the_root() -> None:
    layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
    module = nn.Module()
    module.layers, module.head = layers, nn.Linear(40, 40)
    module.head.weight = layers[1].weight
    assert find_blocks(module).paths == ("layers.0", "layers.2")


def test_a_model_without_repetition_says_so() -> None:
    found = find_blocks(nn.Linear(50, 50))
    assert found.paths == ()
    assert "no repeated blocks were found, so the whole module is gathered at once" in found.warnings[0]


# --- too coarse, too fine


def test_one_unit_that_is_most_of_the_model_is_told() -> None:
    found = find_blocks(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1000), nn.Linear(1000, 1000)))
    assert any("unit '2' holds 99% of the model" in warning for warning in found.warnings)


def test_what_is_told_of_units_names_units_that_a_plan_can_name() -> None:
    """Each `wrap=` that a warning proposes is one that `choose_blocks` takes, and finds more or larger units by."""
    mixed = nn.Module()
    mixed.embedding, mixed.head = nn.Embedding(1000, 16), nn.Linear(16, 90)
    mixed.blocks = nn.ModuleList(Block(16) for _ in range(3))
    recurrent = nn.ModuleDict({"gru": nn.GRU(20, 30), "out": nn.Linear(30, 4)})
    proposed = {}
    for name, module in (("mixed", mixed), ("recurrent", recurrent), ("unet", model("unet_group"))):
        for warning in find_blocks(module).warnings:
            if "wrap=" in warning:
                units = warning.rpartition("wrap=")[2].split("|")
                proposed[name] = choose_blocks(module, tuple(unit for unit in units if unit != "...")).paths
    assert proposed["recurrent"] == ("gru", "out")
    assert {"embedding", "blocks.0", "blocks.2"} <= set(proposed["mixed"])


def test_what_lies_outside_the_units_is_told() -> None:
    module = nn.Module()
    module.embedding = nn.Embedding(1000, 16)
    module.blocks = nn.ModuleList(Block(16) for _ in range(3))
    assert any("of the model lies outside the units" in warning for warning in find_blocks(module).warnings)


def test_units_too_small_to_pay_are_told() -> None:
    found = find_blocks(nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))))
    assert any("40 units of about 72 elements: zero=3 gathers" in warning for warning in found.warnings)
    assert not find_blocks(nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))).warnings
    assert FINE_ELEMENTS < 40 * 41


# --- named


def test_class_names_paths_and_patterns() -> None:
    module = Staged()
    everything = choose_blocks(module, ("Block",)).paths
    assert everything == tuple(f"stages.{s}.blocks.{b}" for s, depth in enumerate((2, 2, 4)) for b in range(depth))
    assert choose_blocks(module, ("stages.*",)).paths[0] == "stages.0"
    assert choose_blocks(module, ("head",)).paths == ("head",)
    assert choose_blocks(module, ("head", "Stage")).paths == ("stages.0", "stages.1", "stages.2", "head"), (
        "module order"
    )
    assert choose_blocks(module, ("head", "he*")).paths == ("head",)


def test_a_star_matches_one_name() -> None:
    assert choose_blocks(Staged(), ("stages.*",)).paths == ("stages.0", "stages.1", "stages.2")
    assert choose_blocks(Staged(), ("stages.*.blocks.*",)).paths == choose_blocks(Staged(), ("Block",)).paths


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("Blok", "did you mean 'Block'?"), ("stage.0", "did you mean 'stages.0'?"), ("block", "did you mean")],
)
def test_a_misspelt_pattern_is_named(pattern: str, hint: str) -> None:
    with pytest.raises(InputError) as raised:
        choose_blocks(Staged(), ("head", pattern))
    assert f"wrap: nothing in the module matches '{pattern}'" in str(raised.value)
    assert hint in str(raised.value)


def test_the_root_is_no_unit() -> None:
    with pytest.raises(InputError, match="'Staged' is the whole model"):
        choose_blocks(Staged(), ("Staged",))


# --- and the plans that use them


@pytest.mark.parametrize("wrap", ["DecoderBlock", "blocks.1|head", "blocks.*"])
def test_units_of_ones_own_choice_equal_one_process(wrap: str, pool: RankPool) -> None:
    name = type(model("decoder").get_submodule("blocks.0")).__name__
    parity = verify(
        "shardwise.models.tasks:decoder", f"dp_shard=2,wrap={wrap.replace('DecoderBlock', name)}", pool=pool
    )
    assert parity.parity, parity.text()


def notices_of(plan: str) -> list[str]:
    return parallelize(tasks.mlp().with_(model=plain_linear), plan).notices


def test_warnings_reach_the_user(pool: RankPool) -> None:
    expected = find_blocks(plain_linear()).warnings
    assert expected and set(expected) <= set(pool.run(notices_of, 2, "dp_shard=2")[0])
    assert not set(expected) & set(pool.run(notices_of, 2, "dp_shard=2,zero=1")[0]), "no units there"


def test_recompute_without_blocks_says_that_it_has_no_effect() -> None:
    task = tasks.mlp().with_(model=plain_linear)
    notices = parallelize(task, Plan(remat="full")).notices
    assert any(notice.startswith("remat has no effect") for notice in notices)


def plain_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(12, tasks.CLASSES)
