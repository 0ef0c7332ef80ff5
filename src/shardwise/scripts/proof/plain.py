"""`Plain`: what `prepare` returns in the one process of a proof: the script's own objects, and calls that only record.

    prepared.backward(loss)             loss.backward()
    prepared.backward(loss, mean_over)  loss.backward(): in one process the mean is over all samples already
    prepared.backward(loss, weight)     gradients of the sum, divided by the step's weights before anything reads them
    sum, gather, split, deal            return what they are given

It shares no code with the engine, so that a bug there cannot hide on both sides of a proof.

What this does not do: resume from a checkpoint of `shardwise.save`; a proof begins where the script does.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.dealing import Share
from shardwise.scripts.entries import as_given, as_one
from shardwise.scripts.proof.recorder import BESIDE, SUMMED, ScriptRecorder, content_of, nudge, shortened
from shardwise.scripts.reading import from_workers, samples_of
from shardwise.scripts.script_lines import refuse_call


class PlainLoader:
    """The script's own loader; `part` is the `Share` of all samples of the current batch."""

    def __init__(self, loader: Any, recorder: ScriptRecorder | None, dim: int | None) -> None:
        """Holds the script's loader; batches are recorded by `recorder`, None for a loader that is not trained on."""
        self.whole = loader if recorder is None else shortened(loader, recorder)
        self.part: Share | None = None
        self._recorder, self._dim = recorder, dim or 0
        self.notices: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.whole)

    def __iter__(self) -> Iterator[Any]:
        return self._epoch(from_workers(iter(self.whole)))  # the loader draws its order now, before any batch

    def _epoch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an epoch, and records its end."""
        most = samples = 0
        for batch in batches:
            samples = self._takes(batch)
            most = max(most, samples)
            yield batch
        if self._recorder is not None:
            self._recorder.epoch_ends(uneven=samples < most)

    def _takes(self, batch: Any) -> int:
        """Returns how many samples a batch has, and records it; 0 if its tensors do not agree."""
        try:
            samples = samples_of(batch, self._dim)
        except InputError:
            samples = 0
        self.part = Share(None, samples, 0, samples)
        if self._recorder is not None:
            self._recorder.batch(samples, content_of(batch))
        return samples


class Plain:
    """A script's model, optimizer and loader in one process, with the public methods of `Prepared` on whole tensors."""

    rank = 0
    world_size = 1

    def __init__(
        self, model: Any, optimizer: Optimizer, loader: Any, plan: Plan, recorder: ScriptRecorder, *, dim: int | None,
        unpacks: int = 3,
    ) -> None:  # fmt: skip
        self.plan, self.optimizer, self._recorder, self._unpacks = plan, optimizer, recorder, unpacks
        self._optimizers: list[Optimizer] = []  # one, or several of one model
        self.model = as_one(model)
        self.loader = loader if isinstance(loader, PlainLoader) else PlainLoader(loader, recorder, dim)
        self.loss = torch.tensor(float("nan"))
        self.grad_norm = float("nan")
        self.notices: list[str] = []
        self._weights: list[float] = []  # of this step's losses, until gradients are divided
        self._losses: list[torch.Tensor] = []  # of this step, until then
        self._calls = 0  # backwards of this step
        nudge(self.model.parameters(), recorder.job)
        trained = {name for name, param in self.model.named_parameters() if param.requires_grad}
        self.number = recorder.add(self, _tensors_of(self.model), trained)
        self._take(optimizer)
        for module in self.model.modules():  # a method beside forward calls submodules alone
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                module.register_forward_pre_hook(self._sees_forward)

    def __iter__(self) -> Iterator[Any]:
        return iter((as_given(self.model), self.optimizer, self.loader)[: self._unpacks])

    # --- what a script calls

    def backward(
        self, loss: torch.Tensor = None, weight: torch.Tensor | float | None = None, *,
        mean_over: torch.Tensor | float | None = None, also: Sequence[Plain] = (), retain_graph: bool | None = False,
        summed: bool = False, loader: PlainLoader | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Runs `loss.backward()`; returns the micro-batch's loss, a float64 scalar, as `Stepping.backward` does."""
        self._recorder.may_go_on()
        refuse_call(loss, options)
        # how the loss is given, in the words of `Stepping.backward`
        form = "weight" if weight is not None else "mean_over" if mean_over is not None else "sum" if summed else "mean"
        loss = loss.reshape(())
        loss.backward(retain_graph=retain_graph)
        value = loss.detach().clone().double()
        self._losses.append(value)
        for script in (self, *also):
            # weights add up over the step's backwards, and `_divide` takes their sum
            if weight is not None:
                script._weights.append(float(weight))
            script._calls += 1
            script._recorder.loss(script.number, float(value) / (float(weight) if weight is not None else 1.0), form)
            # gradients of several backwards are one step's: they are divided with the last
            if script._calls % script.plan.accumulate == 0:
                script._divide()
        return value if weight is None else _over(value, float(weight))

    def _divide(self) -> None:
        """Divides this step's gradients and its loss by the sum of its weights, once."""
        if self._losses:
            self.loss = sum(self._losses)
            self.loss = _over(self.loss, sum(self._weights)) if self._weights else self.loss
        total, self._weights, self._losses = sum(self._weights), [], []
        if total:
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad.div_(total)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips gradients by torch's own function; returns their norm before that."""
        self._divide()
        params = [param for group in self._groups() for param in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, max_norm)
        self.grad_norm = float(norm)
        return norm

    def barrier(self) -> None:
        """Does nothing: one process has no other to wait for."""

    @contextmanager
    def whole(self, *, grads: bool = False, state: bool = False) -> Iterator[None]:
        """Context in which nothing changes, since weights, gradients and state are whole."""
        yield

    def sum(self, *values: Any) -> list[Any]:
        """Returns the values themselves: numbers as floats, tensors with dims detached."""
        self._recorder.met(SUMMED)
        numbers = (value.detach() if isinstance(value, torch.Tensor) else value for value in values)
        return [float(n) if not isinstance(n, torch.Tensor) or not n.dim() else n for n in numbers]

    def gather(self, tensor: torch.Tensor, loader: Any = None) -> torch.Tensor:
        """Returns the tensor itself, without gradient."""
        self._recorder.met(SUMMED)
        return tensor.detach()

    def split(self, loader: Any, *, trains: bool = False) -> PlainLoader:
        """Returns another loader of the script's as a `PlainLoader`, which yields whole batches."""
        if not trains:
            self._recorder.met(BESIDE)
        return PlainLoader(loader, self._recorder if trains else None, None)

    def deal(self, *batch: Any) -> Any:
        """Returns the batch itself; several arguments as a tuple."""
        given = batch[0] if len(batch) == 1 else batch
        self.loader._takes(given)
        return given

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns {name: copy on the CPU} of weights and buffers."""
        return {name: t.detach().cpu().clone() for name, t in self.model.state_dict().items()}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        """Loads a state by the model's own method; returns the missing and unexpected keys."""
        self._recorder.met("a load")
        return self.model.load_state_dict(state, strict)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yields the values of the model's parameters, without gradient."""
        return (param.detach() for param in self.model.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the model's buffers."""
        return self.model.buffers()

    def save_weights(self, path: str | Path) -> None:
        """Writes weights and buffers as one safetensors file."""
        from safetensors.torch import save_file

        self._recorder.met("a save")
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, str(path))

    def replace_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns `optimizer` itself, which is recorded from here on."""
        self.optimizer = optimizer
        self._take(optimizer)
        return optimizer

    def save(self, folder: str | Path, **fields: Any) -> Path:
        """Writes the model, the optimizer's state and `fields` by `torch.save`; returns the new folder of this step."""
        self._recorder.met("a save")
        path = Path(folder) / f"step-{len(self._recorder.record.steps):08d}"
        path.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"model": self.state_dict(), "optimizers": [one.state_dict() for one in self._optimizers],
             "fields": fields}, path / "all"
        )  # fmt: skip
        return path

    # --- what is recorded

    def _sees_forward(self, module: nn.Module, args: tuple) -> None:
        """Hook before a module's forward: records an evaluation (eval mode, no gradients)."""
        if not torch.is_grad_enabled() and not self.model.training:
            self._recorder.met("an evaluation")

    def _take(self, optimizer: Any) -> None:
        """Has the steps of the script's optimizer recorded, or of each one in a tuple or list."""
        self._optimizers = [*optimizer] if isinstance(optimizer, tuple | list) else [optimizer]
        for one in self._optimizers:
            self._hook(one)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self._optimizers for group in one.param_groups]

    def _hook(self, optimizer: Optimizer) -> None:
        """Has each step of one optimizer recorded."""
        self._recorder.raise_eps(optimizer)
        inner, plain = optimizer.step, self

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return plain._step(inner, closure)

        if hasattr(inner, "_wrapped_by_lr_sched"):  # a scheduler warns if its mark is gone
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        vars(optimizer)["step"] = types.MethodType(step, optimizer)

    def _step(self, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Runs the optimizer's own step (`inner`), records gradients and weights around it, and returns its result."""
        recorder = self._recorder
        for one in self._optimizers:
            recorder.raise_eps(one)
        if closure is not None:
            result = inner(closure)  # the gradients of its last call
            recorder.before(self.number, self._gradients())
        else:
            self._divide()
            recorder.before(self.number, self._gradients())
            result = inner()
        self._calls = 0
        named = dict(self.model.named_parameters())
        states = [(name, one.state[param]) for name, param in named.items() for one in self._optimizers
                  if param in one.state]  # fmt: skip
        recorder.after(self.number, named.items(), self.model.named_buffers(), states, self._groups())
        return result

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, param.grad) for name, param in self.model.named_parameters() if param.requires_grad)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _over(value: torch.Tensor, weight: float) -> torch.Tensor:
    """Returns value / weight; NaN for weight 0."""
    return value / weight if weight else value * float("nan")


def load_refused(folder: str | Path) -> dict[str, Any]:
    """Raises `InputError`, since `shardwise.load` cannot run in a proof."""
    raise InputError(
        f"verify: the script goes on from a checkpoint ({folder}); a proof begins where the script does: give it a "
        "folder without one (verify --cwd FOLDER)"
    )
