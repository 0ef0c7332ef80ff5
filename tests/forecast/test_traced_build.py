"""What a trace makes of modules as their constructors leave them: tied, deep-copied, with terms of the loss besides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from shardwise import Plan, Task
from shardwise.errors import InputError
from shardwise.memory.live import LiveBytes
from shardwise.precision import Precision
from shardwise.rehearsal.op_counts import Count, update_of
from shardwise.rehearsal.step_trace import build, trace
from shardwise.simulator.counted import StepTrace
from shardwise.simulator.parts import FOREACH
from shardwise.trace.fake import Fake

WIDTH, WORDS = 16, 60


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, values: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        if values:  # so that it is built for real
            float(self.words.weight.detach().sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


def summed(output: torch.Tensor, batch: object) -> tuple[torch.Tensor, int]:
    return output.square().sum(), len(output)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_tied_weights_are_one_whatever_the_precision(precision: str, values: bool) -> None:
    task = Task(model=lambda: Tied(values), loss=summed, batch=lambda step: torch.arange(12).view(4, 3))
    found = trace(task, 2, precision)
    assert found.parameters == WORDS * WIDTH
    assert found.tensors == 1
    model = build(task, Fake(), Precision.of(Plan(precision=precision)))
    assert model.head.weight is model.words.weight


def test_weights_of_copied_layers_are_not_made_by_the_step() -> None:
    """`nn.Transformer` copies a layer as often as it is deep."""

    def peak(copied: bool) -> int:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 4096, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) if copied else layer

    tasks = [Task(model=lambda c=copied: peak(c), loss=summed, batch=lambda step: torch.ones(4, 3, WIDTH))
             for copied in (False, True)]  # fmt: skip
    plain, copied = (trace(task, 2) for task in tasks)
    assert copied.parameters == plain.parameters
    assert copied.peak == plain.peak


def test_terms_beside_the_loss_are_differentiated_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def loss(output: torch.Tensor, batch: object) -> tuple:
        return output.sum(), len(output), {"spread": (output.exp().sum(), len(output))}

    def plain(output: torch.Tensor, batch: object) -> tuple:
        return output.sum(), len(output)

    with_term, without = (trace(Task(model=Two, loss=each, batch=lambda step: torch.ones(4, 8)), 4)
                          for each in (loss, plain))  # fmt: skip
    assert with_term.peak >= without.peak + 4 * 512 * 4, "the term's graph keeps its exponential"


def test_transforms_and_bilinear_layers_are_flops() -> None:
    """By hand: 5 n log2 n for n complex points, half of it for real ones, and a product for x W y."""

    class Transforms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft2(torch.fft.rfft2(x * self.scale), s=(8, 16))

    task = Task(model=Transforms, loss=summed, batch=lambda step: torch.ones(4, 8, 16))
    assert trace(task, 2).flops == (3 * 2.5 + 5) * 2 * 8 * 16 * 7, "backward of a real one is complex"

    with pytest.raises(InputError, match=r"BFloat16; .*plan with precision=fp32"):
        trace(task, 2, "bf16")

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Bilinear(5, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pair(x, x[:, :4])

    task = Task(model=Pairs, loss=summed, batch=lambda step: torch.ones(6, 5))
    assert trace(task, 6).flops == 2 * 2 * 6 * 3 * 5 * 4, "forward, and the weight's gradient"


OPTIMIZERS = (
    torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop, partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    torch.optim.Adagrad,
)  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: getattr(make, "func", make).__name__)
def test_an_optimizer_on_a_gpu_goes_over_all_tensors_at_once(make: Callable) -> None:
    """What it moves and what lives meanwhile, of tensors of other sizes than those on which it was seen."""
    task = Task(model=nn.Identity, loss=summed, batch=lambda step: torch.ones(1), optimizer=make)
    seen = update_of(task, at_once=True)
    parameters = [nn.Parameter(torch.ones(size)) for size in ((300, 40), (128, 128), (4096,))]
    optimizer = make(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values()) if isinstance(t, torch.Tensor)]
    counted, live = StepTrace(1), LiveBytes()
    live.count(held)
    rests, elements = live.now, sum(parameter.numel() for parameter in parameters)
    with live, Count(counted):
        optimizer.step()
    assert (live.peak - rests) / (4 * elements) == pytest.approx(seen.temporary, rel=0.01)
    assert counted.moved / elements == pytest.approx(sum(wide for _, wide in seen.work), rel=0.01)
    assert seen.calls == counted.calls > 0


def test_decoders_by_name_take_the_same_optimizer() -> None:
    task = Task(model=nn.Identity, loss=summed, batch=lambda step: torch.ones(1), optimizer=torch.optim.AdamW)
    moved = sum(wide for _, wide in update_of(task, at_once=True).work)
    read_and_written = 2 * 4 * (1 + 1 + 2)  # the gradient, the weight, two moments, once each
    assert pytest.approx(moved / read_and_written, rel=1e-3) == FOREACH


def _own(model) -> Task:
    return Task(model=model, loss=lambda o, b: (o.sum(), len(o)), batch=lambda step: torch.ones(4, 4))


def test_weights_without_a_shape_are_refused_by_name() -> None:
    """In a forecast and in a run alike."""
    from shardwise.errors import RefusedPlan
    from shardwise.rehearsal.step_trace import trace
    from shardwise.trace.deferred import build

    def lazy() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))

    for look in (lambda: trace(_own(lazy), 2), lambda: build(lazy, 0)):
        with pytest.raises(RefusedPlan, match=r"'1\.weight' \(LazyLinear\) has no shape before a first forward"):
            look()


def test_a_scripted_module_is_refused_where_its_forward_would_be_looked_into() -> None:
    from shardwise.engine.refused_modules import refuse_scripted
    from shardwise.errors import InputError, RefusedPlan
    from shardwise.layout import Plan
    from shardwise.rehearsal.step_trace import trace

    def compiled() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))

    with pytest.raises(InputError, match=r"'0' was made by torch\.jit"):
        trace(_own(compiled), 2)
    for text in ("tp=2", "pp=2", "dp_shard=2,zero=3", "dp_replicate=2,remat=full"):
        with pytest.raises(RefusedPlan, match=r"'0' was made by torch\.jit"):
            refuse_scripted(compiled(), Plan.parse(text))
    for text in ("dp_replicate=2", "dp_shard=2,zero=2"):
        refuse_scripted(compiled(), Plan.parse(text))


def test_sparse_gradients_are_traced_as_the_dense_ones_of_a_run() -> None:
    from shardwise.rehearsal.step_trace import trace

    def table(sparse: bool) -> Task:
        return Task(
            model=lambda: nn.Sequential(nn.Embedding(64, 8, sparse=sparse), nn.Linear(8, 2)),
            loss=lambda o, b: (o.sum(), len(o)), batch=lambda step: torch.arange(8),
        )  # fmt: skip

    assert trace(table(True), 4).peak == trace(table(False), 4).peak


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy"])
def test_the_one_number_of_a_loss_holds_what_its_kernel_leaves_behind_it(name: str) -> None:
    """Against the live bytes of a real step on a module that is mostly its output."""
    from shardwise.memory.live import LiveBytes

    def loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return getattr(nn.functional, name)(output, batch, reduction="sum"), len(output)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())

    task = Task(model=model, loss=loss, batch=lambda step: torch.full((32, 64), 0.5))
    built, batch = task.model(), task.batch(0)
    for parameter in built.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    live = LiveBytes()
    live.count([*built.parameters(), batch])
    base = live.now
    with live:
        total = loss(built(batch), batch)[0]
        total.backward()
    assert trace(task, 32).peak == pytest.approx(live.peak - base, rel=0.01)


def test_tensors_of_a_batch_that_lie_in_one_another_count_once() -> None:
    from shardwise.rehearsal.step_trace import batch_bytes, one_sample

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        words = torch.zeros(8, 5, dtype=torch.long)
        other = torch.zeros(8, 3)
        return words, words, words[:, 1:], other

    task = Task(model=lambda: nn.Linear(1, 1), loss=summed, batch=batch)
    assert batch_bytes(one_sample(task)) == 5 * 8 + 3 * 4


def test_a_forward_that_takes_gradients_is_refused_where_it_is_followed_without() -> None:
    """A residual of a differential equation: replicas, ZeRO and tp are searched, pp left out with the reason."""
    from shardwise.cluster import Cluster
    from shardwise.costs.software import software
    from shardwise.planner.candidates import Constraints
    from shardwise.planner.traced_layouts import subject_of
    from shardwise.planner.traced_task import Traced

    made = Traced(pinn(), Cluster.parse("4 h100-sxm-80gb"), software("shardwise"), "fp32", (1, 2), True)
    found = list(subject_of(made, 16, ("none",)).layouts(4, Constraints()))
    assert {layout.zero for layout in found if layout.tp * layout.pp == 1} == {0, 1, 2, 3}
    assert {(layout.tp, layout.pp) for layout in found} == {(1, 1), (2, 1)}
    assert any("tp beyond 2 is not looked at" in remark for remark in made.remarks)
    assert any("torch.autograd.grad" in remark and "pp=2" in remark for remark in made.remarks)


def pinn() -> Task:
    """The residual of a differential equation, whose forward takes gradients."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_(True)
            return torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)[0]

    return Task(model=Residual, loss=summed, batch=lambda step: torch.linspace(-1, 1, 32).view(16, 2))


