"""Where a plan first differs from one process, and in what way."""

from __future__ import annotations

import pytest
import torch
from mutations.bugs import bug
from mutations.plant import Bug, BuggyPool
from mutations.spoil import Spoil, SpoiledPool, drawn
from torch import Tensor, nn

from shardwise import Task, verify
from shardwise.models import tasks
from shardwise.proof.kind import kind_of
from shardwise.ranks import RankPool


def test_kinds_of_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = [torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(3)]
    whole = sum(shares[1:], shares[0])
    told = {
        "a factor of 3": whole * 3,
        "a factor of 2/3": whole / 1.5,
        "the sign is turned": -whole,
        "the same values in another order": whole.flip(0),
        "it lacks the share of data rank 1": whole - shares[1],
        "it counts twice the share of data rank 2": whole + shares[2],
        "zero": whole * 0,
        "not finite": whole / 0,
        "of shape (3, 4) where one process has (4, 3)": whole.t(),
        "3 of 12 elements, from element 3 to 5": whole + torch.eye(4, dtype=torch.float64)[:, 1:2],
        "": whole + torch.randn(4, 3, dtype=torch.float64, generator=generator),
    }
    assert {words: kind_of(found, whole, shares) for words, found in told.items()} == {words: words for words in told}
    numbers = torch.complex(whole, shares[0])
    assert kind_of(numbers.conj(), numbers) == "conjugated" and kind_of(2 * numbers, numbers) == "a factor of 2"
    assert kind_of(numbers.real + 0j, numbers) == "12 of 24 parts of numbers, the first at 1"


