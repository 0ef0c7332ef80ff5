"""Every operation on tiles against the same operation on the whole field, forward and backward."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import shardwise.engine.find_positions  # noqa: F401 - functions on tiles, attention of cut positions
from shardwise.boundary import Edges
from shardwise.comm import Axis, Ledger, Observer
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE
from shardwise.mesh import build_mesh
from shardwise.part import Owners, Part, Uncut, plain, to_part, whole
from shardwise.part.sums import with_summed_gradient

DOUBLE = torch.float64
BARS = {torch.float64: 1e-12, torch.float32: 1e-5}
BAR = BARS[DOUBLE]


# --- grids of ranks


def _grids(ranks: int, dims: int) -> list[tuple[int, ...]]:
    """Ways of dealing the ranks to so many dims."""
    if dims == 1:
        return [(ranks,)]
    return [(n, *rest) for n in range(1, ranks + 1) if ranks % n == 0 for rest in _grids(ranks // n, dims - 1)]


class Meshes(dict):
    """The axes of each grid, one for each dim, made when first asked for. Collective."""

    def __missing__(self, grid: tuple[int, ...]) -> tuple[Axis, ...]:
        inner = {axis.name: axis for axis in build_mesh(Plan(domain=grid), torch.device("cpu")).inner}
        self[grid] = tuple(inner.get(name, Axis.alone(name)) for name in SPACE[: len(grid)])
        return self[grid]


# --- cases: name -> what it draws: (shape of x, shapes of parameters, the operation on x and parameters)


@dataclass
class Case:
    """One random operation."""

    kind: str
    shape: tuple[int, ...]
    run: Callable[..., torch.Tensor]
    params: list[tuple[int, ...]] = field(default_factory=list)
    dims: int = 0  # spatial dims, the last ones
    told: dict[str, Any] = field(default_factory=dict)
    buffers: int = 0  # what lies behind the output along its last dim and has no gradient


def _space(rng: random.Random, dims: int) -> tuple[int, ...]:
    return tuple(rng.randint(1, (40, 24, 9)[dims - 1]) for _ in range(dims))


def _of_each(rng: random.Random, dims: int, low: int, high: int) -> list[int]:
    return [rng.randint(low, high) for _ in range(dims)]


def _convolution(rng: random.Random) -> Case:
    dims, groups = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2))
    kernel, stride, dilation = (
        _of_each(rng, dims, 1, 7 if dims < 3 else 4),
        _of_each(rng, dims, 1, 4),
        _of_each(rng, dims, 1, 3),
    )
    transposed, space = rng.random() < 0.35, _space(rng, dims)
    padding: Any = _of_each(rng, dims, 0, 4)
    if not transposed and rng.random() < 0.2:
        padding, stride = "same", [1] * dims
    plain_op = getattr(F, f"conv{'_transpose' * transposed}{dims}d")
    told = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        told["output_padding"] = [rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True)]
    out, into = 2 * groups, 2 * groups
    weight = (into, out // groups, *kernel) if transposed else (out, into // groups, *kernel)
    return Case(plain_op.__name__, (2, into, *space), lambda x, w, b: plain_op(x, w, b, **told), [weight, (out,)],
                dims, told)  # fmt: skip


def _stack(rng: random.Random) -> Case:
    """Convolutions with what treats each element alone between them, or ends what one exchange can serve."""
    dims, layers = rng.choice((1, 2, 2, 3)), rng.randint(2, 4)
    plain_op, told, space = getattr(F, f"conv{dims}d"), [], tuple(n + 6 for n in _space(rng, dims))
    for _ in range(layers):
        kernel, dilation = _of_each(rng, dims, 1, 4), _of_each(rng, dims, 1, 2)
        pads = [rng.choice((d * (k - 1) // 2, rng.randint(0, 2))) for k, d in zip(kernel, dilation, strict=True)]
        stride = _of_each(rng, dims, 1, 2) if rng.random() < 0.2 else [1] * dims
        between = rng.choice(("relu", "gelu", "skip", "scale", "written", "norm", "rolled", "twice", "drop"))
        told.append((kernel, {"padding": pads, "stride": stride, "dilation": dilation}, between))

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        first = x
        for weight, (_, how, between) in zip(weights, told, strict=True):
            y = plain_op(x, weight, None, **how)
            if between == "twice":
                y = y.sigmoid() + plain_op(x.tanh(), weight, None, **how) * 0.5
            skips = between == "skip" and y.shape == x.shape
            y = {
                "relu": F.relu,
                "gelu": F.gelu,
                "scale": lambda y: 2 - y * weights[0].flatten()[:1] / 3,
                "written": lambda y: y.clone().mul_(2).relu_(),
                "norm": lambda y: y - y.mean(),
                "rolled": lambda y: y.roll(1, -1),
                "drop": lambda y: F.dropout(y, 0.5, training=False),
            }.get(between, lambda y: y)(y)
            first, x = (x, y + x + first.mean()) if skips else (first, y)
        return x

    weights = [(2, 2, *kernel) for kernel, _, _ in told]
    return Case(f"stack of conv{dims}d", (2, 2, *space), run, weights, dims, {"layers": told})


def _pool(rng: random.Random) -> Case:
    dims, kind = rng.choice((1, 2, 2, 3)), rng.choice(("max", "avg"))
    kernel = _of_each(rng, dims, 1, 5)
    told: dict[str, Any] = {"kernel_size": kernel, "padding": [rng.randint(0, k // 2) for k in kernel]}
    told |= {"stride": _of_each(rng, dims, 1, 4) if rng.random() < 0.7 else None, "ceil_mode": rng.random() < 0.5}
    if kind == "max":
        told["dilation"] = _of_each(rng, dims, 1, 2)
    else:
        told["count_include_pad"] = rng.random() < 0.5
        if dims > 1 and rng.random() < 0.2:
            told["divisor_override"] = 3
    plain_op, space = getattr(F, f"{kind}_pool{dims}d"), _space(rng, dims)
    for d, n in enumerate(space):  # torch's kernel writes out of its bounds where a window lies in the padding
        gap = told.get("dilation", [1] * dims)[d]
        if gap * (kernel[d] - 1) >= n + 2 * told["padding"][d] or (gap > n and told["padding"][d]):
            kernel[d], told["padding"][d] = 1, 0
    return Case(f"{kind}_pool{dims}d", (2, 2, *space), lambda x: plain_op(x, **told), [], dims, told)


def _padding(rng: random.Random) -> Case:
    dims, mode = rng.choice((1, 2, 2, 3)), rng.choice(("constant", "circular", "reflect", "replicate"))
    least = -3 if mode == "constant" else 0
    told = {"pad": _of_each(rng, 2 * dims, least, 5), "mode": mode}
    if mode == "constant":
        told["value"] = 1.5
    return Case("pad", (2, 2, *_space(rng, dims)), lambda x: F.pad(x, **told), [], dims, told)


def _norm(rng: random.Random) -> Case:
    dims, kind = rng.choice((1, 2, 2, 3)), rng.choice(("group", "instance", "layer", "rms", "batch"))
    space = _space(rng, dims)
    shape = (2, 4, *space)
    if kind == "group":
        groups = rng.choice((1, 2, 4))
        return Case("group_norm", shape, lambda x, w, b: F.group_norm(x, groups, w, b), [(4,), (4,)], dims)
    if kind == "instance":
        return Case("instance_norm", shape, lambda x, w, b: F.instance_norm(x, None, None, w, b), [(4,), (4,)], dims)
    if kind == "batch":
        return Case("batch_norm", shape, _batch_norm, [(4,), (4,)], dims, buffers=2)
    run = F.rms_norm if kind == "rms" else F.layer_norm
    params = [space] if kind == "rms" else [space, space]
    return Case(f"{kind}_norm", shape, lambda x, *p: run(x, space, *p), params, dims)


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The norm, and its running buffers beside it."""
    kept = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    y = F.batch_norm(x, *kept, w, b, True, 0.3)
    return torch.cat([y.flatten(2), y.new_ones(2, 1, 1) * torch.stack(kept, 1)], 2)


