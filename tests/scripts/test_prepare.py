"""Existing scripts with at most four changed lines: losses and weights equal to the untouched script in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from changed_scripts import CHANGES, SCRIPTS, changed, run_script, same
from small_scripts import (
    adamw,
    back,
    batches,
    begin,
    close,
    equals_one_process,
    made,
    momentum,
    muon,
    net,
    refused_with_its_line,
    samples,
    weights_of,
)
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import shardwise
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.ranks import RankPool


class Alone(dict[str, dict[str, Any]]):
    """Each untouched script in one process, run when it is asked for."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool

    def __missing__(self, name: str) -> dict[str, Any]:
        (self[name],) = self.pool.run(run_script, 1, str(SCRIPTS / f"{name}.py"))
        return self[name]


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Alone:
    return Alone(pool)


PLANS_2 = ("dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3")
SHORT = [("char_gpt", PLANS_2[3]), ("char_gpt", PLANS_2[1]), ("causal_lm", PLANS_2[3]),
         ("image_classifier", PLANS_2[2]), ("unet", PLANS_2[0]), ("diffusion", PLANS_2[2]),
         ("vae", PLANS_2[1]), ("siamese", PLANS_2[0]), ("masked_lm", PLANS_2[2]), ("seq2seq", PLANS_2[3]),
         ("unet", "dp_replicate=2,dp_shard=2,zero=3"),
         ("gan", PLANS_2[0]), ("lstm_lm", PLANS_2[1]), ("transformer_lm", PLANS_2[2]), ("unet3d", PLANS_2[3]),
         ("diffusion_ema", PLANS_2[3]), ("graph_net", "dp_shard=4,zero=3"), ("detector", PLANS_2[0]),
         ("reinforce", PLANS_2[2]), ("distillation", PLANS_2[3]), ("neural_operator", PLANS_2[1]),
         ("augmented", PLANS_2[0]), ("unet_dice", PLANS_2[0]),
         ("two_optimizers", PLANS_2[3]), ("lora", PLANS_2[3]), ("early_stopping", PLANS_2[1]),
         ("actor_critic", PLANS_2[2]), ("stream", PLANS_2[3]), ("swa", PLANS_2[3]),
         ("fine_tuning", PLANS_2[2]), ("dino", PLANS_2[1]), ("truncated", PLANS_2[0]),
         ("wasserstein", PLANS_2[2]), ("mean_teacher", PLANS_2[0]), ("momentum_contrast", PLANS_2[3]),
         ("stages", PLANS_2[1]), ("lookahead", PLANS_2[2]), ("agent", PLANS_2[3]), ("swav", PLANS_2[3]),
         ("noisy_gradients", PLANS_2[1]), ("translation", PLANS_2[3])]  # fmt: skip
CUT = [("image_classifier", "tp=2,dp_shard=2"), ("diffusion", "tp=2"),
       ("seq2seq", "tp=2"), ("dino", "tp=2"), ("endless", "tp=2"), ("endless", PLANS_2[3]),
       ("noisy_gradients", "tp=2"),
       ("segmentation", "tp=2,dp_shard=2"), ("truncated", "tp=2"),
       ("fine_tuning", "tp=2,sp=true"), ("stream", "tp=2,sp=true")]  # fmt: skip
SHARES = [("shifted_gpt", "cp=2"), ("weather", "domain=1x2"),
          ("diffusion_unet", "domain=2,zero=3"), ("mixup", "dp_shard=2,zero=1")]  # fmt: skip
PLANS_CUT = ("tp=2", "tp=2,sp=true", "tp=2,dp_shard=2", "tp=2,dp_shard=2,zero=1", "tp=2,dp_replicate=2")
PLANS_4 = ("dp_replicate=4", "dp_shard=4,zero=1", "dp_shard=4,zero=2", "dp_shard=4,zero=3",
           "dp_replicate=2,dp_shard=2,zero=2", "dp_replicate=2,dp_shard=2,zero=3")  # fmt: skip
REST = [
    (name, plan) for name in CHANGES for plan in (*PLANS_2, *PLANS_4, *PLANS_CUT) if (name, plan) not in SHORT + CUT
]
# what is refused, in one sentence, and why


def refusal(name: str, plan: str) -> str | None:
    """What a script is told under a plan, None where it runs."""
    plan_ = shardwise.Plan.parse(plan)
    if name == "lbfgs_fit" and (plan_.tp > 1 or plan_.zero):
        return "LBFGS's update"
    if name == "trainer" and plan_.tp > 1:
        return "the model is compiled"
    return None