class Normed(nn.Module):
    """Two residual layers between norms, a weight that is used twice and a branch that its parent computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(12, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.last(x)


def normed() -> Task:
    return tasks.mlp().with_(model=Normed)


HERE = "test_locate:normed"
CASES = [
    (bug("eps", "parallel.batchnorm:_Normalised.forward", "bias, False, 0.0, over.eps)",
         "bias, False, 0.0, 2 * over.eps)", HERE, "dp_replicate=2"),
     "step 1: forward of 'norm', rank 0, micro-batch 0"),
    (bug("detached", "parallel.batchnorm:_Normalised.backward", "dx = dx - shift",
         "pass", HERE, "dp_replicate=2"), "step 1: backward of 'norm', rank 0"),
    (bug("statistics", "parallel.batchnorm:synced_batch_norm", "lerp_(plain(mean).to(running_mean.dtype), momentum)",
         "lerp_(plain(mean).to(running_mean.dtype), 2 * momentum)", HERE, "dp_replicate=2", (1,)),
     "step 1: buffer 'norm.running_mean', rank 1"),
    (bug("masks", "step.seeded_draws:seed_masks", "begin(state.seed, state.steps_done", "begin(state.seed, 0", HERE,
         "dp_replicate=2"), "step 2: forward of 'drop', rank 0, micro-batch 0"),
    (bug("half", "parallel.replicate:Replicate._reduce", "assert bucket.buffer is not None", "bucket.buffer.mul_(0.5)",
         "shardwise.models.tasks:mlp", "dp_replicate=2"),
     "step 1: gradient of 'layers.0.weight', rank 0: off by 5.0e-01; a factor of 1/2"),
    (bug("share", "parallel.replicate:Replicate._reduce", "assert bucket.buffer is not None",
         "bucket.buffer.mul_(0)", "shardwise.models.tasks:mlp", "dp_replicate=2", (1,)),
     "; it lacks the share of data rank 1"),
    (bug("published", "parallel.flat:Flat.publish", "for part in self.shards:", "for part in self.shards[:1]:",
         "shardwise.models.tasks:mlp", "dp_shard=2,zero=1"), "step 1: update of "),
    (bug("start", "engine.materialise:fill_parameters", "value = value_of(name)", "value = 2 * value_of(name)",
         "shardwise.models.tasks:mlp", "dp_replicate=2", (1,)),
     "before the first step: initial value of 'layers.0.weight', rank 1: off by 1.0e+00; a factor of 2"),
    (bug("norm", "step.normalise:normalise", "agreed.square_norms[: state.mesh.shard.size]", "agreed.square_norms[:1]",
         "shardwise.models.tasks:mlp", "dp_shard=2,zero=2"), "step 1: the gradient's norm, of equal gradients"),
    (bug("tp", "part.rules.products:_product", "batch + 1), share_as(b, lead, batch)), lead.axis",
         "batch + 1), share_as(b, lead, batch)) / 2, lead.axis", "shardwise.models.tasks:decoder_tied", "tp=2"),
     "step 1: forward of 'blocks.0.attention.out', rank 0, micro-batch 0: off by 5.0e-01; a factor of 1/2"),
    (bug("pp", "step.pipelined:_Row._backward", "mail.send_backward(op",
         "[leaf.grad.neg_() for leaf in saved.inputs]; mail.send_backward(op",
         "pipeline_tasks:sequential", "pp=2,microbatches=2"), "the sign is turned"),
]  # fmt: skip


@pytest.mark.parametrize(("planted", "told"), CASES, ids=[one.name for one, _ in CASES])
def test_the_first_difference_is_named(planted: Bug, told: str, pool: RankPool) -> None:
    parity = verify(planted.task, planted.plan, pool=BuggyPool(pool, planted), **planted.options)
    assert not parity.equal and parity.first is not None, parity.text()
    assert told in parity.first.text(), parity.first.text()
    assert parity.as_dict()["first_difference"]["step"] == parity.first.step + 1
    assert f"first: {parity.first.text()}" in parity.text()


def test_an_equal_plan_has_no_first_difference(pool: RankPool) -> None:
    parity = verify(HERE, "dp_replicate=2", pool=pool)
    assert parity.parity and parity.first is None and parity.as_dict()["first_difference"] is None


M, U = "shardwise.models.tasks:", "unusual_tasks:"
SPOILED = [
    Spoil(M + "vit", "tp=2", "blocks.1.down", "forward"),
    Spoil(HERE, "dp_replicate=2", "layers.1", "turned", (1,)),
    Spoil(M + "decoder", "dp_shard=2,zero=3", "blocks.1.attention", "backward"),
    Spoil(U + "highway", "dp_replicate=2,accumulate=2", "turn.1", "backward"),
    Spoil(M + "unet_batchnorm", "tp=2", "downs.0.stride", "backward"),
    Spoil(U + "shared_block", "pp=2,microbatches=2", "blocks.0.block.norm2", "backward"),
    Spoil(U + "highway", "pp=2,microbatches=2", "carry.3", "weight"),
]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: f"{spoil.path}-{spoil.kind}-{spoil.plan}")
def test_the_module_that_computes_wrongly_is_named(pool: RankPool, spoil: Spoil) -> None:
    """A module at a known place computes wrongly in the ranks: forward, its arguments' gradient, or its weight's."""
    parity = verify(spoil.task, spoil.plan, pool=SpoiledPool(pool, spoil))
    assert not parity.parity and parity.first is not None, parity.text()
    assert parity.first.module == spoil.path, parity.first.text()
    assert parity.first.phase == {"backward": "backward of", "weight": "gradient of"}.get(spoil.kind, "forward of")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_nine_in_ten_of_many_modules_are_named(pool: RankPool, seed: int) -> None:
    """Forty drawn modules in twelve nets under six plans; those whose spoiling changes nothing do not count."""
    nets = "lstm unet temporal_fusion graph_attention recommender point_net highway shared_block"
    tasks_ = [*(M + name for name in ("decoder", "mlp", "unet_batchnorm", "vit")), *(U + name for name in nets.split())]
    plans = ["dp_replicate=2", "dp_shard=2,zero=3", "dp_shard=2,zero=1", "tp=2", "pp=2,microbatches=2",
             "dp_replicate=2,accumulate=2"]  # fmt: skip
    told = {}
    for spoil in drawn(tasks_, plans, 40, seed):
        parity = verify(spoil.task, spoil.plan, pool=SpoiledPool(pool, spoil))
        if not parity.parity and not parity.refused:
            told[spoil] = parity.first is not None and parity.first.module == spoil.path
    assert len(told) >= 20
    assert sum(told.values()) >= 0.9 * len(told), [spoil for spoil, right in told.items() if not right]
