"""What the engine refuses or reports, each by name: worlds, losses that do not add up, branches, non-finite values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task, parallelize, verify
from shardwise.errors import InputError, RefusedPlan, RunError
from shardwise.models import tasks
from shardwise.ranks import RankPool
from shardwise.trace.all_pairs import AllPairs

Pair = tuple[Tensor, Tensor]
DATA_PARALLEL = ["dp_replicate=2", "dp_shard=2,zero=1", "dp_shard=2,zero=2", "dp_shard=2,zero=3"]


def start(name: str, plan: str, steps: int = 0, options: dict[str, Any] | None = None) -> list[float]:
    """Make an engine of a task of this module and take steps; returns their losses."""
    task: Task = globals()[name]()
    engine = parallelize(task, plan, **(options or {}))
    assert task.batch is not None
    return [engine.step(task.batch(step)).loss for step in range(steps)]


def variant(**changes: Any) -> Task:
    return tasks.mlp().with_(**changes)


# --- options and worlds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'raise' or 'skip', got 'ignore'"),
        ({"randomness": "slow"}, "randomness is 'global' or 'fast', got 'slow'"),
        ({"clip_norm": 0}, "clip_norm must be positive, got 0"),
        ({"clip_norm": -1.0}, "clip_norm must be positive, got -1.0"),
        ({"clip_norm": math.nan}, "clip_norm must be positive, got nan"),
        ({"plan": "dp_replica=2"}, "unknown key 'dp_replica'; did you mean 'dp_replicate'?"),
    ],
    ids=str,
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        parallelize(tasks.mlp(), **options)
    assert message in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InputError, match="device cuda was asked for, but torch sees no CUDA device"):
        parallelize(tasks.mlp(), device="cuda")


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=3"])
def test_a_world_of_another_size_here(plan: str) -> None:
    with pytest.raises(InputError, match="needs 2 ranks, but 1 run: start 2 ranks or change the plan's degrees"):
        parallelize(tasks.mlp(), plan)


def test_a_world_of_another_size_on_ranks(pool: RankPool) -> None:
    with pytest.raises(InputError, match="needs 4 ranks, but 2 run"):
        pool.run(start, 2, "plain", "dp_shard=4")
    with pytest.raises(InputError, match=r"needs 1 ranks?, but 2 run"):
        pool.run(start, 2, "plain", "single")


def _part_alone(plan: str) -> None:
    engine = parallelize(tasks.mlp(), plan)
    batch = engine.task.batch(0)
    engine.step(tuple(value[engine.rank :: 2] for value in batch))


def test_a_step_is_given_the_whole_batch(pool: RankPool) -> None:
    with pytest.raises(InputError, match="takes the whole batch of the step, alike on every rank"):
        pool.run(_part_alone, 2, "dp_shard=2,zero=3")
    with pytest.raises(InputError, match=r"parallelize takes a shardwise.Task, got Linear"):
        parallelize(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_refused_plan_is_refused_before_anything_is_built() -> None:
    def never() -> nn.Module:
        raise AssertionError

    with pytest.raises(RefusedPlan, match="units of zero=3 gather theirs for each use: add zero=3"):
        parallelize(tasks.mlp().with_(model=never), "zero=0,offload=parameters")
    with pytest.raises(RefusedPlan, match="whose memory is the host's, so that nothing is gained"):
        parallelize(tasks.mlp().with_(model=never), "offload=parameters")
    assert not torch.distributed.is_initialized()


def plain() -> Task:
    return tasks.mlp()


# --- batches


def test_a_batch_smaller_than_accumulate() -> None:
    engine = parallelize(tasks.mlp(), "accumulate=3")
    with pytest.raises(InputError, match="a batch of 2 samples cannot be split into accumulate=3"):
        engine.step(tasks.feature_batch(0, 2))


def two_samples() -> Task:
    return variant(batch=lambda step: tasks.feature_batch(step, 2))


def test_more_ranks_than_samples(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"more ranks than samples.* over 4 ranks, but there are 2 samples"):
        pool.run(start, 4, "two_samples", "dp_replicate=4")


def test_batches_that_disagree() -> None:
    engine = parallelize(tasks.mlp(), "single")
    with pytest.raises(InputError, match=r"batch\[0\] has 4 samples but batch\[1\] has 3"):
        engine.step((torch.ones(4, 12), torch.zeros(3, dtype=torch.long)))


# --- models and losses that are wrong in one process too


def test_nothing_to_train() -> None:
    frozen = variant(model=lambda: nn.Linear(12, tasks.CLASSES).requires_grad_(False))
    with pytest.raises(InputError, match="no parameter that requires a gradient"):
        parallelize(frozen)


def test_a_loss_that_depends_on_nothing() -> None:
    task = variant(loss=lambda out, batch: (batch[0].sum(), len(batch[0])))
    engine = parallelize(task)
    with pytest.raises(InputError, match="does not depend on any trainable parameter"):
        engine.step(task.batch(0))  # type: ignore[misc]


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(InputError, match=r"Task\.optimizer must return a torch\.optim\.Optimizer, got list"):
        parallelize(variant(optimizer=lambda groups: groups))


def test_a_model_that_fails_by_itself() -> None:
    with pytest.raises(InputError, match=r"the task fails on 5 samples in one process too.*mat1 and mat2"):
        parallelize(variant(model=lambda: nn.Linear(11, tasks.CLASSES)))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda out: out.mean(), "got one tensor: a mean hides the weight"),
        (lambda out: (out.sum(),), "got tuple of length 1"),
        (lambda out: None, "got NoneType"),
        (lambda out: (out, 5), r"the sum must be a tensor with one element, got Tensor of shape \(5, 5\)"),
        (lambda out: (out.sum(), out), r"the weight must be one number, got Tensor of shape \(5, 5\)"),
        (lambda out: (out.sum(), 5, [out]), "the extra terms must be a dict, got list of length 1"),
        (lambda out: (out.sum(), 5, {"aux": out}), r"extra 'aux' must be a tensor with one element"),
        (
            lambda out: (out.sum(), 5, {"aux": (out.sum(), "1")}),
            "the weight of extra 'aux' must be one number, got str",
        ),
    ],
)
def test_a_loss_of_the_wrong_form(returned: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"Task\.loss must return \(sum, weight\).*" + message):
        parallelize(variant(loss=lambda out, batch: returned(out)))


# --- losses that do not add up


def mean_loss(out: Tensor, batch: Pair) -> tuple[Tensor, float]:
    return F.cross_entropy(out, batch[1]), 1.0


def unweighted_loss(out: Tensor, batch: Pair) -> tuple[Tensor, float]:
    return F.cross_entropy(out, batch[1], reduction="sum"), 1.0


def mean_extra(out: Tensor, batch: Pair) -> tuple[Tensor, int, dict[str, Tensor]]:
    return *tasks.feature_loss(out, batch), {"entropy": out.softmax(-1).square().mean()}


def crossed_loss(out: Tensor, batch: Pair) -> tuple[Tensor, int]:
    return F.mse_loss(out[:, :1], batch[1].float(), reduction="sum"), len(out)


def all_pairs() -> Task:
    return variant(loss=crossed_loss)


def a_mean() -> Task:
    return variant(loss=mean_loss)


def a_constant_weight() -> Task:
    return variant(loss=unweighted_loss)


def a_mean_as_extra() -> Task:
    return variant(loss=mean_extra)


class Centred(nn.Linear):
    """Mixes samples: subtracts their mean."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0)