def _resizing(rng: random.Random) -> Case:
    dims = rng.choice((1, 2, 2, 3))
    space = _space(rng, dims)
    modes = ["nearest", "nearest-exact", "area", ("linear", "bilinear", "trilinear")[dims - 1]]
    mode = rng.choice([*modes, "bicubic"] if dims == 2 else modes)
    told: dict[str, Any] = {"mode": mode}
    if rng.random() < 0.5:
        told["size"] = [n if rng.random() < 0.1 else rng.randint(1, 2 * n + 3) for n in space]
    else:
        told["scale_factor"] = [rng.choice((0.5, 1.0, 1.5, 2.0, 3.0, 0.7)) for _ in space]
        told["recompute_scale_factor"] = rng.random() < 0.3
    if mode not in modes[:3]:
        told["align_corners"] = rng.random() < 0.5
    if mode in ("bilinear", "bicubic"):
        told["antialias"] = rng.random() < 0.5
    return Case("interpolate", (2, 2, *space), lambda x: F.interpolate(x, **told), [], dims, told)


def _adaptive(rng: random.Random) -> Case:
    dims, kind = rng.choice((1, 2, 2, 3)), rng.choice(("avg", "max"))
    space = _space(rng, dims)
    sizes = [rng.choice((1, rng.randint(1, n + 2))) for n in space]
    run = getattr(F, f"adaptive_{kind}_pool{dims}d")
    return Case(f"adaptive_{kind}_pool", (2, 2, *space), lambda x: run(x, sizes), [], dims, {"sizes": sizes})


def _shuffle(rng: random.Random) -> Case:
    r, space = rng.choice((2, 3)), (rng.randint(1, 12), rng.randint(1, 8))
    if rng.random() < 0.5:
        return Case("pixel_shuffle", (2, 2 * r * r, *space), lambda x: F.pixel_shuffle(x, r), [], 2, {"r": r})
    shape = (2, 2, space[0] * r, space[1] * r)
    return Case("pixel_unshuffle", shape, lambda x: F.pixel_unshuffle(x, r), [], 2, {"r": r})


def _order(rng: random.Random) -> Case:
    dims, kind = rng.choice((1, 2, 2, 3)), rng.choice(("flip", "roll", "crop", "steps", "cat", "stack", "sums"))
    space = _space(rng, dims)
    d = rng.randrange(dims)
    shape, n = (2, 2, *space), space[d]
    a, b, step = rng.randint(0, n), rng.randint(0, n), rng.randint(1, 3)

    def part(x: torch.Tensor, *of: int | None) -> torch.Tensor:
        return x[(slice(None),) * (2 + d) + (slice(*of),)]

    many, shifts = list(range(2, 2 + dims)), _of_each(rng, dims, -9, 9)
    run = {
        "flip": lambda x: x * x.flip(many[: d + 1]),
        "roll": lambda x: x * torch.roll(x, shifts, many),
        "crop": lambda x: F.gelu(part(x, min(a, n - 1), None)),
        "steps": lambda x: torch.cat([part(x, i, n // 2 * 2, 2) for i in (0, 1)], 1),
        "cat": lambda x: torch.roll(torch.cat([x, 2 * part(x, min(a, b), max(a, b), step), x], 2 + d), 1, 2 + d),
        "stack": lambda x: torch.stack([x, x.flip(2 + d)], d + 2).flatten(d + 2, d + 3),
        "sums": lambda x: x - x.mean(2 + d, keepdim=True) * x.var(many, False).sum() + x.amax(2 + d, keepdim=True),
    }[kind]
    return Case(kind, shape, run, [], dims, {"dim": d, "of": (a, b, step), "shifts": shifts})


def _windows(rng: random.Random) -> Case:
    return _windows_of(rng.randint(1, 5), rng.randint(0, 4), rng.randint(1, 24), rng.randint(1, 16))


def _windows_of(w: int, shift: int, h: int, v: int) -> Case:
    """Windows of (w, w): rolled, padded, viewed apart and put together again, as in a Swin block."""

    def run(x, weight):
        x = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, -v % w, 0, -h % w))
        x = torch.roll(x, (-shift, -shift), (1, 2))
        rows, columns = x.shape[1] // w, x.shape[2] // w
        windows = x.view(2, rows, w, columns, w, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, 4)
        q, k = (windows @ weight).chunk(2, -1)
        windows = F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), windows.unsqueeze(1)).squeeze(1)
        x = windows.view(2, rows, columns, w, w, 4).permute(0, 1, 3, 2, 4, 5).reshape(2, rows * w, columns * w, 4)
        return torch.roll(x, (shift, shift), (1, 2))[:, :h, :v].permute(0, 3, 1, 2)

    return Case("windows", (2, 4, h, v), run, [(4, 8)], 2, {"w": w, "shift": shift})


