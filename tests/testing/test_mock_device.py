"""Every kind of plan on a mock accelerator: equal to the CPU to the bit, and what the host reads there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import run_tasks
import torch
import torch.distributed as dist
import torchgen
import yaml
from changed_scripts import SCRIPTS, changed, run_script, same
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import shardwise.part.gathering
from shardwise import Plan, Task, parallelize, prepare, verify
from shardwise.comm import Axis, Pending, all_reduce, beside, text
from shardwise.device import device_uuid
from shardwise.errors import InputError, ShardwiseError
from shardwise.host import HostReads
from shardwise.models import tasks
from shardwise.parallel.sequence import block_attention
from shardwise.proof.oracle import run_oracle
from shardwise.proof.rank import run_rank
from shardwise.proof.settings import Settings
from shardwise.ranks import RankPool
from shardwise.step import normalise
from shardwise.task_names import resolve_task
from shardwise.testing import mock_device


@pytest.fixture(scope="module")
def mocks() -> Iterator[RankPool]:
    """Ranks of their own: a device is registered for a process's life."""
    with RankPool(quiet=True) as ranks:
        yield ranks


def momentum(groups: list[dict]) -> torch.optim.Optimizer:
    """Keeps no count of steps, which torch's Adam reads from a tensor on the CPU."""
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


Steps = tuple[list[float], dict[str, torch.Tensor], dict[str, int], dict[str, int]]


def steps_on(device: str, name: str, plan: str) -> Steps:
    """Losses and weights of two steps, and the host's reads in the second: by name, and by other code."""
    task = resolve_task(name).with_(optimizer=momentum)
    assert task.batch is not None
    engine = parallelize(task, plan, device=device, clip_norm=1.0)
    losses = []
    for step in range(2):
        with HostReads() as reads:
            losses.append(engine.step(task.batch(step)).loss)
    weights = {key: value.detach().cpu().clone() for key, value in engine.full_parameters()}
    engine.close()
    return losses, weights, dict(reads.named), dict(reads.others)


Found = tuple[bool, list[str], dict[str, int], dict[str, int], list[str]]


def both(name: str, plan: str, own_backend: bool = True) -> Found:
    """Whether losses are equal on the CPU and on a mock accelerator, which weights differ, and the latter's reads and
    operations."""
    device = mock_device.install()
    if own_backend and dist.get_world_size() > 1:
        mock_device.join_group()
    # both take the operations of which attention is composed, and one norm of each gradient: kernels of the CPU alone,
    # and norms by runs, which a CPU needs, round in another order
    torch.backends.cuda.enable_flash_sdp(False)
    kernel_for, block_attention.kernel_for = block_attention.kernel_for, lambda *_: None
    by_runs, normalise._norms_of_runs = normalise._norms_of_runs, lambda gradient: [gradient.norm().reshape(1)]
    try:
        here, there = steps_on("cpu", name, plan), steps_on(str(device), name, plan)
    finally:
        block_attention.kernel_for = kernel_for
        normalise._norms_of_runs = by_runs
        torch.backends.cuda.enable_flash_sdp(True)
    assert here[1].keys() == there[1].keys()
    differing = [key for key, value in here[1].items() if not torch.equal(value, there[1][key])]
    return here[0] == there[0], differing, *there[2:], sorted(func.name() for func in mock_device.SEEN)