class Counting(nn.Linear):
    """Keeps statistics of its own."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("running", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.running.copy_(torch.maximum(self.running, x.detach().std(0).to(self.running.dtype)))
        return super().forward(x)


def mixing_samples() -> Task:
    return variant(model=lambda: Centred(12, tasks.CLASSES))


def own_statistics() -> Task:
    return variant(model=lambda: Counting(12, tasks.CLASSES))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_mean", "does not add up over samples: its sum on 5 samples and on 2 and 3 of them"),
        ("a_constant_weight", "does not add up over samples: its weight on 5 samples"),
        ("a_mean_as_extra", "does not add up over samples: its extra 'entropy'"),
        ("mixing_samples", "does not add up over samples: its sum"),
        ("all_pairs", "(5, 1) meets (5,), which makes all pairs of samples: bring both to one shape, or, where all"),
        ("own_statistics", "'running' is computed from the samples of a micro-batch, by other means than batch norm"),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused_by_name(name: str, message: str, pool: RankPool) -> None:
    with pytest.raises(RefusedPlan) as raised:
        pool.run(start, 2, name, "dp_replicate=2")
    assert message in str(raised.value)
    alone = parallelize(globals()[name](), "single")
    assert any(message in notice for notice in alone.notices), "one process splits nothing, so it is a notice there"


def test_samples_in_another_order_are_not_all_pairs() -> None:
    with AllPairs(5) as pairs:
        losses = torch.ones(5, 1)
        losses[torch.arange(5)] * losses
        F.l1_loss(losses, torch.ones(5), reduction="sum")
    assert [shapes for _, *shapes in pairs.meetings] == [[(5, 1), (5,)]]


def test_the_look_can_be_switched_off(pool: RankPool) -> None:
    losses = pool.run(start, 2, "a_mean", "dp_replicate=2", 1, {"check_loss": False})
    assert all(map(math.isfinite, losses[0]))


class TwoTowers(nn.Module):
    """With a learned temperature of `dims` dims."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 6), nn.Linear(12, 6)
        self.temperature = nn.Parameter(torch.full((1,) * dims, 0.3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.right(x.flip(-1)), self.temperature


def contrastive_loss(out: tuple[Tensor, Tensor, Tensor], batch: Pair) -> tuple[Tensor, int]:
    left, right, temperature = out
    scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T * temperature.exp()
    return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)


def contrastive() -> Task:
    return variant(model=lambda: TwoTowers(1), loss=contrastive_loss, loss_scope="global")


def contrastive_scalar() -> Task:
    return variant(model=lambda: TwoTowers(0), loss=contrastive_loss, loss_scope="global")


def contrastive_undeclared() -> Task:
    return contrastive().with_(loss_scope="sample")


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2,accumulate=2", "dp_shard=4,zero=3",
                                  "dp_replicate=2,dp_shard=2,zero=1", "dp_replicate=4"])  # fmt: skip
