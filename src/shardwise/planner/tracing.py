"""What one step of any module does, seen on fake tensors: products, bytes moved, FLOPs, and the peak of live bytes.

The module's own forward, loss and backward run under a dispatch mode on tensors without values; nothing is computed
and no memory is used. Recompute is applied as it is in a run, so what it adds is seen, not estimated.

*What this does not do*: see kernels' workspace; follow modules that look at values (an eager loop over routed experts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.engine.batching import parts_of, samples_in
from shardwise.engine.groups import named_groups
from shardwise.errors import InputError
from shardwise.memory.live import LiveBytes
from shardwise.memory.recompute import recompute_block
from shardwise.simulator.traced import Update
from shardwise.task import Task
from shardwise.trace.blocks import find_blocks

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "bf16-full": torch.bfloat16,
    "fp16": torch.float16,
}
_ATEN = torch.ops.aten
_SDPA = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention, _ATEN._scaled_dot_product_cudnn_attention,
}  # fmt: skip
_SDPA_BACK = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward, _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward, _ATEN._scaled_dot_product_cudnn_attention_backward,
}  # fmt: skip
_VIEWS = ("view", "expand", "transpose", "permute", "t", "slice", "select", "split", "unsqueeze", "squeeze", "detach",
          "alias", "as_strided", "_unsafe_view", "unbind", "split_with_sizes", "_reshape_alias", "diagonal",
          "unfold")  # fmt: skip


@dataclass
class Trace:
    """One forward and backward of `samples` samples.

    products     (m, n, k) -> how often
    attention    (batch x heads, queries, keys, width, backward?) -> how often
    conv_flops   of convolutions
    moved        bytes that all other ops read and write
    work         (op, bytes, or FLOPs of convolutions and attention) -> how often, of all but products
    kernels      ops that compute something
    calls        ops, views among them
    peak         the most live bytes beyond parameters, inputs and their summed gradients
    tensors      parameter tensors
    sizes        elements of a trainable one -> how many
    units        parameters of each repeated block, and of the rest
    """

    samples: int
    parameters: int = 0
    buffers_bytes: int = 0
    units: list[int] = field(default_factory=list)
    rest: int = 0
    tensors: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    products: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    attention: Counter[tuple[int, int, int, int, bool]] = field(default_factory=Counter)
    conv_flops: float = 0.0
    moved: float = 0.0
    work: Counter[tuple[str, float]] = field(default_factory=Counter)
    kernels: int = 0
    calls: int = 0
    peak: int = 0
    gradients: int = 0

    @property
    def flops(self) -> float:
        """Products, convolutions and attention."""
        products = sum(2.0 * m * n * k * times for (m, n, k), times in self.products.items())
        scores = sum(
            4.0 * b * q * k * d * (2.5 if back else 1.0) * times for (b, q, k, d, back), times in self.attention.items()
        )
        return products + scores + self.conv_flops


class Count(TorchDispatchMode):
    """Adds each op to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented  # a share of a tensor: what its rule does is counted
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(out)):
            return out  # a question, such as where a tensor lies
        self.trace.calls += 1
        packet = func._overloadpacket
        if packet in (_ATEN.mm, _ATEN.addmm):
            a, b = args[-2:] if packet is _ATEN.addmm else args[:2]
            self._product(1, a.shape[0], b.shape[1], a.shape[1])
        elif packet in (_ATEN.bmm, _ATEN.baddbmm):
            a, b = args[-2:] if packet is _ATEN.baddbmm else args[:2]
            self._product(a.shape[0], a.shape[1], b.shape[2], a.shape[2])
        elif packet in _SDPA or packet in _SDPA_BACK:
            self._attend(args, packet in _SDPA_BACK)
        elif packet in (_ATEN.convolution, _ATEN.convolution_backward, _ATEN._convolution):
            self._convolve(packet, args, out)
        elif packet.__name__ not in _VIEWS:
            self._stream(packet.__name__, args, out)
        return out

    def _product(self, batch: int, m: int, n: int, k: int) -> None:
        self.trace.products[m, n, k] += batch
        self.trace.kernels += 1

    def _attend(self, args: tuple, back: bool) -> None:
        q, k = (args[1], args[2]) if back else (args[0], args[1])
        batch, heads, queries, width = q.shape
        self.trace.attention[batch * heads, queries, k.shape[2], width, back] += 1
        flops = 4.0 * batch * heads * queries * k.shape[2] * width * (2.5 if back else 1.0)
        self.trace.work["attention_backward" if back else "attention", flops] += 1
        self.trace.kernels += 1

    def _convolve(self, packet: Any, args: tuple, out: Any) -> None:
        self.trace.kernels += 1
        back = packet is _ATEN.convolution_backward
        if back:
            grad, _, weight = args[:3]
            wanted = sum(bool(flag) for flag in args[10][:2])
            flops = wanted * 2.0 * grad.numel() * weight.numel() / weight.shape[0]
        else:
            weight = args[1]
            transposed = bool(args[6])
            cells = args[0].numel() if transposed else out.numel()
            flops = 2.0 * cells * weight.numel() / weight.shape[0]
        self.trace.conv_flops += flops
        self.trace.work["convolution_backward" if back else "convolution", flops] += 1
        self.trace.moved += _bytes(args, out)

    def _stream(self, name: str, args: Any, out: Any) -> None:
        moved = _bytes(args, out)
        self.trace.moved += moved
        self.trace.work[name, float(moved)] += 1
        self.trace.kernels += 1


