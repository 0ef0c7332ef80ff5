"""Counts ops: products, attention, convolutions, recurrences by shape, others by bytes; an optimizer's ops too."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import InputError
from shardwise.memory.live import LiveBytes
from shardwise.part.parameters import shares_in
from shardwise.rehearsal.cudnn_layers import recurrent, recurrent_backward
from shardwise.simulator.counted import StepTrace, Update
from shardwise.step.task_optimizer import construct, named_groups, needs_closure
from shardwise.task import Task
from shardwise.trace.leaves import tensors_in, written

_ATEN = torch.ops.aten
_SDPA = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention, _ATEN._scaled_dot_product_cudnn_attention,
}  # fmt: skip
_SDPA_BACK = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward, _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward, _ATEN._scaled_dot_product_cudnn_attention_backward,
}  # fmt: skip
_FFT = {_ATEN._fft_c2c, _ATEN._fft_r2c, _ATEN._fft_c2r}
DEVICE = torch.ops.prim.device.default
_RNN = {_ATEN.mkldnn_rnn_layer, _ATEN.mkldnn_rnn_layer_backward}
_CALL, _CALL_BACK = (op._opoverload._overloadpacket for op in (recurrent, recurrent_backward))
# ops that allocate memory and write nothing into it, or return a view without an alias in their schema
_NOTHING_MOVES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


@cache
def may_view(func: Any) -> bool:
    """Whether an op's schema says that its results may be views of its arguments (`reshape` is such an op)."""
    alias_infos = [result.alias_info for result in func._schema.returns]
    return any(alias is not None for alias in alias_infos) and not func._schema.is_mutable


def _lies_in(out: Any, args: tuple) -> bool:
    """Whether every output tensor has the storage of an input tensor."""
    there = {tensor.untyped_storage()._cdata for tensor in tensors_in(args)}
    return all(tensor.untyped_storage()._cdata in there for tensor in tensors_in(out))