def test_a_contrastive_loss_over_all_samples_equals_one_process(plan: str, pool: RankPool) -> None:
    parity = verify("test_engine_errors:contrastive", plan, pool=pool)
    assert parity.parity, parity.text()


@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_a_parameter_without_dims(plan: str, pool: RankPool) -> None:
    parity = verify("test_engine_errors:contrastive_scalar", plan, pool=pool)
    assert parity.parity, parity.text()


def test_a_contrastive_loss_must_be_declared(pool: RankPool) -> None:
    parity = verify("test_engine_errors:contrastive_undeclared", "dp_replicate=2", pool=pool)
    assert parity.refused and 'declares loss_scope="global"' in parity.refused


# --- values that are not finite


class Poisoned(nn.Module):
    """The gradient of `second.weight` is infinite where a feature is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.second = nn.Linear(8, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.clamp(-5, 5)).tanh() * _Explode.apply(self.second.weight.sum(), x.max()) ** 0)


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        ctx.largest = float(largest)
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradient, math.inf if ctx.largest > 50 else 0.0), None


def poisoned_batch(step: int) -> Pair:
    x, labels = tasks.feature_batch(step, 8)
    if step == 1:
        x[7, 0] = 100.0  # on the last rank
    return x, labels


def bad_gradient() -> Task:
    return variant(model=Poisoned, batch=poisoned_batch)


def bad_gradient_of_a_closure() -> Task:
    def lbfgs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([param for group in groups for param in group["params"]], lr=0.1, max_iter=2)

    return bad_gradient().with_(optimizer=lbfgs)


def nan_batch(step: int) -> Pair:
    x, labels = tasks.feature_batch(step, 8)
    if step == 1:
        x[7, 0] = math.nan
    return x, labels


def bad_loss() -> Task:
    return variant(batch=nan_batch)


@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_a_bad_gradient_raises_with_its_parameter(plan: str, pool: RankPool) -> None:
    with pytest.raises(RunError) as raised:
        pool.run(start, 2, "bad_gradient", plan, 2)
    text = str(raised.value)
    assert "gradient norm" in text and "is not finite in step 2" in text
    assert "the first bad gradient is that of 'second.weight'" in text
    assert 'on_nonfinite="skip"' in text


def test_a_bad_loss_raises() -> None:
    with pytest.raises(RunError, match="loss nan is not finite in step 2"):
        start("bad_loss", "single", 2)


def skipping(name: str, plan: str) -> list[tuple[bool, bool]]:
    """For each step: was it skipped, and did the parameters stay as they were?"""
    task: Task = globals()[name]()
    engine = parallelize(task, plan, on_nonfinite="skip")
    seen = []
    for step in range(3):
        before = {n: p.clone() for n, p in engine.full_parameters()}
        result = engine.step(task.batch(step))  # type: ignore[misc]
        same = all(torch.equal(before[n], p) for n, p in engine.full_parameters())
        seen.append((result.skipped, same))
    assert engine.state.skipped_steps == 1 and engine.steps_done == 3
    return seen


@pytest.mark.parametrize("name", ["bad_gradient", "bad_loss"])
@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_skipping_leaves_the_weights_and_goes_on(plan: str, name: str, pool: RankPool) -> None:
    for seen in pool.run(skipping, 2, name, plan):
        assert seen == [(False, False), (True, True), (False, False)]


def test_an_optimizer_that_asks_again_skips_too(pool: RankPool) -> None:
    for seen in pool.run(skipping, 2, "bad_gradient_of_a_closure", "dp_replicate=2"):
        assert seen == [(False, False), (True, True), (False, False)]


def weightless() -> Task:
    return variant(loss=lambda out, batch: (out.sum() * 0, 0))


def test_a_batch_in_which_nothing_counts() -> None:
    with pytest.raises(RunError, match=r"global weight 0 \(no sample or token counts\)"):
        start("weightless", "single", 1)


# --- branches


class Branching(nn.Module):
    """Two ways to the same value, chosen by the samples at hand; each with parameters of its own."""

    def __init__(self, routed: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, tasks.CLASSES)
        self.left, self.right = nn.Linear(12, tasks.CLASSES), nn.Linear(12, tasks.CLASSES)
        self.routed = routed
        if not routed:
            for way in (self.left, self.right):
                nn.init.zeros_(way.weight)
                nn.init.zeros_(way.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.trunk(x)
        goes_left = x[:, 0] > 0
        if not self.routed:
            return out + (self.left(x) if bool(goes_left.all()) else self.right(x))
        for way, chosen in ((self.left, goes_left), (self.right, ~goes_left)):
            if bool(chosen.any()):
                out = out.index_add(0, chosen.nonzero().view(-1), way(x[chosen]))
        return out


def split_batch(step: int) -> Pair:
    """The first half of the samples goes left, the second right: each rank of two takes one branch."""
    x, labels = tasks.feature_batch(step, 8)
    x[:, 0] = torch.where(torch.arange(8) < 4, 1.0, -1.0)
    return x, labels


def split_later(step: int) -> Pair:
    """In the first step, which is looked at, all samples go left."""
    x, labels = split_batch(step)
    return (x, labels) if step else (x.abs(), labels)


def branching_at_once() -> Task:
    return variant(model=Branching, batch=split_batch)


def branching() -> Task:
    return variant(model=Branching, batch=split_later)


def routed() -> Task:
    return variant(model=lambda: Branching(routed=True), batch=split_batch, branches="per_sample")


@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_a_branch_that_differs_is_named_with_its_ranks(plan: str, pool: RankPool) -> None:
    with pytest.raises(RunError) as raised:
        pool.run(start, 2, "branching", plan, 2, timeout_s=40)
    text = str(raised.value)
    assert "a branch differs between ranks: parameter" in text
    assert "'left.weight' was used by rank 0 but not by rank 1" in text
    assert 'declare Task(branches="per_sample")' in text


def test_a_branch_for_the_whole_batch_is_refused_before_the_first_step(pool: RankPool) -> None:
    with pytest.raises(RefusedPlan, match="a choice that is made for all samples of a batch at once"):
        pool.run(start, 2, "branching_at_once", "dp_replicate=2", 1, timeout_s=40)


@pytest.mark.parametrize("plan", DATA_PARALLEL[:3])
def test_samples_routed_one_by_one_equal_one_process(plan: str, pool: RankPool) -> None:
    parity = verify("test_engine_errors:routed", plan, pool=pool)
    assert parity.parity, parity.text()


# --- a second backward


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.head = nn.Linear(12, tasks.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.clone().requires_grad_()
        y = checkpoint(self.layer, x, use_reentrant=True)
        return self.head(checkpoint(self.layer, y, use_reentrant=True))


def reentrant() -> Task:
    return variant(model=Twice)


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=2"])
def test_a_reentrant_checkpoint_used_twice_is_named(plan: str, pool: RankPool) -> None:
    try:
        losses = pool.run(start, 2, "reentrant", plan, 1)
    except RunError as error:
        assert "came in several pieces" in str(error) and "'layer." in str(error)
    else:
        assert all(map(math.isfinite, losses[0]))


def test_parameters_of_another_dtype_are_told() -> None:
    task = tasks.mlp()
    double = task.with_(model=lambda: task.model().double())
    assert any("built in torch.float64 are held in torch.float32" in n for n in parallelize(double, "single").notices)
    assert not any("built in" in n for n in parallelize(task, "single").notices)
    assert not any("built in" in n for n in parallelize(double, "precision=fp64").notices)
