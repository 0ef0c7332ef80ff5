"""Building without weights: each value from (seed, name) alone, like a real module's, and no memory taken."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import unlike_tasks
from torch import Tensor, nn

from shardwise.errors import InputError
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.trace.constructor_recorder import LARGE
from shardwise.trace.deferred import Built, build, build_for_real, named_tensors, seed_of

BIG = 80  # BIG * BIG > LARGE: deferred
SMALL = 8


def values(model: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    built = build(model, seed)
    assert not built.notice, built.notice
    return {name: built.value(name) for name, _ in named_tensors(built.module)}


class Layers(nn.Module):
    def __init__(self, names: list[str], size: int = BIG) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(size, size))


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_a_value_depends_on_seed_and_name_alone(size: int) -> None:
    assert (size * size >= LARGE) == (size == BIG)
    alone = values(partial(Layers, ["a"], size))
    among = values(partial(Layers, ["x", "a", "y"], size))
    assert all(torch.equal(alone[name], among[name]) for name in alone)
    names = list(among)
    for i, name in enumerate(names):
        assert all(
            not torch.equal(among[name], among[o]) for o in names[i + 1 :] if among[o].shape == among[name].shape
        )
    other = values(partial(Layers, ["a"], size), seed=1)
    assert not torch.equal(other["a.weight"], alone["a.weight"])


def test_the_order_of_asking_does_not_matter() -> None:
    built = build(partial(Layers, ["a", "b"]), 3)
    names = [name for name, _ in named_tensors(built.module)]
    forward = {name: built.value(name) for name in names}
    state = torch.get_rng_state()
    for name in reversed(names):
        assert torch.equal(built.value(name), forward[name])
    assert torch.equal(torch.get_rng_state(), state), "and no one's random state is disturbed"


def test_values_are_new_each_time() -> None:
    built = build(partial(Layers, ["a"]), 0)
    built.value("a.weight").zero_()
    assert built.value("a.weight").any()


class Initialised(nn.Module):
    """Every way to fill a matrix that is common."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.trunc = nn.Parameter(nn.init.trunc_normal_(torch.empty(size, size), std=0.02, a=-0.04, b=0.04))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(size, size)))
        self.kaiming = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(size, size)))
        self.xavier = nn.Parameter(nn.init.xavier_normal_(torch.empty(size, size)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(size, size), 0.5))
        self.eye = nn.Parameter(nn.init.eye_(torch.empty(size, size)))
        self.constant = nn.Parameter(torch.full((size, size), 0.5))
        self.direct = nn.Parameter(torch.randn(size, size) * 0.1 + 1)
        self.halved = nn.Parameter(torch.ones(size, size))
        self.embedding = nn.Embedding(size * 2, size, padding_idx=3)
        self.lstm = nn.LSTM(size, size)
        self.convolution = nn.Conv2d(size, size, 3)
        self.register_buffer("angles", torch.outer(torch.arange(size), 10000 ** -(torch.arange(size) / size)))
        self.register_buffer("mask", torch.tril(torch.ones(size, size, dtype=torch.bool)))
        with torch.no_grad():
            self.halved.mul_(0.5)
            self.halved[0] = 7
            self.halved[:, 1].uniform_(2, 3)


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_initialisers(size: int) -> None:
    v = values(partial(Initialised, size))
    assert float(v["trunc"].abs().max()) <= 0.04 and 0.01 < float(v["trunc"].std()) < 0.02
    torch.testing.assert_close(v["orthogonal"] @ v["orthogonal"].T, torch.eye(size), atol=1e-5, rtol=0)
    bound = (6 / size) ** 0.5
    assert 0.8 * bound < float(v["kaiming"].abs().max()) <= bound
    assert float(v["xavier"].std()) == pytest.approx(size**-0.5, rel=0.3)
    assert ((v["sparse"] == 0).sum(0) == size // 2).all()
    assert torch.equal(v["eye"], torch.eye(size))
    assert (v["constant"] == 0.5).all()
    assert float(v["direct"].mean()) == pytest.approx(1, abs=0.1) and 0.05 < float(v["direct"].std()) < 0.15
    assert v["halved"][0].eq(7).sum() >= size - 1 and (v["halved"][1:, 0] == 0.5).all()
    assert ((v["halved"][:, 1] >= 2) & (v["halved"][:, 1] <= 3)).all()
    assert not v["embedding.weight"][3].any() and v["embedding.weight"][2].any()
    assert 0.5 * size**-0.5 < float(v["lstm.weight_ih_l0"].abs().max()) <= size**-0.5
    assert 0 < float(v["convolution.weight"].abs().max()) <= (size * 9) ** -0.5
    assert torch.equal(v["mask"], torch.ones(size, size, dtype=torch.bool).tril())
    torch.testing.assert_close(v["angles"], torch.outer(torch.arange(size), 10000 ** -(torch.arange(size) / size)))


class Cloned(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(size, 2, size * 2, batch_first=True), 2)


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_copies_of_a_submodule_start_equal(size: int) -> None:
    built = build(partial(Cloned, size), 0)
    v = {name: built.value(name) for name, _ in named_tensors(built.module)}
    assert torch.equal(v["copies.0.0.weight"], v["copies.2.0.weight"]) and v["copies.0.0.weight"].any()
    in_layers = [name.split(".", 3)[3] for name in v if name.startswith("encoder.layers.0.")]
    assert in_layers and all(torch.equal(v[f"encoder.layers.0.{n}"], v[f"encoder.layers.1.{n}"]) for n in in_layers)


class Derived(nn.Module):
    """Tensors made from others, in forms that must stay consistent with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(BIG, BIG))
        self.twice = nn.Parameter(self.a.detach() * 2)
        self.copied = nn.Parameter(torch.empty(BIG, BIG))
        with torch.no_grad():
            self.copied.copy_(self.a.t())
        self.register_buffer("norm", self.a.detach().norm(dim=1))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(BIG, BIG))
        both = nn.Linear(BIG, 2 * BIG).weight.detach()
        self.top, self.bottom = (nn.Parameter(half.contiguous()) for half in both.chunk(2))


def test_derived_tensors_agree_with_their_sources() -> None:
    v = values(Derived)
    assert torch.equal(v["twice"], v["a"] * 2)
    assert torch.equal(v["copied"], v["a"].t())
    torch.testing.assert_close(v["norm"], v["a"].norm(dim=1))
    original = "normed.parametrizations.weight.original"
    torch.testing.assert_close(v[f"{original}0"], v[f"{original}1"].norm(dim=1, keepdim=True))
    assert not torch.equal(v["top"], v["bottom"])


class Tied(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, size)
        self.head = nn.Linear(size, size, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_tied_weights_stay_one(size: int) -> None:
    built = build(partial(Tied, size), 0)
    assert built.module.head.weight is built.module.embedding.weight
    assert [name for name, _ in named_tensors(built.module)] == ["embedding.weight"]
    assert built.value("embedding.weight").std() > 0.5


class ReadsSchedule(nn.Module):
    """Reads values that were computed, not drawn: a rate for each layer."""

    def __init__(self) -> None:
        super().__init__()
        rates = [float(rate) for rate in torch.linspace(0, 0.2, 3)]
        self.rates = rates + torch.arange(4).tolist()
        self.layers = nn.ModuleList(nn.Linear(BIG, BIG) for _ in rates)


def test_a_constructor_may_read_what_it_computed() -> None:
    built = build(ReadsSchedule, 0)
    assert not built.notice
    assert built.module.rates == pytest.approx([0, 0.1, 0.2, 0, 1, 2, 3])


class ReadsRandom(nn.Module):
    def __init__(self, how: str, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        drawn = self.layer.weight.detach()
        if how == "item":
            self.scale = drawn.abs().max().item()
        elif how == "if":
            self.scale = 1.0 if (drawn > 0).any() else 0.0
        elif how == "numpy":
            self.scale = float(drawn.numpy().max())
        elif how == "tolist":
            self.scale = max(map(max, drawn.tolist()))
        with torch.no_grad():
            self.layer.weight.div_(self.scale)


@pytest.mark.parametrize("size", [SMALL, BIG])
@pytest.mark.parametrize("how", ["item", "if", "numpy", "tolist"])
def test_reading_what_was_drawn_builds_for_real_and_says_so(how: str, size: int) -> None:
    built = build(partial(ReadsRandom, how, size), 0)
    assert "cannot be replayed" in built.notice and "built whole on every rank" in built.notice
    weight = built.value("layer.weight")
    assert weight is not None and torch.equal(weight, built.module.layer.weight)
    if how != "if":
        assert float(weight.detach().abs().max()) >= 1.0 - 1e-6
    again = build(partial(ReadsRandom, how, size), 0)
    assert torch.equal(again.value("layer.weight"), weight), "the seed fixes it all the same"


class FromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(np.arange(BIG * BIG, dtype=np.float32).reshape(BIG, BIG)))
        self.scaled = nn.Parameter(self.table.detach() / 2)


def test_data_from_outside_is_kept() -> None:
    v = values(FromNumpy)
    assert torch.equal(v["table"], torch.arange(BIG * BIG, dtype=torch.float32).view(BIG, BIG))
    assert torch.equal(v["scaled"], v["table"] / 2)


class CopiesABuffer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        part = nn.Module()
        part.register_buffer("table", torch.arange(float(size * size)).view(size, size))
        self.parts = nn.ModuleList([part, copy.deepcopy(part)])


@pytest.mark.parametrize("size", [SMALL, BIG])
def test_a_copied_buffer_has_its_values(size: int) -> None:
    built = build(partial(CopiesABuffer, size), 0)
    for place in range(2):
        assert torch.equal(built.value(f"parts.{place}.table"), torch.arange(float(size * size)).view(size, size))


def test_torch_nn_init_is_put_back() -> None:
    before = dict(vars(nn.init))
    build(partial(Layers, ["a"]), 0)
    with pytest.raises(InputError):
        build(lambda: nn.Linear(-1, 2, 3, 4, 5, 6), 0)
    assert dict(vars(nn.init)) == before


def test_a_constructor_that_fails_is_the_users() -> None:
    with pytest.raises(InputError, match=r"constructor fails in one process too.*ZeroDivisionError"):
        build(lambda: nn.Linear(1 // 0, 1), 0)
    with pytest.raises(InputError, match=r"must return an nn\.Module, got dict"):
        build(dict, 0)


def test_fingerprints_tell_captured_values_apart() -> None:
    def with_constant(value: float) -> nn.Module:
        module = nn.Module()
        module.table = nn.Parameter(torch.from_numpy(np.full((3,), value, dtype=np.float32)) * 2)
        return module

    def printed(model: Callable[[], nn.Module]) -> int:
        return build(model, 0).fingerprint()

    assert printed(partial(with_constant, 1.0)) == printed(partial(with_constant, 1.0))
    assert printed(partial(with_constant, 1.0)) != printed(partial(with_constant, 2.0))
    assert printed(partial(Layers, ["a"])) != printed(partial(Layers, ["b"]))


def test_seeds_do_not_collide_and_do_not_move() -> None:
    assert seed_of("init", 0, "a.weight", 0) == 710680172319042834
    assert seed_of("a", 11) != seed_of("a1", 1)
    assert len({seed_of("init", s, n, k) for s in range(5) for n in "abcdefgh" for k in range(5)}) == 200


@pytest.mark.parametrize("name", ["hf_llama", "hf_vit", "decoder_tied", "gpt2", "vit", "unet_batchnorm"])
def test_real_models_replay_and_equal_themselves(name: str) -> None:
    model = getattr(tasks, name)().model
    first, second = values(model), values(model)
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    real = build_for_real(model, 0, "to compare")
    for path, tensor in named_tensors(real.module):
        replayed = first[path]
        assert (replayed.shape, replayed.dtype) == (tensor.shape, tensor.dtype), path
        if tensor.is_floating_point() and tensor.numel() >= 500:
            assert float(replayed.std()) == pytest.approx(float(tensor.detach().std()), rel=0.25, abs=1e-6), path
            assert float(replayed.mean()) == pytest.approx(
                float(tensor.detach().mean()), abs=0.3 * float(tensor.detach().std()) + 1e-6
            )
        elif tensor.numel() > 1 and float(tensor.detach().float().std(unbiased=False)) == 0:
            assert torch.equal(replayed, tensor.detach()), path


# --- memory


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def growth_of_a_large_build() -> tuple[float, float, float]:
    """MB of resident memory that a Linear of 100 million elements takes: built, after one value, and that value's."""
    build(partial(nn.Linear, 100, 100), 0)
    before = resident_mb()
    built: Built = build(partial(nn.Linear, 10_000, 10_000), 0)
    grown = resident_mb() - before
    value = built.value("weight")
    size = value.numel() * 4 / 2**20
    assert 0.009 < float(value[::100].abs().max()) <= 0.01
    del value
    return grown, resident_mb() - before, size


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_module_is_not_made_resident(pool: RankPool) -> None:
    grown, after, size = pool.run(growth_of_a_large_build, 1)[0]
    assert size > 380
    assert grown < 0.05 * size, f"{grown:.0f} MB"
    assert after < 0.15 * size, f"{after:.0f} MB are left after a value of {size:.0f} MB"


def test_initialisers_that_a_library_kept_serve_the_build_that_runs() -> None:
    """transformers keeps torch.nn.init's functions when it is first imported, which may be inside a constructor."""
    kept: list[Callable[..., Tensor]] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(BIG, BIG))
            if not kept:
                kept.append(nn.init.trunc_normal_)
            kept[0](self.weight, std=0.5)

    first, second = build(Layer, 3), build(Layer, 3)
    assert torch.equal(first.value("weight"), second.value("weight"))
    gone = weakref.ref(first._tape)
    del first
    gc.collect()
    assert gone() is None
    plain = torch.zeros(64)
    kept[0](plain)
    assert plain.abs().sum() > 0
    assert not build(Layer, 3).notice


