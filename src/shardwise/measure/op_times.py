"""Times the ops of a forward and backward on a CPU one by one, by size, in the situation in which a step runs them.

A step keeps its activations. So outputs are kept until HELD_BYTES are full, and several inputs are used in turn, since
an op that writes into memory still in the cache would look faster than in a step.

*What this does not do*: other dtypes than float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from shardwise.measure.pace import Budget, Pace, ends_first, within

ATEN = torch.ops.aten
ELEMENTS = (2**8, 2**13, 2**17, 2**20)  # elements of an input
HELD_BYTES = 12 * 2**20  # bytes of outputs that are kept
BUDGET_S = 0.012  # seconds for one op of one size, after a first round
CONV_FLOPS = 1.5e9  # FLOPs of the largest convolution that is timed
WIDTH = 64  # size of the last dim of inputs

Made = Sequence[Tensor]
Row = tuple[str, float, float]
Product = tuple[str, int, int, int, float]


def _rows(count: int) -> Tensor:
    return torch.randn(max(1, count // WIDTH), WIDTH)


def _image(count: int) -> Tensor:
    side = 2 * max(1, round((count / 8) ** 0.5) // 2)
    return torch.randn(1, 8, side, side)


def _normal(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, bias = torch.ones(WIDTH), torch.zeros(WIDTH)
    _, mean, rstd = ATEN.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)
    return weight, bias, mean, rstd


# name -> (number of elements -> inputs, function of the inputs)
OPS: dict[str, tuple[Callable[[int], Made], Callable[..., object]]] = {
    "add": (lambda n: (_rows(n), _rows(n)), ATEN.add),
    "add_": (lambda n: (_rows(n), _rows(n)), ATEN.add_),
    "mul": (lambda n: (_rows(n), _rows(n)), ATEN.mul),
    "sub": (lambda n: (_rows(n), _rows(n)), ATEN.sub),
    "div": (lambda n: (_rows(n), _rows(n)), ATEN.div),
    "neg": (lambda n: (_rows(n),), ATEN.neg),
    "pow": (lambda n: (_rows(n),), lambda x: ATEN.pow(x, 2)),
    "sqrt": (lambda n: (_rows(n).abs(),), ATEN.sqrt),
    "rsqrt": (lambda n: (_rows(n).abs() + 1,), ATEN.rsqrt),
    "exp": (lambda n: (_rows(n),), ATEN.exp),
    "tanh": (lambda n: (_rows(n),), ATEN.tanh),
    "sigmoid": (lambda n: (_rows(n),), ATEN.sigmoid),
    "relu": (lambda n: (_rows(n),), ATEN.relu),
    "threshold_backward": (lambda n: (_rows(n), _rows(n)), lambda g, x: ATEN.threshold_backward(g, x, 0)),
    "gelu": (lambda n: (_rows(n),), ATEN.gelu),
    "gelu_backward": (lambda n: (_rows(n), _rows(n)), ATEN.gelu_backward),
    "silu": (lambda n: (_rows(n),), ATEN.silu),
    "silu_backward": (lambda n: (_rows(n), _rows(n)), ATEN.silu_backward),
    "_softmax": (lambda n: (_rows(n),), lambda x: ATEN._softmax(x, -1, False)),
    "_softmax_backward_data": (
        lambda n: (_rows(n), _rows(n)),
        lambda g, y: ATEN._softmax_backward_data(g, y, -1, torch.float32),
    ),
    "_log_softmax": (lambda n: (_rows(n),), lambda x: ATEN._log_softmax(x, -1, False)),
    "_log_softmax_backward_data": (
        lambda n: (_rows(n), _rows(n)),
        lambda g, y: ATEN._log_softmax_backward_data(g, y, -1, torch.float32),
    ),
    "native_layer_norm": (
        lambda n: (_rows(n), torch.ones(WIDTH), torch.zeros(WIDTH)),
        lambda x, w, b: ATEN.native_layer_norm(x, [WIDTH], w, b, 1e-5),
    ),
    "native_layer_norm_backward": (
        lambda n: ((x := _rows(n)), _rows(n), *_normal(x)),
        lambda x, g, w, b, m, r: ATEN.native_layer_norm_backward(g, x, [WIDTH], m, r, w, b, [True] * 3),
    ),
    "native_group_norm": (
        lambda n: (torch.randn(1, 16, max(1, n // 16)), torch.ones(16), torch.zeros(16)),
        lambda x, w, b: ATEN.native_group_norm(x, w, b, 1, 16, x.shape[2], 4, 1e-5),
    ),
    "native_group_norm_backward": (
        lambda n: (
            (x := torch.randn(1, 16, max(1, n // 16))),
            torch.randn_like(x),
            *ATEN.native_group_norm(x, None, None, 1, 16, x.shape[2], 4, 1e-5)[1:],
            torch.ones(16),
        ),
        lambda x, g, m, r, w: ATEN.native_group_norm_backward(g, x, m, r, w, 1, 16, x.shape[2], 4, [True] * 3),
    ),
    "native_batch_norm": (
        lambda n: (torch.randn(1, 16, max(2, n // 16)), torch.ones(16), torch.zeros(16)),
        lambda x, w, b: ATEN.native_batch_norm(x, w, b, b.clone(), w.clone(), True, 0.1, 1e-5),
    ),
    "sum": (lambda n: (_rows(n),), lambda x: ATEN.sum(x, [0])),
    "mean": (lambda n: (_rows(n),), lambda x: ATEN.mean(x, [-1])),
    "clone": (
        lambda n: (_rows(n).view(-1, 8, WIDTH // 8).transpose(0, 1),),
        lambda x: ATEN.clone(x, memory_format=torch.contiguous_format),
    ),
    "copy_": (lambda n: (_rows(n), _rows(n)), ATEN.copy_),
    "cat": (lambda n: (_rows(n), _rows(n)), lambda a, b: ATEN.cat([a, b], -1)),
    "where": (lambda n: (_rows(n) > 0, _rows(n), _rows(n)), ATEN.where),
    "masked_fill": (lambda n: (_rows(n), _rows(n) > 0), lambda x, m: ATEN.masked_fill(x, m, 0.0)),
    "_to_copy": (lambda n: (_rows(n),), lambda x: ATEN._to_copy(x, dtype=torch.bfloat16)),
    "zeros_like": (lambda n: (_rows(n),), ATEN.zeros_like),
    "bernoulli_": (lambda n: (_rows(n),), lambda x: ATEN.bernoulli_(x, 0.9)),
    "native_dropout": (lambda n: (_rows(n),), lambda x: ATEN.native_dropout(x, 0.1, True)),
    "embedding": (
        lambda n: (torch.randn(256, WIDTH), torch.randint(256, (max(1, n // WIDTH),))),
        ATEN.embedding,
    ),
    "embedding_dense_backward": (
        lambda n: (_rows(n), torch.randint(256, (max(1, n // WIDTH),))),
        lambda g, i: ATEN.embedding_dense_backward(g, i, 256, -1, False),
    ),
    "_safe_softmax": (lambda n: (_rows(n),), lambda x: ATEN._safe_softmax(x, -1)),
    "div_": (lambda n: (_rows(n),), lambda a: ATEN.div_(a, 1.001)),
    "cos": (lambda n: (_rows(n),), ATEN.cos),
    "sin": (lambda n: (_rows(n),), ATEN.sin),
    "cumsum": (lambda n: (_rows(n),), lambda x: ATEN.cumsum(x, -1)),
    "stack": (lambda n: (_rows(n), _rows(n)), lambda a, b: ATEN.stack([a, b])),
    "slice_backward": (
        lambda n: (_rows(n),),
        lambda g: ATEN.slice_backward(g, [g.shape[0], 2 * WIDTH], 1, 0, WIDTH, 1),
    ),
    "gather": (
        lambda n: ((x := _rows(n)), torch.zeros(len(x), 1, dtype=torch.long)),
        lambda x, i: ATEN.gather(x, 1, i),
    ),
    "index": (
        lambda n: ((x := _rows(n)), torch.randint(len(x), (len(x),))),
        lambda x, i: ATEN.index(x, [i]),
    ),
    "max_pool2d_with_indices": (lambda n: (_image(n),), lambda x: ATEN.max_pool2d_with_indices(x, [2, 2], [2, 2])),
    "avg_pool2d": (lambda n: (_image(n),), lambda x: ATEN.avg_pool2d(x, [2, 2], [2, 2])),
    "upsample_nearest2d": (
        lambda n: (_image(n // 4),),
        lambda x: ATEN.upsample_nearest2d(x, [2 * x.shape[2], 2 * x.shape[3]]),
    ),
    "upsample_nearest2d_backward": (
        lambda n: (_image(n),),
        lambda g: ATEN.upsample_nearest2d_backward(
            g, [2 * (g.shape[2] // 2), 2 * (g.shape[3] // 2)], [1, 8, g.shape[2] // 2, g.shape[3] // 2]
        ),
    ),
    "upsample_bilinear2d": (
        lambda n: (_image(n // 4),),
        lambda x: ATEN.upsample_bilinear2d(x, [2 * x.shape[2], 2 * x.shape[3]], False),
    ),
    "addcmul_": (lambda n: (_rows(n), _rows(n), _rows(n)), ATEN.addcmul_),
    "addcdiv_": (lambda n: (_rows(n), _rows(n), _rows(n).abs() + 1), ATEN.addcdiv_),
    "lerp_": (lambda n: (_rows(n), _rows(n)), lambda a, b: ATEN.lerp_(a, b, 0.1)),
    "mul_": (lambda n: (_rows(n),), lambda a: ATEN.mul_(a, 0.999)),
}


def typical(call: Callable[[], object], budget_s: float = BUDGET_S) -> float:
    """Returns the median seconds of a call, over 3 to 200 calls in about `budget_s` seconds; one call if that is 0."""
    call()
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < (3 if budget_s > 0 else 1) or (time.perf_counter() < until and len(times) < 200):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def held(inputs: Callable[[], Made], call: Callable[..., object]) -> tuple[float, Callable[[], object], int]:
    """Returns (bytes that one call moves, function that makes a round of calls, number of calls in a round).

    inputs  makes the arguments of `call`; a round keeps the outputs of its calls until it ends
    """
    first = inputs()
    out = call(*first)
    made = [t for t in (out if isinstance(out, tuple | list) else (out,)) if torch.is_tensor(t)]
    size = sum(t.numel() * t.element_size() for t in (*first, *made))
    count = max(2, min(64, HELD_BYTES // max(1, size)))
    # several sets of inputs, since the same one would stay in the cache
    sets = [inputs() for _ in range(min(count, 16))]

    def round_of() -> list[object]:
        return [call(*sets[i % len(sets)]) for i in range(count)]

    return float(size), round_of, count


def op_times(pace: Pace, budget: Budget) -> list[Row]:
    """Returns rows (op, bytes that it reads and writes, microseconds), sizes ascending. Collective.

    Every op is timed at its smallest and its largest size, and at others until time is up. Rows of "attention" and
    "attention_backward" have FLOPs in place of bytes.
    """

    def figure(name: str, count: int, may_s: float) -> Row:
        inputs, call = OPS[name]
        size, round_of, times = held(partial(inputs, count), call)
        return (name, size, 1e6 * pace.seconds(partial(typical, round_of, min(BUDGET_S, may_s))) / times)

    # all ops at both ends come first, since a slow machine stops early
    figures = [partial(figure, name, count) for count in ends_first(ELEMENTS) for name in OPS]
    with torch.no_grad():
        return sorted(within(budget, figures, 2 * len(OPS))) + _attention(pace)


def _attention(pace: Pace) -> list[Row]:
    """Returns rows (op, FLOPs without a mask, microseconds) of causal fused attention, forward and backward."""
    rows: list[Row] = []
    forward = ATEN._scaled_dot_product_flash_attention_for_cpu
    backward = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    for heads, length, width in ((4, 8, 16), (8, 32, 32), (8, 128, 64), (8, 512, 64)):
        q, k, v, g = (torch.randn(1, heads, length, width) for _ in range(4))
        out, lse = forward(q, k, v, 0.0, True)
        flops = 4.0 * heads * length * length * width
        ahead = partial(forward, q, k, v, 0.0, True)
        rows.append(("attention", flops, 1e6 * pace.seconds(partial(typical, ahead))))
        back = partial(backward, g, q, k, v, out, lse, 0.0, True)
        rows.append(("attention_backward", 2.5 * flops, 1e6 * pace.seconds(partial(typical, back))))
    return rows


def product_times(sides: Sequence[int], pace: Pace, budget: Budget) -> list[Product]:
    """Returns rows ("fp32", m, n, k, microseconds), each the mean of a linear layer's three products. Collective.

    Forward multiplies by a transposed weight, backward by the weight and by transposed inputs. Shapes of the smallest
    and the largest of `sides` come first, others follow until time is up.
    """

    def figure(m: int, n: int, k: int, may_s: float) -> Product:
        ways = (
            lambda m=m, n=n, k=k: (torch.randn(m, k), torch.randn(n, k).t()),
            lambda m=m, n=n, k=k: (torch.randn(m, k), torch.randn(k, n)),
            lambda m=m, n=n, k=k: (torch.randn(k, m).t(), torch.randn(k, n)),
        )
        took = [pace.seconds(partial(_product_seconds, way, min(BUDGET_S, may_s) / 3)) for way in ways]
        return ("fp32", m, n, k, 1e6 * sum(took) / 3)

    # shapes of the ends come first, since a slow machine stops early
    ends = {sides[0], sides[-1]}
    shapes = sorted(product(sides, repeat=3), key=lambda shape: sum(side not in ends for side in shape))
    return sorted(within(budget, [partial(figure, *shape) for shape in shapes], 2**3))


def _product_seconds(way: Callable[[], Made], budget_s: float) -> float:
    _, round_of, count = held(way, ATEN.mm)
    return typical(round_of, budget_s) / count


def convolution_times(pace: Pace, budget: Budget) -> list[Product]:
    """Returns rows ("conv" or "conv_backward", samples x positions, channels out, 9 x channels in, microseconds).

    These are 3 x 3 convolutions. Few channels come first, others follow until time is up. Collective.
    """

    def figure(side: int, outward: int, inward: int, may_s: float) -> list[Product]:
        cells, deep = 2 * side * side, 9 * inward
        x, w = torch.randn(2, inward, side, side), torch.randn(outward, inward, 3, 3)
        g = torch.randn(2, outward, side, side)  # two samples, since PyTorch runs other code for one
        shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        back = partial(ATEN.convolution_backward, g, x, w, [outward], *shape, [True, True, True])
        calls = (("conv", partial(ATEN.convolution, x, w, None, *shape)), ("conv_backward", back))
        return [(name, cells, outward, deep, 1e6 * pace.seconds(partial(typical, call, min(BUDGET_S, may_s / 2))))
                for name, call in calls]  # fmt: skip

    shapes = [(side, outward, inward) for outward, inward in product((8, 32, 128), repeat=2) for side in (4, 24, 96)
              if 36.0 * side * side * outward * inward <= CONV_FLOPS]  # fmt: skip
    rows = within(budget, [partial(figure, *shape) for shape in shapes], 3)
    return [row for pair in rows for row in pair]