def _bytes(*values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(values) if torch.is_tensor(leaf))


@contextmanager
def as_real() -> Iterator[None]:
    """transformers' masks look at values while tracing; on fake tensors they are told what unpadded input has."""
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    kept = {}
    for name, value in (("find_packed_sequence_indices", lambda *a, **k: None), ("is_tracing", lambda *a, **k: False)):
        if hasattr(masking_utils, name):
            kept[name] = getattr(masking_utils, name)
            setattr(masking_utils, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(masking_utils, name, value)


def build(task: Task, fake: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """The module with fake parameters; built for real where its constructor reads values."""
    try:
        with fake:
            model = task.model()
    except Exception:
        with torch.random.fork_rng(devices=[]):
            model = task.model()
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(fake.from_tensor(parameter.data), parameter.requires_grad)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = fake.from_tensor(buffer)
    with fake:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                    module._parameters[name] = nn.Parameter(parameter.data.to(dtype), parameter.requires_grad)
    return model.train()


def one_sample(task: Task) -> Any:
    """A batch of one sample, from the task's own data."""
    if task.batch is None:
        assert task.data is not None
        return task.data.read([0])
    batch = task.batch(0)
    return parts_of(batch, data_ranks=samples_in(batch))[0].batch


def batch_bytes(batch: Any) -> float:
    """Bytes of all tensors of a batch."""
    leaves = pytree.tree_leaves(batch)
    return float(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)))


def fake_batch(fake: FakeTensorMode, sample: Any, samples: int, dtype: torch.dtype) -> Any:
    """The sample, `samples` times, without values."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = fake.from_tensor(leaf.to(dtype) if leaf.is_floating_point() else leaf)
        return torch.cat([made] * samples) if made.dim() else made

    with fake:
        return pytree.tree_map(convert, sample)


def trace(task: Task, samples: int, precision: str = "fp32", recompute: str = "none", sample: Any = None) -> Trace:
    """Trace one micro-batch; `sample` is a batch of one, so that the task need not make it again.

    A module that cannot be traced raises `InputError` with the line that failed.
    """
    dtype = DTYPES[precision]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    found = Trace(samples)
    try:
        with as_real():
            model = build(task, fake, dtype)
            _sizes(model, found)
            if recompute != "none":
                for path in find_blocks(model).paths:
                    recompute_block(model.get_submodule(path), recompute)
            batch = fake_batch(fake, one_sample(task) if sample is None else sample, samples, dtype)
            for parameter in model.parameters():
                if parameter.requires_grad:  # gradients are an account of their own: buckets, or shards
                    parameter.register_post_accumulate_grad_hook(drop)
            live = LiveBytes()
            rests = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(batch)]
            live.count(leaf for leaf in rests if isinstance(leaf, torch.Tensor))
            base = live.now
            with fake, live, Count(found):
                args, kwargs = task.inputs(batch)
                output = model(*args, **kwargs)
                output = pytree.tree_map(lambda t: wide(t), output)
                total = task.loss(output, batch)[0]
                del output
                total.backward()
            found.peak = live.peak - base
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the model cannot be traced without values: {line_of(error)}") from error
    return found


def wide(leaf: Any) -> Any:
    """Outputs are widened to float32 before a loss sees them."""
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype in (torch.bfloat16, torch.float16):
        return leaf.float()
    return leaf


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def update_of(task: Task) -> Update:
    """What the task's optimizer keeps and does for one tensor, seen on small ones."""
    parameter, other = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64))
    optimizer = task.optimizer(named_groups([parameter, other]))
    parameter.grad, other.grad = torch.ones_like(parameter), torch.ones_like(other)
    optimizer.step()
    state = optimizer.state.get(parameter, {})
    held = sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()) / parameter.numel()
    other.grad = None
    seen = Trace(1)
    with Count(seen):
        optimizer.step()
    work = [(name, size / parameter.numel()) for (name, size), times in seen.work.items() for _ in range(times)]
    return Update(held, tuple(work), seen.calls)


def _sizes(model: nn.Module, found: Trace) -> None:
    found.parameters = sum(p.numel() for p in model.parameters())
    found.tensors = len(list(model.parameters()))
    found.sizes = Counter(p.numel() for p in model.parameters() if p.requires_grad)
    found.gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    found.buffers_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
    paths = find_blocks(model).paths
    found.units = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in paths]
    found.rest = found.parameters - sum(found.units)


def line_of(error: BaseException) -> str:
    from traceback import extract_tb

    frames = [
        f
        for f in extract_tb(error.__traceback__)
        if "site-packages" not in f.filename and "/shardwise/" not in f.filename
    ]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    text = (str(error).strip().splitlines() or ["(no message)"])[0]
    return f"{place}{type(error).__name__}: {text}"