ROW = {"control row": 1}
STAGES = {"control row": 1, "texts": 1}
# task, plan, what the host reads in a step by name, and what else it waits for
CASES = [
    ("vit", "single", ROW, {}),
    ("decoder_dropout", "remat=full", ROW, {}),
    ("mlp_frozen_unused", "dp_replicate=2,accumulate=2", ROW, {}),
    ("decoder_dropout", "dp_replicate=2,remat=selective", ROW, {}),
    ("mlp", "dp_replicate=2,precision=bf16", ROW, {}),
    ("mlp", "dp_replicate=2,precision=bf16,masters=split,optimizer_state=8bit", ROW, {}),
    ("mlp", "dp_shard=2,zero=3,optimizer_state=bf16", ROW, {}),
    ("unet_batchnorm", "dp_replicate=2", ROW, {}),
    ("mlp_frozen_unused", "dp_shard=2,zero=1", ROW, {}),
    ("mlp", "dp_shard=2,zero=2,accumulate=2", ROW, {}),
    ("decoder_tied", "dp_shard=2,zero=3,remat=full", ROW, {}),
    ("gpt2", "tp=2", ROW, {}),
    ("decoder", "tp=2,sp=true", ROW, {}),
    ("decoder", "tp=2,tp_overlap=true", ROW, {}),
    ("decoder", "pp=2,microbatches=2", STAGES, {}),
    ("decoder", "pp=2,schedule=zbv,microbatches=2", STAGES, {}),
    # a model of experts counts each one's tokens, and copies the counts
    ("moe", "dp_shard=2,ep=2", {"control row": 1, "rows for experts": 2}, {"bincount": 2, "_to_copy": 2}),
    ("sequence_tasks:decoder", "cp=2", ROW, {}),
    ("sequence_tasks:grouped", "cp_ulysses=2", ROW, {}),
    ("domain_tasks:unet_group", "domain=2", ROW, {}),
]  # fmt: skip
MORE = [
    ("decoder", "dp_replicate=2,dp_shard=2,zero=3"), ("decoder", "dp_shard=2,zero=3,tp=2"), ("gpt2", "tp=4,sp=true"),
    ("decoder", "pp=2,schedule=interleaved1f1b,stages_per_rank=2,microbatches=4"), ("moe", "dp_shard=2,ep=2,tp=2"),
    ("decoder_tied", "pp=2,dp_replicate=2,microbatches=2"), ("vit", "dp_shard=2,zero=3"), ("unet_group", "tp=2"),
    ("sequence_tasks:windowed", "cp=2"), ("sequence_tasks:encoder", "cp=2"), ("sequence_tasks:decoder", "cp=2,tp=2"),
    ("domain_tasks:resnet", "domain=2"), ("domain_tasks:vit", "domain=2"), ("domain_tasks:unet_batch", "domain=2"),
    ("hf_llama", "tp=2"), ("hf_llama", "dp_shard=2,zero=3"), ("mlp", "dp_replicate=2,precision=fp16"),
    ("mlp", "dp_shard=2,zero=1,precision=bf16,masters=split,optimizer_state=8bit"),
    ("mlp", "dp_replicate=2,optimizer_state=8bit,offload=optimizer:disk"),
]  # fmt: skip


def on_the_host() -> Task:
    """Whose loss makes a tensor on the CPU, wherever the output is."""

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return ((output - batch[1]).square() * torch.linspace(0, 1, output.shape[-1])).sum(), output.shape[0]

    return tasks.mlp().with_(loss=loss)


def test_a_task_that_fails_on_the_device_alone_is_told_so(mocks: RankPool) -> None:
    with pytest.raises(InputError, match=r"fails on 5 samples in one process too: .* on cpu .* On the CPU it runs"):
        mocks.run(steps_on_a_mock, 2, "test_mock_device:on_the_host", "dp_replicate=2")


def steps_on_a_mock(name: str, plan: str) -> Steps:
    device = mock_device.install()
    mock_device.join_group()
    return steps_on(str(device), name, plan)


def named(task: str) -> str:
    return task if ":" in task else f"shardwise.models.tasks:{task}"


@cache
def without_gpu_kernel() -> set[str]:
    """Operations of torch that have a kernel for the CPU and none for CUDA."""
    table = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    found = set()
    for entry in yaml.load(table.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        kinds = {kind.strip() for key in entry.get("dispatch", {}) for kind in key.split(",")}
        if "CPU" in kinds and "CUDA" not in kinds and not any(kind.startswith("Composite") for kind in kinds):
            found.add(f"aten::{entry['func'].partition('(')[0]}")
    return found


def prove(task: str, plan: str, pool: RankPool, own_backend: bool = True) -> list[list[dict[str, int]]]:
    """Each rank's reads, once all is equal to the CPU."""
    ranks: list[Found] = pool.run(both, Plan.parse(plan).world_size, named(task), plan, own_backend, timeout_s=180)
    for equal, differing, _, _, seen in ranks:
        assert equal and not differing
        assert len(seen) > 20 and not set(seen) & without_gpu_kernel()
    return [[reads, others] for _, _, reads, others, _ in ranks]


# what they add to a plan above runs on the host alone: another schedule, messages in pieces, heads dealt once more
RARE = ("tp=2,tp_overlap=true", "pp=2,schedule=zbv,microbatches=2", "cp_ulysses=2")


@pytest.mark.parametrize(
    ("task", "plan", "reads", "others"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case[1] in RARE)) for case in CASES],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_equal_to_the_cpu(task: str, plan: str, reads: dict, others: dict, mocks: RankPool) -> None:
    for found in prove(task, plan, mocks):
        assert found == [reads, others]