TABLES: dict[int, Tensor] = {}  # as a file keeps what every module of it uses


class Unnamed(nn.Module):
    """Large tensors that are neither parameters, buffers nor attributes, as some libraries and teachers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(BIG, BIG)
        self.tables = [torch.linspace(0, 1, LARGE)]
        self.places = {"default": torch.randperm(LARGE, generator=torch.Generator().manual_seed(3))[:9]}
        self.teacher = (nn.Linear(BIG, BIG),)
        self.views = [self.linear.weight[:2]]
        scale = torch.linspace(0, 2, LARGE)
        self.scaled = lambda x: x * scale
        if LARGE not in TABLES:
            TABLES[LARGE] = torch.arange(LARGE)


def test_large_tensors_without_a_name_have_values() -> None:
    TABLES.clear()
    built, other = build(Unnamed, 0), build(Unnamed, 0)
    assert not built.notice, built.notice
    module, plain = built.module, Unnamed()
    assert torch.equal(module.tables[0], plain.tables[0])
    assert torch.equal(module.places["default"], plain.places["default"])
    assert torch.equal(module.scaled(2.0), plain.scaled(2.0))
    assert torch.equal(TABLES[LARGE], torch.arange(LARGE))
    drawn = module.teacher[0].weight
    assert drawn.requires_grad
    assert 0.5 < drawn.std() / plain.teacher[0].weight.std() < 2
    assert torch.equal(drawn, other.module.teacher[0].weight)
    assert not torch.equal(drawn, build(Unnamed, 1).module.teacher[0].weight)
    assert not torch.equal(drawn, built.value("linear.weight"))


class Sizes(nn.Module):
    """Buffers that are made of two numbers each, as layers of sound codecs keep their paddings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for place in range(12):
            size, stride = torch.tensor(place + 3), torch.tensor(place % 3)
            self.register_buffer(f"padding_{place}", size - stride)


