"""Tell a task's error from a plan's: before the task is blamed, it runs in one process without a plan."""

from __future__ import annotations

import copy
import inspect
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.device import CPU
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.look.memory_limits import is_out_of_memory, of_pairs
from shardwise.precision import Precision
from shardwise.python_seeds import python_restored
from shardwise.step.batching import path_of, samples_in
from shardwise.step.forward import run_alone
from shardwise.step.loss import NO_GRAPH, TWICE, is_second_backward
from shardwise.step.optimizer_modes import enter_training
from shardwise.step.task_optimizer import named_groups, needs_closure
from shardwise.task import Task
from shardwise.task_names import inputs_hint, where
from shardwise.trace.deferred import LEAVE_OUT, named_tensors, of_a_device
from shardwise.trace.double import as_written

MOST_ELEMENTS = 2**28  # of parameters; a larger module may not fit one rank, so one process is not tried


class Untried(Exception):
    """Raised if one process cannot be run, so that it is unknown whether it fails too."""


def blame(
    error: Exception, what: str, task: Task, precision: Precision, module: nn.Module, batch: Any,
    device: torch.device = CPU, parts: Sequence[Any] = (), more: Any = None,
) -> ShardwiseError:  # fmt: skip
    """Returns the error for a forward that failed under a plan: `InputError` if one process fails on `batch` too.

    Otherwise `RefusedPlan`, also if one process cannot be tried.

    error   the one under the plan;  what  what could not be done, the message's beginning, which names the plan's part
    module  the task's, for its number of parameters alone
    device  on which the forward failed, since a tensor that the loss makes on the CPU fails on an accelerator alone
    parts   of the batch, on which the forward ran too: one process may fail on one of them alone
    more    a whole batch, of which `batch` has a few samples: one process may run on it alone; None: not tried
    """
    message = f"{type(error).__name__}: {error}"
    elements = sum(param.numel() for param in module.parameters())
    if elements > MOST_ELEMENTS:
        return RefusedPlan(f"{what}: {message} (not tried in one process: {elements:.2g} parameters are many to hold)")
    try:
        alone = told_alone(task, precision, batch, device) or _told_of(parts, batch, task, precision, device)
        # A model that fails on the few samples of a look but runs on all of them is not at fault.
        many = alone is not None and more is not None and samples_in(more) > samples_in(batch)
        if many and failure_alone(task, precision, more, device) is None:
            return RefusedPlan(
                f"{what}, though one process runs on all {samples_in(more)}: {message}. A plan is held against one "
                "process on a few samples first: let the forward run on any number of them, as by groups that lie in a "
                "dim of their own (x of (groups, k, ...) from Task.batch, of which each group counts as one sample)"
            )
    except Untried as why:
        return RefusedPlan(f"{what}: {message} (not tried in one process: {why})")
    return alone or RefusedPlan(f"{what}, though one process runs on them: {message}")


def runs_on_more(task: Task, precision: Precision, few: Any, more: Any) -> bool:
    """Whether one process fails on the samples `few` and runs on `more`, as a forward that needs groups does.

    False if one process cannot be tried.
    """
    with suppress(Untried):
        return failure_alone(task, precision, few) is not None and failure_alone(task, precision, more) is None
    return False


def told_alone(task: Task, precision: Precision, batch: Any, device: torch.device = CPU) -> InputError | None:
    """Returns one process's error on the batch, with its remedy; None if it runs. Raises `Untried`."""
    alone = failure_alone(task, precision, batch, device)
    if alone is None:
        return None
    alone, cure = cured(task, precision, batch, alone, device)
    return InputError(f"the task fails on {samples_in(batch)} samples in one process too: {reason(alone)}{cure}")


def cured(
    task: Task, precision: Precision, batch: Any, error: Exception, device: torch.device
) -> tuple[Exception, str]:
    """Returns (one process's error, its remedy as text).

    On an accelerator the error of the same run on the CPU is taken, which says more. For a task that fails on the
    accelerator alone, the remedy says so.
    """
    if device == CPU or is_out_of_memory(error):
        return error, remedy(task, precision, batch, error)
    on_cpu = failure_alone(task, precision, batch)
    if on_cpu is None:
        return error, f". On the CPU it runs: tensors that it makes are to be made on {device.type}"
    return on_cpu, remedy(task, precision, batch, on_cpu)