class Count(TorchDispatchMode):
    """Mode that adds each op that runs under it to `trace`, by its shape or by the bytes that it reads and writes."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(getattr(kind, "observes_inside", False) for kind in types):
            return NotImplemented  # a sharded tensor: the ops that its rule runs on the local one are counted
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # backward asks twice for each op: no need to go through all modes
        out = func(*args, **(kwargs or {}))
        self.note(func, args, out)
        return out

    def note(self, func: Any, args: tuple, out: Any) -> None:
        """Adds one call of an op to the trace; `args`: its positional arguments, `out`: its result."""
        if not tensors_in(out):  # an op that writes into its arguments (`_foreach_add_`), or that reads no memory
            out = [args[place] for place in written(func) if place < len(args)]
            if not tensors_in(out):
                return
        self.trace.calls += 1
        packet = func._overloadpacket
        if packet in (_ATEN.mm, _ATEN.addmm):
            a, b = args[-2:] if packet is _ATEN.addmm else args[:2]
            self._product(_reals(a), a.shape[0], b.shape[1], a.shape[1])
        elif packet in (_ATEN.bmm, _ATEN.baddbmm):
            a, b = args[-2:] if packet is _ATEN.baddbmm else args[:2]
            self._product(_reals(a) * a.shape[0], a.shape[1], b.shape[2], a.shape[2])
        elif packet is _ATEN._grouped_mm:
            self._product(*_groups(args[0], args[1], args[2] if len(args) > 2 else None))
        elif packet in _SDPA or packet in _SDPA_BACK:
            self._attend(args, packet in _SDPA_BACK, func)
        elif packet in (_ATEN.convolution, _ATEN.convolution_backward, _ATEN._convolution):
            self._convolve(packet, args, out)
        elif packet is _ATEN._trilinear:
            self._contract(args)
        elif packet in _FFT:  # bound by memory on every device, so it takes as long as its bytes
            self.trace.conv_flops += _transform_flops(args, out)
            self._stream(packet.__name__, args, out)
        elif packet in _RNN:
            self._recur(args, packet is _ATEN.mkldnn_rnn_layer_backward)
            self._stream(packet.__name__, args, out)
        elif packet in (_CALL, _CALL_BACK):
            self._recur_in_one(args, packet is _CALL_BACK)
            self._stream(packet.__name__, args, out)
        # any other op takes as long as its bytes; a view, and new memory that nothing is written into, move none
        elif packet.__name__ not in _NOTHING_MOVES and not (may_view(func) and _lies_in(out, args)):
            self._stream(packet.__name__, args, out)

    def _product(self, batch: int, m: int, n: int, k: int) -> None:
        """Counts `batch` matrix products (m, k) @ (k, n)."""
        self.trace.products[m, n, k] += batch
        self.trace.order.append(("product", (m, n, k), batch))
        self.trace.kernels += 1

    def _attend(self, args: tuple, back: bool, func: Any) -> None:
        """Counts a call of fused attention `func`, or of its backward (`back`), by the shapes of q and k in `args`."""
        # a backward op has the output's gradient as its first argument
        q, k = (args[1], args[2]) if back else (args[0], args[1])
        batch, heads, queries, width = q.shape
        shape = (batch * heads, queries, k.shape[2], width)
        place = next(at for at, argument in enumerate(func._schema.arguments) if argument.name == "is_causal")
        causal = place < len(args) and bool(args[place])
        self.trace.attention[*shape, back, causal] += 1
        self.trace.order.append(("attention", (*shape, float(back), float(causal)), 1))
        self.trace.kernels += 1

    def _contract(self, args: tuple) -> None:
        """Counts `aten._trilinear`, a sum over given dims of three broadcast factors, as one matrix product."""
        shapes = []
        # args: three factors, three lists of dims that a factor lacks, the dims that are summed over
        for factor, places in zip(args[:3], args[3:6], strict=True):
            shape = list(factor.shape)
            for place in sorted(places):
                shape.insert(place, 1)
            shapes.append(shape)
        whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
        deep = math.prod(whole[place] for place in args[6])
        # a matrix product needs m and n: the largest remaining dim is m, the others together are n
        rows, *others = sorted((size for place, size in enumerate(whole) if place not in args[6]), reverse=True) or [1]
        self._product(1, rows, math.prod(others), deep)

    def _recur(self, args: tuple, back: bool) -> None:
        """Counts `mkldnn_rnn_layer`: one product of all time steps for the input, one for each step for the state.

        args  (input (steps, B, F), w_ih, w_hh, ...); `back`: its backward, which has twice the products
        """
        steps, batch, wide = args[0].shape
        for _ in range(2 if back else 1):  # gradients of inputs, and of weights
            self._product(1, steps * batch, args[1].shape[0], wide)
            self._product(steps, batch, args[2].shape[0], args[2].shape[1])

    def _recur_in_one(self, args: tuple, back: bool) -> None:
        """Counts `recurrent`, or its backward (`back`), as one call of a GPU's kernel that runs step after step.

        Gradients of weights are one product over all tokens each, since they need no order of steps.
        """
        x, _, weights = args[1:4] if back else args[:3]
        rows, steps = x.numel() // x.shape[-1], args[-1]
        (gates, wide), (_, hidden) = weights[0].shape, weights[1].shape
        step_product = (-(-rows // steps), hidden, gates) if back else (-(-rows // steps), gates, hidden)
        self._product(1, rows, *((wide, gates) if back else (gates, wide)))
        for deep in (wide, hidden) if back else ():
            self._product(1, gates, deep, rows)
        self.trace.products[step_product] += steps
        # one call, so one entry: the steps' products run one after the other inside it
        self.trace.order.append(("recurrence", step_product, steps))

    def _convolve(self, packet: Any, args: tuple, out: Any) -> None:
        """Counts a convolution or its backward (the op `packet`): its FLOPs, its bytes, its shape for `costs/kernels`.

        Positions in `args`, forward: input 0, weight 1, transposed 6, groups 8; backward: gradient 0, input 1,
        weight 2, transposed 7, output_mask 10, groups the last but one.
        """
        self.trace.kernels += 1
        back = packet is _ATEN.convolution_backward
        weight = args[2] if back else args[1]
        # a weight is applied once to each cell of the output, or of the input if it is transposed;
        # backward does that again for each of the two gradients that its mask asks for
        if back:
            cells, times = args[1 if args[7] else 0].numel(), sum(bool(flag) for flag in args[10][:2])
        else:
            cells, times = (args[0] if args[6] else out).numel(), 1
        cells, deep = _reals(weight) * cells, weight.numel() / weight.shape[0]
        self.trace.conv_flops += times * 2.0 * cells * deep
        moved = _bytes(args, out)
        self.trace.moved += moved
        x = args[1] if back else args[0]
        # a GPU's kernels for 16 bits need channels last: tensors in another format are transposed (costs/kernels)
        turned = _channels_first(x) and x.element_size() == 2 and math.prod(weight.shape[2:]) > 1
        alone = weight.shape[1] == 1 and args[-2 if back else 8] > 1  # depthwise
        shape = (cells / weight.shape[0], float(weight.shape[0]), deep, float(moved), float(turned), float(alone))
        self.trace.order.append(("conv_backward" if back else "conv", shape, 1))

    def _stream(self, name: str, args: Any, out: Any) -> None:
        """Counts an op called `name` that takes as long as its bytes: those of tensors in `args` and in `out`."""
        moved = _bytes(args, out)
        self.trace.moved += moved
        shape = [float(moved)]
        if "batch_norm" in name and (x := tensors_in(args)[0]).dtype == torch.bfloat16:
            # these norms have a measured speed of their own, which depends on the channels if channels are first
            if _channels_first(x):
                shape.append(float(x.shape[1]))
            # 0 stands for torch's own kernel over channels last, which has another speed
            elif x.dim() > 3 and name.startswith("native_"):
                shape.append(0.0)
        self.trace.order.append((name, tuple(shape), 1))
        self.trace.kernels += 1


def _channels_first(x: torch.Tensor) -> bool:
    """Whether a tensor (N, C, H, W) lies in memory channels first, torch's default, and not channels last."""
    return x.dim() > 3 and x.shape[1] > 1 and x.stride(1) != 1


