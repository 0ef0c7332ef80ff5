"""Paddings of convolutions and pooling under the task's boundary (`task.BOUNDARIES`); tiles: part/rules/padding.

    conv2d(x, padding=1)      zeros around x                                as written
                              pad(x, 1 each way, by the boundary), then     with a boundary
                              conv2d(padding=0)

Convolutions, plain and transposed, max and average pooling and `F.unfold` read cells beyond the field that the module
does not name; there they find what is declared. Padding that the module names (`F.pad`, `padding_mode=`) stays as it
is. Of an operation over more dims than are declared, the last ones are those declared.

    "zeros"      what the operation pads with by itself (max pooling: what is never the largest)
    "periodic"   the field goes on at its other edge                    3 4 | 0 1 2 3 4 | 0 1
    "reflect"    mirrored at the last cell                              2 1 | 0 1 2 3 4 | 3 2
    "replicate"  the last cell                                          0 0 | 0 1 2 3 4 | 4 4
    "pole"       mirrored behind the last row and turned by half of the periodic dim: row -1 is row 0, 180 degrees on

A function mode is entered at the forward of every module, so that a block that is computed again in backward finds the
same, whoever computes it again. On tiles the same paddings are operations on tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from shardwise.errors import InputError

if TYPE_CHECKING:
    from torch import nn

Sizes = int | Sequence[int]
_MODES = {"periodic": "circular", "reflect": "reflect", "replicate": "replicate"}
_here = threading.local()  # .mode: the one that is entered on this thread


def each(value: Sizes, dims: int) -> list[int]:
    """Returns a list with one size for each spatial dim; a number, or a sequence of one, stands for all of them."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * dims if len(sizes) == 1 else sizes