def _told_of(
    parts: Sequence[Any], batch: Any, task: Task, precision: Precision, device: torch.device
) -> RefusedPlan | None:  # fmt: skip
    """Returns a refusal if one process, which runs on the batch, fails on one of its `parts`; else None."""
    for part in parts:
        if (alone := failure_alone(task, precision, part, device)) is not None:
            count = samples_in(part)
            return RefusedPlan(
                f"the task fails on {count} sample{'s'[: count != 1]} in one process too, though not on "
                f"{samples_in(batch)}: {reason(alone)}. A rank may be given as few of a batch: let the forward run on "
                "them (squeeze() without a dim drops that of a single sample too)"
            )
    return None


def failure_alone(task: Task, precision: Precision, batch: Any, device: torch.device = CPU) -> Exception | None:
    """Returns the exception of one plain step of the task on `batch` on `device`; None if it runs.

    A step is forward, backward and optimizer. Raises `Untried` for a model that exists only once and cannot be copied.
    """
    try:
        with torch.random.fork_rng(devices=[]), python_restored(), torch.enable_grad(), _without_others():
            torch.manual_seed(0)
            with as_written():
                module = _own(task)
            # In the dtypes that a rank has, since else an error of mixed dtypes would not show here.
            with torch.no_grad():
                for name, tensor in named_tensors(module):
                    weight = task.weights(name) if task.weights is not None else None
                    tensor.data = (tensor if weight is None else weight).detach().to(device, precision.dtype_of(tensor))
            optimizer = task.optimizer(named_groups([param for param in module.parameters() if param.requires_grad]))
            enter_training(optimizer)
            run = run_alone(task, precision, device=device)

            def closure() -> float:
                optimizer.zero_grad()
                total = run(module, batch).total
                total.backward()
                return float(total.detach())

            module.train()
            if needs_closure(optimizer):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    except Untried:  # tells nothing of the task
        raise
    except Exception as error:
        return error
    return None


@contextmanager
def _without_others() -> Iterator[None]:
    """Context in which modules that ask torch.distributed for other ranks (SyncBatchNorm) find none."""
    before = dist.is_initialized  # replaced, since a layer asks by its name in torch.distributed
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = before


def _own(task: Task) -> nn.Module:
    """Returns a module of the task that is used nowhere else; a copy if the task returns the same one each time.

    Raises `Untried` if it cannot be copied.
    """
    module = task.model()
    if module is not task.model():  # each call makes a new one
        return module
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise Untried(f"the module cannot be copied: {type(error).__name__}: {error}") from error


def reason(error: Exception) -> str:
    """Returns an error as text, with a hint for known causes, such as a batch with too many fields."""
    if isinstance(error, ShardwiseError):
        return str(error)
    hint = inputs_hint(error)
    if isinstance(error, IndexError) and str(error).startswith("Target "):
        hint = " A label is beyond the model's outputs: give the head one output for each class, or mend the labels"
    if "does not require grad and does not have a grad_fn" in str(error):
        return NO_GRAPH
    if is_second_backward(error):
        return TWICE
    if of_a_device(error):
        hint = f". {LEAVE_OUT}"
    notes = "".join(f". {note}" for note in getattr(error, "__notes__", ()))  # of what the loss was given
    return f"{where(error, own_alone=True)}{hint or notes or _given_to(error)}"


def _given_to(error: Exception) -> str:
    """Returns, as text, the layer of torch that raised an error and the shapes it got; "" if the error has numbers."""
    layer: nn.Module | None = None
    shapes: list[tuple[int, ...]] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals
        if frame.f_code.co_name == "forward" and isinstance(names.get("self"), nn.Module):
            # frames run from the outermost call inwards: the last forward is the one that raised
            layer, shapes = names["self"], [tuple(t.shape) for t in names.values() if isinstance(t, torch.Tensor)]
    # a message with numbers names sizes itself; the repr of a user's own layer shows no settings
    if layer is None or not type(layer).__module__.startswith("torch.nn.") or re.search(r"\d", str(error)):
        return ""
    return f" This is {layer}, given {', '.join(map(str, shapes))}"