def _transform_flops(args: tuple, out: torch.Tensor) -> float:
    """Returns the FLOPs of `_fft_*`: 5 n log2 n for n complex points, half if its input or output is real.

    Source: Cooley and Tukey 1965, as FFTW counts. `args`: (input, dims, ...); `out`: the result.
    """
    real = args[0] if not args[0].is_complex() else out
    points = math.prod(real.shape[dim] for dim in args[1])
    return (2.5 if not real.is_complex() else 5.0) * real.numel() * math.log2(max(1, points))


def _groups(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Returns (groups, m, n, k) of `_grouped_mm`, whose tokens are assumed to be spread evenly over the groups.

    a, b     factors: each is (rows, columns) with the groups one after another, or (groups, rows, columns)
    offsets  where each group ends in a factor of two dims; None if both have three
    """
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if a.dim() == b.dim() == 3 or offsets is None:
        return a.shape[0], m, n, k
    count = offsets.numel()
    if a.dim() == b.dim():  # gradients of weights: each group sums over its own tokens
        return count, m, n, -(-k // count)
    return (count, -(-m // count), n, k) if a.dim() == 2 else (count, m, -(-n // count), k)


def _reals(factor: torch.Tensor) -> int:
    """Returns the number of real multiplications in one of the tensor's dtype: 4 if it is complex, else 1."""
    return 4 if factor.is_complex() else 1


def _bytes(*values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors_in(values))


def update_of(task: Task, at_once: bool = False) -> Update:
    """Returns the cost of a step of the task's optimizer per element of a weight, counted on small tensors.

    at_once   whether each op runs on all tensors at once (foreach, torch's default on a GPU), so that temporaries of
              all tensors live together

    Raises `InputError` for an optimizer that needs a closure.
    """
    parameter = nn.Parameter(torch.zeros(64, 64))
    others = [nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64, 64))]
    optimizer = construct(task.optimizer, [parameter, *others])
    if needs_closure(optimizer):
        raise InputError(
            f"{type(optimizer).__name__} asks for a forward and backward as often as it likes in one step (a closure), "
            "which no forecast knows: plan with an optimizer that takes one, or train with dp_replicate, which runs it"
        )
    # None is torch's default, which means foreach on a GPU; False is the user's choice and stays
    for group in optimizer.param_groups if at_once else ():
        if not group.get("fused") and group.get("foreach", False) is None:
            group["foreach"] = True
    for param in (parameter, *others):
        param.grad = torch.ones_like(param)
    optimizer.step()  # the first step also makes the state, which is not work of every step
    state = optimizer.state.get(parameter, {})
    kept = sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()) / parameter.numel()
    like = [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]
    others[0].grad = None  # an optimizer skips parameters without a gradient: two are updated, then one
    bytes_of_two, _ = _updated(optimizer, [parameter, others[1]])
    others[1].grad = None
    bytes_of_one, seen = _updated(optimizer, [parameter])
    work = tuple((name, shape[0] / parameter.numel()) for name, shape, _ in seen.order if len(shape) == 1)
    more = max(0.0, (bytes_of_two - bytes_of_one) / parameter.nbytes)
    coded = float(sum(tensor.is_floating_point() for tensor in like))
    return Update(kept, work, seen.calls, bytes_of_one / parameter.nbytes, more, coded=coded)


def _updated(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> tuple[int, StepTrace]:
    """Runs one step; returns (peak bytes of temporaries while it updates `parameters`, counts of its operations)."""
    seen, live = StepTrace(1), LiveBytes()
    states = [value for param in parameters for value in optimizer.state.get(param, {}).values()]
    tensors = (*parameters, *(param.grad for param in parameters), *states)
    live.count(value for value in tensors if isinstance(value, torch.Tensor))
    rests = live.now
    with live, Count(seen):
        optimizer.step()
    return live.peak - rests, seen


def in_order(trained: Iterable[nn.Parameter]) -> dict[int, int]:
    """Returns {index in `trained`: elements}, its keys in the order in which an optimizer is given the parameters."""
    params = [*trained]
    places = {id(param): place for place, param in enumerate(params)}
    return {places[id(param)]: param.numel() for group in named_groups(params) for param in group["params"]}


def wholes_of(model: nn.Module, trained: Iterable[nn.Parameter]) -> dict[int, int]:
    """Returns {index in `trained`: elements of the unsharded weight} of the parameters that are shards over tp."""
    cuts = {id(share): cut for child in model.modules() for share, cut in shares_in(child)}
    return {
        place: param.numel() // param.shape[cuts[id(param)].dim] * cuts[id(param)].owners.size
        for place, param in enumerate(trained)
        if id(param) in cuts and param.numel()
    }