def test_a_forward_that_takes_gradients_is_equal_to_one_process(pool) -> None:
    """The look at a few samples runs it with gradients; under zero=3 all weights are one unit, whole while it runs."""
    from shardwise import verify

    assert verify(pinn, "dp_shard=2,zero=2", pool=pool).parity
    assert verify(in_blocks, "dp_shard=2,zero=3", pool=pool).parity


@pytest.mark.parametrize("again", [False, True])
def test_a_loss_that_takes_gradients_through_the_model_is_equal_or_refused_under_zero_3(pool, again: bool) -> None:
    """Weights are freed after the forward, before the backward of a gradient that the loss took."""
    from shardwise import verify

    found = verify(partial(slopes_in_the_loss, again), "dp_shard=2,zero=3", pool=pool)
    assert ("in the model's forward, or use zero=2" in (found.refused or "")) if again else found.parity


class Energy(nn.Module):
    """Energies of points, and the forces that are their gradients, after three layers of one kind."""

    def __init__(self, forces: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.forces = forces

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = h = x.requires_grad_(True)
            for layer in self.layers:
                h = h + torch.tanh(layer(h))
            energy = h.square().sum(1)
            return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0] if self.forces else x


def in_blocks() -> Task:
    """Energies and forces, both in the loss."""

    def loss(output: tuple[torch.Tensor, torch.Tensor], batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        energy, forces = output
        return energy.square().sum() + forces.square().sum(), len(batch)

    return Task(model=Energy, loss=loss, batch=lambda step: torch.linspace(-1, 1, 24).view(6, 4) + step)


def slopes_in_the_loss(again: bool) -> Task:
    """A loss weighed by gradients that it takes itself; `again`: which are differentiated."""

    def loss(output: tuple[torch.Tensor, torch.Tensor], batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        energy, x = output
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=again, retain_graph=True)
        return (energy * slope.square().sum(1)).sum(), len(batch)

    return Task(model=partial(Energy, False), loss=loss, batch=lambda step: torch.linspace(-1, 1, 24).view(6, 4) + step)


def test_an_optimizer_with_a_closure_is_refused_by_name() -> None:
    def lbfgs(groups: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([each for group in groups for each in group["params"]])

    task = Task(model=nn.Identity, loss=summed, batch=lambda step: torch.ones(1), optimizer=lbfgs)
    with pytest.raises(InputError, match="LBFGS asks for a forward and backward as often as it likes"):
        update_of(task)