@pytest.mark.long
@pytest.mark.parametrize(("task", "plan"), MORE)
def test_equal_to_the_cpu_in_full(task: str, plan: str, mocks: RankPool) -> None:
    prove(task, plan, mocks)


def test_messages_go_through_the_host_where_the_device_has_no_backend(mocks: RankPool) -> None:
    for _, others in prove("mlp", "pp=2,microbatches=2", mocks, False):
        assert others.keys() <= {"_to_copy", "copy_"} and others


# --- it shows what a GPU would


def a_few(device: torch.device) -> Iterator[Callable[[], Any]]:
    here, there = torch.arange(4.0), torch.arange(4.0, device=device)
    yield lambda: here + there
    yield lambda: there.add_(here)
    yield lambda: torch.cat([there, here])
    yield lambda: here.mul_(there.sum())
    yield lambda: torch.mm(there.view(2, 2), here.view(2, 2))
    yield lambda: torch.nn.functional.embedding(torch.tensor([1]), there.view(2, 2))
    yield lambda: there.numpy()
    yield lambda: pickle.dumps(there)


def refusals() -> list[str]:
    """What a mock accelerator raises where a GPU does; and what both allow."""
    device, found = mock_device.install(), []
    for attempt in a_few(device):
        try:
            found.append(f"allowed: {attempt()}")
        except (RuntimeError, TypeError):
            found.append("")
    there = torch.arange(4.0, device=device)
    assert (there * torch.tensor(2.0))[torch.tensor([1, 3])].tolist() == [2, 6]
    assert there.device == device and (there + 1).device == device and there.cpu().device.type == "cpu"
    view = there.view(2, 2)
    view.t_()
    view[0] = 9
    assert there.tolist() == [9, 1, 9, 3] and not view.is_contiguous()
    return found


def test_what_a_gpu_refuses(mocks: RankPool) -> None:
    assert mocks.run(refusals, 1) == [[""] * 8]


def draws() -> bool:
    """Whether draws on the device leave the CPU's generator alone, and repeat with the device's own."""
    device = mock_device.install()
    torch.manual_seed(3)
    before, state = torch.get_rng_state(), torch.get_device_module(device).get_rng_state()
    first = torch.randn(4, device=device).tolist()
    torch.get_device_module(device).set_rng_state(state)
    again = torch.empty(4, device=device).normal_().tolist()
    return torch.equal(before, torch.get_rng_state()) and first == again


def test_draws_are_the_devices_own(mocks: RankPool) -> None:
    assert mocks.run(draws, 1) == [True]


def before_and_after() -> tuple[bool, list[float]]:
    """Whether a sum's result is unreadable before it was waited for, and the result."""
    device = mock_device.install()
    mock_device.join_group()
    tensor = torch.ones(2, device=device)
    axis = Axis("world", 2, dist.get_rank(), dist.group.WORLD, (0, 1))
    pending = all_reduce(tensor, axis, "test", wait=False)
    unreadable = bool(tensor.isnan().all())
    pending.wait()
    return unreadable, tensor.tolist()


def test_a_result_is_there_once_it_was_waited_for(mocks: RankPool) -> None:
    assert mocks.run(before_and_after, 2) == [(True, [2.0, 2.0])] * 2


# --- bugs planted: each is one that the CPU alone hides


def never_waits(name: str, plan: str) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "wait", lambda self: None)
        return both(name, plan)


def test_a_missing_wait_is_found(mocks: RankPool) -> None:
    with pytest.raises(ShardwiseError):
        mocks.run(never_waits, 2, named("mlp"), "dp_replicate=2")


