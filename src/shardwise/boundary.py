"""Pads convolutions and pooling by the task's boundary (`task.BOUNDARIES`). On tiles: part/rules/padding.

    conv2d(x, padding=1)      zeros around x                                as written
                              pad(x, 1 each way, by the boundary), then     with a boundary
                              conv2d(padding=0)

Convolutions, plain and transposed, max and average pooling and `F.unfold` pad implicitly; this padding is replaced by
the declared boundary. Explicit padding of the module (`F.pad`, `padding_mode=`) stays as it is. If an operation has
more spatial dims than are declared, the last ones are the declared ones.

    "zeros"      the operation's own padding (in max pooling: minus infinity)
    "periodic"   the field continues at its other edge                  3 4 | 0 1 2 3 4 | 0 1
    "reflect"    mirrored at the last cell                              2 1 | 0 1 2 3 4 | 3 2
    "replicate"  the last cell                                          0 0 | 0 1 2 3 4 | 4 4
    "pole"       mirrored behind the last row and shifted by half of the periodic dim: row -1 is row 0, 180 degrees on

A torch-function mode is entered in the forward of every module, so that blocks which are recomputed in backward see the
same boundary. On tiles the same paddings are operations on tiles.
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
_here = threading.local()  # .mode: the mode that is entered on this thread, if any


def each(value: Sizes, dims: int) -> list[int]:
    """Returns a list of `dims` sizes, one for each spatial dim; an int, or a sequence of one, is repeated."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * dims if len(sizes) == 1 else sizes


def paddings(padding: Sizes | str, kernel: Sequence[int], dilations: list[int]) -> tuple[list[int], list[int]]:
    """Returns (cells before, cells after) by which a convolution pads each spatial dim.

    padding   as convolutions take it: sizes, "same" or "valid"; `ValueError` for any other text
    """
    if padding == "valid":
        padding = 0
    # as torch, pad one more cell after than before if the kernel is even
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

    names: tuple[str, ...]  # of the dims, from Task.spatial
    kinds: tuple[str, ...]  # one of BOUNDARIES for each dim

    def padded(self, input: torch.Tensor, widths: Mapping[int, tuple[int, int]], dims: int, what: str) -> torch.Tensor:
        """Returns the input padded by the boundary.

        widths   spatial dim, 0 to `dims` - 1 -> (cells before, cells after), as `declared` returns them
        dims     number of spatial dims, the last of the input
        what     the operation, for messages

        Raises `InputError` for a dim that has too few cells.
        """
        first = input.dim() - dims
        for d, (front, behind) in widths.items():
            # check all dims before padding one, which would change their sizes
            self._fits(d - dims, max(front, behind), input.shape[first + d], what)
        for d, (front, behind) in widths.items():
            # poles first, since they shift whole rows, which padding would have made longer
            if self.kinds[d - dims] == "pole":
                input = self._turned(input, first + d, front, behind, what)
        for d, width in widths.items():
            kind = self.kinds[d - dims]
            if kind != "pole":
                around = [n for e in reversed(range(dims)) for n in (width if e == d else (0, 0))]
                input = F.pad(input, around, mode=_MODES[kind])
        return input

    def declared(self, dims: int, widths: list[tuple[int, int]], what: str) -> dict[int, tuple[int, int]]:
        """Returns {spatial dim: width} of the dims that an operation pads and whose boundary is not "zeros".

        dims     number of the operation's spatial dims; `widths`: (cells before, cells after) for each

        Raises `InputError` if the operation pads, but has fewer dims than are declared.
        """
        if dims < len(self.kinds) and any(map(any, widths)):
            raise InputError(
                f"{what} pads {dims} dim(s), and Task.spatial declares the boundary of {len(self.kinds)}: which of "
                "them it pads cannot be told; pad there with F.pad and leave its padding at 0"
            )
        wanted = range(max(dims - len(self.kinds), 0), dims)
        return {d: widths[d] for d in wanted if any(widths[d]) and self.kinds[d - dims] != "zeros"}

    def _fits(self, d: int, width: int, n: int, what: str) -> None:
        """Raises `InputError` if the boundary of dim `d`, of `n` cells, cannot supply `width` cells beyond an edge."""
        most = n - 1 if self.kinds[d] == "reflect" else n if self.kinds[d] != "replicate" else width
        if width > most or not n:
            raise InputError(
                f"{what} reads {width} cells beyond the edge of {self.names[d]}, whose boundary is "
                f"{self.kinds[d]!r} and which has {n} cells there: {self.kinds[d]} gives at most {max(most, 0)}; use "
                "a smaller kernel or padding, or fewer halvings"
            )

    def _turned(self, input: torch.Tensor, dim: int, front: int, behind: int, what: str) -> torch.Tensor:
        """Returns the input with `front` and `behind` rows beyond the poles of `dim`, mirrored and shifted.

        They are shifted by half of the periodic dim; `InputError` if that has an odd number of cells.
        """
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
        """Context in which operations pad by this boundary; errors name the module at `path`."""
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
    """Returns a constructor of the same module with this boundary, in place of one that it may have.

    edges   (name, boundary) of each dim of space; (): the module as the user wrote it
    """
    model = model.model if isinstance(model, Bounded) else model
    names, kinds = tuple(name for name, _ in edges), tuple(kind for _, kind in edges)
    return Bounded(model, Edges(names, kinds)) if edges else model