def paddings(padding: Sizes | str, kernel: Sequence[int], dilations: list[int]) -> tuple[list[int], list[int]]:
    """Returns (front, behind): cells that a convolution pads with along each dim; `ValueError` for an unknown text."""
    if padding == "valid":
        padding = 0
    # front and back differ by one where the kernel is even, as torch pads
    if padding == "same":
        both = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        return [n // 2 for n in both], [n - n // 2 for n in both]
    if isinstance(padding, str):
        raise ValueError(f"padding must be a number, 'same' or 'valid', got {padding!r}")
    widths = each(padding, len(kernel))
    return widths, widths


@dataclass(frozen=True)
class Edges:
    """The boundary of each dim of space, in the order in which the dims lie in a tensor."""

    names: tuple[str, ...]  # as Task.spatial calls the dims
    kinds: tuple[str, ...]  # of BOUNDARIES, one for each dim

    def padded(self, input: torch.Tensor, widths: Mapping[int, tuple[int, int]], dims: int, what: str) -> torch.Tensor:
        """Returns the input padded by the boundary: `widths` are (front, behind) cells by dim, of the last `dims`.

        Raises `InputError`, with `what` (the operation), for a dim that has too few cells.
        """
        first = input.dim() - dims
        for d, (front, behind) in widths.items():
            # all dims are checked before the first is padded: the message names the first that is too small
            self._fits(d - dims, max(front, behind), input.shape[first + d], what)
        for d, (front, behind) in widths.items():
            # the pole before the others: it turns whole rows, which padding would have made longer
            if self.kinds[d - dims] == "pole":
                input = self._turned(input, first + d, front, behind, what)
        for d, width in widths.items():
            kind = self.kinds[d - dims]
            # one dim at a time, since each has its own boundary
            if kind != "pole":
                around = [n for e in reversed(range(dims)) for n in (width if e == d else (0, 0))]
                input = F.pad(input, around, mode=_MODES[kind])
        return input

    def declared(self, dims: int, widths: list[tuple[int, int]], what: str) -> dict[int, tuple[int, int]]:
        """Returns, by spatial dim, widths of padded dims whose boundary is not zeros; `InputError` for too few dims."""
        if dims < len(self.kinds) and any(map(any, widths)):
            raise InputError(
                f"{what} pads {dims} dim(s), and Task.spatial declares the boundary of {len(self.kinds)}: which of "
                "them it pads cannot be told; pad there with F.pad and leave its padding at 0"
            )
        wanted = range(max(dims - len(self.kinds), 0), dims)
        return {d: widths[d] for d in wanted if any(widths[d]) and self.kinds[d - dims] != "zeros"}

    def _fits(self, d: int, width: int, n: int, what: str) -> None:
        """Raise `InputError` where dim `d`, of `n` cells, has fewer than `width` to show beyond its edge."""
        most = n - 1 if self.kinds[d] == "reflect" else n if self.kinds[d] != "replicate" else width
        if width > most or not n:
            raise InputError(
                f"{what} reads {width} cells beyond the edge of {self.names[d]}, whose boundary is "
                f"{self.kinds[d]!r} and which has {n} cells there: {self.kinds[d]} gives at most {max(most, 0)}; use "
                "a smaller kernel or padding, or fewer halvings"
            )

    def _turned(self, input: torch.Tensor, dim: int, front: int, behind: int, what: str) -> torch.Tensor:
        """Returns the input with rows beyond the poles, mirrored and shifted half way around (odd: `InputError`)."""
        around, n = input.dim() - len(self.kinds) + self.kinds.index("periodic"), input.shape[dim]
        name = self.names[self.kinds.index("periodic")]
        if input.shape[around] % 2:
            raise InputError(
                f"{what}: boundary 'pole' goes on at the cell half way around {name}, and {name} has "
                f"{input.shape[around]} cells there, an odd number: use a number that stays even, or 'replicate'"
            )
        half = input.shape[around] // 2
        ends = [input.narrow(dim, 0, front), input.narrow(dim, n - behind, behind)]
        north, south = (end.flip(dim).roll(half, around) if end.shape[dim] else None for end in ends)
        return torch.cat([piece for piece in (north, input, south) if piece is not None], dim)

    @contextmanager
    def entered(self, path: str) -> Iterator[None]:
        """Context: operations find this boundary; errors name the module at `path`."""
        mode = getattr(_here, "mode", None)
        if mode is not None and mode.edges == self:
            before, mode.path = mode.path, path
            try:
                yield
            finally:
                mode.path = before
            return
        _here.mode = _Beyond(self, path)
        try:
            with _here.mode:
                yield
        finally:
            _here.mode = mode


class _Beyond(TorchFunctionMode):
    def __init__(self, edges: Edges, path: str):
        super().__init__()
        self.edges, self.path = edges, path

    def __torch_function__(self, func, types, args=(), kwargs=None):
        replaced = _REPLACED.get(func)
        if replaced is None:
            return func(*args, **(kwargs or {}))
        what = f"{func.__name__} of '{self.path}'" if self.path else func.__name__
        return replaced(self.edges, what, *args, **(kwargs or {}))


def bounded(model: Callable[[], nn.Module], edges: Sequence[tuple[str, str]]) -> Callable[[], nn.Module]:
    """Returns a constructor of the same module with this boundary, (name, kind) of each dim; with none, as written."""
    model = model.model if isinstance(model, Bounded) else model
    names, kinds = tuple(name for name, _ in edges), tuple(kind for _, kind in edges)
    return Bounded(model, Edges(names, kinds)) if edges else model


@dataclass(frozen=True)
class Bounded:
    """Builds a module whose own paddings find the boundary."""

    model: Callable[[], nn.Module]  # builds the module as the user wrote it
    edges: Edges

    def __call__(self) -> nn.Module:
        module = self.model()
        for path, child in module.named_modules():
            child.forward = _Inside(child.forward, self.edges, path)
        return module


class _Inside:
    """A module's forward inside the boundary; its method is an attribute, so that a module's copy calls its own."""

    def __init__(self, forward: Callable, edges: Edges, path: str):
        self.__wrapped__ = forward
        self.edges, self.path = edges, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.edges.entered(self.path):
            return self.__wrapped__(*args, **kwargs)


# --- operations that read beyond the field


def _convolution(plain: Callable, dims: int) -> Callable:
    """Returns `plain`, a convolution over `dims` dims, made to pad by the declared boundary (`Edges`)."""

    def convolution(
        edges: Edges, what: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        stride: Sizes = 1, padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        before, after = paddings(padding, weight.shape[2:], each(dilation, dims))
        widths = edges.declared(dims, list(zip(before, after, strict=True)), what)
        if not widths:  # it pads no dim whose boundary is another than zeros
            return plain(input, weight, bias, stride, padding, dilation, groups)
        input = edges.padded(input, widths, dims, what)
        own = [0 if d in widths else before[d] for d in range(dims)]
        rest = [0 if d in widths else after[d] - before[d] for d in range(dims)]
        if any(rest):  # of "same" and an even kernel, one more behind
            input = F.pad(input, [n for d in reversed(range(dims)) for n in (0, rest[d])])
        return plain(input, weight, bias, stride, own, dilation, groups)

    return convolution


def _transposed(plain: Callable, dims: int) -> Callable:
    """Returns `plain`, a transposed convolution over `dims` dims, made to read beyond the field by the boundary."""

    def transposed(
        edges: Edges, what: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        stride: Sizes = 1, padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Returns a transposed convolution of the input padded by the boundary, its outputs cropped to the field."""
        strides, dilations, kernel = each(stride, dims), each(dilation, dims), weight.shape[2:]
        pads, more = each(padding, dims), each(output_padding, dims)
        reads = []
        for d in range(dims):
            n, far = input.shape[input.dim() - dims + d], dilations[d] * (kernel[d] - 1)
            size = (n - 1) * strides[d] - 2 * pads[d] + far + more[d] + 1
            behind = (size - 1 + pads[d]) // strides[d] - (n - 1)  # the last input that adds to the last output
            reads.append((max((far - pads[d]) // strides[d], 0), max(behind, 0)))
        widths = edges.declared(dims, reads, what)
        if not widths:
            return plain(input, weight, bias, stride, padding, output_padding, groups, dilation)
        widths = {d: (max(width), max(width)) for d, width in widths.items()}
        input = edges.padded(input, widths, dims, what)
        own = [pads[d] + strides[d] * widths.get(d, (0, 0))[0] for d in range(dims)]
        return plain(input, weight, bias, strides, own, more, groups, dilations)

    return transposed


def _pooling(plain: Callable, dims: int, by_mean: bool) -> Callable:
    """Returns `plain`, a pooling over `dims` dims, padded by the boundary; `by_mean`: it takes means."""

    def pool(
        edges: Edges, what: str, input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None,
        padding: Sizes = 0, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        pads = each(padding, dims)
        widths = edges.declared(dims, [(n, n) for n in pads], what)
        if not widths:  # it pads no dim whose boundary is another than zeros
            return plain(input, kernel_size, stride, padding, *more, **named)
        names = ("ceil_mode", "count_include_pad", "divisor_override") if by_mean else (
            "dilation", "ceil_mode", "return_indices")  # fmt: skip
        options = dict(zip(names, more, strict=False)) | named
        for option in ("ceil_mode", "return_indices"):
            if options.get(option):
                raise InputError(
                    f"{what}: {option}=True counts in the field as padded, and its boundary "
                    f"{', '.join(edges.kinds)} is not padding: pad with F.pad and leave its padding at 0"
                )
        input = edges.padded(input, widths, dims, what)
        own = [0 if d in widths else pads[d] for d in range(dims)]
        return plain(input, kernel_size, stride, own, **options)

    return pool


def _with_indices(plain: Callable, dims: int) -> Callable:
    """Returns `plain`, a max pooling that also gives indices, made to refuse a boundary that is no padding."""
    run = _pooling(plain, dims, False)

    def pool(edges: Edges, what: str, input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None,
             padding: Sizes = 0, dilation: Sizes = 1, ceil_mode: bool = False,
             return_indices: bool = True) -> Any:  # fmt: skip
        return run(edges, what, input, kernel_size, stride, padding, dilation, ceil_mode, True)

    return pool


def _unfold(
    edges: Edges, what: str, input: torch.Tensor, kernel_size: Sizes, dilation: Sizes = 1, padding: Sizes = 0,
    stride: Sizes = 1,
) -> torch.Tensor:  # fmt: skip
    """Returns `F.unfold` of the input padded by the boundary."""
    pads = each(padding, 2)
    widths = edges.declared(2, [(n, n) for n in pads], what)
    if widths:
        input = edges.padded(input, widths, 2, what)
    return F.unfold(input, kernel_size, dilation, [0 if d in widths else pads[d] for d in range(2)], stride)


def _fold(edges: Edges, what: str, input: torch.Tensor, output_size: Sizes, kernel_size: Sizes, dilation: Sizes = 1,
          padding: Sizes = 0, stride: Sizes = 1) -> torch.Tensor:  # fmt: skip
    """Returns `F.fold`; `InputError` where its padding would drop what belongs elsewhere by the boundary."""
    if edges.declared(2, [(n, n) for n in each(padding, 2)], what):
        raise InputError(
            f"{what}: its padding drops what patches add beyond the edges, where the boundary is "
            f"{', '.join(edges.kinds)}: fold without padding, and add there what belongs"
        )
    return F.fold(input, output_size, kernel_size, dilation, padding, stride)


def _sampled(edges: Edges, what: str, input: torch.Tensor, grid: torch.Tensor, mode: str = "bilinear",
             padding_mode: str = "zeros", align_corners: bool | None = None) -> torch.Tensor:  # fmt: skip
    """Returns `F.grid_sample`; `InputError` where it would read zeros beyond the edges."""
    if padding_mode == "zeros":
        raise InputError(
            f"{what}: padding_mode='zeros' reads zeros beyond the edges, where the boundary is "
            f"{', '.join(edges.kinds)}: take places modulo the field, and padding_mode='border' or 'reflection'"
        )
    return F.grid_sample(input, grid, mode, padding_mode, align_corners)


def _by_its_kernel(edges: Edges, what: str, *args: Any, **kwargs: Any) -> Any:
    raise InputError(f"{what} pads in its kernel, where no boundary is found: call torch.nn.functional's convolutions")


_REPLACED: dict[Callable, Callable] = {
    F.unfold: _unfold, F.fold: _fold, F.grid_sample: _sampled, torch.convolution: _by_its_kernel,
}  # fmt: skip
for _dims, _plain, _back, _max, _places, _avg in (
    (1, F.conv1d, F.conv_transpose1d, F.max_pool1d, F.max_pool1d_with_indices, F.avg_pool1d),
    (2, F.conv2d, F.conv_transpose2d, F.max_pool2d, F.max_pool2d_with_indices, F.avg_pool2d),
    (3, F.conv3d, F.conv_transpose3d, F.max_pool3d, F.max_pool3d_with_indices, F.avg_pool3d),
):
    _REPLACED |= {_plain: _convolution(_plain, _dims), _back: _transposed(_back, _dims)}
    _REPLACED |= {_max: _pooling(_max, _dims, False), _avg: _pooling(_avg, _dims, True)}
    _REPLACED |= {
        _places: _with_indices(_max, _dims),
        getattr(torch, f"max_pool{_dims}d"): _pooling(_max, _dims, False),
    }

__all__ = ["Edges", "Sizes", "bounded", "each", "paddings"]