def check(name: str, plan: str, alone: dict, pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(changed(name, plan))
    told = refusal(name, plan)
    if told is not None:
        with pytest.raises((InputError, RefusedPlan), match=f"({told}).*{name}.py, line"):
            pool.run(run_script, shardwise.Plan.parse(plan).world_size, str(path), timeout_s=120)
        return
    counts = () if shardwise.Plan.parse(plan).data_ranks == 1 else ("correct",)  # of each rank's own samples
    for run in pool.run(run_script, shardwise.Plan.parse(plan).world_size, str(path), timeout_s=120):
        same(run, alone[name])
        for key, value in alone[name]["told"].items():
            if key not in counts:
                close(run["told"][key], value, 1e-9)


@pytest.mark.parametrize(("name", "plan"), SHORT + CUT + SHARES)
def test_scripts_equal_one_process(name: str, plan: str, alone: dict, pool: RankPool, tmp_path: Path) -> None:
    check(name, plan, alone, pool, tmp_path)


def test_it_unpacks_into_as_many_as_were_given() -> None:
    for given in (), (None,), (DataLoader(samples(4), batch_size=2),):
        model = net()
        assert len([*shardwise.prepare(model, adamw(model), *given)]) == 2 + len(given)


def meet_cut_positions() -> None:
    """What a model with cut positions leaves behind, on rank 0 alone: a pool may replace one rank's process."""
    import transformers.modeling_utils  # noqa: F401  whose attention is replaced

    from shardwise.parallel.sequence import hf_attention

    if dist.get_rank() == 0:
        hf_attention.install()


def test_a_process_that_met_cut_positions_comes_to_the_same_collectives(alone: dict, tmp_path: Path) -> None:
    with RankPool() as own:
        own.run(meet_cut_positions, 2)
        check("causal_lm", "tp=2,sp=true", alone, own, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "plan"), REST)
def test_scripts_under_every_plan(name: str, plan: str, alone: dict, pool: RankPool, tmp_path: Path) -> None:
    check(name, plan, alone, pool, tmp_path)


# --- smaller scripts: a function of a plan, run untouched in one process (None) and prepared on ranks