@dataclass(frozen=True)
class Bounded:
    """A constructor of a module whose implicit paddings follow the boundary `edges`."""

    model: Callable[[], nn.Module]  # builds the module as the user wrote it
    edges: Edges

    def __call__(self) -> nn.Module:
        module = self.model()
        for path, child in module.named_modules():
            child.forward = _Inside(child.forward, self.edges, path)
        return module


class _Inside:
    """A module's forward with the boundary's mode around it.

    The method is an attribute that copying a module copies too, so that a copy calls its own forward.
    """

    def __init__(self, forward: Callable, edges: Edges, path: str):
        self.__wrapped__ = forward
        self.edges, self.path = edges, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.edges.entered(self.path):
            return self.__wrapped__(*args, **kwargs)


# --- operations that read beyond the field


def _convolution(plain: Callable, dims: int) -> Callable:
    """Returns a wrapper of `plain`, a convolution over `dims` dims, that pads by the declared boundary.

    Like all wrappers here it is called with (edges, name of the operation for messages, the operation's arguments).
    """

    def convolution(
        edges: Edges, what: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        stride: Sizes = 1, padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        before, after = paddings(padding, weight.shape[2:], each(dilation, dims))
        widths = edges.declared(dims, list(zip(before, after, strict=True)), what)
        if not widths:  # no padded dim has another boundary than "zeros"
            return plain(input, weight, bias, stride, padding, dilation, groups)
        input = edges.padded(input, widths, dims, what)
        own = [0 if d in widths else before[d] for d in range(dims)]
        rest = [0 if d in widths else after[d] - before[d] for d in range(dims)]
        if any(rest):  # "same" with an even kernel pads one more cell after
            input = F.pad(input, [n for d in reversed(range(dims)) for n in (0, rest[d])])
        return plain(input, weight, bias, stride, own, dilation, groups)

    return convolution


def _transposed(plain: Callable, dims: int) -> Callable:
    """Returns a wrapper of `plain`, a transposed convolution over `dims` dims, that reads beyond the field."""

    def transposed(
        edges: Edges, what: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        stride: Sizes = 1, padding: Sizes = 0, output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the transposed convolution of the input padded by the boundary, cropped to the field's outputs."""
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
    """Returns a wrapper of `plain`, a pooling over `dims` dims, that pads by the boundary.

    by_mean   Whether it is an average pooling, which has other positional arguments than max pooling
    """

    def pool(
        edges: Edges, what: str, input: torch.Tensor, kernel_size: Sizes, stride: Sizes | None = None,
        padding: Sizes = 0, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        pads = each(padding, dims)
        widths = edges.declared(dims, [(n, n) for n in pads], what)
        if not widths:  # no padded dim has another boundary than "zeros"
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
    """Returns a wrapper of `plain`, a max pooling that also returns indices, which refuses a boundary but zeros."""
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
    """Returns `F.fold`; `InputError` if it drops padding cells whose values belong elsewhere by the boundary."""
    if edges.declared(2, [(n, n) for n in each(padding, 2)], what):
        raise InputError(
            f"{what}: its padding drops what patches add beyond the edges, where the boundary is "
            f"{', '.join(edges.kinds)}: fold without padding, and add there what belongs"
        )
    return F.fold(input, output_size, kernel_size, dilation, padding, stride)


def _sampled(edges: Edges, what: str, input: torch.Tensor, grid: torch.Tensor, mode: str = "bilinear",
             padding_mode: str = "zeros", align_corners: bool | None = None) -> torch.Tensor:  # fmt: skip
    """Returns `F.grid_sample`; `InputError` for padding_mode "zeros", which contradicts the boundary."""
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
