"""`Task`: a model, its data, its loss and its optimizer, in ordinary PyTorch. `Domain`: its dims of space.

A `Task` holds callables and no distributed code. The loss is a *sum and a weight*, so that both can be added over
samples, ranks and micro-batches, and the sum divided once by the global weight.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from shardwise.dataset import Source, as_source
from shardwise.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def default_inputs(batch: Any) -> tuple[tuple, dict]:
    """Returns the model's (args, kwargs): a mapping as keywords, a tuple or list as positional, else one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def default_optimizer(groups: list[dict]) -> Optimizer:
    """Returns an AdamW (Loshchilov and Hutter 2019) with torch's defaults and a learning rate of 1e-3."""
    import torch

    return torch.optim.AdamW(groups, lr=1e-3)


BOUNDARIES = ("zeros", "periodic", "reflect", "replicate", "pole")


OF_TENSORS = "takes two tensors: give a function that takes the target from the batch and returns (sum, weight)"
CALLED_WITH = {  # field of a task -> arguments that its function is called with
    "batch": ("step",), "inputs": ("batch",), "loss": ("output", "batch"), "optimizer": ("groups of parameters",),
}  # fmt: skip


def _takes(field: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Raises `InputError` if the function in `Task.FIELD` cannot be called with these positional arguments (names)."""
    if not inspect.isfunction(function):
        return
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError(f"Task.{field} is called with ({', '.join(arguments)}): {error}") from None


def _in_place_of(field: str, value: Any) -> str:
    """Returns advice on what to give for `Task.field` in place of `value`, which is not callable; "" without any."""
    if field == "optimizer":
        kind = type(value).__name__
        if not hasattr(value, "param_groups"):  # a name, a dict of settings
            from torch import optim

            alike = {name.lower(): name for name, made in vars(optim).items() if isinstance(made, type)}
            kind = f"torch.optim.{alike.get(str(value).rpartition('.')[2].lower(), 'AdamW')}"
        return f": give optimizer=lambda groups: {kind}(groups, ...)"
    if field == "batch" and hasattr(value, "dataset"):
        return ": give the loader's samples instead, data=loader.dataset"
    return ": it is called with a step; samples by index are given as data=..." if field == "batch" else ""


def call_arguments(task: Task, batch: Any) -> tuple[tuple, dict]:
    """Returns the model's (args, kwargs) for a batch; `InputError` if `Task.inputs` returns anything else."""
    call = task.inputs(batch)
    if not (isinstance(call, tuple | list) and len(call) == 2 and isinstance(call[1], dict)):
        raise InputError(
            f"Task.inputs must return what the model is called with, as (args, kwargs), got {type(call).__name__}: "
            'such as lambda batch: ((batch["x"],), {})'
        )
    return call[0], call[1]


@dataclass(frozen=True)
class Domain:
    """Which dims of a task's tensors are space, for plans that shard space into tiles (`domain=2x3`).

    dims      of every tensor with space, in the order of the plan's degrees: (-2, -1), or (1, 2) for (B, H, W, C)
    names     a name for each dim, for messages and `boundary`; (): without names
    boundary  name -> what replaces the implicit padding of convolutions and pooling: "zeros" (the operation's own),
              "periodic", "reflect", "replicate", or "pole" (mirrored, and shifted by half of the periodic dim). It also
              holds without a plan, since `Task.model()` builds the module with it
    """

    dims: tuple[int, ...]
    names: tuple[str, ...] = ()
    boundary: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # dim 0 has the samples
        right = isinstance(self.dims, tuple) and all(isinstance(d, int) and d != 0 for d in self.dims)
        if not right or not 1 <= len(self.dims) <= 3 or len(set(self.dims)) < len(self.dims):
            raise InputError(f"Domain.dims are one to three different dims behind the samples, got {self.dims!r}")
        if self.names and (len(self.names) != len(self.dims) or len(set(self.names)) < len(self.names)):
            # boundaries are given by name, so each dim needs one
            raise InputError(f"Domain.names names each of {len(self.dims)} dims, no two alike, got {self.names!r}")
        for name, kind in self.boundary.items():
            if name not in self.names:
                raise InputError(f"Domain.boundary: no dim is called {name!r} (names: {', '.join(self.names)})")
            if kind not in BOUNDARIES:
                raise InputError(f"Domain.boundary: {name}={kind!r} is none of {', '.join(BOUNDARIES)}")
        kinds = list(self.boundary.values())
        # with mixed signs the order of dims would depend on a tensor's number of dims
        if any(kind != "zeros" for kind in kinds) and len({d < 0 for d in self.dims}) > 1:
            raise InputError(f"Domain.boundary: count all dims from the front or all from the back, got {self.dims!r}")
        # a pole needs one periodic dim, which is shifted by half
        if "pole" in kinds and (kinds.count("pole"), kinds.count("periodic")) != (1, 1):
            raise InputError(
                f"Domain.boundary: beyond a pole the field goes on half way around the dim that is periodic: 'pole' "
                f"needs one other dim that is 'periodic', got {dict(self.boundary)!r}"
            )

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Returns (name, boundary) of each dim, in the order of dims in a tensor; () if all are "zeros"."""
        names = [name for _, name in sorted(zip(self.dims, self.names, strict=False))]
        edges = tuple((name, self.boundary.get(name, "zeros")) for name in names)
        return edges if any(kind != "zeros" for _, kind in edges) else ()

    def as_text(self) -> str:
        """Returns a text such as "lat (-2), lon (-1)"."""
        names = self.names or tuple("dim" for _ in self.dims)
        return ", ".join(f"{name} ({dim})" for name, dim in zip(names, self.dims, strict=True))


@dataclass(frozen=True)
class Task:
    """Model, data, loss and optimizer, in ordinary PyTorch, which runs unmodified under every plan.

    model      () -> the module; also called with large tensors on meta, so it should not read their values
    loss       (output, batch) -> (sum, weight) or (sum, weight, {name: extra}); an extra is a further loss term, a sum
               with the same weight or a (sum, weight) pair of its own
    batch      step -> one GLOBAL batch on the CPU, deterministic: a pytree whose tensors have the batch dim first
    data       a `Source`, or any map-style dataset (`__len__`, `__getitem__`), of which a rank reads its samples
    inputs     batch -> (args, kwargs) of the model
    optimizer  named parameter groups -> optimizer
    weights    name of a parameter or buffer -> its initial value, unsharded, on the CPU, or None for the constructor's.
               If it has a method `into(model)`, that returns the constructor of a module with these weights
    metrics    (output, batch) -> {name: (sum, weight)}, divided over all samples like the loss; a third item ("sqrt",
               "exp", a function) is applied to the quotient
    eval_data  held-out samples, as `data`
    spatial    which dims are space, for plans with `domain`; None: those behind batch and channel
    sequence   name of a tensor of the batch -> its dim of positions, for plans with `cp` or `cp_ulysses`: {"tokens":
               1}; other tensors are replicated. {}: positions arise inside the module. None: found by trying
    loss_scope "sample": the loss adds up over samples (checked at start). "global": it does not (a contrastive
               loss); the outputs and the batch are gathered on every rank, at a printed cost. "model": the model mixes
               samples in its forward; every data rank runs it on all samples, so data ranks only save memory by `zero`
    branches   "same": every rank must use the same parameters in a micro-batch; one that does not is an error.
               "per_sample": which parameters are used is decided sample by sample (routed experts), so ranks may
               differ and the sum is still that of one process

    Raises `InputError` for a field that is missing or of another kind, and for fields that contradict each other.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], tuple]
    batch: Callable[[int], Any] | None = None
    data: Source | None = None
    inputs: Callable[[Any], tuple[tuple, dict]] = default_inputs
    optimizer: Callable[[list[dict]], Optimizer] = default_optimizer
    weights: Callable[[str], Any] | None = None
    metrics: Callable | None = None
    eval_data: Source | None = None
    spatial: Domain | None = None
    sequence: Mapping[str, int] | None = None
    loss_scope: Literal["sample", "global", "model"] = "sample"
    branches: Literal["same", "per_sample"] = "same"
    name: str = "task"

    def __post_init__(self) -> None:
        for field in ("model", "loss", "inputs", "optimizer", "batch"):
            # `batch` may be None if there is a source
            if not callable(getattr(self, field)) and (field != "batch" or self.batch is not None):
                value = getattr(self, field)
                raise InputError(
                    f"Task.{field} must be callable, got {type(value).__name__}{_in_place_of(field, value)}"
                )
        # check signatures here, since a wrong one would only fail in a rank
        for field, arguments in CALLED_WITH.items():
            _takes(field, getattr(self, field), arguments)
        # a common mistake: a loss class of torch, whose instance takes two tensors
        if isinstance(self.loss, type) and hasattr(self.loss, "forward"):
            raise InputError(f"Task.loss is the class {self.loss.__name__}, of which an instance {OF_TENSORS}")
        # a built module would be pickled to each rank with all of its weights
        if not isinstance(self.model, type) and hasattr(self.model, "named_parameters"):
            raise InputError(
                "Task.model is a module: give its class or a function that builds it (model=Net, not model=Net()), so "
                "that each rank can build it without its weights"
            )
        if self.batch is None and self.data is None:
            raise InputError("Task has no data: give `batch` (step -> global batch) or `data` (a Source)")
        if self.batch is not None and self.data is not None:
            raise InputError("Task has both `batch` and `data`: give one of them")
        # a map-style dataset is wrapped as a source
        for field in ("data", "eval_data"):
            data = getattr(self, field)
            if data is not None and not isinstance(data, Source):
                object.__setattr__(self, field, as_source(data))
        if self.loss_scope not in ("sample", "global", "model"):
            raise InputError(f"Task.loss_scope is 'sample', 'global' or 'model', got {self.loss_scope!r}")
        if self.branches not in ("same", "per_sample"):
            raise InputError(f"Task.branches is 'same' or 'per_sample', got {self.branches!r}")
        if self.metrics is not None and not callable(self.metrics):
            raise InputError(f"Task.metrics must be callable, got {type(self.metrics).__name__}")
        if self.spatial is not None and not isinstance(self.spatial, Domain):
            raise InputError(f"Task.spatial must be a shardwise.Domain, got {type(self.spatial).__name__}")
        named = self.sequence
        if named is not None and not (isinstance(named, Mapping) and all(isinstance(d, int) for d in named.values())):
            raise InputError(f'Task.sequence names dims of tensors, such as {{"tokens": 1}}, got {named!r}')
        # weights with adapters change the constructor, so that all builds have the adapters
        if (into := getattr(self.weights, "into", None)) is not None:
            object.__setattr__(self, "model", into(self.model))
        edges = () if self.spatial is None else self.spatial.edges
        if edges or hasattr(self.model, "edges"):
            # the constructor is wrapped here, so that one process builds the same module as a rank
            from shardwise.boundary import bounded

            object.__setattr__(self, "model", bounded(self.model, edges))

    def with_(self, **changes: Any) -> Task:
        """Returns a copy with some fields replaced."""
        return replace(self, **changes)