def copies_and_waits(name: str, plan: str) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardwise.part.gathering, "to_device", lambda values, device: torch.from_numpy(values).to(device))
        return both(name, plan)


def test_a_copy_that_waits_is_counted(mocks: RankPool) -> None:
    *_, others, _ = mocks.run(copies_and_waits, 2, named("decoder_tied"), "tp=2,sp=true", timeout_s=180)[0]
    assert others.keys() == {"_to_copy"}


def on_the_cpu() -> Task:
    """Its loss makes a tensor without saying where."""

    def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return (output.square().sum(-1) * torch.ones(len(output))).sum(), len(output)

    return tasks.mlp().with_(loss=loss)


def test_a_tensor_on_the_wrong_device_is_found(mocks: RankPool) -> None:
    with pytest.raises(ShardwiseError, match="on the same device"):
        mocks.run(both, 1, "test_mock_device:on_the_cpu", "single")


def has_a_group_of_its_own() -> bool:
    """Whether an axis is given a second group where the device has a backend of its own."""
    device = mock_device.install()
    mock_device.join_group()
    axis = Axis("pp", 2, dist.get_rank(), dist.group.WORLD, (0, 1))
    return beside(axis, device).group is not axis.group and beside(axis, torch.device("cpu")) is axis


def test_messages_that_would_wait_for_each_other_have_groups_of_their_own(mocks: RankPool) -> None:
    assert mocks.run(has_a_group_of_its_own, 2) == [True, True]


# --- doors on a device


def proof_on_the_device(name: str, plan: str) -> tuple[list[float], list[float], bool]:
    """Losses of one process and of this rank in a proof on the device, and whether all gradients are equal."""
    device = mock_device.install()
    mock_device.join_group()
    settings = Settings(clip_norm=1.0, device=device.type)
    alone = run_oracle(resolve_task(name).with_(optimizer=momentum), settings)
    assert len(mock_device.SEEN) > 20
    ranks = run_rank(resolve_task(name).with_(optimizer=momentum), Plan.parse(f"{plan},precision=fp64"), settings)
    near = [
        torch.allclose(mine, value, rtol=0, atol=1e-12)
        for step, found in zip(alone.gradients, ranks.gradients, strict=False)
        for value, mine in ((value, found[key]) for key, value in step.items())
        if value is not None and mine is not None
    ]
    return alone.losses, ranks.losses, all(near)


def test_a_proof_on_the_device_runs_both_sides_there(mocks: RankPool) -> None:
    for alone, ranks, near in mocks.run(proof_on_the_device, 2, named("decoder"), "dp_replicate=2"):
        assert near and max(abs(a - b) for a, b in zip(alone, ranks, strict=True)) < 1e-12


def test_a_proof_on_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r'device = "cuda", but torch sees no accelerator on this machine: use "cpu"'):
        verify(tasks.mlp(), "dp_replicate=2", device="cuda")