def _patches(rng: random.Random) -> Case:
    kind, space = rng.choice(("unfold", "fold", "mixed", "sliding", "tokens")), _space(rng, 2)
    told: dict[str, Any] = {"kernel_size": _of_each(rng, 2, 1, 4), "stride": _of_each(rng, 2, 1, 3)}
    told |= {"padding": _of_each(rng, 2, 0, 2), "dilation": _of_each(rng, 2, 1, 2)}
    k, s = told["kernel_size"], told["stride"]
    run = {
        "unfold": lambda x: F.unfold(x, **told),
        "fold": lambda x: F.fold(F.unfold(x, **told) ** 2, space, **told),
        "mixed": lambda x: F.fold(F.unfold(x, **told).transpose(1, 2).tanh().transpose(1, 2), space, **told) * x,
        "sliding": lambda x: x.unfold(2, k[0], s[0]).unfold(3, k[1], s[1]).square().mean((4, 5)),
        "tokens": lambda x: F.softmax(F.unfold(x, k, stride=k).transpose(1, 2), -1).cumsum(-1),
    }[kind]
    return Case(kind, (2, 2, *space), run, [], 2, told)


def _attention(rng: random.Random) -> Case:
    """Tokens of patches with a class token: global attention, then back to a field."""
    (h, w), heads = _space(rng, 2), rng.choice((1, 2, 4))
    p = rng.randint(1, 3)

    def run(x, embed, qkv, token, position):
        x = F.conv2d(x, embed / 4, stride=p)
        rows, columns = x.shape[2:]
        x = torch.cat([token.expand(2, -1, -1), x.flatten(2).transpose(1, 2)], 1) + position[:, : rows * columns + 1]
        q, k, v = (x @ qkv / 4).reshape(2, -1, 3, heads, 8 // heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, -1, 8)
        return F.layer_norm(x[:, 1:].transpose(1, 2).reshape(2, 8, rows, columns), (columns,)) * x[:, 0, :, None, None]

    weights = [(8, 2, p, p), (8, 24), (1, 1, 8), (1, 40 * 40 + 1, 8)]
    return Case("attention", (2, 2, h, w), run, weights, 2, {"patch": p, "heads": heads})


def _fourier(rng: random.Random) -> Case:
    dims, kind = rng.choice((1, 2, 2, 3)), rng.choice(("there", "real", "operator"))
    space, norm = _space(rng, dims), rng.choice((None, "ortho", "forward"))
    batch = (rng.choice((1, 2)), rng.choice((1, 3, 8)))
    over = list(range(2, 2 + dims))
    modes = [slice(None, max(1, n // 3)) for n in space]

    def there(x):
        y = torch.fft.fftn(x, dim=over, norm=norm)
        return torch.fft.ifftn(y * y.abs(), dim=over, norm=norm)

    def real(x):
        y = torch.fft.rfftn(x, dim=over, norm=norm)
        return torch.fft.irfftn(y * 2, s=[n + i for i, n in enumerate(space)], dim=over, norm=norm)

    def operator(x, weight):  # the lowest modes, mixed by a weight each
        y = torch.fft.rfftn(x, dim=over, norm=norm)
        kept = torch.zeros((*batch, *space[:-1], space[-1] // 2 + 1), dtype=y.dtype)
        low = (slice(None), slice(None), *modes)
        kept[low] = y[low] * torch.view_as_complex(weight)[low]
        return torch.fft.irfftn(kept, s=space, dim=over, norm=norm) + x

    run = {"there": there, "real": real, "operator": operator}[kind]
    params = [(1, 1, *space[:-1], space[-1] // 2 + 1, 2)] if kind == "operator" else []
    return Case(f"fft {kind}", (*batch, *space), run, params, dims, {"norm": norm})


def _modules(rng: random.Random) -> Case:
    """Functions of torch that are written in Python, of which what they call is answered."""
    kinds = ("lp_pool", "response", "heads", "upsample", "cells", "crossed", "norms")
    kind, (h, w) = rng.choice(kinds), _space(rng, 2)
    heads = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=DOUBLE).requires_grad_(False)

    def attended(x, weight):
        tokens = x.flatten(2).transpose(1, 2)
        names = {"in_proj_weight": weight, "out_proj.weight": weight[:4]}
        found, _ = torch.func.functional_call(
            heads.to(x.dtype), names, (tokens, tokens, tokens), {"need_weights": False}
        )
        return found.transpose(1, 2).unflatten(2, x.shape[2:])

    def crossed(x, weight):  # means of rows beside those of columns, each for all cells that it is of
        pools = F.adaptive_avg_pool2d(x, (None, 1)), F.adaptive_avg_pool2d(x, (1, None)).permute(0, 1, 3, 2)
        rows, columns = torch.split(torch.cat(pools, 2).tanh(), [h, w], 2)
        return x * rows.sigmoid() * columns.permute(0, 1, 3, 2).sigmoid()

    def norms(x, weight):  # one norm for a whole tensor and for tiles
        kept = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
        first = F.batch_norm(x.square().mean((2, 3), keepdim=True), *kept, training=True)
        return F.batch_norm(x, *kept, training=True) * first + kept[0].view(4, 1, 1)

    run = {
        "crossed": crossed,
        "norms": norms,
        "lp_pool": lambda x, _: F.lp_pool2d(x.abs() + 1, 3, 2),
        "response": lambda x, _: F.local_response_norm(x, 3),
        "heads": attended,
        "cells": lambda x, w: F.conv1d(x.flatten(2), w[:, :, None]).unflatten(2, x.shape[2:]),
        "upsample": lambda x, _: torch.nn.Upsample(scale_factor=2, mode="bilinear")(x),
    }[kind]
    return Case(kind, (2, 4, h, w), run, [(12, 4)], 2)


def _net(rng: random.Random) -> Case:
    """A small U-Net: what is halved with a rest and doubled is padded to its skip, or its skip is cropped to it."""
    crops = rng.random() < 0.5

    def run(x, w1, w2, w3, w4, scale):
        skip = F.gelu(F.group_norm(F.conv2d(x, w1, padding=1), 2, scale))
        low = F.relu(F.conv2d(F.max_pool2d(skip, 2), w2, padding=2, dilation=2))
        up = F.conv_transpose2d(low, w3, stride=2)
        rest = [skip.shape[2] - up.shape[2], skip.shape[3] - up.shape[3]]
        if crops:
            skip = skip[:, :, : up.shape[2], : up.shape[3]]
        else:
            up = F.pad(up, [rest[1] // 2, rest[1] - rest[1] // 2, 0, rest[0]])
        return F.conv2d(torch.cat([up, skip], 1), w4, padding=1) - up.mean((2, 3), keepdim=True)

    weights = [(4, 2, 3, 3), (4, 4, 3, 3), (4, 4, 2, 2), (4, 8, 3, 3), (4,)]
    return Case("net", (2, 2, rng.randint(2, 40), rng.randint(2, 24)), run, weights, 2, {"crops": crops})


def _boundary(rng: random.Random) -> Case:
    """Operations that pad by themselves, under a declared boundary."""
    dims, kind = rng.choice((1, 2, 2, 2, 3)), rng.choice(("conv", "same", "transposed", "max", "avg", "unfold"))
    dims = 2 if kind == "unfold" else dims
    kinds = tuple(rng.choice(("zeros", "periodic", "reflect", "replicate", "pole")) for _ in range(min(dims, 2)))
    if "periodic" not in kinds:  # what a pole goes on at
        kinds = tuple("periodic" if one == "pole" else one for one in kinds)
    space = [2 * n for n in _space(rng, dims)]
    k, step, pads = _of_each(rng, dims, 1, 4), _of_each(rng, dims, 1, 3), _of_each(rng, dims, 0, 3)
    half = [min(n // 2, pad) for n, pad in zip(k, pads, strict=True)]
    weight = (2, 3, *k) if kind == "transposed" else (3, 2, *k)
    conv, back, largest, mean = (getattr(F, f"{name}{dims}d") for name in
                                 ("conv", "conv_transpose", "max_pool", "avg_pool"))  # fmt: skip
    plain_op = {
        "conv": lambda x, w: conv(x, w, None, step, pads),
        "same": lambda x, w: conv(x, w, padding="same", dilation=2),
        "transposed": lambda x, w: back(x, w, None, step, half),
        "max": lambda x, w: largest(x, k, step, half),
        "avg": lambda x, w: mean(x, k, step, half),
        "unfold": lambda x, w: F.unfold(x, k, 1, pads, step),
    }[kind]

    def run(x, w):
        with Edges(("lat", "lon")[:dims], kinds).entered("here"):
            return plain_op(x, w)

    told = {"kernel": k, "stride": step, "padding": pads}
    return Case(f"{kind}{dims}d {kinds}", (2, 2, *space), run, [weight], dims, told)


def _places(rng: random.Random) -> Case:
    """Places of the largest, put back there; a field that is read at places that are computed."""
    of_any = "indices", "adaptive indices", "unpool", "gathered", "selected"
    kind = rng.choice((*of_any, "sampled", "from whole", "whole field", "indexed"))
    dims = rng.choice((1, 2, 2, 3)) if kind in of_any else 2
    k = _of_each(rng, dims, 1, 4)
    step, pads = [rng.randint(1, n) for n in k], [rng.randint(0, n // 2) for n in k]
    gaps, ceil = _of_each(rng, dims, 1, 2) if kind == "indices" else [1] * dims, rng.random() < 0.3
    space = tuple(max(n, (m - 1) * g + 1) for n, m, g in zip(_space(rng, dims), k, gaps, strict=True))
    pool, unpool = getattr(F, f"max_pool{dims}d"), getattr(F, f"max_unpool{dims}d")
    options = {"mode": rng.choice(("bilinear", "nearest", "bicubic")), "align_corners": rng.random() < 0.5}
    options["padding_mode"] = rng.choice(("zeros", "border", "reflection"))

    def indices(x, w):
        y, places = pool(x, k, step, pads, gaps, ceil, return_indices=True)
        return y * (1 + torch.sin(places.double()))

    def adaptive(x, w):
        y, places = getattr(F, f"adaptive_max_pool{dims}d")(x, [n // 2 + 1 for n in space], return_indices=True)
        return y * (1 + torch.sin(places.double()))

    def unpooled(x, w):
        y, places = pool(x, k, step, pads, 1, False, return_indices=True)
        return unpool(y * 2, places, k, step, pads, output_size=space)

    def sampled(x, w):
        grid = torch.tanh(F.conv2d(x, w, padding=1)).permute(0, 2, 3, 1) * 1.2
        return F.grid_sample(x, grid, **options)

    def whole_grid(x, w):
        theta = torch.cat([w.flatten()[:6].view(1, 2, 3)] * 2)
        return F.grid_sample(x, F.affine_grid(theta, (2, 2, space[0], space[1] + 2), align_corners=False), **options)

    def whole_field(x, w):
        grid = torch.tanh(x).permute(0, 2, 3, 1)
        return F.grid_sample(torch.cat([w[:1], w[1:]]), grid, **options)

    def gathered(x, w):
        place = (x[:, :1].sigmoid() * math.prod(space)).long().clamp(max=math.prod(space) - 1).flatten(2)
        return torch.gather(x.flatten(2) * w[0, 0, 0, 0], 2, place.expand(-1, 2, -1)).view_as(x) * x

    def selected(x, w):
        rows = x * w[0, 0, 0, 0]
        place = (x[0, 0].flatten(1).mean(-1) if dims > 1 else x[0, 0]).sigmoid().mul(space[0]).long()
        return rows.index_select(2, place.clamp(max=space[0] - 1)) * x

    def indexed(x, w):
        down, across = ((x[:, c].sigmoid() * n).long().clamp(max=n - 1) for c, n in zip((0, 1), space, strict=True))
        samples = torch.arange(2)[:, None, None]
        return (x * w[0, 0, 0, 0])[samples, :, down, across].movedim(-1, 1) * x[..., across[0, 0, :1]]

    run = {
        "gathered": gathered,
        "selected": selected,
        "indexed": indexed,
        "indices": indices,
        "adaptive indices": adaptive,
        "unpool": unpooled,
        "sampled": sampled,
        "from whole": whole_grid,
        "whole field": whole_field,
    }[kind]
    told = {"kernel": k, "stride": step, "padding": pads, "dilation": gaps, "ceil": ceil, **options}
    return Case(kind, (2, 2, *space), run, [(2, 2, 3, 3)], dims, told)


def _written(rng: random.Random) -> Case:
    """A whole tensor into which tiles are written: parts of it, some of it twice, with numbers, with a view beside."""
    dims, kind = (
        rng.choice((1, 2, 2, 3)),
        rng.choice(("once", "twice", "place", "added", "viewed", "strided", "summed")),
    )
    space = _space(rng, dims)
    before, behind, step = _of_each(rng, dims, 0, 3), _of_each(rng, dims, 0, 3), rng.randint(1, 3)
    inside = tuple(slice(a, a + n) for a, n in zip(before, space, strict=True))
    at = rng.randrange(space[-1])

    def run(x, w):
        kept = torch.full((2, 2, *map(sum, zip(before, space, behind, strict=True))), 0.5, dtype=x.dtype)
        beside = kept.view(-1) if kind == "viewed" else kept
        if kind == "summed":  # windows that overlap, each as the module gives it
            for start in range(0, space[-1], 2):
                inner = (..., *inside[:-1], slice(start, start + 3))
                kept[inner] += (x[..., start : start + 3] * w.view(2, 1, *[1] * (dims - 1)) * 2).tanh()[
                    ..., : kept[inner].shape[-1]
                ]
            return F.gelu(kept[(..., *inside)]) * x
        if kind == "strided":
            kept[..., ::step] = torch.cat([x, x, x], -1)[..., : kept[..., ::step].shape[-1]].sum(
                list(range(2, x.dim() - 1)), keepdim=True
            ).expand(kept[..., ::step].shape)  # fmt: skip
        kept[(slice(None), slice(None), *inside)] = x * 2
        if kind == "twice":
            kept[(..., *inside)] = kept[(..., *inside)] * x.flip(-1)
            kept[0] = 1.5
        if kind == "place":
            kept[..., at] = x.sum(-1).mean() + w[0, 0] * 3
        if kind == "added":
            kept[:, :1] += w[0]
            kept[:, 1, ..., at : at + 2] = w[1, 0]
        return F.gelu(kept) * torch.roll(kept, 1, 2) + beside.sum()

    return Case(f"written {kind}", (2, 2, *space), run, [(2, 1)], dims, {"before": before, "behind": behind, "at": at})


def _edges(rng: random.Random) -> Case:
    """What is written into single rows, columns and cells of a field, as conditions at a boundary are."""
    kinds = ("row", "rows", "listed", "into", "copied", "added", "cell", "views", "ints", "mask", "both", "line",
             "kept", "every other")  # fmt: skip
    kind, dims, space = rng.choice(kinds), rng.choice((1, 2, 2, 3)), None
    space = tuple(n + 2 for n in _space(rng, dims))
    a, b, d = rng.choice((0, -1, rng.randrange(space[0]))), rng.randrange(space[-1]), rng.randrange(dims)
    row = (slice(None),) * (2 + d)

    def run(x, w):
        y = x * w
        if kind == "row":
            y[:, :, a] = 0.5
        elif kind == "rows":
            y[:, 0, a] = y[:, 1, 0] * 2
            y[..., -1] = (y[..., b] * w[..., 0]).detach()
        elif kind == "listed":
            y[:, :, [0, -1]] = 0.25
            y[..., [0, b]] *= y[..., [1, 1]].tanh()
            y[:, 0, [a]] += w[0, 1].sum()
            y = y * y[:, :, [a, 0, a]].mean()
        elif kind == "into":
            kept = torch.full(space, 0.3, dtype=x.dtype)
            kept.mul_(0.5).add_(y.mean((0, 1)))
            y = y * kept.lerp_(y[0, 0].detach(), 0.25)
        elif kind == "copied":
            y[(*row, 0)] = y[(*row, -2)]
            y[(*row, -1)] = y[(*row, 1)]
        elif kind == "added":
            y[:, :, a] += x[:, :, 0].tanh()
            y[..., b] *= 2
        elif kind == "cell":
            y[(0, slice(None), *[0] * dims)] = w.flatten()
            y[(..., *[-1] * dims)] -= 3
        elif kind == "views":
            y.select(2, a)[:, 1].unsqueeze(-1).transpose(0, -1).mul_(3)
            y[:, :, a][:, :1].squeeze(1).mul_(0.3)
            y = y * (y[:, :, a].flatten(1).square().mean() + y[:, :, 0][:, 1:].flatten().sum())
        elif kind == "ints":
            place = (y > 0).long()
            place[:, :, a] = 7
            place[..., b].add_(place[..., 0] * 2)
            y = y * place
        elif kind == "mask":
            there = y > 0
            there[:, :, 0] = False
            there[..., -1].logical_not_()
            y = y * there
        elif kind == "both":
            y[:, :, :1] = 1.5
            y[..., b] = y[..., :1].squeeze(-1)
        elif kind == "every other":
            even, odd = (*row, slice(0, None, 2)), (*row, slice(1, None, 3))
            y[even] = y[even].flip(2 + d).tanh()
            y[odd] += w
            y[..., b % 2 :: 2].mul_(0.5)
            y[:, :, 1::2][..., ::2] -= x[:, :, 1::2][..., ::2] * 2
        elif kind == "line":
            y = F.conv1d(y.flatten(2), w.flatten(2)[:, :, :1].expand(2, 2, 3), padding=1)
            y[:, :, a] = w.flatten()
            y = F.conv1d(y, torch.ones(2, 2, 3, dtype=x.dtype), padding=1)
        else:
            edge, before = y[:, :, a], y[:, :, a] * 2
            edge += 1
            y = y * (edge * before).flatten(1).mean()
        return F.gelu(y) * y.sum()

    return Case(f"edges {kind}", (2, 2, *space), run, [(1, 2, *[1] * dims)], dims, {"at": (a, b, d)})


def _masked(rng: random.Random) -> Case:
    """Elements that a mask selects, in one process's order; what is put where it is true; bins; one cell for all."""
    kinds = ("own", "whole", "rows", "select", "zeroed", "written", "samples", "bins", "mesh", "numbers", "one")
    kind, dims = rng.choice(kinds), rng.choice((1, 2, 2, 3))
    space, least = _space(rng, dims), rng.choice((-0.5, 0.0, 9.0))

    def land(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(math.prod(space)).view(space) % 3 > 0

    def zeroed(x, w):
        y = x * 2
        y[y.isnan() | (y > 0.5)] = 0.0
        y[:, :, land(x)] = 1.5
        return torch.cat([y.flatten(1), (x - y).square().mean().view(1, 1).expand(2, 1)], 1)

    def written(x, w):
        y, there = x * w, x > least
        y[there] = y[there] * 3 - x[there].mean().nan_to_num()
        return y

    def bins(x, w):
        place = torch.arange(math.prod(space)) % 5
        return torch.zeros(2, 2, 5, dtype=x.dtype).index_add(-1, place, x.flatten(2)) + w.view(1, 2, 1)

    def mesh(x, w):
        place, cells = torch.arange(math.prod(space)) % 5, x.flatten(2).transpose(1, 2) * w.view(1, 1, 2)
        nodes = cells.new_zeros(2, 5, 2).index_add(1, place, cells[:, torch.arange(math.prod(space))]).tanh()
        return torch.cat([cells, nodes[:, place]], -1)

    run = {
        "own": lambda x, w: (x * w)[x > least] ** 2,
        "whole": lambda x, w: (x * w)[:, :, land(x)] ** 2,
        "rows": lambda x, w: (x * w).movedim(1, -1)[x[:, 0] > least],
        "select": lambda x, w: torch.masked_select(x * w, x[:, :1] > least).square(),
        "zeroed": zeroed,
        "written": written,
        "samples": lambda x, w: (x * w)[:, torch.tensor([True, False])].square(),
        "bins": bins,
        "mesh": mesh,
        "one": lambda x, w: x * w - x[:, :, -1:].expand_as(x) * x[..., :1],
        "numbers": lambda x, w: torch.nansum((x * w).masked_fill(x > 1, math.nan) ** 2, -1) + x.nanmean(),
    }[kind]
    return Case(f"masked {kind}", (2, 2, *space), run, [(2, *[1] * dims)], dims, {"least": least})


DRAWS = {
    "net": _net, "stack": _stack, "convolution": _convolution, "pool": _pool, "padding": _padding, "norm": _norm,
    "resizing": _resizing, "adaptive": _adaptive, "shuffle": _shuffle, "order": _order, "windows": _windows,
    "patches": _patches, "attention": _attention, "fourier": _fourier,
    "modules": _modules, "boundary": _boundary, "places": _places, "written": _written,
    "masked": _masked, "edges": _edges,
}  # fmt: skip


# --- one case, whole and on tiles


def _whole(case: Case, seed: int, dtype: torch.dtype = DOUBLE) -> tuple | None:
    """(x, parameters, output, weight of each output, gradients), or None where torch refuses the case."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(case.shape, dtype=dtype, generator=draws).requires_grad_()
    params = [torch.randn(shape, dtype=dtype, generator=draws).requires_grad_() for shape in case.params]
    try:
        y = case.run(x, *params)
        weight = torch.randn(y.shape, dtype=y.dtype, generator=draws)
        (y * weight).real.sum().backward()
    except (RuntimeError, ValueError, InputError):
        return None
    if not y.isfinite().all():  # windows that lie in the padding alone
        return None
    return (
        x.detach(),
        params,
        y.detach(),
        weight,
        [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, *params)],
    )


def _tile(whole: torch.Tensor, axes: tuple[Axis, ...], dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tile, of balanced blocks: the plain tensor, and as a part of the whole."""
    owners = [Owners.blocks(whole.shape[d - dims], axis.size) for d, axis in enumerate(axes)]
    local = whole
    for d, (axis, own) in enumerate(zip(axes, owners, strict=True)):
        local = own.take(local, whole.dim() - dims + d, axis.index)
    leaf = local.clone().requires_grad_()
    part = leaf
    for d, (axis, own) in reversed(list(enumerate(zip(axes, owners, strict=True)))):
        part = to_part(part, whole.dim() - dims + d, own, axis) if axis.size > 1 else part
    return leaf, part


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return float((a - b).abs().max() / max(1.0, float(a.abs().max()))) if a.numel() else 0.0


def _as_dealt(tensor: Any) -> bool:
    """Whether this rank has as many indices of a part as its owners say; where there are more, a sum counts them."""
    while isinstance(tensor, Part):
        if tensor.local.shape[tensor.dim_cut] != tensor.owners.counts[tensor.axis.index]:
            return False
        tensor = tensor.local
    return True


def _try(case: Case, axes: tuple[Axis, ...], expected: tuple) -> str | float:
    """The largest relative difference of output and gradients; what refuses the case."""
    x, params, y, weight, gradients = expected
    leaf, tile = _tile(x, axes, case.dims)
    mine = [p.detach().clone().requires_grad_() for p in params]
    try:
        out = case.run(tile, *(with_summed_gradient(p, tuple(a for a in axes if a.size > 1)) for p in mine))
        (out * weight).real.sum().backward()
    except Uncut as refused:
        return str(refused)
    if out.shape != y.shape or not _as_dealt(out):
        return math.inf
    found = [_off(y, plain(out.detach())), _off(_tile(gradients[0], axes, case.dims)[0].detach(), leaf.grad)]
    for gradient, held in zip(gradients[1:], mine, strict=True):
        total = torch.zeros_like(held) if held.grad is None else held.grad.clone()
        dist.all_reduce(total)
        found.append(_off(gradient, total))
    return max(found)


def _cases(
    seed: int, count: int, kinds: tuple[str, ...], dtype: torch.dtype = DOUBLE
) -> list[tuple[str, str | float]]:  # fmt: skip
    """(what was tried, what was found) of random cases. Runs on every rank."""
    ranks = dist.get_world_size()
    meshes = Meshes()
    found: list[tuple[str, str | float]] = []
    draw = 0
    while len(found) < count:
        rng = random.Random(seed + draw)
        case = DRAWS[kinds[draw % len(kinds)]](rng)
        grid = rng.choice(_grids(ranks, case.dims))
        draw += 1
        expected = _whole(case, seed + draw, dtype)
        if expected is not None:
            least = rng.choice((0.0, math.inf))  # halos on their way while convolutions compute, always or never
            depth = rng.choice((1, 1, 3)) if case.kind[:5] != "stack" else rng.randint(2, 4)  # convolutions of a halo
            axes = tuple(replace(axis, overlap_from=least, halo_depth=depth) for axis in meshes[grid])
            told = f"{case.kind} {case.shape} {case.told} on {grid}, halos beside from {least} products on, of {depth}"
            result = _try(case, axes, expected)
            if isinstance(result, float) and BARS[dtype] < result:
                result = _beyond_rounding(result, case, expected, BARS[dtype])
            found.append((told, result))
    return found


def _beyond_rounding(error: float, case: Case, expected: tuple, bar: float) -> float:
    """The error, or the bar where one process is as far from itself of x an ulp beside (a norm of two equal cells)."""
    x, params, output, weight, gradients = expected
    own = 0.0
    for turn in range(8):
        draws = torch.Generator().manual_seed(turn)
        each = x.shape if turn % 2 else (*x.shape[:2], *[1] * case.dims)  # by cells, or as a sum of cells is rounded
        ulps = torch.randint(-1, 2, each, generator=draws).to(x.dtype)
        near = x * (1 + ulps * torch.finfo(x.dtype).eps)
        leaves = [t.detach().requires_grad_() for t in (near, *params)]
        y = case.run(*leaves)
        if y.shape != output.shape:
            return error
        (y * weight).real.sum().backward()
        slopes = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
        pairs = [(output, y.detach()), *zip(gradients, slopes, strict=True)]
        off = max(_off(*pair) for pair in pairs)
        own = max(own, off if off <= 1e3 * bar else 0.0)  # beyond it, another cell is the largest
    return bar if error <= 4 * own else error


def _of_one_row(norm: tuple[int, ...]) -> str | float:
    """A layer norm over a field of one row on 2 x 2 tiles. Runs on every rank."""
    case = Case("norm", (2, 4, 1, 16), lambda x, w, b: F.layer_norm(x, norm, w, b), [norm, norm], 2)
    expected = _whole(case, 3, DOUBLE)
    assert expected is not None
    return _try(case, Meshes()[(2, 2)], expected)


@pytest.mark.parametrize("norm", [(1, 16), (16,), (4, 1, 16)])
def test_a_sum_that_was_taken_over_one_axis_is_still_a_share_over_the_next(pool, norm: tuple[int, ...]) -> None:
    """The weight's gradient: rows of no tile but one leave it a sum, already taken when its summand is asked for."""
    assert max(pool.run(_of_one_row, 4, norm)) <= BARS[DOUBLE]


def _judge(found: list[list[tuple[str, str | float]]], seed: int, bar: float = BAR) -> tuple[int, int, float]:
    """Equal or refused, on all ranks alike: how many cases, how many of them refused, the largest difference."""
    refused, largest = 0, 0.0
    for rows in zip(*found, strict=True):
        results = [result for _, result in rows]
        if all(isinstance(result, str) for result in results):
            refused += 1
            continue
        assert all(isinstance(r, float) and r <= bar for r in results), f"seed {seed}: {rows[0][0]}: {results}"
        largest = max(largest, *(r for r in results if isinstance(r, float)))
    assert refused <= len(found[0]) // 5
    return len(found[0]), refused, largest


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_operations_on_tiles_equal_the_whole(pool, ranks: int) -> None:
    seed = random.randrange(2**31)
    _judge(pool.run(_cases, ranks, seed, 20, tuple(DRAWS), timeout_s=240), seed)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_operations_on_tiles_many(pool, ranks: int, dtype: torch.dtype) -> None:
    seed, count = random.randrange(2**31), 170 if dtype is DOUBLE else 40
    _judge(pool.run(_cases, ranks, seed, count, tuple(DRAWS), dtype, timeout_s=1800), seed, BARS[dtype])


def _one_window(grid: tuple[int, int]) -> str | float:
    case = _windows_of(5, 4, 1, 1)
    expected = _whole(case, 1)
    assert expected is not None
    return _try(case, Meshes()[grid], expected)


def test_one_cell_in_one_window_goes_one_way_on_all_ranks(pool) -> None:
    """Columns that lie on one rank of an axis, in rows of which ranks further out have two or one."""
    assert max(pool.run(_one_window, 6, (3, 2))) <= BAR


def _crossed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Means of rows beside those of columns, in one tensor and apart again; each for all cells that it is of."""
    pools = x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)
    rows, columns = torch.split(torch.cat(pools, 2).tanh(), [x.shape[2], x.shape[3]], 2)
    return x * rows.sigmoid() * columns.transpose(2, 3).sigmoid() * w


def _looked_up(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Cells of a flattened field at places that it names itself."""
    place = (x[:, :1].sigmoid() * x[0, 0].numel()).long().flatten(2)
    return torch.gather(x.flatten(2) * w, 2, place.expand(-1, 2, -1)).view_as(x) * x


def _both_ways(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A field's cells in two orders side by side, row by row and column by column, as scans go over it."""
    n, c, height, width = x.shape
    orders = torch.stack([x.flatten(2), x.transpose(2, 3).flatten(2)], 1) * w
    rows, columns = (orders * orders.cumsum(-1)).unbind(1)
    return rows.view(n, c, height, width) + columns.view(n, c, width, height).transpose(2, 3)


FEW = {  # of which a rank further out has one row or none: by that, others found a tensor repeated, or none cut
    "crossed": (_crossed, (2, 4, 1, 9), (4, 1, 1), (2, 2)),
    "looked up": (_looked_up, (2, 2, 1, 7, 6), (2, 1), (2, 2, 1)),
    "both ways": (_both_ways, (1, 1, 2, 3), (1, 1, 1), (2, 2)),
}


def _of_few(kind: str) -> str | float:
    run, shape, weight, grid = FEW[kind]
    case = Case(kind, shape, run, [weight], len(shape) - 2)
    expected = _whole(case, 1)
    assert expected is not None
    return _try(case, Meshes()[grid], expected)


@pytest.mark.parametrize("kind", list(FEW))
def test_fewer_rows_than_ranks_go_one_way_on_all_ranks(pool, kind: str) -> None:
    assert max(pool.run(_of_few, 4, kind)) <= BAR


NORMS: dict[str, Callable] = {
    "layer": lambda x, w: F.layer_norm(x, x.shape[2:], w, w.sin()),
    "rms": lambda x, w: F.rms_norm(x, x.shape[2:], w),
}


def _rounded(kind: str, held: torch.dtype) -> list[tuple[torch.dtype, float]]:
    """(dtype, mean error) of a norm of a bf16 field over cut dims, with weights of this dtype: whole, and on tiles."""
    (axis,) = Meshes()[(2,)]
    draws = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 16, 15, generator=draws).bfloat16(), torch.randn(16, 15, generator=draws).to(held)
    owners = Owners.blocks(16, 2)
    tile = to_part(owners.take(x, 2, axis.index), 2, owners, axis)
    exact = NORMS[kind](x.double(), w.double())
    found = NORMS[kind](x, w), plain(NORMS[kind](tile, w))
    return [(each.dtype, float((each.double() - exact).abs().mean())) for each in found]


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", list(NORMS))
def test_norms_over_cut_dims_round_once(pool, kind: str, held: torch.dtype) -> None:
    whole, tiles = pool.run(_rounded, 2, kind, held)[0]
    assert tiles[0] == whole[0] and tiles[1] < 1.05 * whole[1]


def _one_column(grid: tuple[int, int]) -> float:
    x = torch.randn(2, 2, 6, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    _, tile = _tile(x, Meshes()[grid], 2)
    resize = partial(F.interpolate, size=(12, 1), mode="bilinear", antialias=True)
    return float((whole(resize(tile)) - resize(x)).abs().max())


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
def test_a_single_column_is_resized_as_torch_does_it(pool, grid: tuple[int, int]) -> None:
    """With antialias its kernel gives all rows of a single column the first one: so it is done whole."""
    assert max(pool.run(_one_column, 2, grid)) == 0


def _joined(grid: tuple[int, int]) -> float:
    """A field whose rows and columns are joined, and beside it one row of another, which one rank of an axis has."""
    found = []
    for space, place in (((11, 13), 0), ((11, 13), -1), ((2, 3), 0)):

        def run(x, w, place=place):
            row = (x * w)[:, :, place].flatten(1)
            return torch.cat([x.flatten(1), row] if place else [row, x.flatten(1)], 1).square()

        case = Case("joined", (3, 2, *space), run, [(2, 1, 1)], 2)
        expected = _whole(case, 1)
        assert expected is not None
        found.append(_try(case, Meshes()[grid], expected))
    return max(found)


@pytest.mark.parametrize("grid", [(2, 2), pytest.param((3, 2), marks=pytest.mark.long)])
def test_a_row_joined_to_a_flattened_field_goes_one_way_on_all_ranks(pool, grid: tuple[int, int]) -> None:
    assert max(pool.run(_joined, math.prod(grid), grid)) <= BAR


FORCES = {
    "convolution": lambda x, w: F.conv2d(F.conv2d(x, w, padding=1, stride=2).tanh(), w, padding=1),
    "norm": lambda x, w: F.group_norm(F.conv2d(x, w, padding=1), 1, w[:, 0, 0, 0], w[0, :, 1, 1]).tanh(),
    "transform": lambda x, w: torch.fft.rfft2(x.tanh() * w[0, 0, 0, 0]).abs() ** 2 / x.numel(),
    "order": lambda x, w: (x.roll(1, 2) * x[:, :, :1] - F.pad(x, (1, 0, 2, 0), mode="circular")[..., 2:, 1:]) * w.sum(),
}


def _force(kind: str, grid: tuple[int, int]) -> str | float:
    """Gradients of an energy with respect to the field and the weight, which are differentiated again."""

    def run(x, w):
        energy = FORCES[kind](x, w).square().sum()
        first, slope = torch.autograd.grad(energy, (x, w), create_graph=True)
        (again,) = torch.autograd.grad(first[:, :, ::2].tanh().sum(), x, create_graph=True)
        return first + again + slope.tanh().sum() + x * slope.flatten()[:3].sum()

    case = Case(f"force {kind}", (2, 2, 7, 9), run, [(2, 2, 3, 3)], 2)
    expected = _whole(case, 2)
    assert expected is not None
    return _try(case, Meshes()[grid], expected)


@pytest.mark.parametrize("kind", list(FORCES))
def test_second_and_third_derivatives_equal_those_of_the_whole(pool, kind: str) -> None:
    assert max(pool.run(_force, 4, kind, (2, 2))) <= 1e-10


def _penalty(least: float) -> str | float:
    """Gradients of an energy of convolutions whose halos are on their way meanwhile, which are differentiated again."""

    def run(x, w, b):
        y = F.conv2d(F.conv2d(x, w, b, padding=1).tanh(), w, padding=1)
        first, slope, of_bias = torch.autograd.grad(y.square().sum(), (x, w, b), create_graph=True)
        return first + slope.tanh().sum() + of_bias.sum() * x

    case = Case("penalty", (2, 2, 8, 8), run, [(2, 2, 3, 3), (2,)], 2)
    expected = _whole(case, 2)
    assert expected is not None
    axes = tuple(replace(axis, overlap_from=least) for axis in Meshes()[2, 2])
    return _try(case, axes, expected)


@pytest.mark.parametrize("least", [0.0, math.inf])
def test_second_derivatives_of_what_waits_for_its_halo_beside(pool, least: float) -> None:
    assert max(pool.run(_penalty, 4, least)) <= 1e-10


def _few_outputs() -> str | float:
    """A convolution of which one row of tiles has no output, while its halo along the other dim is on its way."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w, b, stride=(2, 1), padding=(0, 1), dilation=(2, 1))
        return y * y.sum((2, 3), keepdim=True)

    case = Case("few outputs", (1, 2, 3, 8), run, [(2, 2, 2, 3), (2,)], 2)
    expected = _whole(case, 1)
    assert expected is not None
    return _try(case, tuple(replace(axis, overlap_from=0.0) for axis in Meshes()[2, 2]), expected)


def test_a_tile_without_outputs_adds_nothing_to_a_sum(pool) -> None:
    assert max(pool.run(_few_outputs, 4)) <= 1e-12


# --- what goes over the wire


def _halo(grid: tuple[int, int], radius: int) -> tuple[list[dict], list[dict]]:
    """What this rank receives in forward and backward of a convolution on tiles of (2, 3, 5, 7)."""
    mesh = build_mesh(Plan(domain=grid), torch.device("cpu"))
    inner = {axis.name: axis for axis in mesh.inner}
    axes = tuple(inner.get(name, Axis.alone(name)) for name in SPACE[:2])
    _, tile = _tile(torch.ones(2, 3, 5 * grid[0], 7 * grid[1], dtype=DOUBLE), axes, 2)
    ledgers = Ledger(), Ledger()
    with Observer(ledgers[0], mesh.group_axes):
        out = F.conv2d(tile, torch.ones(2, 3, 2 * radius + 1, 2 * radius + 1, dtype=DOUBLE), padding=radius)
        summed = (out * out).sum()
    with Observer(ledgers[1], mesh.group_axes):
        summed.backward()
    return tuple([row for row in ledger.rows() if row["op"] == "all_to_all"] for ledger in ledgers)


@pytest.mark.parametrize(("grid", "rank"), [((1, 3), 1), pytest.param((3, 3), 4, marks=pytest.mark.long)])
def test_bytes_of_a_halo(pool, grid: tuple[int, int], rank: int) -> None:
    """An interior tile (a, b) receives B C s (2 r b + 2 r a + 4 r^2), corners with the second dim's strips."""
    a, b, r, rows = 5, 7, 2, grid[0] > 1
    forward, backward = pool.run(_halo, math.prod(grid), grid, r)[rank]
    expected = 2 * 3 * 8 * (2 * r * a + rows * (2 * r * b + 4 * r * r))
    assert sum(row["received_bytes"] for row in forward) == expected == sum(row["received_bytes"] for row in backward)


def test_a_rehearsal_counts_the_bytes_of_a_halo() -> None:
    from shardwise.part import Part
    from shardwise.trace.fake import Fake

    axes = tuple(Axis(name, 3, 1, None, (0, 1, 2), rehearsal=Ledger()) for name in SPACE[:2])
    with Fake():
        local = torch.empty(2, 3, 5, 7, dtype=DOUBLE, requires_grad=True)
        columns = to_part(local, 3, Owners.blocks(21, 3), axes[1])
        tile = to_part(columns, 2, Owners.blocks(15, 3), axes[0])
        out = F.conv2d(tile, torch.empty(2, 3, 5, 5, dtype=DOUBLE), padding=2)
        assert isinstance(out, Part) and out.shape == (2, 2, 15, 21)
        forward = sum(axis.rehearsal.received() for axis in axes)
        (out * out).sum().backward()
    assert forward == 2 * 3 * 8 * (4 * 7 + 4 * 5 + 16)