def loop(plan: str | None, optimizer_of: Any = adamw, count: int = 14, batch: int = 4, every: int = 1,
         clip: str = "", form: str = "weight", loader_of: Any = DataLoader, frozen: bool = False, epochs: int = 1,
         ) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses and weights of a plain training loop. `every` batches make a step; `form`: how a loss is given."""
    model: Any = net()
    if frozen:
        model.layers[0].requires_grad_(False)
    loader = loader_of(samples(count), batch_size=batch, shuffle=loader_of is DataLoader)
    prepared, model, optimizer, loader = begin(plan, model, loader, optimizer_of(model))
    torch.manual_seed(7)
    losses, total, weight = [], 0.0, 0
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().sum()
            if prepared:
                given = {"weight": (loss, y.numel()), "sum": (loss,), "mean": (loss / y.numel(),)}[form]
                prepared.backward(*given, summed=form == "sum")
            else:
                loss.backward()
                total, weight = total + loss.item(), 1 if form == "sum" else weight + y.numel()
            if (number + 1) % every and number + 1 < len(loader):
                continue
            if not prepared:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad /= weight
            if clip == "torch" or (clip and not prepared):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            elif clip:
                prepared.clip_grad_norm_(0.3)
            optimizer.step()
            losses.append(float(prepared.loss) if prepared else total / weight)
            optimizer.zero_grad()
            total, weight = 0.0, 0
    return losses, weights_of(prepared or model)


def with_options(plan: str | None, options: dict) -> tuple:
    """Loops equal one process."""
    return loop(plan, **options)


def as_batches(dataset: TensorDataset, batch_size: int, shuffle: bool) -> list:
    x, y = dataset.tensors
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


class Stream(IterableDataset):
    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self):
        return iter(self.dataset)


def streamed(dataset: TensorDataset, batch_size: int, shuffle: bool) -> DataLoader:
    return DataLoader(Stream(dataset), batch_size=batch_size)


def with_workers(dataset: TensorDataset, batch_size: int, shuffle: bool) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=1)


# --- what would differ is refused, by what it is and what to do


def unseen_noise(x: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return x + torch.rand_like(x) * 0


def once(plan: str, case: str) -> None:
    """One mistake of a script, on ranks."""
    model = net(mixes=case == "mixes")
    if case == "as long as the longest":
        model.forward = lambda x: torch.cat([model.head(x @ torch.ones(6, 8).double())] * (1 + int(x[0, 0] > 0)), 1)
    if case == "unseen draws":
        model.layers[1].forward = unseen_noise
    if case == "draws inside":
        model.layers[1].forward = lambda x: x + torch.rand(2 * len(x), 8, dtype=x.dtype).mean()
    optimizer = torch.optim.LBFGS(model.parameters()) if case == "joint" else adamw(model)
    loader: Any = DataLoader(samples(12), batch_size=4)
    if case == "distributed sampler":
        loader = DataLoader(samples(12), batch_size=4, sampler=DistributedSampler(samples(12), 2, 0))
    if case == "own order":
        g = torch.Generator().manual_seed(torch.distributed.get_rank())
        loader = DataLoader(samples(12), batch_size=4, shuffle=True, generator=g)
    given = loader
    prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=plan)
    if case == "prepared before":
        shardwise.prepare(model, optimizer, loader, plan=plan)
    for x, y in given if case == "other loader" else loader:
        loss = (model(x) - y).square().mean()
        if case == "vector":
            loss = (model(x) - y).square()
        if case == "detached":
            loss = loss.detach()
        if case == "negative":
            prepared.backward(loss * len(x), -len(x))
        if case == "weights":
            prepared.backward(loss * len(x), torch.ones(len(x)))
        if case == "two forms":
            prepared.backward(loss, mean_over=len(x), summed=True)
        prepared.backward(loss)
        if case == "twice":
            prepared.backward((model(x) - y).square().sum(), len(x))
        optimizer.step()
        optimizer.zero_grad()


def test_more_ranks_than_this_run_has() -> None:
    model = net()
    with pytest.raises(InputError, match="start it with shardwise run --nproc 2"):
        shardwise.prepare(model, adamw(model), [], plan="dp_shard=2")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda model: torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1),
            r"shape \(3,\).*no pa",
        ),
        (lambda model: Forgetful(model.parameters(), power=3), "'power' is 3, and would be 2"),
        (lambda model: "sgd", "of type str"),
    ],
)
def test_optimizers_that_cannot_be_made_anew(make: Any, words: str) -> None:
    model = net()
    with pytest.raises(InputError, match=words):
        shardwise.prepare(model, make(model), [])


class Forgetful(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 0.1, power: int = 2) -> None:
        super().__init__(params, lr=lr)
        self.power = power


def adversaries(plan: str | None, order: str = "usual") -> tuple[list[float], dict]:
    """Two models and two optimizers in one loop, each behind the other's loss; dropout and noise in both phases."""
    maker = made(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)))
    judge = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1)))
    loader = batches(17, 8, shuffle=True)  # the last batch has one sample
    of_maker, maker, makes, loader = begin(plan, maker, loader)
    of_judge, judge, judges, loader = begin(plan, judge, loader)

    def backward(prepared: Any, loss: torch.Tensor, n: int) -> float:
        return prepared.backward(loss, n).item() if prepared else back(None, loss / n)

    torch.manual_seed(7)
    losses = []
    for x, _ in loader:
        n = len(x)
        shown = maker(torch.randn(n, 3, dtype=x.dtype))
        judges.zero_grad()
        losses.append(backward(of_judge, (judge(x) - 1).square().sum() + judge(shown.detach()).square().sum(), n))
        if order == "usual":
            judges.step()
        makes.zero_grad()
        losses.append(backward(of_maker, (judge(maker(torch.randn(n, 3, dtype=x.dtype))) - 1).square().sum(), n))
        makes.step()
        if order == "late":
            judges.step()
    return losses, weights_of(of_judge or judge)


def test_gradients_that_another_model_left_are_not_used(pool: RankPool) -> None:
    for plan in ("dp_replicate=2", "dp_shard=2,zero=3"):
        with pytest.raises(InputError, match="another model's backward has left gradients"):
            pool.run(adversaries, 2, plan, "late", timeout_s=60)


def held_out() -> list[float]:
    model = net()
    prepared = shardwise.prepare(model, adamw(model), [], plan="dp_shard=2,zero=3")
    total = weight = 0.0
    loader = prepared.split(DataLoader(samples(5), batch_size=3))
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            total, weight = total + float((model(x) - y).square().sum()), weight + len(y)  # the last has one for each
    return prepared.sum(total, weight)


