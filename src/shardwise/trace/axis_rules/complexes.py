"""Axis labels of complex numbers as pairs, and of Fourier transforms. On shares: part/views, domain/fourier."""

from __future__ import annotations

from typing import Any

from shardwise.trace.axes import Axes, base, param_of
from shardwise.trace.axis_rules.registry import is_free, rule


@rule("view_as_complex")
def view_as_complex(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of pairs as complex numbers: both parts of one lie on one rank."""
    x = args[0]
    if (param := param_of(x)) is not None:
        name, dims = param
        if dims[-1] is not None:
            axes.unite_along(axes.seeds[name, base(dims[-1])], [0])
        output._axes_of = (name, dims[:-1])
        return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, axes.unite_along(labels, [labels.ndim - 1])[..., 0])
        output._axes_free = is_free(x)
    return True


@rule("view_as_real")
def view_as_real(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of complex numbers as pairs: a dim more, without labels."""
    x = args[0]
    if (param := param_of(x)) is not None:
        output._axes_of = (param[0], (*param[1], None))
        return True
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, labels[..., None])
        output._axes_free = is_free(x)
    return True


@rule("_conj", "_conj_physical", "resolve_conj", "_neg_view", "resolve_neg")
def conjugate(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of conjugates: each element is made of one, as a weight in another dtype is of a weight."""
    x = args[0]
    if (param := param_of(x)) is not None:
        output._axes_of = param
        return True
    axes.give(output, axes.labels(x))
    output._axes_free = is_free(x)
    return True


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def transform(axes: Axes, func: Any, args: tuple, kwargs: dict, output: Any) -> bool:
    """Rule of Fourier transforms: what lies along their dims lies together, and the other dims are kept apart."""
    x = args[0]
    labels = axes.labels(x)
    if labels is not None:
        axes.give(output, axes.unite_along(labels, [d % x.dim() for d in args[1]]))
        output._axes_free = is_free(x)
    return True