def remedy(task: Task, precision: Precision, batch: Any, error: Exception) -> str:
    """Returns advice on how to change the batch, found by trying (tensors for arrays, other dtypes), or "".

    For an error of access to a batch without names it says what the batch is.
    """
    if is_out_of_memory(error):
        return of_pairs(batch, error)
    leaves, spec = tree_flatten(batch)
    arrays = [index for index, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    as_tensors = [torch.tensor(leaf) if index in arrays else leaf for index, leaf in enumerate(leaves)]
    if arrays and _helps(task, precision, as_tensors, spec):
        name = path_of(batch, arrays[0])
        return f". {name} is a numpy array: give torch.from_numpy({name}) where the batch is made"
    exchanged = _exchanged(task, precision, batch)
    if exchanged:
        return exchanged
    of_label = str(error).startswith("Target ")  # torch's error for a label out of range, which `reason` explains
    if isinstance(error, TypeError | IndexError | KeyError) and not (of_label or isinstance(batch, Mapping)):
        return f". The batch is {_described(batch)}"
    if not isinstance(error, RuntimeError):  # what torch raises for dtypes that do not go together
        return ""
    wanted = precision.compute if precision.compute.is_floating_point else torch.float32
    if precision.compute == torch.float64:
        wanted = torch.float32  # a proof's; the batch is made wider with the weights
    other_dtypes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dtype != wanted]
    others = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dtype != torch.int64]
    for index in others:  # perhaps labels or token ids
        cast = [leaf.long() if i == index else leaf for i, leaf in enumerate(leaves)]
        # values with a fraction are no labels
        if torch.equal(cast[index].to(leaves[index].dtype), leaves[index]) and _helps(task, precision, cast, spec):
            name = path_of(batch, index)
            return f". {name} is {_short(leaves[index].dtype)}: give {name}.long() where the batch is made"
    for index in other_dtypes:
        cast = [leaf.to(wanted) if i == index else leaf for i, leaf in enumerate(leaves)]
        if _helps(task, precision, cast, spec):
            name = path_of(batch, index)
            return (
                f". {name} is {_short(leaves[index].dtype)} where the model's weights are {_short(wanted)}: give "
                f"{name}.to({wanted}) where the batch is made"
            )
    return ""


def _exchanged(task: Task, precision: Precision, batch: Any) -> str:
    """Returns advice if the loss, or a torch loss in it, runs with its two arguments exchanged; else ""."""
    leaves, spec = tree_flatten(batch)
    if _helps(task.with_(loss=lambda output, batch: task.loss(batch, output)), precision, leaves, spec):
        return ". It runs with the arguments of Task.loss exchanged: it is called with (output, batch)"
    with _TargetFirst() as watch:
        _helps(task, precision, leaves, spec)
    return f". It runs with the arguments of {watch.name} exchanged: the output, then the target" if watch.name else ""


class _TargetFirst(TorchFunctionMode):
    """Function mode that finds the first torch function of (input, target) that runs only with the two exchanged.

    `name`: that function's; "" if there is none.
    """

    name = ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            # a torch loss failed, so it is tried with input and target exchanged
            if len(args) > 1 and _arguments(func)[:2] == ["input", "target"]:
                with suppress(Exception):
                    func(args[1], args[0], *args[2:], **(kwargs or {}))
                    self.name = self.name or func.__name__
            raise  # also if the exchange helps, since its result is not the task's loss


def _arguments(function: Any) -> list[str]:
    """Returns the names of a Python function's arguments; [] for a built-in one."""
    return list(inspect.signature(function).parameters) if inspect.isfunction(function) else []


def _helps(task: Task, precision: Precision, leaves: list[Any], spec: TreeSpec) -> bool:
    """Whether one process runs without an error on the batch that `leaves` and `spec` make."""
    try:
        return failure_alone(task, precision, tree_unflatten(leaves, spec)) is None
    except Untried:
        return False


def _described(batch: Any) -> str:
    """Returns a description of a batch, and for a list or tuple how to index it."""
    if isinstance(batch, torch.Tensor):
        return f"one tensor of shape {tuple(batch.shape)}, without names"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}: take from it by place, as batch[0]"
    return f"of type {type(batch).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def needs_gradients(error: Exception) -> bool:
    """Whether an error comes from a forward that takes gradients itself but ran under no_grad."""
    return isinstance(error, RuntimeError) and "does not require grad" in str(error)