def test_held_out_data_is_cut_and_summed(pool: RankPool) -> None:
    model = net()
    x, y = samples(5).tensors
    for total, weight in pool.run(held_out, 2):
        assert weight == 5 and total == pytest.approx((model(x) - y).square().sum().item(), rel=1e-12)


# --- all of them: a script, a plan, what it is given


EQUAL: list[tuple] = [
    (with_options, "dp_shard=3,zero=3", {"count": 13}), (with_options, "dp_replicate=3", {"count": 13}),
    (with_options, "dp_shard=2,zero=2,accumulate=2", {"every": 2}),
    (with_options, "dp_replicate=2,accumulate=3", {"every": 3}),
    (with_options, "dp_shard=2,zero=1,accumulate=3", {"every": 3}),
    (with_options, "dp_shard=2,zero=3,accumulate=3", {"every": 3, "epochs": 2}),
    (with_options, "dp_shard=2,zero=3", {"clip": "torch"}), (with_options, "dp_replicate=2", {"clip": "torch"}),
    (with_options, "dp_shard=2,zero=1", {"clip": "ours"}), (with_options, "dp_shard=2,zero=2", {"optimizer_of": muon}),
    (with_options, "dp_shard=2,zero=3", {"optimizer_of": muon}),
    (with_options, "dp_shard=2,zero=2", {"optimizer_of": momentum}),
    (with_options, "dp_shard=2,zero=3", {"frozen": True}),
    (with_options, "dp_shard=2,zero=2", {"loader_of": as_batches}),
    (with_options, "dp_shard=2,zero=3", {"loader_of": streamed}),
    (with_options, "dp_shard=3,zero=3", {"form": "sum", "count": 13}),
    (with_options, "dp_shard=2,zero=2", {"form": "mean", "count": 12}),
    (with_options, "dp_shard=2,zero=2", {"form": "mean", "count": 13}),
    (with_options, "dp_shard=2,zero=2", {"form": "mean", "count": 15}), (with_options, "single", {}),
    (adversaries, "dp_replicate=2"), (adversaries, "dp_shard=2,zero=2"), (adversaries, "dp_shard=2,zero=3"),
    (adversaries, "tp=2"), (adversaries, "tp=2,dp_shard=2"),
]  # fmt: skip
MORE_EQUAL: list[tuple] = [
    (with_options, "dp_replicate=2", {"loader_of": with_workers}),
]  # fmt: skip
test_a_script_equals_one_process = equals_one_process(EQUAL, MORE_EQUAL)


REFUSED: list[tuple] = [
    (once, "dp_replicate=2", "two forms", InputError, "not two of them"),
    (once, "dp_shard=2,zero=3", "prepared before", InputError,
     "was prepared before.*call prepare once for each model"),
    (once, "dp_replicate=2", "vector", InputError, r"got shape \(2, 2\): give its .mean"),
    (once, "dp_replicate=2", "detached", InputError, "outside no_grad, without .detach"),
    (once, "dp_replicate=2", "negative", InputError, "weight is -2, which turns the loss around"),
    (once, "dp_replicate=2", "weights", InputError, r"weight must be one number, got shape \(2,\): give its .sum"),
    (once, "dp_replicate=2", "twice", InputError,
     r"2 times before optimizer.step\(\).*accumulate=2.*means, which add"),
    (once, "dp_replicate=2", "distributed sampler", InputError, "DistributedSampler"),
    (once, "dp_replicate=2", "own order", RunError, "drew other samples in step 1"),
    (once, "dp_replicate=2", "draws inside", RefusedPlan, r'shape \(4, 8\).*randomness=\"fast\"'),
    (once, "dp_replicate=2", "unseen draws", RefusedPlan, "cannot be followed"),
    (once, "dp_replicate=2", "other loader", InputError, "has handed out no batch"),
    (once, "dp_shard=2,zero=3", "mixes", RefusedPlan, "mixes samples"),
    (once, "dp_replicate=2", "as long as the longest", RefusedPlan, r"shapes .*\(1, \d\).*total_length"),
    (once, "dp_shard=2,zero=1", "joint", RefusedPlan, "LBFGS's update of one tensor depends on the others"),
    (once, "pp=2", "pipeline", RefusedPlan, r"pp > 1 in prepare.*shardwise.parallelize\(task, plan\).step"),
]  # fmt: skip
test_a_script_is_refused_with_its_line = refused_with_its_line(REFUSED)