class Dropping(nn.Module):
    """A block that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.inner(x)))


def script(device: str, world: int, plan: str = "dp_shard=2,zero=2") -> tuple[list[float], str, list[str]]:
    """Losses of a script whose model lies on `device`, where it is in the end, and what was told."""
    mock_device.install()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 2, (24,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(Dropping(), Dropping(), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, told = [], []
    if world > 1:
        mock_device.join_group()
        prepared = model, optimizer, loader = prepare(model, optimizer, loader, plan=plan)
        told = sorted(prepared._notices._said)
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if world > 1:
            loss = prepared.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()["3.weight"].device.type, told


@pytest.mark.parametrize("plan", ["dp_replicate=2,remat=full", "dp_shard=2,zero=2,remat=selective"])
def test_recompute_in_a_script_repeats_the_devices_draws(plan: str, mocks: RankPool) -> None:
    ((alone, *_),) = mocks.run(script, 1, "mock", 1)
    for losses, *_ in mocks.run(script, 2, "mock", 2, plan):
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-6


@pytest.mark.parametrize("device", ["cpu", "mock"])
def test_a_script_runs_where_it_put_its_model(device: str, mocks: RankPool) -> None:
    ((alone, *_),) = mocks.run(script, 1, device, 1)
    for losses, where, told in mocks.run(script, 2, device, 2):
        assert where == device and max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-6
        assert any("though this machine has an accelerator" in one for one in told) == (device == "cpu")


# --- scripts whose default device it is, as `torch.set_default_device("cuda")` makes a GPU


def run_by_default(path: str, ranks: int) -> dict[str, Any]:
    """What a script comes to whose tensors are made on the device."""
    device = mock_device.install()
    if ranks > 1:
        mock_device.join_group()
    torch.set_default_device(device.type)
    own = torch.randperm  # a loader shuffles by a generator of the CPU's
    torch.randperm = lambda *args, **options: own(*args, **({"device": "cpu"} | options))
    try:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), run_script(path))
    finally:
        torch.randperm = own
        torch.set_default_device(None)


def of(names: str, plan: str) -> list[Any]:
    return [pytest.param(name, plan, marks=pytest.mark.long) for name in names.split()]


@pytest.mark.parametrize(("name", "plan"), [
    ("augmented", "dp_replicate=2"), *of("vae", "dp_shard=2,zero=1"),
    *of("weather image_classifier siamese unet diffusion_ema gan causal_lm dino detector mixup neural_operator trainer "
        "lora char_gpt transformer_lm masked_lm distillation momentum_contrast two_optimizers swa reinforce",
        "dp_replicate=2"),
    ("vae", "tp=2"), *of("causal_lm image_classifier diffusion segmentation fine_tuning char_gpt", "tp=2"),
    *of("weather unet", "domain=2"), *of("shifted_gpt char_gpt", "cp=2"),
])  # fmt: skip
def test_scripts_on_a_default_device_equal_one_process(name: str, plan: str, mocks: RankPool, tmp_path: Path) -> None:
    def run(ranks: int, text: str) -> list[dict[str, Any]]:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return mocks.run(run_by_default, ranks, str(path), ranks, timeout_s=100)

    (alone,) = run(1, (SCRIPTS / f"{name}.py").read_text())
    for found in run(2, changed(name, plan)):
        same(found, alone)


def averaged(plan: str | None) -> list[float]:
    """Sums of an average over `state_dict()` that begins as a copy of the model on its device."""
    device = mock_device.install()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double().to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4, dtype=torch.float64)
    loader: Any = DataLoader(TensorDataset(x, x[:, :2].clone()), batch_size=4)
    backward: Any = torch.Tensor.backward
    if plan is not None:
        mock_device.join_group()
        prepared: Any = prepare(model, optimizer, loader, plan=plan)
        (model, optimizer, loader), backward = prepared, prepared.backward
    for x, y in loader:
        optimizer.zero_grad()
        backward((model(x.to(device)) - y.to(device)).square().mean())
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.5)
    return [each.sum().item() for each in average.values()]


def test_whole_weights_lie_where_the_model_does(mocks: RankPool) -> None:
    (alone,) = mocks.run(averaged, 1, None)
    assert all(found == pytest.approx(alone, rel=1e-12) for found in mocks.run(averaged, 2, "tp=2"))


def sharing(uuid: str) -> str:
    """What ranks are told whose devices have this name, and a backend of their own."""
    device = mock_device.install()
    mock_device.join_group()
    text.device_uuid = lambda _: uuid or str(dist.get_rank())
    try:
        text.refuse_shared_devices(device)
    except InputError as error:
        return str(error)
    finally:
        text.device_uuid = device_uuid
    return ""


def test_ranks_that_share_a_device_over_its_own_backend_are_refused(mocks: RankPool) -> None:
    assert all("ranks 0 and 1 have one accelerator" in told for told in mocks.run(sharing, 2, "one"))
    assert mocks.run(sharing, 2, "") == ["", ""]


def switched() -> None:
    """An optimizer with a mode, whose state would lie on the host."""
    device = mock_device.install()
    mock_device.join_group()
    parallelize(run_tasks.averaged(), "dp_shard=2,zero=1,offload=optimizer", device=device)


def test_an_optimizer_with_a_mode_keeps_its_state_on_the_device(mocks: RankPool) -> None:
    with pytest.raises(ShardwiseError, match="Averaging is switched between training and evaluation"):
        mocks.run(switched, 2)