def test_a_fingerprint_does_not_depend_on_addresses() -> None:
    assert len({build(Sizes, 0).fingerprint() for _ in range(4)}) == 1


@pytest.mark.parametrize("name", ["own_generator", "own_generator_small", "loaded", "loaded_from_file", "half_loaded"])
def test_weights_are_those_of_the_plain_constructor(name: str) -> None:
    model = getattr(unlike_tasks, name)().model
    built, plain = build(model, 0), dict(model().named_parameters())
    assert all(torch.equal(built.value(path), value) for path, value in plain.items())
    assert bool(built.notice) == (name in ("loaded_from_file", "half_loaded"))


def test_generators_in_other_states_are_told_apart() -> None:
    def printed(seed: int) -> int:
        return build(lambda: unlike_tasks.drawn_by(seed), 0).fingerprint()

    assert printed(1) == printed(1) != printed(2)


class Reshaped(nn.Module):
    """Keeps what operations have turned in place: quantiles of many numbers, a large table."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(LARGE, 3, generator=torch.Generator().manual_seed(0))
        edges = torch.quantile(rows, torch.linspace(0, 1, 9), dim=0)
        self.register_buffer("edges", edges.T.contiguous())
        table = torch.arange(2.0 * LARGE).view(2, LARGE)
        table.t_().add_(1)
        self.register_buffer("table", table.unsqueeze_(0).squeeze_(0))


def test_shapes_that_are_changed_in_place() -> None:
    built, plain = build(Reshaped, 0), dict(Reshaped().named_buffers())
    assert not built.notice
    for name, tensor in built.module.named_buffers():
        assert tensor.shape == plain[name].shape and tensor.stride() == plain[name].stride()
        assert torch.equal(built.value(name), plain[name])
